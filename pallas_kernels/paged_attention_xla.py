"""Paged attention in plain XLA: the portable path, and the one for CPUs.

Blockwise online softmax over groups of query rows, in two classes that share one inner loop:

  decode   sequences with one query row, `_DECODE_ROWS` of similar length at a time
  prefill  sequences with more, in tiles of `_PREFILL_ROWS` rows of one, `_PREFILL_TILES` at a time

Leading pages that all sequences of the decode class share are read once, for all of them together.
A class without work runs no iteration, and a group loops over just the blocks that it sees: neither
a wide page table nor an idle class costs anything, and temporaries do not grow with the context.

A row of a matrix product has other bits in a matrix of another shape, or at another row of it.
So batch-invariant results come from one class whatever the batch: tiles of `_INVARIANT_ROWS` rows
that begin at multiples of it in the sequence, so that a position is always at the same row of an
equal tile. Blocks of positions begin at multiples of `_BLOCK` in any case.

Knows nothing of validation: `pallas_kernels.paged_attention` has done it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.cascade import MIN_MEMBERS, MIN_SHARED
from pallas_kernels.merge import add_sinks, merge_states
from pallas_kernels.platform import traced_platform

_DECODE_ROWS = 16  # sequences that decode together
_PREFILL_ROWS = 64  # query rows of a tile
_PREFILL_TILES = 4  # that are computed together
_INVARIANT_ROWS = 8  # query rows of a tile; few, because a sequence that decodes fills just one
_BLOCK = 64  # kv positions of a block
_DECODE_BLOCK = 128  # of sequences that decode: fewer, longer rounds of the loop

# out f32[..., num_q_heads, head_dim] and lse f32[..., num_q_heads] of query rows.
type _Rows = tuple[jax.Array, jax.Array]
# Weighted sum f32[seqs, num_kv_heads, group, rows, head_dim], and without the last axis the peak
# of the scores and the sum of the weights.
type _State = tuple[jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True)
class _Context:
    """What every group needs; dimensions are static."""

    kv_pages: jax.Array  # [num_pages, 2, num_kv_heads, page_size, head_dim]
    kv_scales: jax.Array | None  # f32[num_pages, 2, num_kv_heads, page_size]
    page_table: jax.Array  # i32[max_seqs, pages_per_seq]
    slopes: jax.Array | None  # f32[num_q_heads]
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    dtype: Any  # of both sides of the products, bfloat16 or float32
    block: int = _BLOCK  # kv positions

    @property
    def part(self) -> int:
        """Positions that are gathered as one: a page, or a block of a page that is larger."""
        return min(self.block, self.kv_pages.shape[3])


class _Block(NamedTuple):
    """Keys and values of one block; scales are None if the pool is not quantised."""

    k: jax.Array  # [seqs, num_kv_heads, block, head_dim] in the dtype of the products
    v: jax.Array
    k_scales: jax.Array | None  # f32[seqs, num_kv_heads, block]
    v_scales: jax.Array | None


@dataclass(frozen=True)
class _Work:
    """What the groups of one class attend to. From metadata alone: equal layers share one copy."""

    seqs: jax.Array  # i32[groups, seqs], rows of the page table
    q_pos: jax.Array  # i32[groups, seqs, rows], position of each query row; below 0: sees nothing
    count: jax.Array  # i32[], groups that hold work; they come first

    def seen_from(self, sliding_window: int | None) -> jax.Array:
        """i32[groups, seqs, rows]: first position that each query row sees."""
        low = self.q_pos * 0 if sliding_window is None else self.q_pos - sliding_window + 1
        return jnp.where(self.q_pos >= 0, jnp.maximum(low, 0), jnp.iinfo(jnp.int32).max)


class _Group(NamedTuple):
    """What one group of sequences sees."""

    seqs: jax.Array  # i32[seqs], rows of the page table
    q_pos: jax.Array  # i32[seqs, rows], position of each query row
    low: jax.Array  # i32[seqs, rows], first position that it sees
    start: jax.Array  # i32[seqs], first position that any of them sees
    end: jax.Array  # i32[seqs], one past the last


# Jitted so that a model of many equal layers traces and lowers it once, not once a layer.
@functools.partial(
    jax.jit,
    static_argnames=(
        "scale",
        "sliding_window",
        "soft_cap",
        "max_q_len",
        "batch_invariant",
        "out_dtype",
    ),
)
def paged_attention_xla(
    q: jax.Array,  # [num_tokens, num_q_heads, head_dim]
    kv_pages: jax.Array,  # [num_pages, 2, num_kv_heads, page_size, head_dim]
    page_table: jax.Array,  # i32[max_seqs, pages_per_seq]
    kv_lens: jax.Array,  # i32[max_seqs]
    cu_q_lens: jax.Array,  # i32[max_seqs + 1]
    num_seqs: jax.Array,  # i32[]
    *,
    scale: float | None,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,  # f32[num_q_heads]
    alibi_slopes: jax.Array | None,  # f32[num_q_heads]
    max_q_len: int | None,
    kv_scales: jax.Array | None = None,  # f32[num_pages, 2, num_kv_heads, page_size]
    batch_invariant: bool = False,
    out_dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`paged_attention` after validation; out in `out_dtype` (None: q's), lse f32[num_tokens, N].

    The head_dim of a padded pool may be larger than that of q: its further columns hold zeros.
    """
    context = _Context(
        kv_pages,
        kv_scales,
        page_table,
        alibi_slopes,
        q.shape[2] ** -0.5 if scale is None else scale,
        sliding_window,
        soft_cap,
        _product_dtype(q, kv_pages, kv_scales),
    )
    starts = cu_q_lens[:-1]
    live = jnp.arange(kv_lens.shape[0], dtype=jnp.int32) < num_seqs
    q_lens = jnp.where(live, cu_q_lens[1:] - starts, 0)
    queries = q.astype(context.dtype)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, kv_pages.shape[4] - q.shape[2])))
    if batch_invariant:
        out, lse = _invariant(context, queries, starts, q_lens, kv_lens)
    else:
        out, lse = _decode(context, queries, starts, jnp.where(q_lens == 1, kv_lens, 0))
        if max_q_len != 1:
            q_lens = jnp.where(q_lens > 1, q_lens, 0)
            out, lse = _prefill(context, queries, starts, q_lens, kv_lens, (out, lse))
    out = out[:, :, : q.shape[2]]
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    return out.astype(q.dtype if out_dtype is None else out_dtype), lse


