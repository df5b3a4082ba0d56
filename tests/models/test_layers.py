"""The building blocks against float64, in every form that a number of rows takes.

With a CPU's own kernels, which test_cpu_product.py has more about, and without.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.models.layers import Linear, gated, product

ROWS = (1, 2, 3, 8, 15, 16, 64, 65)


@pytest.fixture(params=["own", "XLA"])
def kernels(request: pytest.FixtureRequest) -> str:
    """Whose products these are."""
    request.getfixturevalue("cpu_kernels" if request.param == "own" else "no_cpu_kernels")
    return request.param


def fresh(function: Callable[..., Any]) -> Any:
    """Compiled for itself: what was traced before may be another's kernels."""
    return jax.jit(lambda *args, **options: function(*args, **options))


def operands(
    num_rows: int, num_outputs: int, dtype: str, *, num_inputs: int = 24
) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(num_rows * 1000 + num_outputs)
    x = jnp.asarray(rng.standard_normal((num_rows, num_inputs)), dtype)
    return x, jnp.asarray(rng.standard_normal((num_outputs, num_inputs)), dtype)


def exact(x: jax.Array, weight: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T


def shapes_of_products(num_rows: int, num_outputs: int, dtype: str) -> list[str]:
    """What the compiled product makes: `f32[rows,out]`, or `f32[out,rows]` the other way round."""
    x, weight = operands(num_rows, num_outputs, dtype)
    compiled = fresh(product).lower(x, weight).compile().as_text()
    assert compiled is not None
    return re.findall(r"(f32\[[\d,]+\])\S* dot\(", compiled)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("num_outputs", [6, 7, 600])  # even, odd, wide as logits are
def test_a_product_is_that_of_float64_whatever_its_rows(num_outputs: int, dtype: str) -> None:
    for num_rows in ROWS:
        x, weight = operands(num_rows, num_outputs, dtype)
        out = fresh(product)(x, weight)
        assert (out.shape, out.dtype) == ((num_rows, num_outputs), jnp.float32)
        np.testing.assert_allclose(np.asarray(out), exact(x, weight), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("narrow", ["int8", "float8_e4m3fn"])
def test_a_product_with_8_bit_values_is_exact_in_them(narrow: str) -> None:
    for num_rows in ROWS:
        x, weight = operands(num_rows, 6, "bfloat16")
        weight = (weight * 20).astype(narrow)
        out = jax.jit(product)(x, weight)
        np.testing.assert_allclose(np.asarray(out), exact(x, weight), rtol=1e-5, atol=1e-3)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("num_rows", [1, 8, 100])
def test_a_product_has_gradients(num_rows: int) -> None:
    x, weight = operands(num_rows, 6, "float32")

    def total(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.sum(product(x, weight) ** 2)

    of_x, of_weight = jax.grad(total, argnums=(0, 1))(x, weight)
    out = 2 * exact(x, weight)
    np.testing.assert_allclose(of_x, out @ np.asarray(weight, np.float64), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(of_weight, out.T @ np.asarray(x, np.float64), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("num_rows", [1, 7, 64])
def test_a_gated_layer_is_that_of_float64(kernels: str, num_rows: int) -> None:
    for dtype, use_bias in (("float32", False), ("bfloat16", False), ("float32", True)):
        x, weight = operands(num_rows, 64, dtype)
        layer = Linear(24, 64, use_bias=use_bias, dtype=jnp.dtype(dtype), rngs=None)
        layer.weight[...] = weight
        if layer.bias is not None:
            layer.bias[...] = jnp.full(64, 0.5)
        both = exact(x, weight) + (0.5 if use_bias else 0)
        expected = both[:, :32] / (1 + np.exp(-both[:, :32])) * both[:, 32:]
        out = fresh(lambda x, layer=layer: gated(layer, x))(x)
        assert (out.shape, out.dtype) == ((num_rows, 32), jnp.dtype(dtype))
        tolerance = 1e-5 if dtype == "float32" else 0.01 if kernels == "own" else 0.04
        np.testing.assert_allclose(np.asarray(out, np.float64), expected, tolerance, tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_live_rows_are_what_they_are_without_padding(kernels: str, dtype: str) -> None:
    x, weight = operands(8, 64, dtype)
    layer = Linear(24, 64, dtype=jnp.dtype(dtype), rngs=None)
    layer.weight[...] = weight
    for call in (
        lambda x, live: product(x, weight, num_live=live),
        lambda x, live: layer(x, live),
        lambda x, live: gated(layer, x, live),
    ):
        whole, some = fresh(call)(x, None), fresh(call)(x, jnp.int32(3))
        np.testing.assert_array_equal(np.asarray(some)[:3], np.asarray(whole)[:3])
        if kernels == "own":
            assert not np.asarray(some)[3:].any()


@pytest.mark.usefixtures("no_cpu_kernels")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="how a CPU computes it")
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "dtype", "expected"),
    [
        (1, 6, "float32", "f32[2,1,3]"),  # a batch, for two cores
        (1, 6, "bfloat16", "f32[2,6]"),  # a second row, or there is no kernel for it
        (8, 6, "float32", "f32[6,8]"),  # the weight on the left is not repacked
        (64, 6, "float32", "f32[6,64]"),
        (65, 6, "float32", "f32[65,6]"),
        (8, 6, "bfloat16", "f32[8,6]"),
        (32, 6, "bfloat16", "f32[6,32]"),
        (32, 600, "float32", "f32[32,600]"),  # logits would have to be transposed
        (8, 600, "float32", "f32[600,8]"),
    ],
)
def test_a_cpu_gets_the_product_the_way_round_that_it_is_fast_at(
    num_rows: int, num_outputs: int, dtype: str, expected: str
) -> None:
    found = shapes_of_products(num_rows, num_outputs, dtype)
    assert [shape.replace(",1,", ",") for shape in found] == [expected.replace(",1,", ",")]
