"""Updates of a page pool: equal to NumPy, in place when donated, out of bounds dropped."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import reference

DTYPES = [jnp.float32, jnp.bfloat16]
NUM_PAGES, HEADS, PAGE, DIM = 40, 3, 8, 16


def random(rng: np.random.Generator, *shape: int, dtype: Any = jnp.float32) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def pool_of(rng: np.random.Generator, dtype: Any, num_pages: int = NUM_PAGES) -> np.ndarray:
    return random(rng, num_pages, 2, HEADS, PAGE, DIM, dtype=dtype)


def same(got: jax.Array, expected: np.ndarray) -> None:
    """To the bit: these operations only move values."""
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(got), expected)


@pytest.mark.parametrize("dtype", [*DTYPES, jnp.float16])
@pytest.mark.parametrize("num_tokens", [1, 50])
def test_write_kv_puts_each_token_in_its_slot(
    rng: np.random.Generator, dtype: Any, num_tokens: int
) -> None:
    pool = pool_of(rng, dtype)
    k, v = (random(rng, num_tokens, HEADS, DIM, dtype=dtype) for _ in range(2))
    slots = rng.permutation(NUM_PAGES * PAGE)[:num_tokens].astype(np.int32)
    got = jax.jit(pallas_kernels.write_kv)(pool, k, v, slots)
    same(got, reference.write_kv(pool, k, v, slots))


def test_write_kv_fills_a_page_with_consecutive_tokens(rng: np.random.Generator) -> None:
    pool = pool_of(rng, jnp.float32)
    k, v = (random(rng, 12, HEADS, DIM) for _ in range(2))
    slots = np.arange(5 * PAGE + 2, 5 * PAGE + 14, dtype=np.int32)
    got = np.asarray(jax.jit(pallas_kernels.write_kv)(pool, k, v, slots))
    np.testing.assert_array_equal(got[5, 0, :, 2:].swapaxes(0, 1), k[:6])
    np.testing.assert_array_equal(got[6, 1, :, :6].swapaxes(0, 1), v[6:])
    np.testing.assert_array_equal(got[5, :, :, :2], pool[5, :, :, :2])


def test_write_kv_drops_slots_outside_the_pool(rng: np.random.Generator) -> None:
    pool = pool_of(rng, jnp.float32)
    k, v = (random(rng, 6, HEADS, DIM) for _ in range(2))
    last = NUM_PAGES * PAGE
    slots = np.array([last, 9, -1, last + 1, 2**31 - 1, -(2**31)], np.int32)
    got = jax.jit(pallas_kernels.write_kv)(pool, k, v, slots)
    same(got, reference.write_kv(pool, k, v, slots))
    np.testing.assert_array_equal(np.asarray(got)[-1], pool[-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_pages_reads_everything_before_it_writes(rng: np.random.Generator, dtype: Any) -> None:
    pool = pool_of(rng, dtype)
    src = np.array([1, 2, 3, 10, 10], np.int32)  # a chain, then one page to two
    dst = np.array([2, 3, 4, 11, 12], np.int32)
    got = jax.jit(pallas_kernels.copy_pages)(pool, src, dst)
    same(got, reference.copy_pages(pool, src, dst))
    same(got[3], pool[2])


def test_copy_pages_drops_destinations_outside_the_pool(rng: np.random.Generator) -> None:
    pool = pool_of(rng, jnp.float32)
    src = np.array([5, 6, 10**6, 7], np.int32)
    dst = np.array([NUM_PAGES, NUM_PAGES + 9, 3, -1], np.int32)
    got = jax.jit(pallas_kernels.copy_pages)(pool, src, dst)
    same(got, reference.copy_pages(pool, src, dst))
    same(got[3], pool[NUM_PAGES - 1])  # a source past the end is clamped


@pytest.mark.parametrize("dtype", DTYPES)
def test_gathered_pages_scatter_back_to_the_bit(rng: np.random.Generator, dtype: Any) -> None:
    pool, empty = pool_of(rng, dtype), np.zeros_like(pool_of(rng, dtype))
    ids = np.array([7, 3, 39], np.int32)
    pages = jax.jit(pallas_kernels.gather_pages)(pool, ids)
    same(pages, pool[ids])
    target = np.array([1, NUM_PAGES, 2], np.int32)
    got = jax.jit(pallas_kernels.scatter_pages)(empty, target, pages)
    same(got, reference.scatter_pages(empty, target, pool[ids]))


def test_gather_pages_clamps_ids(rng: np.random.Generator) -> None:
    pool, ids = pool_of(rng, jnp.float32), np.array([-5, 10**6], np.int32)
    got = pallas_kernels.gather_pages(jnp.asarray(pool), jnp.asarray(ids))
    same(got, reference.gather_pages(pool, ids))
    same(got, pool[[0, -1]])


def test_nan_and_negative_zero_travel_to_the_bit(rng: np.random.Generator) -> None:
    pool = pool_of(rng, jnp.bfloat16)
    payload = np.array([0x7FC1, 0xFF81, 0x8000, 0x0001], np.uint16).view(jnp.bfloat16)
    pool[4] = np.resize(payload, pool[4].shape)
    got = jax.jit(pallas_kernels.copy_pages)(pool, np.array([4], np.int32), np.array([9], np.int32))
    np.testing.assert_array_equal(np.asarray(got)[9].view(np.uint16), pool[4].view(np.uint16))


def operations(
    dtype: Any, num_tokens: int
) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Name -> (operation, its arguments after the pool, as shapes)."""
    ids = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    token = jax.ShapeDtypeStruct((num_tokens, HEADS, DIM), dtype)
    pages = jax.ShapeDtypeStruct((num_tokens, 2, HEADS, PAGE, DIM), dtype)
    return {
        "write_kv": (pallas_kernels.write_kv, (token, token, ids)),
        "copy_pages": (pallas_kernels.copy_pages, (ids, ids)),
        "scatter_pages": (pallas_kernels.scatter_pages, (ids, pages)),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["write_kv", "copy_pages", "scatter_pages"])
