"""The engine with a step in flight: the order of launching and reading, and what failures cost."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from pagedjax import RequestOutput, SamplingParams
from pagedjax.config import SchedulerConfig
from pagedjax.engine import LLMEngine
from pagedjax.errors import TransferError
from pagedjax.plan import StepPlan, StepResult
from pagedjax.scheduler import Scheduler
from tests.fake_runner import FakeRunner, plain_answer
from tests.helpers import dense_greedy
from tests.tiny_engine import answers, drain, tiny_engine, tokens_of, until_interrupted

CONFIG = SchedulerConfig(
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=64,
    page_size=4,
    num_pages=65,
    vocab_size=64,
)


class Noting:
    """A fake runner that notes what it is asked, and fails where a test says so."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.runner = FakeRunner(scheduler.config, scheduler.allocator)
        self.calls: list[str] = []
        self.fails: Callable[[str], BaseException | None] = lambda _: None

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        self._note(f"launch {plan.step}")
        read = self.runner.launch(plan)

        def finish() -> StepResult:
            self._note(f"read {plan.step}")
            return read()

        return finish

    def recover(self) -> bool:
        self._note("recover")
        return False

    def _note(self, call: str) -> None:
        self.calls.append(call)
        error = self.fails(call)
        if error is not None:
            raise error


def noting_engine(**options: Any) -> tuple[LLMEngine, Noting]:
    scheduler = Scheduler(CONFIG)
    runner = Noting(scheduler)
    return LLMEngine(scheduler, runner, None, **options), runner


def add(engine: LLMEngine, name: str, length: int, max_tokens: int, **params: Any) -> None:
    prompt = [(length * 7 + i) % 60 for i in range(length)]
    params = {"temperature": 0.0, "ignore_eos": True} | params
    engine.add_request(name, prompt, SamplingParams(max_tokens=max_tokens, **params))


def check(engine: LLMEngine, outputs: dict[str, RequestOutput], *, but: str = "") -> None:
    """All answers but one are the plain model's."""
    for name, output in outputs.items():
        if name == but:
            continue
        assert output.error is None
        request = engine.intake.request(
            name, output.prompt_token_ids, SamplingParams(temperature=0.0, ignore_eos=True), now=0.0
        )
        plain = plain_answer(request, 0, CONFIG).tokens
        assert tokens_of(output) == plain[: len(tokens_of(output))]


@pytest.mark.parametrize(
    ("is_async", "calls"),
    [
        (True, ["launch 1", "launch 2", "read 1", "launch 3", "read 2", "read 3"]),
        (False, ["launch 1", "read 1", "launch 2", "read 2", "launch 3", "read 3"]),
    ],
)
def test_a_step_is_launched_before_the_last_one_is_read(is_async: bool, calls: list[str]) -> None:
    engine, runner = noting_engine(async_scheduling=is_async)
    add(engine, "a", 5, 3)
    check(engine, drain(engine))
    assert runner.calls == calls


def test_a_request_that_comes_later_is_in_the_next_launch() -> None:
    engine, runner = noting_engine()
    add(engine, "a", 5, 8)
    engine.step()
    add(engine, "b", 6, 3)
    engine.step()
    assert runner.calls == ["launch 1", "launch 2", "read 1", "launch 3", "read 2"]
    outputs = drain(engine)
    check(engine, outputs)
    assert len(tokens_of(outputs["b"])) == 3


def test_an_abort_leaves_a_step_in_flight_that_does_no_harm() -> None:
    engine, runner = noting_engine()
    add(engine, "a", 5, 8)
    engine.step()
    assert engine.abort("a")
    assert set(drain(engine)) == {"a"}  # nothing is waited for
    assert runner.calls == ["launch 1", "launch 2", "read 1"]
    add(engine, "b", 6, 3)
    check(engine, drain(engine))
    assert runner.calls[3:5] == ["launch 3", "read 2"]


@pytest.mark.parametrize("call", ["launch 3", "read 3", "launch 4", "read 4"])
def test_a_hiccup_costs_nobody_a_token(call: str) -> None:
    """The step in front of a failed launch still counts; the one behind a failed read does not."""
    engine, runner = noting_engine()
    runner.fails = lambda seen: RuntimeError("hiccup") if seen == call else None
    for name, length in (("a", 5), ("b", 9), ("c", 3)):
        add(engine, name, length, 7)
    outputs = drain(engine)
    check(engine, outputs)
    assert [len(tokens_of(outputs[name])) for name in "abc"] == [7, 7, 7]
    assert "recover" in runner.calls


def test_what_is_launched_behind_a_failed_step_is_not_read() -> None:
    engine, runner = noting_engine()
    runner.fails = lambda seen: RuntimeError("lost") if seen == "read 2" else None
    add(engine, "a", 5, 6)
    check(engine, drain(engine))
    assert "launch 3" in runner.calls
    assert "read 3" not in runner.calls
    after = runner.calls[runner.calls.index("read 2") + 1 :]
    assert after[0] == "recover"


