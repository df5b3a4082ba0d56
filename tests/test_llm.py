"""The front door: lists in, answers in order out; what is bad fails alone and by name."""

from __future__ import annotations

import dataclasses
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pagedjax import LLM, ConfigError, RequestError, RequestOutput, SamplingParams
from pagedjax import llm as llm_module
from pagedjax.plan import StepPlan
from pagedjax.programs import CompiledProgram
from tests.helpers import VOCAB, ByteTokenizer, TinyLM, dense_greedy
from tests.tiny_engine import tiny_engine, tiny_llm, tokens_of

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def front(monkeypatch: pytest.MonkeyPatch, **values: Any) -> LLM:
    """An `LLM` like any other, over programs that are compiled already."""
    tokenizer = values.pop("tokenizer", ByteTokenizer())
    report = tiny_llm().report
    engine = tiny_engine(tokenizer=tokenizer, has_text=tokenizer is not None)
    monkeypatch.setattr(llm_module, "start_engine", lambda *_: (engine, report))
    return LLM(TinyLM(), tokenizer=tokenizer, **values)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    return front(monkeypatch)


def errors_of(outputs: list[RequestOutput]) -> list[str | None]:
    return [None if output.error is None else str(output.error) for output in outputs]


# -------------------------------------------------------------------------------------- answers


def test_a_model_is_started_and_answers() -> None:
    llm = tiny_llm()
    llm.engine.reset_prefix_cache()
    output = llm.generate("hello", GREEDY)[0]
    ids = ByteTokenizer().encode("hello")
    assert output.prompt == "hello"
    assert output.prompt_token_ids == ids
    assert output.finished
    assert tokens_of(output) == dense_greedy(ids, 8)
    assert output.outputs[0].text == ByteTokenizer().decode(tokens_of(output))
    llm.engine.check_integrity()
    assert llm.engine.reset_prefix_cache()


def test_results_are_in_input_order(llm: LLM) -> None:
    """Short ones end long before the long ones that stand first."""
    rng = np.random.default_rng(0)
    lengths = [60, 1, 45, 2, 33, 3, 5, 28, 1, 17, 50, 4]
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in lengths]
    params = [dataclasses.replace(GREEDY, max_tokens=1 + (7 * i) % 11) for i in range(len(prompts))]
    outputs = llm.generate(prompts, params)
    for prompt, each, output in zip(prompts, params, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        assert tokens_of(output) == dense_greedy(prompt, each.max_tokens or 0)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("abc", [[1, 2, 3]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ((1, 2, 3), [[1, 2, 3]]),
        ({"prompt": "abc"}, [[1, 2, 3]]),
        ({"prompt_token_ids": (4, 5)}, [[4, 5]]),
        ({"prompt": [4, 5], "cache_salt": "x"}, [[4, 5]]),
        (["a", [2, 3], {"prompt": "c"}], [[1], [2, 3], [3]]),
        (("a", "b"), [[1], [2]]),
        ([], []),
    ],
)
def test_a_prompt_has_many_forms(llm: LLM, prompts: Any, expected: list[list[int]]) -> None:
    outputs = llm.generate(prompts, GREEDY)
    assert errors_of(outputs) == [None] * len(expected)
    assert [output.prompt_token_ids for output in outputs] == expected


def test_without_params_the_models_defaults_apply(llm: LLM) -> None:
    llm.default_params = {"temperature": 0.0, "max_tokens": 3}
    assert len(tokens_of(llm.generate([1, 2])[0])) <= 3
    llm.default_params = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True}
    assert tokens_of(llm.generate([1, 2])[0]) == dense_greedy([1, 2], 5)


def test_the_same_call_in_a_new_process_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    first, again = (
        [tokens_of(o) for o in front(monkeypatch).generate([[1, 2], [1, 2]], params)]
        for _ in range(2)
    )
    assert first == again
    assert first[0] != first[1]


