"""Who goes first, who gives way, and who is refused: priorities, queue limits, deadlines, pins."""

from __future__ import annotations

import itertools
import re
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagedjax import LLM, RequestOutput
from pagedjax.config import EngineConfig, SchedulerConfig
from pagedjax.deadlines import Deadlines
from pagedjax.engine import LLMEngine
from pagedjax.errors import ConfigError, IntegrityError, RequestError
from pagedjax.in_flight import InFlight
from pagedjax.request import (
    FinishReason,
    Request,
    SamplingParams,
    Sequence,
    SequenceStatus,
)
from pagedjax.scheduler import Scheduler
from tests.fake_runner import FakeRunner, plain_answer

VOCAB = 24
CONFIG = SchedulerConfig(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=40,
    page_size=4,
    num_pages=41,
    vocab_size=VOCAB,
    scheduling_policy="priority",
    priority_ageing=10.0,
)


class Desk:
    """A scheduler with a runner, and requests of a few words."""

    def __init__(self, **changes: Any) -> None:
        self.config = replace(CONFIG, **changes)
        self.scheduler = Scheduler(self.config)
        self.runner = FakeRunner(self.config, self.scheduler.allocator)
        self.num_added = 0
        self.sequences: list[Sequence] = []

    def add(
        self, priority: int = 0, at: float = 0.0, *, length: int = 5, tokens: int = 6, n: int = 1
    ) -> Sequence:
        arrival = self.num_added
        prompt = tuple((7 * arrival + 3 * i) % VOCAB for i in range(length))
        request = Request(
            request_id=str(arrival),
            prompt_token_ids=prompt,
            params=SamplingParams(n=n, max_tokens=tokens, ignore_eos=True),
            arrival=arrival,
            seed=arrival,
            priority=priority,
            arrival_time=at,
        )
        sequences = self.scheduler.add_request(request)
        self.num_added += 1
        self.sequences += sequences
        return sequences[0]

    def step(self) -> list[Sequence]:
        """One step, checked; the sequences that ran in it."""
        plan = self.scheduler.schedule()
        assert plan is not None
        self.scheduler.update(plan, self.runner.run(plan))
        self.scheduler.check_integrity()
        return [scheduled.sequence for scheduled in plan.scheduled]

    def drain(self) -> None:
        while self.scheduler.has_work:
            self.step()
        self.scheduler.assert_empty()
        for sequence in self.sequences:
            answer = plain_answer(sequence.request, sequence.sample, self.config)
            assert sequence.output_token_ids == answer.tokens

    def waiting(self) -> list[str]:
        return [live.sequence.request.request_id for live in self.scheduler.roster.waiting]


# ------------------------------------------------------------------------------------- priority


def test_the_more_urgent_request_runs_first() -> None:
    desk = Desk(max_num_seqs=1)
    late, soon = desk.add(2), desk.add(-1)
    assert desk.step() == [soon]
    desk.drain()
    assert late.is_finished


def test_equal_priorities_run_by_arrival() -> None:
    desk = Desk(max_num_seqs=1)
    for _ in range(3):
        desk.add(1)
    assert desk.waiting() == ["0", "1", "2"]


def test_requests_with_equal_ranks_are_never_compared_themselves() -> None:
    """Bug 11: a heap of (priority, time, request) compared requests when both were equal."""
    desk = Desk()
    for _ in range(20):
        desk.add(3, at=1.5, n=2)
    keys = [live.key for live in desk.scheduler.roster.live.values()]
    assert len(set(keys)) == len(keys) == 40
    assert len({key[0] for key in keys}) == 1
    desk.drain()


def test_a_request_goes_first_once_it_waited_longer_by_its_priority_times_the_ageing() -> None:
    desk = Desk(max_num_seqs=1)
    desk.add(2, at=0.0)  # as urgent as priority 0 after 20 seconds
    desk.add(0, at=19.9)
    desk.add(0, at=20.1)
    desk.add(1, at=9.0)
    assert desk.waiting() == ["3", "1", "0", "2"]


def test_nothing_starves_behind_urgent_requests_that_never_stop_coming() -> None:
    desk = Desk(max_num_seqs=1)
    patient = desk.add(5, at=0.0, tokens=1)
    second = 0
    for second in range(200):
        if patient.is_finished:
            break
        desk.add(0, at=float(second), tokens=1)
        desk.step()
    assert patient.is_finished
    assert 50 <= second <= 51


