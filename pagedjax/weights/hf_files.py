"""The small files beside the weights in a Hugging Face directory: config, generation, template."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedjax.errors import ModelFormatError
from pagedjax.weights.json_file import MAX_BYTES, read_json

# Fields of generation_config.json that SamplingParams has under the same name.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class HFDirectory:
    """What the small files say."""

    config: Mapping[str, Any]  # config.json as it is
    generation: Mapping[str, Any]  # generation_config.json; empty if there is none
    chat_template: str | None

    @classmethod
    def read(cls, directory: Path) -> HFDirectory:
        """Reads them.

        Raises:
          ModelFormatError: config.json is missing, or a file is damaged.
        """
        if not (directory / "config.json").is_file():
            inside = sorted(path.name for path in directory.glob("*.gguf"))
            hint = f" It holds {inside[0]}: give that file itself." if inside else ""
            raise ModelFormatError(f"{directory} must hold config.json, and does not.{hint}")
        return cls(
            read_json(directory / "config.json"),
            _read_optional(directory / "generation_config.json"),
            _chat_template(directory),
        )

    @property
    def bos_token_id(self) -> int | None:
        """Beginning of text."""
        return next(iter(_ids(self._token("bos_token_id"))), None)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return _ids(self._token("eos_token_id"))

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """Recommended sampling; what is null, or not a finite number, is left out."""
        generation = self.generation
        return {name: generation[name] for name in _SAMPLING if _is_number(generation.get(name))}

    def _token(self, name: str) -> Any:
        value = self.generation.get(name)
        return self.config.get(name) if value is None else value


def _chat_template(directory: Path) -> str | None:
    """chat_template.jinja, or the template in tokenizer_config.json (of several: "default")."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        if path.stat().st_size > MAX_BYTES:
            raise ModelFormatError(f"{path.name} must be at most {MAX_BYTES} bytes.")
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ModelFormatError(f"{path.name} must be UTF-8 text. Got: {error}.") from None
    template = _read_optional(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _ids(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(v for v in values if isinstance(v, int) and not isinstance(v, bool)))


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)