# ----------------------------------------------------------------------------------- bad prompts

BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "`prompt` must hold at least one token"),
    ([], "`prompt` must hold at least one token"),
    ([1] * 128, "within `max_model_len` 128. Got 128 prompt tokens"),
    ([VOCAB], "Got 32"),
    ([-1], "Got -1"),
    ([True, 1], "Got bool"),
    ([1, "a"], "Got str"),
    (None, "Got NoneType"),
    (3.5, "Got float"),
    (b"abc", "Got bytes"),
    ("a\ud800", "lone surrogate at character 1"),
    ({}, "one of `prompt` and `prompt_token_ids`"),
    ({"prompt": "a", "prompt_token_ids": [1]}, "one of `prompt` and `prompt_token_ids`"),
    ({"prompt": "a", "images": []}, "Got ['images', 'prompt']"),
    ({"prompt": None}, "one of `prompt` and `prompt_token_ids`"),
    ({"prompt_token_ids": "abc"}, "`prompt_token_ids` must be a list of token ids. Got str"),
    ({"prompt": 7}, "Got int"),
    ({"prompt": "a", "cache_salt": "x" * 129}, "1 to 128 bytes. Got 129 bytes"),
    ({"prompt": "a", "cache_salt": ""}, "Got 0 bytes"),
    ({"prompt": "a", "cache_salt": 3}, "Got int"),
    ({5: "a"}, "Got ['5']"),
    ({"prompt": {"prompt": "a"}}, "Got dict"),
]


def test_one_bad_prompt_fails_alone_with_a_typed_error(llm: LLM) -> None:
    prompts: list[Any] = [[1, 2]]
    for bad, _ in BAD_PROMPTS:
        prompts += [bad, [3, 4]]
    outputs = llm.generate(prompts, GREEDY)
    assert len(outputs) == len(prompts)
    assert tokens_of(outputs[0]) == dense_greedy([1, 2], 8)
    for (_, message), failed, good in zip(BAD_PROMPTS, outputs[1::2], outputs[2::2], strict=True):
        assert isinstance(failed.error, RequestError)
        assert message in str(failed.error)
        assert failed.finished
        assert failed.outputs == []
        assert tokens_of(good) == dense_greedy([3, 4], 8)
    llm.engine.check_integrity()


@pytest.mark.parametrize(
    "prompt", [3, None, 2.5, True, [1, True], [True], b"", "", {"prompt_token_ids": [1, None]}]
)
def test_a_bad_prompt_by_itself_is_one_failed_answer(llm: LLM, prompt: Any) -> None:
    outputs = llm.generate(prompt, GREEDY)
    if prompt == b"":
        assert outputs == []  # no prompts at all
    else:
        assert len(outputs) == 1
        assert isinstance(outputs[0].error, RequestError)


