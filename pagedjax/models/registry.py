"""Architecture name -> model family; a family's module is imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import Any

from pagedjax.errors import ModelFormatError
from pagedjax.models.family import GGUFFamily, HFFamily

HF_ARCHITECTURES = {
    "LlamaForCausalLM": "pagedjax.models.llama",
    "MistralForCausalLM": "pagedjax.models.llama",
}
GGUF_ARCHITECTURES = {"llama": "pagedjax.models.llama_gguf"}


def hf_family(architectures: Any) -> HFFamily:
    """The family of config.json's `architectures`.

    Raises:
      ModelFormatError: it is none that pagedjax has; the message lists those.
    """
    known = ", ".join(HF_ARCHITECTURES)
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise ModelFormatError(
            f"`architectures` in config.json must be a list of one of: {known}. "
            f"Got {architectures!r:.200}."
        )
    return _family(HF_ARCHITECTURES, architectures[0], "`architectures` in config.json")


def gguf_family(architecture: Any) -> GGUFFamily:
    """The family of a GGUF file's `general.architecture`.

    Raises:
      ModelFormatError: it is none that pagedjax has; the message lists those.
    """
    return _family(GGUF_ARCHITECTURES, architecture, "`general.architecture` of the GGUF file")


def _family(modules: dict[str, str], name: Any, what: str) -> Any:
    module = modules.get(name) if isinstance(name, str) else None
    if module is None:
        raise ModelFormatError(f"{what} must be one of: {', '.join(modules)}. Got {name!r:.200}.")
    return importlib.import_module(module).FAMILY