def test_what_was_launched_before_a_launch_that_fails_is_read_first() -> None:
    engine, runner = noting_engine()
    runner.fails = lambda seen: RuntimeError("no room") if seen == "launch 2" else None
    add(engine, "a", 5, 6)
    check(engine, drain(engine))
    assert runner.calls[:4] == ["launch 1", "launch 2", "read 1", "recover"]


def test_pages_that_can_not_be_brought_in_cost_only_their_step() -> None:
    engine, runner = noting_engine()
    error = TransferError("checksum", host_pages=frozenset())
    runner.fails = lambda seen: error if seen == "launch 2" else None
    add(engine, "a", 5, 6)
    outputs = drain(engine)
    check(engine, outputs)
    assert runner.calls[:4] == ["launch 1", "launch 2", "read 1", "recover"]
    assert len(tokens_of(outputs["a"])) == 6


def test_a_culprit_is_found_one_step_at_a_time() -> None:
    engine, runner = noting_engine()
    launch, alone = runner.launch, []

    def fail(plan: StepPlan) -> Callable[[], StepResult]:
        names = {s.sequence.request.request_id for s in plan.scheduled}
        read = launch(plan)
        if "bad" not in names:
            return read

        def broken() -> StepResult:
            alone.append(names == {"bad"})
            raise RuntimeError("bad")

        return broken

    runner.launch = fail  # type: ignore[method-assign]
    for name, length in (("a", 5), ("bad", 9), ("c", 3)):
        add(engine, name, length, 7)
    outputs = drain(engine)
    check(engine, outputs, but="bad")
    assert "failed alone, twice" in str(outputs["bad"].error)
    assert alone[-1]
    tail = runner.calls[-6:]  # two steps in flight again
    assert [call.split()[0] for call in tail].count("launch") >= 2


@pytest.mark.parametrize("call", ["launch 2", "read 1", "read 2", "launch 3"])
def test_an_interrupt_drops_what_is_in_flight_and_loses_nothing(call: str) -> None:
    engine, runner = noting_engine()
    runner.fails = lambda seen: KeyboardInterrupt() if seen == call else None
    add(engine, "a", 5, 6)
    add(engine, "b", 9, 6)
    outputs = until_interrupted(engine)
    engine.check_integrity()
    outputs |= drain(engine)
    check(engine, outputs)
    assert [len(tokens_of(outputs[name])) for name in "ab"] == [6, 6]


def test_an_interrupt_right_after_a_result_loses_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    expected = answers(tiny_engine(), {"a": ([1, 2, 3], params), "b": ([4, 5], params)})
    engine, results = tiny_engine(), []
    update = engine.scheduler.update

    def interrupted(plan: StepPlan, result: StepResult) -> Any:
        results.append(update(plan, result))
        if len(results) == 3:  # of the last tokens
            signal.raise_signal(signal.SIGINT)
        return results[-1]

    monkeypatch.setattr(engine.scheduler, "update", interrupted)
    engine.add_request("a", [1, 2, 3], params)
    engine.add_request("b", [4, 5], params)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        outputs = until_interrupted(engine)
    finally:
        signal.signal(signal.SIGINT, handler)
    outputs |= drain(engine)
    found = {name: (tokens_of(o), o.outputs[0].text) for name, o in outputs.items()}
    assert found == {name: (tokens_of(o), o.outputs[0].text) for name, o in expected.items()}


KINDS: dict[str, dict[str, Any]] = {
    "plain": {"max_tokens": 12},
    "penalties": {"max_tokens": 12, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "samples": {"max_tokens": 9, "n": 3},
    "beams": {"max_tokens": 6, "beam_width": 3},
    "logprobs": {"max_tokens": 7, "logprobs": 3, "prompt_logprobs": 1},
    "minimum": {"max_tokens": 9, "min_tokens": 5},
    "bad words": {"max_tokens": 9, "bad_words": ["ab", "a"]},
    "stop": {"max_tokens": 30, "stop": ["b"]},
    "drawn": {"max_tokens": 12, "temperature": 1.0, "seed": 5},
}


def test_every_kind_of_request_gets_the_same_answer_with_and_without() -> None:
    """On the compiled programs, where the token of the step in front is taken on the device."""
    requests = {
        name: ([3, 1, 4, 1, 5, 9][: 2 + at % 5], SamplingParams(**{"temperature": 0.0, **kind}))
        for at, (name, kind) in enumerate(KINDS.items())
    }
    found = []
    for is_async in (True, False):
        engine = tiny_engine(async_scheduling=is_async)
        found.append(
            {
                name: [(c.token_ids, c.text, c.finish_reason) for c in output.outputs]
                for name, output in answers(engine, requests).items()
            }
        )
    assert found[0] == found[1]
    assert found[0]["plain"][0][0] == dense_greedy(requests["plain"][0], 12)
