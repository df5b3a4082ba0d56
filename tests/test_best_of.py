"""`best_of`: the answers are the likeliest of all samples that were drawn, best first."""

from __future__ import annotations

from typing import Any

import pytest

from pagedjax import CompletionOutput, RequestError, RequestOutput, SamplingParams
from tests.tiny_engine import answer, drain, tiny_engine

PROMPT = "somewhere"


def sampled(**params: Any) -> RequestOutput:
    values = {"temperature": 1.0, "seed": 5, "max_tokens": 12} | params
    return answer(tiny_engine(), PROMPT, SamplingParams(**values))


def logprob(sample: CompletionOutput) -> float:
    assert sample.cumulative_logprob is not None
    return sample.cumulative_logprob


@pytest.mark.parametrize("stop", [(), ("a", "k")])
def test_the_answers_are_the_n_with_the_highest_mean_logprob_best_first(stop: Any) -> None:
    drawn = sampled(n=6, logprobs=0, stop=stop).outputs
    means = [logprob(sample) / len(sample.token_ids) for sample in drawn]
    order = sorted(range(6), key=lambda i: -means[i])
    assert order[:3] != [0, 1, 2]
    got = sampled(n=3, best_of=6, stop=stop).outputs
    assert [sample.index for sample in got] == [0, 1, 2]
    for sample, i in zip(got, order, strict=False):
        assert sample.token_ids == drawn[i].token_ids
        assert sample.text == drawn[i].text
        assert sample.finish_reason == drawn[i].finish_reason
        assert sample.cumulative_logprob == pytest.approx(drawn[i].cumulative_logprob)
        assert sample.logprobs is None


def test_a_short_answer_may_beat_a_likelier_whole() -> None:
    """The mean counts, not the sum, which would always prefer the shortest."""
    drawn = sampled(n=8, logprobs=0, stop=("e", "m")).outputs
    sums = [logprob(sample) for sample in drawn]
    means = [logprob(sample) / len(sample.token_ids) for sample in drawn]
    assert max(range(8), key=sums.__getitem__) != max(range(8), key=means.__getitem__)
    (best,) = sampled(best_of=8, stop=("e", "m")).outputs
    assert best.token_ids == drawn[max(range(8), key=means.__getitem__)].token_ids


def test_logprobs_of_the_answers_are_reported_when_asked_for() -> None:
    (best,) = sampled(best_of=4, logprobs=2).outputs
    assert best.logprobs is not None
    assert len(best.logprobs) == len(best.token_ids) > 0
    chosen = zip(best.token_ids, best.logprobs, strict=True)
    assert best.cumulative_logprob == pytest.approx(sum(e[token].logprob for token, e in chosen))
    assert all(2 <= len(entry) <= 3 for entry in best.logprobs)


def test_an_aborted_choice_has_n_answers_and_leaves_nothing() -> None:
    """Bug 21: children of n > 1 were not aborted."""
    engine = tiny_engine()
    params = SamplingParams(n=2, best_of=5, max_tokens=50, ignore_eos=True)
    engine.add_request("a", PROMPT, params)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.num_running == 5
    assert engine.abort("a")
    (output,) = drain(engine).values()
    assert [sample.finish_reason for sample in output.outputs] == ["abort", "abort"]
    engine.scheduler.assert_empty()


def test_a_choice_among_more_than_can_run_is_refused() -> None:
    with pytest.raises(RequestError, match=r"`best_of` must be at most .* \(8\). Got 9") as caught:
        tiny_engine().add_request("a", PROMPT, SamplingParams(best_of=9))
    assert caught.value.param == "best_of"