def test_without_the_policy_the_order_is_arrival_alone() -> None:
    desk = Desk(scheduling_policy="fcfs")
    desk.add(0, at=9.0)
    desk.add(0, at=1.0)
    assert desk.waiting() == ["0", "1"]


def test_a_priority_that_nothing_would_look_at_is_refused() -> None:
    desk = Desk(scheduling_policy="fcfs")
    with pytest.raises(RequestError, match=r"`priority` must be 0 unless .* Got -3"):
        desk.add(-3)


def test_priority_alone_preempts_nobody() -> None:
    desk = Desk(max_num_seqs=1)
    running = desk.add(9)
    desk.step()
    desk.add(-9)
    assert desk.step() == [running]
    desk.drain()
    assert desk.scheduler.stats.num_preemptions == 0


def test_who_needs_pages_takes_them_from_the_worst_rank() -> None:
    desk = Desk(num_pages=11, max_num_batched_tokens=32)
    worst, best, middle = (desk.add(p, length=11, tokens=20) for p in (3, 1, 2))
    while not any(s.num_preemptions for s in desk.sequences):
        desk.step()
    assert (worst.num_preemptions, middle.num_preemptions, best.num_preemptions) == (1, 0, 0)
    desk.drain()
    assert best.num_preemptions == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheduling_policy": "lifo"}, "`scheduling_policy` must be fcfs or priority. Got 'lifo'"),
        ({"priority_ageing": 0}, r"`priority_ageing` must be seconds in \(0, 1e\+06\]: .* Got 0"),
        ({"priority_ageing": float("nan")}, "`priority_ageing` must be seconds"),
        ({"priority_ageing": True}, "`priority_ageing` must be seconds"),
        ({"max_queue_requests": 0}, r"`max_queue_requests` must be an integer in \[1, "),
        ({"max_queue_tokens": 1.5}, r"`max_queue_tokens` must be an integer in \[1, "),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options(options)
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, **options)


# ----------------------------------------------------------------------------------- the queue


def test_a_queue_of_so_many_requests_refuses_the_next_with_the_numbers() -> None:
    desk = Desk(max_queue_requests=2, max_num_seqs=1)
    desk.add(length=5)
    desk.add(length=3, n=1)
    with pytest.raises(RequestError, match=r"`max_queue_requests` is 2, .* Got 2 requests with 8"):
        desk.add()
    with pytest.raises(RequestError) as caught:
        desk.add()
    assert caught.value.code == "queue_full"
    desk.step()  # the first runs now
    desk.add()
    desk.drain()


def test_a_queue_of_so_many_tokens_refuses_the_next_and_never_a_long_prompt_alone() -> None:
    desk = Desk(max_queue_tokens=18, max_num_seqs=1)
    desk.add(length=30, tokens=2)
    with pytest.raises(RequestError, match=r"`max_queue_tokens` 18\. Got 1 requests with 30"):
        desk.add(length=1)
    desk.step()
    desk.add(length=9)
    desk.add(length=9)
    with pytest.raises(RequestError, match="Got 2 requests with 18 prompt tokens"):
        desk.add(length=1)
    desk.drain()


def test_a_refused_request_leaves_no_trace() -> None:
    desk = Desk(max_queue_requests=1)
    desk.add()
    before = desk.scheduler.stats.num_requests
    with pytest.raises(RequestError, match="queue"):
        desk.add()
    desk.scheduler.check_integrity()
    assert desk.scheduler.stats.num_requests == before
    desk.drain()


def test_what_was_preempted_takes_no_newcomers_room() -> None:
    desk = Desk(num_pages=11, max_num_batched_tokens=32, max_queue_requests=1)
    for _ in range(2):
        desk.add(length=11, tokens=20)
        desk.step()
    while not desk.scheduler.stats.num_preemptions:
        desk.step()
    assert desk.scheduler.num_waiting
    desk.add()
    with pytest.raises(RequestError, match="Got 1 requests with 5"):
        desk.add()
    desk.drain()


