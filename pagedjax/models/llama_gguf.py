"""The Llama family in GGUF files: what the metadata means, what its tensors are called."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from pagedjax.models import llama, rope_fields
from pagedjax.models.decoder import ModelConfig
from pagedjax.models.family import GGUFFamily, Layout, Source
from pagedjax.models.fields import Fields

ARCHITECTURE = "llama"
ROPE_DIVISORS = "rope_freqs.weight"

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_NAMES = {  # Hugging Face's -> GGUF's
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def from_gguf(
    metadata: Mapping[str, Any], tensors: Collection[str], rope_divisors: tuple[float, ...]
) -> ModelConfig:
    """Reads the `llama.*` metadata; tensor names tell of biases and of tied embeddings.

    Raises:
      ModelFormatError: lists every key that is unknown, unsupported, missing or of a wrong type.
    """
    prefix = f"{ARCHITECTURE}."
    ours = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    fields = Fields(ours, f"GGUF metadata {prefix}*")
    vocabulary = metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(vocabulary, list):
        fields.problem(f"`tokenizer.ggml.tokens` must be an array. Got {vocabulary!r:.80}")
        vocabulary = []
    num_q_heads = fields.integer("attention.head_count")
    embed_dim = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", (embed_dim or 0) // (num_q_heads or 1))
    fields.must_be("attention.value_length", head_dim)
    fields.must_be("rope.dimension_count", head_dim)
    fields.must_be("expert_count", 0)
    fields.must_be("expert_used_count", 0)
    sizes = {
        "vocab_size": fields.integer("vocab_size", len(vocabulary)),
        "embed_dim": embed_dim,
        "ffw_dim": fields.integer("feed_forward_length"),
        "num_layers": fields.integer("block_count"),
        "num_q_heads": num_q_heads,
        "num_kv_heads": fields.integer("attention.head_count_kv", num_q_heads),
        "head_dim": head_dim,
        "max_positions": fields.integer("context_length"),
        "norm_epsilon": fields.number("attention.layer_norm_rms_epsilon"),
        "tied_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "sliding_window": fields.integer("attention.sliding_window", None),
    }
    rope = rope_fields.from_gguf(fields, sizes["max_positions"])
    if rope_divisors:
        if "kind" in rope:
            fields.problem(f"`{ROPE_DIVISORS}` must not come with `rope.scaling.type`")
        rope |= {"kind": "divisors", "divisors": rope_divisors}
    fields.finish()
    return ModelConfig(**sizes, rope=rope_fields.build(rope))


def layout(config: ModelConfig) -> Layout:
    """Names and shapes in a GGUF file; rows of q and k lie in pairs there."""
    plain = llama.layout(config)
    heads = {"attn_q": config.num_q_heads, "attn_k": config.num_kv_heads}

    def renamed(source: Source) -> Source:
        name = _gguf_name(source.name)
        kind = name.split(".")[-2]
        return replace(source, name=name, interleaved_heads=heads.get(kind, 0))

    sources = {path: tuple(map(renamed, parts)) for path, parts in plain.sources.items()}
    return Layout(sources, frozenset((ROPE_DIVISORS,)))


def _gguf_name(name: str) -> str:
    matched = _LAYER.fullmatch(name)
    if matched is None:
        return _NAMES[name]
    index, part, kind = matched.groups()
    return f"blk.{index}.{_LAYER_NAMES[part]}.{kind}"


FAMILY = GGUFFamily(llama.build, from_gguf, layout)
