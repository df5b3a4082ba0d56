"""XLA attention over quantised and over padded pools equals float64 over what they stand for."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import reference
from pallas_kernels.paged_attention_xla import paged_attention_xla
from pallas_kernels.quantize import quantize
from tests.pallas_kernels.cases import Batch, Shape, error, random_batch

DTYPES = [jnp.float8_e4m3fn, jnp.int8]


@functools.partial(
    jax.jit,
    static_argnames=("scale", "sliding_window", "soft_cap", "max_q_len", "batch_invariant"),
)
def attend(*arrays: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
    every = {"scale": None, "sliding_window": None, "soft_cap": None, "sinks": None}
    every |= {"alibi_slopes": None, "max_q_len": None} | options
    return paged_attention_xla(*arrays, **every)  # pyright: ignore[reportCallIssue]


def quantized(batch: Batch, dtype: Any) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """The batch over a quantised pool, and its scales; what was NaN is poison there too."""
    unused = np.isnan(batch.kv_pages).any(axis=-1)
    values, scales = jax.jit(quantize, static_argnums=1)(np.nan_to_num(batch.kv_pages), dtype)
    pool, scales = np.array(values), np.array(scales)
    pool[unused] = 127 if dtype == jnp.int8 else np.nan
    scales[unused] = np.nan
    return (batch.q, pool, *batch.arrays[2:]), scales


FAMILIES: list[tuple[Shape, dict[str, Any]]] = [
    (Shape(16, 3, 3, 64, 8, 96, 300), {}),
    (Shape(1, 2, 1, 16, 1, 1, 60), {"max_q_len": 1}),
    (Shape(64, 1, 8, 32, 20, 90, 200), {"soft_cap": 2.0, "sliding_window": 100}),
    (Shape(256, 2, 4, 16, 6, 200, 600), {"sinks": True, "alibi_slopes": True, "scale": 0.3}),
]


@pytest.mark.parametrize(
    ("shape", "options", "dtype"),
    [(*family, DTYPES[i % 2]) for i, family in enumerate(FAMILIES)],
    ids=lambda value: str(value)[:40],
)
def test_equals_float64_over_what_the_pool_stands_for(
    shape: Shape, options: dict[str, Any], dtype: Any
) -> None:
    rng = np.random.default_rng(shape.page_size)
    values = dict(options)
    for name in {"sinks", "alibi_slopes"} & set(options):
        values[name] = rng.uniform(0, 1, shape.num_q_heads).astype(np.float32)
    for _ in range(12):
        arrays, scales = quantized(random_batch(shape, rng), dtype)
        out, lse = attend(*arrays, kv_scales=scales, **values)
        expected, expected_lse = reference.paged_attention(
            *arrays, kv_scales=scales, return_lse=True, **values
        )
        assert error(out, expected) < 1e-5
        assert error(lse, expected_lse) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_vector_with_nan_corrupts_its_own_sequence_and_stays_visible(dtype: Any) -> None:
    """From `write_kv` on: the engine reports such rows."""
    rng = np.random.default_rng(3)
    pool, scales = np.zeros((5, 2, 1, 8, 16), dtype), np.ones((5, 2, 1, 8), np.float32)
    q, k, v = (rng.standard_normal((6, 1, 16)).astype(np.float32) for _ in range(3))
    slots = np.array([8, 9, 10, 16, 17, 18], np.int32)  # three positions of two sequences
    table = np.array([[1], [2]], np.int32)
    metadata = (table, np.array([3, 3], np.int32), np.array([0, 3, 6], np.int32), np.int32(2))
    write = jax.jit(pallas_kernels.write_kv)

    def run(k: np.ndarray, v: np.ndarray) -> np.ndarray:
        pages, page_scales = write(pool, k, v, slots, kv_scales=scales)
        return np.asarray(attend(q, pages, *metadata, kv_scales=page_scales)[0])

    healthy = run(k, v)
    assert np.all(np.isfinite(healthy))
    for spoiled, bad in ((0, np.nan), (0, np.inf), (1, np.nan), (1, -np.inf)):
        kv = [k.copy(), v.copy()]
        kv[spoiled][0, 0, 3] = bad
        sick = run(*kv)
        assert np.all(np.isnan(sick[:3]))
        np.testing.assert_array_equal(sick[3:], healthy[3:])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_padded_pool_gives_what_the_plain_one_gives(dtype: Any, batch_invariant: bool) -> None:
    shape, rng = Shape(8, 2, 2, 24, 4, 40, 90), np.random.default_rng(4)
    batch = random_batch(shape, rng)
    arrays, scales = batch.arrays, None
    if dtype == jnp.int8:
        arrays, scales = quantized(batch, dtype)
    unused = np.isnan(batch.kv_pages).any(axis=-1)
    padded = np.pad(arrays[1], [(0, 0)] * 4 + [(0, 8)])
    padded[unused] = 127 if dtype == jnp.int8 else np.nan
    arrays = (arrays[0], padded, *arrays[2:])
    out, lse = attend(*arrays, kv_scales=scales, batch_invariant=batch_invariant)
    expected, expected_lse = reference.paged_attention(*arrays, kv_scales=scales, return_lse=True)
    assert out.shape == batch.q.shape
    assert error(out, expected) < 1e-5
    assert error(lse, expected_lse) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (jnp.bfloat16, {}),
        (jnp.bfloat16, {"batch_invariant": True}),
        (jnp.float8_e4m3fn, {}),
    ],
)
def test_temporaries_stay_small_at_64_sequences_of_8192_positions(
    dtype: Any, options: dict[str, Any]
) -> None:
    """The pool is 2.1e9 bytes in bfloat16; as float32 it would be twice that."""

    def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    pool = array(64 * 512 + 1, 2, 8, 16, 128, dtype=dtype)
    arrays = (array(64, 32, 128, dtype=jnp.bfloat16), pool, array(64, 512), array(64), array(65))
    if dtype == jnp.float8_e4m3fn:
        options = options | {"kv_scales": array(*pool.shape[:4], dtype=jnp.float32)}
    compiled = attend.lower(*arrays, array(), **options).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 64e6
