"""The rules of beam search, on a model of random numbers, against lists of tokens; no pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedjax import SamplingParams
from pagedjax.request import Request, TokenLogprobs
from pagedjax.scheduling.beam_search import BeamSearch, score_of
from tests.plain_beams import PlainBeam, plain_beams

VOCAB = 12
EOS = frozenset({0, 1})


def request(**params: Any) -> Request:
    return Request(
        request_id="a",
        prompt_token_ids=(1,),
        params=SamplingParams(**params),
        arrival=0,
        seed=0,
        eos_token_ids=EOS,
    )


def random_model(seed: int, coarse: bool) -> Any:
    """Logprobs that depend on the whole answer; coarse ones tie all the time."""

    def model(answer: tuple[int, ...]) -> dict[int, float]:
        rng = np.random.default_rng([seed, *answer])
        values = -rng.integers(1, 4, VOCAB).astype(float) if coarse else -rng.exponential(1, VOCAB)
        return dict(enumerate(values.tolist()))

    return model


def searched(asked: Request, max_tokens: int, model: Any) -> list[PlainBeam]:
    """The same by `BeamSearch`, with offers as a step reports them."""
    search = BeamSearch(asked, max_tokens)
    lanes: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    empty: list[TokenLogprobs] = []
    for length in range(max_tokens):
        offers = [
            sorted(model(tokens).items(), key=lambda pair: (-pair[1], pair[0]))
            for _, tokens in lanes
        ]
        ended, going_on = search.turn(offers, [total for total, _ in lanes], length)
        for child in ended:
            search.keep(child, [*lanes[child.parent][1], child.token], empty)
        if search.is_done(going_on, length + 1):
            break
        lanes = [(c.total, (*lanes[c.parent][1], c.token)) for c in going_on]
    return [PlainBeam(h.tokens, h.total, h.score, h.reason) for h in search.hypotheses]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -1.0, 2.0])
@pytest.mark.parametrize("coarse", [False, True])
def test_beams_are_those_of_lists_of_tokens(
    early_stopping: Any, length_penalty: float, coarse: bool
) -> None:
    lengths = set()
    for seed in range(40):
        asked = request(
            beam_width=1 + seed % 5,
            early_stopping=early_stopping,
            length_penalty=length_penalty,
            min_tokens=seed % 3,
            stop_token_ids=(3,) if seed % 4 == 0 else (),
            ignore_eos=seed % 6 == 5,
        )
        model = random_model(seed, coarse)
        expected = plain_beams(asked, 2 + seed % 9, model)
        assert searched(asked, 2 + seed % 9, model) == expected
        lengths |= {len(beam.tokens) for beam in expected}
    assert len(lengths) > 3


def test_a_search_of_width_one_is_greedy() -> None:
    model = random_model(3, coarse=False)
    answer: tuple[int, ...] = ()
    while len(answer) < 6:
        values = model(answer)
        answer = (*answer, min(values, key=lambda token: (-values[token], token)))
    (beam,) = searched(request(beam_width=1, ignore_eos=True), 6, model)
    assert beam.tokens == list(answer)


def test_the_best_beam_may_begin_with_a_worse_token() -> None:
    values = {(): {5: -0.5, 6: -0.9}, (5,): {7: -3.0, 8: -3.5}, (6,): {7: -0.1, 8: -4.0}}
    beams = searched(request(beam_width=2), 2, lambda answer: values[answer])
    assert [beam.tokens for beam in beams] == [[6, 7], [5, 7]]


def test_only_the_best_width_can_end() -> None:
    """A stop token behind `width` likelier ones is no answer, though it could go on nowhere."""
    values = {(): {5: -0.1, 6: -0.2, 0: -0.3}, (5,): {5: -1.0, 6: -2.0}, (6,): {5: -1.0, 6: -2.0}}
    beams = searched(request(beam_width=2), 2, lambda answer: values[answer])
    assert [0] not in [beam.tokens for beam in beams]


def test_a_length_penalty_prefers_long_answers_and_a_negative_one_short_ones() -> None:
    values = {(): {0: -1.0, 5: -1.1}, (5,): {0: -0.5, 5: -9.0}, (5, 5): {0: -1.0, 5: -1.0}}

    def first(length_penalty: float) -> list[int]:
        asked = request(beam_width=2, length_penalty=length_penalty)
        return searched(asked, 2, lambda answer: values[answer])[0].tokens

    assert first(0.0) == [0]
    assert first(2.0) == [5, 0]


def test_never_stopping_early_means_at_no_length_that_helps() -> None:
    """With a negative penalty an open lane is best as it is, however far it could go."""
    values = {
        (): {0: -1.0, 5: -0.2, 6: -5.0},
        (5,): {7: -0.1, 0: -3.0, 8: -6.0},
        (6,): {7: -6.0, 8: -7.0},
        (5, 7): {0: -0.1, 5: -9.0, 6: -9.5},
        (5, 8): {5: -9.0, 6: -9.5},
    }
    asked = request(beam_width=2, length_penalty=-1.0, early_stopping="never")
    beams = searched(asked, 30, lambda answer: values[answer])
    assert [beam.tokens for beam in beams] == [[0], [5, 7, 0]]


def test_a_score_divides_by_the_length_to_the_penalty() -> None:
    assert score_of(-6.0, 3, 1.0) == -2.0
    assert score_of(-6.0, 3, 0.0) == -6.0
    assert score_of(-6.0, 2, 2.0) == -1.5
    assert score_of(-6.0, 2, -1.0) == -12.0
    assert score_of(0.0, 0, 1.0) == 0.0
