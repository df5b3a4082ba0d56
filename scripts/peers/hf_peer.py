"""transformers' continuous batching: its manager runs by itself, tokens come through a queue.

Paged SDPA attention, since flash attention needs a GPU; block sharing (its prefix cache) is on.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from .installed import must_have

_BLOCK = 32  # positions of a page; its default of 256 is meant for a GPU


def find() -> None:
    """Raises `ImportError` where it, or what it computes with, is not installed."""
    must_have("transformers", "torch")


def load(settings: dict[str, Any]) -> HFPeer:
    """Loads the model and starts the manager's thread; OMP_NUM_THREADS is PyTorch's threads."""
    transformers = importlib.import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=settings["dtype"], attn_implementation="sdpa"
    ).eval()
    options = {
        "page_size": _BLOCK,
        "num_blocks": -(-settings["kv_tokens"] // _BLOCK) + 1,
        "max_batch_tokens": 512,
        "max_requests_per_batch": settings["concurrency"],
        "allow_block_sharing": True,
        **settings.get("options", {}),
    }
    return HFPeer(transformers, model, options)


class HFPeer:
    """See `drive.Engine`."""

    def __init__(self, transformers: Any, model: Any, options: dict[str, Any]) -> None:
        batching = transformers.ContinuousBatchingConfig(**options)
        generation = transformers.GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1
        )
        self._manager = model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=batching
        )
        self._manager.start()
        self._told: dict[str, int] = {}
        self._indices: dict[str, int] = {}
        self._added = 0  # ids are never used twice
        self.version = transformers.__version__
        self.options = options

    def add(self, index: int, prompt_ids: Sequence[int], max_new: int) -> None:
        """Queues a request."""
        key = f"request-{self._added}"
        self._added += 1
        self._indices[key] = index
        self._told[key] = 0
        self._manager.add_request(
            list(prompt_ids),
            request_id=key,
            max_new_tokens=max_new,
            streaming=True,
            eos_token_id=-1,
        )

    def step(self, wait: float) -> list[tuple[int, list[int], bool]]:
        """What came meanwhile; waits for the first of it."""
        if not self._manager.is_running():
            raise RuntimeError("its batching thread has ended; see what it printed")
        advanced: list[tuple[int, list[int], bool]] = []
        output = self._manager.get_result(timeout=max(wait, 0.001))
        while output is not None:
            if output.error is not None:
                raise RuntimeError(output.error)
            key = output.request_id
            new = output.generated_tokens[self._told[key] :]
            self._told[key] += len(new)
            advanced.append((self._indices[key], list(new), output.is_finished()))
            output = self._manager.get_result(timeout=0)
        return advanced
