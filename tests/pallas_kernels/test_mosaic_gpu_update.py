"""GPU kernels that change a pool, interpreted: equal to NumPy to the bit, free of races."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import mosaic_gpu_target, mosaic_gpu_update, reference
from pallas_kernels.mosaic_gpu_target import GpuTarget
from tests.pallas_kernels.races import no_gpu_race

write_kv = functools.partial(pallas_kernels.write_kv, implementation="mosaic_gpu", interpret=True)
copy_pages = functools.partial(
    pallas_kernels.copy_pages, implementation="mosaic_gpu", interpret=True
)
# (num_pages, num_kv_heads, page_size, head_dim), dtype
POOLS = [
    ((9, 3, 16, 64), jnp.bfloat16),
    ((5, 1, 8, 128), jnp.float32),
    ((4, 5, 32, 16), jnp.float16),
    ((3, 1, 64, 256), jnp.bfloat16),
    ((6, 2, 16, 128), jnp.int8),
    ((4, 1, 128, 64), jnp.float8_e4m3fn),
]


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Any bits, NaN and infinities included: they have to travel as they are."""
    itemsize = jnp.dtype(dtype).itemsize
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * itemsize), np.uint8).view(dtype)


def same_bits(got: Any, expected: np.ndarray) -> None:
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), expected.view(np.uint8))


def make_pool(rng: np.random.Generator, size: tuple[int, int, int, int], dtype: Any) -> np.ndarray:
    return random_bits(rng, (size[0], 2, *size[1:]), dtype)


@pytest.mark.parametrize(
    ("size", "dtype", "num_tokens"), [(*POOLS[0], 1), *((*pool, 19) for pool in POOLS)]
)
def test_write_kv_equals_numpy(
    rng: np.random.Generator, size: tuple[int, int, int, int], dtype: Any, num_tokens: int
) -> None:
    pool = make_pool(rng, size, dtype)
    num_pages, heads, page_size, head_dim = size
    k, v = (random_bits(rng, (num_tokens, heads, head_dim), dtype) for _ in range(2))
    slots = rng.permutation(num_pages * page_size)[:num_tokens].astype(np.int32)
    if num_tokens > 4:  # dropped
        slots[[2, 9, 11]] = num_pages * page_size, -1, 2**31 - 1
        slots[12:14] = -(2**31), num_pages * page_size + 1
    with no_gpu_race():
        got = jax.block_until_ready(jax.jit(write_kv)(pool, k, v, slots))
    same_bits(got, reference.write_kv(pool, k, v, slots))


