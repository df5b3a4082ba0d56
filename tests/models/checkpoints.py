"""Tiny random Llama checkpoints as files, for tests. NumPy alone: it knows nothing of pagedjax."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]

LENGTH = 24  # tokens of the sequences compared


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A config.json: 2 layers, 4 query heads on 2, head_dim that is not embed / heads."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": 40,
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    return config | changes


def tiny_tensors(config: dict[str, Any], seed: int = 0) -> Tensors:
    """float32 tensors under Hugging Face's names, large enough that every part matters."""
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}

    def add(name: str, *shape: int) -> None:
        scale = 1.0 / np.sqrt(shape[-1]) if len(shape) > 1 else 0.3
        tensors[name] = rng.normal(0, scale, shape).astype(np.float32)

    embed, ffw, vocab = (
        config[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    add("model.embed_tokens.weight", vocab, embed)
    for layer in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        for name, rows, columns in (
            (f"{attention}.q_proj", q, embed),
            (f"{attention}.k_proj", kv, embed),
            (f"{attention}.v_proj", kv, embed),
            (f"{attention}.o_proj", embed, q),
            (f"{mlp}.gate_proj", ffw, embed),
            (f"{mlp}.up_proj", ffw, embed),
            (f"{mlp}.down_proj", embed, ffw),
        ):
            add(f"{name}.weight", rows, columns)
            if config.get("attention_bias" if "self_attn" in name else "mlp_bias"):
                add(f"{name}.bias", rows)
        add(f"model.layers.{layer}.input_layernorm.weight", embed)
        add(f"model.layers.{layer}.post_attention_layernorm.weight", embed)
    add("model.norm.weight", embed)
    if not config["tie_word_embeddings"]:
        add("lm_head.weight", vocab, embed)
    return tensors


def tiny_tokens(config: dict[str, Any], length: int = LENGTH) -> np.ndarray:
    """i32[length]."""
    return np.random.default_rng(7).integers(0, config["vocab_size"], length).astype(np.int32)


def write_hf(
    directory: Path, config: dict[str, Any], tensors: Tensors, *, num_shards: int = 1
) -> Path:
    """A directory with config.json and model.safetensors, or shards with an index."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::num_shards])
        save_file(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
