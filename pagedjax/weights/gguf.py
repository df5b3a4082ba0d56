"""Reads GGUF files: metadata and tensors, trusting nothing in the header.

A file is: magic, u32 version, u64 tensor count, u64 metadata count, metadata, tensor entries,
padding, data. The header is read by the code below with bounds on everything it counts by; the
`gguf` package is only asked to decode quantised rows, and only when there are some.
"""

from __future__ import annotations

import importlib
import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.errors import ModelFormatError
from pagedjax.weights.checkpoint import (
    MAX_TENSORS,
    Checkpoint,
    Problems,
    StoredTensor,
    check_overlaps,
    describe,
    plain_decoder,
)

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_METADATA = 65_536
MAX_ELEMENTS = 2**22  # of all arrays together; the largest vocabularies need a million
MAX_STRING_BYTES = 2**26  # a hole in a file has any length; chat templates have some KiB
MAX_DIMENSIONS = 4
MAX_DIMENSION = 2**48  # no arithmetic on smaller ones can hurt
MAX_HEAD_DIM = 65_536
DEFAULT_ALIGNMENT = 32

# Value types of the metadata.
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    _BOOL: "?",
    10: "Q",
    11: "q",
    12: "d",
}
# Tensor types: number -> (name, elements of a block, bytes of a block).
_TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A file's metadata and tensors."""

    metadata: dict[str, Any]
    checkpoint: Checkpoint


def is_gguf(path: Path) -> bool:
    """Whether a file begins with GGUF's magic."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def open_file(path: Path) -> GGUFFile:
    """Reads the header.

    Raises:
      ModelFormatError: it is no GGUF file, or its header is damaged. Problems with single tensors
        are in the checkpoint, to be reported together.
    """
    size = path.stat().st_size
    if size < 24 or not is_gguf(path):
        raise ModelFormatError(
            f"{path.name} must be a GGUF file. It looks like {describe(path)} ({size} bytes)."
        )
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _parse(path, _Cursor(data, len(MAGIC)), size)
        except (_Damaged, UnicodeDecodeError) as error:
            raise ModelFormatError(f"{path.name} has a damaged GGUF header: {error}.") from None


def rope_divisors(checkpoint: Checkpoint) -> tuple[float, ...]:
    """The numbers of `rope_freqs.weight`, or none if it is not there (or is damaged)."""
    tensor = checkpoint.tensors.get("rope_freqs.weight")
    if tensor is None or checkpoint.problems.kinds or tensor.decode is None:
        return ()
    if len(tensor.shape) != 1 or tensor.shape[0] > MAX_HEAD_DIM:
        raise ModelFormatError(
            f"{checkpoint.name}: `rope_freqs.weight` must have one dimension of at most "
            f"{MAX_HEAD_DIM}. Got {list(tensor.shape)}."
        )
    return tuple(tensor.read_rows(0, tensor.num_rows).reshape(-1).tolist())


def token_ids(metadata: Mapping[str, Any], *roles: str) -> tuple[int, ...]:
    """Ids that the metadata gives for roles such as "eos", each once."""
    found = (metadata.get(f"tokenizer.ggml.{role}_token_id") for role in roles)
    return tuple(dict.fromkeys(i for i in found if isinstance(i, int) and not isinstance(i, bool)))


class _Damaged(Exception):
    """The header contradicts itself or the file's size."""


