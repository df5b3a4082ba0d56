"""Engines in turn on the same workloads: alternating, one awake at a time, as ratios.

In each repetition every engine runs the workload once, and another one begins each time; a ratio is
taken within a repetition, so that what slows the machine for a while slows both sides of it. The
first repetition warms up and is not counted. Each repetition has another first token in every
prompt, so that no engine finds what it kept of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..workloads import Requests, varied
from . import measures
from .catalog import OURS, model_path
from .processes import PeerFailed, PeerProcess

_LENGTH_STEP = 64  # max_model_len is rounded up to it


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What is to be compared.

    Attributes:
      peers: names of engines, without ours.
      workloads: requests by name; `vocab_size` bounds their token ids.
      repeat: counted repetitions.
      threads: of each engine. `timeout`: seconds for a start or a run.
      model, options: ours. `models`: folder of the peers' models.
      max_ttft_ms, max_tbt_ms: bounds of goodput.
    """

    peers: Sequence[str]
    workloads: Mapping[str, Requests]
    vocab_size: int
    dtypes: Sequence[str]
    concurrencies: Sequence[int]
    repeat: int
    threads: int
    timeout: float
    model: str
    models: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    max_ttft_ms: float = 1000.0
    max_tbt_ms: float = 200.0

    @property
    def max_model_len(self) -> int:
        """Enough for the longest request of all."""
        longest = max(
            len(request["prompt_ids"]) + request["max_new"]
            for requests in self.workloads.values()
            for request in requests
        )
        return -(-longest // _LENGTH_STEP) * _LENGTH_STEP


@dataclass(slots=True)
class Results:
    """What came out: a row for each engine and workload, what failed, who took part."""

    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    failures: list[str] = field(default_factory=list[str])
    engines: dict[str, Any] = field(default_factory=dict[str, Any])


class Comparer:
    """Runs a comparison.

    Args:
      start: gives an engine's worker, asleep; raises `PeerFailed`.
      note: is told what happens, line by line.
    """

    def __init__(
        self,
        asked: Comparison,
        start: Callable[[str], PeerProcess],
        note: Callable[[str], None],
    ) -> None:
        self._asked = asked
        self._start = start
        self._note = note
        self.results = Results()

    def run(self) -> Results:
        """Everything that is asked; an engine that fails sits out until the next start.

        Ctrl-C ends it with the rows that are complete.
        """
        try:
            for dtype in self._asked.dtypes:
                for concurrency in self._asked.concurrencies:
                    self._setting(dtype, concurrency)
        except KeyboardInterrupt:
            self.results.failures.append("interrupted: the workloads that follow were not run")
        return self.results

    def _setting(self, dtype: str, concurrency: int) -> None:
        """Starts all engines for one dtype and concurrency, and runs every workload."""
        engines: dict[str, PeerProcess] = {}
        try:
            for name in (OURS, *self._asked.peers):
                self._load(engines, name, dtype, concurrency)
            for workload in self._asked.workloads:
                where = {"workload": workload, "concurrency": concurrency, "dtype": dtype}
                self.results.rows += self._rows(engines, where)
        finally:
            for engine in engines.values():
                engine.close()

    def _load(
        self, engines: dict[str, PeerProcess], name: str, dtype: str, concurrency: int
    ) -> None:
        asked = self._asked
        self._note(f"{name}: starts in {dtype} for {concurrency} at once")
        try:
            ours = name == OURS
            settings = {
                "model": asked.model if ours else str(model_path(name, asked.models, dtype)),
                "dtype": dtype,
                "concurrency": concurrency,
                "threads": asked.threads,
                "max_model_len": asked.max_model_len,
                "kv_tokens": asked.max_model_len * concurrency,
                "options": dict(asked.options) if ours else {},
            }
            engines[name] = self._start(name)
            told = engines[name].ask({"do": "load", "settings": settings}, asked.timeout)
            self.results.engines[name] = told
        except PeerFailed as failure:
            self._fail(engines, name, f"{failure} (start in {dtype} for {concurrency} at once)")

    def _rows(self, engines: dict[str, PeerProcess], where: dict[str, Any]) -> list[dict[str, Any]]:
        """One workload on all engines that are left."""
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
        for repetition in range(self._asked.repeat + 1):
            for name in in_turn(list(engines), repetition):
                try:
                    run = self._run(engines[name], where["workload"], repetition)
                except PeerFailed as failure:
                    del runs[name]
                    self._fail(engines, name, f"{failure} ({_said(where)}, run {repetition})")
                    continue
                speed = tokens_per_s(run)
                self._note(f"{name}: {_said(where)}, run {repetition}: {speed:.1f} tokens/s")
                if repetition:
                    runs[name].append(run)
        peaks = {name: engines[name].peak_rss_mib() for name in runs}
        bounds = (self._asked.max_ttft_ms, self._asked.max_tbt_ms)
        return [
            {"engine": name, **where, "peak_rss_mib": peaks[name]}
            | row(runs[name], None if name == OURS else runs.get(OURS), bounds)
            for name in runs
        ]

    def _run(self, engine: PeerProcess, workload: str, repetition: int) -> dict[str, Any]:
        requests = varied(self._asked.workloads[workload], repetition, self._asked.vocab_size)
        return engine.ask({"do": "run", "requests": requests}, self._asked.timeout)

    def _fail(self, engines: dict[str, PeerProcess], name: str, line: str) -> None:
        self._note(line)
        self.results.failures.append(line)
        if name in engines:
            engines.pop(name).close()


def in_turn(names: Sequence[str], repetition: int) -> list[str]:
    """Who runs when: another one begins in each repetition."""
    first = repetition % len(names) if names else 0
    return [*names[first:], *names[:first]]


def tokens_per_s(run: Mapping[str, Any]) -> float:
    """Output tokens over the time from the start to the last token."""
    return sum(len(request["tokens"]) for request in run["requests"]) / run["seconds"]


def row(
    runs: Sequence[dict[str, Any]],
    ours: Sequence[dict[str, Any]] | None,
    bounds: tuple[float, float],
) -> dict[str, Any]:
    """Figures of one engine on one workload.

    Args:
      runs: the counted ones.
      ours: pagedjax' runs of the same repetitions; None: these are ours, or it failed.
      bounds: of goodput: milliseconds to the first token and between tokens.
    """
    speeds = [tokens_per_s(run) for run in runs]
    kept = [measures.goodput(run["requests"], run["seconds"], *bounds) for run in runs]
    waits = [measures.latencies(run["requests"]) for run in runs]
    figures: dict[str, Any] = {
        "output_tokens_per_s": measures.spread(speeds),
        "runs": [round(speed, 2) for speed in speeds],
        "open_loop": any(request["arrival_s"] for request in runs[0]["requests"]),
        "latency": {key: measures.spread([w[key] for w in waits])["median"] for key in waits[0]},
        "goodput": {key: measures.spread([k[key] for k in kept])["median"] for key in kept[0]},
        "ratio": None,
        "agreement": None,
    }
    if ours is not None:
        figures["ratio"] = measures.paired_ratios([tokens_per_s(run) for run in ours], speeds)
        answers = [
            [request["tokens"] for run in side for request in run["requests"]]
            for side in (ours, runs)
        ]
        figures["agreement"] = measures.agreement(*answers)
    return figures


def _said(where: Mapping[str, Any]) -> str:
    return f"{where['workload']} at {where['concurrency']} in {where['dtype']}"
