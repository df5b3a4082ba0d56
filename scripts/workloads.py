"""Workload files: requests as token ids, with arrival times where the load is a trace's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

type Requests = Sequence[dict[str, Any]]  # {"prompt_ids", "max_new", "arrival_s"}


class WorkloadError(ValueError):
    """The file cannot be read, or has no such workload."""


@dataclass(frozen=True, slots=True)
class Workloads:
    """Requests by the name of their workload; `vocab_size` is above all their token ids."""

    requests: dict[str, Requests]
    vocab_size: int


def read_workloads(
    path: Path, *, only: str | None = None, limit: int | None = None, rate_scale: float = 1.0
) -> Workloads:
    """Reads `{"workloads": {name: {"requests": [...]}}, "vocab"?}`.

    Args:
      only: names, comma-separated; None: all.
      limit: at most so many requests of each.
      rate_scale: how many times as many requests come a second as in the file; inf: all at once.

    Raises:
      WorkloadError: with what is wrong.
    """
    if not rate_scale > 0:
        raise WorkloadError(f"`--rate-scale` must be above 0. Got {rate_scale:g}.")
    try:
        content = json.loads(path.read_text())
        found = {
            name: list(workload["requests"]) for name, workload in content["workloads"].items()
        }
        largest = max(max(r["prompt_ids"]) for requests in found.values() for r in requests)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WorkloadError(f"cannot read {path}: {error!r}") from error
    names = list(found) if only is None else only.split(",")
    missing = [name for name in names if name not in found]
    if missing:
        raise WorkloadError(f"no workload {missing}; the file has {list(found)}")
    scaled: dict[str, Requests] = {
        name: [_scaled(request, rate_scale) for request in found[name][:limit]] for name in names
    }
    return Workloads(scaled, content.get("vocab", largest + 1))


def varied(requests: Requests, repetition: int, vocab_size: int) -> list[dict[str, Any]]:
    """The same requests with another first token; those that shared a prefix still do."""
    changed = []
    for request in requests:
        first, *rest = request["prompt_ids"]
        changed.append({**request, "prompt_ids": [(first + repetition) % vocab_size, *rest]})
    return changed


def _scaled(request: dict[str, Any], rate_scale: float) -> dict[str, Any]:
    return {**request, "arrival_s": (request.get("arrival_s") or 0.0) / rate_scale}
