"""The engine end to end on a tiny model: rules of answers, of ends, of failures, of randomness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pagedjax import RequestError, SamplingParams
from pagedjax import intake as intake_module
from pagedjax.detokenizer import Detokenizer
from pagedjax.errors import IntegrityError
from pagedjax.plan import StepPlan, StepResult
from pagedjax.request import RequestOutput
from tests.helpers import (
    MAX_LEN,
    VOCAB,
    ByteTokenizer,
    dense_greedy,
    dense_logits_fn,
    dense_logprobs,
)
from tests.test_runner import compilations
from tests.tiny_engine import (
    answer,
    answers,
    drain,
    tiny_engine,
    tiny_llm,
    tokens_of,
    until_interrupted,
)

PROMPT = [3, 9, 27, 1, 14, 5, 30]


def greedy(max_tokens: int | None = 20, *, ignore_eos: bool = True, **values: Any) -> Any:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos, **values)


# -------------------------------------------------------------------------- the dense reference


def dense_adjusted(
    prompt: list[int],
    params: SamplingParams,
    *,
    stop_ids: Sequence[int] = (),
    bad: Sequence[Sequence[int]] = (),
) -> list[int]:
    """Greedy answer in float64 with every adjustment written out, by recomputing densely."""
    tokens = list(prompt)
    assert params.max_tokens is not None
    for num_output in range(params.max_tokens):
        padded = np.zeros(MAX_LEN, np.int32)
        padded[: len(tokens)] = tokens
        logits = np.asarray(dense_logits_fn()(padded), np.float64)[len(tokens) - 1].copy()
        output = tokens[len(prompt) :]
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        seen = sorted(set(tokens))
        penalty = params.repetition_penalty
        scaled = np.where(logits > 0, logits / penalty, logits * penalty)
        logits[seen] = scaled[seen]
        for token, count in Counter(output).items():
            logits[token] -= params.frequency_penalty * count + params.presence_penalty
        banned = set(params.bad_token_ids)
        if params.allowed_token_ids is not None:
            banned |= set(range(VOCAB)) - set(params.allowed_token_ids)
        if num_output < params.min_tokens:
            banned |= set(stop_ids)
        for word in bad:
            if len(word) == 1 or output[1 - len(word) :] == list(word[:-1]):
                banned.add(word[-1])
        logits[sorted(banned)] = -np.inf
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "values",
    [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 1.5, "frequency_penalty": 0.8},
        {"presence_penalty": -1.5, "frequency_penalty": -2.0},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 1.9},
        {"logit_bias": {4: 3.0, 11: -100.0, 20: 2.5}},
        {"logit_bias": {7: 100.0}, "frequency_penalty": 2.0},
        {"allowed_token_ids": (2, 5, 8, 11, 17)},
        {"bad_token_ids": (1, 4, 19, 25, 27, 31)},
        {"allowed_token_ids": (2, 5, 8), "bad_token_ids": (5,), "repetition_penalty": 2.0},
    ],
)
def test_adjusted_answers_equal_a_dense_reference(values: dict[str, Any]) -> None:
    """Alone, then with all its rows shared with others, on slots that others used before."""
    params = greedy(24, **values)
    expected = dense_adjusted(PROMPT, params)
    assert expected != dense_greedy(PROMPT, 24)
    engine = tiny_engine()
    assert tokens_of(answer(engine, PROMPT, params)) == expected
    crowd = {f"other{i}": ([i, 2, 3], greedy(9, presence_penalty=1.0)) for i in range(5)}
    outputs = answers(engine, {**crowd, "mine": (PROMPT, params)})
    assert tokens_of(outputs["mine"]) == expected


def test_bad_words_never_come() -> None:
    plain = tokens_of(answer(tiny_engine(), PROMPT, greedy(24)))
    tokenizer = ByteTokenizer()
    one, two = tokenizer.decode(plain[4:5]), tokenizer.decode(plain[8:11])
    params = greedy(24, bad_words=(one, two))
    bad = [tokenizer.encode(text) for word in (one, two) for text in (word, " " + word)]
    expected = dense_adjusted(PROMPT, params, bad=bad)
    output = answer(tiny_engine(), PROMPT, params)
    assert tokens_of(output) == expected
    assert one not in output.outputs[0].text
    assert two not in output.outputs[0].text


def test_penalties_hold_through_preemption() -> None:
    params = greedy(40, repetition_penalty=1.4, frequency_penalty=0.9)
    prompts = {str(i): ([i, *PROMPT, *range(20)], params) for i in range(6)}
    engine = tiny_engine(num_pages=40)
    outputs = answers(engine, prompts)
    assert engine.scheduler.stats.num_preemptions > 0
    for name, output in outputs.items():
        assert tokens_of(output) == dense_adjusted(prompts[name][0], params)


# -------------------------------------------------------------------------------------- ends


def test_eos_ends_an_answer_unless_ignored() -> None:
    plain = dense_greedy(PROMPT, 20)
    eos = plain[6]
    end = plain.index(eos) + 1
    engine = tiny_engine(eos_token_ids=frozenset({eos}))
    ended = answer(engine, PROMPT, greedy(ignore_eos=False)).outputs[0]
    assert (ended.token_ids, ended.finish_reason) == (plain[:end], "stop")
    assert ended.stop_reason is None
    ignored = answer(engine, PROMPT, greedy()).outputs[0]
    assert (ignored.token_ids, ignored.finish_reason) == (plain, "length")


def test_a_stop_id_ends_an_answer_and_is_its_reason() -> None:
    plain = dense_greedy(PROMPT, 20)
    stop = plain[6]
    end = plain.index(stop) + 1
    ended = answer(tiny_engine(), PROMPT, greedy(stop_token_ids=(stop,))).outputs[0]
    assert (ended.token_ids, ended.finish_reason) == (plain[:end], "stop")
    assert ended.stop_reason == stop


def test_stop_ids_do_not_come_before_min_tokens() -> None:
    plain = dense_greedy(PROMPT, 20)
    stop, eos = plain[2], plain[4]
    params = greedy(20, ignore_eos=False, stop_token_ids=(stop,), min_tokens=12)
    free = dense_adjusted(PROMPT, params, stop_ids=(stop, eos))
    end = next((i for i, token in enumerate(free) if token in (stop, eos)), 19) + 1
    assert end > 12
    engine = tiny_engine(eos_token_ids=frozenset({eos}))
    assert tokens_of(answer(engine, PROMPT, params)) == free[:end]


def test_the_length_cap_always_holds() -> None:
    prompt = list(range(32)) * 3
    for max_tokens in (None, 1000, 32):
        output = answer(tiny_engine(), prompt, greedy(max_tokens)).outputs[0]
        assert len(output.token_ids) == 128 - len(prompt)
        assert output.finish_reason == "length"
        assert output.token_ids == dense_greedy(prompt, 32)
    assert len(tokens_of(answer(tiny_engine(), prompt, greedy(31)))) == 31
    longest = [1] * 127
    assert len(tokens_of(answer(tiny_engine(), longest, greedy(None)))) == 1


class TestStopStrings:
    """Answers are of one character a token, so that text and tokens can be counted alike."""

    text = "".join(chr(96 + token) for token in dense_greedy(PROMPT, 20))

    def ended(self, **values: Any) -> Any:
        params = greedy(skip_special_tokens=False, **values)
        return answer(tiny_engine(), PROMPT, params).outputs[0]

    def test_without_one_the_text_is_whole(self) -> None:
        assert self.ended().text == self.text

    @pytest.mark.parametrize("length", [1, 2, 5])
    def test_a_stop_string_is_cut_off(self, length: int) -> None:
        stop = self.text[7 : 7 + length]
        at = self.text.find(stop)
        output = self.ended(stop=(stop,))
        assert output.text == self.text[:at]
        assert output.token_ids == dense_greedy(PROMPT, 20)[: at + length]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)

    def test_it_is_kept_when_asked(self) -> None:
        stop = self.text[7:10]
        output = self.ended(stop=(stop,), include_stop_str_in_output=True)
        assert output.text == self.text[: self.text.find(stop) + 3]

    def test_the_first_complete_one_wins(self) -> None:
        early, late = self.text[5:8], self.text[11:13]
        assert self.ended(stop=(late, early, "zzzz")).stop_reason == early

    def test_it_is_not_looked_for_before_min_tokens(self) -> None:
        stop = self.text[3:5]
        output = self.ended(stop=(stop,), min_tokens=10)
        at = self.text.find(stop, 10)
        assert output.text == (self.text if at < 0 else self.text[:at])
        assert len(output.token_ids) >= 10

    def test_one_that_ends_with_the_last_token_is_a_stop(self) -> None:
        stop = self.text[17:20]
        assert self.text.find(stop) == 17
        output = self.ended(stop=(stop,))
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert output.text == self.text[:17]

    def test_the_beginning_of_one_at_the_end_is_text(self) -> None:
        output = self.ended(stop=(self.text[17:20] + "~",))
        assert (output.finish_reason, output.text) == ("length", self.text)

    def test_each_sample_has_its_own(self) -> None:
        params = SamplingParams(n=5, seed=3, temperature=1.0, max_tokens=40, ignore_eos=True)
        plain = answer(tiny_engine(), PROMPT, params)
        stop = plain.outputs[2].text[6:8]
        params = SamplingParams(
            n=5, seed=3, temperature=1.0, max_tokens=40, ignore_eos=True, stop=(stop,)
        )
        stopped = answer(tiny_engine(), PROMPT, params)
        assert stopped.outputs[2].stop_reason == stop
        for old, new in zip(plain.outputs, stopped.outputs, strict=True):
            assert new.text == old.text.split(stop)[0]
            assert new.finish_reason == ("stop" if stop in old.text else "length")


# ------------------------------------------------------------------------------------ logprobs


def test_logprobs_are_of_the_raw_logits_best_first() -> None:
    params = greedy(6, logprobs=3, bad_token_ids=tuple(dense_greedy(PROMPT, 1)))
    sample = answer(tiny_engine(), PROMPT, params).outputs[0]
    assert sample.logprobs is not None
    assert len(sample.logprobs) == 6
    expected = dense_logprobs([*PROMPT, *sample.token_ids])
    for i, (token, entry) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
        row = expected[len(PROMPT) + i - 1]
        order = np.argsort(-row, kind="stable").tolist()
        assert next(iter(entry)) == token
        assert set(entry) == {token, *order[:3]}
        for key, logprob in entry.items():
            assert logprob.logprob == pytest.approx(row[key], abs=1e-4)
            assert logprob.rank == order.index(key) + 1
            assert logprob.decoded_token == chr(96 + key)
    first = sample.logprobs[0][sample.token_ids[0]]
    assert first.rank is not None
    assert first.rank > 1  # the likeliest was banned, and is reported all the same
    total = sum(
        entry[t].logprob for t, entry in zip(sample.token_ids, sample.logprobs, strict=True)
    )
    assert sample.cumulative_logprob == pytest.approx(total)


def test_logprobs_come_only_when_asked() -> None:
    sample = answer(tiny_engine(), PROMPT, greedy(4)).outputs[0]
    assert (sample.logprobs, sample.cumulative_logprob) == (None, None)
    output = answer(tiny_engine(), PROMPT, greedy(4, logprobs=0, prompt_logprobs=0))
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    assert [list(entry) for entry in logprobs] == [[t] for t in tokens_of(output)]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [list(entry or ()) for entry in output.prompt_logprobs[1:]] == [[t] for t in PROMPT[1:]]


def test_logprobs_without_a_tokenizer_have_no_text() -> None:
    output = answer(tiny_engine(has_text=False), PROMPT, greedy(3, logprobs=1))
    assert output.outputs[0].text == ""
    assert output.outputs[0].logprobs is not None
    assert all(p.decoded_token is None for e in output.outputs[0].logprobs for p in e.values())


# ------------------------------------------------------------------------------------ randomness

SAMPLED = SamplingParams(temperature=1.1, top_p=0.95, n=2, max_tokens=24, ignore_eos=True)
RANDOM_PROMPTS = {str(i): [i, *PROMPT, *range(i, i + 9)] for i in range(4)}


def sampled(seed: int | None = None, **values: Any) -> SamplingParams:
    return SamplingParams(
        temperature=1.1, top_p=0.95, n=2, max_tokens=24, ignore_eos=True, seed=seed, **values
    )


def draws(output: RequestOutput) -> list[list[int]]:
    assert output.error is None
    return [sample.token_ids for sample in output.outputs]


@pytest.fixture(scope="module")
def alone() -> dict[str, list[list[int]]]:
    """What each request gets when nothing else ever ran."""
    return {
        name: draws(answer(tiny_engine(seed=5), prompt, sampled(), name))
        for name, prompt in RANDOM_PROMPTS.items()
    }


def test_samples_and_requests_differ(alone: dict[str, list[list[int]]]) -> None:
    found = [tuple(tokens) for each in alone.values() for tokens in each]
    assert len(set(found)) == len(found) == 8
    same = {name: (PROMPT, sampled()) for name in "abc"}  # the id alone makes the difference
    found = [tuple(t) for o in answers(tiny_engine(), same).values() for t in draws(o)]
    assert len(set(found)) == 6


def test_a_crowd_changes_no_draw(alone: dict[str, list[list[int]]]) -> None:
    engine = tiny_engine(seed=5)
    requests = {name: (prompt, sampled()) for name, prompt in RANDOM_PROMPTS.items()}
    crowd = {f"x{i}": ([i, i, 7], SamplingParams(seed=i, max_tokens=5 + i)) for i in range(6)}
    order = [*list(crowd.items())[:3], *requests.items(), *list(crowd.items())[3:]]
    outputs = answers(engine, dict(order))
    assert {name: draws(outputs[name]) for name in alone} == alone


def test_the_order_of_arrival_changes_no_draw(alone: dict[str, list[list[int]]]) -> None:
    backwards = {name: (RANDOM_PROMPTS[name], sampled()) for name in reversed(RANDOM_PROMPTS)}
    outputs = answers(tiny_engine(seed=5), backwards)
    assert {name: draws(outputs[name]) for name in alone} == alone


def test_preemption_changes_no_draw(alone: dict[str, list[list[int]]]) -> None:
    engine = tiny_engine(seed=5, num_pages=33)
    outputs = answers(engine, {n: (p, sampled()) for n, p in RANDOM_PROMPTS.items()})
    assert engine.scheduler.stats.num_preemptions > 0
    assert {name: draws(outputs[name]) for name in alone} == alone


def test_a_prefix_hit_changes_no_draw(alone: dict[str, list[list[int]]]) -> None:
    engine = tiny_engine(seed=5)
    answer(engine, RANDOM_PROMPTS["2"], greedy(30), "before")
    output = answer(engine, RANDOM_PROMPTS["2"], sampled(), "2")
    assert output.num_cached_tokens == 16
    assert draws(output) == alone["2"]


def test_another_page_size_changes_no_draw(alone: dict[str, list[list[int]]]) -> None:
    outputs = answers(
        tiny_engine(seed=5, page_size=16), {n: (p, sampled()) for n, p in RANDOM_PROMPTS.items()}
    )
    assert {name: draws(outputs[name]) for name in alone} == alone


def test_no_seed_means_the_engines_and_the_id(alone: dict[str, list[list[int]]]) -> None:
    def with_engine_seed(seed: int) -> list[list[int]]:
        return draws(answer(tiny_engine(seed=seed), RANDOM_PROMPTS["1"], sampled(), "1"))

    assert with_engine_seed(5) == alone["1"]
    assert with_engine_seed(6) != alone["1"]


def test_a_seed_of_its_own_ignores_engine_and_id() -> None:
    first = answers(tiny_engine(seed=1), {n: (PROMPT, sampled(seed=9)) for n in "ab"})
    second = answers(tiny_engine(seed=2), {n: (PROMPT, sampled(seed=9)) for n in "c"})
    assert draws(first["a"]) == draws(first["b"]) == draws(second["c"])
    other = answer(tiny_engine(seed=1), PROMPT, sampled(seed=10))
    assert draws(other) != draws(first["a"])
    negative = answer(tiny_engine(), PROMPT, sampled(seed=-9))
    assert draws(negative) == draws(answer(tiny_engine(), PROMPT, sampled(seed=2**64 - 9)))


# ---------------------------------------------------------------------------------- bad requests


@pytest.mark.parametrize(
    ("prompt", "message", "param"),
    [
        ([], "`prompt` must hold at least one token. Got none", "prompt"),
        ("", "`prompt` must hold at least one token. Got none", "prompt"),
        ([1] * 128, "Got 128 prompt tokens: shorten the prompt to at most 127 tokens", "prompt"),
        ([1, 32], r"token ids in \[0, 32\), the model's vocabulary. Got 32", "prompt"),
        ([1, 2**70], "Got 1180591620717411303424", "prompt"),
        ([1, -1], "Got -1", "prompt"),
        ([1, True], "`prompt` must hold integers when it is a list. Got bool", "prompt"),
        ([1, 2.0], "Got float", "prompt"),
        ([1, "a"], "Got str", "prompt"),
        ([1, None], "Got NoneType", "prompt"),
        (b"abc", "`prompt` must be text or a list of token ids. Got bytes", "prompt"),
        (None, "Got NoneType", "prompt"),
        (7, "Got int", "prompt"),
        (np.array([1.0, 2.0]), "Got float", "prompt"),
        ("ab\ud800c", "`prompt` must be text that UTF-8 can hold. .* at character 2", "prompt"),
    ],
)
def test_a_bad_prompt_is_refused(prompt: Any, message: str, param: str) -> None:
    engine = tiny_engine()
    with pytest.raises(RequestError, match=message) as caught:
        engine.add_request("a", prompt, greedy(3))
    assert caught.value.param == param
    assert not engine.has_unfinished
    engine.check_integrity()
    assert tokens_of(answer(engine, PROMPT, greedy(3))) == dense_greedy(PROMPT, 3)


def test_a_prompt_that_is_too_long_has_openais_code() -> None:
    with pytest.raises(RequestError) as caught:
        tiny_engine().add_request("a", [1] * 500, greedy())
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("salt", "message"),
    [
        ("", "1 to 128 bytes. Got 0 bytes"),
        ("x" * 129, "Got 129 bytes"),
        ("é" * 65, "Got 130 bytes"),
        (5, "Got int"),
        (b"x", "Got bytes"),
        ("a\udfff", "UTF-8 can hold. Got a lone surrogate at character 1"),
    ],
)
def test_a_bad_salt_is_refused(salt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        tiny_engine().add_request("a", PROMPT, greedy(), cache_salt=salt)
    assert caught.value.param == "cache_salt"


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"n": 9}, "n"),
        ({"stop_token_ids": (32,)}, "stop_token_ids"),
        ({"bad_token_ids": (99,)}, "bad_token_ids"),
        ({"allowed_token_ids": (1, 32)}, "allowed_token_ids"),
        ({"allowed_token_ids": (1,), "bad_token_ids": (1,)}, "allowed_token_ids"),
        ({"logit_bias": {32: 1.0}}, "logit_bias"),
        ({"bad_words": ("\ud800",)}, "bad_words"),
    ],
)
def test_params_that_this_model_cannot_serve_are_refused(
    values: dict[str, Any], param: str
) -> None:
    engine = tiny_engine()
    with pytest.raises(RequestError) as caught:
        engine.add_request("a", PROMPT, greedy(**values))
    assert caught.value.param == param
    assert not engine.has_unfinished


def test_text_needs_a_tokenizer() -> None:
    engine = tiny_engine(has_text=False)
    for prompt, values, param in (
        ("abc", {}, "prompt"),
        ([1], {"stop": "a"}, "stop"),
        ([1], {"bad_words": "a"}, "bad_words"),
    ):
        with pytest.raises(RequestError, match="this engine has no tokenizer") as caught:
            engine.add_request("a", prompt, SamplingParams.from_dict(values))
        assert caught.value.param == param


def test_an_id_in_use_is_refused_and_can_be_used_again_later() -> None:
    engine = tiny_engine()
    engine.add_request("a", PROMPT, greedy(3))
    with pytest.raises(RequestError, match=r"`request_id` must not be in use. Got 'a' twice"):
        engine.add_request("a", [1, 2], greedy(3))
    assert tokens_of(drain(engine)["a"]) == dense_greedy(PROMPT, 3)
    assert tokens_of(answer(engine, [1, 2], greedy(3))) == dense_greedy([1, 2], 3)


class Picky(ByteTokenizer):
    """Knows lower-case letters only, as a tokenizer of one's own may."""

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        return ["abcdefghijklmnopqrstuvwxyz".index(char) + 1 for char in text]


