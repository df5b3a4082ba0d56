"""The Llama family in Hugging Face's form: what config.json means, what its tensors are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from pagedjax.models import rope_fields
from pagedjax.models.decoder import Decoder, ModelConfig
from pagedjax.models.family import HFFamily, Layout, Source
from pagedjax.models.fields import Fields

# Fields of config.json that change nothing here: provenance, training, and how others cache. Those
# that name tokens are read by the loader.
HARMLESS = frozenset(
    (
        "_name_or_path",
        "_attn_implementation_autoset",
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "is_llama_config",
        "model_type",
        "pad_token_id",
        "pretraining_tp",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    )
)


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json.

    Raises:
      ModelFormatError: lists every field that is unknown, unsupported, missing or of a wrong type.
    """
    config = Fields(values, "config.json")
    config.ignore(HARMLESS)
    config.must_be("hidden_act", "silu")
    config.must_be("rope_interleaved", False)
    max_positions = config.integer("max_position_embeddings", 2048)
    num_q_heads, embed_dim = config.integer("num_attention_heads"), config.integer("hidden_size")
    sizes = {
        "vocab_size": config.integer("vocab_size"),
        "embed_dim": embed_dim,
        "ffw_dim": config.integer("intermediate_size"),
        "num_layers": config.integer("num_hidden_layers"),
        "num_q_heads": num_q_heads,
        "num_kv_heads": config.integer("num_key_value_heads", num_q_heads),
        "head_dim": config.integer("head_dim", (embed_dim or 0) // (num_q_heads or 1)),
        "max_positions": max_positions,
        "norm_epsilon": config.number("rms_norm_eps", 1e-6),
        "tied_embeddings": config.boolean("tie_word_embeddings", False),
        "attention_bias": config.boolean("attention_bias", False),
        "mlp_bias": config.boolean("mlp_bias", False),
        "sliding_window": config.integer("sliding_window", None),
    }
    rope = rope_fields.from_hf(config, max_positions)
    config.finish()
    return ModelConfig(**sizes, rope=rope_fields.build(rope))


def layout(config: ModelConfig) -> Layout:
    """Names and shapes in safetensors files."""
    sources: dict[str, tuple[Source, ...]] = {
        "embedding.weight": (_matrix("model.embed_tokens", config.vocab_size, config.embed_dim),),
        "norm.weight": (Source("model.norm.weight", (config.embed_dim,)),),
    }
    ignored = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(config.num_layers)}
    if config.tied_embeddings:
        ignored.add("lm_head.weight")
    else:
        sources["head.weight"] = (_matrix("lm_head", config.vocab_size, config.embed_dim),)
    for index in range(config.num_layers):
        sources |= _layer(config, index)
    return Layout(sources, frozenset(ignored))


def _layer(config: ModelConfig, index: int) -> dict[str, tuple[Source, ...]]:
    ours, theirs = f"layers.{index}", f"model.layers.{index}"
    embed, ffw, q, kv = config.embed_dim, config.ffw_dim, config.q_dim, config.kv_dim
    projections = {  # ours -> (name, rows) of each part, columns, has a bias
        "qkv": ([("q_proj", q), ("k_proj", kv), ("v_proj", kv)], embed, config.attention_bias),
        "out": ([("o_proj", embed)], q, config.attention_bias),
        "gate_up": ([("gate_proj", ffw), ("up_proj", ffw)], embed, config.mlp_bias),
        "down": ([("down_proj", embed)], ffw, config.mlp_bias),
    }
    sources: dict[str, tuple[Source, ...]] = {
        f"{ours}.attention_norm.weight": (Source(f"{theirs}.input_layernorm.weight", (embed,)),),
        f"{ours}.mlp_norm.weight": (Source(f"{theirs}.post_attention_layernorm.weight", (embed,)),),
    }
    for name, (parts, columns, has_bias) in projections.items():
        block = f"{theirs}.{'self_attn' if name in ('qkv', 'out') else 'mlp'}"
        sources[f"{ours}.{name}.weight"] = tuple(
            _matrix(f"{block}.{part}", rows, columns) for part, rows in parts
        )
        if has_bias:
            sources[f"{ours}.{name}.bias"] = tuple(
                Source(f"{block}.{part}.bias", (rows,)) for part, rows in parts
            )
    return sources


def _matrix(name: str, rows: int, columns: int) -> Source:
    return Source(f"{name}.weight", (rows, columns))


def build(config: ModelConfig, dtype: jnp.dtype, weight_dtype: jnp.dtype | None) -> nnx.Module:
    """The module, with zeros for weights."""
    return Decoder(config, dtype=dtype, weight_dtype=weight_dtype)


FAMILY = HFFamily(build, from_hf, layout)
