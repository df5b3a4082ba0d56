"""The scheduler's rules, each by a test named after it; tokens are those of a plain model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest

from pagedjax.config import SchedulerConfig
from pagedjax.errors import IntegrityError, RequestError
from pagedjax.plan import NO_TARGET, StepPlan, StepResult
from pagedjax.request import FinishReason, Request, SamplingParams, Sequence, SequenceStatus
from pagedjax.scheduler import Scheduler
from tests.fake_runner import FakeRunner, check_plan, plain_answer
from tests.scheduler_faults import schedule_with_failures, snapshot

VOCAB = 64
EOS = 63


class Bench:
    """A scheduler and a fake runner, stepped together; everything is checked at each step."""

    def __init__(self, **sizes: Any) -> None:
        defaults: dict[str, Any] = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 32,
            "max_model_len": 64,
        }
        defaults |= {"page_size": 4, "num_pages": 65, "vocab_size": VOCAB}
        self.config = SchedulerConfig(**(defaults | sizes))
        self.scheduler = Scheduler(self.config)
        self.runner = FakeRunner(self.config, self.scheduler.allocator)
        self.arrivals = itertools.count()

    def add(self, prompt: int | Seq[int], salt: str | None = None, **params: Any) -> list[Sequence]:
        """A request; a number as prompt stands for so many tokens of its own."""
        arrival = next(self.arrivals)
        own = np.random.default_rng(arrival).integers
        tokens = own(0, EOS, prompt).tolist() if isinstance(prompt, int) else prompt
        params = {"max_tokens": 8, "ignore_eos": True} | params
        bad = tuple(map(tuple, params.pop("bad_sequences", ())))
        request = Request(
            request_id=str(arrival),
            prompt_token_ids=tuple(tokens),
            params=SamplingParams(**params),
            arrival=arrival,
            seed=arrival,
            eos_token_ids=frozenset({EOS}),
            bad_sequences=bad,
            cache_salt=salt,
        )
        return self.scheduler.add_request(request)

    def schedule(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        check_plan(plan, self.config)
        self.scheduler.check_integrity()
        return plan

    def update(self, plan: StepPlan, result: StepResult | None = None) -> list[Sequence]:
        advanced = self.scheduler.update(plan, self.runner.run(plan) if result is None else result)
        self.scheduler.check_integrity()
        return advanced

    def step(self, times: int = 1) -> StepPlan:
        for _ in range(times - 1):
            self.update(self.schedule())
        plan = self.schedule()
        self.update(plan)
        return plan

    def finish_all(self, *requests: list[Sequence]) -> None:
        """Runs until nothing is left; the given requests must have the plain model's answers."""
        for _ in range(5_000):
            if not self.scheduler.has_work:
                break
            self.step()
        self.scheduler.assert_empty()
        for sequence in itertools.chain(*requests):
            answer = plain_answer(sequence.request, sequence.sample, self.config)
            assert sequence.output_token_ids == answer.tokens
            assert sequence.finish_reason is answer.reason

    def pages(self, sequence: Sequence) -> list[int]:
        return self.scheduler.roster.live[sequence].table.pages


def scheduled(plan: StepPlan) -> dict[str, int]:
    """ "request.sample" -> tokens in this step, in the plan's order."""
    return {
        f"{s.sequence.request.request_id}.{s.sequence.sample}": s.num_tokens for s in plan.scheduled
    }


# ---------------------------------------------------------------------------------- the door


