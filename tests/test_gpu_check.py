"""`scripts/gpu_check`: its parts, its budget and its results file, on a CPU."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import pallas_kernels
from pallas_kernels import reference
from scripts import gpu_check, kernel_proofs
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
    assert found["float64"]["updates"]["same_bits"] is True
    assert found["float64"]["lines"][0]["error"] < 2e-2
    assert found["float64"]["lines"][0]["answered"] == "xla"
    assert found["others"]["none"] == {"seconds": 1.0}


def only(tmp_path: Path, part: str) -> tuple[int, dict[str, Any]]:
    """Exit status, and the part's results."""
    output = tmp_path / "results.json"
    status = gpu_check.main(["--small", "--only", part, "--output", str(output)])
    found = json.loads(output.read_text())
    assert not found["passed"]  # one part is never all of them
    return status, found[part]


def planted(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[..., Any]) -> None:
    """An operation whose result is changed: by `change(result, arguments, options)`."""
    real = getattr(pallas_kernels, name)

    def operation(*arguments: Any, **options: Any) -> Any:
        return change(real(*arguments, **options), arguments, options)

    monkeypatch.setattr(pallas_kernels, name, operation)


def plain(q: Any, *rest: Any, plan: Any = None, return_lse: bool = False, **_: Any) -> Any:
    """In place of attention, which takes long to compile or to interpret."""
    if return_lse:
        return q.astype(jnp.float32), q[..., 0].astype(jnp.float32)
    del plan
    return jnp.asarray(reference.paged_attention(*map(np.asarray, (q, *rest))), jnp.float32)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pallas_kernels, "paged_attention", plain)
    monkeypatch.setattr(kernel_proofs, "answered", lambda *_: "xla")


def test_an_answer_of_another_implementation_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_proofs, "asked_for", lambda small: "mosaic_gpu")
    status, found = only(tmp_path, "float64")
    assert (status, found["passed"], found["updates"]["passed"]) == (1, False, False)
    line = found["lines"][0]
    assert (line["asked"], line["answered"]) == ("mosaic_gpu", "xla")
    assert line["error"] <= line["limit"]  # what XLA says is right, and that is no proof
    assert found["updates"]["same_bits"]
    assert found["updates"]["answered"] == {"write_kv": "xla", "copy_pages": "xla"}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("wrong", [0.05, float("nan")])
def test_a_wrong_value_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    planted(monkeypatch, "paged_attention", lambda out, *_: out.at[1, 0, 3].add(wrong))
    status, found = only(tmp_path, "float64")
    assert (status, found["passed"], found["updates"]["passed"]) == (1, False, True)
    assert not found["lines"][0]["error"] <= found["lines"][0]["limit"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["write_kv", "copy_pages"])
def test_a_wrong_bit_of_a_page_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    planted(monkeypatch, name, lambda pool, *_: pool.at[3, 1, 2, 5, 7].multiply(-1))
    status, found = only(tmp_path, "float64")
    assert (status, found["passed"], found["updates"]["same_bits"]) == (1, False, False)
    assert found["lines"][0]["error"] <= found["lines"][0]["limit"]


def test_the_implementation_is_read_off_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a call that is lowered for a GPU here, without one; interpretation has no kernel in it."""

    class Hopper(AbstractDevice):
        compute_capability = "9.0"

    chip = Hopper("NVIDIA H200", 132, "gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=chip)
    real = jax.jit

    class ForGpu:
        def __init__(self, function: Callable[..., Any]) -> None:
            self.function = function

        def lower(self, *arrays: Any) -> Any:
            with jax.sharding.use_abstract_mesh(mesh):
                return real(self.function).trace(*arrays).lower(lowering_platforms=("cuda",))

    def calls(implementation: str | None) -> list[str]:
        ids = np.array([1], np.int32)
        copy = functools.partial(pallas_kernels.copy_pages, implementation=implementation)
        return [kernel_proofs.answered(copy, np.ones((3, 2, 1, 16, 128), np.float32), ids, ids + 1)]

    monkeypatch.setattr(kernel_proofs.jax, "jit", ForGpu)
    assert calls("mosaic_gpu") == ["mosaic_gpu"]
    assert calls(None) == ["mosaic_gpu"]
    assert calls("xla") == ["xla"]


def test_a_row_has_its_bits_in_every_batch() -> None:
    found = kernel_proofs.batch_invariance("xla", True)
    assert found == {"passed": True, "compared": 8, "different": []}


def uneven(out: Any, arguments: tuple[Any, ...], _: Any) -> Any:
    """A few units in the last place for the number of sequences in the batch."""
    return (
        (out[0] * (1 + arguments[5].astype(jnp.float32) * 2.0**-22), out[1])
        if isinstance(out, tuple)
        else out
    )


def rough(out: Any, _: Any, options: dict[str, Any]) -> Any:
    return out if isinstance(out, tuple) or options["plan"].prefix is None else out + 1e-3


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("change", "good"),
    [
        (lambda out, *_: out, {"cascade": True, "batch_invariant": True}),
        (uneven, {"cascade": True, "batch_invariant": False}),
        (rough, {"cascade": False, "batch_invariant": True}),
    ],
)
def test_a_property_that_does_not_hold_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, good: dict[str, bool]
) -> None:
    planted(monkeypatch, "paged_attention", change)
    status, found = only(tmp_path, "properties")
    assert {name: found[name]["passed"] for name in good} == good
    assert (status == 0) is found["passed"] is all(good.values())
    assert found["cascade"]["shared_tiles"] > 0


@pytest.mark.usefixtures("quick")
def test_a_cascade_that_shares_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pallas_kernels.plan_attention

    def flat(*arrays: Any, cascade: bool, **options: Any) -> Any:
        return real(*arrays, **options)

    monkeypatch.setattr(pallas_kernels, "plan_attention", flat)
    status, found = only(tmp_path, "properties")
    assert (status, found["cascade"]["passed"], found["cascade"]["shared_tiles"]) == (1, False, 0)


@pytest.mark.slow
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    assert gpu_check.main(["--small", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert found["suite"]["counts"]["passed"] > 10
    assert found["properties"]["cascade"]["shared_tiles"] > 0  # of kernels, interpreted
    assert max(found["properties"]["cascade"]["errors"].values()) < 1e-5
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
