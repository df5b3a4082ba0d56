"""From the items of an interpreted GPU kernel to tokens, in float64.

Owns the merge of cut rows and what every kernel promises of its items; knows no kernel.
"""

import itertools

import jax.numpy as jnp
import numpy as np

from pallas_kernels import reference
from pallas_kernels.work_plan import BEGIN, END, QueryTiles, WorkList, unpack_rows


def join_items(
    o: np.ndarray, lse: np.ndarray, work: WorkList, *, empties_say_so: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """o [num_items, rows, D], lse [num_items, rows]: the items of each row as one, in float64.

    Asserts that what was run is finite, in rows that are padding too, and that empty items among
    it have lse -inf.
    """
    items, bounds = np.asarray(work.items), np.asarray(work.row_items)
    empty = items[:, BEGIN] == items[:, END]
    ran = int(work.worker_items[-1])  # nobody runs what is empty at the end
    assert empty[ran:].all()
    assert np.isfinite(o[~empty]).all()
    if empties_say_so:
        assert np.isneginf(lse[:ran][empty[:ran]]).all()
    out = np.zeros((len(bounds) - 1, *o.shape[1:]))
    total = np.full((len(bounds) - 1, *lse.shape[1:]), -np.inf)
    for row, (first, last) in enumerate(itertools.pairwise(bounds)):
        mine = np.arange(first, last)[~empty[first:last]]
        if mine.size:
            out[row], total[row] = reference.merge_states(o[mine], lse[mine])
    return out, total


def to_tokens(
    out: np.ndarray, lse: np.ndarray, tiles: QueryTiles, num_q_heads: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows [num_tiles * heads, rows, ...] as out f32[num_tokens, num_q_heads, D] and lse."""

    def unpack(rows: np.ndarray, empty: float) -> np.ndarray:
        tiled = jnp.asarray(rows, jnp.float32).reshape(tiles.num_tiles, -1, *rows.shape[1:])
        return np.asarray(unpack_rows(tiled.swapaxes(0, 1), tiles, num_q_heads, empty))

    return unpack(out, 0.0), unpack(lse, -np.inf)
