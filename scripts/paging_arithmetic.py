"""E5, E10 and E11: what sharing saves, what giving pages up costs, the paper's exact sums."""

from __future__ import annotations

from pagedjax.paging import PageAllocator, PageTable
from scripts.contiguous_pool import BuddyPool, asked_positions
from scripts.length_distributions import MAX_MODEL_LEN
from scripts.paging_runs import Experiment, Settings, Source, new_server, play, sources
from scripts.paging_simulation import (
    ITEMSIZE,
    NUM_LAYERS,
    NUM_POSITIONS,
    POSITION_BYTES,
    StepTime,
    page_layout,
)

PAGE_SIZE = 16
PAPER_SHARING = {
    "Alpaca-like": {"samples": "6.09 / 8.53 / 9.79", "beams": "37.56 / 53.13 / 55.16"},
    "ShareGPT-like": {"samples": "16.2 to 30.5", "beams": "44.3 to 66.3"},
}
KINDS = {  # of sequences -> share of the steps in which beams compete
    "samples": None,
    "beams, competing every step": 1.0,
    "beams, every third step": 1 / 3,
}
# Requests/s that keep up at n = 6. With more, samples give way and are computed again one by one,
# without a prefix cache each on pages of its own: at 0.6 and n = 6 ShareGPT-like ones saved 8 %.
SHARING_RATES = {"ShareGPT-like": 0.2, "Alpaca-like": 6.0}
COPY_LATENCY = 5e-6  # seconds that starting one copy between host and device takes
EVICTED_TOKENS = 458  # of a running ShareGPT request, in the mean


def sharing(settings: Settings) -> Experiment:
    """E5: pages saved by sharing, of those that sequences of their own would take."""
    figures: dict[str, dict[str, dict[str, float]]] = {}
    rows: list[list[str]] = []
    for source in sources(settings):
        found = figures[source.name] = {kind: dict[str, float]() for kind in KINDS}
        for width in settings.widths:
            for kind, turnover in KINDS.items():
                found[kind][str(width)] = saved_pages(source, width, turnover, settings)
        for kind, saved in found.items():
            paper = PAPER_SHARING.get(source.name, {}).get(kind.split(",")[0], "-")
            values = " / ".join(f"{100 * value:.2f}" for value in saved.values())
            rows.append([source.name, kind, values, paper])
    widths = " / ".join(str(width) for width in settings.widths)
    return Experiment(
        key="E5",
        title=f"pages of {PAGE_SIZE} saved by sharing, %, for {widths} sequences a request",
        columns=("requests", "kind", f"saved: {widths}", "paper: 2 / 4 / 6"),
        rows=rows,
        notes=[
            "Samples run in the scheduler. They share the full pages of their prompts, so that the"
            " prompts' spread, which is assumed, decides the figure.",
            "Beams search in the scheduler too, over random offers, in every step or, since a model"
            " that is sure of its next token leaves the lanes as they are, in a third of the steps."
            " How often real models make lanes compete is not published; it decides the figure for"
            " wide beams.",
        ],
        figures=figures,
    )


def saved_pages(source: Source, width: int, turnover: float | None, settings: Settings) -> float:
    """Share of the pages, over time, that requests of so many sequences save by sharing."""
    rate = SHARING_RATES.get(source.name, source.rate / 4)
    count = settings.sharing_requests
    if turnover is not None:
        count //= 3  # every token of a beam costs the host as much as several of samples
    requests = source.make(
        rate=rate,
        seconds=count / rate,
        seed=settings.seed,
        num_sequences=width,
        is_beam=turnover is not None,
    )
    server = new_server("paged", settings, turnover=turnover or 0.0, seed=settings.seed)
    label = f"{source.name}, {width} {'samples' if turnover is None else 'beams'}"
    return play(server, requests, settings, label, drain=False).saved_pages