def test_a_count_of_the_queue_that_is_wrong_is_found() -> None:
    desk = Desk()
    desk.add(length=5)
    desk.scheduler.roster.num_queued_tokens += 1
    with pytest.raises(IntegrityError, match=r"\(1, 5\) requests and .* Counted .1, 6"):
        desk.scheduler.check_integrity()


def test_room_comes_back_when_what_waits_is_aborted() -> None:
    desk = Desk(max_queue_requests=1, max_num_seqs=2)
    first = desk.add(n=2)
    desk.scheduler.finish(first, FinishReason.ABORT)  # one sample of two: the request still waits
    assert not desk.scheduler.roster.has_room
    assert desk.scheduler.abort("0")
    assert desk.scheduler.roster.has_room
    desk.scheduler.assert_empty()


# ---------------------------------------------------------------------------- engines and clocks


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Counter:
    """An engine over the runner without a device; its clock stands still unless told."""

    def __init__(self, **changes: Any) -> None:
        self.config = replace(CONFIG, **changes)
        scheduler = Scheduler(self.config)
        self.clock = Clock()
        runner = FakeRunner(self.config, scheduler.allocator)
        self.engine = LLMEngine(scheduler, runner, None, clock=self.clock)
        self.outputs: dict[str, RequestOutput] = {}

    def add(self, request_id: str, prompt: list[int], tokens: int = 6, **how: Any) -> None:
        n = how.pop("n", 1)
        params = SamplingParams(max_tokens=tokens, n=n, ignore_eos=True, detokenize=False)
        self.engine.add_request(request_id, prompt, params, **how)

    def step(self) -> list[str]:
        ended = self.engine.step()
        assert not self.outputs.keys() & {output.request_id for output in ended}
        self.outputs |= {output.request_id: output for output in ended}
        self.engine.check_integrity()
        return [output.request_id for output in ended]

    def drain(self) -> None:
        while self.engine.has_unfinished:
            self.step()
        self.engine.scheduler.assert_empty()

    def plain(self, prompt: list[int], tokens: int, request_id: str) -> list[int]:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        request = self.engine.intake.request(request_id, prompt, params, now=0.0)
        return plain_answer(request, 0, self.config).tokens


def late(output: RequestOutput) -> RequestError:
    assert isinstance(output.error, RequestError)
    assert (output.error.code, output.error.param) == ("timeout", "timeout")
    return output.error


# --------------------------------------------------------------------------------------- deadlines


def test_a_running_request_ends_at_its_timeout_with_what_came_so_far() -> None:
    desk = Counter()
    desk.add("slow", [1, 2, 3], 20, timeout=5.0)
    desk.add("free", [4, 5], 9)
    for _ in range(4):
        desk.step()
    desk.clock.now += 4.999
    assert desk.step() == []
    desk.clock.now += 0.001
    assert desk.step() == ["slow"]
    output = desk.outputs["slow"]
    assert output.outputs[0].finish_reason == "timeout"
    assert output.outputs[0].token_ids == desk.plain([1, 2, 3], 5, "slow")
    assert re.search(r"`timeout` of 5 s is over: 5 tokens were", str(late(output)))
    desk.drain()
    assert desk.outputs["free"].outputs[0].token_ids == desk.plain([4, 5], 9, "free")


def test_a_late_sample_is_late_even_when_the_end_of_its_text_is_a_stop_string() -> None:
    class Stopped:
        text, stopped = "so far", "far"

        def finish(self) -> None:
            pass

    desk = Counter()
    desk.add("a", [1], 9, timeout=1.0)
    desk.step()
    live: Any = desk.engine._live["a"]
    live.detokenizers = [Stopped()]
    desk.clock.now += 1.0
    desk.step()
    assert desk.outputs["a"].outputs[0].finish_reason == "timeout"
    assert desk.outputs["a"].outputs[0].text == "so far"


def test_a_request_in_the_queue_ends_at_its_timeout() -> None:
    desk = Counter(max_num_seqs=1)
    desk.add("first", [1], 9)
    desk.add("late", [2], 9, timeout=1.0)
    desk.step()
    desk.clock.now += 1.0
    assert desk.step() == ["late"]
    assert "is over: 0 tokens" in str(late(desk.outputs["late"]))
    desk.drain()


