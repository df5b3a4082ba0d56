"""One suite for all implementations: each against float64 dense attention, on the same batches.

A Mosaic kernel runs interpreted, with race detection; on its own device, with
`PAGEDJAX_TEST_COMPILED=1`, it runs compiled. The default run takes a sample in which every value of
every axis occurs; `-m slow` runs the whole product.
"""

import dataclasses
import itertools
import os
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import reference, tuning
from pallas_kernels.platform import traced_platform
from pallas_kernels.quantize import quantize
from pallas_kernels.tuning import Chip, KernelConfig
from tests.pallas_kernels import races
from tests.pallas_kernels.cases import Batch, Shape, error, make_batch

COMPILED = os.environ.get("PAGEDJAX_TEST_COMPILED") == "1"
TILE = 64  # around which lengths are chosen; a KV tile of most configurations

AXES: dict[str, list[Any]] = {
    "page_size": [8, 16, 32, 64, 128],
    "head_dim": [64, 80, 96, 128, 256],
    "group": [1, 2, 4, 7, 8, 16],
    "dtype": ["bfloat16", "float16", "float8_e4m3fn", "int8"],
    "options": ["plain", "window", "cap", "sinks", "alibi", "everything"],
    "split": [False, True],
    "split_p": [True, True, True, False],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 70},
    "cap": {"soft_cap": 4.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi_slopes": True},
    "everything": {
        "sliding_window": 21, "soft_cap": 9.0, "sinks": True, "alibi_slopes": True, "scale": 0.2,
    },
}  # fmt: skip

# Family -> implementation, cases of the default run, the chip whose sizes it takes.
FAMILIES: dict[str, tuple[str, int, Chip | None]] = {
    "hopper": ("mosaic_gpu", 6, Chip("interpreted", "sm_90", 3)),
    "mma": ("mosaic_gpu", 6, Chip("interpreted", "sm_100", 3)),
    "tpu": ("mosaic_tpu", 6, Chip("interpreted", "tpu", 1)),
    "xla": ("xla", 12, None),
    "native": ("native_cpu", 8, None),
}


@dataclass(frozen=True)
class Case:
    """One call."""

    page_size: int
    head_dim: int
    group: int
    dtype: str
    options: str
    split: bool
    split_p: bool

    @property
    def quantized(self) -> bool:
        """Whether scales stand beside the pool."""
        return self.dtype in ("float8_e4m3fn", "int8")

    @property
    def tolerance(self) -> float:
        """Largest error relative to float64 on the values that the pages hold."""
        if not self.split_p:
            return 3e-3
        return 3e-4 if self.quantized else 1e-5

    def tolerance_of(self, family: str) -> float:
        """A CPU's own kernels round weights and results to bfloat16, and again after sinks."""
        is_rounded = family == "native" and self.dtype == "bfloat16"
        return 1.5 * float(jnp.finfo(jnp.bfloat16).eps) if is_rounded else self.tolerance


def axes_of(family: str) -> dict[str, list[Any]]:
    axes = dict(AXES)
    if family == "tpu":  # no float16 on TPUs
        axes["dtype"] = ["bfloat16", "float32", "float8_e4m3fn", "int8"]
    if family == "xla":
        axes["dtype"] = ["bfloat16", "float16", "float32", "float8_e4m3fn", "int8"]
        axes |= {"split": [False], "split_p": [True]}
    if family == "native":
        axes["dtype"] = ["float32", "bfloat16"]
        axes |= {"split": [False], "split_p": [True]}
    return axes


def sample(family: str) -> list[Case]:
    """As many cases as the default run has time for; each value of each axis occurs."""
    rng = np.random.default_rng(len(family))
    count = FAMILIES[family][1]
    columns = {}
    for name, values in axes_of(family).items():
        repeated = (values * count)[: max(count, len(values))]
        columns[name] = [repeated[i] for i in rng.permutation(len(repeated))]
    cases = [Case(**{name: column[i] for name, column in columns.items()}) for i in range(count)]
    if family != "tpu":
        return cases
    small = itertools.cycle([size for size in AXES["page_size"] if size != 128])
    return [
        dataclasses.replace(case, page_size=128 if case.quantized else next(small))
        for case in cases
    ]


def product(family: str) -> list[Case]:
    axes = axes_of(family)
    cases = [
        Case(*values) for values in itertools.product(*(dict.fromkeys(v) for v in axes.values()))
    ]
    return [case for case in cases if is_served(family, case)]


def is_served(family: str, case: Case) -> bool:
    """False for what the kernels refuse: quantised pages of a TPU that do not fill its lanes."""
    return family != "tpu" or not case.quantized or case.page_size == 128


def available(family: str) -> bool:
    """Whether this run can run the family: interpreted anywhere, compiled on its own device."""
    platform = traced_platform()
    if family == "native":
        return platform == "cpu"
    if not COMPILED or family == "xla":
        return True
    if family == "tpu":
        return platform == "tpu"
    capability = getattr(jax.devices()[0], "compute_capability", "0")
    return platform == "gpu" and (family == "mma" or str(capability) == "9.0")


