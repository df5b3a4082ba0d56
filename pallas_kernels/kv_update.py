"""Changes to a page pool: new tokens, page copies, swap out and in. All in place when donated.

Owns how bytes move; which page belongs to whom is the host's business. Bits are moved, never
converted, except into a quantised pool: there `pallas_kernels.quantize` says how.

  xla         one scatter along the leading axes, which the compiler does in place
  mosaic_gpu  TMA copies (`mosaic_gpu_update`): sm_90 and later; none for swapping
  mosaic_tpu  DMA (`mosaic_tpu_update`)

Scales, [num_pages, 2, num_kv_heads, page_size] beside a quantised pool, go through XLA, but for the
writes of mosaic_tpu: the compiler for TPUs would copy all scales for a scatter into them.

Arrays are JAX's or NumPy's, in the dtypes that are told below: none is converted. Page ids and
slots may also be Python's integers, in a list. No operation has a gradient.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import arguments
from pallas_kernels.platform import check_interpret, check_runs, traced_platform
from pallas_kernels.quantize import LARGEST, quantize

IMPLEMENTATIONS = ("mosaic_gpu", "mosaic_tpu", "xla")


def write_kv(
    kv_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    kv_scales: jax.Array | None = None,
    implementation: str | None = None,
    interpret: Any = False,
) -> Any:
    """**DONATES** under a donating jit. Puts each token's keys and values where the mapping says.

    Args:
      kv_pages: [num_pages, 2, num_kv_heads, page_size, head_dim].
      k, v: [num_tokens, num_kv_heads, up to head_dim] in the pool's dtype, or in float32, bfloat16
        or float16 for a quantised pool. Columns of the pool past theirs become zeros.
      slot_mapping: i32[num_tokens], page * page_size + page offset; an entry outside
        [0, num_pages * page_size) is dropped. Live entries must differ.
      kv_scales: f32[num_pages, 2, num_kv_heads, page_size] of a pool of float8_e4m3fn or int8:
        each vector is quantised (`pallas_kernels.quantize`). DONATES it too. "mosaic_tpu" takes
        pages of 128 tokens.
      implementation: "mosaic_gpu", "mosaic_tpu" or "xla"; None is the best for the device. A named
        one that cannot do the job raises.
      interpret: run a Mosaic implementation on the CPU; it has to be named.

    Returns:
      The pool, with the tokens in it; with `kv_scales` (the pool, the scales).

    Raises:
      ValueError, TypeError: shapes or dtypes disagree; at trace time.
      NotImplementedError: the named implementation cannot do this.
    """
    kv_pages = _pool(kv_pages)
    slot_mapping = _ids("slot_mapping", slot_mapping)
    k, v = arguments.as_array("k", k), arguments.as_array("v", v)
    _check_tokens(kv_pages, k, v, slot_mapping.shape[0], quantized=kv_scales is not None)
    if kv_scales is not None:
        kv_scales = arguments.as_array("kv_scales", kv_scales)
        _check_scales(kv_pages, kv_scales)
    kv_pages, k, v, kv_scales = arguments.without_gradients((kv_pages, k, v, kv_scales))
    if kv_scales is None:
        k, v = (_widen(x, kv_pages.shape[4]) for x in (k, v))
        return _write_vectors(kv_pages, k, v, slot_mapping, implementation, interpret)
    (k, k_scales), (v, v_scales) = (quantize(x, kv_pages.dtype) for x in (k, v))
    k, v = (_widen(x, kv_pages.shape[4]) for x in (k, v))
    scales = (kv_scales, k_scales, v_scales)
    return _write_vectors(kv_pages, k, v, slot_mapping, implementation, interpret, scales)


def copy_pages(
    kv_pages: jax.Array,
    src: jax.Array,
    dst: jax.Array,
    *,
    implementation: str | None = None,
    interpret: Any = False,
) -> jax.Array:
    """**DONATES** under a donating jit. Copies whole pages; all reads come before all writes.

    Args:
      kv_pages: [num_pages, 2, num_kv_heads, page_size, head_dim], or scales without the last axis.
      src: i32[n] page ids to copy from; clamped to the pool.
      dst: i32[n] page ids to copy to; an entry outside [0, num_pages) is dropped. Live entries
        must differ. A page may be a source and a destination; not with "mosaic_tpu", which copies
        in any order, so that a program for every device keeps the two apart. Nothing checks it:
        under jit the ids have no values yet.
      implementation, interpret: as for `write_kv`.

    Returns:
      The pool, with the copies in it.

    Raises:
      ValueError, TypeError: shapes or dtypes disagree; at trace time.
      NotImplementedError: the named implementation cannot do this.
    """
    kv_pages = arguments.without_gradients(_pages_or_scales(kv_pages))
    src, dst = _ids("src", src), _ids("dst", dst)
    if src.shape != dst.shape:
        raise ValueError(f"`dst` must have the shape of `src`, {src.shape}. Got {dst.shape}.")

    def by_gpu() -> jax.Array:
        from pallas_kernels.mosaic_gpu_update import copy_pages_gpu

        return copy_pages_gpu(kv_pages, src, dst, interpret=interpret)

    def by_tpu() -> jax.Array:
        from pallas_kernels.mosaic_tpu_update import copy_pages_tpu

        return copy_pages_tpu(kv_pages, src, dst, interpret=interpret)

    def by_xla() -> jax.Array:
        return _scatter_xla(kv_pages, dst, _gather_xla(kv_pages, src))

    return _run(kv_pages, implementation, interpret, gpu=by_gpu, tpu=by_tpu, xla=by_xla)


def gather_pages(
    kv_pages: jax.Array,
    page_ids: jax.Array,
    *,
    implementation: str | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Copies pages out of the pool, for swapping out.

    Args:
      kv_pages: [num_pages, 2, num_kv_heads, page_size, head_dim], or scales without the last axis.
      page_ids: i32[n]; clamped to the pool.
      implementation, interpret: as for `write_kv`; there is no "mosaic_gpu".

    Returns:
      [n, 2, num_kv_heads, page_size, head_dim], or scales without the last axis.

    Raises:
      ValueError, TypeError: shapes or dtypes disagree; at trace time.
      NotImplementedError: the named implementation cannot do this.
    """
    kv_pages = arguments.without_gradients(_pages_or_scales(kv_pages))
    page_ids = _ids("page_ids", page_ids)

    def by_tpu() -> jax.Array:
        from pallas_kernels.mosaic_tpu_update import gather_pages_tpu

        return gather_pages_tpu(kv_pages, page_ids, interpret=interpret)

    def by_xla() -> jax.Array:
        return _gather_xla(kv_pages, page_ids)

    return _run(kv_pages, implementation, interpret, tpu=by_tpu, xla=by_xla)