def test_a_timeout_is_seen_when_nothing_else_is_there_to_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Counter()
    desk.add("a", [1], timeout=1.0)
    desk.clock.now += 2.0
    monkeypatch.setattr(desk.engine, "runner", None)  # nothing may be run for it
    assert desk.step() == ["a"]
    assert not desk.engine.has_unfinished


def test_a_preempted_request_ends_at_its_timeout() -> None:
    desk = Counter(num_pages=11, max_num_batched_tokens=32)
    for i in range(3):
        desk.add(str(i), [i] * 11, 20, timeout=7.0 if i == 2 else None)
    while not desk.engine.scheduler.stats.num_preemptions:
        desk.step()
    desk.clock.now += 7.0
    assert desk.step() == ["2"]
    desk.drain()
    tokens = desk.outputs["2"].outputs[0].token_ids
    assert tokens == desk.plain([2] * 11, 20, "2")[: len(tokens)]


def test_all_samples_of_a_request_end_at_its_timeout_and_finished_ones_stay() -> None:
    desk = Counter()
    desk.add("a", [1, 2, 3], 9, n=3, timeout=1.0)
    desk.step()
    desk.step()
    sequence = desk.engine.scheduler.roster.requests["a"].members[1].sequence
    desk.engine.scheduler.finish(sequence, FinishReason.STOP)
    desk.clock.now += 1.0
    assert desk.step() == ["a"]
    reasons = [sample.finish_reason for sample in desk.outputs["a"].outputs]
    assert reasons == ["timeout", "stop", "timeout"]
    late(desk.outputs["a"])


def test_an_id_that_is_used_again_does_not_inherit_a_deadline() -> None:
    desk = Counter()
    desk.add("a", [1], 2, timeout=5.0)
    desk.drain()
    del desk.outputs["a"]
    desk.add("a", [1], 30)
    desk.clock.now += 6.0
    desk.drain()
    assert desk.outputs["a"].error is None


def test_a_request_that_finished_in_time_is_not_late() -> None:
    desk = Counter()
    desk.add("a", [1], 1, timeout=1.0)
    desk.clock.now += 0.5
    assert desk.step() == ["a"]
    desk.clock.now += 9.0
    assert desk.step() == []
    assert desk.outputs["a"].error is None


def test_deadlines_hold_no_requests_that_ended_long_before_them() -> None:
    desk, deadlines = Counter(), Deadlines()
    params = SamplingParams(max_tokens=1)
    for i in range(2_000):
        request = desk.engine.intake.request(str(i), [1], params, now=float(i), timeout=1e6)
        sequence = Sequence(request, 0, [1], 1)
        deadlines.add(InFlight(request, [sequence], [None], desk.clock))
        sequence.status = SequenceStatus.FINISHED
    assert len(deadlines) <= 64
    assert deadlines.due(2e6) == []


def test_deadlines_come_in_their_order_whatever_the_order_of_arrival() -> None:
    desk, deadlines = Counter(), Deadlines()
    timeouts = np.random.default_rng(3).permutation(300) + 1.0
    for i, timeout in enumerate(timeouts.tolist()):
        params = SamplingParams(max_tokens=1)
        request = desk.engine.intake.request(str(i), [1], params, now=0.0, timeout=timeout)
        sequence = Sequence(request, 0, [1], 1)
        if timeout % 3 == 0:  # ended at once: it is swept out of the middle of the others
            sequence.status = SequenceStatus.FINISHED
        deadlines.add(InFlight(request, [sequence], [None], desk.clock))
    for now in range(0, 320, 7):
        due = [live.request.timeout for live in deadlines.due(float(now))]
        assert due == [t for t in range(max(now - 6, 1), min(now, 300) + 1) if t % 3]


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), float("nan"), True, "2", 10**400])
def test_a_wrong_timeout_is_refused(timeout: Any) -> None:
    desk = Counter()
    with pytest.raises(RequestError, match=r"`timeout` must be seconds in \(0, 1e\+09\]") as caught:
        desk.add("a", [1], timeout=timeout)
    assert caught.value.param == "timeout"
    assert not desk.engine.has_unfinished


@pytest.mark.parametrize("priority", [1.0, True, 2**31, -(10**400), "1", None])
def test_a_wrong_priority_is_refused(priority: Any) -> None:
    desk = Counter()
    with pytest.raises(RequestError, match="`priority` must be an integer in") as caught:
        desk.add("a", [1], priority=priority)
    assert caught.value.param == "priority"


