"""A request body of OpenAI's API, and what it asks of the engine.

Owns the names and bounds of the parameters of `/v1/completions` and `/v1/chat/completions`. A
known parameter that is not supported is refused by name, never ignored. Knows nothing of answers,
files, sockets, tokenizers or the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pagedjax.errors import RequestError
from pagedjax.request import MAX_LOGPROBS, SamplingParams

MAX_PROMPTS = 256  # prompts of one request ...
MAX_SEQUENCES = 512  # ... and prompts x n, checked before anything is expanded
DEFAULT_MAX_TOKENS = 16  # of completions, as OpenAI documents it

type Json = dict[str, Any]


class Endpoint(Enum):
    """The two requests that are understood."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


# Parameters that go to SamplingParams under their own names.
SAMPLING = frozenset({
    "allowed_token_ids", "bad_token_ids", "bad_words", "beam_width", "best_of", "early_stopping",
    "frequency_penalty", "ignore_eos", "include_stop_str_in_output", "length_penalty", "logit_bias",
    "max_tokens", "min_p", "min_tokens", "n", "presence_penalty", "prompt_logprobs",
    "repetition_penalty", "seed", "skip_special_tokens", "stop", "stop_token_ids", "temperature",
    "top_k", "top_p",
})  # fmt: skip

# Those that shape draws: a model's defaults for them say nothing to a beam search.
OF_DRAWS = frozenset({
    "frequency_penalty", "min_p", "presence_penalty", "repetition_penalty", "temperature", "top_k",
    "top_p",
})  # fmt: skip

# Parameters that are read here.
OWN = frozenset({
    "cache_salt", "logprobs", "model", "priority", "return_token_ids",
    "return_tokens_as_token_ids", "timeout", "use_beam_search",
})  # fmt: skip
OWN_OF = {
    Endpoint.COMPLETIONS: frozenset({"echo", "prompt"}),
    Endpoint.CHAT: frozenset({"max_completion_tokens", "messages", "top_logprobs"}),
}

# Parameters that change no answer: notes of the caller's, and hints to OpenAI's own service.
HARMLESS = frozenset({
    "metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user",
})  # fmt: skip

