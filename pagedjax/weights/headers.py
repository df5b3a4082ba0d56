"""What a model's files say before any weight is read: sizes, dtype, names, the module to fill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pagedjax.config import quantized_dtype
from pagedjax.errors import ModelFormatError
from pagedjax.models import registry
from pagedjax.models.decoder import ModelConfig
from pagedjax.models.family import Layout
from pagedjax.weights import gguf, safetensors
from pagedjax.weights.checkpoint import PLAIN_DTYPES, Checkpoint, describe
from pagedjax.weights.hf_files import HFDirectory

type Dtypes = tuple[jnp.dtype, jnp.dtype | None]  # of parameters; of quantised ones, if any

_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHeaders:
    """A model whose weights are still in its files.

    Attributes:
      name: of the file or directory.
      config: its sizes and switches.
      dtype: that its weights will have, but for those that are quantised.
      build: makes the module, weights to be filled in.
      layout, checkpoint: where each parameter comes from, and the tensors that the files hold.
      hf_files: what else a directory says; None for a GGUF file.
      gguf_metadata: what else a GGUF file says; None for a directory.
    """

    name: str
    config: ModelConfig
    dtype: jnp.dtype
    build: Callable[[], nnx.Module]
    layout: Layout
    checkpoint: Checkpoint
    hf_files: HFDirectory | None = None
    gguf_metadata: Mapping[str, Any] | None = None


def read_headers(
    path: str | Path,
    *,
    dtype: str = "auto",
    quantization: str = "none",
    default_dtype: DTypeLike = jnp.float32,
) -> ModelHeaders:
    """Reads config and headers of a directory or a GGUF file.

    Args:
      path: as `resolve_model` returns it.
      dtype: of the weights: auto, float32, bfloat16 or float16; auto is the files' own.
      quantization: of the layers' matrices, see `EngineConfig.quantization`.
      default_dtype: what auto means for quantised files.

    Raises:
      ConfigError: there is no such `quantization`.
      ModelFormatError: the files cannot be read, or are none that pagedjax knows. Problems with
        single tensors are told by `assemble.check`.
    """
    if dtype not in _DTYPES:
        raise ModelFormatError(f"`dtype` must be one of {', '.join(_DTYPES)}. Got {dtype!r}.")
    narrow = quantized_dtype(quantization)
    weight_dtype = None if narrow is None else jnp.dtype(narrow)
    path = Path(path)

    def choose(checkpoint: Checkpoint) -> Dtypes:
        return _choose_dtype(dtype, checkpoint, default_dtype), weight_dtype

    try:
        if path.is_dir():
            return _of_directory(path, choose)
        if path.is_file():
            return _of_gguf(path, choose)
    except OSError as error:
        raise ModelFormatError(f"{path} cannot be read: {error}.") from error
    raise ModelFormatError(f"`model` must be a directory or a GGUF file. Got {path}: not there.")


def _of_directory(path: Path, choose: Callable[[Checkpoint], Dtypes]) -> ModelHeaders:
    files = HFDirectory.read(path)
    family = registry.hf_family(files.config.get("architectures"))
    config = family.from_hf(files.config)
    checkpoint = safetensors.open_directory(path)
    dtypes = choose(checkpoint)
    return ModelHeaders(
        name=path.resolve().name,
        config=config,
        dtype=dtypes[0],
        build=lambda: family.build(config, *dtypes),
        layout=family.layout(config),
        checkpoint=checkpoint,
        hf_files=files,
    )


def _of_gguf(path: Path, choose: Callable[[Checkpoint], Dtypes]) -> ModelHeaders:
    if not gguf.is_gguf(path):
        raise ModelFormatError(
            f"{path} must be a GGUF file, or a directory with config.json and safetensors files. "
            f"It looks like {describe(path)}."
        )
    file = gguf.open_file(path)
    metadata, checkpoint = file.metadata, file.checkpoint
    family = registry.gguf_family(metadata.get("general.architecture"))
    config = family.from_gguf(metadata, checkpoint.tensors, gguf.rope_divisors(checkpoint))
    dtypes = choose(checkpoint)
    return ModelHeaders(
        name=path.name.removesuffix(".gguf"),
        config=config,
        dtype=dtypes[0],
        build=lambda: family.build(config, *dtypes),
        layout=family.layout(config),
        checkpoint=checkpoint,
        gguf_metadata=metadata,
    )


def _choose_dtype(dtype: str, checkpoint: Checkpoint, default_dtype: DTypeLike) -> jnp.dtype:
    """The asked one, or that of most stored numbers, or the default for quantised files."""
    if dtype != "auto":
        return jnp.dtype(dtype)
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        sizes[tensor.kind] += tensor.num_bytes
    kind = sizes.most_common(1)[0][0] if sizes else ""
    return jnp.dtype(PLAIN_DTYPES.get(kind, default_dtype))
