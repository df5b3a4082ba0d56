#!/usr/bin/env python3
"""Measures the engine on a workload file and prints a table, then one JSON line.

A workload file is `{"workloads": {name: {"desc", "requests": [{"prompt_ids", "max_new",
"arrival_s"?}]}}}`; eos is ignored. Each repetition changes every prompt's first token, so that no
repetition finds the pages of the one before. Requests with an `arrival_s` come then, whether the
engine keeps up or not, and their times count from there; `--rate-scale 2` lets twice as many come a
second, `--rate-scale inf` all at once. A request is good when its first token came within
`--max-ttft-ms` and the others, on average, `--max-tbt-ms` apart or less.

`--compare vllm openvino` runs the same workloads on those engines too, alternating, each in a
process (and, with `--peer-python`, a Python) of its own that sleeps while another one runs; it
prints ratios with their spread instead of the fractions below. scripts/peers/export_model.py makes
the models that they read.

`model_fraction` is the time of the bare forward passes of the very same steps (the recorded plans
run through model and logits alone: no scheduler, sampler, packing, readback or text) over the
engine's time. `matmul_fraction` leaves attention and page writes out of those passes too: what is
left is the weights' products, the floor of any engine on this model and machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
from tqdm import tqdm  # noqa: E402

from pagedjax import LLM, ConfigError, PagedJaxError  # noqa: E402
from pagedjax import attention as attention_module  # noqa: E402
from pagedjax.plan import StepPlan, StepResult  # noqa: E402
from scripts import checkout  # noqa: E402
from scripts.peers import measures  # noqa: E402
from scripts.peers.command import add_options, compare_engines  # noqa: E402
from scripts.peers.comparison_table import aligned  # noqa: E402
from scripts.peers.drive import drive  # noqa: E402
from scripts.peers.pagedjax_peer import PagedJaxPeer  # noqa: E402
from scripts.workloads import (  # noqa: E402
    Requests,
    WorkloadError,
    Workloads,
    read_workloads,
    varied,
)

COLUMNS = (
    ("output_tokens_per_s", "out tok/s", "{:.1f}"),
    ("total_tokens_per_s", "all tok/s", "{:.1f}"),
    ("ttft_ms_mean", "TTFT ms", "{:.0f}"),
    ("ttft_ms_p99", "p99", "{:.0f}"),
    ("tbt_ms_mean", "TBT ms", "{:.1f}"),
    ("tbt_ms_p99", "p99", "{:.1f}"),
    ("e2e_ms_p99", "E2E p99", "{:.0f}"),
    ("good_share", "in bounds", "{:.0%}"),
    ("pool_use_peak", "pool", "{:.1%}"),
    ("padding_share", "padding", "{:.1%}"),
    ("model_fraction", "model", "{:.3f}"),
    ("matmul_fraction", "matmul", "{:.3f}"),
)


# Options of our engine: what a comparison sets for every engine, and what only ours knows.
_SIZES = {"dtype", "max_num_seqs", "max_model_len"}
_OURS_ALONE = {"max_num_batched_tokens", "page_size", "num_pages", "attention_implementation"}


class Recorder:
    """Stands in for the runner during a run and keeps what each step was and when it ended."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.plans: list[StepPlan] = []
        self.ends: list[float] = []

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Launches the step and notes it, and when its result was there."""
        read = self.runner.launch(plan)
        self.plans.append(plan)

        def finish() -> StepResult:
            result = read()
            self.ends.append(time.perf_counter())
            return result

        return finish

    def recover(self) -> bool:
        """As the runner's."""
        return self.runner.recover()


def main() -> int:
    """Parses, measures, prints."""
    args = _arguments()
    workloads = _read(args)
    if args.compare:
        return compare_engines(args, workloads, _options(args, _OURS_ALONE))
    try:
        llm = LLM(args.model, **_options(args, _SIZES | _OURS_ALONE))
    except PagedJaxError as error:
        print(f"bench_engine: {error}", file=sys.stderr)
        return 2
    for line in llm.report.lines():
        print(line, file=sys.stderr)
    bare = BarePasses(llm.engine.runner, bool(args.bare))
    results = {
        name: measure(llm, requests, args, bare, name)
        for name, requests in workloads.requests.items()
    }
    print(table(results))
    print(json.dumps(_environment(llm, args) | _flat(results)))
    return 0


