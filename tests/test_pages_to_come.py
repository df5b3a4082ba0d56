"""What requests that arrive together share is computed once: each rule by a test named after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedjax.events import Step
from pagedjax.plan import StepPlan
from pagedjax.request import FinishReason, Sequence, SequenceStatus
from pagedjax.scheduling.pages_to_come import WORTH_WAITING
from tests.event_logs import Events
from tests.test_history import Recorded
from tests.test_scheduler import VOCAB, Bench, scheduled

WAITING, RUNNING = SequenceStatus.WAITING, SequenceStatus.RUNNING


def tokens_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB - 1, length).tolist()


PREFIX, OTHER = tokens_of(100, 512), tokens_of(101, 512)


def bench_of(kind: type[Bench] = Bench, **sizes: Any) -> Any:
    """Room for all, unless said otherwise."""
    defaults: dict[str, Any] = {
        "max_num_seqs": 32,
        "max_num_batched_tokens": 4_096,
        "max_model_len": 1_024,
        "page_size": 16,
        "num_pages": 1_025,
    }
    return kind(**(defaults | sizes))


def add(bench: Bench, prefix: list[int], own: int = 20, **params: Any) -> Sequence:
    """A request that goes on from a prefix with so many tokens of its own."""
    end = tokens_of(len(bench.scheduler.roster.requests) + 1_000, own)
    return bench.add([*prefix, *end], **params)[0]


def statuses(*sequences: Sequence) -> list[SequenceStatus]:
    return [sequence.status for sequence in sequences]


def check_answers(bench: Bench, *sequences: Sequence) -> None:
    """Runs to the end; each answer is the plain model's."""
    bench.finish_all([*sequences])


# ------------------------------------------------------------------------------ what it is for


@pytest.mark.parametrize("budget", [4_096, 1_000, 96])
def test_what_a_crowd_shares_is_computed_once(budget: int) -> None:
    bench = bench_of(max_num_batched_tokens=budget)
    crowd = [add(bench, PREFIX, 64) for _ in range(32)]
    check_answers(bench, *crowd)
    assert bench.scheduler.stats.num_prompt_tokens == 512 + 32 * 64
    assert bench.scheduler.stats.prefix_hit_tokens == 31 * 512
    assert [sequence.num_cached_tokens for sequence in crowd] == [0, *[512] * 31]


def test_without_a_prefix_cache_nobody_waits() -> None:
    bench = bench_of(enable_prefix_caching=False)
    crowd = [add(bench, PREFIX) for _ in range(4)]
    bench.step()
    assert statuses(*crowd) == [RUNNING] * 4
    assert bench.scheduler.stats.num_prompt_tokens == 4 * 532


def test_those_who_wait_start_in_the_step_after() -> None:
    bench = bench_of()
    crowd = [add(bench, PREFIX) for _ in range(3)]
    assert scheduled(bench.step()) == {"0.0": 532}
    assert scheduled(bench.step()) == {"0.0": 1, "1.0": 20, "2.0": 20}
    check_answers(bench, *crowd)


def test_groups_do_not_wait_for_each_other() -> None:
    bench = bench_of()
    groups = [add(bench, prefix) for prefix in (PREFIX, PREFIX, OTHER, OTHER)]
    assert scheduled(bench.step()) == {"0.0": 532, "2.0": 532}
    assert scheduled(bench.step()) == {"0.0": 1, "1.0": 20, "2.0": 1, "3.0": 20}
    check_answers(bench, *groups)


def test_a_prefix_that_goes_on_in_some_of_a_crowd_is_waited_for_again() -> None:
    """The first page of all is cached, 256 tokens are shared by all, 512 by the last two."""
    bench = bench_of()
    check_answers(bench, add(bench, PREFIX[:16]))
    crowd = [add(bench, prefix) for prefix in (PREFIX[:256], PREFIX, PREFIX)]
    assert scheduled(bench.step()) == {"1.0": 260}
    assert scheduled(bench.step()) == {"1.0": 1, "2.0": 276}
    assert scheduled(bench.step()) == {"1.0": 1, "2.0": 1, "3.0": 20}
    check_answers(bench, *crowd)


def test_of_several_that_compute_the_one_that_shares_enough_is_found() -> None:
    bench = bench_of()
    first, second = add(bench, PREFIX[:64], 200), add(bench, PREFIX)  # share too little
    third = add(bench, PREFIX)
    assert scheduled(bench.step()) == {"0.0": 264, "1.0": 532}
    check_answers(bench, first, second, third)
    assert third.num_cached_tokens == 512


