"""The model of a job: which files it is, how it is loaded, and what its files say without that.

Owns the messages about models. JAX takes seconds to import, so it is imported here when a model is
asked for, after everything else was checked.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagedjax.batch_job.errors import CannotStart
from pagedjax.batch_job.messages import say
from pagedjax.chat_template import ChatTemplate, encode_chat
from pagedjax.errors import PagedJaxError
from pagedjax.tokenizer import TextTokenizer, Tokenizer, encode_prompt

_WHOLE_BYTES = 16 * 2**20  # a larger file is sampled: reading weights twice takes too long
_SAMPLES, _SAMPLE_BYTES = 128, 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """What a model's files say about texts, read without its weights."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    max_model_len: int
    default_params: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def count(self, prompt: str | list[int]) -> int:
        """Tokens of a prompt; raises `RequestError`."""
        if not isinstance(prompt, str):
            return len(prompt)
        return len(encode_prompt(self.tokenizer, prompt))

    def count_chat(self, messages: Any) -> int:
        """Tokens of a conversation; raises `RequestError`."""
        return len(encode_chat(self.tokenizer, self.template, messages))


def identify(model: str) -> dict[str, Any]:
    """Name and `identity` of a model: a hash of its files, of large ones of 128 samples.

    Raises:
      CannotStart, PagedJaxError: there is no such model.
    """
    try:
        from pagedjax.weights import resolve_model

        path = resolve_model(model)
        digest = hashlib.sha256()
        for file in _files_of(path):
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            _hash_file(digest, file)
        return {"name": model, "identity": digest.hexdigest()}
    except (OSError, ImportError) as error:
        raise _cannot_load(model, error) from error


def load(model: str, options: Mapping[str, Any]) -> Any:
    """Loads and compiles, with a line for each program; whatever stops it becomes one message.

    Raises:
      CannotStart, PagedJaxError: for the user.
    """
    try:
        from pagedjax.llm import LLM

        llm = LLM(model, progress=say, **options)
        report = llm.report
        num_kept = report.num_programs - report.num_compiled
        say(
            f"ready after {report.total_seconds:.1f} s; of {report.num_programs} programs, "
            f"{report.num_compiled} compiled and {num_kept} kept from earlier starts"
        )
        return llm
    except PagedJaxError:
        raise
    except Exception as error:
        raise _cannot_load(model, error) from error


def read_text(model: str, options: Mapping[str, Any]) -> ModelText:
    """What `--check` needs of a model; raises as `load` does."""
    try:
        return _read_text(model, options)
    except PagedJaxError:
        raise
    except Exception as error:
        raise _cannot_load(model, error) from error


def _read_text(model: str, options: Mapping[str, Any]) -> ModelText:
    from pagedjax.models import registry
    from pagedjax.weights import gguf, resolve_model
    from pagedjax.weights.hf_files import HFDirectory

    path = resolve_model(model)
    if path.is_dir():
        files = HFDirectory.read(path)
        config = registry.hf_family(files.config.get("architectures")).from_hf(files.config)
        tokenizer = TextTokenizer.from_directory(path)
        source, defaults = files.chat_template, dict(files.sampling_defaults)
    else:
        file = gguf.open_file(path)
        family = registry.gguf_family(file.metadata.get("general.architecture"))
        divisors = gguf.rope_divisors(file.checkpoint)
        config = family.from_gguf(file.metadata, file.checkpoint.tensors, divisors)
        tokenizer = TextTokenizer.from_gguf(file.metadata)
        source, defaults = tokenizer.chat_template, {}
    source = source or tokenizer.chat_template
    template = None
    if source is not None:
        bos, eos = getattr(tokenizer, "bos_token", None), getattr(tokenizer, "eos_token", None)
        template = ChatTemplate(source, bos_token=bos, eos_token=eos)
    return ModelText(
        tokenizer=tokenizer,
        template=template,
        max_model_len=options.get("max_model_len") or config.max_positions,
        default_params=defaults,
    )


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.iterdir() if file.is_file() and file.name[0] != ".")


def _hash_file(digest: Any, path: Path) -> None:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _WHOLE_BYTES:
            digest.update(file.read())
            return
        for i in range(_SAMPLES):
            file.seek((size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))


def _cannot_load(model: str, error: Exception) -> CannotStart:
    if isinstance(error, OSError):
        return CannotStart(f"cannot read the model {model!r}: {error}")
    if isinstance(error, ImportError):
        return CannotStart(
            f"cannot load the model {model!r}: {error}. Install what is missing (scripts/demo "
            "installs everything into .venv)."
        )
    text = " ".join(str(error).split())[:500]
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        return CannotStart(
            f"out of memory while loading the model {model!r}: {text}. Lower "
            "--gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs, or free memory."
        )
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = "" if frame is None else f" ({Path(frame.tb_frame.f_code.co_filename).name}, line "
    where += "" if frame is None else f"{frame.tb_lineno})"
    return CannotStart(f"cannot load the model {model!r}: {type(error).__name__}: {text}{where}")