def measure(
    llm: LLM, requests: Requests, args: argparse.Namespace, bare: BarePasses, name: str
) -> dict[str, float]:
    """Medians over the repetitions of one workload; ratios are taken within a repetition."""
    runs = []
    for repetition in tqdm(range(args.repeat + 1), desc=name, unit="run", disable=None):
        run = run_once(llm, requests, repetition, bare, (args.max_ttft_ms, args.max_tbt_ms))
        if repetition:  # the first warms caches of the machine and is not counted
            runs.append(run)
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def run_once(
    llm: LLM,
    requests: Requests,
    repetition: int,
    bare: BarePasses,
    bounds: tuple[float, float],
) -> dict[str, float]:
    """One pass over the workload, then the same steps without the engine."""
    engine = llm.engine
    recorder = Recorder(engine.runner)
    engine.runner = recorder
    engine.reset_prefix_cache()
    watched = Watched(llm)
    requests = varied(requests, repetition, engine.scheduler.config.vocab_size)
    try:
        run = drive(watched, requests)
    finally:
        engine.runner = recorder.runner
    seconds = run["seconds"]
    generated = sum(len(request["tokens"]) for request in run["requests"])
    prompt = sum(len(request["prompt_ids"]) for request in requests)
    tokens = sum(plan.num_tokens for plan in recorder.plans)
    padded = sum(plan.bucket for plan in recorder.plans)
    return {
        "seconds": seconds,
        "output_tokens_per_s": generated / seconds,
        "total_tokens_per_s": (generated + prompt) / seconds,
        **measures.latencies(run["requests"]),
        **measures.goodput(run["requests"], seconds, *bounds),
        "steps": len(recorder.plans),
        "padding_share": 1 - tokens / padded,
        "pool_use_peak": watched.pool_use_peak,
    } | bare.fractions(recorder.plans, seconds)


class Watched(PagedJaxPeer):
    """Our engine as `drive` wants it; notes how full the pool was."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm, {})
        self._scheduler = llm.engine.scheduler
        self.pool_use_peak = 0.0

    def step(self, wait: float) -> list[tuple[int, list[int], bool]]:
        """A step, and a look at the pool."""
        advanced = super().step(wait)
        self.pool_use_peak = max(self.pool_use_peak, self._scheduler.stats.kv_usage)
        return advanced


class BarePasses:
    """The forward passes of recorded plans without an engine: whole, and without attention."""

    def __init__(self, runner: Any, enabled: bool) -> None:
        self._runner = runner
        self._enabled = enabled
        self._compiled: dict[int, Callable[..., Any]] = {}

    def fractions(self, plans: list[StepPlan], engine_seconds: float) -> dict[str, float]:
        """Their time over the engine's."""
        if not self._enabled:
            return {"model_fraction": float("nan"), "matmul_fraction": float("nan")}
        return {
            "model_fraction": self._replay(plans, with_attention=True) / engine_seconds,
            "matmul_fraction": self._replay(plans, with_attention=False) / engine_seconds,
        }

    def _replay(self, plans: list[StepPlan], *, with_attention: bool) -> float:
        runner = self._runner
        run = runner.forward if with_attention else self._products
        packed = [jax.device_put(runner.layout(plan.bucket).pack(plan)) for plan in plans]
        for bucket in {plan.bucket for plan in plans}:  # compiled outside the timing
            first = next(i for i, plan in enumerate(plans) if plan.bucket == bucket)
            jax.block_until_ready(run(bucket, packed[first]))
        started = time.perf_counter()
        for plan, words in zip(plans, packed, strict=True):
            jax.block_until_ready(run(plan.bucket, words))
        return time.perf_counter() - started

    def _products(self, bucket: int, packed: Any) -> Any:
        """The forward pass with nothing in attention's place."""
        runner = self._runner
        if bucket not in self._compiled:
            with _attention_left_out():
                self._compiled[bucket] = runner.lower_forward(bucket).compile()
        forward = self._compiled[bucket]
        runner.kv_cache, logits, _ = forward(
            runner.model.leaves, runner.kv_cache, runner.last_tokens, packed
        )
        return logits


