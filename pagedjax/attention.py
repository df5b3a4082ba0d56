"""The one call that a model's attention makes: write the new keys and values, attend over pages.

Works for NNX, Linen and plain functions alike: arrays in, arrays out, the cache threaded through.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

import pallas_kernels
from pagedjax import kv_cache as kv_caches
from pagedjax.kv_cache import KVCache


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Batch:
    """Where the step's tokens belong: what attention has to know and nothing else.

    Entries past a sequence's length, and rows past `num_seqs`, may hold anything.
    """

    page_table: jax.Array  # i32[max_seqs, pages_per_seq]
    kv_lens: jax.Array  # i32[max_seqs], positions with keys and values, new tokens included
    cu_q_lens: jax.Array  # i32[max_seqs + 1], prefix sums of new tokens per sequence
    num_seqs: jax.Array  # i32[]
    slot_mapping: jax.Array  # i32[num_tokens], page * page_size + offset of each new token
    implementation: str | None = field(default=None, metadata={"static": True})
    max_q_len: int | None = field(default=None, metadata={"static": True})  # 1: decode only
    # Shared runs of pages are read once, where the implementation and the call allow it.
    cascade: bool = field(default=False, metadata={"static": True})
    # The same bits for a row whatever else is in the batch.
    batch_invariant: bool = field(default=False, metadata={"static": True})


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_cache: KVCache,
    batch: Batch,
    *,
    layer: int,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
) -> tuple[jax.Array, KVCache]:
    """Writes k and v of the step's tokens into their pages, then attends causally over pages.

    **DONATES** `kv_cache` under a jit that donates it: use the returned one from here on.

    Args:
      q: [num_tokens, num_q_heads, head_dim], positions already encoded.
      k, v: [num_tokens, num_kv_heads, head_dim], in the cache's dtype; of any floating-point
        dtype if the cache is quantised.
      kv_cache: the pools; layer `layer` is written and read.
      batch: the step's metadata, as the model got it.
      layer: index of this attention layer, 0 <= layer < kv_cache.num_layers.
      scale: of q . k; None is 1 / sqrt(head_dim).
      sliding_window: a query sees the last so many positions, its own included.
      soft_cap: scores become cap * tanh(score / cap).
      sinks: f32[num_q_heads], an extra logit of each head in the softmax's denominator.
      alibi_slopes: f32[num_q_heads], adds slope * (kv position - q position) to the scores.

    Returns:
      out [num_tokens, num_q_heads, head_dim] in q's dtype (padding tokens: zeros), and the cache.

    Raises:
      ValueError: `layer` is out of range, or shapes or dtypes disagree; at trace time.
    """
    if not 0 <= layer < kv_cache.num_layers:
        raise ValueError(
            f"`layer` must be in [0, {kv_cache.num_layers}), the layers of `kv_cache`. Got {layer}."
        )
    kv_cache = kv_caches.write(
        kv_cache, layer, k, v, batch.slot_mapping, implementation=batch.implementation
    )
    plan = None
    if batch.cascade and sliding_window is None and alibi_slopes is None:
        plan = pallas_kernels.plan_attention(
            batch.kv_lens,
            batch.cu_q_lens,
            batch.num_seqs,
            q=q,
            kv_pages=kv_cache.kv_pages[layer],
            page_table=batch.page_table,
            max_q_len=batch.max_q_len,
            cascade=True,
            implementation=batch.implementation,
        )
    out = pallas_kernels.paged_attention(
        q,
        kv_cache.kv_pages[layer],
        batch.page_table,
        batch.kv_lens,
        batch.cu_q_lens,
        batch.num_seqs,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        kv_scales=kv_cache.scales(layer),
        max_q_len=batch.max_q_len,
        batch_invariant=batch.batch_invariant,
        plan=plan,
        implementation=batch.implementation,
    )
    return out, kv_cache
