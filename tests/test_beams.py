"""Beam search on pages: what it shares, gives up and gets back; answers are the plain ones."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from pagedjax.errors import RequestError
from pagedjax.request import FinishReason, Sequence, SequenceStatus
from tests.plain_beams import fake_beams
from tests.scheduler_faults import Injected, failing_after, schedule_with_failures
from tests.test_scheduler import Bench, scheduled

LEAST = {"num_pages": 17}  # one sequence of max_model_len, nothing beside it


def finish(bench: Bench, *requests: list[Sequence]) -> None:
    """Runs until nothing is left; every request with beams must have the plain answers."""
    for _ in range(5_000):
        if not bench.scheduler.has_work:
            break
        bench.step()
    bench.scheduler.assert_empty()
    check(bench, *requests)


def check(bench: Bench, *requests: list[Sequence]) -> None:
    for sequences in requests:
        expected = fake_beams(sequences[0].request, bench.config)
        for sequence, beam in zip(sequences, expected, strict=True):
            beam.check(sequence)


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_beams_are_the_plain_ones(page_size: int, width: int) -> None:
    bench = Bench(page_size=page_size, num_pages=1 + 512 // page_size)
    kinds: list[dict[str, Any]] = [
        {},
        {"early_stopping": True, "ignore_eos": False},
        {"early_stopping": "never", "stop_token_ids": (1, 2, 3, 4)},
        {"length_penalty": 0.0, "stop_token_ids": (1, 2, 3, 4), "min_tokens": 3, "logprobs": 3},
    ]
    requests = [
        bench.add(5 + i, beam_width=width, max_tokens=12, **kind) for i, kind in enumerate(kinds)
    ]
    finish(bench, *requests)


def test_a_search_of_one_token_ends_at_its_prompt() -> None:
    bench = Bench()
    request = bench.add(6, beam_width=3, max_tokens=1)
    assert len(bench.step().scheduled) == 1
    assert {sequence.finish_reason for sequence in request} == {FinishReason.LENGTH}
    finish(bench, request)


# ------------------------------------------------------------------------------------- sharing


def test_the_prompt_is_computed_once_and_its_pages_are_shared() -> None:
    bench = Bench(enable_prefix_caching=False)
    request = bench.add(14, beam_width=4)
    plan = bench.step()
    assert (plan.num_tokens, plan.num_rows, plan.rows.num_logprobs[0]) == (14, 1, 20)
    assert bench.scheduler.allocator.num_held == 4
    assert len({tuple(bench.pages(sequence)) for sequence in request}) == 1
    finish(bench, request)


def test_a_page_is_copied_only_when_a_lane_writes_what_others_hold() -> None:
    bench = Bench(enable_prefix_caching=False)
    request = bench.add(14, beam_width=4)
    bench.step()
    plan = bench.schedule()
    assert len(plan.copies) == 3  # the last holder writes in place
    assert len({copy.src for copy in plan.copies}) == 1
    assert bench.scheduler.allocator.num_held == 7
    bench.update(plan)
    finish(bench, request)


def test_a_lane_without_children_leaves_its_pages_at_once() -> None:
    """Pages that are held are those that the lanes' tables name, after each turn."""
    bench = Bench(enable_prefix_caching=False)
    request = bench.add(6, beam_width=4, max_tokens=30)
    shared = 0
    while bench.scheduler.has_work:
        bench.step()
        named = [page for live in bench.scheduler.roster.live.values() for page in live.table.pages]
        assert bench.scheduler.allocator.num_held == len(set(named))
        shared += len(named) - len(set(named))
    assert shared > 0
    check(bench, request)


def test_each_lane_owns_its_state() -> None:
    """Bug 18: children of one parent must not share lists."""
    bench = Bench()
    request = bench.add(6, beam_width=4, max_tokens=20, logprobs=1)
    while bench.scheduler.has_work:
        bench.step()
        for a, b in itertools.combinations(request, 2):
            assert a.tokens is not b.tokens
            assert a.output_logprobs is not b.output_logprobs
    check(bench, request)