def test_donated_updates_compile_to_no_pool_sized_temporary(name: str, dtype: Any) -> None:
    pool = jax.ShapeDtypeStruct((20_000, 2, HEADS, PAGE, DIM), dtype)
    pool_bytes = pool.size * pool.dtype.itemsize
    operation, arguments = operations(dtype, 32)[name]
    compiled = jax.jit(operation, donate_argnums=0).lower(pool, *arguments).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.alias_size_in_bytes == pool_bytes
    assert analysis.temp_size_in_bytes < pool_bytes / 10


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["write_kv", "copy_pages", "scatter_pages"])
def test_donated_updates_reuse_the_buffer(name: str, dtype: Any) -> None:
    operation, shapes = operations(dtype, 4)[name]
    arguments = [jnp.zeros(s.shape, s.dtype) for s in shapes]
    pool = jnp.ones((NUM_PAGES, 2, HEADS, PAGE, DIM), dtype)
    where = pool.unsafe_buffer_pointer()
    new = jax.jit(operation, donate_argnums=0)(pool, *arguments)
    assert pool.is_deleted()
    assert new.unsafe_buffer_pointer() == where


I32 = jnp.zeros(4, jnp.int32)
POOL = jnp.zeros((5, 2, 3, 8, 16), jnp.float32)
TOKENS = jnp.zeros((4, 3, 16), jnp.float32)
PAGES = jnp.zeros((4, 2, 3, 8, 16), jnp.float32)

