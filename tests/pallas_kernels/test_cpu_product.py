"""The product of a CPU's own kernels: float64's, and for each row the same bits in any company."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cpu

F32, BF16 = jnp.float32, jnp.bfloat16
# A vector has 4 to 32 numbers; a tile 6 rows and 4 outputs. Each with what does not fill it. Many
# rows are computed in another way, which starts at 40 of them.
ROWS = (1, 2, 5, 6, 7, 12, 13, 39, 40, 48, 64, 65, 101)
INS = (1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 66, 100, 257)
OUTS = (1, 2, 3, 4, 5, 9, 130)

needs_kernels = pytest.mark.usefixtures("cpu_kernels")


def operands(rows: int, ins: int, outs: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(rows * 10**6 + ins * 1000 + outs)
    x, weight = rng.standard_normal((rows, ins)), rng.standard_normal((outs, ins))
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype)


def check(rows: int, ins: int, outs: int, dtype: Any) -> None:
    """Within the rounding of float32 sums; the error of a sum is relative to its terms."""
    x, weight = operands(rows, ins, outs, dtype)
    wide_x, wide_weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    out = cpu.product(x, weight)
    assert (out.shape, out.dtype) == ((rows, outs), F32)
    difference = np.abs(np.asarray(out, np.float64) - wide_x @ wide_weight.T)
    assert np.all(difference <= 1e-6 * (np.abs(wide_x) @ np.abs(wide_weight).T)), (rows, ins, outs)


def silu(gate: np.ndarray) -> np.ndarray:
    return gate / (1 + np.exp(-gate))


def check_gated(rows: int, ins: int, outs: int, dtype: Any) -> None:
    """As `check`, an error relative to what rounding gate and up would make, and the result."""
    x, weight = operands(rows, ins, 2 * outs, dtype)
    wide_x, wide_weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    out = cpu.gated_product(x, weight)
    assert (out.shape, out.dtype) == ((rows, outs), dtype)
    gate, up = np.split(wide_x @ wide_weight.T, 2, axis=1)
    gate_terms, up_terms = np.split(np.abs(wide_x) @ np.abs(wide_weight).T, 2, axis=1)
    expected = silu(gate) * up
    allowed = 1e-6 * (1.1 * gate_terms * np.abs(up) + np.abs(silu(gate)) * up_terms)
    allowed += np.abs(expected) * (1e-6 if dtype == F32 else 2.0**-8)
    assert np.all(np.abs(np.asarray(out, np.float64) - expected) <= allowed), (rows, ins, outs)


def bits(array: jax.Array) -> np.ndarray:
    return np.asarray(array).view(np.uint32 if array.dtype == F32 else np.uint16)


@needs_kernels
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_product_is_that_of_float64(dtype: Any, rng: np.random.Generator) -> None:
    for _ in range(40):
        rows, ins, outs = (int(rng.choice(sizes)) for sizes in (ROWS, INS, OUTS))
        check(rows, ins, outs, dtype)


@needs_kernels
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [1, 8, 65])
def test_a_product_that_all_threads_share_is_that_of_float64(rows: int, dtype: Any) -> None:
    check(rows, 300, 2001, dtype)


@needs_kernels
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_gated_product_is_that_of_float64(dtype: Any, rng: np.random.Generator) -> None:
    for _ in range(40):
        rows, ins = (int(rng.choice(sizes)) for sizes in (ROWS, INS))
        check_gated(rows, ins - (ins % 2 and rows > 48), 16 * int(rng.integers(1, 5)), dtype)
    check_gated(101, 300, 1600, dtype)


ODD = """
from tests.pallas_kernels import test_cpu_product as tests
from pagedjax import cpu_kernels, startup
cpu_kernels.prepare(startup.open_store())
tests.check_gated(65, 33, 32, tests.BF16)
"""


@needs_kernels
def test_a_gated_product_of_many_rows_may_have_an_odd_number_of_inputs() -> None:
    """In a process of its own, which may crash."""
    root = Path(__file__).parent.parent.parent
    assert subprocess.run([sys.executable, "-c", ODD], cwd=root).returncode == 0


@needs_kernels
@pytest.mark.parametrize("rows", [3, 48])
def test_a_gate_of_any_size_is_right(rows: int) -> None:
    gates = np.array([0, -0.0, 1e-30, 20, -20, 86, -86, -88, 200, -200, 1e30, -1e30, np.inf])
    weight = np.zeros((32, 2), np.float32)
    weight[: len(gates), 0], weight[16:, 1] = gates, 3
    weight[15] = np.nan
    x = jnp.ones((rows, 2), F32).at[:, 0].set(1)
    out = np.asarray(cpu.gated_product(x, jnp.asarray(weight)))
    finite = gates[:-1].astype(np.float64)
    expected = 3 * np.where(finite < -100, 0, finite / (1 + np.exp(-np.maximum(finite, -100))))
    np.testing.assert_allclose(out[:, : len(finite)], [expected] * rows, rtol=1e-6, atol=1e-35)
    assert np.all(out[:, len(finite)] == np.inf)
    assert np.isnan(out[:, 15]).all()


@needs_kernels
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_what_is_empty_gives_an_empty_product_or_zeros(dtype: Any) -> None:
    for rows, ins, outs in ((0, 5, 3), (3, 5, 0), (0, 5, 0)):
        assert cpu.product(*operands(rows, ins, outs, dtype)).shape == (rows, outs)
    assert np.all(np.asarray(cpu.product(*operands(3, 0, 5, dtype))) == 0)
    for rows, outs in ((0, 32), (3, 0)):
        assert cpu.gated_product(*operands(rows, 6, outs, dtype)).shape == (rows, outs // 2)


@needs_kernels
@pytest.mark.parametrize("outs", [4, 7])
def test_a_bfloat16_result_is_the_float32_one_rounded_to_nearest_even(outs: int) -> None:
    rng = np.random.default_rng(outs)
    halfway = 2.0**-8  # between two neighbours from 1 to 2
    first = 1 + rng.integers(0, 128, 200) / 128
    second = rng.choice([-halfway, halfway, 1.01 * halfway, 0.99 * halfway], 200)
    sums = np.stack([first, second], axis=1)
    largest = float(jnp.finfo(BF16).max)
    odd = [(np.nan, 1), (np.inf, 1), (-np.inf, 1), (np.inf, -np.inf), (largest, 2.0**119)]
    odd += [(largest, 2.0**118), (0.0, -0.0), (-largest, -(2.0**119)), (1e-39, 0)]
    x = jnp.asarray(np.concatenate([sums, odd]), BF16)
    weight = jnp.ones((outs, 2), BF16)
    wide, narrow = cpu.product(x, weight), cpu.product(x, weight, BF16)
    assert narrow.dtype == BF16
    expected = np.asarray(wide).astype(BF16)
    is_nan = np.isnan(expected)
    assert is_nan.sum() == 2 * outs
    assert np.isinf(expected).sum() == 4 * outs
    np.testing.assert_array_equal(np.isnan(np.asarray(narrow)), is_nan)
    np.testing.assert_array_equal(bits(narrow)[~is_nan], expected.view(np.uint16)[~is_nan])


@needs_kernels
def test_a_nan_reaches_its_own_row_and_output_alone() -> None:
    for dtype in (F32, BF16):
        x, weight = operands(8, 33, 9, dtype)
        for at in (0, 31, 32):
            of_x = np.isnan(np.asarray(cpu.product(x.at[2, at].set(jnp.nan), weight)))
            of_weight = np.isnan(np.asarray(cpu.product(x, weight.at[5, at].set(jnp.nan))))
            assert of_x[2].all()
            assert of_x.sum() == 9
            assert of_weight[:, 5].all()
            assert of_weight.sum() == 8


@needs_kernels
@pytest.mark.parametrize("name", ["product", "gated_product"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_row_has_the_same_bits_wherever_it_is_and_whatever_is_beside_it(
    dtype: Any, name: str
) -> None:
    product = getattr(cpu, name)
    for rows in (*range(1, 8), 11, 13, 39, 40, 41, 48, 49, 64, 101):
        x, weight = operands(rows, 74, 64, dtype)
        whole = bits(product(x, weight))
        others, _ = operands(rows, 75, 1, dtype)
        for shift in (1, 7):
            moved = np.roll(np.asarray(x), shift, axis=0)
            np.testing.assert_array_equal(bits(product(moved, weight)), np.roll(whole, shift, 0))
        keeps = np.arange(rows) % 3 == 0
        mixed = jnp.where(keeps[:, None], x, others[:, :74])
        np.testing.assert_array_equal(bits(product(mixed, weight))[keeps], whole[keeps])


@needs_kernels
@pytest.mark.parametrize("name", ["product", "gated_product"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_that_are_not_live_are_zeros_and_change_no_bits(dtype: Any, name: str) -> None:
    product = jax.jit(getattr(cpu, name))
    for rows in (1, 7, 40, 101):
        x, weight = operands(rows, 74, 64, dtype)
        whole = bits(product(x, weight))
        for live in {0, 1, rows // 2, rows - 1, rows, -5, 10**6}:
            kept = min(max(live, 0), rows)
            poisoned = x.at[kept:].set(jnp.nan)
            out = bits(product(poisoned, weight, num_live=jnp.int32(live)))
            np.testing.assert_array_equal(out[:kept], whole[:kept])
            assert not out[kept:].any()


@needs_kernels
@pytest.mark.parametrize("name", ["product", "gated_product"])
def test_rows_that_are_not_live_have_no_gradient(name: str) -> None:
    x, weight = operands(5, 20, 32, F32)

    def total(x: jax.Array, weight: jax.Array, live: int | None) -> jax.Array:
        num_live = None if live is None else jnp.int32(live)
        return jnp.sum(getattr(cpu, name)(x, weight, num_live=num_live))

    of_x, of_weight = jax.grad(total, argnums=(0, 1))(x, weight, 3)
    expected_x, expected_weight = jax.grad(total, argnums=(0, 1))(x[:3], weight, None)
    assert np.all(np.asarray(of_x[3:]) == 0)
    np.testing.assert_allclose(of_x[:3], expected_x, atol=1e-5)
    np.testing.assert_allclose(of_weight, expected_weight, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [7, 64])
def test_an_output_has_the_same_bits_beside_any_number_of_others(rows: int, dtype: Any) -> None:
    x, weight = operands(rows, 74, 70, dtype)
    whole = bits(cpu.product(x, weight))
    for outs in range(1, 70, 3):
        last = bits(cpu.product(x, weight[70 - outs :]))
        np.testing.assert_array_equal(last, whole[:, 70 - outs :])


def plain(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.matmul(x, weight.T, precision="highest", preferred_element_type=F32)


def plain_gated(x: jax.Array, weight: jax.Array) -> jax.Array:
    gate, up = jnp.split(plain(x, weight), 2, axis=1)
    return jax.nn.silu(gate) * up


@needs_kernels
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("product", "expected"), [(cpu.product, plain), (cpu.gated_product, plain_gated)]
)
def test_a_product_has_the_gradients_of_a_plain_one(
    product: Any, expected: Any, dtype: Any
) -> None:
    x, weight = operands(5, 33, 32, dtype)

    def total(product: Any, x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(product(x, weight).astype(F32) / 8))

    gradients = jax.jit(jax.grad(total, argnums=(1, 2)), static_argnums=0)
    pairs = zip(gradients(product, x, weight), gradients(expected, x, weight), strict=True)
    for one, other in pairs:
        assert one.dtype == dtype
        tolerance = 1e-5 if dtype == F32 else 0.05
        np.testing.assert_allclose(
            np.asarray(one, np.float64), np.asarray(other, np.float64), atol=tolerance, rtol=0.01
        )


@needs_kernels
@pytest.mark.parametrize("out_dtype", [F32, BF16])
def test_a_tangent_is_in_the_results_dtype(out_dtype: Any) -> None:
    x, weight = operands(3, 20, 4, BF16)
    dots = operands(3, 20, 4, BF16)
    product = functools.partial(cpu.product, dtype=out_dtype)
    out, out_dot = jax.jvp(product, (x, weight), dots)
    assert out.dtype == out_dot.dtype == out_dtype
    expected = np.asarray(plain(dots[0], weight) + plain(x, dots[1]), np.float64)
    np.testing.assert_allclose(np.asarray(out_dot, np.float64), expected, rtol=0.01, atol=1e-4)


@needs_kernels
def test_a_product_is_mapped_over_rows_weights_or_both() -> None:
    x, weight = operands(12, 17, 10, F32)
    xs, weights = x.reshape(2, 6, 17), weight.reshape(2, 5, 17)
    both = jax.jit(jax.vmap(cpu.product))(xs, weights)
    over_x = jax.vmap(cpu.product, in_axes=(0, None))(xs, weight)
    over_weights = jax.vmap(cpu.product, in_axes=(None, 0))(x, weights)
    for i in range(2):
        np.testing.assert_array_equal(bits(both[i]), bits(cpu.product(xs[i], weights[i])))
        np.testing.assert_array_equal(bits(over_x[i]), bits(cpu.product(xs[i], weight)))
        np.testing.assert_array_equal(bits(over_weights[i]), bits(cpu.product(x, weights[i])))


@needs_kernels
def test_a_product_runs_in_a_compiled_loop_over_layers() -> None:
    x, _ = operands(3, 16, 1, BF16)
    weights = jnp.stack([operands(3, 16, 16, BF16)[1] * jnp.asarray(0.2 + i, BF16) for i in (0, 1)])

    @jax.jit
    def chain(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (cpu.product(x, w, BF16), None), x, weights)[0]

    expected = cpu.product(cpu.product(x, weights[0], BF16), weights[1], BF16)
    np.testing.assert_array_equal(bits(chain(x)), bits(expected))


@needs_kernels
def test_only_pairs_of_float32_or_of_bfloat16_can_be_multiplied() -> None:
    dtypes = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "int32")
    able = {
        (a, b)
        for a in dtypes
        for b in dtypes
        if cpu.can_multiply(jnp.zeros((2, 3), a), jnp.zeros((4, 3), b))
    }
    assert able == {("float32", "float32"), ("bfloat16", "bfloat16")}


@needs_kernels
def test_what_can_be_gated_has_whole_vectors_of_outputs() -> None:
    x = jnp.zeros((2, 3))
    able = [
        outs
        for outs in (1, 16, 31, 32, 33, 48, 64, 96, 128)
        if cpu.can_gate(x, jnp.zeros((outs, 3)))
    ]
    assert able == [32, 64, 96, 128]
    assert not cpu.can_gate(x, jnp.zeros((32, 3), BF16))


@pytest.mark.usefixtures("no_cpu_kernels")
def test_nothing_can_be_multiplied_by_kernels_that_are_not_loaded() -> None:
    assert not cpu.can_multiply(*operands(2, 3, 32, F32))
    assert not cpu.can_gate(*operands(2, 3, 32, F32))


@needs_kernels
@pytest.mark.parametrize(
    ("x", "weight", "dtype", "message"),
    [
        (jnp.ones((2, 3)), jnp.ones((4, 5)), F32, "shapes of x, weight and result"),
        (jnp.ones((2, 3)), jnp.ones((4, 3), BF16), F32, "dtypes of x, weight and result"),
        (jnp.ones((2, 3)), jnp.ones((4, 3)), BF16, "dtypes of x, weight and result"),
        (jnp.ones((2, 3), jnp.float16), jnp.ones((4, 3), jnp.float16), F32, "neither float32"),
    ],
)
def test_what_cannot_be_multiplied_is_an_error_not_a_crash(
    x: jax.Array, weight: jax.Array, dtype: Any, message: str
) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(cpu.product(x, weight, dtype))
