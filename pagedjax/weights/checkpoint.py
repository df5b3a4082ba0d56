"""Tensors that lie in files: where, in what form, and reading some of their rows.

The readers of each format make a `Checkpoint` from a file's header alone, after checking every span
against the file's size. Rows are read with plain reads, not through a memory map: a map would
count as resident memory, and would kill the process if the file shrank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from pagedjax.errors import ModelFormatError

MAX_TENSORS = 65_536
MAX_DIMENSIONS = 8
MOST_NAMES_SHOWN = 12  # of each kind of problem, in one message

PLAIN_DTYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file.

    Attributes:
      name: in the file.
      path, offset: the file, and the first byte in it.
      shape: outermost dimension first.
      kind: what the numbers are stored as, in the format's own word ("BF16", "Q4_1", ...).
      num_rows, row_bytes: rows of the outermost dimension, and bytes of each.
      decode: u8[rows, row_bytes] -> floating point [rows, elements of a row]; None: pagedjax
        cannot decode this kind.
    """

    name: str
    path: Path
    offset: int
    shape: tuple[int, ...]
    kind: str
    num_rows: int
    row_bytes: int
    decode: Callable[[np.ndarray], np.ndarray] | None

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.num_rows * self.row_bytes

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        """Decoded rows [stop - start, elements of a row].

        Raises:
          ModelFormatError: the file ends early, which it did not when its header was read.
        """
        assert self.decode is not None, "the loader refuses kinds that cannot be decoded"
        count = (stop - start) * self.row_bytes
        begin = self.offset + start * self.row_bytes
        raw = np.fromfile(self.path, np.uint8, count, offset=begin)
        if raw.size != count:
            raise ModelFormatError(
                f"{self.path.name} must hold {count} bytes of `{self.name}` from byte {begin}. "
                f"Got {raw.size}: the file became shorter while it was read."
            )
        return self.decode(raw.reshape(stop - start, self.row_bytes))


@dataclass(slots=True)
class Problems:
    """What is wrong with a checkpoint, collected by kind and reported at once."""

    kinds: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, what: str) -> None:
        """Adds one problem, e.g. `add("missing", "model.norm.weight")`."""
        self.kinds.setdefault(kind, []).append(what)

    def raise_if_any(self, where: str) -> None:
        """Raises one `ModelFormatError` with counts and names of every kind."""
        if not self.kinds:
            return
        count = sum(map(len, self.kinds.values()))
        parts = [f"{len(found)} {kind}: {_some(found)}" for kind, found in self.kinds.items()]
        raise ModelFormatError(f"{where}: {count} problem(s) with tensors. {'. '.join(parts)}.")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Every tensor of a model's files, and the problems that their headers show."""

    name: str  # of the file or directory, for messages
    tensors: Mapping[str, StoredTensor]
    problems: Problems


def plain_decoder(kind: str) -> Callable[[np.ndarray], np.ndarray] | None:
    """The decoder of numbers stored as they are; None if `kind` is not among `PLAIN_DTYPES`."""
    dtype = PLAIN_DTYPES.get(kind)
    return None if dtype is None else lambda raw: raw.view(dtype)


def check_overlaps(tensors: Iterable[StoredTensor], problems: Problems) -> None:
    """Adds a problem for each tensor that begins before the one before it in the file ends."""
    end, previous = 0, ""
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.num_bytes)):
        if tensor.offset < end and tensor.num_bytes:
            problems.add("overlapping", f"{tensor.name} with {previous}")
        if tensor.offset + tensor.num_bytes > end:
            end, previous = tensor.offset + tensor.num_bytes, tensor.name


def describe(path: Path) -> str:
    """What a file that is not what it should be looks like, for a message."""
    with path.open("rb") as file:
        head = file.read(512)
    if not head:
        return "an empty file"
    if head.startswith(b"version https://git-lfs"):
        return "a git-lfs pointer; fetch the real file, e.g. with `git lfs pull`"
    if head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "an HTML page, perhaps a download that failed"
    if head.startswith((b"PK\x03\x04", b"\x80")):
        return "a zip or pickle file, as PyTorch writes it; convert it to safetensors"
    if head.startswith(b"GGUF"):
        return "a GGUF file"
    return f"a file that begins with {head[:8]!r}"


def _some(names: list[str]) -> str:
    shown = ", ".join(f"{name:.200}" for name in names[:MOST_NAMES_SHOWN])
    more = len(names) - MOST_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
