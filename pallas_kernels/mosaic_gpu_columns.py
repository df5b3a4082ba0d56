"""The Hopper kernel for few query rows a sequence: query rows are COLUMNS of both products.

Owns the kernel and what it can do. A CTA is a producer warpgroup, which brings pages by TMA, and a
consumer warpgroup, which computes S^T = K Q^T and O^T = V^T P^T with wgmma. wgmma wants 64 rows but
takes 8 columns, so 64 positions x 8 query rows fill it without padding. CTAs are persistent: each
runs its share of a work list, and the ring of KV tiles never drains between two items.

Registers a thread, as compiled for sm_90a with kv_tile 64, P split and no spills; two CTAs share an
SM up to 128 registers and 115,712 bytes. Bytes are about
`stages * 2 * kv_tile * head_dim * itemsize + rows * (4 * head_dim + 256) + 2,208`, and of a
quantised pool also `kv_tile * (2 * head_dim + 8 * stages)`.

    head_dim        64            128            192            256
    rows          8  16  32    8   16   32    8   16   32    8   16   32
    16-bit pool  75  92 127   96  120  164  116  143  196  128  157  234
    e4m3, int8   87  95 139  143  158  196    -  208    -  233  246  spills: use 16 rows
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_gpu_ops as ops
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

# Of a matrix whose columns are query rows; reduce(0) is one value a column, reduce(1) one a row.
LAYOUT = plgpu.Layout.WGMMA
Q_SLOTS = 2  # the queries of the next item arrive while this one computes
CHUNK = 64  # columns of a tile that pass through registers at once: more costs 20-80 registers


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Everything static about one launch."""

    rule: ScoreRule
    rows: int
    group: int
    passes: int
    tokens: int  # of a tile
    kv_tile: int
    page_size: int
    head_dim: int
    stages: int
    compute: Any  # dtype of the products' operands
    quantised: bool
    split_p: bool
    slopes: bool


def attend_columns(
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
    """Attention of each item of `work`, normalised by itself.

    Args:
      q_tiles: [heads, num_tiles, rows, head_dim] in the pool's dtype (bfloat16 or float16); with a
        quantised pool any float dtype, rounded to float16. Rows that hold no query are zero.
      kv_pages: [num_pages, 2, num_kv_heads, page_size, head_dim]; bfloat16, float16, or, with
        `kv_scales`, float8_e4m3fn or int8. Unused positions may hold NaN.
      page_table: i32[max_seqs, pages_per_seq]; only entries of pages that a query sees are read.
      work: the items; the grid is `config.workers`, and `work.worker_items` must match it.
      shape: of the tiles.
      rule: how scores are made.
      config: sizes of the launch.
      slopes: f32[heads, rows], ALiBi.
      kv_scales: f32[num_pages, 2, num_kv_heads, page_size].
      out_dtype: must be float32: parts are stored transposed, and only float32 can be.
      interpret: run on the CPU; True is with race detection.

    Returns:
      o f32[num_items, head_dim, rows] (transposed) and lse f32[num_items, rows], natural. An empty
      item has lse -inf and leaves o as it was; a row that sees nothing has 0 and -inf.
    """
    quantised = kv_scales is not None
    _check(q_tiles, kv_pages, work, shape, config, quantised, out_dtype)
    head_dim, page_size = kv_pages.shape[4], kv_pages.shape[3]
    compute = jnp.dtype(jnp.float16) if quantised else jnp.dtype(kv_pages.dtype)
    z = _Sizes(
        rule=rule,
        rows=shape.rows,
        group=shape.group,
        passes=shape.passes,
        tokens=shape.tokens_per_tile,
        kv_tile=config.kv_tile,
        page_size=page_size,
        head_dim=head_dim,
        stages=config.stages,
        compute=compute,
        quantised=quantised,
        split_p=config.split_p,
        slopes=slopes is not None,
    )
    given = {"table": page_table, "items": work.items, "deal": work.worker_items, "pool": kv_pages}
    if quantised:
        q_tiles, unscale = ops.to_float16(q_tiles)
        given |= {"unscale": unscale, "scales": kv_scales}
    if slopes is not None:
        given["slopes"] = slopes
    given["q"] = q_tiles

    def body(*refs: Any, **scratch: Any) -> None:
        g = SimpleNamespace(**dict(zip((*given, "o", "lse"), refs, strict=True)))
        s = SimpleNamespace(**scratch)
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == 0)(lambda: _consume(z, g, s))
        pl.when(warpgroup == 1)(lambda: _produce(z, g, s))

    num_items = work.items.shape[0]
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((num_items, head_dim, z.rows), jnp.float32),
            jax.ShapeDtypeStruct((num_items, z.rows), jnp.float32),
        ),
        grid=(config.workers,),
        grid_names=("worker",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=_scratch(z, kv_pages.dtype),
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=2048),
        interpret=ops.interpret_params(interpret),
        kernel_name=f"attend_columns_{z.rows}x{z.kv_tile}x{head_dim}",
    )(*given.values())


