"""Thousands of requests of every kind after warm-up: nothing compiles, is traced, or leaks."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedjax import SamplingParams
from tests.test_engine import Soak
from tests.test_programs import counted
from tests.tiny_engine import HOST_PAGES, tiny_engine, tiny_llm

PAGE = os.sysconf("SC_PAGE_SIZE")


class Endurance(Soak):
    """What `Soak` asks, and beams, over a small pool whose pages are swapped."""

    def __init__(self, num_requests: int) -> None:
        super().__init__(num_requests)
        self.engine = tiny_engine(num_pages=33, num_host_pages=HOST_PAGES, seed=3)

    def random_params(self) -> SamplingParams:
        if self.rng.random() > 0.1:
            return super().random_params()
        width = int(self.rng.integers(1, 5))
        return SamplingParams(
            n=int(self.rng.integers(1, width + 1)),
            beam_width=width,
            max_tokens=int(self.rng.integers(1, 9)),
            temperature=0.0,
        )


def check(num_requests: int) -> None:
    tiny_llm()
    many = Endurance(num_requests)
    with counted() as count:
        many.run()
    assert not count
    assert len(many.outputs) == num_requests
    assert any(params.beam_width for params in many.params.values())
    assert any(params.prompt_logprobs for params in many.params.values())
    stats = many.engine.scheduler.stats
    assert stats.prefix_hit_tokens > 0
    assert stats.swap.num_pages_in > 0
    assert many.aborted


def test_three_hundred_requests_compile_and_trace_nothing() -> None:
    check(300)


@pytest.mark.slow
def test_ten_thousand_requests_compile_and_trace_nothing() -> None:
    check(10_000)


# --------------------------------------------------------------------------------------- memory


def resident() -> float:
    """MiB of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 2**20


def slope(points: list[tuple[float, float]]) -> float:
    """Of a line through (x, y), least squares."""
    x, y = np.array(points).T
    return float(np.polyfit(x - x[0], y, 1)[0])


@pytest.mark.slow
def test_memory_stays_flat_over_two_thousand_requests(capsys: Any) -> None:
    """After a thousand to settle; then, at rest, for a minute."""
    tiny_llm()
    work: list[tuple[float, float]] = []
    engine = None
    for batch in range(15):
        many = Endurance(200)
        many.rng = np.random.default_rng(batch)
        if engine is not None:
            many.engine = engine
        engine = many.engine
        many.run()
        del many
        work.append((batch * 200.0, resident()))
    started, rest = time.monotonic(), list[tuple[float, float]]()
    while time.monotonic() < started + 60.0:
        rest.append(((time.monotonic() - started) / 3600.0, resident()))
        time.sleep(2.0)
    grown, at_rest = slope(work[5:]) * 2000.0, slope(rest)
    with capsys.disabled():
        print(f"\nRSS MiB after each 200 requests: {[round(y, 1) for _, y in work]}")
        print(f"over 2,000 requests {grown:+.2f} MiB; at rest {at_rest:+.2f} MiB an hour")
    assert grown < 2.0
    assert at_rest < 1.0
