"""TPUs: what is too much for the kernel, and the call of it for one class of tiles."""

from typing import Any

import jax

from pallas_kernels.attention_plan import Problem, TileClass
from pallas_kernels.mosaic_tpu_attend import attend_tpu
from pallas_kernels.paged_attention_mosaic import check_limits
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
    check_limits(problem, q_dtype, quantized)
    if quantized and problem.page_size != LANES:
        raise NotImplementedError(
            f"`kv_pages` must have page_size {LANES} for 'mosaic_tpu' where `kv_scales` is given: "
            f"the compiler keeps the scales of smaller pages in an order that would have them all "
            f"copied in every call. Got {problem.page_size}. Use page_size {LANES}, or 'xla'."
        )
