"""Changes to a page pool on NVIDIA GPUs, in place: copies by the tensor memory accelerator (TMA).

Owns how tokens and pages are dealt to CTAs. Bytes move through shared memory and never through
registers. `pallas_kernels.kv_update` has checked the arguments. Chips before sm_90 have no TMA.

`plgpu.kernel` cannot alias an output with an input, so the pool goes in as a mutable reference:
a donated pool is changed where it lies.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_gpu_ops, mosaic_gpu_target

_MAX_BOX = 256  # elements of a TMA copy along each axis
_TMA_BYTES = 16  # every stride and the last axis of a copy are multiples of it
_STAGED_BYTES = 32 * 1024  # of shared memory that a CTA moves through: several CTAs share an SM
_MAX_TOKENS = 16  # of a CTA
_MAX_PAIRS = 32  # of pages: each has a barrier, and Mosaic lowers no more in a group


def write_kv_gpu(
    kv_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    interpret: Any = False,
) -> jax.Array:
    """**DONATES** under a donating jit. `write_kv` of tokens in the pool's dtype and head size.

    A CTA loads a run of tokens, K and V of all heads, by two copies and stores each token by two
    more: a box of num_kv_heads rows that lie a head's slab apart.

    Args:
      kv_pages: [num_pages, 2, num_kv_heads, page_size, head_dim].
      k, v: [num_tokens, num_kv_heads, head_dim].
      slot_mapping: i32[num_tokens]; an entry outside the pool is dropped.
      interpret: False, True (races are errors) or interpret parameters.

    Raises:
      NotImplementedError: the chip has no TMA, or the sizes do not suit it; at trace time.
    """
    _check_tma("write_kv", kv_pages)
    num_pages, _, _, page_size, _ = kv_pages.shape
    num_tokens, *vector = k.shape
    if num_tokens == 0:
        return kv_pages
    block = _tokens_per_block(num_tokens, math.prod(vector) * k.dtype.itemsize)

    def body(k_g: Any, v_g: Any, slots_g: Any, pool_g: Any, k_s: Any, v_s: Any, full: Any) -> None:
        first = lax.axis_index("block") * block
        # The last run ends with the tokens; it leaves those that belong to the one before alone.
        start = lax.min(first, jnp.int32(num_tokens - block))
        plgpu.copy_gmem_to_smem(k_g.at[pl.ds(start, block)], k_s, full)
        plgpu.copy_gmem_to_smem(v_g.at[pl.ds(start, block)], v_s, full)
        plgpu.barrier_wait(full)
        for i in range(block):
            slot = slots_g[start + i]
            mine = (start + i >= first) & (slot >= 0) & (slot < num_pages * page_size)

            @pl.when(mine)
            def _store() -> None:
                page, row = lax.div(slot, jnp.int32(page_size)), lax.rem(slot, jnp.int32(page_size))
                plgpu.copy_smem_to_gmem(k_s.at[i], pool_g.at[page, 0, :, row], commit_group=False)
                plgpu.copy_smem_to_gmem(v_s.at[i], pool_g.at[page, 1, :, row])

        plgpu.wait_smem_to_gmem(0)

    tokens = plgpu.SMEM((block, *vector), kv_pages.dtype)
    return _in_place(
        body,
        kv_pages,
        (k, v, slot_mapping),
        grid={"block": -(-num_tokens // block)},
        scratch=[tokens, tokens, plgpu.Barrier(num_arrivals=2)],
        interpret=interpret,
        name=f"write_kv_{block}x{vector[0]}x{vector[1]}",
    )


def copy_pages_gpu(
    kv_pages: jax.Array, src: jax.Array, dst: jax.Array, *, interpret: Any = False
) -> jax.Array:
    """**DONATES** under a donating jit. `copy_pages`: all reads come before all writes.

    A CTA owns the same few rows of every page: it loads them from all sources and only then
    stores them, so a page may be a source and a destination in one call. Pairs that are dropped
    cost nothing.

    Args:
      kv_pages: [num_pages, 2, num_kv_heads, page_size, head_dim].
      src: i32[n]; clamped to the pool.
      dst: i32[n]; an entry outside the pool is dropped.
      interpret: False, True (races are errors) or interpret parameters.

    Raises:
      NotImplementedError: the chip has no TMA, the sizes do not suit it, or there are more than
        32 pairs; at trace time.
    """
    _check_tma("copy_pages", kv_pages)
    num_pages, _, num_kv_heads, page_size, head_dim = kv_pages.shape
    n = src.shape[0]
    if n == 0:
        return kv_pages
    rows = _rows_per_block(n, page_size, head_dim * kv_pages.dtype.itemsize)

    def body(src_g: Any, dst_g: Any, pool_g: Any, rows_s: Any, full: Any) -> None:
        kv, head = lax.axis_index("kv"), lax.axis_index("head")
        piece = pl.ds(lax.axis_index("piece") * rows, rows)

        def for_live_pairs(act: Callable[[jax.Array, jax.Array], None]) -> None:
            @pl.loop(0, n)
            def _pair(i: jax.Array) -> None:
                target = dst_g[i]
                pl.when((target >= 0) & (target < num_pages))(lambda: act(i, target))

        def load(i: jax.Array, _: jax.Array) -> None:
            page = lax.clamp(jnp.int32(0), src_g[i], jnp.int32(num_pages - 1))
            plgpu.copy_gmem_to_smem(pool_g.at[page, kv, head, piece], rows_s.at[i], full.at[i])

        def store(i: jax.Array, target: jax.Array) -> None:
            plgpu.copy_smem_to_gmem(rows_s.at[i], pool_g.at[target, kv, head, piece])

        for_live_pairs(load)
        for_live_pairs(lambda i, _: plgpu.barrier_wait(full.at[i]))
        plgpu.commit_smem()  # orders the loads before the stores, which may be to the same pages
        for_live_pairs(store)
        plgpu.wait_smem_to_gmem(0)

    staged = plgpu.SMEM((n, rows, head_dim), kv_pages.dtype)
    return _in_place(
        body,
        kv_pages,
        (src, dst),
        grid={"kv": 2, "head": num_kv_heads, "piece": page_size // rows},
        scratch=[staged, plgpu.Barrier(num_barriers=n)],
        interpret=interpret,
        name=f"copy_pages_{n}x{rows}x{head_dim}",
    )


def _in_place(
    body: Callable[..., None],  # (*operands, pool, *scratch)
    kv_pages: jax.Array,
    operands: tuple[jax.Array, ...],
    *,
    grid: dict[str, int],
    scratch: list[Any],
    interpret: Any,
    name: str,
) -> jax.Array:
    """The pool after one launch."""
    pool = jax.new_ref(kv_pages)
    body.__name__ = name  # what profilers show
    plgpu.kernel(
        body,
        out_type=(),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        scratch_types=scratch,
        interpret=mosaic_gpu_ops.interpret_params(interpret),
    )(*operands, pool)
    return jax.freeze(pool)


def _check_tma(operation: str, kv_pages: jax.Array) -> None:
    obstacle = _obstacle(kv_pages)
    if obstacle is not None:
        raise NotImplementedError(
            f"`implementation` 'mosaic_gpu' of {operation} cannot run: {obstacle}. Use 'xla'."
        )


def _obstacle(kv_pages: jax.Array) -> str | None:
    """Why the TMA cannot address this pool, if so."""
    target = mosaic_gpu_target.target()
    if not target.has_tma:
        return f"{target.kind} (sm_{''.join(map(str, target.arch))}) has no TMA, sm_90 and later do"
    _, _, num_kv_heads, page_size, head_dim = kv_pages.shape
    if head_dim * kv_pages.dtype.itemsize % _TMA_BYTES:
        return (
            f"`kv_pages` must have vectors of a multiple of {_TMA_BYTES} bytes, not of "
            f"{head_dim} {kv_pages.dtype}"
        )
    if max(num_kv_heads, page_size, head_dim) > _MAX_BOX:
        return f"`kv_pages` must have at most {_MAX_BOX} heads, rows and columns in a page"
    return None


def _tokens_per_block(num_tokens: int, token_bytes: int) -> int:
    """Tokens of a CTA: one while that keeps all SMs busy, then more, so that copies are large."""
    spread = num_tokens // (2 * mosaic_gpu_target.target().num_sms)
    block = min(_MAX_TOKENS, max(1, spread), max(1, _STAGED_BYTES // (2 * token_bytes)))
    return 1 << (block.bit_length() - 1)


def _rows_per_block(n: int, page_size: int, row_bytes: int) -> int:
    """Rows of a CTA's piece of each page: a power of two that divides page_size."""
    if n > _MAX_PAIRS:  # 32 rows of the widest pages fit into shared memory
        raise NotImplementedError(
            f"`src` must have at most {_MAX_PAIRS} entries for 'mosaic_gpu'. Got {n}. Use 'xla', "
            "or several calls."
        )
    rows = max(1, min(_STAGED_BYTES * 2 // (n * row_bytes), page_size))
    return math.gcd(1 << (rows.bit_length() - 1), page_size)
