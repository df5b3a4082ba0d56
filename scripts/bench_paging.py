#!/usr/bin/env python3
"""The PagedAttention paper's memory experiments, on this project's scheduler: tables, a JSON line.

The scheduler, the allocator and the page tables are the real ones; the device and the clock are
simulated, so no accelerator and no model is needed. The set-up is the paper's: OPT-13B on an A100
with 40 GB, 12 GiB of keys and values, 15,728 positions. Beside pages run the paper's contiguous
baselines on the same arrivals: Max (reserves 2,048 positions), Pow2 (the next power of two of the
answer) and Oracle (knows the answer's length), over buddy blocks.

  E1   what the memory holds                E6   a prefix that requests share
  E2   requests/s at a bound on latency     E7   chat
  E3   requests batched                     E9   page size
  E4   parallel sampling                    E10  swap against recompute
  E5   pages saved by samples and beams     E10B both, and auto, in the scheduler
                                            E11  the paper's example, exact

E2, E4, E6 and E7 look for the highest rate whose mean latency keeps `--latency-bound`; with
`--quick` they measure what comes out of a queue that is never empty instead.

A trace (`--trace`) is JSON lines of {"arrival": seconds, "prompt_tokens": n, "output_tokens": n},
or a workload file of bench_engine.py with arrival times; it takes the place of both data sets.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tqdm import tqdm  # noqa: E402

from scripts import (  # noqa: E402
    checkout,
    paging_arithmetic,
    paging_experiments,
    paging_plots,
    paging_pressure,
    paging_rates,
)
from scripts.contiguous_pool import POOLS  # noqa: E402
from scripts.length_distributions import SimulatedRequest, read_trace  # noqa: E402
from scripts.paging_runs import Experiment, Settings  # noqa: E402
from scripts.paging_simulation import KV_BYTES, NUM_POSITIONS, StepTime  # noqa: E402

QUICK: dict[str, Any] = {
    "seconds": 150.0,
    "search_seconds": 45.0,
    "bound": None,
    "page_sizes": (1, 16, 64, 256),
    "sharing_requests": 60,
    "widths": (2, 6),
}
KEYS = ("E1", "E2", "E3", "E4", "E5", "E6", "E7", "E9", "E10", "E10B", "E11")
STEP_TIME_OPTIONS = {  # option -> field of StepTime, unit of the option, its help
    "weight-gb": ("weight_bytes", 1e9, "weights, read once a step"),
    "gflop-per-token": ("flops_per_token", 1e9, "operations a token"),
    "bandwidth-gbs": ("bandwidth", 1e9, "memory bandwidth reached, GB/s"),
    "tflops": ("flops", 1e12, "arithmetic reached, TFLOP/s"),
    "host-bandwidth-gbs": ("host_bandwidth", 1e9, "between host and device, GB/s"),
    "overhead-ms": ("overhead", 1e-3, "host time that every step waits for"),
    "overhead-per-sequence-ms": ("overhead_per_sequence", 1e-3, "and more for each sequence"),
    "page-cost": ("page_cost", 1.0, "reading a page costs as so many positions more"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Parses, simulates, prints."""
    args = _arguments(argv)
    try:
        if args.plots is not None:
            paging_plots.require_matplotlib()
        settings = settings_of(args)
    except (ModuleNotFoundError, OSError, ValueError) as error:
        print(f"bench_paging: {error}", file=sys.stderr)
        return 2
    started = time.perf_counter()
    experiments: list[Experiment] = []
    for experiment in run(settings, args.only or KEYS):
        experiments.append(experiment)
        tqdm.write(table(experiment) + "\n", file=sys.stdout)
        sys.stdout.flush()  # a long run that is cut short has said what it knows
    if args.plots is not None:
        for path in paging_plots.save(experiments, args.plots):
            print(f"wrote {path}", file=sys.stderr)
    print(json.dumps(_environment(args, settings, started) | figures(experiments)))
    return 0


