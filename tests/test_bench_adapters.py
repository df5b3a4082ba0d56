"""Adapters of peers that this project does not install, over fakes with those peers' interfaces."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from scripts.peers import hf_peer, llama_cpp_peer, openvino_peer, vllm_peer
from scripts.peers.drive import UNKNOWN_TOKEN, drive

SETTINGS = {
    "model": "model",
    "dtype": "float32",
    "concurrency": 3,
    "threads": 2,
    "max_model_len": 192,
    "kv_tokens": 576,
}
LOAD = [{"prompt_ids": [1] * n, "max_new": n} for n in (4, 2, 3)]
EXPECTED = [[4] * 4, [2] * 2, [3] * 3]  # fakes answer with the number of a prompt's tokens


def tokens(engine: Any) -> list[list[int]]:
    return [record["tokens"] for record in drive(engine, LOAD)["requests"]]


class Countdown:
    """What the fakes share: requests that get a token a step."""

    def __init__(self) -> None:
        self.left: dict[Any, list[int]] = {}  # token, how many are left

    def step(self) -> list[tuple[Any, int, bool]]:
        advanced = []
        for key, state in list(self.left.items()):
            state[1] -= 1
            advanced.append((key, state[0], state[1] == 0))
            if state[1] == 0:
                del self.left[key]
        return advanced


# ------------------------------------------------------------------------------------- llama.cpp


@pytest.fixture
def llama_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = tmp_path / "llama-server"
    fake = Path(__file__).parent / "fake_llama_server.py"
    server.write_text(f"#!{sys.executable}\n" + fake.read_text())
    server.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.usefixtures("llama_server")
def test_llama_cpp_streams_over_http() -> None:
    llama_cpp_peer.find()
    engine = llama_cpp_peer.load(SETTINGS)
    try:
        assert engine.version == "version: 1 (fake)"
        assert tokens(engine) == EXPECTED
        (record,) = drive(engine, [{"prompt_ids": [7, 7], "max_new": 5}])["requests"]
        assert record["tokens"] == [2, UNKNOWN_TOKEN, 2, 2, UNKNOWN_TOKEN]
        with pytest.raises(RuntimeError, match=r"llama-server broke off: .*no room"):
            drive(engine, [{"prompt_ids": [11], "max_new": 1}])
        with pytest.raises(RuntimeError, match=r"llama-server answered 400: .*unlucky"):
            drive(engine, [{"prompt_ids": [13], "max_new": 1}])
        engine._server.kill()
        engine._server.wait()
        with pytest.raises(
            RuntimeError, match=r"llama-server (ended with status -9|answered)|refused"
        ):
            drive(engine, LOAD)
    finally:
        engine._server.kill()
        engine._server.wait()


@pytest.mark.usefixtures("llama_server")
def test_llama_cpp_that_cannot_start_is_told() -> None:
    options = {"options": {"--version": ""}}  # makes the fake print and end
    with pytest.raises(RuntimeError, match="llama-server ended with status 0"):
        llama_cpp_peer.load(SETTINGS | options)


def test_llama_cpp_that_is_nowhere_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match=r"llama-server is neither beside .* nor on PATH"):
        llama_cpp_peer.find()


# ------------------------------------------------------------------------------------------ vLLM


def test_vllm_gets_exactly_the_pool_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = '{"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, '
    (tmp_path / "config.json").write_text(config + '"num_hidden_layers": 3}')
    engine_options: dict[str, Any] = {}
    countdown = Countdown()

    def add_request(key: str, prompt: dict[str, list[int]], params: Any) -> None:
        assert (params.temperature, params.ignore_eos, params.output_kind) == (0.0, True, "delta")
        countdown.left[key] = [len(prompt["prompt_token_ids"]), params.max_tokens]

    def step() -> list[Any]:
        return [
            types.SimpleNamespace(
                request_id=key, outputs=[types.SimpleNamespace(token_ids=(token,))], finished=ended
            )
            for key, token, ended in countdown.step()
        ]

    def llm(**options: Any) -> Any:
        engine_options.update(options)
        return types.SimpleNamespace(
            llm_engine=types.SimpleNamespace(add_request=add_request, step=step)
        )

    module: Any = types.ModuleType("vllm")
    module.LLM, module.__version__ = llm, "0"
    module.SamplingParams = lambda **values: types.SimpleNamespace(**values)
    params: Any = types.ModuleType("vllm.sampling_params")
    params.RequestOutputKind = types.SimpleNamespace(DELTA="delta")
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(name, "")
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.setenv(name, "")
    engine = vllm_peer.load(SETTINGS | {"model": str(tmp_path)})
    assert tokens(engine) == EXPECTED
    assert engine_options["num_gpu_blocks_override"] == 1 + 3 * 2  # 192 tokens are 2 pages of 128
    assert engine_options["enable_prefix_caching"] is True
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "1"
    bound = os.environ["VLLM_CPU_OMP_THREADS_BIND"].split(",")
    assert [int(core) for core in bound] == sorted(os.sched_getaffinity(0))


# -------------------------------------------------------------------------------------- OpenVINO


def test_openvino_reads_what_is_new_of_every_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    countdown = Countdown()
    handles: dict[int, Handle] = {}
    made: list[Any] = []

    class Handle:
        def __init__(self) -> None:
            self.unread: list[int] = []
            self.status = "running"

        def can_read(self) -> bool:
            return bool(self.unread)

        def read(self) -> dict[int, Any]:
            return {0: types.SimpleNamespace(generated_ids=[self.unread.pop(0)])}

        def get_status(self) -> str:
            return self.status

    class Pipeline:
        def __init__(self, *arguments: Any) -> None:
            made.append(arguments)

        def add_request(self, key: int, ids: Any, config: Any) -> Handle:
            assert key not in handles, "an id was used twice"
            assert (config.ignore_eos, config.do_sample) == (True, False)
            countdown.left[key] = [ids.shape[1], config.max_new_tokens]
            handles[key] = Handle()
            return handles[key]

        def step(self) -> None:
            for key, token, ended in countdown.step():
                handles[key].unread.append(token)
                handles[key].status = "finished" if ended else "running"

    genai: Any = types.ModuleType("openvino_genai")
    genai.SchedulerConfig = genai.GenerationConfig = types.SimpleNamespace
    genai.GenerationStatus = types.SimpleNamespace(RUNNING="running")
    genai.ContinuousBatchingPipeline, genai.__version__ = Pipeline, "0"
    openvino: Any = types.ModuleType("openvino")
    openvino.Tensor = lambda array: array
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    monkeypatch.setitem(sys.modules, "openvino", openvino)
    engine = openvino_peer.load(SETTINGS)
    assert tokens(engine) == EXPECTED
    assert tokens(engine) == EXPECTED
    _, scheduler, _, properties = made[0]
    assert (scheduler.num_kv_blocks, scheduler.max_num_seqs) == (18, 3)
    assert scheduler.enable_prefix_caching is True
    assert properties["KV_CACHE_PRECISION"] == properties["INFERENCE_PRECISION_HINT"] == "f32"
    assert properties["INFERENCE_NUM_THREADS"] == 2


# ---------------------------------------------------------------------------------- transformers


class Manager:
    """Its outputs tell all tokens so far, as transformers' do."""

    def __init__(self) -> None:
        self.countdown = Countdown()
        self.generated: dict[str, list[int]] = {}
        self.ready: list[Any] = []
        self.started = False
        self.error: str | None = None

    def start(self) -> None:
        self.started = True

    def is_running(self) -> bool:
        return self.started

    def add_request(
        self, ids: list[int], *, request_id: str, max_new_tokens: int, **rest: Any
    ) -> None:
        assert rest == {"streaming": True, "eos_token_id": -1}
        assert request_id not in self.generated, "an id was used twice"
        self.countdown.left[request_id] = [len(ids), max_new_tokens]
        self.generated[request_id] = []

    def get_result(self, timeout: float) -> Any:
        if not self.ready and timeout > 0:
            for key, token, ended in self.countdown.step():
                self.generated[key].append(token)
                self.ready.append(self._output(key, ended))
        return self.ready.pop(0) if self.ready else None

    def _output(self, key: str, ended: bool) -> Any:
        return types.SimpleNamespace(
            request_id=key,
            generated_tokens=list(self.generated[key]),
            error=self.error,
            is_finished=lambda: ended,
        )


def test_transformers_outputs_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Manager()
    batching: dict[str, Any] = {}
    model = types.SimpleNamespace(init_continuous_batching=lambda **_: manager)
    model.eval = lambda: model
    module: Any = types.ModuleType("transformers")
    module.__version__ = "0"
    module.AutoModelForCausalLM = types.SimpleNamespace(from_pretrained=lambda *_, **__: model)
    module.ContinuousBatchingConfig = lambda **options: batching.update(options)
    module.GenerationConfig = lambda **options: options
    monkeypatch.setitem(sys.modules, "transformers", module)
    engine = hf_peer.load(SETTINGS)
    assert tokens(engine) == EXPECTED
    assert tokens(engine) == EXPECTED
    assert (batching["num_blocks"], batching["max_requests_per_batch"]) == (19, 3)
    assert batching["allow_block_sharing"] is True
    manager.error = "out of memory"
    with pytest.raises(RuntimeError, match="out of memory"):
        drive(engine, LOAD)
    manager.started = False
    with pytest.raises(RuntimeError, match="its batching thread has ended"):
        drive(engine, LOAD)
