"""`check_metadata`: every way in which metadata values can be wrong has its message."""

from typing import Any

import numpy as np
import pytest

import pallas_kernels

GOOD: dict[str, Any] = {
    "page_table": np.array([[3, 4, -1], [9, -7, 10**6], [-1, -1, -1]], np.int32),
    "kv_lens": np.array([8, 3, -5], np.int32),
    "cu_q_lens": np.array([0, 2, 5, -99], np.int32),
    "num_seqs": np.array(2, np.int32),
    "num_pages": 10,
    "page_size": 4,
}


def test_garbage_past_the_lengths_is_accepted() -> None:
    pallas_kernels.check_metadata(**GOOD)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_seqs": 4}, r"`num_seqs` must be in \[0, 3\], the rows. Got 4"),
        ({"cu_q_lens": [1, 2, 5, 5]}, "`cu_q_lens` must start with 0. Got 1"),
        ({"cu_q_lens": [0, 2, 1, 0]}, "`cu_q_lens` must not fall: sequence 1 has -1 new tokens"),
        ({"kv_lens": [8, 2, 0]}, "`kv_lens` must include the new tokens: sequence 1 has 3"),
        ({"kv_lens": [13, 3, 0]}, "`page_table` must have a column for each page.*needs 4. Got 3"),
        ({"kv_lens": [9, 3, 0]}, r"`page_table` must hold page ids in \[0, 10\).*-1 at \[0, 2\]"),
        ({"num_pages": 9}, r"`page_table` must hold page ids in \[0, 9\).*Got 9 at \[1, 0\]"),
    ],
)
def test_wrong_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pallas_kernels.check_metadata(**(GOOD | changes))
