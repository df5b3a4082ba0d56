"""The public operation: check what is static, choose an implementation, call it.

Owns the specification (the docstring of `paged_attention`) and the errors. Knows no algorithm.
"""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_kernels import arguments, cpu, reference
from pallas_kernels.attention_plan import AttentionPlan, Problem, make_plan
from pallas_kernels.merge import add_sinks
from pallas_kernels.paged_attention_mosaic import LIMITS, paged_attention_mosaic
from pallas_kernels.paged_attention_xla import paged_attention_xla
from pallas_kernels.platform import (
    KERNELS,
    MOSAIC,
    NATIVE_CPU,
    check_interpret,
    check_runs,
    traced_platform,
)
from pallas_kernels.quantize import LARGEST
from pallas_kernels.score_rule import ScoreRule
from pallas_kernels.tuning import KernelConfig

IMPLEMENTATIONS = ("mosaic_gpu", "mosaic_tpu", "native_cpu", "xla", "reference")
MAX_PAGE_SIZE = 256
MAX_HEAD_DIM = 2**31 - 1  # an array's index
SOFT_CAPS = (1e-30, 1e30)  # beyond, scores of ordinary size divided by it leave float32
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

    Arrays are JAX's or NumPy's, in the dtype that is told here: none is converted. The integers
    (`page_table` to `num_seqs`) may also be Python's, in lists. There is no gradient; a kernel of a
    TPU is mapped by `jax.lax.map`, not by vmap.

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
      soft_cap: bounds the scaled scores; from 1e-30 to 1e30.
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
      implementation: "mosaic_gpu", "mosaic_tpu", "native_cpu" (see `pallas_kernels.cpu`), "xla"
        or "reference"; None is the best for the device. A named one that cannot do the job raises;
        it never falls back in silence.
        "reference" reads values, so it does not run under jit: NotImplementedError there.
      interpret: run a Mosaic implementation on the CPU, with race detection; or the parameters
        of Pallas' interpreter.

    Returns:
      out [num_tokens, num_q_heads, head_dim] in `out_dtype`, zeros in padding rows; with
      `return_lse` also lse f32[num_tokens, num_q_heads] (natural logarithm, -inf in padding rows).

    Raises:
      ValueError, TypeError: an argument's rank, shape, dtype or value is wrong; at trace time.
      NotImplementedError: no implementation, or not the one named, can do this.
    """
    q, kv_pages = arguments.as_array("q", q), arguments.as_array("kv_pages", kv_pages)
    _check_tensors(q, kv_pages)
    kv_scales = _scales(kv_pages, kv_scales)
    rows = _rows(page_table, kv_lens, cu_q_lens, num_seqs)
    _check_options(scale, sliding_window, soft_cap, max_q_len)
    arguments.check_flag("batch_invariant", batch_invariant)
    arguments.check_flag("return_lse", return_lse)
    out_dtype = _out_dtype(q, out_dtype)
    per_head: dict[str, Any] = {
        "sinks": _per_head("sinks", sinks, q.shape[1]),
        "alibi_slopes": _per_head("alibi_slopes", alibi_slopes, q.shape[1]),
        "kv_scales": kv_scales,
    }
    chosen, problem = _choose(
        q,
        kv_pages,
        rows[0],
        implementation,
        sliding_window=sliding_window,
        max_q_len=max_q_len,
        batch_invariant=batch_invariant,
    )
    check_interpret(chosen, interpret)
    check_runs(chosen, interpret)
    if plan is not None:
        _check_plan(plan, problem, alibi_slopes)
    q, kv_pages, per_head = arguments.without_gradients((q, kv_pages, per_head))
    arrays = (q, kv_pages, *rows)
    scale = float(q.shape[2] ** -0.5 if scale is None else scale)
    rule = ScoreRule(scale, sliding_window, soft_cap)
    if chosen == "reference":
        out, lse = _reference(arrays, rule, per_head)
    elif chosen == NATIVE_CPU:
        sinks = per_head["sinks"]
        out, lse = cpu.attention(
            *arrays,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            alibi_slopes=per_head["alibi_slopes"],
            # What is rounded once more after this comes unrounded.
            out_dtype=q.dtype if sinks is None and out_dtype == q.dtype else jnp.float32,
        )
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
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
    rows = _rows(page_table, kv_lens, cu_q_lens, num_seqs)
    _check_options(None, sliding_window, None, max_q_len)
    for name, flag in (("batch_invariant", batch_invariant), ("cascade", cascade)):
        arguments.check_flag(name, flag)
    for name, config in (("decode", decode), ("prefill", prefill)):
        _check_config(name, config)
    _, problem = _choose(
        q,
        kv_pages,
        rows[0],
        implementation,
        sliding_window=sliding_window,
        max_q_len=max_q_len,
        batch_invariant=batch_invariant,
    )
    if not problem.implementation.startswith("mosaic"):
        asked = {"cascade": cascade, "decode": decode, "prefill": prefill}
        for name in [name for name, value in asked.items() if value]:
            if implementation is not None:
                raise NotImplementedError(
                    f"`{name}` must be used with a Mosaic implementation. Got {implementation!r}."
                )
        return AttentionPlan((), None, problem)  # the others make their work lists themselves
    return make_plan(problem, *rows, cascade=cascade, decode=decode, prefill=prefill)


def padded_head_dim(head_dim: int, implementation: str | None = None) -> int:
    """Columns that a pool needs for heads of `head_dim`, so that `implementation` takes it.

    Raises:
      TypeError: `head_dim` is no int.
      ValueError: it is below 1 or above 2^31 - 1, or there is no such implementation.
      NotImplementedError: the implementation has no kernel for so large a head.
    """
    arguments.check_implementation(implementation, IMPLEMENTATIONS)
    if not arguments.is_integer(head_dim):
        raise TypeError(f"`head_dim` must be an int. Got {arguments.shown(head_dim)}.")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"`head_dim` must be from 1 to {MAX_HEAD_DIM}. Got {arguments.shown(head_dim)}."
        )
    chosen = implementation or KERNELS[traced_platform()]
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

    Raises:
      ValueError, TypeError: as `paged_attention`.
    """
    _check_tensors(q, kv_pages)
    arguments.check_described("page_table", page_table)
    _check_rank("page_table", page_table, "[max_seqs, pages_per_seq]", 2)
    mosaic = MOSAIC.get(traced_platform())
    if mosaic is None:
        limit = cpu.attention_limit(q, kv_pages)
        return (NATIVE_CPU, "") if limit is None else ("xla", limit)
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
    arguments.check_implementation(implementation, IMPLEMENTATIONS)
    if implementation is None:
        implementation = best_implementation(q, kv_pages, page_table)[0]
    return implementation, _problem(q, kv_pages, page_table, implementation, **options)


