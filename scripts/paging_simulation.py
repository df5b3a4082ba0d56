"""A server on a simulated clock and device: the real scheduler, and how long a step takes.

Owns the model of a step's time, the server over `pagedjax.scheduler.Scheduler`, and the loop that
plays requests against any server. Knows nothing of the experiments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from pagedjax.capacity import GIB, PageLayout
from pagedjax.config import SchedulerConfig
from pagedjax.plan import MAX_LOGPROBS, StepPlan, StepResult
from pagedjax.request import FinishReason, Request, SamplingParams
from pagedjax.request import Sequence as TokenSequence
from pagedjax.scheduler import Scheduler
from scripts.length_distributions import MAX_MODEL_LEN, SimulatedRequest

# The paper's OPT-13B in 16 bits on an A100 with 40 GB: 12 GiB are left for keys and values.
NUM_LAYERS, NUM_HEADS, HEAD_DIM, ITEMSIZE = 40, 40, 128, 2
KV_BYTES = 12 * GIB
VOCAB_SIZE = 1 << 20  # so large that every request can have a token of its own
CHECK_EVERY = 256  # steps between looks at whether a latency bound can still be met


def page_layout(page_size: int) -> PageLayout:
    """OPT-13B's pages: 800 KiB a position."""
    return PageLayout(
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        page_size=page_size,
        itemsize=ITEMSIZE,
    )


POSITION_BYTES = page_layout(1).page_bytes
NUM_POSITIONS = page_layout(1).pages_in(KV_BYTES)  # 15,728


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step does, in numbers that its time depends on."""

    tokens: int  # computed in this step
    context: int  # positions whose keys and values are read
    copied_positions: float = 0.0  # within the device's memory
    moved_positions: int = 0  # between device and host
    pages: int = 0  # that the context lies in; 0: contiguous
    sequences: int = 0  # in the step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step: `overhead + a + b tokens + c context`, from a GPU's data sheet.

    a: the weights are read once. OPT-13B: 26 GB at 0.8 of 1,555 GB/s = 20.9 ms.
    b: two operations a parameter. 26 GFLOP at 0.5 of 312 TFLOP/s = 0.167 ms a token.
    c: keys and values are read. 819,200 bytes at 0.8 of 1,555 GB/s = 0.66 us a position.

    The shares of 0.8 and 0.5 are what large reads and large products usually reach. Adding b to a
    overstates small batches, whose products hide behind the weights' way from memory; the host's
    time is left out. The paper's steps are slower: 30.42 requests of 338 tokens at 2 a second are
    45.0 ms a step (Little's law), 132.44 of 58.45 at 30 a second 75.5 ms, 7.5 and 18.5 ms more
    than this model says there. `with_2023_host` adds what goes through both points.
    """

    weight_bytes: float = 26e9
    flops_per_token: float = 26e9
    position_bytes: float = POSITION_BYTES
    bandwidth: float = 0.8 * 1555e9  # bytes/s
    flops: float = 0.5 * 312e12  # 1/s
    host_bandwidth: float = 25e9  # bytes/s between host and device: PCIe 4.0 x16 as it is reached
    overhead: float = 0.0  # seconds of host work that a step waits for ...
    overhead_per_sequence: float = 0.0  # ... and more for each sequence in it
    page_cost: float = 0.0  # reading a page costs as much as so many positions more

    def seconds(self, work: StepWork) -> float:
        """How long a step takes."""
        positions = work.context + self.page_cost * work.pages + 2 * work.copied_positions
        return (
            self.overhead
            + self.overhead_per_sequence * work.sequences
            + self.weight_bytes / self.bandwidth
            + work.tokens * self.flops_per_token / self.flops
            + positions * self.position_bytes / self.bandwidth
            + work.moved_positions * self.position_bytes / self.host_bandwidth
        )

    def with_2023_host(self) -> StepTime:
        """The same device behind the host program that the paper's figures speak of."""
        return replace(self, overhead=4.2e-3, overhead_per_sequence=0.108e-3)


@dataclass(frozen=True, slots=True)
class Usage:
    """Who has the memory in one step, in positions; the five kinds sum to the pool."""

    requests: int  # running
    tokens: int  # that hold keys and values
    reserved: int  # will hold some of the same sequence
    internal: int  # asked for, and never to be used
    rounding: int  # taken beyond what was asked for
    free: int
    pages: int = 0  # held
    unshared_pages: int = 0  # would be held if no page were shared


