"""The command line: what it prints, its exit status, and that it loads no JAX."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pagedjax.cli import main
from pagedjax.events import EventLog
from pagedjax.version import __version__
from tests.event_logs import Trace, write_trace

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Requests r0, r1, ... of a random trace."""
    write_trace(tmp_path / "log", seed=3)
    return tmp_path / "log"


def run(*arguments: object, shell_tail: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pagedjax", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_all_requests_are_listed_with_totals(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--event-log", str(log)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        *("request", "arrived", "waited", "prompt", "cached", "output", "gave", "way", "ended")
    ]
    num_requests = len([line for line in lines if line.startswith("r") and line[1].isdigit()])
    added = [line for line in log.read_text().splitlines() if '"e":"added"' in line]
    assert num_requests == len(added) > 5
    assert lines[num_requests + 2].startswith(f"{num_requests} requests, {num_requests} ended, in ")
    assert "tokens computed again" in lines[-2]


def test_one_request_is_told_in_words(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "r1", "--event-log", str(log)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("r1: ")
    assert "arrived as number 1" in text
    assert "ended (" in text


def test_an_unknown_request_gets_near_names(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "r1x", "--event-log", str(log)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "pagedjax: error: no request 'r1x' among the" in captured.err
    assert "Did you mean r1 or " in captured.err
    assert main(["explain", "completely else", "--event-log", str(log)]) == 2
    assert "Did you mean" not in capsys.readouterr().err


def test_part_of_a_long_name_is_near_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path / "log", seed=1, num_operations=30)
    del path
    text = (tmp_path / "log").read_text().replace('"r0"', '"chat-completion-0123456789-a"')
    (tmp_path / "log").write_text(text)
    assert main(["explain", "0123456789", "--event-log", str(tmp_path / "log")]) == 2
    assert "Did you mean chat-completion-0123456789-a?" in capsys.readouterr().err


def test_a_log_that_cannot_be_read_ends_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["explain", "--event-log"], ["replay"]):
        assert main([*command, str(tmp_path / "none")]) == 2
        assert "cannot read the event log" in capsys.readouterr().err


def test_a_log_without_requests_is_explained_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = EventLog(tmp_path / "log")
    Trace(0, log)
    log.close()
    assert main(["explain", "--event-log", str(tmp_path / "log")]) == 0
    assert "0 requests, 0 ended" in capsys.readouterr().out


def test_damage_inside_a_line_is_told_by_its_number(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    at = next(i for i, line in enumerate(lines) if line.get("admitted"))
    lines[at]["admitted"] = [["no such sequence"]]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["explain", "--event-log", str(log)]) == 2
    assert f"line {at + 1} is damaged" in capsys.readouterr().err


def test_a_replay_that_agrees(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(log)]) == 0
    out = capsys.readouterr().out
    num_lines = len(log.read_text().splitlines())
    assert out.startswith(f"{num_lines} lines, ")
    assert out.endswith("decisions are the same\n")


def test_a_replay_that_differs_shows_both_sides(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = log.read_text().replace('"free":', '"free":9', 1)
    log.write_text(text)
    assert main(["replay", str(log)]) == 1
    out = capsys.readouterr().out
    assert "step 1: `free` differs\n  in the log: 9" in out
    assert "  replayed:   " in out


def test_another_version_is_told(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.write_text(log.read_text().replace(f'"version":"{__version__}"', '"version":"0.0.1"', 1))
    assert main(["replay", str(log)]) == 0
    assert f"the log is of pagedjax 0.0.1, this is {__version__}" in capsys.readouterr().out


def test_as_a_module_and_without_a_command(log: Path) -> None:
    assert run("replay", log).returncode == 0
    assert run().returncode == 2
    assert run("--version").stdout == f"pagedjax {__version__}\n"
    for command in ("explain", "replay"):
        assert "usage: pagedjax" in run(command, "--help").stdout


def test_a_closed_pipe_is_no_error(log: Path) -> None:
    command = f'"{sys.executable}" -m pagedjax explain --event-log "{log}" | head -n 1'
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.startswith("request ")
    assert result.stderr == ""


@pytest.mark.parametrize("command", ["explain", "replay"])
def test_no_command_loads_jax(log: Path, command: str) -> None:
    arguments = (
        ["explain", "--event-log", str(log)] if command == "explain" else ["replay", str(log)]
    )
    code = (
        "import sys; from pagedjax.cli import main; status = main(sys.argv[1:]); "
        "sys.exit(status or int(bool({'jax', 'flax', 'pallas_kernels'} & set(sys.modules))))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
