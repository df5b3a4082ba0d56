"""Who goes first, who gives way, and who is refused: priorities, queue limits, deadlines, pins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pagedjax.config import EngineConfig, SchedulerConfig
from pagedjax.errors import ConfigError, RequestError
from pagedjax.request import Request, SamplingParams, Sequence
from pagedjax.scheduler import Scheduler
from tests.fake_runner import FakeRunner, plain_answer

VOCAB = 24
CONFIG = SchedulerConfig(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=40,
    page_size=4,
    num_pages=41,
    vocab_size=VOCAB,
    scheduling_policy="priority",
    priority_ageing=10.0,
)


class Desk:
    """A scheduler with a runner, and requests of a few words."""

    def __init__(self, **changes: Any) -> None:
        self.config = replace(CONFIG, **changes)
        self.scheduler = Scheduler(self.config)
        self.runner = FakeRunner(self.config, self.scheduler.allocator)
        self.num_added = 0
        self.sequences: list[Sequence] = []

    def add(
        self, priority: int = 0, at: float = 0.0, *, length: int = 5, tokens: int = 6, n: int = 1
    ) -> Sequence:
        arrival = self.num_added
        prompt = tuple((7 * arrival + 3 * i) % VOCAB for i in range(length))
        request = Request(
            request_id=str(arrival),
            prompt_token_ids=prompt,
            params=SamplingParams(n=n, max_tokens=tokens, ignore_eos=True),
            arrival=arrival,
            seed=arrival,
            priority=priority,
            arrival_time=at,
        )
        sequences = self.scheduler.add_request(request)
        self.num_added += 1
        self.sequences += sequences
        return sequences[0]

    def step(self) -> list[Sequence]:
        """One step, checked; the sequences that ran in it."""
        plan = self.scheduler.schedule()
        assert plan is not None
        self.scheduler.update(plan, self.runner.run(plan))
        self.scheduler.check_integrity()
        return [scheduled.sequence for scheduled in plan.scheduled]

    def drain(self) -> None:
        while self.scheduler.has_work:
            self.step()
        self.scheduler.assert_empty()
        for sequence in self.sequences:
            answer = plain_answer(sequence.request, sequence.sample, self.config)
            assert sequence.output_token_ids == answer.tokens

    def waiting(self) -> list[str]:
        return [live.sequence.request.request_id for live in self.scheduler.roster.waiting]


# ------------------------------------------------------------------------------------- priority


def test_the_more_urgent_request_runs_first() -> None:
    desk = Desk(max_num_seqs=1)
    late, soon = desk.add(2), desk.add(-1)
    assert desk.step() == [soon]
    desk.drain()
    assert late.is_finished


def test_equal_priorities_run_by_arrival() -> None:
    desk = Desk(max_num_seqs=1)
    for _ in range(3):
        desk.add(1)
    assert desk.waiting() == ["0", "1", "2"]


def test_requests_with_equal_ranks_are_never_compared_themselves() -> None:
    """Bug 11: a heap of (priority, time, request) compared requests when both were equal."""
    desk = Desk()
    for _ in range(20):
        desk.add(3, at=1.5, n=2)
    keys = [live.key for live in desk.scheduler.roster.live.values()]
    assert len(set(keys)) == len(keys) == 40
    assert len({key[0] for key in keys}) == 1
    desk.drain()


def test_a_request_goes_first_once_it_waited_longer_by_its_priority_times_the_ageing() -> None:
    desk = Desk(max_num_seqs=1)
    desk.add(2, at=0.0)  # as urgent as priority 0 after 20 seconds
    desk.add(0, at=19.9)
    desk.add(0, at=20.1)
    desk.add(1, at=9.0)
    assert desk.waiting() == ["3", "1", "0", "2"]


def test_nothing_starves_behind_urgent_requests_that_never_stop_coming() -> None:
    desk = Desk(max_num_seqs=1)
    patient = desk.add(5, at=0.0, tokens=1)
    second = 0
    for second in range(200):
        if patient.is_finished:
            break
        desk.add(0, at=float(second), tokens=1)
        desk.step()
    assert patient.is_finished
    assert 50 <= second <= 51


def test_without_the_policy_the_order_is_arrival_alone() -> None:
    desk = Desk(scheduling_policy="fcfs")
    desk.add(0, at=9.0)
    desk.add(0, at=1.0)
    assert desk.waiting() == ["0", "1"]


def test_a_priority_that_nothing_would_look_at_is_refused() -> None:
    desk = Desk(scheduling_policy="fcfs")
    with pytest.raises(RequestError, match=r"`priority` must be 0 unless .* Got -3"):
        desk.add(-3)


def test_priority_alone_preempts_nobody() -> None:
    desk = Desk(max_num_seqs=1)
    running = desk.add(9)
    desk.step()
    desk.add(-9)
    assert desk.step() == [running]
    desk.drain()
    assert desk.scheduler.stats.num_preemptions == 0


def test_who_needs_pages_takes_them_from_the_worst_rank() -> None:
    desk = Desk(num_pages=11, max_num_batched_tokens=32)
    worst, best, middle = (desk.add(p, length=11, tokens=20) for p in (3, 1, 2))
    while not any(s.num_preemptions for s in desk.sequences):
        desk.step()
    assert (worst.num_preemptions, middle.num_preemptions, best.num_preemptions) == (1, 0, 0)
    desk.drain()
    assert best.num_preemptions == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheduling_policy": "lifo"}, "`scheduling_policy` must be fcfs or priority. Got 'lifo'"),
        ({"priority_ageing": 0}, r"`priority_ageing` must be seconds in \(0, 1e\+06\]: .* Got 0"),
        ({"priority_ageing": float("nan")}, "`priority_ageing` must be seconds"),
        ({"priority_ageing": True}, "`priority_ageing` must be seconds"),
        ({"max_queue_requests": 0}, r"`max_queue_requests` must be an integer in \[1, "),
        ({"max_queue_tokens": 1.5}, r"`max_queue_tokens` must be an integer in \[1, "),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options(options)
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, **options)
