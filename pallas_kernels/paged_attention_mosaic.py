"""What the two Mosaic implementations share: pack queries, attend class by class, unpack, merge.

Owns the way from packed tokens to tiles and back. The kernels behind it see tiles only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention_plan import AttentionPlan, Problem, TileClass
from pallas_kernels.merge import add_sinks, merge_states
from pallas_kernels.score_rule import ScoreRule
from pallas_kernels.work_plan import TileShape, pack_queries, unpack_rows

# (q_tiles, kv_pages, page_table, tile_class, keywords) -> o [heads, num_tiles, rows, D] and
# lse f32[heads, num_tiles, rows].
type AttendTiles = Callable[..., tuple[jax.Array, jax.Array]]

PAGE_SIZES = (8, 128)  # smallest and largest


@dataclass(frozen=True, slots=True)
class Limits:
    """What the kernels of an implementation take on each of its chips."""

    head_dims: tuple[int, ...]  # of the pool
    q_dtypes: tuple[Any, ...]


LIMITS = {
    "mosaic_gpu": Limits((64, 128, 256), (jnp.bfloat16, jnp.float16)),
    "mosaic_tpu": Limits((128, 256), (jnp.bfloat16, jnp.float32)),
}


def check_limits(problem: Problem, q_dtype: Any, quantized: bool) -> None:
    """Raises `NotImplementedError` for what no chip of the implementation can do."""
    name, limits = problem.implementation, LIMITS[problem.implementation]
    if not PAGE_SIZES[0] <= problem.page_size <= PAGE_SIZES[1]:
        raise NotImplementedError(
            f"`kv_pages` must have a page_size from {PAGE_SIZES[0]} to {PAGE_SIZES[1]} for "
            f"{name!r}. Got {problem.page_size}. Use such a page size, or 'xla'."
        )
    if problem.head_dim not in limits.head_dims:
        known = [str(head_dim) for head_dim in limits.head_dims]
        raise NotImplementedError(
            f"`kv_pages` must have a head_dim of "
            f"{' or '.join(known) if len(known) == 2 else ', '.join(known)} for {name!r}. Got "
            f"{problem.head_dim}. Make the pool with `padded_head_dim(head_dim, {name!r})` columns "
            f"(the rest zero), or use 'xla'."
        )
    if q_dtype not in limits.q_dtypes:
        known = [jnp.dtype(dtype).name for dtype in limits.q_dtypes]
        raise NotImplementedError(
            f"`q` must be {' or '.join(known)} for {name!r}. Got {q_dtype}. Use 'xla'."
        )
    if not quantized and jnp.dtype(problem.dtype) != q_dtype:
        raise NotImplementedError(
            f"`kv_pages` must have the dtype of `q`, {q_dtype}, for {name!r}. Got "
            f"{problem.dtype}. Use 'xla'."
        )


def paged_attention_mosaic(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    plan: AttentionPlan,
    attend_tiles: AttendTiles,
    *,
    rule: ScoreRule,
    sinks: jax.Array | None,
    alibi_slopes: jax.Array | None,
    kv_scales: jax.Array | None,
    out_dtype: Any,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """`paged_attention` after validation; out out_dtype[num_tokens, N, H] and lse f32.

    Args:
      q: [num_tokens, num_q_heads, head_dim], head_dim at most the pool's.
      kv_pages, page_table: as `paged_attention` takes them.
      plan: made for this problem.
      attend_tiles: the kernels of one chip.
      rule: how scores are made.
      sinks, alibi_slopes: f32[num_q_heads] or None.
      kv_scales: f32[num_pages, 2, num_kv_heads, page_size] or None.
      out_dtype: of out.
      interpret: for the kernels.
    """

    def attend(part: TileClass, dtype: Any) -> tuple[jax.Array, jax.Array]:
        shape, num_kv_heads = part.tiles.shape, kv_pages.shape[2]
        o, lse = attend_tiles(
            pack_queries(q, part.tiles, num_kv_heads, kv_pages.shape[4]),
            kv_pages,
            page_table,
            part,
            rule=rule,
            slopes=None if alibi_slopes is None else row_slopes(alibi_slopes, shape, num_kv_heads),
            kv_scales=kv_scales,
            out_dtype=dtype,
            interpret=interpret,
        )
        out = unpack_rows(o, part.tiles, q.shape[1], 0.0)[:, :, : q.shape[2]]
        return out, unpack_rows(lse, part.tiles, q.shape[1], -jnp.inf)

    exact = plan.prefix is not None or sinks is not None  # more arithmetic follows
    dtype = jnp.float32 if exact else out_dtype
    out, lse = attend(plan.classes[0], dtype)
    for part in plan.classes[1:]:
        other, other_lse = attend(part, dtype)
        mine = (part.tiles.place >= 0)[:, None]
        out = jnp.where(mine[..., None], other, out)
        lse = jnp.where(mine, other_lse, lse)
    if plan.prefix is not None:
        shared, shared_lse = attend(plan.prefix, dtype)
        out, lse = merge_states(jnp.stack([out, shared]), jnp.stack([lse, shared_lse]))
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    return out.astype(out_dtype), lse


def row_slopes(slopes: jax.Array, shape: TileShape, num_kv_heads: int) -> jax.Array:
    """f32[num_q_heads] as f32[heads, rows]: the slope of each row of a tile; 0 in padding."""
    per_head = slopes.reshape(num_kv_heads, -1)
    padding = shape.group * shape.passes - per_head.shape[1]
    per_head = jnp.pad(per_head, ((0, 0), (0, padding)))
    per_head = per_head.reshape(num_kv_heads * shape.passes, 1, shape.group)
    rows = jnp.broadcast_to(
        per_head, (per_head.shape[0], shape.tokens_per_tile, shape.group)
    ).reshape(per_head.shape[0], -1)
    return jnp.pad(rows, ((0, 0), (0, shape.rows - rows.shape[1])))
