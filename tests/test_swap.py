"""Swap and the host tier, each rule by a test named after it; tokens are those of a plain model."""

from __future__ import annotations

from typing import Any

import pytest

from pagedjax.errors import IntegrityError, TransferError
from pagedjax.plan import StepPlan, StepResult
from pagedjax.request import FinishReason, Sequence, SequenceStatus
from pagedjax.scheduler import Scheduler
from pagedjax.scheduling import page_mover
from pagedjax.scheduling.live import LiveSequence
from tests.scheduler_faults import schedule_with_failures
from tests.test_scheduler import Bench, scheduled

MOVING = {"num_pages": 17, "num_host_pages": 40, "preemption_mode": "swap"}


def pressed(n: int = 3, **sizes: Any) -> tuple[Bench, list[list[Sequence]]]:
    """Requests that outgrow a pool that holds one of `max_model_len`, by default without hits."""
    bench = Bench(**(MOVING | {"enable_prefix_caching": False} | sizes))
    return bench, [bench.add(16, max_tokens=30) for _ in range(n)]


def until_preempted(bench: Bench) -> StepPlan:
    """Steps until a plan has victims; it is not run yet."""
    for _ in range(60):
        before = bench.scheduler.stats.num_preemptions
        plan = bench.schedule()
        if bench.scheduler.stats.num_preemptions > before:
            return plan
        bench.update(plan)
    raise AssertionError("nothing was preempted")


def live(bench: Bench, sequence: Sequence) -> LiveSequence:
    return bench.scheduler.roster.live[sequence]


def fill(bench: Bench, num_tokens: int) -> None:
    """A request of its own that takes so many positions and ends."""
    bench.finish_all(bench.add(num_tokens - 1, max_tokens=1))


# ------------------------------------------------------------------------------- out and in again