WRONG: list[tuple[Callable[..., Any], tuple[Any, ...], type[Exception], str]] = [
    (pallas_kernels.write_kv, (POOL[0], TOKENS, TOKENS, I32), ValueError, "`kv_pages` must have"),
    (pallas_kernels.write_kv, (POOL, TOKENS[:3], TOKENS, I32), ValueError, r"`k` must have shape"),
    (pallas_kernels.write_kv, (POOL, TOKENS, TOKENS[..., :8], I32), ValueError, r"`v` must have"),
    (
        pallas_kernels.write_kv,
        (POOL, TOKENS, TOKENS.astype(jnp.bfloat16), I32),
        TypeError,
        "`v` must have the dtype of `kv_pages`, float32. Got bfloat16",
    ),
    (
        pallas_kernels.write_kv,
        (POOL, TOKENS, TOKENS, I32.astype(jnp.float32)),
        TypeError,
        "`slot_mapping` must be int32. Got float32",
    ),
    (
        pallas_kernels.write_kv,
        (POOL, TOKENS, TOKENS, I32[:, None]),
        ValueError,
        r"`slot_mapping` must have one dimension. Got shape \(4, 1\)",
    ),
    (pallas_kernels.copy_pages, (POOL, I32, I32[:2]), ValueError, r"`dst` must have the shape"),
    (pallas_kernels.copy_pages, (POOL, I32, I32.astype(jnp.uint32)), TypeError, "must be int32"),
    (pallas_kernels.gather_pages, (POOL, I32[0]), ValueError, "`page_ids` must have one dim"),
    (pallas_kernels.scatter_pages, (POOL, I32, PAGES[:2]), ValueError, "`pages` must have shape"),
]


@pytest.mark.parametrize(("operation", "arguments", "kind", "message"), WRONG)
def test_wrong_arguments_are_refused(
    operation: Callable[..., Any], arguments: tuple[Any, ...], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        operation(*arguments)


QUANTIZED = [jnp.float8_e4m3fn, jnp.int8]


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_write_kv_quantises_and_keeps_what_it_does_not_write(
    rng: np.random.Generator, dtype: Any
) -> None:
    pool = pool_of(rng, dtype)
    scales = random(rng, *pool.shape[:4])
    k, v = (random(rng, 9, HEADS, DIM - 4, dtype=jnp.bfloat16) for _ in range(2))
    k[3, 1, 5] = np.nan
    slots = rng.permutation(NUM_PAGES * PAGE)[:9].astype(np.int32)
    slots[[4, 6]] = NUM_PAGES * PAGE, -1
    write = jax.jit(pallas_kernels.write_kv)
    got, got_scales = write(pool, k, v, slots, kv_scales=scales)
    expected, expected_scales = reference.write_kv(pool, k, v, slots, kv_scales=scales)
    assert np.isnan(expected_scales).sum() == 1
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), expected.view(np.uint8))
    same(got_scales, expected_scales)


def test_write_kv_puts_zeros_into_the_columns_of_a_padded_pool(rng: np.random.Generator) -> None:
    pool = np.full((NUM_PAGES, 2, HEADS, PAGE, DIM), np.nan, np.float32)
    k, v = (random(rng, 5, HEADS, DIM - 6) for _ in range(2))
    slots = np.array([3, 17, 18, NUM_PAGES * PAGE, 100], np.int32)
    got = jax.jit(pallas_kernels.write_kv)(pool, k, v, slots)
    same(got, reference.write_kv(pool, k, v, slots))
    assert np.all(np.asarray(got)[0, :, :, 3, DIM - 6 :] == 0)


def test_scales_move_with_their_pages(rng: np.random.Generator) -> None:
    scales = random(rng, NUM_PAGES, 2, HEADS, PAGE)
    src, dst = np.array([1, 2], np.int32), np.array([2, NUM_PAGES], np.int32)
    copied = jax.jit(pallas_kernels.copy_pages)(scales, src, dst)
    same(copied, reference.copy_pages(scales, src, dst))
    pages = jax.jit(pallas_kernels.gather_pages)(scales, src)
    same(pages, scales[src])
    same(
        jax.jit(pallas_kernels.scatter_pages)(scales, dst, pages),
        reference.scatter_pages(scales, dst, scales[src]),
    )


