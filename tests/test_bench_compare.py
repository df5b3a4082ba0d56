"""Engines in turn: processes that sleep, alternation, ratios, and what fails on the way."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.peers import catalog, command, comparison_table, measures
from scripts.peers.compare import Comparer, Comparison, Results, in_turn
from scripts.peers.drive import UNKNOWN_TOKEN
from scripts.peers.processes import PeerFailed, PeerProcess

FAKE = Path(__file__).parent / "fake_peer.py"
LOAD = {"do": "load", "settings": {}}
RUN = {"do": "run", "requests": [{"prompt_ids": [5, 6], "max_new": 4, "arrival_s": 0.0}]}
SECONDS = 60.0  # that a fake may take before a test fails


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """Starts fakes by what they do, and ends them all."""
    started: list[PeerProcess] = []

    def starter(behaviour: str) -> PeerProcess:
        command_line = [sys.executable, str(FAKE), behaviour, str(tmp_path / "log")]
        started.append(PeerProcess(behaviour.partition(":")[0], command_line))
        return started[-1]

    yield starter
    for process in started:
        process.close()


def states(process: PeerProcess) -> set[str]:
    """Of its processes: T is stopped."""
    stats = [Path(f"/proc/{pid}/stat").read_text() for pid in process.pids()]
    return {stat.rpartition(")")[2].split()[0] for stat in stats}


def comparison(models: Path, **values: Any) -> Comparison:
    requests = [{"prompt_ids": [5 + i, 6], "max_new": 4, "arrival_s": 0.0} for i in range(3)]
    given: dict[str, Any] = {
        "peers": ["vllm"],
        "workloads": {"A": requests},
        "vocab_size": 7,
        "dtypes": ["float32"],
        "concurrencies": [2],
        "repeat": 2,
        "threads": 1,
        "timeout": SECONDS,
        "model": "ours",
        "models": models,
    }
    for peer in catalog.PEERS.values():
        (models / peer.model.format(dtype="float32")).mkdir(exist_ok=True)
    return Comparison(**(given | values))


@pytest.fixture
def compared(start: Callable[[str], PeerProcess], tmp_path: Path) -> Any:
    """Compares fakes that stand in for engines; gives the results and who ran when."""

    def run(behaviours: dict[str, str], **values: Any) -> tuple[Results, list[list[str]]]:
        asked = comparison(tmp_path, peers=[n for n in behaviours if n != "pagedjax"], **values)
        notes: list[str] = []
        results = Comparer(asked, lambda name: start(behaviours[name]), notes.append).run()
        assert [line for line in results.failures if line not in notes] == []
        return results, [line.split() for line in (tmp_path / "log").read_text().splitlines()]

    return run


# --------------------------------------------------------------------------------- the processes


def test_a_worker_sleeps_unless_it_is_asked(start: Callable[[str], PeerProcess]) -> None:
    process = start("fast:spin")
    assert process.ask(LOAD, SECONDS) == {"version": "1", "options": {}}
    assert len(process.ask(RUN, SECONDS)["requests"][0]["tokens"]) == 4
    if not process.pids():
        pytest.skip("no /proc")
    assert states(process) == {"T"}, "its busy thread has to stop, too"
    assert process.ask(RUN, SECONDS)["seconds"] == 2.0
    assert (process.peak_rss_mib() or 0) > 1
    process.close()
    assert process.pids() == []


def test_a_worker_that_ends_is_told_with_what_it_printed(
    start: Callable[[str], PeerProcess],
) -> None:
    process = start("fast:crash2")
    process.ask(RUN, SECONDS)
    with pytest.raises(PeerFailed, match=r"^fast: it ended with status 7; it printed: out of \| m"):
        process.ask(RUN, SECONDS)
    with pytest.raises(PeerFailed, match=r"^fast: it has ended$"):
        process.ask(RUN, SECONDS)


def test_a_worker_that_hangs_is_ended(start: Callable[[str], PeerProcess]) -> None:
    process = start("fast:hang1")
    process.ask(LOAD, SECONDS)
    with pytest.raises(PeerFailed, match=r"^fast: no answer within 0\.2 s$"):
        process.ask(RUN, 0.2)
    assert process.pids() == []


def test_a_worker_that_says_why_it_cannot_goes_on(start: Callable[[str], PeerProcess]) -> None:
    process = start("fast:error1")
    with pytest.raises(PeerFailed, match=r"^fast: WrongAnswer: request 0 must get 4 tokens"):
        process.ask(RUN, SECONDS)
    assert process.ask(RUN, SECONDS)["seconds"] == 2.0


# --------------------------------------------------------------------------------- the comparison


def test_engines_alternate_and_each_repetition_has_its_own_prompts(compared: Any) -> None:
    _, log = compared({"pagedjax": "ours", "vllm": "slow"}, repeat=3)
    who = [name for name, _ in log]
    assert who == ["ours", "slow", "slow", "ours", "ours", "slow", "slow", "ours"]
    assert [int(first) for _, first in log] == [5, 5, 6, 6, 0, 0, 1, 1]  # 7 and 8 of 7 wrap


def test_ratios_are_taken_within_a_repetition(compared: Any) -> None:
    """Fakes take 1 or 2 seconds times the number of their run: 12 tokens in 2, 3 against 4, 6."""
    results, _ = compared({"pagedjax": "ours", "vllm": "slow"})
    ours, theirs = results.rows
    assert (ours["engine"], ours["ratio"], ours["agreement"]) == ("pagedjax", None, None)
    assert ours["output_tokens_per_s"] == {"median": 5.0, "min": 4.0, "max": 6.0}
    assert theirs["output_tokens_per_s"] == {"median": 2.5, "min": 2.0, "max": 3.0}
    assert theirs["ratio"] == {"median": 2.0, "min": 2.0, "max": 2.0}
    assert theirs["agreement"] == {"requests": 1.0, "tokens": 1.0}
    assert (theirs["workload"], theirs["concurrency"], theirs["dtype"]) == ("A", 2, "float32")
    assert results.failures == []


def test_every_engine_gets_the_same_sizes(compared: Any, tmp_path: Path) -> None:
    results, _ = compared({"pagedjax": "ours", "hf": "fast"}, options={"page_size": 32})
    ours, theirs = (results.engines[name]["options"] for name in ("pagedjax", "hf"))
    for settings in (ours, theirs):
        assert settings["max_model_len"] == 64
        assert settings["kv_tokens"] == 128
        assert (settings["concurrency"], settings["threads"]) == (2, 1)
    assert (ours["model"], ours["options"]) == ("ours", {"page_size": 32})
    assert (theirs["model"], theirs["options"]) == (str(tmp_path / "hf-float32"), {})


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("crash2", "vllm: it ended with status 7; it printed: out of | memory (A at 2 in float32"),
        ("error3", "vllm: WrongAnswer: request 0 must get 4 tokens. Got 3. (A at 2 in float32"),
        ("hang1", "vllm: no answer within 5 s (A at 2 in float32, run 0)"),
    ],
)
def test_who_fails_sits_out_and_the_others_go_on(compared: Any, fault: str, said: str) -> None:
    behaviours = {"pagedjax": "ours", "vllm": f"vllm:{fault}", "hf": "slow"}
    results, log = compared(behaviours, timeout=5.0)
    assert [row["engine"] for row in results.rows] == ["pagedjax", "hf"]
    assert results.rows[1]["ratio"]["median"] == 2.0
    assert len(results.failures) == 1
    assert results.failures[0].startswith(said)
    assert [name for name, _ in log].count("ours") == 3
    assert [name for name, _ in log].count("slow") == 3


def test_who_failed_is_tried_again_in_the_next_setting(compared: Any) -> None:
    behaviours = {"pagedjax": "ours", "vllm": "vllm:crash1"}
    results, log = compared(behaviours, concurrencies=[1, 8])
    assert len(results.failures) == 2
    assert [name for name, _ in log].count("vllm") == 2
    assert [row["concurrency"] for row in results.rows] == [1, 8]


def test_an_interrupt_leaves_the_rows_that_are_complete(
    start: Callable[[str], PeerProcess], tmp_path: Path
) -> None:
    def note(line: str) -> None:
        if "B at 2 in float32, run 1" in line:
            raise KeyboardInterrupt

    asked = comparison(tmp_path, peers=[])
    workloads = {"A": asked.workloads["A"], "B": asked.workloads["A"]}
    comparer = Comparer(comparison(tmp_path, peers=[], workloads=workloads), start, note)
    results = comparer.run()
    assert [row["workload"] for row in results.rows] == ["A"]
    assert results.failures == ["interrupted: the workloads that follow were not run"]


def test_without_ours_there_are_no_ratios(compared: Any) -> None:
    results, _ = compared({"pagedjax": "ours:crash2", "vllm": "slow"})
    (row,) = results.rows
    assert (row["engine"], row["ratio"]) == ("vllm", None)
    assert "out tok/s" in comparison_table.comparison_table(results.rows)


def test_a_model_that_was_not_exported_is_told_with_the_way_to_make_it(
    start: Callable[[str], PeerProcess], tmp_path: Path
) -> None:
    with pytest.raises(PeerFailed, match=r"no .*openvino-bfloat16; make it with: scripts/peers/ex"):
        catalog.model_path("openvino", tmp_path, "bfloat16")
    with pytest.raises(PeerFailed, match="`--peer-models` must name a folder"):
        catalog.model_path("hf", None, "bfloat16")
    asked = comparison(tmp_path, dtypes=["bfloat16"], repeat=1)
    results = Comparer(asked, start, lambda _: None).run()
    assert [row["engine"] for row in results.rows] == ["pagedjax"]
    assert "hf-bfloat16" in results.failures[0]


def test_another_one_begins_each_time() -> None:
    assert [in_turn(["a", "b", "c"], i) for i in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
    assert in_turn([], 2) == []


# ---------------------------------------------------------------------------------- arithmetic


def test_spread_and_paired_ratios() -> None:
    assert measures.spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    ratios = measures.paired_ratios([10.0, 5.0, 9.0], [5.0, 5.0, 3.0])
    assert ratios == {"median": 2.0, "min": 1.0, "max": 3.0}
    with pytest.raises(ValueError, match="zip"):
        measures.paired_ratios([1.0], [1.0, 2.0])


def test_percentiles_lie_between_ranks() -> None:
    assert measures.percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert measures.percentile([1.0, 2.0], 90) == pytest.approx(1.9)
    assert measures.percentile([7.0], 99) == 7.0


def test_latencies_count_from_the_arrival() -> None:
    records = [
        {"arrival_s": 1.0, "times": [1.5, 1.7, 2.3]},
        {"arrival_s": 2.0, "times": [2.1]},
    ]
    told = measures.latencies(records)
    assert told["ttft_ms_p50"] == pytest.approx(300)
    assert told["ttft_ms_mean"] == pytest.approx(300)
    assert told["tbt_ms_p50"] == pytest.approx(400)
    assert told["tbt_ms_p99"] == pytest.approx(596)
    assert told["e2e_ms_p50"] == pytest.approx(700)


def test_goodput_counts_who_kept_both_bounds() -> None:
    records = [
        {"arrival_s": 1.0, "times": [1.5, 1.6, 1.8]},  # 500 ms, then 150 on average
        {"arrival_s": 1.0, "times": [1.9, 2.0]},  # 900 ms
        {"arrival_s": 3.0, "times": [3.4]},  # one token: nothing between
        {"arrival_s": 1.0, "times": [1.5, 1.8]},  # 300 apart
    ]
    kept = measures.goodput(records, 4.0, max_ttft_ms=501.0, max_tbt_ms=151.0)
    assert kept == {"good_share": 0.5, "goodput_rps": 0.5}


def test_agreement_counts_tokens_before_a_difference() -> None:
    told = measures.agreement([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]])
    assert told == {"requests": 0.5, "tokens": pytest.approx(4 / 6)}
    assert measures.agreement([[1, 2]], [[1]])["requests"] == 0.0
    unknown = measures.agreement([[1, 2, 3]], [[1, UNKNOWN_TOKEN, 3]])
    assert unknown == {"requests": 1.0, "tokens": 1.0}


# ------------------------------------------------------------------------------ the command line


def bench(tmp_path: Path, *arguments: str) -> list[str]:
    load = tmp_path / "load.json"
    requests = [{"prompt_ids": [1, 2, 3], "max_new": 2, "arrival_s": 0.5}]
    load.write_text(json.dumps({"workloads": {"A": {"requests": requests}}}))
    return ["bench_engine", "--workload", str(load), *arguments]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--compare", "sglang"], "`--compare` must be of vllm, openvino, llama-cpp, hf. Got sg"),
        (["--compare", "hf", "--peer-python", "hf"], "`--peer-python` must be NAME=PATH"),
        (["--compare", "hf", "--concurrency", "8,x"], "`--concurrency` must be whole numbers"),
        (["--compare", "hf", "--threads", "0"], "`--threads` must be 1 to"),
        (
            ["--compare", "hf", "--peer-python", "hf=/nowhere/python"],
            "`--compare hf` must name an engine that is installed. Got hf: cannot start /nowhere",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_starts(
    bench_engine: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(sys, "argv", bench(tmp_path, *arguments))
    assert bench_engine.main() == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"bench_engine: {said}")


def test_a_peer_that_is_not_installed_is_told_with_the_way_to_install_it() -> None:
    """This project installs no peer: the real worker looks for one and finds none."""
    starter = catalog.Starter({}, command._cores(None))
    with pytest.raises(PeerFailed) as caught:
        command.probe(starter, "openvino")
    said = str(caught.value)
    assert "Got openvino: ModuleNotFoundError: No module named 'openvino_genai'." in said
    assert "pip install openvino-genai" in said
    assert "--peer-python openvino=PATH/bin/python" in said


def test_results_are_printed_for_people_and_for_programs(
    compared: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    results, _ = compared({"pagedjax": "ours", "vllm": "slow:other", "hf": "hf:crash1"})
    command.report(results, Path("somewhere/load.json"), [0, 1])
    *table, failed, line = capsys.readouterr().out.splitlines()
    assert len({len(row) for row in table}) == 1
    cells = table[2].split()
    assert cells[:5] == ["A", "2", "float32", "vllm", "2.5"]
    assert "2.00 (2.00..2.00)" in table[2]
    assert "75.0%" in cells
    assert failed.startswith("FAILED hf: it ended with status 7")
    printed = json.loads(line)
    assert printed["engines"]["vllm"]["version"] == "1"
    assert printed["rows"][1]["agreement"]["requests"] == 0.0
    assert (printed["cores"], printed["workload_file"]) == (2, "load.json")


def test_rows_with_arrival_times_have_a_table_of_latencies(compared: Any) -> None:
    requests = [{"prompt_ids": [5], "max_new": 4, "arrival_s": 0.0005}]
    results, _ = compared({"pagedjax": "ours"}, workloads={"D": requests}, max_tbt_ms=2.0)
    speed, _, latency = comparison_table.comparison_table(results.rows).partition("\n\n")
    assert "E2E ms p50" in latency
    assert "100%" in latency.splitlines()[1]
    assert len(speed.splitlines()) == len(latency.splitlines()) == 2


@pytest.fixture(scope="module")
def bench_engine() -> Any:
    import scripts.bench_engine as module

    return module