def test_what_a_users_tokenizer_raises_is_the_requests_error() -> None:
    engine = tiny_engine(tokenizer=Picky())
    with pytest.raises(RequestError, match=r"tokenizer can encode. Got 'a1': ValueError: substri"):
        engine.add_request("a", "a1", greedy())
    with pytest.raises(RequestError, match="`bad_words` must be text that the tokenizer can"):
        engine.add_request("a", "a", greedy(bad_words=("?",)))
    assert tokens_of(answer(engine, "abc", greedy(4))) == dense_greedy([1, 2, 3], 4)


# --------------------------------------------------------------------- failures of one request


class Exploding(Detokenizer):
    """Breaks in the requests that ask for the stop string "push", "last" or "finish"."""

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        self.mode = next(iter(values["stop"]), "")
        self.num_pushed = 0

    def push(self, token_id: int) -> str:
        self.num_pushed += 1
        if self.mode == "push" or (self.mode == "last" and self.num_pushed == 6):
            raise ZeroDivisionError("boom")
        return super().push(token_id)

    def finish(self) -> str:
        if self.mode == "finish":
            raise ZeroDivisionError("boom")
        return super().finish()


@pytest.mark.parametrize("mode", ["push", "last", "finish"])
@pytest.mark.parametrize("n", [1, 3])
def test_an_exception_in_handling_one_request_fails_that_one_only(
    monkeypatch: pytest.MonkeyPatch, mode: str, n: int
) -> None:
    monkeypatch.setattr(intake_module, "Detokenizer", Exploding)
    engine = tiny_engine()
    outputs = answers(
        engine,
        {
            "before": (PROMPT, greedy(9)),
            "bad": ([5, 6, 7], greedy(6, n=n, stop=(mode,))),
            "after": ([8, 9], greedy(9)),
        },
    )
    error = outputs["bad"].error
    assert isinstance(error, RequestError)
    assert error.code == "engine_error"
    assert "internal error" in str(error)
    assert "boom" not in str(error)  # the log has it
    assert tokens_of(outputs["before"]) == dense_greedy(PROMPT, 9)
    assert tokens_of(outputs["after"]) == dense_greedy([8, 9], 9)
    assert engine.reset_prefix_cache()


