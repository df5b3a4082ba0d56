"""Quantised vectors: as NumPy's to the bit, close to what they stand for, NaN stays in place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.quantize import dequantize, quantize

DTYPES = [jnp.float8_e4m3fn, jnp.int8]


def as_bits(values: Any) -> np.ndarray:
    return np.asarray(values).view(np.uint8)


def both(x: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Values and scales; the same to the bit from XLA, jitted or not, as from NumPy."""
    expected, expected_scales = reference.quantize(x, dtype)
    for run in (quantize, jax.jit(quantize, static_argnums=1)):
        values, scales = run(jnp.asarray(x), dtype)
        assert values.dtype == dtype
        assert scales.dtype == jnp.float32
        np.testing.assert_array_equal(as_bits(values), as_bits(expected))
        np.testing.assert_array_equal(np.asarray(scales), expected_scales)
    return expected, expected_scales


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", [np.float32, jnp.bfloat16, np.float16])
def test_equals_numpy_to_the_bit(rng: np.random.Generator, dtype: Any, source: Any) -> None:
    size = 10.0 ** rng.uniform(-4, 4, (50, 3, 1))
    both((rng.standard_normal((50, 3, 48)) * size).astype(source), dtype)


@pytest.mark.parametrize(("dtype", "relative"), [(jnp.float8_e4m3fn, 1 / 16), (jnp.int8, 0)])
def test_error_is_half_a_step(rng: np.random.Generator, dtype: Any, relative: float) -> None:
    x = rng.standard_normal((200, 64)).astype(np.float32)
    values, scales = both(x, dtype)
    got = np.asarray(dequantize(jnp.asarray(values), jnp.asarray(scales)), np.float64)
    np.testing.assert_allclose(got, reference.dequantize(values, scales), rtol=1e-7)
    amax = np.abs(x).max(axis=-1, keepdims=True)
    absolute = amax / 254 if dtype == jnp.int8 else amax / 448 * 2**-10  # half a subnormal
    assert np.all(np.abs(got - x) <= np.maximum(relative * np.abs(x), absolute) * (1 + 1e-5))


@pytest.mark.parametrize(("dtype", "largest"), [(jnp.float8_e4m3fn, 448), (jnp.int8, 127)])
def test_the_largest_element_uses_the_whole_range(dtype: Any, largest: int) -> None:
    x = np.array([[-3.0, 1, 0.5, 2], [1e-30, 0, 0, 0], [3.4e38, -3.4e38, 0, 1]], np.float32)
    values, scales = both(x, dtype)
    assert np.all(np.abs(values.astype(np.float32)).max(axis=-1) == largest)
    np.testing.assert_allclose(scales, np.abs(x).max(axis=-1) / largest, rtol=1e-6)


def test_ties_go_to_even(rng: np.random.Generator) -> None:
    x = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 3.5]], np.float32)
    values, scales = both(x, jnp.int8)
    assert scales[0] == 1
    assert values[0].tolist() == [127, 0, 2, 2, 0, -2, 126, 4]
    every = np.arange(127, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
    middles = (every[1:] + every[:-1]) / 2
    near = np.concatenate([middles, np.nextafter(middles, 0), np.nextafter(middles, 999), [448]])
    _, scales = both(near[None].astype(np.float32), jnp.float8_e4m3fn)
    assert scales[0] == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_and_vanishing_vectors_have_scale_one(dtype: Any) -> None:
    x = np.zeros((3, 8), np.float32)
    x[1, 3], x[2] = 1e-37, -1e-42
    values, scales = both(x, dtype)
    assert np.all(scales == 1)
    assert np.all(values.astype(np.float32) == 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_vector_with_nan_or_infinity_is_all_nan_and_alone(dtype: Any, bad: float) -> None:
    x = np.arange(24, dtype=np.float32).reshape(3, 8) + 1
    healthy, _ = both(x, dtype)
    x[1, 5] = bad
    values, scales = both(x, dtype)
    got = np.asarray(dequantize(jnp.asarray(values), jnp.asarray(scales)))
    assert np.all(np.isnan(got[1]))
    np.testing.assert_array_equal(as_bits(values[[0, 2]]), as_bits(healthy[[0, 2]]))
    assert np.all(np.isfinite(got[[0, 2]]))
    assert not np.any(np.isnan(values.astype(np.float32)))  # only the scale says it


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match=r"`dtype` must be float8_e4m3fn or int8. Got float16"):
        quantize(jnp.ones((2, 4)), jnp.float16)
