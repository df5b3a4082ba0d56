"""How the kernels are timed: problems of random data, the device's ceilings, seconds a call.

Shared by bench_kernels.py and gpu_check.py; prints nothing.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels

QUANTISED = ("float8_e4m3fn", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """One measurement."""

    batch: int = 64
    context: int = 4096  # kv positions of each sequence
    new: int = 1  # query rows of each sequence
    page_size: int = 64
    dtype: str = "bfloat16"  # of the pool
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    @property
    def pages_per_seq(self) -> int:
        """Columns of the page table."""
        return -(-self.context // self.page_size)

    @property
    def vector_bytes(self) -> int:
        """Of one key or value, its scale included."""
        return self.head_dim * jnp.dtype(self.dtype).itemsize + 4 * (self.dtype in QUANTISED)

    @property
    def kv_bytes(self) -> int:
        """That one call has to read."""
        return self.batch * self.context * 2 * self.num_kv_heads * self.vector_bytes

    @property
    def flops(self) -> int:
        """Of the two products of causal attention."""
        seen = self.new * (self.context - self.new) + self.new * (self.new + 1) // 2
        return 4 * self.batch * seen * self.num_q_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Device:
    """How much memory a measurement goes over, and how long it takes."""

    rotated_bytes: int  # more than the caches
    most_bytes: int  # of a pool
    seconds: float  # of one run
    repeats: int
    calls: int  # in one program, on different pages: a launch from Python costs as much as a kernel

    @classmethod
    def at_hand(cls) -> Device:
        """Sized for the default device."""
        if jax.default_backend() == "cpu":
            return cls(2**22, 2**28, 0.01, 3, 1)
        stats = jax.devices()[0].memory_stats() or {}
        limit = int(stats.get("bytes_limit", 2**33))
        return cls(min(2**30, limit // 16), limit // 2, 0.03, 7, 4)


# ------------------------------------------------------------------------------------------ timing


def seconds_a_call(call: Callable[[], Any], device: Device) -> float:
    """Median over runs of many calls each; the device's queue is never empty within a run."""
    jax.block_until_ready(call())
    jax.block_until_ready(call())
    started = time.perf_counter()
    jax.block_until_ready(call())
    once = time.perf_counter() - started
    count = max(1, min(1000, math.ceil(device.seconds / max(once, 1e-6))))
    runs = []
    for _ in range(device.repeats):
        started = time.perf_counter()
        for _ in range(count - 1):
            call()
        jax.block_until_ready(call())
        runs.append((time.perf_counter() - started) / count)
    return statistics.median(runs)


