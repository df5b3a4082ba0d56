"""config.json of the Llama family: known fields, harmless ones, and the refusal of all others."""

from __future__ import annotations

from typing import Any

import pytest

from pagedjax.errors import ModelFormatError
from pagedjax.models import llama, llama_gguf, registry
from tests.models.checkpoints import tiny_config


def test_config_json_becomes_the_model_config() -> None:
    config = llama.from_hf(tiny_config(attention_bias=True, tie_word_embeddings=True))
    assert (config.embed_dim, config.ffw_dim, config.num_layers) == (24, 36, 2)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (4, 2, 8)
    assert (config.vocab_size, config.max_positions, config.norm_epsilon) == (40, 64, 1e-5)
    assert (config.attention_bias, config.mlp_bias, config.tied_embeddings) == (True, False, True)
    assert config.sliding_window is None


def test_absent_sizes_follow_from_the_others() -> None:
    values = tiny_config()
    del values["head_dim"], values["num_key_value_heads"]
    config = llama.from_hf(values)
    assert (config.head_dim, config.num_kv_heads) == (6, 4)


def test_harmless_fields_change_nothing() -> None:
    harmless: dict[str, Any] = dict.fromkeys(llama.HARMLESS, "anything")
    assert llama.from_hf(harmless | tiny_config()) == llama.from_hf(tiny_config())


def test_all_problems_come_in_one_error() -> None:
    values = tiny_config(
        frobnicate=1, quantization_config={"bits": 4}, hidden_act="gelu", vocab_size="many"
    )
    del values["hidden_size"]
    with pytest.raises(ModelFormatError) as error:
        llama.from_hf(values)
    message = str(error.value)
    assert "2 unknown field(s)" in message
    for part in ("`frobnicate`", "`quantization_config`", "`hidden_act` must be 'silu'"):
        assert part in message
    assert "`vocab_size` must be an integer. Got 'many'" in message
    assert "`hidden_size` is missing" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 2.0),
        ("num_hidden_layers", True),
        ("rms_norm_eps", float("nan")),
        ("attention_bias", 1),
        ("rope_scaling", [1]),
        ("rope_interleaved", True),
    ],
)
def test_wrong_types_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ModelFormatError, match=f"`{name}` must be"):
        llama.from_hf(tiny_config(**{name: value}))


@pytest.mark.parametrize("architectures", [None, [], ["BertModel"], ["LlamaForCausalLM"] * 2, "x"])
def test_other_architectures_are_refused_by_name(architectures: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"LlamaForCausalLM, MistralForCausalLM.*Got"):
        registry.hf_family(architectures)


def test_gguf_architectures_are_refused_by_name() -> None:
    with pytest.raises(ModelFormatError, match=r"must be one of: llama. Got 'mamba'"):
        registry.gguf_family("mamba")


def test_every_parameter_has_a_name_in_both_formats() -> None:
    config = llama.from_hf(tiny_config(attention_bias=True, mlp_bias=True))
    hf, gguf = llama.layout(config).sources, llama_gguf.layout(config).sources
    assert hf.keys() == gguf.keys()
    names = [source.name for parts in gguf.values() for source in parts]
    assert len(set(names)) == len(names) == 3 + 2 * 16
    assert "blk.1.attn_output.bias" in names