def _problem(
    q: Any, kv_pages: Any, page_table: Any, implementation: str, **options: Any
) -> Problem:
    if implementation == NATIVE_CPU:
        limit = cpu.attention_limit(q, kv_pages)
        if limit is not None:
            raise NotImplementedError(f"`implementation` {NATIVE_CPU!r} cannot do this: {limit}.")
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
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((arrays, per_head))):
        raise NotImplementedError(
            "`implementation` 'reference' reads values, and traced arrays (under jit, vmap, grad, "
            "eval_shape) have none yet. Call it outside, or use 'xla'."
        )
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


def _scales(kv_pages: jax.Array, kv_scales: Any) -> jax.Array | None:
    """The scales, checked."""
    if kv_pages.dtype in LARGEST and kv_scales is None:
        raise ValueError(f"`kv_scales` must be given for a pool of {kv_pages.dtype}. Got None.")
    if kv_scales is None:
        return None
    if kv_pages.dtype not in LARGEST:
        raise TypeError(
            f"`kv_pages` must be float8_e4m3fn or int8 when `kv_scales` is given. "
            f"Got {kv_pages.dtype}."
        )
    scales = arguments.as_array("kv_scales", kv_scales)
    if scales.shape != kv_pages.shape[:4]:
        raise ValueError(
            f"`kv_scales` must have shape {kv_pages.shape[:4]}: one for each head and position. "
            f"Got {scales.shape}."
        )
    if scales.dtype != jnp.float32:
        raise TypeError(f"`kv_scales` must be float32. Got {scales.dtype}.")
    return scales