def test_a_lane_hits_what_an_earlier_prompt_left() -> None:
    bench = Bench()
    prompt = list(range(18))
    finish(bench, bench.add(prompt, beam_width=2))
    request = bench.add([*prompt, 1, 2], beam_width=3)
    assert scheduled(bench.schedule()) == {"1.0": 4}
    assert [sequence.num_cached_tokens for sequence in request] == [16, 16, 16]
    bench.scheduler.abort("1")
    bench.scheduler.assert_empty()


# ------------------------------------------------------------------------------------- lockstep


def test_lanes_wait_for_each_other() -> None:
    """With a budget of two tokens beside another request, lanes run in turns and idle between."""
    bench = Bench(max_num_batched_tokens=4)
    request, other = bench.add(3, beam_width=3, max_tokens=6), bench.add(20)
    lengths = set()
    idle = 0
    while bench.scheduler.has_work:
        bench.step()
        lanes = [live for live in bench.scheduler.roster.live.values() if live.owner.beams]
        lengths.add(len({live.sequence.num_tokens for live in lanes}))
        idle += sum(live.offers is not None for live in lanes)
    assert lengths <= {0, 1}
    check(bench, request)
    assert other[0].is_finished


def test_a_lane_whose_result_is_late_holds_its_search_back_and_nobody_else() -> None:
    bench = Bench(max_num_seqs=5)
    request, other = bench.add(4, beam_width=4, max_tokens=9), bench.add(3, max_tokens=30)
    bench.step()
    late = bench.schedule()
    assert len(late.scheduled) == 5
    result = bench.runner.run(late)
    ahead = bench.schedule()
    assert [s.sequence for s in ahead.scheduled] == other
    bench.update(late, result)
    bench.update(ahead)
    finish(bench, request)
    assert other[0].is_finished


def test_idle_lanes_keep_their_pages_while_a_result_is_awaited() -> None:
    """It may bring the turn: nothing is computed again because a step is late."""
    bench = Bench(**LEAST, enable_prefix_caching=False, max_num_seqs=8)
    bench.add(8, max_tokens=40)
    request = bench.add(10, beam_width=4, max_tokens=30)
    num_idle = 0
    while bench.scheduler.has_work:
        plan = bench.schedule()
        before = bench.scheduler.stats.num_preemptions
        num_idle += sum(live.offers is not None for live in bench.scheduler.roster.running)
        result = bench.runner.run(plan)
        ahead = bench.scheduler.schedule()  # those that are no lanes
        assert bench.scheduler.stats.num_preemptions == before
        bench.update(plan, result)
        if ahead is not None:
            bench.update(ahead)
    assert num_idle > 0
    check(bench, request)


def test_a_lost_step_is_run_again_by_all_lanes() -> None:
    bench = Bench()
    request = bench.add(6, beam_width=4, max_tokens=12)
    for turns in range(1, 4):
        bench.step(turns)
        plan = bench.schedule()
        bench.runner.fail(plan)
        bench.scheduler.drop(plan)
        bench.scheduler.check_integrity()
    finish(bench, request)


# ----------------------------------------------------------------------------- too few pages


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [4, 32])
def test_beams_in_the_least_pool_are_the_plain_ones(caching: bool, budget: int) -> None:
    """Idle lanes give their pages up to their siblings: else nothing could run."""
    bench = Bench(**LEAST, enable_prefix_caching=caching, max_num_batched_tokens=budget)
    requests = [
        bench.add(50, beam_width=4, max_tokens=None),
        bench.add(7, beam_width=3, max_tokens=40, logprobs=0),
    ]
    finish(bench, *requests)
    stats = bench.scheduler.stats
    assert stats.num_preemptions > 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_host_pages", [5, 60])
