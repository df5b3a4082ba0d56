"""Answers of the engine as response bodies of OpenAI's API.

Owns the shapes of completions, chat completions and errors on the wire. Knows nothing of how a
request was read, nor of files, sockets or the engine.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagedjax.errors import RequestError
from pagedjax.openai_api.requests import ApiRequest, Endpoint
from pagedjax.request import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestOutput,
    TokenLogprobs,
)
from pagedjax.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON lacks

type Json = dict[str, Any]


def response_body(
    request: ApiRequest,
    outputs: Sequence[RequestOutput],
    *,
    response_id: str,
    created: int,
    model: str,
    tokenizer: Tokenizer | None,
) -> Json:
    """The body that answers `request`.

    Args:
      outputs: one for each prompt, in order, none of them failed.
      model: its name, where the caller gave none.
      tokenizer: for the text of tokens; None: they are shown as ids.
    """
    is_chat = request.endpoint is Endpoint.CHAT
    choice = _chat_choice if is_chat else _completion_choice
    body: Json = {
        "id": ("chatcmpl-" if is_chat else "cmpl-") + response_id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": request.model or model,
        "choices": [
            {"index": position * request.params.n + sample.index}
            | choice(request, output, sample, tokenizer)
            for position, output in enumerate(outputs)
            for sample in sorted(output.outputs, key=lambda sample: sample.index)
        ],
        "usage": _usage(request, outputs),
    }
    if is_chat and request.return_token_ids:
        body["prompt_token_ids"] = outputs[0].prompt_token_ids
    if is_chat and request.max_prompt_logprobs is not None:
        body["prompt_logprobs"] = _prompt_logprobs(request, outputs[0])
    return body


def error_body(
    message: str,
    *,
    param: str | None = None,
    code: str = "invalid_value",
    kind: str = "invalid_request_error",
) -> Json:
    """The body of a refusal or a failure."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a finished output is no answer, in the words of an error body."""

    message: str
    status: int = 500  # of HTTP
    code: str = "engine_error"
    param: str | None = None


def failure_of(output: RequestOutput) -> Failure | None:
    """Why a finished output cannot be shown as an answer; None when it can."""
    if isinstance(output.error, RequestError) and output.error.code == "timeout":
        return Failure(str(output.error), 408, "timeout", "timeout")
    if output.error is not None:
        return Failure(str(output.error))
    shown = (FinishReason.STOP.value, FinishReason.LENGTH.value)  # all that OpenAI's schema lists
    for sample in output.outputs:
        if sample.finish_reason not in shown:
            return Failure(f"the request ended early ({sample.finish_reason})")
    return None if output.outputs else Failure("the request ended without an answer")


def _usage(request: ApiRequest, outputs: Sequence[RequestOutput]) -> Json:
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    generated = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    if request.only_prompt:
        generated = 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _completion_choice(
    request: ApiRequest,
    output: RequestOutput,
    sample: CompletionOutput,
    tokenizer: Tokenizer | None,
) -> Json:
    text = "" if request.only_prompt else sample.text
    if request.echo:
        prompt = output.prompt
        text = (_text(output.prompt_token_ids, tokenizer) if prompt is None else prompt) + text
    choice: Json = {
        "text": text,
        "logprobs": _completion_logprobs(request, output, sample, text, tokenizer),
        **_ending(request, sample),
    }
    if request.return_token_ids:
        choice["prompt_token_ids"] = output.prompt_token_ids
    if request.max_prompt_logprobs is not None:
        choice["prompt_logprobs"] = _prompt_logprobs(request, output)
    return choice


def _chat_choice(
    request: ApiRequest,
    output: RequestOutput,
    sample: CompletionOutput,
    tokenizer: Tokenizer | None,
) -> Json:
    del output  # a chat's choice shows the answer alone; the signature is shared
    logprobs = None
    if request.max_logprobs is not None:
        logprobs = {
            "content": [_chat_token(request, *pair, tokenizer) for pair in _answer_tokens(sample)]
        }
    return {
        "message": {"role": "assistant", "content": sample.text},
        "logprobs": logprobs,
        **_ending(request, sample),
    }


