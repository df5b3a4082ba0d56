"""The "rows" kernel: many query rows over pages, on Hopper (sm_90a), by wgmma.

For prefill and chunks of it. One CTA is one or two consumer warpgroups of 64 query rows each and a
producer warpgroup that copies KV tiles, page by page, into a ring that the consumers share. CTAs
are persistent: each runs its share of the work list. S = Q K^T, then O += P V; P is a register
operand, or goes through shared memory where the kernel is interpreted (interpret mode lacks the
former, and accumulators that live on).

Owns the schedule and the online softmax. Knows nothing of sequences: the work list names
everything. Pages of 8-bit values are converted to float16 by the consumers, once for all of them.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_gpu_ops as ops
from pallas_kernels import mosaic_gpu_target
from pallas_kernels.score_rule import LN_2, LOG2_E, ScoreRule
from pallas_kernels.tuning import KernelConfig
from pallas_kernels.work_plan import TileShape, WorkList

WG_ROWS = 64  # query rows of a consumer warpgroup: M of a wgmma
QUANTISED = (jnp.float8_e4m3fn, jnp.int8)
_L = plgpu.Layout.WGMMA
_SERIES = 0.15**2  # below this square, four terms of tanh's series are good to 6e-9
_PER_ROW = _L.reduce(1)  # vectors with one value for each query row
_PER_COLUMN = _L.reduce(0)  # vectors with one value for each kv position
_UPCAST = plgpu.Layout.WGMMA_UPCAST_2X  # of 8-bit values that become 16-bit ones
# Registers of a thread: 2 consumers and a producer share 504, 1 and 1 have more than they can use.
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 232, 40
_BARRIER_BYTES = 1024  # at most, with slopes
_MAX_COPIES = 8  # of a KV tile of K: the producer holds the page ids of two tiles in registers


@dataclass(frozen=True, slots=True)
class _Static:
    """What one compilation of the kernel is made for."""

    shape: TileShape
    rule: ScoreRule
    config: KernelConfig
    page_size: int
    head_dim: int
    dtype: Any  # of what is multiplied: the pool's, float16 for a quantised pool
    out_dtype: Any
    quantised: bool
    alibi: bool
    p_in_smem: bool

    @property
    def consumers(self) -> int:
        return self.shape.rows // WG_ROWS

    @property
    def kv_tile(self) -> int:
        return self.config.kv_tile

    @property
    def parts(self) -> int:
        """Of P."""
        return 2 if self.config.split_p else 1

    @property
    def copies(self) -> int:
        """TMA copies of a KV tile of K, or of V."""
        return max(1, self.kv_tile // self.page_size)


class _Item(NamedTuple):
    """Words of a work item, i32[] each."""

    tile: jax.Array
    head: jax.Array
    begin: jax.Array
    end: jax.Array
    seq: jax.Array
    position: jax.Array
    kv_end: jax.Array


class _State(NamedTuple):
    """Online softmax of a warpgroup's rows; logarithms are to base 2."""

    acc: jax.Array  # f32[WG_ROWS, head_dim]
    peak: jax.Array  # f32[WG_ROWS], -inf: nothing seen
    total: jax.Array  # f32[WG_ROWS]
    top: jax.Array | None  # f32[WG_ROWS], gives the unit of acc; quantised pools only


