"""Reads JSON that others wrote: bounded size, unique keys, an object; anything else is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pagedjax.errors import ModelFormatError
from pagedjax.weights.checkpoint import describe

MAX_BYTES = 64 * 2**20


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
      ModelFormatError: it is too large, not JSON, not an object, or repeats a key.
    """
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ModelFormatError(f"{path.name} must be at most {MAX_BYTES} bytes. Got {size}.")
    try:
        return parse_json(path.read_bytes(), path.name)
    except ModelFormatError as error:
        raise ModelFormatError(f"{error} It looks like {describe(path)}.") from None


def parse_json(text: bytes, what: str) -> dict[str, Any]:
    """The object in `text`; `what` names it in messages.

    Raises:
      ModelFormatError: it is not JSON, not an object, or repeats a key.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # bad UTF-8 and JSON are ValueErrors
        raise ModelFormatError(f"{what} must be a JSON object. Got: {error}.") from None
    if not isinstance(value, dict):
        raise ModelFormatError(f"{what} must be a JSON object. Got {type(value).__name__}.")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {repeated!r:.80} comes twice")
    return values
