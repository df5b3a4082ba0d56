"""E10B: swap, recompute and auto in the scheduler, while far more is asked for than fits.

Owns the two settings, one for each mode to win. Knows nothing of how a mode is carried out.
"""

from __future__ import annotations

from dataclasses import replace

from scripts.length_distributions import SHAREGPT, SimulatedRequest, poisson_requests
from scripts.paging_runs import Experiment, Settings, play
from scripts.paging_simulation import NUM_POSITIONS, Outcome, PagedServer, StepTime

MODES = ("recompute", "swap", "auto")
OVERLOAD = 4  # times what fits is asked for, all of it at once
# bytes/s between host and device, of the wide link that the other experiments have and of a narrow
# one. Moving a position both ways and computing it cost the same at 9.8 GB/s.
LINKS = {"wide link": 25e9, "narrow link": 4e9}


def pressure(settings: Settings) -> Experiment:
    """E10B: seconds until a burst of four times what fits is answered, by mode."""
    requests = burst(settings)
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for link, bandwidth in LINKS.items():
        time = replace(settings.step_time, host_bandwidth=bandwidth)
        figures[link] = {
            mode: _figures(server, play(server, requests, settings, mode, step_time=time))
            for mode in MODES
            for server in [server_of(mode, time, settings)]
        }
    rows = [
        [
            f"{link}, {LINKS[link] / 1e9:g} GB/s",
            mode,
            f"{found['seconds']:.1f}",
            f"{found['latency']:.1f}",
            f"{found['preemptions']:.0f}",
            f"{found['swaps']:.0f}",
            f"{found['moved_pages']:.0f}",
            f"{found['recomputed_tokens']:.0f}",
        ]
        for link, modes in figures.items()
        for mode, found in modes.items()
    ]
    return Experiment(
        key="E10B",
        title=f"a burst of {len(requests)} requests, {OVERLOAD} times what fits",
        columns=(
            "between host and device",
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
            "The host pool is as large as the device's, the paper's limit. A step waits for its"
            " transfers: nothing is taken to overlap. `auto` weighs with the simulated rates.",
        ],
        figures=figures,
    )


def burst(settings: Settings) -> list[SimulatedRequest]:
    """Requests whose tokens in the end are four times the pool, all there at the start."""
    requests: list[SimulatedRequest] = []
    total = 0
    for request in poisson_requests(SHAREGPT, rate=1.0, seconds=1000.0, seed=settings.seed):
        if total + request.total_tokens > OVERLOAD * NUM_POSITIONS:
            break
        total += request.total_tokens
        requests.append(replace(request, arrival=0.0))
    return requests


def server_of(mode: str, time: StepTime, settings: Settings) -> PagedServer:
    """An empty server with as many pages on the host as on the device."""
    num_pages = PagedServer().config.num_pages - 1
    return PagedServer(
        max_num_seqs=settings.max_num_seqs,
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
