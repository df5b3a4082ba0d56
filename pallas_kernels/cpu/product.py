"""The product of a few rows with a weight, on a CPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.cpu.library import is_loaded
from pallas_kernels.platform import traced_platform

_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))

type _Three = tuple[jax.Array, jax.Array, jax.Array]  # x, weight, live rows i32[1]

_MOST_LANES = 16  # float32 numbers in the longest vector; gated outputs come in whole ones


def can_multiply(x: jax.Array, weight: jax.Array) -> bool:
    """True when `product` takes these: both float32 or both bfloat16, and the kernels are loaded.

    They are not where the code is traced for another device.
    """
    return (
        is_loaded()
        and traced_platform() == "cpu"
        and x.dtype in _DTYPES
        and weight.dtype == x.dtype
    )


def can_gate(x: jax.Array, weight: jax.Array) -> bool:
    """True when `gated_product` takes these: as `product`, and the width is a multiple of 16."""
    return can_multiply(x, weight) and weight.shape[0] % (2 * _MOST_LANES) == 0


def product(
    x: jax.Array,
    weight: jax.Array,
    dtype: DTypeLike = jnp.float32,
    *,
    num_live: jax.Array | None = None,
) -> jax.Array:
    """x [num_rows, in] times weight [out, in], the weight read as it lies in memory.

    Sums are float32, and a row's results are the same bits whatever is in the rows beside it. Can
    be differentiated and vmapped; derivatives are XLA's products.

    Args:
      x: float32 or bfloat16.
      weight: in x's dtype.
      dtype: of the result, float32 or x's.
      num_live: i32[]; rows from there on are padding: they cost nothing, and come out as zeros.
        None: all are live.

    Returns:
      [num_rows, out].
    """
    return _product(jnp.dtype(dtype), x, weight, _live(x, num_live))


def gated_product(
    x: jax.Array, weight: jax.Array, *, num_live: jax.Array | None = None
) -> jax.Array:
    """silu(gate) * up, where x [num_rows, in] times weight [2 * out, in] is gate, then up.

    Like `product`; gate and up are float32 until they are multiplied.

    Returns:
      [num_rows, out] in x's dtype.
    """
    return _gated_product(x, weight, _live(x, num_live))


def _live(x: jax.Array, num_live: jax.Array | None) -> jax.Array:
    """i32[1]."""
    if num_live is None:
        return jnp.full((1,), x.shape[0], jnp.int32)
    return num_live.reshape(1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _product(dtype: jnp.dtype, x: jax.Array, weight: jax.Array, live: jax.Array) -> jax.Array:
    return _call("pagedjax_product", x, weight, live, weight.shape[0], dtype)


@_product.defjvp
def _product_jvp(
    dtype: jnp.dtype, primals: _Three, tangents: _Three
) -> tuple[jax.Array, jax.Array]:
    _, out_dot = jax.jvp(_plain_product, primals[:2], tangents[:2])
    return _product(dtype, *primals), _of_live(out_dot, primals[2]).astype(dtype)


@jax.custom_jvp
def _gated_product(x: jax.Array, weight: jax.Array, live: jax.Array) -> jax.Array:
    return _call("pagedjax_gated_product", x, weight, live, weight.shape[0] // 2, x.dtype)


@_gated_product.defjvp
def _gated_product_jvp(primals: _Three, tangents: _Three) -> tuple[jax.Array, jax.Array]:
    _, out_dot = jax.jvp(_plain_gated_product, primals[:2], tangents[:2])
    return _gated_product(*primals), _of_live(out_dot, primals[2]).astype(primals[0].dtype)


def _of_live(rows: jax.Array, live: jax.Array) -> jax.Array:
    return jnp.where(jnp.arange(rows.shape[0])[:, None] < live[None], rows, 0.0)


def _call(
    name: str, x: jax.Array, weight: jax.Array, live: jax.Array, width: int, dtype: jnp.dtype
) -> jax.Array:
    out = jax.ShapeDtypeStruct((x.shape[0], width), dtype)
    return jax.ffi.ffi_call(name, out, vmap_method="sequential")(x, weight, live)


def _plain_gated_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    gate, up = jnp.split(_plain_product(x, weight), 2, axis=-1)
    return jax.nn.silu(gate) * up


def _plain_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
