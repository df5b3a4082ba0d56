"""Beam search as arithmetic: which lanes go on with which tokens, which ended, when it is over.

The rules are those of transformers' `generate(num_beams=...)`, token for token. Knows nothing of
pages, steps or sequences: lanes are numbers here, 0 the likeliest.

Each turn every lane offers its likeliest tokens. Of all of them the W best by the logprob of the
whole that end a lane become hypotheses, scored by logprob / tokens ** length_penalty; the W best
that end none are the next lanes. Of equal ones the better lane's comes first, then the lower id.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice

from pagedjax.request import FinishReason, Request, TokenLogprobs

type Offers = list[tuple[int, float]]  # token ids with their logprobs, likeliest first


@dataclass(frozen=True, slots=True)
class Child:
    """A lane and one token more."""

    parent: int  # which lane
    token: int
    logprob: float
    rank: int  # of the token among its lane's, 1 is the likeliest
    total: float  # logprob of the whole answer


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An answer that ended."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]  # one for each token; empty unless asked for
    total: float  # sum of the tokens' logprobs
    score: float
    reason: FinishReason
    stop_reason: int | None


class BeamSearch:
    """One request's search.

    Attributes:
      hypotheses: the best of those that ended, at most `width`, best first; earlier ones first
        where scores are equal.
    """

    def __init__(self, request: Request, max_tokens: int):
        """`max_tokens`: of an answer; every lane ends there."""
        params = request.params
        self.hypotheses: list[Hypothesis] = []
        self._width = params.num_sequences
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._min_tokens = params.min_tokens
        self._max_tokens = max_tokens
        self._stop_ids = request.stop_ids
        self._named_stops = frozenset(params.stop_token_ids)

    def turn(
        self, offers: Seq[Offers], totals: Seq[float], num_tokens: int
    ) -> tuple[list[Child], list[Child]]:
        """(those that ended, the next lanes), each best first.

        Args:
          offers: of each lane, best lane first; every lane's hold `width` tokens that do not stop.
          totals: logprob of each lane's answer so far.
          num_tokens: of each lane's answer so far.
        """
        stops = self._stop_ids
        is_early, is_last = num_tokens < self._min_tokens, num_tokens + 1 >= self._max_tokens
        ranked = sorted(  # as tuples: a child is only made where it is one
            (-(totals[lane] + logprob), lane, token, logprob, rank)
            for lane, offered in enumerate(offers)
            for rank, (token, logprob) in enumerate(offered, 1)
            if not (is_early and token in stops)
        )
        best = ranked[: self._width]
        if is_last:
            return [_child(*offer) for offer in best], []
        ended = [_child(*offer) for offer in best if offer[2] in stops]
        going_on = (_child(*offer) for offer in ranked if offer[2] not in stops)
        return ended, list(islice(going_on, self._width))

    def keep(self, child: Child, tokens: list[int], logprobs: list[TokenLogprobs]) -> None:
        """An answer that ended with `child` is kept while no `width` better ones are known."""
        is_stop = child.token in self._stop_ids and len(tokens) > self._min_tokens
        hypothesis = Hypothesis(
            tokens=tokens,
            logprobs=logprobs,
            total=child.total,
            score=score_of(child.total, len(tokens), self._length_penalty),
            reason=FinishReason.STOP if is_stop else FinishReason.LENGTH,
            stop_reason=child.token if is_stop and child.token in self._named_stops else None,
        )
        self.hypotheses.append(hypothesis)
        self.hypotheses.sort(key=lambda kept: -kept.score)  # stable
        del self.hypotheses[self._width :]

    def is_done(self, lanes: Seq[Child], num_tokens: int) -> bool:
        """Whether no lane is left, or none can add to the hypotheses by the request's rule.

        `num_tokens`: of the lanes' answers, their new tokens included.
        """
        if not lanes:
            return True
        if len(self.hypotheses) < self._width:
            return False
        if self._early_stopping is True:
            return True
        # An open lane only loses logprob; more tokens help it where the penalty is positive.
        waits = self._early_stopping == "never" and self._length_penalty > 0
        length = self._max_tokens if waits else num_tokens
        best_possible = score_of(lanes[0].total, length, self._length_penalty)
        return best_possible <= self.hypotheses[-1].score


def _child(negative_total: float, lane: int, token: int, logprob: float, rank: int) -> Child:
    return Child(lane, token, logprob, rank, -negative_total)


def score_of(total: float, num_tokens: int, length_penalty: float) -> float:
    """What beams are ranked by; of an answer without tokens its logprob."""
    return total / max(num_tokens, 1) ** length_penalty
