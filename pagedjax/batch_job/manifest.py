"""The manifest beside an output: which job it belongs to, and whether that job is done.

Owns what makes two runs the same job. Options that change no answer (sizes, memory, who gives way)
may differ; under `batch_invariant` the sizes of a step may not, because they change bits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pagedjax import __version__
from pagedjax.batch_job import files
from pagedjax.config import EngineConfig

FORMAT = 1
MAX_BYTES = 2**20
# Engine options that leave every answer as it is.
_OPERATION = frozenset({
    "async_scheduling", "enable_prefix_caching", "event_log", "max_num_batched_tokens",
    "max_num_seqs", "max_queue_requests", "max_queue_tokens", "memory_utilization", "num_pages",
    "preemption_mode", "priority_ageing", "swap_space", "victim_policy",
})  # fmt: skip
_STEP_SIZES = frozenset({"max_num_batched_tokens", "max_num_seqs"})

type Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One job.

    Attributes:
      input: `sha256`, `bytes` and `lines` of the requests, unpacked, and `answers` to be given.
      model: its name and `identity`, a hash of its files.
      parameters: all that answers depend on.
      version: of pagedjax.
      is_complete: the output is whole.
      last_run: counts of answers, and tokens a second, when it ended; empty: it did not yet.
    """

    input: Mapping[str, Any]
    model: Mapping[str, Any]
    parameters: Mapping[str, Any]
    version: str = __version__
    is_complete: bool = False
    last_run: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def write(self, path: Path) -> None:
        """Replaces the file at once."""
        document = {"format": FORMAT, "program": "pagedjax batch", **asdict(self)}
        files.write_whole(path, json.dumps(document, indent=1).encode() + b"\n")


def read(path: Path) -> Manifest | None:
    """The manifest of an earlier run; None where there is none.

    Raises:
      ValueError: the file is no manifest.
      OSError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    try:
        document: Json = json.loads(raw)
        if document["format"] != FORMAT:
            raise ValueError
        found = Manifest(**{name: document[name] for name in Manifest.__dataclass_fields__})
        if not all(isinstance(found.input[name], int) for name in ("lines", "answers")):
            raise ValueError
        for part in (found.model, found.parameters, found.last_run):
            part.keys()
        return found
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is not a manifest of this program") from None


def parameters(options: EngineConfig, request_timeout: float | None) -> Json:
    """What answers depend on beside the input and the model."""
    free = _OPERATION - _STEP_SIZES if options.batch_invariant else _OPERATION
    values = {name: value for name, value in asdict(options).items() if name not in free}
    return values | {"request_timeout": request_timeout}


def differences(old: Manifest, new: Manifest) -> list[str]:
    """What makes `new` another job than `old`, for people; the model only where both know it."""
    found: list[str] = []
    if old.input.get("sha256") != new.input.get("sha256"):
        then, now = old.input.get("lines"), new.input.get("lines")
        what = f"{then} lines then, {now} now" if then != now else f"other text in its {now} lines"
        found.append(f"the input ({what})")
    if new.model.get("identity") is not None and (
        old.model.get("identity") != new.model["identity"]
    ):
        found.append(f"the model ({old.model.get('name')} then, {new.model.get('name')} now)")
    if old.version != new.version:
        found.append(f"the version of pagedjax ({old.version} then, {new.version} now)")
    for name in sorted(old.parameters.keys() | new.parameters.keys()):
        then, now = old.parameters.get(name), new.parameters.get(name)
        if then != now:
            found.append(f"{name} ({then} then, {now} now)")
    return found