def ceilings(device: Device) -> dict[str, float]:
    """Bytes/s of a copy (read and written) and of a read, FLOP/s of a bfloat16 product."""
    words = min(device.rotated_bytes * 2, device.most_bytes // 4) // 4
    data = jax.random.bits(jax.random.key(0), (words // 1024, 1024), jnp.uint32)
    copy = jax.jit(lambda x: x ^ jnp.uint32(1))
    read = jax.jit(lambda x: x.max(axis=1))
    size = 512 if jax.default_backend() == "cpu" else 8192
    left, right = jax.random.normal(jax.random.key(1), (2, size, size), jnp.bfloat16)
    product = jax.jit(jnp.dot)
    return {
        "copy_bytes_per_s": 2 * data.nbytes / seconds_a_call(lambda: copy(data), device),
        "read_bytes_per_s": data.nbytes / seconds_a_call(lambda: read(data), device),
        "product_flops_per_s": 2 * size**3 / seconds_a_call(lambda: product(left, right), device),
    }


# ---------------------------------------------------------------------------------------- problems


def make_pool(sizes: Sizes, rotations: int) -> tuple[jax.Array, jax.Array | None]:
    """A random pool with the null page and pages for `rotations` batches; scales if quantised."""
    num_pages = 1 + rotations * sizes.batch * sizes.pages_per_seq
    shape = (num_pages, 2, sizes.num_kv_heads, sizes.page_size, sizes.head_dim)
    dtype = jnp.dtype(sizes.dtype)

    @functools.partial(jax.jit, static_argnums=0)
    def random(dtype: Any) -> jax.Array:
        # Random bits are not used: some of them are NaN and infinities.
        values = jax.random.normal(jax.random.key(2), shape, jnp.bfloat16)
        return (values * 30 if dtype.name in QUANTISED else values).astype(dtype)

    scales = None
    if sizes.dtype in QUANTISED:
        scales = jax.random.uniform(jax.random.key(3), shape[:4], jnp.float32, 0.01, 0.04)
    return random(dtype), scales


def rotations_for(sizes: Sizes, device: Device) -> int:
    """Batches of pages that calls take turns on: more than the caches hold, within the memory."""
    wanted = -(-device.rotated_bytes // sizes.kv_bytes)
    return max(1, min(wanted, device.most_bytes // sizes.kv_bytes, 64))


def q_dtype(sizes: Sizes) -> Any:
    """Of queries for a pool."""
    return jnp.dtype(jnp.bfloat16 if sizes.dtype in QUANTISED else sizes.dtype)


def tables(sizes: Sizes, rotations: int) -> jax.Array:
    """i32[rotations, batch, pages_per_seq]: disjoint random pages."""
    count = rotations * sizes.batch * sizes.pages_per_seq
    pages = 1 + np.random.default_rng(0).permutation(count)
    return jnp.asarray(pages.reshape(rotations, sizes.batch, -1), jnp.int32)


def attend_call(
    sizes: Sizes, device: Device, implementation: str, **configs: Any
) -> tuple[Callable[[], Any], int]:
    """A call that attends `device.calls` times, and how often."""
    rotations = rotations_for(sizes, device)
    pool, scales = make_pool(sizes, rotations)
    tokens = sizes.batch * sizes.new
    q = jax.random.normal(
        jax.random.key(4), (tokens, sizes.num_q_heads, sizes.head_dim), q_dtype(sizes)
    )
    lens = jnp.full((sizes.batch,), sizes.context, jnp.int32)
    starts = jnp.arange(sizes.batch + 1, dtype=jnp.int32) * sizes.new
    metadata = (lens, starts, jnp.int32(sizes.batch))
    options: dict[str, Any] = {"implementation": implementation, "max_q_len": sizes.new}
    every = tables(sizes, rotations)
    plan = pallas_kernels.plan_attention(
        *metadata, q=q, kv_pages=pool, page_table=every[0], **options, **configs
    )

    @jax.jit
    def attend(q: Any, pool: Any, scales: Any, four: Any, plan: Any) -> Any:
        return [
            pallas_kernels.paged_attention(
                q, pool, table, *metadata, kv_scales=scales, plan=plan, **options
            )
            for table in four
        ]

    # With fewer rotations than calls some pages are read twice in a program: they are large then.
    turns = [
        [every[(first + i) % rotations] for i in range(device.calls)]
        for first in range(0, max(rotations, 1), device.calls)
    ]
    turn = itertools.cycle(turns)
    return lambda: attend(q, pool, scales, next(turn), plan), device.calls


def measure_attention(
    sizes: Sizes, device: Device, implementation: str, limits: dict[str, float], **configs: Any
) -> dict[str, Any]:
    """Seconds, bytes/s and FLOP/s of one call, and shares of the ceilings."""
    call, calls = attend_call(sizes, device, implementation, **configs)
    seconds = seconds_a_call(call, device) / calls
    rows = 2 * sizes.batch * sizes.new * sizes.num_q_heads * sizes.head_dim
    moved = sizes.kv_bytes + rows * q_dtype(sizes).itemsize
    return _figures(seconds, moved, sizes.flops, limits)


def measure_update(
    what: str, sizes: Sizes, device: Device, implementation: str | None, limits: dict[str, float]
) -> dict[str, Any]:
    """Of `write_kv` (a batch of new tokens) or `copy_pages` (a page for each sequence)."""
    pool, scales = make_pool(sizes, rotations_for(sizes, device))
    rng = np.random.default_rng(1)
    num_pages, tokens = pool.shape[0], sizes.batch * sizes.new
    if what == "write_kv":
        shape = (tokens, sizes.num_kv_heads, sizes.head_dim)
        k, v = (jax.random.normal(jax.random.key(s), shape, q_dtype(sizes)) for s in (5, 6))
        positions = num_pages * sizes.page_size
        slots = [
            jnp.asarray(rng.choice(positions, tokens, replace=False), jnp.int32)
            for _ in range(device.calls)
        ]

        def change(pool: Any, scales: Any) -> Any:
            for where in slots:
                pool = pallas_kernels.write_kv(
                    pool, k, v, where, kv_scales=scales, implementation=implementation
                )
                pool, scales = pool if scales is not None else (pool, None)
            return pool, scales

        moved = 2 * tokens * sizes.num_kv_heads * (k.dtype.itemsize * sizes.head_dim)
        moved += 2 * tokens * sizes.num_kv_heads * sizes.vector_bytes
    else:
        count = min(sizes.batch, (num_pages - 1) // 2)
        chosen = [rng.permutation(num_pages - 1)[: 2 * count] + 1 for _ in range(device.calls)]
        pairs = [jnp.asarray(ids.reshape(2, count), jnp.int32) for ids in chosen]

        def change(pool: Any, scales: Any) -> Any:
            for src, dst in pairs:
                pool = pallas_kernels.copy_pages(pool, src, dst, implementation=implementation)
            return pool, scales

        moved = 2 * count * pool.nbytes // num_pages
    step = jax.jit(change, donate_argnums=(0, 1))
    state = (pool, scales)
    del pool, scales

    def call() -> Any:
        nonlocal state
        state = step(*state)
        return state[0]

    return _figures(seconds_a_call(call, device) / device.calls, moved, 0, limits)


def _figures(seconds: float, moved: int, flops: int, limits: dict[str, float]) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "bytes_per_s": moved / seconds,
        "flops_per_s": flops / seconds,
        "of_copy": moved / seconds / limits["copy_bytes_per_s"],
        "of_read": moved / seconds / limits["read_bytes_per_s"],
        "of_product": flops / seconds / limits["product_flops_per_s"],
    }


def measure(
    what: str,
    sizes: Sizes,
    device: Device,
    implementation: str,
    limits: dict[str, float],
    **configs: Any,
) -> dict[str, Any]:
    """One line of the table; one that cannot run says why in `error`."""
    line: dict[str, Any] = {"what": what, **dataclasses.asdict(sizes)}
    line["implementation"] = implementation
    try:
        if what in ("decode", "prefill"):
            return line | measure_attention(sizes, device, implementation, limits, **configs)
        return line | measure_update(what, sizes, device, implementation, limits)
    except Exception as error:  # a benchmark goes on with the next line, whatever a compiler says
        return line | {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def facts() -> dict[str, Any]:
    """Of the device and the software."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "compute_capability": getattr(device, "compute_capability", None),
        "cores": getattr(device, "core_count", None),
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
