"""The product of a few rows with a weight, on a CPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.cpu.library import is_loaded

_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))


def can_multiply(x: jax.Array, weight: jax.Array) -> bool:
    """True when `product` takes these: the kernels are loaded, both float32 or both bfloat16."""
    return is_loaded() and x.dtype in _DTYPES and weight.dtype == x.dtype


def product(x: jax.Array, weight: jax.Array, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """x [num_rows, in] times weight [out, in], the weight read as it lies in memory.

    Sums are float32, in an order that depends on `in` alone: a row's results are the same bits
    whatever rows are beside it. Can be differentiated and vmapped; derivatives are XLA's products.

    Args:
      x: float32 or bfloat16.
      weight: in x's dtype.
      dtype: of the result, float32 or x's.

    Returns:
      [num_rows, out].
    """
    return _product(jnp.dtype(dtype), x, weight)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _product(dtype: jnp.dtype, x: jax.Array, weight: jax.Array) -> jax.Array:
    out = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), dtype)
    call = jax.ffi.ffi_call("pagedjax_product", out, vmap_method="sequential")
    return call(x, weight)


@_product.defjvp
def _product_jvp(
    dtype: jnp.dtype, primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x, weight), (x_dot, weight_dot) = primals, tangents
    dot = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    out_dot = dot(x_dot, weight) + dot(x, weight_dot)
    return _product(dtype, x, weight), out_dot.astype(dtype)
