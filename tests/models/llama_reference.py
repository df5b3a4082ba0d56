"""Llama once more, in NumPy and float64, head by head: what our decoder is compared with.

Reads the names and fields of Hugging Face's files. Written from the papers' formulas, slow on
purpose; shares nothing with pagedjax.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def logits(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], tokens: Any) -> np.ndarray:
    """f64[length, vocab_size]."""
    weights = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    eps = config["rms_norm_eps"]
    x = weights["model.embed_tokens.weight"][np.asarray(tokens)]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        normed = _rms_norm(x, weights[f"{prefix}input_layernorm.weight"], eps)
        x = x + _attention(config, weights, f"{prefix}self_attn.", normed)
        normed = _rms_norm(x, weights[f"{prefix}post_attention_layernorm.weight"], eps)
        gate = _linear(weights, f"{prefix}mlp.gate_proj", normed)
        up = _linear(weights, f"{prefix}mlp.up_proj", normed)
        x = x + _linear(weights, f"{prefix}mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
    x = _rms_norm(x, weights["model.norm.weight"], eps)
    tied = config["tie_word_embeddings"]
    return x @ weights["model.embed_tokens.weight" if tied else "lm_head.weight"].T


def _attention(
    config: Mapping[str, Any], weights: Mapping[str, np.ndarray], prefix: str, x: np.ndarray
) -> np.ndarray:
    head_dim = config["head_dim"]
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    q, k, v = (_linear(weights, f"{prefix}{name}_proj", x) for name in "qkv")
    window = config.get("sliding_window") or len(x)
    heads = []
    for head in range(config["num_attention_heads"]):
        q_head = _rope(config, _head(q, head, head_dim))
        k_head = _rope(config, _head(k, head // group, head_dim))
        scores = q_head @ k_head.T / math.sqrt(head_dim)
        for row in range(len(x)):
            scores[row, row + 1 :] = -np.inf
            scores[row, : max(0, row - window + 1)] = -np.inf
        weight = np.exp(scores - scores.max(axis=1, keepdims=True))
        weight /= weight.sum(axis=1, keepdims=True)
        heads.append(weight @ _head(v, head // group, head_dim))
    return _linear(weights, f"{prefix}o_proj", np.concatenate(heads, axis=1))


def _rope(config: Mapping[str, Any], x: np.ndarray) -> np.ndarray:
    """Complex numbers: dimension i is the real part of pair i, dimension i + half the imaginary."""
    half = x.shape[1] // 2
    pairs = x[:, :half] + 1j * x[:, half:]
    scaling = config.get("rope_scaling") or {}
    for pair in range(half):
        frequency = config["rope_theta"] ** (-2 * pair / x.shape[1])
        frequency *= _stretch(scaling, frequency)
        pairs[:, pair] *= np.exp(1j * frequency * np.arange(len(x)))
    return np.concatenate([pairs.real, pairs.imag], axis=1)


def _stretch(scaling: Mapping[str, Any], frequency: float) -> float:
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind is None:
        return 1.0
    if kind == "linear":
        return 1.0 / scaling["factor"]
    assert kind == "llama3", "yarn is compared with figures in tests/data"
    wavelength = 2 * math.pi / frequency
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    longest_kept = original / scaling["high_freq_factor"]
    shortest_stretched = original / scaling["low_freq_factor"]
    if wavelength <= longest_kept:
        return 1.0
    if wavelength >= shortest_stretched:
        return 1.0 / factor
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = (original / wavelength - low) / (high - low)
    return share + (1 - share) / factor


def _head(x: np.ndarray, index: int, head_dim: int) -> np.ndarray:
    return x[:, index * head_dim : (index + 1) * head_dim]


def _linear(weights: Mapping[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps) * weight
