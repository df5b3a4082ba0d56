"""NVIDIA GPUs: which kernel runs a class of tiles, and what is too much for it.

  columns  Hopper decode: wgmma with the operands swapped
  rows     Hopper prefill: wgmma
  mma      every other chip, both classes

Owns the limits (they raise `NotImplementedError` at trace time) and the merge of cut rows.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention_plan import Problem, TileClass
from pallas_kernels.mosaic_gpu_columns import attend_columns
from pallas_kernels.mosaic_gpu_merge import merge_items
from pallas_kernels.mosaic_gpu_mma import attend_mma
from pallas_kernels.mosaic_gpu_rows import attend_rows
from pallas_kernels.mosaic_gpu_target import target
from pallas_kernels.paged_attention_mosaic import check_limits
from pallas_kernels.score_rule import ScoreRule

_KERNELS = {"columns": attend_columns, "rows": attend_rows, "mma": attend_mma}
MIN_ARCH = (8, 0)
MIN_COPY = 1024  # bytes of a page's copy before sm_90: 8 a thread


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
    config, work = part.config, part.work
    assert work is not None
    transposed = config.kernel == "columns"
    o, lse = _KERNELS[config.kernel](
        q_tiles,
        kv_pages,
        page_table,
        work,
        shape=part.tiles.shape,
        rule=rule,
        config=config,
        slopes=slopes,
        kv_scales=kv_scales,
        out_dtype=jnp.float32 if config.split or transposed else out_dtype,
        interpret=interpret,
    )
    if config.split:
        o, lse = merge_items(o, lse, work.row_items, transposed=transposed, interpret=interpret)
    heads, num_tiles = q_tiles.shape[:2]
    o = o.reshape(num_tiles, heads, *o.shape[1:])
    if transposed:
        o = o.swapaxes(2, 3)
    lse = lse.reshape(num_tiles, heads, -1)
    return o.swapaxes(0, 1).astype(out_dtype), lse.swapaxes(0, 1)


def check(problem: Problem, q_dtype: Any, quantized: bool) -> None:
    """Raises `NotImplementedError` for what no kernel here can do on the chip traced for."""
    chip = target()
    if chip.arch < MIN_ARCH:
        raise NotImplementedError(
            f"`implementation` 'mosaic_gpu' needs compute capability 8.0 or newer. Got "
            f"{chip.arch[0]}.{chip.arch[1]}. Use 'xla'."
        )
    check_limits(problem, q_dtype, quantized)
    if quantized and chip.arch < (9, 0) and problem.page_size * problem.head_dim < MIN_COPY:
        raise NotImplementedError(
            f"`kv_pages` must hold {MIN_COPY} bytes of a head's keys in a page on compute "
            f"capability {chip.arch[0]}.{chip.arch[1]}. Got page_size {problem.page_size} of "
            f"head_dim {problem.head_dim} in {problem.dtype}. Use larger pages, or 'xla'."
        )
    if problem.dtype == "float8_e4m3fn" and chip.arch < (8, 9):
        raise NotImplementedError(
            f"`kv_pages` must be int8 or 16-bit on compute capability {chip.arch[0]}."
            f"{chip.arch[1]}: it has no float8. Got {problem.dtype}."
        )
