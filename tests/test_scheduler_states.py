"""Whatever is asked of the scheduler in whatever order, every sample is the plain model's.

A Hypothesis state machine over all that can happen to it, on a pool so small that requests are
preempted all the time. All structures are checked after every rule.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedjax.config import (
    PREEMPTION_MODES,
    SCHEDULING_POLICIES,
    VICTIM_POLICIES,
    SchedulerConfig,
)
from pagedjax.errors import CapacityError, TransferError
from pagedjax.plan import StepPlan, StepResult
from pagedjax.request import FinishReason, Logprob, Request, SamplingParams, Sequence
from pagedjax.scheduler import Scheduler
from pagedjax.scheduling import pages_to_come
from pagedjax.scheduling.live import LiveSequence
from tests.fake_runner import FakeRunner, PlainAnswer, check_plan, plain_answer
from tests.plain_beams import PlainBeam, fake_beams
from tests.scheduler_faults import schedule_with_failures

VOCAB = 24
ROOT = bytes(range(32))
PREFIXES = [np.random.default_rng(seed).integers(0, VOCAB, 30).tolist() for seed in range(2)]
MAX_STEPS = 3_000


def check_answer(sequence: Sequence, answer: PlainAnswer) -> None:
    """A sequence that ended by itself is the plain answer; any other is the front of it."""
    output = sequence.output_token_ids
    assert output == answer.tokens[: len(output)], sequence.finish_reason
    reported = [_plain(entry) for entry in sequence.output_logprobs]
    assert reported == answer.logprobs[: len(reported)]
    total = sum(next(iter(entry.values())).logprob for entry in sequence.output_logprobs)
    assert sequence.cumulative_logprob == pytest.approx(total)
    if sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
        assert len(output) == len(answer.tokens)
        assert len(reported) == len(answer.logprobs)
        assert sequence.finish_reason is answer.reason
        assert sequence.stop_reason == answer.stop_reason
    asked = [None if e is None else _plain(e) for e in sequence.prompt_logprobs]
    assert asked == answer.prompt_logprobs[: len(asked)]
    if sequence.sample == 0 and output:
        assert len(asked) == len(answer.prompt_logprobs)


def _plain(entry: dict[int, Logprob]) -> dict[int, tuple[float, int | None]]:
    return {token: (value.logprob, value.rank) for token, value in entry.items()}


@st.composite
def sampling_params(draw: st.DrawFn, max_n: int) -> SamplingParams:
    tokens = st.lists(st.integers(0, VOCAB - 1), max_size=3)
    max_tokens = draw(st.integers(1, 14))
    if draw(st.integers(0, 3)) == 0:
        return SamplingParams(
            beam_width=draw(st.integers(1, max_n)),
            length_penalty=draw(st.sampled_from([1.0, 0.0, -1.0, 2.0])),
            early_stopping=draw(st.sampled_from([False, True, "never"])),
            max_tokens=max_tokens,
            min_tokens=draw(st.sampled_from([0, 0, min(3, max_tokens)])),
            stop_token_ids=draw(st.sampled_from([(), (3,), (5, 6)])),
            logprobs=draw(st.sampled_from([None, 0, 2])),
            prompt_logprobs=draw(st.sampled_from([None, None, 0])),
            ignore_eos=draw(st.booleans()),
        )
    return SamplingParams(
        n=draw(st.integers(1, max_n)),
        max_tokens=max_tokens,
        min_tokens=draw(st.sampled_from([0, 0, min(3, max_tokens)])),
        stop_token_ids=draw(st.sampled_from([(), (), (3,), (5, 6)])),
        logprobs=draw(st.sampled_from([None, None, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0, 2])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.0])),
        bad_token_ids=tuple(draw(tokens)),
        ignore_eos=draw(st.booleans()),
    )


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 4, 8]),
        max_num_seqs=st.integers(1, 5),
        spare_pages=st.sampled_from([0, 0, 1, 3, 12]),
        spare_tokens=st.integers(0, 20),
        caching=st.sampled_from([True, True, False]),
        host_tokens=st.sampled_from([0, 12, 60, 60, 300]),
        mode=st.sampled_from(["swap", *PREEMPTION_MODES]),
        victim_policy=st.sampled_from(VICTIM_POLICIES),
        policy=st.sampled_from(SCHEDULING_POLICIES),
        worth=st.sampled_from([1, 4, 4, 12, pages_to_come.WORTH_WAITING]),
    )
    def start(
        self,
        *,
        page_size: int,
        max_num_seqs: int,
        spare_pages: int,
        spare_tokens: int,
        caching: bool,
        host_tokens: int,
        mode: Any,
        victim_policy: Any,
        policy: Any,
        worth: int,
    ) -> None:
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(pages_to_come, "WORTH_WAITING", worth)
        max_model_len = 40
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare_tokens,
            max_model_len=max_model_len,
            page_size=page_size,
            num_pages=1 + -(-max_model_len // page_size) + spare_pages,
            vocab_size=VOCAB,
            enable_prefix_caching=caching,
            num_host_pages=-(-host_tokens // page_size),
            preemption_mode=mode,
            victim_policy=victim_policy,
            scheduling_policy=policy,
            priority_ageing=5.0,
        )
        self.scheduler = Scheduler(self.config, prefix_cache_root=ROOT)
        self.runner = FakeRunner(self.config, self.scheduler.allocator)
        self.sequences: list[Sequence] = []
        self.beams: dict[str, list[PlainBeam]] = {}
        self.pending: list[tuple[StepPlan, StepResult | None]] = []
        self.read: tuple[StepPlan, StepResult] | None = None

    @rule(
        data=st.data(),
        prefix=st.integers(0, 1),
        shared=st.integers(0, 26),
        tail=st.lists(st.integers(0, VOCAB - 1), max_size=8),
        salt=st.sampled_from([None, None, "a"]),
        words=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3), max_size=6),
    )
    def add(
        self,
        data: st.DataObject,
        prefix: int,
        shared: int,
        tail: list[int],
        salt: str | None,
        words: list[list[int]],
    ) -> None:
        prompt = tuple(PREFIXES[prefix][:shared] + tail) or (1,)
        params = data.draw(sampling_params(self.config.max_num_seqs))
        by_priority = self.config.scheduling_policy == "priority"
        priority = data.draw(st.integers(-2, 2)) if by_priority else 0
        self.add_request(prompt, params, words=words, salt=salt, priority=priority)

    @rule(prefix=st.integers(0, 1), lengths=st.lists(st.integers(1, 24), min_size=2, max_size=5))
    def add_crowd(self, prefix: int, lengths: list[int]) -> None:
        """Requests that fit together at first and outgrow the pool."""
        for length in lengths:
            tokens = [
                *PREFIXES[prefix][: length // 2],
                *PREFIXES[1 - prefix][: length - length // 2],
            ]
            self.add_request(tuple(tokens), SamplingParams(max_tokens=14, ignore_eos=True))

    @rule(
        prefix=st.integers(0, 1),
        shared=st.integers(2, 28),
        tails=st.lists(st.integers(0, 6), min_size=2, max_size=5),
        data=st.data(),
    )
    def add_together(self, prefix: int, shared: int, tails: list[int], data: st.DataObject) -> None:
        """Requests with one prefix, so that all but one may wait for its pages."""
        for number, length in enumerate(tails):
            own = [(number + i) % VOCAB for i in range(length)]
            params = data.draw(sampling_params(self.config.max_num_seqs))
            self.add_request((*PREFIXES[prefix][:shared], *own), params)

    def add_request(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        *,
        words: list[list[int]] | None = None,
        salt: str | None = None,
        priority: int = 0,
    ) -> None:
        arrival = len({s.request.request_id for s in self.sequences})
        request = Request(
            request_id=f"r{arrival}",
            prompt_token_ids=prompt,
            params=params,
            arrival=arrival,
            seed=2**63 + arrival % 3,
            eos_token_ids=frozenset({2}),
            bad_sequences=tuple(map(tuple, words or ())),
            cache_salt=salt,
            priority=priority,
            arrival_time=float(arrival),
        )
        self.sequences += self.scheduler.add_request(request)

    @rule(times=st.integers(2, 10))
    def step_on(self, times: int) -> None:
        for _ in range(times):
            self.step(late=False, with_failures=False)

    @rule(late=st.booleans(), with_failures=st.booleans())
    def step(self, late: bool, with_failures: bool) -> None:
        roster = self.scheduler.roster
        queues = [*roster.running, *roster.waiting]
        can_run = [live for live in queues if live.offers is None and not self.pending]
        oldest = next(iter(can_run), None)
        waiting = list(roster.waiting)
        plan = (
            schedule_with_failures(self.scheduler) if with_failures else self.scheduler.schedule()
        )
        for live in waiting:
            if live in roster.running:
                assert not self.computed_twice(live)
        if plan is None:
            assert oldest is None, "there is work and nothing runs"
            return
        check_plan(plan, self.config)
        if oldest is not None:
            assert plan.scheduled[0].sequence is oldest.sequence
        try:
            result = self.runner.run(plan)
        except TransferError as error:
            self.scheduler.drop(plan, lost=error.host_pages, has_run=False)
            return
        self.pending.append((plan, result))
        if not late:
            self.deliver_all()

    def computed_twice(self, admitted: LiveSequence) -> int:
        """Tokens that were worth waiting for, and that an older sequence computes just as well."""
        owner, size = admitted.owner, self.config.page_size
        is_caching = self.config.enable_prefix_caching
        if not is_caching or admitted.host_pages or not owner.may_read_cache(admitted.sequence):
            return 0
        tokens, hits = admitted.sequence.tokens, admitted.sequence.num_computed_tokens
        worth = 0
        for live in self.scheduler.roster.running:
            computed = live.sequence.num_computed_tokens // size * size
            salts = live.owner.request.cache_salt, owner.request.cache_salt
            is_elder = live.key < admitted.key and salts[0] == salts[1]
            if live.sequence.num_tokens - live.sequence.num_computed_tokens < 2:
                continue  # it decodes; with pages of 1 that fills one, which nobody waits for
            if is_elder and live.in_flight is not None and computed <= hits:
                pairs = zip(live.sequence.tokens, tokens[:-1], strict=False)
                shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                worth = max(worth, shared // size * size - hits)
        return worth if worth >= -(-pages_to_come.WORTH_WAITING // size) * size else 0

    @precondition(lambda self: self.pending)
    @rule()
    def deliver_first(self) -> None:
        plan, result = self.pending.pop(0)
        if result is None:
            self.scheduler.drop(plan)
            return
        owed = [s.sequence for s in plan.scheduled if s.epoch == s.sequence.epoch and s.num_samples]
        owed = [s for s in owed if not s.is_finished and s.request.params.beam_width is None]
        before = {s: s.num_tokens for s in self.sequences}
        was_finished = {s: s.is_finished for s in self.sequences}
        advanced = self.scheduler.update(plan, result)
        ended = [s for s in self.sequences if not was_finished[s] and s.is_finished]
        grown = [s for s in self.sequences if s.num_tokens > before[s] or s in ended]
        assert sorted(map(_name, advanced)) == sorted(map(_name, grown))
        assert set(map(_name, owed)) <= set(map(_name, grown))
        self.read = (plan, result)

    @precondition(lambda self: self.pending)
    @rule()
    def lose_last(self) -> None:
        """The last step broke off on the device."""
        plan, result = self.pending.pop()
        self.runner.fail(plan, result)
        self.scheduler.drop(plan)

    @precondition(lambda self: self.runner.stored)
    @rule(data=st.data(), is_noticed=st.booleans())
    def lose_host_page(self, data: st.DataObject, is_noticed: bool) -> None:
        page = data.draw(st.sampled_from(sorted(self.runner.stored)))
        self.runner.lose(page, is_noticed=is_noticed)

    @precondition(lambda self: self.read)
    @rule()
    def read_again(self) -> None:
        assert self.read
        assert self.scheduler.update(*self.read) == []

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        request_id = sequence.request.request_id
        siblings = [s for s in self.sequences if s.request is sequence.request]
        was_live = not all(s.is_finished for s in siblings)
        assert self.scheduler.abort(request_id) == was_live
        assert not self.scheduler.abort(request_id)
        assert all(s.is_finished for s in siblings)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), how=st.sampled_from([None, FinishReason.ERROR, FinishReason.TIMEOUT]))
    def end_one(self, data: st.DataObject, how: FinishReason | None) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        was = sequence.finish_reason
        if how is not None:
            self.scheduler.fail(sequence, how.value, reason=how)
            assert (sequence.error == how.value) == (was in (None, how))
        else:
            self.scheduler.finish(sequence, FinishReason.ABORT)
        assert sequence.is_finished
        assert was is None or sequence.finish_reason is was

    @rule(forced=st.booleans())
    def reset_prefix_cache(self, forced: bool) -> None:
        scheduler = self.scheduler
        pages = [page for live in scheduler.roster.live.values() for page in live.table.pages]
        is_free = not pages and not scheduler.host.allocator.num_held
        pinned, tokens = scheduler.pins.listing, [s.num_tokens for s in self.sequences]
        assert scheduler.reset_prefix_cache(reset_running=forced) == (forced or is_free)
        assert [s.num_tokens for s in self.sequences] == tokens
        if forced or is_free:
            assert scheduler.prefix_cache.num_cached == scheduler.allocator.num_held == 0
            assert scheduler.host.allocator.num_free == self.config.num_host_pages
            assert scheduler.pins.listing == ()
        else:
            assert scheduler.pins.listing == pinned

    @precondition(lambda self: self.config.enable_prefix_caching)
    @rule(which=st.integers(0, 1), num_pages=st.integers(1, 6), salt=st.sampled_from([None, "a"]))
    def pin(self, which: int, num_pages: int, salt: str | None) -> None:
        pins = self.scheduler.pins
        prefix = pins.prefix_of(tuple(PREFIXES[which][: num_pages * self.config.page_size]))
        try:
            pins.check(prefix, salt)
        except CapacityError:
            return
        if pins.pin(prefix, salt):
            found = {(pin.token_ids, pin.cache_salt): pin for pin in pins.listing}
            assert found[prefix, salt].num_hit_tokens == len(prefix)
            left = self.scheduler.allocator.usable - pins.num_pages
            assert left >= self.config.pages_per_seq

    @precondition(lambda self: self.scheduler.pins.listing)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin = data.draw(st.sampled_from(self.scheduler.pins.listing))
        assert self.scheduler.pins.unpin(pin.token_ids, pin.cache_salt)
        assert not self.scheduler.pins.unpin(pin.token_ids, pin.cache_salt)

    @invariant()
    def all_agrees(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    def check_beam(self, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        if sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            if request_id not in self.beams:
                self.beams[request_id] = fake_beams(sequence.request, self.config)
            self.beams[request_id][sequence.sample].check(sequence)

    def deliver_all(self) -> None:
        while self.pending:
            self.deliver_first()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        try:
            self.end_all()
        finally:
            self.patches.undo()

    def end_all(self) -> None:
        self.deliver_all()
        steps = 0
        while self.scheduler.has_work:
            self.step(late=False, with_failures=False)
            steps += 1
            assert steps < MAX_STEPS, "no end in sight"
        self.scheduler.check_integrity()
        self.scheduler.assert_empty()
        for sequence in self.sequences:
            assert sequence.is_finished
            if sequence.request.params.beam_width is not None:
                self.check_beam(sequence)
                continue
            check_answer(sequence, plain_answer(sequence.request, sequence.sample, self.config))
        assert self.scheduler.reset_prefix_cache()


def _name(sequence: Sequence) -> tuple[int, int]:
    return (sequence.request.arrival, sequence.sample)


class TestScheduler(SchedulerMachine.TestCase):
    settings = settings(max_examples=500, stateful_step_count=30)


@pytest.mark.slow
class TestSchedulerLong(SchedulerMachine.TestCase):
    settings = settings(max_examples=10_000, stateful_step_count=40)
