"""OpenVINO GenAI: its continuous batching pipeline, stepped by hand.

Dynamic split-fuse (prompts in chunks beside decoding) and prefix caching are on. Activations and
pages have the asked dtype; left alone, it would keep pages in 8 bits on a CPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from .installed import must_have

_BLOCK = 32  # positions of a page on a CPU
_PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def find() -> None:
    """Raises `ImportError` where it is not installed."""
    must_have("openvino_genai")


def load(settings: dict[str, Any]) -> OpenVINOPeer:
    """Loads the IR, or a GGUF file, and makes the pool."""
    genai = importlib.import_module("openvino_genai")
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = settings["concurrency"]
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    scheduler.cache_size = 0
    scheduler.num_kv_blocks = -(-settings["kv_tokens"] // _BLOCK)
    precision = _PRECISIONS[settings["dtype"]]
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": settings["threads"],
        "PERFORMANCE_HINT": "THROUGHPUT" if settings["concurrency"] > 1 else "LATENCY",
        "NUM_STREAMS": 1,
        **settings.get("options", {}),
    }
    return OpenVINOPeer(genai, settings["model"], scheduler, properties)


class OpenVINOPeer:
    """See `drive.Engine`."""

    def __init__(self, genai: Any, model: str, scheduler: Any, properties: dict[str, Any]) -> None:
        self._genai = genai
        self._tensor = importlib.import_module("openvino").Tensor
        self._numpy = importlib.import_module("numpy")
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._running: dict[int, Any] = {}
        self._added = 0  # ids are never used twice
        self.version = genai.__version__
        self.options = properties | {
            name: getattr(scheduler, name)
            for name in ("max_num_seqs", "dynamic_split_fuse", "enable_prefix_caching")
        }

    def add(self, index: int, prompt_ids: Sequence[int], max_new: int) -> None:
        """Queues a request."""
        config = self._genai.GenerationConfig()
        config.max_new_tokens = max_new
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        ids = self._tensor(self._numpy.array([prompt_ids], dtype=self._numpy.int64))
        self._running[index] = self._pipeline.add_request(self._added, ids, config)
        self._added += 1

    def step(self, wait: float) -> list[tuple[int, list[int], bool]]:
        """One step of the pipeline."""
        del wait  # a step takes as long as it takes
        self._pipeline.step()
        advanced: list[tuple[int, list[int], bool]] = []
        for index, handle in list(self._running.items()):
            new: list[int] = []
            while handle.can_read():
                for result in handle.read().values():
                    new.extend(int(token) for token in result.generated_ids)
            ended = handle.get_status() != self._genai.GenerationStatus.RUNNING
            if new or ended:
                advanced.append((index, new, ended))
            if ended:
                del self._running[index]
        return advanced
