"""`pagedjax plan`: it decides what start-up decides, reads no weights and asks no absent device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from pagedjax import LLM, CapacityError, ConfigError, device, startup
from pagedjax.cli import main
from pagedjax.config import EngineConfig
from pagedjax.device import DeviceMemory
from pagedjax.memory_plan import MemoryPlan, described, make_plan
from pagedjax.weights import checkpoint, load_model
from pallas_kernels import cpu
from tests.tiny_checkpoint import tiny_checkpoint

ROOT = Path(__file__).resolve().parent.parent
FREE = 3 * 2**20  # bytes, once the weights are loaded


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One of a context of 256 tokens."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    return str(folder)


class NotReached(Exception):
    """Start-up decided; what it would compile is not the question."""


def started(monkeypatch: pytest.MonkeyPatch, model: str, **options: Any) -> Any:
    """The sizes that an engine gets, with FREE bytes free."""
    decided: list[Any] = []

    def stop(flat: Any, config: Any, **_: Any) -> Any:
        del flat
        decided.append(config)
        raise NotReached

    with monkeypatch.context() as patch:
        patch.setattr(startup, "ModelRunner", stop)
        give_memory(patch, FREE)
        with pytest.raises(NotReached):
            LLM(model, **options)
    return decided[0]


def give_memory(patch: pytest.MonkeyPatch, free: int) -> None:
    patch.setattr(device, "memory", lambda: DeviceMemory(free, 2**36))
    patch.setattr(device, "host_memory", lambda: DeviceMemory(free, 2**36))


def planned(model: str, *, length: int | None = None, **options: Any) -> MemoryPlan:
    return make_plan(model, EngineConfig(**options), length=length)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"memory_utilization": 0.5, "max_model_len": 100, "page_size": 8},
        {"memory_utilization": 0.5, "kv_cache_dtype": "int8", "max_num_seqs": 200},
        {"num_pages": 40, "swap_space": 2**-12, "preemption_mode": "swap"},
        {"batch_invariant": True, "dtype": "bfloat16", "max_num_batched_tokens": 96},
        {"quantization": "int8", "memory_utilization": 0.5},
    ],
)
def test_a_plan_is_what_start_up_decides(
    monkeypatch: pytest.MonkeyPatch, model: str, options: dict[str, Any]
) -> None:
    how = {"dtype": options.get("dtype", "auto")}
    how["quantization"] = options.get("quantization", "none")
    weights = load_model(model, **how).num_bytes
    config = started(monkeypatch, model, **options)
    give_memory(monkeypatch, FREE + weights)
    plan = planned(model, **options)
    assert plan.sizes.config == config
    assert plan.weights_bytes == weights
    assert plan.num_tokens == (config.num_pages - 1) * config.page_size


def test_no_weight_is_read(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(checkpoint.StoredTensor, "read_rows", refuse)
    with pytest.raises(AssertionError, match="a weight was read"):
        load_model(model)
    assert planned(model).weights_bytes > 0


def test_what_the_largest_step_takes_is_told_and_taken_off(
    monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    if device.platform() != "cpu":
        pytest.skip("imitates an accelerator on a CPU")
    monkeypatch.setattr(device, "platform", lambda: "gpu")
    options: dict[str, Any] = {"attention_implementation": "xla", "max_num_seqs": 2000}
    monkeypatch.setattr(device, "memory", lambda: DeviceMemory(2**23, 2**23))
    plans = []
    for step in (0, 10**6):
        monkeypatch.setattr(startup, "_step_bytes", lambda *_, step=step: step)
        plans.append(planned(model, **options))
    page_bytes = plans[0].sizes.layout.page_bytes
    lost = plans[0].sizes.config.num_pages - plans[1].sizes.config.num_pages
    assert 10**6 // page_bytes <= lost <= 10**6 // page_bytes + 1
    assert plans[1].sizes.step_bytes == 10**6
    given = planned(model, **options, num_pages=100)
    assert given.sizes.step_bytes is None
    assert "not compiled where `num_pages` is given" in "\n".join(given.lines())


@pytest.mark.usefixtures("no_cpu_kernels")
@pytest.mark.parametrize(
    ("platform", "attention", "page_size"),
    [
        ("gpu", "mosaic_gpu (the kernels for a GPU)", 64),
        ("tpu", "mosaic_tpu (the kernels for a TPU)", 128),
        ("cpu", "xla (the portable one; device is a CPU)", 16),
    ],
)
def test_a_described_device_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, model: str, platform: Any, attention: str, page_size: int
) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a device was asked")

    for name in ("name", "platform", "memory", "host_memory", "defaults"):
        monkeypatch.setattr(device, name, refuse)
    monkeypatch.setattr(jax, "devices", refuse)
    options = EngineConfig(dtype="bfloat16", swap_space=0.5)
    plan = make_plan(model, options, target=described(platform, 2**30))
    assert str(plan.sizes.choice) == attention
    assert plan.sizes.config.page_size == page_size
    assert plan.sizes.step_bytes is None
    page_bytes = plan.sizes.layout.page_bytes
    assert plan.host_pool_bytes == 2**29 // page_bytes * page_bytes
    assert plan.to_dict()["device"] == f"a {platform.upper()} of 1.00 GiB"


def test_nothing_is_left_out_of_the_memory(model: str) -> None:
    plan = make_plan(model, EngineConfig(memory_utilization=1.0, max_num_seqs=2**20),
                     target=described("gpu", 2**28))  # fmt: skip
    told = plan.to_dict()
    taken = told["weights_bytes"] + told["pool_bytes"] + told["transfer_bytes"]
    assert taken + told["left_bytes"] == 2**28
    assert 0 <= told["left_bytes"] < told["page_bytes"]


def test_requests_of_a_length_are_whole_ones(model: str) -> None:
    options = {"page_size": 16, "num_pages": 11, "max_model_len": 100}
    counts = {n: planned(model, length=n, **options).requests_of(n) for n in (1, 16, 17, 80, 100)}
    assert counts == {1: 10, 16: 10, 17: 5, 80: 2, 100: 1}
    for length in (0, -1, 101):
        with pytest.raises(ConfigError, match=r"`length` must be in \[1, 100\].*Got"):
            planned(model, length=length, **options)


def test_people_read_it_within_a_hundred_columns(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", model, "--memory", "1GiB", "--dtype=bfloat16", "--block-size", "32"]
    assert main([*arguments, "--length", "100", "--swap-space", "0.25"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert lines[0].endswith(" in bfloat16 on a GPU of 1.00 GiB")
    labels = [line[2:22].strip() for line in lines[1:]]
    assert [label for label in labels if label] == [
        "free memory", "weights", "page pool", "largest step", "transfers", "swap space", "left",
        "tokens", "requests at once", "step", "compiled sizes", "attention",
        "products",
    ]  # fmt: skip
    text = "\n".join(lines)
    assert "swap space          0.25 GiB" in text
    assert " of 100 tokens" in text
    assert "only the device's compiler tells" in text


def test_a_plan_for_here_knows_the_kernels_of_here(
    model: str, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    arguments = ["plan", model, "--num-pages", "20", "--max-model-len", "64", "--json"]
    for fixture, attention, products in (
        ("cpu_kernels", "native_cpu (", "own kernels, built by "),
        ("no_cpu_kernels", "xla (", "XLA (PAGEDJAX_CPU_KERNELS is off)"),
    ):
        request.getfixturevalue(fixture)
        assert main(arguments) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["attention"].startswith(attention)
        assert told["products"].startswith(products)


@pytest.mark.usefixtures("no_cpu_kernels")
def test_machines_read_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", model, "--num-pages", "20", "--max-model-len", "64", "--json"]
    assert main([*arguments, "--length", "33", "--no-enable-prefix-caching"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["num_pages"], told["num_tokens"], told["max_model_len"]) == (20, 19 * 16, 64)
    assert (told["length"], told["requests_of_length"], told["max_concurrency"]) == (33, 6, 4.75)
    coarse, fine = [1, 8, 32, 64, 128, 256, 512], [1, 4, 8, 12, 16, 24, 32, 64, 96, 128, 192]
    assert told["buckets"] == ([*fine, 256, 384, 512] if cpu.is_loaded() else coarse)
    report = set(startup.StartupReport.__dataclass_fields__)
    only_started = {"load_seconds", "compile_seconds", "total_seconds", "programs", "products"}
    assert report - only_started <= told.keys()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--num-pages", "3", "--max-model-len", "64"], 1, "`num_pages` must be at least 5"),
        (["--memory", "1000"], 1, "the weights of"),
        (["--memory", "60000", "--max-model-len", "256"], 1, "one request of `max_model_len` 256"),
        (["--max-modle-len", "64"], 2, "unknown option --max-modle-len. Did you mean --max-model"),
        (["--gpu-memory-utilisation=0.5"], 2, "Did you mean --gpu-memory-utilization?"),
        (["--zzz"], 2, "unknown option --zzz. See --help."),
        (["another"], 2, "unknown argument another."),
        (["--page-size", "10"], 2, "`page_size` must be a power of two"),
        (["--length", "9999999"], 2, "`length` must be in [1, "),
        (["--platform", "tpu"], 2, "`--platform` must be given with `--memory`"),
        (["--max-model-len", "9999999"], 2, "what the model was made for"),
    ],
)
def test_what_does_not_fit_and_what_is_wrong(
    model: str,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    message: str,
) -> None:
    assert main(["plan", model, *arguments]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith(
        "pagedjax: it does not fit: " if status == 1 else "pagedjax: error: "
    )


@pytest.mark.parametrize("size", ["", "0", "lots", "-1", "5 furlongs", "1e9", "nan"])
def test_an_odd_memory_size_is_refused(
    model: str, capsys: pytest.CaptureFixture[str], size: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", model, f"--memory={size}"])
    assert caught.value.code == 2
    assert "such as 80GiB. Got" in capsys.readouterr().err


def test_memory_has_units(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    for text, expected in [("1073741824", 2**30), ("1.5GB", 15 * 10**8), ("64mib", 2**26)]:
        assert main(["plan", model, "--memory", text, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["memory_total_bytes"] == expected


def test_a_damaged_header_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_checkpoint(tmp_path / "damaged")
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-4])
    assert main(["plan", str(folder)]) == 2
    assert "pagedjax: error: " in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "nothing")]) == 2
    assert "there is no such file or directory" in capsys.readouterr().err


def test_weights_that_do_not_fit_are_told_with_both_sizes(model: str) -> None:
    with pytest.raises(CapacityError, match=r"take 0.00 GiB; 0.00 GiB are free on a GPU of 0.00"):
        make_plan(model, EngineConfig(), target=described("gpu", 1000))


def test_a_plan_for_an_absent_device_starts_no_backend(model: str) -> None:
    code = (
        "import sys; from pagedjax.cli import main; status = main(sys.argv[1:]); "
        "from jax._src import xla_bridge; sys.exit(status or len(xla_bridge._backends))"
    )
    arguments = ["plan", model, "--memory", "1GiB"]
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, b"")
