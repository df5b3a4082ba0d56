"""What the paging experiments share: settings, where requests come from, one run, one table.

Knows nothing of any experiment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tqdm import tqdm

from scripts.contiguous_pool import ContiguousServer, Policy
from scripts.length_distributions import (
    ALPACA,
    SHAREGPT,
    Lengths,
    SimulatedRequest,
    poisson_requests,
)
from scripts.paging_simulation import (
    NUM_POSITIONS,
    Outcome,
    PagedServer,
    Server,
    StepTime,
    simulate,
)

POLICIES: tuple[Policy, ...] = ("max", "pow2", "oracle")
SYSTEMS = (*POLICIES, "paged")
NAMES = {"max": "Max", "pow2": "Pow2", "oracle": "Oracle", "paged": "paged"}
WARM_UP = 0.1  # of the simulated time


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the options say, for every experiment."""

    seed: int = 0
    seconds: float = 3600.0  # simulated
    search_seconds: float = 900.0  # simulated, for each rate that is tried
    bound: float | None = 0.5  # seconds an output token that a sustained rate may cost in the mean
    precision: float = 0.03  # of a sustained rate
    pool: str = "buddy"
    step_time: StepTime = field(default_factory=StepTime)
    max_num_seqs: int = 256
    widths: Sequence[int] = (2, 4, 6)  # samples of E4 and E5, beams
    prefixes: Sequence[int] = (80, 341)  # tokens of E6
    page_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # of E9 and E10
    sharing_requests: int = 240  # of E5, for each width; a third of them with beams
    trace: Sequence[SimulatedRequest] = ()
    show_progress: bool = True


@dataclass(slots=True, kw_only=True)
class Experiment:
    """A table for people, the same figures for programs, and what a plot needs."""

    key: str
    title: str
    columns: Sequence[str]
    rows: list[list[str]]
    notes: list[str]
    figures: dict[str, Any]  # JSON
    curves: dict[str, tuple[Sequence[float], Sequence[float]]] = field(
        default_factory=dict[str, tuple[Sequence[float], Sequence[float]]]
    )


@dataclass(frozen=True, slots=True)
class Source:
    """Where requests come from: a data set's fit, or a trace played faster or slower."""

    name: str
    rate: float  # requests/s of the experiments at one rate
    make: Callable[..., list[SimulatedRequest]]  # (rate=, seconds=, seed=, **shape)

    @classmethod
    def of(cls, lengths: Lengths, rate: float) -> Source:
        """Poisson arrivals of a data set."""
        return cls(lengths.name, rate, partial(poisson_requests, lengths))


def sources(settings: Settings) -> tuple[Source, ...]:
    """The trace alone, or both data sets."""
    if not settings.trace:
        return Source.of(SHAREGPT, 2.0), Source.of(ALPACA, 30.0)
    trace = settings.trace
    span = max(trace[-1].arrival, 1e-9)

    def make(*, rate: float, seconds: float, seed: int, **shape: Any) -> list[SimulatedRequest]:
        del seed  # a trace is what it is
        scale = len(trace) / span / rate
        count = max(1, int(rate * seconds))
        return [
            replace(
                trace[i % len(trace)],
                arrival=(trace[i % len(trace)].arrival + (i // len(trace)) * span) * scale,
                **shape,
            )
            for i in range(count)
        ]

    return (Source("trace", len(trace) / span, make),)


def new_server(system: str, settings: Settings, **options: Any) -> Server:
    """An empty server; `options` are of the paged one."""
    if system == "paged":
        return PagedServer(max_num_seqs=settings.max_num_seqs, **options)
    return ContiguousServer(
        NUM_POSITIONS,
        system,  # pyright: ignore[reportArgumentType]
        pool=settings.pool,
        max_num_seqs=settings.max_num_seqs,
    )


def play(
    server: Server, requests: Sequence[SimulatedRequest], settings: Settings, label: str, **how: Any
) -> Outcome:
    """One simulation, with a bar of simulated seconds."""
    total = requests[-1].arrival
    with tqdm(
        total=round(total),
        desc=label,
        unit=" simulated s",
        leave=False,
        disable=None if settings.show_progress else True,  # None: shown on terminals only
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total} s simulated",
    ) as bar:
        step_time = how.pop("step_time", settings.step_time)
        return simulate(
            server,
            requests,
            step_time,
            warm_up=how.pop("warm_up", WARM_UP) * total,
            progress=bar.update,
            **how,
        )
