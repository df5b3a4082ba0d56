"""Building blocks of the decoders: products, norms, dense attention. Knows nothing of pages.

Weights are stored [out, in]: a row for each output. On a CPU that layout's product is the faster
one, and it is the layout of the files. Products accumulate in float32 whatever the dtype, and
float32 products are never rounded to a faster format. Norms and softmax are float32.

A quantised weight is 8-bit values and a float32 scale for each output: its product is that of the
values, which x's dtype holds exactly, times the scale.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import cpu
from pallas_kernels.platform import traced_platform
from pallas_kernels.quantize import quantize

# Measured on a CPU: see `_is_better_on_the_right`.
_FEW_ROWS = 64
_NARROW_TILE = 16
_WIDE = 16  # times as many outputs as inputs
_FEW_ROWS_WIDE = 8

_INIT = nnx.initializers.normal(0.02)  # what GPT-2 and the Llama family start training from


def initial(rngs: nnx.Rngs | None, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """A matrix to start training from; zeros without `rngs`, for weights that a file will fill."""
    return jnp.zeros(shape, dtype) if rngs is None else _INIT(rngs.params(), shape, dtype)


def product(
    x: jax.Array,
    weight: jax.Array,
    dtype: jnp.dtype | None = None,
    *,
    num_live: jax.Array | None = None,
) -> jax.Array:
    """x [num_rows, in] times weight [out, in] in x's dtype or 8-bit: [num_rows, out].

    `dtype`: of the result, x's or float32; None: float32. `num_live`: i32[], rows from there on
    are padding and need not be multiplied; None: all are wanted.
    """
    dtype = dtype or jnp.dtype(jnp.float32)
    if cpu.can_multiply(x, weight):
        return cpu.product(x, weight, dtype, num_live=num_live)
    return _xla_product(x, weight).astype(dtype)


def _xla_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    if weight.dtype.itemsize == 1:
        # Not before x is known: XLA would widen the weights of all layers first, and keep them.
        x, weight = jax.lax.optimization_barrier((x, weight))
        weight = weight.astype(x.dtype)  # exact
    if traced_platform() != "cpu":
        return _dot(x, weight)
    if x.shape[0] == 1:
        return _one_row(x, weight)
    if _is_better_on_the_right(x, weight):
        # Behind a barrier, or XLA turns it back.
        return jax.lax.optimization_barrier(_dot(weight, x)).T
    return _dot(x, weight)


def _is_better_on_the_right(x: jax.Array, weight: jax.Array) -> bool:
    """Whether XLA's product on a CPU is faster as that of the weight with x.

    It repacks what is on the right, and the weight is larger than a few rows of x. bfloat16 is
    computed in tiles of 16 columns, which fewer rows would waste. What comes out is transposed:
    free in the loop that reads it, but not where a wide output (logits) is used as it is.
    """
    num_rows, is_narrow = x.shape[0], x.dtype.itemsize < 4
    if is_narrow and num_rows < _NARROW_TILE:
        return False
    is_wide = weight.shape[0] > _WIDE * weight.shape[1]
    return num_rows <= (_FEW_ROWS_WIDE if is_wide else _FEW_ROWS)


def _one_row(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`product` of one row on a CPU, where XLA is slow at it in any plain way.

    A float32 one runs on one core unless there is a batch to share out. A narrower one has no
    kernel at all (some ten times the time of two rows).
    """
    num_outputs, num_inputs = weight.shape
    if x.dtype != jnp.float32:
        return _dot(jnp.pad(x, ((0, 1), (0, 0))), weight)[:1]
    if num_outputs % 2:
        return _dot(x, weight)
    halves = weight.reshape(2, num_outputs // 2, num_inputs)
    pair = jnp.broadcast_to(x, (2, 1, num_inputs))
    return _dot(pair, halves).reshape(1, num_outputs)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """The last axis of a with that of b, batched over what comes before two axes; float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    last, batch = a.ndim - 1, tuple(range(a.ndim - 2))
    return jax.lax.dot_general(
        a,
        b,
        (((last,), (last,)), (batch, batch)),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


class Linear(nnx.Module):
    """`x @ weight.T * scale + bias` with `weight [out, in]`, `scale` f32[out] if it is 8-bit."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = False,
        dtype: jnp.dtype,
        weight_dtype: jnp.dtype | None = None,
        rngs: nnx.Rngs | None,
    ) -> None:
        """`weight_dtype`: int8 or float8_e4m3fn, to be used but not trained; None: `dtype`."""
        weight, scale = initial(rngs, (out_features, in_features), dtype), None
        if weight_dtype is not None:
            weight, scale = quantize(weight, weight_dtype)
        self.weight = nnx.Param(weight)
        self.scale = None if scale is None else nnx.Param(scale)
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype)) if use_bias else None

    @property
    def is_plain(self) -> bool:
        """Neither bias nor scale."""
        return self.scale is None and self.bias is None

    def __call__(self, x: jax.Array, num_live: jax.Array | None = None) -> jax.Array:
        """x [num_rows, in] -> [num_rows, out] in x's dtype; `num_live` as for `product`."""
        if self.is_plain:
            return product(x, self.weight[...], x.dtype, num_live=num_live)
        out = product(x, self.weight[...], num_live=num_live)
        if self.scale is not None:
            out = out * self.scale[...][None, :]
        if self.bias is not None:
            out = out + self.bias[...].astype(jnp.float32)[None, :]
        return out.astype(x.dtype)