# ------------------------------------------------------------------------------ when it is worth it


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
def test_few_shared_tokens_are_not_waited_for(page_size: int) -> None:
    enough = max(WORTH_WAITING, page_size)
    for shared, waits in ((enough - 1, False), (enough, True)):
        bench = bench_of(page_size=page_size)
        first, second = (add(bench, PREFIX[:shared], page_size + 20) for _ in range(2))
        bench.step()
        assert statuses(first, second) == [RUNNING, WAITING if waits else RUNNING]
        check_answers(bench, first, second)


def test_what_is_cached_already_does_not_count() -> None:
    for cached, waits in ((384, True), (400, False)):
        bench = bench_of()
        check_answers(bench, add(bench, PREFIX[:cached]))
        first, second = add(bench, PREFIX), add(bench, PREFIX)
        bench.step()
        assert statuses(first, second) == [RUNNING, WAITING if waits else RUNNING]


def test_a_page_that_could_not_be_hit_does_not_count() -> None:
    """The last token is run in any case, so of 128 equal tokens 112 could be hit."""
    for length, waits in ((WORTH_WAITING, False), (WORTH_WAITING + 1, True)):
        bench = bench_of()
        first, second = (add(bench, PREFIX[:length], 0) for _ in range(2))
        bench.step()
        assert statuses(first, second) == [RUNNING, WAITING if waits else RUNNING]
        check_answers(bench, first, second)


def test_another_salt_is_another_prefix() -> None:
    bench = bench_of()
    first, second = bench.add(PREFIX, salt="a")[0], bench.add(PREFIX, salt="b")[0]
    bench.step()
    assert statuses(first, second) == [RUNNING, RUNNING]


def test_what_a_decoding_sequence_writes_is_not_waited_for() -> None:
    bench = bench_of()
    first = add(bench, PREFIX, max_tokens=200)
    bench.step(150)
    second = bench.add([*first.tokens, *tokens_of(1, 20)])[0]
    bench.step()
    assert second.status is RUNNING


# -------------------------------------------------------------------------------- order and room


def test_an_urgent_request_does_not_wait_for_a_later_one() -> None:
    bench = bench_of(scheduling_policy="priority", max_num_batched_tokens=300)
    first = add(bench, PREFIX, max_tokens=1)
    bench.step()
    request = first.request
    urgent = bench.scheduler.add_request(
        type(request)(
            request_id="urgent",
            prompt_token_ids=request.prompt_token_ids,
            params=request.params,
            arrival=1,
            seed=1,
            priority=-5,
        )
    )[0]
    bench.step()
    assert urgent.status is RUNNING
    assert urgent.num_cached_tokens == 288  # of the first's first chunk
    check_answers(bench, first, urgent)


def test_who_waits_loses_no_page_to_those_behind_it() -> None:
    """34 pages for the first, 18 more for the second; the third would fit beside the first."""
    bench = bench_of(max_num_batched_tokens=300, num_pages=1 + 64, max_model_len=1_000)
    first, second = add(bench, PREFIX, max_tokens=2), add(bench, PREFIX, 280, max_tokens=2)
    small, large = add(bench, OTHER[:100], 10), add(bench, OTHER, 20)
    bench.step()
    assert statuses(first, second, small, large) == [RUNNING, WAITING, WAITING, WAITING]
    assert scheduled(bench.step())["0.0"] == 232
    assert statuses(first, second, small, large) == [RUNNING, WAITING, RUNNING, WAITING]
    bench.step()
    assert statuses(second, large) == [RUNNING, WAITING]
    check_answers(bench, first, second, small, large)
    assert bench.scheduler.stats.num_preemptions == 0


def test_what_would_fit_beside_the_first_alone_does_not_pass_the_second() -> None:
    bench = bench_of(num_pages=1 + 64, max_model_len=1_000)
    first, second = add(bench, PREFIX), add(bench, PREFIX, 280)  # 34 pages, and 18 of its own
    third = add(bench, OTHER[:300], 10)  # 20 pages
    bench.step()
    assert statuses(first, second, third) == [RUNNING, WAITING, WAITING]
    bench.step()
    assert statuses(second, third) == [RUNNING, WAITING]
    check_answers(bench, first, second, third)


def test_who_waits_for_a_prefix_and_lacks_pages_stops_those_behind_it() -> None:
    bench = bench_of(num_pages=1 + 64)
    first, second = add(bench, PREFIX), add(bench, PREFIX, 500)  # 34 pages, and 32 of its own
    small = add(bench, [], 10)
    bench.step()
    assert statuses(first, second, small) == [RUNNING, WAITING, WAITING]
    check_answers(bench, first, second, small)


