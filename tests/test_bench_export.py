"""The models that peers read hold the numbers that we read from the file they were made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pagedjax import ConfigError
from pagedjax.weights import load_model
from scripts.peers import export_model
from tests.models.checkpoints import tiny_config, tiny_tensors
from tests.smollm2 import tiny_metadata
from tests.weights.test_gguf import parameters, to_gguf

CONFIG = tiny_config(vocab_size=269)  # the tokens of the tiny tokenizer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A GGUF file of 8-bit matrices with a tokenizer."""
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    numbers = {
        "block_count": CONFIG["num_hidden_layers"],
        "context_length": CONFIG["max_position_embeddings"],
        "embedding_length": CONFIG["hidden_size"],
        "feed_forward_length": CONFIG["intermediate_size"],
        "attention.head_count": CONFIG["num_attention_heads"],
        "attention.head_count_kv": CONFIG["num_key_value_heads"],
        "attention.key_length": CONFIG["head_dim"],
        "attention.value_length": CONFIG["head_dim"],
        "rope.dimension_count": CONFIG["head_dim"],
        "vocab_size": CONFIG["vocab_size"],
    }
    for key, value in numbers.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", CONFIG["rms_norm_eps"])
    writer.add_float32("llama.rope.freq_base", CONFIG["rope_theta"])
    for key, value in tiny_metadata().items():
        add: Any = {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}
        add[type(value)](key, value)
    for name, tensor in to_gguf(tiny_tensors(CONFIG), CONFIG).items():
        kind = gguf.GGMLQuantizationType.F16 if tensor.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_formats_hold_what_the_source_holds(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    out = tmp_path / "out"
    argv = ["export_model", str(out), "--model", str(source), "--dtype", dtype]
    monkeypatch.setattr("sys.argv", argv)
    assert export_model.main() == 0
    expected = parameters(load_model(source, dtype=dtype))
    for path in (out / f"hf-{dtype}", out / f"gguf-{dtype}.gguf"):
        loaded = load_model(path)  # in the dtype of the files
        assert loaded.dtype == np.dtype(expected["embedding.weight"].dtype)
        got = parameters(loaded)
        assert got.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(got[name], values, err_msg=f"{path} {name}")


def test_what_is_no_llama_is_refused() -> None:
    assert export_model.hf_name("blk.3.ffn_up.weight") == (
        "model.layers.3.mlp.up_proj.weight",
        "ffn_up",
    )
    for name in ("blk.0.attn_q.bias", "rope_freqs.weight", "blk.0.ffn_gate_inp.weight"):
        with pytest.raises(
            ConfigError, match=f"must be a plain Llama model. Got the tensor '{name}"
        ):
            export_model.hf_name(name)


def test_a_model_that_is_no_gguf_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["export_model", str(tmp_path), "--model", str(tmp_path)])
    assert export_model.main() == 2
    assert "`--model` must be a GGUF file" in capsys.readouterr().err