def test_a_tokenizer_that_breaks_on_a_token_fails_the_requests_that_show_it() -> None:
    class NoText(ByteTokenizer):
        def token_text(self, token_id: int) -> str:
            raise ZeroDivisionError("boom")

    engine = tiny_engine(tokenizer=NoText())
    outputs = answers(engine, {"bad": (PROMPT, greedy(4, logprobs=1)), "good": (PROMPT, greedy(4))})
    assert isinstance(outputs["bad"].error, RequestError)
    assert tokens_of(outputs["bad"]) == tokens_of(outputs["good"]) == dense_greedy(PROMPT, 4)
    assert outputs["good"].error is None


def test_numbers_that_are_none_fail_the_request_that_met_them() -> None:
    class Corrupting:
        def __init__(self, runner: Any) -> None:
            self.runner = runner

        def launch(self, plan: StepPlan) -> Any:
            read = self.runner.launch(plan)

            def spoilt() -> StepResult:
                result = read()
                for scheduled in plan.scheduled:
                    if scheduled.sequence.request.request_id == "bad":
                        result.corrupted[scheduled.first_row] = True
                return result

            return spoilt

        def recover(self) -> bool:
            return self.runner.recover()

    engine = tiny_engine()
    engine.runner = Corrupting(engine.runner)
    outputs = answers(engine, {"bad": (PROMPT, greedy(4)), "good": ([1, 2], greedy(4))})
    assert "the model gave no usable numbers" in str(outputs["bad"].error)
    assert tokens_of(outputs["good"]) == dense_greedy([1, 2], 4)


