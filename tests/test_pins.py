"""Pinned prefixes are never evicted and never starve a request; resets void what they must."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from pagedjax.config import SchedulerConfig
from pagedjax.errors import CapacityError, ConfigError, IntegrityError, RequestError
from pagedjax.plan import StepPlan, StepResult
from pagedjax.request import Request, RequestOutput, SamplingParams
from pagedjax.scheduler import Scheduler
from tests.fake_runner import FakeRunner, plain_answer
from tests.test_policy import Counter, Desk, llm_over

PREFIX = [(3 * i + 1) % 24 for i in range(14)]  # three pages of four, and two tokens


def pinned_desk(**changes: Any) -> Counter:
    """An engine whose longest request takes ten pages."""
    return Counter(scheduling_policy="fcfs", **changes)


def crowd(desk: Counter, count: int = 12, seed: int = 5) -> None:
    """Other requests, enough to evict whatever can be evicted."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        prompt = rng.integers(0, 24, 20).tolist()
        desk.add(f"crowd-{seed}-{i}", prompt, 12)
    desk.drain()


def test_pinning_computes_what_is_missing_and_holds_the_full_pages() -> None:
    desk = pinned_desk()
    assert desk.engine.pin_prefix(PREFIX) == 12
    assert desk.engine.scheduler.allocator.num_held == 3
    (pin,) = desk.engine.scheduler.stats.pinned
    assert (pin.token_ids, pin.cache_salt, pin.num_hit_tokens) == (tuple(PREFIX[:12]), None, 12)
    assert not desk.engine.has_unfinished
    assert desk.step() == []
    desk.engine.check_integrity()


def test_a_pinned_prefix_is_hit_after_any_pressure_and_an_unpinned_one_is_not() -> None:
    desk = pinned_desk(num_pages=21)
    other = [23 - t for t in PREFIX]
    desk.engine.pin_prefix(PREFIX)
    desk.add("other", other, 1)
    crowd(desk)
    assert desk.engine.scheduler.stats.num_preemptions > 0
    desk.add("hit", PREFIX, 4)
    desk.add("miss", other, 4)
    desk.drain()
    assert desk.outputs["hit"].num_cached_tokens == 12
    assert desk.outputs["miss"].num_cached_tokens == 0
    assert desk.outputs["hit"].outputs[0].token_ids == desk.plain(PREFIX, 4, "hit")
    assert desk.engine.unpin_prefix(PREFIX) == 12
    crowd(desk, seed=6)
    desk.add("again", PREFIX, 4)
    desk.drain()
    assert desk.outputs["again"].num_cached_tokens == 0


def test_what_is_cached_already_is_pinned_without_computing() -> None:
    desk = pinned_desk()
    desk.add("a", PREFIX, 1)
    desk.drain()
    before = desk.engine.scheduler.stats.num_requests
    assert desk.engine.pin_prefix(PREFIX) == 12
    assert desk.engine.scheduler.stats.num_requests == before


def test_a_prompt_shorter_than_a_page_pins_nothing() -> None:
    desk = pinned_desk()
    assert desk.engine.pin_prefix([1, 2, 3]) == desk.engine.pin_prefix([]) == 0
    assert desk.engine.scheduler.stats.pinned == ()
    assert desk.engine.unpin_prefix([1, 2, 3]) == 0


def test_pinning_twice_is_pinning_once() -> None:
    desk = pinned_desk()
    assert desk.engine.pin_prefix(PREFIX) == desk.engine.pin_prefix(PREFIX[:13]) == 12
    assert len(desk.engine.scheduler.stats.pinned) == 1
    assert desk.engine.unpin_prefix(PREFIX[:12]) == 12
    assert desk.engine.unpin_prefix(PREFIX) == 0
    desk.engine.scheduler.assert_empty()
    assert desk.engine.scheduler.allocator.num_held == 0


