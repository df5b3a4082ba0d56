"""The host half's benchmark: every part runs, prints its figures and one JSON line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "bench_host.py"
SMALL = ["--running", "8", "--waiting", "5", "--steps", "20", "--requests", "12", "--lookups", "3"]
SIZES = ["--max-model-len", "512", "--prompt-tokens", "20:60", "--new-tokens", "4:9"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("options", [[], ["--no-prefix-caching", "--clock", "cpu"]])
def test_every_part_prints_its_figures(options: list[str]) -> None:
    result = bench(*SMALL, *SIZES, *options)
    assert result.returncode == 0, result.stderr
    printed = json.loads(result.stdout.splitlines()[-1])
    for part in ("decode", "full"):
        assert printed[part]["running"] == 8
        assert printed[part]["waiting"] == 5
        assert 0 < printed[part]["schedule_us_min"] <= printed[part]["schedule_us"]
    assert printed["trace"]["steps"] > 9
    assert printed["trace"]["preemptions"] == 0
    assert printed["prefix"]["growth"] > 0
    assert all(0 <= printed["gap"][f"idle_%_{name}"] < 100 for name in ("async", "one_by_one"))
    assert ("host_ms_async" in printed["gap"]) == bool(options)
    assert "schedule_us" in result.stdout.splitlines()[0]


def test_a_device_whose_steps_are_long_waits_for_the_first_only() -> None:
    """On a simulated clock: what the machine does meanwhile does not matter."""
    options = ["--only", "gap", "--clock", "cpu", "--step-ms", "1000"]
    printed = json.loads(bench(*SMALL, *SIZES, *options).stdout.splitlines()[-1])["gap"]
    assert printed["idle_%_async"] == 0
    assert printed["idle_%_one_by_one"] > 0


def test_a_workload_file_is_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    requests = [{"prompt_ids": list(range(40)), "max_new": 6} for _ in range(7)]
    path.write_text(json.dumps({"workloads": {"A": {"requests": requests}}}))
    result = bench("--only", "trace", "--workload", str(path), *SMALL)
    assert result.returncode == 0, result.stderr
    printed = json.loads(result.stdout.splitlines()[-1])
    assert printed["trace"]["steps"] == 6
    assert printed["workload_file"] == "load.json"


def test_a_pool_too_small_for_all_preempts() -> None:
    pages = ["--num-pages", "40", "--new-tokens", "200:200", "--only", "trace"]
    result = bench(*SMALL, *SIZES, *pages)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["trace"]["preemptions"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "nothing"], "must be of decode, full, trace, gap, prefix"),
        (["--running", "0"], "must be at least 1"),
        (["--prompt-tokens", "9:3"], "must be LOW:HIGH"),
        (["--only", "trace", "--workload", "/nowhere.json"], "cannot read /nowhere.json"),
        (["--page-size", "3"], "power of two"),
    ],
)
def test_what_makes_no_sense_is_refused(options: list[str], message: str) -> None:
    result = bench(*options)
    assert result.returncode != 0
    assert message in result.stderr
    assert "Traceback" not in result.stderr
