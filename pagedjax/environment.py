"""The environment variables that pagedjax reads, in one place and never at import.

PAGEDJAX_CACHE_DIR   where compiled steps are kept between runs; empty: nowhere.
                     Default: $XDG_CACHE_HOME/pagedjax or ~/.cache/pagedjax.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment says."""

    cache_dir: Path | None  # None: keep no compiled steps


def read() -> Environment:
    """Reads the variables now."""
    given = os.environ.get("PAGEDJAX_CACHE_DIR")
    if given is not None:
        return Environment(Path(given).expanduser() if given else None)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Environment(Path(base) / "pagedjax")