def scatter_pages(
    kv_pages: jax.Array,
    page_ids: jax.Array,
    pages: jax.Array,
    *,
    implementation: str | None = None,
    interpret: Any = False,
) -> jax.Array:
    """**DONATES** under a donating jit. Puts whole pages into the pool, for swapping in.

    Args:
      kv_pages: [num_pages, 2, num_kv_heads, page_size, head_dim], or scales without the last axis.
      page_ids: i32[n]; an entry outside [0, num_pages) is dropped. Live entries must differ.
      pages: [n, 2, num_kv_heads, page_size, head_dim] in the pool's dtype, or scales likewise.
      implementation, interpret: as for `write_kv`; there is no "mosaic_gpu".

    Returns:
      The pool, with the pages in it.

    Raises:
      ValueError, TypeError: shapes or dtypes disagree; at trace time.
      NotImplementedError: the named implementation cannot do this.
    """
    kv_pages, page_ids = _pages_or_scales(kv_pages), _ids("page_ids", page_ids)
    pages = arguments.as_array("pages", pages)
    _check_like("pages", pages, (page_ids.shape[0], *kv_pages.shape[1:]), kv_pages)
    kv_pages, pages = arguments.without_gradients((kv_pages, pages))

    def by_tpu() -> jax.Array:
        from pallas_kernels.mosaic_tpu_update import scatter_pages_tpu

        return scatter_pages_tpu(kv_pages, page_ids, pages, interpret=interpret)

    def by_xla() -> jax.Array:
        return _scatter_xla(kv_pages, page_ids, pages)

    return _run(kv_pages, implementation, interpret, tpu=by_tpu, xla=by_xla)


