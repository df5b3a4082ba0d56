"""The host's check of metadata VALUES, for tests and debugging. Shapes are checked at trace time.

It reads the arrays, so it must not be called on tracers.
"""

from typing import Any

import numpy as np
from jax.core import Tracer
from numpy.typing import ArrayLike


def check_metadata(
    page_table: ArrayLike,
    kv_lens: ArrayLike,
    cu_q_lens: ArrayLike,
    num_seqs: ArrayLike,
    num_pages: int,
    page_size: int,
) -> None:
    """Raises unless `paged_attention` can follow the metadata.

    Args:
      page_table: i32[max_seqs, pages_per_seq]; only the entries that a length reaches are checked.
      kv_lens: i32[max_seqs], new tokens included.
      cu_q_lens: i32[max_seqs + 1], prefix sums of the new tokens.
      num_seqs: i32[], live rows.
      num_pages: pages of the pool.
      page_size: positions of a page.

    Raises:
      ValueError: a shape or a value is wrong.
      TypeError: something holds no integers, or has no values yet because it is traced.
    """
    table = _integers("page_table", page_table, 2)
    lens = _integers("kv_lens", kv_lens, 1, len(table))
    starts = _integers("cu_q_lens", cu_q_lens, 1, len(table) + 1)
    live = int(_integers("num_seqs", num_seqs, 0))
    for name, size in (("num_pages", num_pages), ("page_size", page_size)):
        if int(_integers(name, size, 0)) < 1:
            raise ValueError(f"`{name}` must be at least 1. Got {size}.")
    if not 0 <= live <= len(lens):
        raise ValueError(f"`num_seqs` must be in [0, {len(lens)}], the rows. Got {live}.")
    if starts[0] != 0:
        raise ValueError(f"`cu_q_lens` must start with 0. Got {starts[0]}.")
    for s in range(live):
        _check_sequence(s, int(lens[s]), int(starts[s + 1] - starts[s]))
        _check_pages(s, table[s], -(-int(lens[s]) // page_size), num_pages)


def _integers(name: str, value: Any, ndim: int, length: int | None = None) -> np.ndarray:
    """NumPy's array of `value`, checked; `length` is of its only axis."""
    if isinstance(value, Tracer):
        raise TypeError(f"`{name}` must have values: `check_metadata` is not for traced arrays.")
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        array = np.asarray(None)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"`{name}` must hold integers. Got {array.dtype}.")
    if array.ndim != ndim or (length is not None and len(array) != length):
        wanted = f"shape ({length},)" if length is not None else f"{ndim} dimensions"
        raise ValueError(f"`{name}` must have {wanted}. Got shape {array.shape}.")
    return array


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
