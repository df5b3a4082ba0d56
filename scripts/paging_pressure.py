"""E10B: swap, recompute and auto in the scheduler, while far more is asked for than fits.

Owns the two workloads, one for each mode to win, and the machine for both. Knows nothing of how
a mode is carried out.
"""

from __future__ import annotations

from dataclasses import replace

from scripts.length_distributions import (
    ALPACA,
    SHAREGPT,
    Lengths,
    SimulatedRequest,
    poisson_requests,
)
from scripts.paging_runs import Experiment, Settings, play
from scripts.paging_simulation import NUM_POSITIONS, Outcome, PagedServer, StepTime

MODES = ("recompute", "swap", "auto")
OVERLOAD = 4  # times what fits is asked for, all of it at once
# Both on one machine. A page moves whole, and only what is computed of it is computed again: where
# sequences are long, nearly all of a page is tokens, and moving them is cheaper at this link's
# speed (it would cost the same at 9.8 GB/s); short ones leave most of their one or two pages empty.
WORKLOADS = {"long (ShareGPT-like)": SHAREGPT, "short (Alpaca-like)": ALPACA}
PAGE_SIZE = 64
HOST_BANDWIDTH = 14e9  # bytes/s between host and device


def pressure(settings: Settings) -> Experiment:
    """E10B: seconds until a burst of four times what fits is answered, by mode."""
    time = replace(settings.step_time, host_bandwidth=HOST_BANDWIDTH)
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for name, lengths in WORKLOADS.items():
        requests = burst(lengths, settings)
        figures[name] = {
            mode: _figures(server, play(server, requests, settings, mode, step_time=time))
            for mode in MODES
            for server in [server_of(mode, time)]
        }
    rows = [
        [
            name,
            mode,
            f"{found['seconds']:.2f}",
            f"{found['latency']:.2f}",
            f"{found['preemptions']:.0f}",
            f"{found['swaps']:.0f}",
            f"{found['moved_pages']:.0f}",
            f"{found['recomputed_tokens']:.0f}",
        ]
        for name, modes in figures.items()
        for mode, found in modes.items()
    ]
    return Experiment(
        key="E10B",
        title=f"a burst of {OVERLOAD} times what fits, pages of {PAGE_SIZE}",
        columns=(
            "sequences",
            "mode",
            "all answered, s",
            "mean latency, s",
            "preempted",
            "swapped",
            "pages moved",
            "tokens recomputed",
        ),
        rows=rows,
        notes=[
            f"{HOST_BANDWIDTH / 1e9:g} GB/s between host and device. The host pool is as large as"
            " the device's, the paper's limit. A step waits for its transfers: nothing is taken to"
            " overlap. `auto` weighs with the simulated rates.",
        ],
        figures=figures,
    )


def burst(lengths: Lengths, settings: Settings) -> list[SimulatedRequest]:
    """Requests whose tokens in the end are four times the pool, all there at the start."""
    requests: list[SimulatedRequest] = []
    total = 0
    for request in poisson_requests(lengths, rate=1.0, seconds=2000.0, seed=settings.seed):
        if total + request.total_tokens > OVERLOAD * NUM_POSITIONS:
            break
        total += request.total_tokens
        requests.append(replace(request, arrival=0.0))
    return requests


def server_of(mode: str, time: StepTime) -> PagedServer:
    """An empty server with as many pages on the host as on the device; only pages are scarce."""
    num_pages = PagedServer(page_size=PAGE_SIZE).config.num_pages - 1
    return PagedServer(
        page_size=PAGE_SIZE,
        max_num_seqs=1024,
        rates_of=time,
        preemption_mode=mode,
        num_host_pages=num_pages,
    )


def _figures(server: PagedServer, outcome: Outcome) -> dict[str, float]:
    swap = server.scheduler.stats.swap
    return {
        "seconds": outcome.seconds,
        "latency": sum(outcome.latencies) / len(outcome.latencies),
        "preemptions": outcome.num_preemptions,
        "swaps": swap.num_swaps,
        "moved_pages": swap.num_pages_out + swap.num_pages_in,
        "recomputed_tokens": swap.num_recomputed_tokens,
    }