def run(settings: Settings, keys: Sequence[str]) -> Iterator[Experiment]:
    """The chosen experiments, in the order of their numbers, each as soon as it is done."""
    makers: dict[str, Callable[[Settings], Experiment]] = {
        "E1": paging_experiments.memory_shares,
        "E2": paging_rates.rates,
        "E3": paging_experiments.batched_requests,
        "E4": paging_rates.sampling_rates,
        "E5": paging_arithmetic.sharing,
        "E6": paging_rates.prefix_rates,
        "E7": paging_rates.chat_rates,
        "E9": paging_experiments.page_sizes,
        "E10": paging_arithmetic.preemption_costs,
        "E10B": paging_pressure.pressure,
        "E11": paging_arithmetic.example,
    }
    wanted = [key for key in KEYS if key in keys]
    with tqdm(wanted, unit="experiment", disable=None if settings.show_progress else True) as bar:
        for key in bar:
            bar.set_description(key)
            yield makers[key](settings)


def table(experiment: Experiment) -> str:
    """An experiment for people."""
    head = list(experiment.columns)
    widths = [max(len(row[i]) for row in [head, *experiment.rows]) for i in range(len(head))]
    lines = [f"{experiment.key}: {experiment.title}"]
    lines += [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [head, *experiment.rows]
    ]
    return "\n".join([*lines, *(f"  {note}" for note in experiment.notes)])


def figures(experiments: Sequence[Experiment]) -> dict[str, Any]:
    """All figures, rounded, under the experiments' keys."""
    return {experiment.key: _rounded(experiment.figures) for experiment in experiments}


def settings_of(args: argparse.Namespace) -> Settings:
    """What the options ask for; `--quick` changes only what was not given.

    Raises:
      ValueError, OSError: the trace cannot be used.
    """
    step_time = {
        name: getattr(args, option.replace("-", "_")) * unit
        for option, (name, unit, _) in STEP_TIME_OPTIONS.items()
        if getattr(args, option.replace("-", "_")) is not None
    }
    trace: Sequence[SimulatedRequest] = () if args.trace is None else read_trace(args.trace)
    given = {
        "seconds": args.seconds,
        "search_seconds": args.search_seconds,
        "bound": args.latency_bound,
    }
    values: dict[str, Any] = dict(QUICK) if args.quick else {}
    values |= {name: value for name, value in given.items() if value is not None}
    return Settings(
        seed=args.seed,
        pool=args.allocator,
        max_num_seqs=args.max_num_seqs,
        step_time=StepTime(**step_time),
        trace=trace,
        **values,
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="all of it in less than a minute")
    parser.add_argument(
        "--only", type=_keys, metavar="E1,E2", help=f"of {', '.join(KEYS)} (default: all)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", type=Path, help="play these requests")
    parser.add_argument("--seconds", type=_positive, help="simulated, of E1 and E3 (default 3600)")
    parser.add_argument(
        "--search-seconds", type=_positive, help="simulated, of each other run (default 900)"
    )
    parser.add_argument(
        "--latency-bound", type=_positive, help="seconds an output token (default 0.5)"
    )
    parser.add_argument("--allocator", choices=sorted(POOLS), default="buddy")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write PNG and SVG there")
    model = parser.add_argument_group("step time (defaults: OPT-13B on an A100 by data sheet)")
    defaults = StepTime()
    for option, (name, unit, meaning) in STEP_TIME_OPTIONS.items():
        default = getattr(defaults, name) / unit
        model.add_argument(f"--{option}", type=_number, help=f"{meaning} (default {default:g})")
    return parser.parse_args(argv)


def _keys(text: str) -> list[str]:
    keys = text.upper().split(",")
    unknown = [key for key in keys if key not in KEYS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no experiment {unknown}; there are {', '.join(KEYS)}")
    return keys


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number. Got {text}.")
    return value


def _number(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number, not negative. Got {text}.")
    return value


def _environment(args: argparse.Namespace, settings: Settings, started: float) -> dict[str, Any]:
    return {
        "git": checkout.commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "quick": args.quick,
        "seed": settings.seed,
        "seconds": settings.seconds,
        "search_seconds": settings.search_seconds,
        "latency_bound": settings.bound,
        "allocator": settings.pool,
        "max_num_seqs": settings.max_num_seqs,
        "trace": None if args.trace is None else args.trace.name,
        "kv_bytes": KV_BYTES,
        "positions": NUM_POSITIONS,
        "wall_seconds": round(time.perf_counter() - started, 1),
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return round(value, 5) if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
