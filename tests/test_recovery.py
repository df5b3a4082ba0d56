"""A step that fails harms nobody but who makes it fail; a device that is gone ends everything."""

from __future__ import annotations

import pkgutil
import signal
from collections.abc import Callable
from typing import Any

import pytest

from pagedjax import RequestOutput, SamplingParams
from pagedjax.engine import LLMEngine
from pagedjax.errors import DeviceError
from pagedjax.plan import StepPlan, StepResult
from pagedjax.recovery import MAX_FAILED_ALONE, Quarantine
from pagedjax.request import FinishReason, Request, Sequence, SequenceStatus
from pagedjax.runner import ModelRunner
from pagedjax.scheduling.cost_model import CostModel
from tests.helpers import dense_greedy
from tests.runner_faults import OUT_OF_MEMORY, STEP_SITES, SWAP_SITES, FaultyRunner, Injected
from tests.tiny_engine import answer, drain, tiny_engine, tiny_llm, tokens_of

PROMPTS = {
    "a": [3, 1, 4, 1, 5, 9, 2, 6],
    "b": [2, 7, 1, 8, 2, 8],
    "fork": [1, 6, 1, 8, 0, 3, 3],
    "bad": [1, 4, 1, 4, 2, 1, 3, 5, 6],
    "c": [30, 2],
    "late fork": [2, 4] * 8 + [9] * 5,  # its prompt takes two steps
}
NUM_NEW = 10
# A ban that never matters, so that a request has sampler rows and is still the dense answer.
WITH_ROWS = SamplingParams(
    temperature=0, max_tokens=NUM_NEW, ignore_eos=True, logit_bias={31: 1e-9}
)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
FORKING = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, n=2)
PARAMS = {"a": WITH_ROWS, "fork": FORKING, "bad": WITH_ROWS, "late fork": FORKING}


def real_runner() -> ModelRunner:
    runner = tiny_llm().engine.runner
    assert isinstance(runner, ModelRunner)
    return runner


def engine_on(runner: Any, **sizes: Any) -> LLMEngine:
    engine = tiny_engine(**sizes)
    engine.runner = runner
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, PARAMS.get(name, GREEDY))
    return engine


def steps(engine: LLMEngine, count: int, outputs: dict[str, RequestOutput]) -> None:
    """So many steps; what ends in them goes to `outputs`."""
    for _ in range(count):
        outputs |= {output.request_id: output for output in engine.step()}


def checked(engine: LLMEngine) -> dict[str, RequestOutput]:
    """All outputs; integrity after every step, nothing left at the end."""
    outputs: dict[str, RequestOutput] = {}
    for _ in range(500):
        if not engine.has_unfinished:
            break
        for output in engine.step():
            outputs[output.request_id] = output
        engine.check_integrity()
    assert not engine.has_unfinished
    return outputs


def assert_right(outputs: dict[str, RequestOutput], names: set[str]) -> None:
    for name in names:
        assert outputs[name].error is None, name
        for sample in range(PARAMS.get(name, GREEDY).n):
            assert tokens_of(outputs[name], sample) == dense_greedy(PROMPTS[name], NUM_NEW), name


def drawn(output: RequestOutput) -> Any:
    assert output.error is None
    return [(sample.token_ids, sample.finish_reason) for sample in output.outputs]


def has(plan: StepPlan, request_id: str) -> bool:
    return any(s.sequence.request.request_id == request_id for s in plan.scheduled)


# ------------------------------------------------------------------------------ the real runner


