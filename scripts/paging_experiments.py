"""The experiments that play requests: how many fit, at which rate, with what of the memory.

Owns what each experiment compares and its table; `paging_arithmetic.py` has those that need no
clock. Knows nothing of how memory is managed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from scripts.contiguous_pool import ContiguousServer, Policy
from scripts.length_distributions import (
    ALPACA,
    SHAREGPT,
    TRANSLATION,
    Lengths,
    SimulatedRequest,
    chat_requests,
    poisson_requests,
)
from scripts.paging_simulation import (
    NUM_POSITIONS,
    Outcome,
    PagedServer,
    Server,
    StepTime,
    simulate,
    sliding_mean,
)

POLICIES: tuple[Policy, ...] = ("max", "pow2", "oracle")
SYSTEMS = (*POLICIES, "paged")
NAMES = {"max": "Max", "pow2": "Pow2", "oracle": "Oracle", "paged": "paged"}
WINDOW = 60.0  # seconds of the sliding mean in the plot of E3
WARM_UP = 0.1  # of the simulated time
RUSH = 2.5  # times the paper's rate: no server keeps up, so the queue is never empty


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
    sharing_requests: int = 600  # of E5, for each width
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


def sources(settings: Settings) -> tuple[Source, ...]:
    """The trace alone, or both data sets."""
    if not settings.trace:
        return _of(SHAREGPT, 2.0), _of(ALPACA, 30.0)
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
        total=round(total), desc=label, unit="s", leave=False, disable=not settings.show_progress
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


def memory_shares(settings: Settings) -> Experiment:
    """E1: what the pool holds while the queue is never empty."""
    source = sources(settings)[0]
    requests = source.make(rate=RUSH * source.rate, seconds=settings.seconds, seed=settings.seed)
    memory = {
        system: play(
            new_server(system, settings),
            requests,
            settings,
            f"{system}, queue never empty",
            drain=False,
            warm_up=1 / 3,
        ).shares
        for system in SYSTEMS
    }
    return _memory_table(memory, settings)


def batched_requests(settings: Settings) -> Experiment:
    """E3: how many requests run at once, at the paper's rates."""
    batched: dict[str, dict[str, float]] = {}
    curves: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    slow = settings.step_time.with_2023_host()
    for source in sources(settings):
        batched[source.name] = {}
        requests = source.make(rate=source.rate, seconds=settings.seconds, seed=settings.seed)
        for system in (*SYSTEMS, "paged, 2023 host"):
            outcome = play(
                new_server(system.split(",")[0], settings),
                requests,
                settings,
                f"{source.name}, {system}",
                drain=False,
                step_time=slow if "host" in system else settings.step_time,
            )
            batched[source.name][system] = outcome.mean_requests
            curves[f"{source.name}/{system}"] = sliding_mean(outcome.timeline, WINDOW)
    return _batch_table(batched, curves, settings)


PAPER_MEMORY = {
    "max": (20.4, 13.3, 57.3, 8.9),
    "pow2": (26.8, 17.9, 41.6, 13.6),
    "oracle": (38.2, 25.2, 0.0, 36.6),
    "paged": (96.3, None, None, None),
}
PAPER_BATCHED = {
    "ShareGPT-like": (7.00, 9.81, 13.62, 30.42),
    "Alpaca-like": (7.00, 43.24, 72.75, 132.44),
}


def _memory_table(memory: dict[str, dict[str, float]], settings: Settings) -> Experiment:
    rows = []
    for system in SYSTEMS:
        shares = memory[system]
        values = [shares[k] for k in ("tokens", "reserved", "internal", "rounding", "free")]
        paper = " / ".join("-" if v is None else f"{v:g}" for v in PAPER_MEMORY[system])
        rows.append([NAMES[system], *(f"{100 * v:.1f}" for v in values), paper])
    taken = 1 - memory["paged"]["free"]
    useful = memory["paged"]["tokens"] / taken
    return Experiment(
        key="E1",
        title=f"what {NUM_POSITIONS:,} positions hold, % ({settings.pool}, queue never empty)",
        columns=(
            "system", "tokens", "reserved", "internal", "rounding", "free",
            "paper: tokens / reserved / internal / external",
        ),
        rows=rows,
        notes=[
            "Max holds by construction: the answers' spread was taken from its figures.",
            "The paper counts the rounding to a buddy block as internal for Pow2 and, as this table"
            " shows, as external for Oracle, whose internal share it gives as 0.",
            f"Of the positions in pages that are held, {100 * useful:.1f} % hold tokens; for paged,"
            " free is the next page of each running sequence, and what no waiting prompt fits in.",
        ],
        figures={"shares": memory, "paged_useful": useful},
    )  # fmt: skip


