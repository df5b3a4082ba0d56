"""Rotary position embedding: frequencies of every scaling variant, and the rotation itself.

Frequencies depend on the configuration alone, never on a sequence's length: keys are rotated once,
when they are written to their page, and pages are shared between sequences of any length. Variants
that change with the length (dynamic NTK, longrope) can therefore not be served, and are refused
where a config is read. Frequencies are made in float64 on the host, angles in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.errors import ModelFormatError

type RopeKind = Literal["default", "linear", "llama3", "yarn", "divisors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Base frequency and scaling.

    Attributes:
      theta: base of the wavelengths.
      kind: how the frequencies are scaled.
      factor: context extension (all kinds but default and divisors).
      original_max_positions: context length before the extension (llama3, yarn).
      low_freq_factor, high_freq_factor: the band that llama3 blends.
      beta_fast, beta_slow: rotations that bound yarn's ramp.
      truncate: whether yarn rounds the ramp's ends to whole dimensions.
      attention_factor: what cosine and sine are multiplied by (yarn).
      divisors: head_dim / 2 numbers, each divides one frequency (a GGUF file's `rope_freqs`).
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Checks what the formulas divide by or take a logarithm of."""
        for name in ("theta", "factor", "attention_factor"):
            _check_positive(name, getattr(self, name))
        if self.kind in ("llama3", "yarn") and self.original_max_positions < 1:
            raise ModelFormatError(
                f"`original_max_position_embeddings` must be at least 1 for rope type {self.kind}. "
                f"Got {self.original_max_positions}."
            )
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ModelFormatError(
                f"`low_freq_factor` must be positive and below `high_freq_factor`. "
                f"Got {self.low_freq_factor} and {self.high_freq_factor}."
            )
        if self.kind == "yarn":
            _check_positive("beta_fast", self.beta_fast)
            _check_positive("beta_slow", self.beta_slow)
            if self.theta == 1.0:
                raise ModelFormatError("`rope_theta` must not be 1 for rope type yarn. Got 1.")
        for divisor in self.divisors:
            _check_positive("rope_freqs", divisor)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """f64[head_dim / 2]: radians that each pair of dimensions turns by per position."""
    plain = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim)
    if rope.kind == "divisors":
        return plain / _checked_divisors(rope, head_dim)
    return plain


def rotation(rope: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine for positions i32[num_tokens]: each f32[num_tokens, 1, head_dim / 2]."""
    frequencies = jnp.asarray(inverse_frequencies(rope, head_dim), jnp.float32)
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies[None, None, :]
    scale = jnp.float32(rope.attention_factor)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns x [num_tokens, num_heads, head_dim], first half against second half, in float32.

    Written over an axis of the two halves, which one loop can run through: put together from the
    turned halves, it takes XLA five on a CPU.
    """
    halves = x.astype(jnp.float32).reshape(*x.shape[:2], 2, -1)
    signed_sin = jnp.stack([-sin, sin], axis=2)  # f32[num_tokens, 1, 2, head_dim / 2]
    turned = halves * cos[:, :, None] + jnp.flip(halves, axis=2) * signed_sin
    return turned.reshape(x.shape).astype(x.dtype)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """The factor on cosine and sine that goes with an extension of the context by `factor`."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Long wavelengths are stretched, short ones kept, those between blended.

    wavelength:   0 .. original/high   kept | blended | original/low .. stretched
    """
    turns = rope.original_max_positions * plain / (2 * math.pi)  # over the original context
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / rope.factor


def _yarn(rope: RopeConfig, plain: np.ndarray, head_dim: int) -> np.ndarray:
    """Blends by dimension: those that turn often keep their frequency, the others are stretched."""

    def dimension(turns: float) -> float:
        ratio = rope.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001  # a step instead of a division by zero
    stretch = np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)
    return (1.0 - stretch) * plain + stretch * plain / rope.factor


def _checked_divisors(rope: RopeConfig, head_dim: int) -> np.ndarray:
    if len(rope.divisors) != head_dim // 2:
        raise ModelFormatError(
            f"`rope_freqs` must hold head_dim / 2 = {head_dim // 2} numbers. "
            f"Got {len(rope.divisors)}."
        )
    return np.asarray(rope.divisors, np.float64)


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ModelFormatError(f"`{name}` must be a positive finite number. Got {value!r}.")