def attend_rows(
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
    out_dtype: Any = None,
    interpret: Any = False,
    p_in_smem: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of every item of `work`, each normalised by itself.

    Args:
      q_tiles: [heads, num_tiles, rows, head_dim], packed token-major; bfloat16 or float16.
      kv_pages: [num_pages, 2, num_kv_heads, page_size, head_dim], of the dtype of `q_tiles`,
        float8_e4m3fn or int8.
      page_table: i32[max_seqs, pages_per_seq].
      work: items of the tiles; not `split`: item i is row i.
      shape: sizes of the tiles; `rows` is 64 or 128.
      rule: how a score is made.
      config: `kv_tile` is 64 or 128, `stages` the depth of the ring, `workers` CTAs run.
      slopes: f32[heads, rows], ALiBi.
      kv_scales: f32[num_pages, 2, num_kv_heads, page_size], of a quantised pool.
      out_dtype: of o: float32, bfloat16 or float16; None: as `q_tiles`.
      interpret: False, True, or parameters of Pallas' interpret mode.
      p_in_smem: P goes through shared memory; None: only where interpreted. For tests.

    Returns:
      o out_dtype[num_items, rows, head_dim] and lse f32[num_items, rows] (natural logarithm; -inf
      for rows that see nothing). Items without KV tiles: lse -inf if `work.split`, else undefined.

    Raises:
      NotImplementedError: the kernel cannot do this with these sizes or dtypes.
      ValueError: arguments contradict each other.
    """
    out_dtype = jnp.dtype(q_tiles.dtype if out_dtype is None else out_dtype)
    dtype = jnp.dtype(jnp.float16) if kv_pages.dtype in QUANTISED else kv_pages.dtype
    static = _Static(
        shape=shape,
        rule=rule,
        config=config,
        page_size=kv_pages.shape[3],
        head_dim=kv_pages.shape[4],
        dtype=dtype,
        # O leaves by the memory of Q, if of its dtype, or from registers, as float32
        out_dtype=out_dtype if out_dtype == dtype else jnp.dtype(jnp.float32),
        quantised=kv_pages.dtype in QUANTISED,
        alibi=slopes is not None,
        p_in_smem=bool(interpret) if p_in_smem is None else p_in_smem,
    )
    _check(static, q_tiles, kv_pages, kv_scales)
    if not interpret:
        _check_chip(static)
    passes = q_tiles.shape[0] // kv_pages.shape[2]
    num_items = work.items.shape[0]
    unscale = None
    if static.quantised:
        q_tiles, unscale = ops.to_float16(q_tiles)
    options = {"slopes": slopes, "kv_scales": kv_scales, "unscale": unscale}
    given = {name: array for name, array in options.items() if array is not None}

    def body(*refs: Any, **scratch: Any) -> None:
        *inputs, o_g, lse_g = refs
        gmem = dict(zip(_INPUTS + tuple(given), inputs, strict=True))
        kernel = _Kernel(static, work.split, passes, gmem, o_g, lse_g, scratch)
        wg = lax.axis_index("wg")
        pl.when(wg == static.consumers)(kernel.produce)
        pl.when(wg < static.consumers)(lambda: kernel.consume(wg))

    o, lse = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((num_items, shape.rows, static.head_dim), static.out_dtype),
            jax.ShapeDtypeStruct((num_items, shape.rows), jnp.float32),
        ),
        grid=(config.workers,),
        grid_names=("worker",),
        num_threads=static.consumers + 1,
        thread_name="wg",
        scratch_types=_scratch(static, kv_pages.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True),  # exp2, log2: to 1e-7
        interpret=ops.interpret_params(interpret),
    )(
        q_tiles,
        kv_pages,
        page_table,
        work.items,
        work.worker_items,
        *given.values(),
    )
    return o.astype(out_dtype), lse


_INPUTS = ("q_tiles", "kv_pages", "page_table", "items", "worker_items")


def _smem_bytes(static: _Static) -> int:
    """Shared memory of a CTA."""
    rows, dim, tile, stages = (
        static.shape.rows,
        static.head_dim,
        static.kv_tile,
        static.config.stages,
    )
    total = 2 * rows * dim + 2 * stages * tile * dim * (1 if static.quantised else 2)
    if static.quantised:
        total += 2 * 2 * tile * dim + 2 * 4 * stages * max(tile, 32 * static.copies)
    if static.p_in_smem:
        total += static.parts * 2 * rows * tile
    return total + _BARRIER_BYTES


def _check(
    static: _Static, q_tiles: jax.Array, kv_pages: jax.Array, kv_scales: jax.Array | None
) -> None:
    shape, config = static.shape, static.config
    if shape.rows not in (WG_ROWS, 2 * WG_ROWS):
        raise NotImplementedError(
            f"`shape` must have 64 or 128 rows for the rows kernel. Got {shape.rows}."
        )
    if config.kv_tile != shape.kv_tile or config.rows != shape.rows:
        raise ValueError(f"`config` must have the sizes of `shape`, {shape}. Got {config}.")
    if config.kv_tile not in (64, 128):
        raise NotImplementedError(
            f"`config` must have a kv_tile of 64 or 128 for the rows kernel. Got {config.kv_tile}."
        )
    page_size = static.page_size
    if page_size % 8 or max(page_size, config.kv_tile) % min(page_size, config.kv_tile):
        raise NotImplementedError(
            f"`kv_pages` must have a page_size (axis 3) of 8 or more that divides the kv_tile, "
            f"{config.kv_tile}, or is a multiple of it. Got {page_size}."
        )
    if static.copies > _MAX_COPIES:
        raise NotImplementedError(
            f"`config` must have a kv_tile of at most {_MAX_COPIES} pages, whose ids the producer "
            f"holds. Got {static.copies} pages of {page_size}."
        )
    if static.head_dim % 64 or static.head_dim > 256:
        raise NotImplementedError(
            f"`kv_pages` must have a head_dim (axis 4) of 64, 128, 192 or 256 for the rows kernel: "
            f"pad it. Got {static.head_dim}."
        )
    if kv_pages.dtype not in (jnp.bfloat16, jnp.float16, *QUANTISED):
        raise NotImplementedError(
            f"`kv_pages` must be bfloat16, float16, float8_e4m3fn or int8 for the rows kernel. "
            f"Got {kv_pages.dtype}."
        )
    if not static.quantised and q_tiles.dtype != kv_pages.dtype:
        raise NotImplementedError(
            f"`q_tiles` must have the dtype of `kv_pages`, {kv_pages.dtype}. Got {q_tiles.dtype}."
        )
    if (kv_scales is not None) != static.quantised:
        raise ValueError(
            f"`kv_scales` must be given with 8-bit `kv_pages` and only then. Got "
            f"{'scales' if kv_scales is not None else 'none'} with {kv_pages.dtype}."
        )


def _check_chip(static: _Static) -> None:
    """What compiled code needs."""
    chip, needed = mosaic_gpu_target.target(), _smem_bytes(static)
    if not chip.has_wgmma:
        raise NotImplementedError(
            f"the rows kernel needs a Hopper GPU (sm_90a). Got {chip.kind}; use the mma kernel."
        )
    if needed > chip.smem_bytes:
        raise NotImplementedError(
            f"`config` must need at most the {chip.smem_bytes} bytes of shared memory of "
            f"{chip.kind}: fewer stages, or smaller tiles. Got {needed}."
        )


def _scratch(static: _Static, pool_dtype: Any) -> dict[str, Any]:
    dim, tile, stages, consumers = (
        static.head_dim,
        static.kv_tile,
        static.config.stages,
        static.consumers,
    )
    arrivals = static.copies * (2 if static.quantised else 1)
    kv_smem = plgpu.SMEM(
        (stages, tile, dim),
        pool_dtype,
        transforms=ops.tiled(pool_dtype, _tile_width(dim) if static.quantised else dim),
    )
    scratch = {
        "q_s": ops.tiled_smem((consumers, WG_ROWS, dim), static.dtype),  # later O
        "k_s": kv_smem,
        "v_s": kv_smem,
        "q_full": plgpu.Barrier(
            num_arrivals=1 + static.alibi + static.quantised, num_barriers=consumers
        ),
        "k_full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
        "v_full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
        "k_free": plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        "v_free": plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        "k_ready": plgpu.Barrier(num_arrivals=consumers),  # written by consumers, for consumers
        "v_ready": plgpu.Barrier(num_arrivals=consumers),
    }
    if static.alibi:
        scratch["slope_s"] = plgpu.SMEM((consumers, WG_ROWS), jnp.float32)
    if static.p_in_smem:
        scratch["p_s"] = ops.tiled_smem((consumers, static.parts, WG_ROWS, tile), static.dtype)
    if static.quantised:
        scratch["k16_s"] = ops.tiled_smem((1, tile, dim), static.dtype)
        scratch["v16_s"] = ops.tiled_smem((1, tile, dim), static.dtype)
        scratch["k_scale_s"] = ops.scale_smem(stages, tile, static.page_size)
        scratch["v_scale_s"] = ops.scale_smem(stages, tile, static.page_size)
        scratch["unscale_s"] = plgpu.SMEM((consumers, WG_ROWS), jnp.float32)
    return scratch


def _tile_width(head_dim: int) -> int:
    """Columns that a consumer converts at once; fewer where O takes the registers."""
    return 128 if head_dim == 128 else 64


class _Kernel:
    """One launch: its static sizes and its references. Made and used while tracing only."""

    def __init__(
        self,
        static: _Static,
        split: bool,
        passes: int,
        gmem: dict[str, Any],
        o_g: Any,
        lse_g: Any,
        scratch: dict[str, Any],
    ) -> None:
        self.static, self.split, self.passes = static, split, passes
        self.gmem, self.o_g, self.lse_g = gmem, o_g, lse_g
        self.smem = scratch

    def each_item(self, run: Any) -> jax.Array:
        """Calls run(i, item, tiles done before) for this worker's items; all tiles of them."""
        worker = lax.axis_index("worker")
        deal, items = self.gmem["worker_items"], self.gmem["items"]

        def step(i: jax.Array, done: jax.Array) -> jax.Array:
            item = _Item(*(items[i, word] for word in range(len(_Item._fields))))
            if self.split:  # an empty item has to say that it is
                run(i, item, done)
            else:
                pl.when(item.begin < item.end)(lambda: run(i, item, done))
            return done + item.end - item.begin

        return lax.fori_loop(deal[worker], deal[worker + 1], step, jnp.int32(0))

    # The producer.

    def produce(self) -> None:
        """Copies the KV tiles of all items into the ring."""
        static, smem = self.static, self.smem
        stages = static.config.stages
        if static.consumers > 1:
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

        def run(i: jax.Array, item: _Item, done: jax.Array) -> None:
            del i  # what is read does not depend on it

            def tile(t: jax.Array, pages: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                nth = done + t - item.begin
                slot = lax.rem(nth, jnp.int32(stages))
                # Before anything is waited for: the ids are there when the next tile needs them.
                following = self.pages(item, jnp.minimum(t + 1, item.end - 1))
                for kind, name in enumerate(("k", "v")):
                    free = smem[f"{name}_free"].at[slot]
                    pl.when(nth >= stages)(lambda free=free: plgpu.barrier_wait(free))
                    self.copy(kind, name, slot, (t, item.head, pages))
                return following

            lax.fori_loop(item.begin, item.end, tile, self.pages(item, item.begin))

        done = self.each_item(run)
        for slot in range(stages):  # every completion of a barrier has to be observed

            @pl.when(slot < done)
            def _(slot: int = slot) -> None:
                plgpu.barrier_wait(smem["k_free"].at[slot])
                plgpu.barrier_wait(smem["v_free"].at[slot])

    def pages(self, item: _Item, t: jax.Array) -> tuple[jax.Array, ...]:
        """Page ids of KV tile t."""
        return ops.tile_pages(
            self.gmem["page_table"],
            item.seq,
            t,
            kv_begin=0,
            kv_end=item.kv_end,
            page_size=self.static.page_size,
            kv_tile=self.static.kv_tile,
        )

    def copy(self, kind: int, name: str, slot: jax.Array, what: tuple[Any, Any, Any]) -> None:
        """Starts the copies of K (kind 0) or V (1) of a KV tile, and of its scales."""
        t, head, pages = what
        kv_head = lax.div(head, jnp.int32(self.passes))
        full = self.smem[f"{name}_full"].at[slot]
        pool, target = self.gmem["kv_pages"], self.smem[f"{name}_s"].at[slot]
        ops.copy_tile(pages, t, lambda page: pool.at[page, kind, kv_head], target, full)
        if self.static.quantised:
            scales, target = self.gmem["kv_scales"], self.smem[f"{name}_scale_s"].at[slot]
            source = lambda page: scales.at[page, kind, kv_head]  # noqa: E731
            ops.copy_scales(pages, t, source, target, self.static.kv_tile, full)

    # The consumers.

    def consume(self, wg: jax.Array) -> None:
        """Attends with rows [64 * wg, 64 * wg + 64) of every item's tile."""
        static = self.static
        if static.consumers > 1:
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")

        def run(i: jax.Array, item: _Item, done: jax.Array) -> None:
            q, q_full = self.smem["q_s"].at[wg], self.smem["q_full"].at[wg]
            rows = pl.ds(wg * WG_ROWS, WG_ROWS)
            plgpu.copy_gmem_to_smem(self.gmem["q_tiles"].at[item.head, item.tile, rows], q, q_full)
            if static.alibi:
                slopes = self.gmem["slopes"].at[item.head, rows]
                plgpu.copy_gmem_to_smem(slopes, self.smem["slope_s"].at[wg], q_full)
            if static.quantised:
                unscale = self.gmem["unscale"].at[item.head, item.tile, rows]
                plgpu.copy_gmem_to_smem(unscale, self.smem["unscale_s"].at[wg], q_full)
            tile = _Tiles(self, wg, item, done)
            plgpu.barrier_wait(q_full)
            state = _State(
                plgpu.layout_cast(jnp.zeros((WG_ROWS, static.head_dim), jnp.float32), _L),
                _row_vector(-math.inf),
                _row_vector(0.0),
                _row_vector(0.0) if static.quantised else None,
            )
            lax.fori_loop(item.begin, tile.first, tile.skip, None)
            state = lax.fori_loop(tile.first, tile.last, tile.step, state)
            lax.fori_loop(tile.last, item.end, tile.skip, None)
            self.write(i, wg, state)

        self.each_item(run)

    def write(self, i: jax.Array, wg: jax.Array, state: _State) -> None:
        """Normalises and stores O and the lse of item i."""
        static, wg = self.static, _fresh(wg)
        rows = pl.ds(wg * WG_ROWS, WG_ROWS)
        total = jnp.where(state.total == 0, 1.0, state.total)
        peak = jnp.where(state.peak == -math.inf, 0.0, state.peak)
        lse = jnp.where(state.total == 0, -math.inf, peak * LN_2 + jnp.log(total))
        self.lse_g[i, rows] = lse
        scale = 1.0 / total if state.top is None else ops.unit_of(state.top) / total
        o = state.acc * _over_columns(scale, static.head_dim)
        if static.out_dtype == jnp.float32:
            self.o_g[i, rows] = o
            return
        staged = self.smem["q_s"].at[wg]
        staged[...] = o.astype(static.out_dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, self.o_g.at[i, rows])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # before the next Q


class _Tiles:
    """The KV tiles of an item as one consumer warpgroup goes through them.

    All consumers pass all tiles, also those of which their rows see nothing, so that each slot of
    the ring is given back by all.

      begin ... first ... last ... end      of the item, in KV tiles
           skip       step     skip
    """

    def __init__(
        self,
        kernel: _Kernel,
        wg: jax.Array,
        item: _Item,
        done: jax.Array,
    ) -> None:
        static = kernel.static
        self.static, self.smem = static, kernel.smem
        self.wg, self.item, self.done = wg, item, done
        group, tile = jnp.int32(static.shape.group), jnp.int32(static.kv_tile)
        self.row = wg * WG_ROWS
        # Positions of this warpgroup's first and last query; last < first: all rows are padding.
        self.low = item.position + lax.div(self.row, group)
        high = item.position + lax.div(self.row + (WG_ROWS - 1), group)
        self.high = jnp.minimum(high, item.kv_end - 1)
        last = jnp.where(self.low < item.kv_end, lax.div(self.high, tile) + 1, 0)
        self.first = item.begin
        if static.rule.sliding_window is not None:
            start = jnp.maximum(self.low - (static.rule.sliding_window - 1), 0)
            self.first = jnp.minimum(jnp.maximum(item.begin, lax.div(start, tile)), item.end)
        self.last = jnp.minimum(jnp.maximum(last, self.first), item.end)

    def slot(self, t: jax.Array) -> jax.Array:
        """Where in the ring tile t is."""
        return lax.rem(self.done + t - self.item.begin, jnp.int32(self.static.config.stages))

    def step(self, t: jax.Array, state: _State) -> _State:
        """Attends to KV tile t."""
        static, smem, slot = self.static, self.smem, self.slot(t)
        shape = (WG_ROWS, static.kv_tile)
        k, k_scale = self.take_k(t)
        s = ops.wgmma_sum(shape, (smem["q_s"].at[_fresh(self.wg)], k.T))
        if k_scale is not None:
            unscale = _load(smem["unscale_s"].at[self.wg], _PER_ROW)
            s = s * _over_rows(k_scale) * _over_columns(unscale, static.kv_tile)
        self.give_back("k", slot)
        s, unit = self.score(t, s)
        peak = jnp.maximum(state.peak, s.max(axis=1) * unit)
        safe = jnp.where(peak == -math.inf, 0.0, peak)
        shrink = jnp.exp2(state.peak - safe)
        p = jnp.exp2(s * unit - _over_columns(safe, static.kv_tile))
        total = state.total * shrink + p.sum(axis=1)
        v, v_scale = self.take_v(t)
        old_top = top = state.top
        if v_scale is not None and old_top is not None:
            live = self.kv_positions(t) < self.item.kv_end
            v_scale = jnp.where(live, v_scale, 0.0)  # it may be NaN, and 0 * NaN is NaN
            p, top = ops.fold_scales(p, v_scale, positions=1, least=old_top * shrink)
            shrink = ops.change_unit(shrink, old_top, top)
        acc = state.acc * _over_columns(shrink, static.head_dim)
        acc = self.add_values(acc, p, v)
        self.give_back("v", slot)
        return _State(acc, peak, total, top)

    def skip(self, t: jax.Array, _: None) -> None:
        """Passes KV tile t, of which no row sees anything."""
        self.take_k(t)
        self.give_back("k", self.slot(t))
        self.take_v(t)
        self.give_back("v", self.slot(t))

    def score(self, t: jax.Array, s: jax.Array) -> tuple[jax.Array, float]:
        """Scores of q . k `s`, -inf where not seen, and the unit of them in powers of two."""
        rule, shape = self.static.rule, s.shape
        unit = rule.scale * LOG2_E
        if rule.scale <= 0 or rule.soft_cap is not None or self.static.alibi:
            s, unit = s * rule.scale, LOG2_E  # the largest of s has to be the largest score
        if rule.soft_cap is not None:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1): what the hardware calls tanh is good to 1e-3 only
            # Nor does it divide well: the slow path costs registers.
            x = s * (1 / rule.soft_cap)
            grown = jnp.log(jnp.exp2(x * (2 * LOG2_E)) + 1.0)
            far = 1.0 - 2.0 * jnp.exp2(grown * -LOG2_E)
            # Near 0 that difference has lost its last digits; tanh's series has not.
            square = x * x
            near = x + x * square * (-1 / 3 + square * (2 / 15 - 17 / 315 * square))
            s = rule.soft_cap * jnp.where(square < _SERIES, near, far)
        if self.static.alibi:
            slope = _load(self.smem["slope_s"].at[self.wg], _PER_ROW)
            distance = _over_rows(self.kv_positions(t)) - _over_columns(
                self.q_positions(), shape[1]
            )
            s = s + _over_columns(slope, shape[1]) * distance.astype(jnp.float32)
        start = t * self.static.kv_tile
        masked = start + (self.static.kv_tile - 1) > self.low
        if rule.sliding_window is not None:
            masked |= start <= self.high - rule.sliding_window
        return lax.cond(masked, lambda x: self.mask(t, x), lambda x: x, s), unit

    def mask(self, t: jax.Array, s: jax.Array) -> jax.Array:
        """-inf where a row does not see a position."""
        kv, q = _over_rows(self.kv_positions(t)), self.q_positions()
        seen = kv <= _over_columns(jnp.minimum(q, self.item.kv_end - 1), s.shape[1])
        window = self.static.rule.sliding_window
        if window is not None:
            seen &= kv > _over_columns(q - window, s.shape[1])
        return jnp.where(seen, s, -math.inf)

    def kv_positions(self, t: jax.Array) -> jax.Array:
        """i32[kv_tile], of the columns of S."""
        column = _fresh(_iota(self.static.kv_tile, _PER_COLUMN))
        return column + t * self.static.kv_tile

    def q_positions(self) -> jax.Array:
        """i32[WG_ROWS], of the rows of S."""
        row = _iota(WG_ROWS, _PER_ROW) + self.row
        group = self.static.shape.group
        return (row if group == 1 else lax.div(row, jnp.int32(group))) + self.item.position

    def add_values(self, acc: jax.Array, p: jax.Array, v: Any) -> jax.Array:
        """acc + p @ v, p as 16-bit numbers whose sum it is."""
        static = self.static
        high = p.astype(static.dtype)
        parts = [high]
        if static.config.split_p:
            parts.append((p - high.astype(jnp.float32)).astype(static.dtype))
        if static.p_in_smem:
            staged = self.smem["p_s"].at[_fresh(self.wg)]
            for i, part in enumerate(parts):
                staged[i] = part
            plgpu.commit_smem()
            pairs = [(staged.at[i], v) for i in range(len(parts))]
            return acc + ops.wgmma_sum((WG_ROWS, static.head_dim), *pairs)

        return ops.wgmma_onto(acc, *((part, v) for part in parts))

    # Tiles of K and V, as they arrive and as they are multiplied.

    def take_k(self, t: jax.Array) -> tuple[Any, jax.Array | None]:
        """K of tile t, [kv_tile, head_dim] in shared memory, once it is there; its scales."""
        slot = self.slot(t)
        plgpu.barrier_wait(self.smem["k_full"].at[slot])
        if self.static.quantised:
            return self.convert("k", slot, None)
        return self.smem["k_s"].at[slot], None

    def take_v(self, t: jax.Array) -> tuple[Any, jax.Array | None]:
        """V of tile t, zero past the end of the sequence (0 * NaN would be NaN); its scales."""
        slot = self.slot(t)
        plgpu.barrier_wait(self.smem["v_full"].at[slot])
        left = self.item.kv_end - t * self.static.kv_tile  # rows before the end
        if self.static.quantised:
            return self.convert("v", slot, left)
        v = self.smem["v_s"].at[slot]

        @pl.when(left < self.static.kv_tile)
        def _() -> None:
            def clear(rows: Any, columns: Any, first_row: int) -> None:
                part = v.at[rows, columns]
                old = plgpu.load(part, layout=_L)
                row = plgpu.broadcasted_iota(jnp.int32, old.shape, 0, layout=_L) + first_row
                part[...] = jnp.where(row < left, old, jnp.zeros_like(old))

            _divide(self.static, self.wg, clear, 64, 0)
            self.share("v_ready")

        return v, None

    def give_back(self, name: str, slot: jax.Array) -> None:
        """The producer may overwrite this slot, once all consumers have said so."""
        plgpu.barrier_arrive(self.smem[f"{name}_free"].at[slot])

    def convert(self, name: str, slot: jax.Array, left: jax.Array | None) -> tuple[Any, jax.Array]:
        """A tile of 8-bit values as float16, rows from `left` on zero; its scales f32[kv_tile]."""
        source = self.smem[f"{name}_s"].at[slot]
        target = self.smem[f"{name}16_s"].at[_fresh(jnp.int32(0))]
        width = _tile_width(self.static.head_dim)

        def convert(rows: Any, columns: Any, first_row: int) -> None:
            raw = plgpu.load(source.at[rows, columns], layout=_UPCAST)
            values = plgpu.layout_cast(raw.astype(self.static.dtype), _L)
            if left is not None:
                row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=_L) + first_row
                values = jnp.where(row < left, values, jnp.zeros_like(values))
            target[rows, columns] = values

        # K begins with one consumer and V with the other, so both work where each is one part.
        _divide(self.static, self.wg, convert, width, int(name == "v"))
        # What is read of a slot is read before `share`, which orders it before the next copy.
        scale = ops.load_scales(
            self.smem[f"{name}_scale_s"].at[slot], self.static.kv_tile, _PER_COLUMN
        )
        self.share(f"{name}_ready")
        return target, scale

    def share(self, name: str) -> None:
        """What any consumer wrote to shared memory is there for the products of all."""
        plgpu.commit_smem()
        if self.static.consumers > 1:
            plgpu.barrier_arrive(self.smem[name])
            plgpu.barrier_wait(self.smem[name])


