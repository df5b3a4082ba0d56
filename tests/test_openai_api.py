"""Bodies in and bodies out: each parameter's meaning or refusal, and the shape of each answer."""

from __future__ import annotations

from typing import Any

import pytest

from pagedjax.errors import RequestError
from pagedjax.openai_api import ApiRequest, Endpoint, failure_of, parse_body, response_body
from pagedjax.openai_api.requests import HARMLESS, UNSUPPORTED, UNSUPPORTED_OF
from pagedjax.request import Logprob, RequestOutput
from tests.batch_fakes import CharTokenizer, FakeEngine

COMPLETIONS, CHAT = Endpoint.COMPLETIONS, Endpoint.CHAT
MESSAGES = [{"role": "user", "content": "hi"}]


def completion(**body: Any) -> ApiRequest:
    return parse_body(COMPLETIONS, {"prompt": "ab", **body}, {})


def chat(**body: Any) -> ApiRequest:
    return parse_body(CHAT, {"messages": MESSAGES, **body}, {})


def answer(request: ApiRequest, *prompts: str | list[int]) -> dict[str, Any]:
    engine = FakeEngine()
    outputs: list[RequestOutput] = []
    for index, prompt in enumerate(prompts or request.prompts):
        engine.add_request(str(index), prompt, request.params)
    while engine.has_unfinished:
        outputs += engine.step()
    outputs.sort(key=lambda output: int(output.request_id))
    return response_body(
        request,
        outputs,
        response_id="x",
        created=7,
        model="fake",
        tokenizer=CharTokenizer(),
    )


# ------------------------------------------------------------------------------------ parameters


def test_sampling_parameters_keep_their_names() -> None:
    given: dict[str, Any] = {
        "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "n": 2,
        "seed": 3, "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5,
        "logit_bias": {"5": 2}, "min_tokens": 1, "ignore_eos": True, "stop": "x",
        "stop_token_ids": [7], "bad_words": ["no"], "bad_token_ids": [8],
        "allowed_token_ids": [1, 2], "skip_special_tokens": False,
        "include_stop_str_in_output": True, "prompt_logprobs": 1, "logprobs": 2,
    }  # fmt: skip
    params = completion(**given).params
    shown = {name: getattr(params, name) for name in given}
    assert shown == given | {
        "stop": ("x",), "stop_token_ids": (7,), "bad_words": ("no",), "bad_token_ids": (8,),
        "allowed_token_ids": (1, 2), "logit_bias": {5: 2.0},
    }  # fmt: skip


def test_defaults_are_openai_s_then_the_model_s_then_the_request_s() -> None:
    assert completion().params.max_tokens == 16
    assert chat().params.max_tokens is None
    assert completion().params.temperature == 1.0
    own = {"temperature": 0.2, "top_p": 0.9}
    request = parse_body(COMPLETIONS, {"prompt": "a", "top_p": 0.5}, own)
    assert (request.params.temperature, request.params.top_p) == (0.2, 0.5)


def test_null_is_as_good_as_absent() -> None:
    request = completion(max_tokens=None, stop=None, seed=None, tools=None, suffix=None, n=None)
    assert request == completion()


def test_harmless_parameters_change_nothing() -> None:
    assert completion(**dict.fromkeys(HARMLESS, "x")) == completion()


@pytest.mark.parametrize("endpoint", Endpoint)
def test_unsupported_parameters_are_refused_by_name(endpoint: Endpoint) -> None:
    prompt: dict[str, Any] = {"prompt": "a"} if endpoint is COMPLETIONS else {"messages": MESSAGES}
    for name, neutral in (UNSUPPORTED | UNSUPPORTED_OF[endpoint]).items():
        for value in neutral:
            parse_body(endpoint, prompt | {name: value}, {})
        with pytest.raises(RequestError, match=f"`{name}` is not supported here") as caught:
            parse_body(endpoint, prompt | {name: {"type": "other"}}, {})
        assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize("endpoint", list(Endpoint))
