"""Start-up: which options it refuses and how, what it decides, what it reports, what it logs."""

from __future__ import annotations

import dataclasses
import json
import logging
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pagedjax import LLM, CapacityError, ConfigError, device, startup, throughput
from pagedjax.device import DeviceMemory
from pagedjax.programs import CompiledProgram
from pagedjax.startup import StartupReport
from pallas_kernels import cpu
from tests.helpers import ByteTokenizer, TinyLM
from tests.tiny_engine import HOST_PAGES, tiny_llm

PAGE_BYTES = 2 * 2 * 2 * 8 * 4 * 4  # TinyLM: layers, K and V, heads, head_dim, page_size, f32


class NotReached(Exception):
    """Start-up went past the checks that a test is about."""


@pytest.fixture
def refuse_to_compile(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Start-up ends where the runner would be made; what it had decided is kept."""
    decided: list[Any] = []

    def stop(flat: Any, config: Any, **_: Any) -> Any:
        decided.append(config)
        raise NotReached

    monkeypatch.setattr(startup, "ModelRunner", stop)
    return decided


def decide(decided: list[Any], **options: Any) -> Any:
    with pytest.raises(NotReached):
        LLM(TinyLM(), **options)
    return decided.pop()


def give_memory(monkeypatch: pytest.MonkeyPatch, free: int, total: int = 2**36) -> None:
    monkeypatch.setattr(device, "memory", lambda: DeviceMemory(free, total))


@pytest.mark.usefixtures("refuse_to_compile")
class TestRefusals:
    def test_one_request_must_fit_the_pages_asked_for(self) -> None:
        with pytest.raises(CapacityError) as caught:
            LLM(TinyLM(), page_size=4, num_pages=25, max_model_len=128)
        assert str(caught.value).startswith(
            "`num_pages` must be at least 33 for one request of `max_model_len` 128"
        )
        assert "Got 25, which holds 96 tokens" in str(caught.value)

    def test_one_request_must_fit_the_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        give_memory(monkeypatch, free=20 * PAGE_BYTES)
        with pytest.raises(CapacityError) as caught:
            LLM(TinyLM(), page_size=4, max_model_len=128, memory_utilization=1.0)
        assert "one request of `max_model_len` 128 needs 0.000 GiB" in str(caught.value)
        assert "which hold 76 tokens. Set `max_model_len` to at most 76" in str(caught.value)

    def test_a_longer_context_than_the_models_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"at most 256, what the model was made for. Got 257"):
            LLM(TinyLM(), max_model_len=257)

    def test_a_model_without_a_length_needs_the_option(self) -> None:
        model = TinyLM()
        model.max_model_len = None  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(ConfigError, match="`max_model_len` must be given: the model does not"):
            LLM(model)

    @pytest.mark.parametrize("length", [0, -5, True, "256", 2.5])
    def test_an_odd_length_of_the_model_is_refused(self, length: Any) -> None:
        model = TinyLM()
        model.max_model_len = length
        with pytest.raises(ConfigError, match=f"positive integer. Got {length!r}"):
            LLM(model)

    def test_contradicting_options_are_refused_with_both_numbers(self) -> None:
        with pytest.raises(ConfigError, match=r"at least `max_num_seqs` \(64\).*Got 32"):
            LLM(TinyLM(), max_num_seqs=64, max_num_batched_tokens=32)

    def test_an_unknown_attention_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"Got 'flash': `implementation` must be None or one"):
            LLM(TinyLM(), attention_implementation="flash")

    def test_a_dtype_that_a_models_own_code_does_not_follow_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="a cache of dtype float16"):
            LLM(TinyLM(), dtype="float16")

    def test_what_a_tokenizer_misses_is_named(self) -> None:
        class Half:
            vocab_size = 32

            def encode(self, text: str) -> list[int]:
                raise NotImplementedError

        message = r"subclass of .*Tokenizer with .*Got Half without decode, eos_token_ids, bos_to"
        with pytest.raises(ConfigError, match=message):
            LLM(TinyLM(), tokenizer=Half())  # pyright: ignore[reportArgumentType]


def test_what_nobody_set_suits_the_device(refuse_to_compile: list[Any]) -> None:
    config = decide(refuse_to_compile)
    assert (config.page_size, config.max_num_seqs) == (16, 32)
    assert (config.max_num_batched_tokens, config.max_model_len) == (512, 256)
    assert config.num_pages == 1 + 32 * 256 // 16  # all that 32 sequences can fill
    assert config.vocab_size == 32
    assert config.enable_prefix_caching


def test_a_small_step_makes_few_sequences(refuse_to_compile: list[Any]) -> None:
    config = decide(refuse_to_compile, max_num_batched_tokens=8)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (8, 8)
    config = decide(refuse_to_compile, max_num_seqs=600)
    assert config.max_num_batched_tokens == 600
    config = decide(refuse_to_compile, max_num_seqs=1, max_model_len=40)
    assert config.max_num_batched_tokens == 40


def test_the_pool_is_sized_by_the_free_memory(
    refuse_to_compile: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    give_memory(monkeypatch, free=400 * PAGE_BYTES)
    config = decide(refuse_to_compile, page_size=4, memory_utilization=0.5)
    assert config.num_pages == 200
    assert config.max_model_len == 256
    config = decide(refuse_to_compile, page_size=4, memory_utilization=0.5, max_num_seqs=2)
    assert config.num_pages == 1 + 2 * 64
    monkeypatch.setattr(TinyLM, "max_model_len", 1000)
    give_memory(monkeypatch, free=260 * PAGE_BYTES)
    with pytest.raises(CapacityError, match="`max_model_len` 1000 needs"):
        LLM(TinyLM(), page_size=4, memory_utilization=0.9)


def test_the_hosts_memory_is_plausible() -> None:
    memory = device.memory()
    assert 0 < memory.free <= memory.total
    assert device.platform() in ("cpu", "gpu", "tpu")
    assert device.name()


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [("max", "1", None), (str(2**30), str(2**28), 2**30 - 2**28), (str(2**30), str(2**31), 0)],
)
def test_a_container_has_its_limit_for_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, limit: str, used: str, expected: int | None
) -> None:
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text(used + "\n")
    monkeypatch.setattr(device, "_CGROUP", tmp_path)
    monkeypatch.setattr(device, "_meminfo", lambda field: 2**33)
    monkeypatch.setattr(device, "platform", lambda: "cpu")
    memory = device.memory()
    assert memory.free == (2**33 if expected is None else expected)
    if expected is not None:
        assert memory.total == 2**30


class FakeDevice:
    platform = "cuda"
    device_kind = "NVIDIA Test"

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 100, "bytes_in_use": 30, "peak_bytes_in_use": 60}


def test_an_accelerators_memory_is_what_jax_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [FakeDevice()])
    assert device.platform() == "gpu"
    assert device.memory() == DeviceMemory(70, 100)
    assert device.peak_bytes() == 60
    assert device.name() == "NVIDIA Test"
    assert device.defaults().page_size == 64
    assert device.defaults().dtype == "bfloat16"


def test_swap_space_is_host_pages_beside_the_pool(
    refuse_to_compile: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"page_size": 4, "num_pages": 33, "max_model_len": 128}
    config = decide(refuse_to_compile, **options, preemption_mode="swap")
    assert (config.num_host_pages, config.preemption_mode) == (0, "swap")
    half = 2**19 / PAGE_BYTES  # of a MiB
    config = decide(refuse_to_compile, **options, swap_space=2**-11, victim_policy="least_cost")
    assert (config.num_host_pages, config.victim_policy) == (half, "least_cost")
    monkeypatch.setattr(device, "host_memory", lambda: DeviceMemory(43 * PAGE_BYTES, 2**36))
    if device.platform() == "cpu":  # the pool takes its 33 pages of the same memory
        with pytest.raises(CapacityError, match="`swap_space` must fit into the host's free mem"):
            LLM(TinyLM(), **options, swap_space=11 * PAGE_BYTES / 2**30)
    config = decide(refuse_to_compile, **options, swap_space=10 * PAGE_BYTES / 2**30)
    assert config.num_host_pages == 10


def test_swap_that_cannot_be_is_told(
    refuse_to_compile: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"page_size": 4, "num_pages": 33, "max_model_len": 128}
    decide(refuse_to_compile, **options, swap_space=PAGE_BYTES / 2**30, preemption_mode="swap")
    decide(refuse_to_compile, **options, preemption_mode="recompute")
    assert caplog.text == ""
    decide(refuse_to_compile, **options, preemption_mode="swap")
    assert "`preemption_mode` is swap and `swap_space` is 0" in caplog.text
    caplog.clear()
    decide(refuse_to_compile, **options, swap_space=(PAGE_BYTES - 1) / 2**30)
    assert f"holds no page of {PAGE_BYTES} bytes" in caplog.text


def test_what_transfers_take_is_taken_off_the_pool(
    refuse_to_compile: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_flight = 6 * 64 * PAGE_BYTES  # batches of 64 pages: four on their way, two in the making
    give_memory(monkeypatch, 4000 * PAGE_BYTES)
    monkeypatch.setattr(device, "host_memory", lambda: DeviceMemory(2**40, 2**40))
    options = {"page_size": 4, "max_model_len": 128, "max_num_seqs": 200, "memory_utilization": 1.0}
    without = decide(refuse_to_compile, **options)
    beside = decide(refuse_to_compile, **options, swap_space=0.001)
    assert (without.num_host_pages, beside.num_host_pages) == (0, 2**30 // 1000 // PAGE_BYTES)
    assert without.num_pages - beside.num_pages == in_flight // PAGE_BYTES


def test_a_cpu_keeps_no_peak() -> None:
    if device.platform() == "cpu":
        assert device.peak_bytes() is None


# ------------------------------------------------------------------------------------- the report

REPORT = StartupReport(
    model="Tiny",
    device="cpu x2",
    dtype="float32",
    quantization="none",
    kv_cache_dtype="float32",
    attention="xla (asked for)",
    products="XLA",
    weights_bytes=3 * 2**29,
    load_seconds=1.25,
    memory_free_bytes=8 * 2**30,
    pool_bytes=2**30,
    page_size=16,
    num_pages=1001,
    num_host_pages=0,
    page_bytes=1_048_576,
    max_model_len=4000,
    max_num_seqs=8,
    max_num_batched_tokens=512,
    max_concurrency=4.0,
    buckets=(2, 4, 8, 16),
    programs=(
        CompiledProgram("step of 16 tokens", 2.25, is_kept=False),
        CompiledProgram("decoding 2 tokens", 3.0, is_kept=True),
        CompiledProgram("page copies", 0.25, is_kept=False),
    ),
    compile_seconds=3.0,
    total_seconds=5.5,
)


def test_the_report_says_what_was_decided() -> None:
    assert REPORT.lines() == [
        "Model Tiny in float32 on cpu x2: weights 1.50 GiB, loaded in 1.2 s",
        "Memory: 8.00 GiB free, 1.00 GiB for the KV cache: 1001 pages of 16 tokens "
        "in float32, 1,048,576 bytes a page",
        "KV cache size: 16,000 tokens. Maximum concurrency for 4,000 tokens per request: 4.00x",
        "Attention: xla (asked for). Steps of at most 8 sequences and 512 tokens. Products: XLA",
        "Programs for steps of [2, 4, 8, 16] tokens: 2 compiled, 1 kept from earlier starts, "
        "in 3.0 s",
        "Start-up took 5.5 s",
    ]
    assert REPORT.program_lines() == [
        "  decoding 2 tokens: kept from an earlier start, 3.0 s",
        "  step of 16 tokens: compiled, 2.2 s",
        "  page copies: compiled, 0.2 s",
    ]
    told = REPORT.to_dict()
    assert (told["num_programs"], told["num_compiled"]) == (3, 2)
    assert told["programs"][1] == {"name": "decoding 2 tokens", "seconds": 3.0, "is_kept": True}
    swapping = dataclasses.replace(REPORT, num_host_pages=512).lines()
    assert swapping[1].endswith("1,048,576 bytes a page, 512 more in 0.50 GiB of swap space")


def test_the_size_of_the_cache_is_what_its_pages_hold() -> None:
    odd = dataclasses.replace(REPORT, num_pages=50, max_model_len=15, max_concurrency=49.0)
    assert odd.lines()[2].startswith("KV cache size: 784 tokens.")


def test_the_report_is_json() -> None:
    assert json.loads(json.dumps(REPORT.to_dict())) == REPORT.to_dict() | {"buckets": [2, 4, 8, 16]}


def test_the_report_of_an_engine_is_true() -> None:
    llm = tiny_llm()
    report, runner = llm.report, llm.engine.runner
    assert report.model == llm.model_name == "TinyLM"
    assert (report.num_pages, report.page_size, report.page_bytes) == (129, 4, PAGE_BYTES)
    assert report.pool_bytes == 129 * PAGE_BYTES
    assert report.weights_bytes == sum(leaf.nbytes for leaf in runner.model.leaves)  # pyright: ignore[reportAttributeAccessIssue]
    assert report.max_concurrency == 4.0
    assert report.buckets == ((1, 4, 8, 32) if cpu.is_loaded() else (1, 8, 32))
    assert report.products.startswith("own kernels" if cpu.is_loaded() else "XLA (")
    assert report.num_host_pages == HOST_PAGES
    assert (
        report.num_programs == 2 + len(report.buckets) + 1 + 2 + 4
    )  # pools, forward passes, sampler, updates, moves
    assert report.dtype == "float32"
    assert 0 < report.compile_seconds <= report.total_seconds


def test_start_up_logs_its_report_and_shows_progress(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int, int]] = []

    class Runner:
        def __init__(self, flat: Any, config: Any, **_: Any) -> None:
            self.kv_cache = jnp.zeros((8,))

        def warm_up(self, progress: Any) -> None:
            for done in (1, 2):
                progress(CompiledProgram(f"program {done}", 1.0, is_kept=False), done, 2)

    monkeypatch.setattr(startup, "ModelRunner", Runner)
    from pagedjax.config import EngineConfig

    with caplog.at_level(logging.INFO, logger="pagedjax"):
        _, report = startup.start_engine(
            TinyLM(),
            ByteTokenizer(),
            EngineConfig(),
            startup.ModelFacts(name="Tiny", max_model_len=256, load_seconds=2.0),
            lambda program, done, total: calls.append((program.name, done, total)),
        )
    assert calls == [("program 1", 1, 2), ("program 2", 2, 2)]
    assert [record.message for record in caplog.records] == report.lines()
    assert report.total_seconds > 2.0
    kernels = "native_cpu (the kernels for a " if cpu.is_loaded() else "xla (the portable one; "
    assert report.attention.startswith(kernels)


# ------------------------------------------------------------------------------- the periodic line


@dataclass
class Stats:
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 3
    num_cow_copies: int = 7
    kv_usage: float = 0.125
    prefix_hit_rate: float = 0.5


@dataclass
class Counters:
    stats: Any
    num_running: int = 4
    num_waiting: int = 2


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(throughput.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.message for record in caplog.records if record.name == "throughput-test"]
    caplog.clear()
    return found


def test_the_periodic_line_comes_every_ten_seconds_of_work(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    log = throughput.ThroughputLog(logging.getLogger("throughput-test"))
    counters = Counters(Stats(num_prompt_tokens=50, num_generated_tokens=10))
    log.step(counters)  # the clock starts; what was done before is not averaged in
    clock.now += 9.9
    log.step(counters)
    assert logged(caplog) == []
    clock.now += 2.6
    counters.stats.num_prompt_tokens += 1000
    counters.stats.num_generated_tokens += 25
    log.step(counters)
    assert logged(caplog) == [
        "Avg prompt throughput: 80.0 tokens/s, Avg generation throughput: 2.0 tokens/s, "
        "Running: 4 reqs, Waiting: 2 reqs, Preemptions: 3, KV cache usage: 12.5%, "
        "Prefix cache hit rate: 50.0%, COW copies: 7"
    ]
    clock.now += 10.0
    log.step(counters)
    assert "Avg generation throughput: 0.0 tokens/s" in logged(caplog)[0]


def test_idle_time_is_not_averaged_in(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = throughput.ThroughputLog(logging.getLogger("throughput-test"))
    counters = Counters(Stats())
    log.step(counters)
    clock.now += 3600
    counters.stats.num_generated_tokens += 5
    log.step(counters)
    assert logged(caplog) == []
    clock.now += 10
    counters.stats.num_generated_tokens += 200
    log.step(counters)
    assert "Avg generation throughput: 20.0 tokens/s" in logged(caplog)[0]
