"""What gpu_check.py asks of the kernels beyond their tests, at sizes that models have.

Attention and page updates against NumPy; which implementation answered, read off the program that
was lowered; a cascade against the same call without one; `batch_invariant` bit by bit. Prints
nothing, and raises nothing for a wrong value: each function says what it found.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels import mosaic_gpu_target, reference
from scripts import kernel_timing
from scripts.kernel_timing import Sizes

TINY: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
ERRORS = {"bfloat16": 2e-2, "float8_e4m3fn": 2e-2, "int8": 2e-2}  # of bfloat16 outputs of size 1
SPLIT_ERROR, PLAIN_ERROR = 1e-4, 5e-3  # of float32 outputs, with and without `split_p`
FIRST_FLOAT8 = (8, 9)  # compute capability


def asked_for(small: bool) -> str:
    """The implementation of attention that has to answer."""
    return "xla" if small else "mosaic_gpu"


def answered(function: Callable[..., Any], *arrays: Any) -> str:
    """The implementation that a call comes down to, by the calls in its lowered program."""
    text = jax.jit(function).lower(*arrays).as_text()
    if re.search(r"custom_call\s*@mosaic_gpu", text):
        return "mosaic_gpu"
    return "mosaic_tpu" if re.search(r"custom_call\s*@tpu_custom_call", text) else "xla"


# ---------------------------------------------------------------------------------------- float64


def against_float64(asked: str, small: bool, deadline: float) -> dict[str, Any]:
    """Decode and prefill of the shapes that gpu_check.py times, and page updates, by NumPy."""
    shapes = [Sizes(batch=3, context=700, page_size=p) for p in (16, 64)]
    shapes += [Sizes(batch=2, context=333, new=200, page_size=64)]
    shapes += [Sizes(batch=3, context=700, dtype=_quantised())]
    if small:
        shapes = [Sizes(batch=2, context=40, page_size=16, **TINY)]
    lines: list[dict[str, Any]] = []
    for sizes in shapes:
        late = time.monotonic() > deadline
        lines.append({"skipped": str(sizes)} if late else _attention(sizes, asked))
    found = [line for line in lines if "error" in line]
    good = [line["error"] <= line["limit"] and line["answered"] == asked for line in found]
    moved = updates(asked)
    passed = bool(good) and all(good) and moved["passed"]
    return {"passed": passed, "lines": lines, "updates": moved}


def _quantised() -> str:
    """float8, or what older chips have."""
    old = jax.default_backend() == "gpu" and mosaic_gpu_target.target().arch < FIRST_FLOAT8
    return "int8" if old else "float8_e4m3fn"


def _attention(sizes: Sizes, asked: str) -> dict[str, Any]:
    """One call as an engine makes it: the implementation is not named."""
    pool, scales = kernel_timing.make_pool(sizes, 1)
    shape = (sizes.batch * sizes.new, sizes.num_q_heads, sizes.head_dim)
    q = jnp.asarray(np.random.default_rng(7).standard_normal(shape), jnp.bfloat16)
    table = kernel_timing.tables(sizes, 1)[0]
    lens = jnp.full((sizes.batch,), sizes.context, jnp.int32)
    starts = jnp.arange(sizes.batch + 1, dtype=jnp.int32) * sizes.new
    arrays = (q, pool, table, lens, starts, jnp.int32(sizes.batch))
    call = functools.partial(pallas_kernels.paged_attention, kv_scales=scales)
    got = call(*arrays)
    expected = reference.paged_attention(
        *(np.asarray(array) for array in arrays),
        kv_scales=None if scales is None else np.asarray(scales),
    )
    return {
        "sizes": str(sizes),
        "error": _error(got, expected),
        "limit": ERRORS[sizes.dtype],
        "asked": asked,
        "answered": answered(call, *arrays),
    }


def updates(asked: str) -> dict[str, Any]:
    """Whether `write_kv` and `copy_pages`, compiled and donated, leave the bits that NumPy's do.

    Args:
      asked: of attention; chips without TMA have no kernels for updates, so that XLA is right.
    """
    rng = np.random.default_rng(8)
    pool = rng.standard_normal((40, 2, 8, 16, 128)).astype(jnp.bfloat16)
    k, v = rng.standard_normal((2, 50, 8, 128)).astype(jnp.bfloat16)
    slots = rng.permutation(40 * 16 - 16)[:50].astype(np.int32) + 16
    slots[::7] = 40 * 16  # dropped
    src, dst = rng.permutation(39)[:20].reshape(2, 10).astype(np.int32) + 1
    write, copy = pallas_kernels.write_kv, pallas_kernels.copy_pages
    by = {
        "write_kv": answered(write, pool, k, v, slots),
        "copy_pages": answered(copy, pool, src, dst),
    }
    written = jax.jit(write, donate_argnums=0)(jnp.asarray(pool), k, v, slots)
    got = jax.jit(copy, donate_argnums=0)(written, src, dst)
    for token, slot in enumerate(slots):
        if slot < 40 * 16:
            pool[slot // 16, :, :, slot % 16] = k[token], v[token]
    pool[dst] = pool[src]
    same = bool((np.asarray(got).view(np.uint16) == pool.view(np.uint16)).all())
    wanted = asked if asked == "xla" or mosaic_gpu_target.target().has_tma else "xla"
    passed = same and set(by.values()) == {wanted}
    return {"passed": passed, "same_bits": same, "asked": wanted, "answered": by}


# ---------------------------------------------------------------------------------------- cascade


def cascade(small: bool) -> dict[str, Any]:
    """A shared run of pages, read once, against the same batch read sequence by sequence.

    On a CPU the kernels are interpreted, on few numbers.
    """
    sizes = Sizes(batch=10, context=1400, page_size=64)
    members, shared, options = 8, 1024, {"implementation": "mosaic_gpu", "max_q_len": 1}
    if small:
        sizes = Sizes(batch=4, context=264, page_size=128, **TINY)
        members, shared = 4, 256
    rng = np.random.default_rng(9)
    pool, _ = kernel_timing.make_pool(sizes, 1)
    q = jnp.asarray(
        rng.standard_normal((sizes.batch, sizes.num_q_heads, sizes.head_dim)), jnp.bfloat16
    )
    table = np.array(kernel_timing.tables(sizes, 1)[0])
    table[:members, : shared // sizes.page_size] = table[0, : shared // sizes.page_size]
    lens = rng.integers(shared + 1, sizes.context + 1, sizes.batch).astype(np.int32)
    starts = np.arange(sizes.batch + 1, dtype=np.int32)
    metadata = tuple(jnp.asarray(a) for a in (lens, starts, np.int32(sizes.batch)))
    expected = reference.paged_attention(np.asarray(q), np.asarray(pool), table, *metadata)

    def attend(cascade: bool) -> tuple[np.ndarray, Any]:
        plan = pallas_kernels.plan_attention(
            *metadata, q=q, kv_pages=pool, page_table=jnp.asarray(table), cascade=cascade, **options
        )
        out = pallas_kernels.paged_attention(
            q,
            pool,
            jnp.asarray(table),
            *metadata,
            plan=plan,
            out_dtype=jnp.float32,
            interpret=small,
            **options,
        )
        return np.asarray(out), plan

    flat, flat_plan = attend(False)
    joined, plan = attend(True)
    tiles = 0 if plan.prefix is None else int(plan.prefix.tiles.count)
    limit = SPLIT_ERROR if flat_plan.classes[0].config.split_p else PLAIN_ERROR
    errors = {
        "flat": _error(flat, expected),
        "cascade": _error(joined, expected),
        "between": _error(joined, np.asarray(flat, np.float64)),
    }
    passed = tiles > 0 and all(error <= limit for error in errors.values())
    return {"passed": passed, "shared_tiles": tiles, "errors": errors, "limit": limit}


# -------------------------------------------------------------------------------- batch invariance


@dataclass(frozen=True, slots=True)
class _World:
    """Sequences with pages and new tokens of their own, put together into batches."""

    pool: jax.Array
    table: np.ndarray  # i32[sequences, pages_per_seq]
    lens: tuple[int, ...]
    rows: tuple[np.ndarray, ...]  # of q, the new tokens of each sequence

    @classmethod
    def random(cls, sizes: Sizes, lens: Sequence[int], news: Sequence[int]) -> _World:
        """Sequences of `lens` positions, the last `news` of them new."""
        rng = np.random.default_rng(10)
        pool, _ = kernel_timing.make_pool(sizes, 1)
        shape = (sizes.num_q_heads, sizes.head_dim)
        rows = [rng.standard_normal((new, *shape)).astype(jnp.bfloat16) for new in news]
        return cls(pool, np.asarray(kernel_timing.tables(sizes, 1)[0]), tuple(lens), tuple(rows))

    def batch(self, chosen: Sequence[int], num_tokens: int, max_seqs: int) -> tuple[Any, ...]:
        """Arguments of `paged_attention` for some of the sequences, in this order."""
        idle = max_seqs - len(chosen)
        q = np.zeros((num_tokens, *self.rows[0].shape[1:]), jnp.bfloat16)
        counts = [len(self.rows[s]) for s in chosen]
        q[: sum(counts)] = np.concatenate([self.rows[s] for s in chosen])
        table = np.pad(self.table[list(chosen)], ((0, idle), (0, 0)))
        lens = np.array([*(self.lens[s] for s in chosen), *[0] * idle], np.int32)
        starts = np.pad(np.cumsum([0, *counts]), (0, idle), mode="edge").astype(np.int32)
        return (q, self.pool, table, lens, starts, np.int32(len(chosen)))


def batch_invariance(asked: str, small: bool) -> dict[str, Any]:
    """Whether each row has the same bits in a full batch, in another order, and alone."""
    sizes, lens, news = Sizes(batch=5, context=2100), (700, 2100, 64, 333, 1300), (1, 1, 1, 200, 1)
    if small:
        sizes = Sizes(batch=4, context=150, page_size=16, **TINY)
        lens, news = (40, 150, 9, 70), (1, 1, 1, 12)
    world = _World.random(sizes, lens, news)
    attend = jax.jit(
        functools.partial(
            pallas_kernels.paged_attention,
            batch_invariant=True,
            return_lse=True,
            out_dtype=jnp.float32,
            implementation=asked,
        )
    )
    every, room = range(len(lens)), 2 * sum(news)
    batches = [(list(every), room, 8), (list(reversed(every)), room, 8)]
    batches += [([s], max(news), 3) for s in every]
    first: dict[int, np.ndarray] = {}
    compared, different = 0, []
    for number, (chosen, num_tokens, max_seqs) in enumerate(batches):
        out, lse = attend(*world.batch(chosen, num_tokens, max_seqs))
        both = np.concatenate([np.asarray(out), np.asarray(lse)[..., None]], axis=-1)
        begin = 0
        for s in chosen:
            bits = both[begin : begin + news[s]].view(np.uint32)
            begin += news[s]
            compared += s in first
            if not np.array_equal(first.setdefault(s, bits), bits):
                different.append({"batch": number, "sequence": s})
    passed = compared == 2 * len(lens) and not different
    return {"passed": passed, "compared": compared, "different": different}


def _error(got: Any, expected: Any) -> float:
    """Largest difference relative to max(1, |expected|); NaN where either has one."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return float((np.abs(got - expected) / np.maximum(1, np.abs(expected))).max())
