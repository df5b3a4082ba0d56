"""E1, E3 and E9: what the memory holds, how many requests run at once, the size of a page.

Knows nothing of how memory is managed.
"""

from __future__ import annotations

from collections.abc import Sequence

from scripts.paging_runs import (
    NAMES,
    SYSTEMS,
    WARM_UP,
    Experiment,
    Settings,
    new_server,
    play,
    sources,
)
from scripts.paging_simulation import NUM_POSITIONS, sliding_mean

WINDOW = 60.0  # seconds of the sliding mean in the plot of E3
RUSH = 2.5  # times the paper's rate: no server keeps up, so the queue is never empty
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