def lengths(case: Case, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Decoding sequences and chunks around the edges of pages and tiles."""
    page = case.page_size
    edges = [1, page - 1, page, page + 1, TILE - 1, TILE, TILE + 1, 3 * TILE + 5]
    kv_lens = [int(n) for n in rng.choice(edges, 3, replace=False)]
    chunk = int(rng.choice([TILE + 1, 19, 33]))
    return [*kv_lens, chunk + int(rng.integers(0, 80)), 9], [1, 1, 1, chunk, min(3, 9)]


def values_of(case: Case, implementation: str, rng: np.random.Generator) -> tuple[Batch, Any]:
    """The batch with its pool in the case's dtype and width, and its scales."""
    kv_lens, q_lens = lengths(case, rng)
    heads = 2 if case.group == 1 else 1
    shape = Shape(case.page_size, heads, case.group, case.head_dim, 6, 96, 320)
    dtype = np.float32 if case.quantized else jnp.dtype(case.dtype)
    batch = make_batch(shape, rng, kv_lens, q_lens, dtype)
    width = pallas_kernels.padded_head_dim(case.head_dim, implementation)
    extra = np.repeat(batch.kv_pages[..., :1] * 0, width - case.head_dim, axis=-1)
    pool, scales = np.concatenate([batch.kv_pages, extra], axis=-1), None
    if case.quantized:
        pool, scales = (np.asarray(a) for a in quantize(jnp.asarray(pool), jnp.dtype(case.dtype)))
        batch = dataclasses.replace(batch, q=batch.q.astype(jnp.bfloat16))
    if implementation == "xla":  # takes any dtype of q: its output then shows the last digits
        batch = dataclasses.replace(batch, q=batch.q.astype(np.float32))
    return dataclasses.replace(batch, kv_pages=pool), scales


def config_of(case: Case, kind: Any, chip: Chip, implementation: str, pool: Any) -> KernelConfig:
    """The tuned sizes, with the case's switches; few workers where they are interpreted."""

    class Problem:
        page_size, head_dim = pool.shape[3:]
        dtype, group = case.dtype, case.group

    here = None if COMPILED and chip.architecture != "sm_100" else chip
    if COMPILED and here is not None:
        here = dataclasses.replace(chip, cores=jax.devices()[0].core_count)
    config = tuning.lookup(implementation, kind, Problem(), chip=here)
    workers = config.workers if COMPILED else min(config.workers, 3)
    split = case.split and config.kernel != "tpu"
    return dataclasses.replace(config, workers=workers, split=split, split_p=case.split_p)


def check(family: str, case: Case) -> None:
    if not available(family):
        pytest.skip(f"{family} does not run compiled on this device")
    implementation, _, chip = FAMILIES[family]
    rng = np.random.default_rng(abs(hash(dataclasses.astuple(case)[:3])) % 2**32)
    batch, scales = values_of(case, implementation, rng)
    options = dict(OPTIONS[case.options])
    heads = batch.q.shape[1]
    if "sinks" in options:
        options["sinks"] = rng.standard_normal(heads).astype(np.float32)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = (2.0 ** -rng.uniform(1, 8, heads)).astype(np.float32)
    expected, expected_lse = reference.paged_attention(
        *batch.arrays, kv_scales=scales, return_lse=True, **options
    )
    arrays = [jnp.asarray(a) for a in batch.arrays]
    extra: dict[str, Any] = {}
    if chip is not None:
        extra["plan"] = pallas_kernels.plan_attention(
            *arrays[3:],
            q=arrays[0],
            kv_pages=arrays[1],
            page_table=arrays[2],
            sliding_window=options.get("sliding_window"),
            implementation=implementation,
            decode=config_of(case, "decode", chip, implementation, batch.kv_pages),
            prefill=config_of(case, "prefill", chip, implementation, batch.kv_pages),
        )
        extra["interpret"] = not COMPILED
    with race_check(family):
        out, lse = pallas_kernels.paged_attention(
            *arrays,
            kv_scales=None if scales is None else jnp.asarray(scales),
            return_lse=True,
            out_dtype=jnp.float32,
            implementation=implementation,
            **options,
            **extra,
        )
        assert error(out, expected) <= case.tolerance_of(family)
        assert error(lse, expected_lse) <= 1e-4
    if family == "tpu" and not COMPILED:
        races.assert_no_tpu_race()


def race_check(family: str) -> Any:
    is_gpu = FAMILIES[family][0] == "mosaic_gpu"
    return races.no_gpu_race() if is_gpu and not COMPILED else nullcontext()


@pytest.fixture(autouse=True, scope="module")
def interpreted_mma() -> None:
    if not COMPILED:
        races.interpret_mma()


@pytest.fixture(autouse=True)
def native_kernels(request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["family"] == "native":
        request.getfixturevalue("cpu_kernels")


@pytest.mark.parametrize(
    ("family", "case"),
    [(family, case) for family in FAMILIES for case in sample(family)],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, vars(value).values())),
)
def test_implementation_equals_float64_attention(family: str, case: Case) -> None:
    check(family, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "case"),
    [(family, case) for family in FAMILIES for case in product(family)],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, vars(value).values())),
)
def test_implementation_equals_float64_attention_in_the_whole_product(
    family: str, case: Case
) -> None:
    check(family, case)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_of_every_axis_occurs_in_the_sample(family: str) -> None:
    cases = sample(family)
    for name, values in axes_of(family).items():
        assert {getattr(case, name) for case in cases} == set(values), name