def _decode(
    context: _Context,
    q: jax.Array,  # f32[num_tokens, num_q_heads, head_dim], scaled
    starts: jax.Array,  # i32[max_seqs], the query row of each sequence
    kv_lens: jax.Array,  # i32[max_seqs]; 0 where a sequence does not decode
) -> _Rows:
    """out and lse of sequences with one query row; zeros and -inf in all other rows."""
    context = replace(context, block=_DECODE_BLOCK)
    num_tokens, num_q_heads, head_dim = q.shape
    width = min(_DECODE_ROWS, kv_lens.shape[0])
    padding = (0, -kv_lens.shape[0] % width)
    # Similar lengths share a group, idle rows come last.
    order = jnp.argsort(-kv_lens).astype(jnp.int32)
    order, lens = jnp.pad(order, padding), jnp.pad(kv_lens[order], padding)
    work = _Work(
        seqs=order.reshape(-1, width),
        q_pos=lens.reshape(-1, width, 1) - 1,
        count=(jnp.sum(lens > 0, dtype=jnp.int32) + width - 1) // width,
    )
    queries = jnp.take(q, starts[order], axis=0, mode="clip")
    queries = queries.reshape(-1, width, 1, num_q_heads, head_dim)

    out, lse = _decode_sorted(context, work, queries, lens)
    # Back from sorted sequences to tokens, by gathering: scatters are slow on CPUs.
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    owns = (tokens == starts[order][None]) & (lens > 0)[None]  # bool[num_tokens, sequences]
    row, found = jnp.argmax(owns, axis=1), jnp.any(owns, axis=1)
    return (
        jnp.where(found[:, None, None], out[row], 0.0),
        jnp.where(found[:, None], lse[row], -jnp.inf),
    )


