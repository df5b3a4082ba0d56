"""What every test runs under: JAX's strictest settings, deterministic hypothesis, device skips.

Owns the process-wide test configuration, with the C++ kernels that a process loads once or never;
shared fakes live in `tests/helpers.py`.
"""

import os
import pwd
import signal
from pathlib import Path
from typing import NoReturn

# Before the first `import jax` anywhere: JAX reads its platform when it is imported. A developer
# with an accelerator overrides it: `JAX_PLATFORMS=cuda scripts/test -m gpu`.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# One CPU device on purpose. Splitting the host into virtual devices splits its thread pool too,
# which slows every matrix product of the suite; a test of sharding starts its own process with
# `--xla_force_host_platform_device_count`.

# What the tests compile is kept in the checkout, not in the user's home: engines of one shape
# share it, and the next run finds it. The keys cover programs, versions and flags.
os.environ.setdefault("PAGEDJAX_CACHE_DIR", str(Path(__file__).parent.parent / ".cache/pagedjax"))

from collections.abc import Callable, Iterator, Sequence

import hypothesis
import jax
import numpy as np
import pytest

from pagedjax import cpu_kernels as kernels_of_a_cpu
from pagedjax import startup
from pallas_kernels import cpu
from pallas_kernels.cpu import library

# int + float, or i32 + i64, must be written out: the compiled step never changes dtype in silence.
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Shapes of different rank must be aligned by hand: a missing axis is an error, not a broadcast.
jax.config.update("jax_numpy_rank_promotion", "raise")
# Parity tests compare with float64: products must not be rounded to a faster format.
jax.config.update("jax_default_matmul_precision", "highest")

# Bare jitted functions are kept by JAX itself.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".cache/jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

# The same examples on every run and machine, and no deadline: two busy cores are slow, not wrong.
hypothesis.settings.register_profile(
    "default_run", derandomize=True, deadline=None, database=None, print_blob=True
)
hypothesis.settings.register_profile(
    "explore", parent=hypothesis.settings.get_profile("default_run"), derandomize=False
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default_run"))

# Marker -> the JAX platforms that serve it.
ACCELERATORS = {"gpu": ("gpu", "cuda"), "tpu": ("tpu",)}


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    platform = jax.default_backend()
    for item in items:
        for marker, platforms in ACCELERATORS.items():
            if item.get_closest_marker(marker) and platform not in platforms:
                item.add_marker(pytest.mark.skip(reason=f"needs a {marker}; JAX has {platform}"))


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own handler of SIGINT: a job in the background is started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def cpu_kernels() -> None:
    """The C++ kernels of a CPU are loaded, as an engine loads them, or the test is skipped."""
    answer = kernels_of_a_cpu.prepare(startup.open_store())
    if not cpu.is_loaded():
        pytest.skip(f"the kernels of a CPU are not to be had: {answer}")


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """`~` stands for nothing: no HOME, and a user whom the system does not know."""

    def refuse(user: object) -> NoReturn:
        raise KeyError(user)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", refuse)


@pytest.fixture
def no_cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not loaded them, and will not: what is traced meanwhile is XLA's."""
    monkeypatch.setenv("PAGEDJAX_CPU_KERNELS", "0")
    monkeypatch.setattr(library, "_loaded", {})


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with the same stream in every test and run."""
    return np.random.default_rng(0)


@pytest.fixture
def assert_close() -> Callable[..., None]:
    """A comparison in float64: same shape, no NaN, and nowhere further apart than `atol`."""

    def compare(actual: object, expected: object, *, atol: float = 1e-5) -> None:
        left, right = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
        assert left.shape == right.shape
        np.testing.assert_allclose(left, right, rtol=0, atol=atol, equal_nan=False)

    return compare