def _write_vectors(
    kv_pages: jax.Array,
    k: jax.Array,  # [num_tokens, num_kv_heads, head_dim] in the pool's dtype
    v: jax.Array,
    slot_mapping: jax.Array,
    implementation: str | None,
    interpret: Any,
    scales: tuple[jax.Array, jax.Array, jax.Array] | None = None,  # the pool's, of k, of v
) -> Any:
    """The pool; with `scales` (the pool, its scales)."""

    def by_gpu() -> Any:
        from pallas_kernels.mosaic_gpu_update import write_kv_gpu

        pages = write_kv_gpu(kv_pages, k, v, slot_mapping, interpret=interpret)
        return pages if scales is None else (pages, _write_xla(*scales, slot_mapping))

    def by_tpu() -> Any:
        from pallas_kernels.mosaic_tpu_update import write_kv_tpu, write_scales_tpu

        if scales is None:
            return write_kv_tpu(kv_pages, k, v, slot_mapping, interpret=interpret)
        written = write_scales_tpu(*scales, slot_mapping, interpret=interpret)
        return write_kv_tpu(kv_pages, k, v, slot_mapping, interpret=interpret), written

    def by_xla() -> Any:
        pages = _write_xla(kv_pages, k, v, slot_mapping)
        return pages if scales is None else (pages, _write_xla(*scales, slot_mapping))

    return _run(kv_pages, implementation, interpret, gpu=by_gpu, tpu=by_tpu, xla=by_xla)


def _run(
    array: jax.Array,  # the pool, or scales
    implementation: str | None,
    interpret: Any,
    *,
    xla: Callable[[], Any],
    gpu: Callable[[], Any] | None = None,
    tpu: Callable[[], Any] | None = None,
) -> Any:
    """By the implementation named, or by the best that can."""
    arguments.check_implementation(implementation, IMPLEMENTATIONS)
    check_interpret(implementation, interpret)
    is_scales = array.ndim == 4
    kernels = {} if is_scales else {"mosaic_gpu": gpu, "mosaic_tpu": tpu}
    if implementation is None:
        best = kernels.get(f"mosaic_{traced_platform()}")
        try:
            return best() if best is not None else xla()
        except NotImplementedError:  # what this device or these sizes do not allow
            return xla()
    if implementation == "xla" or is_scales:
        return xla()
    named = kernels[implementation]
    if named is None:
        raise NotImplementedError(
            f"`implementation` {implementation!r} does not exist for this operation. Use 'xla'."
        )
    check_runs(implementation, interpret)
    return named()


def _write_xla(
    pool: jax.Array,  # [num_pages, 2, num_kv_heads, page_size, ...]
    k: jax.Array,  # [num_tokens, num_kv_heads, ...]
    v: jax.Array,
    slot_mapping: jax.Array,
) -> jax.Array:
    num_pages, _, _, page_size = pool.shape[:4]
    slots = _past_the_end(slot_mapping, num_pages * page_size)
    pages, offsets = slots // page_size, slots % page_size
    new = jnp.stack([k, v], axis=1)  # [num_tokens, 2, num_kv_heads, ...]
    moved = _as_bits(pool).at[pages, :, :, offsets].set(_as_bits(new), mode="drop")
    return _as_dtype(moved, pool.dtype)


def _gather_xla(pool: jax.Array, page_ids: jax.Array) -> jax.Array:
    ids = jnp.clip(page_ids, 0, pool.shape[0] - 1)
    return _as_dtype(_as_bits(pool).at[ids].get(mode="promise_in_bounds"), pool.dtype)


def _scatter_xla(pool: jax.Array, page_ids: jax.Array, pages: jax.Array) -> jax.Array:
    ids = _past_the_end(page_ids, pool.shape[0])
    return _as_dtype(_as_bits(pool).at[ids].set(_as_bits(pages), mode="drop"), pool.dtype)


