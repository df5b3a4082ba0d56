"""Damaged safetensors files: bytes, and entries that no writer would make, drawn by a generator.

Owns the mutations; what a reader must do with them is the tests' business.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.weights.mutated_bytes import draw, mutate_bytes

type Header = dict[str, Any]

NUMBERS = (
    -1, 0, 1, 7, 2**31, 2**32 - 1, 2**47, 2**48 - 1, 2**48, 2**62, 2**63, 2**64, 10**400, -(2**63),
    0.0, 24.0, 1e308, float("nan"), float("inf"), True, None, "24", [], {}, [[24]],
)  # fmt: skip
DTYPES = (
    "F16", "BF16", "F64", "I64", "U8", "BOOL", "F8_E4M3", "f32", "", "F4", "F32\0", "float32",
    "F32" * 100_000, None, 32, ["F32"], {"F32": 1},
)  # fmt: skip
NAMES = ("", "\0", "\ud800", "../x", "model.norm.weight ", "x" * 1_000_000, "__metadata__", "é" * 9)
METADATA = (
    None, [], "pt", {"format": 1}, {"format": None}, {"a": "x" * 1_000_000}, {"": ""}, {"a": {}},
)  # fmt: skip
LENGTHS = (0, 1, 2, 7, 2**31, 2**32 - 1, 99_999_999, 100_000_001, 2**62, 2**63, 2**64 - 1)
DEEP = 200_000  # brackets: more than any recursion allows


def mutated(raw: bytes, rng: np.random.Generator) -> bytes:
    """A file like `raw`, with one thing about its header or its length changed."""
    length = struct.unpack("<Q", raw[:8])[0]
    if rng.random() < 0.3:
        return mutate_bytes(raw, 8 + length, rng)
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    change = draw(rng, CHANGES)
    return change(header, data, rng)


def packed(text: str | bytes, data: bytes, length: int | None = None) -> bytes:
    """A file of a header's text and data; `length` is what it says of the text's length."""
    encoded = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    said = len(encoded) if length is None else length
    return struct.pack("<Q", said) + encoded + data


def _some_entry(header: Header, rng: np.random.Generator) -> Header:
    return header[draw(rng, [name for name in header if name != "__metadata__"])]


def _set_number(header: Header, data: bytes, rng: np.random.Generator) -> bytes:
    values = _some_entry(header, rng)[draw(rng, ("shape", "data_offsets"))]
    values[int(rng.integers(len(values)))] = draw(rng, NUMBERS)
    return packed(json.dumps(header), data)


def _add_numbers(header: Header, data: bytes, rng: np.random.Generator) -> bytes:
    values = _some_entry(header, rng)[draw(rng, ("shape", "data_offsets"))]
    values.extend([draw(rng, NUMBERS)] * draw(rng, (1, 8, 100_000)))
    return packed(json.dumps(header), data)


def _set_field(header: Header, data: bytes, rng: np.random.Generator) -> bytes:
    field = draw(rng, ("dtype", "shape", "data_offsets"))
    _some_entry(header, rng)[field] = draw(rng, DTYPES if field == "dtype" else NUMBERS)
    return packed(json.dumps(header), data)


def _drop(header: Header, data: bytes, rng: np.random.Generator) -> bytes:
    entry = draw(rng, (header, _some_entry(header, rng)))
    del entry[draw(rng, list(entry))]
    return packed(json.dumps(header), data)


def _swap_spans(header: Header, data: bytes, rng: np.random.Generator) -> bytes:
    one, other = _some_entry(header, rng), _some_entry(header, rng)
    one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]
    return packed(json.dumps(header), data)


def _shift_span(header: Header, data: bytes, rng: np.random.Generator) -> bytes:
    span = _some_entry(header, rng)["data_offsets"]
    by = draw(rng, (-(2**40), -4, -1, 1, 4, len(data), 2**40, 2**47))
    span[:] = [span[0] + by, span[1] + by]
    return packed(json.dumps(header), data)


def _empty_tensor(header: Header, data: bytes, rng: np.random.Generator) -> bytes:
    entry = _some_entry(header, rng)
    entry["shape"] = [draw(rng, (0, 2**47)), 0]
    entry["data_offsets"] = [draw(rng, (0, len(data), len(data) + 1, 2**47))] * 2
    return packed(json.dumps(header), data)


def _rename(header: Header, data: bytes, rng: np.random.Generator) -> bytes:
    header[draw(rng, NAMES)] = header.pop(draw(rng, list(header)))
    return packed(json.dumps(header, ensure_ascii=bool(rng.integers(2))), data)


def _name_twice(header: Header, data: bytes, rng: np.random.Generator) -> bytes:
    name = draw(rng, list(header))
    again = json.dumps({name: draw(rng, (header[name], {}, None))})
    return packed(json.dumps(header)[:-1] + "," + again[1:], data)


def _metadata(header: Header, data: bytes, rng: np.random.Generator) -> bytes:
    header["__metadata__"] = draw(rng, METADATA)
    return packed(json.dumps(header), data)


def _many(header: Header, data: bytes, rng: np.random.Generator) -> bytes:
    entry = _some_entry(header, rng)
    count = draw(rng, (10, 1000, 10_000))
    return packed(json.dumps(header | {f"t{i}": entry for i in range(count)}), data)


def _deep(header: Header, data: bytes, rng: np.random.Generator) -> bytes:
    opening, closing = draw(rng, (("[", "]"), ('{"a":', "}")))
    deep = opening * DEEP + draw(rng, ("", "1" + closing * DEEP))
    whole = draw(rng, (deep, json.dumps(header)[:-1] + ',"x":' + deep + "}"))
    return packed(whole, data)


def _other_text(header: Header, data: bytes, rng: np.random.Generator) -> bytes:
    text = json.dumps(header)
    # With a mark, as UTF-16, padded, a number too long to convert, and what is no object at all.
    texts = (
        b"\xef\xbb\xbf" + text.encode(), text.encode("utf-16"), text.encode("utf-32-le"),
        text.encode() + b" " * 1000, text.encode() + b"\0" * 8, b"[1]", b"null", b'"x"', b"  ",
        b"{}", text[:-1].encode() + b',"x":' + b"9" * 100_000 + b"}", b"\xff" * 64,
    )  # fmt: skip
    return packed(draw(rng, texts), data)


def _length(header: Header, data: bytes, rng: np.random.Generator) -> bytes:
    text = json.dumps(header)
    lengths = (*LENGTHS, len(text) - 1, len(text) + 1, len(text) + len(data))
    return packed(text, data, draw(rng, lengths))


def _cut(header: Header, data: bytes, rng: np.random.Generator) -> bytes:
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    at = draw(rng, (0, 1, len(data) - 1, draw(rng, ends), int(rng.integers(len(data)))))
    return packed(json.dumps(header), data[:at])


def _grow(header: Header, data: bytes, rng: np.random.Generator) -> bytes:
    return packed(json.dumps(header), data + bytes(draw(rng, (1, 4096, 100_000))))


CHANGES: tuple[Callable[[Header, bytes, np.random.Generator], bytes], ...] = (
    _set_number, _set_number, _add_numbers, _set_field, _drop, _swap_spans, _shift_span,
    _empty_tensor, _rename, _name_twice, _metadata, _many, _deep, _other_text, _length, _cut, _grow,
)  # fmt: skip
