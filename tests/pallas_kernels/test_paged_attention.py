"""`paged_attention` equals float64 dense attention, whatever unused memory holds.

XLA's, and that of a CPU's own kernels; what only those promise is in test_cpu_attention.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import reference
from pallas_kernels.paged_attention import IMPLEMENTATIONS
from tests.pallas_kernels.cases import Batch, Shape, error, make_batch, random_batch, with_per_head

CASES_PER_FAMILY = 56

# (shape, options): a compilation each. Together they span pages 1..256, heads, groups, head sizes.
FAMILIES: list[tuple[Shape, dict[str, Any]]] = [
    (Shape(16, 3, 3, 64, 8, 96, 300), {}),
    (Shape(1, 2, 1, 16, 1, 1, 60), {}),
    (Shape(2, 1, 4, 16, 5, 33, 150), {"sliding_window": 1}),
    (Shape(4, 4, 2, 32, 9, 130, 140), {"sliding_window": 37}),
    (Shape(8, 2, 7, 32, 3, 7, 290), {"soft_cap": 5.0}),
    (Shape(32, 8, 1, 128, 2, 70, 260), {"sinks": True}),
    (Shape(64, 1, 8, 64, 37, 90, 200), {"soft_cap": 2.0, "sliding_window": 100}),
    (Shape(128, 7, 1, 32, 3, 150, 400), {"alibi_slopes": True, "sliding_window": 129}),
    (
        Shape(256, 2, 4, 16, 6, 200, 600),
        {"sinks": True, "soft_cap": 9.0, "alibi_slopes": True, "scale": 0.3, "sliding_window": 300},
    ),
]


STATIC = ("scale", "sliding_window", "soft_cap", "max_q_len", "implementation")


@functools.partial(jax.jit, static_argnames=STATIC)
def attend(
    *arrays: jax.Array, implementation: str = "xla", **options: Any
) -> tuple[jax.Array, jax.Array]:
    options |= {"return_lse": True, "implementation": implementation}
    return pallas_kernels.paged_attention(*arrays, **options)  # pyright: ignore[reportCallIssue]


def errors(
    shape: Shape, options: dict[str, Any], dtype: Any, count: int, implementation: str = "xla"
) -> np.ndarray:
    """[count, 2]: errors of out and of lse."""
    rng = np.random.default_rng(shape.page_size * 1000 + shape.max_len)
    found = []
    for _ in range(count):
        batch = random_batch(shape, rng, dtype)
        values = with_per_head(shape, options, rng)
        out, lse = attend(*batch.arrays, implementation=implementation, **values)
        expected, expected_lse = reference.paged_attention(*batch.arrays, return_lse=True, **values)
        assert out.dtype == dtype
        found.append((error(out, expected), error(lse, expected_lse)))
    return np.array(found)


@pytest.mark.parametrize(("shape", "options"), FAMILIES, ids=lambda value: str(value)[:60])
def test_float32_equals_float64_dense_attention(shape: Shape, options: dict[str, Any]) -> None:
    assert errors(shape, options, np.float32, CASES_PER_FAMILY).max() < 1e-5


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize(("shape", "options"), FAMILIES, ids=lambda value: str(value)[:60])
def test_a_cpus_own_kernels_equal_float64_dense_attention(
    shape: Shape, options: dict[str, Any]
) -> None:
    assert errors(shape, options, np.float32, 16, "native_cpu").max() < 1e-5


def test_families_hold_at_least_500_cases() -> None:
    assert len(FAMILIES) * CASES_PER_FAMILY >= 500


@pytest.mark.parametrize(("dtype", "family"), [(jnp.bfloat16, 0), (jnp.float16, 8)])
def test_half_precision_loses_only_its_last_rounding(dtype: Any, family: int) -> None:
    out_error, lse_error = errors(*FAMILIES[family], dtype, 12).max(axis=0)
    assert out_error < float(jnp.finfo(dtype).eps) / 2 + 1e-5  # bfloat16: 3.9e-3
    assert lse_error < 1e-5


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("family", [0, 8])
def test_in_bfloat16_a_cpus_own_kernels_round_the_weights_too(family: int) -> None:
    out_error, lse_error = errors(*FAMILIES[family], jnp.bfloat16, 12, "native_cpu").max(axis=0)
    assert out_error < float(jnp.finfo(jnp.bfloat16).eps)  # 7.8e-3: two roundings
    assert lse_error < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "options"), FAMILIES, ids=lambda value: str(value)[:60])
def test_float32_equals_float64_dense_attention_in_500_cases_each(
    shape: Shape, options: dict[str, Any]
) -> None:
    assert errors(shape, options, np.float32, 500).max() < 1e-5


class TestRows:
    """What single rows must be; all of one shape."""

    shape = Shape(4, 1, 2, 16, 4, 24, 40)
    implementation = "xla"

    def attend(self, *arrays: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
        return attend(*arrays, implementation=self.implementation, **options)

    def batch(self, kv_lens: list[int], q_lens: list[int]) -> Batch:
        return make_batch(self.shape, np.random.default_rng(1), kv_lens, q_lens)

    def test_padding_rows_are_zero_with_lse_minus_infinity(self) -> None:
        out, lse = self.attend(*self.batch([9, 5], [1, 3]).arrays)
        assert np.all(np.asarray(out)[4:] == 0)
        assert np.all(np.isneginf(np.asarray(lse)[4:]))
        assert np.all(np.isfinite(np.asarray(lse)[:4]))

    def test_a_promise_of_decode_only_changes_nothing_but_the_code(self) -> None:
        batch = self.batch([9, 20, 0, 33], [1, 0, 0, 1])
        options: dict[str, Any] = {"max_q_len": 1}
        out, lse = self.attend(*batch.arrays)
        promised, promised_lse = self.attend(*batch.arrays, **options)
        np.testing.assert_array_equal(np.asarray(promised), np.asarray(out))
        np.testing.assert_array_equal(np.asarray(promised_lse), np.asarray(lse))

    def test_no_live_sequence_gives_zeros(self) -> None:
        out, lse = self.attend(*self.batch([], []).arrays)
        assert np.all(np.asarray(out) == 0)
        assert np.all(np.isneginf(np.asarray(lse)))

    def test_a_row_alone_equals_the_row_in_a_mixed_batch(self) -> None:
        mixed = self.batch([9, 20, 33, 7], [1, 12, 1, 7])
        out, _ = self.attend(*mixed.arrays)
        for s in range(4):
            first, last = int(mixed.cu_q_lens[s]), int(mixed.cu_q_lens[s + 1])
            q = np.zeros_like(mixed.q)
            q[: last - first] = mixed.q[first:last]
            alone, _ = self.attend(
                q,
                mixed.kv_pages,
                np.roll(mixed.page_table, -s, axis=0),
                np.roll(mixed.kv_lens, -s),
                np.array([0, *[last - first] * 4], np.int32),
                np.array(1, np.int32),
            )
            assert error(alone[: last - first], np.asarray(out[first:last], np.float64)) < 1e-6

    def test_chunks_of_a_prompt_equal_the_whole_prompt(self) -> None:
        whole = self.batch([22], [22])
        out, _ = self.attend(*whole.arrays)
        for start, end in ((0, 9), (9, 10), (10, 22)):
            q = np.zeros_like(whole.q)
            q[: end - start] = whole.q[start:end]
            cu_q_lens = np.array([0, *[end - start] * 4], np.int32)
            kv_lens = np.array([end, 0, 0, 0], np.int32)
            chunk, _ = self.attend(
                q, whole.kv_pages, whole.page_table, kv_lens, cu_q_lens, whole.num_seqs
            )
            assert error(chunk[: end - start], np.asarray(out[start:end], np.float64)) < 1e-6

    def test_nan_in_one_sequence_reaches_no_other(self) -> None:
        batch = self.batch([9, 20, 33], [1, 12, 1])
        healthy, _ = self.attend(*batch.arrays)
        pool = batch.kv_pages.copy()
        pool[batch.page_table[1, 0], :, :, 0] = np.nan
        sick, _ = self.attend(batch.q, pool, *batch.arrays[2:])
        assert np.all(np.isnan(np.asarray(sick)[1:13]))
        keep = np.r_[0, 13:24]
        np.testing.assert_array_equal(np.asarray(sick)[keep], np.asarray(healthy)[keep])

    def test_pages_before_a_window_are_never_read_into_a_result(self) -> None:
        batch = self.batch([33, 30], [1, 2])
        options: dict[str, Any] = {"sliding_window": 6}
        before, _ = self.attend(*batch.arrays, **options)
        pool = batch.kv_pages.copy()
        pool[batch.page_table[0, :6]] = np.nan  # positions 0..23; the window starts at 27
        pool[batch.page_table[1, :5]] = np.nan  # positions 0..19; the windows start at 23
        after, _ = self.attend(batch.q, pool, *batch.arrays[2:], **options)
        np.testing.assert_array_equal(np.asarray(after), np.asarray(before))


@pytest.mark.usefixtures("cpu_kernels")
class TestRowsOfACpusOwnKernels(TestRows):
    implementation = "native_cpu"


def test_reference_implementation_is_reachable_by_name() -> None:
    batch = TestRows().batch([9, 5], [1, 3])
    arrays = [jnp.asarray(a) for a in batch.arrays]
    out, lse = pallas_kernels.paged_attention(*arrays, implementation="reference", return_lse=True)
    expected, expected_lse = reference.paged_attention(*batch.arrays, return_lse=True)
    assert error(out, expected) < 1e-6
    assert error(lse, expected_lse) < 1e-6


def abstract(**changes: Any) -> dict[str, Any]:
    """Arguments of a valid call of 3 sequences and 10 tokens as shapes, some of them replaced."""
    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    arguments: dict[str, Any] = {
        "q": jax.ShapeDtypeStruct((10, 6, 16), jnp.float32),
        "kv_pages": jax.ShapeDtypeStruct((5, 2, 3, 8, 16), jnp.float32),
        "page_table": i32((3, 4)),
        "kv_lens": i32((3,)),
        "cu_q_lens": i32((4,)),
        "num_seqs": i32(()),
    }
    return arguments | changes


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


WRONG_ARGUMENTS = [
    ({"q": array(10, 6)}, ValueError, r"`q` must have shape .*Got \(10, 6\)"),
    ({"q": array(10, 6, 32)}, ValueError, r"`q` must have at most the head_dim of `kv_pages`, 16"),
    ({"q": array(10, 4, 16)}, ValueError, r"`q` must have a multiple of the 3 heads.*Got 4"),
    ({"q": array(0, 6, 16)}, ValueError, r"`q` must have no dimension of size 0"),
    ({"q": array(10, 6, 16, dtype=jnp.int32)}, TypeError, r"`q` must be float32.*Got int32"),
    ({"kv_pages": array(5, 2, 3, 8)}, ValueError, r"`kv_pages` must have shape"),
    ({"kv_pages": array(5, 3, 3, 8, 16)}, ValueError, r"`kv_pages` must have 2 \(K and V\)"),
    ({"kv_pages": array(5, 2, 3, 12, 16)}, ValueError, r"power of two from 1 to 256. Got 12"),
    ({"kv_pages": array(5, 2, 3, 512, 16)}, ValueError, r"power of two from 1 to 256. Got 512"),
    ({"kv_pages": array(5, 2, 3, 8, 16, dtype=jnp.int16)}, TypeError, r"float32.*Got int16"),
    (
        {"kv_pages": array(5, 2, 3, 8, 16, dtype=jnp.int8)},
        ValueError,
        r"`kv_scales` must be given for a pool of int8",
    ),
    ({"kv_scales": array(5, 2, 3, 8)}, TypeError, r"`kv_pages` must be float8_e4m3fn or int8"),
    (
        {
            "kv_pages": array(5, 2, 3, 8, 16, dtype=jnp.int8),
            "kv_scales": array(5, 2, 3),
        },
        ValueError,
        r"`kv_scales` must have shape \(5, 2, 3, 8\)",
    ),
    (
        {
            "kv_pages": array(5, 2, 3, 8, 16, dtype=jnp.float8_e4m3fn),
            "kv_scales": array(5, 2, 3, 8, dtype=jnp.bfloat16),
        },
        TypeError,
        r"`kv_scales` must be float32. Got bfloat16",
    ),
    ({"page_table": array(3, dtype=jnp.int32)}, ValueError, r"`page_table` must have shape"),
    ({"page_table": array(3, 0, dtype=jnp.int32)}, ValueError, r"`page_table` must have no dim"),
    ({"page_table": array(3, 4)}, TypeError, r"`page_table` must be int32. Got float32"),
    ({"kv_lens": array(4, dtype=jnp.int32)}, ValueError, r"`kv_lens` must have shape \(3,\)"),
    ({"kv_lens": array(3, dtype=jnp.uint32)}, TypeError, r"`kv_lens` must be int32. Got uint32"),
    ({"cu_q_lens": array(3, dtype=jnp.int32)}, ValueError, r"`cu_q_lens` must have shape \(4,\)"),
    ({"cu_q_lens": array(4, dtype=jnp.int16)}, TypeError, r"`cu_q_lens` must be int32"),
    ({"num_seqs": array(1, dtype=jnp.int32)}, ValueError, r"`num_seqs` must have shape \(\)"),
    ({"num_seqs": array()}, TypeError, r"`num_seqs` must be int32. Got float32"),
    ({"sinks": array(3)}, ValueError, r"`sinks` must have shape \(6,\)"),
    ({"sinks": array(6, dtype=jnp.bfloat16)}, TypeError, r"`sinks` must be float32"),
    ({"alibi_slopes": array(6, 1)}, ValueError, r"`alibi_slopes` must have shape \(6,\)"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), WRONG_ARGUMENTS)
def test_wrong_arrays_are_refused_at_trace_time(
    changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        jax.eval_shape(pallas_kernels.paged_attention, **abstract(**changes))


WRONG_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"scale": float("nan")}, ValueError, "`scale` must be finite in float32. Got nan"),
    ({"sliding_window": 0}, ValueError, "`sliding_window` must be at least 1, or None. Got 0"),
    ({"max_q_len": 0}, ValueError, "`max_q_len` must be at least 1, or None. Got 0"),
    ({"soft_cap": 0.0}, ValueError, "`soft_cap` must be from 1e-30 to 1e.30, or None. Got 0.0"),
    ({"implementation": "triton"}, ValueError, "`implementation` must be None or one of .*triton"),
    ({"implementation": "mosaic_gpu"}, NotImplementedError, "head_dim of 64, 128, 256 .* Got 16"),
    ({"implementation": "mosaic_tpu"}, NotImplementedError, "head_dim of 128 or 256 .* Got 16"),
    ({"sliding_window": 8.5}, TypeError, "`sliding_window` must be an int, or None. Got float"),
    ({"sliding_window": 2**40}, ValueError, r"`sliding_window` must be below 2\^31"),
    ({"scale": np.float32(1)}, TypeError, "`scale` must be a Python number, or None. Got float32"),
    ({"out_dtype": jnp.int32}, TypeError, "`out_dtype` must be float32, bfloat16 or .* Got int32"),
    ({"plan": object()}, TypeError, "`plan` must be what `plan_attention` returns. Got object"),
    (
        {"interpret": True, "implementation": "xla"},
        ValueError,
        "`interpret` must be used with a Mosaic impl.* Got 'xla'",
    ),
]


@pytest.mark.parametrize(("options", "kind", "message"), WRONG_OPTIONS)
def test_what_cannot_be_done_is_refused_by_name(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    call = functools.partial(pallas_kernels.paged_attention, **options)
    with pytest.raises(kind, match=message):
        jax.eval_shape(call, **abstract())


def test_every_implementation_is_known_by_name() -> None:
    names = {"mosaic_gpu", "mosaic_tpu", "native_cpu", "xla", "reference"}
    assert set(IMPLEMENTATIONS) == names


def temp_bytes(shape: Shape, num_pages: int, pages_per_seq: int, dtype: Any) -> int:
    """Of one compiled call, by the compiler's account; nothing is run."""
    seqs, heads, dim = shape.max_seqs, shape.num_kv_heads, shape.head_dim
    arguments = abstract(
        q=array(shape.num_tokens, shape.num_q_heads, dim, dtype=dtype),
        kv_pages=array(num_pages, 2, heads, shape.page_size, dim, dtype=dtype),
        page_table=array(seqs, pages_per_seq, dtype=jnp.int32),
        kv_lens=array(seqs, dtype=jnp.int32),
        cu_q_lens=array(seqs + 1, dtype=jnp.int32),
    )
    attention = functools.partial(pallas_kernels.paged_attention, implementation="xla")
    compiled = jax.jit(attention).lower(**arguments).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def test_temporaries_do_not_grow_with_the_context() -> None:
    shape = Shape(16, 8, 4, 128, 64, 64, 0)
    # 64 sequences of 8,192 positions: their keys and values are 2.1e9 bytes.
    assert temp_bytes(shape, 64 * 512 + 1, 512, jnp.bfloat16) < 64e6