def _batch_table(
    batched: dict[str, dict[str, float]],
    curves: dict[str, tuple[Sequence[float], Sequence[float]]],
    settings: Settings,
) -> Experiment:
    columns = [*SYSTEMS, "paged, 2023 host"]
    at = ", ".join(f"{source.name} {source.rate:g}/s" for source in sources(settings))
    rows = []
    for source, means in batched.items():
        paper = " / ".join(f"{v:g}" for v in PAPER_BATCHED.get(source, ())) or "-"
        rows.append([source, *(f"{means[c]:.2f}" for c in columns), paper])
    return Experiment(
        key="E3",
        title=f"requests batched, mean ({at})",
        columns=(
            "requests",
            *(NAMES.get(c, c) for c in columns),
            "paper: Max / Pow2 / Oracle / paged",
        ),
        rows=rows,
        notes=[
            "A server that keeps up runs rate x answer x step time requests (Little's law), so what"
            " does not fill its memory shows how slow steps are, not how much memory there is. Our"
            " steps, by the data sheet, are faster than the paper's; '2023 host' adds the host time"
            " that the paper's two paged figures imply.",
            f"Means leave out the first {WARM_UP:.0%} of {settings.seconds:g} simulated seconds.",
        ],
        figures=batched,
        curves=curves,
    )  # fmt: skip


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
    """E4: the same with parallel sampling, on short requests."""
    found: dict[str, dict[str, float]] = {}
    for width in settings.widths:

        def make(rate: float, width: int = width) -> list[SimulatedRequest]:
            return _alpaca(settings).make(
                rate=rate,
                seconds=settings.search_seconds,
                seed=settings.seed,
                num_sequences=width,
            )

        found[f"n = {width}"] = _rates_of(
            ("oracle", "paged"), make, settings, f"n={width}", 20 / width
        )
    return _ratio_table(
        found,
        {},
        settings,
        key="E4",
        title="sustained requests/s, Alpaca-like, parallel sampling",
        paper_column="paper: paged / Oracle",
        notes=["The paper: 1.3x without samples; more with more of them."],
    )  # fmt: skip


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


def page_sizes(settings: Settings) -> Experiment:
    """E9: latency and memory by page size, near the rate that pages sustain."""
    loads = {source.name: source for source in sources(settings)}
    at = {"ShareGPT-like": 2.5, "Alpaca-like": 40.0}
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for name, source in loads.items():
        requests = source.make(
            rate=at.get(name, source.rate), seconds=settings.search_seconds, seed=settings.seed
        )
        figures[name] = {}
        for size in settings.page_sizes:
            outcome = play(
                new_server("paged", settings, page_size=size), requests, settings, f"page {size}"
            )
            figures[name][str(size)] = {
                "normalized_latency": outcome.normalized_latency,
                "waste": outcome.shares["internal"] / max(1 - outcome.shares["free"], 1e-9),
                "preemptions": outcome.num_preemptions,
            }
    rows = [
        [str(size)]
        + [
            text
            for name in loads
            for text in (
                f"{1e3 * figures[name][str(size)]['normalized_latency']:.1f}",
                f"{100 * figures[name][str(size)]['waste']:.1f}",
                f"{figures[name][str(size)]['preemptions']:.0f}",
            )
        ]
        for size in settings.page_sizes
    ]
    columns = ["page size"]
    for name in loads:
        columns += [f"{name} ms/token", "unused %", "preempted"]
    rate = ", ".join(f"{n} {at.get(n, s.rate):g}/s" for n, s in loads.items())
    return Experiment(
        key="E9",
        title=f"page size ({rate})",
        columns=columns,
        rows=rows,
        notes=[
            "Paper: best 16-128 on ShareGPT, 16-32 on Alpaca.",
            "Only the memory's side is simulated. That pages below 16 are slow is the attention"
            " kernel's doing; `--page-cost` gives a page a cost where one was measured (now"
            f" {settings.step_time.page_cost:g} positions).",
        ],
        figures=figures,
    )


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


def _of(lengths: Lengths, rate: float) -> Source:
    def make(**how: Any) -> list[SimulatedRequest]:
        return poisson_requests(lengths, **how)

    return Source(lengths.name, rate, make)


def _alpaca(settings: Settings) -> Source:
    return _of(ALPACA, 30.0) if not settings.trace else sources(settings)[0]