@pytest.mark.parametrize(
    ("body", "width", "n"),
    [
        ({"beam_width": 4}, 4, 1),
        ({"beam_width": 4, "n": 2}, 4, 2),
        ({"use_beam_search": True, "n": 3}, 3, 3),
        ({"use_beam_search": True, "n": 2, "best_of": 5}, 5, 2),
        ({"use_beam_search": True, "beam_width": 4}, 4, 1),
        ({"use_beam_search": True}, 1, 1),
        ({"use_beam_search": False, "n": 2, "best_of": 5}, None, 2),
    ],
)
def test_beams_are_asked_for_as_here_or_as_in_vllm(
    endpoint: Endpoint, body: Any, width: int | None, n: int
) -> None:
    prompt = {"messages": MESSAGES} if endpoint is Endpoint.CHAT else {"prompt": "a"}
    params = parse_body(endpoint, prompt | body, {}).params
    assert (params.beam_width, params.n) == (width, n)
    assert params.best_of == (None if width else 5)


def test_the_models_defaults_for_draws_are_not_for_beams() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1}
    body = {"prompt": "a", "beam_width": 2, "length_penalty": 0.5, "early_stopping": "never"}
    params = parse_body(Endpoint.COMPLETIONS, body, defaults | {"min_tokens": 3}).params
    assert (params.temperature, params.top_p, params.repetition_penalty) == (0.0, 1.0, 1.0)
    assert (params.length_penalty, params.early_stopping) == (0.5, "never")
    assert params.min_tokens == 3
    drawn = parse_body(Endpoint.COMPLETIONS, {"prompt": "a"}, defaults).params
    assert (drawn.temperature, drawn.top_k) == (0.6, 50)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"temprature": 1}, "temprature", "`temprature` is not a parameter of /v1/completions"),
        ({"messages": MESSAGES}, "messages", "is not a parameter of /v1/completions"),
        ({"n": 10**9}, "n", r"`n` must be an integer in \[1, 128\]. Got 1000000000"),
        ({"n": 128, "prompt": ["a"] * 5}, "n", r"must be at most 512. Got 128 x 5"),
        ({"n": True}, "n", "`n` must be"),
        ({"best_of": 4, "n": 5}, "best_of", r"`best_of` must be at least `n` \(5\). Got 4"),
        ({"best_of": True}, "best_of", "Got True"),
        ({"best_of": 4, "temperature": 0}, "best_of", "at temperature 0"),
        ({"use_beam_search": 1}, "use_beam_search", "true or false. Got 1"),
        ({"use_beam_search": True, "n": 11}, "beam_width", r"\[1, 10\] or None. Got 11"),
        ({"use_beam_search": True, "temperature": 0.5}, "temperature", "left out or 0"),
        ({"use_beam_search": True, "beam_width": 2, "best_of": 2}, "best_of", "left out with"),
        ({"beam_width": 10, "prompt": ["a"] * 52}, "beam_width", r"at most 512. Got 10 x 52"),
        ({"length_penalty": 2.0}, "length_penalty", "left out without `beam_width`"),
        ({"early_stopping": "yes"}, "early_stopping", 'true, false or "never"'),
        ({"best_of": 128, "prompt": ["a"] * 5}, "best_of", r"must be at most 512. Got 128 x 5"),
        ({"max_tokens": 0}, "max_tokens", "`max_tokens` must be"),
        ({"max_tokens": "9"}, "max_tokens", "`max_tokens` must be"),
        ({"temperature": float("inf")}, "temperature", "`temperature` must be a finite number"),
        ({"top_p": 0}, "top_p", "`top_p` must be"),
        ({"stop": 5}, "stop", "`stop` must be"),
        ({"logprobs": True}, "logprobs", "`logprobs` must be an integer"),
        ({"logprobs": 21}, "logprobs", r"\[0, 20\]"),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": -1}, "prompt_logprobs", "Got -1"),
        ({"echo": 1}, "echo", "`echo` must be true or false. Got 1"),
        ({"return_token_ids": "yes"}, "return_token_ids", "must be true or false. Got a string"),
        ({"model": 5}, "model", "`model` must be a string. Got a number"),
        ({"cache_salt": ["a"]}, "cache_salt", "`cache_salt` must be a string. Got a list"),
        ({"prompt": None}, "prompt", "`prompt` must be text, a list .* Got nothing"),
        ({"prompt": {"a": 1}}, "prompt", "`prompt` must be text, .* Got an object"),
        ({"prompt": 5}, "prompt", "Got a number"),
        ({"prompt": ""}, "prompt", "`prompt` must not be empty"),
        ({"prompt": []}, "prompt", "`prompt` must not be empty"),
        ({"prompt": ["a", ""]}, "prompt", "`prompt` must not be empty"),
        ({"prompt": [[1], []]}, "prompt", "`prompt` must not be empty"),
        ({"prompt": [1, "a"]}, "prompt", "`prompt` must hold texts, or integer token ids"),
        ({"prompt": ["a", 1]}, "prompt", "`prompt` must hold texts, or integer token ids"),
        ({"prompt": [1, True]}, "prompt", "`prompt` must hold texts, or integer token ids"),
        ({"prompt": [1.5]}, "prompt", "`prompt` must hold texts, or integer token ids"),
        ({"prompt": ["a"] * 257}, "prompt", "`prompt` must hold at most 256 prompts. Got 257"),
    ],
)
def test_bad_completion_parameter_is_named(body: Any, param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        completion(**body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"messages": None}, "messages", "`messages` must be a list .* Got nothing"),
        ({"prompt": "a"}, "prompt", "`prompt` is not a parameter of /v1/chat/completions"),
        ({"logprobs": 2}, "logprobs", "`logprobs` must be true or false. Got 2"),
        ({"top_logprobs": 2}, "top_logprobs", "must come with `logprobs` true. Got 2"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", r"in \[0, 20\]. Got 21"),
        ({"top_logprobs": True, "logprobs": True}, "top_logprobs", "Got true"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1. Got 0"),
        ({"max_completion_tokens": 10**40}, "max_tokens", "Got a huge integer"),
        (
            {"max_completion_tokens": 5, "max_tokens": 6},
            "max_tokens",
            r"must equal .*\(5\).* Got 6",
        ),
    ],
)
def test_bad_chat_parameter_is_named(body: Any, param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        chat(**body)
    assert caught.value.param == param


@pytest.mark.parametrize("body", [[], "text", None, 5])
def test_body_must_be_an_object(body: Any) -> None:
    with pytest.raises(RequestError, match="`body` must be an object") as caught:
        parse_body(COMPLETIONS, body, {})
    assert caught.value.param == "body"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        ([1, 2], ([1, 2],)),
        (["a", "b"], ("a", "b")),
        ([[1], [2, 3]], ([1], [2, 3])),
        (["a", [2]], ("a", [2])),
    ],
)
def test_prompt_has_openai_s_four_forms(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


def test_chat_counts() -> None:
    assert chat(max_completion_tokens=5).params.max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).params.max_tokens == 5
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).params.logprobs == 3
    assert chat(logprobs=False).params.logprobs is None
    assert chat(n=3).num_sequences == 3


