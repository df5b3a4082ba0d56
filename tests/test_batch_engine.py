"""Batch lines through the real engine: a tiny model on pages, against its dense twin."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from pagedjax import LLM
from pagedjax.batch_job import Summary, run_batch
from pagedjax.batch_job.answers import InputOrder
from tests.helpers import ByteTokenizer, TinyLM, dense_greedy, dense_logprobs

type Row = dict[str, Any]

TEMPLATE = "{% for m in messages %}{{ m.role[:1] }}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        TinyLM(),
        tokenizer=ByteTokenizer(),
        chat_template=TEMPLATE,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        page_size=4,
        num_pages=70,
    )


def run(llm: LLM, *lines: Row | bytes, **how: Any) -> tuple[list[Row], Summary]:
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    written: list[str] = []
    summary = run_batch(llm, raw, InputOrder(written.append), **how)
    llm.engine.check_integrity()
    assert not llm.engine.has_unfinished
    return [json.loads(text) for text in written], summary


def choice(row: Row) -> Row:
    assert row["error"] is None, row["error"]
    return row["response"]["body"]["choices"][0]


def greedy(prompt: str | list[int], max_tokens: int, **more: Any) -> Row:
    body: Row = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return body | {"ignore_eos": True, "return_token_ids": True} | more


def test_many_lines_get_their_dense_answers_in_order(llm: LLM) -> None:
    prompts = [[1 + i % 7, 2, 3 + i % 5] * (1 + i % 6) for i in range(12)]
    counts = [1 + (5 * i) % 13 for i in range(12)]
    rows, summary = run(llm, *map(greedy, prompts, counts), max_in_flight=6)
    for row, prompt, count in zip(rows, prompts, counts, strict=True):
        assert choice(row)["token_ids"] == dense_greedy(prompt, count)
    assert summary.answered == 12
    assert summary.output_tokens == sum(counts)


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "d"}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    rows, _ = run(llm, body | {"return_token_ids": True})
    prompt = ByteTokenizer().encode("uabcad")
    assert rows[0]["response"]["body"]["prompt_token_ids"] == prompt
    assert choice(rows[0])["token_ids"] == dense_greedy(prompt, 4)
    assert choice(rows[0])["message"]["content"] == ByteTokenizer().decode(dense_greedy(prompt, 4))


def test_echo_scores_the_prompt(llm: LLM) -> None:
    """What evaluation programs send: token ids, echo, one logprob, one token."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    rows, _ = run(llm, greedy(prompt, 1, echo=True, logprobs=1))
    logprobs = choice(rows[0])["logprobs"]
    tokens = [*prompt, *dense_greedy(prompt, 1)]
    dense = dense_logprobs(tokens)
    expected = [dense[i, token] for i, token in enumerate(tokens[1:])]
    assert logprobs["token_logprobs"][0] is None
    np.testing.assert_allclose(logprobs["token_logprobs"][1:], expected, atol=1e-4)
    best = [max(top.values()) for top in logprobs["top_logprobs"][1:]]
    np.testing.assert_allclose(best, dense[:-1].max(axis=-1), atol=1e-4)
    assert choice(rows[0])["text"] == ByteTokenizer().decode(tokens)


def test_draws_depend_on_the_custom_id_and_not_on_the_order(llm: LLM) -> None:
    lines: list[Row] = [
        {"custom_id": name, "prompt": "abc", "max_tokens": 8, "return_token_ids": True, "n": 2}
        for name in ("a", "b", "c")
    ]
    rows, _ = run(llm, *lines)
    swapped, _ = run(llm, lines[2], b"not json", lines[1], greedy("de", 5), lines[0])
    drawn = {row["custom_id"]: row["response"]["body"]["choices"] for row in rows}
    again = {row["custom_id"]: row["response"]["body"].get("choices") for row in swapped}
    assert {name: again[name] for name in drawn} == drawn
    first = [[sample["token_ids"] for sample in samples] for samples in drawn.values()]
    assert len({str(tokens) for samples in first for tokens in samples}) > 3


def test_stop_string_cuts_the_text(llm: LLM) -> None:
    full = ByteTokenizer().decode(dense_greedy([1, 2, 3], 12))
    rows, _ = run(llm, greedy([1, 2, 3], 12, stop=full[4:6]))
    assert choice(rows[0])["text"] == full[: full.index(full[4:6])]
    assert choice(rows[0])["finish_reason"] == "stop"
    assert choice(rows[0])["stop_reason"] == full[4:6]


@pytest.mark.parametrize(
    ("bad", "code", "message"),
    [
        ({"prompt": [1] * 64}, "context_length_exceeded", "64"),
        ({"prompt": [1, 32]}, "invalid_value", "32"),
        ({"prompt": [1, -1]}, "invalid_value", "-1"),
        ({"prompt": [1, 2**70]}, "invalid_value", "token"),
        ({"prompt": "a", "logit_bias": {"99": 1}}, "invalid_value", "99"),
        ({"prompt": "a", "n": 5}, "invalid_value", "5"),
        ({"prompt": "a", "cache_salt": "s" * 200}, "invalid_value", "`cache_salt`"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "invalid_value", "robot"),
        ({"messages": []}, "invalid_value", "`messages`"),
    ],
)
def test_what_the_engine_refuses_is_an_error_line(
    llm: LLM, bad: Row, code: str, message: str
) -> None:
    rows, summary = run(llm, greedy([1, 2], 3), bad, greedy([3], 3))
    assert choice(rows[0])["token_ids"] == dense_greedy([1, 2], 3)
    assert choice(rows[2])["token_ids"] == dense_greedy([3], 3)
    assert rows[1]["response"]["status_code"] == 400
    assert rows[1]["error"]["code"] == code
    assert rows[1]["error"]["message"].startswith("line 2: ")
    assert message in rows[1]["error"]["message"]
    assert summary.failed == 1


def test_interruption_leaves_no_page_behind(llm: LLM) -> None:
    steps: list[Summary] = []
    lines = [greedy([1, 2, 3], 40, custom_id=str(i)) for i in range(6)]
    rows, summary = run(llm, *lines, on_progress=steps.append, should_stop=lambda: len(steps) > 4)
    assert summary.interrupted
    assert rows == []