def test_prefixes_that_begin_alike_share_their_pages_and_are_let_go_one_by_one() -> None:
    desk = pinned_desk()
    longer = [*PREFIX[:12], 9, 9, 9, 9]
    desk.engine.pin_prefix(PREFIX)
    desk.engine.pin_prefix(longer)
    assert desk.engine.scheduler.allocator.num_held == 4
    assert desk.engine.scheduler.pins.num_pages == 4
    desk.engine.unpin_prefix(PREFIX)
    assert desk.engine.scheduler.allocator.num_held == 4
    desk.engine.unpin_prefix(longer)
    assert desk.engine.scheduler.allocator.num_held == 0


def test_a_salt_keeps_a_pinned_prefix_to_its_owner() -> None:
    desk = pinned_desk()
    desk.engine.pin_prefix(PREFIX, cache_salt="mine")
    desk.add("mine", PREFIX, 2, cache_salt="mine")
    desk.add("other", PREFIX, 2, cache_salt="other")
    desk.drain()
    assert desk.outputs["mine"].num_cached_tokens == 12
    assert desk.outputs["other"].num_cached_tokens == 0
    assert desk.engine.unpin_prefix(PREFIX) == 0
    assert desk.engine.unpin_prefix(PREFIX, cache_salt="mine") == 12


def test_pins_leave_room_for_the_longest_request_or_are_refused_with_the_numbers() -> None:
    desk = pinned_desk(num_pages=15)  # 14 to use, 10 of them for one request of 40 tokens
    desk.engine.pin_prefix(PREFIX)
    message = r"leave 10 pages .* Got 4 pages, of which 4 are not pinned yet, beside 3 pinned ones "
    message += r"of 14: that leaves 7. Pin at most 1 more \(4 tokens\)"
    with pytest.raises(CapacityError, match=message):
        desk.engine.pin_prefix([7] * 16)
    assert not desk.engine.has_unfinished
    assert desk.engine.pin_prefix([*PREFIX[:12], 1, 2, 3, 4]) == 16  # one page more than is pinned
    with pytest.raises(CapacityError, match=r"leaves 9\. Pin at most 0 more"):
        desk.engine.pin_prefix([7] * 4)
    desk.add("longest", [5] * 30, 10)
    crowd(desk, 3)
    assert desk.outputs["longest"].outputs[0].token_ids == desk.plain([5] * 30, 10, "longest")


def test_requests_that_end_while_a_prefix_is_computed_are_returned_by_the_next_step() -> None:
    desk = pinned_desk()
    desk.add("a", [1, 2], 1)
    desk.add("b", [3, 4], 9)
    desk.engine.pin_prefix(PREFIX)
    assert desk.step() == ["a"]
    desk.drain()
    assert desk.outputs["b"].outputs[0].token_ids == desk.plain([3, 4], 9, "b")


def test_the_request_that_computes_a_prefix_is_nobodys_answer_and_takes_no_ones_id() -> None:
    desk = pinned_desk()
    desk.add("prefix-0", [1, 2], 9)
    desk.engine.pin_prefix(PREFIX)
    desk.drain()
    assert list(desk.outputs) == ["prefix-0"]


def test_pinning_survives_preemption_of_the_request_that_computes_it() -> None:
    desk = pinned_desk(num_pages=16)
    for i in range(3):
        desk.add(str(i), [i] * 11, 20)
    assert desk.engine.pin_prefix(PREFIX) == 12
    desk.drain()
    assert desk.engine.scheduler.stats.num_preemptions
    desk.add("hit", PREFIX, 2)
    desk.drain()
    assert desk.outputs["hit"].num_cached_tokens == 12


def test_a_step_that_raises_while_a_prefix_is_computed_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = pinned_desk(max_num_batched_tokens=8)
    desk.add("a", [1], 1)
    run, calls = desk.engine.step, iter(range(9))

    def broken() -> list[RequestOutput]:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return run()

    monkeypatch.setattr(desk.engine, "step", broken)
    with pytest.raises(KeyboardInterrupt):
        desk.engine.pin_prefix(PREFIX)
    assert desk.step() == ["a"]
    desk.drain()
    assert desk.engine.scheduler.allocator.num_held == 0


