"""The host's check of metadata VALUES, for tests and debugging. Shapes are checked at trace time.

Pure NumPy: it reads the arrays, so it must not be called on tracers.
"""

import numpy as np
from numpy.typing import ArrayLike


def check_metadata(
    page_table: ArrayLike,
    kv_lens: ArrayLike,
    cu_q_lens: ArrayLike,
    num_seqs: ArrayLike,
    num_pages: int,
    page_size: int,
) -> None:
    """Raises `ValueError` unless `paged_attention` can follow the metadata.

    Args:
      page_table: i32[max_seqs, pages_per_seq]; only the entries that a length reaches are checked.
      kv_lens: i32[max_seqs], new tokens included.
      cu_q_lens: i32[max_seqs + 1], prefix sums of the new tokens.
      num_seqs: i32[], live rows.
      num_pages: pages of the pool.
      page_size: positions of a page.
    """
    table, lens, starts = (np.asarray(a) for a in (page_table, kv_lens, cu_q_lens))
    live = int(np.asarray(num_seqs))
    if not 0 <= live <= len(lens):
        raise ValueError(f"`num_seqs` must be in [0, {len(lens)}], the rows. Got {live}.")
    if starts[0] != 0:
        raise ValueError(f"`cu_q_lens` must start with 0. Got {starts[0]}.")
    for s in range(live):
        _check_sequence(s, int(lens[s]), int(starts[s + 1] - starts[s]))
        _check_pages(s, table[s], -(-int(lens[s]) // page_size), num_pages)


def _check_sequence(s: int, kv_len: int, q_len: int) -> None:
    if q_len < 0:
        raise ValueError(
            f"`cu_q_lens` must not fall: sequence {s} has {q_len} new tokens. Make each entry at "
            f"least the one before it."
        )
    if kv_len < q_len:
        raise ValueError(
            f"`kv_lens` must include the new tokens: sequence {s} has {q_len} of them. "
            f"Got {kv_len}."
        )


def _check_pages(s: int, row: np.ndarray, num_used: int, num_pages: int) -> None:
    if num_used > len(row):
        raise ValueError(
            f"`page_table` must have a column for each page of a sequence: sequence {s} needs "
            f"{num_used}. Got {len(row)} columns."
        )
    used = row[:num_used]
    bad = np.flatnonzero((used < 0) | (used >= num_pages))
    if bad.size:
        raise ValueError(
            f"`page_table` must hold page ids in [0, {num_pages}) up to a sequence's length. "
            f"Got {used[bad[0]]} at [{s}, {bad[0]}]."
        )
