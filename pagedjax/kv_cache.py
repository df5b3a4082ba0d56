"""`KVCache`: the pytree that holds the page pool of every layer. Knows shapes, not sequences.

Each layer has one array `kv_pages: [num_pages, 2, num_kv_heads, page_size, head_dim]` (K = 0,
V = 1). Page 0 is the null page: zero-filled, never allocated, never written. Layers are separate
arrays because a pool stacked over layers is copied by XLA when a loop carries it. A quantised cache
also has scales, one for each vector. head_dim may be larger than the model's, as kernels want it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels.platform import NATIVE_CPU
from pallas_kernels.quantize import LARGEST


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class KVCache:
    """The page pools of all layers.

    Every function that changes a cache takes it and returns the new one first; under a jit that
    donates it, the buffers are reused in place and the old handle raises when it is read.
    """

    # A layer each: [num_pages, 2, num_kv_heads, page_size, head_dim].
    kv_pages: tuple[jax.Array, ...]
    # Of a quantised cache, a layer each: f32[num_pages, 2, num_kv_heads, page_size].
    kv_scales: tuple[jax.Array, ...] | None = None

    @property
    def num_layers(self) -> int:
        """Layers that have a pool."""
        return len(self.kv_pages)

    @property
    def num_pages(self) -> int:
        """Pages of each pool, the null page included."""
        return self.kv_pages[0].shape[0]

    @property
    def page_size(self) -> int:
        """Token positions of one page."""
        return self.kv_pages[0].shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes of all pools together, scales included."""
        return sum(array.nbytes for array in (*self.kv_pages, *(self.kv_scales or ())))

    def scales(self, layer: int) -> jax.Array | None:
        """Scales of one layer, or None."""
        return None if self.kv_scales is None else self.kv_scales[layer]


def joined(caches: Sequence[KVCache]) -> KVCache:
    """One cache of the layers of several, which are all quantised or none."""
    scales = [scale for cache in caches for scale in cache.kv_scales or ()]
    pages = tuple(pages for cache in caches for pages in cache.kv_pages)
    return KVCache(pages, tuple(scales) or None)


def init_kv_cache(
    *,
    num_layers: int,
    num_pages: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: jnp.dtype,
) -> KVCache:
    """A zero-filled cache of `num_layers` pools; with scales if `dtype` is a quantised one."""
    shape = (num_pages, 2, num_kv_heads, page_size, head_dim)
    pools = tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))
    if jnp.dtype(dtype) not in LARGEST:
        return KVCache(pools)
    return KVCache(pools, tuple(jnp.zeros(shape[:4], jnp.float32) for _ in range(num_layers)))


def write(
    kv_cache: KVCache,
    layer: int,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    implementation: str | None = None,
) -> KVCache:
    """**DONATES** under jit. Writes k, v `[num_tokens, num_kv_heads, head_dim]` of one layer.

    Args:
      slot_mapping: i32[num_tokens], page * page_size + offset; past the pool's end: dropped.
      implementation: of attention; with a kernel, the best way to write on its chip.
    """
    written = pallas_kernels.write_kv(
        kv_cache.kv_pages[layer],
        k,
        v,
        slot_mapping,
        kv_scales=kv_cache.scales(layer),
        implementation=_updates(implementation),
    )
    if kv_cache.kv_scales is None:
        return replace(kv_cache, kv_pages=_replace_layer(kv_cache.kv_pages, layer, written))
    pages, scales = written
    return KVCache(
        _replace_layer(kv_cache.kv_pages, layer, pages),
        _replace_layer(kv_cache.kv_scales, layer, scales),
    )


def copy(
    kv_cache: KVCache, src: jax.Array, dst: jax.Array, *, implementation: str | None = None
) -> KVCache:
    """**DONATES** under jit. Copies pages src -> dst in every layer (copy-on-write).

    Args:
      src, dst: i32[n] page ids; an entry with `dst >= num_pages` is dropped.
      implementation: of attention; with a kernel, the best way to copy on its chip.
    """

    def copied(array: jax.Array) -> jax.Array:
        return pallas_kernels.copy_pages(array, src, dst, implementation=_updates(implementation))

    return jax.tree.map(copied, kv_cache)


def gather(
    kv_cache: KVCache, page_ids: jax.Array, *, implementation: str | None = None
) -> tuple[jax.Array, ...]:
    """Copies pages of all layers out of the pools, for swapping out.

    Args:
      page_ids: i32[n], clamped to the pool.
      implementation: of attention; with a kernel, the best way to read pages on its chip.

    Returns:
      (pages [n, num_layers, 2, num_kv_heads, page_size, head_dim] in the pool's dtype,), and of a
      quantised cache (pages, scales f32[n, num_layers, 2, num_kv_heads, page_size]).
    """

    def gathered(pools: tuple[jax.Array, ...]) -> jax.Array:
        name = _updates(implementation)
        layers = [
            pallas_kernels.gather_pages(pool, page_ids, implementation=name) for pool in pools
        ]
        return jnp.stack(layers, axis=1)

    return tuple(gathered(pools) for pools in _groups(kv_cache))


def scatter(
    kv_cache: KVCache,
    page_ids: jax.Array,
    pages: tuple[jax.Array, ...],
    *,
    implementation: str | None = None,
) -> KVCache:
    """**DONATES** under jit. Puts pages of all layers into the pools, for swapping in.

    Args:
      page_ids: i32[n]; an entry outside [0, num_pages) is dropped. Live entries must differ.
      pages: as `gather` returns them.
      implementation: as for `gather`.
    """
    name = _updates(implementation)
    groups = [
        tuple(
            pallas_kernels.scatter_pages(pool, page_ids, new[:, layer], implementation=name)
            for layer, pool in enumerate(pools)
        )
        for pools, new in zip(_groups(kv_cache), pages, strict=True)
    ]
    return KVCache(*groups)


def _groups(kv_cache: KVCache) -> tuple[tuple[jax.Array, ...], ...]:
    """The pools, and the scales if there are any."""
    return tuple(group for group in (kv_cache.kv_pages, kv_cache.kv_scales) if group is not None)


def _updates(implementation: str | None) -> str | None:
    """Plain XLA stays plain; beside a kernel for attention, the best that the chip has."""
    return "xla" if implementation in ("xla", NATIVE_CPU, "reference") else None


def _replace_layer(
    arrays: tuple[jax.Array, ...], layer: int, new: jax.Array
) -> tuple[jax.Array, ...]:
    return (*arrays[:layer], new, *arrays[layer + 1 :])
