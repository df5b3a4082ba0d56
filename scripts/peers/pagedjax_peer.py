"""pagedjax, measured as its peers are: in a process of its own, through the same protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagedjax import LLM, SamplingParams
from pagedjax.version import __version__

_PAGE_SIZE = 16  # the default on a CPU; the pool's size in tokens is what the peers get


def find() -> None:
    """It is here: this project is its package."""


def load(settings: dict[str, Any]) -> PagedJaxPeer:
    """Start-up with the settings' sizes; anything else is the default."""
    given = settings.get("options", {})
    options = {
        "dtype": settings["dtype"],
        "max_num_seqs": settings["concurrency"],
        "max_model_len": settings["max_model_len"],
        "page_size": _PAGE_SIZE,
        "num_pages": 1 + -(-settings["kv_tokens"] // given.get("page_size", _PAGE_SIZE)),
        **given,
    }
    return PagedJaxPeer(LLM(settings["model"], progress=False, **options), options)


class PagedJaxPeer:
    """See `drive.Engine`."""

    version = __version__

    def __init__(self, llm: Any, options: dict[str, Any]) -> None:
        self._engine = llm.engine
        self._running: dict[str, tuple[Any, int]] = {}  # its sequence, tokens that were told
        self.options = options | {"prefix_caching": options.get("enable_prefix_caching", True)}

    def add(self, index: int, prompt_ids: Sequence[int], max_new: int) -> None:
        """Queues a request."""
        params = SamplingParams(
            temperature=0.0, max_tokens=max_new, ignore_eos=True, detokenize=False
        )
        key = str(index)
        self._engine.add_request(key, list(prompt_ids), params)
        self._running[key] = (self._engine._live[key].sequences[0], 0)

    def step(self, wait: float) -> list[tuple[int, list[int], bool]]:
        """One step of the engine; what advanced is read off the sequences."""
        del wait  # a step takes as long as it takes
        ended = {output.request_id: output for output in self._engine.step()}
        for output in ended.values():
            if output.error is not None:
                raise output.error
        advanced: list[tuple[int, list[int], bool]] = []
        for key, (sequence, told) in list(self._running.items()):
            if sequence.num_output_tokens > told:
                new = sequence.output_token_ids[told:]
                self._running[key] = (sequence, told + len(new))
                advanced.append((int(key), new, key in ended))
            if key in ended:
                del self._running[key]
        return advanced
