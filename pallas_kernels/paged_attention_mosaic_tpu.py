"""TPUs: what is too much for the kernel, and the call of it for one class of tiles."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention_plan import Problem, TileClass
from pallas_kernels.mosaic_tpu_attend import attend_tpu
from pallas_kernels.score_rule import ScoreRule

LANES = 128  # the last axis of a TPU's tile


def attend_tiles(
    q_tiles: jax.Array,  # [heads, num_tiles, rows, head_dim]
    kv_pages: jax.Array,
    page_table: jax.Array,
    part: TileClass,
    *,
    rule: ScoreRule,
    slopes: jax.Array | None,
    kv_scales: jax.Array | None,
    out_dtype: Any,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """One class of tiles: o out_dtype[heads, num_tiles, rows, head_dim], lse f32."""
    return attend_tpu(
        q_tiles,
        kv_pages,
        page_table,
        part.tiles,
        rule=rule,
        config=part.config,
        slopes=slopes,
        kv_scales=kv_scales,
        out_dtype=out_dtype,
        interpret=interpret,
    )


def check(problem: Problem, q_dtype: Any, quantized: bool) -> None:
    """Raises `NotImplementedError` for what the kernel cannot do."""
    if not 8 <= problem.page_size <= 128:
        raise NotImplementedError(
            f"`kv_pages` must have a page_size from 8 to 128 for 'mosaic_tpu'. Got "
            f"{problem.page_size}. Use such a page size, or 'xla'."
        )
    if quantized and problem.page_size != LANES:
        raise NotImplementedError(
            f"`kv_pages` must have page_size {LANES} for 'mosaic_tpu' where `kv_scales` is given: "
            f"the compiler keeps the scales of smaller pages in an order that would have them all "
            f"copied in every call. Got {problem.page_size}. Use page_size {LANES}, or 'xla'."
        )
    if problem.head_dim % LANES or problem.head_dim > 2 * LANES:
        raise NotImplementedError(
            f"`kv_pages` must have a head_dim of 128 or 256 for 'mosaic_tpu'. Got "
            f"{problem.head_dim}. Make the pool with `padded_head_dim(head_dim, 'mosaic_tpu')` "
            f"columns (the rest zero), or use 'xla'."
        )
    if q_dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(
            f"`q` must be bfloat16 or float32 for 'mosaic_tpu'. Got {q_dtype}. Use 'xla'."
        )
    if not quantized and jnp.dtype(problem.dtype) != q_dtype:
        raise NotImplementedError(
            f"`kv_pages` must have the dtype of `q`, {q_dtype}, for 'mosaic_tpu'. Got "
            f"{problem.dtype}. Use 'xla'."
        )