def _check(
    q_tiles: jax.Array,
    kv_pages: jax.Array,
    work: WorkList,
    shape: TileShape,
    config: KernelConfig,
    quantised: bool,
    out_dtype: Any,
) -> None:
    """Raises for what the kernel cannot do."""
    page_size, head_dim = kv_pages.shape[3:]
    stored = (jnp.float8_e4m3fn, jnp.int8) if quantised else (jnp.bfloat16, jnp.float16)
    if kv_pages.dtype not in stored:
        raise NotImplementedError(
            f"`kv_pages` must be one of {', '.join(jnp.dtype(d).name for d in stored)} "
            f"{'with' if quantised else 'without'} `kv_scales` in the columns kernel. "
            f"Got {kv_pages.dtype}."
        )
    if not quantised and q_tiles.dtype != kv_pages.dtype:
        raise NotImplementedError(
            f"`q_tiles` must have the dtype of `kv_pages`, {kv_pages.dtype}, in the columns "
            f"kernel. Got {q_tiles.dtype}."
        )
    if jnp.dtype(out_dtype) != jnp.float32:
        raise NotImplementedError(f"`out_dtype` must be float32. Got {jnp.dtype(out_dtype).name}.")
    if head_dim % 64 or head_dim > 256:
        raise NotImplementedError(
            f"`kv_pages` must have a head_dim of 64, 128, 192 or 256 in the columns kernel: pad "
            f"the pool. Got {head_dim}."
        )
    if page_size not in (8, 16, 32, 64, 128):
        raise NotImplementedError(
            f"`kv_pages` must have a page_size of 8, 16, 32, 64 or 128 in the columns kernel. "
            f"Got {page_size}."
        )
    if config.kv_tile % 64 or config.kv_tile > 256 or config.kv_tile != shape.kv_tile:
        raise NotImplementedError(
            f"`config.kv_tile` must be a multiple of 64 up to 256, and that of `shape`, "
            f"{shape.kv_tile}. Got {config.kv_tile}."
        )
    if shape.rows % 8 or shape.rows > 64 or q_tiles.shape[2] != shape.rows:
        raise NotImplementedError(
            f"`shape.rows` must be a multiple of 8 up to 64, and that of `q_tiles`, "
            f"{q_tiles.shape[2]}. Got {shape.rows}."
        )
    if work.worker_items.shape != (config.workers + 1,):
        raise ValueError(
            f"`work` must be dealt to `config.workers`, {config.workers}. "
            f"Got {work.worker_items.shape[0] - 1}."
        )


def _scratch(z: _Sizes, stored: Any) -> dict[str, Any]:
    """Shared memory and barriers of a CTA."""
    # Bytes are swizzled by 64, so that CHUNK columns of them can be loaded.
    ring = ops.tiled_smem(
        (z.stages, z.kv_tile, z.head_dim), stored, most=CHUNK * jnp.dtype(stored).itemsize
    )
    probabilities = ops.tiled_smem((z.rows, z.kv_tile), z.compute)
    copies = max(1, z.kv_tile // z.page_size) * (2 if z.quantised else 1)

    def barriers(arrivals: int, count: int) -> Any:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)

    scratch = {
        "k": ring,
        "v": ring,
        "q": ops.tiled_smem((Q_SLOTS, z.rows, z.head_dim), z.compute),
        "p": [probabilities] * (2 if z.split_p else 1),
        "k_full": barriers(copies, z.stages),
        "v_full": barriers(copies, z.stages),
        "q_full": barriers(1, Q_SLOTS),
        "k_free": barriers(1, z.stages),
        "v_free": barriers(1, z.stages),
        "q_free": barriers(1, Q_SLOTS),
    }
    if z.quantised:
        scales = plgpu.SMEM((z.stages, z.kv_tile), jnp.float32)
        wide = ops.tiled_smem((z.kv_tile, z.head_dim), z.compute)
        scratch |= {"k_scale": scales, "v_scale": scales, "wide": wide}
    return scratch


