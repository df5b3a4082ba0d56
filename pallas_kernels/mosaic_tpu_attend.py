"""Attention over pages on TPUs: every head of a tile of query rows at a time.

The grid runs over (worker, step): worker w takes tiles w, w + workers, ... and a tile's keys and
values arrive in blocks of several pages, one copy a page, `stages` blocks in flight. The copies
run ahead of the arithmetic and know no tile border: while the last block of a tile is computed,
the first one of the worker's next tile is on its way. The page table stays in HBM; the row of
the tile that the copies are at, and that of the next one, are in scalar memory.

Knows nothing of sinks, nor of how query rows became tiles (`work_plan`).
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mosaic_tpu_ops import interpret_params
from pallas_kernels.score_rule import LN_2, LOG2_E, ScoreRule
from pallas_kernels.tuning import KernelConfig
from pallas_kernels.work_plan import QueryTiles

LANES = 128  # of a vector register
UNROLLED = 2**16  # scores that are computed without a loop
VMEM_BUDGET = 14 * 2**20  # bytes of vector memory that blocks are made to fit; the least is 16 MiB
VMEM_LIMIT = 48 * 2**20  # what a call may take where blocks of one page are larger
SMEM_LIMIT = 900 * 1024  # bytes of scalar memory; a core has 1 MiB
META_WORDS = 4  # of a tile in scalar memory: seq, position, kv_begin, kv_end
# Words of the copies' state: the tile, its block and its table row that are to be copied next,
# where to; and where the block lies that is to be computed next.
TILE, BLOCK, ROW, FILL, USE, STATE_WORDS = range(6)


@dataclass(frozen=True)
class _Sizes:
    """Static sizes of a call."""

    heads: int
    passes: int  # heads for each KV head
    group: int  # rows of a token
    rows: int
    head_dim: int
    num_kv_heads: int
    page_size: int
    pages: int  # of a block
    pages_per_seq: int
    stages: int
    workers: int

    @property
    def block(self) -> int:
        """Positions of a block."""
        return self.pages * self.page_size


@dataclass(frozen=True)
class _Feed:
    """Memory of the copies."""

    meta: Any  # SMEM i32[num_tiles * META_WORDS]
    count: Any  # SMEM i32[1]
    kv_pages: Any  # HBM [num_pages, 2, num_kv_heads, page_size, head_dim]
    kv_scales: Any  # HBM f32[num_pages, 2, num_kv_heads, page_size] or None
    page_table: Any  # HBM i32[max_seqs, pages_per_seq]
    kv: Any  # VMEM [stages, pages, 2, num_kv_heads, page_size, head_dim]
    scales: Any  # VMEM f32[stages, pages, 2, num_kv_heads, page_size] or None
    table_rows: Any  # SMEM i32[2, pages_per_seq]
    state: Any  # SMEM i32[STATE_WORDS]
    arrived: Any  # DMA semaphores [stages]
    row_arrived: Any  # DMA semaphores [2]


@dataclass(frozen=True)
class _Refs:
    """Memory of the arithmetic."""

    q: Any  # VMEM [heads, 1, rows, head_dim]
    slopes: Any  # VMEM f32[heads, rows, 1] or None
    o: Any  # VMEM [heads, 1, rows, head_dim]
    lse: Any  # VMEM f32[1, heads, rows]
    kv: Any  # of the copies
    scales: Any  # of the copies
    scale_rows: Any  # VMEM f32[2, num_kv_heads, block] or None: those of the block, side by side
    peak: Any  # VMEM f32[heads, rows, LANES], of the scores (log2), the same in all lanes
    total: Any  # VMEM f32[heads, rows, LANES], of the weights, likewise
    acc: Any  # VMEM f32[heads, rows, head_dim], weighted sum


def attend_tpu(
    q_tiles: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    tiles: QueryTiles,
    *,
    rule: ScoreRule,
    config: KernelConfig,
    slopes: jax.Array | None,
    kv_scales: jax.Array | None,
    out_dtype: Any,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Attention of tiles of one class.

    Args:
      q_tiles: [heads, num_tiles, rows, head_dim] in the pool's dtype; bfloat16 or float32 with a
        quantised pool. heads = num_kv_heads * passes.
      kv_pages: [num_pages, 2, num_kv_heads, page_size, head_dim]; bfloat16, float32,
        float8_e4m3fn or int8.
      page_table: i32[max_seqs, pages_per_seq].
      tiles: of `work_plan.plan_tiles`.
      rule: how a score is made.
      config: kv_tile, stages, workers (cores) and split_p matter.
      slopes: f32[heads, rows], ALiBi.
      kv_scales: f32[num_pages, 2, num_kv_heads, page_size] of a quantised pool.
      out_dtype: of o.
      interpret: False, True (strict), or interpret parameters.

    Returns:
      o out_dtype[heads, num_tiles, rows, head_dim] and lse f32[heads, num_tiles, rows], natural
      logarithm; a row that sees nothing is 0 and -inf. Tiles past `tiles.count` hold anything.

    Raises:
      NotImplementedError: the chip cannot hold it.
    """
    heads, num_tiles, rows, head_dim = q_tiles.shape
    num_kv_heads, page_size = kv_pages.shape[2:4]
    sizes = _Sizes(
        heads=heads,
        passes=heads // num_kv_heads,
        group=tiles.shape.group,
        rows=rows,
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        pages=1,
        pages_per_seq=page_table.shape[1],
        stages=config.stages,
        workers=max(1, min(config.workers, num_tiles)),
    )
    sizes = _fit(sizes, config.kv_tile, q_tiles.dtype, kv_pages.dtype, out_dtype)
    words = (tiles.seq, tiles.position, tiles.kv_begin, tiles.kv_end)
    meta = jnp.stack(words, axis=1).reshape(-1)
    _check_scalars(sizes, num_tiles)

    def of_tile(worker: jax.Array, step: jax.Array, count: Any) -> jax.Array:
        # A dead tile takes the block of the worker's last live one: nothing is copied for it.
        last = jnp.maximum(count[0] - 1 - worker, 0) // sizes.workers
        return jnp.minimum(step, last) * sizes.workers + worker

    hbm = pl.BlockSpec(memory_space=pl.ANY)
    tile = pl.BlockSpec(
        (heads, 1, rows, head_dim), lambda w, s, meta, count: (0, of_tile(w, s, count), 0, 0)
    )
    whole = pl.BlockSpec((heads, rows, 1), lambda *_: (0, 0, 0))
    inputs = [(q_tiles, tile), (kv_pages, hbm), (page_table, hbm)]
    if slopes is not None:
        inputs.append((slopes[:, :, None], whole))
    if kv_scales is not None:
        inputs.append((kv_scales, hbm))
    names = ["meta", "count", "q", "kv_pages", "page_table"]
    names += ["slopes"] * (slopes is not None) + ["kv_scales"] * (kv_scales is not None)
    names += ["o", "lse"]
    scratch = _scratch(sizes, kv_pages.dtype, kv_scales is not None)
    absent = dict.fromkeys(("slopes", "kv_scales", "scales", "scale_rows"))

    def body(*refs: Any) -> None:
        named = absent | dict(zip([*names, *scratch], refs, strict=True))
        feed = _Feed(**{field.name: named[field.name] for field in fields(_Feed)})
        rest = _Refs(**{field.name: named[field.name] for field in fields(_Refs)})
        _attend_tile(feed, rest, sizes, rule, config.split_p)

    o, lse = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(sizes.workers, -(-num_tiles // sizes.workers)),
            in_specs=[spec for _, spec in inputs],
            out_specs=[
                tile,
                pl.BlockSpec(
                    (1, heads, rows), lambda w, s, meta, count: (of_tile(w, s, count), 0, 0)
                ),
            ],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q_tiles.shape, out_dtype),
            jax.ShapeDtypeStruct((num_tiles, heads, rows), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_LIMIT,
        ),
        interpret=interpret_params(interpret),
        name=f"attend_{rows}x{sizes.block}x{config.stages}",
    )(meta, tiles.count.reshape(1), *[array for array, _ in inputs])
    return o, lse.swapaxes(0, 1)


