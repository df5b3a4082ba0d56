"""What a caller asks (`SamplingParams`, `Request`), a live token stream, and what is answered.

All checks of sampling parameters live in the one constructor that library, batch and HTTP use.
Knows nothing of pages, scheduling or devices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from typing import Any, Literal

from pagedjax.errors import RequestError
from pagedjax.param_checks import MAX_LOGIT_BIAS as MAX_LOGIT_BIAS  # the width of bias rows
from pagedjax.param_checks import (
    check_bias,
    check_bool,
    check_float,
    check_ids,
    check_int,
    check_strings,
    shown,
)

MAX_N = 128  # OpenAI's cap on parallel samples
MAX_BEAM_WIDTH = 10  # a lane offers twice as many tokens, and a step reports MAX_LOGPROBS
MAX_LOGPROBS = 20  # OpenAI's cap on top_logprobs
MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 256
GREEDY_BELOW = 1e-5  # temperatures below this are greedy
LOWEST_TEMPERATURE = 0.01  # sampled temperatures below this are raised to it (overflow in f32)


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"  # eos, a stop token id or a stop string
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"  # cancelled by the caller
    ERROR = "error"  # this request failed; the message says why
    TIMEOUT = "timeout"  # its `timeout` was over


class SequenceStatus(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one request; names and meanings as in vLLM. Raises `RequestError`.

    Attributes:
      n: samples of the prompt, 1..128; with beam search at most beam_width.
      best_of: None, or how many samples to draw, n..128: the n with the highest mean logprob a
        token are returned, best first. Equal to n it chooses nothing.
      beam_width: None, or 1..10: beam search with so many beams; the n best are returned, best
        first. It draws nothing, so temperature must be left out or 0 and what shapes draws or
        text must be left out; min_tokens, stop_token_ids and ignore_eos hold.
      length_penalty: a beam's score is its logprob / tokens ** length_penalty, [-10, 10]; larger
        values favour longer answers.
      early_stopping: True: stop when beam_width beams ended; False: when, by its score so far, no
        open beam can beat them; "never": when none can at any length.
      temperature: >= 0; below 1e-5 is greedy.
      top_k: keep the k likeliest tokens; 0 or -1: off.
      top_p: keep the smallest set of likeliest tokens with this mass, (0, 1].
      min_p: drop tokens less likely than this fraction of the likeliest, [0, 1].
      presence_penalty, frequency_penalty: [-2, 2], over generated tokens.
      repetition_penalty: > 0, over prompt and generated tokens; > 1 discourages.
      seed: draws depend on it, the sample index and the position only; None or -1: chosen by
        the engine from its own seed and the request id.
      stop: strings that end the text and are cut off it (see include_stop_str_in_output).
      stop_token_ids: token ids that end the sequence; they stay in its token ids.
      include_stop_str_in_output: keep the stop string at the end of the text.
      ignore_eos: go on after an end-of-sequence token.
      max_tokens: >= 1; None: as many as fit in max_model_len.
      min_tokens: eos, stop ids and stop strings are not taken before so many tokens.
      logprobs: None, or the number of likeliest tokens to report, 0..20 (the sampled token is
        always reported then). They are of the raw logits.
      prompt_logprobs: the same for every prompt token but the first.
      logit_bias: token id -> value in [-100, 100] added to its logit.
      allowed_token_ids: only these are sampled.
      bad_words: strings that are never generated.
      bad_token_ids: token ids that are never generated.
      detokenize: make text; False leaves it empty (stop strings then raise).
      skip_special_tokens: leave special tokens out of the text.
    """

    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_token_ids: tuple[int, ...] = ()
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Checks every field and brings it to its canonical form."""
        self._check_counts()
        self._check_floats()
        self._check_strings()
        self._check_token_ids()
        if self.temperature < GREEDY_BELOW:
            self._set(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
        elif self.temperature < LOWEST_TEMPERATURE:
            self._set(temperature=LOWEST_TEMPERATURE)
        if self.seed == -1:
            self._set(seed=None)
        if self.top_k == -1:
            self._set(top_k=0)
        self._check_choice()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Builds from names and values; an unknown name raises, naming it."""
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise RequestError(
                    f"`{name}` is not a sampling parameter. Known: {', '.join(sorted(known))}.",
                    param=str(name),
                    code="unknown_parameter",
                )
        return cls(**values)

    @property
    def is_greedy(self) -> bool:
        """True when the likeliest token is taken."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """True when a penalty needs the counts of tokens so far."""
        neutral = (0.0, 0.0, 1.0)
        own = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return own != neutral

    @property
    def num_sequences(self) -> int:
        """Sequences that run for one prompt; n of them are returned."""
        return self.beam_width or self.best_of or self.n

    @property
    def row_logprobs(self) -> int | None:
        """Likeliest tokens that a step must report for these parameters; 0: the drawn one alone."""
        if self.beam_width is not None:
            return MAX_LOGPROBS
        return 0 if self.logprobs is None and self.best_of is not None else self.logprobs

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_counts(self) -> None:
        check_int(self, "n", 1, MAX_N)
        check_int(self, "best_of", 1, MAX_N, optional=True)
        check_int(self, "beam_width", 1, MAX_BEAM_WIDTH, optional=True)
        check_int(self, "top_k", -1, 2**31 - 1)
        check_int(self, "max_tokens", 1, 2**31 - 1, optional=True)
        check_int(self, "min_tokens", 0, 2**31 - 1)
        check_int(self, "seed", -(2**63), 2**64 - 1, optional=True)
        check_int(self, "logprobs", 0, MAX_LOGPROBS, optional=True)
        check_int(self, "prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize"):
            check_bool(self, name)
        check_bool(self, "skip_special_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"`min_tokens` must be at most `max_tokens` ({self.max_tokens}). "
                f"Got {self.min_tokens}.",
                param="min_tokens",
            )

    def _check_floats(self) -> None:
        check_float(self, "temperature", 0.0, 100.0)
        check_float(self, "top_p", 0.0, 1.0, above_low=True)
        check_float(self, "min_p", 0.0, 1.0)
        check_float(self, "presence_penalty", -2.0, 2.0)
        check_float(self, "frequency_penalty", -2.0, 2.0)
        check_float(self, "repetition_penalty", 0.0, 100.0, above_low=True)
        check_float(self, "length_penalty", -10.0, 10.0)

    def _check_strings(self) -> None:
        for name, most in (("stop", MAX_STOP_STRINGS), ("bad_words", MAX_BAD_WORDS)):
            self._set(**{name: check_strings(getattr(self, name), name, most)})
        if self.stop and not self.detokenize:
            raise RequestError(
                "`stop` must be empty when `detokenize` is False. Got stop strings: "
                "they are looked for in the text.",
                param="stop",
            )

    def _check_choice(self) -> None:
        """Which sequences are returned: of n samples, of best_of samples or of beams."""
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise RequestError(
                f'`early_stopping` must be true, false or "never". '
                f"Got {shown(self.early_stopping)}.",
                param="early_stopping",
            )
        if self.beam_width is not None:
            _check_beams(self)
            self._set(temperature=0.0)
            return
        for name in ("length_penalty", "early_stopping"):
            if getattr(self, name) != _DEFAULTS[name]:
                raise RequestError(
                    f"`{name}` must be left out without `beam_width`. "
                    f"Got {shown(getattr(self, name))}.",
                    param=name,
                )
        if self.best_of is not None:
            _check_best_of(self)
            if self.best_of == self.n:
                self._set(best_of=None)

    def _check_token_ids(self) -> None:
        for name in ("stop_token_ids", "bad_token_ids"):
            self._set(**{name: check_ids(getattr(self, name) or (), name)})
        if self.allowed_token_ids is not None:
            allowed = check_ids(self.allowed_token_ids, "allowed_token_ids")
            if not allowed:
                raise RequestError(
                    "`allowed_token_ids` must be None or hold at least one id. Got none.",
                    param="allowed_token_ids",
                )
            self._set(allowed_token_ids=allowed)
        self._set(logit_bias=check_bias(self.logit_bias))


_DEFAULTS = {
    f.name: f.default if f.default_factory is MISSING else f.default_factory()
    for f in fields(SamplingParams)
}
# What beam search does not take into account; a request that sets one of them is refused.
_WITHOUT_BEAMS = (
    "best_of", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "stop", "logit_bias", "allowed_token_ids", "bad_words", "bad_token_ids",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """An immutable ask, checked, tokenised and stamped; it has `params.num_sequences` sequences."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival: int  # order of arrival, unique; ties cannot happen
    seed: int  # unsigned 64 bit; what every draw of this request depends on
    eos_token_ids: frozenset[int] = frozenset()
    bad_sequences: tuple[tuple[int, ...], ...] = ()  # bad_words as token ids, each non-empty
    cache_salt: str | None = None  # requests with different salts never share cached pages
    prompt: str | None = None  # the text, when the caller gave text
    priority: int = 0  # smaller values run earlier, under the policy that looks at it
    arrival_time: float = 0.0  # seconds on the engine's clock
    timeout: float | None = None  # seconds from arrival after which it ends as it is
    label: str | None = None  # what the event log calls it, where that is not its id

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end a sequence (eos unless ignored, and stop_token_ids)."""
        eos = frozenset[int]() if self.params.ignore_eos else self.eos_token_ids
        return eos | frozenset(self.params.stop_token_ids)


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's logprob under the raw logits; rank 1 is the likeliest."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


type TokenLogprobs = dict[int, Logprob]  # the chosen token first, then the likeliest, best first


@dataclass(slots=True, eq=False)
class Sequence:
    """A live token stream of a request. The scheduler alone changes it.

    `tokens[: num_prompt_tokens]` is the prompt; `tokens[: num_computed_tokens]` have keys and
    values in pages. `epoch` grows whenever results in flight become void (preemption, abort).
    """

    request: Request
    sample: int  # index within the request, 0..num_sequences-1
    tokens: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # got from the prefix cache at the first admission
    epoch: int = 0
    slot: int | None = None  # row of the decode batch, held while running
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id or string that ended it
    error: str | None = None  # why, when finish_reason is ERROR or TIMEOUT
    num_preemptions: int = 0
    output_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    cumulative_logprob: float = 0.0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list[TokenLogprobs | None])

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Generated token ids (a copy)."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        """True once it has a finish reason."""
        return self.status is SequenceStatus.FINISHED


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One sample's answer."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None  # given with logprobs, best_of and beam search
    score: float | None = None  # of beam search: what the beams are ranked by
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None  # a FinishReason's value
    stop_reason: int | str | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A request's answer: `outputs` has one entry a sample; `error` is set when it failed."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    error: Exception | None = None  # a RequestError for a bad prompt or parameter
    metrics: dict[str, float] = field(default_factory=dict[str, float])


def derived_seed(engine_seed: int, request_id: str) -> int:
    """Unsigned 64-bit seed of a request that gave none: SHA-256 of the engine's seed and its id."""
    digest = hashlib.sha256(f"{engine_seed}\0{request_id}".encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest()[:8], "big")


def _check_beams(params: SamplingParams) -> None:
    if params.n > (params.beam_width or 0):
        raise RequestError(
            f"`n` must be at most `beam_width` ({params.beam_width}). Got {params.n}.", param="n"
        )
    if params.temperature not in (0.0, _DEFAULTS["temperature"]):
        raise RequestError(
            f"`temperature` must be left out or 0 with `beam_width`: beam search draws nothing. "
            f"Got {params.temperature:g}.",
            param="temperature",
        )
    for name in _WITHOUT_BEAMS:
        if getattr(params, name) != _DEFAULTS[name]:
            raise RequestError(
                f"`{name}` must be left out with `beam_width`: beam search ranks by the model's "
                f"own logprobs. Got {shown(getattr(params, name))}.",
                param=name,
            )


def _check_best_of(params: SamplingParams) -> None:
    if (params.best_of or 0) < params.n:
        raise RequestError(
            f"`best_of` must be at least `n` ({params.n}). Got {params.best_of}.", param="best_of"
        )
    if params.is_greedy and params.best_of != params.n:
        raise RequestError(
            f"`best_of` must equal `n` ({params.n}) at temperature 0, where all samples are the "
            f"same. Got {params.best_of}.",
            param="best_of",
        )