def test_who_waits_loses_no_slot_to_those_behind_it() -> None:
    bench = bench_of(max_num_seqs=4)
    first, second = add(bench, PREFIX), add(bench, PREFIX, n=3)
    small = add(bench, [], 10)
    bench.step()
    assert statuses(first, second, small) == [RUNNING, WAITING, WAITING]
    bench.step()
    assert statuses(first, second, small) == [RUNNING, RUNNING, WAITING]
    bench.finish_all()


def test_the_leader_of_samples_and_of_beams_waits_and_is_waited_for() -> None:
    for params in ({"n": 3}, {"beam_width": 3}):
        bench = bench_of()
        first, second = add(bench, PREFIX, **params), add(bench, PREFIX, **params)
        assert scheduled(bench.step()) == {"0.0": 532}
        assert scheduled(bench.step())["1.0"] == 20
        assert second.num_cached_tokens == 512
        bench.finish_all()
        assert first.is_finished


def test_nobody_waits_for_a_budget_that_is_used_up() -> None:
    """A prompt in chunks takes whole steps; then the queue stands for that reason."""
    sink = Events()
    bench = bench_of(max_num_batched_tokens=100)
    bench.scheduler = type(bench.scheduler)(bench.config, events=sink)
    add(bench, PREFIX)
    add(bench, PREFIX)
    bench.scheduler.schedule()
    assert [step.waiting for step in sink.of(Step)] == [["1", "tokens", 1, 0, 0]]


# ---------------------------------------------------------------------- prompts in chunks, late


def test_a_long_prefix_is_waited_for_as_long_as_it_is_computed() -> None:
    bench = bench_of(max_num_batched_tokens=120)
    first, second = add(bench, PREFIX), add(bench, PREFIX)
    for _ in range(4):
        bench.step()
        assert second.status is WAITING
    assert scheduled(bench.step()) == {"0.0": 52, "1.0": 52}  # 480 tokens are there to be hit
    assert second.num_cached_tokens == 480
    check_answers(bench, first, second)


def test_who_waits_knows_that_a_result_is_to_come() -> None:
    bench = bench_of()
    first, second, other = add(bench, PREFIX), add(bench, PREFIX), add(bench, OTHER)
    plan = bench.schedule()
    assert scheduled(plan) == {"0.0": 532, "2.0": 532}
    result = bench.runner.run(plan)
    third, fourth = add(bench, OTHER), add(bench, [], 10)
    late = bench.schedule()  # those that compute go on ahead of their results
    assert scheduled(late) == {"0.0": 1, "2.0": 1, "4.0": 10}
    bench.update(plan, result)
    bench.update(late)
    assert scheduled(bench.step()) == {"0.0": 1, "1.0": 20, "2.0": 1, "3.0": 20, "4.0": 1}
    check_answers(bench, first, second, other, third, fourth)


# -------------------------------------------------------------------- who computes, does so no more


def _abort(bench: Bench, plan: StepPlan) -> None:
    bench.scheduler.abort("0")
    bench.update(plan)


def _finish(bench: Bench, plan: StepPlan) -> None:
    bench.scheduler.finish(plan.scheduled[0].sequence, FinishReason.STOP)
    bench.update(plan)


def _corrupt(bench: Bench, plan: StepPlan) -> None:
    result = bench.runner.run(plan)
    result.corrupted[0] = True
    bench.update(plan, result)


def _drop(bench: Bench, plan: StepPlan) -> None:
    bench.runner.fail(plan)
    bench.scheduler.drop(plan)


def _never_run(bench: Bench, plan: StepPlan) -> None:
    bench.scheduler.drop(plan, has_run=False)


def _reset(bench: Bench, plan: StepPlan) -> None:
    assert bench.scheduler.reset_prefix_cache(reset_running=True)
    bench.update(plan)


def _forget(bench: Bench, plan: StepPlan) -> None:
    bench.scheduler.forget_device_pages()
    bench.update(plan)


@pytest.mark.parametrize("end", [_abort, _finish, _corrupt])
def test_when_the_one_that_computes_ends_the_next_does(
    end: Callable[[Bench, StepPlan], None],
) -> None:
    bench = bench_of()
    first, second, third = (add(bench, PREFIX) for _ in range(3))
    end(bench, bench.schedule())
    assert first.is_finished
    assert scheduled(bench.step()) == {"1.0": 532}
    check_answers(bench, second, third)
    assert third.num_cached_tokens == 512


