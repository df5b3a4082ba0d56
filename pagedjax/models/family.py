"""What the weight loader has to know about a model family: its config, its names, its module."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx

from pagedjax.models.decoder import ModelConfig

type Build = Callable[[ModelConfig, jnp.dtype, jnp.dtype | None], nnx.Module]


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor of a checkpoint, and how its rows become rows of a parameter.

    Attributes:
      name: in the file.
      shape: what it must have there.
      interleaved_heads: number of heads whose rows lie in pairs (0, 1), (2, 3), ... as GGUF files
        keep q and k; they are put in halves as `rope.rotate` expects. 0: as they are.
    """

    name: str
    shape: tuple[int, ...]
    interleaved_heads: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parameters of one model come from.

    Attributes:
      sources: parameter path, dotted -> tensors whose rows follow one another in it.
      ignored: names that a file may hold and that are not needed.
    """

    sources: Mapping[str, tuple[Source, ...]]
    ignored: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class HFFamily:
    """A family in Hugging Face's form.

    Attributes:
      build: (config, dtype, 8-bit dtype of the layers' matrices or None) -> the module, weights to
        be filled in; run under `nnx.eval_shape` it allocates nothing.
      from_hf: config.json -> config.
      layout: names in safetensors files.
    """

    build: Build
    from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    layout: Callable[[ModelConfig], Layout]


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """A family in a GGUF file.

    Attributes:
      build: (config, dtype, 8-bit dtype of the layers' matrices or None) -> the module, weights to
        be filled in; run under `nnx.eval_shape` it allocates nothing.
      from_gguf: metadata, tensor names and the numbers of `rope_freqs.weight` (none if it is not
        there) -> config.
      layout: names in the file.
    """

    build: Build
    from_gguf: Callable[[Mapping[str, Any], Collection[str], tuple[float, ...]], ModelConfig]
    layout: Callable[[ModelConfig], Layout]