@pytest.mark.parametrize("num_tokens", [8, 19])
def test_runs_of_tokens_cover_each_token_once(
    rng: np.random.Generator, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tokens a CTA, the last run overlapping the one before; a second write would race."""
    monkeypatch.setattr(mosaic_gpu_update, "_tokens_per_block", lambda *_: 8)
    pool = make_pool(rng, (5, 2, 16, 64), jnp.bfloat16)
    k, v = (random_bits(rng, (num_tokens, 2, 64), jnp.bfloat16) for _ in range(2))
    slots = np.arange(21, 21 + num_tokens, dtype=np.int32)
    with no_gpu_race():
        got = jax.block_until_ready(jax.jit(write_kv)(pool, k, v, slots))
    same_bits(got, reference.write_kv(pool, k, v, slots))


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 1), (264, 1), (2048, 4), (8192, 8)])
def test_decode_spreads_over_the_chip_and_prefill_copies_more_at_once(
    num_tokens: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chip = GpuTarget("H200", (9, 0), 132, 227 * 1024)
    monkeypatch.setattr(mosaic_gpu_target, "target", lambda: chip)
    assert mosaic_gpu_update._tokens_per_block(num_tokens, 8 * 128 * 2) == expected


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.int8])
def test_write_kv_quantises_on_the_way(rng: np.random.Generator, dtype: Any) -> None:
    pool, scales = (
        make_pool(rng, (4, 2, 16, 128), dtype),
        np.full((4, 2, 2, 16), np.nan, np.float32),
    )
    k, v = (rng.standard_normal((9, 2, 80)).astype(jnp.bfloat16) for _ in range(2))
    slots = rng.permutation(4 * 16)[:9].astype(np.int32)
    with no_gpu_race():
        got = jax.jit(write_kv)(pool, k, v, slots, kv_scales=scales)
        got, got_scales = jax.block_until_ready(got)
    expected, expected_scales = reference.write_kv(pool, k, v, slots, kv_scales=scales)
    same_bits(got, expected)
    np.testing.assert_array_equal(np.asarray(got_scales), expected_scales)


@pytest.mark.parametrize(("size", "dtype"), [POOLS[i] for i in (0, 1, 3, 4)])
def test_copy_pages_equals_numpy(
    rng: np.random.Generator, size: tuple[int, int, int, int], dtype: Any
) -> None:
    pool = make_pool(rng, size, dtype)
    src = np.array([1, 0, -3, 1, 2**31 - 1], np.int32)
    dst = np.array([2, size[0], size[0] - 1 if size[0] > 3 else -1, -1, 2**31 - 1], np.int32)
    with no_gpu_race():
        got = jax.block_until_ready(jax.jit(copy_pages)(pool, src, dst))
    same_bits(got, reference.copy_pages(pool, src, dst))


def test_copy_pages_reads_everything_before_it_writes(rng: np.random.Generator) -> None:
    pool = make_pool(rng, (9, 2, 16, 64), jnp.bfloat16)
    src = np.array([1, 2, 3, 5, 6, 7, 7], np.int32)  # a chain, a swap, one page to two
    dst = np.array([2, 3, 4, 6, 5, 8, 1], np.int32)
    with no_gpu_race():
        got = jax.block_until_ready(jax.jit(copy_pages)(pool, src, dst))
    same_bits(got, reference.copy_pages(pool, src, dst))


@pytest.mark.parametrize(
    ("n", "page_size", "row_bytes", "expected"),
    [(32, 64, 256, 8), (1, 64, 256, 64), (1, 128, 1024, 64), (32, 16, 1024, 2), (3, 16, 256, 16)],
)
def test_pieces_of_pages_fit_in_shared_memory(
    n: int, page_size: int, row_bytes: int, expected: int
) -> None:
    assert mosaic_gpu_update._rows_per_block(n, page_size, row_bytes) == expected


def test_nothing_to_do_leaves_the_pool(rng: np.random.Generator) -> None:
    pool = jnp.asarray(make_pool(rng, (3, 1, 8, 64), jnp.float32))
    none = jnp.zeros(0, jnp.int32)
    tokens = jnp.zeros((0, 1, 64), jnp.float32)
    assert write_kv(pool, tokens, tokens, none) is pool
    assert copy_pages(pool, none, none) is pool


def shapes(heads: int, page_size: int, head_dim: int, dtype: Any) -> tuple[Any, Any, Any]:
    return (
        jax.ShapeDtypeStruct((4, 2, heads, page_size, head_dim), dtype),
        jax.ShapeDtypeStruct((5, heads, head_dim), dtype),
        jax.ShapeDtypeStruct((5,), jnp.int32),
    )


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((1, 8, 20, jnp.float16), "vectors of a multiple of 16 bytes, not of 20 float16"),
        ((257, 8, 64, jnp.float16), "at most 256 heads, rows and columns"),
        ((1, 8, 512, jnp.float16), "at most 256 heads, rows and columns"),
    ],
)
def test_sizes_that_tma_cannot_address_are_refused(size: Any, message: str) -> None:
    pool, tokens, ids = shapes(*size)
    with pytest.raises(NotImplementedError, match=f"of write_kv cannot run: .*{message}"):
        jax.eval_shape(write_kv, pool, tokens, tokens, ids)
    with pytest.raises(NotImplementedError, match=f"of copy_pages cannot run: .*{message}"):
        jax.eval_shape(copy_pages, pool, ids, ids)


def test_too_many_copies_at_once_are_refused() -> None:
    pool, _, _ = shapes(1, 8, 256, jnp.float32)
    many = jax.ShapeDtypeStruct((1000,), jnp.int32)
    with pytest.raises(NotImplementedError, match=r"`src` must have at most 32 entries.*Got 1000"):
        jax.eval_shape(copy_pages, pool, many, many)


def test_a_chip_without_tma_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    a100 = GpuTarget("NVIDIA A100", (8, 0), 108, 163 * 1024)
    monkeypatch.setattr(mosaic_gpu_target, "target", lambda: a100)
    pool, tokens, ids = shapes(1, 8, 64, jnp.float16)
    with pytest.raises(NotImplementedError, match=r"NVIDIA A100 \(sm_80\) has no TMA"):
        jax.eval_shape(write_kv, pool, tokens, tokens, ids)


def test_more_pairs_than_barriers_are_refused_when_traced() -> None:
    """The compiler would say so, when it is too late to go through XLA."""
    copy = mosaic_gpu_update.copy_pages_gpu
    pool, ids = jnp.zeros((80, 2, 1, 8, 64), jnp.bfloat16), jnp.arange(33, dtype=jnp.int32)
    with pytest.raises(NotImplementedError, match=r"`src` must have at most 32 entries.* Got 33"):
        jax.eval_shape(copy, pool, ids, ids + 40)