def test_a_swapped_sequence_goes_on_where_it_was() -> None:
    bench, requests = pressed()
    (last,) = requests[2]
    plan = until_preempted(bench)
    computed, pages = last.num_computed_tokens, live(bench, last).host_pages
    assert computed == last.num_tokens - 1 > 16
    assert (last.status, last.slot, last.num_preemptions) == (SequenceStatus.WAITING, None, 1)
    assert bench.pages(last) == []
    assert sorted(move.host_page for move in plan.swaps_out) == sorted(pages)
    assert len(pages) == -(-computed // 4)
    bench.update(plan)
    while last.status is SequenceStatus.WAITING:
        plan = bench.step()
    assert scheduled(plan)["2.0"] == 1  # nothing is computed again
    assert {move.host_page for move in plan.swaps_in} >= set(pages)
    bench.finish_all(*requests)
    swap = bench.scheduler.stats.swap
    assert swap.num_swaps == bench.scheduler.stats.num_preemptions > 0
    assert swap.num_tokens_in == swap.num_tokens_out > 0
    assert swap.num_pages_in == swap.num_pages_out > 0
    assert (swap.num_recomputed_tokens, swap.num_held_host_pages) == (0, 0)


def test_a_prompt_is_swapped_in_the_middle_and_goes_on() -> None:
    """Prompt logprobs too: those that are in stay, the others come (bug 20)."""
    bench = Bench(**MOVING, max_num_batched_tokens=8)
    first, second = bench.add(12, max_tokens=40), bench.add(44, prompt_logprobs=1, max_tokens=3)
    plan = until_preempted(bench)
    (sequence,) = second
    assert 12 < sequence.num_computed_tokens < 44
    assert live(bench, sequence).host_pages
    bench.update(plan)
    bench.finish_all(first, second)
    assert len(sequence.prompt_logprobs) == 44
    assert bench.scheduler.stats.swap.num_recomputed_tokens == 0


def test_the_seeded_answer_of_a_swapped_sequence_is_the_same() -> None:
    """Bug 24: the key is (seed, sample, position)."""
    for caching in (True, False):
        bench, requests = pressed(4, enable_prefix_caching=caching)
        bench.finish_all(*requests)
        assert bench.scheduler.stats.swap.num_swaps > 0


def test_nobody_gives_way_while_results_are_awaited() -> None:
    """So a victim's positions count once, and its token comes once."""
    bench = Bench(**MOVING, enable_prefix_caching=False)
    requests = [bench.add(16, max_tokens=40), bench.add(16, max_tokens=40)]
    waves: list[tuple[StepPlan, StepResult]] = []
    while bench.scheduler.has_work:
        before = bench.scheduler.stats.num_preemptions
        plan = bench.scheduler.schedule()
        bench.scheduler.check_integrity()
        assert bench.scheduler.stats.num_preemptions == before or not waves
        if plan is not None:
            waves.append((plan, bench.runner.run(plan)))
        if plan is None or len(waves) == 2:
            bench.update(*waves.pop(0))
    assert bench.scheduler.stats.swap.num_swaps > 0
    bench.finish_all(*requests)


def test_a_victim_frees_its_pages_in_the_step_that_moves_them() -> None:
    """Bug 25: pages that are about to be free count, so there are no more victims than needed."""
    bench, _ = pressed()
    plan = until_preempted(bench)
    assert bench.scheduler.stats.num_preemptions == 1
    gone = {move.page for move in plan.swaps_out}
    written = {int(slot) // 4 for slot in plan.slot_mapping[: plan.num_tokens]}
    assert gone & written  # read before this very step writes it


def test_pages_that_came_back_do_not_wait_for_the_host_again() -> None:
    """Full pages stay on the host as cached content: to give them up again moves nothing."""
    bench, requests = pressed(enable_prefix_caching=True)
    bench.finish_all(*requests)
    swap = bench.scheduler.stats.swap
    assert swap.num_swaps >= 1
    assert swap.num_pages_out < -(-swap.num_tokens_out // 4) + swap.num_swaps


def test_what_is_still_on_the_device_is_not_moved_back() -> None:
    bench, requests = pressed(2, enable_prefix_caching=True)
    bench.update(until_preempted(bench))
    (last,) = requests[1]
    kept = live(bench, last)
    full = last.num_computed_tokens // 4
    bench.scheduler.abort("0")  # frees pages without touching those of the victim
    plan = bench.step()
    assert len(plan.swaps_in) < full
    assert {m.host_page for m in plan.swaps_in} <= set(kept.host_pages) | set(range(1, 41))
    bench.finish_all([last])


# ----------------------------------------------------------------------------------------- sharing


def test_forks_that_are_swapped_together_move_their_pages_once() -> None:
    bench = Bench(**MOVING, enable_prefix_caching=False)
    oldest, forks = bench.add(6, max_tokens=50), bench.add(22, n=2, max_tokens=20)
    bench.step(2)
    while not live(bench, forks[1]).sequence.num_preemptions:
        plan = bench.schedule()
        if live(bench, forks[0]).host_pages and live(bench, forks[1]).host_pages:
            shared = set(live(bench, forks[0]).host_pages) & set(live(bench, forks[1]).host_pages)
            assert len(shared) == 5
            assert len({m.page for m in plan.swaps_out}) == len(plan.swaps_out)
        bench.update(plan)
    bench.finish_all(oldest, forks)


def test_forks_share_a_partial_host_page_and_each_gets_a_page_of_its_own() -> None:
    bench = Bench(**MOVING, enable_prefix_caching=False)
    oldest = bench.add(4, max_tokens=50)  # its next position needs a page
    forks = bench.add(22, n=2, max_tokens=8)  # two positions in the sixth page
    bench.step()
    pool = bench.scheduler.allocator
    taken = pool.allocate(pool.num_free)
    plan = bench.scheduler.schedule()
    assert plan is not None
    assert scheduled(plan) == {"0.0": 1}
    first, second = (live(bench, fork).host_pages for fork in forks)
    assert first == second
    assert sorted(move.host_page for move in plan.swaps_out) == sorted(first)
    pool.free(taken)
    bench.update(plan)
    plan = bench.step()
    assert {m.host_page for m in plan.swaps_in} == set(first)
    assert len(plan.swaps_in) == 7  # five that they share, and two tails
    bench.finish_all(oldest, forks)


def test_two_hits_of_one_step_share_the_page_that_is_brought_in() -> None:
    bench = Bench(**MOVING)
    prefix = list(range(12))
    bench.finish_all(bench.add([*prefix, 1]))
    fill(bench, 64)
    requests = [bench.add([*prefix, 2]), bench.add([*prefix, 3])]
    plan = bench.schedule()
    assert scheduled(plan) == {"2.0": 1, "3.0": 1}
    assert len(plan.swaps_in) == 3
    first, second = (bench.pages(sequence) for (sequence,) in requests)
    assert first[:3] == second[:3] == [move.page for move in plan.swaps_in]
    bench.update(plan)
    late = bench.add([*prefix, 4])  # what was brought in is hit on the device from now on
    plan = bench.schedule()
    assert scheduled(plan)["4.0"] == 1
    assert plan.swaps_in == ()
    bench.update(plan)
    bench.finish_all(*requests, late)


# ------------------------------------------------------------------------------- evicted prefixes


def test_an_evicted_prefix_is_kept_on_the_host_and_brought_in_by_a_hit() -> None:
    bench = Bench(**MOVING)
    prompt = list(range(22))
    bench.finish_all(bench.add(prompt))
    fill(bench, 64)
    (again,) = bench.add([*prompt, 1])
    plan = bench.step()
    assert again.num_cached_tokens == 20  # on the device or the host: it is a hit
    assert len(plan.swaps_in) == 5
    assert scheduled(plan) == {"2.0": 3}
    stats = bench.scheduler.stats
    assert (stats.prefix_hit_tokens, stats.swap.num_hit_tokens) == (20, 20)
    bench.finish_all([again])


def test_a_prefix_that_is_half_on_the_host_is_hit_whole() -> None:
    bench = Bench(**MOVING)
    prompt = list(range(24))
    bench.finish_all(bench.add(prompt))
    fill(bench, 52)  # takes some of its pages only
    hits = bench.scheduler.prefix_cache.find(
        [*prompt, 1], bench.scheduler.prefix_cache.chain((), {"salt": None})
    )
    assert len(hits) == 6
    assert 0 < sum(map(bool, hits.pages)) < 6
    (again,) = bench.add([*prompt, 1])
    plan = bench.step()
    assert len(plan.swaps_in) == sum(map(bool, hits.host_pages))
    assert again.num_cached_tokens == 24
    bench.finish_all([again])


def test_the_host_keeps_the_latest_and_never_what_a_swapped_sequence_holds() -> None:
    bench, requests = pressed(enable_prefix_caching=True, num_host_pages=8)
    (last,) = requests[2]
    bench.update(until_preempted(bench))
    held = live(bench, last).host_pages
    assert len(held) == -(-last.num_computed_tokens // 4)
    while last.status is SequenceStatus.WAITING:  # evictions go on meanwhile
        assert live(bench, last).host_pages == held
        bench.step()
    bench.finish_all(*requests)
    host = bench.scheduler.host.allocator
    assert host.num_evictable == 8
    assert bench.scheduler.stats.swap.num_spilled_pages > 8


def test_a_step_spills_a_bounded_number_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_mover, "MAX_SPILLED_PAGES", 3)
    bench = Bench(**MOVING, max_num_batched_tokens=64)
    prompt = list(range(60))
    bench.finish_all(bench.add(prompt))
    bench.add(63)
    plan = bench.step()
    assert len(plan.swaps_out) == 3
    # The latest used of what went are the front of the prefix, which alone can be hit.
    cache = bench.scheduler.prefix_cache
    assert len(cache.find(prompt, cache.chain((), {"salt": None}))) == 3


def test_without_swap_space_nothing_moves() -> None:
    bench, requests = pressed(num_host_pages=0, enable_prefix_caching=True)
    bench.finish_all(*requests)
    stats = bench.scheduler.stats
    assert stats.num_preemptions > 0
    assert (stats.swap.num_swaps, stats.swap.num_spilled_pages) == (0, 0)
    assert stats.swap.num_recomputed_tokens > 0


def test_a_waiting_request_is_looked_up_anew_in_each_step() -> None:
    """Bug 8: nothing of an earlier look-up is kept for one that was not scheduled."""
    bench = Bench(**MOVING, max_num_batched_tokens=64)
    prompt = list(range(20))
    bench.finish_all(bench.add([*prompt, 1]))
    holder = bench.add(40, max_tokens=24)
    bench.step()
    (waiting,) = bench.add([*prompt, 2, *range(20, 40)])  # hits five pages, does not fit
    bench.step()
    assert waiting.status is SequenceStatus.WAITING
    assert waiting.num_cached_tokens == 0
    for page in range(1, 41):  # meanwhile the host forgets, and the device what nobody holds
        bench.scheduler.host.lose(page)
    bench.finish_all(holder)
    bench.finish_all([waiting])


# -------------------------------------------------------------------------------- mode and victim


def test_a_full_host_pool_falls_back_to_recompute() -> None:
    bench, requests = pressed(4, num_host_pages=3)
    bench.finish_all(*requests)
    swap = bench.scheduler.stats.swap
    assert swap.num_swaps < bench.scheduler.stats.num_preemptions
    assert swap.num_recomputed_tokens > 0


def test_recompute_moves_no_page_of_a_victim() -> None:
    bench, requests = pressed(preemption_mode="recompute")
    bench.finish_all(*requests)
    assert bench.scheduler.stats.num_preemptions > 0
    assert bench.scheduler.stats.swap.num_pages_out == 0


@pytest.mark.parametrize(("seconds_per_page", "swaps"), [(1e-6, True), (1.0, False)])
def test_auto_does_what_is_faster(seconds_per_page: float, swaps: bool) -> None:
    bench, requests = pressed(preemption_mode="auto")
    costs = bench.scheduler.costs
    costs.seconds_per_page_out = costs.seconds_per_page_in = seconds_per_page
    costs.seconds_per_token = 1e-3
    bench.finish_all(*requests)
    stats = bench.scheduler.stats
    assert stats.swap.num_swaps == (stats.num_preemptions if swaps else 0)


def test_auto_counts_what_others_hold_as_there() -> None:
    """A victim whose prefix stays on the device computes little again: no reason to move."""
    bench = Bench(**MOVING | {"preemption_mode": "auto"})
    prefix = list(range(20))
    requests = [bench.add([*prefix, 1], max_tokens=30)]
    bench.step()
    requests += [bench.add([*prefix, i], max_tokens=30) for i in (2, 3)]
    costs = bench.scheduler.costs
    costs.seconds_per_page_out = costs.seconds_per_page_in = 1.0
    costs.seconds_per_token = 1.0  # a page of its own costs 2 to move, 4 to compute
    bench.update(until_preempted(bench))
    assert bench.scheduler.stats.swap.num_swaps == 1  # but only those of its own were weighed
    bench.finish_all(*requests)


def test_least_cost_takes_who_is_restored_cheapest_by_the_page() -> None:
    """Forks that share what they computed free few pages each, and cost as much as any other."""
    choices = {}
    for policy in ("latest", "least_cost"):
        sizes: dict[str, Any] = {"num_pages": 17, "max_num_batched_tokens": 64}
        bench = Bench(**sizes, victim_policy=policy, enable_prefix_caching=False)
        oldest, alone = bench.add(4, max_tokens=50), bench.add(16, max_tokens=20)
        forks = bench.add(24, n=2, max_tokens=12)
        bench.step()
        bench.scheduler.allocator.allocate(bench.scheduler.allocator.num_free)
        assert bench.scheduler.schedule() is not None  # each of them needs a page now
        victims = [s for s in [*oldest, *alone, *forks] if s.num_preemptions]
        choices[policy] = [(s.request.request_id, s.sample) for s in victims]
    assert choices == {"latest": [("2", 0), ("2", 1)], "least_cost": [("1", 0)]}


def test_the_oldest_is_never_a_victim_of_least_cost() -> None:
    bench, requests = pressed(4, victim_policy="least_cost", enable_prefix_caching=True)
    while not requests[0][0].is_finished:
        assert bench.step().scheduled[0].sequence is requests[0][0]
    assert requests[0][0].num_preemptions == 0
    bench.finish_all(*requests)


@pytest.mark.parametrize("params", [{"n": 2}, {"beam_width": 3}])
def test_a_sibling_is_no_victim_of_least_cost_while_others_are_there(
    params: dict[str, Any],
) -> None:
    """A lane that gave way would hold back the very search that needed the page."""
    sizes = {"num_pages": 18 if "beam_width" in params else 24, "max_num_seqs": 6}
    bench = Bench(**sizes, enable_prefix_caching=False, victim_policy="least_cost")
    older = bench.add(4, max_tokens=50, **params)
    younger = bench.add(40, n=2, max_tokens=20)  # dear by the page: most of it they share
    bench.update(until_preempted(bench))
    assert any(sequence.num_preemptions for sequence in younger)
    assert not any(sequence.num_preemptions for sequence in older)
    bench.finish_all(*([older] if "n" in params else []), younger)


def test_what_the_draft_counts_is_what_the_allocators_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug 27: one arithmetic decides, another hands out; they must be equal after every step."""
    made: list[Any] = []
    original = Scheduler._draft
    monkeypatch.setattr(
        Scheduler, "_draft", lambda *given: made.append(original(*given)) or made[-1]
    )
    for caching in (True, False):
        bench, requests = pressed(5, enable_prefix_caching=caching, num_host_pages=12)
        requests.append(bench.add(21, n=3, max_tokens=20))
        requests.append(bench.add(list(requests[0][0].tokens), max_tokens=20))
        while bench.scheduler.has_work:
            plan = bench.schedule()
            draft = made[-1]
            assert draft._pages.free == bench.scheduler.allocator.num_free
            if draft._chooser is not None:
                spilled = len(plan.swaps_out) - sum(
                    victim.mode == "swap" and victim.host_pages.count(0) for victim in draft.victims
                )
                if spilled <= 0:
                    assert draft._chooser._host_free == bench.scheduler.host.allocator.num_free
            bench.update(plan)
        bench.finish_all(*requests)
        assert bench.scheduler.stats.num_preemptions > 0


# ------------------------------------------------------------------------------------- what fails


def test_a_lost_host_page_costs_its_sequence_a_recompute_and_nobody_else() -> None:
    bench, requests = pressed(5)
    bench.update(until_preempted(bench))
    while sum(bool(live(bench, s).host_pages) for (s,) in requests if not s.is_finished) < 2:
        bench.step()
    swapped = [s for (s,) in requests if not s.is_finished and live(bench, s).host_pages]
    lost, kept = swapped[-1], swapped[0]
    pages, computed = live(bench, kept).host_pages, kept.num_computed_tokens
    bench.runner.lose(live(bench, lost).host_pages[1], is_noticed=True)
    bench.step()
    assert (live(bench, lost).host_pages, lost.num_computed_tokens) == ((), 0)
    if not kept.slot:
        assert (live(bench, kept).host_pages, kept.num_computed_tokens) == (pages, computed)
    bench.finish_all(*requests)
    assert bench.scheduler.stats.swap.num_lost_pages == 1


def test_a_transfer_that_fails_costs_whom_it_was_for_a_recompute_and_nobody_else() -> None:
    bench, requests = pressed()
    bench.update(until_preempted(bench))
    while True:
        plan = bench.schedule()
        back = [s.sequence for s in plan.scheduled if live(bench, s.sequence).host_pages]
        if len(back) > 1:
            break
        bench.update(plan)
    computed = {sequence: sequence.num_computed_tokens for sequence in back}
    damaged = live(bench, back[1]).host_pages[2]
    bench.runner.lose(damaged, is_noticed=False)
    newcomer = bench.add(3)
    with pytest.raises(TransferError) as error:
        bench.runner.run(plan)
    bench.scheduler.drop(plan, lost=error.value.host_pages, has_run=False)
    bench.scheduler.check_integrity()
    assert error.value.host_pages == {damaged}
    assert {s: s.num_computed_tokens for s in back} == computed | {back[1]: 0}
    bench.finish_all(*requests, newcomer)


def test_running_sequences_keep_their_pages_when_a_transfer_fails() -> None:
    bench = Bench(**MOVING)
    prompt = list(range(22))
    bench.finish_all(bench.add(prompt))
    fill(bench, 64)
    running = bench.add(9, n=2, presence_penalty=1.0)
    bench.step()
    hit = bench.add([*prompt, 1])
    plan = bench.schedule()
    assert plan.swaps_in
    assert len(plan.copies) == 1  # of one fork, which has nothing to go on from without it
    bench.scheduler.drop(plan, has_run=False)
    bench.scheduler.check_integrity()
    assert sorted(s.num_computed_tokens for s in [*running, *hit]) == [0, 0, 9]
    bench.finish_all(running, hit)


def until_back(bench: Bench, sequence: Sequence) -> StepPlan:
    """Steps until a plan brings a swapped sequence in; it is not run yet."""
    while True:
        plan = bench.schedule()
        if sequence.status is SequenceStatus.RUNNING:
            return plan
        bench.update(plan)


def test_a_step_that_fails_costs_swapped_sequences_nothing() -> None:
    """They keep their host pages until a result says that they are back."""
    bench, requests = pressed()
    (last,) = requests[2]
    bench.update(until_preempted(bench))
    computed, pages = last.num_computed_tokens, live(bench, last).host_pages
    plan = until_back(bench, last)
    bench.runner.fail(plan, bench.runner.run(plan))
    bench.scheduler.drop(plan)
    bench.scheduler.check_integrity()
    assert (live(bench, last).host_pages, last.num_computed_tokens) == (pages, computed)
    bench.finish_all(*requests)
    assert bench.scheduler.stats.swap.num_held_host_pages == 0


def test_who_found_all_its_pages_on_the_device_queues_again_as_swapped() -> None:
    """When the step of its return never ran, for another's sake."""
    bench = Bench(**MOVING)
    prompt = list(range(16))
    holder = bench.add(prompt, max_tokens=20)
    bench.step()
    (last,) = bench.add(prompt, max_tokens=8)
    bench.step()
    pool = bench.scheduler.allocator
    taken = pool.allocate(pool.num_free)
    plan = bench.scheduler.schedule()  # it needs a page, and only it can give some up
    pool.free(taken)
    assert plan is not None
    bench.update(plan)
    pages = live(bench, last).host_pages
    plan = until_back(bench, last)
    assert (len(pages), plan.swaps_in) == (4, ())
    bench.scheduler.drop(plan, has_run=False)
    bench.scheduler.check_integrity()
    assert (live(bench, last).host_pages, last.num_computed_tokens) == (pages, 16)
    bench.finish_all(holder, [last])


def test_a_transfer_that_fails_for_unknown_pages_is_not_tried_for_ever() -> None:
    bench = Bench(**MOVING)
    prompt = list(range(22))
    bench.finish_all(bench.add(prompt))
    fill(bench, 64)
    request = bench.add([*prompt, 1])
    plan = bench.schedule()
    assert plan.swaps_in
    bench.scheduler.drop(plan, has_run=False)
    plan = bench.schedule()
    assert plan.swaps_in == ()
    bench.update(plan)
    bench.finish_all(request)


def test_copies_that_did_not_run_are_not_believed() -> None:
    """Bug 19: a copy of a step that never ran leaves its sequence nothing to go on from."""
    bench = Bench(enable_prefix_caching=False)
    forks = bench.add(6, n=2, max_tokens=10)
    bench.step()
    plan = bench.schedule()
    assert len(plan.copies) == 1
    bench.scheduler.drop(plan, has_run=False)
    bench.scheduler.check_integrity()
    assert sorted(fork.num_computed_tokens for fork in forks) == [0, 6]
    bench.finish_all(forks)


def test_a_lost_step_loses_the_host_pages_that_it_was_to_fill() -> None:
    bench, requests = pressed()
    (last,) = requests[2]
    plan = until_preempted(bench)
    assert live(bench, last).host_pages
    bench.runner.fail(plan)
    bench.scheduler.drop(plan)
    bench.scheduler.check_integrity()
    assert (live(bench, last).host_pages, last.num_computed_tokens) == ((), 0)
    bench.finish_all(*requests)


def test_a_schedule_that_fails_changes_neither_pool() -> None:
    """Bug 10: it fails at each of its calls for device and host pages."""
    bench = Bench(**MOVING | {"num_host_pages": 12}, max_num_batched_tokens=20)
    prefix = list(range(14))
    bench.finish_all(bench.add(prefix))
    fill(bench, 64)
    requests = [bench.add([*prefix, 1, 2, 3]), bench.add([*prefix, 4], n=2, max_tokens=20)]
    requests += [bench.add(9, max_tokens=40) for _ in range(3)]
    while bench.scheduler.has_work:
        plan = schedule_with_failures(bench.scheduler)
        assert plan is not None
        bench.update(plan)
    swap = bench.scheduler.stats.swap
    assert min(swap.num_swaps, swap.num_hit_tokens, swap.num_spilled_pages) > 0
    bench.finish_all(*requests)


def test_pages_of_a_corrupted_sequence_are_not_hit_on_the_host() -> None:
    bench = Bench(**MOVING)
    prompt = list(range(17))
    bench.finish_all(bench.add(prompt))
    fill(bench, 64)
    bench.add([*prompt, 1])
    plan = bench.schedule()
    assert plan.swaps_in
    result = bench.runner.run(plan)
    result.corrupted[0] = True
    bench.update(plan, result)
    (again,) = bench.add([*prompt, 1])
    bench.step()
    assert again.num_cached_tokens == 0


# ----------------------------------------------------------------------------------- ends, resets


@pytest.mark.parametrize("way", ["abort", "finish", "fail"])
def test_a_swapped_sequence_ends_once_and_leaves_no_host_page(way: str) -> None:
    """Bugs 21 and 26."""
    bench, requests = pressed()
    (last,) = requests[2]
    bench.update(until_preempted(bench))
    assert bench.scheduler.stats.swap.num_held_host_pages > 0
    if way == "abort":
        assert bench.scheduler.abort("2")
        assert not bench.scheduler.abort("2")
    elif way == "finish":
        bench.scheduler.finish(last, FinishReason.STOP)
        bench.scheduler.finish(last, FinishReason.ABORT)
        assert last.finish_reason is FinishReason.STOP
    else:
        bench.scheduler.fail("2", "why")
    bench.scheduler.check_integrity()
    assert bench.scheduler.stats.swap.num_held_host_pages == 0
    bench.finish_all(*requests[:2])


def test_a_reset_waits_for_swapped_sequences_or_starts_them_over() -> None:
    bench, requests = pressed(enable_prefix_caching=True)
    (last,) = requests[2]
    bench.update(until_preempted(bench))
    bench.scheduler.abort("0")
    bench.scheduler.abort("1")
    assert bench.scheduler.allocator.num_held == 0
    assert not bench.scheduler.reset_prefix_cache()
    assert last.num_computed_tokens > 0
    assert bench.scheduler.reset_prefix_cache(reset_running=True)
    bench.scheduler.check_integrity()
    host = bench.scheduler.host.allocator
    assert (host.num_held, host.num_evictable, last.num_computed_tokens) == (0, 0, 0)
    plan = bench.step()
    assert plan.swaps_in == ()
    bench.finish_all([last])


def test_the_device_may_lose_its_pages_and_the_host_keeps_them() -> None:
    bench, requests = pressed(enable_prefix_caching=True)
    (last,) = requests[2]
    bench.update(until_preempted(bench))
    computed = last.num_computed_tokens
    bench.scheduler.forget_device_pages()
    bench.scheduler.check_integrity()
    assert last.num_computed_tokens == computed
    assert live(bench, last).host_pages
    bench.finish_all(*requests)


def test_the_same_requests_move_the_same_pages() -> None:
    def moves(mode: str) -> list[Any]:
        bench, _ = pressed(5, enable_prefix_caching=True, num_host_pages=12, preemption_mode=mode)
        made = []
        while bench.scheduler.has_work:
            plan = bench.step()
            made.append((plan.swaps_out, plan.swaps_in, plan.copies, scheduled(plan)))
        return made

    for mode in ("auto", "swap"):
        assert moves(mode) == moves(mode)
        assert any(step[1] for step in moves(mode))


# -------------------------------------------------------------------------------- check_integrity


def break_host_pages(bench: Bench) -> None:
    bench.scheduler.host.allocator.allocate()


def break_host_table(bench: Bench) -> None:
    swapped = next(x for x in bench.scheduler.roster.waiting if x.host_pages)
    swapped.host_pages = swapped.host_pages[:-1]


def break_swapped_computed(bench: Bench) -> None:
    swapped = next(x for x in bench.scheduler.roster.waiting if x.host_pages)
    swapped.sequence.num_computed_tokens += 4


def break_node(bench: Bench) -> None:
    tier = bench.scheduler.host
    node = next(node for node in tier._node_of if node is not None)
    node.host_page = None


def break_flag(bench: Bench) -> None:
    tier = bench.scheduler.host
    page = next(page for page, node in enumerate(tier._node_of) if node is not None)
    tier.allocator._cached[page] = False


def break_running(bench: Bench) -> None:
    swapped = next(x for x in bench.scheduler.roster.waiting if x.host_pages)
    bench.scheduler.roster.running[0].host_pages = swapped.host_pages
    for page in swapped.host_pages:
        bench.scheduler.host.allocator.share(page)


@pytest.mark.parametrize(
    "damage",
    [
        break_host_pages, break_host_table, break_swapped_computed, break_node, break_flag,
        break_running,
    ],
)  # fmt: skip
def test_check_integrity_finds(damage: Any) -> None:
    bench, _ = pressed(enable_prefix_caching=True)
    bench.update(until_preempted(bench))
    bench.scheduler.check_integrity()
    damage(bench)
    with pytest.raises(IntegrityError):
        bench.scheduler.check_integrity()


def test_assert_empty_finds_a_host_page() -> None:
    bench = Bench(**MOVING)
    bench.scheduler.host.allocator.allocate()
    with pytest.raises(IntegrityError, match=r"no host page must be held\. Got 1"):
        bench.scheduler.assert_empty()