# --------------------------------------------------------------------------------------- answers


def test_completion_body() -> None:
    assert answer(completion(prompt="abc", max_tokens=8, model="mine")) == {
        "id": "cmpl-x",
        "object": "text_completion",
        "created": 7,
        "model": "mine",
        "choices": [
            {
                "index": 0,
                "text": "ABC",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": 0,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


def test_chat_body() -> None:
    body = answer(chat(max_tokens=2, return_token_ids=True), [104, 105])
    assert body["object"] == "chat.completion"
    assert body["id"] == "chatcmpl-x"
    assert body["model"] == "fake"
    assert body["prompt_token_ids"] == [104, 105]
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "HI"},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": [72, 73],
        }
    ]


def test_choices_of_many_prompts_count_through() -> None:
    body = answer(completion(prompt=["a", "b", "c"], n=2))
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "A"), (1, "A"), (2, "B"), (3, "B"), (4, "C"), (5, "C"),
    ]  # fmt: skip
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 6


def test_completion_logprobs_are_parallel_lists() -> None:
    logprobs = answer(completion(prompt="ab", logprobs=1))["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["A", "B"],
        "token_logprobs": [-1.0, -1.0],
        "top_logprobs": [{"B": -0.5, "A": -1.0}, {"C": -0.5, "B": -1.0}],
        "text_offset": [0, 1],
    }


def test_echo_puts_the_prompt_first() -> None:
    choice = answer(completion(prompt="ab", echo=True, logprobs=2))["choices"][0]
    assert choice["text"] == "abAB"
    assert choice["logprobs"]["tokens"] == ["a", "b", "A", "B"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0, -1.0]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][1] == {"c": -0.5, "b": -1.0}
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]


def test_echo_of_token_ids_is_their_text() -> None:
    assert answer(completion(prompt=[97, 0, 98], echo=True))["choices"][0]["text"].startswith(
        "a<eos>b"
    )


