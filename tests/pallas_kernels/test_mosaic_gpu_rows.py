"""The rows kernel (Hopper prefill), interpreted, equals float64; unused memory holds poison."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference, work_plan
from pallas_kernels.mosaic_gpu_rows import attend_rows
from pallas_kernels.paged_attention_mosaic import row_slopes
from pallas_kernels.quantize import quantize
from pallas_kernels.score_rule import ScoreRule
from pallas_kernels.tuning import KernelConfig
from pallas_kernels.work_plan import TileShape, WorkList
from tests.pallas_kernels.cases import Batch, Shape, error, make_batch, random_batch
from tests.pallas_kernels.joining import join_items, to_tokens
from tests.pallas_kernels.races import no_gpu_race

EXACT, PLAIN = 1e-5, 3e-3  # with P in two parts, and in one of bfloat16
PLAIN_F16 = 1e-3  # in one of float16; mostly 3e-4, more where few values cancel
ROUNDED = 2.0**-8  # of a bfloat16 result


def run(
    shape: Shape,
    batch: Batch,
    *,
    rows: int = 128,
    kv_tile: int = 64,
    stages: int = 2,
    workers: int = 2,
    split: bool = False,
    split_p: bool = True,
    out_dtype: Any = jnp.float32,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: np.ndarray | None = None,  # f32[num_q_heads]
    kv_scales: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """out f32[num_tokens, num_q_heads, head_dim] and lse of the interpreted kernel, no races."""
    q, pool, table, kv_lens, cu_q_lens, num_seqs = (jnp.asarray(a) for a in batch.arrays)
    tile_shape = TileShape.fit(shape.group, rows=rows, multiple=64, kv_tile=kv_tile)
    tiles = work_plan.plan_tiles(
        kv_lens, cu_q_lens, num_seqs, shape=tile_shape, num_tokens=shape.num_tokens,
        sliding_window=sliding_window,
    )  # fmt: skip
    heads = shape.num_kv_heads * tile_shape.passes
    work = work_plan.plan_work(tiles, heads=heads, workers=workers, split=split, min_tiles=1)
    slopes = None
    if alibi_slopes is not None:
        slopes = row_slopes(jnp.asarray(alibi_slopes), tile_shape, shape.num_kv_heads)
    with no_gpu_race():
        o, lse = attend_rows(
            work_plan.pack_queries(q, tiles, shape.num_kv_heads, shape.head_dim),
            pool,
            table,
            work,
            shape=tile_shape,
            rule=ScoreRule(scale or shape.head_dim**-0.5, sliding_window, soft_cap),
            config=KernelConfig("rows", tile_shape.rows, kv_tile, stages, workers, split, split_p),
            slopes=slopes,
            kv_scales=None if kv_scales is None else jnp.asarray(kv_scales),
            out_dtype=out_dtype,
            interpret=True,
        )
        assert o.dtype == out_dtype
        o, lse = np.asarray(o, np.float64), np.asarray(lse)
    return to_tokens(*join_items(o, lse, work, empties_say_so=split), tiles, shape.num_q_heads)


def check(
    shape: Shape, batch: Batch, bound: float, *, pool: np.ndarray | None = None, **options: Any
) -> None:
    """The kernel's results are within `bound` of float64 on the same numbers."""
    names = ("scale", "sliding_window", "soft_cap", "alibi_slopes", "kv_scales")
    same = {name: options[name] for name in names if name in options}
    if pool is not None:
        batch = Batch(batch.q, pool, *batch.arrays[2:])
    out, lse = run(shape, batch, **options)
    expected, expected_lse = reference.paged_attention(*batch.arrays, **same, return_lse=True)
    live = batch.cu_q_lens[int(batch.num_seqs)]
    errors = error(out[:live], expected[:live]), error(lse[:live], expected_lse[:live])
    assert errors[0] <= bound
    assert errors[1] <= (EXACT if options.get("out_dtype") is None else bound)


def batch_of(
    shape: Shape, kv_lens: list[int], q_lens: list[int], dtype: Any = jnp.bfloat16
) -> Batch:
    return make_batch(shape, np.random.default_rng(sum(kv_lens)), kv_lens, q_lens, dtype)


def test_chunks_of_prompts_see_their_own_past_with_padding_rows_in_every_tile() -> None:
    """Group 3: 42 tokens a tile, two rows over; lengths at and past tile and page edges."""
    shape = Shape(16, 1, 3, 64, 4, 120, 200)
    batch = batch_of(shape, [131, 64, 17], [50, 43, 17])
    check(shape, batch, EXACT)


def test_plain_p_and_a_result_in_the_dtype_of_the_queries() -> None:
    shape = Shape(32, 1, 4, 128, 2, 40, 150)
    batch = batch_of(shape, [150, 8], [32, 8])
    check(shape, batch, PLAIN + ROUNDED, kv_tile=128, split_p=False, out_dtype=jnp.bfloat16)


def test_windows_skip_the_tiles_of_one_warpgroup_and_not_of_the_other() -> None:
    shape = Shape(8, 1, 1, 64, 2, 128, 330)
    batch = batch_of(shape, [330], [128])
    check(shape, batch, EXACT, sliding_window=40)


def test_soft_caps_and_slopes_in_float16_with_one_consumer() -> None:
    shape = Shape(16, 2, 2, 64, 2, 40, 100)
    batch = batch_of(shape, [100, 33], [7, 33], jnp.float16)
    slopes = np.array([0.5, 0.25, 0.0, 1.0], np.float32)
    check(shape, batch, EXACT, rows=64, stages=1, soft_cap=2.0, alibi_slopes=slopes, scale=0.3)


