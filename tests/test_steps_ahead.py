"""Steps that are planned before the one in front of them was read: who may go, and what is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedjax.plan import FROM_SLOT, StepPlan, StepResult
from pagedjax.request import FinishReason, Sequence
from tests.fake_runner import plain_answer
from tests.test_scheduler import EOS, Bench, scheduled


class Waves(Bench):
    """A bench with up to `depth` steps in flight."""

    def __init__(self, depth: int = 2, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.depth = depth
        self.flights: list[tuple[StepPlan, StepResult]] = []
        self.plans: list[StepPlan] = []

    def launch(self) -> StepPlan | None:
        """Plans a step, and runs it without reading it."""
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan is not None:
            self.flights.append((plan, self.runner.run(plan)))
            self.plans.append(plan)
        return plan

    def read(self) -> list[Sequence]:
        return self.update(*self.flights.pop(0))

    def run(self, *requests: list[Sequence]) -> None:
        """To the end; every answer must be the plain model's."""
        while self.scheduler.has_work or self.flights:
            while len(self.flights) < self.depth and self.launch() is not None:
                pass
            if self.flights:
                self.read()
        self.finish_all(*requests)


def ahead_of(plan: StepPlan) -> list[int]:
    """Slots whose last token the device is to take."""
    return [FROM_SLOT - token for token in plan.tokens[: plan.num_tokens].tolist() if token < 0]


def test_a_step_takes_the_token_of_the_step_in_front_of_it_on_the_device() -> None:
    bench = Waves()
    requests = [bench.add(6, max_tokens=12), bench.add(3, max_tokens=12)]
    first, second = bench.launch(), bench.launch()
    assert first is not None
    assert second is not None
    assert ahead_of(first) == []
    assert scheduled(second) == {"0.0": 1, "1.0": 1}
    assert ahead_of(second) == [0, 1]
    assert second.positions[:2].tolist() == [6, 3]
    assert second.kv_lens[:2].tolist() == [7, 4]
    assert second.rows.position[:2].tolist() == [7, 4]
    assert [s.num_output_tokens for pair in requests for s in pair] == [0, 0]
    bench.run(*requests)
    assert len(bench.plans) == 12  # none more than one after the other


def test_nobody_is_two_steps_ahead() -> None:
    bench = Waves()
    request = bench.add(4)
    assert bench.launch() is not None
    assert bench.launch() is not None
    assert bench.launch() is None
    bench.run(request)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_an_end_by_length_is_known_ahead(max_tokens: int) -> None:
    bench = Waves()
    request = bench.add(4, max_tokens=max_tokens)
    bench.run(request)
    assert len(bench.plans) == max_tokens


def test_an_end_that_comes_as_a_surprise_costs_one_row() -> None:
    bench = Waves(max_model_len=64)
    request = bench.add(4, max_tokens=40)
    answer = plain_answer(request[0].request, 0, bench.config)
    bench.run(request)
    stop = answer.tokens[5]
    bench = Waves()
    stopped = bench.add(4, max_tokens=40, stop_token_ids=[stop])
    other = bench.add(9, max_tokens=30)
    bench.run(stopped, other)
    num_rows = sum(s.sequence is stopped[0] for plan in bench.plans for s in plan.scheduled)
    assert stopped[0].finish_reason is FinishReason.STOP
    assert num_rows == stopped[0].num_output_tokens + 1


def test_pages_and_slot_of_a_surprise_are_free_for_the_step_behind_it() -> None:
    """What the wasted row writes comes before what the next owner writes."""
    bench = Waves(num_pages=17, max_num_seqs=2)
    ends = bench.add(7, max_tokens=40, ignore_eos=False)
    stays = bench.add(7, max_tokens=40)
    waits = [bench.add(20, max_tokens=20, ignore_eos=False) for _ in range(6)]
    bench.run(ends, stays, *waits)


def test_chunks_of_a_prompt_go_ahead() -> None:
    bench = Waves(max_num_batched_tokens=8)
    request = bench.add(21, max_tokens=4)
    chunks = []
    for _ in range(4):
        plan = bench.launch()
        assert plan is not None
        chunks.append((scheduled(plan), ahead_of(plan)))
        if len(bench.flights) == 2:
            bench.read()
    assert chunks == [({"0.0": n}, slots) for n, slots in ((8, []), (8, []), (5, []), (1, [0]))]
    bench.run(request)


@pytest.mark.parametrize(
    "params",
    [
        {"n": 2},
        {"beam_width": 2},
        {"prompt_logprobs": 1},
        {"bad_sequences": [[1, 2]]},
        {"min_tokens": 1, "ignore_eos": False},
    ],
    ids=lambda params: next(iter(params)),
)
def test_what_the_token_decides_waits_for_it(params: dict[str, Any]) -> None:
    bench = Waves()
    request, plain = bench.add(3, **params), bench.add(3)
    bench.launch()
    plan = bench.launch()
    assert plan is not None
    assert [s.sequence for s in plan.scheduled] == plain
    bench.run(*(() if "beam_width" in params else (request,)), plain)


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 1.0},
        {"min_tokens": 6, "ignore_eos": False},
        {"logit_bias": {EOS: -100.0}},
        {"logprobs": 2},
        {"temperature": 0.7},
        {"allowed_token_ids": [1, 2, 3]},
    ],
    ids=lambda params: next(iter(params)),
)
def test_what_the_token_does_not_decide_goes_ahead(params: dict[str, Any]) -> None:
    bench = Waves()
    request = bench.add(3, **params)
    bench.launch()
    plan = bench.launch()
    assert plan is not None
    assert plan.row_updates == ()
    bench.run(request)


