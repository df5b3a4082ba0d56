"""`KVCache`: a write reaches one layer, a copy reaches all of it, scales included."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import kv_cache
from pagedjax.kv_cache import KVCache, init_kv_cache
from pallas_kernels import reference

SIZES: dict[str, Any] = {
    "num_layers": 2, "num_pages": 5, "num_kv_heads": 3, "page_size": 4, "head_dim": 8,
}  # fmt: skip
DTYPES = [jnp.float32, jnp.int8, jnp.float8_e4m3fn]


def filled(dtype: Any) -> KVCache:
    """Every page and scale another number."""
    rng = np.random.default_rng(0)
    empty = init_kv_cache(**SIZES, dtype=dtype)
    return jax.tree.map(lambda a: jnp.asarray(rng.integers(1, 99, a.shape), a.dtype), empty)


def arrays(cache: KVCache) -> list[np.ndarray]:
    return [np.asarray(a.astype(jnp.float32)) for a in jax.tree.leaves(cache)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_quantised_cache_has_scales_and_counts_them(dtype: Any) -> None:
    cache = init_kv_cache(**SIZES, dtype=dtype)
    vectors = 2 * 5 * 2 * 3 * 4
    quantised = dtype != jnp.float32
    assert (cache.kv_scales is not None) == quantised
    assert cache.nbytes == vectors * (8 * jnp.dtype(dtype).itemsize + (4 if quantised else 0))
    assert all(not array.any() for array in arrays(cache))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_of_pages_reaches_every_layer_and_its_scales(dtype: Any) -> None:
    before = filled(dtype)
    after = kv_cache.copy(before, jnp.array([1, 3, 0]), jnp.array([2, 4, 5]))
    for old, new in zip(arrays(before), arrays(after), strict=True):
        np.testing.assert_array_equal(new, old[[0, 1, 1, 3, 3]])  # 5 is past the end: dropped


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_write_reaches_its_layer_and_no_other(dtype: Any) -> None:
    before = filled(dtype)
    rng = np.random.default_rng(1)
    k, v = (jnp.asarray(rng.standard_normal((2, 3, 8)), jnp.float32) for _ in range(2))
    slots = jnp.array([9, 14], jnp.int32)
    after = kv_cache.write(before, 1, k, v, slots)
    expected = reference.write_kv(before.kv_pages[1], k, v, slots, kv_scales=before.scales(1))
    pages, scales = (expected, None) if before.kv_scales is None else expected
    np.testing.assert_array_equal(
        np.asarray(after.kv_pages[1]).astype(np.float32), pages.astype(np.float32)
    )
    if after.kv_scales is not None:
        np.testing.assert_array_equal(after.kv_scales[1], scales)
        np.testing.assert_array_equal(after.kv_scales[0], before.scales(0))
    np.testing.assert_array_equal(arrays(after)[0], arrays(before)[0])
