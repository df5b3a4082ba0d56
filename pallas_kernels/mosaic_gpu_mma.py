"""Attention by warp-level products (mma.sync): the kernel of every NVIDIA chip but Hopper.

One body for decode and prefill. A CTA is one warpgroup that computes what it copied itself: it
walks its items while the copies of later KV tiles, of later items too, fly ahead in a ring of
`stages` tiles. From compute capability 9.0 on copies are TMA with barriers; before, cp.async.
Knows no plan: `work_plan.WorkList` says which item is whose.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_gpu_ops as ops
from pallas_kernels.mosaic_gpu_target import target
from pallas_kernels.score_rule import LN_2, LOG2_E, ScoreRule
from pallas_kernels.tuning import KernelConfig
from pallas_kernels.work_plan import (
    BEGIN,
    END,
    HEAD,
    KV_END,
    POSITION,
    SEQ,
    TILE,
    TileShape,
    WorkList,
)

CHUNK = 64  # columns of a head that are multiplied at once: those of the widest swizzled tile
PART = 16  # positions that are multiplied with values at once: those of one mma.sync
REDUCTION_BYTES = 2048  # of shared memory, for maxima and sums over warps


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What is static in one launch."""

    shape: TileShape
    rule: ScoreRule
    config: KernelConfig
    width: int  # head_dim
    page_size: int
    dtype: Any  # of the products
    kv_dtype: Any  # of the pages; another one: quantised
    out_dtype: Any
    tma: bool  # else cp.async

    @property
    def quantised(self) -> bool:
        """Pages have scales, and are widened to `dtype` tile by tile."""
        return self.kv_dtype != self.dtype

    @property
    def copies(self) -> int:
        """Copies of K, or of V, in a KV tile."""
        return max(1, self.shape.kv_tile // self.page_size)

    @property
    def lhs(self) -> Any:
        return plgpu.Layout.MMA_LHS(self.dtype, m_warps=self._m_warps)

    @property
    def rhs(self) -> Any:
        return plgpu.Layout.MMA_RHS(self.dtype, m_warps=self._m_warps)

    @property
    def acc(self) -> Any:
        """Of a product; `.reduce(1)` is one value a row, `.reduce(0)` one a column."""
        return plgpu.Layout.MMA_ACC(self.dtype, m_warps=self._m_warps)

    @property
    def _m_warps(self) -> int:
        """The four warps share the rows as far as there are rows, then the columns."""
        return next(warps for warps in (4, 2, 1) if self.shape.rows % (16 * warps) == 0)

    @property
    def q_swizzle(self) -> int:
        """Of [rows, width] of 16 bits."""
        return _swizzle(self.shape.rows, 2 * self.width)

    @property
    def ring_swizzle(self) -> int:
        """Of a KV tile. TMA likes it wide, whatever the page size; 8 bits are read by CHUNK."""
        widest = CHUNK if self.quantised else 128
        if self.tma:
            return widest
        rows = min(self.page_size, self.shape.kv_tile)
        return _swizzle(rows, self.width * self.kv_dtype.itemsize, widest)

    @property
    def by_rows(self) -> Any:
        """Layout of [rows, width] of 16 bits between memories: 16 bytes of a row a thread."""
        shape = (self.shape.rows, self.width)
        return plgpu.Layout.SMEM_GMEM_COPY(shape, self.dtype, self.q_swizzle)

    def full(self, value: float, *width: int) -> jax.Array:
        """f32[rows, width] or f32[rows]."""
        filled = jnp.full((self.shape.rows, *width), value, jnp.float32)
        return plgpu.layout_cast(filled, self.acc if width else self.acc.reduce(1))


class _Inputs(NamedTuple):
    """Global memory."""

    q: Any  # [heads, num_tiles, rows, width]
    kv: Any  # [num_pages, 2, num_kv_heads, page_size, width]
    table: Any  # i32[max_seqs, pages_per_seq]
    items: Any  # i32[num_items, ITEM_WORDS]
    worker_items: Any  # i32[workers + 1]
    slopes: Any = None  # f32[heads, rows]
    scales: Any = None  # f32[num_pages, 2, num_kv_heads, page_size]
    unscale: Any = None  # f32[heads, num_tiles, rows], of quantised: q is times its inverse


class _Memory(NamedTuple):
    """Shared memory of a CTA."""

    q: Any  # [rows, width]
    rings: tuple[Any, Any]  # K and V [stages, kv_tile, width]
    p: tuple[Any, ...]  # [rows, kv_tile] each: the high part, and the low part if there is one
    out: Any  # [rows, width] of the output's dtype; None: float32 is written from registers
    ready: Any  # a barrier a stage; None with cp.async
    scales: Any  # f32[stages, 2, kv_tile]; None: not quantised
    wide: Any  # [kv_tile, width], K, then V; None: not quantised


class _Cursor(NamedTuple):
    """The next KV tile to copy; its page ids have been read."""

    item: jax.Array  # i32[]; equal to the end of the worker's items: there is none
    tile: jax.Array  # i32[]
    head: jax.Array  # i32[], of the pool
    pages: tuple[jax.Array, ...]  # i32[] each


class _Item(NamedTuple):
    """What the rows of an item need for their scores."""

    position: jax.Array  # i32[]
    kv_end: jax.Array  # i32[]
    slopes: Any  # f32[rows], times LOG2_E, or None
    unscale: Any  # f32[rows], or None


class _Softmax(NamedTuple):
    """State of an item, in exponents of 2."""

    out: tuple[jax.Array, ...]  # f32[rows, CHUNK] each
    peak: jax.Array  # f32[rows]
    total: jax.Array  # f32[rows]
    top: jax.Array | None  # f32[rows], gives the unit of `out`; None: not quantised


def attend_mma(
    q_tiles: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    work: WorkList,
    *,
    shape: TileShape,
    rule: ScoreRule,
    config: KernelConfig,
    slopes: jax.Array | None = None,
    kv_scales: jax.Array | None = None,
    out_dtype: Any = jnp.float32,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """o out_dtype[num_items, rows, head_dim] and natural lse f32[num_items, rows] of each item.

    Args:
      q_tiles: [heads, num_tiles, rows, head_dim], bfloat16 or float16.
      kv_pages: [num_pages, 2, num_kv_heads, page_size, head_dim] in q's dtype; with `kv_scales`
        int8, or from compute capability 8.9 on float8_e4m3fn. Unused positions may hold NaN.
      page_table: i32[max_seqs, pages_per_seq].
      work: the items, dealt to workers.
      shape: of the tiles; rows a multiple of 16.
      rule: how a score is made.
      config: sizes of the launch; `kv_tile` 32, 64 or 128.
      slopes: f32[heads, rows], ALiBi.
      kv_scales: f32[num_pages, 2, num_kv_heads, page_size].
      out_dtype: float32, bfloat16 or float16.
      interpret: run on the CPU; True is with race detection.

    Returns:
      o and lse. An empty item has lse -inf and leaves o as it was; a row that sees nothing has 0
      and -inf.
    """
    sizes = _Sizes(
        shape=shape,
        rule=rule,
        config=config,
        width=kv_pages.shape[4],
        page_size=kv_pages.shape[3],
        dtype=jnp.dtype(jnp.float16 if kv_scales is not None else kv_pages.dtype),
        kv_dtype=jnp.dtype(kv_pages.dtype),
        out_dtype=jnp.dtype(out_dtype),
        tma=bool(interpret) or target().has_tma,
    )
    _check(sizes, q_tiles, work, is_compiled=not interpret)
    inputs = {
        "q": q_tiles,
        "kv": kv_pages,
        "table": page_table,
        "items": work.items,
        "worker_items": work.worker_items,
    }
    if kv_scales is not None:
        inputs["q"], inputs["unscale"] = ops.to_float16(q_tiles)
        inputs["scales"] = kv_scales
    if slopes is not None:
        inputs["slopes"] = slopes

    def body(*refs: Any, memory: _Memory) -> None:
        *given, o, lse = refs
        _Worker(sizes, _Inputs(**dict(zip(inputs, given, strict=True))), memory).run(o, lse)

    rows, num_items = shape.rows, work.items.shape[0]
    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((num_items, rows, sizes.width), sizes.out_dtype),
            jax.ShapeDtypeStruct((num_items, rows), jnp.float32),
        ),
        grid=(config.workers,),
        grid_names=("worker",),
        scratch_types={"memory": _memory(sizes)},
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=REDUCTION_BYTES),
        interpret=ops.interpret_params(interpret),
        kernel_name=f"attend_mma_{rows}x{shape.kv_tile}x{sizes.width}",
    )
    return kernel(*inputs.values())