# Known and not supported -> the values that ask for nothing (null never asks for anything).
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "stream": (False,),
    "stream_options": (),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
}
UNSUPPORTED_OF: dict[Endpoint, dict[str, tuple[Any, ...]]] = {
    Endpoint.COMPLETIONS: {"add_special_tokens": (True,), "suffix": ("",)},
    Endpoint.CHAT: {
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),
        "audio": (),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "reasoning_effort": (),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": (),
        "web_search_options": (),
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """One checked request body; its prompts are not tokenised yet.

    Attributes:
      prompts: texts or token ids; empty for a chat.
      messages: of a chat, not checked yet; None for completions.
      model: the name that the caller gave, or None.
      max_logprobs: likeliest tokens to show beside each token; None: no logprobs at all.
      echo: completions: the prompt comes before the answer.
      priority: smaller values run earlier, where the engine orders by priority.
      timeout: seconds that each prompt may take, or None: as the server has it.
      only_prompt: with `echo` and `max_tokens` 0: the one token that is generated is not shown.
    """

    endpoint: Endpoint
    prompts: tuple[str | list[int], ...]
    messages: Any
    params: SamplingParams
    model: str | None
    cache_salt: str | None
    max_logprobs: int | None
    max_prompt_logprobs: int | None
    echo: bool
    only_prompt: bool
    return_token_ids: bool
    tokens_as_ids: bool
    priority: int = 0
    timeout: float | None = None

    @property
    def num_sequences(self) -> int:
        """Sequences that the request becomes."""
        return max(1, len(self.prompts)) * self.params.num_sequences


def parse_body(endpoint: Endpoint, body: Any, defaults: Mapping[str, Any]) -> ApiRequest:
    """Reads a request body.

    Args:
      body: a parsed JSON document.
      defaults: sampling parameters of the model's own, for those that the body leaves out.

    Raises:
      RequestError: naming the parameter that is wrong, unknown or not supported.
    """
    if not isinstance(body, dict):
        raise RequestError(f"`body` must be an object. Got {_kind(body)}.", param="body")
    given = {name: value for name, value in body.items() if value is not None}
    _refuse_unknown(endpoint, given)
    is_chat = endpoint is Endpoint.CHAT
    max_logprobs = _chat_logprobs(given) if is_chat else given.get("logprobs")
    echo = _flag(given, "echo")
    only_prompt = echo and _is_int(given.get("max_tokens")) and given["max_tokens"] == 0
    values = {"max_tokens": None if is_chat else DEFAULT_MAX_TOKENS, **_sampling(given, defaults)}
    values |= {"logprobs": max_logprobs}
    if "max_completion_tokens" in given:
        values["max_tokens"] = _max_completion_tokens(given)
    if only_prompt:
        values["max_tokens"] = 1
    if echo and max_logprobs is not None:
        values["prompt_logprobs"] = _larger(given.get("prompt_logprobs"), max_logprobs)
    params = SamplingParams.from_dict(values)
    request = ApiRequest(
        endpoint=endpoint,
        prompts=() if is_chat else _prompts(given.get("prompt")),
        messages=_messages(given.get("messages")) if is_chat else None,
        params=params,
        model=_string(given, "model"),
        cache_salt=_string(given, "cache_salt"),
        max_logprobs=max_logprobs,
        max_prompt_logprobs=given.get("prompt_logprobs"),
        echo=echo,
        only_prompt=only_prompt,
        return_token_ids=_flag(given, "return_token_ids"),
        tokens_as_ids=_flag(given, "return_tokens_as_token_ids"),
        priority=given.get("priority", 0),  # these two are checked by the engine, which says how
        timeout=given.get("timeout"),
    )
    _check_totals(request)
    return request


def _sampling(given: Json, defaults: Mapping[str, Any]) -> Json:
    """Sampling parameters as the body gives them, over the defaults.

    `use_beam_search` is vLLM's way to ask for beams: `best_of` is then their number, or `n`.
    """
    own = {name: given[name] for name in SAMPLING if name in given}
    if _flag(given, "use_beam_search") and "beam_width" not in own:
        own["beam_width"] = own.pop("best_of", own.get("n", 1))
    if "beam_width" in own:
        defaults = {name: value for name, value in defaults.items() if name not in OF_DRAWS}
    return {**defaults, **own}


def _refuse_unknown(endpoint: Endpoint, given: Json) -> None:
    unsupported = UNSUPPORTED | UNSUPPORTED_OF[endpoint]
    known = SAMPLING | OWN | OWN_OF[endpoint] | HARMLESS
    for name, value in given.items():
        if name in unsupported:
            if value not in unsupported[name]:
                raise RequestError(
                    f"`{name}` is not supported here. Leave it out.",
                    param=name,
                    code="unsupported_parameter",
                )
        elif name not in known:
            raise RequestError(
                f"`{_short(name)}` is not a parameter of {endpoint.value}.",
                param=_short(name),
                code="unknown_parameter",
            )


def _prompts(value: Any) -> tuple[str | list[int], ...]:
    """The prompts that one `prompt` stands for: text, token ids, or a list of either."""
    if isinstance(value, str) or (isinstance(value, list) and value and _is_int(value[0])):
        value = [value]
    if not isinstance(value, list):
        raise RequestError(
            f"`prompt` must be text, a list of token ids, or a list of these. Got {_kind(value)}.",
            param="prompt",
            code="missing_required_parameter" if value is None else "invalid_value",
        )
    if len(value) > MAX_PROMPTS:
        raise RequestError(
            f"`prompt` must hold at most {MAX_PROMPTS} prompts. Got {len(value)}.", param="prompt"
        )
    if not value or not all(value):
        raise RequestError("`prompt` must not be empty. Got no text or token ids.", param="prompt")
    for prompt in value:
        is_ids = isinstance(prompt, list) and all(_is_int(token) for token in prompt)
        if not is_ids and not isinstance(prompt, str):
            raise RequestError(
                "`prompt` must hold texts, or integer token ids, and nothing else.", param="prompt"
            )
    return tuple(value)


def _messages(value: Any) -> Any:
    """The messages as they came: whoever applies the chat template checks them."""
    if value is None:
        raise RequestError(
            "`messages` must be a list of at least one message. Got nothing.",
            param="messages",
            code="missing_required_parameter",
        )
    return value


def _chat_logprobs(given: Json) -> int | None:
    """Chats say whether with `logprobs` and how many with `top_logprobs`."""
    wanted = _flag(given, "logprobs")
    top = given.get("top_logprobs", 0)
    if not _is_int(top) or not 0 <= top <= MAX_LOGPROBS:
        raise RequestError(
            f"`top_logprobs` must be an integer in [0, {MAX_LOGPROBS}]. Got {_shown(top)}.",
            param="top_logprobs",
        )
    if top and not wanted:
        raise RequestError(
            f"`top_logprobs` must come with `logprobs` true. Got {top} without it.",
            param="top_logprobs",
        )
    return top if wanted else None


def _max_completion_tokens(given: Json) -> Any:
    value = given["max_completion_tokens"]
    if not _is_int(value) or value < 1:
        raise RequestError(
            f"`max_completion_tokens` must be an integer of at least 1. Got {_shown(value)}.",
            param="max_completion_tokens",
        )
    if given.get("max_tokens", value) != value:
        raise RequestError(
            f"`max_tokens` must equal `max_completion_tokens` ({_shown(value)}), its newer name, "
            f"when both are given. Got {_shown(given['max_tokens'])}.",
            param="max_tokens",
        )
    return value


def _check_totals(request: ApiRequest) -> None:
    count = request.params.num_sequences
    if request.num_sequences > MAX_SEQUENCES:
        name = "beam_width" if request.params.beam_width else "best_of"
        name = "n" if count == request.params.n else name
        raise RequestError(
            f"`{name}` times the number of prompts must be at most {MAX_SEQUENCES}. "
            f"Got {count} x {len(request.prompts)}.",
            param=name,
        )


def _flag(given: Json, name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise RequestError(f"`{name}` must be true or false. Got {_shown(value)}.", param=name)
    return value


def _string(given: Json, name: str) -> str | None:
    value = given.get(name)
    if value is not None and not isinstance(value, str):
        raise RequestError(f"`{name}` must be a string. Got {_kind(value)}.", param=name)
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _larger(first: Any, second: Any) -> Any:
    """The larger of two counts; a bad one comes back as it is, to be refused by name."""
    if first is None or not _is_int(second):
        return second
    return max(first, second) if _is_int(first) and 0 <= first <= MAX_LOGPROBS else first


def _kind(value: Any) -> str:
    """What a JSON value is, in JSON's words."""
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    if value is None:
        return "nothing"
    if isinstance(value, list | dict) and not value:
        return "an empty list" if isinstance(value, list) else "an empty object"
    return kinds.get(type(value), "a list" if isinstance(value, list) else "an object")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if _is_int(value):
        return str(value) if abs(value) < 10**30 else "a huge integer"
    return str(value) if isinstance(value, float) else _kind(value)


def _short(name: str) -> str:
    return name if len(name) <= 64 else name[:61] + "..."
