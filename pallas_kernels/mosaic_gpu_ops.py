"""What the Mosaic GPU kernels share: tiled memory, sums of products, pages of a KV tile.

Owns the calls that differ between JAX versions and the page arithmetic; knows no attention.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# What is multiplied with a quantised pool is scaled, row by row, to at most about this: well inside
# float16, and as far as can be from the small numbers of which it holds fewer digits, or none.
F16_TOP = 2.0**14
_SMALLEST_TOP = 2.0**-100  # smaller sums of values become zero: no power of two here overflows


def interpret_params(interpret: Any) -> Any:
    """The `interpret` of a kernel call; True means the strictest there is: races are errors."""
    return plgpu.InterpretGPUParams(detect_races=True) if interpret is True else interpret


def tiled(dtype: Any, width: int, most: int = 128) -> tuple[Any, Any]:
    """Transforms of a shared-memory matrix [rows, width] that wgmma, mma and TMA all read.

    Rows of `width` elements (a multiple of 64 bytes) are swizzled by the widest pattern, in bytes,
    that fits and is not above `most`. A slice of columns must be a multiple of that pattern.
    """
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = most if width * itemsize % most == 0 else 64
    transforms: Any = plgpu  # pyright takes these two for abstract classes
    tiling = transforms.TilingTransform((8, swizzle // itemsize))
    return tiling, transforms.SwizzleTransform(swizzle)


def tiled_smem(shape: tuple[int, ...], dtype: Any, most: int = 128) -> Any:
    """Shared memory for matrices `shape[-2:]` in the layout of `tiled`."""
    return plgpu.SMEM(shape, dtype, transforms=tiled(dtype, shape[-1], most))


def store_small(target: Any, value: jax.Array) -> None:
    """Stores to global memory in whatever pieces the layout gives: for a few bytes only.

    JAX 0.12 refuses such stores unless it is told; 0.11 cannot be told.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(target, value, optimized=False)
    else:
        target[...] = value


