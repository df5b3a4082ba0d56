"""The engine's benchmark: what it reads, what it prints, and a run on the tiny model."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagedjax import SamplingParams
from tests.tiny_engine import tiny_llm

SCRIPT = Path(__file__).parent.parent / "scripts" / "bench_engine.py"


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("bench_engine", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def requests(count: int, *, arrival_s: float | None = None) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [
        {"prompt_ids": [1 + i, 2, 3, 4, 5], "max_new": 4 + i} for i in range(count)
    ]
    if arrival_s is not None:
        for i, request in enumerate(made):
            request["arrival_s"] = i * arrival_s
    return made


@pytest.fixture
def workload_file(tmp_path: Path) -> Path:
    path = tmp_path / "load.json"
    workloads = {
        "short": {"desc": "a few", "requests": requests(3)},
        "timed": {"desc": "one after another", "requests": requests(4, arrival_s=0.001)},
    }
    path.write_text(json.dumps({"workloads": workloads}))
    return path


def arguments(workload: Path, **values: Any) -> argparse.Namespace:
    given = {"workload": workload, "only": None, "limit": None, "rate_scale": 1.0}
    return argparse.Namespace(**(given | values))


def test_help_is_worth_reading() -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    for word in ("--workload", "--only", "--no-prefix-caching", "model_fraction", "prompt_ids"):
        assert word in result.stdout


def test_workloads_are_read_chosen_and_limited(bench: Any, workload_file: Path) -> None:
    every = bench._read(arguments(workload_file))
    assert {name: len(r) for name, r in every.requests.items()} == {"short": 3, "timed": 4}
    assert every.vocab_size == 6
    chosen = bench._read(arguments(workload_file, only="timed", limit=2))
    assert list(chosen.requests) == ["timed"]
    assert len(chosen.requests["timed"]) == 2


@pytest.mark.parametrize(("scale", "last"), [(1.0, 0.003), (2.0, 0.0015), (math.inf, 0.0)])
def test_arrival_times_are_scaled_by_rate(
    bench: Any, workload_file: Path, scale: float, last: float
) -> None:
    read = bench._read(arguments(workload_file, rate_scale=scale))
    assert read.requests["timed"][-1]["arrival_s"] == last
    assert read.requests["short"][-1]["arrival_s"] == 0.0


def test_what_cannot_be_read_is_told(bench: Any, workload_file: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no workload \['long'\]; the file has \['short', 'ti"):
        bench._read(arguments(workload_file, only="short,long"))
    with pytest.raises(SystemExit, match=r"cannot read .*missing\.json"):
        bench._read(arguments(tmp_path / "missing.json"))
    for scale in (0.0, -1.0, math.nan):
        with pytest.raises(SystemExit, match="`--rate-scale` must be above 0"):
            bench._read(arguments(workload_file, rate_scale=scale))
    workload_file.write_text("{}")
    with pytest.raises(SystemExit, match="bench_engine: cannot read"):
        bench._read(arguments(workload_file))


def test_the_table_has_a_row_for_each_workload(bench: Any) -> None:
    result = {key: 0.5 for key, _, _ in bench.COLUMNS} | {"output_tokens_per_s": 1234.56}
    text = bench.table({"short": result, "a longer name": result})
    lines = text.splitlines()
    assert len(lines) == 3
    assert len({len(line) for line in lines}) == 1  # aligned
    assert "out tok/s" in lines[0]
    assert lines[1].split()[:2] == ["short", "1234.6"]
    assert "50.0%" in lines[1]


def test_one_workload_is_flat_in_json_and_several_are_named(bench: Any) -> None:
    one = bench._flat({"short": {"seconds": 1.234567}})
    assert one == {"workload": "short", "seconds": 1.23457}
    two = bench._flat({"a": {"seconds": 1.0}, "b": {"seconds": 2.0}})
    assert two == {"workloads": {"a": {"seconds": 1.0}, "b": {"seconds": 2.0}}}


@pytest.mark.parametrize("arrival_s", [None, 0.002])
def test_a_run_counts_what_it_did(bench: Any, arrival_s: float | None) -> None:
    llm = tiny_llm()
    bare = bench.BarePasses(llm.engine.runner, False)
    args = argparse.Namespace(repeat=1, max_ttft_ms=1e9, max_tbt_ms=1e9)
    result = bench.measure(llm, requests(5, arrival_s=arrival_s), args, bare, "tiny")
    assert result["seconds"] > 0
    tokens = sum(4 + i for i in range(5))
    assert result["output_tokens_per_s"] * result["seconds"] == pytest.approx(tokens)
    assert result["total_tokens_per_s"] * result["seconds"] == pytest.approx(tokens + 25)
    assert result["steps"] >= 8
    assert 0 < result["ttft_ms_p50"] <= result["ttft_ms_p99"] <= result["e2e_ms_p99"]
    assert 0 < result["tbt_ms_mean"] <= result["tbt_ms_p99"]
    assert result["good_share"] == 1.0
    assert 0 < result["pool_use_peak"] < 1
    assert 0 < result["padding_share"] < 1
    assert math.isnan(result["model_fraction"])
    llm.engine.check_integrity()
    assert bench.table({"tiny": result})
    assert llm.engine.reset_prefix_cache()


def test_the_bare_passes_are_the_runs_own_steps(bench: Any) -> None:
    """With the runner's own programs; without attention it would compile, so that is left out."""
    llm = tiny_llm()
    bare = bench.BarePasses(llm.engine.runner, True)
    recorder = bench.Recorder(llm.engine.runner)
    llm.engine.runner = recorder
    try:
        bench.drive(bench.Watched(llm), requests(3))
    finally:
        llm.engine.runner = recorder.runner
    assert len(recorder.plans) == len(recorder.ends) >= 6
    assert bare._replay(recorder.plans, with_attention=True) > 0
    assert llm.engine.reset_prefix_cache()