def _check(sizes: _Sizes, q_tiles: jax.Array, work: WorkList, *, is_compiled: bool) -> None:
    """Raises for what the kernel cannot do."""
    shape, config, chip = sizes.shape, sizes.config, target()
    stored = (jnp.int8, jnp.float8_e4m3fn) if sizes.quantised else (jnp.bfloat16, jnp.float16)
    if sizes.kv_dtype not in stored:
        raise NotImplementedError(
            f"`kv_pages` must be {' or '.join(jnp.dtype(dtype).name for dtype in stored)} "
            f"{'with' if sizes.quantised else 'without'} `kv_scales` in the mma kernel. "
            f"Got {sizes.kv_dtype}."
        )
    if sizes.kv_dtype == jnp.float8_e4m3fn and is_compiled and chip.arch < (8, 9):
        raise NotImplementedError(
            "`kv_pages` must be int8 on chips before compute capability 8.9, which cannot convert "
            f"float8_e4m3fn. Got {sizes.kv_dtype} on {chip.kind}."
        )
    if not sizes.quantised and q_tiles.dtype != sizes.kv_dtype:
        raise NotImplementedError(
            f"`q_tiles` must have the dtype of `kv_pages`, {sizes.kv_dtype}, in the mma kernel. "
            f"Got {q_tiles.dtype}."
        )
    if sizes.width % CHUNK:
        raise NotImplementedError(
            "`kv_pages` must have a head_dim that is a multiple of 64 in the mma kernel: pad the "
            f"pool. Got {sizes.width}."
        )
    if sizes.page_size not in (8, 16, 32, 64, 128):
        raise NotImplementedError(
            "`kv_pages` must have a page_size of 8, 16, 32, 64 or 128 in the mma kernel. "
            f"Got {sizes.page_size}."
        )
    if config.kv_tile not in (32, 64, 128) or config.kv_tile != shape.kv_tile:
        raise NotImplementedError(
            "`config.kv_tile` must be 32, 64 or 128, and that of `shape`, "
            f"{shape.kv_tile}. Got {config.kv_tile}."
        )
    if shape.rows % 16 or shape.rows != q_tiles.shape[2]:
        raise NotImplementedError(
            "`shape.rows` must be a multiple of 16, and that of `q_tiles`, "
            f"{q_tiles.shape[2]}. Got {shape.rows}."
        )
    if config.stages < 2:
        raise NotImplementedError(f"`config.stages` must be at least 2. Got {config.stages}.")
    if work.worker_items.shape != (config.workers + 1,):
        raise ValueError(
            f"`work` must be dealt to `config.workers`, {config.workers}. "
            f"Got {work.worker_items.shape[0] - 1}."
        )
    needed = _smem_bytes(sizes)
    if is_compiled and needed > chip.smem_bytes:
        raise NotImplementedError(
            f"`config` must need at most the {chip.smem_bytes} bytes of shared memory of "
            f"{chip.kind}: take fewer stages or smaller tiles. Got {needed}."
        )


