#!/usr/bin/env python3
"""Measures the engine on a workload file and prints a table, then one JSON line.

A workload file is `{"workloads": {name: {"desc", "requests": [{"prompt_ids", "max_new",
"arrival_s"?}]}}}`; eos is ignored. Each repetition changes every prompt's first token, so that no
repetition finds the pages of the one before.

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
import numpy as np  # noqa: E402
from tqdm import tqdm  # noqa: E402

from pagedjax import LLM, ConfigError, PagedJaxError, SamplingParams  # noqa: E402
from pagedjax import attention as attention_module  # noqa: E402
from pagedjax.plan import StepPlan, StepResult  # noqa: E402
from scripts import checkout  # noqa: E402

COLUMNS = (
    ("output_tokens_per_s", "out tok/s", "{:.1f}"),
    ("total_tokens_per_s", "all tok/s", "{:.1f}"),
    ("ttft_ms_mean", "TTFT ms", "{:.0f}"),
    ("ttft_ms_p99", "p99", "{:.0f}"),
    ("tbt_ms_mean", "TBT ms", "{:.1f}"),
    ("tbt_ms_p99", "p99", "{:.1f}"),
    ("pool_use_peak", "pool", "{:.1%}"),
    ("padding_share", "padding", "{:.1%}"),
    ("model_fraction", "model", "{:.3f}"),
    ("matmul_fraction", "matmul", "{:.3f}"),
)


class Recorder:
    """Stands in for the runner during a run and keeps what each step was and when it ended."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.plans: list[StepPlan] = []
        self.ends: list[float] = []

    def run(self, plan: StepPlan) -> StepResult:
        """Runs the step and notes it."""
        result = self.runner.run(plan)
        self.plans.append(plan)
        self.ends.append(time.perf_counter())
        return result

    def recover(self) -> bool:
        """As the runner's."""
        return self.runner.recover()


def main() -> int:
    """Parses, measures, prints."""
    args = _arguments()
    workloads = _read_workloads(args)
    try:
        llm = LLM(args.model, **_engine_options(args))
    except PagedJaxError as error:
        print(f"bench_engine: {error}", file=sys.stderr)
        return 2
    for line in llm.report.lines():
        print(line, file=sys.stderr)
    bare = BarePasses(llm.engine.runner, bool(args.bare))
    results = {name: measure(llm, w["requests"], args, bare, name) for name, w in workloads.items()}
    print(table(results))
    print(json.dumps(_environment(llm, args) | _flat(results)))
    return 0


def measure(
    llm: LLM, requests: list[dict[str, Any]], args: argparse.Namespace, bare: BarePasses, name: str
) -> dict[str, float]:
    """Medians over the repetitions of one workload; ratios are taken within a repetition."""
    runs = []
    for repetition in tqdm(range(args.repeat + 1), desc=name, unit="run"):
        run = run_once(llm, requests, repetition, bare)
        if repetition:  # the first warms caches of the machine and is not counted
            runs.append(run)
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def run_once(
    llm: LLM, requests: list[dict[str, Any]], repetition: int, bare: BarePasses
) -> dict[str, float]:
    """One pass over the workload, then the same steps without the engine."""
    engine = llm.engine
    recorder = Recorder(engine.runner)
    engine.runner = recorder
    started = time.perf_counter()
    try:
        outputs, pool_use = _drive(llm, requests, repetition)
    finally:
        engine.runner = recorder.runner
    seconds = time.perf_counter() - started
    generated = sum(len(output.outputs[0].token_ids) for output in outputs)
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    ttft = [output.metrics["time_to_first_token_seconds"] * 1e3 for output in outputs]
    tbt = np.diff([started, *recorder.ends])[1:] * 1e3  # a decoding request gets a token a step
    tokens = sum(plan.num_tokens for plan in recorder.plans)
    padded = sum(plan.bucket for plan in recorder.plans)
    return {
        "seconds": seconds,
        "output_tokens_per_s": generated / seconds,
        "total_tokens_per_s": (generated + prompt) / seconds,
        "ttft_ms_mean": statistics.mean(ttft),
        "ttft_ms_p99": float(np.percentile(ttft, 99)),
        "tbt_ms_mean": float(np.mean(tbt)),
        "tbt_ms_p50": float(np.percentile(tbt, 50)),
        "tbt_ms_p99": float(np.percentile(tbt, 99)),
        "steps": len(recorder.plans),
        "padding_share": 1 - tokens / padded,
        "pool_use_peak": pool_use,
    } | bare.fractions(recorder.plans, seconds)


def _drive(llm: LLM, requests: list[dict[str, Any]], repetition: int) -> tuple[list[Any], float]:
    """Adds each request when it is due, steps until all ended."""
    engine = llm.engine
    engine.reset_prefix_cache()
    due = sorted(enumerate(requests), key=lambda item: item[1].get("arrival_s") or 0.0)
    started = time.monotonic()
    outputs: list[Any] = []
    pool_use = 0.0
    vocab = engine.scheduler.config.vocab_size
    while due or engine.has_unfinished:
        now = time.monotonic() - started
        while due and (due[0][1].get("arrival_s") or 0.0) <= now:
            index, request = due.pop(0)
            prompt = list(request["prompt_ids"])
            prompt[0] = (prompt[0] + repetition) % vocab
            params = SamplingParams(
                temperature=0.0, max_tokens=request["max_new"], ignore_eos=True, detokenize=False
            )
            engine.add_request(f"{repetition}-{index}", prompt, params)
        if not engine.has_unfinished:
            time.sleep(max(0.0, (due[0][1]["arrival_s"] or 0.0) - now))
            continue
        outputs.extend(engine.step())
        pool_use = max(pool_use, engine.scheduler.stats.kv_usage)
    failed = [output.error for output in outputs if output.error is not None]
    if failed:
        raise SystemExit(f"bench_engine: {len(failed)} requests failed, the first: {failed[0]}")
    return outputs, pool_use


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
        runner.kv_cache, logits, _ = forward(runner.model.leaves, runner.kv_cache, packed)
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
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [head, *rows]
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", type=Path, required=True, help="workload file (JSON)")
    parser.add_argument("--only", help="names of workloads, comma-separated (default: all)")
    parser.add_argument("--repeat", type=int, default=3, help="counted runs (default 3)")
    parser.add_argument("--limit", type=int, help="at most so many requests of each workload")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16", help="default bfloat16")
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
    return parser.parse_args()


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    names = (
        "dtype",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_model_len",
        "page_size",
        "num_pages",
        "attention_implementation",
    )
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return given | {"enable_prefix_caching": not args.no_prefix_caching}


def _read_workloads(args: argparse.Namespace) -> dict[str, Any]:
    try:
        found = json.loads(args.workload.read_text())["workloads"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"bench_engine: cannot read {args.workload}: {error}") from error
    names = list(found) if args.only is None else args.only.split(",")
    missing = [name for name in names if name not in found]
    if missing:
        raise SystemExit(f"bench_engine: no workload {missing}; the file has {list(found)}")
    limit = args.limit
    return {name: found[name] | {"requests": found[name]["requests"][:limit]} for name in names}


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
        "compiles": llm.report.num_compiled,
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
