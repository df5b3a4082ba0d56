"""The product of a few rows with a weight, on a CPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.cpu.library import is_loaded

_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))


_MOST_LANES = 16  # float32 numbers in the longest vector; gated outputs come in whole ones


def can_multiply(x: jax.Array, weight: jax.Array) -> bool:
    """True when `product` takes these: the kernels are loaded, both float32 or both bfloat16."""
    return is_loaded() and x.dtype in _DTYPES and weight.dtype == x.dtype


def can_gate(x: jax.Array, weight: jax.Array) -> bool:
    """True when `gated_product` takes these: as `product`, and the width is a multiple of 16."""
    return can_multiply(x, weight) and weight.shape[0] % (2 * _MOST_LANES) == 0


def product(x: jax.Array, weight: jax.Array, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """x [num_rows, in] times weight [out, in], the weight read as it lies in memory.

    Sums are float32, and a row's results are the same bits whatever is in the rows beside it. Can
    be differentiated and vmapped; derivatives are XLA's products.

    Args:
      x: float32 or bfloat16.
      weight: in x's dtype.
      dtype: of the result, float32 or x's.

    Returns:
      [num_rows, out].
    """
    return _product(jnp.dtype(dtype), x, weight)


def gated_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """silu(gate) * up, where x [num_rows, in] times weight [2 * out, in] is gate, then up.

    Like `product`; gate and up are float32 until they are multiplied.

    Returns:
      [num_rows, out] in x's dtype.
    """
    return _gated_product(x, weight)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _product(dtype: jnp.dtype, x: jax.Array, weight: jax.Array) -> jax.Array:
    return _call("pagedjax_product", x, weight, weight.shape[0], dtype)


@_product.defjvp
def _product_jvp(
    dtype: jnp.dtype, primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x, weight), (x_dot, weight_dot) = primals, tangents
    out_dot = _dot(x_dot, weight) + _dot(x, weight_dot)
    return _product(dtype, x, weight), out_dot.astype(dtype)


@jax.custom_jvp
def _gated_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return _call("pagedjax_gated_product", x, weight, weight.shape[0] // 2, x.dtype)


@_gated_product.defjvp
def _gated_product_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    _, out_dot = jax.jvp(_plain_gated_product, primals, tangents)
    return _gated_product(*primals), out_dot


def _plain_gated_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    gate, up = jnp.split(_dot(x, weight), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(x.dtype)


def _call(name: str, x: jax.Array, weight: jax.Array, width: int, dtype: jnp.dtype) -> jax.Array:
    out = jax.ShapeDtypeStruct((x.shape[0], width), dtype)
    return jax.ffi.ffi_call(name, out, vmap_method="sequential")(x, weight)


def _dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