@pytest.mark.parametrize(
    ("site", "nth"),
    [
        (site, nth)
        for site in STEP_SITES
        for nth in (1, 2, 7)
        if nth < 7 or site[:3] not in ("cop", "row")
    ],
)
def test_one_failure_anywhere_in_a_step_costs_nobody_a_token(
    site: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = FaultyRunner(real_runner(), site, lambda _, call: call == nth, monkeypatch)
    outputs = checked(engine_on(runner))
    assert runner.num_failures == 1
    assert_right(outputs, set(PROMPTS))


@pytest.mark.parametrize("nth", [2, 4, 6])
@pytest.mark.parametrize("site", ["forward after", "sampler before", "copy after"])
def test_beams_and_draws_survive_a_failure(
    site: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = {
        "beams": SamplingParams(beam_width=3, max_tokens=NUM_NEW, temperature=0, logprobs=1),
        "best": SamplingParams(best_of=3, n=2, max_tokens=NUM_NEW, seed=4),
        "bad": SamplingParams(max_tokens=NUM_NEW, seed=5),
    }

    def run(runner: Any) -> dict[str, Any]:
        engine = tiny_engine()
        engine.runner = runner
        for name, params in requests.items():
            engine.add_request(name, PROMPTS["bad"], params)
        return {name: drawn(output) for name, output in checked(engine).items()}

    calm = run(real_runner())
    runner = FaultyRunner(real_runner(), site, lambda _, call: call == nth, monkeypatch)
    assert run(runner) == calm
    assert runner.num_failures == 1


@pytest.mark.parametrize("site", ["forward before", "forward after", "sampler after", "readback"])
def test_a_request_that_makes_every_step_fail_fails_alone(
    site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(plan: StepPlan, _: int) -> bool:
        return has(plan, "bad")

    runner = FaultyRunner(real_runner(), site, fails, monkeypatch)
    outputs = checked(engine_on(runner))
    assert_right(outputs, set(PROMPTS) - {"bad"})
    bad = outputs["bad"]
    assert bad.outputs[0].finish_reason == FinishReason.ERROR.value
    assert str(bad.error).startswith("CapacityError: out of memory: this request's step failed")
    assert OUT_OF_MEMORY in str(bad.error)
    assert 2 <= runner.num_failures <= 5


def test_a_request_that_fails_late_keeps_what_came(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(plan: StepPlan, _: int) -> bool:
        return any(
            s.sequence.num_output_tokens >= 4 and s.sequence.request.request_id == "bad"
            for s in plan.scheduled
        )

    runner = FaultyRunner(real_runner(), "forward after", fails, monkeypatch)
    outputs = checked(engine_on(runner))
    assert_right(outputs, set(PROMPTS) - {"bad"})
    assert outputs["bad"].error is not None
    # The step before the one that failed was in flight: its token counts.
    assert tokens_of(outputs["bad"]) == dense_greedy(PROMPTS["bad"], 5)


@pytest.mark.parametrize("culprits", [{"a", "bad"}, {"a", "b", "c", "bad"}])
def test_several_culprits_fail_and_no_other(
    culprits: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(plan: StepPlan, _: int) -> bool:
        return any(has(plan, name) for name in culprits)

    runner = FaultyRunner(real_runner(), "forward before", fails, monkeypatch)
    outputs = checked(engine_on(runner))
    assert_right(outputs, set(PROMPTS) - culprits)
    assert all(outputs[name].error is not None for name in culprits)


def test_many_culprits_are_no_proof_against_the_device() -> None:
    """Between their failures others' steps go well."""
    runner = Scripted(fails=lambda plan: any(has(plan, f"bad {i}") for i in range(10)))
    engine = tiny_engine()
    engine.runner = runner
    for i in range(10):
        engine.add_request(f"bad {i}", [1, 2, 3], GREEDY)
        engine.add_request(f"good {i}", [4, 5, i], GREEDY)
    outputs = checked(engine)
    for i in range(10):
        assert str(outputs[f"bad {i}"].error).startswith("DeviceError: this request's step failed")
        assert tokens_of(outputs[f"good {i}"]) == dense_greedy([4, 5, i], NUM_NEW)


def test_a_small_pool_does_not_keep_a_suspect_from_its_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who was cleared holds pages; the next trial needs them."""
    runner = FaultyRunner(
        real_runner(), "forward after", lambda plan, _: has(plan, "bad"), monkeypatch
    )
    outputs = checked(engine_on(runner, num_pages=33))
    assert_right(outputs, set(PROMPTS) - {"bad"})
    assert outputs["bad"].error is not None


# ------------------------------------------------------------------------------------- transfers

SWAPPING: dict[str, Any] = {"num_pages": 33, "num_host_pages": 64, "preemption_mode": "swap"}
SHARED = [7, 3, 7, 3, 9, 9, 1, 2]  # two pages with which some prompts begin
LONG = SamplingParams(temperature=0, max_tokens=33, ignore_eos=True, logit_bias={31: 1e-9})
SWAPPED = {f"s{i}": (SHARED if i % 2 else []) + [i + 1] * (3 + 3 * i) for i in range(7)}


def swapping_engine(runner: Any, **sizes: Any) -> LLMEngine:
    """Twice as many pages are wanted as there are."""
    engine = tiny_engine(**{**SWAPPING, **sizes})
    engine.runner = runner
    for name, prompt in SWAPPED.items():
        engine.add_request(name, prompt, LONG)
    return engine


def assert_swapped_right(outputs: dict[str, RequestOutput]) -> None:
    for name, prompt in SWAPPED.items():
        assert outputs[name].error is None, name
        assert tokens_of(outputs[name]) == dense_greedy(prompt, 33), name


@pytest.mark.parametrize(("nth", "caching"), [(1, True), (2, False), (3, True)])
@pytest.mark.parametrize("site", SWAP_SITES)
def test_one_failure_anywhere_in_a_transfer_costs_nobody_a_token(
    site: str, nth: int, caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = FaultyRunner(real_runner(), site, lambda _, call: call == nth, monkeypatch)
    outputs = checked(swapping_engine(runner, enable_prefix_caching=caching))
    assert runner.num_failures == 1
    assert_swapped_right(outputs)


@pytest.mark.parametrize("site", SWAP_SITES)
def test_transfers_that_always_fail_cost_time_and_no_token(
    site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = FaultyRunner(real_runner(), site, lambda *_: True, monkeypatch)
    outputs = checked(swapping_engine(runner))
    assert runner.num_failures > 1
    assert_swapped_right(outputs)


@pytest.mark.parametrize("site", ["forward before", "forward after", "sampler after", "readback"])
def test_a_step_that_swaps_in_and_fails_is_run_again(
    site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in the host pool outlives the pages of the device."""
    failed: list[int] = []

    def fails(plan: StepPlan, _: int) -> bool:
        if not plan.swaps_in or failed:
            return False
        failed.append(1)
        return True

    runner = FaultyRunner(real_runner(), site, fails, monkeypatch)
    engine = swapping_engine(runner)
    assert_swapped_right(checked(engine))
    assert runner.num_failures == 1
    assert engine.scheduler.stats.swap.num_lost_pages == 0


def test_the_scheduler_weighs_with_what_was_measured() -> None:
    made = tiny_llm().engine
    answer(made, [1, 2], GREEDY)
    costs, rates = made.scheduler.costs, real_runner().rates
    assert costs != CostModel()
    assert 0 < costs.seconds_per_page_in < 10
    assert rates.seconds_per_page_in is not None


# --------------------------------------------------------------------------- a device that is gone


class Scripted:
    """Runs on the real runner; fails a run, or a recovery, when a test says so."""

    def __init__(
        self,
        fails: Callable[[StepPlan], bool] = lambda _: False,
        recovers: Callable[[], bool] = lambda: True,
    ) -> None:
        self.runner, self.fails, self.recovers = real_runner(), fails, recovers
        self.num_runs = self.num_recoveries = 0

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        self.num_runs += 1
        if self.fails(plan):
            raise Injected("INTERNAL: the device is lost")
        return self.runner.launch(plan)

    def recover(self) -> bool:
        self.num_recoveries += 1
        if not self.recovers():
            raise Injected("INTERNAL: no device")
        return self.runner.recover()


def outputs_after(engine: LLMEngine) -> dict[str, RequestOutput]:
    outputs = {output.request_id: output for output in engine.step()}
    engine.check_integrity()
    return outputs


def test_a_device_that_runs_nothing_ends_every_request_once() -> None:
    runner = Scripted(fails=lambda _: True, recovers=lambda: False)
    engine = engine_on(runner)
    engine.step()
    with pytest.raises(DeviceError, match=r"steps fail for every request \(Injected: INTERNAL"):
        engine.step()
    assert runner.num_recoveries == 3
    outputs = outputs_after(engine)
    assert set(outputs) == set(PROMPTS)
    for output in outputs.values():
        assert str(output.error).startswith("DeviceError: steps fail for every request")
    assert not engine.has_unfinished


def test_steps_that_fail_for_everybody_come_to_an_end() -> None:
    """The device runs an idle step and nothing else: not one request after the other is guilty."""
    runner = Scripted(fails=lambda _: True)
    engine = tiny_engine()
    engine.runner = runner
    names = [f"r{i}" for i in range(3 * MAX_FAILED_ALONE)]
    for name in names:
        engine.add_request(name, [1, 2, 3], GREEDY)
    outputs: dict[str, RequestOutput] = {}
    with pytest.raises(DeviceError):
        steps(engine, 10 * len(names), outputs)
    assert len(outputs) == MAX_FAILED_ALONE - 1
    outputs |= outputs_after(engine)
    assert sorted(outputs) == sorted(names)
    assert all(output.error is not None for output in outputs.values())
    runner.fails = lambda plan: has(plan, "bad")  # a new start: one culprit is one culprit
    engine.add_request("bad", [1, 2], GREEDY)
    engine.add_request("good", [3, 4], GREEDY)
    outputs = checked(engine)
    assert outputs["bad"].error is not None
    assert tokens_of(outputs["good"]) == dense_greedy([3, 4], NUM_NEW)


def test_a_device_that_comes_back_serves_the_next_requests() -> None:
    is_gone = True
    runner = Scripted(fails=lambda _: is_gone, recovers=lambda: not is_gone)
    engine = engine_on(runner)
    engine.step()
    with pytest.raises(DeviceError):
        engine.step()
    engine.step()
    is_gone = False
    engine.add_request("again", [3, 1, 4], GREEDY)
    assert tokens_of(drain(engine)["again"]) == dense_greedy([3, 1, 4], NUM_NEW)


def test_a_recovery_that_broke_off_counts_as_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that was made anew before an idle step failed looks whole the next time."""
    answers = iter([False, True])
    runner = Scripted(fails=lambda _: runner.num_runs == 3, recovers=lambda: next(answers))
    engine = engine_on(runner)
    told: list[bool] = []
    forget = engine.scheduler.forget_device_pages
    monkeypatch.setattr(
        engine.scheduler, "forget_device_pages", lambda: told.append(True) or forget()
    )
    assert_right(checked(engine), set(PROMPTS))
    assert told == [True]


def test_new_requests_wait_while_others_are_suspected() -> None:
    first = iter([True])
    runner = Scripted(fails=lambda _: next(first, False))
    engine = engine_on(runner)
    engine.step()
    engine.add_request("new", [5, 5], GREEDY)
    engine.step()
    assert engine.scheduler.num_running <= 4  # a half of the suspects
    outputs = checked(engine)
    assert_right(outputs, set(PROMPTS))
    assert tokens_of(outputs["new"]) == dense_greedy([5, 5], NUM_NEW)


# ------------------------------------------------------------------------------------ interrupts


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("site", ["forward before", "forward after", "row after", "sampler after"])
def test_an_interrupt_passes_and_leaves_a_usable_engine(
    site: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.runner_faults.Injected", lambda _: error())
    runner = FaultyRunner(real_runner(), site, lambda _, call: call == 2, monkeypatch)
    engine = engine_on(runner)
    outputs: dict[str, RequestOutput] = {}
    with pytest.raises(error):
        steps(engine, 20, outputs)
    engine.check_integrity()
    assert engine.abort("c")
    engine.check_integrity()
    outputs |= checked(engine)
    assert_right(outputs, set(PROMPTS) - {"c"})


def test_an_interrupt_while_a_result_is_read_loses_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_on(real_runner())
    read, calls = engine.scheduler._reader.read, iter(range(9))

    def interrupted(*arguments: Any) -> Any:
        if next(calls, None) == 7:
            raise KeyboardInterrupt
        return read(*arguments)

    monkeypatch.setattr(engine.scheduler._reader, "read", interrupted)
    outputs: dict[str, RequestOutput] = {}
    with pytest.raises(KeyboardInterrupt):
        steps(engine, 5, outputs)
    assert_right(outputs | checked(engine), set(PROMPTS))


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("nth", [1, 2, 5, 10, 11])
@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize(
    "place",
    [
        "pagedjax.scheduler._commit",  # pages are taken, and queues not changed yet
        "pagedjax.recovery.GuardedSteps._schedule",  # there is a plan that nobody knows of
        "pagedjax.scheduling.result_reader.ResultReader._count_computed",
        "pagedjax.scheduling.result_reader.ResultReader._end_or_go_on",
        "pagedjax.scheduler.Scheduler.update",
        "pagedjax.in_flight.InFlight.read",
        "pagedjax.detokenizer.Detokenizer.push",
    ],
)
def test_a_signal_in_the_middle_of_the_hosts_work_breaks_nothing(
    place: str, is_before: bool, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(real_runner())
    real, calls = pkgutil.resolve_name(place), iter(range(nth))

    def interrupted(*arguments: Any, **keywords: Any) -> Any:
        is_time = next(calls, None) == nth - 1
        if is_time and is_before:
            signal.raise_signal(signal.SIGINT)
        result = real(*arguments, **keywords)
        if is_time and not is_before:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(place, interrupted)
    outputs: dict[str, RequestOutput] = {}
    with pytest.raises(KeyboardInterrupt):
        steps(engine, 20, outputs)
    outputs |= checked(engine)
    assert_right(outputs, set(PROMPTS))
    for output in outputs.values():
        expected = answer(tiny_engine(), output.prompt_token_ids, GREEDY)
        assert output.outputs[0].text == expected.outputs[0].text


# ------------------------------------------------------------------------------------ quarantine


def sequence(name: str, sample: int = 0) -> Sequence:
    request = Request(
        request_id=name, prompt_token_ids=(1, 2), params=SamplingParams(n=2), arrival=0, seed=0
    )
    return Sequence(request, sample, [1, 2], 2)


def test_suspects_are_halved_until_one_is_alone() -> None:
    quarantine = Quarantine()
    suspects = [sequence(name) for name in "abcde"]
    assert quarantine.only is None
    assert quarantine.suspect(suspects) is None
    assert quarantine.only == {"a", "b"}
    assert quarantine.suspect(suspects[:2]) is None
    assert quarantine.only == {"a"}
    assert quarantine.suspect(suspects[:1]) == "a"
    assert quarantine.only == {"b"}
    suspects[1].tokens.append(3)
    quarantine.clear()
    assert quarantine.only == {"c", "d", "e"}


def test_a_first_failure_alone_is_no_proof() -> None:
    quarantine = Quarantine()
    only = [sequence("a", sample) for sample in range(2)]
    assert quarantine.suspect(only) is None
    assert quarantine.only == {"a"}
    assert quarantine.suspect(only) == "a"
    assert quarantine.only is None


def test_who_was_not_in_the_failed_step_is_still_to_be_tried() -> None:
    quarantine = Quarantine()
    suspects = [sequence(name) for name in "abcd"]
    quarantine.suspect(suspects)
    assert quarantine.only == {"a", "b"}
    assert quarantine.suspect(suspects[:1]) is None  # b was not scheduled
    assert quarantine.only == {"a"}
    assert quarantine.suspect(suspects[:1]) == "a"
    assert quarantine.only == {"b"}


def test_a_trial_ends_when_every_sequence_has_a_token_more_or_has_ended() -> None:
    quarantine = Quarantine()
    first, second = sequence("a", 0), sequence("a", 1)
    quarantine.suspect([first, second])
    first.tokens.append(3)
    quarantine.clear()
    assert quarantine.only == {"a"}
    second.status = SequenceStatus.FINISHED
    quarantine.clear()
    assert quarantine.only is None