def _ending(request: ApiRequest, sample: CompletionOutput) -> Json:
    if request.only_prompt:
        ending: Json = {"finish_reason": FinishReason.LENGTH.value, "stop_reason": None}
    else:
        ending = {"finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason}
    if request.return_token_ids:
        ending["token_ids"] = [] if request.only_prompt else sample.token_ids
    return ending


def _answer_tokens(sample: CompletionOutput) -> list[tuple[int, TokenLogprobs]]:
    return list(zip(sample.token_ids, sample.logprobs or [], strict=True))


def _completion_logprobs(
    request: ApiRequest,
    output: RequestOutput,
    sample: CompletionOutput,
    text: str,
    tokenizer: Tokenizer | None,
) -> Json | None:
    """Four parallel lists; the very first token of an echoed prompt has no logprob."""
    if request.max_logprobs is None:
        return None
    tokens: list[tuple[int, TokenLogprobs | None]] = []
    if request.echo:
        tokens += zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
    if not request.only_prompt:
        tokens += _answer_tokens(sample)
    hidden = request.params.skip_special_tokens
    return {
        "tokens": [_name(request, token, entry, tokenizer) for token, entry in tokens],
        "token_logprobs": [
            None if entry is None else _number(entry[token].logprob) for token, entry in tokens
        ],
        "top_logprobs": [
            None if entry is None else _top_words(request, token, entry, tokenizer)
            for token, entry in tokens
        ],
        "text_offset": _offsets([token for token, _ in tokens], len(text), hidden, tokenizer),
    }


def _offsets(
    tokens: Sequence[int], end: int, hidden: bool, tokenizer: Tokenizer | None
) -> list[int]:
    """Where in the text each token begins, in characters; `hidden`: special tokens are not in it.

    Bytes are counted, because tokens that share a character would each show one of their own.
    """
    if tokenizer is None:
        return [0] * len(tokens)
    reader = codecs.getincrementaldecoder("utf-8")("replace")
    offsets: list[int] = []
    offset = 0
    for token in tokens:
        offsets.append(min(offset, end))  # a stop string may have cut the text
        if not (hidden and token in tokenizer.special_ids):
            offset += len(reader.decode(tokenizer.token_bytes(token)))
    return offsets


def _top_words(
    request: ApiRequest, token: int, entry: TokenLogprobs, tokenizer: Tokenizer | None
) -> Json:
    """The likeliest tokens and the one that was taken; of equal words the likelier one stays."""
    top: Json = {}
    for key, logprob in [*_likeliest(entry, request.max_logprobs or 0), (token, entry[token])]:
        top.setdefault(_name(request, key, entry, tokenizer), _number(logprob.logprob))
    return top


def _chat_token(
    request: ApiRequest, token: int, entry: TokenLogprobs, tokenizer: Tokenizer | None
) -> Json:
    def shown(key: int) -> Json:
        return {
            "token": _name(request, key, entry, tokenizer),
            "logprob": _number(entry[key].logprob),
            "bytes": None if tokenizer is None else list(tokenizer.token_bytes(key)),
        }

    top = [shown(key) for key, _ in _likeliest(entry, request.max_logprobs or 0)]
    return {**shown(token), "top_logprobs": top}


def _name(
    request: ApiRequest, token: int, entry: TokenLogprobs | None, tokenizer: Tokenizer | None
) -> str:
    """How a token is shown: its text, or its id where ids are asked for or there is no text."""
    if request.tokens_as_ids or tokenizer is None:
        return f"token_id:{token}"
    word = None if entry is None else entry[token].decoded_token
    return tokenizer.token_text(token) if word is None else word


def _text(tokens: Sequence[int], tokenizer: Tokenizer | None) -> str:
    return "" if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=False)


def _prompt_logprobs(request: ApiRequest, output: RequestOutput) -> list[Json | None]:
    """vLLM's form: for each prompt token but the first, token id -> logprob, rank, text."""
    entries: list[Json | None] = []
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
    for token, entry in pairs:
        if entry is None:
            entries.append(None)
            continue
        kept = {token: entry[token], **dict(_likeliest(entry, request.max_prompt_logprobs or 0))}
        entries.append(
            {
                str(key): {
                    "logprob": _number(logprob.logprob),
                    "rank": logprob.rank,
                    "decoded_token": logprob.decoded_token,
                }
                for key, logprob in kept.items()
            }
        )
    return entries


def _likeliest(entry: TokenLogprobs, count: int) -> list[tuple[int, Logprob]]:
    """The `count` likeliest of an entry, which also holds the token that was taken."""
    return sorted(entry.items(), key=lambda item: -item[1].logprob)[:count]


def _number(logprob: float) -> float:
    if math.isnan(logprob):
        raise ValueError("a logprob is not a number")
    return max(logprob, LOWEST_LOGPROB)