def test_a_donated_int8_pool_and_its_scales_are_changed_in_place() -> None:
    def write(pool: jax.Array, scales: jax.Array, k: jax.Array, slots: jax.Array) -> Any:
        return pallas_kernels.write_kv(pool, k, k, slots, kv_scales=scales)

    pool = jax.ShapeDtypeStruct((20_000, 2, HEADS, PAGE, DIM), jnp.int8)
    scales = jax.ShapeDtypeStruct(pool.shape[:4], jnp.float32)
    arguments = (jax.ShapeDtypeStruct((32, HEADS, DIM), jnp.bfloat16),)
    ids = jax.ShapeDtypeStruct((32,), jnp.int32)
    compiled = jax.jit(write, donate_argnums=(0, 1)).lower(pool, scales, *arguments, ids).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.alias_size_in_bytes == pool.size + 4 * scales.size
    assert analysis.temp_size_in_bytes < pool.size / 10


SCALES = jnp.zeros((5, 2, 3, 8), jnp.float32)
INT8 = POOL.astype(jnp.int8)


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "message"),
    [
        (
            (POOL, TOKENS, TOKENS, I32),
            {"kv_scales": SCALES},
            TypeError,
            "`kv_pages` must be float8",
        ),
        (
            (INT8, TOKENS, TOKENS, I32),
            {"kv_scales": SCALES[0]},
            ValueError,
            "`kv_scales` must have",
        ),
        ((INT8, TOKENS, TOKENS, I32), {"kv_scales": SCALES.astype(jnp.bfloat16)}, TypeError, "32"),
        ((INT8, INT8[:4, 0, :, 0], TOKENS, I32), {"kv_scales": SCALES}, TypeError, "`k` must be"),
        ((POOL, TOKENS, TOKENS, I32), {"implementation": "cuda"}, ValueError, "None or one of"),
        ((POOL, TOKENS, TOKENS, I32), {"interpret": True}, ValueError, "a Mosaic implementation"),
    ],
)
def test_wrong_options_are_refused(
    arguments: tuple[Any, ...], options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        pallas_kernels.write_kv(*arguments, **options)


def test_swapping_has_no_gpu_kernel() -> None:
    for operation, arguments in (
        (pallas_kernels.gather_pages, (POOL, I32)),
        (pallas_kernels.scatter_pages, (POOL, I32, PAGES)),
    ):
        with pytest.raises(NotImplementedError, match="'mosaic_gpu' does not exist for this"):
            operation(*arguments, implementation="mosaic_gpu")


def test_tpu_kernels_are_reachable_by_name(rng: np.random.Generator) -> None:
    pool = random(rng, 5, 2, 1, 16, 128)
    by_tpu: dict[str, Any] = {"implementation": "mosaic_tpu", "interpret": True}
    ids, target = np.array([3, 1], np.int32), np.array([2, 4], np.int32)
    tokens = random(rng, 2, 1, 128)
    same(
        pallas_kernels.write_kv(
            jnp.asarray(pool), jnp.asarray(tokens), jnp.asarray(tokens), jnp.asarray(ids), **by_tpu
        ),
        reference.write_kv(pool, tokens, tokens, ids),
    )
    same(
        pallas_kernels.copy_pages(
            jnp.asarray(pool), jnp.asarray(ids), jnp.asarray(target), **by_tpu
        ),
        reference.copy_pages(pool, ids, target),
    )
    pages = pallas_kernels.gather_pages(jnp.asarray(pool), jnp.asarray(ids), **by_tpu)
    same(pages, pool[ids])
    same(
        pallas_kernels.scatter_pages(jnp.asarray(pool), jnp.asarray(target), pages, **by_tpu),
        reference.scatter_pages(pool, target, pool[ids]),
    )