class Breaking:
    """A runner that breaks off once, before or after it ran the step."""

    def __init__(self, runner: Any, at: int, *, is_late: bool, error: BaseException) -> None:
        self.runner, self.at, self.is_late, self.error = runner, at, is_late, error
        self.num_steps = 0

    def launch(self, plan: StepPlan) -> Any:
        self.num_steps += 1
        if self.num_steps != self.at:
            return self.runner.launch(plan)
        if not self.is_late:
            raise self.error
        read = self.runner.launch(plan)

        def broken() -> StepResult:
            read()
            raise self.error

        return broken

    def recover(self) -> bool:
        return self.runner.recover()


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3, 6])
def test_a_step_that_breaks_off_is_run_again(at: int, is_late: bool) -> None:
    engine = tiny_engine()
    interrupt = KeyboardInterrupt()
    engine.runner = Breaking(engine.runner, at, is_late=is_late, error=interrupt)
    params = greedy(9, presence_penalty=1.2, frequency_penalty=0.5)
    engine.add_request("a", PROMPT * 4, params)
    engine.add_request("b", [1, 2], greedy(9, n=2))
    outputs = until_interrupted(engine)
    engine.check_integrity()
    outputs |= drain(engine)
    assert tokens_of(outputs["a"]) == dense_adjusted(PROMPT * 4, params)
    assert draws(outputs["b"]) == [dense_greedy([1, 2], 9)] * 2


