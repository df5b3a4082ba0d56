"""Checks of single values of a request: each raises a `RequestError` that names the parameter.

Knows nothing of what the values mean, nor of how they depend on each other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, cast

from pagedjax.errors import RequestError

MAX_STOP_BYTES = 256  # of one string
MAX_LOGIT_BIAS = 1024  # entries
LOGIT_BIAS_BOUND = 100.0


def check_int(params: Any, name: str, low: int, high: int, *, optional: bool = False) -> None:
    """The field is an integer in [low, high], or None where that is allowed."""
    value = getattr(params, name)
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        wanted = f"an integer in [{low}, {high}]" + (" or None" if optional else "")
        raise RequestError(f"`{name}` must be {wanted}. Got {shown(value)}.", param=name)


def check_bool(params: Any, name: str) -> None:
    """The field is True or False."""
    value = getattr(params, name)
    if not isinstance(value, bool):
        raise RequestError(f"`{name}` must be true or false. Got {shown(value)}.", param=name)


def check_float(
    params: Any,
    name: str,
    low: float,
    high: float,
    *,
    above_low: bool = False,
) -> None:
    """The field is a finite number in [low, high], or above `low`; it becomes a float."""
    value = getattr(params, name)
    fits = _is_finite(value) and low <= value <= high
    if not fits or (above_low and value == low):
        bracket = "(" if above_low else "["
        raise RequestError(
            f"`{name}` must be a finite number in {bracket}{low:g}, {high:g}]. Got {shown(value)}.",
            param=name,
        )
    object.__setattr__(params, name, float(value))


def check_strings(value: Any, name: str, most: int) -> tuple[str, ...]:
    """None, one string or a list of at most `most` non-empty ones, as a tuple."""
    items: tuple[Any, ...]
    if value is None:
        items = ()
    elif isinstance(value, str):
        items = (value,)
    elif isinstance(value, list | tuple):
        items = tuple(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    else:
        raise RequestError(
            f"`{name}` must be a string or a list of strings. Got {shown(value)}.",
            param=name,
        )
    if len(items) > most:
        raise RequestError(
            f"`{name}` must hold at most {most} strings. Got {len(items)}.", param=name
        )
    for item in items:
        if (
            not isinstance(item, str)
            or not 0 < len(item.encode("utf-8", "replace")) <= MAX_STOP_BYTES
        ):
            raise RequestError(
                f"`{name}` must hold strings of 1 to {MAX_STOP_BYTES} bytes. Got {shown(item)}.",
                param=name,
            )
    return items


def check_ids(value: Any, name: str) -> tuple[int, ...]:
    """Token ids in any iterable, as a tuple; whether the model has them is not known here."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError(f"`{name}` must be a list of token ids. Got {shown(value)}.", param=name)
    ids: list[int] = []
    for item in cast(Iterable[Any], value):
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < 2**31:
            raise RequestError(f"`{name}` must hold token ids >= 0. Got {shown(item)}.", param=name)
        ids.append(item)
    return tuple(ids)


def check_bias(value: Any) -> dict[int, float]:
    """A mapping of token ids to numbers, which are brought within the bound."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or len(value) > MAX_LOGIT_BIAS:  # pyright: ignore[reportUnknownArgumentType]
        raise RequestError(
            f"`logit_bias` must map at most {MAX_LOGIT_BIAS} token ids to numbers. "
            f"Got {shown(value)}.",
            param="logit_bias",
        )
    return dict(_bias_entry(key, bias) for key, bias in value.items())  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _bias_entry(key: Any, bias: Any) -> tuple[int, float]:
    # JSON objects have string keys only, so "42" is an id there.
    is_id = (isinstance(key, int) and not isinstance(key, bool)) or (
        isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
    )
    if not is_id or not 0 <= int(key) < 2**31 or not _is_finite(bias):
        raise RequestError(
            f"`logit_bias` must map token ids >= 0 to finite numbers. "
            f"Got {shown(key)}: {shown(bias)}.",
            param="logit_bias",
        )
    return int(key), min(max(float(bias), -LOGIT_BIAS_BOUND), LOGIT_BIAS_BOUND)


def _is_finite(value: Any) -> bool:
    """A number that a float can hold: by comparing, since huge integers overflow in float()."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max


def shown(value: Any) -> str:
    """A value in an error message: short, whatever it is."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge integer"
    return text if len(text) <= 80 else text[:77] + "..."
