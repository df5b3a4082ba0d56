"""Quantised V whose scales differ a lot inside a KV tile: no row pays for what it hardly sees.

Every implementation, each GPU kernel by itself, against float64 over what the pages stand for. An
error is relative to the row's own largest value (of either half of its columns), so a value that is
1e8 times the others must not cost digits to the rows for which it is masked, outside the window, or
all but without weight.
"""

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import reference
from pallas_kernels.quantize import LARGEST
from pallas_kernels.tuning import KernelConfig
from tests.pallas_kernels import races
from tests.pallas_kernels.cases import Batch, Shape, make_batch

TOLERANCE = 1e-5  # what is measured is 1e-6, and 5e-6 on a TPU, whose products are of bfloat16
WINDOW, GROUP, HEAD_DIM = 70, 4, 64
FAINT = -30.0  # of the key of a faint position: its weight is below 1e-5 of the others'
LONE = 1e5  # the most that a row's largest weight may exceed those that must keep their digits

KERNELS: dict[str, KernelConfig | None] = {
    "columns": KernelConfig("columns", 16, 64, 2, 2),
    "rows": KernelConfig("rows", 64, 64, 2, 2),
    "mma": KernelConfig("mma", 16, 64, 2, 2),
    "tpu": KernelConfig("tpu", 16, 128, 2, 1),
    "xla": None,
}
IMPLEMENTATIONS = {"tpu": "mosaic_tpu", "xla": "xla"}


@dataclass(frozen=True)
class Place:
    """A sequence, and which of its positions has the scale that differs."""

    kv_len: int
    q_len: int
    odd: int
    faint: bool = False  # nobody gives it weight
    lone: bool = False  # its vector has nothing in the second half of the columns
    zeros: range = range(0)  # positions whose scales are 0


# With KV tiles of 64, and a window of 70: the queries of (130, 4) see 57-126 to 60-129.
PLACES = {
    "seen by all, alone in its tile with others": Place(130, 4, 60),
    "seen by all, in the middle": Place(130, 4, 100),
    "all but without weight": Place(130, 4, 60, faint=True),
    "masked by causality for three of four rows": Place(130, 4, 129),
    "seen by the first row only, by the window": Place(130, 4, 57),
    "outside the window of all, in their first tile": Place(130, 4, 50),
    "the only one that the first row sees": Place(4, 4, 0),
    "masked by causality for the first rows of a prompt": Place(4, 4, 3),
    "in a tile after one of zeros": Place(130, 4, 100, zeros=range(64)),
    "in a tile before one of zeros": Place(130, 4, 60, zeros=range(64, 130)),
    "in a sequence of zeros": Place(10, 2, 5, zeros=range(10)),
    "seen by all, with columns of zeros": Place(130, 4, 100, lone=True),
}