def _memory(sizes: _Sizes) -> _Memory:
    rows, kv_tile, stages = sizes.shape.rows, sizes.shape.kv_tile, sizes.config.stages
    ring = _tiled((stages, kv_tile, sizes.width), sizes.kv_dtype, sizes.ring_swizzle)
    wide = scales = out = ready = None
    if sizes.quantised:
        wide = _tiled((kv_tile, sizes.width), sizes.dtype, 128)
        scales = plgpu.SMEM((stages, 2, kv_tile), jnp.float32)
    if sizes.out_dtype not in (jnp.float32, sizes.dtype):
        out = _tiled((rows, sizes.width), sizes.out_dtype, sizes.q_swizzle)
    if sizes.tma:
        ready = plgpu.Barrier(num_arrivals=2 * sizes.copies, num_barriers=stages)
    return _Memory(
        q=_tiled((rows, sizes.width), sizes.dtype, sizes.q_swizzle),
        rings=(ring, ring),
        # Tiles of PART columns, because it is read by so many.
        p=(_tiled((rows, kv_tile), sizes.dtype, 2 * PART),) * (1 + sizes.config.split_p),
        out=out,
        ready=ready,
        scales=scales,
        wide=wide,
    )


def _tiled(shape: tuple[int, ...], dtype: Any, swizzle: int) -> Any:
    """Shared memory of matrices shape[-2:], in tiles of 8 rows of `swizzle` bytes."""
    columns = swizzle // jnp.dtype(dtype).itemsize
    tiling: Any = plgpu.TilingTransform
    pattern: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(shape, dtype, transforms=(tiling((8, columns)), pattern(swizzle)))


