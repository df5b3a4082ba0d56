"""Damaged headers give `ModelFormatError` or load; never another exception, a hang or a crash."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from pagedjax.errors import ModelFormatError
from pagedjax.weights import gguf, load_model, safetensors
from pagedjax.weights.checkpoint import Problems
from tests.models.checkpoints import tiny_config, tiny_tensors, write_hf
from tests.weights.test_gguf import CONFIG, to_gguf, write_gguf

NUM_MUTATIONS = 300
EXTREMES = (0, 1, 0x7F, 0x80, 0xFF)


def mutate(raw: bytes, header_bytes: int, rng: np.random.Generator) -> bytes:
    """Sets bytes, overwrites a word with a huge number, cuts, or repeats a part of the header."""
    data = bytearray(raw)
    at = int(rng.integers(0, header_bytes))
    match int(rng.integers(0, 5)):
        case 0:
            for position in rng.integers(0, header_bytes, 4):
                data[position] = int(rng.integers(0, 256))
        case 1:
            data[at] = EXTREMES[int(rng.integers(0, len(EXTREMES)))]
        case 2:
            huge = int(rng.choice([2**31, 2**32 - 1, 2**48, 2**62, 2**63 - 1]))
            data[at : at + 8] = struct.pack("<Q", huge)
        case 3:
            del data[at:]
        case _:
            other = int(rng.integers(0, header_bytes))
            data[at:at] = data[other : other + 32]
    return bytes(data)


def read_safetensors(path: Path) -> None:
    problems = Problems()
    tensors = safetensors.read_header(path, problems)
    problems.raise_if_any(path.name)
    for tensor in tensors.values():
        if tensor.decode is not None:
            tensor.read_rows(0, tensor.num_rows)


def read_gguf(path: Path) -> None:
    checkpoint = gguf.open_file(path).checkpoint
    checkpoint.problems.raise_if_any(path.name)
    for tensor in checkpoint.tensors.values():
        if tensor.decode is not None:
            tensor.read_rows(0, tensor.num_rows)


def test_mutated_safetensors_headers(rng: np.random.Generator, tmp_path: Path) -> None:
    config = tiny_config()
    path = write_hf(tmp_path, config, tiny_tensors(config)) / "model.safetensors"
    raw = path.read_bytes()
    header_bytes = 8 + struct.unpack("<Q", raw[:8])[0]
    refused = 0
    for _ in range(NUM_MUTATIONS):
        path.write_bytes(mutate(raw, header_bytes, rng))
        try:
            read_safetensors(path)
        except ModelFormatError:
            refused += 1
    assert refused > NUM_MUTATIONS // 2


def test_mutated_gguf_headers(rng: np.random.Generator, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", to_gguf(tiny_tensors(CONFIG), CONFIG), kind="Q8_0")
    raw = path.read_bytes()
    first = min(tensor.offset for tensor in gguf.open_file(path).checkpoint.tensors.values())
    refused = 0
    for _ in range(NUM_MUTATIONS):
        path.write_bytes(mutate(raw, first, rng))
        try:
            read_gguf(path)
        except ModelFormatError:
            refused += 1
    assert refused > NUM_MUTATIONS // 3


@pytest.mark.parametrize("keep", [0, 3, 4, 8, 23, 24, 40, 200])
def test_any_cut_of_a_gguf_header_is_refused(keep: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", to_gguf(tiny_tensors(CONFIG), CONFIG))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelFormatError):
        load_model(path)