def test_a_page_larger_than_a_tile_is_copied_in_slices() -> None:
    shape = Shape(128, 1, 8, 64, 2, 20, 210)
    batch = batch_of(shape, [210], [20])
    check(shape, batch, EXACT)


def test_rows_may_be_cut_and_empty_items_say_so() -> None:
    shape = Shape(16, 1, 4, 64, 3, 40, 250)
    batch = batch_of(shape, [250, 40], [30, 2])
    check(shape, batch, EXACT, split=True, workers=3)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.int8])
def test_quantised_pages(dtype: Any) -> None:
    """Scales of unused positions are NaN; those of used ones differ by a thousand."""
    shape = Shape(16, 1, 4, 128 if dtype == jnp.int8 else 64, 2, 34, 140)
    batch = batch_of(shape, [140], [34])
    values, scales = quantized(batch, dtype)
    check(shape, batch, EXACT, pool=values, kv_scales=scales, rows=128 if dtype == jnp.int8 else 64)


def quantized(batch: Batch, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """8-bit pages and their scales, each position's its own; what was NaN is poison there too."""
    pool = batch.kv_pages.astype(np.float32)
    unused = np.isnan(pool).any(axis=-1)
    values, scales = (np.array(a) for a in quantize(jnp.asarray(np.nan_to_num(pool)), dtype))
    scales = scales * np.random.default_rng(0).choice([1e-3, 0.1, 1.0], scales.shape)
    values[unused] = 127 if dtype == jnp.int8 else np.nan
    scales[unused] = np.nan
    return values, scales.astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(16))
def test_random_batches(seed: int) -> None:
    """The product of sizes, dtypes and options, sampled."""
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([8, 16, 32, 64, 128]))
    kv_tile = int(rng.choice([64, 128] if page_size > 8 else [64]))
    head_dim = int(rng.choice([64, 128, 192, 256]))
    group = int(rng.choice([1, 2, 3, 4, 7, 8, 16, 130]))
    shape = Shape(page_size, int(rng.choice([1, 2])), group, head_dim, 4, 60, 300)
    dtype = jnp.bfloat16 if rng.random() < 0.5 else jnp.float16
    batch = random_batch(shape, rng, dtype)
    split_p = bool(rng.random() < 0.7)
    options: dict[str, Any] = {
        "rows": int(rng.choice([64, 128])),
        "kv_tile": kv_tile,
        "stages": int(rng.choice([1, 2, 3])),
        "workers": int(rng.choice([1, 3, 7])),
        "split": bool(rng.random() < 0.3),
        "split_p": split_p,
    }
    if rng.random() < 0.4:
        options["sliding_window"] = int(rng.choice([1, 5, 64, 100]))
    if rng.random() < 0.3:
        options["soft_cap"] = 3.0
    if rng.random() < 0.3:
        options["alibi_slopes"] = rng.uniform(0, 1, shape.num_q_heads).astype(np.float32)
    bound = EXACT if split_p else PLAIN if dtype == jnp.bfloat16 else PLAIN_F16
    if rng.random() < 0.4:
        quantised = jnp.int8 if rng.random() < 0.5 else jnp.float8_e4m3fn
        options["kv_scales"] = None
        pool, options["kv_scales"] = quantized(batch, quantised)
        check(shape, batch, EXACT if split_p else PLAIN_F16, pool=pool, **options)
    else:
        check(shape, batch, bound, **options)


def refused(**changes: Any) -> None:
    """Traces a call of good sizes but for `changes`."""
    page_size, head_dim = changes.pop("page_size", 16), changes.pop("head_dim", 64)
    pool_dtype = changes.pop("pool_dtype", jnp.bfloat16)
    rows, kv_tile = changes.pop("rows", 128), changes.pop("kv_tile", 64)
    work = WorkList(
        jnp.zeros((1, 8), jnp.int32), jnp.zeros((3,), jnp.int32), jnp.zeros((2,), jnp.int32), False
    )
    attend_rows(
        jnp.zeros((1, 1, rows, head_dim), jnp.bfloat16),
        jnp.zeros((4, 2, 1, page_size, head_dim), pool_dtype),
        jnp.zeros((1, 4), jnp.int32),
        work,
        shape=TileShape(1, 1, rows, rows, kv_tile),
        rule=ScoreRule(1.0),
        config=KernelConfig("rows", rows, changes.pop("config_tile", kv_tile), 2, 2),
        **changes,
    )


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"rows": 32}, NotImplementedError, "64 or 128 rows.*Got 32"),
        ({"kv_tile": 32}, NotImplementedError, "kv_tile of 64 or 128.*Got 32"),
        ({"config_tile": 128}, ValueError, "`config` must have the sizes of `shape`"),
        ({"page_size": 4}, NotImplementedError, "page_size.*Got 4"),
        ({"page_size": 8, "kv_tile": 128}, NotImplementedError, "at most 8 pages.*Got 16"),
        ({"head_dim": 96}, NotImplementedError, "head_dim.*Got 96"),
        ({"pool_dtype": jnp.float32}, NotImplementedError, "Got float32"),
        ({"pool_dtype": jnp.float16}, NotImplementedError, "Got bfloat16"),
        ({"pool_dtype": jnp.int8}, ValueError, "`kv_scales` must be given.*Got none with int8"),
        ({"head_dim": 256, "kv_tile": 128}, NotImplementedError, "bytes of shared memory"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(
    changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        refused(**changes)