# ------------------------------------------------------------------------------ aborts and idling


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_an_aborted_request_returns_what_came(num_steps: int) -> None:
    engine = tiny_engine()
    engine.add_request("a", PROMPT * 6, greedy(20))  # 42 tokens: two steps of prompt
    engine.add_request("b", [1, 2], greedy(8))
    for _ in range(num_steps):
        assert engine.step() == []
    assert engine.abort("a")
    assert not engine.abort("a")
    assert not engine.abort("never")
    engine.check_integrity()
    outputs = drain(engine)
    sample = outputs["a"].outputs[0]
    assert sample.finish_reason == "abort"
    assert outputs["a"].error is None
    assert outputs["a"].finished
    assert sample.token_ids == dense_greedy(PROMPT * 6, 20)[: len(sample.token_ids)]
    assert len(sample.token_ids) == max(0, num_steps - 1)
    assert tokens_of(outputs["b"]) == dense_greedy([1, 2], 8)


def test_an_idle_step_does_nothing() -> None:
    engine = tiny_engine()
    assert not engine.has_unfinished
    assert engine.step() == []
    engine.check_integrity()


def test_requests_that_cannot_be_scheduled_are_a_bug_that_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = tiny_engine()
    engine.add_request("a", PROMPT, greedy())
    monkeypatch.setattr(engine.scheduler, "schedule", lambda: None)
    with pytest.raises(IntegrityError, match="1 requests are in flight and none can be scheduled"):
        engine.step()


