"""Paged attention in plain XLA: the portable path, and the one for CPUs.

Blockwise online softmax over groups of query rows, in two classes that share one inner loop:

  decode   sequences with one query row, `_DECODE_ROWS` of similar length at a time
  prefill  sequences with more, in tiles of `_PREFILL_ROWS` rows of one sequence

A class without work runs no iteration, and a group loops over just the blocks that it sees: neither
a wide page table nor an idle class costs anything, and temporaries do not grow with the context.
Knows nothing of validation: `pallas_kernels.paged_attention` has done it.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

_DECODE_ROWS = 16  # sequences that decode together
_PREFILL_ROWS = 64  # query rows of a tile
_BLOCK = 64  # kv positions of a block


@dataclass(frozen=True)
class _Context:
    """What every group needs; dimensions are static."""

    kv_pages: jax.Array  # [num_pages, 2, num_kv_heads, page_size, head_dim]
    page_table: jax.Array  # i32[max_seqs, pages_per_seq]
    slopes: jax.Array | None  # f32[num_q_heads]
    scale: float
    sliding_window: int | None
    soft_cap: float | None

    @property
    def pages_per_block(self) -> int:
        """Pages that one block gathers."""
        return max(1, _BLOCK // self.kv_pages.shape[3])

    @property
    def block(self) -> int:
        """Positions of one block."""
        return self.pages_per_block * self.kv_pages.shape[3]


@dataclass(frozen=True)
class _Sequences:
    """The live part of the metadata: rows past `num_seqs` have neither tokens nor positions."""

    starts: jax.Array  # i32[max_seqs], first query row
    q_lens: jax.Array  # i32[max_seqs]
    kv_lens: jax.Array  # i32[max_seqs]


# Jitted so that a model of many equal layers traces and lowers it once, not once a layer.
@functools.partial(jax.jit, static_argnames=("scale", "sliding_window", "soft_cap", "max_q_len"))
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
) -> tuple[jax.Array, jax.Array]:
    """`paged_attention` after validation; out in q's dtype and lse f32[num_tokens, N]."""
    context = _Context(
        kv_pages,
        page_table,
        alibi_slopes,
        q.shape[2] ** -0.5 if scale is None else scale,
        sliding_window,
        soft_cap,
    )
    sequences = _live_sequences(kv_lens, cu_q_lens, num_seqs)
    out, lse = _decode(context, sequences, q)
    if max_q_len != 1:
        out, lse = _prefill(context, sequences, q, out, lse)
    if sinks is not None:
        out, lse = _add_sinks(out, lse, sinks)
    return out.astype(q.dtype), lse


def _live_sequences(kv_lens: jax.Array, cu_q_lens: jax.Array, num_seqs: jax.Array) -> _Sequences:
    live = jnp.arange(kv_lens.shape[0], dtype=jnp.int32) < num_seqs
    return _Sequences(
        starts=cu_q_lens[:-1],
        q_lens=jnp.where(live, cu_q_lens[1:] - cu_q_lens[:-1], 0),
        kv_lens=jnp.where(live, kv_lens, 0),
    )


