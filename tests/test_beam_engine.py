"""Beams of the engine on a tiny model are those of lists of tokens on its dense attention."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from pagedjax import RequestOutput, SamplingParams
from pagedjax.request import Request
from tests.helpers import ByteTokenizer, dense_logprobs
from tests.plain_beams import PlainBeam, plain_beams
from tests.tiny_engine import EOS, answer, answers, drain, tiny_engine

PROMPTS = ("somewhere", "a", "thelastofthepages" * 5)
TOLERANCE = 1e-3


def dense_beams(prompt: str, params: SamplingParams) -> list[PlainBeam]:
    """The oracle: the whole sequence computed anew, densely, for each token of each beam."""
    ids = ByteTokenizer().encode(prompt)
    request = Request(
        request_id="a",
        prompt_token_ids=tuple(ids),
        params=params,
        arrival=0,
        seed=0,
        eos_token_ids=EOS,
    )

    @functools.cache
    def model(tokens: tuple[int, ...]) -> dict[int, float]:
        return dict(enumerate(dense_logprobs([*ids, *tokens])[-1].tolist()))

    return plain_beams(request, params.max_tokens or 1, model)


def check(output: RequestOutput, expected: list[PlainBeam]) -> None:
    n = len(output.outputs)
    assert [sample.index for sample in output.outputs] == list(range(n))
    for sample, beam in zip(output.outputs, expected[:n], strict=True):
        assert sample.token_ids == beam.tokens
        assert sample.cumulative_logprob == pytest.approx(beam.total, abs=TOLERANCE)
        assert sample.score == pytest.approx(beam.score, abs=TOLERANCE)
        assert sample.finish_reason == beam.reason.value
        assert sample.text == ByteTokenizer().decode(beam.tokens)


KINDS: dict[str, dict[str, Any]] = {
    "ordinary": {"beam_width": 4, "n": 4, "max_tokens": 24},
    "early": {"beam_width": 3, "n": 2, "max_tokens": 24, "early_stopping": True},
    "never": {"beam_width": 2, "max_tokens": 20, "early_stopping": "never", "length_penalty": 2.0},
    "stops": {"beam_width": 5, "n": 5, "max_tokens": 16, "stop_token_ids": [4, 9], "min_tokens": 4},
    "endless": {"beam_width": 4, "n": 3, "max_tokens": 16, "ignore_eos": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_beams_are_those_of_dense_attention(kind: str) -> None:
    params = SamplingParams(**KINDS[kind])
    for prompt in PROMPTS:
        check(answer(tiny_engine(), prompt, params), dense_beams(prompt, params))


@pytest.mark.parametrize("caching", [True, False])
def test_beams_beside_other_requests_in_too_few_pages_are_the_same(caching: bool) -> None:
    """Everything at once on a pool of one request: lanes are parked and computed again."""
    engine = tiny_engine(num_pages=1 + 32, enable_prefix_caching=caching)
    asked = {
        f"{kind} {prompt}": (prompt, SamplingParams(**values))
        for kind, values in KINDS.items()
        for prompt in PROMPTS
    }
    others = {
        f"sampled {seed}": ("a page", SamplingParams(seed=seed, n=2, max_tokens=20))
        for seed in range(4)
    }
    found = answers(engine, {**asked, **others})
    assert engine.scheduler.stats.num_preemptions > 3
    for name, (prompt, params) in asked.items():
        check(found[name], dense_beams(prompt, params))
    for name, (prompt, params) in others.items():
        alone = answer(tiny_engine(), prompt, params)
        assert [s.token_ids for s in found[name].outputs] == [s.token_ids for s in alone.outputs]


def test_logprobs_of_beams_are_those_of_the_model() -> None:
    params = SamplingParams(beam_width=3, n=3, max_tokens=10, logprobs=2, prompt_logprobs=1)
    output = answer(tiny_engine(), PROMPTS[0], params)
    prompt = output.prompt_token_ids
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(prompt)
    for sample in output.outputs:
        dense = dense_logprobs([*prompt, *sample.token_ids])[len(prompt) - 1 :]
        assert sample.logprobs is not None
        assert len(sample.logprobs) == len(sample.token_ids)
        for token, entry, row in zip(sample.token_ids, sample.logprobs, dense, strict=False):
            likeliest = sorted(range(len(row)), key=lambda i: -row[i])
            assert set(entry) == {token, *likeliest[:2]}
            for key, value in entry.items():
                assert value.logprob == pytest.approx(row[key], abs=TOLERANCE)
                assert value.rank == likeliest.index(key) + 1
                assert value.decoded_token == ByteTokenizer().decode(
                    [key], skip_special_tokens=False
                )


def test_an_aborted_search_returns_its_best_lanes_so_far() -> None:
    engine = tiny_engine()
    params = SamplingParams(beam_width=4, n=2, max_tokens=40, ignore_eos=True)
    engine.add_request("a", PROMPTS[0], params)
    for _ in range(6):
        engine.step()
    assert engine.abort("a")
    (output,) = drain(engine).values()
    six = SamplingParams(beam_width=4, max_tokens=6, ignore_eos=True)
    expected = dense_beams(PROMPTS[0], six)
    assert [sample.token_ids for sample in output.outputs] == [b.tokens for b in expected[:2]]
    assert {sample.finish_reason for sample in output.outputs} == {"abort"}
    engine.scheduler.assert_empty()


def test_a_search_without_a_tokenizer_has_ids_and_scores() -> None:
    params = SamplingParams(beam_width=2, max_tokens=5)
    output = answer(tiny_engine(has_text=False), [3, 1, 4], params)
    (sample,) = output.outputs
    assert sample.text == ""
    assert sample.score is not None
    assert "total_seconds" in output.metrics
