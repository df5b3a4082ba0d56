"""Event logs for tests: a scheduler over the fake model that is driven at random and recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.config import SchedulerConfig
from pagedjax.errors import TransferError
from pagedjax.events import Event, EventLog, EventSink
from pagedjax.plan import StepPlan, StepResult
from pagedjax.request import FinishReason, Request, SamplingParams, Sequence
from pagedjax.scheduler import Scheduler
from tests.fake_runner import FakeRunner

VOCAB = 24


class Events:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def flush(self) -> None:
        pass

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class Trace:
    """Adds, steps, aborts, fails, drops, resets and pins at random; results may come late."""

    def __init__(self, seed: int, sink: EventSink, **sizes: Any) -> None:
        self.rng = np.random.default_rng(seed)
        defaults: dict[str, Any] = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 12,
            "max_model_len": 40,
            "page_size": 4,
            "num_pages": 14,
            "num_host_pages": 8,
            "vocab_size": VOCAB,
        }
        self.config = SchedulerConfig(**(defaults | sizes))
        self.scheduler = Scheduler(self.config, events=sink)
        self.runner = FakeRunner(self.config, self.scheduler.allocator)
        self.prefixes = self.rng.integers(0, VOCAB, (3, 20)).tolist()
        self.sequences: list[Sequence] = []
        self.pending: list[tuple[StepPlan, StepResult]] = []

    def run(self, num_operations: int) -> None:
        operations = [self.add, self.step, self.step, self.step, self.step, self.deliver, self.end]
        for _ in range(num_operations):
            operations[self.rng.integers(len(operations))]()
            if self.rng.random() < 0.05:
                self.rare()
        while self.pending:
            self.deliver()
        while self.scheduler.has_work:
            self.step()
            self.deliver()

    def add(self, **params: Any) -> list[Sequence]:
        rng, arrival = self.rng, len({s.request.request_id for s in self.sequences})
        prompt = [
            *self.prefixes[rng.integers(3)][: rng.integers(0, 21)],
            *rng.integers(0, VOCAB, rng.integers(1, 5)).tolist(),
        ]
        defaults: dict[str, Any] = {
            "n": int(rng.choice([1, 1, 1, 3])),
            "max_tokens": int(rng.integers(1, 12)),
            "stop_token_ids": (3,),
            "logprobs": 2 if rng.random() < 0.1 else None,
            "prompt_logprobs": 0 if rng.random() < 0.1 else None,
            "presence_penalty": 1.0 if rng.random() < 0.1 else 0.0,
            "logit_bias": {5: -100.0} if rng.random() < 0.1 else {},
        }
        if rng.random() < 0.15:
            defaults = {
                "beam_width": int(rng.integers(2, 4)),
                "max_tokens": defaults["max_tokens"],
                "temperature": 0.0,
            }
        request = Request(
            request_id=f"r{arrival}",
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(**(defaults | params)),
            arrival=arrival,
            seed=2**63 + arrival,
            eos_token_ids=frozenset({2}),
            cache_salt=None if rng.random() < 0.8 else "secret",
            arrival_time=arrival / 4,
            priority=int(rng.integers(-2, 3)) if self.is_priority else 0,
        )
        added = self.scheduler.add_request(request)
        self.sequences += added
        return added

    @property
    def is_priority(self) -> bool:
        return self.config.scheduling_policy == "priority"

    def step(self) -> None:
        self.start(self.scheduler.schedule())
        while len(self.pending) > 2:
            self.deliver()

    def start(self, plan: StepPlan | None) -> None:
        if plan is None:
            return
        if self.rng.random() < 0.1:
            self.scheduler.costs.seconds_per_token *= float(self.rng.choice([0.01, 100]))
        held = [page for live in self.scheduler.roster.waiting for page in live.host_pages]
        if held and self.rng.random() < 0.2:
            self.runner.lose(int(self.rng.choice(held)), is_noticed=bool(self.rng.integers(2)))
        try:
            self.pending.append((plan, self.runner.run(plan)))
        except TransferError as error:
            self.scheduler.drop(plan, lost=error.host_pages, has_run=False)

    def deliver(self) -> None:
        if not self.pending:
            return
        plan, result = self.pending.pop(0)
        if self.rng.random() < 0.02:
            result.corrupted[0] = True
        self.scheduler.update(plan, result)

    def end(self) -> None:
        if not self.sequences or self.rng.random() < 0.7:
            return
        sequence = self.sequences[self.rng.integers(len(self.sequences))]
        which = self.rng.integers(3)
        if which == 0:
            self.scheduler.abort(sequence.request.request_id)
        elif which == 1:
            self.scheduler.finish(sequence, FinishReason.STOP, stop_reason="x")
        else:
            self.scheduler.fail(sequence, "late", reason=FinishReason.TIMEOUT)

    def rare(self) -> None:
        which = self.rng.integers(6)
        if which == 0 and self.pending:
            plan, result = self.pending.pop()
            self.runner.fail(plan, result)
            self.scheduler.drop(plan, lost=result.lost_host_pages)
        elif which == 1:
            self.scheduler.reset_prefix_cache(reset_running=bool(self.rng.integers(2)))
        elif which in (2, 3):
            self.pin_or_unpin()
        elif which == 4:
            self.scheduler.forget_device_pages()
        elif which == 5:
            self.confine()

    def confine(self) -> None:
        """A step for some of the requests alone, as after a step that failed."""
        only = {s.request.request_id for s in self.sequences if self.rng.random() < 0.5}
        self.start(self.scheduler.schedule(only))

    def pin_or_unpin(self) -> None:
        pins = self.scheduler.pins
        for pinned in pins.listing[:1]:
            pins.unpin(pinned.token_ids, pinned.cache_salt)
            return
        if self.config.enable_prefix_caching:
            pins.pin(tuple(self.prefixes[self.rng.integers(3)][:8]), None)


def write_trace(path: Path, seed: int, num_operations: int = 150, **sizes: Any) -> Trace:
    """A recorded random trace; the log is closed."""
    log = EventLog(path)
    trace = Trace(seed, log, **sizes)
    trace.run(num_operations)
    log.close()
    return trace
