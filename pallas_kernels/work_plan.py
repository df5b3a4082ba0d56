"""Work plans: which query rows form a tile, which keys it reads, and who computes what.

A plan is pure integer arithmetic on the step's metadata. It is made once a step, on the device, and
all layers share it. Knows nothing of queries, keys or values, nor of how a kernel computes.

  token   a row of q: num_q_heads vectors
  tile    up to `tokens_per_tile` tokens of ONE page table row; what a kernel holds at once. Its
          rows are token-major: row r is query head r % group of token r // group
  head    a KV head, or one of the `passes` in which a large group shares a KV head
  row     (tile, head); row number tile * heads + head
  item    a run of KV tiles of one row; rows that are cut have several
"""

import functools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

ITEM_WORDS = 8
TILE, HEAD, BEGIN, END, SEQ, POSITION, KV_END = range(7)  # words of an item
# One fused reduction. The default is a loop, which a GPU runs as many small launches.
_SEARCH = "compare_all"


@dataclass(frozen=True, slots=True)
class TileShape:
    """Static sizes of the tiles of one class; hashable."""

    group: int  # query heads of one head of the kernel
    passes: int  # heads of the kernel for each KV head
    tokens_per_tile: int
    rows: int  # of a tile: group * tokens_per_tile, rounded up to what the hardware takes
    kv_tile: int  # positions of a KV tile

    @classmethod
    def fit(cls, group: int, *, rows: int, multiple: int, kv_tile: int) -> "TileShape":
        """Tiles of at most `rows` rows, a multiple of `multiple`; `group` query heads a KV head.

        A group larger than `rows` is divided over several passes.
        """
        passes = -(-group // rows)
        share = -(-group // passes)
        tokens = max(1, rows // share)
        return cls(share, passes, tokens, -(-share * tokens // multiple) * multiple, kv_tile)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class QueryTiles:
    """Tiles of one class; those that hold tokens come first."""

    tokens: jax.Array  # i32[num_tiles, tokens_per_tile], rows of q; num_tokens where there is none
    seq: jax.Array  # i32[num_tiles], row of the page table
    position: jax.Array  # i32[num_tiles], of the first token; token j is at position + j
    kv_begin: jax.Array  # i32[num_tiles], first position that any token sees
    kv_end: jax.Array  # i32[num_tiles], one past the last; equal to kv_begin: nothing to do
    count: jax.Array  # i32[], tiles that hold tokens
    place: jax.Array  # i32[num_tokens], tile * tokens_per_tile + j of each token; -1: other class
    shape: TileShape = field(metadata={"static": True})

    @property
    def num_tiles(self) -> int:
        """Static bound."""
        return self.seq.shape[0]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class WorkList:
    """Items in row order, dealt to workers (CTAs) in contiguous runs of about equal work.

    An item is eight words: tile, head, begin and end (KV tiles; equal: empty), then its tile's
    seq, position and kv_end, so that a kernel reads one row of it and nothing else.
    """

    items: jax.Array  # i32[num_items, ITEM_WORDS]
    worker_items: jax.Array  # i32[workers + 1], worker w runs items [w_items[w], w_items[w + 1])
    row_items: jax.Array  # i32[num_tiles * heads + 1], items of each row, likewise; all are run
    split: bool = field(metadata={"static": True})  # False: item i is row i, never cut


@functools.partial(
    jax.jit, static_argnames=("shape", "num_tokens", "above", "up_to", "sliding_window")
)
def plan_tiles(
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    shape: TileShape,
    num_tokens: int,
    above: int = 0,
    up_to: int | None = None,
    sliding_window: int | None = None,
    kv_begin: jax.Array | None = None,
) -> QueryTiles:
    """Tiles of the sequences whose number of query rows is in (above, up_to].

    Args:
      kv_lens: i32[max_seqs], new tokens included.
      cu_q_lens: i32[max_seqs + 1].
      num_seqs: i32[].
      shape: static sizes.
      num_tokens: rows of q, padding included.
      above: exclusive bound.
      up_to: inclusive bound; None: none.
      sliding_window: a query sees so many positions, its own included.
      kv_begin: i32[max_seqs], multiples of kv_tile: positions before are someone else's part.
    """
    max_seqs, per_tile = kv_lens.shape[0], shape.tokens_per_tile
    starts = cu_q_lens[:-1]
    live = jnp.arange(max_seqs, dtype=jnp.int32) < num_seqs
    q_lens = jnp.where(live, cu_q_lens[1:] - starts, 0)
    most = num_tokens if up_to is None else up_to
    q_lens = jnp.where((q_lens > above) & (q_lens <= most), q_lens, 0)
    one_each = most <= per_tile
    bound = max_seqs if one_each else num_tokens // per_tile + max_seqs
    tiles = (q_lens + per_tile - 1) // per_tile
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    tile = jnp.arange(bound, dtype=jnp.int32)
    seq = jnp.searchsorted(ends, tile, side="right", method=_SEARCH).astype(jnp.int32)
    seq = jnp.minimum(seq, max_seqs - 1)
    offset = (tile - (ends[seq] - tiles[seq])) * per_tile
    used = tile < ends[-1]
    held = jnp.where(used, jnp.minimum(q_lens[seq] - offset, per_tile), 0)
    position = jnp.where(used, kv_lens[seq] - q_lens[seq] + offset, 0)
    end = position + held
    begin = jnp.zeros_like(position)
    if sliding_window is not None:
        begin = jnp.maximum(begin, position - sliding_window + 1)
    if kv_begin is not None:
        begin = jnp.maximum(begin, kv_begin[seq])
    j = jnp.arange(per_tile, dtype=jnp.int32)[None]
    tokens = jnp.where(j < held[:, None], (starts[seq] + offset)[:, None] + j, num_tokens)
    return QueryTiles(
        tokens=tokens,
        seq=jnp.where(used, seq, 0),
        position=position,
        kv_begin=jnp.minimum(begin, end),
        kv_end=end,
        count=ends[-1],
        place=places(tokens, num_tokens),
        shape=shape,
    )


def places(tokens: jax.Array, num_tokens: int) -> jax.Array:
    """i32[num_tokens]: where in `tokens` i32[num_tiles, tokens_per_tile] each token is, or -1."""
    at = jnp.arange(tokens.size, dtype=jnp.int32)
    return jnp.full((num_tokens,), -1, jnp.int32).at[tokens.reshape(-1)].set(at, mode="drop")


@functools.partial(
    jax.jit, static_argnames=("heads", "workers", "split", "min_tiles", "chunk", "max_kv_tiles")
)
def plan_work(
    tiles: QueryTiles,
    *,
    heads: int,
    workers: int,
    split: bool,
    min_tiles: int = 4,
    chunk: int | None = None,
    max_kv_tiles: int | None = None,
) -> WorkList:
    """Deals the rows of `tiles` to `workers`.

    All KV tiles of all rows lie on one line, which is cut into equal runs, one a worker. Without
    `split` a row belongs whole to the worker in whose run it begins. With `chunk` the cuts are
    at multiples of `chunk` KV tiles of each row instead, whatever else the batch holds.

    Args:
      tiles: of one class.
      heads: num_kv_heads * passes.
      workers: CTAs that run at once.
      split: cut rows; their parts have to be merged.
      min_tiles: a run is at least so long.
      chunk: with `split`: KV tiles of an item, fixed.
      max_kv_tiles: with `chunk`: most KV tiles that a row can have.
    """
    kv_tile = tiles.shape.kv_tile
    first = jnp.repeat(tiles.kv_begin // kv_tile, heads)
    last = jnp.repeat(-(-tiles.kv_end // kv_tile), heads)
    last = jnp.where(jnp.repeat(tiles.kv_end > tiles.kv_begin, heads), last, first)
    ends = jnp.cumsum(last - first, dtype=jnp.int32)
    starts = ends - (last - first)
    total = ends[-1]
    run = jnp.maximum(min_tiles if split else 1, -(-total // workers))
    deal = jnp.minimum(jnp.arange(workers + 1, dtype=jnp.int32) * run, total)
    if split and chunk is not None:
        if max_kv_tiles is None:
            raise ValueError("`max_kv_tiles` must be given with `chunk`. Got None.")
        row, begin, end = _chunks(first, last, chunk, -(-max_kv_tiles // chunk))
    elif split:
        row, begin, end = _cuts(first, starts, ends, deal[:-1])
    else:
        row, begin, end = jnp.arange(first.size, dtype=jnp.int32), first, last
    items = jnp.stack(_words(tiles, row, heads, begin, end), axis=1)
    line = starts[row] + begin - first[row]  # where each item begins
    # Nobody runs the empty items at the end: they are of rows past the live ones, and many.
    row = jnp.where(line < total, row, first.size)
    worker = jnp.searchsorted(line, deal, side="left", method=_SEARCH).astype(jnp.int32)
    rows = jnp.arange(first.size + 1, dtype=jnp.int32)
    return WorkList(
        items=items,
        worker_items=worker,
        row_items=jnp.searchsorted(row, rows, side="left", method=_SEARCH).astype(jnp.int32),
        split=split,
    )


def _cuts(
    first: jax.Array, starts: jax.Array, ends: jax.Array, deal: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """row, begin and end of the pieces between row starts and the cuts at `deal`."""
    cuts = jnp.sort(jnp.concatenate([starts, deal]))
    upto = jnp.append(cuts[1:], ends[-1])
    row = jnp.searchsorted(ends, cuts, side="right", method=_SEARCH).astype(jnp.int32)
    row = jnp.minimum(row, ends.size - 1)
    offset = first[row] - starts[row]
    return row, cuts + offset, upto + offset


def _chunks(
    first: jax.Array, last: jax.Array, chunk: int, most: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """row, begin and end of the pieces between multiples of `chunk`, `most` a row."""
    row = jnp.repeat(jnp.arange(first.size, dtype=jnp.int32), most)
    at = jnp.tile(jnp.arange(most, dtype=jnp.int32), first.size) + (first // chunk)[row]
    begin = jnp.clip(at * chunk, first[row], last[row])
    return row, begin, jnp.clip((at + 1) * chunk, first[row], last[row])


def _words(
    tiles: QueryTiles, row: jax.Array, heads: int, begin: jax.Array, end: jax.Array
) -> list[jax.Array]:
    tile = row // heads
    of_tile = [array[tile] for array in (tiles.seq, tiles.position, tiles.kv_end)]
    return [tile, row % heads, begin, end, *of_tile, jnp.zeros_like(tile)]


def pack_queries(q: jax.Array, tiles: QueryTiles, num_kv_heads: int, width: int) -> jax.Array:
    """q [num_tokens, num_q_heads, head_dim] as tiles [heads, num_tiles, rows, width].

    Rows without a token and columns past head_dim are zero.
    """
    shape, head_dim = tiles.shape, q.shape[2]
    group = q.shape[1] // num_kv_heads
    q = q.reshape(-1, num_kv_heads, group, head_dim)
    padding = shape.group * shape.passes - group
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padding), (0, width - head_dim)))
    q = q.reshape(q.shape[0], num_kv_heads * shape.passes, shape.group, width)
    q = q.at[tiles.tokens].get(mode="fill", fill_value=0)  # [num_tiles, tokens, heads, ...]
    q = q.transpose(2, 0, 1, 3, 4).reshape(q.shape[2], tiles.num_tiles, -1, width)
    return jnp.pad(q, ((0, 0), (0, 0), (0, shape.rows - q.shape[2]), (0, 0)))


def unpack_rows(tiled: jax.Array, tiles: QueryTiles, num_q_heads: int, empty: float) -> jax.Array:
    """[heads, num_tiles, rows, ...] as [num_tokens, num_q_heads, ...]; `empty` in other rows."""
    shape, rest = tiles.shape, tiled.shape[3:]
    heads, num_tiles = tiled.shape[:2]
    tiled = tiled[:, :, : shape.tokens_per_tile * shape.group]
    tiled = tiled.reshape(heads, num_tiles * shape.tokens_per_tile, shape.group, *rest)
    rows = tiled[:, jnp.maximum(tiles.place, 0)]  # [heads, num_tokens, group, ...]
    rows = jnp.moveaxis(rows, 0, 1)
    num_kv_heads = heads // shape.passes
    rows = rows.reshape(-1, num_kv_heads, shape.passes * shape.group, *rest)
    rows = rows[:, :, : num_q_heads // num_kv_heads].reshape(-1, num_q_heads, *rest)
    mine = (tiles.place >= 0).reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.where(mine, rows, jnp.asarray(empty, rows.dtype))