class _attention_left_out:
    """While tracing: attention and the page write become nothing, the products stay."""

    def __init__(self) -> None:
        self._kernels = attention_module.pallas_kernels
        self._write = attention_module.kv_caches.write

    def __enter__(self) -> None:
        attention_module.pallas_kernels = _NoKernels  # pyright: ignore[reportAttributeAccessIssue]
        attention_module.kv_caches.write = lambda kv_cache, *_, **__: kv_cache

    def __exit__(self, *_: object) -> None:
        attention_module.pallas_kernels = self._kernels
        attention_module.kv_caches.write = self._write


class _NoKernels:
    @staticmethod
    def paged_attention(q: Any, *_: Any, **__: Any) -> Any:
        """The right shape and no work."""
        return q


def table(results: dict[str, dict[str, float]]) -> str:
    """The results for people."""
    head = ["workload", *(title for _, title, _ in COLUMNS)]
    rows = [
        [name, *(form.format(result[key]) for key, _, form in COLUMNS)]
        for name, result in results.items()
    ]
    return aligned([head, *rows])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", type=Path, required=True, help="workload file (JSON)")
    parser.add_argument("--only", help="names of workloads, comma-separated (default: all)")
    parser.add_argument("--repeat", type=int, default=3, help="counted runs (default 3)")
    parser.add_argument("--limit", type=int, help="at most so many requests of each workload")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument(
        "--dtype", default="bfloat16", help="default bfloat16; several with --compare"
    )
    parser.add_argument("--max-num-seqs", type=int, default=32, help="at once (default 32)")
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--max-model-len", type=int, default=2048, help="default 2048")
    parser.add_argument("--page-size", type=int)
    parser.add_argument("--num-pages", type=int)
    parser.add_argument("--attention-implementation")
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument(
        "--bare", action=argparse.BooleanOptionalAction, default=True, help="measure fractions"
    )
    parser.add_argument(
        "--rate-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="times as many requests a second as the file's arrival times; inf: all at once",
    )
    parser.add_argument("--max-ttft-ms", type=float, default=1000.0, help="default 1000")
    parser.add_argument("--max-tbt-ms", type=float, default=200.0, help="default 200")
    add_options(parser)
    return parser.parse_args()


def _options(args: argparse.Namespace, names: set[str]) -> dict[str, Any]:
    """Those of our engine that were given."""
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return given | {"enable_prefix_caching": not args.no_prefix_caching}


def _read(args: argparse.Namespace) -> Workloads:
    try:
        return read_workloads(
            args.workload, only=args.only, limit=args.limit, rate_scale=args.rate_scale
        )
    except WorkloadError as error:
        raise SystemExit(f"bench_engine: {error}") from error


def _environment(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "git": checkout.commit(),
        "jax": jax.__version__,
        "device": llm.report.device,
        "cores": os.cpu_count(),
        "model": llm.model_name,
        "dtype": llm.report.dtype,
        "page_size": llm.report.page_size,
        "num_pages": llm.report.num_pages,
        "max_num_seqs": llm.report.max_num_seqs,
        "workload_file": args.workload.name,
        "compiles": llm.report.num_programs,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _flat(results: dict[str, dict[str, float]]) -> dict[str, Any]:
    """One workload's figures at the top level; several under their names."""
    rounded = {
        name: {key: round(value, 5) for key, value in result.items()}
        for name, result in results.items()
    }
    if len(rounded) == 1:
        ((name, result),) = rounded.items()
        return {"workload": name} | result
    return {"workloads": rounded}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(f"bench_engine: {error}")
