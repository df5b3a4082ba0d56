"""`KVCache`: the pytree that holds the page pool of every layer. Knows shapes, not sequences.

Each layer has one array `kv_pages: [num_pages, 2, num_kv_heads, page_size, head_dim]` (K = 0,
V = 1). Page 0 is the null page: zero-filled, never allocated, never written. Layers are separate
arrays because a pool stacked over layers is copied by XLA when a loop carries it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

import pallas_kernels


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class KVCache:
    """The page pools of all layers.

    Every function that changes a cache takes it and returns the new one first; under a jit that
    donates it, the buffers are reused in place and the old handle raises when it is read.
    """

    kv_pages: tuple[
        jax.Array, ...
    ]  # a layer each: [num_pages, 2, num_kv_heads, page_size, head_dim]

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
        """Bytes of all pools together."""
        return sum(pool.nbytes for pool in self.kv_pages)


def init_kv_cache(
    *,
    num_layers: int,
    num_pages: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: jnp.dtype,
) -> KVCache:
    """A zero-filled cache of `num_layers` pools."""
    shape = (num_pages, 2, num_kv_heads, page_size, head_dim)
    return KVCache(tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)))


def write(
    kv_cache: KVCache, layer: int, k: jax.Array, v: jax.Array, slot_mapping: jax.Array
) -> KVCache:
    """**DONATES** under jit. Writes k, v `[num_tokens, num_kv_heads, head_dim]` of one layer.

    Args:
      slot_mapping: i32[num_tokens], page * page_size + offset; past the pool's end: dropped.
    """
    pool = pallas_kernels.write_kv(kv_cache.kv_pages[layer], k, v, slot_mapping)
    return _with_layer(kv_cache, layer, pool)


def copy(kv_cache: KVCache, src: jax.Array, dst: jax.Array) -> KVCache:
    """**DONATES** under jit. Copies pages src -> dst in every layer (copy-on-write).

    Args:
      src, dst: i32[n] page ids; an entry with `dst >= num_pages` is dropped.
    """
    pools = (pallas_kernels.copy_pages(pool, src, dst) for pool in kv_cache.kv_pages)
    return _with_pools(kv_cache, pools)


def _with_layer(kv_cache: KVCache, layer: int, pool: jax.Array) -> KVCache:
    pools = kv_cache.kv_pages
    return _with_pools(kv_cache, (*pools[:layer], pool, *pools[layer + 1 :]))


def _with_pools(kv_cache: KVCache, pools: Iterable[jax.Array]) -> KVCache:
    return replace(kv_cache, kv_pages=tuple(pools))
