"""Loads a model: a Hugging Face directory or a GGUF file -> module, config and what else it says.

Builds no tokenizer: it says where one is (`directory`, `gguf_metadata`) and what the files say
about templates, end tokens and sampling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pagedjax.errors import ModelFormatError
from pagedjax.models import registry
from pagedjax.models.decoder import ModelConfig
from pagedjax.weights import gguf, safetensors
from pagedjax.weights.assemble import Progress, assemble
from pagedjax.weights.checkpoint import PLAIN_DTYPES, Checkpoint, describe
from pagedjax.weights.hf_files import HFDirectory

_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model and what its files say about using it.

    Attributes:
      model: the NNX module, weights in place.
      config: its sizes and switches.
      dtype: of its weights.
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


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    default_dtype: DTypeLike = jnp.float32,
    progress: Progress | None = None,
) -> LoadedModel:
    """Reads a model from a directory or a GGUF file.

    Args:
      path: as `resolve_model` returns it.
      dtype: of the weights: auto, float32, bfloat16 or float16; auto is the files' own.
      default_dtype: what auto means for quantised files.
      progress: called with (done, total) bytes.

    Raises:
      ModelFormatError: says everything that is wrong with the files.
    """
    if dtype not in _DTYPES:
        raise ModelFormatError(f"`dtype` must be one of {', '.join(_DTYPES)}. Got {dtype!r}.")
    path = Path(path)
    try:
        if path.is_dir():
            return _load_directory(path, dtype, default_dtype, progress)
        if path.is_file():
            return _load_gguf(path, dtype, default_dtype, progress)
    except OSError as error:
        raise ModelFormatError(f"{path} cannot be read: {error}.") from error
    raise ModelFormatError(f"`model` must be a directory or a GGUF file. Got {path}: not there.")


def _load_directory(
    path: Path, dtype: str, default_dtype: DTypeLike, progress: Progress | None
) -> LoadedModel:
    files = HFDirectory.read(path)
    family = registry.hf_family(files.config.get("architectures"))
    config = family.from_hf(files.config)
    checkpoint = safetensors.open_directory(path)
    chosen = _choose_dtype(dtype, checkpoint, default_dtype)
    model = assemble(
        lambda: family.build(config, chosen), family.layout(config), checkpoint, chosen, progress
    )
    return LoadedModel(
        model=model,
        config=config,
        dtype=chosen,
        name=path.resolve().name,
        num_bytes=_num_bytes(model),
        directory=path,
        chat_template_source=files.chat_template,
        bos_token_id=files.bos_token_id,
        eos_token_ids=files.eos_token_ids,
        sampling_defaults=files.sampling_defaults,
    )


def _load_gguf(
    path: Path, dtype: str, default_dtype: DTypeLike, progress: Progress | None
) -> LoadedModel:
    if not gguf.is_gguf(path):
        raise ModelFormatError(
            f"{path} must be a GGUF file, or a directory with config.json and safetensors files. "
            f"It looks like {describe(path)}."
        )
    file = gguf.open_file(path)
    metadata, checkpoint = file.metadata, file.checkpoint
    family = registry.gguf_family(metadata.get("general.architecture"))
    config = family.from_gguf(metadata, checkpoint.tensors, gguf.rope_divisors(checkpoint))
    chosen = _choose_dtype(dtype, checkpoint, default_dtype)
    model = assemble(
        lambda: family.build(config, chosen), family.layout(config), checkpoint, chosen, progress
    )
    template = metadata.get("tokenizer.chat_template")
    return LoadedModel(
        model=model,
        config=config,
        dtype=chosen,
        name=path.name.removesuffix(".gguf"),
        num_bytes=_num_bytes(model),
        gguf_metadata=metadata,
        chat_template_source=template if isinstance(template, str) else None,
        bos_token_id=next(iter(gguf.token_ids(metadata, "bos")), None),
        eos_token_ids=gguf.token_ids(metadata, "eos", "eot", "eom"),
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


def _num_bytes(model: nnx.Module) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
