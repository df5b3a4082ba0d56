"""Beam search over lists of tokens, obviously right: what a model's beams must be.

A model is a function from an answer so far to the logprobs of what may follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagedjax.config import SchedulerConfig
from pagedjax.request import FinishReason, Request, Sequence
from tests.fake_runner import advance, likeliest

type Model = Callable[[tuple[int, ...]], dict[int, float]]


@dataclass
class PlainBeam:
    """One answer that must be given."""

    tokens: list[int]
    total: float
    score: float
    reason: FinishReason

    def check(self, sequence: Sequence) -> None:
        """A sequence that ended by itself must be this answer."""
        params = sequence.request.params
        assert sequence.output_token_ids == self.tokens
        assert sequence.finish_reason is self.reason
        assert sequence.cumulative_logprob == self.total
        is_named = self.reason is FinishReason.STOP and self.tokens[-1] in params.stop_token_ids
        assert sequence.stop_reason == (self.tokens[-1] if is_named else None)
        if params.logprobs is not None:
            pairs = list(zip(sequence.output_logprobs, self.tokens, strict=True))
            assert sum(entry[token].logprob for entry, token in pairs) == self.total
            for entry, token in pairs:
                ranks = sorted(value.rank or 0 for value in entry.values())
                top = list(range(1, params.logprobs + 1))
                assert ranks in (top, [*top, entry[token].rank])
                assert next(iter(entry)) == token


def plain_beams(request: Request, max_tokens: int, model: Model) -> list[PlainBeam]:
    """All `beam_width` answers, best first."""
    params, width = request.params, request.params.beam_width
    assert width is not None
    stops = request.stop_ids
    open_beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[PlainBeam] = []
    for length in range(1, max_tokens + 1):
        longer = [
            (total + logprob, place, tokens, token)
            for place, (total, tokens) in enumerate(open_beams)
            for token, logprob in model(tokens).items()
            if token not in stops or length > params.min_tokens
        ]
        longer.sort(key=lambda beam: (-beam[0], beam[1], beam[3]))
        for total, _, tokens, token in longer[:width]:
            if token in stops or length == max_tokens:
                reason = FinishReason.STOP if token in stops else FinishReason.LENGTH
                score = total / length**params.length_penalty
                ended.append(PlainBeam([*tokens, token], total, score, reason))
        ended = sorted(ended, key=lambda beam: -beam.score)[:width]
        going_on = [beam for beam in longer if beam[3] not in stops][:width]
        open_beams = [(total, (*tokens, token)) for total, _, tokens, token in going_on]
        if len(ended) == width:
            if params.early_stopping is True:
                break
            at = length
            if params.early_stopping == "never" and params.length_penalty > 0:
                at = max_tokens
            if open_beams[0][0] / at**params.length_penalty <= ended[-1].score:
                break
    return ended


def fake_beams(request: Request, config: SchedulerConfig) -> list[PlainBeam]:
    """What `FakeRunner` must make of a request with beam search."""
    prompt = list(request.prompt_token_ids)

    def model(answer: tuple[int, ...]) -> dict[int, float]:
        state = 0
        for position, token in enumerate([*prompt, *answer]):
            state = advance(state, token, position)[1]
        return dict(zip(*likeliest(state, config.vocab_size), strict=True))

    room = config.max_model_len - len(prompt)
    return plain_beams(request, min(request.params.max_tokens or room, room), model)