# ------------------------------------------------------------------------------------------- abort


def test_aborting_every_sample_of_a_request_frees_all_of_them() -> None:
    """Bug 21: children of n > 1 were not aborted and kept their pages."""
    desk = Counter()
    desk.add("waiting", [1] * 5, n=3)
    assert desk.engine.abort("waiting")
    desk.add("forked", [2] * 5, n=3)
    desk.step()
    assert desk.engine.scheduler.num_running == 3
    assert desk.engine.abort("forked")
    assert not desk.engine.abort("forked")
    desk.engine.scheduler.assert_empty()
    assert desk.step() == ["forked"]
    assert desk.outputs["waiting"].outputs[2].finish_reason == "abort"
    assert {s.finish_reason for s in desk.outputs["forked"].outputs} == {"abort"}


def test_an_abort_that_races_a_finish_changes_nothing() -> None:
    """Bug 26: a request was finished twice, with the reason of whoever came last."""
    desk = Desk()
    sequence = desk.add(tokens=1)
    plan = desk.scheduler.schedule()
    assert plan is not None
    result = desk.runner.run(plan)
    assert [s.finish_reason for s in desk.scheduler.update(plan, result)] == [FinishReason.LENGTH]
    assert not desk.scheduler.abort("0")
    desk.scheduler.fail(sequence, "too late", reason=FinishReason.TIMEOUT)
    desk.scheduler.finish(sequence, FinishReason.STOP)
    assert (sequence.finish_reason, sequence.error) == (FinishReason.LENGTH, None)
    desk.scheduler.assert_empty()


def test_a_result_that_comes_after_the_abort_is_dropped() -> None:
    """Bug 26, the other way round: the result of a request that ended revived it."""
    desk = Desk()
    sequence = desk.add(tokens=1)
    plan = desk.scheduler.schedule()
    assert plan is not None
    result = desk.runner.run(plan)
    assert desk.scheduler.abort("0")
    assert desk.scheduler.update(plan, result) == []
    assert (sequence.finish_reason, sequence.num_output_tokens) == (FinishReason.ABORT, 0)
    desk.scheduler.check_integrity()
    desk.scheduler.assert_empty()


def test_a_preempted_request_can_be_aborted() -> None:
    desk = Desk(num_pages=11, max_num_batched_tokens=32)
    for _ in range(3):
        desk.add(length=11, tokens=20)
    while not desk.scheduler.stats.num_preemptions:
        desk.step()
    (request_id,) = desk.waiting()
    assert desk.scheduler.abort(request_id)
    desk.scheduler.check_integrity()
    desk.sequences = [s for s in desk.sequences if s.request.request_id != request_id]
    desk.drain()


def swapped_desk() -> Counter:
    """An engine in which one of two requests is on the host."""
    desk = Counter(
        num_pages=11, num_host_pages=20, preemption_mode="swap", scheduling_policy="fcfs"
    )
    for i in range(2):
        desk.add(str(i), [i + 1] * 11, 20, timeout=7.0 if i else None)
    while not desk.engine.scheduler.host.allocator.num_held:
        desk.step()
    return desk


def test_a_swapped_request_can_be_aborted() -> None:
    desk = swapped_desk()
    assert desk.engine.abort("1")
    assert not desk.engine.abort("1")
    assert desk.engine.scheduler.host.allocator.num_held == 0
    desk.drain()
    assert desk.outputs["0"].outputs[0].token_ids == desk.plain([1] * 11, 20, "0")


def test_a_swapped_request_ends_at_its_timeout() -> None:
    desk = swapped_desk()
    desk.clock.now += 7.0
    assert desk.step() == ["1"]
    late(desk.outputs["1"])
    assert desk.engine.scheduler.host.allocator.num_held == 0
    tokens = desk.outputs["1"].outputs[0].token_ids
    assert tokens
    assert tokens == desk.plain([2] * 11, 20, "1")[: len(tokens)]
    desk.drain()


