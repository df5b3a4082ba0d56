"""Wrong calls of the public operations: an error that names the argument, never a deep trace."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import KernelConfig
from pallas_kernels.arguments import as_array, as_int32, without_gradients
from pallas_kernels.attention_plan import AttentionPlan

Q = jnp.ones((4, 2, 128), jnp.bfloat16)
POOL = jnp.ones((6, 2, 1, 16, 128), jnp.bfloat16)
TABLE, LENS, STARTS, SEQS = [[1, 2], [3, 4]], [5, 6], [0, 2, 4], 2
TOKENS, IDS = jnp.ones((2, 1, 128), jnp.bfloat16), [1, 2]
INT8, SCALES = POOL.astype(jnp.int8), jnp.ones(POOL.shape[:4], jnp.float32)
GPU = KernelConfig("columns", 8, 64, 3, 4, True, True)

# Of any type: what is handed to them here is wrong on purpose.
attend: Any = pallas_kernels.paged_attention
write_kv: Any = pallas_kernels.write_kv
copy: Any = pallas_kernels.copy_pages
gather: Any = pallas_kernels.gather_pages
scatter: Any = pallas_kernels.scatter_pages
merge: Any = pallas_kernels.merge_states
plan: Any = pallas_kernels.plan_attention
check: Any = pallas_kernels.check_metadata


def attention(**changes: Any) -> dict[str, Any]:
    arguments = {
        "q": Q, "kv_pages": POOL, "page_table": TABLE, "kv_lens": LENS, "cu_q_lens": STARTS,
        "num_seqs": SEQS,
    }  # fmt: skip
    return arguments | changes


def write(**changes: Any) -> dict[str, Any]:
    return {"kv_pages": POOL, "k": TOKENS, "v": TOKENS, "slot_mapping": [17, 30]} | changes


def metadata(**changes: Any) -> dict[str, Any]:
    arguments = {
        "page_table": TABLE, "kv_lens": LENS, "cu_q_lens": STARTS, "num_seqs": SEQS,
        "num_pages": 6, "page_size": 16,
    }  # fmt: skip
    return arguments | changes


# --------------------------------------------------------------------------------- arrays and ids


def test_integers_of_python_are_int32() -> None:
    for value in (3, [3, -1], [[1, 2], [3, 4]], (7,), [], [2**31 - 1, -(2**31)], [np.int64(3)]):
        got = as_int32("ids", value)
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(np.asarray(got), np.asarray(value))


@pytest.mark.parametrize(
    "value",
    [True, [True], 2.0, [1.5], "12", None, {1}, [[1], [2, 3]], 2**31, [2**40], [10**30], object()],
)
def test_what_is_no_integer_of_32_bits_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"`ids` must be an int32 array, or integers .* Got "):
        as_int32("ids", value)


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.float32, np.bool_])
def test_arrays_of_another_dtype_are_never_converted(dtype: Any) -> None:
    with pytest.raises(TypeError, match=f"`ids` must be int32. Got {np.dtype(dtype)}: convert it"):
        as_int32("ids", np.ones(3, dtype))


def test_a_list_of_traced_values_is_refused() -> None:
    with pytest.raises(TypeError, match="`ids` must be an int32 array"):
        jax.eval_shape(lambda x: as_int32("ids", [x, x]), jnp.int32(1))


def test_arrays_of_numpy_are_taken_and_nothing_else() -> None:
    got = as_array("x", np.ones(3, jnp.bfloat16))
    assert isinstance(got, jax.Array)
    assert got.dtype == jnp.bfloat16
    for value, told in (
        ([1.0], "an array of JAX or NumPy. Got list"),
        (None, "an array of JAX or NumPy. Got NoneType"),
        (np.ones(3), "a dtype that JAX keeps. Got float64"),
        (np.array(["a"]), "a dtype that JAX keeps. Got <U1"),
    ):
        with pytest.raises(TypeError, match=f"`x` must (be|have) {told}"):
            as_array("x", value)


def test_lists_and_numpy_give_what_arrays_give() -> None:
    expected = attend(Q, POOL, *(jnp.asarray(a, jnp.int32) for a in (TABLE, LENS, STARTS, SEQS)))
    for arguments in (
        attention(),
        attention(q=np.asarray(Q), kv_pages=np.asarray(POOL), kv_lens=np.array(LENS, np.int32)),
    ):
        np.testing.assert_array_equal(np.asarray(attend(**arguments)), np.asarray(expected))
    pool = np.asarray(POOL)
    written = write_kv(pool, 2 * TOKENS, np.asarray(TOKENS), [17, 30])
    assert np.all(np.asarray(written)[1, 0, :, [1, 14]] == 2)
    copied = copy(written, [1], [5])
    np.testing.assert_array_equal(np.asarray(copied)[5], np.asarray(written)[1])
    assert gather(pool, []).shape == (0, *POOL.shape[1:])
    swapped = scatter(pool, [0], np.asarray(copied)[5:])
    np.testing.assert_array_equal(np.asarray(swapped)[0], np.asarray(written)[1])


# ------------------------------------------------------------------------------------ wrong calls

by_gpu: dict[str, Any] = {"implementation": "mosaic_gpu"}
parts, logs = np.ones((2, 3, 4, 5), np.float32), np.ones((2, 3, 4), np.float32)

WRONG: list[tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = [
    (attend, attention(kv_lens=[5.0, 6.0]), TypeError, r"`kv_lens` must be .*Got \[5.0, 6.0\]"),
    (attend, attention(page_table=[[1], [2, 3]]), TypeError, "`page_table` must be an int32"),
    (attend, attention(page_table=[1, 2]), ValueError, "`page_table` must have shape"),
    (attend, attention(num_seqs=[2]), ValueError, r"`num_seqs` must have shape \(\)"),
    (attend, attention(num_seqs=True), TypeError, "`num_seqs` must be an int32 .*Got True"),
    (attend, attention(cu_q_lens=[0, 4]), ValueError, r"`cu_q_lens` must have shape \(3,\)"),
    (attend, attention(q=None), TypeError, "`q` must be an array of JAX .* Got NoneType"),
    (attend, attention(kv_pages=(POOL,)), TypeError, "`kv_pages` must be an array .* Got tuple"),
    (attend, attention(sinks=[1.0, 2.0]), TypeError, "`sinks` must be an array .* Got list"),
    (attend, attention(alibi_slopes=np.ones(2)), TypeError, "`alibi_slopes` must have a dtype"),
    (attend, attention(kv_pages=INT8, kv_scales=[1.0]), TypeError, "`kv_scales` must be an array"),
    (attend, attention(interpret="yes"), TypeError, "`interpret` must be False, True or"),
    (attend, attention(interpret=1, **by_gpu), TypeError, "`interpret` must be .* Got 1"),
    (attend, attention(batch_invariant="no"), TypeError, "`batch_invariant` must be True or"),
    (attend, attention(return_lse="no"), TypeError, "`return_lse` must be True or False"),
    (attend, attention(scale=True), TypeError, "`scale` must be a Python number.* Got bool"),
    (attend, attention(scale=1e300), ValueError, r"`scale` must be finite in float32. Got 1e\+300"),
    (attend, attention(scale=10**400), ValueError, "`scale` must be .* an int of 1329 bits"),
    (attend, attention(soft_cap=1e38), ValueError, "`soft_cap` must be from 1e-30 to 1e.30"),
    (attend, attention(soft_cap=1e-45), ValueError, "`soft_cap` must be from 1e-30 to 1e.30"),
    (attend, attention(sliding_window=True), TypeError, "`sliding_window` must be an int"),
    (attend, attention(max_q_len=2**31), ValueError, r"`max_q_len` must be below 2\^31"),
    (attend, attention(out_dtype="half?"), TypeError, "`out_dtype` must be .* Got 'half\\?'"),
    (attend, attention(implementation=["xla"]), ValueError, r"`implementation` must be None or"),
    (plan, attention(kv_lens=None), TypeError, "`kv_lens` must be an int32 array"),
    (plan, attention(q=[1]), TypeError, "`q` must be an array, or a jax.ShapeDtypeStruct"),
    (plan, attention(cascade="yes"), TypeError, "`cascade` must be True or False. Got 'yes'"),
    (plan, attention(decode="fast"), TypeError, "`decode` must be a KernelConfig, or None"),
    (
        plan,
        attention(prefill=KernelConfig("rows", "64", 64, 2, 4, True, True), **by_gpu),  # pyright: ignore[reportArgumentType]
        TypeError,
        "`prefill` must have integers for its sizes",
    ),
    (
        plan,
        attention(decode=GPU, implementation="xla"),
        NotImplementedError,
        "`decode` must be used with a Mosaic implementation. Got 'xla'",
    ),
    (write_kv, write(slot_mapping=[True, False]), TypeError, "`slot_mapping` must"),
    (write_kv, write(slot_mapping=[1]), ValueError, "`k` must have shape"),
    (write_kv, write(k=[[1.0]]), TypeError, "`k` must be an array of JAX or NumPy"),
    (write_kv, write(kv_pages=None), TypeError, "`kv_pages` must be an array"),
    (write_kv, write(kv_pages=POOL[:0]), ValueError, "none of them 0"),
    (write_kv, write(kv_pages=INT8), ValueError, "`kv_scales` must be given"),
    (write_kv, write(interpret="yes"), TypeError, "`interpret` must be False"),
    (write_kv, write(implementation=1), ValueError, "`implementation` must be None"),
    (copy, {"kv_pages": POOL, "src": 1, "dst": 2}, ValueError, "`src` must have one dimension"),
    (copy, {"kv_pages": POOL, "src": [1], "dst": [2.0]}, TypeError, "`dst` must be an int32"),
    (copy, {"kv_pages": [1], "src": [1], "dst": [2]}, TypeError, "`kv_pages` must be an array"),
    (gather, {"kv_pages": SCALES[:0], "page_ids": [1]}, ValueError, "none of them 0"),
    (gather, {"kv_pages": POOL, "page_ids": "1"}, TypeError, "`page_ids` must be an int32"),
    (scatter, {"kv_pages": POOL, "page_ids": [1], "pages": [1]}, TypeError, "`pages` must be an"),
    (merge, {"outs": [parts], "lses": logs}, TypeError, "`outs` must be an array"),
    (merge, {"outs": parts[:0], "lses": logs[:0]}, ValueError, "`outs` must have .* a part at"),
    (merge, {"outs": parts.astype(np.int32), "lses": logs}, TypeError, "`outs` must be floating"),
    (merge, {"outs": parts, "lses": logs.astype(np.float16)}, TypeError, "`lses` must be float32"),
    (check, metadata(cu_q_lens=[0, 2]), ValueError, r"`cu_q_lens` must have shape \(3,\)"),
    (check, metadata(kv_lens=[5]), ValueError, r"`kv_lens` must have shape \(2,\)"),
    (check, metadata(kv_lens=[5.5, 6.0]), TypeError, "`kv_lens` must hold integers. Got float64"),
    (check, metadata(page_table=[1, 2]), ValueError, "`page_table` must have 2 dimensions"),
    (check, metadata(page_table=[[1], [2, 3]]), TypeError, "`page_table` must hold integers"),
    (check, metadata(page_table=None), TypeError, "`page_table` must hold integers"),
    (check, metadata(num_seqs=[1, 2]), ValueError, "`num_seqs` must have 0 dimensions"),
    (check, metadata(page_size=0), ValueError, "`page_size` must be at least 1. Got 0"),
    (check, metadata(num_pages=0), ValueError, "`num_pages` must be at least 1. Got 0"),
    (
        pallas_kernels.best_implementation,
        {"q": None, "kv_pages": POOL, "page_table": LENS},
        TypeError,
        "`q` must be an array, or a jax.ShapeDtypeStruct. Got NoneType",
    ),
    (
        pallas_kernels.best_implementation,
        {"q": Q, "kv_pages": POOL, "page_table": jnp.ones(3)},
        ValueError,
        "`page_table` must have shape",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "arguments", "kind", "message"), WRONG)
def test_a_wrong_call_is_told_by_name(
    operation: Callable[..., Any], arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        operation(**arguments)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("head_dim", "name", "kind", "message"),
    [
        (0, None, ValueError, "`head_dim` must be from 1 to 2147483647. Got 0"),
        (-3, "mosaic_gpu", ValueError, "Got -3"),
        (2**31, "xla", ValueError, "Got 2147483648"),
        (10**400, "mosaic_tpu", ValueError, "Got an int of 1329 bits"),
        (True, "mosaic_gpu", TypeError, "`head_dim` must be an int. Got True"),
        (64.0, "mosaic_gpu", TypeError, r"Got 64\.0"),
        ("64", None, TypeError, "Got '64'"),
        (257, "mosaic_gpu", NotImplementedError, "`head_dim` must be at most 256 .* Got 257"),
        (64, "flash", ValueError, "`implementation` must be None or one of .* Got 'flash'"),
        (64, ["xla"], ValueError, "`implementation` must be None or one of"),
    ],
)
def test_a_head_that_no_pool_can_hold_is_refused(
    head_dim: Any, name: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        pallas_kernels.padded_head_dim(head_dim, name)


def test_a_traced_table_has_no_values_to_check() -> None:
    def checked(table: Any) -> Any:
        check(**metadata(page_table=table))

    with pytest.raises(TypeError, match="`page_table` must have values"):
        jax.eval_shape(checked, jnp.asarray(TABLE))


# --------------------------------------------------------------------- implementations, gradients

UPDATES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "write_kv": (write_kv, write()),
    "copy_pages": (copy, {"kv_pages": POOL, "src": IDS, "dst": [3, 4]}),
    "gather_pages": (gather, {"kv_pages": POOL, "page_ids": IDS}),
    "scatter_pages": (scatter, {"kv_pages": POOL, "page_ids": IDS, "pages": POOL[:2]}),
}


@pytest.mark.parametrize("jitted", [False, True])
def test_reference_says_that_it_needs_values(jitted: bool) -> None:
    call = functools.partial(attend, implementation="reference")
    transformed = jax.jit(call) if jitted else functools.partial(jax.eval_shape, call)
    arrays = {name: jnp.asarray(value) for name, value in attention().items()}
    with pytest.raises(NotImplementedError, match=r"'reference' reads values.*or use 'xla'"):
        transformed(**arrays)


@pytest.mark.parametrize("name", ["mosaic_gpu", "mosaic_tpu"])
@pytest.mark.parametrize("operation", UPDATES)
def test_updates_by_kernels_of_another_device_are_refused(operation: str, name: str) -> None:
    call, arguments = UPDATES[operation]
    swaps = name == "mosaic_gpu" and operation in ("gather_pages", "scatter_pages")
    told = "does not exist for this operation" if swaps else r"does not run on a CPU\. Use 'xla'"
    with pytest.raises(NotImplementedError, match=f"`implementation` '{name}' {told}"):
        call(**arguments, implementation=name)


def total(
    operation: Callable[..., Any], arguments: dict[str, Any], name: str, **options: Any
) -> Callable[..., Any]:
    """A scalar function of one of the arguments."""

    def call(x: Any) -> Any:
        return operation(**(arguments | {name: x}), **options).astype(jnp.float32).sum()

    return call


GRADIENTS = [
    *[(attend, attention(), name) for name in ("q", "kv_pages")],
    (attend, attention(sinks=jnp.ones(2)), "sinks"),
    (attend, attention(alibi_slopes=jnp.ones(2)), "alibi_slopes"),
    (attend, attention(kv_pages=INT8, kv_scales=SCALES), "kv_scales"),
    *[(call, arguments, "kv_pages") for call, arguments in UPDATES.values()],
    (*UPDATES["write_kv"], "k"),
    (*UPDATES["write_kv"], "v"),
    (*UPDATES["scatter_pages"], "pages"),
]


@pytest.mark.parametrize(("operation", "arguments", "name"), GRADIENTS)
def test_gradients_are_refused(
    operation: Callable[..., Any], arguments: dict[str, Any], name: str
) -> None:
    call = total(operation, arguments, name)
    for transformed in (jax.grad(call), jax.grad(jax.jit(call)), jax.jit(jax.grad(call))):
        with pytest.raises(NotImplementedError, match="no gradients: attention over pages is for"):
            transformed(arguments[name])


@pytest.mark.parametrize("kind", ["mosaic_gpu", "mosaic_tpu"])
@pytest.mark.parametrize(
    ("operation", "arguments"), [(attend, attention()), UPDATES["write_kv"], UPDATES["copy_pages"]]
)
def test_gradients_are_refused_by_interpreted_kernels(
    operation: Callable[..., Any], arguments: dict[str, Any], kind: str
) -> None:
    call = total(operation, arguments, "kv_pages", implementation=kind, interpret=True)
    with pytest.raises(NotImplementedError, match="no gradients"):
        jax.grad(call)(POOL)


def test_stopped_gradients_pass() -> None:
    def call(x: jax.Array) -> jax.Array:
        return (attend(**attention(q=jax.lax.stop_gradient(x))) * x).astype(jnp.float32).sum()

    np.testing.assert_array_equal(np.asarray(jax.grad(call)(Q)), np.asarray(attend(**attention())))


def test_the_refusal_of_gradients_compiles_to_nothing() -> None:
    compiled = jax.jit(without_gradients, donate_argnums=0).lower((Q, POOL)).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.alias_size_in_bytes == Q.nbytes + POOL.nbytes
    assert "fusion" not in (compiled.as_text() or "")
    assert analysis.temp_size_in_bytes == 0


def test_a_plan_of_lists_is_the_plan_of_arrays() -> None:
    arrays = {
        name: jnp.asarray(a, jnp.int32)
        for name, a in attention().items()
        if name not in ("q", "kv_pages")
    }
    arrays |= {"q": Q, "kv_pages": POOL}
    by_lists, by_arrays = plan(**attention(), **by_gpu), plan(**arrays, **by_gpu)
    assert isinstance(by_lists, AttentionPlan)
    jax.tree.map(np.testing.assert_array_equal, by_lists, by_arrays)
