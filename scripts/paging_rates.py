"""E2, E4, E6 and E7: the rate of requests that each system sustains.

Owns the search for a rate. Knows nothing of how memory is managed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from scripts.length_distributions import (
    ALPACA,
    TRANSLATION,
    SimulatedRequest,
    chat_requests,
    poisson_requests,
)
from scripts.paging_runs import (
    NAMES,
    SYSTEMS,
    Experiment,
    Settings,
    Source,
    new_server,
    play,
    sources,
)
from scripts.paging_simulation import Server


def rates(settings: Settings) -> Experiment:
    """E2: the rate that each system sustains."""
    found: dict[str, dict[str, float]] = {}
    for source in sources(settings):

        def make(rate: float, source: Source = source) -> list[SimulatedRequest]:
            return source.make(rate=rate, seconds=settings.search_seconds, seed=settings.seed)

        found[source.name] = _rates_of(SYSTEMS, make, settings, source.name, source.rate)
    paper = {"ShareGPT-like": "1.7-2.7 / 2.7-8", "Alpaca-like": "less"}
    return _ratio_table(
        found,
        paper,
        settings,
        key="E2",
        title="sustained requests/s",
        paper_column="paper: paged / Oracle, / Max",
        notes=[
            "Of the paper's curves 8x Max is not reached at any threshold, and 2.7x Oracle depends"
            " on it.",
        ],
    )


def sampling_rates(settings: Settings) -> Experiment:
    """E4: the same with parallel sampling and with beams, on short requests."""
    found: dict[str, dict[str, float]] = {}
    source = Source.of(ALPACA, 30.0) if not settings.trace else sources(settings)[0]
    for width in settings.widths:
        found[f"{width} samples"] = _group_rates(source, width, settings, is_beam=False)
    widest = max(settings.widths)
    shorter = replace(settings, search_seconds=settings.search_seconds / 4)
    found[f"{widest} beams"] = _group_rates(source, widest, shorter, is_beam=True)
    return _ratio_table(
        found,
        {"6 beams": "2.3"},
        settings,
        key="E4",
        title=f"sustained requests/s, {source.name}, parallel sampling and beams",
        paper_column="paper: paged / Oracle",
        notes=[
            "The paper: 1.3 times Oracle with one sequence a request (here: E2), 2.3 times with 6"
            " beams. Oracle's beams copy what a lane takes over from another one. Beams are played"
            " for a quarter of the time.",
        ],
    )


def _group_rates(
    source: Source, width: int, settings: Settings, *, is_beam: bool
) -> dict[str, float]:
    def make(rate: float) -> list[SimulatedRequest]:
        return source.make(
            rate=rate,
            seconds=settings.search_seconds,
            seed=settings.seed,
            num_sequences=width,
            is_beam=is_beam,
        )

    label = f"{width} {'beams' if is_beam else 'samples'}"
    guess = source.rate * 2 / 3 / width
    return _rates_of(("oracle", "paged"), make, settings, label, guess)


def prefix_rates(settings: Settings) -> Experiment:
    """E6: translation with a prefix that all requests share."""
    found: dict[str, dict[str, float]] = {}
    for prefix in settings.prefixes:

        def make(rate: float, prefix: int = prefix) -> list[SimulatedRequest]:
            return poisson_requests(
                TRANSLATION,
                rate=rate,
                seconds=settings.search_seconds,
                seed=settings.seed,
                shared_prefix=prefix,
            )

        found[f"{prefix} tokens"] = _rates_of(
            ("oracle", "paged"), make, settings, f"prefix {prefix}", 12.0, prefix_caching=True
        )
    return _ratio_table(
        found,
        {"80 tokens": "1.67", "341 tokens": "3.58"},
        settings,
        key="E6",
        title="sustained requests/s, WMT16-like, shared prefix",
        paper_column="paper: paged / Oracle",
        notes=[
            "The lengths of the sentences are assumed (mean 35 tokens in and out).",
            "Prefixes are shared by whole pages: 80 of 80 and 336 of 341 tokens.",
        ],
    )


def chat_rates(settings: Settings) -> Experiment:
    """E7: chat, its history in the prompt."""

    def make(rate: float) -> list[SimulatedRequest]:
        return chat_requests(rate=rate, seconds=settings.search_seconds, seed=settings.seed)

    found = {"chat": _rates_of(SYSTEMS, make, settings, "chat", 1.0)}
    return _ratio_table(
        found,
        {"chat": "2 (all alike)"},
        settings,
        key="E7",
        title="sustained requests/s, chat (prompt cut to 1,024, answer at most 1,024)",
        paper_column="paper: paged / Oracle, / Max",
        notes=[
            "The turns before each question are assumed (geometric, mean 3); as in the paper"
            " without a prefix cache. Its three baselines reserve 1,024 for every answer and are"
            " alike; here Pow2 and Oracle go by the answer's length.",
        ],
    )


def sustained_rate(
    make_server: Callable[[], Server],
    make_requests: Callable[[float], list[SimulatedRequest]],
    settings: Settings,
    label: str,
    guess: float,
) -> float:
    """The highest rate, requests/s, whose mean normalised latency keeps the bound.

    Without a bound: what comes out of a server whose queue is never empty.
    """
    rush = play(
        make_server(),
        make_requests(3 * guess),
        settings,
        f"{label}, saturated",
        drain=False,
        warm_up=1 / 3,
    )
    bound = settings.bound
    if bound is None:
        return rush.throughput

    def keeps(rate: float) -> bool:
        outcome = play(
            make_server(),
            make_requests(rate),
            settings,
            f"{label} at {rate:.2f}/s",
            bound=bound,
        )
        return outcome.normalized_latency <= bound

    low = high = rush.throughput
    while keeps(high):
        low, high = high, high * 1.2
    while low == high or not keeps(low):
        low, high = low / 1.2, low
    while high / low > 1 + settings.precision:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def _rates_of(
    systems: Sequence[str],
    make: Callable[[float], list[SimulatedRequest]],
    settings: Settings,
    label: str,
    guess: float,
    **options: Any,
) -> dict[str, float]:
    found: dict[str, float] = {}
    for system in systems:
        own = options if system == "paged" else {}
        found[system] = guess = sustained_rate(
            lambda system=system, own=own: new_server(system, settings, **own),
            make,
            settings,
            f"{label} {system}",
            guess,
        )
    return found


def _ratio_table(
    found: dict[str, dict[str, float]],
    paper: dict[str, str],
    settings: Settings,
    *,
    key: str,
    title: str,
    paper_column: str,
    notes: list[str],
) -> Experiment:
    systems = list(next(iter(found.values())))
    baselines = [system for system in ("oracle", "max") if system in systems]
    rows = [
        [
            name,
            *(f"{rate[system]:.2f}" for system in systems),
            *(f"{rate['paged'] / rate[system]:.2f}" for system in baselines),
            paper.get(name, "-"),
        ]
        for name, rate in found.items()
    ]
    limit = "queue never empty"
    how = f"Played for {settings.search_seconds:g} simulated seconds; the first third is left out."
    if settings.bound is not None:
        limit = f"mean latency at most {settings.bound:g} s a token"
        how = (
            f"Each rate is played for {settings.search_seconds:g} simulated seconds, found to"
            f" {settings.precision:.0%}."
        )
    return Experiment(
        key=key,
        title=f"{title}, {limit}",
        columns=(
            "requests",
            *(NAMES[system] for system in systems),
            *(f"paged / {NAMES[system]}" for system in baselines),
            paper_column,
        ),
        rows=rows,
        notes=[
            how,
            *notes,
        ],
        figures=found,
    )
