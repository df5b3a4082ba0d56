"""Attention of a CPU's own kernels: sizes of every kind, NaN where it is seen, what is refused.

What it shares with XLA's is in test_paged_attention.py, test_every_implementation.py and, for the
bits of a row, test_batch_invariant.py.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels import best_implementation, paged_attention, reference
from tests.pallas_kernels.cases import (
    GARBAGE,
    Batch,
    Shape,
    error,
    make_batch,
    random_batch,
    with_per_head,
)

BF16 = jnp.bfloat16
EVERYTHING: dict[str, Any] = {
    "sliding_window": 41, "soft_cap": 7.0, "sinks": True, "alibi_slopes": True, "scale": 0.3,
}  # fmt: skip
# A block is 64 positions, a vector 4 to 16 numbers, a unit of work up to 48 rows.
SIZES = [
    (1, 2, 1, 2),  # page_size, num_kv_heads, group, head_dim
    (2, 1, 8, 3),
    (4, 3, 2, 15),
    (8, 1, 5, 16),
    (16, 2, 3, 17),
    (32, 1, 7, 33),
    (64, 2, 6, 64),
    (128, 1, 4, 80),
    (256, 1, 2, 255),
    (256, 2, 1, 256),
    (16, 1, 48, 8),
    (16, 1, 71, 64),  # Falcon-7B's: more than fit a unit
]
BF16_SIZES = [size for size in SIZES if size[3] % 2 == 0]

needs_kernels = pytest.mark.usefixtures("cpu_kernels")


@functools.partial(jax.jit, static_argnames=("scale", "sliding_window", "soft_cap", "out_dtype"))
def attend(*arrays: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
    options |= {"return_lse": True, "implementation": "native_cpu"}
    return paged_attention(*arrays, **options)  # pyright: ignore[reportCallIssue]


def errors(size: tuple[int, int, int, int], options: dict[str, Any], dtype: Any) -> np.ndarray:
    """The largest errors of out and lse in some random batches, whose sequences end anywhere."""
    shape, rng = Shape(*size, 5, 90, 300), np.random.default_rng(size)
    found = []
    for _ in range(6):
        batch = random_batch(shape, rng, dtype)
        values = with_per_head(shape, options, rng)
        out, lse = attend(*batch.arrays, **values)
        values.pop("out_dtype", None)
        expected, expected_lse = reference.paged_attention(*batch.arrays, return_lse=True, **values)
        assert out.dtype == options.get("out_dtype", dtype)
        found.append((error(out, expected), error(lse, expected_lse)))
    return np.max(found, axis=0)


@needs_kernels
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_float32_of_any_size_is_float64s(size: Any, options: dict[str, Any]) -> None:
    assert errors(size, options, np.float32).max() < 1e-5


@needs_kernels
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize(("out_dtype", "roundings"), [(BF16, 2), (jnp.float32, 1)])
@pytest.mark.parametrize("size", BF16_SIZES, ids=str)
def test_bfloat16_of_any_size_loses_its_roundings(
    size: Any, out_dtype: Any, roundings: int, options: dict[str, Any]
) -> None:
    """Of the weights, and of the result where it is bfloat16: once, with sinks too."""
    out_error, lse_error = errors(size, {**options, "out_dtype": out_dtype}, BF16)
    assert out_error < roundings * float(jnp.finfo(BF16).eps) / 2
    assert lse_error < 1e-5


@needs_kernels
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 11])
def test_a_row_has_the_same_bits_in_chunks_that_make_units_of_any_height(
    group: int, dtype: Any
) -> None:
    whole = make_batch(
        Shape(16, 1, group, 24, 1, 40, 130), np.random.default_rng(group), [130], [40], dtype
    )
    expected = attend(*whole.arrays)
    for start, end in ((0, 1), (1, 3), (3, 10), (10, 27), (27, 39), (39, 40)):
        q, length = np.zeros_like(whole.q), end - start
        q[:length] = whole.q[start:end]
        lens = np.array([90 + end], np.int32), np.array([0, length], np.int32)
        found = attend(q, whole.kv_pages, whole.page_table, *lens, whole.num_seqs)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(one)[:length], np.asarray(other)[start:end])


def exact_scores(shape: Shape, kv_lens: list[int], q_lens: list[int]) -> Batch:
    """Queries and keys of -1, 0 and 1: their products are exact in float32."""
    batch = make_batch(shape, np.random.default_rng(3), kv_lens, q_lens)
    pool = batch.kv_pages
    pool[:, 0] = np.sign(np.round(pool[:, 0]))
    return dataclasses.replace(batch, q=np.sign(np.round(batch.q)), kv_pages=pool)


@needs_kernels
@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 32.0, -32.0, 2.0**20])
def test_weights_are_right_over_the_whole_range_of_scores(scale: float) -> None:
    batch = exact_scores(Shape(8, 1, 2, 16, 3, 60, 200), [200, 33, 65], [40, 1, 10])
    out, lse = attend(*batch.arrays, scale=scale)
    expected, expected_lse = reference.paged_attention(*batch.arrays, scale=scale, return_lse=True)
    assert error(out, expected) < 1e-5
    assert error(lse, expected_lse) < 1e-6


def decoding(
    page_size: int, lengths: tuple[int, ...], shared: int, dtype: Any
) -> tuple[Batch, Batch]:
    """Sequences of one token each that begin with the same `shared` pages; and with copies of them.

    The fifth has only half of those pages in common with the others.
    """
    count = len(lengths)
    shape = Shape(page_size, 2, 3, 24, count + 1, count + 3, max(lengths))
    apart = make_batch(shape, np.random.default_rng(9), [*lengths], [1] * count, dtype)
    table = apart.page_table.copy()
    for row in range(1, count):
        same = shared // 2 if row == 4 else shared
        apart.kv_pages[table[row, :same]] = apart.kv_pages[table[0, :same]]
        table[row, :same] = table[0, :same]
    return dataclasses.replace(apart, page_table=table), apart


@needs_kernels
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("options", [{}, EVERYTHING, EVERYTHING | {"sliding_window": None}])
@pytest.mark.parametrize(
    ("page_size", "shared", "lengths"),
    [
        (16, 20, (321, 400, 330, 322)),
        (16, 11, (177, 178, 400, 200)),
        (1, 300, (301, 302, 400, 333)),
        (128, 2, (257, 300, 400, 384)),
        (16, 16, tuple(range(257, 337, 2))),  # more than fit a unit
    ],
)
def test_sequences_that_share_pages_get_the_bits_of_pages_of_their_own(
    page_size: int, shared: int, lengths: Any, options: dict[str, Any], dtype: Any
) -> None:
    together, apart = decoding(page_size, lengths, shared, dtype)
    values = with_per_head(Shape(page_size, 2, 3, 24, 1, 1, 1), options, np.random.default_rng(2))
    found, expected = (attend(*batch.arrays, **values) for batch in (together, apart))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    exact = reference.paged_attention(*together.arrays, **values)
    assert error(found[0], exact) < (1e-5 if dtype == np.float32 else 0.012)


@needs_kernels
def test_a_nan_of_one_sequence_does_not_reach_those_that_share_its_pages() -> None:
    together, _ = decoding(16, (321, 400, 330, 322), 20, np.float32)
    together.q[1] = np.nan
    together.kv_pages[together.page_table[2, 20], :, :, 3] = np.nan  # after the shared pages
    out, lse = (np.asarray(a) for a in attend(*together.arrays))
    expected = [False, True, True, False, False, False, False]
    np.testing.assert_array_equal(np.isnan(out).any(axis=(1, 2)), expected)
    np.testing.assert_array_equal(np.isnan(lse).any(axis=1), expected)
    together.kv_pages[together.page_table[0, 9], 1, :, 3] = np.nan  # in pages that all share
    out, _ = attend(*together.arrays)
    assert np.isnan(np.asarray(out))[:4].any(axis=(1, 2)).sum() == 4


SHAPE = Shape(16, 1, 2, 16, 3, 40, 130)


def seen_nan(is_value: bool, position: int, dtype: Any, **options: Any) -> tuple[Any, Any]:
    """Rows of out and lse with a NaN, where one position of the first sequence has one.

    Its queries are the last 20 of 90 positions; the second sequence is healthy.
    """
    batch = make_batch(SHAPE, np.random.default_rng(4), [90, 30], [20, 15], dtype)
    healthy, _ = attend(*batch.arrays, **options)
    page, offset = batch.page_table[0, position // 16], position % 16
    batch.kv_pages[page, int(is_value), 0, offset, 5] = np.nan
    out, lse = (np.asarray(a, np.float32) for a in attend(*batch.arrays, **options))
    np.testing.assert_array_equal(out[20:], np.asarray(healthy, np.float32)[20:])
    return np.isnan(out).any(axis=(1, 2))[:20], np.isnan(lse).any(axis=1)[:20]


@needs_kernels
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("position", [0, 63, 64, 70, 75, 89])
def test_a_nan_key_reaches_the_rows_that_see_it_and_no_other(position: int, dtype: Any) -> None:
    sees = np.arange(70, 90) >= position
    out, lse = seen_nan(False, position, dtype)
    np.testing.assert_array_equal(out, sees)
    np.testing.assert_array_equal(lse, sees)
    out, lse = seen_nan(False, position, dtype, soft_cap=3.0, sliding_window=9)
    sees &= np.arange(70, 90) - 9 < position
    np.testing.assert_array_equal(out, sees)
    np.testing.assert_array_equal(lse, sees)


@needs_kernels
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("position", [0, 63, 64, 70, 75, 89])
def test_a_nan_value_reaches_all_rows_that_see_it(position: int, dtype: Any) -> None:
    """And, as everywhere, rows computed together with those: 0 times NaN is NaN."""
    out, lse = seen_nan(True, position, dtype)
    assert out[np.arange(70, 90) >= position].all()
    assert not lse.any()


@needs_kernels
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_a_nan_that_is_all_a_row_sees_is_no_empty_row(dtype: Any) -> None:
    batch = make_batch(SHAPE, np.random.default_rng(5), [3, 4], [3, 4], dtype)
    batch.kv_pages[batch.page_table[0, 0], 0, 0, 0] = np.nan
    out, lse = attend(*batch.arrays)
    assert np.isnan(np.asarray(lse)[0]).all()
    assert np.isnan(np.asarray(out, np.float32)[0]).all()
    batch.q[3] = np.nan
    out, _ = attend(*batch.arrays)
    is_nan = np.isnan(np.asarray(out, np.float32)).any(axis=(1, 2))
    np.testing.assert_array_equal(is_nan[:8], [True] * 4 + [False] * 4)


@needs_kernels
def test_pages_that_a_window_left_behind_may_be_listed_as_anything() -> None:
    batch = make_batch(SHAPE, np.random.default_rng(6), [120, 99], [10, 1])
    before = attend(*batch.arrays, sliding_window=17)
    for row, first in ((0, 120 - 10 - 16), (1, 99 - 17)):
        columns = first // SHAPE.page_size
        assert columns >= 5
        batch.page_table[row, :columns] = np.resize(GARBAGE, columns)
    for one, other in zip(attend(*batch.arrays, sliding_window=17), before, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@needs_kernels
def test_sequences_past_the_live_ones_are_not_run_however_they_look() -> None:
    batch = make_batch(SHAPE, np.random.default_rng(6), [120, 99, 30], [10, 1, 7])
    all_out, all_lse = (np.asarray(a) for a in attend(*batch.arrays))
    for num_seqs, rows in ((-1, 0), (0, 0), (1, 10), (2, 11), (3, 18), (10**6, 18)):
        out, lse = attend(*batch.arrays[:5], np.array(num_seqs, np.int32))
        np.testing.assert_array_equal(np.asarray(out)[:rows], all_out[:rows])
        np.testing.assert_array_equal(np.asarray(lse)[:rows], all_lse[:rows])
        assert np.all(np.asarray(out)[rows:] == 0)
        assert np.all(np.isneginf(np.asarray(lse)[rows:]))


@needs_kernels
def test_a_result_in_another_dtype_is_the_result_converted() -> None:
    batch = make_batch(SHAPE, np.random.default_rng(7), [90, 30], [20, 1], BF16)
    out, _ = attend(*batch.arrays)
    wide, _ = attend(*batch.arrays, out_dtype=jnp.float32)
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(wide.astype(BF16)), np.asarray(out))


@needs_kernels
def test_attention_runs_in_compiled_loops_and_mapped() -> None:
    batches = [make_batch(SHAPE, np.random.default_rng(s), [90, 30], [20, 1]) for s in (1, 2)]
    stacked = [np.stack(pair) for pair in zip(*(b.arrays for b in batches), strict=True)]
    mapped = jax.vmap(attend)(*stacked)
    looped = jax.lax.map(lambda arrays: attend(*arrays), tuple(map(jnp.asarray, stacked)))
    for i, batch in enumerate(batches):
        for results in (mapped, looped):
            for one, other in zip(attend(*batch.arrays), results, strict=True):
                np.testing.assert_array_equal(np.asarray(other[i]), np.asarray(one))


def call(dtype: Any = jnp.float32, pool_dtype: Any = None, *, head_dim: int = 16) -> dict[str, Any]:
    """Arguments of a small call, as shapes."""
    sizes = {"page_table": (3, 4), "kv_lens": (3,), "cu_q_lens": (4,), "num_seqs": ()}
    arguments = {name: jax.ShapeDtypeStruct(it, jnp.int32) for name, it in sizes.items()}
    pool = jax.ShapeDtypeStruct((5, 2, 3, 8, head_dim), pool_dtype or dtype)
    return arguments | {"q": jax.ShapeDtypeStruct((10, 6, head_dim), dtype), "kv_pages": pool}


def refusal(**arguments: Any) -> str:
    attention = functools.partial(paged_attention, implementation="native_cpu")
    with pytest.raises(NotImplementedError) as caught:
        jax.eval_shape(attention, **arguments)
    return str(caught.value)


@needs_kernels
def test_what_the_kernels_cannot_do_is_refused_by_name_and_left_to_xla() -> None:
    int8 = call(BF16, jnp.int8) | {"kv_scales": jax.ShapeDtypeStruct((5, 2, 3, 8), jnp.float32)}
    narrower = call() | {"q": jax.ShapeDtypeStruct((10, 6, 12), jnp.float32)}
    for arguments, why in (
        (call(jnp.float16), "both be float32 or bfloat16 there, not float16"),
        (call(BF16, jnp.float32), "not bfloat16 and float32"),
        (int8, "not bfloat16 and int8"),
        (narrower, "the pool's heads have 16 columns, those of `q` 12"),
        (call(BF16, head_dim=7), "must be even there in bfloat16, not 7"),
    ):
        assert why in refusal(**arguments)
        chosen, reason = best_implementation(
            *(arguments[n] for n in ("q", "kv_pages", "page_table"))
        )
        assert chosen == "xla"
        assert why in reason
        jax.eval_shape(paged_attention, **arguments)


@needs_kernels
def test_attention_on_a_cpu_is_the_kernels_where_they_are_loaded(
    request: pytest.FixtureRequest,
) -> None:
    batch = make_batch(SHAPE, np.random.default_rng(8), [90, 30], [20, 1])
    arrays = [jnp.asarray(a) for a in batch.arrays]
    assert best_implementation(*arrays[:3]) == ("native_cpu", "")
    out = np.asarray(paged_attention(*arrays))
    np.testing.assert_array_equal(out, np.asarray(attend(*batch.arrays)[0]))
    request.getfixturevalue("no_cpu_kernels")
    chosen, why = best_implementation(*arrays[:3])
    assert (chosen, "not loaded" in why) == ("xla", True)
    assert "are not loaded" in refusal(**call())
    xla = np.asarray(paged_attention(*arrays, implementation="xla"))
    np.testing.assert_array_equal(np.asarray(paged_attention(*arrays)), xla)
    assert np.any(out != xla)  # else this could not fail


@needs_kernels
def test_the_kernels_are_refused_where_another_device_is_traced_for() -> None:
    chip = AbstractDevice("TPU v5 lite", 1, "tpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=chip)
    with jax.sharding.use_abstract_mesh(mesh):
        assert "'native_cpu' does not run on a TPU. Use 'xla'." in refusal(**call())