class Server(Protocol):
    """What `simulate` plays requests against."""

    num_positions: int

    def add(self, index: int, request: SimulatedRequest) -> None:
        """Queues a request under its index."""
        ...

    def plan(self) -> StepWork | None:
        """Decides the next step; None when nothing runs."""
        ...

    def finish_step(self) -> list[int]:
        """Ends the step; indices of the requests that have all their tokens."""
        ...

    def usage(self) -> Usage:
        """Who has the memory in the step that was planned last."""
        ...

    def generated(self, index: int, request: SimulatedRequest) -> list[int]:
        """Output tokens of each sequence of a finished request."""
        ...


class PagedServer:
    """The project's scheduler. Every row of a result says token 0; only its time is simulated.

    Beams are offered random tokens. The logprobs of a row's likeliest tokens are a Poisson process
    downwards from 0, so that lanes compete as evenly as they can; in the steps that `turnover`
    leaves out a model is sure of each lane's next token, and all lanes stay.
    """

    def __init__(
        self,
        *,
        page_size: int = 16,
        prefix_caching: bool = False,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        turnover: float = 1.0,
        seed: int = 0,
        rates_of: StepTime | None = None,
        **options: Any,
    ):
        """Makes the scheduler over the pages of 12 GiB, the null page among them.

        Args:
          page_size, max_num_seqs, max_num_batched_tokens: as in `SchedulerConfig`.
          prefix_caching: its `enable_prefix_caching`.
          turnover: share of the steps in which the lanes of a beam compete.
          seed: of what beams are offered.
          rates_of: the device whose rates preemption is to weigh with, as an engine measures them.
          options: more of `SchedulerConfig`.
        """
        num_pages = page_layout(page_size).pages_in(KV_BYTES)
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            page_size=page_size,
            num_pages=num_pages,
            vocab_size=VOCAB_SIZE,
            enable_prefix_caching=prefix_caching,
            **options,
        )
        self.scheduler = Scheduler(self.config, prefix_cache_root=bytes(32))
        if rates_of is not None:
            move = page_size * rates_of.position_bytes / rates_of.host_bandwidth
            costs = self.scheduler.costs
            costs.seconds_per_page_out = costs.seconds_per_page_in = move
            costs.seconds_per_token = rates_of.flops_per_token / rates_of.flops
        self.num_positions = num_pages * page_size
        self._results = {width: _empty_result(width) for width in self._widths()}
        self._sequences: dict[int, list[TokenSequence]] = {}
        self._turnover = turnover
        self._rng = np.random.default_rng([seed, 4])
        self._num_beams = 0  # requests in flight that search with beams
        self._plan: StepPlan | None = None

    def add(self, index: int, request: SimulatedRequest) -> None:
        """As in `Server`."""
        own = request.prompt_tokens - request.shared_prefix
        prompt = (1,) * request.shared_prefix + (2 + index % (VOCAB_SIZE - 2),) * own
        width = request.num_sequences
        self._num_beams += request.is_beam
        params = SamplingParams(
            n=1 if request.is_beam else width,
            beam_width=width if request.is_beam else None,
            max_tokens=request.output_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        self._sequences[index] = self.scheduler.add_request(
            Request(
                request_id=str(index),
                prompt_token_ids=prompt,
                params=params,
                arrival=index,
                seed=index,
            )
        )

    def plan(self) -> StepWork | None:
        """As in `Server`."""
        plan = self._plan = self.scheduler.schedule()
        if plan is None:
            return None
        size = self.config.page_size
        kv_lens = plan.kv_lens[: plan.num_seqs]
        return StepWork(
            tokens=plan.num_tokens,
            context=int(kv_lens.sum()),
            copied_positions=len(plan.copies) * size,
            moved_positions=(len(plan.swaps_out) + len(plan.swaps_in)) * size,
            pages=int((-(-kv_lens // size)).sum()),
            sequences=plan.num_seqs,
        )

    def finish_step(self) -> list[int]:
        """As in `Server`."""
        plan = self._plan
        if plan is None:
            return []
        result = self._results[self.config.rows_in(plan.bucket)]
        if self._num_beams:
            result = _offering(result, self._rng, sure=self._rng.random() >= self._turnover)
        advanced = self.scheduler.update(plan, result)
        ended = {int(s.request.request_id) for s in advanced if s.is_finished}
        return sorted(i for i in ended if all(s.is_finished for s in self._sequences[i]))

    def usage(self) -> Usage:
        """As in `Server`."""
        plan, running = self._plan, self.scheduler.roster.running
        size, held = self.config.page_size, self.scheduler.allocator.num_held
        if plan is not None and plan.num_seqs == len(running):
            tokens = int(plan.kv_lens.sum())
        else:
            tokens = sum(live.sequence.num_computed_tokens + live.num_in_flight for live in running)
        return Usage(
            requests=len({live.owner for live in running}),
            tokens=tokens,
            reserved=0,
            internal=held * size - tokens,
            rounding=0,
            free=self.num_positions - held * size,
            pages=held,
            unshared_pages=sum(live.width * live.capacity for live in running) // size,
        )

    def generated(self, index: int, request: SimulatedRequest) -> list[int]:
        """As in `Server`; anything but a full length is an error."""
        sequences = self._sequences.pop(index)
        self._num_beams -= request.is_beam
        wrong = [s for s in sequences if s.finish_reason is not FinishReason.LENGTH]
        if wrong:
            raise RuntimeError(f"request {index} ended with {wrong[0].finish_reason}: {wrong}")
        return [s.num_output_tokens for s in sequences]

    def _widths(self) -> set[int]:
        return {self.config.rows_in(bucket) for bucket in self.config.buckets}


@dataclass(slots=True)
class Outcome:
    """What one simulation showed. Means are over time, between the warm-up and the last arrival."""

    num_requests: int
    num_finished: int = 0
    seconds: float = 0.0  # simulated, until the last request ended
    steps: int = 0
    exceeded: bool = False  # broken off: the bound on the mean latency could not be met any more
    latencies: list[float] = field(default_factory=list[float])  # seconds, arrival to end
    normalized: list[float] = field(default_factory=list[float])  # seconds an output token
    output_tokens: int = 0
    num_preemptions: int = 0
    shares: dict[str, float] = field(default_factory=dict[str, float])  # of the pool's positions
    mean_requests: float = 0.0
    throughput: float = 0.0  # requests/s that the tokens drawn in that time make
    saved_pages: float = 0.0  # share of the pages that are saved by sharing
    timeline: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])

    @property
    def normalized_latency(self) -> float:
        """Mean over the requests of seconds an output token; infinite when broken off."""
        if self.exceeded or not self.normalized:
            return float("inf")
        return sum(self.normalized) / len(self.normalized)


def simulate(
    server: Server,
    requests: Sequence[SimulatedRequest],
    step_time: StepTime,
    *,
    warm_up: float = 0.0,
    bound: float | None = None,
    drain: bool = True,
    progress: Callable[[float], object] | None = None,
) -> Outcome:
    """Plays requests against a server; each is checked to get all its tokens.

    Args:
      server: starts empty.
      requests: at least one, by arrival.
      step_time: how long a step takes.
      warm_up: seconds at the start that are left out of the means.
      bound: break off as soon as the mean normalised latency is sure to exceed it.
      drain: go on after the last arrival, until every request has ended.
      progress: called with the simulated seconds that passed, every few hundred steps.
    """
    outcome = Outcome(len(requests))
    means = _Means(warm_up, requests[-1].arrival)
    waiting: dict[int, SimulatedRequest] = {}  # arrived and not ended
    now = shown = 0.0
    upcoming = 0
    while upcoming < len(requests) or waiting:
        while upcoming < len(requests) and requests[upcoming].arrival <= now:
            server.add(upcoming, requests[upcoming])
            waiting[upcoming] = requests[upcoming]
            upcoming += 1
        if upcoming == len(requests) and not drain:
            break
        work = server.plan()
        if work is None:
            if upcoming == len(requests):
                raise RuntimeError(f"{len(waiting)} requests wait and none can run")
            now = requests[upcoming].arrival
            continue
        seconds = step_time.seconds(work)
        means.add(now, seconds, work, server)
        now += seconds
        outcome.steps += 1
        for index in server.finish_step():
            _record(outcome, waiting.pop(index), now, server.generated(index, requests[index]))
        if outcome.steps % CHECK_EVERY == 0:
            if progress is not None:
                progress(now - shown)
                shown = now
            if bound is not None and _is_hopeless(outcome, waiting, now, bound):
                outcome.exceeded = True
                break
    outcome.seconds = now
    means.write(outcome, server, requests)
    return outcome


class _Means:
    """Sums over time of what a server's memory is used for."""

    def __init__(self, start: float, end: float):
        self._start, self._end = start, end
        self._seconds = 0.0
        self._drawn = 0
        self._sums = np.zeros(8)
        self._timeline: list[tuple[float, int]] = []

    def add(self, now: float, seconds: float, work: StepWork, server: Server) -> None:
        if now > self._end:
            return
        usage = server.usage()
        self._timeline.append((now, usage.requests))
        if now >= self._start:
            self._seconds += seconds
            self._drawn += work.sequences
            self._sums += seconds * np.array(_values(usage))

    def write(self, outcome: Outcome, server: Server, requests: Sequence[SimulatedRequest]) -> None:
        means = self._sums / max(self._seconds, 1e-9)
        outcome.timeline = self._timeline
        outcome.mean_requests = float(means[0])
        drawn_each = sum(r.output_tokens * r.num_sequences for r in requests) / len(requests)
        outcome.throughput = self._drawn / max(self._seconds, 1e-9) / drawn_each
        names = ("tokens", "reserved", "internal", "rounding", "free")
        outcome.shares = {
            name: float(mean) / server.num_positions
            for name, mean in zip(names, means[1:6], strict=True)
        }
        if means[7]:
            outcome.saved_pages = float(1 - means[6] / means[7])
        if isinstance(server, PagedServer):
            outcome.num_preemptions = server.scheduler.stats.num_preemptions


def sliding_mean(
    timeline: Sequence[tuple[float, int]], window: float, points: int = 400
) -> tuple[list[float], list[float]]:
    """(times, means) of a step function over a window that ends at each time; `points` each."""
    times = np.array([time for time, _ in timeline])
    values = np.array([value for _, value in timeline], float)
    area = np.concatenate([[0.0], np.cumsum(values[:-1] * np.diff(times))])
    ends = np.linspace(times[0], times[-1], points + 1)[1:]
    starts = np.maximum(ends - window, times[0])
    covered = np.interp(ends, times, area) - np.interp(starts, times, area)
    return ends.tolist(), (covered / (ends - starts)).tolist()


def _values(usage: Usage) -> tuple[int, ...]:
    return (
        usage.requests,
        usage.tokens,
        usage.reserved,
        usage.internal,
        usage.rounding,
        usage.free,
        usage.pages,
        usage.unshared_pages,
    )


def _record(outcome: Outcome, request: SimulatedRequest, now: float, generated: list[int]) -> None:
    if generated != [request.output_tokens] * request.num_sequences:
        raise RuntimeError(f"{request} was to have all its tokens. Got {generated}.")
    latency = now - request.arrival
    outcome.num_finished += 1
    outcome.output_tokens += sum(generated)
    outcome.latencies.append(latency)
    outcome.normalized.append(latency / request.output_tokens)


def _is_hopeless(
    outcome: Outcome, waiting: dict[int, SimulatedRequest], now: float, bound: float
) -> bool:
    """Even if all that is left took no more time, the mean would exceed the bound."""
    least = sum(outcome.normalized)
    least += sum((now - r.arrival) / r.output_tokens for r in waiting.values())
    return least > bound * outcome.num_requests


def _empty_result(width: int) -> StepResult:
    """Rows of token 0. One for each width is used over and over: the scheduler only reads it."""
    return StepResult(
        tokens=np.zeros(width, np.int32),
        logprobs=np.zeros(width, np.float32),
        ranks=np.zeros(width, np.int32),
        top_ids=np.zeros((width, MAX_LOGPROBS), np.int32),
        top_logprobs=np.zeros((width, MAX_LOGPROBS), np.float32),
        corrupted=np.zeros(width, bool),
    )


def _offering(result: StepResult, rng: np.random.Generator, *, sure: bool) -> StepResult:
    """The same with other tokens on offer to beams, ids 0 to 19, likeliest first."""
    shape = result.top_ids.shape
    gaps = np.full(shape, 1e3) if sure else rng.standard_exponential(shape)
    gaps[:, 0] *= not sure
    return replace(
        result,
        top_ids=np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        top_logprobs=-np.cumsum(gaps, axis=1, dtype=np.float32),
    )
