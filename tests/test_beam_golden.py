"""Beams of the real model against `generate(num_beams=...)` of transformers on the same weights.

`tests/data/smollm2_beams.json`: all beams in float32; `make_beam_golden.py` beside it made them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedjax import LLM, SamplingParams
from tests.smollm2 import needs_weights

pytestmark = needs_weights

GOLDEN = json.loads((Path(__file__).parent / "data" / "smollm2_beams.json").read_text())
CASES: list[dict[str, Any]] = GOLDEN["cases"]
TOLERANCE = 1e-3  # of a score, which float32 rounds at each of its tokens


@pytest.fixture(scope="module")
def outputs() -> list[Any]:
    """All searches at once, on fewer slots than they would like."""
    llm = LLM(
        "smollm2-135m-instruct",
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,  # the shapes of test_golden.py: compiling is what the time goes into
        max_num_batched_tokens=64,
    )
    params = [SamplingParams(**case["params"], n=case["params"]["beam_width"]) for case in CASES]
    answers = llm.generate([case["prompt_ids"] for case in CASES], params)
    llm.engine.check_integrity()
    return answers


@pytest.mark.parametrize(
    "at", range(len(CASES)), ids=[f"{case['prompt']}-{case['kind']}" for case in CASES]
)
def test_beams_equal_those_of_transformers(at: int, outputs: Any) -> None:
    output = outputs[at]
    assert output.error is None
    expected = CASES[at]["beams"]
    assert [sample.token_ids for sample in output.outputs] == [beam["ids"] for beam in expected]
    for sample, beam in zip(output.outputs, expected, strict=True):
        assert sample.score == pytest.approx(beam["score"], abs=TOLERANCE, rel=1e-4)