@pytest.mark.parametrize(
    ("prompt", "salt", "error", "message"),
    [
        ([1, 2, 3, 99], None, RequestError, r"`prompt` must hold token ids in \[0, 24\)"),
        ([10**30] * 4, None, RequestError, r"`prompt` must hold token ids in \[0, 24\)"),
        ("text", None, RequestError, "this engine has no tokenizer"),
        ([1] * 40, None, RequestError, "`prompt` must leave room for at least one token"),
        ([1] * 4, 7, RequestError, "`cache_salt` must be a string"),
        ([1] * 4, "", RequestError, "`cache_salt` must be a string"),
    ],
)
def test_what_cannot_be_pinned_is_refused(
    prompt: Any, salt: Any, error: type[Exception], message: str
) -> None:
    desk = pinned_desk()
    with pytest.raises(error, match=message):
        desk.engine.pin_prefix(prompt, cache_salt=salt)
    assert desk.engine.scheduler.stats.pinned == ()
    desk.engine.check_integrity()


def test_without_a_prefix_cache_nothing_can_be_pinned() -> None:
    desk = pinned_desk(enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="`enable_prefix_caching` must be true to pin"):
        desk.engine.pin_prefix(PREFIX)


class Spoiler:
    """Says of the steps of one request that their numbers are none."""

    def __init__(self, runner: Any, request_id: str) -> None:
        self.runner, self.request_id = runner, request_id

    def recover(self) -> bool:
        return False

    def launch(self, plan: StepPlan) -> Any:
        read = self.runner.launch(plan)

        def spoilt() -> StepResult:
            result = read()
            for scheduled in plan.scheduled:
                if scheduled.sequence.request.request_id == self.request_id:
                    result.corrupted[scheduled.first_row] = True
            return result

        return spoilt


def test_a_prefix_that_cannot_be_computed_is_not_pinned() -> None:
    desk = pinned_desk()
    desk.engine.runner = Spoiler(desk.engine.runner, "prefix-0")
    with pytest.raises(RequestError, match="no usable numbers"):
        desk.engine.pin_prefix(PREFIX)
    assert desk.engine.scheduler.stats.pinned == ()
    desk.engine.scheduler.assert_empty()


def test_pages_that_turned_out_spoilt_are_hit_no_more_and_pinned_anew() -> None:
    desk = pinned_desk()
    desk.engine.pin_prefix(PREFIX)
    runner = desk.engine.runner
    desk.engine.runner = Spoiler(runner, "bad")
    desk.add("bad", PREFIX, 2)
    desk.drain()
    (pin,) = desk.engine.scheduler.stats.pinned
    assert pin.num_hit_tokens == 0
    desk.engine.runner = runner
    assert desk.engine.pin_prefix(PREFIX) == 12
    (pin,) = desk.engine.scheduler.stats.pinned
    assert pin.num_hit_tokens == 12
    desk.engine.check_integrity()
    assert desk.engine.scheduler.allocator.num_held == 3


def test_the_front_door_pins_prompts_in_its_forms() -> None:
    desk = pinned_desk()
    llm = llm_over(desk.engine)
    assert llm.pin_prefix({"prompt_token_ids": PREFIX, "cache_salt": "s"}) == 12
    assert llm.pin_prefix(PREFIX, cache_salt="t") == 12
    assert [pin.cache_salt for pin in desk.engine.scheduler.stats.pinned] == ["s", "t"]
    assert llm.unpin_prefix(PREFIX, cache_salt="s") == 12
    assert llm.unpin_prefix({"prompt_token_ids": PREFIX, "cache_salt": "t"}) == 12


# ------------------------------------------------------------------------------------------ resets