def _fit(sizes: _Sizes, kv_tile: int, q_dtype: Any, dtype: Any, out_dtype: Any) -> _Sizes:
    """`sizes` with as many pages in a block as `kv_tile` asks for and the vector memory takes."""
    row = sizes.head_dim * (2 * q_dtype.itemsize + 2 * jnp.dtype(out_dtype).itemsize + 4)
    row += LANES * 4 * 5  # peak, total, and the scores and weights of one vector register
    state = sizes.heads * sizes.rows * row
    page = 2 * sizes.num_kv_heads * sizes.page_size * sizes.head_dim * dtype.itemsize
    if dtype.itemsize == 1:
        page += 2 * sizes.num_kv_heads * LANES * 4  # scales
    least = state + sizes.stages * page
    if least > VMEM_LIMIT:
        raise NotImplementedError(
            f"`kv_pages` and `q` must fit {VMEM_LIMIT} bytes of vector memory. Got {least} bytes "
            f"for {sizes.stages} pages and tiles of {sizes.rows} rows. Use smaller pages or fewer "
            "rows, or 'xla'."
        )
    pages = min(kv_tile // sizes.page_size, (VMEM_BUDGET - state) // (sizes.stages * page))
    return replace(sizes, pages=max(1, pages))


def _check_scalars(sizes: _Sizes, num_tiles: int) -> None:
    scalars = 4 * (2 * sizes.pages_per_seq + META_WORDS * num_tiles)
    if scalars > SMEM_LIMIT:
        raise NotImplementedError(
            f"`page_table` and the tiles must fit {SMEM_LIMIT} bytes of scalar memory. Got "
            f"{sizes.pages_per_seq} pages a sequence and {num_tiles} tiles: {scalars} bytes. Use "
            "larger pages, or 'xla'."
        )


def _scratch(sizes: _Sizes, dtype: Any, quantized: bool) -> dict[str, Any]:
    """Memory that lives through the whole grid, by name."""
    slab = (sizes.stages, sizes.pages, 2, sizes.num_kv_heads, sizes.page_size)
    each_row = (sizes.heads, sizes.rows)
    scratch = {"kv": pltpu.VMEM((*slab, sizes.head_dim), dtype)}
    if quantized:
        scratch["scales"] = pltpu.VMEM(slab, jnp.float32)
        scratch["scale_rows"] = pltpu.VMEM((2, sizes.num_kv_heads, sizes.block), jnp.float32)
    return scratch | {
        "table_rows": pltpu.SMEM((2, sizes.pages_per_seq), jnp.int32),
        "state": pltpu.SMEM((STATE_WORDS,), jnp.int32),
        "peak": pltpu.VMEM((*each_row, LANES), jnp.float32),
        "total": pltpu.VMEM((*each_row, LANES), jnp.float32),
        "acc": pltpu.VMEM((*each_row, sizes.head_dim), jnp.float32),
        "arrived": pltpu.SemaphoreType.DMA((sizes.stages,)),
        "row_arrived": pltpu.SemaphoreType.DMA((2,)),
    }


@dataclass(frozen=True)
class _Tile:
    """Scalars i32[] of a tile."""

    seq: jax.Array
    position: jax.Array
    kv_begin: jax.Array
    kv_end: jax.Array
    page_size: int

    @classmethod
    def read(cls, feed: _Feed, tile: jax.Array, page_size: int) -> "_Tile":
        """Of the list in scalar memory."""
        seq, position, kv_begin, kv_end = (
            feed.meta[tile * META_WORDS + word] for word in range(META_WORDS)
        )
        return cls(seq, position, kv_begin, kv_end, page_size)

    @property
    def first_page(self) -> jax.Array:
        """Column of the table where its first block begins."""
        return lax.div(self.kv_begin, jnp.int32(self.page_size))

    @property
    def num_pages(self) -> jax.Array:
        """Pages that it reads."""
        past = lax.div(self.kv_end + self.page_size - 1, jnp.int32(self.page_size))
        return jnp.where(self.kv_end > self.kv_begin, past - self.first_page, 0)

    def num_blocks(self, pages: int) -> jax.Array:
        """At least one, so that an empty tile is no special case; its block has no pages."""
        return jnp.maximum(lax.div(self.num_pages + pages - 1, jnp.int32(pages)), 1)


def _attend_tile(feed: _Feed, refs: _Refs, sizes: _Sizes, rule: ScoreRule, split_p: bool) -> None:
    """One step of the grid."""
    worker, step = pl.program_id(0), pl.program_id(1)
    tile = step * sizes.workers + worker

    @pl.when(tile < feed.count[0])
    def _() -> None:
        now = _Tile.read(feed, tile, sizes.page_size)

        @pl.when(step == 0)
        def _() -> None:
            _begin_copies(feed, sizes, tile)

        refs.peak[...] = jnp.full_like(refs.peak, -jnp.inf)
        refs.total[...] = jnp.zeros_like(refs.total)
        refs.acc[...] = jnp.zeros_like(refs.acc)

        def block(b: jax.Array, _: None) -> None:
            _copy_next(feed, sizes)
            slot = feed.state[USE]
            feed.state[USE] = _after(slot, sizes.stages)
            _wait_for_block(feed, sizes, now, b, slot)
            start = (now.first_page + b * sizes.pages) * sizes.page_size
            _clear_unseen(refs, sizes, now, start, slot)
            if refs.scales is not None:
                _join_scales(refs, sizes, now, start, slot)
            _attend_block(refs, sizes, now, start, slot, rule=rule, split_p=split_p)

        lax.fori_loop(0, now.num_blocks(sizes.pages), block, None)
        _finish(refs, sizes)


# ------------------------------------------------------------------------------------- copies


def _after(slot: jax.Array, size: int) -> jax.Array:
    return jnp.where(slot == size - 1, 0, slot + 1)


def _row_copy(feed: _Feed, tile: jax.Array, page_size: int, row: jax.Array) -> Any:
    """The copy of a tile's row of the page table into one of two places."""
    seq = _Tile.read(feed, tile, page_size).seq
    return pltpu.make_async_copy(
        feed.page_table.at[seq], feed.table_rows.at[row], feed.row_arrived.at[row]
    )


def _enter(feed: _Feed, sizes: _Sizes, tile: jax.Array, row: jax.Array) -> None:
    """The copies turn to `tile`, whose table row is under way; the next one's follows."""
    feed.state[TILE] = tile
    feed.state[BLOCK] = 0
    feed.state[ROW] = row

    @pl.when(tile < feed.count[0])
    def _() -> None:
        _row_copy(feed, tile, sizes.page_size, row).wait()

    @pl.when(tile + sizes.workers < feed.count[0])
    def _() -> None:
        _row_copy(feed, tile + sizes.workers, sizes.page_size, 1 - row).start()


def _begin_copies(feed: _Feed, sizes: _Sizes, tile: jax.Array) -> None:
    """Starts all but one of the blocks in flight, from the worker's first tile on."""
    feed.state[FILL] = 0
    feed.state[USE] = 0
    _row_copy(feed, tile, sizes.page_size, jnp.int32(0)).start()
    _enter(feed, sizes, tile, jnp.int32(0))
    for _ in range(sizes.stages - 1):
        _copy_next(feed, sizes)


def _copy_next(feed: _Feed, sizes: _Sizes) -> None:
    """Starts the copies of one more block, if the worker has one left."""
    tile, block, row = feed.state[TILE], feed.state[BLOCK], feed.state[ROW]

    @pl.when(tile < feed.count[0])
    def _() -> None:
        ahead, slot = _Tile.read(feed, tile, sizes.page_size), feed.state[FILL]
        _each_page(feed, sizes, ahead, block, slot, lambda copy: copy.start())
        feed.state[FILL] = _after(slot, sizes.stages)
        feed.state[BLOCK] = block + 1

        @pl.when(block + 1 == ahead.num_blocks(sizes.pages))
        def _() -> None:
            _enter(feed, sizes, tile + sizes.workers, 1 - row)


def _wait_for_block(
    feed: _Feed, sizes: _Sizes, tile: _Tile, block: jax.Array, slot: jax.Array
) -> None:
    _each_page(feed, sizes, tile, block, slot, lambda copy: copy.wait())


def _each_page(
    feed: _Feed, sizes: _Sizes, tile: _Tile, block: jax.Array, slot: jax.Array, do: Any
) -> None:
    """Starts, or waits for, the copies of a block: those pages alone that the tile reads."""
    left = tile.num_pages - block * sizes.pages

    def one(i: jax.Array, _: None) -> None:
        column = tile.first_page + block * sizes.pages + i
        # Only a start needs the page; a wait needs the size.
        page = feed.table_rows[feed.state[ROW], column]
        do(
            pltpu.make_async_copy(
                feed.kv_pages.at[page], feed.kv.at[slot, i], feed.arrived.at[slot]
            )
        )
        if feed.kv_scales is not None:
            do(
                pltpu.make_async_copy(
                    feed.kv_scales.at[page], feed.scales.at[slot, i], feed.arrived.at[slot]
                )
            )

    lax.fori_loop(0, jnp.clip(left, 0, sizes.pages), one, None)


# --------------------------------------------------------------------------------- arithmetic


def _clear_unseen(
    refs: _Refs, sizes: _Sizes, tile: _Tile, start: jax.Array, slot: jax.Array
) -> None:
    """Zeroes V where the tile sees nothing: memory there may hold NaN, and 0 * NaN is NaN."""

    @pl.when((start < tile.kv_begin) | (start + sizes.block > tile.kv_end))
    def _() -> None:
        def page(i: jax.Array, _: None) -> None:
            v = refs.kv[slot, i, 1]  # [num_kv_heads, page_size, head_dim]
            at = start + i * sizes.page_size + lax.broadcasted_iota(jnp.int32, v.shape, 1)
            seen = (at >= tile.kv_begin) & (at < tile.kv_end)
            refs.kv[slot, i, 1] = jnp.where(seen, v, jnp.zeros_like(v))

        lax.fori_loop(0, sizes.pages, page, None)


def _join_scales(
    refs: _Refs, sizes: _Sizes, tile: _Tile, start: jax.Array, slot: jax.Array
) -> None:
    """Scales of the block's pages side by side; 1 where nothing is seen."""
    shape = (sizes.num_kv_heads, sizes.block)
    at = start + lax.broadcasted_iota(jnp.int32, shape, 1)
    seen = (at >= tile.kv_begin) & (at < tile.kv_end)
    for kv in range(2):
        row = jnp.concatenate([refs.scales[slot, i, kv] for i in range(sizes.pages)], axis=1)
        refs.scale_rows[kv] = jnp.where(seen, row, 1.0)


def _attend_block(
    refs: _Refs,
    sizes: _Sizes,
    tile: _Tile,
    start: jax.Array,  # i32[], first position of the block
    slot: jax.Array,
    *,
    rule: ScoreRule,
    split_p: bool,
) -> None:
    """Folds a block into the state of every head."""
    seen = _seen(sizes, tile, start, rule.sliding_window)

    def head(h: Any) -> None:
        kv_head = lax.div(h, jnp.int32(sizes.passes))
        q = refs.q[h, 0]
        s = _dot(q, _of_head(refs, sizes, slot, 0, kv_head, q.dtype), contract=1)
        scale = rule.scale
        if refs.scales is not None:
            s = s * refs.scale_rows[0, pl.ds(kv_head, 1)]
        if rule.soft_cap is not None:
            s = jnp.tanh(s * (scale / rule.soft_cap))
            scale = rule.soft_cap
        s = s * (scale * LOG2_E)
        if refs.slopes is not None:
            s = s + (refs.slopes[h] * LOG2_E) * _distance(sizes, tile, start)
        s = jnp.where(seen, s, -jnp.inf)
        old = refs.peak[h, :, :1]
        peak = jnp.maximum(old, jnp.max(s, axis=1, keepdims=True))
        base = jnp.where(peak == -jnp.inf, 0.0, peak)  # nothing seen yet: -inf - -inf is NaN
        p = jnp.exp2(s - base)
        shrink = jnp.exp2(old - base)
        total = refs.total[h, :, :1] * shrink + jnp.sum(p, axis=1, keepdims=True)
        if refs.scales is not None:
            p = p * refs.scale_rows[1, pl.ds(kv_head, 1)]
        v = _of_head(refs, sizes, slot, 1, kv_head, q.dtype)
        refs.acc[h] = refs.acc[h] * shrink + _weigh(p, v, split_p)
        refs.peak[h] = jnp.broadcast_to(peak, refs.peak.shape[1:])
        refs.total[h] = jnp.broadcast_to(total, refs.total.shape[1:])

    _for_heads(sizes, head)


def _for_heads(sizes: _Sizes, do: Any) -> None:
    """do(h) for every head, several in a row so that their arithmetic can overlap."""
    most = max(2, UNROLLED // (sizes.rows * sizes.block))
    together = max(n for n in range(1, sizes.heads + 1) if sizes.heads % n == 0 and n <= most)

    def some(i: jax.Array, _: None) -> None:
        for j in range(together):
            do(i * together + j)

    lax.fori_loop(0, sizes.heads // together, some, None)


def _seen(sizes: _Sizes, tile: _Tile, start: jax.Array, sliding_window: int | None) -> jax.Array:
    """bool[rows, block]: which positions each row sees."""
    shape = (sizes.rows, sizes.block)
    row = lax.broadcasted_iota(jnp.int32, shape, 0)
    at = start + lax.broadcasted_iota(jnp.int32, shape, 1)
    seen = (at >= tile.kv_begin) & (at < tile.kv_end)
    # The token of a row is row // group; without the division: x <= row // group where
    # x * group <= row.
    seen &= (at - tile.position) * sizes.group <= row
    if sliding_window is not None:
        seen &= (at + sliding_window - tile.position) * sizes.group > row
    return seen


def _distance(sizes: _Sizes, tile: _Tile, start: jax.Array) -> jax.Array:
    """f32[rows, block]: position of the key less that of the query."""
    shape = (sizes.rows, sizes.block)
    row = lax.broadcasted_iota(jnp.int32, shape, 0).astype(jnp.float32)
    token = jnp.floor((row + 0.5) * (1 / sizes.group))
    at = start - tile.position + lax.broadcasted_iota(jnp.int32, shape, 1)
    return at.astype(jnp.float32) - token


def _of_head(refs: _Refs, sizes: _Sizes, slot: Any, kv: int, kv_head: Any, dtype: Any) -> jax.Array:
    """[block, head_dim]: K (0) or V (1) of one head; quantised values are exact in `dtype`."""
    x = refs.kv[slot, :, kv, kv_head]  # [pages, page_size, head_dim]
    if x.dtype != dtype:
        x = x.astype(dtype)
    return x.reshape(sizes.block, sizes.head_dim)


def _weigh(p: jax.Array, v: jax.Array, split_p: bool) -> jax.Array:
    """f32[rows, head_dim]: p f32[rows, block] @ v."""
    if v.dtype == jnp.float32:
        return _dot(p, v, contract=0)
    if not split_p:
        return _dot(p.astype(v.dtype), v, contract=0)
    high = p.astype(v.dtype).astype(jnp.float32)
    # One product of twice the rows: v is loaded into the matrix unit once.
    both = jnp.concatenate([high, p - high], axis=0).astype(v.dtype)
    o = _dot(both, v, contract=0)
    return o[: p.shape[0]] + o[p.shape[0] :]


def _dot(a: jax.Array, b: jax.Array, contract: int) -> jax.Array:
    """a's last axis with axis `contract` of b; products and sum in float32."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((1,), (contract,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)


def _finish(refs: _Refs, sizes: _Sizes) -> None:
    """Divides, and turns the statistics into the log-sum-exp; 0 and -inf where nothing was seen."""

    def head(h: Any) -> None:
        total = refs.total[h]  # [rows, LANES]
        safe = jnp.where(total == 0, 1.0, total)
        lse = jnp.where(total == 0, -jnp.inf, refs.peak[h] * LN_2 + jnp.log(safe))
        refs.o[h, 0] = (refs.acc[h] / safe[:, :1]).astype(refs.o.dtype)
        refs.lse[0, h] = lse.T[0]

    _for_heads(sizes, head)
