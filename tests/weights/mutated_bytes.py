"""Damage that knows nothing of a format: bytes, words, cuts and repeats in a file's header."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

EXTREMES = (0, 1, 0x7F, 0x80, 0xFF)
HUGE = (2**31, 2**32 - 1, 2**48, 2**62, 2**63 - 1, 2**64 - 1)


def draw[T](rng: np.random.Generator, values: Sequence[T]) -> T:
    """One of them, as it is: `rng.choice` makes NumPy's numbers of them."""
    return values[int(rng.integers(len(values)))]


def mutate_bytes(raw: bytes, header_bytes: int, rng: np.random.Generator) -> bytes:
    """Sets bytes, overwrites a word with a huge number, cuts, or repeats a part of the header."""
    data = bytearray(raw)
    at = int(rng.integers(0, header_bytes))
    match int(rng.integers(0, 5)):
        case 0:
            for position in rng.integers(0, header_bytes, 4):
                data[position] = int(rng.integers(0, 256))
        case 1:
            data[at] = draw(rng, EXTREMES)
        case 2:
            data[at : at + 8] = struct.pack("<Q", draw(rng, HUGE))
        case 3:
            del data[at:]
        case _:
            other = int(rng.integers(0, header_bytes))
            data[at:at] = data[other : other + 32]
    return bytes(data)
