"""What a history says is what happened: against the scheduler itself, and case by case."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from pagedjax.events import Event, Header, Logged
from pagedjax.explain import WIDTH, _waited, explain, overview
from pagedjax.history import Fact, History, Miss, Story
from pagedjax.history.story import Wait
from pagedjax.request import FinishReason, Sequence
from pagedjax.scheduling import pages_to_come
from pagedjax.scheduling.recorder import name_of
from tests.event_logs import Trace
from tests.test_scheduler import Bench


class Reader:
    """A sink that reads a history as it happens; a step a second."""

    def __init__(self) -> None:
        self.history: History | None = None
        self.num_lines = 0

    def emit(self, event: Event) -> None:
        self.num_lines += 1
        if isinstance(event, Header):
            self.history = History(event)
            return
        assert self.history is not None
        seconds = float(getattr(event, "step", self.history.now.step))
        self.history.read(Logged(self.num_lines, max(seconds, self.history.now.seconds), event))

    def flush(self) -> None:
        pass

    @property
    def stories(self) -> list[Story]:
        assert self.history is not None
        return self.history.stories


def check_agrees(trace: Trace, history: History) -> None:
    """Tables and positions of what runs, as the history has them, are the scheduler's."""
    known = history._sequences
    for live in trace.scheduler.roster.running:
        one = known.find(name_of(live.sequence))
        if one is None or (live.sequence.sample and one.joined is None):
            continue  # a sample that has not run yet: the log has nothing of it
        computed = one.computed_before(history.now.step + 1)
        assert computed == live.sequence.num_computed_tokens + live.num_in_flight
        assert one.table == list(live.table.pages)
        assert one.waits_since is None
    for live in trace.scheduler.roster.waiting:
        one = known.find(name_of(live.sequence))
        assert one is None or one.table == []
        assert one is None or one.waits_since is not None


