"""The door: what a caller gives becomes a checked, tokenised `Request`, or a `RequestError`.

Owns the checks of prompts, salts, priorities and timeouts, and what the tokenizer makes of a
request's texts. Knows nothing of scheduling, pages or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pagedjax.detokenizer import Detokenizer
from pagedjax.errors import RequestError
from pagedjax.request import Request, SamplingParams, derived_seed
from pagedjax.tokenizer import Tokenizer, encode_prompt

type Prompt = str | list[int] | tuple[int, ...] | np.ndarray[Any, Any]

_SEED_MASK = 2**64 - 1
MAX_SALT_BYTES = 128
MAX_TIMEOUT = 1e9  # seconds


class Intake:
    """Makes requests and what turns their tokens into text."""

    def __init__(
        self, tokenizer: Tokenizer | None, *, seed: int = 0, eos_token_ids: frozenset[int]
    ) -> None:
        """For an engine.

        Args:
          tokenizer: None: prompts are token ids and answers have no text.
          seed: what requests without a seed of their own derive theirs from.
          eos_token_ids: tokens that end an answer unless `ignore_eos`.
        """
        self.tokenizer = tokenizer
        self._seed = seed
        self._eos_token_ids = eos_token_ids
        self._num_made = 0

    def request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        now: float,
        cache_salt: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        label: str | None = None,
    ) -> Request:
        """A request that arrives at `now`, in seconds.

        Raises:
          RequestError: naming the argument that is wrong.
        """
        text = prompt if isinstance(prompt, str) else None
        seed = params.seed
        if seed is None:
            seed = derived_seed(self._seed, request_id)
        self._num_made += 1
        return Request(
            request_id=request_id,
            prompt_token_ids=self.token_ids(prompt),
            params=params,
            arrival=self._num_made,
            seed=seed & _SEED_MASK,
            eos_token_ids=self._eos_token_ids,
            bad_sequences=self._bad_sequences(params),
            cache_salt=checked_salt(cache_salt),
            prompt=text,
            priority=checked_priority(priority),
            arrival_time=now,
            timeout=checked_timeout(timeout),
            label=label,
        )

    def prefix(self, prompt: Prompt, cache_salt: str | None) -> tuple[tuple[int, ...], str | None]:
        """Checked token ids and salt of what requests will begin with; raises `RequestError`."""
        return self.token_ids(prompt), checked_salt(cache_salt)

    def token_ids(self, prompt: Any) -> tuple[int, ...]:
        """Token ids of a prompt in any of its forms; raises `RequestError`."""
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

    def detokenizer(self, params: SamplingParams) -> Detokenizer | None:
        """For one sample of a request; None when no text is wanted or there is no tokenizer."""
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


def checked_priority(priority: Any) -> int:
    """The priority of a request; raises `RequestError`."""
    is_int = isinstance(priority, int) and not isinstance(priority, bool)
    if not is_int or not -(2**31) <= priority < 2**31:
        raise RequestError(
            f"`priority` must be an integer in [{-(2**31)}, {2**31 - 1}]. "
            f"Got {priority if is_int and abs(priority) < 10**30 else type(priority).__name__}.",
            param="priority",
        )
    return priority


def checked_timeout(timeout: Any) -> float | None:
    """Seconds that a request may take; raises `RequestError`."""
    if timeout is None:
        return None
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if is_number and 0.0 < timeout <= MAX_TIMEOUT:
        return float(timeout)
    is_short = isinstance(timeout, float) or (is_number and abs(timeout) < 10**30)
    raise RequestError(
        f"`timeout` must be seconds in (0, {MAX_TIMEOUT:g}] or None. "
        f"Got {timeout if is_short else type(timeout).__name__}.",
        param="timeout",
    )


def checked_salt(salt: Any) -> str | None:
    """The cache salt of a request; raises `RequestError`."""
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
