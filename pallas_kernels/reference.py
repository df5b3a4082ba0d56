"""The oracle of every operation: NumPy, float64, plain dense attention over gathered pages.

Owns correctness and nothing else: slow and obviously right. It never reads a page-table entry past
a sequence's length nor a position past it, so unused memory may hold NaN. Same signatures as the
public operations; what changes a pool returns a changed copy.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

type Array = np.ndarray[Any, Any]


def paged_attention(
    q: ArrayLike,  # [num_tokens, num_q_heads, head_dim]
    kv_pages: ArrayLike,  # [num_pages, 2, num_kv_heads, page_size, head_dim]
    page_table: ArrayLike,  # i32[max_seqs, pages_per_seq]
    kv_lens: ArrayLike,  # i32[max_seqs]
    cu_q_lens: ArrayLike,  # i32[max_seqs + 1]
    num_seqs: ArrayLike,  # i32[]
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: ArrayLike | None = None,  # f32[num_q_heads]
    alibi_slopes: ArrayLike | None = None,  # f32[num_q_heads]
    kv_scales: ArrayLike | None = None,  # f32[num_pages, 2, num_kv_heads, page_size]
    max_q_len: int | None = None,
    return_lse: bool = False,
    plan: object = None,
    batch_invariant: bool = False,
    implementation: str | None = None,
    interpret: bool = False,
) -> Any:
    """Float64 `pallas_kernels.paged_attention`: out f64[num_tokens, N, H], lse f64[num_tokens, N].

    Every row is computed alone, so it is batch invariant; a plan changes nothing in the result.
    """
    # Ways to compute, not what to compute.
    del max_q_len, plan, batch_invariant, implementation, interpret
    queries = np.asarray(q, np.float64)
    pool = np.asarray(kv_pages)
    table, lens, starts = (np.asarray(a) for a in (page_table, kv_lens, cu_q_lens))
    num_q_heads, head_dim = queries.shape[1:]  # of a padded pool only the first columns count
    out = np.zeros(queries.shape)
    lse = np.full(queries.shape[:2], -np.inf)
    for s in range(int(np.asarray(num_seqs))):
        first, last = int(starts[s]), int(starts[s + 1])
        if first == last:
            continue
        k, v = dense_kv(pool, table[s], int(lens[s]), kv_scales)
        k, v = k[..., :head_dim], v[..., :head_dim]
        out[first:last], lse[first:last] = dense_attention(
            queries[first:last],
            k,
            v,
            scale=head_dim**-0.5 if scale is None else scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=np.full(num_q_heads, -np.inf) if sinks is None else np.asarray(sinks, float),
            slopes=np.zeros(num_q_heads)
            if alibi_slopes is None
            else np.asarray(alibi_slopes, float),
        )
    return (out, lse) if return_lse else out


def dense_kv(
    pool: Array, row: Array, kv_len: int, kv_scales: ArrayLike | None = None
) -> tuple[Array, Array]:
    """K and V f64[kv_len, num_kv_heads, head_dim] of one sequence, position by position."""
    page_size = pool.shape[3]
    positions = np.arange(kv_len)
    pages, offsets = row[positions // page_size], positions % page_size
    kv = pool[pages, :, :, offsets].astype(np.float64)  # [kv_len, 2, num_kv_heads, head_dim]
    if kv_scales is not None:
        kv = dequantize(kv, np.asarray(kv_scales)[pages, :, :, offsets])
    return kv[:, 0], kv[:, 1]


def dense_attention(
    q: Array,  # f64[q_len, num_q_heads, head_dim]
    k: Array,  # f64[kv_len, num_kv_heads, head_dim]
    v: Array,  # f64[kv_len, num_kv_heads, head_dim]
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Array,  # f64[num_q_heads]; -inf: none
    slopes: Array,  # f64[num_q_heads]; 0: none
) -> tuple[Array, Array]:
    """Causal attention of the last q_len positions; out [q_len, N, H] and lse [q_len, N]."""
    q_len, kv_len, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    q_pos = np.arange(kv_len - q_len, kv_len)[None, :, None]
    kv_pos = np.arange(kv_len)[None, None, :]
    scores = np.einsum("tnh,snh->nts", q, k) * scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    scores += slopes[:, None, None] * (kv_pos - q_pos)
    seen = kv_pos <= q_pos
    if sliding_window is not None:
        seen &= kv_pos > q_pos - sliding_window
    scores = np.where(seen, scores, -np.inf)
    peak = np.maximum(scores.max(axis=-1), sinks[:, None])
    weights = np.exp(scores - peak[..., None])
    total = weights.sum(axis=-1) + np.exp(sinks[:, None] - peak)
    out = np.einsum("nts,snh->tnh", weights / total[..., None], v)
    return out, (peak + np.log(total)).T


def write_kv(
    kv_pages: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    slot_mapping: ArrayLike,
    *,
    kv_scales: ArrayLike | None = None,
    implementation: str | None = None,
    interpret: object = False,
) -> Any:
    """A copy of the pool in which token t lies at slot_mapping[t]; past the end: dropped.

    With `kv_scales` (pool, scales), each vector quantised.
    """
    del implementation, interpret  # ways to compute, not what to compute
    pool, tokens = np.array(kv_pages), np.stack([np.asarray(k), np.asarray(v)], axis=1)
    num_pages, page_size, width = pool.shape[0], pool.shape[3], tokens.shape[3]
    scales = np.ones(pool.shape[:4], np.float32) if kv_scales is None else np.array(kv_scales)
    for token, slot in zip(tokens, np.asarray(slot_mapping), strict=True):
        if 0 <= slot < num_pages * page_size:
            page, offset = divmod(int(slot), page_size)
            values = token  # [2, num_kv_heads, head_dim]
            if kv_scales is not None:
                values, scales[page, :, :, offset] = quantize(token, pool.dtype)
            pool[page, :, :, offset, :width] = values
            pool[page, :, :, offset, width:] = 0
    return pool if kv_scales is None else (pool, scales)


def quantize(x: ArrayLike, dtype: Any) -> tuple[Array, Array]:
    """`pallas_kernels.quantize`, vector by vector: values in `dtype`, scales f32[...]."""
    vectors = np.asarray(x).astype(np.float32)
    values, scales = np.zeros(vectors.shape, dtype), np.ones(vectors.shape[:-1], np.float32)
    largest = np.float32(127 if np.dtype(dtype) == np.int8 else 448)
    for at in np.ndindex(scales.shape):
        vector = vectors[at]
        if not np.all(np.isfinite(vector)):
            scales[at] = np.nan
            continue
        scale = np.abs(vector).max() * np.float32(1 / float(largest))
        scales[at] = scale if scale >= 2.0**-126 else 1
        scaled = np.clip(vector * (np.float32(1) / scales[at]), -largest, largest)
        # NumPy's rounding and ml_dtypes' cast both go to nearest, ties to even.
        values[at] = (np.rint(scaled) if np.dtype(dtype) == np.int8 else scaled).astype(dtype)
    return values, scales


def dequantize(values: ArrayLike, scales: ArrayLike) -> Array:
    """f64[..., head_dim]: what quantised vectors stand for."""
    return np.asarray(values).astype(np.float64) * np.asarray(scales, np.float64)[..., None]


def copy_pages(kv_pages: ArrayLike, src: ArrayLike, dst: ArrayLike) -> Array:
    """A copy of the pool in which page dst[i] holds what page src[i] held before the call."""
    before, after = np.asarray(kv_pages), np.array(kv_pages)
    for source, target in zip(np.asarray(src), np.asarray(dst), strict=True):
        if 0 <= target < len(before):
            after[target] = before[np.clip(source, 0, len(before) - 1)]
    return after


def gather_pages(kv_pages: ArrayLike, page_ids: ArrayLike) -> Array:
    """[n, 2, num_kv_heads, page_size, head_dim]: the pages named, in order; ids are clamped."""
    pool = np.asarray(kv_pages)
    return pool[np.clip(np.asarray(page_ids), 0, len(pool) - 1)]


def scatter_pages(kv_pages: ArrayLike, page_ids: ArrayLike, pages: ArrayLike) -> Array:
    """A copy of the pool in which page page_ids[i] holds pages[i]; past the end: dropped."""
    pool, new = np.array(kv_pages), np.asarray(pages)
    for i, page in enumerate(np.asarray(page_ids)):
        if 0 <= page < len(pool):
            pool[page] = new[i]
    return pool


def merge_states(outs: ArrayLike, lses: ArrayLike) -> tuple[Array, Array]:
    """Float64 merge of attention over disjoint parts of the positions; empty part: (0, -inf)."""
    parts, weights_log = np.asarray(outs, np.float64), np.asarray(lses, np.float64)
    peak = weights_log.max(axis=0)
    peak = np.where(np.isneginf(peak), 0.0, peak)
    weights = np.exp(weights_log - peak)
    total = weights.sum(axis=0)
    safe = np.where(total == 0, 1.0, total)
    out = (parts * weights[..., None]).sum(axis=0) / safe[..., None]
    return out, np.where(total == 0, -np.inf, peak + np.log(safe))