@pytest.mark.parametrize("seed", range(12))
def test_a_history_agrees_with_the_scheduler_after_every_operation(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_to_come, "WORTH_WAITING", (8, 128)[seed // 2 % 2])
    reader = Reader()
    trace = Trace(seed, reader, page_size=(2, 4)[seed % 2], num_pages=(25, 14)[seed % 2])
    history = reader.history
    assert history is not None
    step, end, rare = trace.step, trace.end, trace.rare
    for operation in (step, end, rare, trace.add, trace.deliver):

        def checked(operation: Any = operation) -> None:
            operation()
            check_agrees(trace, history)

        setattr(trace, operation.__name__, checked)
    trace.run(120)
    check_totals(trace, reader.stories)
    check_words(history)


def starts_over(*, loses: bool) -> Counter[str]:
    """Why sequences start over where beams press a small pool; the words must say so, too."""
    causes: Counter[str] = Counter()
    for seed in range(8):
        reader = Reader()
        trace = Trace(seed, reader, num_pages=11, num_host_pages=30)
        if not loses:
            trace.runner.lose = lambda *_args, **_kwargs: None
        for _ in range(12):
            trace.add(beam_width=3, n=1, max_tokens=9, **PLAIN)
            for _ in range(6):
                trace.step()
        trace.run(60)
        for story in reader.stories:
            facts = [fact for fact in story.facts if fact.kind == "restarted"]
            causes.update(fact.details["cause"] for fact in facts)
            turned = [fact for fact in facts if fact.details["cause"] == "turned"]
            assert not turned or "beam_width" in story.document["params"]
            assert reader.history is not None
            words = " ".join(explain(reader.history, story.request_id).split())
            told = "because its beam ended and it goes on from another one"
            assert words.count(told) == len(turned)
    return causes


PLAIN: dict[str, Any] = {
    "temperature": 0.0,
    "stop_token_ids": (),
    "logprobs": None,
    "prompt_logprobs": None,
    "presence_penalty": 0.0,
    "logit_bias": {},
}


def test_a_beam_that_goes_on_from_another_lost_nothing_on_the_host() -> None:
    causes = starts_over(loses=False)
    assert causes["turned"] > 0
    assert causes["lost"] == 0
    causes = starts_over(loses=True)
    assert causes["turned"] > 0
    assert causes["lost"] > 0


def check_totals(trace: Trace, stories: list[Story]) -> None:
    of_request: dict[str, list[Sequence]] = {}
    for sequence in trace.sequences:
        of_request.setdefault(sequence.request.request_id, []).append(sequence)
    assert [story.request_id for story in stories] == list(of_request)
    for story in stories:
        sequences = of_request[story.request_id]
        assert story.counts.num_output_tokens == sum(s.num_output_tokens for s in sequences)
        assert story.counts.num_cached_tokens == max(s.num_cached_tokens for s in sequences)
        reasons = [s.finish_reason.value for s in sequences if s.finish_reason]
        assert Counter(story.reasons) == Counter(reasons)
    stats = trace.scheduler.stats
    num_preemptions = sum(story.counts.num_preemptions for story in stories)
    num_restarts = sum(
        story.counts.num_restarts for story in stories
    )  # some of them are counted there
    assert num_preemptions <= stats.num_preemptions <= num_preemptions + num_restarts
    assert sum(story.counts.num_copies for story in stories) == stats.num_cow_copies


def check_words(history: History) -> None:
    """Every fact has words; no line is too wide, however it is wrapped."""
    for story in history.stories:
        text = explain(history, story.request_id)
        assert all(len(line) <= WIDTH for line in text.splitlines())
        assert len(text.splitlines()) >= 2 + len(story.facts)
    assert all(len(line) <= WIDTH for line in overview(history).splitlines())


# ------------------------------------------------------------------------------- case by case


class Recorded(Bench):
    """A bench whose history is read."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.reader = Reader()
        self.scheduler = type(self.scheduler)(self.config, events=self.reader)
        self.runner = type(self.runner)(self.config, self.scheduler.allocator)

    def facts(self, request: int, kind: str) -> list[Fact]:
        return [fact for fact in self.reader.stories[request].facts if fact.kind == kind]

    def miss(self, request: int) -> Miss | None:
        return self.facts(request, "admitted")[0].details["miss"]

    def text(self, request: int) -> str:
        """Without the breaks of lines."""
        assert self.reader.history is not None
        return " ".join(explain(self.reader.history, str(request)).split())


PROMPT = list(range(1, 18))  # four pages of four, and a token


def test_a_hit_tells_whose_pages_it_found() -> None:
    bench = Recorded()
    bench.finish_all(bench.add(PROMPT))
    bench.finish_all(bench.add(PROMPT))
    details = bench.facts(1, "admitted")[0].details
    assert details["num_tokens"] == 16
    assert details["sources"] == {"0": 4}
    assert details["miss"] is None
    text = bench.text(1)
    assert "starts with 16 of 17 prompt tokens: 4 pages on the device (computed for 0)" in text
    assert "16 of 17 prompt tokens came from the prefix cache" in text


def test_a_prompt_that_nobody_had_is_a_new_one() -> None:
    bench = Recorded()
    bench.finish_all(bench.add(PROMPT))
    bench.finish_all(bench.add([*PROMPT[:8], 0, *PROMPT[9:]]))
    assert bench.miss(1) == Miss("new", 8, 11)
    assert "first miss: tokens 8 to 11 were in no earlier prompt" in bench.text(1)


def test_a_miss_because_of_eviction_tells_when_and_whose() -> None:
    bench = Recorded(num_pages=17)
    bench.finish_all(bench.add(PROMPT, max_tokens=1))
    bench.finish_all(bench.add(50, max_tokens=1))  # takes all pages but three
    assert bench.reader.history is not None
    bench.finish_all(bench.add(PROMPT, max_tokens=1))
    assert bench.miss(2) == Miss("evicted", 12, 15, "0", 3)
    assert "tokens 12 to 15 were computed for 0 and evicted in step 3" in bench.text(2)


def test_a_miss_because_of_another_salt_names_no_salt() -> None:
    bench = Recorded()
    bench.finish_all(bench.add(PROMPT, salt="theirs"))
    bench.finish_all(bench.add(PROMPT, salt="mine"))
    assert bench.miss(1) == Miss("salt", 0, 3, "0")
    assert "computed for 0, under another cache salt" in bench.text(1)
    assert "theirs" not in bench.text(1)


def test_a_miss_on_what_is_still_being_computed() -> None:
    bench = Recorded(max_num_batched_tokens=12)
    first = bench.add(PROMPT)
    bench.step()
    second = bench.add(PROMPT)
    bench.step()
    assert bench.miss(1) == Miss("pending", 12, 15, "0")
    assert "were still being computed for 0" in bench.text(1)
    bench.finish_all(first, second)


def test_a_miss_after_a_reset() -> None:
    bench = Recorded()
    bench.finish_all(bench.add(PROMPT, max_tokens=2))
    assert bench.scheduler.reset_prefix_cache()
    bench.finish_all(bench.add(PROMPT))
    assert bench.miss(1) == Miss("reset", 0, 3, "0", 2)
    assert "went with the reset after step 2" in bench.text(1)


def test_a_reset_that_was_refused_is_no_reset() -> None:
    bench = Recorded()
    first = bench.add(PROMPT)
    bench.step()
    assert not bench.scheduler.reset_prefix_cache()
    bench.finish_all(first, bench.add(PROMPT))
    assert bench.miss(1) is None


def test_a_miss_without_a_cache_and_for_prompt_logprobs() -> None:
    bench = Recorded(enable_prefix_caching=False)
    bench.finish_all(bench.add(PROMPT))
    assert bench.miss(0) == Miss("off", 0, 3)
    assert "because prefix caching is off" in bench.text(0)
    bench = Recorded()
    bench.finish_all(bench.add(PROMPT))
    bench.finish_all(bench.add(PROMPT, prompt_logprobs=1))
    assert bench.miss(1) == Miss("logprobs", 0, 3)


def test_a_step_that_broke_off_cached_nothing() -> None:
    bench = Recorded()
    first = bench.add(PROMPT)
    plan = bench.schedule()
    bench.runner.fail(plan)
    bench.scheduler.drop(plan)
    bench.scheduler.abort("0")
    bench.finish_all(bench.add(PROMPT))
    assert first[0].finish_reason is FinishReason.ABORT
    assert bench.miss(1) == Miss("new", 0, 3)
    assert "starts over, because step 1 broke off: gives up 17 tokens" in bench.text(0)
    assert "ended (abort) after 0 tokens" in bench.text(0)


def test_a_preemption_tells_for_whom_and_what_it_cost() -> None:
    bench = Recorded(page_size=4, num_pages=11, max_model_len=40)
    bench.finish_all(bench.add(14, max_tokens=12), bench.add(14, max_tokens=12))
    (preempted,) = bench.facts(1, "preempted")
    assert preempted.details["needer"] == "0"
    assert (preempted.details["needed"], preempted.details["free"]) == (1, 0)
    first, again = bench.facts(1, "admitted")
    assert not again.details["is_first"]
    computed, found = preempted.details["num_tokens"], again.details["num_tokens"]
    assert again.details["num_recomputed"] == computed - found > 0
    story = bench.reader.stories[1]
    assert (story.counts.num_preemptions, story.counts.num_recomputed_tokens) == (
        1,
        computed - found,
    )
    waited = again.at.step - preempted.at.step - 1
    assert story.counts.num_wait_steps == waited > 0
    assert first.at.step == 1
    text = bench.text(1)
    assert "preempted, to be computed again: 0 needed 1 page and none were free; gives up" in text
    assert f"{computed - found} tokens to compute again" in text


def test_a_swap_tells_what_moved_out_and_back() -> None:
    bench = Recorded(
        page_size=4, num_pages=11, max_model_len=40, num_host_pages=20, preemption_mode="swap"
    )
    bench.finish_all(bench.add(14, max_tokens=12), bench.add(14, max_tokens=12))
    (preempted,) = bench.facts(1, "preempted")
    assert preempted.details["mode"] == "swap"
    moved = preempted.details["num_moved"]
    again = bench.facts(1, "admitted")[1].details
    assert again["num_recomputed"] == 0
    assert again["num_tokens"] == preempted.details["num_tokens"]
    counts = bench.reader.stories[1].counts
    assert counts.num_pages_out == moved > 0
    assert counts.num_pages_in == again["num_host"] > 0
    assert "preempted by swap: 0 needed 1 page and none were free" in bench.text(1)
    assert "brought in from the host" in bench.text(1)


def test_what_the_host_kept_is_no_eviction() -> None:
    bench = Recorded(num_pages=17, num_host_pages=20)
    bench.finish_all(bench.add(PROMPT, max_tokens=1))
    bench.finish_all(bench.add(50, max_tokens=1))
    bench.finish_all(bench.add(PROMPT, max_tokens=1))
    details = bench.facts(2, "admitted")[0].details
    assert (details["miss"], details["num_tokens"]) == (None, 16)
    assert (details["num_host"], details["sources"]) == (1, {"0": 4})
    contents = bench.reader.history._contents._contents if bench.reader.history else {}
    assert all(content.evicted is None for content in contents.values() if content.on_host)


def test_a_wait_is_told_with_its_reasons_and_no_step_is_counted_twice() -> None:
    bench = Recorded(max_num_seqs=1, num_pages=40)
    bench.finish_all(
        bench.add(5, max_tokens=4), bench.add(6, max_tokens=3), bench.add(7, max_tokens=2)
    )
    history, story = bench.reader.history, bench.reader.stories[2]
    assert history is not None
    (admitted,) = bench.facts(2, "admitted")
    waits = history.waits(story, admitted.details["since"], admitted.at)
    assert [(w.head, w.is_head, w.num_steps) for w in waits] == [("1", False, 4), ("2", True, 3)]
    assert admitted.details["num_steps"] == 7
    assert (
        "waited 7 steps (8.000 s): 4 steps behind 1, which was first: all slots were taken; 3 "
        "steps first in the queue: all slots were taken."
    ) in bench.text(2)


def test_samples_are_told_apart() -> None:
    bench = Recorded()
    bench.finish_all(bench.add(9, n=2, max_tokens=3))
    text = bench.text(0)
    assert "sample 1: ended (length) after 3 tokens" in text
    assert "is copied to" in text
    assert "9 prompt tokens, 2 samples, 6 tokens generated, length" in text


def test_a_sample_that_gives_way_to_another_says_to_which() -> None:
    bench = Recorded(num_pages=17)
    bench.finish_all(bench.add(30, n=4, max_tokens=20))
    preempted = bench.facts(0, "preempted")
    assert len(preempted) > 1
    text = bench.text(0)
    assert "its samples waited " in text
    for fact in preempted:
        details = fact.details
        assert details["is_sibling"] == (details["needer_sample"] != fact.sample)
        who = f"sample {details['needer_sample']}" if details["is_sibling"] else "it"
        assert f"sample {fact.sample}: preempted, to be computed again: {who} needed" in text
    assert any(fact.details["needer_sample"] == 0 for fact in preempted)
    assert any(fact.details["is_sibling"] for fact in preempted)


def test_pages_that_are_kept_may_be_more_than_are_free() -> None:
    wait = Wait("a", is_head=True, reason="pages", needed=1, free=1, reserved=4, num_steps=2)
    assert _waited(wait) == (
        "2 steps first in the queue: it needed 1 page and 1 was free, 4 to be kept for what ran"
    )


def test_a_request_is_known_by_its_label_and_by_its_id() -> None:
    bench = Recorded()
    (sequence,) = bench.add(5)
    request = replace(sequence.request, request_id="af12", label="my\n\x1bask", arrival=9)
    bench.finish_all([sequence], bench.scheduler.add_request(request))
    assert bench.reader.history is not None
    text = explain(bench.reader.history, "af12")
    assert text.startswith("my??ask: 5 prompt tokens")
    assert explain(bench.reader.history, "my??ask") == text
    assert "my??ask " in overview(bench.reader.history)


def test_what_has_not_ended_says_so() -> None:
    bench = Recorded()
    bench.add(9)
    bench.step(2)
    assert bench.text(0).endswith("the log ends here")
    assert "not ended" in bench.text(0)