def test_bad_params_of_one_prompt_fail_it_alone(llm: LLM) -> None:
    too_many = dataclasses.replace(GREEDY, n=9)
    outputs = llm.generate([[1, 2], [3, 4]], [too_many, GREEDY])
    assert "`n` must be at most `max_num_seqs` (8). Got 9" in str(outputs[0].error)
    assert tokens_of(outputs[1]) == dense_greedy([3, 4], 8)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([GREEDY], r"as many as prompts \(2\). Got 1"),
        ([GREEDY] * 3, "Got 3"),
        ([], "Got 0"),
        ({"max_tokens": 5}, "Got a dict"),
        ([GREEDY, None], "Got a NoneType"),
        (5, "Got a int"),
    ],
)
def test_params_that_do_not_match_the_prompts_are_refused(
    llm: LLM, params: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate(["a", "b"], params)
    assert caught.value.param == "params"
    assert not llm.engine.has_unfinished


# ----------------------------------------------------------------------------------- interruption


class Interrupting:
    """A runner in whose third step the user presses Ctrl-C."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.num_steps = 0

    def launch(self, plan: StepPlan) -> Any:
        self.num_steps += 1
        if self.num_steps == 3:
            raise KeyboardInterrupt
        return self.runner.launch(plan)

    def recover(self) -> bool:
        return self.runner.recover()


def test_an_interrupt_aborts_all_that_was_asked_and_leaves_the_engine_usable(llm: LLM) -> None:
    llm.engine.runner = Interrupting(llm.engine.runner)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[i, 2] * 9 for i in range(20)], GREEDY)
    llm.engine.check_integrity()
    assert llm.engine.scheduler.num_running == llm.engine.scheduler.num_waiting == 0
    assert not llm.engine.scheduler.has_work
    outputs = llm.generate([[1, 2], [3, 4]], GREEDY)
    assert [tokens_of(output) for output in outputs] == [
        dense_greedy([1, 2], 8),
        dense_greedy([3, 4], 8),
    ]
    assert llm.engine.reset_prefix_cache()


def test_an_interrupt_while_prompts_are_added_aborts_those_that_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(ByteTokenizer):
        def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
            if text == "stop":
                raise KeyboardInterrupt
            return super().encode(text, special_tokens=special_tokens)

    llm = front(monkeypatch, tokenizer=Slow())
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "stop", "c"], GREEDY)
    assert not llm.engine.scheduler.has_work
    llm.engine.check_integrity()
    assert tokens_of(llm.generate("ab", GREEDY)[0]) == dense_greedy([1, 2], 8)


def test_the_bar_of_the_next_call_counts_its_own_prompts(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.engine.runner = Interrupting(llm.engine.runner)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1]] * 5, GREEDY)
    capsys.readouterr()
    llm.generate([[1, 2], [], [3]], GREEDY, use_tqdm=True)
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "tok/s" in shown
    assert "4/3" not in shown
    llm.generate([[1, 2]], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


# ------------------------------------------------------------------------------------------ chat


def test_chat_puts_messages_through_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = front(monkeypatch, chat_template=TEMPLATE)
    one = [{"role": "user", "content": "hi"}]
    ids = llm.encode_chat(one)
    assert ids == ByteTokenizer().encode("<user>hi")
    assert tokens_of(llm.chat(one, GREEDY)[0]) == dense_greedy(ids, 8)
    two = [{"role": "user", "content": "you"}, {"role": "assistant", "content": "me"}]
    outputs = llm.chat([one, two], GREEDY)
    assert [output.prompt_token_ids for output in outputs] == [ids, llm.encode_chat(two)]


def test_a_bad_conversation_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = front(monkeypatch, chat_template=TEMPLATE)
    good = [{"role": "user", "content": "hi"}]
    outputs = llm.chat([good, [{"role": "user"}], good], GREEDY)
    assert [isinstance(output.error, RequestError) for output in outputs] == [False, True, False]
    assert llm.chat([], GREEDY) == []


def test_chat_needs_a_template_and_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    good = [{"role": "user", "content": "hi"}]
    output = front(monkeypatch).chat(good, GREEDY)[0]
    assert isinstance(output.error, RequestError)
    assert "template" in str(output.error)
    output = front(monkeypatch, tokenizer=None).chat(good, GREEDY)[0]
    assert "this engine: it has no tokenizer" in str(output.error)


def test_a_tokenizers_own_template_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithTemplate(ByteTokenizer):
        chat_template = TEMPLATE

    ids = ByteTokenizer().encode("<user>b")
    llm = front(monkeypatch, tokenizer=WithTemplate())
    assert llm.encode_chat([{"role": "user", "content": "b"}]) == ids


# ------------------------------------------------------------------------------- what it is given


def test_unknown_options_and_models_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"`max_num_sequences` is not an engine option\. Did"):
        LLM(TinyLM(), max_num_sequences=8)
    with pytest.raises(ConfigError, match="must be a positive integer: the engine sizes the page"):
        LLM(object())


def test_the_start_is_given_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, told = list[Any](), list[str]()
    tiny_llm()  # made before what makes it is replaced

    def start(*args: Any) -> Any:
        seen.extend(args)
        args[-1](CompiledProgram("step", 1.0, is_kept=False), 1, 2)
        return tiny_engine(), tiny_llm().report

    monkeypatch.setattr(llm_module, "start_engine", start)
    model, tokenizer = TinyLM(), ByteTokenizer()
    sizes: dict[str, Any] = {"max_num_seqs": 3, "gpu_memory_utilization": 0.4, "seed": 9}
    LLM(model, tokenizer=tokenizer, progress=told.append, **sizes)
    assert told == ["step: compiled, 1.0 s (1 of 2, at most 1 s to go)"]
    got_model, got_tokenizer, options, facts, _ = seen
    assert got_model is model
    assert got_tokenizer is tokenizer
    assert (options.max_num_seqs, options.memory_utilization, options.seed) == (3, 0.4, 9)
    assert (facts.name, facts.max_model_len) == ("TinyLM", 256)
    assert facts.identity is None  # nobody knows a user's code
    assert facts.eos_token_ids == tokenizer.eos_token_ids


@pytest.mark.parametrize("shown", [True, False])
def test_compiling_shows_its_progress_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shown: bool
) -> None:
    def start(*args: Any) -> Any:
        for done in (1, 2, 3):
            args[-1](CompiledProgram(f"step {done}", 1.0, is_kept=False), done, 3)
        return tiny_engine(), tiny_llm().report

    tiny_llm()
    capsys.readouterr()
    monkeypatch.setattr(llm_module, "start_engine", start)
    LLM(TinyLM(), progress=shown)
    assert ("compiling" in capsys.readouterr().err) == shown
    assert not sys.stderr.isatty()


@pytest.mark.parametrize(
    "prompts",
    [np.array([[1, 2, 3], [4, 5, 6]]), [np.array([1, 2, 3]), [4, 5, 6]]],
    ids=["matrix", "mixed list"],
)
def test_numpy_arrays_are_token_ids(llm: LLM, prompts: Any) -> None:
    expected = [tokens_of(output) for output in llm.generate([[1, 2, 3], [4, 5, 6]], GREEDY)]
    assert [tokens_of(output) for output in llm.generate(prompts, GREEDY)] == expected
    assert [tokens_of(llm.generate(prompts[0], GREEDY)[0])] == expected[:1]


@pytest.mark.parametrize("messages", [None, 3, "hello"])
def test_messages_that_are_no_list_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="`messages` must be a list of messages"):
        llm.chat(messages)


def test_calls_from_several_threads_take_turns(llm: LLM) -> None:
    prompts = [[token, token + 1, token + 2] for token in range(1, 13)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda prompt: llm.generate([prompt, prompt], GREEDY), prompts))
    for prompt, outputs in zip(prompts, answers, strict=True):
        assert [tokens_of(output) for output in outputs] == [dense_greedy(prompt, 8)] * 2
    llm.engine.check_integrity()


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_waits_for_the_step_and_leaves_the_engine_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = llm.engine.runner
    finished: list[StepPlan] = []

    def interrupted(plan: StepPlan) -> Any:
        read = runner.launch(plan)

        def finish() -> Any:
            if not finished:
                signal.raise_signal(signal.SIGINT)
            result = read()
            finished.append(plan)
            return result

        return finish

    monkeypatch.setattr(llm.engine, "runner", SimpleNamespace(launch=interrupted))
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3], [4, 5]], GREEDY)
    assert len(finished) == 1
    monkeypatch.setattr(llm.engine, "runner", runner)
    llm.engine.check_integrity()
    assert tokens_of(llm.generate([1, 2, 3], GREEDY)[0]) == dense_greedy([1, 2, 3], 8)