def test_a_reset_unpins_everything_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    desk = pinned_desk()
    desk.engine.pin_prefix(PREFIX)
    with caplog.at_level(logging.INFO, "pagedjax"):
        assert desk.engine.reset_prefix_cache()
    assert "nothing is pinned any more" in caplog.text
    assert desk.engine.scheduler.stats.pinned == ()
    assert desk.engine.scheduler.allocator.num_held == 0
    assert desk.engine.scheduler.prefix_cache.num_cached == 0


def test_a_reset_that_would_take_pages_of_requests_changes_nothing() -> None:
    desk = pinned_desk()
    desk.engine.pin_prefix(PREFIX)
    desk.add("a", [1, 2, 3], 5)
    desk.step()
    assert not desk.engine.reset_prefix_cache()
    assert len(desk.engine.scheduler.stats.pinned) == 1
    assert desk.engine.scheduler.prefix_cache.num_cached == 3
    desk.drain()


def test_a_reset_under_running_requests_voids_results_in_flight_and_changes_no_token() -> None:
    desk = Desk(scheduling_policy="fcfs")
    desk.add(length=10, tokens=9)
    desk.add(length=6, tokens=9, n=2)
    for _ in range(4):
        desk.step()
    plan = desk.scheduler.schedule()
    assert plan is not None
    result = desk.runner.run(plan)
    before = [sequence.num_tokens for sequence in desk.sequences]
    assert desk.scheduler.reset_prefix_cache(reset_running=True)
    desk.scheduler.check_integrity()
    assert desk.scheduler.prefix_cache.num_cached == 0
    assert (desk.scheduler.num_running, desk.scheduler.allocator.num_held) == (0, 0)
    assert desk.scheduler.update(plan, result) == []
    assert [sequence.num_tokens for sequence in desk.sequences] == before
    assert all(sequence.num_preemptions == 1 for sequence in desk.sequences)
    assert desk.scheduler.stats.num_preemptions == 3
    assert desk.scheduler.prefix_cache.num_cached == 0  # the void result registered nothing
    desk.drain()


def test_tokens_are_right_whenever_everything_is_reset() -> None:
    for when in range(1, 12):
        desk = Desk(scheduling_policy="fcfs", num_pages=16)
        for _ in range(4):
            desk.add(length=9, tokens=8)
        for at in range(12):
            if not desk.scheduler.has_work:
                break
            desk.step()
            if at == when:
                assert desk.scheduler.reset_prefix_cache(reset_running=True)
                desk.scheduler.check_integrity()
        desk.drain()


def test_pins_count_when_integrity_is_checked() -> None:
    desk = pinned_desk()
    desk.engine.pin_prefix(PREFIX)
    desk.engine.scheduler.stats.pinned[0].pages.pop()
    with pytest.raises(IntegrityError, match="references must equal the entries"):
        desk.engine.scheduler.check_integrity()
    with pytest.raises(IntegrityError, match=r"only the 2 pinned pages must be held\. Got 3"):
        desk.engine.scheduler.assert_empty()


def test_a_reset_asks_who_has_pages_and_not_who_runs() -> None:
    """After a step that never was, what it began runs on without a page."""
    config = SchedulerConfig(
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_model_len=16,
        page_size=4,
        num_pages=9,
        vocab_size=24,
    )
    scheduler = Scheduler(config)
    request = Request(
        request_id="a",
        prompt_token_ids=(1, 2, 3),
        params=SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True),
        arrival=0,
        seed=0,
    )
    (sequence,) = scheduler.add_request(request)
    plan = scheduler.schedule()
    assert plan is not None
    assert not scheduler.reset_prefix_cache()
    scheduler.drop(plan, has_run=False)
    assert scheduler.num_running == 1
    assert scheduler.reset_prefix_cache()
    runner = FakeRunner(config, scheduler.allocator)
    while (plan := scheduler.schedule()) is not None:
        scheduler.update(plan, runner.run(plan))
    assert sequence.output_token_ids == plain_answer(request, 0, config).tokens
    scheduler.assert_empty()
