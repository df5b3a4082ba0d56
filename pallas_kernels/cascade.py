"""Cascade: which sequences of a batch share a long run of pages, read from the page table alone.

Sequences with one query row whose first pages are the same form a group. The shared run is computed
once for all of them, as tiles whose rows come from several sequences; each then adds its own
suffix, and `merge_states` joins the two. Pure integer arithmetic, like the work plan.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.work_plan import QueryTiles, TileShape, places

MIN_SHARED = 256  # positions: a shorter run is in the L2 cache anyway
MIN_MEMBERS = 4  # sequences: fewer save less than the second launch costs


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Groups:
    """Sequences in an order in which the members of a group are neighbours."""

    order: jax.Array  # i32[max_seqs], sequence at each place
    member: jax.Array  # i32[max_seqs], number of each place in its group; -1: in none
    shared_lens: jax.Array  # i32[max_seqs], by SEQUENCE: positions read with its group; 0: none


def find_groups(
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    page_size: int,
    multiple: int,
) -> Groups:
    """Groups of decoding sequences that share at least `MIN_SHARED` leading positions.

    Args:
      page_table: i32[max_seqs, pages_per_seq].
      kv_lens, cu_q_lens, num_seqs: as `paged_attention` takes them.
      page_size: positions of a page.
      multiple: of page_size; shared runs are multiples of it, whole KV tiles.
    """
    max_seqs, pages_per_seq = page_table.shape
    column = -(-MIN_SHARED // page_size) - 1  # sequences of a group agree in this page
    live = jnp.arange(max_seqs, dtype=jnp.int32) < num_seqs
    decodes = live & (cu_q_lens[1:] - cu_q_lens[:-1] == 1)
    # Whole pages before the last position: the newest token's page is never a shared one.
    full = jnp.where(decodes, (kv_lens - 1) // page_size, 0)
    long = full > column
    if column >= pages_per_seq:
        long = jnp.zeros_like(long)
    key = jnp.where(long, page_table[:, min(column, pages_per_seq - 1)], jnp.iinfo(jnp.int32).max)
    order = jnp.argsort(key).astype(jnp.int32)
    columns = jnp.arange(pages_per_seq, dtype=jnp.int32)[None]
    table, full, long = page_table[order], full[order], long[order]
    both = jnp.minimum(full[1:], full[:-1])
    equal = (table[1:] == table[:-1]) & (columns < both[:, None])
    common = jnp.cumprod(equal, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
    common = common * page_size // multiple * multiple  # positions, of neighbours
    linked = (common >= MIN_SHARED) & long[1:] & long[:-1]
    start = jnp.concatenate([jnp.ones((1,), bool), ~linked])
    run = jnp.cumsum(start, dtype=jnp.int32) - 1  # i32[max_seqs]
    members = jnp.zeros((max_seqs,), jnp.int32).at[run].add(1)
    most = jnp.iinfo(jnp.int32).max
    shortest = jnp.full((max_seqs,), most, jnp.int32)
    shortest = shortest.at[run[1:]].min(jnp.where(linked, common, most))
    grouped = (members >= MIN_MEMBERS)[run]
    place = jnp.arange(max_seqs, dtype=jnp.int32)
    member = place - jax.lax.cummax(jnp.where(start, place, 0))
    shared = jnp.where(grouped, shortest[run], 0)
    shared_lens = jnp.zeros((max_seqs,), jnp.int32).at[order].set(shared)
    return Groups(order, jnp.where(grouped, member, -1), shared_lens)


def plan_prefix(
    groups: Groups, cu_q_lens: jax.Array, shape: TileShape, num_tokens: int
) -> QueryTiles:
    """Tiles over the shared runs: each holds tokens of several members of one group.

    All of them see the whole run, so the tile is placed where causality masks nothing.
    """
    max_seqs, per_tile = groups.order.shape[0], shape.tokens_per_tile
    grouped = groups.member >= 0
    opens = grouped & (groups.member % per_tile == 0)  # the first token of a tile
    tile = jnp.cumsum(opens, dtype=jnp.int32) - 1
    count = tile[-1] + 1
    at = jnp.where(grouped, tile * per_tile + groups.member % per_tile, max_seqs * per_tile)
    tokens = jnp.full((max_seqs * per_tile,), num_tokens, jnp.int32)
    tokens = tokens.at[at].set(cu_q_lens[:-1][groups.order], mode="drop")
    seq = jnp.zeros((max_seqs,), jnp.int32)
    seq = seq.at[jnp.where(opens, tile, max_seqs)].set(groups.order, mode="drop")
    place = jnp.arange(max_seqs, dtype=jnp.int32)
    kv_end = jnp.where(place < count, groups.shared_lens[seq], 0)
    tokens = tokens.reshape(max_seqs, per_tile)
    return QueryTiles(
        tokens=tokens,
        seq=seq,
        position=kv_end,
        kv_begin=jnp.zeros_like(kv_end),
        kv_end=kv_end,
        count=count,
        place=places(tokens, num_tokens),
        shape=shape,
    )