def _as_bits(x: jax.Array) -> jax.Array:
    """8-bit floats on a CPU as bytes: XLA would widen all of a pool in order to move some of it.

    There a donated float8 pool still costs a copy of itself in temporaries; int8 does not.
    """
    if x.dtype != jnp.float8_e4m3fn or traced_platform() != "cpu":
        return x
    return lax.bitcast_convert_type(x, jnp.uint8)


def _as_dtype(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def _widen(x: jax.Array, head_dim: int) -> jax.Array:
    """Vectors of a padded pool: zeros after those of x [..., up to head_dim]."""
    padding = head_dim - x.shape[-1]
    return x if padding == 0 else jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])


def _past_the_end(indices: jax.Array, size: int) -> jax.Array:
    """Indices with the negative ones, which JAX would wrap, made too large: a write drops them."""
    return jnp.where(indices < 0, size, indices)


def _pool(kv_pages: Any) -> jax.Array:
    """The pool, checked."""
    pool = arguments.as_array("kv_pages", kv_pages)
    if pool.ndim != 5 or pool.shape[1] != 2 or 0 in pool.shape:
        raise ValueError(
            "`kv_pages` must have shape [num_pages, 2, num_kv_heads, page_size, head_dim], none of "
            f"them 0. Got {pool.shape}."
        )
    return pool


def _pages_or_scales(kv_pages: Any) -> jax.Array:
    """The pool or the scales, checked."""
    array = arguments.as_array("kv_pages", kv_pages)
    is_scales = array.ndim == 4 and array.shape[1] == 2 and 0 not in array.shape
    return array if is_scales else _pool(array)


def _check_scales(kv_pages: jax.Array, kv_scales: jax.Array) -> None:
    if kv_scales.shape != kv_pages.shape[:4]:
        raise ValueError(
            f"`kv_scales` must have the shape of `kv_pages` without the last axis, "
            f"{kv_pages.shape[:4]}. Got {kv_scales.shape}."
        )
    if kv_scales.dtype != jnp.float32:
        raise TypeError(f"`kv_scales` must be float32. Got {kv_scales.dtype}.")


def _check_tokens(
    kv_pages: jax.Array, k: jax.Array, v: jax.Array, num_tokens: int, *, quantized: bool
) -> None:
    if quantized and kv_pages.dtype not in LARGEST:
        raise TypeError(
            "`kv_pages` must be float8_e4m3fn or int8 where `kv_scales` is given. "
            f"Got {kv_pages.dtype}."
        )
    if not quantized and kv_pages.dtype in LARGEST and kv_pages.dtype not in (k.dtype, v.dtype):
        raise ValueError(
            f"`kv_scales` must be given for a pool of {kv_pages.dtype} and tokens of {k.dtype}. "
            "Got None."
        )
    _, _, num_kv_heads, _, head_dim = kv_pages.shape
    width = k.shape[-1] if k.ndim == 3 and k.shape[-1] <= head_dim else head_dim
    for name, x in (("k", k), ("v", v)):
        if quantized and x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise TypeError(f"`{name}` must be float32, bfloat16 or float16. Got {x.dtype}.")
        pool = x if quantized else kv_pages
        _check_like(name, x, (num_tokens, num_kv_heads, width), pool)


def _ids(name: str, ids: Any) -> jax.Array:
    """i32[n], checked."""
    array = arguments.as_int32(name, ids)
    if array.ndim != 1:
        raise ValueError(f"`{name}` must have one dimension. Got shape {array.shape}.")
    return array


def _check_like(name: str, array: jax.Array, shape: tuple[int, ...], pool: jax.Array) -> None:
    if array.shape != shape:
        raise ValueError(f"`{name}` must have shape {shape}. Got {array.shape}.")
    if array.dtype != pool.dtype:
        raise TypeError(
            f"`{name}` must have the dtype of `kv_pages`, {pool.dtype}. Got {array.dtype}."
        )