class _Cursor:
    """Takes values off the front of a file; every length is checked before it is used."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self.data = data
        self.position = position
        self.elements_left = MAX_ELEMENTS

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.data):
            raise _Damaged(f"{count} bytes at {self.position} go past the end ({len(self.data)})")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        length = self.scalar("Q")
        if length > MAX_STRING_BYTES:
            raise _Damaged(f"a string of {length} bytes; the limit is {MAX_STRING_BYTES}")
        return self.take(length).decode()

    def value(self) -> Any:
        kind = self.scalar("I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        return self.scalar(_scalar_code(kind))

    def _array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if count > self.elements_left:
            raise _Damaged(f"an array of {count} elements; the limit is {MAX_ELEMENTS} for all")
        self.elements_left -= count
        if kind == _STRING:
            return self._strings(count)
        code = _scalar_code(kind)
        raw = self.take(count * struct.calcsize(code))
        return np.frombuffer(raw, np.dtype(f"<{code}")).tolist()

    def _strings(self, count: int) -> list[str]:
        """As `string`, `count` times, without calls: vocabularies are long."""
        data, position, size = self.data, self.position, len(self.data)
        strings: list[str] = []
        for _ in range(count):
            start = position + 8
            if start > size:
                raise _Damaged(f"a string at {position} goes past the end ({size})")
            position = start + int.from_bytes(data[position:start], "little")
            if position > size or position - start > MAX_STRING_BYTES:
                raise _Damaged(
                    f"a string at {start} goes past the end ({size}) or the limit of "
                    f"{MAX_STRING_BYTES} bytes"
                )
            strings.append(data[start:position].decode())
        self.position = position
        return strings


def _scalar_code(kind: int) -> str:
    if kind not in _SCALARS:
        raise _Damaged(f"value type {kind} is not one of GGUF's, or an array inside an array")
    return _SCALARS[kind]


def _parse(path: Path, cursor: _Cursor, size: int) -> GGUFFile:
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise _Damaged(f"version must be 2 or 3, little-endian, and is {version}")
    num_tensors, num_metadata = cursor.scalar("Q"), cursor.scalar("Q")
    if num_tensors > MAX_TENSORS or num_metadata > MAX_METADATA:
        raise _Damaged(f"{num_tensors} tensors and {num_metadata} metadata fields are too many")
    metadata: dict[str, Any] = {}
    for _ in range(num_metadata):
        key = cursor.string()
        if key in metadata:
            raise _Damaged(f"metadata key {key!r:.80} comes twice")
        metadata[key] = cursor.value()
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        raise _Damaged(f"general.alignment must be a power of two and is {alignment!r:.80}")
    entries = [_entry(cursor) for _ in range(num_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    return GGUFFile(metadata, _checkpoint(path, entries, data_start, size))


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    shape: tuple[int, ...]  # outermost first; the file has it the other way round
    type_number: int
    offset: int  # from the start of the data


def _entry(cursor: _Cursor) -> _Entry:
    name, num_dimensions = cursor.string(), cursor.scalar("I")
    if num_dimensions > MAX_DIMENSIONS:
        raise _Damaged(f"tensor {name!r:.80} has {num_dimensions} dimensions")
    shape = tuple(cursor.scalar("Q") for _ in range(num_dimensions))[::-1]
    if any(size > MAX_DIMENSION for size in shape):
        raise _Damaged(f"tensor {name!r:.80} has a dimension above {MAX_DIMENSION}: {list(shape)}")
    return _Entry(name, shape, cursor.scalar("I"), cursor.scalar("Q"))


def _checkpoint(path: Path, entries: list[_Entry], data_start: int, size: int) -> Checkpoint:
    problems = Problems()
    tensors: dict[str, StoredTensor] = {}
    for entry in entries:
        tensor = _tensor(path, entry, data_start)
        end = tensor.offset + tensor.num_bytes
        if end > size:
            problems.add("truncated", f"{entry.name} (ends at byte {end}, the file at {size})")
        if entry.name in tensors:
            problems.add("duplicated", entry.name)
        tensors[entry.name] = tensor
    check_overlaps(tensors.values(), problems)
    return Checkpoint(path.name, tensors, problems)


def _tensor(path: Path, entry: _Entry, data_start: int) -> StoredTensor:
    if entry.type_number not in _TENSOR_TYPES:
        raise _Damaged(f"tensor {entry.name!r:.80} has the unknown type {entry.type_number}")
    kind, block, block_bytes = _TENSOR_TYPES[entry.type_number]
    row = math.prod(entry.shape[1:]) if len(entry.shape) > 1 else (*entry.shape, 1)[0]
    if (entry.shape[-1] if entry.shape else 1) % block:
        raise _Damaged(
            f"tensor {entry.name!r:.80} of shape {list(entry.shape)} must have rows of a multiple "
            f"of {block} elements for type {kind}"
        )
    return StoredTensor(
        name=entry.name,
        path=path,
        offset=data_start + entry.offset,
        shape=entry.shape,
        kind=kind,
        num_rows=entry.shape[0] if len(entry.shape) > 1 else 1,
        row_bytes=row // block * block_bytes,
        decode=plain_decoder(kind) or _quantised_decoder(entry.type_number, kind),
    )


def _quantised_decoder(number: int, kind: str) -> Callable[[np.ndarray], np.ndarray] | None:
    if kind in ("I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"):
        return None  # never weights: indices, or what others quantise activations to

    def decode(raw: np.ndarray) -> np.ndarray:
        quants = _quants()
        # Blocks are independent: as one long row, for the package takes only 16 rows at a time.
        one_row = raw.reshape(1, -1)
        try:
            # A damaged scale gives NaN, which the request that meets it reports.
            with np.errstate(invalid="ignore", over="ignore"):
                decoded = quants.dequantize(one_row, quants.GGMLQuantizationType(number))
            return decoded.reshape(raw.shape[0], -1)
        except (NotImplementedError, ValueError) as error:
            raise ModelFormatError(
                f"The installed `gguf` package cannot decode type {kind} ({error}). Install a "
                f"newer one, or convert the file to a type such as Q8_0 or BF16."
            ) from error

    return decode


def _quants() -> Any:
    try:
        return importlib.import_module("gguf.quants")  # an extra
    except ImportError:
        raise ModelFormatError(
            "Quantised GGUF files need the `gguf` package. Run `pip install pagedjax[gguf]`."
        ) from None
