"""Keys and values in eight bits: one float32 scale for each vector.

Owns the rule by which a vector is rounded; where vectors and scales lie is `kv_update`'s business.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# The largest magnitude that a quantised vector holds.
LARGEST = {jnp.dtype(jnp.float8_e4m3fn): 448.0, jnp.dtype(jnp.int8): 127.0}
SMALLEST_SCALE = 2.0**-126  # of normal float32 numbers: some devices flush smaller ones to zero
_E4M3_SMALLEST_NORMAL, _E4M3_STEPS = 2.0**-6, 2.0**9  # below it values are multiples of 2 ** -9


def quantize(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Each vector of the last axis as 8-bit values and a scale; values * scale is about x.

    All arithmetic is in float32, rounded to nearest even, with `largest` 448 (float8_e4m3fn) or
    127 (int8):

      amax   = max |x|
      scale  = amax * float32(1 / largest)
      values = x * (1 / scale), clamped to [-largest, largest], rounded to the nearest value of
               `dtype`, ties to even (float8: to an even last mantissa bit)

    A vector whose scale would be below 2 ** -126, as that of zeros is, has scale 1 and zeros. A
    vector that holds a NaN or an infinity has scale NaN and zeros: all of it reads as NaN, and
    no other vector is touched.

    Args:
      x: [..., head_dim]; float32, bfloat16 or float16.
      dtype: float8_e4m3fn or int8.

    Returns:
      values [..., head_dim] in `dtype`, and scales f32[...].

    Raises:
      TypeError: `dtype` is another; at trace time.
    """
    dtype = check_dtype(dtype)
    largest = jnp.float32(LARGEST[dtype])
    x = x.astype(jnp.float32)
    amax = jnp.max(jnp.abs(x), axis=-1, initial=0)  # NaN if any is
    scale = amax * jnp.float32(1 / LARGEST[dtype])
    finite = amax < jnp.inf
    scale = jnp.where(scale < SMALLEST_SCALE, 1.0, scale)
    usable = jnp.where(finite, scale, 1.0)[..., None]
    values = jnp.clip(jnp.where(finite[..., None], x, 0.0) * (1 / usable), -largest, largest)
    rounded = jnp.round(values) if dtype == jnp.int8 else _round_to_e4m3(values)
    return rounded.astype(dtype), jnp.where(finite, scale, jnp.nan)


def dequantize(values: jax.Array, scales: jax.Array) -> jax.Array:
    """f32[..., head_dim]: what `quantize` stands for. values [..., head_dim], scales f32[...]."""
    return values.astype(jnp.float32) * scales[..., None]


def check_dtype(dtype: Any) -> jnp.dtype:
    """The dtype of a quantised pool, or TypeError."""
    if jnp.dtype(dtype) not in LARGEST:
        raise TypeError(f"`dtype` must be float8_e4m3fn or int8. Got {jnp.dtype(dtype)}.")
    return jnp.dtype(dtype)


def _round_to_e4m3(x: jax.Array) -> jax.Array:
    """f32 values that float8_e4m3fn holds, so that the cast is exact by whatever route it goes."""
    normal = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=3)
    subnormal = jnp.round(x * _E4M3_STEPS) * (1 / _E4M3_STEPS)
    return jnp.where(jnp.abs(x) < _E4M3_SMALLEST_NORMAL, subnormal, normal)
