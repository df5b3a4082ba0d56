"""Thousands of random requests with aborts: no page, slot or row is lost, every answer is right."""

from __future__ import annotations

import numpy as np
import pytest

from pagedjax.config import SchedulerConfig
from pagedjax.request import FinishReason, Request, SamplingParams, Sequence
from pagedjax.scheduler import Scheduler
from tests.fake_runner import FakeRunner, plain_answer
from tests.scheduler_faults import schedule_with_failures

VOCAB = 32


class Soak:
    """Adds requests as long as few wait, aborts one now and then, and steps; some fail first."""

    def __init__(self, num_requests: int) -> None:
        self.num_requests = num_requests
        self.config = SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=32,
            max_model_len=40,
            page_size=4,
            num_pages=31,
            vocab_size=VOCAB,
        )
        self.scheduler = Scheduler(self.config)
        self.runner = FakeRunner(self.config, self.scheduler.allocator)
        self.rng = np.random.default_rng(11)
        self.prefixes = self.rng.integers(0, VOCAB, (4, 24)).tolist()
        self.num_added = 0
        self.live: dict[int, list[Sequence]] = {}
        self.ended: list[list[Sequence]] = []

    def run(self) -> None:
        steps = 0
        while self.num_added < self.num_requests or self.scheduler.has_work:
            while self.num_added < self.num_requests and self.scheduler.num_waiting < 3:
                self.add()
            is_faulty = self.rng.random() < 0.02
            plan = (schedule_with_failures if is_faulty else Scheduler.schedule)(self.scheduler)
            assert plan is not None
            result = self.runner.run(plan)
            if self.rng.random() < 0.05:
                self.abort()
            self.scheduler.update(plan, result)
            steps += 1
            if steps % 50 == 0:
                self.scheduler.check_integrity()
            self.collect()

    def add(self) -> None:
        rng, arrival = self.rng, self.num_added
        prefix = self.prefixes[rng.integers(4)][: rng.integers(0, 25)]
        prompt = [*prefix, *rng.integers(0, VOCAB, rng.integers(1, 6)).tolist()]
        params = SamplingParams(
            n=1 + int(rng.random() < 0.2) * int(rng.integers(1, 4)),
            max_tokens=int(rng.integers(1, 12)),
            prompt_logprobs=0 if rng.random() < 0.05 else None,
            presence_penalty=1.0 if rng.random() < 0.1 else 0.0,
            stop_token_ids=(3,),
        )
        request = Request(
            request_id=str(arrival),
            prompt_token_ids=tuple(prompt),
            params=params,
            arrival=arrival,
            seed=arrival,
            eos_token_ids=frozenset({2}),
        )
        self.live[arrival] = self.scheduler.add_request(request)
        self.num_added += 1

    def abort(self) -> None:
        arrival = int(self.rng.choice(sorted(self.live)))
        assert self.scheduler.abort(str(arrival))

    def collect(self) -> None:
        for arrival, sequences in list(self.live.items()):
            if all(sequence.is_finished for sequence in sequences):
                self.ended.append(self.live.pop(arrival))


def check_that_nothing_leaks(num_requests: int) -> None:
    soak = Soak(num_requests)
    soak.run()
    scheduler, stats = soak.scheduler, soak.scheduler.stats
    scheduler.check_integrity()
    scheduler.assert_empty()
    assert scheduler.allocator.num_free == scheduler.allocator.usable
    assert scheduler.reset_prefix_cache()
    assert scheduler.allocator.num_evictable == 0
    assert stats.num_requests == len(soak.ended) == num_requests
    # The run went through everything that it is to wear out.
    assert stats.num_preemptions > 20
    assert stats.num_cow_copies > 100
    assert stats.prefix_hit_tokens > 1_000
    aborted = [s for group in soak.ended for s in group if s.finish_reason is FinishReason.ABORT]
    assert len(aborted) > 50
    for sequence in (s for group in soak.ended[::5] for s in group):
        answer = plain_answer(sequence.request, sequence.sample, soak.config)
        output = sequence.output_token_ids
        assert output == answer.tokens[: len(output)]
        if sequence.finish_reason is not FinishReason.ABORT:
            assert (output, sequence.finish_reason) == (answer.tokens, answer.reason)


def test_nothing_leaks_in_two_thousand_requests_with_aborts() -> None:
    check_that_nothing_leaks(2_000)


@pytest.mark.slow
def test_after_a_hundred_thousand_requests_the_pages_are_back_at_the_start() -> None:
    check_that_nothing_leaks(100_000)
