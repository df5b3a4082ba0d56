"""Attention by warp-level products (mma.sync): the kernel of every NVIDIA chip but Hopper.

One body for decode and prefill. A CTA is one warpgroup that computes what it copied itself: it
walks its items while the copies of later KV tiles, of later items too, fly ahead in a ring of
`stages` tiles. From compute capability 9.0 on copies are TMA with barriers; before, cp.async.
Knows no plan: `work_plan.WorkList` says which item is whose.
"""

import functools
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

CHUNK = 64  # columns of a head in registers at once; a swizzled tile of a 16-bit type is as wide


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What is static in one launch."""

    shape: TileShape
    rule: ScoreRule
    config: KernelConfig
    width: int  # head_dim
    page_size: int
    dtype: Any  # of the products
    tma: bool  # else cp.async

    @property
    def warps(self) -> dict[str, int]:
        """How the four warps are spread: over rows as far as there are rows, then over columns."""
        return {"m_warps": min(4, self.shape.rows // 16)}

    @property
    def copies(self) -> int:
        """Copies of K, or of V, in a KV tile."""
        return max(1, self.shape.kv_tile // self.page_size)

    @property
    def lhs(self) -> Any:
        return plgpu.Layout.MMA_LHS(self.dtype, **self.warps)

    @property
    def rhs(self) -> Any:
        return plgpu.Layout.MMA_RHS(self.dtype, **self.warps)

    @property
    def acc(self) -> Any:
        return plgpu.Layout.MMA_ACC(self.dtype, **self.warps)

    def full(self, width: int, value: float) -> jax.Array:
        """f32[rows, width], or f32[rows] where width is 0, in the layout of products."""
        if not width:
            return plgpu.layout_cast(
                jnp.full((self.shape.rows,), value, jnp.float32), self.acc.reduce(1)
            )
        return plgpu.layout_cast(jnp.full((self.shape.rows, width), value, jnp.float32), self.acc)


class _Cursor(NamedTuple):
    """The next KV tile to copy; its page ids have been read."""

    item: jax.Array  # i32[]; equal to the end of the worker's items: there is none
    tile: jax.Array  # i32[]
    pages: tuple[jax.Array, ...]  # i32[] each


class _Memory(NamedTuple):
    """Shared memory of a CTA."""

    q: Any  # [rows, width]
    k: Any  # [stages, kv_tile, width]
    v: Any  # [stages, kv_tile, width]
    p: tuple[Any, ...]  # [rows, kv_tile] each: the high part, and the low part if there is one
    ready: Any  # a barrier a stage, or None


class _Carry(NamedTuple):
    """Softmax state of an item, in exponents of 2."""

    out: tuple[jax.Array, ...]  # f32[rows, CHUNK] each
    peak: jax.Array  # f32[rows]
    total: jax.Array  # f32[rows]


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
    """o out_dtype[num_items, rows, head_dim] and lse f32[num_items, rows], one of each item.

    Args:
      q_tiles: [heads, num_tiles, rows, head_dim], bfloat16 or float16.
      kv_pages: [num_pages, 2, num_kv_heads, page_size, head_dim] in q's dtype.
      page_table: i32[max_seqs, pages_per_seq].
      work: items of `q_tiles`.
      shape: `rows` is 16, 32 or a multiple of 64.
      rule: of scores.
      config: `kv_tile` a multiple of 32, `stages` >= 2.
      slopes: f32[heads, rows], of ALiBi.
      kv_scales: f32[num_pages, 2, num_kv_heads, page_size] of a quantised pool.
      out_dtype: float32, or q's dtype.
      interpret: as in `plgpu.kernel`; True is with race detection.

    Returns:
      o of an empty item is not written; its lse is -inf.
    """
    sizes = _Sizes(
        shape, rule, config, kv_pages.shape[4], kv_pages.shape[3], q_tiles.dtype,
        bool(interpret) or target().has_tma,
    )  # fmt: skip
    rows, num_items = shape.rows, work.items.shape[0]
    kernel = plgpu.kernel(
        functools.partial(_attend, sizes=sizes),
        out_type=(
            jax.ShapeDtypeStruct((num_items, rows, sizes.width), out_dtype),
            jax.ShapeDtypeStruct((num_items, rows), jnp.float32),
        ),
        scratch_types={"memory": _memory(sizes)},
        grid=(work.worker_items.shape[0] - 1,),
        grid_names=("worker",),
        interpret=ops.interpret_params(interpret),
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=2048),
    )
    return kernel(q_tiles, kv_pages, page_table, work.items, work.worker_items)


def _memory(sizes: _Sizes) -> _Memory:
    rows, kv_tile = sizes.shape.rows, sizes.shape.kv_tile
    stages, width = sizes.config.stages, sizes.width
    ring = ops.tiled_smem((stages, kv_tile, width), sizes.dtype)
    return _Memory(
        q=ops.tiled_smem((rows, width), sizes.dtype),
        k=ring,
        v=ring,
        p=(ops.tiled_smem((rows, kv_tile), sizes.dtype),) * (1 + sizes.config.split_p),
        ready=plgpu.Barrier(num_arrivals=2 * sizes.copies, num_barriers=stages)
        if sizes.tma
        else (),
    )


def _attend(
    q_g: Any,  # [heads, num_tiles, rows, width]
    kv_g: Any,  # [num_pages, 2, num_kv_heads, page_size, width]
    table_g: Any,  # i32[max_seqs, pages_per_seq]
    items_g: Any,  # i32[num_items, ITEM_WORDS]
    worker_items_g: Any,  # i32[workers + 1]
    o_g: Any,  # [num_items, rows, width]
    lse_g: Any,  # f32[num_items, rows]
    *,
    memory: _Memory,
    sizes: _Sizes,
) -> None:
    worker = lax.axis_index("worker")
    first, last = worker_items_g[worker], worker_items_g[worker + 1]
    stages = sizes.config.stages
    copy = functools.partial(_copy_tile, sizes, memory, kv_g, items_g, last)
    seek = functools.partial(_seek, sizes, table_g, items_g, last)

    def copy_next(cursor: _Cursor, slot: Any) -> _Cursor:
        copy(cursor, slot)
        return lax.cond(
            cursor.item < last,
            lambda: seek(cursor.item, cursor.tile + 1),
            lambda: cursor,
        )

    cursor = seek(first, jnp.int32(-1))
    for slot in range(stages - 1):
        cursor = copy_next(cursor, slot)

    def item_step(item: jax.Array, state: tuple[jax.Array, _Cursor]) -> tuple[jax.Array, _Cursor]:
        begin, end = items_g[item, BEGIN], items_g[item, END]
        tile, head = items_g[item, TILE], items_g[item, HEAD]
        position, kv_end = items_g[item, POSITION], items_g[item, KV_END]

        @pl.when(begin < end)
        def _() -> None:
            _load_queries(sizes, q_g.at[head, tile], memory.q)

        def tile_step(t: jax.Array, carry: Any) -> Any:
            slot, cursor, softmax = carry
            if sizes.tma:
                plgpu.commit_smem()  # the next copy overwrites what registers read and wrote
            alive = cursor.item < last
            cursor = copy_next(cursor, lax.rem(slot + stages - 1, stages))
            _wait_tile(sizes, memory, slot, alive)
            k, v = memory.k.at[slot], memory.v.at[slot]
            s = _scores(sizes, memory.q, k)
            s = _visible(sizes, s, t, position, kv_end)
            softmax = _accumulate(sizes, softmax, s, memory.p, v, t, kv_end)
            return lax.rem(slot + 1, stages), cursor, softmax

        zeros = tuple(sizes.full(CHUNK, 0.0) for _ in range(0, sizes.width, CHUNK))
        softmax = _Carry(zeros, sizes.full(0, -jnp.inf), sizes.full(0, 0.0))
        slot, cursor, softmax = lax.fori_loop(begin, end, tile_step, (*state, softmax))
        _write(sizes, softmax, memory, o_g.at[item], lse_g.at[item], begin < end)
        return slot, cursor

    lax.fori_loop(first, last, item_step, (jnp.int32(0), cursor))


def _seek(
    sizes: _Sizes, table_g: Any, items_g: Any, last: jax.Array, item: jax.Array, tile: jax.Array
) -> _Cursor:
    """The KV tile `tile` of `item`; the first of the next item that has one where it has none.

    A tile of -1 is before the first. At the end the pages are those of the last item.
    """
    most = items_g.shape[0] - 1

    def is_past(item: jax.Array, tile: jax.Array) -> jax.Array:
        return (item < last) & (tile >= items_g[lax.min(item, most), END])

    def step(state: Any) -> Any:
        item, _, _ = state
        item = item + 1
        tile = items_g[lax.min(item, most), BEGIN]
        return item, tile, is_past(item, tile)

    inside = lax.min(item, most)
    tile = lax.select(tile < 0, items_g[inside, BEGIN], tile)
    item, tile, _ = lax.while_loop(lambda s: s[2], step, (item, tile, is_past(item, tile)))
    inside = lax.min(item, most)
    pages = ops.tile_pages(
        table_g, items_g[inside, SEQ], tile, kv_begin=0, kv_end=items_g[inside, KV_END],
        page_size=sizes.page_size, kv_tile=sizes.shape.kv_tile,
    )  # fmt: skip
    return _Cursor(item, tile, pages)


def _copy_tile(
    sizes: _Sizes,
    memory: _Memory,
    kv_g: Any,
    items_g: Any,
    last: jax.Array,
    cursor: _Cursor,
    slot: Any,
) -> None:
    @pl.when(cursor.item < last)
    def _() -> None:
        head = lax.div(items_g[cursor.item, HEAD], jnp.int32(sizes.shape.passes))
        barrier = memory.ready.at[slot] if sizes.tma else None
        for kv, ring in enumerate((memory.k, memory.v)):

            def source(page: jax.Array) -> Any:
                return kv_g.at[page, kv, head]

            ops.copy_tile(cursor.pages, cursor.tile, source, ring.at[slot], barrier)


def _wait_tile(sizes: _Sizes, memory: _Memory, slot: jax.Array, alive: jax.Array) -> None:
    """Waits for the tile in `slot`; `alive`: all `stages` tiles are being copied."""
    if sizes.tma:
        plgpu.barrier_wait(memory.ready.at[slot])
        return
    later = 2 * sizes.copies * (sizes.config.stages - 1)
    pl.when(alive)(lambda: plgpu.wait_gmem_to_smem(later))
    pl.when(jnp.logical_not(alive))(lambda: plgpu.wait_gmem_to_smem(0))


def _load_queries(sizes: _Sizes, q_g: Any, q: Any) -> None:
    layout = plgpu.Layout.SMEM_GMEM_COPY((sizes.shape.rows, sizes.width), sizes.dtype, 128)
    q[...] = plgpu.load(q_g, layout=layout, optimized=False)  # JAX 0.11: GMEM is never optimized


def _scores(sizes: _Sizes, q: Any, k: Any) -> jax.Array:
    """f32[rows, kv_tile]: q . k, scaled and capped, in exponents of 2."""
    s = sizes.full(sizes.shape.kv_tile, 0.0)
    for c in range(0, sizes.width, CHUNK):
        a = plgpu.load(q.at[:, pl.ds(c, CHUNK)], layout=sizes.lhs)
        b = plgpu.load(k.at[:, pl.ds(c, CHUNK)].T, layout=sizes.rhs)
        s = plgpu.mma(s, a, b)
    if sizes.rule.soft_cap is None:
        return s * (sizes.rule.scale * LOG2_E)
    cap = sizes.rule.soft_cap
    return jnp.tanh(s * (sizes.rule.scale / cap)) * (cap * LOG2_E)


def _visible(
    sizes: _Sizes, s: jax.Array, t: jax.Array, position: jax.Array, kv_end: jax.Array
) -> jax.Array:
    """-inf where a row does not see a position."""
    iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, s.shape, layout=sizes.acc)
    kv_pos = iota(1) + t * sizes.shape.kv_tile
    q_pos = lax.div(iota(0), jnp.int32(sizes.shape.group)) + position
    seen = (kv_pos <= q_pos) & (kv_pos < kv_end)
    if sizes.rule.sliding_window is not None:
        seen = seen & (kv_pos > q_pos - sizes.rule.sliding_window)
    return jnp.where(seen, s, -jnp.inf)


def _accumulate(
    sizes: _Sizes,
    carry: _Carry,
    s: jax.Array,
    p_s: tuple[Any, ...],
    v: Any,
    t: jax.Array,
    kv_end: jax.Array,
) -> _Carry:
    peak = jnp.maximum(carry.peak, s.max(axis=1))
    # A row that has seen nothing yet: exp2(-inf - 0) is 0, where -inf - -inf is NaN.
    safe = jnp.where(peak == -jnp.inf, 0.0, peak)
    p = jnp.exp2(s - lax.broadcast_in_dim(safe, s.shape, [0]))
    shrink = jnp.exp2(carry.peak - safe)
    total = carry.total * shrink + p.sum(axis=1)
    for part in p_s:
        high = p.astype(sizes.dtype)
        part[...] = high
        p = p - high.astype(jnp.float32)
    _clear_past(sizes, v, kv_end - t * sizes.shape.kv_tile)
    weights = [plgpu.load(part, layout=sizes.lhs) for part in p_s]
    out = []
    for c, old in zip(range(0, sizes.width, CHUNK), carry.out, strict=True):
        values = plgpu.load(v.at[:, pl.ds(c, CHUNK)], layout=sizes.rhs)
        new = old * lax.broadcast_in_dim(shrink, old.shape, [0])
        for part in weights:
            new = plgpu.mma(new, part, values)
        out.append(new)
    return _Carry(tuple(out), peak, total)


def _clear_past(sizes: _Sizes, v: Any, live: jax.Array) -> None:
    """Zeros V's rows from `live` on: a weight of 0 does not silence NaN."""

    @pl.when(live < sizes.shape.kv_tile)
    def _() -> None:
        layout = plgpu.Layout.SMEM_GMEM_COPY((sizes.shape.kv_tile, CHUNK), sizes.dtype, 128)
        for c in range(0, sizes.width, CHUNK):
            part = v.at[:, pl.ds(c, CHUNK)]
            old = plgpu.load(part, layout=layout)
            row = plgpu.broadcasted_iota(jnp.int32, old.shape, 0, layout=layout)
            part[...] = jnp.where(row < live, old, jnp.zeros_like(old))


def _write(
    sizes: _Sizes, carry: _Carry, memory: _Memory, o_g: Any, lse_g: Any, any_tiles: jax.Array
) -> None:
    total = jnp.where(carry.total == 0, 1.0, carry.total)
    lse = (carry.peak + jnp.log2(total)) * LN_2  # -inf where nothing was seen
    ops.store_narrow(lse_g, lse)

    @pl.when(any_tiles)
    def _() -> None:
        for c, out in zip(range(0, sizes.width, CHUNK), carry.out, strict=True):
            out = out / lax.broadcast_in_dim(total, out.shape, [0])
            where = pl.ds(c, CHUNK)
            if o_g.dtype == jnp.float32:
                o_g[:, where] = out
            else:
                memory.q[:, where] = out.astype(o_g.dtype)
        if o_g.dtype != jnp.float32:
            layout = plgpu.Layout.SMEM_GMEM_COPY((sizes.shape.rows, sizes.width), o_g.dtype, 128)
            o_g[...] = plgpu.load(memory.q, layout=layout)
