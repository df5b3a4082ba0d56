"""The engine: joins the scheduler (host half) and the runner (device half), one step at a time.

Owns the requests that are in flight, their detokenizers and their clocks. Everything that a
request brings is handled inside a boundary of its own, so that a bad one harms nobody else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pagedjax.detokenizer import Detokenizer
from pagedjax.errors import IntegrityError, RequestError
from pagedjax.plan import StepPlan, StepResult
from pagedjax.request import (
    CompletionOutput,
    FinishReason,
    Logprob,
    Request,
    RequestOutput,
    SamplingParams,
    Sequence,
    TokenLogprobs,
    derived_seed,
)
from pagedjax.scheduler import Scheduler
from pagedjax.throughput import ThroughputLog
from pagedjax.tokenizer import Tokenizer, encode_prompt

logger = logging.getLogger("pagedjax")

type Prompt = str | list[int] | tuple[int, ...]

_SEED_MASK = 2**64 - 1
INTERNAL_ERROR = "internal error while handling this request; see the log"


class Runner(Protocol):
    """What the engine needs of the device half."""

    def run(self, plan: StepPlan) -> StepResult:
        """Runs one step."""
        ...


@dataclass(slots=True, eq=False)
class _Live:
    """A request in flight."""

    request: Request
    sequences: list[Sequence]
    detokenizers: list[Detokenizer | None]
    arrived: float  # seconds, monotonic clock, as all here
    num_seen: list[int] = field(default_factory=list[int])  # output tokens handled, by sample
    first_token: float | None = None
    last_token: float = 0.0
    longest_gap: float = 0.0  # between two tokens of sample 0


class LLMEngine:
    """Adds, steps and aborts requests; `step` returns the requests that ended."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer | None,
        *,
        seed: int = 0,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Joins the halves.

        Args:
          tokenizer: None: prompts are token ids and answers have no text.
          seed: what requests without a seed of their own derive theirs from.
          eos_token_ids: tokens that end an answer unless `ignore_eos`.
        """
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self._seed = seed
        self._eos_token_ids = eos_token_ids
        self._live: dict[str, _Live] = {}
        self._ended: list[RequestOutput] = []
        self._num_arrived = 0
        self._log = ThroughputLog(logger)

    @property
    def has_unfinished(self) -> bool:
        """True while a request is in flight or an ended one was not returned yet."""
        return bool(self._live or self._ended)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
    ) -> None:
        """Checks, tokenises and queues a request.

        Raises:
          RequestError: it can never be served as asked, or its id is in use.
        """
        if request_id in self._live:
            raise RequestError(
                f"`request_id` must not be in use. Got {request_id!r} twice.", param="request_id"
            )
        request = self._request(request_id, prompt, params, cache_salt)
        detokenizers = [self._detokenizer(params) for _ in range(params.n)]
        sequences = self.scheduler.add_request(request)
        live = _Live(request, sequences, detokenizers, time.monotonic())
        live.num_seen = [0] * params.n
        self._num_arrived += 1
        self._live[request_id] = live

    def step(self) -> list[RequestOutput]:
        """Schedules and runs one step; returns the requests that ended, in order of ending."""
        plan = self.scheduler.schedule()
        if plan is None:
            self._end_finished(self._live.values())
            if self._live and not self._ended:
                raise IntegrityError(
                    f"{len(self._live)} requests are in flight and none can be scheduled. "
                    "This is a bug in pagedjax: please report it."
                )
        else:
            result = self.runner.run(plan)
            self._advance(self.scheduler.update(plan, result))
            self._log.step(self.scheduler)
        ended, self._ended = self._ended, []
        return ended

    def abort(self, request_id: str) -> bool:
        """Cancels a request at any moment; its output, so far as it came, is returned by `step`.

        Returns False when no such request is in flight.
        """
        live = self._live.get(request_id)
        if live is None:
            return False
        self.scheduler.abort(request_id)
        self._end_finished([live])
        return True

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False, and nothing changed, while requests use some."""
        return self.scheduler.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Raises `IntegrityError` when an invariant of pages, queues or requests is broken."""
        self.scheduler.check_integrity()
        for request_id, live in self._live.items():
            if all(sequence.is_finished for sequence in live.sequences):
                raise IntegrityError(f"request {request_id!r} ended but is still in flight.")
        if not self._live:
            self.scheduler.assert_empty()

    def _request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, cache_salt: str | None
    ) -> Request:
        text = prompt if isinstance(prompt, str) else None
        seed = params.seed
        if seed is None:
            seed = derived_seed(self._seed, request_id)
        return Request(
            request_id=request_id,
            prompt_token_ids=self._token_ids(prompt),
            params=params,
            arrival=self._num_arrived,
            seed=seed & _SEED_MASK,
            eos_token_ids=self._eos_token_ids,
            bad_sequences=self._bad_sequences(params),
            cache_salt=_checked_salt(cache_salt),
            prompt=text,
        )

    def _token_ids(self, prompt: Any) -> tuple[int, ...]:
        if isinstance(prompt, str):
            tokenizer = self._need_tokenizer("a prompt of text", "prompt")
            return tuple(encode_prompt(tokenizer, prompt))
        if not isinstance(prompt, list | tuple):
            raise RequestError(
                f"`prompt` must be text or a list of token ids. Got {type(prompt).__name__}.",
                param="prompt",
            )
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int):
                raise RequestError(
                    f"`prompt` must hold integers when it is a list. Got {type(token).__name__}.",
                    param="prompt",
                )
        return tuple(prompt)

    def _need_tokenizer(self, what: str, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                f"`{param}` must be given as token ids: this engine has no tokenizer. Got {what}.",
                param=param,
            )
        return self.tokenizer

    def _bad_sequences(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            tokenizer = self._need_tokenizer("bad_words", "bad_words")
            for text in (word, " " + word):  # most words are other tokens after a space
                ids = tuple(tokenizer.encode(text, special_tokens=False))
                if ids:
                    found[ids] = None
        return tuple(found)

    def _detokenizer(self, params: SamplingParams) -> Detokenizer | None:
        if self.tokenizer is None:
            if params.stop:
                self._need_tokenizer("stop strings", "stop")
            return None
        if not params.detokenize:
            return None
        return Detokenizer(
            self.tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _advance(self, sequences: list[Sequence]) -> None:
        now = time.monotonic()
        touched: dict[str, _Live] = {}
        for sequence in sequences:
            live = self._live.get(sequence.request.request_id)
            if live is None:
                continue
            touched[sequence.request.request_id] = live
            try:
                self._read_tokens(live, sequence, now)
            except Exception:
                logger.exception("request %s failed", sequence.request.request_id)
                self.scheduler.fail(sequence, INTERNAL_ERROR)
        self._end_finished(touched.values())

    def _read_tokens(self, live: _Live, sequence: Sequence, now: float) -> None:
        """Clocks and detokenises what is new of one sequence; a stop string ends it."""
        sample = sequence.sample
        start = sequence.num_prompt_tokens + live.num_seen[sample]
        new = sequence.tokens[start:]
        live.num_seen[sample] += len(new)
        if sample == 0 and new:
            if live.first_token is None:
                live.first_token = now
            else:
                live.longest_gap = max(live.longest_gap, now - live.last_token)
            live.last_token = now
        detokenizer = live.detokenizers[sample]
        if detokenizer is None:
            return
        for token in new:
            detokenizer.push(token)
            if detokenizer.stopped is not None:
                self.scheduler.finish(sequence, FinishReason.STOP, stop_reason=detokenizer.stopped)
                break

    def _end_finished(self, candidates: Any) -> None:
        for live in list(candidates):
            if all(sequence.is_finished for sequence in live.sequences):
                del self._live[live.request.request_id]
                self._ended.append(self._output(live))

    def _output(self, live: _Live) -> RequestOutput:
        request, sequences = live.request, live.sequences
        failed = next((s for s in sequences if s.finish_reason is FinishReason.ERROR), None)
        first = sequences[0]
        output = RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[self._completion(live, sequence) for sequence in sequences],
            finished=True,
            num_cached_tokens=first.num_cached_tokens,
            metrics=_metrics(live),
        )
        if request.params.prompt_logprobs is not None:
            output.prompt_logprobs = [
                None if entry is None else self._decoded(entry) for entry in first.prompt_logprobs
            ]
        if failed is not None:
            output.error = RequestError(failed.error or INTERNAL_ERROR, code="engine_error")
        return output

    def _completion(self, live: _Live, sequence: Sequence) -> CompletionOutput:
        params = live.request.params
        detokenizer = live.detokenizers[sequence.sample]
        reason, stop_reason = sequence.finish_reason, sequence.stop_reason
        text = ""
        if detokenizer is not None:
            detokenizer.finish()
            text = detokenizer.text
            if detokenizer.stopped is not None and reason is not FinishReason.ERROR:
                reason, stop_reason = FinishReason.STOP, detokenizer.stopped
        wants_logprobs = params.logprobs is not None
        return CompletionOutput(
            index=sequence.sample,
            text=text,
            token_ids=sequence.output_token_ids,
            cumulative_logprob=sequence.cumulative_logprob if wants_logprobs else None,
            logprobs=[self._decoded(e) for e in sequence.output_logprobs]
            if wants_logprobs
            else None,
            finish_reason=None if reason is None else reason.value,
            stop_reason=stop_reason,
        )

    def _decoded(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        tokenizer = self.tokenizer
        if tokenizer is None:
            return entry
        return {
            token: replace(logprob, decoded_token=tokenizer.token_text(token))
            for token, logprob in entry.items()
        }


def _metrics(live: _Live) -> dict[str, float]:
    now = time.monotonic()
    metrics = {"total_seconds": now - live.arrived}
    if live.first_token is not None:
        metrics["time_to_first_token_seconds"] = live.first_token - live.arrived
        gaps = live.sequences[0].num_output_tokens - 1
        if gaps > 0:
            mean = (live.last_token - live.first_token) / gaps
            metrics["mean_time_between_tokens_seconds"] = mean
            metrics["max_time_between_tokens_seconds"] = live.longest_gap
    return metrics


def _checked_salt(salt: Any) -> str | None:
    if salt is None:
        return None
    if not isinstance(salt, str) or not 0 < len(salt.encode("utf-8", "replace")) <= 128:
        raise RequestError(
            f"`cache_salt` must be a string of 1 to 128 bytes. Got {type(salt).__name__}.",
            param="cache_salt",
        )
    return salt


def prompt_fields(prompt: Any) -> tuple[Any, str | None]:
    """Text or token ids, and the cache salt, of a prompt given in any of its forms.

    Args:
      prompt: text, token ids, or a mapping with `prompt` or `prompt_token_ids`, and `cache_salt`.

    Raises:
      RequestError: a mapping with other keys, or without a prompt.
    """
    if not isinstance(prompt, Mapping):
        return prompt, None
    unknown = sorted(set(map(str, prompt)) - {"prompt", "prompt_token_ids", "cache_salt"})
    given = [key for key in ("prompt", "prompt_token_ids") if prompt.get(key) is not None]
    if unknown or len(given) != 1:
        raise RequestError(
            "`prompt` must have one of `prompt` and `prompt_token_ids`, and may have `cache_salt`, "
            f"when it is a mapping. Got {sorted(map(str, prompt))}.",
            param="prompt",
        )
    return prompt[given[0]], prompt.get("cache_salt")