def test_swapped_lanes_come_back_with_what_they_had(caching: bool, num_host_pages: int) -> None:
    """Parents and children may be swapped when their search turns, and the host may be full."""
    bench = Bench(
        **LEAST,
        enable_prefix_caching=caching,
        num_host_pages=num_host_pages,
        preemption_mode="swap",
        max_num_seqs=8,
    )
    requests = [
        bench.add(20, beam_width=4, max_tokens=30),
        bench.add(9, beam_width=3, max_tokens=40, logprobs=0),
    ]
    finish(bench, *requests)
    assert bench.scheduler.stats.swap.num_swaps > 0


def test_what_came_first_progresses_whatever_searches_are_about() -> None:
    bench = Bench(**LEAST, enable_prefix_caching=False)
    first = bench.add(20, beam_width=4, max_tokens=30)
    others = [bench.add(10, max_tokens=30)[0], *bench.add(20, beam_width=3, max_tokens=30)]
    while not first[0].is_finished:
        plan = bench.step()
        assert plan.scheduled[0].sequence in first
    assert not any(sequence.is_finished for sequence in others)
    check(bench, first)
    finish(bench, others[1:])


def test_a_parked_lane_keeps_its_offers_and_nothing_younger_takes_its_room() -> None:
    bench = Bench(**LEAST, enable_prefix_caching=False, max_num_seqs=5)
    request = bench.add(30, beam_width=4, max_tokens=20)
    young = None
    for _ in range(400):
        bench.step()
        lanes = [live for live in bench.scheduler.roster.live.values() if live.owner.beams]
        parked = [live for live in lanes if live.offers and live.sequence.slot is None]
        if parked and young is None:
            young = bench.add(2)[0]
        if young is not None and parked:
            assert young.status is SequenceStatus.WAITING
        if not lanes:
            break
    assert young is not None
    check(bench, request)
    finish(bench)


def test_a_search_short_of_pages_goes_on_beside_an_older_request() -> None:
    """What idle lanes hold goes to their sibling that waits, though others could run, too."""
    bench = Bench(**LEAST, enable_prefix_caching=False, max_num_seqs=8)
    (older,) = bench.add(8, max_tokens=40)
    request = bench.add(10, beam_width=4, max_tokens=30)
    while not older.is_finished:
        bench.step()
    assert request[0].num_output_tokens > 13  # 11 when idle lanes keep theirs
    finish(bench, request)


def test_an_older_newcomer_is_not_locked_out_by_idle_lanes() -> None:
    """All lanes of a search but one idle, which is behind a request of higher priority."""
    bench = Bench(
        **LEAST,
        enable_prefix_caching=False,
        scheduling_policy="priority",
        max_num_batched_tokens=64,
    )
    request = bench.add(40, beam_width=4, max_tokens=20)
    newcomers = []
    for step in range(600):
        if not bench.scheduler.has_work:
            break
        waiting = [live for live in bench.scheduler.roster.waiting if live.owner.beams]
        if waiting and len(newcomers) < 3 and step % 5 == 0:
            newcomers.append(add_urgent(bench))
        bench.step()
    assert newcomers
    assert all(sequence.is_finished for sequences in newcomers for sequence in sequences)
    check(bench, request)


def add_urgent(bench: Bench) -> list[Sequence]:
    """A request of many pages and slots that goes before all others."""
    add, urgent = bench.scheduler.add_request, []
    bench.scheduler.add_request = lambda request: add(  # pyright: ignore[reportAttributeAccessIssue]
        replace(request, priority=-100)
    )
    try:
        urgent = bench.add(45, n=4, max_tokens=10)
    finally:
        del bench.scheduler.add_request
    return urgent


def test_children_take_no_slot_that_is_promised_to_a_fork() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.add(20, n=3)
    bench.step()
    roster = bench.scheduler.roster
    assert roster.free_slots == [1, 2, 3]
    assert roster.unpromised_slots() == [1]  # two of them are the other samples'
    bench.finish_all()


# --------------------------------------------------------------------------- ends and failures


