"""Damaged GGUF files: bytes, and fields, strings, arrays and entries that no writer would make.

A good file is taken apart into pieces, one a field of metadata or a tensor's entry; the mutations
change pieces, their order and their number, and put a file together again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tests.weights.mutated_bytes import HUGE, draw, mutate_bytes

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of scalar types
STRING, ARRAY, UINT32, FLOAT32 = 8, 9, 4, 6
COUNTS = (0, 1, 3, 65_535, 65_536, 65_537, *HUGE)
KINDS = (0, 1, 2, 4, 5, 12, 15, 24, 28, 30, 31, 38, 39, 40, 41, 255, 2**31, 2**32 - 1)
DIMENSIONS = (0, 1, 31, 32, 33, 40, 2**31, 2**32, 2**47, 2**62, 2**63, 2**64 - 1)
ALIGNMENTS = (0, 1, 3, 8, 4096, 2**20, 2**21, 2**31, 2**32 - 1)
TEXTS = (
    b"",
    b"\0",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"x" * 1_000_000,
    b"token_embd.weight",
    b"llama.",
)
FLOATS = (float("nan"), float("inf"), -1.0, 0.0, 1e-45, 3e38)


@dataclass(frozen=True)
class Field:
    """One of the metadata's fields: `value` is everything behind the type."""

    key: bytes
    kind: int
    value: bytes

    @property
    def raw(self) -> bytes:
        return string(self.key) + struct.pack("<I", self.kind) + self.value


@dataclass(frozen=True)
class Entry:
    """One tensor."""

    name: bytes
    dimensions: tuple[int, ...]
    kind: int
    offset: int

    @property
    def raw(self) -> bytes:
        numbers = struct.pack(f"<I{len(self.dimensions)}Q", len(self.dimensions), *self.dimensions)
        return string(self.name) + numbers + struct.pack("<IQ", self.kind, self.offset)


@dataclass
class Parts:
    """A file in pieces; counts that are None are what there is."""

    fields: list[Field]
    entries: list[Entry]
    data: bytes
    version: int = 3
    num_entries: int | None = None
    num_fields: int | None = None
    alignment: int = 32

    def pack(self) -> bytes:
        """The file."""
        counts = (
            len(self.entries) if self.num_entries is None else self.num_entries,
            len(self.fields) if self.num_fields is None else self.num_fields,
        )
        head = b"GGUF" + struct.pack("<IQQ", self.version, *counts)
        head += b"".join(piece.raw for piece in (*self.fields, *self.entries))
        return head + bytes(-len(head) % self.alignment) + self.data


def string(text: bytes) -> bytes:
    """A length and a text."""
    return struct.pack("<Q", len(text)) + text


def take_apart(raw: bytes) -> Parts:
    """The pieces of a good file without arrays inside arrays."""
    _, num_entries, num_fields = struct.unpack_from("<IQQ", raw, 4)
    at = 24

    def take(count: int) -> bytes:
        nonlocal at
        at += count
        return raw[at - count : at]

    def number(code: str) -> int:
        return struct.unpack("<" + code, take(struct.calcsize(code)))[0]

    def value(kind: int) -> bytes:
        start = at
        if kind == STRING:
            take(number("Q"))
        elif kind == ARRAY:
            inner, count = number("I"), number("Q")
            for _ in range(count):
                value(inner)
        else:
            take(SIZES[kind])
        return raw[start:at]

    fields: list[Field] = []
    for _ in range(num_fields):
        key, kind = take(number("Q")), number("I")
        fields.append(Field(key, kind, value(kind)))
    entries: list[Entry] = []
    for _ in range(num_entries):
        name, rank = take(number("Q")), number("I")
        dimensions = tuple(number("Q") for _ in range(rank))
        entries.append(Entry(name, dimensions, number("I"), number("Q")))
    return Parts(fields, entries, raw[at + -at % 32 :])


def mutated(raw: bytes, rng: np.random.Generator) -> bytes:
    """A file like `raw`, with one thing about its header or its length changed."""
    parts = take_apart(raw)
    if rng.random() < 0.3:
        return mutate_bytes(raw, len(raw) - len(parts.data), rng)
    changed = draw(rng, CHANGES)(parts, rng)
    return parts.pack() if changed is None else changed


# ---------------------------------------------------------------------------- metadata


def _replace_field(parts: Parts, rng: np.random.Generator, **changes: object) -> None:
    at = int(rng.integers(len(parts.fields)))
    parts.fields[at] = replace(parts.fields[at], **changes)


def _retype(parts: Parts, rng: np.random.Generator) -> None:
    _replace_field(parts, rng, kind=draw(rng, (*range(14), 255, 2**32 - 1)))


def _set_integer(parts: Parts, rng: np.random.Generator) -> None:
    kind = draw(rng, (4, 5, 10, 11))
    number = draw(rng, (0, 1, 2, 3, 7, 10_000, *HUGE))
    _replace_field(parts, rng, kind=kind, value=struct.pack("<Q", number)[: SIZES[kind]])


def _set_float(parts: Parts, rng: np.random.Generator) -> None:
    _replace_field(parts, rng, kind=FLOAT32, value=struct.pack("<f", draw(rng, FLOATS)))


def _set_text(parts: Parts, rng: np.random.Generator) -> None:
    _replace_field(parts, rng, kind=STRING, value=string(draw(rng, TEXTS)))


def _set_text_length(parts: Parts, rng: np.random.Generator) -> None:
    length = struct.pack("<Q", draw(rng, COUNTS))
    _replace_field(parts, rng, kind=STRING, value=length + b"text")