def test_samples_go_ahead_once_they_are_forked() -> None:
    bench = Waves()
    request = bench.add(5, n=3, max_tokens=6)
    bench.launch()
    bench.read()
    assert bench.launch() is not None
    plan = bench.launch()
    assert plan is not None
    assert ahead_of(plan) == [0, 1, 2]
    bench.run(request)


def test_a_page_that_others_would_have_to_give_up_is_waited_for() -> None:
    bench = Waves(num_pages=17)
    requests = [bench.add(20, max_tokens=40), bench.add(20, max_tokens=40)]
    waits = 0
    while bench.scheduler.has_work:
        before = bench.scheduler.stats.num_preemptions
        plan = bench.launch()
        is_alone = plan is not None and len(bench.flights) == 1
        assert is_alone or bench.scheduler.stats.num_preemptions == before
        waits += plan is None
        if plan is None or len(bench.flights) == 2:
            bench.read()
    assert waits > 0
    assert bench.scheduler.stats.num_preemptions > 0
    bench.finish_all(*requests)


def test_results_are_read_in_order() -> None:
    bench = Waves()
    request = bench.add(4)
    bench.launch()
    bench.launch()
    (_, first), (later, second) = bench.flights
    with pytest.raises(ValueError, match=r"oldest without a result, step 1\. Got step 2"):
        bench.scheduler.update(later, second)
    assert bench.update(bench.plans[0], first) == request
    assert bench.update(later, second) == request
    bench.flights.clear()
    bench.run(request)


@pytest.mark.parametrize("has_run", [True, False])
def test_a_step_ahead_that_is_dropped_is_done_again(has_run: bool) -> None:
    """The one in front of it still counts, unless its sequences had to give their pages up."""
    bench = Waves(max_num_batched_tokens=16)
    requests = [bench.add(6, max_tokens=14), bench.add(11, max_tokens=14, presence_penalty=0.5)]
    for _ in range(3):
        bench.launch()
        plan = bench.scheduler.schedule()
        if plan is not None:
            if has_run:
                bench.runner.fail(plan, bench.runner.run(plan))
            bench.scheduler.drop(plan, has_run=has_run)
            bench.scheduler.check_integrity()
        advanced = bench.read()
        assert has_run or advanced or not any(s.num_samples for s in bench.plans[-1].scheduled)
        if has_run:
            bench.step(3)
    bench.run(*requests)


def test_an_abort_voids_both_steps() -> None:
    bench = Waves()
    gone, stays = bench.add(4), bench.add(4)
    bench.launch()
    bench.launch()
    bench.scheduler.abort("0")
    bench.scheduler.check_integrity()
    assert bench.read() == stays
    assert bench.read() == stays
    assert gone[0].num_output_tokens == 0
    bench.run(stays)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_random_requests_get_the_plain_answers_at_every_depth(depth: int, seed: int) -> None:
    bench = Waves(depth, num_pages=24, max_num_batched_tokens=24)
    draw = np.random.default_rng(seed)
    requests = []
    for _ in range(10):
        params: dict[str, Any] = {"max_tokens": int(draw.integers(1, 24))}
        params |= {"ignore_eos": bool(draw.integers(2)), "temperature": float(draw.integers(2))}
        kind = draw.integers(5)
        if kind == 0:
            params["n"] = int(draw.integers(2, 4))
        elif kind == 1:
            params |= {"min_tokens": 1, "presence_penalty": 0.5}
        elif kind == 2:
            params["bad_sequences"] = [[int(draw.integers(EOS)), int(draw.integers(EOS))]]
        requests.append(bench.add(int(draw.integers(1, 30)), **params))
    bench.run(*requests)


def test_who_is_being_brought_in_waits_for_its_first_result() -> None:
    """Until then its host pages are kept: the step may fail."""
    sizes = {"num_pages": 17, "num_host_pages": 32, "preemption_mode": "swap"}
    bench = Waves(**sizes, enable_prefix_caching=False)
    requests = [bench.add(16, max_tokens=40) for _ in range(3)]
    num_brought = 0
    while bench.scheduler.has_work:
        plan = bench.launch()
        if plan is not None and plan.swaps_in:
            lives = bench.scheduler.roster.live.values()
            brought = {live.sequence for live in lives if live.restored is not None}
            num_brought += len(brought)
            ahead = bench.launch() if len(bench.flights) < 2 else None
            assert ahead is None or brought.isdisjoint(s.sequence for s in ahead.scheduled)
        if plan is None or len(bench.flights) >= 2:
            bench.read()
    assert num_brought > 0
    bench.flights.clear()
    bench.finish_all(*requests)
