"""The environment variables that pagedjax reads, in one place and never at import.

PAGEDJAX_CACHE_DIR   where compiled programs are kept between runs; empty: nowhere.
                     Default: $XDG_CACHE_HOME/pagedjax or ~/.cache/pagedjax.
NO_COLOR             not empty: what is drawn in a terminal has no colours (https://no-color.org).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment says."""

    cache_dir: Path | None  # None: keep no compiled programs
    no_color: bool


def read() -> Environment:
    """Reads the variables now."""
    no_color = bool(os.environ.get("NO_COLOR"))
    given = os.environ.get("PAGEDJAX_CACHE_DIR")
    if given is not None:
        return Environment(Path(given).expanduser() if given else None, no_color)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Environment(Path(base) / "pagedjax", no_color)