def test_check_integrity_reaches_pages_and_queues() -> None:
    engine = tiny_engine()
    engine.add_request("a", PROMPT, greedy(20))
    engine.step()
    engine.check_integrity()
    engine.scheduler.allocator.allocate()  # a page that nobody knows
    with pytest.raises(IntegrityError):
        engine.check_integrity()


def test_the_clocks_of_an_answer_are_consistent() -> None:
    metrics = answer(tiny_engine(), PROMPT, greedy(6)).metrics
    assert 0 < metrics["time_to_first_token_seconds"] <= metrics["total_seconds"]
    mean = metrics["mean_time_between_tokens_seconds"]
    assert 0 < mean <= metrics["max_time_between_tokens_seconds"]
    assert metrics["time_to_first_token_seconds"] + 5 * mean <= metrics["total_seconds"]
    assert (
        "mean_time_between_tokens_seconds" not in answer(tiny_engine(), PROMPT, greedy(1)).metrics
    )


def test_salts_keep_cached_prefixes_apart() -> None:
    engine = tiny_engine()
    cached: list[int] = []
    for i, salt in enumerate((None, None, "x", "y", "x", None)):
        engine.add_request(str(i), PROMPT * 3, greedy(2), cache_salt=salt)
        cached.append(drain(engine)[str(i)].num_cached_tokens)
    assert cached == [0, 20, 0, 0, 20, 20]