def _out_dtype(q: jax.Array, out_dtype: Any) -> Any:
    try:
        found = q.dtype if out_dtype is None else jnp.dtype(out_dtype)
    except TypeError:  # of NumPy, for what names no dtype
        found = None
    if found not in _DTYPES:
        raise TypeError(
            f"`out_dtype` must be float32, bfloat16 or float16. "
            f"Got {found or arguments.shown(out_dtype)}."
        )
    return found


def _check_tensors(q: Any, kv_pages: Any) -> None:
    arguments.check_described("q", q)
    arguments.check_described("kv_pages", kv_pages)
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


def _rows(
    page_table: Any, kv_lens: Any, cu_q_lens: Any, num_seqs: Any
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The same four, checked, as i32 arrays."""
    given = {
        "page_table": page_table, "kv_lens": kv_lens, "cu_q_lens": cu_q_lens, "num_seqs": num_seqs
    }  # fmt: skip
    arrays = {name: arguments.as_int32(name, value) for name, value in given.items()}
    table = arrays["page_table"]
    _check_rank("page_table", table, "[max_seqs, pages_per_seq]", 2)
    if 0 in table.shape:
        raise ValueError(f"`page_table` must have no dimension of size 0. Got {table.shape}.")
    max_seqs = table.shape[0]
    for name, shape in {
        "kv_lens": (max_seqs,),
        "cu_q_lens": (max_seqs + 1,),
        "num_seqs": (),
    }.items():
        if arrays[name].shape != shape:
            raise ValueError(
                f"`{name}` must have shape {shape}: `page_table` has {max_seqs} rows. "
                f"Got {arrays[name].shape}."
            )
    return table, arrays["kv_lens"], arrays["cu_q_lens"], arrays["num_seqs"]


def _check_config(name: str, config: Any) -> None:
    if config is None:
        return
    if not isinstance(config, KernelConfig):
        raise TypeError(f"`{name}` must be a KernelConfig, or None. Got {arguments.shown(config)}.")
    sizes = (config.rows, config.kv_tile, config.stages, config.workers)
    if not all(map(arguments.is_integer, sizes)):
        raise TypeError(f"`{name}` must have integers for its sizes. Got {config}.")


def _check_options(
    scale: float | None,
    sliding_window: int | None,
    soft_cap: float | None,
    max_q_len: int | None,
) -> None:
    for name, number in (("scale", scale), ("soft_cap", soft_cap)):
        if number is not None and not (arguments.is_integer(number) or isinstance(number, float)):
            raise TypeError(
                f"`{name}` must be a Python number, or None. Got {type(number).__name__}."
            )
    for name, value in (("sliding_window", sliding_window), ("max_q_len", max_q_len)):
        if value is not None and not arguments.is_integer(value):
            raise TypeError(f"`{name}` must be an int, or None. Got {type(value).__name__}.")
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1, or None. Got {arguments.shown(value)}.")
        if value is not None and value >= 2**31:
            raise ValueError(f"`{name}` must be below 2^31, or None. Got {arguments.shown(value)}.")
    most = float(jnp.finfo(jnp.float32).max)
    if scale is not None and not -most <= scale <= most:
        raise ValueError(f"`scale` must be finite in float32. Got {arguments.shown(scale)}.")
    if soft_cap is not None and not SOFT_CAPS[0] <= soft_cap <= SOFT_CAPS[1]:
        raise ValueError(
            f"`soft_cap` must be from {SOFT_CAPS[0]} to {SOFT_CAPS[1]}, or None. "
            f"Got {arguments.shown(soft_cap)}."
        )


def _per_head(name: str, array: Any, num_q_heads: int) -> jax.Array | None:
    """The array, checked."""
    if array is None:
        return None
    array = arguments.as_array(name, array)
    if array.shape != (num_q_heads,):
        raise ValueError(f"`{name}` must have shape ({num_q_heads},), as q. Got {array.shape}.")
    if array.dtype != jnp.float32:
        raise TypeError(f"`{name}` must be float32. Got {array.dtype}.")
    return array


def _check_rank(name: str, array: jax.Array, shape: str, rank: int) -> None:
    if array.ndim != rank:
        raise ValueError(f"`{name}` must have shape {shape}. Got {array.shape}.")
