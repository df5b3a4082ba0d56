"""Decoding sequences that share their first pages: read once in `xla`, and nothing else changes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import paged_attention_xla, reference
from tests.pallas_kernels.cases import Batch, Shape, error, make_batch

SHAPE = Shape(16, 3, 3, 64, 6, 70, 700)


def sharing(
    kv_lens: list[int], num_shared: int, dtype: Any = np.float32, *, chunk: int = 0
) -> Batch:
    """Sequences that decode, the first `num_shared` pages of all being those of the first.

    `chunk`: one more sequence, of whose prompt so many tokens run.
    """
    q_lens = [1] * len(kv_lens)
    if chunk:
        kv_lens, q_lens = [*kv_lens, chunk + 40], [*q_lens, chunk]
    batch = make_batch(SHAPE, np.random.default_rng(7), kv_lens, q_lens, dtype)
    for s, q_len in enumerate(q_lens):
        if q_len == 1:
            batch.page_table[s, :num_shared] = batch.page_table[0, :num_shared]
    return batch


def shared_length(batch: Batch) -> int:
    """What `xla` reads once."""
    q_lens = batch.cu_q_lens[1:] - batch.cu_q_lens[:-1]
    lens = np.where(q_lens == 1, batch.kv_lens, 0)
    order = np.argsort(-lens, kind="stable")
    context = paged_attention_xla._Context(
        jnp.asarray(batch.kv_pages), None, jnp.asarray(batch.page_table),
        None, 1.0, None, None, jnp.float32, 128,
    )  # fmt: skip
    found = paged_attention_xla._shared_length(
        context, jnp.asarray(order, jnp.int32), jnp.asarray(lens[order], jnp.int32)
    )
    return int(found)


@pytest.mark.parametrize(
    ("kv_lens", "num_shared", "expected"),
    [
        ([600, 520, 641, 513], 32, 512),
        ([600, 520, 641, 513], 31, 384),  # whole blocks of 128 only
        ([600, 520, 641, 512], 32, 384),  # its newest position is in the last of those pages
        ([600, 520, 641, 257], 32, 256),
        ([600, 520, 641, 256], 32, 0),  # 255 are too few
        ([600, 520, 641], 32, 0),  # too few sequences
        ([600, 520, 641, 700], 0, 0),
    ],
)
def test_whole_blocks_that_all_share_are_read_once(
    kv_lens: list[int], num_shared: int, expected: int
) -> None:
    assert shared_length(sharing(kv_lens, num_shared)) == expected
    assert shared_length(sharing(kv_lens, num_shared, chunk=30)) == expected


def test_what_lies_behind_a_sequence_is_not_shared() -> None:
    batch = sharing([600, 600, 600, 290], 0)
    batch.page_table[1:] = batch.page_table[:1]  # the short one's tail, too
    assert shared_length(batch) == 256


@pytest.mark.parametrize(
    "options", [{}, {"soft_cap": 4.0}, {"sinks": True, "alibi_slopes": True}], ids=str
)
@pytest.mark.parametrize(("dtype", "limit"), [(jnp.float32, 1e-5), (jnp.bfloat16, 1e-5)])
def test_shared_pages_change_no_value(options: dict[str, Any], dtype: Any, limit: float) -> None:
    rng = np.random.default_rng(3)
    heads = SHAPE.num_q_heads
    values = dict(options)
    if "sinks" in values:
        values["sinks"] = rng.standard_normal(heads).astype(np.float32)
        values["alibi_slopes"] = (2.0 ** -rng.uniform(1, 8, heads)).astype(np.float32)

    @jax.jit
    def attend(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        return pallas_kernels.paged_attention(  # pyright: ignore[reportReturnType]
            *arrays, return_lse=True, implementation="xla", out_dtype=jnp.float32, **values
        )

    for kv_lens, num_shared in (([600, 520, 641, 513], 32), ([300, 290, 310, 640, 289], 17)):
        for chunk in (0, 30):
            batch = sharing(kv_lens, num_shared, dtype, chunk=chunk)
            assert shared_length(batch) > 0
            out, lse = attend(*batch.arrays)
            expected, expected_lse = reference.paged_attention(
                *batch.arrays, return_lse=True, **values
            )
            assert error(out, expected) < limit
            assert error(lse, expected_lse) < 1e-5
