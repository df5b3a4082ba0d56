"""Whether a package is there, without the seconds that importing an engine takes."""

from __future__ import annotations

import importlib.util


def must_have(*packages: str) -> None:
    """Raises `ModuleNotFoundError` for the first that is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}")
