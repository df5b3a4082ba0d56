"""Paged attention on a CPU: the C++ kernel, and what it can do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu.library import is_loaded

_NO_WINDOW = 2**31  # positions: more than any sequence has


def attention_limit(q: Any, kv_pages: Any) -> str | None:
    """Why the kernel cannot attend over these (shapes and dtypes are enough); None: it can."""
    if not is_loaded():
        return "the CPU's kernels are not loaded (`pagedjax` builds them when an engine starts)"
    if kv_pages.dtype not in (jnp.float32, jnp.bfloat16) or q.dtype != kv_pages.dtype:
        return (
            f"`q` and `kv_pages` must both be float32 or bfloat16 there, not {q.dtype} and "
            f"{kv_pages.dtype}"
        )
    if q.shape[2] != kv_pages.shape[4]:
        return f"the pool's heads have {kv_pages.shape[4]} columns, those of `q` {q.shape[2]}"
    if q.dtype == jnp.bfloat16 and q.shape[2] % 2:
        return f"head_dim must be even there in bfloat16, not {q.shape[2]}"
    return None


def attention(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    alibi_slopes: jax.Array | None,
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """`paged_attention` of what `attention_limit` allows, without sinks.

    A row's results are the same bits whatever else is in the batch, however it was cut.

    Args:
      out_dtype: q's dtype or float32.

    Returns:
      out [num_tokens, num_q_heads, head_dim] in `out_dtype`, lse f32[num_tokens, num_q_heads].
    """
    slopes = jnp.zeros(0, jnp.float32) if alibi_slopes is None else alibi_slopes
    results = (
        jax.ShapeDtypeStruct(q.shape, out_dtype),
        jax.ShapeDtypeStruct(q.shape[:2], jnp.float32),
    )
    call = jax.ffi.ffi_call("pagedjax_attention", results, vmap_method="sequential")
    out, lse = call(
        q,
        kv_pages,
        page_table,
        kv_lens,
        cu_q_lens,
        num_seqs.reshape(1),
        slopes,
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap or 0.0),
        window=sliding_window or _NO_WINDOW,
    )
    return out, lse
