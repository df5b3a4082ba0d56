"""GGUF files: every type that can be written here, what metadata means, and everything wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from flax import nnx
from gguf import quants

from pagedjax.errors import ModelFormatError
from pagedjax.weights import LoadedModel, load_model
from pagedjax.weights import gguf as gguf_files
from tests.models.checkpoints import Tensors, tiny_config, tiny_tensors

# Rows of quantised tensors are whole blocks of 32 (256 for the larger ones).
CONFIG = tiny_config(hidden_size=32, intermediate_size=64)
KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"]
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows 0, 1, 2, 3 of a head -> 0, 2, 1, 3: the halves become pairs, as converters do."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(rows.shape)


def to_gguf(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    renamed: Tensors = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            tensor = interleave(tensor, config["num_attention_heads"])
        if "k_proj" in name:
            tensor = interleave(tensor, config["num_key_value_heads"])
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        renamed[name] = tensor
    return renamed


def write_gguf(
    path: Path, tensors: Tensors, *, kind: str = "F32", metadata: dict[str, Any] | None = None
) -> Path:
    """Writes matrices as `kind` and vectors as F32; `metadata` is added to that of CONFIG."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_key_length(CONFIG["head_dim"])
    writer.add_value_length(CONFIG["head_dim"])
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_rope_freq_base(CONFIG["rope_theta"])
    writer.add_token_list([f"t{i}" for i in range(CONFIG["vocab_size"])])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    writer.add_chat_template("{{ messages }}")
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        add[type(value)](key, value)
    number = gguf.GGMLQuantizationType[kind]
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, quants.quantize(tensor, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def parameters(loaded: LoadedModel) -> dict[str, np.ndarray]:
    return {
        ".".join(map(str, path)): np.asarray(value[...])
        for path, value in nnx.to_flat_state(nnx.state(loaded.model))
    }


@pytest.fixture
def tensors() -> Tensors:
    return to_gguf(tiny_tensors(CONFIG), CONFIG)


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_gives_its_own_numbers(kind: str, tensors: Tensors, tmp_path: Path) -> None:
    loaded = load_model(write_gguf(tmp_path / "tiny.gguf", tensors, kind=kind), dtype="float32")
    number = gguf.GGMLQuantizationType[kind]
    got = parameters(loaded)
    plain = tiny_tensors(CONFIG)

    def rounded(name: str, num_heads: int = 0) -> np.ndarray:
        rows = plain[name]
        return quants.dequantize(quants.quantize(rows, number), number).reshape(rows.shape)

    np.testing.assert_array_equal(got["embedding.weight"], rounded("model.embed_tokens.weight"))
    attention = [rounded(f"model.layers.1.self_attn.{name}_proj.weight") for name in "qkv"]
    np.testing.assert_array_equal(got["layers.1.qkv.weight"], np.concatenate(attention))
    np.testing.assert_array_equal(got["norm.weight"], plain["model.norm.weight"])


def test_k_quants_are_decoded_by_the_package(rng: np.random.Generator, tmp_path: Path) -> None:
    """It cannot write them, so the blocks are random bytes, and one tensor is read alone."""
    number = gguf.GGMLQuantizationType.Q6_K
    raw = rng.integers(0, 100, (3, 2 * 210), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("x", raw, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = gguf_files.open_file(tmp_path / "k.gguf").checkpoint.tensors["x"]
    assert (tensor.shape, tensor.kind, tensor.num_bytes) == ((3, 512), "Q6_K", raw.nbytes)
    got = tensor.read_rows(1, 3)
    np.testing.assert_array_equal(got, quants.dequantize(raw, number)[1:3])


def test_metadata_says_the_rest(tensors: Tensors, tmp_path: Path) -> None:
    loaded = load_model(write_gguf(tmp_path / "tiny-model.gguf", tensors, kind="Q8_0"))
    assert (loaded.name, str(loaded.dtype)) == ("tiny-model", "float32")
    assert (loaded.bos_token_id, loaded.eos_token_ids) == (None, (2, 7))
    assert loaded.chat_template_source == "{{ messages }}"
    assert loaded.gguf_metadata is not None
    assert loaded.gguf_metadata["tokenizer.ggml.tokens"][3] == "t3"
    assert loaded.config.vocab_size == 40
    assert not loaded.config.tied_embeddings


@pytest.mark.parametrize(
    ("kind", "expected"), [("F32", "float32"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")]
)
def test_auto_dtype_is_the_files_or_the_default(
    kind: str, expected: str, tensors: Tensors, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tensors, kind=kind)
    assert str(load_model(path, default_dtype="bfloat16").dtype) == expected


def test_missing_output_ties_and_biases_are_seen(tmp_path: Path) -> None:
    config = CONFIG | {"tie_word_embeddings": True, "attention_bias": True}
    tensors = to_gguf(tiny_tensors(config), config)
    loaded = load_model(write_gguf(tmp_path / "tiny.gguf", tensors))
    assert loaded.config.tied_embeddings
    got, plain = parameters(loaded), tiny_tensors(config)
    biases = [plain[f"model.layers.0.self_attn.{name}_proj.bias"] for name in "qkv"]
    np.testing.assert_array_equal(got["layers.0.qkv.bias"], np.concatenate(biases))


def test_rope_freqs_become_divisors(tensors: Tensors, tmp_path: Path) -> None:
    tensors["rope_freqs.weight"] = np.asarray([1, 1, 2, 8], np.float32)
    rope = load_model(write_gguf(tmp_path / "tiny.gguf", tensors)).config.rope
    assert (rope.kind, rope.divisors) == ("divisors", (1.0, 1.0, 2.0, 8.0))


def test_rope_scaling_is_read(tensors: Tensors, tmp_path: Path) -> None:
    metadata = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 16,
    }
    rope = load_model(write_gguf(tmp_path / "tiny.gguf", tensors, metadata=metadata)).config.rope
    assert (rope.kind, rope.factor, rope.original_max_positions) == ("yarn", 4.0, 16)
    assert rope.attention_factor == pytest.approx(0.1 * np.log(4.0) + 1)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.warp_factor", 9, "1 unknown.*`warp_factor`"),
        ("llama.expert_count", 8, "`expert_count` must be 0. Got 8"),
        ("llama.rope.scaling.type", "longrope", "`rope.scaling.type` must be 'none' or 'linear'"),
        ("llama.rope.dimension_count", 4, "`rope.dimension_count` must be 8. Got 4"),
        ("llama.vocab_size", 39, r"token_embd.weight \(expected \[39, 32\], got \[40, 32\]"),
    ],
)
def test_what_would_change_the_answers_is_refused(
    key: str, value: Any, message: str, tensors: Tensors, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tensors, metadata={key: value})
    with pytest.raises(ModelFormatError, match=message):
        load_model(path)


def test_all_problems_with_tensors_come_in_one_error(tensors: Tensors, tmp_path: Path) -> None:
    del tensors["blk.0.ffn_up.weight"]
    tensors["blk.7.ffn_up.weight"] = tensors["blk.1.ffn_up.weight"]
    path = write_gguf(tmp_path / "tiny.gguf", tensors)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelFormatError) as error:
        load_model(path)
    message = str(error.value)
    assert "1 missing: blk.0.ffn_up.weight" in message
    assert "1 unexpected: blk.7.ffn_up.weight" in message
    assert "truncated: blk.7.ffn_up.weight" in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"looks like an empty file"),
        (b"<html><body>404</body></html>", "an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a git-lfs pointer"),
        (b"GGUF\x03\0\0\0", r"must be a GGUF file. It looks like a GGUF file \(8 bytes\)"),
        (b"GGUF" + b"\0\0\0\x03" + b"\0" * 32, "version must be 2 or 3, little-endian"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 32, "tensors and .* metadata fields are too many"),
    ],
)
def test_mislabelled_files_say_what_they_look_like(
    content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "tiny.gguf").write_bytes(content)
    with pytest.raises(ModelFormatError, match=message):
        load_model(tmp_path / "tiny.gguf")


def test_missing_package_says_what_to_install(
    tensors: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tensors, kind="Q4_0")
    plain = write_gguf(tmp_path / "plain.gguf", tensors, kind="BF16")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    with pytest.raises(ModelFormatError, match=r"Run `pip install pagedjax\[gguf\]`"):
        load_model(path)
    load_model(plain)  # numbers stored as they are need no package
