"""The kernels' benchmark: what it measures on a CPU, what it tries in a sweep, what it saves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.tuning import Chip, Entry, KernelConfig
from scripts import bench_kernels, kernel_timing
from scripts.kernel_timing import Device, Sizes

QUICK = Device(2**12, 2**24, 1e-4, 1, 1)
LIMITS = {"copy_bytes_per_s": 1e9, "read_bytes_per_s": 2e9, "product_flops_per_s": 1e12}
TINY: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16}
ENTRY = Entry("decode", ("bfloat16", "float16"), 128, 64, 4, "columns", 8, 64, 3, 2, True, True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "at_hand", lambda: QUICK)
    monkeypatch.setattr(kernel_timing, "ceilings", lambda device: LIMITS)


def test_it_prints_a_table_and_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--operations decode,write_kv --batch 2 --context 32 --page-size 16"
    arguments += " --heads 4,2 --head-dim 64 --implementation xla"
    assert bench_kernels.main([*arguments.split()]) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert [line["what"] for line in result["lines"]] == ["decode", "write_kv"]
    for line in result["lines"]:
        assert line["seconds"] > 0
        assert line["of_copy"] == pytest.approx(line["bytes_per_s"] / 1e9)
        assert line["of_read"] == pytest.approx(line["bytes_per_s"] / 2e9)
    assert len(shown) == 3
    assert "GB/s" in shown[0]


def test_a_kernel_that_cannot_run_is_a_line_with_its_error() -> None:
    sizes = Sizes(batch=1, context=16, **TINY)
    line = kernel_timing.measure("decode", sizes, QUICK, "nonsense", LIMITS)
    assert "`implementation` must be" in line["error"]
    assert "nonsense" in bench_kernels.table([line])


def test_bytes_and_operations_are_counted() -> None:
    sizes = Sizes(batch=3, context=10, new=2, **TINY)
    assert sizes.kv_bytes == 3 * 10 * 2 * 2 * 64 * 2
    assert sizes.flops == 4 * 3 * (9 + 10) * 4 * 64  # the queries see 9 and 10 positions
    assert Sizes(dtype="int8", **TINY).vector_bytes == 64 + 4


def test_data_is_random_and_pages_are_taken_once() -> None:
    for dtype in ("bfloat16", "int8"):
        sizes = Sizes(batch=2, context=33, dtype=dtype, **TINY)
        pool, scales = kernel_timing.make_pool(sizes, 3)
        values = np.asarray(pool.astype(jnp.float32))
        assert np.isfinite(values).all()
        assert values.std() > 0.5
        assert (scales is None) == (dtype == "bfloat16")
    tables = np.asarray(kernel_timing.tables(sizes, 3)).ravel()
    assert sorted(tables) == list(range(1, pool.shape[0]))


def test_calls_go_over_more_than_the_caches_hold() -> None:
    device = Device(2**30, 2**33, 0.1, 3, 4)
    small, large = Sizes(batch=1, context=4096), Sizes(batch=64, context=32768)
    assert kernel_timing.rotations_for(small, device) * small.kv_bytes >= 2**30
    assert kernel_timing.rotations_for(large, device) == 1


def test_candidates_are_distinct_and_begin_with_the_tuned_one() -> None:
    base = KernelConfig("columns", 8, 64, 3, 264, True, True)
    found = list(bench_kernels.candidates(base, 132))
    assert found[0] == base
    assert len(found) == len(set(found)) > 10
    assert {config.workers for config in found} == {132, 264, 396}


def test_sweep_keeps_the_fastest_that_is_as_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    base = KernelConfig("columns", 8, 64, 3, 264, True, True)
    monkeypatch.setattr(
        bench_kernels, "tuned", lambda *_: ("mosaic_gpu", Chip("NVIDIA X", "sm_90", 132), base)
    )

    def measured(*_: Any, decode: KernelConfig, **__: Any) -> dict[str, Any]:
        if decode.kv_tile == 128:
            return {"error": "too large"}
        return {"seconds": (5 - decode.stages) * (2 if decode.split_p else 1) * 1e-6}

    monkeypatch.setattr(kernel_timing, "measure", measured)
    lines, entry = bench_kernels.sweep("decode", Sizes(), QUICK, LIMITS)
    assert any("error" in line for line in lines)
    assert entry is not None
    assert (entry.stages, entry.split_p, entry.workers_per_core) == (4, True, 2)
    assert (entry.group, entry.dtypes) == (4, ("bfloat16", "float16"))


def test_saving_replaces_entries_for_the_same_problem(tmp_path: Path) -> None:
    chip = Chip("NVIDIA X", "sm_90", 1)
    other = tuning.Entry(**{**_fields(ENTRY), "head_dim": 64})
    bench_kernels.save(chip, [ENTRY, other], tmp_path)
    path = bench_kernels.save(chip, [tuning.Entry(**{**_fields(ENTRY), "stages": 5})], tmp_path)
    kept = tuning.load(path)
    assert {(e.head_dim, e.stages) for e in kept.entries} == {(64, 3), (128, 5)}
    assert kept.source.startswith("measured 2")


def _fields(entry: Entry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in entry.__dataclass_fields__}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--operations fly", "--operations: must be of decode, prefill, write_kv, copy_pages. Got"),
        ("--dtype nonsense", "--dtype: must be of bfloat16, .*, int8. Got 'nonsense'"),
        ("--dtype bfloat16,", "--dtype: must be of .* Got 'bfloat16,'"),
        ("--implementation triton", "must be of mosaic_gpu, mosaic_tpu, native_cpu, xla"),
        ("--heads 3,2", "`--heads` must be query heads, a multiple of the kv heads"),
        ("--heads 4", "`--heads` must be query heads"),
        ("--batch 0", "--batch: must be from 1 to 2147483647. Got '0'"),
        ("--batch 1,x", "--batch: must be from 1 to .* Got 'x'"),
        ("--context 1.5", "--context: must be from 1 to"),
        ("--context 99999999999999999999", "--context: must be from 1 to"),
        ("--head-dim 0", "--head-dim: must be from 1 to"),
        ("--page-size 24", r"`--page-size` must be powers of two up to 256. Got \[24\]"),
        ("--page-size 16,512", r"`--page-size` must be .* Got \[512\]"),
        ("--save", "`--save` must be used with `--sweep`"),
        ("--sweep --operations write_kv", "`--sweep` must be of decode or prefill"),
    ],
)
def test_wrong_usage_is_refused(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench_kernels.main([*arguments.split()])
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_sweep_needs_a_device_with_kernels() -> None:
    with pytest.raises(NotImplementedError, match="needs a device with kernels"):
        bench_kernels.main(["--sweep", "--operations", "decode"])
