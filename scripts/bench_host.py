#!/usr/bin/env python3
"""Measures the host half alone: the real scheduler with a runner that computes nothing.

Prints a table, then one JSON line. Its parts:

  decode  `--running` sequences decode while `--waiting` requests queue behind them: microseconds of
          `schedule` (a whole plan: decisions, pages, arrays) and of `update` a step
  full    the same with slots to spare: it is pages that keep the queue out
  trace   a workload file, or one made up of `--requests` requests, from first to last: the
          scheduler's time a step, a token and a request; set it beside another scheduler's time on
          the same file
  gap     the engine, text included, over a device that takes `--step-ms` a step: the share of the
          time in which the device waits for the host, with and without asynchronous scheduling
  prefix  `PrefixCache.match` of prompts of 16 to 1,024 cached pages: nanoseconds a page, which is
          the same for all when a lookup is linear

A workload file is what scripts/bench_engine.py reads; only its lengths and token ids matter here,
and arrival times are ignored. Nothing of JAX is loaded. On a machine that does other work too, let
`--clock cpu` count the processor's time instead of the wall's.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from tqdm import tqdm  # noqa: E402

from pagedjax.config import SchedulerConfig  # noqa: E402
from pagedjax.errors import PagedJaxError  # noqa: E402
from pagedjax.paging import PageAllocator, PageTable, PrefixCache  # noqa: E402
from pagedjax.plan import MAX_LOGPROBS, StepPlan, StepResult  # noqa: E402
from pagedjax.request import Request, SamplingParams  # noqa: E402
from pagedjax.scheduler import Scheduler  # noqa: E402
from scripts import checkout, host_gap  # noqa: E402

VOCAB_SIZE = 50_000
TOKEN = 7  # what the runner "samples"
PREFIX_PAGES = (16, 64, 256, 1_024)
clock: Callable[[], float] = time.perf_counter


class NullRunner:
    """Answers a plan at once with the same token for every row."""

    def __init__(self) -> None:
        self._results: dict[int, StepResult] = {}

    def run(self, plan: StepPlan) -> StepResult:
        """The result of a step of this width; made once."""
        width = len(plan.rows.slot)
        if width not in self._results:
            self._results[width] = StepResult(
                tokens=np.full(width, TOKEN, np.int32),
                logprobs=np.zeros(width, np.float32),
                ranks=np.ones(width, np.int32),
                top_ids=np.tile(np.arange(MAX_LOGPROBS, dtype=np.int32), (width, 1)),
                top_logprobs=np.zeros((width, MAX_LOGPROBS), np.float32),
                corrupted=np.zeros(width, bool),
            )
        return self._results[width]


def main() -> int:
    """Parses, measures, prints."""
    global clock
    args = _arguments()
    clock = CLOCKS[args.clock]
    results: dict[str, dict[str, float]] = {}
    for part in args.only.split(","):
        results[part] = PARTS[part](args)
    print(table(results))
    print(json.dumps(_environment(args) | results))
    return 0


# ------------------------------------------------------------------------------------------ decode


def measure_decode(args: argparse.Namespace) -> dict[str, float]:
    """A full house that decodes, with a queue that cannot come in for want of slots."""
    times = _decode(args, Scheduler(_config(args, args.running)), args.steps, "decode")
    return _times(times) | {"running": args.running, "waiting": args.waiting}


def measure_full(args: argparse.Namespace) -> dict[str, float]:
    """As many sequences with slots to spare; it is pages that keep the queue out."""
    prompts = sum(-(-length // args.page_size) for length in _lengths(args.running, args))
    steps = min(args.steps, args.page_size)  # what is grown must stay less than the queue's first
    num_pages = prompts + 3 * args.running // 2 + 2
    times: list[tuple[float, float]] = []
    for _ in range(-(-args.steps // (5 * steps))):
        length = max(args.max_model_len, 2 * (args.running + 1) * args.page_size)
        config = _config(args, 2 * args.running, max_model_len=length, num_pages=num_pages)
        scheduler = Scheduler(config)
        times += _decode(args, scheduler, steps, "full")
    return _times(times) | {"running": args.running, "waiting": args.waiting}


def _decode(
    args: argparse.Namespace, scheduler: Scheduler, steps: int, name: str
) -> list[tuple[float, float]]:
    """Seconds of `schedule` and `update` of each step."""
    runner, params = NullRunner(), SamplingParams(max_tokens=None, detokenize=False)
    for arrival, length in enumerate(_lengths(args.running, args)):
        scheduler.add_request(_request(arrival, _tokens(arrival, length), params))
    while any(live.sequence.num_output_tokens == 0 for live in scheduler.roster.live.values()):
        _step(scheduler, runner)
    config = scheduler.config
    queued = _tokens(0, config.max_model_len - 1)
    for arrival in range(args.running, args.running + args.waiting):
        scheduler.add_request(_request(arrival, queued, params))
    gc.collect()
    bar = tqdm(range(steps), desc=name, unit="step", disable=None)
    times = [_step(scheduler, runner) for _ in bar]
    scheduler.check_integrity()
    if (scheduler.num_running, scheduler.num_waiting) != (args.running, args.waiting):
        raise SystemExit(f"bench_host: {name} did not stay as it was: {scheduler.stats}")
    return times


def _times(times: Sequence[tuple[float, float]]) -> dict[str, float]:
    schedules, updates = zip(*times, strict=True)
    return _spread("schedule_us", schedules) | _spread("update_us", updates)


def _step(scheduler: Scheduler, runner: NullRunner) -> tuple[float, float]:
    """Seconds of one `schedule` and of one `update`."""
    started = clock()
    plan = scheduler.schedule()
    scheduled = clock()
    if plan is None:
        raise SystemExit("bench_host: nothing can be scheduled")
    result = runner.run(plan)
    answered = clock()
    scheduler.update(plan, result)
    return scheduled - started, clock() - answered


# ------------------------------------------------------------------------------------------- trace


def measure_trace(args: argparse.Namespace) -> dict[str, float]:
    """Every request of a workload, all there from the start, from the first step to the last."""
    workload = _workload(args)
    longest = max(len(tokens) + new for tokens, new in workload)
    config = _config(args, args.running, max_model_len=max(args.max_model_len, longest))
    scheduler, runner = Scheduler(config), NullRunner()
    started = clock()
    for arrival, (tokens, new) in enumerate(workload):
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        scheduler.add_request(_request(arrival, tokens, params))
    added = clock() - started
    times: list[tuple[float, float]] = []
    with tqdm(desc="trace", unit="step", disable=None) as bar:
        while scheduler.has_work:
            times.append(_step(scheduler, runner))
            bar.update()
    scheduler.assert_empty()
    stats = scheduler.stats
    seconds = sum(map(sum, times))
    return {
        "steps": len(times),
        "step_us": 1e6 * seconds / len(times),
        **_times(times),
        "add_us": 1e6 * added / len(workload),
        "token_us": 1e6 * seconds / max(stats.num_generated_tokens, 1),
        "request_us": 1e6 * seconds / len(workload),
        "preemptions": stats.num_preemptions,
    }


def _workload(args: argparse.Namespace) -> list[tuple[Sequence[int], int]]:
    """(prompt, tokens to generate) of each request."""
    if args.workload is None:
        rng = np.random.default_rng(args.seed)
        new = rng.integers(args.new_tokens[0], args.new_tokens[1] + 1, args.requests)
        lengths = _lengths(args.requests, args)
        return [(_tokens(i, n), int(m)) for i, (n, m) in enumerate(zip(lengths, new, strict=True))]
    try:
        found = json.loads(args.workload.read_text())["workloads"]
        requests = list(itertools.chain.from_iterable(w["requests"] for w in found.values()))
        return [(request["prompt_ids"], int(request["max_new"])) for request in requests]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"bench_host: cannot read {args.workload}: {error}") from error


# --------------------------------------------------------------------------------------------- gap


def measure_gap(args: argparse.Namespace) -> dict[str, float]:
    """With and without."""
    config = _config(args, args.running)
    prompts = [_tokens(at, length) for at, length in enumerate(_lengths(args.running, args))]
    found: dict[str, float] = {"step_ms": args.step_ms}
    for name in ("async", "one_by_one"):
        gap = host_gap.measure(
            config,
            prompts,
            steps=args.steps,
            step_seconds=args.step_ms / 1e3,
            async_scheduling=name == "async",
            clock=clock,
        )
        found[f"idle_%_{name}"] = 100 * gap.idle_share
        if args.clock == "cpu":
            found[f"host_ms_{name}"] = 1e3 * gap.host_seconds
    return found


# ------------------------------------------------------------------------------------------ prefix


def measure_prefix(args: argparse.Namespace) -> dict[str, float]:
    """Lookups of whole prompts that are all cached, shorter and longer ones."""
    size = args.page_size
    cache_pages = sum(PREFIX_PAGES) + len(PREFIX_PAGES) + 2
    allocator = PageAllocator(cache_pages)
    cache = PrefixCache(allocator, size)
    found: dict[str, float] = {}
    for pages in tqdm(PREFIX_PAGES, desc="prefix", unit="length", disable=None):
        tokens = _tokens(pages, pages * size + 1)
        table = PageTable(allocator, size)
        table.append(len(tokens))
        cache.insert_computed(cache.chain(tokens), tokens, table, len(tokens))
        seconds = []
        for _ in range(args.lookups):
            started = clock()
            hits = cache.match(tokens, cache.chain())  # hashing the prompt is a part of it
            seconds.append(clock() - started)
            if len(hits) != pages:
                raise SystemExit(f"bench_host: {pages} pages were cached, {len(hits)} were found")
        found[f"ns_a_page_{pages}"] = 1e9 * statistics.median(seconds) / pages
    shortest, longest = (
        found[f"ns_a_page_{pages}"] for pages in (PREFIX_PAGES[1], PREFIX_PAGES[-1])
    )
    return found | {"growth": longest / shortest}  # 1: linear; 16: quadratic


# ------------------------------------------------------------------------------------------ common


def _config(
    args: argparse.Namespace,
    max_num_seqs: int,
    *,
    max_model_len: int | None = None,
    num_pages: int | None = None,
) -> SchedulerConfig:
    most = max(args.prompt_tokens) + args.steps + 2 * args.page_size
    length = max(args.max_model_len, most) if max_model_len is None else max_model_len
    every = max_num_seqs * -(-length // args.page_size) + 1
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_seqs, args.max_num_batched_tokens),
        max_model_len=length,
        page_size=args.page_size,
        num_pages=num_pages or args.num_pages or every,
        vocab_size=VOCAB_SIZE,
        enable_prefix_caching=not args.no_prefix_caching,
    )


def _lengths(count: int, args: argparse.Namespace) -> list[int]:
    low, high = args.prompt_tokens
    return np.random.default_rng(args.seed).integers(low, high + 1, count).tolist()


def _tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng([seed, count]).integers(0, VOCAB_SIZE, count).tolist()


def _request(arrival: int, tokens: Iterable[int], params: SamplingParams) -> Request:
    return Request(
        request_id=f"request-{arrival}",
        prompt_token_ids=tuple(token % VOCAB_SIZE for token in tokens),
        params=params,
        arrival=arrival,
        seed=arrival,
    )


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Median, minimum and 99th percentile in microseconds."""
    values = 1e6 * np.array(seconds)
    return {
        name: float(np.median(values)),
        f"{name}_min": float(np.min(values)),
        f"{name}_p99": float(np.percentile(values, 99)),
    }