def _decode_sorted(
    context: _Context,
    work: _Work,
    queries: jax.Array,  # [groups, seqs, 1, num_q_heads, head_dim]
    lens: jax.Array,  # i32[groups * seqs]; 0: does not decode
) -> _Rows:
    """out and lse [groups * seqs, ...] in the order of the groups; shared pages are read once."""

    def read(g: jax.Array) -> jax.Array:
        return lax.dynamic_index_in_dim(queries, g, keepdims=False)

    def write(g: jax.Array, rows: _Rows, new: _Rows) -> _Rows:
        out, lse = (
            lax.dynamic_update_index_in_dim(a, b, g, 0) for a, b in zip(rows, new, strict=True)
        )
        return out, lse

    def attend(seen: jax.Array | None) -> _Rows:
        out, lse = _attend_groups(context, work, read, write, _unseen_rows(queries), seen)
        return out.reshape(-1, *out.shape[3:]), lse.reshape(-1, lse.shape[3])

    order = work.seqs.reshape(-1)
    if context.sliding_window is not None or order.shape[0] < MIN_MEMBERS:
        return attend(None)
    length = _shared_length(context, order, lens)

    def join(rows: _Rows) -> _Rows:
        shared = _attend_shared(context, queries, order, lens, length)
        return merge_states(*(jnp.stack(both) for both in zip(shared, rows, strict=True)))

    return lax.cond(length > 0, join, lambda rows: rows, attend(length))


