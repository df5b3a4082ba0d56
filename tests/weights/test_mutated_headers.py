"""Damaged weight files give `ModelFormatError` or load; never another exception, a hang or a crash.

The long test has 10,000 files, each behind an alarm, and says how long the slowest one computed.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedjax.errors import ModelFormatError
from pagedjax.weights import gguf, load_model, safetensors
from pagedjax.weights.checkpoint import Problems
from tests.models.checkpoints import tiny_config, tiny_tensors, write_hf
from tests.weights import mutated_gguf, mutated_safetensors
from tests.weights.test_gguf import CONFIG, to_gguf, write_gguf

NUM_MUTATIONS, MANY_MUTATIONS = 300, 5000
LOADED_EACH = 10  # every so many files are given to the whole loader
HANGS_AFTER = 20  # seconds of computing; a file takes milliseconds
MOST_MEMORY = 2**29  # bytes that no header of a small file may cost

type Mutate = Callable[[bytes, np.random.Generator], bytes]


class HangError(BaseException):
    """A reader that no `except Exception` may take for an answer."""


@contextmanager
def alarm(what: str) -> Iterator[None]:
    """Ends the block when it hangs."""

    def ring(number: int, frame: object) -> None:
        del number, frame  # what a signal handler is called with
        raise HangError(f"{what} was not answered within {HANGS_AFTER} s")

    before = signal.signal(signal.SIGPROF, ring)
    # Again and again: Python drops what is raised in a garbage collector's callback.
    signal.setitimer(signal.ITIMER_PROF, HANGS_AFTER, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


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


@dataclass
class Answers:
    """What became of mutated files."""

    counts: Counter[str] = field(default_factory=Counter[str])
    slowest: tuple[float, str] = (0.0, "")  # seconds of computing, and what was read

    def take(self, path: Path, read: Callable[[Path], Any], kind: str) -> None:
        """Reads a file: it loads, or is refused by name; anything else is raised here."""
        started = time.process_time()
        with alarm(f"{path} ({kind})"):
            try:
                read(path)
                outcome = "read"
            except ModelFormatError:
                outcome = "refused"
        self.counts[f"{kind} {outcome}"] += 1
        self.slowest = max(self.slowest, (time.process_time() - started, kind))


def mutate_all(
    path: Path, model: Path, mutate: Mutate, read: Callable[[Path], Any], count: int, seed: int
) -> Answers:
    """Reads `count` mutations of a file, and of some the whole model; `path` is left damaged
    where one failed, to be looked at."""
    raw, answers = path.read_bytes(), Answers()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        damaged = mutate(raw, np.random.default_rng((seed, number)))
        path.write_bytes(damaged)
        answers.take(path, read, "header")
        if number % LOADED_EACH == 0:
            answers.take(model, load_model, "model")
    path.write_bytes(raw)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MOST_MEMORY, f"{grown} bytes"
    seconds, kind = answers.slowest
    print(f"{path.name}: {dict(answers.counts)}, slowest {seconds:.3f} s ({kind}), {grown} bytes")
    return answers


def mutate_safetensors(folder: Path, count: int, seed: int) -> Answers:
    config = tiny_config()
    path = write_hf(folder, config, tiny_tensors(config)) / "model.safetensors"
    return mutate_all(path, folder, mutated_safetensors.mutated, read_safetensors, count, seed)


def mutate_gguf(folder: Path, count: int, seed: int) -> Answers:
    path = write_gguf(folder / "t.gguf", to_gguf(tiny_tensors(CONFIG), CONFIG), kind="Q8_0")
    return mutate_all(path, path, mutated_gguf.mutated, read_gguf, count, seed)


@pytest.mark.parametrize("mutate", [mutate_safetensors, mutate_gguf])
def test_mutated_headers(mutate: Any, tmp_path: Path) -> None:
    answers = mutate(tmp_path, NUM_MUTATIONS, seed=0)
    assert answers.counts["header refused"] > NUM_MUTATIONS // 3
    assert answers.counts["model refused"] > NUM_MUTATIONS // LOADED_EACH // 2


@pytest.mark.slow
@pytest.mark.parametrize("mutate", [mutate_safetensors, mutate_gguf])
def test_thousands_of_mutated_headers(mutate: Any, tmp_path: Path) -> None:
    seed = int(os.environ.get("PAGEDJAX_TEST_SEED", "1"))
    answers = mutate(tmp_path, MANY_MUTATIONS, seed=seed)
    assert answers.counts["header refused"] > MANY_MUTATIONS // 3


def test_a_file_in_pieces_is_the_same_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", to_gguf(tiny_tensors(CONFIG), CONFIG))
    assert mutated_gguf.take_apart(path.read_bytes()).pack() == path.read_bytes()


def test_a_vocabulary_that_is_no_array_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", to_gguf(tiny_tensors(CONFIG), CONFIG))
    parts = mutated_gguf.take_apart(path.read_bytes())
    at = [field.key for field in parts.fields].index(b"tokenizer.ggml.tokens")
    number = struct.pack("<f", 4.0)
    parts.fields[at] = replace(parts.fields[at], kind=mutated_gguf.FLOAT32, value=number)
    path.write_bytes(parts.pack())
    with pytest.raises(
        ModelFormatError, match=r"`tokenizer.ggml.tokens` must be an array. Got 4.0"
    ):
        load_model(path)


@pytest.mark.parametrize("keep", [0, 3, 4, 8, 23, 24, 40, 200])
def test_any_cut_of_a_gguf_header_is_refused(keep: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", to_gguf(tiny_tensors(CONFIG), CONFIG))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelFormatError):
        load_model(path)


def sparse(path: Path, head: bytes, size: int) -> None:
    """A file that is nearly all hole: it has a size, and takes no room."""
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)


@pytest.mark.parametrize("length", [2, 4096, 99_999_999, 100_000_001, 2**40 - 8])
def test_a_huge_safetensors_file_of_nothing_is_refused(length: int, tmp_path: Path) -> None:
    path = write_hf(tmp_path, tiny_config(), {}) / "model.safetensors"
    sparse(path, struct.pack("<Q", length), 2**40)
    answers = Answers()
    answers.take(path, read_safetensors, "header")
    answers.take(tmp_path, load_model, "model")
    assert answers.counts == {"header refused": 1, "model refused": 1}


@pytest.mark.parametrize(
    "head",
    [
        b"GGUF",
        b"GGUF" + struct.pack("<IQQ", 3, 65_536, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 65_536),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<QIQ", 0, 8, 2**40 - 100),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<QIIQ", 0, 9, 0, 2**22),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<QIIQ", 0, 9, 8, 2**22),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<QIIQ", 0, 9, 12, 2**22),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<QIIQQ", 0, 9, 8, 1, 2**39),
    ],
)
def test_a_huge_gguf_file_of_nothing_is_refused(head: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    sparse(path, head, 2**40)
    answers = Answers()
    answers.take(path, load_model, "model")
    assert answers.counts == {"model refused": 1}


def test_a_tensor_of_terabytes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = write_hf(tmp_path, tiny_config(), {}) / "model.safetensors"
    entry = {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}
    text = json.dumps({"model.norm.weight": entry}).encode()
    sparse(path, struct.pack("<Q", len(text)) + text, 2**40 + 8 + len(text))
    with alarm("a terabyte"), pytest.raises(ModelFormatError, match="of a wrong shape"):
        load_model(tmp_path)


@pytest.mark.parametrize("scale", [np.inf, np.nan])
def test_a_damaged_scale_gives_nan_without_a_word(scale: float) -> None:
    """Of blocks it is data like any other; NumPy's warnings would name no file."""
    decode = gguf._quantised_decoder(3, "Q4_1")
    assert decode is not None
    block = np.zeros((1, 20), np.uint8)
    block[0, :2] = np.array([scale], np.float16).view(np.uint8)
    assert np.isnan(decode(block)).all()