def wgmma_sum(shape: tuple[int, int], *pairs: tuple[Any, Any]) -> jax.Array:
    """f32[shape]: the sum of a @ b over `pairs` of shared-memory operands; waits for it."""

    def body(acc: Any) -> jax.Array:
        for a, b in pairs:
            plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(body, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def wgmma_onto(acc: jax.Array, *pairs: tuple[Any, Any]) -> jax.Array:
    """acc + the sum of a @ b over `pairs`, without a second accumulator; a may be in registers.

    Interpret mode has neither.
    """

    def body(acc_ref: Any) -> None:
        for a, b in pairs:
            plgpu.wgmma(acc_ref, a, b)

    product: Any = pl.run_state(body)(plgpu.WGMMAAccumulatorRef.init(acc))
    return product


def tile_pages(
    page_table: Any,  # GMEM ref i32[max_seqs, pages_per_seq]
    seq: jax.Array,  # i32[]
    tile: jax.Array,  # i32[], index of the KV tile
    *,
    kv_begin: jax.Array | int,  # i32[]: pages wholly before this position are not dereferenced
    kv_end: jax.Array,  # i32[]: nor are those wholly past it
    page_size: int,
    kv_tile: int,
) -> tuple[jax.Array, ...]:
    """Page ids of a KV tile, one for each of its copies (`copy_tile`).

    Entries of the table that no live position needs may be garbage, so a tile that reaches past
    them reads the nearest live page once more. An empty sequence reads column 0, unused.
    """
    first = lax.div(jnp.int32(kv_begin), jnp.int32(page_size))
    last = lax.max(lax.div(kv_end - 1, jnp.int32(page_size)), first)
    start = lax.div(tile * kv_tile, jnp.int32(page_size))
    columns = (start + i for i in range(max(1, kv_tile // page_size)))
    return tuple(page_table[seq, lax.clamp(first, column, last)] for column in columns)


def copy_tile(
    pages: tuple[jax.Array, ...],  # i32[] each, of `tile_pages`
    tile: jax.Array,  # i32[]
    source: Any,  # page id -> GMEM ref [page_size, ...] of one head's K or V (or scales)
    target: Any,  # SMEM ref [kv_tile, ...]
    barrier: Any,  # gets max(1, kv_tile // page_size) arrivals; None: as in `copy_to_smem`
    *,
    in_bounds: bool = False,  # as in `copy_to_smem`
) -> None:
    """Starts the copies of a KV tile: one a page, or one slice of a page that is larger."""
    kv_tile = target.shape[0]
    page_size = source(pages[0]).shape[0]
    if page_size > kv_tile:
        offset = lax.rem(tile * kv_tile, jnp.int32(page_size))
        part = source(pages[0]).at[pl.ds(offset, kv_tile)]
        copy_to_smem(part, target, barrier, in_bounds=in_bounds)
        return
    for i, page in enumerate(pages):
        part = target.at[pl.ds(i * page_size, page_size)]
        copy_to_smem(source(page), part, barrier, in_bounds=in_bounds)


def scale_smem(stages: int, kv_tile: int, page_size: int) -> Any:
    """Shared memory for the scales of the tiles of a ring, one row a copy: see `copy_scales`."""
    copies = max(1, kv_tile // page_size)
    return plgpu.SMEM((stages, copies, max(kv_tile // copies, 32)), jnp.float32)


def copy_scales(
    pages: tuple[jax.Array, ...],  # i32[] each, of `tile_pages`
    tile: jax.Array,  # i32[]
    source: Any,  # page id -> GMEM ref f32[page_size] of one head's K or V
    target: Any,  # SMEM ref f32[copies, 32 or more], of `scale_smem`
    kv_tile: int,
    barrier: Any,  # as in `copy_tile`
) -> None:
    """Starts the copies of a KV tile's scales.

    TMA writes to multiples of 128 bytes only, so the scales of small pages lie apart. Nothing but
    the hardware would notice if they did not.
    """
    page_size = source(pages[0]).shape[0]
    if page_size > kv_tile:
        copy_tile(pages, tile, source, target.at[0, pl.ds(0, kv_tile)], barrier)
        return
    for i, page in enumerate(pages):
        copy_to_smem(source(page), target.at[i, pl.ds(0, page_size)], barrier)


def load_scales(source: Any, kv_tile: int, layout: Any) -> jax.Array:
    """f32[kv_tile] of what `copy_scales` copied to `source`."""
    copies = source.shape[0]
    each = pl.ds(0, kv_tile // copies)
    parts = [plgpu.load(source.at[i, each], layout=layout) for i in range(copies)]
    return parts[0] if copies == 1 else jnp.concatenate(parts)


def copy_to_smem(source: Any, target: Any, barrier: Any, *, in_bounds: bool = False) -> None:
    """Starts a copy by TMA, or where `barrier` is None (before Hopper) by cp.async, in a group.

    `in_bounds` promises that nothing past `source`'s array is read. Contiguous memory that is not
    swizzled is then copied without a descriptor, to any multiple of 16 bytes; otherwise TMA writes
    to multiples of 128 bytes only, and nothing but the hardware notices.
    """
    promise = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
    if barrier is None:
        plgpu.copy_gmem_to_smem(source, target, oob_mode=promise)
    else:
        plgpu.copy_gmem_to_smem(source, target, barrier, oob_mode=promise if in_bounds else None)


def fold_scales(
    p: jax.Array,  # f32, a matrix of query rows and positions
    scale: jax.Array,  # f32[positions], of V; finite where nobody sees
    *,
    positions: int,  # the axis of p
    least: jax.Array | None = None,  # f32[rows]
) -> tuple[jax.Array, jax.Array]:
    """p times `scale` in a unit of each row's own, for products in float16.

    The unit follows the largest p * scale of the row. So a large scale costs digits only the rows
    to which its value is what matters, not those that do not see it or hardly do.

    Returns:
      p in units of `unit_of(top)`, at most 2 * F16_TOP; and top f32[rows]: the largest p * scale,
      or `least` if that is larger.
    """
    weights = p * lax.broadcast_in_dim(scale, p.shape, [positions])
    top = weights.max(axis=positions)
    top = top if least is None else jnp.maximum(top, least)
    inverse = _inverse(unit_of(top))
    return weights * lax.broadcast_in_dim(inverse, p.shape, [1 - positions]), top


def change_unit(shrink: jax.Array, old_top: jax.Array, top: jax.Array) -> jax.Array:
    """f32[rows]: by which to multiply sums in `unit_of(old_top)` that shrink, for `unit_of(top)`.

    `top` must be at least `old_top * shrink`: then neither this nor the sums grow without bound.
    """
    return unit_of(old_top) * shrink * _inverse(unit_of(top))  # in this order: no overflow


def unit_of(top: jax.Array) -> jax.Array:
    """f32[rows]: what 1 in sums of `fold_scales` stands for.

    A power of two, so that a change of it rounds nothing.
    """
    top = jnp.maximum(top, _SMALLEST_TOP)
    return _float_of(_bits_of(top) & 0x7F800000) * (1 / F16_TOP)


def _inverse(power: jax.Array) -> jax.Array:
    """1 / a power of two: its exponent negated, which is exact, and no division."""
    return _float_of(0x7F000000 - _bits_of(power))


def _bits_of(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _float_of(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def to_float16(q_tiles: jax.Array) -> tuple[jax.Array, jax.Array]:
    """q as float16 and f32[heads, num_tiles, rows], a power of two that undoes its scaling.

    Scaled by powers of two row by row, so neither large nor small values leave float16's range, and
    a row does not depend on any other.
    """
    q = q_tiles.astype(jnp.float32)
    peak = jnp.max(jnp.abs(q), axis=-1)
    _, exponent = jnp.frexp(jnp.where(peak > 0, peak, 1.0))
    up = jnp.ldexp(jnp.float32(F16_TOP), -exponent)  # largest value becomes 2**13 .. 2**14
    return (q * up[..., None]).astype(jnp.float16), 1 / up
