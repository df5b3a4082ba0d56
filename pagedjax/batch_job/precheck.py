"""All lines looked at before the first one runs: which are bad, and what the others ask for.

Owns counts. Nothing is refused here that the job itself would answer, and
the other way round: both read lines with the same functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pagedjax.batch_job.ids import CustomIds
from pagedjax.batch_job.lines import parse_json, split_line
from pagedjax.errors import RequestError
from pagedjax.intake import checked_priority, checked_salt, checked_timeout
from pagedjax.openai_api import ApiRequest, parse_body
from pagedjax.scheduling.live import check_policy

MAX_SHOWN = 20  # bad lines that are shown one by one

type Json = dict[str, Any]


class PromptCounter(Protocol):
    """What counts prompt tokens, where that is wanted."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""
        ...

    @property
    def default_params(self) -> Mapping[str, Any]:
        """Sampling parameters that hold where a request gives none."""
        ...

    def count(self, prompt: str | list[int]) -> int:
        """Tokens of a prompt; raises `RequestError`."""
        ...

    def count_chat(self, messages: Any) -> int:
        """Tokens of a conversation; raises `RequestError`."""
        ...


@dataclass(slots=True)
class Precheck:
    """What a file of requests holds."""

    requests: int = 0  # lines that can be answered, as far as can be told now
    blank: int = 0
    sequences: int = 0  # that the requests become
    prompt_tokens: int = 0
    max_new_tokens: int = 0  # if no answer ends by itself
    num_bad: int = 0
    bad: list[str] = field(default_factory=list[str])  # the first of them, with number and reason

    def lines(self) -> list[str]:
        """The bad lines, for people."""
        more = self.num_bad - len(self.bad)
        return [*self.bad, f"and {more} more bad lines"] if more else self.bad

    def sentence(self) -> str:
        """What would run, for people."""
        return (
            f"{self.requests} requests ({self.sequences} answers): {self.prompt_tokens} prompt "
            f"tokens, at most {self.max_new_tokens} new tokens; {self.num_bad} bad lines, "
            f"{self.blank} blank ones"
        )


def check_lines(
    lines: Iterable[bytes], policy: str, counter: PromptCounter | None = None
) -> Precheck:
    """Reads all lines.

    Args:
      policy: the engine's `scheduling_policy`.
      counter: None: prompts are not tokenised, which takes most of the time.
    """
    found, ids = Precheck(), CustomIds()
    for number, raw in enumerate(lines, 1):
        raw = raw.removeprefix(b"\xef\xbb\xbf")
        if not raw.strip():
            found.blank += 1
            continue
        try:
            document = parse_json(raw)
            ids.take(number, document)
            defaults = {} if counter is None else counter.default_params
            request = parse_body(*split_line(document), defaults)
            _check_terms(request, policy)
            if counter is not None:
                _count(found, request, counter)
            found.sequences += request.num_sequences
            found.requests += 1
        except RequestError as error:
            found.num_bad += 1
            if len(found.bad) < MAX_SHOWN:
                found.bad.append(f"line {number}: {error}")
    return found


def _check_terms(request: ApiRequest, policy: str) -> None:
    """What the engine is going to say of everything but the prompt."""
    check_policy(checked_priority(request.priority), policy)
    checked_timeout(request.timeout)
    checked_salt(request.cache_salt)


def _count(found: Precheck, request: ApiRequest, counter: PromptCounter) -> None:
    if request.messages is not None:
        lengths = [counter.count_chat(request.messages)]
    else:
        lengths = [counter.count(prompt) for prompt in request.prompts]
    longest = counter.max_model_len
    new = 0
    for length in lengths:
        if length >= longest:
            raise RequestError(
                f"`prompt` must have at most {longest - 1} tokens. Got {length}.", param="prompt"
            )
        room = longest - length
        wanted = request.params.max_tokens
        new += (room if wanted is None else min(room, wanted)) * request.params.num_sequences
    found.prompt_tokens += sum(lengths)
    found.max_new_tokens += new