@pytest.mark.parametrize(
    ("prompt", "params", "param", "message"),
    [
        ([], {}, "prompt", r"at least one token. Got none"),
        (64, {}, "prompt", r"`max_model_len` 64. Got 64 prompt tokens.*at most 63"),
        (3, {"n": 5}, "n", r"at most `max_num_seqs` \(4\). Got 5"),
        ([1, VOCAB], {}, "prompt", r"\[0, 64\).*Got 64"),
        ([1, -1], {}, "prompt", r"Got -1"),
        (3, {"stop_token_ids": (VOCAB,)}, "stop_token_ids", "Got 64"),
        (3, {"bad_token_ids": (99,)}, "bad_token_ids", "Got 99"),
        (3, {"allowed_token_ids": (99,)}, "allowed_token_ids", "Got 99"),
        (3, {"logit_bias": {99: 1.0}}, "logit_bias", "Got 99"),
        (3, {"bad_sequences": [(1, 99)]}, "bad_words", "Got 99"),
        (3, {"bad_sequences": [()]}, "bad_words", "no empty word"),
        (3, {"allowed_token_ids": (1, 2), "bad_token_ids": (2, 1)}, "allowed_token_ids", "2 ids"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_at_the_door(
    prompt: Any, params: dict[str, Any], param: str, message: str
) -> None:
    """Bugs 16 and 22: it would wait at the head for ever, or harm others on the device."""
    bench = Bench()
    with pytest.raises(RequestError, match=message) as error:
        bench.add(prompt, **params)
    assert error.value.param == param
    bench.scheduler.assert_empty()


def test_a_prompt_that_is_too_long_has_its_own_code() -> None:
    with pytest.raises(RequestError) as error:
        Bench().add(64)
    assert error.value.code == "context_length_exceeded"


def test_an_id_in_use_is_refused() -> None:
    bench = Bench()
    bench.add(3)
    bench.arrivals = itertools.count()
    with pytest.raises(RequestError, match="must not be in use"):
        bench.add(3)


def test_a_lone_request_of_max_model_len_fits_the_smallest_pool() -> None:
    bench = Bench(num_pages=17)
    bench.finish_all(bench.add(63), bench.add(1, max_tokens=None), bench.add(62, n=4))


# -------------------------------------------------------------------------- budgets and order


def test_running_sequences_come_first_and_share_one_budget_with_prompts() -> None:
    bench = Bench(max_num_batched_tokens=10)
    bench.add(4)
    bench.add(3)
    bench.step()
    bench.add(20)
    assert scheduled(bench.step()) == {"0.0": 1, "1.0": 1, "2.0": 8}
    assert scheduled(bench.step()) == {"0.0": 1, "1.0": 1, "2.0": 8}
    plan = bench.step()
    assert scheduled(plan) == {"0.0": 1, "1.0": 1, "2.0": 4}
    assert [s.num_samples for s in plan.scheduled] == [1, 1, 1]


def test_a_chunk_that_does_not_end_the_prompt_draws_nothing() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.add(20)
    assert bench.schedule().num_rows == 0


def test_waiting_requests_are_admitted_strictly_in_order_of_arrival() -> None:
    bench = Bench(num_pages=17, max_num_batched_tokens=64)
    bench.add(40, max_tokens=20)
    bench.step()
    bench.add(50)  # does not fit beside the first
    bench.add(2)  # would
    assert scheduled(bench.step()) == {"0.0": 1}


def test_no_more_sequences_run_than_there_are_slots_and_the_lowest_is_taken() -> None:
    bench = Bench()
    requests = [bench.add(2)[0] for _ in range(6)]
    bench.step()
    assert [s.slot for s in requests] == [0, 1, 2, 3, None, None]
    bench.scheduler.abort("2")
    bench.scheduler.abort("1")
    bench.step()
    assert [s.slot for s in requests] == [0, None, None, 3, 1, 2]


def test_the_whole_prompt_must_fit_not_only_its_first_chunk() -> None:
    bench = Bench(num_pages=17, max_num_batched_tokens=8)
    bench.add(30, max_tokens=30)
    bench.step(5)
    assert bench.scheduler.allocator.num_free == 8
    second = bench.add(33)[0]  # nine pages; a chunk of seven tokens would fit
    bench.step()
    assert second.status is SequenceStatus.WAITING
    bench.scheduler.abort("1")
    third = bench.add(20)[0]
    bench.step()
    assert third.status is SequenceStatus.RUNNING


def test_pages_that_an_admitted_prompt_still_needs_are_not_given_away() -> None:
    """A prompt cut short by its rows leaves tokens in the budget, but no pages for others."""
    bench = Bench(num_pages=17, max_num_seqs=2, max_num_batched_tokens=30)
    bench.add(40, prompt_logprobs=0)
    second = bench.add(28)[0]
    bench.step(3)
    assert second.status is SequenceStatus.WAITING
    bench.finish_all()


def test_a_prompt_is_not_admitted_into_the_next_page_of_running_sequences() -> None:
    bench = Bench(num_pages=17)
    running = [bench.add(15, max_tokens=16)[0] for _ in range(2)]
    bench.step()  # both end in a full page
    late = bench.add(32, max_tokens=1)[0]  # the eight free pages, but two are needed next
    bench.step()
    assert late.status is SequenceStatus.WAITING
    bench.finish_all(running, [late])
    assert bench.scheduler.stats.num_preemptions == 0


# ---------------------------------------------------------------------------------- preemption


def preempting_bench() -> tuple[Bench, list[list[Sequence]]]:
    bench = Bench(num_pages=17, enable_prefix_caching=False)
    return bench, [bench.add(16, max_tokens=30) for _ in range(3)]


def step_until_preempted(bench: Bench) -> StepPlan:
    for _ in range(60):
        plan = bench.schedule()
        if bench.scheduler.stats.num_preemptions:
            return plan
        bench.update(plan)
    raise AssertionError("nothing was preempted")


def test_the_latest_gives_way_and_starts_over_at_the_front() -> None:
    bench, requests = preempting_bench()
    (first,), _, (third,) = requests
    bench.step()
    fourth = bench.add(1)[0]
    plan = step_until_preempted(bench)
    assert scheduled(plan) == {"0.0": 1, "1.0": 1}
    assert (third.status, third.slot, third.num_computed_tokens) == (
        SequenceStatus.WAITING,
        None,
        0,
    )
    assert (third.epoch, third.num_preemptions) == (1, 1)
    assert [live.sequence for live in bench.scheduler.roster.waiting] == [third, fourth]
    assert third.num_output_tokens > 0
    bench.update(plan)
    bench.finish_all(*requests, [fourth])
    assert first.num_preemptions == 0


def test_nothing_is_admitted_in_a_step_that_preempted() -> None:
    twin, _ = preempting_bench()
    steps = 0
    while twin.scheduler.stats.num_preemptions == 0:
        twin.step()
        steps += 1
    bench, requests = preempting_bench()
    bench.step(steps - 1)
    tiny = bench.add(1)  # a slot is free, and the victim leaves more pages than it needs
    plan = bench.step()
    assert scheduled(plan) == {"0.0": 1, "1.0": 1}
    assert bench.scheduler.allocator.num_free > 2
    assert tiny[0].status is SequenceStatus.WAITING
    bench.finish_all(*requests, tiny)


def test_the_oldest_is_never_a_victim_and_progresses_in_every_step() -> None:
    bench, requests = preempting_bench()
    while not requests[0][0].is_finished:
        assert bench.step().scheduled[0].sequence is requests[0][0]
    assert requests[0][0].num_preemptions == 0
    bench.finish_all(*requests)


def test_a_seeded_answer_is_the_same_after_preemption() -> None:
    """Bug 24: the key is (seed, sample, position), whatever happened to the sequence."""
    bench, requests = preempting_bench()
    bench.finish_all(*requests)
    assert bench.scheduler.stats.num_preemptions > 0


def test_a_preempted_request_counts_its_hits_once() -> None:
    bench = Bench(num_pages=17)
    requests = [bench.add(16, max_tokens=30) for _ in range(3)]
    bench.finish_all(*requests)
    stats = bench.scheduler.stats
    assert stats.num_preemptions > 0
    assert stats.prefix_query_tokens == 48
    assert stats.prefix_hit_tokens == 0
    assert [s.num_cached_tokens for (s,) in requests] == [0, 0, 0]


def test_a_preempted_request_may_hit_its_own_pages() -> None:
    bench = Bench()
    (request,) = bench.add(16)
    bench.step(3)
    bench.scheduler.drop(bench.schedule())
    assert request.num_computed_tokens == 0
    bench.schedule()
    assert request.num_computed_tokens == 16


# ----------------------------------------------------------------------------- results, epochs


def test_a_result_for_a_preempted_sequence_is_dropped() -> None:
    """Bug 12: else the token would be lost or doubled."""
    bench, requests = preempting_bench()
    bench.step(3)
    late = bench.schedule()
    assert requests[2][0] in [s.sequence for s in late.scheduled]
    result = bench.runner.run(late)
    live = bench.scheduler.roster.live[requests[2][0]]
    live.table.release()
    bench.scheduler.roster.requeue(live)
    advanced = bench.update(late, result)
    assert requests[2][0] not in advanced
    bench.finish_all(*requests)


def test_a_result_is_read_once() -> None:
    bench = Bench()
    request = bench.add(4)
    plan = bench.schedule()
    result = bench.runner.run(plan)
    assert bench.update(plan, result) == request
    assert bench.update(plan, result) == []
    later = bench.schedule()
    assert bench.update(plan, result) == []  # also while another step is on its way
    assert bench.update(later) == request
    bench.finish_all(request)


def test_an_abort_in_flight_frees_pages_and_slot_at_once() -> None:
    bench = Bench()
    gone, stays = bench.add(6), bench.add(6)
    plan = bench.schedule()
    result = bench.runner.run(plan)
    assert bench.scheduler.abort("0")
    bench.scheduler.check_integrity()
    assert bench.scheduler.allocator.num_held == 2
    assert not bench.scheduler.abort("0")
    new = bench.add(6)
    other = bench.schedule()  # takes slot and pages of the aborted one
    assert new[0].slot == 0
    assert scheduled(other) == {"1.0": 1, "2.0": 6}  # the other one goes on ahead of its result
    assert bench.update(plan, result) == stays
    bench.update(other)
    assert (gone[0].finish_reason, gone[0].num_output_tokens) == (FinishReason.ABORT, 0)
    bench.finish_all(stays, new)


@pytest.mark.parametrize("n", [2, 3])
def test_a_sample_that_ends_while_the_fork_is_in_flight_costs_the_others_nothing(n: int) -> None:
    """Each keeps the token that was drawn for it, and its count."""
    bench = Bench()
    samples = bench.add(6, n=n, max_tokens=9, temperature=1.0, presence_penalty=1.0)
    plan = bench.schedule()
    result = bench.runner.run(plan)
    bench.scheduler.finish(samples[1], FinishReason.ABORT)
    bench.update(plan, result)
    bench.finish_all([sample for sample in samples if sample is not samples[1]])


def test_a_dropped_step_is_done_again() -> None:
    bench = Bench(max_num_batched_tokens=8)
    requests = [bench.add(15, n=3, max_tokens=20, presence_penalty=1.0), bench.add(4)]
    for lost in range(4):
        plan = bench.schedule()
        bench.runner.fail(plan)
        bench.scheduler.drop(plan)
        bench.scheduler.check_integrity()
        bench.step(lost + 2)
    bench.finish_all(*requests)


# ------------------------------------------------------------------------------- prefix cache


def test_a_prompt_finds_the_pages_of_an_earlier_one() -> None:
    bench = Bench()
    prompt = list(range(18))
    bench.finish_all(bench.add(prompt))
    request = bench.add([*prompt, 1, 2])
    assert scheduled(bench.schedule()) == {"1.0": 4}
    assert request[0].num_cached_tokens == 16
    assert bench.scheduler.stats.prefix_hit_tokens == 16
    assert bench.scheduler.stats.prefix_query_tokens == 38


def test_a_prompt_finds_the_pages_of_an_earlier_answer() -> None:
    bench = Bench()
    (first,) = bench.add(6, max_tokens=20)
    bench.finish_all([first])
    (second,) = bench.add([*first.tokens, 1])
    bench.step()
    assert second.num_cached_tokens == 24  # the last of the 26 tokens has no keys and values


def test_a_full_hit_leaves_a_token_to_run() -> None:
    """Bug 9."""
    bench = Bench()
    prompt = list(range(16))
    bench.finish_all(bench.add(prompt))
    request = bench.add(prompt)
    assert scheduled(bench.step()) == {"1.0": 4}
    bench.finish_all(request)


def test_pages_are_registered_once_and_only_when_computed() -> None:
    """Bugs 5 and 7: state starts from the hit; nothing is hit before its step was read."""
    bench = Bench(max_num_batched_tokens=64)
    prompt = list(range(17))
    first = bench.add(prompt)
    plan = bench.schedule()
    result = bench.runner.run(plan)
    second = bench.add(prompt)
    other = bench.schedule()
    assert scheduled(other) == {"0.0": 1, "1.0": 17}
    assert bench.scheduler.prefix_cache.num_cached == 0
    bench.update(plan, result)
    assert bench.scheduler.prefix_cache.num_cached == 4
    bench.update(other)
    third = bench.add(prompt)
    before = bench.scheduler.prefix_cache.num_cached
    bench.step()
    assert bench.scheduler.prefix_cache.num_cached == before
    bench.finish_all(first, second, third)


def test_hits_are_looked_up_anew_at_each_step() -> None:
    """Bug 8: a request that waits must not remember pages that were evicted meanwhile."""
    bench = Bench(num_pages=17, max_num_seqs=2)
    prompt = list(range(40))
    bench.finish_all(bench.add(prompt, max_tokens=1))
    running = bench.add(30, max_tokens=34)
    bench.step()
    waits = bench.add([*prompt, 1, 2, 3], max_tokens=4)
    bench.step()
    assert waits[0].status is SequenceStatus.WAITING
    bench.step(25)  # the running one grows into the cached pages
    bench.finish_all(running, waits)
    assert waits[0].num_cached_tokens < 40


def test_hits_that_nobody_holds_count_as_pages_to_take() -> None:
    bench = Bench(num_pages=17)
    prompt = list(range(32))
    bench.finish_all(bench.add(prompt, max_tokens=1))
    bench.add(29, max_tokens=20)
    bench.step()
    assert bench.scheduler.allocator.num_free == 8
    request = bench.add([*prompt, 1])[0]  # nine pages, eight of them cached and free
    bench.step()
    assert request.status is SequenceStatus.WAITING


def test_a_hit_is_not_evicted_by_what_runs_in_the_same_step() -> None:
    bench = Bench(num_pages=17)
    prompt = list(range(31))
    first = bench.add(prompt, max_tokens=1)
    bench.finish_all(first)
    grows = bench.add(7, max_tokens=3)  # takes its third page in the step that admits the next
    bench.step(2)
    hits = bench.add([*prompt, 5])
    bench.step()
    assert hits[0].num_cached_tokens == 28
    bench.finish_all(first, grows, hits)


def test_salts_keep_requests_apart() -> None:
    bench = Bench()
    prompt = list(range(16))
    bench.finish_all(bench.add(prompt, salt="a"))
    requests = [bench.add(prompt, salt="b"), bench.add(prompt), bench.add(prompt, salt="a")]
    bench.finish_all(*requests)
    assert [s.num_cached_tokens for (s,) in requests] == [0, 0, 12]


def test_the_prefix_cache_is_reset_only_when_idle() -> None:
    bench = Bench()
    request = bench.add(16)
    bench.step()
    assert not bench.scheduler.reset_prefix_cache()
    bench.finish_all(request)
    assert bench.scheduler.prefix_cache.num_cached
    assert bench.scheduler.reset_prefix_cache()
    assert bench.scheduler.prefix_cache.num_cached == 0


# ----------------------------------------------------------------------------- several samples


def test_samples_share_the_prompt_and_copy_the_page_they_write() -> None:
    bench = Bench()
    requests = bench.add(10, n=3)
    plan = bench.step()
    assert scheduled(plan) == {"0.0": 10}
    assert plan.scheduled[0].num_samples == 3
    tables = [bench.pages(s) for s in requests]
    assert tables[0] == tables[1] == tables[2]
    plan = bench.step()
    assert [copy.src for copy in plan.copies] == [tables[0][2]] * 2  # the last keeps the page
    after = [bench.pages(s) for s in requests]
    assert [pages[:2] for pages in after] == [tables[0][:2]] * 3
    assert len({pages[2] for pages in after}) == 3
    assert bench.scheduler.stats.num_cow_copies == 2
    bench.finish_all(requests)


def test_samples_of_a_prompt_that_fills_its_pages_need_no_copy() -> None:
    bench = Bench()
    requests = bench.add(8, n=3)
    bench.finish_all(requests)
    assert bench.scheduler.stats.num_cow_copies == 0


def test_a_request_with_n_samples_waits_for_n_slots() -> None:
    bench = Bench()
    first = bench.add(3, max_tokens=4)
    bench.step()
    wide, late = bench.add(3, n=4), bench.add(3)
    assert scheduled(bench.step()) == {"0.0": 1}
    bench.finish_all(first, wide, late)


def test_slots_are_kept_for_samples_that_have_not_forked() -> None:
    bench = Bench(max_num_batched_tokens=8)
    wide = bench.add(12, n=3)
    bench.add(1)
    late = bench.add(1)
    assert scheduled(bench.step()) == {"0.0": 8}
    assert scheduled(bench.step()) == {"0.0": 4, "1.0": 1}
    assert [s.slot for s in wide] == [0, 2, 3]
    assert late[0].status is SequenceStatus.WAITING


def test_the_last_chunk_waits_for_rows_of_all_samples() -> None:
    bench = Bench(max_num_seqs=4)
    asks = bench.add(30, prompt_logprobs=0, max_tokens=2)
    wide = bench.add(9, n=3)
    plan = bench.step()  # the first took all four rows
    assert scheduled(plan) == {"0.0": 4, "1.0": 8}
    bench.finish_all(asks, wide)


def test_each_sample_owns_its_state() -> None:
    """Bug 18: samples shared lists, and outputs overwrote each other."""
    bench = Bench()
    requests = bench.add(5, n=4, logprobs=1, max_tokens=6)
    bench.finish_all(requests)
    assert len({tuple(s.output_token_ids) for s in requests}) == 4
    for name in ("tokens", "output_logprobs", "prompt_logprobs"):
        assert len({id(getattr(s, name)) for s in requests}) == 4
    assert all(len(s.output_logprobs) == 6 for s in requests)


def test_a_preempted_sample_is_a_sequence_of_its_own() -> None:
    bench = Bench(num_pages=17)
    requests = bench.add(18, n=4, max_tokens=30)
    bench.finish_all(requests)
    assert requests[0].num_preemptions == 0
    assert requests[3].num_preemptions > 0


def test_aborting_a_request_ends_all_its_samples() -> None:
    """Bug 21: before the fork, after it, and while the fork is in flight."""
    for steps in range(4):
        bench = Bench(max_num_batched_tokens=8)
        requests = bench.add(12, n=3)
        for _ in range(steps):
            bench.step()
        plan = bench.schedule()
        result = bench.runner.run(plan)
        bench.scheduler.abort("0")
        assert bench.update(plan, result) == []
        assert [s.finish_reason for s in requests] == [FinishReason.ABORT] * 3
        bench.scheduler.assert_empty()


def test_one_sample_can_end_and_leave_its_siblings() -> None:
    for steps in range(5):
        for sample in range(3):
            bench = Bench(max_num_batched_tokens=8)
            requests = bench.add(12, n=3)
            for _ in range(steps):
                bench.step()
            bench.scheduler.finish(requests[sample], FinishReason.STOP, stop_reason="end")
            bench.scheduler.finish(requests[sample], FinishReason.ABORT)
            assert requests[sample].finish_reason is FinishReason.STOP
            assert requests[sample].stop_reason == "end"
            bench.scheduler.check_integrity()
            bench.finish_all([s for s in requests if s.sample != sample])


# ----------------------------------------------------------------------------- prompt logprobs


@pytest.mark.parametrize("length", [1, 2, 7, 40])
def test_prompt_logprobs_are_complete_whatever_the_rows(length: int) -> None:
    bench = Bench(max_num_seqs=4)
    (request,) = bench.add(length, prompt_logprobs=2, max_tokens=3)
    bench.finish_all([request])
    check_prompt_logprobs(bench, request)


def check_prompt_logprobs(bench: Bench, sequence: Sequence) -> None:
    answer = plain_answer(sequence.request, sequence.sample, bench.config)
    got = [
        None if e is None else {token: (v.logprob, v.rank) for token, v in e.items()}
        for e in sequence.prompt_logprobs
    ]
    assert got == answer.prompt_logprobs
    for target, entry in enumerate(sequence.prompt_logprobs):
        assert entry is None or next(iter(entry)) == sequence.tokens[target]


def test_prompt_logprobs_do_not_read_the_prefix_cache_but_fill_it() -> None:
    bench = Bench()
    prompt = list(range(20))
    bench.finish_all(bench.add(prompt))
    (request,) = bench.add(prompt, prompt_logprobs=0)
    bench.finish_all([request])
    assert request.num_cached_tokens == 0
    check_prompt_logprobs(bench, request)
    (request,) = bench.add(prompt)
    bench.step()
    assert request.num_cached_tokens == 16


def test_prompt_logprobs_come_once_after_preemption() -> None:
    """Bug 20: not short, not twice, not of an unwritten buffer."""
    for steps in range(14):
        bench = Bench(max_num_seqs=4)
        (request,) = bench.add(30, prompt_logprobs=1, max_tokens=4)
        for _ in range(steps):
            bench.step()
        if request.is_finished:
            break
        bench.scheduler.drop(bench.schedule())
        bench.finish_all([request])
        check_prompt_logprobs(bench, request)


# ----------------------------------------------------------------------------- ends of a sequence


def run_with_tokens(bench: Bench, tokens: Seq[int]) -> None:
    """Steps with these tokens drawn for every row."""
    for token in tokens:
        plan = bench.schedule()
        result = bench.runner.run(plan)
        result.tokens[:] = token
        bench.update(plan, result)


def test_eos_ends_a_sequence_without_a_stop_reason() -> None:
    bench = Bench()
    (request,) = bench.add(3, ignore_eos=False)
    run_with_tokens(bench, [5, EOS])
    assert request.output_token_ids == [5, EOS]
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, None)
    bench.scheduler.assert_empty()


def test_a_stop_id_ends_a_sequence_and_is_its_stop_reason() -> None:
    bench = Bench()
    (request,) = bench.add(3, stop_token_ids=(7,))
    run_with_tokens(bench, [EOS, 7])  # eos is ignored
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, 7)


def test_stop_ids_are_not_looked_at_before_min_tokens() -> None:
    bench = Bench()
    (request,) = bench.add(3, stop_token_ids=(7,), min_tokens=3)
    run_with_tokens(bench, [7, 7, 7])
    assert not request.is_finished
    run_with_tokens(bench, [7])
    assert request.finish_reason is FinishReason.STOP
    assert request.num_output_tokens == 4


def test_length_is_checked_whatever_min_tokens_says() -> None:
    """Bug 17: an early return for min_tokens made endless requests."""
    bench = Bench(max_num_batched_tokens=64)
    (request,) = bench.add(60, min_tokens=50, max_tokens=None, stop_token_ids=(7,))
    run_with_tokens(bench, [7, 7, 7, 7])
    assert request.finish_reason is FinishReason.LENGTH
    assert request.num_tokens == 64


def test_stop_wins_over_length_on_the_last_token() -> None:
    bench = Bench()
    (request,) = bench.add(3, stop_token_ids=(7,), max_tokens=2)
    run_with_tokens(bench, [1, 7])
    assert request.finish_reason is FinishReason.STOP


def test_a_corrupted_row_ends_its_request_alone() -> None:
    bench = Bench()
    sick, well = bench.add(9, n=2), bench.add(9)
    bench.step()
    plan = bench.schedule()
    result = bench.runner.run(plan)
    result.corrupted[1] = True
    advanced = bench.update(plan, result)
    assert set(advanced) == {*sick, *well}
    assert [s.finish_reason for s in sick] == [FinishReason.ERROR] * 2
    assert "NaN" in (sick[1].error or "")
    bench.finish_all(well)


def test_pages_of_a_corrupted_sequence_are_not_hit() -> None:
    bench = Bench()
    prompt = list(range(17))
    bench.add(prompt)
    bench.step(2)
    plan = bench.schedule()
    result = bench.runner.run(plan)
    result.corrupted[0] = True
    bench.update(plan, result)
    (again,) = bench.add(prompt)
    bench.step()
    assert again.num_cached_tokens == 0


def test_a_result_that_cannot_be_handled_fails_its_request_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    sick, well = bench.add(9, n=2), bench.add(9)
    plan = bench.schedule()
    result = bench.runner.run(plan)
    result.tokens[1] = VOCAB  # the second sample's
    assert set(bench.update(plan, result)) == {*sick, *well}
    assert [s.finish_reason for s in sick] == [FinishReason.ERROR] * 2
    assert "IntegrityError" in (sick[0].error or "")
    assert "request 0 failed" in caplog.text
    bench.finish_all(well)


def test_fail_ends_a_request_by_id_or_by_sequence_once() -> None:
    bench = Bench()
    first, second = bench.add(5, n=2), bench.add(5)
    bench.step()
    bench.scheduler.fail(first[1], "why")
    bench.scheduler.fail("1", "because")
    bench.scheduler.fail("1", "again")
    bench.scheduler.fail("unknown", "x")
    assert [s.error for s in [*first, *second]] == ["why", "why", "because"]
    bench.scheduler.assert_empty()


# ------------------------------------------------------------------------------- rows and updates


def test_rows_carry_the_parameters_of_their_sequence() -> None:
    bench = Bench()
    bench.add(3, temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, logprobs=3)
    bench.add(2, n=2, presence_penalty=0.5, frequency_penalty=1.5, repetition_penalty=2.0)
    rows = bench.schedule().rows
    assert rows.token_index.tolist() == [2, 4, 4, 0]
    assert rows.position.tolist() == [3, 2, 2, 0]
    assert rows.sample.tolist() == [0, 0, 1, 0]
    assert rows.slot.tolist() == [4, 1, 1, 4]
    assert rows.counts.tolist() == [0, 0, 0, 0]
    assert rows.seed.tolist() == [[0, 0], [0, 1], [0, 1], [0, 0]]
    assert rows.temperature.tolist() == [0.5, 1.0, 1.0, 0.0]
    assert rows.top_p.tolist() == [0.25, 1, 1, 1]
    assert rows.top_k.tolist() == [7, 0, 0, 0]
    assert rows.min_p.tolist() == [0.125, 0, 0, 0]
    assert rows.num_logprobs.tolist() == [3, -1, -1, -1]
    assert rows.presence_penalty.tolist() == [0, 0.5, 0.5, 0]
    assert rows.frequency_penalty.tolist() == [0, 1.5, 1.5, 0]
    assert rows.repetition_penalty.tolist() == [1, 2, 2, 1]


def test_prompt_rows_ask_for_the_token_after_theirs() -> None:
    bench = Bench(max_num_seqs=3)
    bench.add([9, 8, 7, 6, 5], prompt_logprobs=2, temperature=0.5)
    plan = bench.step()
    assert plan.rows.target.tolist() == [8, 7, 6]
    plan = bench.schedule()
    assert plan.rows.target.tolist() == [5, NO_TARGET, NO_TARGET]
    assert plan.rows.token_index.tolist() == [0, 1, 0]
    assert plan.rows.num_logprobs.tolist() == [2, -1, -1]
    assert plan.rows.temperature.tolist() == [0, 0.5, 0]
    assert plan.rows.position.tolist() == [4, 5, 0]


def test_a_sequence_without_adjustments_touches_no_sampler_row() -> None:
    bench = Bench()
    bench.add(3, ignore_eos=False)
    plan = bench.step()
    assert plan.row_updates == ()
    assert plan.rows.slot[0] == 4


def test_a_row_update_comes_with_the_slot_and_after_a_fork_and_a_preemption() -> None:
    bench = Bench()
    requests = bench.add(3, n=2, repetition_penalty=1.5, logit_bias={4: 2.0}, bad_token_ids=(9,))
    plan = bench.step()
    (update,) = plan.row_updates
    assert (update.slot, update.output_counts, update.allowed) == (0, {}, None)
    assert update.bias == {4: 2.0, 9: -np.inf}
    assert update.prompt_tokens == frozenset(requests[0].tokens[:3])
    plan = bench.step()
    assert [u.slot for u in plan.row_updates] == [0, 1]
    for sequence, update in zip(requests, plan.row_updates, strict=True):
        assert update.output_counts == {sequence.output_token_ids[0]: 1}
    assert plan.rows.counts[:2].tolist() == [1, 1]
    assert bench.step().row_updates == ()
    bench.scheduler.drop(bench.schedule())
    assert [u.slot for u in bench.step().row_updates] == [0, 1]
    bench.finish_all(requests)


def test_a_row_update_comes_when_min_tokens_is_reached() -> None:
    bench = Bench()
    bench.add(3, min_tokens=2, ignore_eos=False, stop_token_ids=(5,))
    (update,) = bench.step().row_updates
    assert update.bias == {5: -np.inf, EOS: -np.inf}
    assert bench.step().row_updates == ()
    (update,) = bench.step().row_updates
    assert update.bias == {}
    assert bench.step().row_updates == ()


def test_the_last_token_of_a_bad_word_is_banned_after_the_others() -> None:
    bench = Bench()
    bench.add(3, bad_sequences=[(1, 2), (7,), (1, 1, 3)])
    bans: list[Any] = []
    for token in (1, 1, 1, 5, 5):
        plan = bench.schedule()
        bans.append([sorted(update.bias) for update in plan.row_updates])
        result = bench.runner.run(plan)
        result.tokens[:] = token
        bench.update(plan, result)
    assert bans == [[[7]], [[2, 7]], [[2, 3, 7]], [], [[7]]]


# ------------------------------------------------------------------------------- plans as a whole


def test_plans_share_no_memory_with_each_other_or_the_scheduler() -> None:
    """Bug 13: JAX may still read a plan while the next one is made."""
    bench = Bench()
    bench.add(9, n=2, presence_penalty=1.0)
    bench.add(3, prompt_logprobs=1)
    plans = [bench.step() for _ in range(4)]
    before = [[array.copy() for array in arrays_of(plan)] for plan in plans]
    bench.finish_all()
    for plan, old in zip(plans, before, strict=True):
        for array, copy in zip(arrays_of(plan), old, strict=True):
            np.testing.assert_array_equal(array, copy)
    for a, b in itertools.combinations(plans, 2):
        for x, y in itertools.product(arrays_of(a), arrays_of(b)):
            assert not np.shares_memory(x, y)


def arrays_of(plan: StepPlan) -> list[np.ndarray]:
    names = ("tokens", "positions", "slot_mapping", "page_table", "kv_lens", "cu_q_lens")
    rows = [getattr(plan.rows, name) for name in plan.rows.__slots__]
    return [*(getattr(plan, name) for name in names), *rows]


def test_a_schedule_that_fails_changes_nothing() -> None:
    """Bug 10: it fails at each of its calls for pages, with hits, copies and victims under way."""
    bench = Bench(num_pages=18, max_num_batched_tokens=20)
    prefix = list(range(14))
    bench.finish_all(bench.add(prefix))
    requests = [bench.add([*prefix, 1, 2, 3]), bench.add([*prefix, 4], n=2, max_tokens=20)]
    requests.append(bench.add(9, max_tokens=20))
    while bench.scheduler.has_work:
        plan = schedule_with_failures(bench.scheduler)
        assert plan is not None
        bench.update(plan)
    stats = bench.scheduler.stats
    assert stats.prefix_hit_tokens == 24
    assert stats.num_cow_copies > 0
    assert stats.num_preemptions > 0
    bench.finish_all(*requests)


def test_an_interrupted_schedule_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    requests = bench.add(9, n=2)
    bench.step()
    before = snapshot(bench.scheduler)
    with monkeypatch.context() as patch:
        patch.setattr(SchedulerConfig, "bucket_for", interrupt)
        with pytest.raises(KeyboardInterrupt):
            bench.scheduler.schedule()
    assert snapshot(bench.scheduler) == before
    bench.finish_all(requests)


def interrupt(*arguments: Any, **options: Any) -> int:
    raise KeyboardInterrupt


def test_the_same_requests_make_the_same_plans() -> None:
    def plans() -> list[Any]:
        bench = Bench(num_pages=20, max_num_batched_tokens=12)
        for length in (9, 20, 3, 14, 30):
            bench.add(length, n=1 + length % 3, max_tokens=12, presence_penalty=0.5)
        made = []
        while bench.scheduler.has_work:
            plan = bench.step()
            arrays = [array.tolist() for array in arrays_of(plan)]
            made.append((arrays, plan.copies, plan.row_updates, scheduled(plan)))
        return made

    assert plans() == plans()


def test_stats_count_what_happened() -> None:
    bench = Bench()
    bench.add(10, max_tokens=5)
    bench.step()
    stats = bench.scheduler.stats
    assert (stats.num_requests, stats.num_prompt_tokens, stats.num_generated_tokens) == (1, 10, 1)
    assert (stats.num_pages, stats.num_held_pages, stats.kv_usage) == (64, 3, 3 / 64)
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (1, 0)
    bench.finish_all()
    assert bench.scheduler.stats.num_generated_tokens == 5
    assert bench.scheduler.stats.kv_usage == 0


# ------------------------------------------------------------------------------- check_integrity


def break_pages(bench: Bench) -> None:
    bench.scheduler.allocator.allocate()


def break_slots(bench: Bench) -> None:
    bench.scheduler.roster.free_slots.append(0)


def break_queue(bench: Bench) -> None:
    bench.scheduler.roster.waiting.append(bench.scheduler.roster.running[0])


def break_computed(bench: Bench) -> None:
    bench.scheduler.roster.running[0].sequence.num_computed_tokens += 9


def break_capacity(bench: Bench) -> None:
    bench.scheduler.roster.running[0].capacity += 4


def break_waiting(bench: Bench) -> None:
    bench.scheduler.roster.waiting[0].sequence.num_computed_tokens = 1


def break_tail(bench: Bench) -> None:
    first, second = bench.scheduler.roster.running[:2]
    first.shares_tail = second.shares_tail = False


def break_cache(bench: Bench) -> None:
    page = bench.scheduler.roster.running[0].table.pages[-1]
    bench.scheduler.allocator.mark_cached(page)


def break_rows(bench: Bench) -> None:
    live = bench.scheduler.roster.running[0]
    bench.scheduler._builder._pages[live.sequence.slot] += 1


def break_parameters(bench: Bench) -> None:
    live = bench.scheduler.roster.running[0]
    bench.scheduler._builder._seeds[live.sequence.slot, 1] += 1


def break_requests(bench: Bench) -> None:
    bench.scheduler.roster.requests.pop("0")


@pytest.mark.parametrize(
    "damage",
    [
        break_pages, break_slots, break_queue, break_computed, break_capacity, break_waiting,
        break_tail, break_cache, break_rows, break_parameters, break_requests,
    ],
)  # fmt: skip
def test_check_integrity_finds(damage: Any) -> None:
    bench = Bench()
    bench.add(10, n=2)
    bench.add(6)
    bench.step()
    bench.add(6, n=3)
    bench.scheduler.check_integrity()
    damage(bench)
    with pytest.raises(IntegrityError):
        bench.scheduler.check_integrity()


@pytest.mark.parametrize("damage", [break_pages, break_slots])
def test_assert_empty_finds(damage: Any) -> None:
    bench = Bench()
    bench.scheduler.assert_empty()
    damage(bench)
    with pytest.raises(IntegrityError):
        bench.scheduler.assert_empty()


def test_assert_empty_finds_a_request() -> None:
    bench = Bench()
    bench.add(3)
    with pytest.raises(IntegrityError, match="no work must be left"):
        bench.scheduler.assert_empty()
