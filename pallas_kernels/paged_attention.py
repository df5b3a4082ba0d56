"""The public operation: check what is static, choose an implementation, call it.

Owns the specification (the docstring of `paged_attention`) and the errors. Knows no algorithm.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import reference
from pallas_kernels.paged_attention_xla import paged_attention_xla

IMPLEMENTATIONS = ("mosaic_gpu", "mosaic_tpu", "xla", "reference")
MAX_PAGE_SIZE = 256
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    kv_scales: jax.Array | None = None,
    max_q_len: int | None = None,
    return_lse: bool = False,
    plan: object = None,
    batch_invariant: bool = False,
    implementation: str | None = None,
    interpret: bool = False,
) -> Any:
    """Causal attention of a ragged batch over keys and values in pages.

    The query rows of the batch are packed one sequence after another; decode, prefill and chunks
    of a prefill may be mixed. A sequence's query rows are its LAST positions: query j of sequence
    s sits at position `kv_lens[s] - q_len + j` and sees the positions up to its own, which must be
    in the pages already (`write_kv` first). The softmax is in float32 whatever the dtype.

    Scores are, in this order: `scale * q . k`; `soft_cap * tanh(score / soft_cap)`;
    `+ slope * (kv position - q position)`; positions that are not seen are -inf.

    Args:
      q: [num_tokens, num_q_heads, head_dim]; float32, bfloat16 or float16.
      kv_pages: [num_pages, 2, num_kv_heads, page_size, head_dim]; K = 0, V = 1; page_size a power
        of two from 1 to 256; num_q_heads a multiple of num_kv_heads. Memory that no length
        reaches may hold anything, NaN included.
      page_table: i32[max_seqs, pages_per_seq]; entries past a sequence's length may be anything.
      kv_lens: i32[max_seqs], positions with keys and values, new tokens included.
      cu_q_lens: i32[max_seqs + 1], prefix sums of new tokens; rows of `q` from
        `cu_q_lens[num_seqs]` on are padding.
      num_seqs: i32[], live rows of the metadata; what lies past them may be anything.
      scale: of q . k; None is 1 / sqrt(head_dim).
      sliding_window: w: a query at position p sees p - w + 1 .. p.
      soft_cap: bounds the scaled scores.
      sinks: f32[num_q_heads], an extra logit in the denominator only; the lse includes it.
      alibi_slopes: f32[num_q_heads].
      kv_scales: scales of a quantised pool.
      max_q_len: a promise that no live sequence has more query rows; 1 (decode only) compiles to
        less code. None: no promise.
      return_lse: also return the log-sum-exp.
      plan: a work list made once a step.
      batch_invariant: the same bits for a row whatever else is in the batch.
      implementation: "mosaic_gpu", "mosaic_tpu", "xla" or "reference"; None is the best for the
        device. A named one that cannot do the job raises; it never falls back in silence.
        "reference" reads values, so it does not run under jit.
      interpret: run a Mosaic implementation on the CPU.

    Returns:
      out [num_tokens, num_q_heads, head_dim] in q's dtype, zeros in padding rows; with
      `return_lse` also lse f32[num_tokens, num_q_heads] (natural logarithm, -inf in padding rows).

    Raises:
      ValueError, TypeError: an argument's rank, shape, dtype or value is wrong; at trace time.
      NotImplementedError: no implementation, or not the one named, can do this.
    """
    _check_tensors(q, kv_pages)
    _check_rows(page_table, kv_lens, cu_q_lens, num_seqs)
    _check_options(scale, sliding_window, soft_cap)
    if max_q_len is not None and max_q_len < 1:
        raise ValueError(f"`max_q_len` must be at least 1, or None. Got {max_q_len}.")
    for name, per_head in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        _check_per_head(name, per_head, q.shape[1])
    chosen = _choose(implementation)
    _refuse(chosen, kv_scales, plan, batch_invariant, interpret)
    options = {
        "scale": scale,
        "sliding_window": sliding_window,
        "soft_cap": soft_cap,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
    }
    arrays = (q, kv_pages, page_table, kv_lens, cu_q_lens, num_seqs)
    if chosen == "reference":
        out, lse = reference.paged_attention(*arrays, **options, return_lse=True)
        out, lse = jnp.asarray(out.astype(q.dtype)), jnp.asarray(lse.astype(np.float32))
    else:
        out, lse = paged_attention_xla(*arrays, **options, max_q_len=max_q_len)
    return (out, lse) if return_lse else out


def _choose(implementation: str | None) -> str:
    if implementation is None:
        return "xla"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"`implementation` must be None or one of {', '.join(IMPLEMENTATIONS)}. "
            f"Got {implementation!r}."
        )
    if implementation.startswith("mosaic"):
        raise NotImplementedError(
            f"`implementation` {implementation!r} does not exist yet. Use 'xla', or None."
        )
    return implementation


def _refuse(
    chosen: str, kv_scales: object, plan: object, batch_invariant: bool, interpret: bool
) -> None:
    """Raises for the arguments that no implementation here can honour yet."""
    unsupported = {
        "kv_scales": kv_scales is not None,
        "plan": plan is not None,
        "batch_invariant": batch_invariant and chosen != "reference",
        "interpret": interpret,
    }
    for name, given in unsupported.items():
        if given:
            raise NotImplementedError(
                f"`{name}` is not implemented by {chosen!r} yet. Leave it at its default."
            )


def _check_tensors(q: jax.Array, kv_pages: jax.Array) -> None:
    _check_rank("q", q, "[num_tokens, num_q_heads, head_dim]", 3)
    _check_rank("kv_pages", kv_pages, "[num_pages, 2, num_kv_heads, page_size, head_dim]", 5)
    for name, array in (("q", q), ("kv_pages", kv_pages)):
        if array.dtype not in _DTYPES:
            raise TypeError(f"`{name}` must be float32, bfloat16 or float16. Got {array.dtype}.")
        if 0 in array.shape:
            raise ValueError(f"`{name}` must have no dimension of size 0. Got {array.shape}.")
    _, two, num_kv_heads, page_size, head_dim = kv_pages.shape
    if two != 2:
        raise ValueError(f"`kv_pages` must have 2 (K and V) as axis 1. Got {kv_pages.shape}.")
    if page_size > MAX_PAGE_SIZE or page_size & (page_size - 1):
        raise ValueError(
            f"`kv_pages` must have a page_size (axis 3) that is a power of two from 1 to "
            f"{MAX_PAGE_SIZE}. Got {page_size}."
        )
    if q.shape[2] != head_dim:
        raise ValueError(
            f"`q` must have the head_dim of `kv_pages`, {head_dim}, as axis 2. Got {q.shape}."
        )
    if q.shape[1] % num_kv_heads:
        raise ValueError(
            f"`q` must have a multiple of the {num_kv_heads} heads of `kv_pages` as axis 1. "
            f"Got {q.shape[1]}."
        )


def _check_rows(
    page_table: jax.Array, kv_lens: jax.Array, cu_q_lens: jax.Array, num_seqs: jax.Array
) -> None:
    _check_rank("page_table", page_table, "[max_seqs, pages_per_seq]", 2)
    if 0 in page_table.shape:
        raise ValueError(f"`page_table` must have no dimension of size 0. Got {page_table.shape}.")
    max_seqs = page_table.shape[0]
    expected = (
        ("kv_lens", kv_lens, (max_seqs,)),
        ("cu_q_lens", cu_q_lens, (max_seqs + 1,)),
        ("num_seqs", num_seqs, ()),
    )
    for name, array, shape in expected:
        if array.shape != shape:
            raise ValueError(
                f"`{name}` must have shape {shape}: `page_table` has {max_seqs} rows. "
                f"Got {array.shape}."
            )
    for name, array in (("page_table", page_table), *((n, a) for n, a, _ in expected)):
        if array.dtype != jnp.int32:
            raise TypeError(f"`{name}` must be int32. Got {array.dtype}.")


def _check_options(scale: float | None, sliding_window: int | None, soft_cap: float | None) -> None:
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"`scale` must be finite. Got {scale}.")
    if soft_cap is not None and not (math.isfinite(soft_cap) and soft_cap > 0):
        raise ValueError(f"`soft_cap` must be above 0 and finite, or None. Got {soft_cap}.")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"`sliding_window` must be at least 1, or None. Got {sliding_window}.")


def _check_per_head(name: str, array: jax.Array | None, num_q_heads: int) -> None:
    if array is None:
        return
    if array.shape != (num_q_heads,):
        raise ValueError(f"`{name}` must have shape ({num_q_heads},), as q. Got {array.shape}.")
    if array.dtype != jnp.float32:
        raise TypeError(f"`{name}` must be float32. Got {array.dtype}.")


def _check_rank(name: str, array: jax.Array, shape: str, rank: int) -> None:
    if array.ndim != rank:
        raise ValueError(f"`{name}` must have shape {shape}. Got {array.shape}.")
