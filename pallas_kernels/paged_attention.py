"""The public operation: check what is static, choose an implementation, call it.

Owns the specification (the docstring of `paged_attention`) and the errors. Knows no algorithm.
"""

import math
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import reference
from pallas_kernels.attention_plan import AttentionPlan, Problem, make_plan
from pallas_kernels.paged_attention_mosaic import LIMITS, paged_attention_mosaic
from pallas_kernels.paged_attention_xla import paged_attention_xla
from pallas_kernels.platform import MOSAIC, traced_platform
from pallas_kernels.quantize import LARGEST
from pallas_kernels.score_rule import ScoreRule
from pallas_kernels.tuning import KernelConfig

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
    out_dtype: Any = None,
    plan: AttentionPlan | None = None,
    batch_invariant: bool = False,
    implementation: str | None = None,
    interpret: Any = False,
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
        of two from 1 to 256; num_q_heads a multiple of num_kv_heads. Its head_dim may be larger
        than q's (`padded_head_dim`); the rest is zero where a position is written. float32,
        bfloat16, float16, or with `kv_scales` float8_e4m3fn or int8. Memory that no length
        reaches may hold anything, NaN included.
      page_table: i32[max_seqs, pages_per_seq]; entries past a sequence's length may be anything.
      kv_lens: i32[max_seqs], positions with keys and values, new tokens included.
      cu_q_lens: i32[max_seqs + 1], prefix sums of new tokens; rows of `q` from
        `cu_q_lens[num_seqs]` on are padding.
      num_seqs: i32[], live rows of the metadata; what lies past them may be anything.
      scale: of q . k; None is 1 / sqrt(head_dim) with q's head_dim.
      sliding_window: w: a query at position p sees p - w + 1 .. p.
      soft_cap: bounds the scaled scores.
      sinks: f32[num_q_heads], an extra logit in the denominator only; the lse includes it.
      alibi_slopes: f32[num_q_heads].
      kv_scales: f32[num_pages, 2, num_kv_heads, page_size], scales of a quantised pool: a key or
        value is its scale times its vector of `kv_pages`.
      max_q_len: a promise that no live sequence has more query rows; 1 (decode only) compiles to
        less code. None: no promise.
      return_lse: also return the log-sum-exp.
      out_dtype: of out; None: q's.
      plan: of `plan_attention`, made once a step for all layers; None: made here.
      batch_invariant: the same bits for a row whatever else is in the batch; for one width of
        the page table, which decides where long rows are cut.
      implementation: "mosaic_gpu", "mosaic_tpu", "xla" or "reference"; None is the best for the
        device. A named one that cannot do the job raises; it never falls back in silence.
        "reference" reads values, so it does not run under jit.
      interpret: run a Mosaic implementation on the CPU, with race detection; or the parameters
        of Pallas' interpreter.

    Returns:
      out [num_tokens, num_q_heads, head_dim] in `out_dtype`, zeros in padding rows; with
      `return_lse` also lse f32[num_tokens, num_q_heads] (natural logarithm, -inf in padding rows).

    Raises:
      ValueError, TypeError: an argument's rank, shape, dtype or value is wrong; at trace time.
      NotImplementedError: no implementation, or not the one named, can do this.
    """
    _check_tensors(q, kv_pages)
    _check_scales(kv_pages, kv_scales)
    _check_rows(page_table, kv_lens, cu_q_lens, num_seqs)
    _check_options(scale, sliding_window, soft_cap, max_q_len)
    for name, array in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        _check_per_head(name, array, q.shape[1])
    chosen, problem = _choose(
        q,
        kv_pages,
        page_table,
        implementation,
        sliding_window=sliding_window,
        max_q_len=max_q_len,
        batch_invariant=batch_invariant,
    )
    _check_runs(chosen, interpret)
    if plan is not None:
        _check_plan(plan, problem, alibi_slopes)
    arrays = (q, kv_pages, page_table, kv_lens, cu_q_lens, num_seqs)
    per_head: dict[str, Any] = {
        "sinks": sinks, "alibi_slopes": alibi_slopes, "kv_scales": kv_scales
    }  # fmt: skip
    scale = float(q.shape[2] ** -0.5 if scale is None else scale)
    rule = ScoreRule(scale, sliding_window, soft_cap)
    out_dtype = q.dtype if out_dtype is None else jnp.dtype(out_dtype)
    if out_dtype not in _DTYPES:
        raise TypeError(f"`out_dtype` must be float32, bfloat16 or float16. Got {out_dtype}.")
    if chosen == "reference":
        out, lse = _reference(arrays, rule, per_head)
    elif chosen == "xla":
        out, lse = paged_attention_xla(
            *arrays,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            **per_head,
            max_q_len=max_q_len,
            batch_invariant=batch_invariant,
            out_dtype=out_dtype,
        )
    else:
        plan = plan or make_plan(problem, *arrays[2:])
        attend_tiles = _kernels(chosen).attend_tiles
        out, lse = paged_attention_mosaic(
            *arrays[:3],
            plan,
            attend_tiles,
            rule=rule,
            **per_head,
            out_dtype=out_dtype,
            interpret=interpret,
        )
    out = out.astype(out_dtype)
    return (out, lse) if return_lse else out


def plan_attention(
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    q: Any,
    kv_pages: Any,
    page_table: jax.Array,
    sliding_window: int | None = None,
    max_q_len: int | None = None,
    batch_invariant: bool = False,
    cascade: bool = False,
    implementation: str | None = None,
    decode: KernelConfig | None = None,
    prefill: KernelConfig | None = None,
) -> AttentionPlan:
    """The part of `paged_attention` that layers share, made once a step: pass it as `plan=`.

    Pure integer arithmetic on the metadata; runs under jit, on the device.

    Args:
      kv_lens, cu_q_lens, num_seqs, page_table: as `paged_attention` takes them.
      q, kv_pages: arrays, or anything with their shape and dtype (`jax.ShapeDtypeStruct`).
      sliding_window, max_q_len, batch_invariant, implementation: as `paged_attention` is going
        to get them; a plan for other ones is refused there.
      cascade: sequences that decode and share a long run of pages (256 positions, whole KV tiles:
        512 on a TPU) read it once. Not with a window, ALiBi or `batch_invariant`.
      decode, prefill: sizes of the launches in place of the tuned ones.

    Raises:
      ValueError, TypeError, NotImplementedError: as `paged_attention`.
    """
    _check_tensors(q, kv_pages)
    _check_rows(page_table, kv_lens, cu_q_lens, num_seqs)
    _check_options(None, sliding_window, None, max_q_len)
    _, problem = _choose(
        q,
        kv_pages,
        page_table,
        implementation,
        sliding_window=sliding_window,
        max_q_len=max_q_len,
        batch_invariant=batch_invariant,
    )
    if not problem.implementation.startswith("mosaic"):
        if cascade and implementation is not None:
            raise NotImplementedError(
                f"`cascade` must be used with a Mosaic implementation. Got {implementation!r}."
            )
        return AttentionPlan((), None, problem)  # the others make their work lists themselves
    metadata = (page_table, kv_lens, cu_q_lens, num_seqs)
    return make_plan(problem, *metadata, cascade=cascade, decode=decode, prefill=prefill)


def padded_head_dim(head_dim: int, implementation: str | None = None) -> int:
    """Columns that a pool needs for heads of `head_dim`, so that `implementation` takes it.

    Raises:
      NotImplementedError: the implementation has no kernel for so large a head.
    """
    chosen = implementation or MOSAIC.get(traced_platform(), "xla")
    widths = LIMITS[chosen].head_dims if chosen in LIMITS else (head_dim,)
    fitting = [width for width in widths if width >= head_dim]
    if not fitting:
        raise NotImplementedError(
            f"`head_dim` must be at most {widths[-1]} for {chosen!r}. Got {head_dim}. Use 'xla'."
        )
    return fitting[0]


def best_implementation(q: Any, kv_pages: Any, page_table: Any) -> tuple[str, str]:
    """What `implementation=None` stands for on this device, and why not a faster one ("": none).

    Args:
      q, kv_pages, page_table: arrays, or anything with their shape and dtype.
    """
    mosaic = MOSAIC.get(traced_platform())
    if mosaic is None:
        return "xla", ""
    options = {"sliding_window": None, "max_q_len": None, "batch_invariant": False}
    try:
        _problem(q, kv_pages, page_table, mosaic, **options)
    except NotImplementedError as error:
        return "xla", str(error)
    return mosaic, ""


def _choose(
    q: Any, kv_pages: Any, page_table: Any, implementation: str | None, **options: Any
) -> tuple[str, Problem]:
    """The implementation, and the problem as it sees it; raises when a named one cannot."""
    if implementation is None:
        implementation = best_implementation(q, kv_pages, page_table)[0]
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"`implementation` must be None or one of {', '.join(IMPLEMENTATIONS)}. "
            f"Got {implementation!r}."
        )
    return implementation, _problem(q, kv_pages, page_table, implementation, **options)


def _problem(
    q: Any, kv_pages: Any, page_table: Any, implementation: str, **options: Any
) -> Problem:
    problem = Problem.of(q, kv_pages, page_table, implementation=implementation, **options)
    if implementation.startswith("mosaic"):
        quantized = kv_pages.dtype in LARGEST
        _kernels(implementation).check(problem, q.dtype, quantized)
    return problem


def _kernels(implementation: str) -> ModuleType:
    """Loaded when first asked for: a CPU needs neither, and each takes a while to import."""
    if implementation == "mosaic_gpu":
        from pallas_kernels import paged_attention_mosaic_gpu as kernels
    else:
        from pallas_kernels import paged_attention_mosaic_tpu as kernels
    return kernels


def _reference(
    arrays: tuple[jax.Array, ...], rule: ScoreRule, per_head: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    out, lse = reference.paged_attention(
        *arrays,  # pyright: ignore[reportCallIssue]
        scale=rule.scale,
        sliding_window=rule.sliding_window,
        soft_cap=rule.soft_cap,
        **per_head,
        return_lse=True,
    )
    return jnp.asarray(out.astype(np.float32)), jnp.asarray(lse.astype(np.float32))


def _check_plan(plan: Any, problem: Problem, alibi_slopes: jax.Array | None) -> None:
    if not isinstance(plan, AttentionPlan):
        raise TypeError(f"`plan` must be what `plan_attention` returns. Got {type(plan).__name__}.")
    plan.check(problem)
    if plan.prefix is not None and alibi_slopes is not None:
        raise NotImplementedError(
            "`plan` must be made without `cascade` for `alibi_slopes`: the rows of a shared run "
            "have no position of their own."
        )


def _check_runs(chosen: str, interpret: Any) -> None:
    mosaic, here = chosen.startswith("mosaic"), traced_platform()
    if interpret and not mosaic:
        raise ValueError(
            f"`interpret` must be used with a Mosaic implementation. Got {chosen!r}: name one."
        )
    if mosaic and not interpret and MOSAIC.get(here) != chosen:
        raise NotImplementedError(
            f"`implementation` {chosen!r} does not run on a {here.upper()}. Use 'xla', or "
            f"interpret=True, which is slow and meant for tests."
        )


def _check_scales(kv_pages: jax.Array, kv_scales: jax.Array | None) -> None:
    if kv_pages.dtype in LARGEST and kv_scales is None:
        raise ValueError(f"`kv_scales` must be given for a pool of {kv_pages.dtype}. Got None.")
    if kv_scales is None:
        return
    if kv_pages.dtype not in LARGEST:
        raise TypeError(
            f"`kv_pages` must be float8_e4m3fn or int8 when `kv_scales` is given. "
            f"Got {kv_pages.dtype}."
        )
    if kv_scales.shape != kv_pages.shape[:4]:
        raise ValueError(
            f"`kv_scales` must have shape {kv_pages.shape[:4]}: one for each head and position. "
            f"Got {kv_scales.shape}."
        )
    if kv_scales.dtype != jnp.float32:
        raise TypeError(f"`kv_scales` must be float32. Got {kv_scales.dtype}.")


def _check_tensors(q: jax.Array, kv_pages: jax.Array) -> None:
    _check_rank("q", q, "[num_tokens, num_q_heads, head_dim]", 3)
    _check_rank("kv_pages", kv_pages, "[num_pages, 2, num_kv_heads, page_size, head_dim]", 5)
    for name, array in (("q", q), ("kv_pages", kv_pages)):
        if array.dtype not in _DTYPES and not (name == "kv_pages" and array.dtype in LARGEST):
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
    if q.shape[2] > head_dim:
        raise ValueError(
            f"`q` must have at most the head_dim of `kv_pages`, {head_dim}, as axis 2. "
            f"Got {q.shape}."
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


def _check_options(
    scale: float | None,
    sliding_window: int | None,
    soft_cap: float | None,
    max_q_len: int | None,
) -> None:
    for name, value in (("scale", scale), ("soft_cap", soft_cap)):
        if value is not None and not isinstance(value, int | float):
            raise TypeError(
                f"`{name}` must be a Python number, or None. Got {type(value).__name__}."
            )
    for name, value in (("sliding_window", sliding_window), ("max_q_len", max_q_len)):
        if value is not None and not isinstance(value, int):
            raise TypeError(f"`{name}` must be an int, or None. Got {type(value).__name__}.")
    if max_q_len is not None and max_q_len < 1:
        raise ValueError(f"`max_q_len` must be at least 1, or None. Got {max_q_len}.")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"`scale` must be finite. Got {scale}.")
    if soft_cap is not None and not (math.isfinite(soft_cap) and soft_cap > 0):
        raise ValueError(f"`soft_cap` must be above 0 and finite, or None. Got {soft_cap}.")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"`sliding_window` must be at least 1, or None. Got {sliding_window}.")
    if sliding_window is not None and sliding_window >= 2**31:
        raise ValueError(f"`sliding_window` must be below 2^31, or None. Got {sliding_window}.")


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