def _item(g: SimpleNamespace, index: jax.Array) -> SimpleNamespace:
    """The words of an item; past the last one, those of the last one."""
    at = jnp.minimum(index, g.items.shape[0] - 1)
    words = ("tile", TILE), ("head", HEAD), ("begin", BEGIN), ("end", END), ("seq", SEQ)
    words = (*words, ("position", POSITION), ("kv_end", KV_END))
    return SimpleNamespace(**{name: g.items[at, word] for name, word in words})


def _first_seen(z: _Sizes, item: SimpleNamespace) -> jax.Array:
    """i32[]: the first position that any query of the item sees."""
    if z.rule.sliding_window is None:
        return jnp.int32(0)
    return jnp.maximum(item.position - (z.rule.sliding_window - 1), 0)


def _slot(n: jax.Array, slots: int) -> jax.Array:
    return lax.rem(n, jnp.int32(slots))


# ------------------------------------------------------------------------------- the producer


def _produce(z: _Sizes, g: SimpleNamespace, s: SimpleNamespace) -> None:
    """Starts every copy of this CTA's items, as far ahead as the ring allows."""
    worker = lax.axis_index("worker")
    first, last = g.deal[worker], g.deal[worker + 1]

    def page_ids(item: SimpleNamespace, tile: jax.Array) -> tuple[jax.Array, ...]:
        return ops.tile_pages(
            g.table,
            item.seq,
            tile,
            kv_begin=_first_seen(z, item),
            kv_end=item.kv_end,
            page_size=z.page_size,
            kv_tile=z.kv_tile,
        )

    def copy(
        which: int, head: jax.Array, ids: tuple[jax.Array, ...], tile: jax.Array, n: jax.Array
    ) -> None:
        slot = _slot(n, z.stages)
        ring = s.v if which else s.k
        full, free = (s.v_full, s.v_free) if which else (s.k_full, s.k_free)
        pl.when(n >= z.stages)(lambda: plgpu.barrier_wait(free.at[slot]))
        kv_head = lax.div(head, jnp.int32(z.passes))

        def page_of(page: jax.Array) -> Any:
            return g.pool.at[page, which, kv_head]

        def scales_of(page: jax.Array) -> Any:
            return g.scales.at[page, which, kv_head]

        ops.copy_tile(ids, tile, page_of, ring.at[slot], full.at[slot])
        if z.quantised:
            target = s.v_scale if which else s.k_scale
            ops.copy_tile(ids, tile, scales_of, target.at[slot], full.at[slot], in_bounds=True)

    def run(i: jax.Array, carry: Any) -> Any:
        n, queries, words, ids = carry
        item, after = SimpleNamespace(**words), _item(g, i + 1)
        some = item.begin < item.end

        @pl.when(some)
        def _() -> None:
            slot = _slot(queries, Q_SLOTS)
            pl.when(queries >= Q_SLOTS)(lambda: plgpu.barrier_wait(s.q_free.at[slot]))
            plgpu.copy_gmem_to_smem(g.q.at[item.head, item.tile], s.q.at[slot], s.q_full.at[slot])

        def step(tile: jax.Array, carry: Any) -> Any:
            n, ids = carry
            copy(0, item.head, ids, tile, n)
            copy(1, item.head, ids, tile, n)
            # The ids of the next tile, be it of the next item, are on their way while this waits.
            more = tile + 1 < item.end
            source = SimpleNamespace(**{
                name: jnp.where(more, getattr(item, name), getattr(after, name))
                for name in ("seq", "position", "kv_end")
            })  # fmt: skip
            return n + 1, page_ids(source, jnp.where(more, tile + 1, after.begin))

        n, ids = lax.fori_loop(item.begin, item.end, step, (n, ids))
        ids = lax.cond(some, lambda: ids, lambda: page_ids(after, after.begin))
        return n, queries + some.astype(jnp.int32), vars(after), ids

    item = _item(g, first)
    start = (jnp.int32(0), jnp.int32(0), vars(item), page_ids(item, item.begin))
    n, queries, _, _ = lax.fori_loop(first, last, run, start)
    _drain(n, z.stages, s.k_free)
    _drain(n, z.stages, s.v_free)
    _drain(queries, Q_SLOTS, s.q_free)


def _drain(count: jax.Array, slots: int, free: Any) -> None:
    """Waits for the last arrivals: a barrier must not be left with one that nobody saw."""

    def wait(n: jax.Array, _: None) -> None:
        plgpu.barrier_wait(free.at[_slot(n, slots)])

    lax.fori_loop(jnp.maximum(count - slots, 0), count, wait, None)


