"""Identity of lines: their custom_id, or one after their number, each given once.

Owns the keys that ids and draws depend on. Of an id only a digest is kept, so memory for a line is
bounded whatever ids are given.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pagedjax.batch_job.lines import refuse

MAX_CUSTOM_ID = 512  # characters

type Json = dict[str, Any]


def number_key(number: int) -> str:
    """32 hexadecimal digits for a line that has no id."""
    return _digest(f"line\0{number}")


def id_key(custom_id: str) -> str:
    """32 hexadecimal digits for a custom_id."""
    return _digest(f"id\0{custom_id}")


class CustomIds:
    """The ids of the lines so far."""

    def __init__(self) -> None:
        """Knows none yet."""
        self._seen: dict[bytes, int] = {}  # digest of each custom_id -> the line that has it

    def take(self, number: int, document: Json) -> str:
        """The line's own custom_id, or one after its number where the form needs none.

        Raises:
          RequestError: there is none, or another line has it.
        """
        given = document.get("custom_id")
        if given is None and not document.keys() & {"method", "url", "body"}:
            given = self._free_id(number)
        elif not isinstance(given, str) or not 0 < len(given) <= MAX_CUSTOM_ID:
            refuse(
                f"`custom_id` must be a string of 1 to {MAX_CUSTOM_ID} characters.",
                param="custom_id",
            )
        first = self._seen.setdefault(bytes.fromhex(id_key(given)), number)
        if first != number:  # the answer of that line keeps the id to itself
            shown = json.dumps(given[:64])
            refuse(
                f"`custom_id` must be unique. Got {shown}, which line {first} has.",
                "duplicate_custom_id",
                "custom_id",
            )
        return given

    def _free_id(self, number: int) -> str:
        custom_id, tries = f"line-{number}", 1
        while bytes.fromhex(id_key(custom_id)) in self._seen:
            tries += 1
            custom_id = f"line-{number}-{tries}"
        return custom_id


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