class Embedding(nnx.Module):
    """A vector for each token; also the output projection of a model that ties the two."""

    def __init__(
        self, vocab_size: int, embed_dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs | None
    ) -> None:
        self.weight = nnx.Param(initial(rngs, (vocab_size, embed_dim), dtype))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """i32[num_tokens] -> [num_tokens, embed_dim]."""
        return jnp.take(self.weight[...], tokens, axis=0, mode="clip")


class RMSNorm(nnx.Module):
    """Scales each row to unit root mean square, then by a learnt weight; in float32."""

    def __init__(self, dim: int, *, epsilon: float, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.ones((dim,), dtype))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [num_rows, dim] -> the same shape and dtype."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        unit = wide * jax.lax.rsqrt(mean_square + jnp.float32(self.epsilon))
        return (unit * self.weight[...].astype(jnp.float32)[None, :]).astype(x.dtype)


def gated(gate_up: Linear, x: jax.Array, num_live: jax.Array | None = None) -> jax.Array:
    """`swiglu` of a layer's outputs, gate first: x [num_rows, in] -> [num_rows, ffw_dim].

    `num_live` as for `product`.
    """
    weight = gate_up.weight[...]
    if gate_up.is_plain and cpu.can_gate(x, weight):
        return cpu.gated_product(x, weight, num_live=num_live)
    return swiglu(gate_up(x, num_live))


def swiglu(gate_up: jax.Array) -> jax.Array:
    """[num_rows, 2 * ffw_dim], gate first -> silu(gate) * up, [num_rows, ffw_dim]."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


def dense_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, sliding_window: int | None = None
) -> jax.Array:
    """Causal attention without pages, every sequence from position 0.

    Args:
      q: [batch, length, num_q_heads, head_dim].
      k, v: [batch, length, num_kv_heads, head_dim].
      sliding_window: a query sees the last so many positions, its own included.

    Returns:
      [batch, length, num_q_heads, head_dim] in q's dtype.
    """
    batch, length, num_q_heads, head_dim = q.shape
    grouped = q.reshape(batch, length, k.shape[2], -1, head_dim)  # K groups of G query heads
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    scores = jnp.einsum(
        "btkgh,bskh->bkgts", grouped, k, precision=precision, preferred_element_type=jnp.float32
    )
    scores = scores * jnp.float32(head_dim**-0.5)
    query, key = jnp.arange(length)[:, None], jnp.arange(length)[None, :]
    visible = key <= query
    if sliding_window is not None:
        visible &= key > query - sliding_window
    scores = jnp.where(visible[None, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum(
        "bkgts,bskh->btkgh", weights, v, precision=precision, preferred_element_type=jnp.float32
    )
    return out.reshape(batch, length, num_q_heads, head_dim).astype(q.dtype)
