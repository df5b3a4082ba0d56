"""The environment variables that pagedjax reads, in one place and never at import.

PAGEDJAX_CACHE_DIR   where compiled programs are kept between runs; empty: nowhere.
                     Default: $XDG_CACHE_HOME/pagedjax or ~/.cache/pagedjax.
PAGEDJAX_CPU_KERNELS 0: products and attention on a CPU are XLA's, also where there is a C++
                     compiler that could build faster ones.
NO_COLOR             not empty: what is drawn in a terminal has no colours (https://no-color.org).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment says."""

    cache_dir: Path | None  # None: keep no compiled programs; `~` as it is: there may be no home
    cpu_kernels: bool  # use our own where they can be built
    no_color: bool


def read() -> Environment:
    """Reads the variables now."""
    no_color = bool(os.environ.get("NO_COLOR"))
    cpu_kernels = os.environ.get("PAGEDJAX_CPU_KERNELS") != "0"
    return Environment(_cache_dir(), cpu_kernels, no_color)


def _cache_dir() -> Path | None:
    given = os.environ.get("PAGEDJAX_CACHE_DIR")
    if given is not None:
        return Path(given) if given else None
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "pagedjax"
