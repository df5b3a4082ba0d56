"""`batch_invariant=True` on the XLA path: a row has the same bits in whatever batch it is.

A CPU's own kernels are always so.

Not only among other sequences: also in chunks of any size, decoded, in buckets of other sizes, on
other pages and in pages of another size.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention, reference
from pallas_kernels.paged_attention_xla import paged_attention_xla
from tests.pallas_kernels.cases import GARBAGE, error

LENGTHS = (150, 64, 97, 5, 131, 33)  # positions of the sequences of a world
GROUP, HEADS, DIM = 3, 2, 32
BUCKETS = [(8, 5, 40, 1), (24, 24, 12, None), (300, 7, 12, None)]  # tokens, seqs, columns, promise
VARIANTS: list[tuple[dict[str, Any], Any]] = [
    ({}, jnp.float32),
    ({"sliding_window": 40, "soft_cap": 3.0, "sinks": True, "alibi_slopes": True}, jnp.bfloat16),
    ({"kv_scales": True}, jnp.int8),
]


@dataclass(frozen=True)
class World:
    """Sequences: queries, keys and values of every position."""

    q: list[np.ndarray]  # [length, num_q_heads, head_dim]
    kv: list[np.ndarray]  # [length, 2, num_kv_heads, head_dim]
    scales: list[np.ndarray]  # f32[length, 2, num_kv_heads]

    @classmethod
    def random(cls, rng: np.random.Generator, dtype: Any) -> "World":
        q, kv, scales = [], [], []
        for length in LENGTHS:
            rows = rng.standard_normal((length, GROUP * HEADS, DIM))
            q.append(rows.astype(np.float32 if dtype == jnp.int8 else dtype))
            vectors = rng.standard_normal((length, 2, HEADS, DIM)) * (
                30 if dtype == jnp.int8 else 1
            )
            kv.append(
                np.rint(vectors).astype(dtype) if dtype == jnp.int8 else vectors.astype(dtype)
            )
            scales.append(rng.uniform(0.01, 0.05, (length, 2, HEADS)).astype(np.float32))
        return cls(q, kv, scales)


STATIC = ("sliding_window", "soft_cap", "max_q_len", "is_native")


@functools.partial(jax.jit, static_argnames=STATIC)
def attend(
    *arrays: jax.Array, is_native: bool = False, **options: Any
) -> tuple[jax.Array, jax.Array]:
    if is_native:
        options |= {"return_lse": True, "implementation": "native_cpu"}
        return paged_attention(*arrays, **options)  # pyright: ignore[reportCallIssue]
    every = {"scale": None, "sliding_window": None, "soft_cap": None, "sinks": None}
    every |= {"alibi_slopes": None, "max_q_len": None} | options
    return paged_attention_xla(*arrays, **every, batch_invariant=True)  # pyright: ignore[reportCallIssue]


def with_values(options: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    values = {k: v for k, v in options.items() if k != "kv_scales"}
    if "sinks" in options:
        values["sinks"] = rng.standard_normal(GROUP * HEADS).astype(np.float32)
        values["alibi_slopes"] = (2.0 ** -rng.uniform(1, 8, GROUP * HEADS)).astype(np.float32)
    return values


def arguments(
    world: World,
    chunks: list[tuple[int, int, int]],  # sequence, first and last position + 1 of its query rows
    rng: np.random.Generator,
    *,
    bucket: tuple[int, int, int],  # num_tokens, max_seqs, pages_per_seq
    page_size: int = 16,
    num_pages: int = 48,
) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """The arrays of a call, and scales; pages at random, whatever is unused poisoned."""
    num_tokens, max_seqs, columns = bucket
    dtype = world.kv[0].dtype
    pool = np.zeros((num_pages, 2, HEADS, page_size, DIM), dtype)
    pool[:] = 127 if dtype == jnp.int8 else np.nan
    scales = np.full(pool.shape[:4], np.nan, np.float32)
    table = rng.choice(GARBAGE, (max_seqs, columns))
    free = list(rng.permutation(num_pages))
    q = np.full((num_tokens, *world.q[0].shape[1:]), np.nan, world.q[0].dtype)
    q_lens = [end - begin for _, begin, end in chunks]
    q[: sum(q_lens)] = np.concatenate([world.q[s][begin:end] for s, begin, end in chunks])
    for row, (s, _, end) in enumerate(chunks):
        for start in range(0, end, page_size):
            page = table[row, start // page_size] = free.pop()
            used = slice(start, min(start + page_size, end))
            count = used.stop - start
            pool[page, :, :, :count] = np.moveaxis(world.kv[s][used], 0, 2)
            scales[page, :, :, :count] = np.moveaxis(world.scales[s][used], 0, 2)
    idle = max_seqs - len(chunks)
    kv_lens = np.array([*(end for *_, end in chunks), *rng.integers(-9, 10**6, idle)], np.int32)
    starts = np.cumsum([0, *q_lens])
    cu_q_lens = np.array([*starts, *rng.integers(-9, 10**6, idle)], np.int32)
    return (q, pool, table, kv_lens, cu_q_lens, np.array(len(chunks), np.int32)), scales


def random_chunks(
    rng: np.random.Generator, bucket: tuple[int, int, int, int | None]
) -> list[tuple[int, int, int]]:
    room, max_seqs, _, most = bucket
    chunks = []
    for s in rng.permutation(len(LENGTHS))[: int(rng.integers(1, max_seqs + 1))]:
        end = int(rng.integers(1, LENGTHS[s] + 1))
        length = int(rng.choice([1, 1, 2, 7, 8, 9, 64, 65, end]))
        length = min(length, end, room, most or end)
        if length:
            chunks.append((int(s), end - length, end))
        room -= length
    return chunks


def whole(
    world: World, rng: np.random.Generator, *, is_native: bool = False, **values: Any
) -> list[Any]:
    """(out, lse) of all rows of each sequence, each computed alone as one prompt."""
    found = []
    for s, length in enumerate(LENGTHS):
        arrays, scales = arguments(world, [(s, 0, length)], rng, bucket=(150, 1, 10))
        scaled = {"kv_scales": scales} if world.kv[0].dtype == jnp.int8 else {}
        out, lse = (np.asarray(a) for a in attend(*arrays, is_native=is_native, **scaled, **values))
        expected, expected_lse = reference.paged_attention(
            *arrays, return_lse=True, **scaled, **values
        )
        narrow = 8e-3 if is_native else 4e-3  # its weights are bfloat16, too
        assert error(out, expected) < (1e-5 if out.dtype == np.float32 else narrow)
        assert error(lse, expected_lse) < 1e-5
        found.append((out[:length], lse[:length]))
    return found


def check_bits(options: dict[str, Any], dtype: Any, *, is_native: bool) -> None:
    rng = np.random.default_rng(7)
    world, values = World.random(rng, dtype), with_values(options, rng) | {"is_native": is_native}
    expected = whole(world, rng, **values)
    decoded = 0
    for bucket in BUCKETS:
        for _ in range(40):
            chunks = random_chunks(rng, bucket)
            arrays, scales = arguments(world, chunks, rng, bucket=bucket[:3])
            scaled = {"kv_scales": scales} if dtype == jnp.int8 else {}
            got = [np.asarray(a) for a in attend(*arrays, max_q_len=bucket[3], **scaled, **values)]
            for row, (s, begin, end) in enumerate(chunks):
                mine = slice(arrays[4][row], arrays[4][row + 1])
                for array, whole_array in zip(got, expected[s], strict=True):
                    np.testing.assert_array_equal(array[mine], whole_array[begin:end])
                decoded += end - begin == 1
    assert decoded > 100


@pytest.mark.parametrize(("options", "dtype"), VARIANTS, ids=lambda value: str(value)[:40])
def test_a_row_has_the_same_bits_in_every_batch(options: dict[str, Any], dtype: Any) -> None:
    check_bits(options, dtype, is_native=False)


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("options", [VARIANTS[0][0], VARIANTS[1][0]], ids=["plain", "everything"])
def test_a_row_of_a_cpus_own_kernels_has_the_same_bits_in_every_batch(
    options: dict[str, Any], dtype: Any
) -> None:
    check_bits(options, dtype, is_native=True)


def check_pages(dtype: Any, *, is_native: bool) -> None:
    rng = np.random.default_rng(8)
    world = World.random(rng, dtype)
    chunks = [(0, 140, 150), (4, 130, 131), (1, 0, 64)]
    found = []
    for page_size in (4, 64, 256):
        columns = -(-150 // page_size) + 1
        arrays, _ = arguments(
            world, chunks, rng, bucket=(80, 4, columns), page_size=page_size, num_pages=4 * columns
        )
        found.append([np.asarray(a) for a in attend(*arrays, is_native=is_native)])
    for out, lse in found[1:]:
        np.testing.assert_array_equal(out, found[0][0])
        np.testing.assert_array_equal(lse, found[0][1])


def test_a_row_has_the_same_bits_on_pages_of_every_size() -> None:
    check_pages(jnp.float32, is_native=False)


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_of_a_cpus_own_kernels_has_the_same_bits_on_pages_of_every_size(dtype: Any) -> None:
    check_pages(dtype, is_native=True)


def test_padding_rows_and_idle_batches_are_empty() -> None:
    rng = np.random.default_rng(9)
    world = World.random(rng, jnp.float32)
    arrays, _ = arguments(world, [(0, 9, 12), (3, 0, 5)], rng, bucket=(24, 24, 12))
    out, lse = (np.asarray(a) for a in attend(*arrays))
    assert np.all(out[8:] == 0)
    assert np.all(np.isneginf(lse[8:]))
    out, lse = (np.asarray(a) for a in attend(*arrays[:5], np.array(0, np.int32)))
    assert np.all(out == 0)
    assert np.all(np.isneginf(lse))


def test_nan_in_one_sequence_reaches_no_other() -> None:
    rng = np.random.default_rng(10)
    world = World.random(rng, jnp.float32)
    chunks = [(0, 9, 12), (3, 0, 5), (1, 40, 41)]
    arrays, _ = arguments(world, chunks, rng, bucket=(24, 24, 12))
    healthy, _ = attend(*arrays)
    arrays[1][arrays[2][1, 0], :, :, 0] = np.nan
    sick, _ = attend(*arrays)
    assert np.all(np.isnan(np.asarray(sick)[3:8]))
    keep = np.r_[0:3, 8:24]
    np.testing.assert_array_equal(np.asarray(sick)[keep], np.asarray(healthy)[keep])