def _swizzle(rows: int, row_bytes: int, widest: int = 128) -> int:
    """The widest tiles, of 8 rows of so many bytes, that the four warps can copy a tile each."""
    for swizzle in (128, 64, 32):
        down, across = rows // 8, row_bytes // swizzle
        shared = down % 4 == 0 or (down % 2 == 0 and across % 2 == 0) or across % 4 == 0
        if swizzle <= widest and row_bytes % swizzle == 0 and shared:
            return swizzle
    raise NotImplementedError(
        "`kv_pages` must have at least 1024 bytes of each head's keys in a page on chips before "
        f"compute capability 9.0: take larger pages. Got {rows} rows of {row_bytes} bytes."
    )


def _smem_bytes(sizes: _Sizes) -> int:
    """Of a CTA, from above."""
    memory = _memory(sizes)
    buffers = [memory.q, *memory.rings, *memory.p, memory.out, memory.scales, memory.wide]
    used = (math.prod(b.shape) * jnp.dtype(b.dtype).itemsize for b in buffers if b is not None)
    return sum(-(-size // 1024) * 1024 for size in used) + REDUCTION_BYTES + 1024  # barriers


@dataclass(frozen=True, slots=True)
class _Worker:
    """One CTA at work."""

    sizes: _Sizes
    inputs: _Inputs
    memory: _Memory

    def run(self, o: Any, lse: Any) -> None:
        """Computes the worker's items. o [num_items, rows, width], lse f32[num_items, rows]."""
        sizes, inputs, stages = self.sizes, self.inputs, self.sizes.config.stages
        worker = lax.axis_index("worker")
        first, last = inputs.worker_items[worker], inputs.worker_items[worker + 1]

        def copy(cursor: _Cursor, slot: Any) -> tuple[_Cursor, tuple[jax.Array, ...]]:
            scales = self.load_scales(cursor)
            pl.when(cursor.item < last)(lambda: self.copy_tile(cursor, slot))
            follow = functools.partial(self.seek, cursor.item, cursor.tile + 1, last)
            return lax.cond(cursor.item < last, follow, lambda: cursor), scales

        def tile_step(item: _Item, t: jax.Array, carry: Any) -> Any:
            slot, cursor, scales, softmax = carry
            self.store_scales(lax.rem(slot + stages - 2, stages), scales)
            if sizes.tma:
                plgpu.commit_smem()  # the next copy overwrites what registers have read and written
            is_full = cursor.item < last
            cursor, scales = copy(cursor, lax.rem(slot + stages - 1, stages))
            self.wait_tile(slot, is_full)
            softmax = self.attend_tile(item, t, slot, softmax)
            return lax.rem(slot + 1, stages), cursor, scales, softmax

        def item_step(index: jax.Array, carry: Any) -> Any:
            begin, end = inputs.items[index, BEGIN], inputs.items[index, END]
            item = self.load_item(index, begin < end)
            zeros = tuple(sizes.full(0.0, CHUNK) for _ in range(0, sizes.width, CHUNK))
            top = sizes.full(0.0) if sizes.quantised else None
            softmax = _Softmax(zeros, sizes.full(-jnp.inf), sizes.full(0.0), top)
            step = functools.partial(tile_step, item)
            *carry, softmax = lax.fori_loop(begin, end, step, (*carry, softmax))
            self.write(softmax, o.at[index], lse.at[index], begin < end)
            return tuple(carry)

        cursor, scales = self.seek(first, jnp.int32(-1), last), ()
        for slot in range(stages - 1):
            self.store_scales(slot - 1, scales)
            cursor, scales = copy(cursor, slot)
        lax.fori_loop(first, last, item_step, (jnp.int32(0), cursor, scales))

    def seek(self, item: jax.Array, tile: jax.Array, last: jax.Array) -> _Cursor:
        """The KV tile `tile` of `item`, or the first of the next item that has one.

        A tile of -1 is the first. Where no item before `last` has one, the pages mean nothing.
        """
        sizes, items = self.sizes, self.inputs.items

        def word(item: jax.Array, which: int) -> jax.Array:
            return items[lax.min(item, items.shape[0] - 1), which]

        def is_past(item: jax.Array, tile: jax.Array) -> jax.Array:
            return (item < last) & (tile >= word(item, END))

        def step(state: Any) -> Any:
            item = state[0] + 1
            tile = word(item, BEGIN)
            return item, tile, is_past(item, tile)

        tile = lax.select(tile < 0, word(item, BEGIN), tile)
        item, tile, _ = lax.while_loop(lambda s: s[2], step, (item, tile, is_past(item, tile)))
        pages = ops.tile_pages(
            self.inputs.table,
            word(item, SEQ),
            tile,
            kv_begin=0,
            kv_end=word(item, KV_END),
            page_size=sizes.page_size,
            kv_tile=sizes.shape.kv_tile,
        )
        head = lax.div(word(item, HEAD), jnp.int32(sizes.shape.passes))
        return _Cursor(item, tile, head, pages)

    def copy_tile(self, cursor: _Cursor, slot: Any) -> None:
        """Starts the copies of K and V."""
        barrier = self.memory.ready.at[slot] if self.sizes.tma else None
        for which, ring in enumerate(self.memory.rings):

            def source(page: jax.Array) -> Any:
                return self.inputs.kv.at[page, which, cursor.head]

            ops.copy_tile(cursor.pages, cursor.tile, source, ring.at[slot], barrier)

    def wait_tile(self, slot: jax.Array, is_full: jax.Array) -> None:
        """Waits for the tile in `slot`; `is_full`: the copies of all other slots were started."""
        if self.sizes.tma:
            plgpu.barrier_wait(self.memory.ready.at[slot])
            return
        later = 2 * self.sizes.copies * (self.sizes.config.stages - 1)
        pl.when(is_full)(lambda: plgpu.wait_gmem_to_smem(later))
        pl.when(jnp.logical_not(is_full))(lambda: plgpu.wait_gmem_to_smem(0))

    def load_scales(self, cursor: _Cursor) -> tuple[jax.Array, ...]:
        """Scales of K's and then V's pages of a tile, in registers: f32[part] each.

        Not copied: they are too short for cp.async, and too little aligned for TMA. They are put
        down a tile later (`store_scales`), when they have arrived.
        """
        if not self.sizes.quantised:
            return ()
        sizes, scales = self.sizes, self.inputs.scales
        part = min(sizes.page_size, sizes.shape.kv_tile)
        offset = lax.rem(cursor.tile * sizes.shape.kv_tile, jnp.int32(sizes.page_size))
        parts = []
        for which in range(2):
            for page in cursor.pages:
                page = lax.clamp(0, page, scales.shape[0] - 1)  # past the end it means nothing
                where = scales.at[page, which, cursor.head]
                if part < sizes.page_size:
                    where = where.at[pl.ds(offset, part)]
                parts.append(plgpu.load(where, layout=_lanes(part), optimized=False))
        return tuple(parts)

    def store_scales(self, slot: Any, parts: tuple[jax.Array, ...]) -> None:
        """Puts what `load_scales` returned in its slot."""
        for i, part in enumerate(parts):
            which, page = divmod(i, self.sizes.copies)
            where = pl.ds(page * part.shape[0], part.shape[0])
            self.memory.scales[slot, which, where] = part

    def load_item(self, index: jax.Array, has_tiles: jax.Array) -> _Item:
        """Reads what is of an item, its queries into shared memory."""
        sizes, inputs = self.sizes, self.inputs
        tile, head = inputs.items[index, TILE], inputs.items[index, HEAD]

        @pl.when(has_tiles)
        def _() -> None:
            # JAX 0.11 has no optimised loads from GMEM.
            q = plgpu.load(inputs.q.at[head, tile], layout=sizes.by_rows, optimized=False)
            self.memory.q[...] = q

        def per_row(source: Any) -> jax.Array:
            return plgpu.load(source, layout=sizes.acc.reduce(1), optimized=False)

        return _Item(
            position=inputs.items[index, POSITION],
            kv_end=inputs.items[index, KV_END],
            slopes=None if inputs.slopes is None else per_row(inputs.slopes.at[head]) * LOG2_E,
            unscale=None if inputs.unscale is None else per_row(inputs.unscale.at[head, tile]),
        )

    def attend_tile(
        self, item: _Item, t: jax.Array, slot: jax.Array, softmax: _Softmax
    ) -> _Softmax:
        """Adds KV tile `t`, which is in `slot`."""
        sizes, memory = self.sizes, self.memory
        live = item.kv_end - t * sizes.shape.kv_tile  # positions of the tile that are in use
        k, v = (ring.at[slot] for ring in memory.rings)
        if sizes.quantised:
            self.widen(k, live)
            k = memory.wide
        s = self.mask(self.score(item, k, slot, t), item, t)
        peak = jnp.maximum(softmax.peak, s.max(axis=1))
        # A row that has seen nothing yet: exp2(-inf - 0) is 0, where -inf - -inf is NaN.
        safe = jnp.where(peak == -jnp.inf, 0.0, peak)
        p = jnp.exp2(s - _columns(safe, s.shape))
        shrink = jnp.exp2(softmax.peak - safe)
        total = softmax.total * shrink + p.sum(axis=1)
        old_top = top = softmax.top
        if old_top is not None:
            scale = self.value_scales(slot, live)
            p, top = ops.fold_scales(p, scale, positions=1, least=old_top * shrink)
            shrink = ops.change_unit(shrink, old_top, top)
        for part in memory.p:
            high = p.astype(sizes.dtype)
            part[...] = high
            p = p - high.astype(jnp.float32)
        if sizes.quantised:
            self.widen(v, live)
            v = memory.wide
        else:
            self.clear_past(v, live)
        out = tuple(
            self.add_values(old * _columns(shrink, old.shape), v.at[:, pl.ds(c, CHUNK)])
            for c, old in zip(range(0, sizes.width, CHUNK), softmax.out, strict=True)
        )
        return _Softmax(out, peak, total, top)

    def score(self, item: _Item, k: Any, slot: jax.Array, t: jax.Array) -> jax.Array:
        """f32[rows, kv_tile]: q . k by the rule but for what is not seen, in exponents of 2."""
        sizes, rule = self.sizes, self.sizes.rule
        s = sizes.full(0.0, sizes.shape.kv_tile)
        for c in range(0, sizes.width, CHUNK):
            a = plgpu.load(self.memory.q.at[:, pl.ds(c, CHUNK)], layout=sizes.lhs)
            b = plgpu.load(k.at[:, pl.ds(c, CHUNK)].T, layout=sizes.rhs)
            s = plgpu.mma(s, a, b)
        if sizes.quantised:
            scales = self.memory.scales.at[slot, 0]
            scale = plgpu.load(scales, layout=sizes.acc.reduce(0), optimized=False)
            s = s * lax.broadcast_in_dim(scale, s.shape, [1]) * _columns(item.unscale, s.shape)
        if rule.soft_cap is None:
            s = s * (rule.scale * LOG2_E)
        else:
            s = jnp.tanh(s * (rule.scale / rule.soft_cap)) * (rule.soft_cap * LOG2_E)
        if item.slopes is not None:
            q_pos, kv_pos = self.positions(item, t)
            s = s + (kv_pos - q_pos).astype(jnp.float32) * _columns(item.slopes, s.shape)
        return s

    def mask(self, s: jax.Array, item: _Item, t: jax.Array) -> jax.Array:
        """-inf where a row does not see a position."""
        q_pos, kv_pos = self.positions(item, t)
        seen = (kv_pos <= q_pos) & (kv_pos < item.kv_end)
        if self.sizes.rule.sliding_window is not None:
            seen = seen & (kv_pos > q_pos - self.sizes.rule.sliding_window)
        return jnp.where(seen, s, -jnp.inf)

    def positions(self, item: _Item, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of queries and of keys, i32[rows, kv_tile] each."""
        shape = self.sizes.shape
        row, column = (
            plgpu.broadcasted_iota(
                jnp.int32, (shape.rows, shape.kv_tile), axis, layout=self.sizes.acc
            )
            for axis in range(2)
        )
        return lax.div(row, jnp.int32(shape.group)) + item.position, column + t * shape.kv_tile

    def add_values(self, out: jax.Array, v: Any) -> jax.Array:
        """f32[rows, CHUNK]: out + p @ v. v is a ref [kv_tile, CHUNK]."""
        for r in range(0, self.sizes.shape.kv_tile, PART):
            values = plgpu.load(v.at[pl.ds(r, PART)], layout=self.sizes.rhs)
            for part in self.memory.p:
                weights = plgpu.load(part.at[:, pl.ds(r, PART)], layout=self.sizes.lhs)
                out = plgpu.mma(out, weights, values)
        return out

    def value_scales(self, slot: jax.Array, live: jax.Array) -> jax.Array:
        """f32[kv_tile]: V's, zeros from position `live` on, where they may be NaN."""
        layout = self.sizes.acc.reduce(0)
        scale = plgpu.load(self.memory.scales.at[slot, 1], layout=layout, optimized=False)
        at = plgpu.broadcasted_iota(jnp.int32, scale.shape, 0, layout=layout)
        return jnp.where(at < live, scale, 0.0)

    def widen(self, narrow: Any, live: jax.Array) -> None:
        """Writes a quantised tile to `memory.wide`, zeros from position `live` on."""
        sizes = self.sizes
        layout = plgpu.Layout.SMEM_GMEM_COPY((sizes.shape.kv_tile, CHUNK), sizes.dtype, 128)
        for c in range(0, sizes.width, CHUNK):
            part = plgpu.load(narrow.at[:, pl.ds(c, CHUNK)], layout=layout, optimized=False)
            part = part.astype(sizes.dtype)
            row = plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=layout)
            self.memory.wide[:, pl.ds(c, CHUNK)] = jnp.where(row < live, part, jnp.zeros_like(part))

    def clear_past(self, v: Any, live: jax.Array) -> None:
        """Zeros V's rows from `live` on: a weight of 0 does not silence NaN."""
        sizes = self.sizes

        @pl.when(live < sizes.shape.kv_tile)
        def _() -> None:
            tile = (sizes.shape.kv_tile, CHUNK)
            layout = plgpu.Layout.SMEM_GMEM_COPY(tile, sizes.dtype, sizes.ring_swizzle)
            for c in range(0, sizes.width, CHUNK):
                part = v.at[:, pl.ds(c, CHUNK)]
                old = plgpu.load(part, layout=layout)
                row = plgpu.broadcasted_iota(jnp.int32, old.shape, 0, layout=layout)
                part[...] = jnp.where(row < live, old, jnp.zeros_like(old))

    def write(self, softmax: _Softmax, o: Any, lse: Any, has_tiles: jax.Array) -> None:
        """Writes an item's o [rows, width], if it has tiles, and its lse f32[rows]."""
        sizes = self.sizes
        total = jnp.where(softmax.total == 0, 1.0, softmax.total)
        ops.store_small(lse, (softmax.peak + jnp.log2(total)) * LN_2)
        direct = sizes.out_dtype == jnp.float32
        staged = self.memory.q if self.memory.out is None else self.memory.out

        @pl.when(has_tiles)
        def _() -> None:
            for c, out in zip(range(0, sizes.width, CHUNK), softmax.out, strict=True):
                out = out / _columns(total, out.shape)
                if softmax.top is not None:
                    out = out * _columns(ops.unit_of(softmax.top), out.shape)
                part = (o if direct else staged).at[:, pl.ds(c, CHUNK)]
                part[...] = out.astype(sizes.out_dtype)
            if not direct:  # 16-bit values in the layout of products fill no sector of memory
                o[...] = plgpu.load(staged, layout=sizes.by_rows)


def _columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[rows] as [rows, columns]."""
    return lax.broadcast_in_dim(x, shape, [0])


def _lanes(length: int) -> Any:
    """Layout of a short vector: an element a lane, the same in every warp."""
    lanes = min(length, 32)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((lanes,), (1,))),
        warp_dims=(plgpu.Replicated(4),),
        lane_dims=(-2, plgpu.Replicated(32 // lanes)) if lanes < 32 else (-2,),
        vector_dim=-1,
    )
