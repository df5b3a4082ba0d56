"""Reads safetensors headers, of one file or of shards with an index, trusting nothing in them.

A file is: u64 header length, a JSON header {name: {dtype, shape, data_offsets}}, the data.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from pagedjax.errors import ModelFormatError
from pagedjax.weights.checkpoint import (
    MAX_DIMENSIONS,
    MAX_TENSORS,
    Checkpoint,
    Problems,
    StoredTensor,
    check_overlaps,
    describe,
    plain_decoder,
)
from pagedjax.weights.json_file import parse_json, read_json

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
MAX_SHARDS = 4096

_LENGTH_BYTES = 8
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
}


def open_directory(directory: Path) -> Checkpoint:
    """The tensors of model.safetensors, or of the shards that its index names.

    Raises:
      ModelFormatError: there are none, or a header is damaged. Problems with single tensors are
        in the checkpoint, to be reported together.
    """
    if (directory / INDEX_FILE).exists():
        return _open_shards(directory)
    if (directory / SINGLE_FILE).exists():
        problems = Problems()
        tensors = read_header(directory / SINGLE_FILE, problems)
        return Checkpoint(directory.name, tensors, problems)
    others = sorted(path.name for path in directory.glob("*.bin"))[:3]
    found = f" Got {', '.join(others)}, which pagedjax does not read: loading a pickle runs code. "
    hint = "Convert the model to safetensors." if others else ""
    raise ModelFormatError(
        f"{directory} must hold {SINGLE_FILE} or {INDEX_FILE}.{found + hint if others else ''}"
    )


def read_header(path: Path, problems: Problems) -> dict[str, StoredTensor]:
    """Name -> tensor of one file; what is wrong with single tensors goes to `problems`.

    Raises:
      ModelFormatError: the header as a whole is damaged.
    """
    header, data_start, size = _header(path)
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    if len(entries) > MAX_TENSORS:
        raise ModelFormatError(
            f"{path.name} must hold at most {MAX_TENSORS} tensors. Got {len(entries)}."
        )
    tensors: dict[str, StoredTensor] = {}
    for name, entry in entries.items():
        tensor = _tensor(path, name, entry, data_start)
        if tensor.offset + tensor.num_bytes > size:
            end = tensor.offset + tensor.num_bytes
            problems.add("truncated", f"{name} (ends at byte {end}, the file at {size})")
        tensors[name] = tensor
    check_overlaps(tensors.values(), problems)
    return tensors


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The parsed header, where the data starts, and the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(_LENGTH_BYTES)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == _LENGTH_BYTES else 0
        most = min(MAX_HEADER_BYTES, size - _LENGTH_BYTES)
        if not 2 <= length <= most:
            raise ModelFormatError(
                f"{path.name} must begin with a safetensors header of 2 to {most} bytes. "
                f"Got {length}; it looks like {describe(path)}."
            )
        text = file.read(length)
    return parse_json(text, f"The header of {path.name}"), _LENGTH_BYTES + length, size


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    """Checks one entry by itself: types, bounds, and that shape and span agree."""

    def refuse(what: str) -> ModelFormatError:
        return ModelFormatError(f"{path.name}: `{name:.200}` must have {what}. Got {entry!r:.200}.")

    if not isinstance(entry, dict):
        raise refuse("an object with dtype, shape and data_offsets")
    bits = _BITS.get(entry.get("dtype", "")) if isinstance(entry.get("dtype"), str) else None
    shape, span = entry.get("shape"), entry.get("data_offsets")
    if bits is None:
        raise refuse(f"a dtype among {', '.join(_BITS)}")
    if not _are_sizes(shape, most=MAX_DIMENSIONS):
        raise refuse(f"a shape of at most {MAX_DIMENSIONS} sizes")
    if not _are_sizes(span, most=2) or len(span) != 2:
        raise refuse("two data_offsets")
    num_bytes = math.prod(shape) * bits // 8
    if span[1] - span[0] != num_bytes:
        raise refuse(f"data_offsets that are {num_bytes} bytes apart, as its shape and dtype say")
    num_rows = shape[0] if shape else 1
    return StoredTensor(
        name=name,
        path=path,
        offset=data_start + span[0],
        shape=tuple(shape),
        kind=entry["dtype"],
        num_rows=num_rows,
        row_bytes=num_bytes // num_rows if num_rows else 0,
        decode=plain_decoder(entry["dtype"]),
    )


def _are_sizes(values: Any, *, most: int) -> TypeGuard[list[int]]:
    """Whether a value is a list of so many sizes that no arithmetic on them can hurt."""
    return (
        isinstance(values, list)
        and len(values) <= most
        and all(
            isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48
            for value in values
        )
    )


def _open_shards(directory: Path) -> Checkpoint:
    weight_map = _weight_map(directory)
    problems = Problems()
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if not (directory / shard).is_file():
            problems.add("missing shards", shard)
            continue
        for name, tensor in read_header(directory / shard, problems).items():
            if name in tensors:
                problems.add("in two shards", f"{name} in {tensors[name].path.name} and {shard}")
            elif weight_map.get(name) != shard:
                problems.add("not where the index says", f"{name} in {shard}")
            tensors[name] = tensor
    return Checkpoint(directory.name, tensors, problems)


def _weight_map(directory: Path) -> Mapping[str, str]:
    weight_map = read_json(directory / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(map(_is_file_name, weight_map.values())):
        raise ModelFormatError(
            f"`weight_map` in {INDEX_FILE} must map tensor names to file names in the same "
            f"directory. Got {weight_map!r:.200}."
        )
    if len(weight_map) > MAX_TENSORS or len(set(weight_map.values())) > MAX_SHARDS:
        raise ModelFormatError(
            f"`weight_map` in {INDEX_FILE} must have at most {MAX_TENSORS} tensors in "
            f"{MAX_SHARDS} files. Got {len(weight_map)} in {len(set(weight_map.values()))}."
        )
    return weight_map


def _is_file_name(value: Any) -> bool:
    """No path: an index must not reach outside its directory."""
    return (
        isinstance(value, str)
        and value.endswith(".safetensors")
        and not any(separator in value for separator in ("/", "\\", "\0"))
    )