# ------------------------------------------------------------------------------- the consumer


def _consume(z: _Sizes, g: SimpleNamespace, s: SimpleNamespace) -> None:
    """Computes this CTA's items from what the producer brings."""
    worker = lax.axis_index("worker")
    first, last = g.deal[worker], g.deal[worker + 1]

    def run(i: jax.Array, carry: Any) -> Any:
        n, queries, words = carry
        item, after = SimpleNamespace(**words), _item(g, i + 1)
        some = item.begin < item.end

        @pl.when(some)
        def _() -> None:
            slot = _slot(queries, Q_SLOTS)
            plgpu.barrier_wait(s.q_full.at[slot])
            columns = _columns(z, g, item)
            acc, peak, total = lax.fori_loop(
                item.begin,
                item.end,
                lambda tile, state: _tile_step(
                    z, s, item, columns, tile, n + tile - item.begin, s.q.at[slot], state
                ),
                _start(z),
            )
            plgpu.barrier_arrive(s.q_free.at[slot])
            g.o[i] = acc * _wide(1 / jnp.where(total == 0, 1.0, total), acc.shape)
            lse = (peak + jnp.log2(total)) * LN_2  # nothing seen: -inf + -inf
            ops.store_small(g.lse.at[i], lse)

        @pl.when(jnp.logical_not(some))
        def _() -> None:
            ops.store_small(g.lse.at[i], _start(z)[1])

        return n + item.end - item.begin, queries + some.astype(jnp.int32), vars(after)

    lax.fori_loop(first, last, run, (jnp.int32(0), jnp.int32(0), vars(_item(g, first))))


def _start(z: _Sizes) -> tuple[jax.Array, jax.Array, jax.Array]:
    """f32[head_dim, rows] sum of p v, f32[rows] peak of the scores, f32[rows] sum of p."""
    acc = plgpu.layout_cast(jnp.full((z.head_dim, z.rows), 0.0, jnp.float32), LAYOUT)
    peak = jnp.full((z.rows,), -jnp.inf, jnp.float32)
    total = jnp.full((z.rows,), 0.0, jnp.float32)
    each = LAYOUT.reduce(0)
    return acc, plgpu.layout_cast(peak, each), plgpu.layout_cast(total, each)