def table(results: dict[str, dict[str, float]]) -> str:
    """The results for people: a line a figure."""
    lines = []
    for part, figures in results.items():
        for name, value in figures.items():
            text = f"{value:,.0f}" if value >= 100 or float(value).is_integer() else f"{value:.2f}"
            lines.append(f"{part:8}{name:22}{text:>12}")
    return "\n".join(lines)


PARTS = {
    "decode": measure_decode,
    "full": measure_full,
    "trace": measure_trace,
    "gap": measure_gap,
    "prefix": measure_prefix,
}
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.thread_time}


def _pair(text: str) -> tuple[int, int]:
    """`LOW:HIGH`, or one number for both."""
    low, _, high = text.partition(":")
    pair = int(low), int(high or low)
    if not 1 <= pair[0] <= pair[1]:
        raise argparse.ArgumentTypeError(f"must be LOW:HIGH with 1 <= LOW <= HIGH. Got {text}.")
    return pair


def _parts(text: str) -> str:
    wrong = [part for part in text.split(",") if part not in PARTS]
    if wrong:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(PARTS)}. Got {wrong[0]!r}.")
    return text


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1. Got {value}.")
    return value


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", type=_parts, default=",".join(PARTS), help="parts, comma-separated (all)")
    add("--running", type=_positive, default=256, help="sequences at once (256)")
    add("--waiting", type=int, default=1_000, help="requests that queue behind (1000)")
    add("--steps", type=_positive, default=500, help="decode steps that are timed (500)")
    add("--workload", type=Path, help="workload file (JSON) for the trace")
    add("--requests", type=_positive, default=1_000, help="of a made-up trace (1000)")
    add("--prompt-tokens", type=_pair, default=(64, 512), metavar="LOW:HIGH", help="64:512")
    add("--new-tokens", type=_pair, default=(16, 256), metavar="LOW:HIGH", help="16:256")
    add("--max-model-len", type=_positive, default=8_192, help="width of page tables (8192)")
    add("--max-num-batched-tokens", type=_positive, default=8_192, help="tokens a step (8192)")
    add("--page-size", type=_positive, default=16, help="token positions of a page (16)")
    add("--num-pages", type=_positive, help="default: as many as --running sequences can fill")
    add("--clock", choices=CLOCKS, default="wall", help="seconds of the wall, or of the processor")
    add("--lookups", type=_positive, default=50, help="prefix lookups of each length (50)")
    add("--step-ms", type=float, default=5.0, help="of the simulated device (5)")
    add("--no-prefix-caching", action="store_true", help="decode and trace without it")
    add("--seed", type=int, default=0, help="of lengths and tokens (0)")
    return parser.parse_args()


def _environment(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "git": checkout.commit(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "page_size": args.page_size,
        "max_model_len": args.max_model_len,
        "clock": args.clock,
        "workload_file": None if args.workload is None else args.workload.name,
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PagedJaxError as error:
        sys.exit(f"bench_host: {error}")
