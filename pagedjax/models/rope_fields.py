"""Reads rotary embedding's settings from config.json and GGUF metadata, refusing what it must."""

from __future__ import annotations

from typing import Any

from pagedjax.models.fields import Fields
from pagedjax.models.rope import RopeConfig, yarn_attention_factor

_KINDS = ("default", "linear", "llama3", "yarn")
# These pick frequencies by the length of the sequence: keys in shared pages would be wrong.
_BY_LENGTH = ("dynamic", "longrope", "su")


def from_hf(config: Fields, max_positions: int | None) -> dict[str, Any]:
    """Takes `rope_theta`, `rope_scaling` and, newer, `rope_parameters` out of config.json."""
    config.must_be("partial_rotary_factor", 1.0, 1)
    theta = config.number("rope_theta", 10_000.0)
    values = config.mapping("rope_scaling") | config.mapping("rope_parameters")
    scaling = Fields(values, "rope scaling")
    scaling.must_be("partial_rotary_factor", 1.0, 1)
    kind = _kind(scaling, values.get("rope_type") or values.get("type") or "default")
    rope: dict[str, Any] = {"theta": scaling.number("rope_theta", theta), "kind": kind}
    scaling.ignore(frozenset(("rope_type", "type", "finetuned")))
    if kind in ("linear", "llama3"):
        rope["factor"] = scaling.number("factor")
    if kind == "llama3":
        rope["original_max_positions"] = scaling.integer("original_max_position_embeddings")
        rope["low_freq_factor"] = scaling.number("low_freq_factor")
        rope["high_freq_factor"] = scaling.number("high_freq_factor")
    if kind == "yarn":
        rope |= _yarn_from_hf(scaling, max_positions)
    config.merge(scaling)
    return rope


def from_gguf(metadata: Fields, max_positions: int | None) -> dict[str, Any]:
    """Takes `llama.rope.*` out of GGUF metadata."""
    rope: dict[str, Any] = {"theta": metadata.number("rope.freq_base", 10_000.0)}
    # An older key for the same as scaling type linear.
    legacy = metadata.number("rope.scale_linear", 1.0)
    kind = metadata.must_be("rope.scaling.type", "none", "linear", "yarn")
    factor = metadata.number("rope.scaling.factor", legacy)
    original = metadata.integer("rope.scaling.original_context_length", max_positions)
    attention_factor = metadata.number("rope.scaling.attn_factor", 1.0)
    metadata.ignore(frozenset(("rope.scaling.finetuned",)))
    if kind == "linear" or (kind == "none" and legacy != 1.0):
        rope |= {"kind": "linear", "factor": factor}
    elif kind == "yarn":
        rope |= {
            "kind": "yarn",
            "factor": factor,
            "original_max_positions": original,
            "attention_factor": attention_factor * yarn_attention_factor(factor),
        }
    return rope


def build(rope: dict[str, Any]) -> RopeConfig:
    """The config, once every field was found sound."""
    return RopeConfig(**rope)


def _kind(scaling: Fields, kind: Any) -> Any:
    if kind in _BY_LENGTH:
        scaling.problem(
            f"rope type {kind!r} changes the frequencies with the sequence's length, so that keys "
            f"in pages cannot be shared or kept; pagedjax serves {', '.join(_KINDS)}"
        )
    elif kind not in _KINDS:
        scaling.problem(f"`rope_type` must be one of: {', '.join(_KINDS)}. Got {kind!r:.80}")
    return kind


def _yarn_from_hf(scaling: Fields, max_positions: int | None) -> dict[str, Any]:
    original = scaling.integer("original_max_position_embeddings", max_positions)
    extension = (max_positions or 1) / (original or 1)
    factor = scaling.number("factor", extension)
    mscale, mscale_all = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
    if mscale and mscale_all:
        by_default = yarn_attention_factor(factor, mscale)
        by_default /= yarn_attention_factor(factor, mscale_all)
    else:
        by_default = yarn_attention_factor(factor)
    return {
        "factor": factor,
        "original_max_positions": original,
        "attention_factor": scaling.number("attention_factor", by_default),
        "beta_fast": scaling.number("beta_fast", 32.0),
        "beta_slow": scaling.number("beta_slow", 1.0),
        "truncate": scaling.boolean("truncate", True),
    }