def batch_of(page_size: int, dtype: Any, odd: float, others: float) -> tuple[Batch, np.ndarray]:
    """The sequences of `PLACES` over quantised pages, and their scales.

    Values are about `odd` or `others` times normal ones. What no length reaches is poison: NaN,
    infinity and large numbers.
    """
    rng = np.random.default_rng(page_size)
    places = list(PLACES.values())
    shape = Shape(page_size, 1, GROUP, HEAD_DIM, len(places), 4 * len(places), 130)
    batch = make_batch(shape, rng, [p.kv_len for p in places], [p.q_len for p in places])
    batch.q[..., 0] = np.abs(batch.q[..., 0]) + 3
    pool, table = batch.kv_pages, batch.page_table
    largest = np.float32(LARGEST[jnp.dtype(dtype)])
    scales = np.abs(pool).max(axis=-1) / largest
    unused = np.isnan(scales)
    values = np.where(unused[..., None], np.nan, pool / np.where(scales == 0, 1, scales)[..., None])
    scales[:, 1] *= others
    for s, place in enumerate(places):
        page, offset = table[s, place.odd // page_size], place.odd % page_size
        scales[page, 1, :, offset] *= min(odd / others, LONE) if place.lone else odd / others
        if place.lone:
            values[page, 1, :, offset, HEAD_DIM // 2 :] = 0
        if place.faint:
            values[page, 0, :, offset] = 0
            values[page, 0, :, offset, 0] = -largest
            scales[page, 0, :, offset] = -FAINT / largest
        for position in place.zeros:
            scales[table[s, position // page_size], 1, :, position % page_size] = 0
    scales[unused] = rng.choice(np.array([np.nan, np.inf, -np.inf, 1e30], np.float32), unused.sum())
    if dtype == jnp.int8:
        values = np.where(unused[..., None], 99, np.round(values))
    values = np.asarray(jnp.asarray(values, jnp.float32).astype(dtype))
    return dataclasses.replace(batch, q=batch.q.astype(jnp.bfloat16), kv_pages=values), scales


def attend(kernel: str, batch: Batch, scales: np.ndarray) -> np.ndarray:
    """f32[num_tokens, GROUP, HEAD_DIM]: all sequences in one launch of `kernel`."""
    implementation, config = IMPLEMENTATIONS.get(kernel, "mosaic_gpu"), KERNELS[kernel]
    width = pallas_kernels.padded_head_dim(HEAD_DIM, implementation)
    padding = [(0, 0)] * 4 + [(0, width - HEAD_DIM)]
    q, pool, *metadata = (jnp.asarray(a) for a in batch.arrays)
    pool = jnp.pad(pool, padding)
    options: dict[str, Any] = {"sliding_window": WINDOW, "max_q_len": 4}
    options["implementation"] = implementation
    extra: dict[str, Any] = {}
    if config is not None:
        extra["plan"] = pallas_kernels.plan_attention(
            *metadata[1:],
            q=q,
            kv_pages=pool,
            page_table=metadata[0],
            decode=config,
            prefill=config,
            **options,
        )
        extra["interpret"] = True
    if implementation == "mosaic_gpu":
        with races.no_gpu_race():
            return run(q, pool, *metadata, scales=scales, **options, **extra)
    out = run(q, pool, *metadata, scales=scales, **options, **extra)
    if implementation == "mosaic_tpu":
        races.assert_no_tpu_race()
    return out


def run(*arrays: Any, scales: np.ndarray, **options: Any) -> np.ndarray:
    return np.asarray(
        pallas_kernels.paged_attention(
            *arrays, kv_scales=jnp.asarray(scales), out_dtype=jnp.float32, **options
        )
    )


def check(kernel: str, dtype: Any, odd: float, others: float) -> None:
    """Each row is within `TOLERANCE` of float64, relative to its largest value of each half."""
    batch, scales = batch_of(128 if kernel == "tpu" else 16, dtype, odd, others)
    expected = reference.paged_attention(*batch.arrays, kv_scales=scales, sliding_window=WINDOW)
    out = attend(kernel, batch, scales)
    halves = (batch.cu_q_lens[-1], GROUP, 2, HEAD_DIM // 2)
    out, expected = (rows[: halves[0]].reshape(halves) for rows in (out, expected))
    size = np.abs(expected).max(axis=-1)
    errors = np.abs(out - expected).max(axis=-1) / np.where(size > 0, size, 1)
    worst = np.split(errors.max(axis=(1, 2)), batch.cu_q_lens[1:-1])
    told = {name: float(rows.max()) for name, rows in zip(PLACES, worst, strict=True)}
    print({name: f"{value:.1e}" for name, value in told.items()})
    assert max(told.values()) <= TOLERANCE, told


@pytest.fixture(autouse=True, scope="module")
def interpreted_mma() -> None:
    races.interpret_mma()


@pytest.mark.parametrize(
    ("kernel", "dtype", "odd", "others"),
    [
        ("columns", jnp.int8, 1e5, 1),
        ("columns", jnp.float8_e4m3fn, 1, 1e8),
        ("rows", jnp.float8_e4m3fn, 1e5, 1),
        ("rows", jnp.int8, 1, 1e8),
        ("mma", jnp.int8, 1e8, 1),
        ("mma", jnp.float8_e4m3fn, 1, 1e5),
        ("tpu", jnp.int8, 1e8, 1),
        ("xla", jnp.int8, 1e8, 1),
        ("xla", jnp.float8_e4m3fn, 1e-8, 1),
    ],
)
def test_a_scale_unlike_the_others_costs_no_other_row_digits(
    kernel: str, dtype: Any, odd: float, others: float
) -> None:
    check(kernel, dtype, odd, others)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.int8])
@pytest.mark.parametrize(
    ("odd", "others"),
    [
        *itertools.product([1, 1e3, 1e5, 1e8, 1e20, 1e-20], [1]),
        *itertools.product([1], [1e3, 1e5, 1e8, 1e20, 1e-20]),
        *[(0, 1), (1e30, 1e30), (1e-30, 1e-30)],
    ],
)
def test_scales_of_all_ratios(kernel: str, dtype: Any, odd: float, others: float) -> None:
    check(kernel, dtype, odd, others)
