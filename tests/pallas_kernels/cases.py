"""Random ragged batches whose unused memory is poison: NaN in pages, garbage in table tails.

Owns the generators and the error measure that the kernel tests share; asserts nothing.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

GARBAGE = np.array([-(2**31), 2**31 - 1, -1, 10**6], np.int32)  # page ids that name nothing


@dataclass(frozen=True, slots=True)
class Shape:
    """Static sizes: one compilation serves every case of a shape."""

    page_size: int
    num_kv_heads: int
    group: int
    head_dim: int
    max_seqs: int
    num_tokens: int
    max_len: int

    @property
    def num_q_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def pages_per_seq(self) -> int:
        return -(-self.max_len // self.page_size) + 2  # a tail that no sequence reaches


@dataclass(frozen=True, slots=True)
class Batch:
    """The six array arguments of `paged_attention`, in NumPy."""

    q: np.ndarray
    kv_pages: np.ndarray
    page_table: np.ndarray
    kv_lens: np.ndarray
    cu_q_lens: np.ndarray
    num_seqs: np.ndarray

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return (
            self.q, self.kv_pages, self.page_table, self.kv_lens, self.cu_q_lens, self.num_seqs
        )  # fmt: skip


def random_batch(shape: Shape, rng: np.random.Generator, dtype: Any = np.float32) -> Batch:
    """Lengths around page edges, every mix of idle, decode, chunk and whole-prompt rows."""
    num_seqs = int(rng.integers(1, shape.max_seqs + 1))
    kv_lens, q_lens = random_lengths(shape, rng, num_seqs)
    return make_batch(shape, rng, kv_lens, q_lens, dtype)


def random_lengths(
    shape: Shape, rng: np.random.Generator, num_seqs: int
) -> tuple[list[int], list[int]]:
    page, room = shape.page_size, shape.num_tokens
    kv_lens, q_lens = [], []
    for _ in range(num_seqs):
        edges = (0, 1, page - 1, page, page + 1, shape.max_len, *rng.integers(1, shape.max_len, 4))
        kv_len = min(int(rng.choice(edges)), shape.max_len)
        kind = rng.choice(["idle", "decode", "prefill", "chunk"])
        q_len = {"idle": 0, "decode": 1, "prefill": kv_len, "chunk": int(rng.integers(0, 99))}[kind]
        q_len = min(q_len, kv_len, room)
        room -= q_len
        kv_lens.append(kv_len)
        q_lens.append(q_len)
    return kv_lens, q_lens


def make_batch(
    shape: Shape,
    rng: np.random.Generator,
    kv_lens: list[int],
    q_lens: list[int],
    dtype: Any = np.float32,
) -> Batch:
    """A batch of these lengths; pages in random order, everything else poison."""
    live, idle = len(kv_lens), shape.max_seqs - len(kv_lens)
    num_pages = shape.max_seqs * shape.pages_per_seq + 2
    size = (num_pages, 2, shape.num_kv_heads, shape.page_size, shape.head_dim)
    pool = np.full(size, np.nan, np.float32)
    pool[0] = 0  # the null page
    free = list(rng.permutation(np.arange(1, num_pages)))
    table = rng.choice(GARBAGE, (shape.max_seqs, shape.pages_per_seq))
    for s, kv_len in enumerate(kv_lens):
        for column, start in enumerate(range(0, kv_len, shape.page_size)):
            table[s, column] = free.pop()
            used = min(shape.page_size, kv_len - start)
            values = rng.standard_normal((2, shape.num_kv_heads, used, shape.head_dim))
            pool[table[s, column], :, :, :used] = values
    q = np.full((shape.num_tokens, shape.num_q_heads, shape.head_dim), np.nan, np.float32)
    q[: sum(q_lens)] = rng.standard_normal((sum(q_lens), *q.shape[1:]))
    return Batch(
        q.astype(dtype),
        pool.astype(dtype),
        table,
        np.array([*kv_lens, *rng.integers(-9, 10**6, idle)], np.int32),
        np.array([0, *np.cumsum(q_lens), *rng.integers(-9, 10**6, idle)], np.int32)[
            : shape.max_seqs + 1
        ],
        np.array(live, np.int32),
    )


def with_per_head(
    shape: Shape, options: dict[str, Any], rng: np.random.Generator
) -> dict[str, Any]:
    """Random values for the options that are arrays."""
    values = dict(options)
    if "sinks" in values:
        values["sinks"] = rng.standard_normal(shape.num_q_heads).astype(np.float32)
    if "alibi_slopes" in values:  # as models have them: 2^-1 .. 2^-8
        values["alibi_slopes"] = (2.0 ** -rng.uniform(1, 8, shape.num_q_heads)).astype(np.float32)
    return values


def error(got: Any, expected: np.ndarray) -> float:
    """Largest difference relative to max(1, |expected|); infinities must agree exactly."""
    got = np.asarray(got, np.float64)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(got[~finite], expected[~finite])
    difference = np.abs(got[finite] - expected[finite])
    return float((difference / np.maximum(1, np.abs(expected[finite]))).max(initial=0))
