"""What is found of a request: facts in order, and counts. Knows nothing of events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

type MissReason = Literal["new", "off", "logprobs", "pending", "evicted", "reset", "salt", "gone"]


@dataclass(frozen=True, slots=True)
class Moment:
    """A place in the log: the last planned step, and seconds since the log was begun."""

    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Part of a wait: what the head of the queue, which may be the request itself, waited for.

    `reason`, `needed`, `free` and `reserved` are those of `Step.waiting`; `whose` is the name of
    the request that computed what was awaited, where it was that.
    """

    head: str  # name of a request
    is_head: bool
    reason: str
    needed: int
    free: int
    reserved: int
    num_steps: int
    whose: str = ""


@dataclass(frozen=True, slots=True)
class Miss:
    """The first page of a prompt that was not found, when there was one to look for.

    `why`: "new" (no earlier prompt had it), "off" (no prefix cache), "logprobs" (of the prompt,
    which need every position computed), "pending" (`whose` was still computing it), "evicted" (at
    `step`), "reset" (at `step`), "salt" (`whose` has another one) or "gone" (the log does not say).
    """

    why: MissReason
    first_token: int
    last_token: int
    whose: str = ""  # name of a request
    step: int = 0


@dataclass(slots=True)
class Fact:
    """One thing that happened to a request; `kind` says which `details` there are."""

    at: Moment
    kind: str
    sample: int = 0
    details: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class Counts:
    """Of all samples of a request."""

    num_output_tokens: int = 0
    num_cached_tokens: int = 0  # at the first admission
    num_wait_steps: int = 0
    wait_seconds: float = 0.0
    num_preemptions: int = 0
    num_restarts: int = 0
    num_recomputed_tokens: int = 0
    num_pages_out: int = 0
    num_pages_in: int = 0
    num_copies: int = 0


@dataclass(slots=True)
class Story:
    """One request's life."""

    request_id: str
    arrival: str
    document: dict[str, Any]  # as in `Added`
    added: Moment
    facts: list[Fact] = field(default_factory=list[Fact])
    counts: Counts = field(default_factory=Counts)
    first_run: Moment | None = None
    ended: Moment | None = None  # its last sample so far
    reasons: list[str] = field(default_factory=list[str])  # of samples, in order of ending

    @property
    def name(self) -> str:
        """What people call it, in one line."""
        text = str(self.document.get("label") or self.request_id)
        return "".join(char if char.isprintable() else "?" for char in text)

    @property
    def tokens(self) -> list[int]:
        """Token ids of the prompt."""
        return self.document["prompt_token_ids"]

    @property
    def salt(self) -> str:
        """What stands for its cache salt; empty for none."""
        return self.document.get("cache_salt") or ""

    @property
    def num_samples(self) -> int:
        """Sequences that it runs as."""
        params = self.document["params"]
        return params.get("beam_width") or params.get("best_of") or params.get("n", 1)

    @property
    def is_over(self) -> bool:
        """True when all its samples ended."""
        return len(self.reasons) >= self.num_samples