def _set_array(parts: Parts, rng: np.random.Generator) -> None:
    """Of a true length, or of one that is said only."""
    kind, count = draw(rng, (*SIZES, STRING, ARRAY, 99)), draw(rng, (0, 1, 5, 100_000))
    said = count if rng.random() < 0.5 else draw(rng, (*COUNTS, 2**23, 2**23 + 1))
    content = string(b"ab") * count if kind == STRING else bytes(SIZES.get(kind, 12) * count)
    _replace_field(parts, rng, kind=ARRAY, value=struct.pack("<IQ", kind, said) + content)


def _nest_arrays(parts: Parts, rng: np.random.Generator) -> None:
    deep = struct.pack("<IQ", ARRAY, 1) * draw(rng, (1, 10, 100_000))
    _replace_field(parts, rng, kind=ARRAY, value=deep + struct.pack("<IQI", UINT32, 1, 7))


def _rename_field(parts: Parts, rng: np.random.Generator) -> None:
    _replace_field(parts, rng, key=draw(rng, (*TEXTS, *(field.key for field in parts.fields))))


def _drop_field(parts: Parts, rng: np.random.Generator) -> None:
    del parts.fields[int(rng.integers(len(parts.fields)))]


def _add_fields(parts: Parts, rng: np.random.Generator) -> None:
    prefix = draw(rng, (b"llama.", b"tokenizer.ggml.", b"general.", b""))
    for i in range(draw(rng, (1, 100, 20_000))):
        value = struct.pack("<I", int(rng.integers(2**32)))
        parts.fields.append(Field(b"%sx%d" % (prefix, i), UINT32, value))


def _align(parts: Parts, rng: np.random.Generator) -> None:
    alignment = draw(rng, ALIGNMENTS)
    parts.fields.append(Field(b"general.alignment", UINT32, struct.pack("<I", alignment)))
    parts.alignment = alignment if 0 < alignment <= 2**20 else 32


# ----------------------------------------------------------------------------- tensors


def _replace_entry(parts: Parts, rng: np.random.Generator, **changes: object) -> None:
    at = int(rng.integers(len(parts.entries)))
    parts.entries[at] = replace(parts.entries[at], **changes)


def _set_kind(parts: Parts, rng: np.random.Generator) -> None:
    _replace_entry(parts, rng, kind=draw(rng, KINDS))


def _set_dimensions(parts: Parts, rng: np.random.Generator) -> None:
    rank = draw(rng, (0, 1, 2, 3, 4, 5, 9, 1000))
    drawn = tuple(draw(rng, DIMENSIONS) for _ in range(rank))
    _replace_entry(parts, rng, dimensions=drawn)


def _turn_dimensions(parts: Parts, rng: np.random.Generator) -> None:
    at = int(rng.integers(len(parts.entries)))
    entry = parts.entries[at]
    parts.entries[at] = replace(entry, dimensions=entry.dimensions[::-1])


def _set_offset(parts: Parts, rng: np.random.Generator) -> None:
    size = len(parts.data)
    offsets = (0, 1, 16, 31, 32, size - 1, size, size + 32, *HUGE, int(rng.integers(size)))
    _replace_entry(parts, rng, offset=draw(rng, offsets))


def _rename_entry(parts: Parts, rng: np.random.Generator) -> None:
    _replace_entry(parts, rng, name=draw(rng, (*TEXTS, *(entry.name for entry in parts.entries))))


def _drop_entry(parts: Parts, rng: np.random.Generator) -> None:
    del parts.entries[int(rng.integers(len(parts.entries)))]


def _add_entries(parts: Parts, rng: np.random.Generator) -> None:
    like = draw(rng, parts.entries)
    count = draw(rng, (1, 100, 10_000))
    parts.entries += [replace(like, name=b"t%d" % i) for i in range(count)]


def _rope_divisors(parts: Parts, rng: np.random.Generator) -> None:
    """A tensor whose numbers decide about the model."""
    dimensions = (draw(rng, (0, 1, 4, 5, 65_536, 65_537, 2**47)),)
    kind, offset = draw(rng, KINDS), draw(rng, (0, 32, 2**62))
    parts.entries.append(Entry(b"rope_freqs.weight", dimensions, kind, offset))


# -------------------------------------------------------------------------- whole file


def _set_counts(parts: Parts, rng: np.random.Generator) -> None:
    if rng.random() < 0.5:
        parts.num_entries = draw(rng, COUNTS)
    else:
        parts.num_fields = draw(rng, COUNTS)


def _set_version(parts: Parts, rng: np.random.Generator) -> None:
    parts.version = draw(rng, (0, 1, 2, 4, 3 << 24, 2**32 - 1))


def _cut(parts: Parts, rng: np.random.Generator) -> bytes:
    raw = parts.pack()
    first = len(raw) - len(parts.data)
    ends = [first + entry.offset for entry in parts.entries]
    at = draw(rng, (3, 4, 8, 23, 24, first - 1, first, draw(rng, ends), len(raw) - 1))
    return raw[:at]


def _grow(parts: Parts, rng: np.random.Generator) -> None:
    parts.data += bytes(draw(rng, (1, 4096, 100_000)))


CHANGES: tuple[Callable[[Parts, np.random.Generator], bytes | None], ...] = (
    _retype, _set_integer, _set_integer, _set_float, _set_text, _set_text_length, _set_array,
    _nest_arrays, _rename_field, _drop_field, _add_fields, _align, _set_kind, _set_dimensions,
    _turn_dimensions, _set_offset, _rename_entry, _drop_entry, _add_entries, _rope_divisors,
    _set_counts, _set_version, _cut, _grow,
)  # fmt: skip
