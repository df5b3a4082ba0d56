"""Reads a model's description field by field: every problem at once, nothing unknown passes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pagedjax.errors import ModelFormatError

_REQUIRED = object()
_MOST_SHOWN = 50  # names in one message


class Fields:
    """Takes fields out of a mapping; `finish` reports what was wrong and what nobody took."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = dict(values)
        self._where = where
        self._problems: list[str] = []

    def integer(self, name: str, default: Any = _REQUIRED) -> Any:
        """An integer; null counts as absent."""
        return self._take(name, default, "an integer", lambda v: isinstance(v, int))

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """A finite number, as float."""
        value = self._take(name, default, "a finite number", _is_finite)
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value

    def boolean(self, name: str, default: bool) -> bool:
        """true or false."""
        return self._take(
            name, default, "true or false", lambda v: isinstance(v, bool), allow_bool=True
        )

    def mapping(self, name: str) -> dict[str, Any]:
        """An object; empty when absent."""
        return self._take(name, {}, "an object", lambda v: isinstance(v, dict))

    def must_be(self, name: str, *allowed: Any) -> Any:
        """A field that may be absent or one of `allowed`; returns it, or the first allowed."""
        value = self._values.pop(name, allowed[0])
        if value is not None and not any(
            value == option and type(value) is type(option) for option in allowed
        ):
            choices = " or ".join(repr(option) for option in allowed)
            self.problem(f"`{name}` must be {choices}. Got {value!r:.80}")
        return allowed[0] if value is None else value

    def ignore(self, names: frozenset[str]) -> None:
        """Fields that change nothing that pagedjax computes."""
        for name in names:
            self._values.pop(name, None)

    def problem(self, text: str) -> None:
        """Adds a problem of the caller's."""
        self._problems.append(text)

    def merge(self, part: Fields) -> None:
        """Takes over the problems of an object inside this one, its unknown fields included."""
        part.note_unknown()
        self._problems += [f"{part._where}: {problem}" for problem in part._problems]

    def note_unknown(self) -> None:
        """Makes a problem of the fields that nobody took."""
        if self._values:
            names = ", ".join(f"`{name:.80}`" for name in sorted(self._values)[:_MOST_SHOWN])
            self.problem(
                f"{len(self._values)} unknown field(s), which could change the answers if they "
                f"were left out: {names}"
            )

    def finish(self) -> None:
        """Raises `ModelFormatError` with every problem, unknown fields included."""
        self.note_unknown()
        if self._problems:
            raise ModelFormatError(f"{self._where}: {'; '.join(self._problems)}.")

    def _take(
        self, name: str, default: Any, what: str, fits: Any, *, allow_bool: bool = False
    ) -> Any:
        value = self._values.pop(name, None)
        if value is None:
            if default is _REQUIRED:
                self.problem(f"`{name}` is missing")
                return None
            return default
        if not fits(value) or (isinstance(value, bool) and not allow_bool):
            self.problem(f"`{name}` must be {what}. Got {value!r:.80}")
            return None if default is _REQUIRED else default
        return value


def _is_finite(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) < 2**63
    return isinstance(value, float) and math.isfinite(value)
