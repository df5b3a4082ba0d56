"""The sequences of a log that have not ended: which pages they have, how far they are computed.

Knows nothing of events.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pagedjax.history.story import Fact, Moment, Story


@dataclass(slots=True)
class SequenceRecord:
    """A sequence that has not ended."""

    story: Story
    sample: int
    waits_since: Moment | None
    computed: int = 0  # positions before `joined`
    joined: int | None = None  # the step since which it runs a token a step; None: it does not run
    lost: int = 0  # computed positions when it gave its pages up
    table: list[int] = field(default_factory=list[int])
    num_indexed: int = 0  # full pages of the prompt whose content is known to be computed

    def computed_before(self, step: int) -> int:
        """Positions computed in the steps before this one."""
        return self.computed + (0 if self.joined is None else step - self.joined)

    def run(self, step: int, num_tokens: int) -> None:
        """It runs so many tokens in this step, and one in each that follows."""
        self.computed = self.computed_before(step) + num_tokens - 1
        self.joined = step

    def stop(self, step: int) -> None:
        """It does not run in this step."""
        self.computed, self.joined = self.computed_before(step), None

    def give_up(self, at: Moment, *, keeps: bool) -> None:
        """Its device pages are gone; it keeps what is computed where the host has that."""
        if not keeps:
            self.lost, self.computed = max(self.lost, self.computed), 0
        self.table, self.num_indexed = [], 0
        self.waits_since = self.waits_since or at

    def note(self, at: Moment, kind: str, **details: Any) -> None:
        """A fact of its story."""
        self.story.facts.append(Fact(at, kind, self.sample, details))


class Sequences:
    """All of them, by name.

    Attributes:
      running: those that ran in the last step.
      prompting: those of them whose prompt is not computed yet.
    """

    def __init__(self) -> None:
        """Starts with none."""
        self.running: set[str] = set()
        self.prompting: set[str] = set()
        self._records: dict[str, SequenceRecord] = {}
        self._stories: dict[str, Story] = {}  # by order of arrival
        self._prompt_tables: dict[str, list[int]] = {}  # request -> pages that its samples share

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return sum(one.waits_since is not None for one in self._records.values())

    def add(self, story: Story) -> None:
        """The first sequence of a request waits."""
        self._stories[story.arrival] = story
        self._records[story.arrival] = SequenceRecord(story, 0, story.added)

    def find(self, name: str) -> SequenceRecord | None:
        """A sequence's record, if the log has said anything of it yet."""
        return self._records.get(name)

    def record(self, name: str) -> SequenceRecord:
        """A sequence's record; a sample that is new has forked off, with the prompt's pages."""
        one = self._records.get(name)
        if one is None:
            story = self.story(name)
            one = SequenceRecord(story, int(name.split(".")[1]), None, len(story.tokens))
            one.table = list(self._prompt_tables.get(story.arrival, ()))
            self._records[name] = one
        return one

    def story(self, name: str) -> Story:
        """The request that a sequence is of."""
        return self._stories[name.split(".")[0]]

    def prompt_done(self, name: str) -> SequenceRecord:
        """Its prompt is computed: samples that fork off start from the pages it has now."""
        self.prompting.discard(name)
        one = self.record(name)
        self._prompt_tables[one.story.arrival] = list(one.table)
        return one

    def stop(self, name: str, step: int) -> None:
        """It does not run in this step."""
        if name in self._records:
            self._records[name].stop(step)
        self.running.discard(name)
        self.prompting.discard(name)

    def remove(self, name: str) -> None:
        """It ended."""
        del self._records[name]