# --------------------------------------------------------------------------------------- the soak

NUM_REQUESTS = 2_000


class Soak:
    """Many random requests of every kind on the real model, some aborted at any moment."""

    def __init__(self, num_requests: int = NUM_REQUESTS) -> None:
        self.num_requests = num_requests
        self.engine = tiny_engine(num_pages=33, seed=3)
        self.rng = np.random.default_rng(17)
        self.prefixes = self.rng.integers(0, VOCAB, (4, 24)).tolist()
        self.params: dict[str, SamplingParams] = {}
        self.outputs: dict[str, RequestOutput] = {}
        self.aborted: set[str] = set()
        self.num_compiled = -1

    def run(self) -> None:
        engine, rng, steps = self.engine, self.rng, 0
        while len(self.params) < self.num_requests or engine.has_unfinished:
            while len(self.params) < self.num_requests and engine.scheduler.num_waiting < 4:
                self.add()
            if rng.random() < 0.05:
                self.abort()
            for output in engine.step():
                assert output.request_id not in self.outputs
                self.outputs[output.request_id] = output
            steps += 1
            if steps % 50 == 0:
                engine.check_integrity()

    def abort(self) -> None:
        live = sorted(set(self.params) - set(self.outputs))
        name = str(self.rng.choice(live))
        if self.engine.abort(name):
            self.aborted.add(name)

    def add(self) -> None:
        rng, name = self.rng, str(len(self.params))
        if rng.random() < 0.5:
            prompt = self.prefixes[rng.integers(4)][: rng.integers(1, 25)]
        else:
            prompt = rng.integers(0, VOCAB, rng.integers(1, 40 if rng.random() < 0.3 else 9))
        ids = [int(token) for token in prompt]
        text = "".join(chr(96 + token) for token in ids)
        self.params[name] = params = self.random_params()
        salt = "salt" if rng.random() < 0.1 else None
        asked = text if rng.random() < 0.3 else ids
        self.engine.add_request(name, asked, params, cache_salt=salt)

    def random_params(self) -> SamplingParams:
        rng = self.rng
        optional: dict[str, Any] = {
            "n": int(rng.integers(1, 5)),
            "top_k": int(rng.integers(1, 10)),
            "top_p": float(rng.uniform(0.1, 1)),
            "min_p": float(rng.uniform(0, 0.3)),
            "presence_penalty": float(rng.uniform(-2, 2)),
            "frequency_penalty": float(rng.uniform(-2, 2)),
            "repetition_penalty": float(rng.uniform(0.5, 2)),
            "seed": int(rng.integers(2**62)),
            "stop_token_ids": (int(rng.integers(VOCAB)),),
            "ignore_eos": True,
            "logprobs": int(rng.integers(0, 21)),
            "prompt_logprobs": int(rng.integers(0, 21)),
            "logit_bias": {int(rng.integers(VOCAB)): float(rng.uniform(-5, 5))},
            "allowed_token_ids": tuple(rng.choice(VOCAB, 8, replace=False).tolist()),
            "bad_words": ("ab", "c", "xyz"),
            "bad_token_ids": (int(rng.integers(VOCAB)),),
            "stop": ("a", "bc"),
            "skip_special_tokens": False,
        }
        chosen = {name: value for name, value in optional.items() if rng.random() < 0.15}
        max_tokens = int(rng.integers(1, 13))
        return SamplingParams(
            **chosen,
            temperature=float(rng.choice([0.0, 0.6, 1.0, 1.5])),
            max_tokens=max_tokens,
            min_tokens=int(rng.integers(0, max_tokens + 1)) if rng.random() < 0.15 else 0,
            detokenize=bool("stop" in chosen or rng.random() < 0.9),
        )