def test_echo_without_tokens_scores_the_prompt() -> None:
    request = completion(prompt="abc", echo=True, max_tokens=0, logprobs=0, return_token_ids=True)
    assert request.params.max_tokens == 1
    body = answer(request)
    choice = body["choices"][0]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([], [97, 98, 99])
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0


def test_tokens_can_be_shown_as_ids() -> None:
    request = completion(prompt="ab", echo=True, logprobs=1, return_tokens_as_token_ids=True)
    logprobs = answer(request)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:97", "token_id:98", "token_id:65", "token_id:66"]
    assert logprobs["top_logprobs"][2] == {"token_id:66": -0.5, "token_id:65": -1.0}


def test_chat_logprobs() -> None:
    request = chat(logprobs=True, top_logprobs=2, max_tokens=1)
    content = answer(request, [0xE4])["choices"][0]["logprobs"]["content"]
    assert content == [
        {
            "token": "Ä",
            "logprob": -1.0,
            "bytes": [0xC3, 0x84],
            "top_logprobs": [
                {"token": "Å", "logprob": -0.5, "bytes": [0xC3, 0x85]},
                {"token": "Ä", "logprob": -1.0, "bytes": [0xC3, 0x84]},
            ],
        }
    ]


def test_prompt_logprobs_have_vllm_s_form() -> None:
    rows = answer(completion(prompt="ab", prompt_logprobs=1))["choices"][0]["prompt_logprobs"]
    assert rows == [
        None,
        {
            "98": {"logprob": -1.0, "rank": 2, "decoded_token": "b"},
            "99": {"logprob": -0.5, "rank": 1, "decoded_token": "c"},
        },
    ]
    chat_rows = answer(chat(prompt_logprobs=0, max_tokens=1), [97, 98])["prompt_logprobs"]
    assert chat_rows == [None, {"98": {"logprob": -1.0, "rank": 2, "decoded_token": "b"}}]


def test_more_prompt_logprobs_than_logprobs_do_not_widen_the_echo() -> None:
    request = completion(prompt="ab", echo=True, logprobs=1, prompt_logprobs=5, max_tokens=1)
    choice = answer(request)["choices"][0]
    assert len(choice["prompt_logprobs"][1]) == 5
    assert choice["logprobs"]["top_logprobs"][1] == {"c": -0.5, "b": -1.0}


def test_offsets_count_shared_and_hidden_tokens() -> None:
    class Pieces(CharTokenizer):
        """Tokens 1 and 2 are the halves of one character."""

        def token_bytes(self, token_id: int) -> bytes:
            halves = {1: b"\xc3", 2: b"\xa4"}
            return halves.get(token_id) or super().token_bytes(token_id)

    request = completion(prompt=[1, 2, 0, 97], logprobs=0)
    engine = FakeEngine()
    engine.add_request("0", [1, 2, 0, 97], request.params)
    outputs: list[RequestOutput] = []
    while not outputs:
        outputs = engine.step()
    outputs[0].outputs[0].text = "äA"
    body = response_body(
        request, outputs, response_id="x", created=0, model="m", tokenizer=Pieces()
    )
    assert body["choices"][0]["logprobs"]["text_offset"] == [0, 0, 1, 1]


def test_minus_infinity_is_a_number_in_json() -> None:
    request = completion(prompt="a", logprobs=0)
    engine = FakeEngine()
    engine.add_request("0", "a", request.params)
    (output,) = engine.step()
    output.outputs[0].logprobs = [{65: Logprob(float("-inf"), 1, "A")}]
    body = response_body(
        request, [output], response_id="x", created=0, model="m", tokenizer=CharTokenizer()
    )
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ("break", "internal error"),
        ("vanish", "the request ended early (abort)"),
        ("linger", "its time is over"),
        ("fine", None),
    ],
)
def test_only_stop_and_length_are_answers(prompt: str, why: str | None) -> None:
    engine = FakeEngine()
    engine.add_request("0", prompt, completion().params)
    while not (outputs := engine.step()):
        pass
    failure = failure_of(outputs[0])
    assert (None if failure is None else failure.message) == why
    if failure is not None:
        expected = (
            (408, "timeout", "timeout") if prompt == "linger" else (500, "engine_error", None)
        )
        assert (failure.status, failure.code, failure.param) == expected