@pytest.mark.parametrize("lose", [_drop, _never_run, _reset, _forget])
def test_when_its_step_is_lost_it_computes_again_and_is_waited_for(
    lose: Callable[[Bench, StepPlan], None],
) -> None:
    bench = bench_of()
    crowd = [add(bench, PREFIX) for _ in range(3)]
    lose(bench, bench.schedule())
    assert scheduled(bench.step()) == {"0.0": 532}
    assert scheduled(bench.step()) == {"0.0": 1, "1.0": 20, "2.0": 20}
    check_answers(bench, *crowd)


def test_when_it_gives_way_nobody_takes_its_place() -> None:
    """Older ones need the pages of the one that computes, which is back before who waits for it."""
    bench = bench_of(num_pages=1 + 40, max_model_len=640, max_num_batched_tokens=60)
    old = [add(bench, [], 10, max_tokens=30) for _ in range(8)]
    bench.step(2)
    computes, waits = add(bench, PREFIX[:448], 10), add(bench, PREFIX[:448], 10)
    while computes.num_preemptions == 0:
        bench.step()
        assert computes.num_output_tokens == 0
        assert waits.status is WAITING
    while computes.num_output_tokens == 0:
        assert waits.status is WAITING
        bench.step()
    check_answers(bench, *old, computes, waits)
    assert waits.num_cached_tokens >= 448 - WORTH_WAITING


def test_what_was_preempted_waits_for_no_later_one() -> None:
    bench = bench_of(max_num_batched_tokens=190)
    first, second = add(bench, PREFIX), add(bench, PREFIX)
    bench.step()
    plan = bench.scheduler.schedule(only={"1"})  # as for a suspect: the first gives its pages up
    assert plan is not None
    bench.update(plan)
    assert (first.num_preemptions, second.num_computed_tokens) == (1, 366)
    assert scheduled(bench.step()) == {"1.0": 166, "0.0": 24}
    check_answers(bench, first, second)


def test_a_page_that_was_computed_and_cannot_be_hit_is_not_waited_for() -> None:
    """As when another one that had hit it gave numbers that cannot be trusted."""
    bench = bench_of(max_num_batched_tokens=300)
    first = add(bench, PREFIX)
    bench.step()
    for page in bench.pages(first):
        if bench.scheduler.allocator.is_cached(page):
            bench.scheduler.allocator.unmark(page)
    second = add(bench, PREFIX)
    assert scheduled(bench.step()) == {"0.0": 232, "1.0": 68}
    check_answers(bench, first, second)


def test_who_asks_for_prompt_logprobs_is_waited_for_and_waits_for_nobody() -> None:
    bench = bench_of()
    first, other = add(bench, PREFIX, prompt_logprobs=0), add(bench, PREFIX)
    bench.step()
    assert statuses(first, other) == [RUNNING, WAITING]
    check_answers(bench, first, other)
    assert other.num_cached_tokens >= 512 - WORTH_WAITING
    first, other = add(bench, OTHER), add(bench, OTHER, prompt_logprobs=0)
    bench.step()
    assert statuses(first, other) == [RUNNING, RUNNING]
    check_answers(bench, first, other)
    assert other.num_cached_tokens == 0


def test_what_was_swapped_comes_back_at_once() -> None:
    bench = bench_of(num_host_pages=200, preemption_mode="swap", num_pages=1 + 80)
    old = add(bench, OTHER[:400], 0, max_tokens=600)
    swapped = add(bench, PREFIX, max_tokens=300)
    while swapped.num_preemptions == 0:
        bench.step()
    assert bench.scheduler.roster.live[swapped].host_pages
    check_answers(bench, old, swapped)


# ----------------------------------------------------------------------------------- what it costs


def test_a_crowd_is_looked_up_in_the_cache_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the one that computes and the first that waits; the others wait for what that one does."""
    bench, calls = bench_of(), list[Any]()
    find = bench.scheduler.prefix_cache.find
    for _ in range(30):
        add(bench, PREFIX)

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return find(*arguments)

    monkeypatch.setattr(bench.scheduler.prefix_cache, "find", counted)
    assert scheduled(bench.schedule()) == {"0.0": 532}
    assert len(calls) == 2


# --------------------------------------------------------------------------------------- in words


def test_the_event_log_and_explain_say_who_computed_what() -> None:
    bench = bench_of(Recorded)
    crowd = [add(bench, PREFIX) for _ in range(3)]
    check_answers(bench, *crowd)
    assert (
        "waited 1 step (2.000 s): 1 step first in the queue: 0 was computing the first 512 tokens "
        "of its prompt. starts with 512 of 532 prompt tokens: 32 pages on the device (computed for "
        "0)"
    ) in bench.text(1)
    assert (
        "1 step behind 1, which was first: 0 was computing the first 512 tokens of its prompt"
    ) in bench.text(2)
    assert "waited 0 steps" in bench.text(0)
