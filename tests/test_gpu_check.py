"""`scripts/gpu_check`: its parts, its budget and its results file, on a CPU."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from scripts import gpu_check
from scripts.gpu_check import Part, Run

ROOT = Path(__file__).parent.parent


def check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *parts: Part, budget: float = 100
) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    output = tmp_path / "results.json"
    status = gpu_check.main(["--small", "--output", str(output), "--budget", str(budget)])
    return status, json.loads(output.read_text())


def result(**values: Any) -> Any:
    return lambda run, deadline: values


def test_all_that_must_pass_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, rest = Part("a", 5, result(passed=True), must_pass=True), Part("b", 5, result(figure=1))
    status, found = check(tmp_path, monkeypatch, good, rest)
    assert (status, found["passed"], found["b"]["figure"]) == (0, True, 1)


def fail(run: Run, deadline: float) -> dict[str, Any]:
    raise ValueError("no luck")


def test_a_part_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = Part("a", 5, fail, must_pass=True), Part("b", 5, result(passed=True))
    status, found = check(tmp_path, monkeypatch, bad, good)
    assert status == 1
    assert "ValueError: no luck" in found["a"]["error"]
    assert found["b"]["passed"]
    assert not found["passed"]


def test_a_skipped_part_that_must_pass_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = Part("late", 60, result(passed=True), must_pass=True)
    status, found = check(tmp_path, monkeypatch, late, budget=5)
    assert status == 1
    assert "skipped" in found["late"]


def test_results_are_on_disk_after_each_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    def look(run: Run, deadline: float) -> dict[str, Any]:
        seen.append(json.loads(run.output.read_text()))
        assert deadline <= time.monotonic() + 5
        return {}

    check(tmp_path, monkeypatch, Part("a", 5, result(n=7)), Part("b", 5, look))
    assert seen[0]["a"]["n"] == 7
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_the_quick_parts_run_on_a_cpu(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    only = "device,float64,others"
    assert gpu_check.main(["--small", "--only", only, "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert found["device"]["platform"] == "cpu"
    assert found["float64"]["updates"] is True
    assert found["float64"]["lines"][0]["error"] < 2e-2
    assert found["others"]["none"] == {"seconds": 1.0}


@pytest.mark.slow
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    assert gpu_check.main(["--small", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert found["suite"]["counts"]["passed"] > 10
    assert {line["what"] for line in found["sweep"]["lines"]} == {
        "decode", "prefill", "write_kv", "copy_pages"
    }  # fmt: skip
    assert not any("error" in line for line in found["sweep"]["lines"])
    assert found["engine"]["output_tokens_per_s"] > 0


def test_what_a_machine_without_a_network_runs_needs_few_packages() -> None:
    """The selected tests run with `--noconftest`: pytest, NumPy and JAX must do."""
    names = ["tests/pallas_kernels/cases.py", "tests/pallas_kernels/races.py", *gpu_check.SUITES]
    for name in names:
        text = (ROOT / name).read_text()
        for missing in ("hypothesis", "chex", "psutil", "rng:"):
            assert f"import {missing}" not in text
    measured = list(gpu_check._measurements(False))
    assert measured[0][2] == "mosaic_gpu"
    assert len(measured) == len(set(map(str, measured)))


def test_unknown_part_is_refused() -> None:
    with pytest.raises(SystemExit) as stopped:
        gpu_check.main(["--only", "speed"])
    assert stopped.value.code == 2