def _attend_shared(
    context: _Context,
    queries: jax.Array,  # [groups, seqs, 1, num_q_heads, head_dim]
    order: jax.Array,  # i32[groups * seqs], rows of the page table, the longest sequence first
    lens: jax.Array,  # i32[groups * seqs]
    length: jax.Array,  # i32[], positions
) -> _Rows:
    """out and lse over the leading positions alone: of a tile whose rows are the sequences."""
    q_pos = (lens - 1)[None]
    low = jnp.where(q_pos >= 0, 0, jnp.iinfo(jnp.int32).max)
    group = _Group(order[:1], q_pos, low, jnp.zeros_like(length)[None], length[None])
    q = _by_kv_head(queries.reshape(1, -1, *queries.shape[3:]), context.kv_pages.shape[2])
    fold = functools.partial(_fold_block, context, q, group)
    out, lse = _finish(lax.fori_loop(0, length // context.block, fold, _empty_state(q)))
    return out[0], lse[0]


def _shared_length(context: _Context, order: jax.Array, lens: jax.Array) -> jax.Array:
    """i32[]: positions that all sequences that decode share, whole blocks; 0 if it does not pay."""
    page_size = context.kv_pages.shape[3]
    table = context.page_table[order]
    # Whole pages before the newest position: its own page is never shared.
    full = jnp.maximum(lens - 1, 0) // page_size
    columns = jnp.arange(table.shape[1], dtype=jnp.int32)[None]
    equal = (table == table[:1]) & (columns < full[:, None])
    common = jnp.cumprod(equal, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
    pages = jnp.min(jnp.where(lens > 0, common, table.shape[1]))
    length = pages * page_size // context.block * context.block
    pays = (length >= MIN_SHARED) & (jnp.sum(lens > 0) >= MIN_MEMBERS)
    return jnp.where(pays, length, 0)


def _prefill(
    context: _Context,
    q: jax.Array,  # f32[num_tokens, num_q_heads, head_dim], scaled
    starts: jax.Array,  # i32[max_seqs], first query row of each sequence
    q_lens: jax.Array,  # i32[max_seqs]; 0 where a sequence has no tile
    kv_lens: jax.Array,  # i32[max_seqs]
    rows: _Rows,
) -> _Rows:
    """`rows` with those of sequences that have several query rows, some tiles at a time."""
    num_tokens, height = q.shape[0], min(_PREFILL_ROWS, q.shape[0])
    tiles = (q_lens + height - 1) // height
    ends = jnp.cumsum(tiles)
    most_tiles = num_tokens // height + q_lens.shape[0]
    width = min(_PREFILL_TILES, most_tiles)
    tile = jnp.arange(most_tiles + -most_tiles % width, dtype=jnp.int32)
    seqs = jnp.sum(ends[None] <= tile[:, None], axis=1, dtype=jnp.int32)
    seqs = jnp.minimum(seqs, q_lens.shape[0] - 1)
    first = starts[seqs] + (tile - ends[seqs] + tiles[seqs]) * height
    last = starts[seqs] + q_lens[seqs]
    # A tile may reach past its sequence, not past the tokens: those rows see nothing.
    top = jnp.minimum(first, num_tokens - height)
    tokens = top[:, None] + jnp.arange(height, dtype=jnp.int32)[None]
    mine = (tokens >= first[:, None]) & (tokens < last[:, None])
    q_pos = jnp.where(mine, tokens + (kv_lens[seqs] - last)[:, None], -1)
    count = (ends[-1] + width - 1) // width
    work = _Work(seqs.reshape(-1, width), q_pos.reshape(-1, width, height), count)

    def read(g: jax.Array) -> jax.Array:
        at = lax.dynamic_slice_in_dim(tokens, g * width, width)
        return jnp.take(q, at, axis=0, mode="clip")

    def write(g: jax.Array, rows: _Rows, new: _Rows) -> _Rows:
        out, lse = rows
        for i in range(width):  # one after the other: tiles may overlap where rows are not theirs
            at, own = top[g * width + i], mine[g * width + i]
            out = _put_rows(out, new[0][i], at, own[:, None, None])
            lse = _put_rows(lse, new[1][i], at, own[:, None])
        return out, lse

    return _attend_groups(context, work, read, write, rows)


def _invariant(
    context: _Context,
    q: jax.Array,  # f32[num_tokens, num_q_heads, head_dim], scaled
    starts: jax.Array,  # i32[max_seqs], first query row of each sequence
    q_lens: jax.Array,  # i32[max_seqs]
    kv_lens: jax.Array,  # i32[max_seqs]
) -> _Rows:
    """out and lse of all rows, in tiles that begin at multiples of their height in the sequence."""
    num_tokens, height = q.shape[0], _INVARIANT_ROWS
    before = jnp.where(q_lens > 0, (kv_lens - q_lens) % height, 0)  # rows of others in a first tile
    tiles = (before + q_lens + height - 1) // height
    ends = jnp.cumsum(tiles)
    tile = jnp.arange(num_tokens // height + 2 * q_lens.shape[0], dtype=jnp.int32)
    seqs = jnp.sum(ends[None] <= tile[:, None], axis=1, dtype=jnp.int32)
    seqs = jnp.minimum(seqs, q_lens.shape[0] - 1)
    top = (starts - before)[seqs] + (tile - ends[seqs] + tiles[seqs]) * height
    tokens = top[:, None] + jnp.arange(height, dtype=jnp.int32)[None]
    last = starts[seqs] + q_lens[seqs]
    mine = (tokens >= starts[seqs][:, None]) & (tokens < last[:, None])
    q_pos = jnp.where(mine, tokens + (kv_lens[seqs] - last)[:, None], -1)
    work = _Work(seqs[:, None], q_pos[:, None], ends[-1])
    # Tiles reach past both ends of the tokens.
    q = jnp.pad(q, ((height, height), (0, 0), (0, 0)))

    def read(i: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(q, top[i] + height, height)[None]

    def write(i: jax.Array, rows: _Rows, new: _Rows) -> _Rows:
        at = top[i] + height
        out = _put_rows(rows[0], new[0][0], at, mine[i][:, None, None])
        return out, _put_rows(rows[1], new[1][0], at, mine[i][:, None])

    rows = _unseen_rows(q)
    out, lse = _attend_groups(context, work, read, write, rows)
    return out[height:-height], lse[height:-height]


def _put_rows(array: jax.Array, new: jax.Array, start: jax.Array, mine: jax.Array) -> jax.Array:
    """Rows [start, ...) of the array, those that are not `mine` kept."""
    old = lax.dynamic_slice_in_dim(array, start, new.shape[0])
    return lax.dynamic_update_slice_in_dim(array, jnp.where(mine, new, old), start, 0)


def _attend_groups(
    context: _Context,
    work: _Work,
    read: Callable[[jax.Array], jax.Array],  # group -> its queries f32[seqs, rows, N, H]
    write: Callable[[jax.Array, _Rows, _Rows], _Rows],  # group, all rows, its rows -> all rows
    rows: _Rows,
    seen: jax.Array | None = None,  # i32[], leading positions to leave out, whole blocks
) -> _Rows:
    """`rows` with those of every group written."""
    size = context.block
    low = work.seen_from(context.sliding_window)
    start, end = low.min(axis=2), work.q_pos.max(axis=2) + 1  # seen by any row of a sequence
    first = start.min(axis=1) // size
    last = (end.max(axis=1) + size - 1) // size

    if seen is not None:
        first = jnp.maximum(first, seen // size)

    def run(g: jax.Array, rows: _Rows) -> _Rows:
        q = _by_kv_head(read(g), context.kv_pages.shape[2])
        group = _Group(work.seqs[g], work.q_pos[g], low[g], start[g], end[g])
        fold = functools.partial(_fold_block, context, q, group)
        return write(g, rows, _finish(lax.fori_loop(first[g], last[g], fold, _empty_state(q))))

    return lax.fori_loop(0, work.count, run, rows)


def _fold_block(
    context: _Context,
    q: jax.Array,  # [seqs, num_kv_heads, group, rows, head_dim]
    group: _Group,
    j: jax.Array,  # i32[], the block
    state: _State,
) -> _State:
    """The state with block j of each sequence taken in."""
    kv_pos = j * context.block + jnp.arange(context.block, dtype=jnp.int32)
    block = _gather_block(context, group.seqs, j, kv_pos, group.start, group.end)
    scores = _dot(q, block.k, contract=3) * context.scale
    if block.k_scales is not None:
        scores = scores * block.k_scales[:, :, None, None]
    scores = _adjust(context, scores, group.q_pos, kv_pos)
    at = kv_pos[None, None]
    visible = (at <= group.q_pos[..., None]) & (at >= group.low[..., None])
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    return _online_softmax(state, scores, block)


def _gather_block(
    context: _Context,
    seqs: jax.Array,  # i32[seqs]
    j: jax.Array,  # i32[], the block
    kv_pos: jax.Array,  # i32[block]
    start: jax.Array,  # i32[seqs], first position that is seen
    end: jax.Array,  # i32[seqs], one past the last
) -> _Block:
    """Block j of sequences; unseen V, and its scales, are zero."""
    num_pages, _, num_kv_heads, page_size, head_dim = context.kv_pages.shape
    parts, per_page = context.block // context.part, page_size // context.part
    index = j * parts + jnp.arange(parts, dtype=jnp.int32)  # of parts, from position 0 on
    columns = jnp.minimum(index // per_page, context.page_table.shape[1] - 1)
    ids = context.page_table[seqs[:, None], columns[None]]
    # Past the length: garbage, but inside the pool; one page for all, which stays in the cache.
    is_used = columns[None] * page_size < end[:, None]
    ids = jnp.where(is_used, jnp.clip(ids, 0, num_pages - 1), 0)
    seen = (kv_pos[None] >= start[:, None]) & (kv_pos[None] < end[:, None])  # [seqs, block]
    pool = context.kv_pages
    if pool.dtype == jnp.float8_e4m3fn:
        # Tied to the block, or XLA takes the cast out of the loop, and with it a copy of the pool.
        pool, ids = lax.optimization_barrier((pool, ids))
    gather = functools.partial(_gather_parts, ids=ids, index=index % per_page, part=context.part)
    # Keys that are not seen need no zeros: `_attend_groups` replaces their scores.
    k, v = gather(pool, 0).astype(context.dtype), gather(pool, 1).astype(context.dtype)
    by_part = seen.reshape(*ids.shape, context.part)
    v = jnp.where(jnp.repeat(by_part, head_dim, axis=2)[:, None], v, jnp.zeros((), v.dtype))
    k, v = lax.optimization_barrier((k, v))
    shape = (seqs.shape[0], num_kv_heads, context.block, head_dim)
    k, v = k.reshape(shape), v.reshape(shape)
    if context.kv_scales is None:
        return _Block(k, v, None, None)
    k_scales, v_scales = (gather(context.kv_scales, kv).reshape(shape[:3]) for kv in (0, 1))
    return _Block(k, v, k_scales, jnp.where(seen[:, None], v_scales, 0.0))


def _gather_parts(
    pool: jax.Array,  # [num_pages, 2, num_kv_heads, page_size, ...]
    kv: int,  # 0: K, 1: V
    *,
    ids: jax.Array,  # i32[seqs, n], pages
    index: jax.Array,  # i32[n], the part of its page
    part: int,  # positions
) -> jax.Array:
    """[seqs, num_kv_heads, n, part * ...]: equal parts of pages.

    A head's part of a page is contiguous. As one long last axis XLA copies it by vectors; as two
    short ones it unrolls the loop into single elements.
    """
    num_pages, _, num_kv_heads, page_size = pool.shape[:4]
    dtype = pool.dtype
    if dtype == jnp.float8_e4m3fn:  # as bytes: XLA would widen all of the pool in order to gather
        pool = lax.bitcast_convert_type(pool, jnp.uint8)
    per_page = page_size // part
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None]
    rows = ((ids[:, None] * 2 + kv) * num_kv_heads + heads) * per_page + index[None, None]
    slabs = pool.reshape(num_pages * 2 * num_kv_heads * per_page, -1)
    found = slabs.at[rows].get(mode="promise_in_bounds")
    return lax.bitcast_convert_type(found, dtype) if dtype == jnp.float8_e4m3fn else found


def _adjust(
    context: _Context,
    scores: jax.Array,  # f32[seqs, num_kv_heads, group, rows, block]
    q_pos: jax.Array,  # i32[seqs, rows]
    kv_pos: jax.Array,  # i32[block]
) -> jax.Array:
    """Soft cap, then ALiBi."""
    if context.soft_cap is not None:
        scores = context.soft_cap * jnp.tanh(scores / context.soft_cap)
    if context.slopes is not None:
        distance = (kv_pos[None, None] - q_pos[..., None]).astype(jnp.float32)[:, None, None]
        slopes = context.slopes.reshape(1, *scores.shape[1:3], 1, 1)
        scores = scores + slopes * distance
    return scores


def _by_kv_head(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """[seqs, rows, N, H] as [seqs, num_kv_heads, group, rows, H]."""
    seqs, rows, num_q_heads, head_dim = q.shape
    q = q.reshape(seqs, rows, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    return q.transpose(0, 2, 3, 1, 4)


def _by_q_head(array: jax.Array) -> jax.Array:
    """[seqs, num_kv_heads, group, rows, ...] as [seqs, rows, N, ...]."""
    seqs, num_kv_heads, group, rows = array.shape[:4]
    array = jnp.moveaxis(array, 3, 1)
    return array.reshape(seqs, rows, num_kv_heads * group, *array.shape[4:])


def _unseen_rows(q: jax.Array) -> _Rows:
    """Zeros and -inf for queries [..., head_dim]."""
    return jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:-1], -jnp.inf, jnp.float32)


def _empty_state(q: jax.Array) -> _State:
    rows = jnp.zeros(q.shape[:-1], jnp.float32)
    return jnp.zeros(q.shape, jnp.float32), rows - jnp.inf, rows


def _online_softmax(
    state: _State,
    scores: jax.Array,  # f32[seqs, num_kv_heads, group, rows, block]
    block: _Block,
) -> _State:
    """Folds one block in."""
    acc, peak, total = state
    new_peak = jnp.maximum(peak, scores.max(axis=-1))
    base = jnp.where(jnp.isneginf(new_peak), 0.0, new_peak)  # nothing seen yet: -inf - -inf is NaN
    weights = jnp.exp(scores - base[..., None])
    shrink = jnp.exp(peak - base)
    total = total * shrink + weights.sum(axis=-1)
    if block.v_scales is not None:
        weights = weights * block.v_scales[:, :, None, None]
    return acc * shrink[..., None] + _weighted(weights, block.v), new_peak, total


def _weighted(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Sum of v by weights f32[seqs, num_kv_heads, group, rows, block], in float32."""
    if v.dtype == jnp.float32 or weights.shape[3] > 1:
        return _dot(weights, v.astype(jnp.float32), contract=2)
    # One row of weights: this is cheaper than to widen v. As the sum of two narrow numbers a weight
    # keeps 16 of its bits; v has 8.
    high = weights.astype(v.dtype)
    low = (weights - high.astype(jnp.float32)).astype(v.dtype)
    both = _dot(jnp.concatenate([high, low], axis=2), v, contract=2)
    high, low = jnp.split(both, 2, axis=2)
    return high + low


def _finish(state: _State) -> _Rows:
    """out and lse by query head; rows that saw nothing are 0 and -inf, never 0 / 0."""
    acc, peak, total = state
    safe = jnp.where(total == 0, 1.0, total)
    lse = jnp.where(total == 0, -jnp.inf, peak + jnp.log(safe))
    return _by_q_head(acc / safe[..., None]), _by_q_head(lse)


def _dot(a: jax.Array, b: jax.Array, contract: int) -> jax.Array:
    """a's last axis with axis `contract` of b, both led by [seqs, num_kv_heads]; float32."""
    # HIGHEST: accelerators would otherwise round float32 operands to a faster format.
    dims = (((4,), (contract,)), ((0, 1), (0, 1)))
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _product_dtype(q: jax.Array, kv_pages: jax.Array, kv_scales: jax.Array | None) -> Any:
    """bfloat16 where that is exact and a CPU computes it: half the bytes to move. Else float32."""
    is_narrow = q.dtype == kv_pages.dtype == jnp.bfloat16 and kv_scales is None
    return jnp.bfloat16 if is_narrow and traced_platform() == "cpu" else jnp.float32