def preemption_costs(settings: Settings) -> Experiment:
    """E10: what it takes to give one sequence's pages up and get them back, by page size."""
    time = settings.step_time
    recompute = EVICTED_TOKENS * time.flops_per_token / time.flops
    figures: dict[str, dict[str, float]] = {}
    for size in settings.page_sizes:
        figures[str(size)] = {
            "recompute": recompute,
            "swap_page_by_page": 2 * _swap_seconds(size, time, copies_per_page=2 * NUM_LAYERS),
            "swap_gathered": 2 * _swap_seconds(size, time, copies_per_page=0),
        }
    rows = [
        [size, *(f"{1e3 * seconds:.1f}" for seconds in costs.values())]
        for size, costs in figures.items()
    ]
    return Experiment(
        key="E10",
        title=f"ms to give up and get back {EVICTED_TOKENS} tokens",
        columns=("page size", "recompute", "swap, a copy a page and layer", "swap, gathered"),
        rows=rows,
        notes=[
            "Paper: recompute flat; swap bad with small pages; equal at 16-64.",
            f"Arithmetic: {time.host_bandwidth / 1e9:g} GB/s between host and device,"
            f" {COPY_LATENCY * 1e6:g} us to start a copy. The paper's system copies K and V of each"
            " layer of each page; gathered means one transfer each way, as the plan's page moves"
            " allow: then the page size does not matter.",
        ],
        figures=figures,
    )


def _swap_seconds(page_size: int, time: StepTime, *, copies_per_page: int) -> float:
    """One way."""
    pages = page_layout(page_size).pages_for(EVICTED_TOKENS)
    num_bytes = pages * page_size * POSITION_BYTES
    copies = pages * copies_per_page or 1
    return copies * COPY_LATENCY + num_bytes / time.host_bandwidth


def example(settings: Settings) -> Experiment:
    """E11, and the other figures that are exact: no setting changes them."""
    del settings
    requests, used = 100, 300
    layout = page_layout(PAGE_SIZE)
    allocator = PageAllocator(requests * layout.pages_for(MAX_MODEL_LEN) + 1)
    tables = [PageTable(allocator, PAGE_SIZE) for _ in range(requests)]
    for table in tables:
        table.append(used)
    figures = {
        "reserved": requests * asked_positions("max", used, 1),
        "used": sum(table.num_tokens for table in tables),
        "pages_each": layout.pages_for(used),
        "paged": allocator.num_held * PAGE_SIZE,
        "position_bytes": layout.page_bytes // PAGE_SIZE,
        "positions": NUM_POSITIONS,
        "max_requests": _fill(BuddyPool(NUM_POSITIONS)),
    }
    figures["external"] = NUM_POSITIONS - figures["max_requests"] * MAX_MODEL_LEN
    share = figures["external"] / NUM_POSITIONS
    return Experiment(
        key="E11",
        title=f"the paper's example: {requests} requests of {used} tokens, exact",
        columns=("figure", "here", "paper"),
        rows=[
            ["positions reserved to the maximum", f"{figures['reserved']:,}", "204,800"],
            ["positions that hold tokens", f"{figures['used']:,}", "30,000"],
            ["pages of 16 a request", f"{figures['pages_each']}", "19"],
            ["positions in pages", f"{figures['paged']:,}", "30,400"],
            ["KiB a position", f"{figures['position_bytes'] / 1024:g}", "800"],
            ["positions in 12 GiB", f"{figures['positions']:,}", "15.7K"],
            ["requests of 2,048 that fit", f"{figures['max_requests']}", "7.00"],
            ["external fragmentation of Max, %", f"{100 * share:.2f}", "8.9"],
        ],
        notes=[f"Pages by the real allocator and page tables; {ITEMSIZE} bytes an element."],
        figures=figures,
    )


def _fill(pool: BuddyPool) -> int:
    """Requests of the maximum length that fit."""
    count = 0
    while pool.allocate(MAX_MODEL_LEN) is not None:
        count += 1
    return count
