"""What a request bans, allows and adds to logits, as the rows of the sampler's state.

Owns the rules of when a ban begins and ends (min_tokens, bad words of several tokens). Knows
nothing of slots' owners, pages or devices.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from pagedjax.plan import RowUpdate
from pagedjax.request import Request, Sequence

BAN = -math.inf


@dataclass(frozen=True, slots=True)
class BanState:
    """The part of a row that changes while a sequence grows; a new one means a new `RowUpdate`."""

    bans_stops: bool  # min_tokens is not reached: eos and stop ids are banned
    bad_ends: frozenset[int]  # last tokens of the bad words whose other tokens were just generated


class Adjustments:
    """One request's adjustments, compiled once; `None` from `of` when it has none."""

    def __init__(self, request: Request, vocab_size: int):
        """For `of`."""
        params = request.params
        self._min_tokens = params.min_tokens
        self._stops = [token for token in request.stop_ids if token < vocab_size]
        self._bias = dict(params.logit_bias)
        self._bias.update(dict.fromkeys(params.bad_token_ids, BAN))
        self._bias.update({word[0]: BAN for word in request.bad_sequences if len(word) == 1})
        self._bad = [(list(word[:-1]), word[-1]) for word in request.bad_sequences if len(word) > 1]
        allowed = params.allowed_token_ids
        self._allowed = None if allowed is None else frozenset(allowed)
        self._has_penalties = params.has_penalties
        is_repetition = params.repetition_penalty != 1.0
        self._prompt = frozenset(request.prompt_token_ids) if is_repetition else frozenset[int]()

    @classmethod
    def of(cls, request: Request, vocab_size: int) -> Adjustments | None:
        """The request's adjustments, or None when its logits are sampled as they are.

        A beam search samples nothing; it keeps to min_tokens where it selects.
        """
        params = request.params
        has_any = (
            params.has_penalties
            or params.logit_bias
            or params.allowed_token_ids is not None
            or params.bad_token_ids
            or request.bad_sequences
            or (params.min_tokens > 0 and request.stop_ids)
        )
        return cls(request, vocab_size) if has_any and params.beam_width is None else None

    @property
    def leaves_nothing(self) -> bool:
        """True when every allowed token is banned, at least until min_tokens is reached."""
        if self._allowed is None:
            return False
        stops = self._stops if self._min_tokens > 0 else []
        banned = {token for token, bias in self._bias.items() if bias == BAN} | set(stops)
        return self._allowed <= banned

    def state(self, sequence: Sequence) -> BanState:
        """What holds for the sequence's next token."""
        num_output = sequence.num_output_tokens
        tokens = sequence.tokens
        ends = [
            end
            for start, end in self._bad
            if len(start) <= num_output and tokens[-len(start) :] == start
        ]
        return BanState(num_output < self._min_tokens, frozenset(ends))

    def state_after(self, num_output: int) -> BanState | None:
        """What holds after so many tokens, whatever they are; None: it depends on them."""
        return None if self._bad else BanState(num_output < self._min_tokens, frozenset())

    def row_update(self, slot: int, sequence: Sequence, state: BanState) -> RowUpdate:
        """The whole row of the slot that the sequence holds."""
        bias = dict(self._bias)
        if state.bans_stops:
            bias.update(dict.fromkeys(self._stops, BAN))
        bias.update(dict.fromkeys(state.bad_ends, BAN))
        counted = sequence.output_token_ids if self._has_penalties else list[int]()
        return RowUpdate(slot, bias, self._allowed, dict(Counter(counted)), self._prompt)