@pytest.mark.parametrize("when", range(8))
def test_an_abort_of_a_search_frees_all_of_it(when: int) -> None:
    """Bug 21: lanes that wait, run, idle or compute the prompt."""
    bench = Bench(**LEAST, max_num_batched_tokens=5)
    request, other = bench.add(12, beam_width=4, max_tokens=30), bench.add(3)
    bench.step(when) if when else None
    plan = bench.schedule()
    result = bench.runner.run(plan)
    assert bench.scheduler.abort("0")
    assert not bench.scheduler.abort("0")
    bench.update(plan, result)
    assert {sequence.finish_reason for sequence in request} == {FinishReason.ABORT}
    bench.finish_all(other)


def test_a_search_ends_as_one() -> None:
    bench = Bench()
    request = bench.add(5, beam_width=3)
    bench.step(3)
    bench.scheduler.finish(request[1], FinishReason.ABORT)
    assert {sequence.finish_reason for sequence in request} == {FinishReason.ABORT}
    bench.scheduler.assert_empty()


def test_a_turn_that_fails_ends_its_request_alone() -> None:
    """Every call for pages of a turn fails once; the other request never notices."""
    failures = 0
    for num_calls in range(12):
        bench = Bench(enable_prefix_caching=False)
        request, other = bench.add(14, beam_width=3, max_tokens=6), bench.add(5, max_tokens=20)
        bench.step(2)
        allocator = bench.scheduler.allocator
        left = iter(range(num_calls))
        plan = bench.schedule()
        result = bench.runner.run(plan)
        allocator.share = failing_after(left, allocator.share)
        bench.scheduler.update(plan, result)
        del allocator.share
        bench.scheduler.check_integrity()
        if request[0].finish_reason is FinishReason.ERROR:
            failures += 1
            assert Injected.__name__ in (request[0].error or "")
            assert {sequence.finish_reason for sequence in request} == {FinishReason.ERROR}
            bench.finish_all(other)
        else:
            finish(bench, request)
    assert failures > 1


def test_a_step_that_cannot_be_made_changes_nothing_of_parked_lanes() -> None:
    bench = Bench(**LEAST, enable_prefix_caching=False)
    request = bench.add(50, beam_width=4, max_tokens=None)
    num_parked = 0
    while bench.scheduler.has_work:
        before = bench.scheduler.stats.num_preemptions
        plan = schedule_with_failures(bench.scheduler)
        assert plan is not None
        num_parked += bench.scheduler.stats.num_preemptions - before
        bench.update(plan)
    assert num_parked > 0
    check(bench, request)


def test_a_corrupted_lane_ends_its_search() -> None:
    bench = Bench()
    request, other = bench.add(5, beam_width=3), bench.add(4)
    bench.step(2)
    plan = bench.schedule()
    result = bench.runner.run(plan)
    result.corrupted[1] = True
    bench.update(plan, result)
    assert {sequence.finish_reason for sequence in request} == {FinishReason.ERROR}
    bench.finish_all(other)


@pytest.mark.parametrize("token", [-1, 64])
def test_an_offer_outside_the_vocabulary_ends_its_search(token: int) -> None:
    bench = Bench()
    request, other = bench.add(5, beam_width=3), bench.add(4)
    bench.step(2)
    plan = bench.schedule()
    result = bench.runner.run(plan)
    result.top_ids[1, 5] = token
    bench.update(plan, result)
    assert {sequence.finish_reason for sequence in request} == {FinishReason.ERROR}
    bench.finish_all(other)


# ------------------------------------------------------------------------------------ the door


@pytest.mark.parametrize(
    ("params", "param", "message"),
    [
        ({"beam_width": 5}, "beam_width", r"at most `max_num_seqs` \(4\). Got 5"),
        (
            {"beam_width": 4, "stop_token_ids": tuple(range(17))},
            "beam_width",
            "at most 3 with 17 tokens that end",
        ),
        ({"beam_width": 4, "stop_token_ids": (64,)}, "stop_token_ids", "Got 64"),
    ],
)
def test_a_search_that_can_never_be_served_is_refused(
    params: dict[str, Any], param: str, message: str
) -> None:
    bench = Bench()
    with pytest.raises(RequestError, match=message) as caught:
        bench.add(3, **params)
    assert caught.value.param == param
    bench.scheduler.assert_empty()
