"""Sampling parameters: what is accepted and how it is brought to one form, what is refused."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest

from pagedjax import RequestError, SamplingParams
from pagedjax.request import Request, Sequence, derived_seed

HUGE = 10**40


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("n", 0, r"integer in \[1, 128\]. Got 0"),
        ("n", 129, "Got 129"),
        ("n", True, "Got True"),
        ("n", 1.0, r"Got 1\.0"),
        ("n", None, "Got None"),
        ("n", HUGE, "Got a huge integer"),
        ("best_of", 0, r"integer in \[1, 128\] or None. Got 0"),
        ("best_of", 129, "Got 129"),
        ("beam_width", 0, r"integer in \[1, 10\] or None. Got 0"),
        ("beam_width", 11, "Got 11"),
        ("beam_width", True, "Got True"),
        ("length_penalty", math.inf, r"finite number in \[-10, 10\]. Got inf"),
        ("length_penalty", -11, "Got -11"),
        ("early_stopping", "always", "true, false or \"never\". Got 'always'"),
        ("early_stopping", 1, "Got 1"),
        ("early_stopping", None, "Got None"),
        ("max_tokens", 0, r"or None. Got 0"),
        ("max_tokens", "5", "Got '5'"),
        ("min_tokens", -1, "Got -1"),
        ("min_tokens", 17, r"at most `max_tokens` \(16\)"),
        ("top_k", -2, "Got -2"),
        ("top_k", 1.5, r"Got 1\.5"),
        ("seed", 2**64, "Got 18446744073709551616"),
        ("seed", "1", "Got '1'"),
        ("logprobs", 21, r"\[0, 20\] or None. Got 21"),
        ("logprobs", -1, "Got -1"),
        ("prompt_logprobs", True, "Got True"),
        ("temperature", -0.1, r"Got -0\.1"),
        ("temperature", math.nan, "Got nan"),
        ("temperature", math.inf, "Got inf"),
        ("temperature", "hot", "Got 'hot'"),
        ("temperature", HUGE, "Got a huge integer"),
        ("top_p", 0.0, r"finite number in \(0, 1\]"),
        ("top_p", 1.01, r"Got 1\.01"),
        ("min_p", -0.01, r"Got -0\.01"),
        ("min_p", 1.5, r"Got 1\.5"),
        ("presence_penalty", 2.1, r"\[-2, 2\]"),
        ("frequency_penalty", -2.1, r"\[-2, 2\]"),
        ("repetition_penalty", 0.0, r"Got 0\.0"),
        ("repetition_penalty", False, "Got False"),
        ("stop", 5, "string or a list of strings. Got 5"),
        ("stop", [""], "1 to 256 bytes. Got ''"),
        ("stop", ["x" * 257], "1 to 256 bytes"),
        ("stop", ["a", 3], "Got 3"),
        ("stop", ["a"] * 17, "at most 16 strings. Got 17"),
        ("bad_words", ["a"] * 257, "at most 256 strings. Got 257"),
        ("bad_words", {"a": 1}, "string or a list of strings"),
        ("stop_token_ids", [-1], "token ids >= 0. Got -1"),
        ("stop_token_ids", [True], "Got True"),
        ("stop_token_ids", "12", "list of token ids. Got '12'"),
        ("stop_token_ids", 5, "Got 5"),
        ("bad_token_ids", [2**31], "Got 2147483648"),
        ("allowed_token_ids", [], "at least one id"),
        ("allowed_token_ids", [1.0], r"Got 1\.0"),
        ("logit_bias", [1], "map at most 1024 token ids"),
        ("logit_bias", {-1: 0.0}, "Got -1: 0.0"),
        ("logit_bias", {"a": 0.0}, "Got 'a': 0.0"),
        ("logit_bias", {"²": 0.0}, "Got '²'"),
        ("logit_bias", {1: math.nan}, "Got 1: nan"),
        ("logit_bias", {1: "x"}, "Got 1: 'x'"),
        ("logit_bias", {1: True}, "Got 1: True"),
        ("logit_bias", {True: 1.0}, "Got True: 1.0"),
        ("logit_bias", dict.fromkeys(range(1025), 0.0), "at most 1024"),
        ("ignore_eos", 1, "true or false. Got 1"),
        ("detokenize", "no", "Got 'no'"),
        ("skip_special_tokens", None, "Got None"),
        ("include_stop_str_in_output", 0, "Got 0"),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert str(caught.value).startswith(f"`{name}` must")
    assert caught.value.code == "invalid_value"
    assert len(str(caught.value)) < 250


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match="`temprature` is not a sampling parameter") as caught:
        SamplingParams.from_dict({"temprature": 1})
    assert (caught.value.param, caught.value.code) == ("temprature", "unknown_parameter")
    assert "temperature" in str(caught.value)


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="`stop` must be empty when `detokenize` is False"):
        SamplingParams(stop=("x",), detokenize=False)


@pytest.mark.parametrize(
    ("values", "param", "message"),
    [
        ({"n": 3, "best_of": 2}, "best_of", r"at least `n` \(3\). Got 2"),
        ({"best_of": 2, "temperature": 0}, "best_of", r"equal `n` \(1\) at temperature 0.*Got 2"),
        ({"length_penalty": 2.0}, "length_penalty", r"without `beam_width`. Got 2\.0"),
        ({"early_stopping": True}, "early_stopping", "without `beam_width`. Got True"),
        ({"beam_width": 2, "n": 3}, "n", r"at most `beam_width` \(2\). Got 3"),
        ({"beam_width": 2, "temperature": 0.5}, "temperature", r"left out or 0 .*Got 0\.5"),
        ({"beam_width": 2, "best_of": 2}, "best_of", "with `beam_width`"),
        ({"beam_width": 2, "top_k": 2}, "top_k", "Got 2"),
        ({"beam_width": 2, "top_p": 0.5}, "top_p", r"Got 0\.5"),
        ({"beam_width": 2, "min_p": 0.5}, "min_p", "with `beam_width`"),
        ({"beam_width": 2, "presence_penalty": 1}, "presence_penalty", "with `beam_width`"),
        ({"beam_width": 2, "frequency_penalty": 1}, "frequency_penalty", "with `beam_width`"),
        ({"beam_width": 2, "repetition_penalty": 2}, "repetition_penalty", "with `beam_width`"),
        ({"beam_width": 2, "stop": "x"}, "stop", r"Got \('x',\)"),
        ({"beam_width": 2, "logit_bias": {1: 2}}, "logit_bias", "with `beam_width`"),
        ({"beam_width": 2, "allowed_token_ids": (1,)}, "allowed_token_ids", "with `beam_width`"),
        ({"beam_width": 2, "bad_words": "x"}, "bad_words", "with `beam_width`"),
        ({"beam_width": 2, "bad_token_ids": [1]}, "bad_token_ids", "with `beam_width`"),
    ],
)
def test_what_contradicts_the_choice_of_answers_is_refused_by_name(
    values: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**values)
    assert caught.value.param == param
    assert str(caught.value).startswith(f"`{param}` must")


def test_a_request_runs_as_many_sequences_as_it_chooses_from() -> None:
    assert SamplingParams(n=3).num_sequences == 3
    assert SamplingParams(n=3, best_of=5).num_sequences == 5
    assert SamplingParams(n=3, best_of=3) == SamplingParams(n=3)
    assert SamplingParams(n=2, beam_width=4).num_sequences == 4


def test_steps_report_what_the_choice_needs() -> None:
    assert SamplingParams().row_logprobs is None
    assert SamplingParams(logprobs=3).row_logprobs == 3
    assert SamplingParams(best_of=2).row_logprobs == 0
    assert SamplingParams(best_of=2, logprobs=3).row_logprobs == 3
    assert SamplingParams(beam_width=10).row_logprobs == 20


def test_beam_search_is_greedy_whatever_was_left_out() -> None:
    params = SamplingParams(
        beam_width=3, length_penalty=-1, early_stopping="never", min_tokens=2, stop_token_ids=(1,)
    )
    assert params.is_greedy
    assert isinstance(params.length_penalty, float)
    assert params == SamplingParams(
        beam_width=3,
        length_penalty=-1.0,
        early_stopping="never",
        min_tokens=2,
        stop_token_ids=(1,),
        temperature=0,
    )
    assert replace(params, n=3).temperature == 0.0


def test_values_get_one_form() -> None:
    params = SamplingParams.from_dict(
        {
            "stop": "x",
            "bad_words": ["a", "b"],
            "stop_token_ids": [3, 4],
            "allowed_token_ids": range(3),
            "logit_bias": {"7": 1000, 8: -5},
            "temperature": 1,
            "top_k": -1,
            "seed": -1,
        }
    )
    assert params.stop == ("x",)
    assert params.bad_words == ("a", "b")
    assert params.stop_token_ids == (3, 4)
    assert params.allowed_token_ids == (0, 1, 2)
    assert params.logit_bias == {7: 100.0, 8: -5.0}
    assert isinstance(params.temperature, float)
    assert (params.top_k, params.seed) == (0, None)


def test_a_tiny_temperature_is_greedy_and_a_small_one_is_raised() -> None:
    greedy = SamplingParams(temperature=9e-6, top_k=5, top_p=0.5, min_p=0.5)
    assert greedy.is_greedy
    assert (greedy.temperature, greedy.top_k, greedy.top_p, greedy.min_p) == (0.0, 0, 1.0, 0.0)
    assert SamplingParams(temperature=1e-5).temperature == 0.01
    assert SamplingParams(temperature=0.02).temperature == 0.02
    assert not SamplingParams().is_greedy


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_each_penalty_needs_counts(field: str) -> None:
    assert SamplingParams.from_dict({field: 1.5}).has_penalties
    assert not SamplingParams().has_penalties


def test_defaults_pass_through_a_dict() -> None:
    plain = SamplingParams()
    values = {field.name: getattr(plain, field.name) for field in fields(plain)}
    assert SamplingParams.from_dict(values) == plain


def test_stop_ids_are_eos_unless_ignored_and_the_asked_ones() -> None:
    def stop_ids(**values: Any) -> frozenset[int]:
        return Request(
            request_id="a",
            prompt_token_ids=(1,),
            params=SamplingParams(**values),
            arrival=0,
            seed=0,
            eos_token_ids=frozenset({2}),
        ).stop_ids

    assert stop_ids() == {2}
    assert stop_ids(stop_token_ids=(5,)) == {2, 5}
    assert stop_ids(stop_token_ids=(5,), ignore_eos=True) == {5}


def test_a_sequence_counts_its_tokens() -> None:
    request = Request(
        request_id="a", prompt_token_ids=(1, 2), params=SamplingParams(), arrival=0, seed=0
    )
    sequence = Sequence(request, 0, [1, 2, 7], num_prompt_tokens=2)
    assert (sequence.num_tokens, sequence.num_output_tokens) == (3, 1)
    sequence.output_token_ids.append(9)  # a copy
    assert sequence.output_token_ids == [7]
    assert not sequence.is_finished


def test_a_derived_seed_depends_on_the_engine_and_the_id() -> None:
    assert derived_seed(0, "a") == derived_seed(0, "a")
    seeds = {derived_seed(seed, name) for seed in (0, 1, 10) for name in ("a", "b", "0a", "\ud800")}
    assert len(seeds) == 12
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 10**400},
        {"top_p": -(10**400)},
        {"repetition_penalty": 10**5000},
        {"logit_bias": {3: 10**400}},
    ],
    ids=["temperature", "top_p", "repetition_penalty", "logit_bias"],
)
def test_a_number_too_large_for_a_float_is_refused_by_name(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(RequestError, match="finite number") as caught:
        SamplingParams(**values)
    assert caught.value.param == name