def _divide(static: _Static, wg: jax.Array, work: Any, width: int, offset: int) -> None:
    """Deals parts of 64 rows and `width` columns of a KV tile to the consumers."""
    nth = offset
    for row in range(0, static.kv_tile, 64):
        for column in range(0, static.head_dim, width):
            rows, columns = pl.ds(row, 64), pl.ds(column, width)
            mine = wg == nth % static.consumers
            pl.when(mine)(lambda r=rows, c=columns, first=row: work(r, c, first))
            nth += 1


def _fresh(x: jax.Array) -> jax.Array:
    """x, opaque to the compiler: what depends on it is computed where it is used.

    Otherwise positions and addresses are computed once, before the loop over KV tiles, and kept in
    dozens of registers that the loop then lacks: it spills.
    """
    return lax.optimization_barrier(x)


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout)


def _iota(length: int, layout: Any) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (length,), 0, layout=layout)


def _row_vector(value: float) -> jax.Array:
    return plgpu.layout_cast(jnp.full((WG_ROWS,), value, jnp.float32), _PER_ROW)


def _over_columns(x: jax.Array, columns: int) -> jax.Array:
    """x[rows] as [rows, columns]."""
    return lax.broadcast_in_dim(x, (x.shape[0], columns), [0])


def _over_rows(x: jax.Array) -> jax.Array:
    """x[columns] as [WG_ROWS, columns]."""
    return lax.broadcast_in_dim(x, (WG_ROWS, x.shape[0]), [1])
