"""The engine: joins the scheduler (host half) and the runner (device half), one step at a time.

Owns the requests that are in flight. Everything that a request brings is handled inside a boundary
of its own, so that a bad one harms nobody else.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

from pagedjax.deadlines import Deadlines
from pagedjax.errors import IntegrityError, RequestError
from pagedjax.in_flight import INTERNAL_ERROR, InFlight
from pagedjax.intake import Intake, Prompt
from pagedjax.interrupts import HeldInterrupt
from pagedjax.rates import Rates
from pagedjax.recovery import GuardedSteps, Runner
from pagedjax.request import FinishReason, RequestOutput, SamplingParams, Sequence
from pagedjax.scheduler import Scheduler
from pagedjax.throughput import ThroughputLog
from pagedjax.tokenizer import Tokenizer

logger = logging.getLogger("pagedjax")

_PREFIX_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)


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
        rates: Callable[[], Rates] | None = None,
        async_scheduling: bool = True,
    ) -> None:
        """Joins the halves.

        Args:
          tokenizer: None: prompts are token ids and answers have no text.
          seed: what requests without a seed of their own derive theirs from.
          eos_token_ids: tokens that end an answer unless `ignore_eos`.
          clock: seconds, never going back; ageing, deadlines and metrics read it.
          rates: what the runner measured; None: the scheduler keeps to its estimates.
          async_scheduling: launch each step before the last one was read.
        """
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.intake = Intake(tokenizer, seed=seed, eos_token_ids=eos_token_ids)
        self._clock = clock
        self._live: dict[str, InFlight] = {}
        self._ended: list[RequestOutput] = []
        self._deadlines = Deadlines()
        self._steps = GuardedSteps(scheduler, rates, depth=2 if async_scheduling else 1)
        self._is_read = True  # False: a step broke off, and tokens of it may not be read
        self._log = ThroughputLog(logger)

    @property
    def has_queue_room(self) -> bool:
        """False while `add_request` would refuse with "queue_full"."""
        return self.scheduler.roster.has_room

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
        label: str | None = None,
    ) -> None:
        """Checks, tokenises and queues a request.

        Args:
          cache_salt: requests with different salts never share cached pages.
          priority: smaller values run earlier; 0 unless `scheduling_policy` is "priority".
          timeout: seconds from now, > 0, after which it ends with what came so far and an error
            of code "timeout"; None: never.
          label: what the event log calls it; None: `request_id`.

        Raises:
          RequestError: it can never be served as asked, its id is in use, or (code "queue_full")
            too much waits already.
        """
        if request_id in self._live:
            raise RequestError(
                f"`request_id` must not be in use. Got {request_id!r} twice.", param="request_id"
            )
        request = self.intake.request(
            request_id,
            prompt,
            params,
            now=self._clock(),
            cache_salt=cache_salt,
            priority=priority,
            timeout=timeout,
            label=label,
        )
        detokenizers = [self.intake.detokenizer(params) for _ in range(params.num_sequences)]
        sequences = self.scheduler.add_request(request)
        live = InFlight(request, sequences, detokenizers, self._clock)
        self._live[request_id] = live
        self._deadlines.add(live)

    def step(self) -> list[RequestOutput]:
        """Launches a step and waits for the one before; returns what ended, in order of ending.

        Requests whose timeout is over end first, whether they wait or run. A step that fails is
        computed again, and a request that makes it fail ends with an error.

        Raises:
          DeviceError: the device runs no step any more. Every request in flight was ended; the
            next call returns them.
        """
        self._end_late()
        if not self._is_read:  # what was read already is not read twice
            with HeldInterrupt():
                self._advance([s for live in self._live.values() for s in live.sequences])
        self._is_read = False
        # With nobody left, what is in flight is nobody's: the next step reads it.
        advanced = self._steps.run(self.runner) if self._live else None
        if advanced is None:
            self._end_finished(self._live.values())
            if self._live and not self._ended:
                raise IntegrityError(
                    f"{len(self._live)} requests are in flight and none can be scheduled. "
                    "This is a bug in pagedjax: please report it."
                )
        else:
            with HeldInterrupt():
                self._advance(advanced)
            self._log.step(self.scheduler)
        self._is_read = True
        ended, self._ended = self._ended, []
        if not self._live and self.scheduler.events is not None:
            self.scheduler.events.flush()
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

    def reset_prefix_cache(self, *, reset_running: bool = False) -> bool:
        """Forgets all cached prefixes, pinned ones too.

        Args:
          reset_running: take their pages from the requests that run, which compute them again.

        Returns:
          False, and nothing changed, while requests use pages.
        """
        return self.scheduler.reset_prefix_cache(reset_running=reset_running)

    def pin_prefix(self, prompt: Prompt, *, cache_salt: str | None = None) -> int:
        """Keeps the full pages of a prompt in the prefix cache until `unpin_prefix`.

        What is missing of them is computed now, beside the requests in flight; those that end
        meanwhile are returned by the next `step`. Resetting the prefix cache unpins everything.

        Args:
          prompt: what requests will begin with. Of a text, the last tokens may be others when more
            text follows.
          cache_salt: of those requests.

        Returns:
          how many tokens are pinned: a whole number of pages, 0 for a shorter prompt.

        Raises:
          RequestError: the prompt is wrong, or could not be computed.
          CapacityError: what is left could not hold a request of `max_model_len` any more.
          ConfigError: there is no prefix cache.
        """
        pins = self.scheduler.pins
        prefix, salt = self.intake.prefix(prompt, cache_salt)
        prefix = pins.prefix_of(prefix)
        if not prefix:
            return 0
        pins.check(prefix, salt)
        if not pins.pin(prefix, salt):
            self._compute(prefix, salt)
            if not pins.pin(prefix, salt):
                raise RequestError("`prompt` could not be cached. Try again.", param="prompt")
        return len(prefix)

    def unpin_prefix(self, prompt: Prompt, *, cache_salt: str | None = None) -> int:
        """Takes back `pin_prefix` of the same prompt; returns how many tokens that were, or 0."""
        pins = self.scheduler.pins
        prefix, salt = self.intake.prefix(prompt, cache_salt)
        prefix = pins.prefix_of(prefix)
        return len(prefix) if pins.unpin(prefix, salt) else 0

    def check_integrity(self) -> None:
        """Raises `IntegrityError` when an invariant of pages, queues or requests is broken."""
        self.scheduler.check_integrity()
        for request_id, live in self._live.items():
            if live.is_finished:
                raise IntegrityError(f"request {request_id!r} ended but is still in flight.")
        if not self._live:
            self.scheduler.assert_empty()

    def _compute(self, prompt: tuple[int, ...], salt: str | None) -> None:
        """Runs a request of this engine's own until its prompt is in the prefix cache."""
        names = (f"prefix-{i}" for i in itertools.count())
        request_id = next(name for name in names if name not in self._live)
        self.add_request(request_id, prompt, _PREFIX_PARAMS, cache_salt=salt)
        others: list[RequestOutput] = []
        own: list[RequestOutput] = []
        try:
            while not own:
                for output in self.step():
                    (own if output.request_id == request_id else others).append(output)
        finally:
            if self.abort(request_id):  # a step raised
                self._ended = [o for o in self._ended if o.request_id != request_id]
            self._ended[:0] = others
        if own[0].error is not None:
            raise own[0].error

    def _advance(self, sequences: list[Sequence]) -> None:
        now = self._clock()
        ended: dict[str, InFlight] = {}
        for sequence in sequences:
            request_id = sequence.request.request_id
            live = self._live.get(request_id)
            if live is None:
                continue
            try:
                stopped = live.read(sequence, now)
                if stopped is not None:
                    self.scheduler.finish(sequence, FinishReason.STOP, stop_reason=stopped)
            except Exception:
                logger.exception("request %s failed", sequence.request.request_id)
                live.error = INTERNAL_ERROR  # its sequences may have ended already
                self.scheduler.fail(sequence, INTERNAL_ERROR)
            if sequence.is_finished:
                ended[request_id] = live
        self._end_finished(ended.values())

    def _end_late(self) -> None:
        late = self._deadlines.due(self._clock())
        for live in late:
            request_id = live.request.request_id
            self.scheduler.fail(request_id, live.lateness(), reason=FinishReason.TIMEOUT)
        self._end_finished(late)

    def _end_finished(self, candidates: Any) -> None:
        for live in list(candidates):
            if live.is_finished:
                del self._live[live.request.request_id]
                self._ended.append(self._output(live))

    def _output(self, live: InFlight) -> RequestOutput:
        try:
            for sequence in live.sequences:  # an interrupt may have come before its text was read
                live.read(sequence, self._clock())
            return live.output(self.tokenizer)
        except Exception:
            logger.exception("request %s failed", live.request.request_id)
            return live.failed_output()
