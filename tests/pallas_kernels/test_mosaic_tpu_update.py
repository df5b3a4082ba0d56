"""Updates of a page pool by the TPU kernels, interpreted: equal to NumPy to the bit, race-free."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import mosaic_tpu_update, reference
from tests.pallas_kernels.races import assert_no_tpu_race

EAGER = pltpu.InterpretParams(
    detect_races=True, dma_execution_mode="eager", out_of_bounds_reads="raise"
)
MODES = {"on_wait": True, "eager": EAGER}
PAGE, HEADS, DIM, NUM_PAGES = 8, 2, 128, 12
END = NUM_PAGES * PAGE  # the first slot past the pool
TOKENS = 24  # one compilation serves all
SLOTS = {
    "decode": [5, END, 17, 8, 95, -1, 40],
    "prefill": [*range(11, 25), 72, 73, END, END, *range(50, 53)],
    "a page again and again": [16, 20, 18, 3, 22, 17, 40],
    "nothing": [END, -5, 2**31 - 1, -(2**31)],
    "backwards": [30, 29, 28, 27, 24, 23, 22],
}


@pytest.fixture(autouse=True)
def _fresh_interpreter() -> Iterator[None]:
    """An error inside a kernel leaves the interpreter unusable for the next test."""
    yield
    pltpu.reset_tpu_interpret_mode_state()


@functools.cache
def compiled(function: Callable[..., jax.Array], mode: str) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(function, interpret=MODES[mode]))


def run(function: Callable[..., jax.Array], *args: Any, mode: str = "on_wait") -> np.ndarray:
    got = np.asarray(compiled(function, mode)(*map(jnp.asarray, args)))
    assert_no_tpu_race()
    return got


def same(got: np.ndarray, expected: np.ndarray) -> None:
    """To the bit, NaN included."""
    assert got.dtype == expected.dtype
    bits = f"u{expected.dtype.itemsize}"
    np.testing.assert_array_equal(got.view(bits), expected.view(bits))


def random(rng: np.random.Generator, dtype: Any, *shape: int) -> np.ndarray:
    return (rng.standard_normal(shape) * 30).astype(dtype)


def pool_of(rng: np.random.Generator, dtype: Any, num_pages: int = NUM_PAGES) -> np.ndarray:
    return random(rng, dtype, num_pages, 2, HEADS, PAGE, DIM)


def check_write(
    pool: np.ndarray, slots: list[int], rng: np.random.Generator, mode: str = "on_wait"
) -> None:
    mapping = np.array(slots, np.int32)
    k, v = (random(rng, pool.dtype, mapping.size, pool.shape[2], DIM) for _ in range(2))
    got = run(mosaic_tpu_update.write_kv_tpu, pool, k, v, mapping, mode=mode)
    same(got, reference.write_kv(pool, k, v, mapping))


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
def test_write_kv_equals_numpy(rng: np.random.Generator, slots: list[int]) -> None:
    pool = pool_of(rng, ml_dtypes.bfloat16)
    check_write(pool, slots + [END] * (TOKENS - len(slots)), rng)


def test_write_kv_when_copies_are_done_at_once(rng: np.random.Generator) -> None:
    slots = [*range(13, 25), 2, 16, 3]
    check_write(pool_of(rng, ml_dtypes.bfloat16), slots, rng, "eager")


@pytest.mark.parametrize(
    ("dtype", "heads"), [(ml_dtypes.float8_e4m3fn, 3), (np.int8, 32)], ids=["e4m3", "int8"]
)
def test_write_kv_moves_eight_bits_exactly(
    rng: np.random.Generator, dtype: Any, heads: int
) -> None:
    """With 32 heads a token is put into its page in two parts."""
    check_write(random(rng, dtype, 4, 2, heads, PAGE, DIM), [*range(12, 20), 30], rng)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_write_kv_takes_tokens_in_any_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    check_write(pool_of(rng, ml_dtypes.bfloat16), list(rng.permutation(END + 9)[:TOKENS]), rng)


def test_write_kv_with_two_runs_in_flight_in_two_calls(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mosaic_tpu_update, "RING_BYTES", 1)
    monkeypatch.setattr(mosaic_tpu_update, "MAX_TOKENS", 9)
    slots = [6, 7, 8, 33, 9, 34, 20, 35, 36, 37, 10, 11]
    check_write(pool_of(rng, np.float32), slots, rng)


def test_write_kv_keeps_what_unwritten_slots_hold(rng: np.random.Generator) -> None:
    pool = np.full((NUM_PAGES, 2, HEADS, PAGE, DIM), np.nan, ml_dtypes.bfloat16)
    check_write(pool, [9, 10, 11, 40] + [END] * (TOKENS - 4), rng)


def test_write_kv_refuses_pages_too_large_for_vector_memory() -> None:
    pool = jax.ShapeDtypeStruct((2, 2, 64, 128, 256), jnp.float32)
    tokens = jax.ShapeDtypeStruct((1, 64, 256), jnp.float32)
    slots = jax.ShapeDtypeStruct((1,), jnp.int32)
    with pytest.raises(NotImplementedError, match=r"at most 4194304 bytes.*Got 16777216"):
        jax.eval_shape(mosaic_tpu_update.write_kv_tpu, pool, tokens, tokens, slots)


@pytest.mark.parametrize("mode", MODES)
def test_copy_pages_equals_numpy(rng: np.random.Generator, mode: str) -> None:
    pool = pool_of(rng, ml_dtypes.bfloat16, 40)
    order = rng.permutation(np.arange(1, 39)).astype(np.int32)
    src, dst = order[:12], order[20:32]
    src[3], src[4], src[9] = src[5], -3, 99  # one source twice; clamped ones
    dst[7], dst[8], dst[11] = 40, -1, 2**31 - 1
    got = run(mosaic_tpu_update.copy_pages_tpu, pool, src, dst, mode=mode)
    same(got, reference.copy_pages(pool, src, dst))


def test_a_planted_race_is_reported(rng: np.random.Generator) -> None:
    """The copies run at the same time, so that no page may be both source and destination."""
    pool = pool_of(rng, np.float32)
    with pytest.raises(Exception, match=r"(?i)race"):
        run(
            mosaic_tpu_update.copy_pages_tpu,
            pool,
            np.array([1, 2], np.int32),
            np.array([2, 3], np.int32),
        )


def test_gather_and_scatter_equal_numpy(rng: np.random.Generator) -> None:
    pool = pool_of(rng, np.int8)
    ids = np.array([3, 99, 11, -4, 3, 7, 0, 1, 2, 5], np.int32)
    pages = reference.gather_pages(pool, ids)
    same(run(mosaic_tpu_update.gather_pages_tpu, pool, ids), pages)
    ids = np.array([3, 99, 11, -4, 8, 7, 0, 1, 2, 5], np.int32)
    got = run(mosaic_tpu_update.scatter_pages_tpu, pool, ids, pages)
    same(got, reference.scatter_pages(pool, ids, pages))
