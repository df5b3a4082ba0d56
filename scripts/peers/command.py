"""`bench_engine.py --compare`: its options, and what it prints."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import checkout
from ..workloads import Workloads
from .catalog import OURS, PEERS, Starter, not_installed
from .compare import Comparer, Comparison, Results
from .comparison_table import comparison_table
from .processes import PeerFailed

_PROBE_SECONDS = 120.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of a comparison."""
    group = parser.add_argument_group("comparison with other engines")
    group.add_argument("--compare", nargs="+", metavar="PEER", help=f"of {', '.join(PEERS)}")
    group.add_argument(
        "--peer-python",
        action="append",
        default=[],
        metavar="PEER=PATH",
        help="the interpreter that has this engine (default: this one)",
    )
    group.add_argument(
        "--peer-models", type=Path, metavar="DIR", help="what scripts/peers/export_model.py wrote"
    )
    group.add_argument(
        "--concurrency", default="32", help="requests at once, comma-separated (default 32)"
    )
    group.add_argument("--threads", type=int, help="of each engine (default: one a core)")
    group.add_argument(
        "--peer-timeout",
        type=float,
        default=900.0,
        metavar="S",
        help="seconds that an engine may take to start, or for one run (default 900)",
    )


def compare_engines(
    args: argparse.Namespace, workloads: Workloads, options: Mapping[str, Any]
) -> int:
    """Compares, prints a table and one JSON line.

    Args:
      args: of `bench_engine.py`.
      options: of our engine.

    Returns:
      the exit status: 0, 1 when an engine failed, 2 when nothing was started.
    """
    try:
        cores = _cores(args.threads)
        starter = Starter(_pythons(args), cores)
        asked = Comparison(
            peers=_peers(args),
            workloads=workloads.requests,
            vocab_size=workloads.vocab_size,
            dtypes=args.dtype.split(","),
            concurrencies=_concurrencies(args.concurrency),
            repeat=args.repeat,
            threads=len(cores),
            timeout=args.peer_timeout,
            model=args.model,
            models=args.peer_models,
            options=options,
            max_ttft_ms=args.max_ttft_ms,
            max_tbt_ms=args.max_tbt_ms,
        )
        for name in asked.peers:
            probe(starter, name)
    except (ValueError, PeerFailed) as error:
        print(f"bench_engine: {error}", file=sys.stderr)
        return 2
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > len(cores) / 2:
        _note(f"other programs run here (load {os.getloadavg()[0]:.1f}): figures will be too low")
    results = Comparer(asked, starter, _note).run()
    report(results, args.workload, cores)
    return 1 if results.failures else 0


def probe(starter: Starter, name: str) -> None:
    """Asks a peer's Python whether it has the engine.

    Raises:
      PeerFailed: it has not; says how to install it.
    """
    try:
        worker = starter(name)
        try:
            worker.ask({"do": "find"}, _PROBE_SECONDS)
        finally:
            worker.close()
    except PeerFailed as failure:
        raise PeerFailed(not_installed(name, str(failure))) from failure


def report(results: Results, workload: Path, cores: list[int]) -> None:
    """For people, then for programs."""
    if results.rows:
        print(comparison_table(results.rows))
    for line in results.failures:
        print(f"FAILED {line}")
    environment = {
        "git": checkout.commit(),
        "workload_file": workload.name,
        "cores": len(cores),
        "engines": results.engines,
    }
    print(json.dumps(environment | {"rows": results.rows, "failures": results.failures}))


def _peers(args: argparse.Namespace) -> list[str]:
    named = [name for word in args.compare for name in word.split(",")]
    unknown = [name for name in named if name not in PEERS]
    if unknown:
        raise ValueError(f"`--compare` must be of {', '.join(PEERS)}. Got {', '.join(unknown)}.")
    return list(dict.fromkeys(named))


def _pythons(args: argparse.Namespace) -> dict[str, str]:
    pythons = {}
    for word in args.peer_python:
        name, equals, path = word.partition("=")
        if name not in {OURS, *PEERS} or not equals or not path:
            raise ValueError(
                f"`--peer-python` must be NAME=PATH, with a name of {', '.join(PEERS)}. "
                f"Got {word!r}."
            )
        pythons[name] = path
    return pythons


def _concurrencies(words: str) -> list[int]:
    try:
        counts = [int(word) for word in words.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise ValueError(f"`--concurrency` must be whole numbers, 1 or more. Got {words!r}.")
    return counts


def _cores(threads: int | None) -> list[int]:
    """Ids of the cores that the engines may use: as many as they have threads."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))
    if threads is not None and not 1 <= threads <= len(cores):
        raise ValueError(f"`--threads` must be 1 to {len(cores)}, the cores here. Got {threads}.")
    return cores[:threads]


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