@pytest.fixture(scope="module")
def soak() -> Soak:
    tiny_llm()
    made = Soak()
    with compilations() as count:
        made.run()
    made.num_compiled = count["compiled"]
    return made


def test_two_thousand_requests_of_every_kind_compile_nothing(soak: Soak) -> None:
    assert soak.num_compiled == 0


def test_two_thousand_requests_with_aborts_lose_no_page(soak: Soak) -> None:
    engine = soak.engine
    engine.check_integrity()
    allocator, stats = engine.scheduler.allocator, engine.scheduler.stats
    assert allocator.num_held == 0
    assert allocator.num_free == allocator.usable == 32  # evictable ones are free for the asking
    assert allocator.num_evictable > 0
    assert engine.reset_prefix_cache()
    assert allocator.num_evictable == 0
    assert stats.num_preemptions > 10
    assert stats.num_cow_copies > 50
    assert stats.prefix_hit_tokens > 1_000


def test_two_thousand_requests_are_all_answered_as_asked(soak: Soak) -> None:
    assert set(soak.outputs) == set(soak.params)
    assert len(soak.aborted) > 40
    for name, output in soak.outputs.items():
        params = soak.params[name]
        assert output.error is None
        assert len(output.outputs) == params.n
        for sample in output.outputs:
            if name not in soak.aborted:
                assert sample.finish_reason in ("stop", "length")
                assert params.min_tokens <= len(sample.token_ids) <= (params.max_tokens or 0)
            if params.allowed_token_ids is not None:
                assert set(sample.token_ids) <= set(params.allowed_token_ids)
            assert not set(sample.token_ids) & {*params.bad_token_ids}
            if params.bad_words:
                assert 3 not in sample.token_ids
                assert (1, 2) not in set(zip(sample.token_ids, sample.token_ids[1:], strict=False))
            if params.logprobs is not None:
                assert len(sample.logprobs or ()) == len(sample.token_ids)
            if sample.stop_reason in params.stop:
                assert sample.finish_reason == "stop"
        if params.prompt_logprobs is not None and name not in soak.aborted:
            assert len(output.prompt_logprobs or ()) == len(output.prompt_token_ids)