def _decode(context: _Context, sequences: _Sequences, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows of sequences with one query row; f32 out and lse, zeros and -inf in all other rows."""
    num_tokens, num_q_heads, head_dim = q.shape
    max_seqs = sequences.q_lens.shape[0]
    width = min(_DECODE_ROWS, max_seqs)
    lens = jnp.where(sequences.q_lens == 1, sequences.kv_lens, 0)
    order = jnp.argsort(-lens).astype(jnp.int32)  # similar lengths share a group, idle rows last
    num_groups = (jnp.sum(lens > 0, dtype=jnp.int32) + width - 1) // width

    def run_group(g: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start = jnp.minimum(g * width, max_seqs - width)  # the last group may overlap: same rows
        rows = lax.dynamic_slice(order, (start,), (width,))
        queries = jnp.take(q, sequences.starts[rows], axis=0, mode="clip")[:, None]
        group_out, group_lse = _attend(context, queries, rows, lens[rows][:, None] - 1)
        return (
            lax.dynamic_update_slice(state[0], group_out[:, 0], (start, 0, 0)),
            lax.dynamic_update_slice(state[1], group_lse[:, 0], (start, 0)),
        )

    empty = (
        jnp.zeros((max_seqs, num_q_heads, head_dim), jnp.float32),
        jnp.full((max_seqs, num_q_heads), -jnp.inf, jnp.float32),
    )
    out, lse = lax.fori_loop(0, num_groups, run_group, empty)
    # Back from sorted sequences to tokens, by gathering: scatters are slow on CPUs.
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    owns = (tokens[:, None] == sequences.starts[order][None]) & (lens[order] > 0)[None]
    row, found = jnp.argmax(owns, axis=1), jnp.any(owns, axis=1)
    return (
        jnp.where(found[:, None, None], out[row], 0.0),
        jnp.where(found[:, None], lse[row], -jnp.inf),
    )


def _prefill(
    context: _Context, sequences: _Sequences, q: jax.Array, out: jax.Array, lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Adds the rows of sequences with several query rows to out and lse, a tile at a time."""
    num_tokens = q.shape[0]
    height = min(_PREFILL_ROWS, num_tokens)
    tiles = jnp.where(sequences.q_lens > 1, (sequences.q_lens + height - 1) // height, 0)
    ends = jnp.cumsum(tiles)

    def run_tile(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        s = jnp.sum(ends <= i, dtype=jnp.int32)  # the sequence of tile i
        first = sequences.starts[s] + (i - ends[s] + tiles[s]) * height
        last = sequences.starts[s] + sequences.q_lens[s]
        start = jnp.minimum(first, num_tokens - height)  # [start, start + height) is in range
        tokens = start + jnp.arange(height, dtype=jnp.int32)
        mine = (tokens >= first) & (tokens < last)
        q_pos = jnp.where(mine, sequences.kv_lens[s] - last + tokens, -1)
        queries = lax.dynamic_slice_in_dim(q, start, height)
        tile_out, tile_lse = _attend(context, queries[None], s[None], q_pos[None])
        return (
            _put_rows(state[0], tile_out[0], start, mine[:, None, None]),
            _put_rows(state[1], tile_lse[0], start, mine[:, None]),
        )

    return lax.fori_loop(0, ends[-1], run_tile, (out, lse))


def _put_rows(array: jax.Array, new: jax.Array, start: jax.Array, mine: jax.Array) -> jax.Array:
    """Rows [start, ...) of the array, those that are not `mine` kept."""
    old = lax.dynamic_slice_in_dim(array, start, new.shape[0])
    return lax.dynamic_update_slice_in_dim(array, jnp.where(mine, new, old), start, 0)


def _attend(
    context: _Context,
    q: jax.Array,  # [seqs, rows, num_q_heads, head_dim]
    seqs: jax.Array,  # i32[seqs], rows of the page table
    q_pos: jax.Array,  # i32[seqs, rows]; below 0: sees nothing
) -> tuple[jax.Array, jax.Array]:
    """Online softmax of one group over the blocks it sees; f32 [seqs, rows, N, H] and lse."""
    num_kv_heads = context.kv_pages.shape[2]
    width, height, num_q_heads, head_dim = q.shape
    group = num_q_heads // num_kv_heads
    queries = q.astype(jnp.float32).reshape(width, height, num_kv_heads, group, head_dim)
    queries = (queries * context.scale).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(width, num_kv_heads, group * height, head_dim)
    low = q_pos * 0 if context.sliding_window is None else q_pos - context.sliding_window + 1
    low = jnp.where(q_pos >= 0, jnp.maximum(low, 0), jnp.iinfo(jnp.int32).max)
    from_pos, to_pos = low.min(axis=1), q_pos.max(axis=1) + 1  # i32[seqs], seen by any row

    def step(
        j: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        kv_pos = j * context.block + jnp.arange(context.block, dtype=jnp.int32)
        k, v = _gather_block(context, seqs, j, kv_pos, from_pos, to_pos)
        scores = _dot(queries, k, contract=3).reshape(width, num_kv_heads, group, height, -1)
        scores = _adjust(context, scores, q_pos, kv_pos)
        at = kv_pos[None, None]
        seen = (at <= q_pos[..., None]) & (at >= low[..., None])  # [seqs, rows, block]
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        return _online_softmax(state, scores.reshape(width, num_kv_heads, group * height, -1), v)

    rows = (width, num_kv_heads, group * height)
    state = (
        jnp.zeros((*rows, head_dim), jnp.float32),
        jnp.full(rows, -jnp.inf, jnp.float32),
        jnp.zeros(rows, jnp.float32),
    )
    first, last = from_pos.min() // context.block, -(-to_pos.max() // context.block)
    acc, peak, total = lax.fori_loop(first, last, step, state)
    safe = jnp.where(total == 0, 1.0, total)
    lse = jnp.where(total == 0, -jnp.inf, peak + jnp.log(safe))
    out = (acc / safe[..., None]).reshape(width, num_q_heads, height, head_dim)
    return out.swapaxes(1, 2), lse.reshape(width, num_q_heads, height).swapaxes(1, 2)


def _gather_block(
    context: _Context,
    seqs: jax.Array,  # i32[seqs]
    j: jax.Array,  # i32[], the block
    kv_pos: jax.Array,  # i32[block]
    from_pos: jax.Array,  # i32[seqs]
    to_pos: jax.Array,  # i32[seqs]
) -> tuple[jax.Array, jax.Array]:
    """K and V f32[seqs, num_kv_heads, block, head_dim] of block j; unseen V is zero."""
    num_pages, _, num_kv_heads, page_size, head_dim = context.kv_pages.shape
    columns = j * context.pages_per_block + jnp.arange(context.pages_per_block, dtype=jnp.int32)
    columns = jnp.minimum(columns, context.page_table.shape[1] - 1)
    ids = context.page_table[seqs[:, None], columns[None]]
    ids = jnp.clip(ids, 0, num_pages - 1)  # past the length: garbage, but inside the pool
    seen = (kv_pos[None] >= from_pos[:, None]) & (kv_pos[None] < to_pos[:, None])
    seen = seen.reshape(*ids.shape, page_size)
    # Keys that are not seen need no zeros: `_attend` replaces their scores.
    k, v = _gather_slabs(context, ids, 0), _gather_slabs(context, ids, 1)
    v = jnp.where(jnp.repeat(seen, head_dim, axis=2)[:, None], v, 0.0)
    shape = (seqs.shape[0], num_kv_heads, context.block, head_dim)
    return k.reshape(shape), v.reshape(shape)


def _gather_slabs(context: _Context, ids: jax.Array, kv: int) -> jax.Array:
    """K (0) or V (1) of pages i32[seqs, n]: f32[seqs, num_kv_heads, n, page_size * head_dim].

    A head's slab of a page is contiguous. As one long last axis XLA copies it by vectors; as two
    short ones it unrolls the loop into single elements.
    """
    num_pages, _, num_kv_heads, page_size, head_dim = context.kv_pages.shape
    slabs = context.kv_pages.reshape(num_pages, 2, num_kv_heads, page_size * head_dim)
    return slabs.at[ids, kv].get(mode="promise_in_bounds").swapaxes(1, 2).astype(jnp.float32)


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


def _online_softmax(
    state: tuple[jax.Array, jax.Array, jax.Array],
    scores: jax.Array,  # f32[seqs, num_kv_heads, rows, block]
    v: jax.Array,  # f32[seqs, num_kv_heads, block, head_dim]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Folds one block into (weighted sum, peak, total)."""
    acc, peak, total = state
    new_peak = jnp.maximum(peak, scores.max(axis=-1))
    base = jnp.where(jnp.isneginf(new_peak), 0.0, new_peak)  # nothing seen yet: -inf - -inf is NaN
    weights = jnp.exp(scores - base[..., None])
    shrink = jnp.exp(peak - base)
    acc = acc * shrink[..., None] + _dot(weights, v, contract=2)
    return acc, new_peak, total * shrink + weights.sum(axis=-1)


def _dot(a: jax.Array, b: jax.Array, contract: int) -> jax.Array:
    """a's last axis with axis `contract` of b, both led by [seqs, num_kv_heads]; float32."""
    # HIGHEST: accelerators would otherwise round float32 operands to a faster format.
    dims = (((3,), (contract,)), ((0, 1), (0, 1)))
    return lax.dot_general(a, b, dims, precision=lax.Precision.HIGHEST)


def _add_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """An extra logit in the denominator; rows that saw nothing stay empty."""
    with_sink = jnp.where(jnp.isneginf(lse), -jnp.inf, jnp.logaddexp(lse, sinks[None]))
    shrink = jnp.where(jnp.isneginf(lse), 0.0, jnp.exp(lse - with_sink))
    return out * shrink[..., None], with_sink
