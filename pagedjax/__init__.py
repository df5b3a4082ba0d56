"""PagedAttention for JAX: a paged KV cache and continuous batching for your own models.

Owns the public names and where each one lives; knows nothing of what they do. Names are loaded at
first use (PEP 562), so that `import pagedjax` stays cheap and the host half never loads JAX.
"""

import importlib
from typing import TYPE_CHECKING

from pagedjax.version import __version__ as __version__

if TYPE_CHECKING:
    from pagedjax.attention import Batch, attend
    from pagedjax.errors import (
        CapacityError,
        ConfigError,
        ModelFormatError,
        PagedJaxError,
        RequestError,
    )
    from pagedjax.kv_cache import KVCache
    from pagedjax.llm import LLM
    from pagedjax.request import (
        CompletionOutput,
        FinishReason,
        Logprob,
        RequestOutput,
        SamplingParams,
    )


__all__ = [
    "LLM",
    "Batch",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "FinishReason",
    "KVCache",
    "Logprob",
    "ModelFormatError",
    "PagedJaxError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "attend",
]

_HOMES = {
    "Batch": "attention",
    "CapacityError": "errors",
    "CompletionOutput": "request",
    "ConfigError": "errors",
    "FinishReason": "request",
    "KVCache": "kv_cache",
    "LLM": "llm",
    "Logprob": "request",
    "ModelFormatError": "errors",
    "PagedJaxError": "errors",
    "RequestError": "errors",
    "RequestOutput": "request",
    "SamplingParams": "request",
    "attend": "attention",
}  # public name -> the module of this package that defines it


if not TYPE_CHECKING:  # a type checker must see the names above, and call any other an error

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'pagedjax' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"pagedjax.{_HOMES[name]}"), name)
        globals()[name] = value  # the next use finds it without coming here
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