def test_a_reset_takes_swapped_pages_and_no_token() -> None:
    desk = swapped_desk()
    assert not desk.engine.reset_prefix_cache()
    assert desk.engine.reset_prefix_cache(reset_running=True)
    desk.engine.check_integrity()
    host = desk.engine.scheduler.host.allocator
    assert (host.num_free, host.num_evictable) == (20, 0)
    desk.drain()
    for i in range(2):
        assert desk.outputs[str(i)].outputs[0].token_ids == desk.plain([i + 1] * 11, 20, str(i))


@pytest.mark.parametrize("how", ["abort", "timeout"])
@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_a_beam_search_can_be_ended_at_any_point(how: str, num_steps: int) -> None:
    desk = Counter()
    params = SamplingParams(beam_width=3, n=2, max_tokens=12, ignore_eos=True, detokenize=False)
    desk.engine.add_request("beams", [1, 2, 3, 4, 5], params, timeout=5.0)
    desk.add("other", [3, 4], 9)
    for _ in range(num_steps):
        desk.step()
    if how == "abort":
        assert desk.engine.abort("beams")
        assert not desk.engine.abort("beams")
    desk.clock.now += 5.0
    assert desk.step() == ["beams"]
    assert {s.finish_reason for s in desk.outputs["beams"].outputs} == {how}
    desk.drain()
    assert desk.outputs["other"].outputs[0].token_ids == desk.plain([3, 4], 9, "other")


# -------------------------------------------------------------------------------------- the LLM


def llm_over(engine: LLMEngine) -> LLM:
    """The front door over an engine without a device, and without text."""
    llm = object.__new__(LLM)
    llm.engine, llm._ids, llm._terminal = engine, itertools.count(), False
    llm.tokenizer, llm.default_params = None, {}
    llm._turn = threading.Lock()
    return llm


PLAIN = SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False)


def test_generate_feeds_a_long_list_as_the_queue_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Counter(max_queue_requests=3, max_queue_tokens=9, max_num_seqs=2)
    waited: list[int] = []
    schedule = desk.engine.scheduler.schedule

    def watched() -> Any:
        waited.append(desk.engine.scheduler.num_waiting)
        return schedule()

    monkeypatch.setattr(desk.engine.scheduler, "schedule", watched)
    prompts = [[1 + i, 2, 3] if i % 2 else [i] * 5 for i in range(15)]
    outputs = llm_over(desk.engine).generate(prompts, PLAIN)
    assert [output.error for output in outputs] == [None] * 15
    assert max(waited) == 3
    for i, output in enumerate(outputs):
        assert output.prompt_token_ids == prompts[i]
        assert output.outputs[0].token_ids == desk.plain(prompts[i], 3, output.request_id)


def test_generate_takes_priorities_for_all_or_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Counter(max_num_seqs=1).engine
    llm = llm_over(engine)
    ended: list[str] = []
    step = engine.step

    def watched() -> list[RequestOutput]:
        outputs = step()
        ended.extend(output.request_id for output in outputs)
        return outputs

    monkeypatch.setattr(engine, "step", watched)
    params = PLAIN
    llm.generate([[1], [2], [3]], params, priority=[5, 1, 3])
    assert ended == ["request-1", "request-2", "request-0"]
    outputs = llm.generate([[1], [2]], params, priority=(1, -1))
    assert ended[3:] == ["request-4", "request-3"]
    assert [o.prompt_token_ids for o in outputs] == [[1], [2]]
    assert llm.generate([[1]], params, priority=-4)[0].error is None
    with pytest.raises(RequestError, match=r"`priority` must be an integer or a list of as many"):
        llm.generate([[1], [2]], params, priority=[1])
    (output,) = llm.generate([[1]], params, priority="high")  # pyright: ignore[reportArgumentType]
    assert "`priority` must be an integer in" in str(output.error)


def test_generate_ends_what_takes_longer_than_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Counter()
    llm = llm_over(desk.engine)
    step = desk.engine.step

    def slow() -> list[RequestOutput]:
        desk.clock.now += 1.0
        return step()

    monkeypatch.setattr(desk.engine, "step", slow)
    params = replace(PLAIN, max_tokens=30)
    outputs = llm.generate([[1], [2]], [PLAIN, params], timeout=5.0)
    assert outputs[0].error is None
    late(outputs[1])
    assert len(outputs[1].outputs[0].token_ids) == 4
    late(llm.generate([9], params, timeout=2.5)[0])
