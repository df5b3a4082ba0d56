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
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import pallas_kernels
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


def test_write_kv_refuses_float16_which_xla_then_takes() -> None:
    pool = jax.ShapeDtypeStruct((2, 2, 1, 8, 128), jnp.float16)
    tokens = jax.ShapeDtypeStruct((1, 1, 128), jnp.float16)
    slots = jax.ShapeDtypeStruct((1,), jnp.int32)
    with pytest.raises(NotImplementedError, match="must not be float16"):
        jax.eval_shape(mosaic_tpu_update.write_kv_tpu, pool, tokens, tokens, slots)
    assert not written_by_kernels(pool, tokens, slots)


def test_a_v4_gets_what_its_vector_memory_holds() -> None:
    slots = jax.ShapeDtypeStruct((1,), jnp.int32)
    pool = jax.ShapeDtypeStruct((2, 2, 32, 128, 256), jnp.bfloat16)  # pages of 4 MiB
    tokens = jax.ShapeDtypeStruct((1, 32, 256), jnp.bfloat16)
    assert written_by_kernels(pool, tokens, slots)
    assert not written_by_kernels(pool, tokens, slots, chip="TPU v4")


def written_by_kernels(*args: Any, chip: str = "TPU v5 lite", scales: Any = None) -> list[str]:
    """Names of the kernels in what `write_kv` makes of abstract arguments on a TPU."""
    pool, tokens, slots = args
    device = AbstractDevice(chip, 1, "tpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        write = functools.partial(pallas_kernels.write_kv, kv_scales=scales)
        program = str(jax.make_jaxpr(write)(pool, tokens, tokens, slots))
    return [name for name in ("write_kv_", "write_scales") if name in program]


# -------------------------------------------------------------------------------------- scales

LANES = 128
SCALE_END = 4 * LANES  # the first slot past the pool
SCALE_SLOTS = {
    "decode": [130, 5 * LANES, 17, 2**31 - 1, 511, -1, 40],
    "a run through two blocks of tokens and three pages": [SCALE_END] * 70 + [*range(100, 300)],
    "runs that turn both ways, a page again and again": [
        *range(30, 60), 4 * LANES, *range(10, 25), *range(LANES + 5, LANES + 40), 3, 5, 4,
        *range(61, 120), *range(3 * LANES, 4 * LANES), *range(2 * LANES + 90, 2 * LANES + 126),
    ],
}  # fmt: skip
SCALE_TOKENS = 310


def check_scales(
    slots: list[int], rng: np.random.Generator, heads: int = HEADS, mode: str = "on_wait"
) -> None:
    """Poisoned everywhere: whatever no token was given must stay the NaN that it was."""
    scales = random(rng, np.float32, 4, 2, heads, LANES)
    scales[rng.random(scales.shape) < 0.5] = np.nan
    mapping = np.array(slots + [SCALE_END] * (SCALE_TOKENS - len(slots)), np.int32)
    k, v = (random(rng, np.float32, mapping.size, heads) for _ in range(2))
    dead = (mapping < 0) | (mapping >= SCALE_END)
    k[dead], v[dead] = np.nan, np.nan
    got = run(mosaic_tpu_update.write_scales_tpu, scales, k, v, mapping, mode=mode)
    same(got, reference.write_kv(scales[..., None], k[..., None], v[..., None], mapping)[..., 0])


@pytest.mark.parametrize("slots", SCALE_SLOTS.values(), ids=SCALE_SLOTS)
def test_write_scales_equals_numpy(rng: np.random.Generator, slots: list[int]) -> None:
    check_scales(slots, rng)


def test_write_scales_when_copies_are_done_at_once(rng: np.random.Generator) -> None:
    check_scales([*range(100, 135), 9, 128, 11], rng, mode="eager")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_write_scales_takes_tokens_in_any_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    check_scales(list(rng.permutation(SCALE_END + 9)[:SCALE_TOKENS]), rng, heads=3)


@pytest.mark.slow
def test_write_scales_in_two_calls(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mosaic_tpu_update, "SCALE_BYTES", 4096 * 2)  # 256 tokens of one head
    check_scales([*range(100, 400), 5], rng, heads=1)


def test_write_kv_takes_the_kernels_for_vectors_and_scales_or_for_neither() -> None:
    def kernels(page_size: int) -> list[str]:
        pool = jax.ShapeDtypeStruct((4, 2, 1, page_size, 128), jnp.int8)
        tokens = jax.ShapeDtypeStruct((3, 1, 128), jnp.bfloat16)
        slots = jax.ShapeDtypeStruct((3,), jnp.int32)
        return written_by_kernels(pool, tokens, slots, scales=jnp.zeros(pool.shape[:4]))

    assert kernels(LANES) == ["write_kv_", "write_scales"]
    assert kernels(64) == []


def test_write_kv_quantises_into_pages_and_scales(rng: np.random.Generator) -> None:
    pool = random(rng, np.int8, 2, 2, 1, LANES, DIM)
    scales = random(rng, np.float32, 2, 2, 1, LANES)
    k, v = (random(rng, np.float32, 5, 1, DIM) for _ in range(2))
    slots = np.array([126, 127, 128, -3, 40], np.int32)
    write = functools.partial(pallas_kernels.write_kv, implementation="mosaic_tpu", interpret=True)
    got = jax.jit(write)(*map(jnp.asarray, (pool, k, v, slots)), kv_scales=jnp.asarray(scales))
    assert_no_tpu_race()
    for found, expected in zip(
        got, reference.write_kv(pool, k, v, slots, kv_scales=scales), strict=True
    ):
        same(np.asarray(found), np.asarray(expected))


def test_write_scales_refuses_small_pages() -> None:
    scales, tokens = jnp.zeros((2, 2, 1, 64)), jnp.zeros((1, 1))
    with pytest.raises(NotImplementedError, match=r"pages of 128 tokens.*Got page_size 64"):
        mosaic_tpu_update.write_scales_tpu(scales, tokens, tokens, jnp.zeros((1,), jnp.int32))


# --------------------------------------------------------------------------------- whole pages


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
