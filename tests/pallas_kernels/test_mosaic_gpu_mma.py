"""The mma.sync kernel, interpreted in its TMA form, against float64; unused values are poison."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import reference
from pallas_kernels.mosaic_gpu_mma import attend_mma
from pallas_kernels.score_rule import ScoreRule
from pallas_kernels.tuning import KernelConfig
from pallas_kernels.work_plan import (
    QueryTiles,
    TileShape,
    WorkList,
    pack_queries,
    plan_tiles,
    plan_work,
    unpack_rows,
)
from tests.pallas_kernels import cases, races

races.interpret_mma()

SPLIT_P_ERROR = 1e-5
PLAIN_ERROR = 3e-3


def run(
    shape: cases.Shape,
    batch: cases.Batch,
    *,
    rows: int = 16,
    kv_tile: int = 64,
    stages: int = 2,
    workers: int = 3,
    split: bool = True,
    split_p: bool = True,
    dtype: Any = jnp.bfloat16,
    alibi_slopes: np.ndarray | None = None,
    kv_scales: np.ndarray | None = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """out [num_tokens, num_q_heads, head_dim] and lse [num_tokens, num_q_heads] of the kernel."""
    q, pool, table, kv_lens, cu_q_lens, num_seqs = (jnp.asarray(a) for a in batch.arrays)
    tile_shape = TileShape.fit(shape.group, rows=rows, multiple=rows, kv_tile=kv_tile)
    tiles = plan_tiles(
        kv_lens, cu_q_lens, num_seqs, shape=tile_shape, num_tokens=shape.num_tokens,
        sliding_window=options.get("sliding_window"),
    )  # fmt: skip
    heads = shape.num_kv_heads * tile_shape.passes
    work = plan_work(tiles, heads=heads, workers=workers, split=split, min_tiles=1)
    rule = ScoreRule(options.pop("scale", None) or shape.head_dim**-0.5, **options)
    with races.no_gpu_race():
        o, lse = attend_mma(
            pack_queries(q, tiles, shape.num_kv_heads, shape.head_dim), pool, table, work,
            shape=tile_shape,
            rule=rule,
            config=KernelConfig("mma", rows, kv_tile, stages, workers, split, split_p),
            slopes=None if alibi_slopes is None else _row_slopes(alibi_slopes, tile_shape),
            kv_scales=None if kv_scales is None else jnp.asarray(kv_scales),
            out_dtype=jnp.float32 if split else dtype,
            interpret=True,
        )  # fmt: skip
        o, lse = np.asarray(o.astype(jnp.float32)), np.asarray(lse)
    return _join(o, lse, work, tiles, heads, shape.num_q_heads)


def _join(
    o: np.ndarray, lse: np.ndarray, work: WorkList, tiles: QueryTiles, heads: int, num_q_heads: int
) -> tuple[np.ndarray, np.ndarray]:
    """The items of each row as one, in float64, and rows as tokens."""
    items, bounds = np.asarray(work.items), np.asarray(work.row_items)
    num_rows = tiles.num_tiles * heads
    out = np.zeros((num_rows, *o.shape[1:]))
    total = np.full((num_rows, o.shape[1]), -np.inf)
    for row in range(num_rows):
        mine = [i for i in range(bounds[row], bounds[row + 1]) if items[i, 2] < items[i, 3]]
        if mine:
            out[row], total[row] = reference.merge_states(o[mine], lse[mine])
    out = np.moveaxis(out.reshape(tiles.num_tiles, heads, *o.shape[1:]), 1, 0)
    total = np.moveaxis(total.reshape(tiles.num_tiles, heads, -1), 1, 0)
    return (
        np.asarray(unpack_rows(jnp.asarray(out, jnp.float32), tiles, num_q_heads, 0.0)),
        np.asarray(unpack_rows(jnp.asarray(total, jnp.float32), tiles, num_q_heads, -np.inf)),
    )


def _row_slopes(alibi_slopes: np.ndarray, shape: TileShape) -> jax.Array:
    """f32[heads, rows] of f32[num_q_heads] where the passes divide a group evenly."""
    per_head = alibi_slopes.reshape(-1, shape.group)
    slopes = np.tile(per_head, (1, shape.tokens_per_tile))
    return jnp.asarray(np.pad(slopes, ((0, 0), (0, shape.rows - slopes.shape[1]))))


def check(
    shape: cases.Shape, batch: cases.Batch, *, bound: float, **options: Any
) -> tuple[float, float]:
    known = ("scale", "sliding_window", "soft_cap", "alibi_slopes")
    out, lse = run(shape, batch, **options)
    rule = {name: options[name] for name in known if name in options}
    expected, expected_lse = reference.paged_attention(*batch.arrays, **rule, return_lse=True)
    errors = cases.error(out, expected), cases.error(lse, expected_lse)
    assert max(errors[0], errors[1]) <= bound, errors
    return errors


def test_decode_smoke() -> None:
    shape = cases.Shape(16, 2, 4, 64, 4, 8, 200)
    batch = cases.make_batch(
        shape, np.random.default_rng(0), [200, 65, 64, 1], [1, 3, 0, 1], jnp.bfloat16
    )
    print(check(shape, batch, bound=SPLIT_P_ERROR))
    print(check(shape, batch, bound=PLAIN_ERROR, split_p=False))
