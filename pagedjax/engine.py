"""The engine: joins the scheduler (host half) and the runner (device half), one step at a time.

Owns the requests that are in flight. Everything that a
request brings is handled inside a boundary of its own, so that a bad one harms nobody else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from pagedjax.detokenizer import Detokenizer
from pagedjax.errors import IntegrityError, RequestError
from pagedjax.in_flight import INTERNAL_ERROR, InFlight
from pagedjax.plan import StepPlan, StepResult
from pagedjax.request import (
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    Sequence,
    derived_seed,
)
from pagedjax.scheduler import Scheduler
from pagedjax.throughput import ThroughputLog
from pagedjax.tokenizer import Tokenizer, encode_prompt

logger = logging.getLogger("pagedjax")

type Prompt = str | list[int] | tuple[int, ...] | np.ndarray[Any, Any]

_SEED_MASK = 2**64 - 1
MAX_SALT_BYTES = 128


class Runner(Protocol):
    """What the engine needs of the device half."""

    def run(self, plan: StepPlan) -> StepResult:
        """Runs one step."""
        ...


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Joins the halves.

        Args:
          tokenizer: None: prompts are token ids and answers have no text.
          seed: what requests without a seed of their own derive theirs from.
          eos_token_ids: tokens that end an answer unless `ignore_eos`.
          clock: seconds, never going back; ageing, deadlines and metrics read it.
        """
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self._seed = seed
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._live: dict[str, InFlight] = {}
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
        priority: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Checks, tokenises and queues a request.

        Args:
          cache_salt: requests with different salts never share cached pages.
          priority: smaller values run earlier; 0 unless `scheduling_policy` is "priority".
          timeout: seconds from now, > 0, after which it ends with what came so far and an error
            of code "timeout"; None: never.

        Raises:
          RequestError: it can never be served as asked, or its id is in use.
        """
        if request_id in self._live:
            raise RequestError(
                f"`request_id` must not be in use. Got {request_id!r} twice.", param="request_id"
            )
        request = self._request(
            request_id, prompt, params, cache_salt, _checked_priority(priority), timeout
        )
        detokenizers = [self._detokenizer(params) for _ in range(params.n)]
        sequences = self.scheduler.add_request(request)
        live = InFlight(request, sequences, detokenizers, self._clock)
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
            try:
                result = self.runner.run(plan)
            except BaseException:  # no result will come: what was planned is computed again
                self.scheduler.drop(plan)
                raise
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
            if live.is_finished:
                raise IntegrityError(f"request {request_id!r} ended but is still in flight.")
        if not self._live:
            self.scheduler.assert_empty()

    def _request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        cache_salt: str | None,
        priority: int,
        timeout: float | None,
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
            priority=priority,
            arrival_time=self._clock(),
            timeout=timeout,
        )

    def _token_ids(self, prompt: Any) -> tuple[int, ...]:
        if isinstance(prompt, str):
            tokenizer = self._need_tokenizer("a prompt of text", "prompt")
            return tuple(_encoded(encode_prompt, tokenizer, prompt, param="prompt"))
        if isinstance(prompt, np.ndarray):
            prompt = prompt.tolist()
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
                ids = tuple(_encoded(_encode_plain, tokenizer, text, param="bad_words"))
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
        now = self._clock()
        touched: dict[str, InFlight] = {}
        for sequence in sequences:
            live = self._live.get(sequence.request.request_id)
            if live is None:
                continue
            touched[sequence.request.request_id] = live
            try:
                stopped = live.read(sequence, now)
                if stopped is not None:
                    self.scheduler.finish(sequence, FinishReason.STOP, stop_reason=stopped)
            except Exception:
                logger.exception("request %s failed", sequence.request.request_id)
                live.error = INTERNAL_ERROR  # its sequences may have ended already
                self.scheduler.fail(sequence, INTERNAL_ERROR)
        self._end_finished(touched.values())

    def _end_finished(self, candidates: Any) -> None:
        for live in list(candidates):
            if live.is_finished:
                del self._live[live.request.request_id]
                self._ended.append(self._output(live))

    def _output(self, live: InFlight) -> RequestOutput:
        try:
            return live.output(self.tokenizer)
        except Exception:
            logger.exception("request %s failed", live.request.request_id)
            return live.failed_output()


def _checked_priority(priority: Any) -> int:
    is_int = isinstance(priority, int) and not isinstance(priority, bool)
    if not is_int or not -(2**31) <= priority < 2**31:
        raise RequestError(
            f"`priority` must be an integer in [{-(2**31)}, {2**31 - 1}]. "
            f"Got {priority if is_int and abs(priority) < 10**30 else type(priority).__name__}.",
            param="priority",
        )
    return priority


def _checked_salt(salt: Any) -> str | None:
    if salt is None:
        return None
    if not isinstance(salt, str):
        got = type(salt).__name__
    else:
        size = len(_utf8(salt, "cache_salt"))
        if 0 < size <= MAX_SALT_BYTES:
            return salt
        got = f"{size} bytes"
    raise RequestError(
        f"`cache_salt` must be a string of 1 to {MAX_SALT_BYTES} bytes. Got {got}.",
        param="cache_salt",
    )


def _utf8(text: str, param: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"`{param}` must be text that UTF-8 can hold. Got a lone surrogate at character "
            f"{error.start}.",
            param=param,
        ) from None


def _encode_plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, special_tokens=False)


def _encoded(
    encode: Callable[[Tokenizer, str], list[int]], tokenizer: Tokenizer, text: str, *, param: str
) -> list[int]:
    """Token ids of a request's text; what a tokenizer raises is that request's error alone."""
    _utf8(text, param)
    try:
        return encode(tokenizer, text)
    except RequestError:
        raise
    except Exception as error:  # a user's own tokenizer may raise anything
        raise RequestError(
            f"`{param}` must be text that the tokenizer can encode. Got {text[:40]!r}: "
            f"{type(error).__name__}: {error}.",
            param=param,
        ) from error


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
    value = prompt[given[0]]
    if given[0] == "prompt_token_ids" and not isinstance(value, list | tuple):
        raise RequestError(
            f"`prompt_token_ids` must be a list of token ids. Got {type(value).__name__}.",
            param="prompt_token_ids",
        )
    return value, prompt.get("cache_salt")
