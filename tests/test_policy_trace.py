"""Random traces through the engine with every account kept twice: here, and where it belongs.

Requests with priorities, timeouts, salts and samples come and are aborted, time passes, prefixes
are pinned and unpinned, caches are reset. After every operation the pages held, their references,
the queue's counts, tokens and preemptions are compared with what they must be, exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from pagedjax.engine import LLMEngine
from pagedjax.errors import CapacityError, RequestError
from pagedjax.request import FinishReason, RequestOutput, SamplingParams, Sequence, SequenceStatus
from pagedjax.scheduler import Scheduler
from tests.fake_runner import FakeRunner, plain_answer
from tests.test_policy import CONFIG

VOCAB = 24
NUM_PREFIXES = 4


@dataclass(eq=False)
class Asked:
    """A request as its caller remembers it."""

    sequences: list[Sequence]
    deadline: float | None


class Trace:
    """An engine, its callers, and their books."""

    def __init__(self, seed: int, num_host_pages: int) -> None:
        self.config = replace(
            CONFIG,
            num_pages=23,
            max_queue_requests=6,
            max_queue_tokens=70,
            max_num_seqs=5,
            num_host_pages=num_host_pages,
            preemption_mode="swap",
        )
        self.rng = np.random.default_rng(seed)
        self.now = 0.0
        self.scheduler = Scheduler(self.config, prefix_cache_root=bytes(range(32)))
        self.runner = FakeRunner(self.config, self.scheduler.allocator)
        self.engine = LLMEngine(self.scheduler, self.runner, None, clock=lambda: self.now)
        self.prefixes = self.rng.integers(0, VOCAB, (NUM_PREFIXES, 16)).tolist()
        self.asked: dict[str, Asked] = {}  # in flight, or ended and not returned yet
        self.counts = Counter[str]()
        self.ended_tokens = self.ended_preemptions = self.own_tokens = self.own_preemptions = 0
        operations: list[tuple[Callable[[], None], float]] = [
            (self.step, 0.45), (self.add, 0.30), (self.abort, 0.05), (self.tick, 0.15),
            (self.pin, 0.03), (self.unpin, 0.01), (self.reset, 0.01),
        ]  # fmt: skip
        self._operations = [operation for operation, _ in operations]
        self._shares = [share for _, share in operations]

    def run(self, num_operations: int) -> None:
        chosen = self.rng.choice(len(self._operations), num_operations, p=self._shares)
        for at, which in enumerate(chosen.tolist()):
            self._operations[which]()
            self.compare()
            if at % 100 == 0:
                self.engine.check_integrity()
        while self.engine.has_unfinished:
            self.step()
            self.compare()
        assert not self.asked

    # ---------------------------------------------------------------------------- operations

    def add(self) -> None:
        rng, name = self.rng, str(self.counts["added"] + self.counts["refused"])
        prefix = self.prefixes[rng.integers(NUM_PREFIXES)][: rng.integers(0, 17)]
        prompt = [*prefix, *rng.integers(0, VOCAB, rng.integers(1, 5)).tolist()]
        timeout = float(rng.integers(1, 30)) if rng.random() < 0.3 else None
        n = 1 + int(rng.random() < 0.15)
        params = SamplingParams(n=n, max_tokens=int(rng.integers(1, 11)), detokenize=False)
        roster, config = self.scheduler.roster, self.config
        has_room = roster.num_queued_requests < 6 and roster.num_queued_tokens < 70
        assert (config.max_queue_requests, config.max_queue_tokens) == (6, 70)
        try:
            self.engine.add_request(
                name, prompt, params,
                priority=int(rng.integers(-2, 3)), timeout=timeout,
                cache_salt="s" if rng.random() < 0.1 else None,
            )  # fmt: skip
        except RequestError as error:
            self.note_refusal(error, has_room)
            return
        assert has_room
        self.counts["added"] += 1
        deadline = None if timeout is None else self.now + timeout
        self.asked[name] = Asked(self.engine._live[name].sequences, deadline)

    def note_refusal(self, error: RequestError, has_room: bool) -> None:
        assert (error.code, has_room) == ("queue_full", False)
        self.counts["refused"] += 1

    def step(self) -> None:
        due = [
            name
            for name, asked in self.asked.items()
            if asked.deadline is not None and asked.deadline <= self.now and _is_due(asked)
        ]
        ended = {output.request_id: output for output in self.engine.step()}
        assert all(_is_late(ended[name]) for name in due)
        assert sum(map(_is_late, ended.values())) == len(due)
        for name, output in ended.items():
            self.close(name, output)

    def close(self, name: str, output: RequestOutput) -> None:
        asked = self.asked.pop(name)
        self.counts["ended"] += 1
        self.counts["late"] += _is_late(output)
        for sequence, sample in zip(asked.sequences, output.outputs, strict=True):
            assert sequence.status is SequenceStatus.FINISHED
            assert sample.token_ids == sequence.output_token_ids
            self.ended_tokens += len(sample.token_ids)
            self.ended_preemptions += sequence.num_preemptions
            if self.rng.random() < 0.05:
                self.counts["checked"] += 1
                answer = plain_answer(sequence.request, sequence.sample, self.config)
                cut = (
                    len(sample.token_ids) if sample.finish_reason in ("abort", "timeout") else None
                )
                assert sample.token_ids == answer.tokens[:cut]

    def abort(self) -> None:
        if not self.asked:
            return
        name = list(self.asked)[int(self.rng.integers(len(self.asked)))]
        is_live = not all(s.is_finished for s in self.asked[name].sequences)
        assert self.engine.abort(name) == is_live
        assert not self.engine.abort(name)
        self.counts["aborted"] += is_live

    def tick(self) -> None:
        self.now += float(self.rng.integers(1, 3))

    def pin(self) -> None:
        """Pages of an own request are computed on the way: its token and preemptions are booked."""
        before = self.scheduler.stats.num_generated_tokens, self.scheduler.stats.num_preemptions
        tokens = {name: _tokens(asked) for name, asked in self.asked.items()}
        preempted = {name: _preemptions(asked) for name, asked in self.asked.items()}
        prefix = self.prefixes[self.rng.integers(NUM_PREFIXES)]
        num_pinned = len(self.scheduler.stats.pinned)
        try:
            assert self.engine.pin_prefix(prefix) == 16
            assert len(self.scheduler.stats.pinned) >= num_pinned
            self.counts["pins"] += 1
        except RequestError as error:
            self.note_refusal(error, self.engine.has_queue_room)
        except CapacityError:
            self.counts["full"] += 1
        after = self.scheduler.stats.num_generated_tokens, self.scheduler.stats.num_preemptions
        others = sum(_tokens(self.asked[name]) - tokens[name] for name in tokens)
        self.own_tokens += after[0] - before[0] - others
        others = sum(_preemptions(self.asked[name]) - preempted[name] for name in preempted)
        self.own_preemptions += after[1] - before[1] - others
        assert after[0] - before[0] >= 0

    def unpin(self) -> None:
        prefix = self.prefixes[self.rng.integers(NUM_PREFIXES)]
        is_pinned = any(pin.token_ids == tuple(prefix) for pin in self.scheduler.stats.pinned)
        assert self.engine.unpin_prefix(prefix) == (16 if is_pinned else 0)

    def reset(self) -> None:
        forced = self.rng.random() < 0.5
        is_free = self.scheduler.num_running == self.scheduler.host.allocator.num_held == 0
        expected = forced or is_free
        assert self.engine.reset_prefix_cache(reset_running=forced) == expected
        if expected:
            self.counts["resets"] += 1
            assert self.scheduler.allocator.num_free == self.scheduler.allocator.usable
            assert self.scheduler.allocator.num_evictable == 0
            assert self.scheduler.host.allocator.num_free == self.config.num_host_pages
            assert self.scheduler.host.allocator.num_evictable == 0
            assert self.scheduler.stats.pinned == ()

    # ------------------------------------------------------------------------------- the books

    def compare(self) -> None:
        scheduler, roster, allocator = (
            self.scheduler,
            self.scheduler.roster,
            self.scheduler.allocator,
        )
        tables = [live.table.pages for live in roster.running]
        named = [page for pages in [*tables, *scheduler.pins.pages] for page in pages]
        assert allocator.num_held == len(set(named)) == allocator.usable - allocator.num_free
        assert sum(allocator.references(page) for page in set(named)) == len(named)
        assert len(allocator.eviction_order()) == allocator.num_free
        host = scheduler.host.allocator
        # What is being brought in keeps its host pages until the result is read.
        lives = [*roster.waiting, *roster.running]
        named = [page for live in lives for page in live.host_pages]
        assert host.num_held == len(set(named)) == host.usable - host.num_free
        assert sum(host.references(page) for page in set(named)) == len(named)
        live = [s for asked in self.asked.values() for s in asked.sequences]
        stats = scheduler.stats
        tokens = sum(s.num_output_tokens for s in live)
        assert stats.num_generated_tokens == tokens + self.ended_tokens + self.own_tokens
        preemptions = sum(s.num_preemptions for s in live)
        counted = preemptions + self.ended_preemptions + self.own_preemptions
        assert stats.num_preemptions == counted
        assert self.counts["added"] == self.counts["ended"] + len(self.asked)
        queued = [owner.request for owner in roster.requests.values() if not owner.was_admitted]
        assert roster.num_queued_requests == len(queued)
        assert roster.num_queued_tokens == sum(len(r.prompt_token_ids) for r in queued)
        assert len(roster.running) + len(roster.free_slots) == self.config.max_num_seqs


def _is_due(asked: Asked) -> bool:
    """Not ended when its time is over, or ended for that while a prefix was computed."""
    reasons = {sequence.finish_reason for sequence in asked.sequences}
    return None in reasons or FinishReason.TIMEOUT in reasons


def _is_late(output: RequestOutput) -> bool:
    is_late = isinstance(output.error, RequestError) and output.error.code == "timeout"
    assert is_late == any(sample.finish_reason == "timeout" for sample in output.outputs)
    assert is_late or output.error is None
    return is_late


def _tokens(asked: Asked) -> int:
    return sum(sequence.num_output_tokens for sequence in asked.sequences)


def _preemptions(asked: Asked) -> int:
    return sum(sequence.num_preemptions for sequence in asked.sequences)


def run_trace(num_operations: int, num_host_pages: int) -> None:
    trace = Trace(num_operations + num_host_pages, num_host_pages)
    trace.run(num_operations)
    trace.engine.check_integrity()
    assert trace.engine.reset_prefix_cache()
    allocator = trace.scheduler.allocator
    assert (allocator.num_free, allocator.num_evictable) == (allocator.usable, 0)
    # The trace went through everything that it is to account for.
    least = num_operations / 20_000
    assert trace.scheduler.stats.num_preemptions > 100 * least
    assert trace.scheduler.stats.prefix_hit_tokens > 1_000 * least
    swap = trace.scheduler.stats.swap
    assert (swap.num_pages_out > 100 * least) == (swap.num_pages_in > 100 * least)
    assert (swap.num_pages_in > 100 * least) == (num_host_pages > 0)
    wanted = {"added": 1_000, "refused": 100, "late": 100, "aborted": 200, "checked": 50}
    wanted |= {"pins": 50, "full": 5, "resets": 60}
    for name, count in wanted.items():
        assert trace.counts[name] > count * least, trace.counts


@pytest.mark.parametrize("num_host_pages", [0, 12])
def test_twice_ten_thousand_operations_with_exact_accounting(num_host_pages: int) -> None:
    run_trace(10_000, num_host_pages)


@pytest.mark.slow
def test_a_million_operations_with_exact_accounting() -> None:
    run_trace(1_000_000, num_host_pages=12)
