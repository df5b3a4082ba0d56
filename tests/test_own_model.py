"""The example of a model of one's own runs, and its paged and dense answers are the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "examples" / "own_model.py"


def test_the_example_trains_serves_and_agrees_with_itself() -> None:
    """Twenty steps teach no sums, but two different attentions must agree at any weights."""
    result = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "20"],
        cwd=EXAMPLE.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("loss after 20 steps: ")
    assert lines[-1] == "paged and dense answers are the same"
    answers = [line for line in lines if " paged [" in line]
    assert len(answers) == 6
    for line in answers:
        paged, dense = line.split(" paged ")[1].split("  dense ")
        assert paged == dense != "[]"