def _wide(per_column: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(per_column, shape, [1])


def _columns(z: _Sizes, g: SimpleNamespace, item: SimpleNamespace) -> SimpleNamespace:
    """What differs from one query row to another, [rows] each, or scalars where nothing does."""
    each = LAYOUT.reduce(0)
    position = item.position
    if z.tokens > 1:
        row = plgpu.broadcasted_iota(jnp.int32, (z.rows,), 0, layout=each)
        position = lax.div(row, jnp.full_like(row, z.group)) + position
    columns = SimpleNamespace(position=position, end=jnp.minimum(position + 1, item.kv_end))
    if z.slopes:
        slopes = plgpu.load(g.slopes.at[item.head], layout=each, optimized=False)
        columns.slope = slopes * LOG2_E
    if z.quantised:
        source = g.unscale.at[item.head, item.tile]
        columns.unscale = plgpu.load(source, layout=each, optimized=False)
    return columns


def _tile_step(
    z: _Sizes,
    s: SimpleNamespace,
    item: SimpleNamespace,
    columns: SimpleNamespace,
    tile: jax.Array,  # i32[], index of the KV tile
    n: jax.Array,  # i32[], of all tiles of this CTA
    *rest: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One KV tile of the online softmax, in base 2."""
    q, (acc, peak, total) = rest
    slot, start = _slot(n, z.stages), tile * z.kv_tile
    plgpu.barrier_wait(s.k_full.at[slot])
    scores = _scores(z, s, slot, q, columns, start)
    new_peak = jnp.maximum(peak, scores.max(axis=0))
    safe = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)  # -inf - -inf is NaN
    p = jnp.exp2(scores - _wide(safe, scores.shape))  # [kv_tile, rows]
    shrink = jnp.exp2(peak - safe)
    total = total * shrink + p.sum(axis=0)
    plgpu.barrier_wait(s.v_full.at[slot])
    values = _values(z, s, slot, item, start, p)
    acc = acc * _wide(shrink, acc.shape) + values
    plgpu.barrier_arrive(s.v_free.at[slot])
    return acc, new_peak, total


def _scores(
    z: _Sizes, s: SimpleNamespace, slot: Any, q: Any, columns: SimpleNamespace, start: jax.Array
) -> jax.Array:
    """f32[kv_tile, rows]: scores in base 2, -inf where a query does not see; frees K."""
    shape = (z.kv_tile, z.rows)
    if z.quantised:
        _dequantise(z, s.k.at[slot], s.wide, None)
        scale = plgpu.load(s.k_scale.at[slot], layout=LAYOUT.reduce(1), optimized=False)
        plgpu.commit_smem()
        plgpu.barrier_arrive(s.k_free.at[slot])
        scores = ops.wgmma_sum(shape, (s.wide, q.T))
        scores = scores * lax.broadcast_in_dim(scale, shape, [0]) * _wide(columns.unscale, shape)
    else:
        scores = ops.wgmma_sum(shape, (s.k.at[slot], q.T))
        plgpu.barrier_arrive(s.k_free.at[slot])
    if z.rule.soft_cap is None:
        scores = scores * (z.rule.scale * LOG2_E)
    else:
        cap = z.rule.soft_cap
        scores = jnp.tanh(scores * (z.rule.scale / cap)) * (cap * LOG2_E)

    def to_matrix(value: jax.Array) -> jax.Array:
        return _wide(value, shape) if value.ndim else value

    at = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=LAYOUT) + start
    position = to_matrix(columns.position)
    if z.slopes:
        scores = scores + _wide(columns.slope, shape) * (at - position).astype(jnp.float32)
    seen = at < to_matrix(columns.end)
    if z.rule.sliding_window is not None:
        seen = seen & (at > position - z.rule.sliding_window)
    return jnp.where(seen, scores, -jnp.inf)


def _values(
    z: _Sizes,
    s: SimpleNamespace,
    slot: Any,
    item: SimpleNamespace,
    start: jax.Array,
    p: jax.Array,  # f32[kv_tile, rows]
) -> jax.Array:
    """f32[head_dim, rows]: V^T P^T, with P in one or two 16-bit parts."""
    first = _first_seen(z, item)
    live = SimpleNamespace(first=first - start, end=item.kv_end - start)
    v, unit = s.v.at[slot], None
    if z.quantised:
        _dequantise(z, v, s.wide, live)
        p, top = ops.fold_scales(p, _value_scales(s.v_scale.at[slot], live), positions=0)
        v, unit = s.wide, ops.unit_of(top)
    else:
        ragged = (live.end < z.kv_tile) | (live.first > 0)
        pl.when(ragged)(lambda: _clear(z, v, live))
    rest = p
    for part in s.p:
        rounded = rest.astype(z.compute)
        part.T[...] = rounded
        rest = rest - rounded.astype(jnp.float32)
    plgpu.commit_smem()
    shape = (z.head_dim, z.rows)
    product = ops.wgmma_sum(shape, *((v.T, part.T) for part in s.p))
    return product if unit is None else product * _wide(unit, shape)


def _is_live(live: SimpleNamespace, shape: tuple[int, ...], layout: Any) -> jax.Array:
    """bool[shape]: positions (axis 0) that some query of the item may see."""
    at = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
    return (at >= live.first) & (at < live.end)


def _clear(z: _Sizes, v: Any, live: SimpleNamespace) -> None:
    """Zeroes V where nobody may look: it may hold NaN, and 0 * NaN is NaN."""
    for column in range(0, z.head_dim, CHUNK):
        part = v.at[:, pl.ds(column, CHUNK)]
        old = plgpu.load(part, layout=LAYOUT)
        part[...] = jnp.where(_is_live(live, old.shape, LAYOUT), old, jnp.zeros_like(old))


def _dequantise(z: _Sizes, narrow: Any, wide: Any, live: SimpleNamespace | None) -> None:
    """Copies a tile of 8-bit values to float16, which holds them exactly; zero where not live."""
    for column in range(0, z.head_dim, CHUNK):
        part = pl.ds(column, CHUNK)
        values = plgpu.load(narrow.at[:, part], layout=plgpu.Layout.WGMMA_UPCAST_2X)
        values = plgpu.layout_cast(values.astype(z.compute), LAYOUT)
        if live is not None:
            keep = _is_live(live, values.shape, LAYOUT)
            values = jnp.where(keep, values, jnp.zeros_like(values))
        wide[:, part] = values


def _value_scales(scales: Any, live: SimpleNamespace) -> jax.Array:
    """f32[kv_tile]: V's, zero where nobody may look: they may be NaN."""
    layout = LAYOUT.reduce(1)
    scale = plgpu.load(scales, layout=layout, optimized=False)
    return jnp.where(_is_live(live, scale.shape, layout), scale, jnp.zeros_like(scale))
