"""The swapped Hopper decode kernel, interpreted, against float64; unused values are poison."""

import dataclasses
import itertools
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mosaic_gpu_columns, reference
from pallas_kernels.mosaic_gpu_columns import attend_columns
from pallas_kernels.mosaic_gpu_merge import merge_items
from pallas_kernels.paged_attention_mosaic import row_slopes
from pallas_kernels.quantize import LARGEST
from pallas_kernels.score_rule import ScoreRule
from pallas_kernels.tuning import KernelConfig
from pallas_kernels.work_plan import (
    TileShape,
    WorkList,
    pack_queries,
    plan_tiles,
    plan_work,
)
from tests.pallas_kernels import cases, races
from tests.pallas_kernels.joining import join_items, to_tokens

SPLIT_P = 1e-5  # P in two 16-bit parts
PLAIN_P = 3e-3  # P in one bfloat16
PLAIN_P_F16 = 3e-4  # P in one float16


def attend(
    shape: cases.Shape,
    batch: cases.Batch,
    *,
    rows: int = 8,
    kv_tile: int = 64,
    stages: int = 2,
    workers: int = 3,
    split: bool = True,
    split_p: bool = True,
    by_kernel: bool = False,
    alibi_slopes: np.ndarray | None = None,
    kv_scales: np.ndarray | None = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """out [num_tokens, num_q_heads, head_dim] and lse [num_tokens, num_q_heads] of the kernel.

    The items are joined in NumPy, or `by_kernel`.
    """
    q, pool, table, kv_lens, cu_q_lens, num_seqs = (jnp.asarray(a) for a in batch.arrays)
    tile_shape = TileShape.fit(shape.group, rows=rows, multiple=8, kv_tile=kv_tile)
    window = options.get("sliding_window")
    tiles = plan_tiles(
        kv_lens, cu_q_lens, num_seqs,
        shape=tile_shape, num_tokens=shape.num_tokens, sliding_window=window,
    )  # fmt: skip
    heads = shape.num_kv_heads * tile_shape.passes
    work = plan_work(tiles, heads=heads, workers=workers, split=split, min_tiles=1)
    config = KernelConfig("columns", tile_shape.rows, kv_tile, stages, workers, split, split_p)
    with races.no_gpu_race():
        o, lse = attend_columns(
            pack_queries(q, tiles, shape.num_kv_heads, shape.head_dim),
            pool,
            table,
            work,
            shape=tile_shape,
            rule=ScoreRule(options.pop("scale", shape.head_dim**-0.5), **options),
            config=config,
            slopes=None
            if alibi_slopes is None
            else row_slopes(jnp.asarray(alibi_slopes), tile_shape, shape.num_kv_heads),
            kv_scales=None if kv_scales is None else jnp.asarray(kv_scales),
            interpret=True,
        )
        if by_kernel:
            o, lse = merge_items(o, lse, work.row_items, transposed=True, interpret=True)
        o, lse = np.asarray(o).swapaxes(1, 2), np.asarray(lse)
    if not by_kernel:
        o, lse = join_items(o, lse, work)
    return to_tokens(o, lse, tiles, shape.num_q_heads)


def check(shape: cases.Shape, batch: cases.Batch, bound: float, **options: Any) -> None:
    """Out within `bound` of float64, the lse within `SPLIT_P`."""
    told = ("scale", "sliding_window", "soft_cap", "alibi_slopes", "kv_scales")
    out, lse = attend(shape, batch, **options)
    rule = {name: options[name] for name in told if name in options}
    expected, expected_lse = reference.paged_attention(*batch.arrays, **rule, return_lse=True)
    errors = cases.error(out, expected), cases.error(lse, expected_lse)
    print(f"out {errors[0]:.1e}, lse {errors[1]:.1e}")
    assert errors[0] <= bound
    assert errors[1] <= SPLIT_P


def quantised(batch: cases.Batch, dtype: Any) -> tuple[cases.Batch, np.ndarray]:
    """The batch with 8-bit pages and their scales; those of unused positions are NaN."""
    pool = batch.kv_pages.astype(np.float32)
    scales = np.abs(pool).max(axis=-1) / np.float32(LARGEST[jnp.dtype(dtype)])
    scales[0] = 1
    values = pool / scales[..., None]
    if dtype == jnp.int8:
        values = np.where(np.isnan(values), 99, np.round(values))
    values = np.asarray(jnp.asarray(values, jnp.float32).astype(dtype))
    return dataclasses.replace(batch, kv_pages=values), scales


# --------------------------------------------------------------------------------- interpretation


def test_decode_of_lengths_around_page_and_tile_edges(rng: np.random.Generator) -> None:
    shape = cases.Shape(16, 1, 4, 128, 7, 7, 150)
    kv_lens = [1, 16, 17, 63, 64, 65, 150]
    batch = cases.make_batch(shape, rng, kv_lens, [1] * 7, jnp.bfloat16)
    check(shape, batch, SPLIT_P, workers=4, by_kernel=True)


def test_several_tokens_a_tile_with_window_cap_and_slopes(rng: np.random.Generator) -> None:
    shape = cases.Shape(8, 1, 3, 64, 3, 12, 200)  # 5 tokens and a padding row a tile
    batch = cases.make_batch(shape, rng, [200, 5], [7, 5], jnp.float16)
    slopes = np.array([0.3, 0.1, 0.02], np.float32)
    options = {"sliding_window": 70, "soft_cap": 5.0, "alibi_slopes": slopes, "scale": 0.3}
    check(shape, batch, SPLIT_P, rows=16, stages=3, **options)


def test_plain_p_and_a_tile_that_is_a_slice_of_a_page(rng: np.random.Generator) -> None:
    shape = cases.Shape(128, 2, 8, 64, 2, 2, 200)
    batch = cases.make_batch(shape, rng, [200, 129], [1] * 2, jnp.bfloat16)
    check(shape, batch, PLAIN_P, split_p=False, workers=2)


def test_large_group_in_two_passes_and_rows_that_are_not_cut(rng: np.random.Generator) -> None:
    shape = cases.Shape(32, 1, 16, 192, 3, 3, 150)
    batch = cases.make_batch(shape, rng, [150, 31], [1, 1], jnp.bfloat16)
    check(shape, batch, SPLIT_P, kv_tile=128, split=False, workers=2)


def test_pages_out_of_the_window_are_not_followed(rng: np.random.Generator) -> None:
    """An engine may have given them to others; a tile that the window cuts holds some of them."""
    shape = cases.Shape(8, 1, 4, 64, 2, 2, 200)
    batch = cases.make_batch(shape, rng, [200], [1], jnp.bfloat16)
    expected = reference.paged_attention(*batch.arrays, sliding_window=20)
    batch.page_table[0, : (200 - 20) // 8] = cases.GARBAGE[0]
    out, _ = attend(shape, batch, sliding_window=20)
    assert cases.error(out, expected) <= SPLIT_P


@pytest.mark.parametrize(
    ("dtype", "page_size", "head_dim", "split_p", "bound"),
    [(jnp.int8, 8, 128, True, SPLIT_P), (jnp.float8_e4m3fn, 128, 64, False, PLAIN_P_F16)],
)
def test_quantised_pages(
    rng: np.random.Generator,
    dtype: Any,
    page_size: int,
    head_dim: int,
    split_p: bool,
    bound: float,
) -> None:
    shape = cases.Shape(page_size, 1, 4, head_dim, 4, 4, 150)
    batch = cases.make_batch(shape, rng, [150, 65, 1], [2, 1, 1], jnp.bfloat16)
    batch, scales = quantised(batch, dtype)
    check(shape, batch, bound, kv_scales=scales, split_p=split_p)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page_size", "head_dim", "group"),
    list(itertools.product((8, 16, 32, 64, 128), (64, 128, 256), (1, 2, 4, 7, 8, 16))),
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_random_batches(page_size: int, head_dim: int, group: int, dtype: Any) -> None:
    seed = page_size + head_dim + 7 * group
    generator = np.random.default_rng(seed)
    shape = cases.Shape(page_size, 2, group, head_dim, 5, 30, 300)
    batch = cases.random_batch(shape, generator, dtype)
    options = {
        "rows": int(generator.choice([8, 16, 32])),
        "kv_tile": int(generator.choice([64, 128])),
        "sliding_window": None if seed % 3 else int(generator.integers(1, 200)),
        "soft_cap": None if seed % 2 else 10.0,
        "split": bool(seed % 5),
        "stages": int(generator.integers(2, 5)),
    }
    check(shape, batch, SPLIT_P, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "page_size", "head_dim"),
    list(itertools.product((jnp.int8, jnp.float8_e4m3fn), (8, 32, 64, 128), (64, 128, 192, 256))),
)
def test_random_quantised_batches(dtype: Any, page_size: int, head_dim: int) -> None:
    shape = cases.Shape(page_size, 2, 4, head_dim, 5, 30, 300)
    batch = cases.random_batch(shape, np.random.default_rng(page_size + head_dim), jnp.bfloat16)
    batch, scales = quantised(batch, dtype)
    check(shape, batch, SPLIT_P, kv_scales=scales, rows=16, stages=3, soft_cap=20.0)


# --------------------------------------------------------------------------- tests of the tests


# JAX 0.11 goes on after a race, and may then fail because nobody waited for a barrier.
RACE = r"(?i)race was found|race detected|no threads? observed"


def small_batch(rng: np.random.Generator) -> tuple[cases.Shape, cases.Batch]:
    shape = cases.Shape(64, 1, 4, 64, 1, 1, 128)
    return shape, cases.make_batch(shape, rng, [128], [1], jnp.bfloat16)


def test_a_planted_race_is_caught(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer does not wait for K and V."""
    wait = mosaic_gpu_columns.plgpu.barrier_wait

    def impatient(barrier: Any) -> None:
        if sys._getframe(1).f_code.co_name != "_tile_step":
            wait(barrier)

    monkeypatch.setattr(mosaic_gpu_columns.plgpu, "barrier_wait", impatient)
    with pytest.raises(Exception, match=RACE):
        attend(*small_batch(rng), workers=1)


def test_a_missing_commit_is_caught(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P is in shared memory, but the tensor cores may not see it yet."""
    monkeypatch.setattr(mosaic_gpu_columns.plgpu, "commit_smem", lambda: None)
    with pytest.raises(Exception, match=RACE):
        attend(*small_batch(rng), workers=1)


def test_a_tile_freed_too_early_is_caught(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producer does not wait for the slot of a tile that is still read."""
    when = mosaic_gpu_columns.pl.when

    def careless(condition: Any) -> Any:
        is_wait = sys._getframe(1).f_code.co_name == "copy"
        return (lambda body: None) if is_wait else when(condition)

    monkeypatch.setattr(mosaic_gpu_columns.pl, "when", careless)
    monkeypatch.setattr(mosaic_gpu_columns, "_drain", lambda count, slots, free: None)
    shape = cases.Shape(64, 1, 4, 64, 1, 1, 256)
    batch = cases.make_batch(shape, rng, [256], [1], jnp.bfloat16)
    with pytest.raises(Exception, match=RACE):
        attend(shape, batch, workers=1)


def test_a_planted_page_id_out_of_range_is_caught(rng: np.random.Generator) -> None:
    shape, batch = small_batch(rng)
    batch.page_table[0, 1] = len(batch.kv_pages)
    with pytest.raises(Exception, match=r"(?i)out.of.bounds"):
        attend(shape, batch, workers=1)


# ------------------------------------------------------------------------------------- refusals

REFUSALS = {
    "head_dim": ("head_dim of 64, 128, 192 or 256 .* Got 80", {"head_dim": 80}),
    "page_size": ("page_size of 8, 16, 32, 64 or 128 .* Got 4", {"page_size": 4}),
    "dtype": ("one of bfloat16, float16 without `kv_scales`.* Got float32", {"dtype": jnp.float32}),
    "q_dtype": ("`q_tiles` must have the dtype of `kv_pages`", {"q_dtype": jnp.float16}),
    "scales": ("one of float8_e4m3fn, int8 with `kv_scales`.* Got bfloat16", {"scales": True}),
    "out_dtype": ("`out_dtype` must be float32. Got bfloat16", {"out_dtype": jnp.bfloat16}),
    "kv_tile": ("`config.kv_tile` must be a multiple of 64 .* Got 32", {"kv_tile": 32}),
    "rows": ("`shape.rows` must be a multiple of 8 up to 64.* Got 12", {"rows": 12}),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses_what_it_cannot_do(name: str) -> None:
    message, change = REFUSALS[name]
    given: dict[str, Any] = {
        "head_dim": 128, "page_size": 16, "dtype": jnp.bfloat16, "q_dtype": jnp.bfloat16,
        "scales": False, "out_dtype": jnp.float32, "kv_tile": 64, "rows": 8,
    } | change  # fmt: skip
    rows, kv_tile, page_size = given["rows"], given["kv_tile"], given["page_size"]
    items, workers, bounds = (jnp.zeros(n, jnp.int32) for n in ((4, 8), 3, 5))
    with pytest.raises(NotImplementedError, match=message):
        attend_columns(
            jnp.zeros((2, 2, rows, given["head_dim"]), given["q_dtype"]),
            jnp.zeros((3, 2, 2, page_size, given["head_dim"]), given["dtype"]),
            jnp.zeros((2, 4), jnp.int32),
            WorkList(items, workers, bounds, False),
            shape=TileShape(4, 1, 2, rows, kv_tile),
            rule=ScoreRule(0.1),
            config=KernelConfig("columns", rows, kv_tile, 2, 2),
            kv_scales=jnp.ones((3, 2, 2, page_size)) if given["scales"] else None,
            out_dtype=given["out_dtype"],
            interpret=True,
        )