def test_no_repetition_finds_the_pages_of_the_one_before(bench: Any) -> None:
    """Not even where the cache is not reset in between, as in a comparison."""
    llm = tiny_llm()
    peer = bench.Watched(llm)
    load = [{"prompt_ids": [1 + i, *range(2, 22)], "max_new": 3} for i in (0, 7)]
    hits = []
    for repetition in (0, 1, 1):
        before = llm.engine.scheduler.stats.prefix_hit_tokens
        bench.drive(peer, bench.varied(load, repetition, 32))
        hits.append(llm.engine.scheduler.stats.prefix_hit_tokens - before)
    assert hits[:2] == [0, 0]
    assert hits[2] > 0, "the same prompts again are found: the test can tell"
    assert llm.engine.reset_prefix_cache()


def test_our_engine_gives_its_tokens_step_by_step(bench: Any) -> None:
    """The same tokens as `generate`, each with the time of its own step."""
    llm = tiny_llm()
    load = requests(3)
    run = bench.drive(bench.Watched(llm), load)
    params = [
        SamplingParams(temperature=0.0, max_tokens=r["max_new"], ignore_eos=True) for r in load
    ]
    alone = llm.generate([r["prompt_ids"] for r in load], params)
    for record, output in zip(run["requests"], alone, strict=True):
        assert record["tokens"] == output.outputs[0].token_ids
        assert len(set(record["times"])) == len(record["tokens"])
        assert record["times"] == sorted(record["times"])
    assert llm.engine.reset_prefix_cache()


def test_the_environment_is_told(bench: Any, workload_file: Path) -> None:
    told = bench._environment(tiny_llm(), arguments(workload_file))
    assert json.loads(json.dumps(told)) == told
    assert told["model"] == "TinyLM"
    assert told["workload_file"] == "load.json"
    assert told["compiles"] == tiny_llm().report.num_programs
    assert told["peak_rss_mib"] > 10
    assert told["num_pages"] == 129


def test_a_start_that_is_refused_is_one_line_and_status_two(
    bench: Any,
    workload_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["bench_engine", "--workload", str(workload_file), "--page-size", "24"]
    monkeypatch.setattr(sys, "argv", argv)
    assert bench.main() == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("bench_engine: `page_size` must be a power of two")
    assert len(captured.err.splitlines()) == 1
