"""Loads a model: a Hugging Face directory or a GGUF file -> module, config and what else it says.

Builds no tokenizer: it says where one is (`directory`, `gguf_metadata`) and what the files say
about templates, end tokens and sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pagedjax.errors import ModelFormatError
from pagedjax.models.decoder import ModelConfig
from pagedjax.weights import gguf
from pagedjax.weights.assemble import Progress, assemble
from pagedjax.weights.headers import ModelHeaders, read_headers


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model and what its files say about using it.

    Attributes:
      model: the NNX module, weights in place.
      config: its sizes and switches.
      dtype: of its weights; of what computes with them, if they are quantised.
      name: of the file or directory.
      num_bytes: of its weights.
      directory: where tokenizer files are, for a directory.
      gguf_metadata: what holds the tokenizer, for a GGUF file.
      chat_template_source: Jinja source, if the files have one.
      bos_token_id: beginning of text; None: the files name none.
      eos_token_ids: tokens that end an answer.
      sampling_defaults: what the files' author recommends, by SamplingParams' names.
    """

    model: nnx.Module
    config: ModelConfig
    dtype: jnp.dtype
    name: str
    num_bytes: int
    directory: Path | None = None
    gguf_metadata: Mapping[str, Any] | None = None
    chat_template_source: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """What the module is, beside its weights, as a text that is the same at each load."""
        kind = type(self.model)
        return f"{kind.__module__}.{kind.__qualname__} {self.dtype} {self.config!r}"


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    quantization: str = "none",
    default_dtype: DTypeLike = jnp.float32,
    progress: Progress | None = None,
) -> LoadedModel:
    """Reads a model from a directory or a GGUF file.

    Args:
      path: as `resolve_model` returns it.
      dtype: of the weights: auto, float32, bfloat16 or float16; auto is the files' own.
      quantization: of the layers' matrices, see `EngineConfig.quantization`; from files of either
        format and any type.
      default_dtype: what auto means for quantised files.
      progress: called with (done, total) bytes.

    Raises:
      ConfigError: there is no such `quantization`.
      ModelFormatError: says everything that is wrong with the files.
    """
    headers = read_headers(
        path, dtype=dtype, quantization=quantization, default_dtype=default_dtype
    )
    try:
        model = assemble(headers.build, headers.layout, headers.checkpoint, progress)
    except OSError as error:
        raise ModelFormatError(f"{path} cannot be read: {error}.") from error
    return LoadedModel(
        model=model,
        config=headers.config,
        dtype=headers.dtype,
        name=headers.name,
        num_bytes=_num_bytes(model),
        **(_from_directory if headers.gguf_metadata is None else _from_gguf)(Path(path), headers),
    )


def _from_directory(path: Path, headers: ModelHeaders) -> dict[str, Any]:
    files = headers.hf_files
    assert files is not None, "headers are of a directory or of a GGUF file"
    return {
        "directory": path,
        "chat_template_source": files.chat_template,
        "bos_token_id": files.bos_token_id,
        "eos_token_ids": files.eos_token_ids,
        "sampling_defaults": files.sampling_defaults,
    }


def _from_gguf(path: Path, headers: ModelHeaders) -> dict[str, Any]:
    del path
    metadata = headers.gguf_metadata
    assert metadata is not None, "headers are of a directory or of a GGUF file"
    template = metadata.get("tokenizer.chat_template")
    return {
        "gguf_metadata": metadata,
        "chat_template_source": template if isinstance(template, str) else None,
        "bos_token_id": next(iter(gguf.token_ids(metadata, "bos")), None),
        "eos_token_ids": gguf.token_ids(metadata, "eos", "eot", "eom"),
    }


def _num_bytes(model: nnx.Module) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
