"""A request between arrival and answer: its sequences, the text so far, its clocks.

Reads what the scheduler appended; changes nothing of it. Knows nothing of steps or queues.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pagedjax.detokenizer import Detokenizer
from pagedjax.errors import RequestError
from pagedjax.request import (
    CompletionOutput,
    FinishReason,
    Request,
    RequestOutput,
    Sequence,
    TokenLogprobs,
)
from pagedjax.scheduling.beam_search import score_of
from pagedjax.tokenizer import Tokenizer

INTERNAL_ERROR = "internal error while handling this request; see the log"


@dataclass(slots=True, eq=False)
class InFlight:
    """A request that was added and has not been answered."""

    request: Request
    sequences: list[Sequence]
    detokenizers: list[Detokenizer | None]  # by sample; None: no text is wanted
    clock: Callable[[], float]  # the engine's, in seconds, as all times here
    num_seen: list[int] = field(default_factory=list[int])  # output tokens read, by sample
    first_token: float | None = None
    last_token: float = 0.0
    longest_gap: float = 0.0  # between two tokens of sample 0
    error: str | None = None  # why its text could not be made

    def __post_init__(self) -> None:
        """Nothing was read yet."""
        self.num_seen = [0] * len(self.sequences)

    @property
    def is_finished(self) -> bool:
        """True once every sample ended."""
        return all(sequence.is_finished for sequence in self.sequences)

    def read(self, sequence: Sequence, now: float) -> str | None:
        """Clocks and detokenises what is new of one sequence; returns the stop string it hit."""
        sample = sequence.sample
        new = sequence.tokens[sequence.num_prompt_tokens + self.num_seen[sample] :]
        self.num_seen[sample] += len(new)
        if sample == 0 and new:
            self._note_time(now)
        detokenizer = self.detokenizers[sample]
        if detokenizer is None or self.request.params.beam_width is not None:
            return None  # the tokens of beams are not final before the end
        for token in new:
            detokenizer.push(token)
        return detokenizer.stopped

    def output(self, tokenizer: Tokenizer | None) -> RequestOutput:
        """The answer, complete or as far as it came."""
        first = self.sequences[0]
        output = RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=list(self.request.prompt_token_ids),
            outputs=[
                self._completion(index, sequence, tokenizer)
                for index, sequence in enumerate(self._chosen())
            ],
            finished=True,
            num_cached_tokens=first.num_cached_tokens,
            metrics=self._metrics(),
        )
        if self.request.params.prompt_logprobs is not None:
            output.prompt_logprobs = [
                None if entry is None else _decoded(entry, tokenizer)
                for entry in first.prompt_logprobs
            ]
        output.error = self._error()
        return output

    def lateness(self) -> str:
        """What to say when its timeout is over."""
        num_tokens = sum(sequence.num_output_tokens for sequence in self.sequences)
        return (
            f"the request's `timeout` of {self.request.timeout:g} s is over: {num_tokens} tokens "
            "were generated"
        )

    def failed_output(self) -> RequestOutput:
        """The answer when its text or logprobs cannot be made: the tokens and an error."""
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=list(self.request.prompt_token_ids),
            outputs=[
                CompletionOutput(
                    index=index,
                    text="",
                    token_ids=sequence.output_token_ids,
                    finish_reason=FinishReason.ERROR.value,
                )
                for index, sequence in enumerate(self._chosen())
            ],
            finished=True,
            error=RequestError(INTERNAL_ERROR, code="engine_error"),
            metrics=self._metrics(),
        )

    def _error(self) -> RequestError | None:
        reasons = {sequence.finish_reason: sequence.error for sequence in self.sequences}
        if FinishReason.ERROR in reasons:
            message = reasons[FinishReason.ERROR] or INTERNAL_ERROR
            return RequestError(message, code="engine_error")
        if self.error is not None:
            return RequestError(self.error, code="engine_error")
        if FinishReason.TIMEOUT in reasons:
            message = reasons[FinishReason.TIMEOUT] or INTERNAL_ERROR
            return RequestError(message, param="timeout", code="timeout")
        return None

    def _note_time(self, now: float) -> None:
        if self.first_token is None:
            self.first_token = now
        else:
            self.longest_gap = max(self.longest_gap, now - self.last_token)
        self.last_token = now

    def _chosen(self) -> list[Sequence]:
        """The sequences that are answers: all samples, or the n best, best first."""
        params = self.request.params
        if params.beam_width is None and params.best_of is None:
            return self.sequences
        rank = _mean_logprob if params.beam_width is None else self._score
        return sorted(self.sequences, key=rank, reverse=True)[: params.n]

    def _score(self, sequence: Sequence) -> float:
        penalty = self.request.params.length_penalty
        return score_of(sequence.cumulative_logprob, sequence.num_output_tokens, penalty)

    def _completion(
        self, index: int, sequence: Sequence, tokenizer: Tokenizer | None
    ) -> CompletionOutput:
        detokenizer = self.detokenizers[sequence.sample]
        reason, stop_reason = sequence.finish_reason, sequence.stop_reason
        text = ""
        is_beam = self.request.params.beam_width is not None
        if detokenizer is not None:
            for token in sequence.output_token_ids if is_beam else ():
                detokenizer.push(token)
            detokenizer.finish()
            text = detokenizer.text
            # The scheduler may have ended it first, by length or a stop id of the same token.
            cut = (FinishReason.ERROR, FinishReason.TIMEOUT)
            if detokenizer.stopped is not None and reason not in cut:
                reason, stop_reason = FinishReason.STOP, detokenizer.stopped
        completion = CompletionOutput(
            index=index,
            text=text,
            token_ids=sequence.output_token_ids,
            finish_reason=None if reason is None else reason.value,
            stop_reason=stop_reason,
        )
        if is_beam:
            completion.score = self._score(sequence)
        if self.request.params.row_logprobs is not None:
            completion.cumulative_logprob = sequence.cumulative_logprob
        if self.request.params.logprobs is not None:
            completion.logprobs = [_decoded(entry, tokenizer) for entry in sequence.output_logprobs]
        return completion

    def _metrics(self) -> dict[str, float]:
        metrics = {"total_seconds": self.clock() - self.request.arrival_time}
        if self.first_token is None:
            return metrics
        metrics["time_to_first_token_seconds"] = self.first_token - self.request.arrival_time
        gaps = self.sequences[0].num_output_tokens - 1
        if gaps > 0:
            mean = (self.last_token - self.first_token) / gaps
            metrics["mean_time_between_tokens_seconds"] = mean
            metrics["max_time_between_tokens_seconds"] = self.longest_gap
        return metrics


def _mean_logprob(sequence: Sequence) -> float:
    """Of a token of the answer; an answer without tokens comes last."""
    num_tokens = sequence.num_output_tokens
    return sequence.cumulative_logprob / num_tokens if num_tokens else -math.inf


def _decoded(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> TokenLogprobs:
    if tokenizer is None:
        return entry
    return {
        token: replace(logprob, decoded_token=tokenizer.token_text(token))
        for token, logprob in entry.items()
    }
