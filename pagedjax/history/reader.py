"""Follows a log's events: who waits, who runs, what pages a sequence has, how much is computed.

Knows nothing of words.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagedjax.errors import EventLogError
from pagedjax.events import (
    Added,
    Called,
    Dropped,
    Ended,
    Header,
    Logged,
    Restarted,
    Result,
    Stalled,
    Step,
    Turned,
    decode_request,
    read_events,
)
from pagedjax.history.contents import Contents
from pagedjax.history.sequences import Sequences
from pagedjax.history.story import Fact, Moment, Story, Wait
from pagedjax.history.waits import Block, QueueWaits


class History:
    """Reads a log's events in order.

    Attributes:
      stories: in order of arrival.
      now: the last event's moment.
    """

    def __init__(self, header: Header):
        """Starts before the first request."""
        self.header = header
        self.stories: list[Story] = []
        self.now = Moment(0, 0.0)
        self._size: int = header.config["page_size"]
        self._contents = Contents(
            self._size, is_cached=bool(header.config["enable_prefix_caching"])
        )
        self._queue = QueueWaits()
        self._sequences = Sequences()
        self._cause: tuple[str, int] = ("", 0)  # of sequences that start over now

    @classmethod
    def load(cls, path: str | Path) -> History:
        """The history of a whole log.

        Raises:
          EventLogError: it cannot be read, or a line of it is damaged.
        """
        lines, number = read_events(path), 1
        try:
            history = cls(next(lines).event)
            for logged in lines:
                number = logged.line
                history.read(logged)
        except EventLogError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise EventLogError(f"{path}, line {number} is damaged: {error!r}.") from error
        return history

    def read(self, logged: Logged) -> None:
        """Takes in one line."""
        event = logged.event
        step = event.step if isinstance(event, Step) else self.now.step
        self.now = Moment(step, logged.seconds)
        match event:
            case Added():
                self._add(event)
            case Step():
                self._step(event)
            case Stalled():
                self._block(event.waiting)
            case Result():
                self._cause = ("result", event.step)
            case Dropped():
                self._cause = ("dropped", event.step)
            case Called():
                self._cause = (event.method, step)
                if event.method in ("reset_prefix_cache", "forget_device_pages"):
                    self._contents.reset(step)
            case Restarted():
                self._restart(event.sequence)
            case Turned():
                for name, parent, runs in event.moves:
                    self._turn(name, parent, runs=runs)
            case Ended():
                self._end(event)
            case _:
                pass

    def waits(self, story: Story, since: Moment, until: Moment) -> list[Wait]:
        """What a wait of one of its sequences was for, longest part first."""
        return self._queue.parts(story, since, until)

    def _add(self, event: Added) -> None:
        document = event.request
        decode_request(document)  # raises for what is none
        arrival = str(document["arrival"])
        story = Story(document["request_id"], arrival, document, self.now)
        sequences = self._sequences
        crowd = {"num_waiting": sequences.num_waiting, "num_running": len(sequences.running)}
        story.facts.append(Fact(self.now, "added", details=crowd))
        self.stories.append(story)
        sequences.add(story)
        self._contents.add(story)

    # -------------------------------------------------------------------------------- one step

    def _step(self, event: Step) -> None:
        for preempted in event.preempted:
            self._preempt(event, *preempted)
        self._contents.move_out(event)
        new = {name: ids for name, _, ids in event.pages}
        for name, num_tokens, host_pages in event.admitted:
            self._admit(name, num_tokens, host_pages, new.get(name, []))
        self._contents.move_in(event)
        self._take_pages(event)
        self._run(event)
        self._block(event.waiting)

    def _preempt(
        self, event: Step, name: str, mode: str, needer: str, needed: int, free: int
    ) -> None:
        one = self._sequences.record(name)
        self._sequences.stop(name, event.step)
        moved = len({page for page, _ in event.swaps_out}.intersection(one.table))
        one.story.counts.num_preemptions += 1
        one.story.counts.num_pages_out += moved
        one.note(
            self.now,
            "preempted",
            mode=mode,
            needer=self._sequences.story(needer).name if needer else "",
            is_sibling=needer != name and needer.split(".")[0] == one.story.arrival,
            needer_sample=_sample(needer),
            needed=needed,
            free=free,
            num_pages=len(one.table),
            num_moved=moved,
            num_tokens=one.computed,
        )
        one.give_up(self.now, keeps=mode == "swap")

    def _admit(self, name: str, num_tokens: int, host_pages: list[int], pages: list[int]) -> None:
        one = self._sequences.record(name)
        story, counts = one.story, one.story.counts
        since = one.waits_since or story.added  # a sample whose leader ended has its place
        self._queue.leave(self.now, name)
        num_steps = self.now.step - since.step - 1
        self._count_wait(story, since, num_steps)
        is_first, num_pages = story.first_run is None, -(-num_tokens // self._size)
        num_host, recomputed = sum(map(bool, host_pages)), max(0, one.lost - num_tokens)
        counts.num_pages_in += num_host
        counts.num_recomputed_tokens += recomputed
        running = [self._sequences.story(other) for other in sorted(self._sequences.running)]
        miss = self._contents.miss(story, num_tokens, self.now.step, running) if is_first else None
        one.note(
            self.now,
            "admitted",
            is_first=is_first,
            since=since,
            num_steps=num_steps,
            seconds=self.now.seconds - since.seconds,
            num_tokens=num_tokens,
            num_device=num_pages - num_host,
            num_host=num_host,
            num_recomputed=recomputed,
            sources=self._contents.sources(pages[:num_pages], host_pages),
            miss=miss,
        )
        if is_first:
            story.first_run = self.now
            counts.num_cached_tokens = num_tokens
        one.waits_since, one.lost, one.computed = None, 0, num_tokens

    def _take_pages(self, event: Step) -> None:
        found = {name: -(-tokens // self._size) for name, tokens, _ in event.admitted}
        for name, first, ids in event.pages:
            one = self._sequences.record(name)
            one.table[first:] = ids
            for logical, page in enumerate(ids, first):
                if logical >= found.get(name, 0):
                    self._contents.own(one.story, logical, page)
        for name, source, target in event.copies:
            one = self._sequences.record(name)
            one.story.counts.num_copies += 1
            if source in one.table:
                logical = one.table.index(source)
                one.table[logical] = target
                self._contents.own(one.story, logical, target)
            one.note(self.now, "copied", source=source, target=target)

    def _run(self, event: Step) -> None:
        for name in event.gone:
            self._sequences.stop(name, event.step)
        for name, num_tokens in event.runs:
            one = self._sequences.record(name)
            if one.computed_before(event.step) < len(one.story.tokens):
                self._sequences.prompting.add(name)
            one.run(event.step, num_tokens)
            self._sequences.running.add(name)
        for name in sorted(self._sequences.prompting):
            self._advance_prompt(name, self._sequences.record(name).computed_before(event.step + 1))

    def _advance_prompt(self, name: str, computed: int) -> None:
        """Its prompt's full pages among the first `computed` positions can be hit soon."""
        one = self._sequences.record(name)
        story, last = one.story, computed // self._size
        self._contents.compute(story, one.num_indexed, last, self.now.step)
        one.num_indexed = max(one.num_indexed, last)
        if computed >= len(story.tokens):
            self._sequences.prompt_done(name).note(self.now, "prompt done")

    def _block(self, waiting: list[Any]) -> None:
        if waiting:
            head, reason, needed, free, reserved, *maker = waiting
            whose = self._sequences.story(maker[0]).name if maker else ""
            story = self._sequences.story(head)
            block = Block(self.now, head, story, reason, needed, free, reserved, whose)
            self._queue.block(block)

    # ------------------------------------------------------------------------- between two steps

    def _restart(self, name: str) -> None:
        one = self._sequences.record(name)
        cause, step = self._cause
        if cause == "result":  # which says what the host lost, or lets beams go on from others
            cause = "lost" if one.waits_since is not None else "turned"
        self._sequences.stop(name, self.now.step + 1)
        one.story.counts.num_restarts += 1
        if cause == "dropped":
            self._contents.undo(one.story, step)
        one.note(self.now, "restarted", cause=cause, step=step, num_tokens=one.computed)
        one.give_up(self.now, keeps=False)

    def _turn(self, name: str, parent: str, *, runs: bool) -> None:
        one, source = self._sequences.record(name), self._sequences.record(parent)
        if not runs:
            self._sequences.stop(name, self.now.step + 1)
            one.computed, one.table = 0, []
            one.waits_since = one.waits_since or self.now
            return
        one.computed, one.table = source.computed_before(self.now.step + 1), list(source.table)
        one.joined = self.now.step + 1 if name in self._sequences.running else None
        one.waits_since, one.lost = None, 0

    def _end(self, event: Ended) -> None:
        one = self._sequences.record(event.sequence)
        story = one.story
        self._queue.leave(self.now, event.sequence)
        self._sequences.stop(event.sequence, self.now.step + 1)
        if one.waits_since is not None:
            self._count_wait(story, one.waits_since, self.now.step - one.waits_since.step)
        story.ended = self.now
        story.reasons.append(event.reason)
        story.counts.num_output_tokens += event.tokens
        one.note(self.now, "ended", reason=event.reason, num_tokens=event.tokens, error=event.error)
        self._sequences.remove(event.sequence)

    # ---------------------------------------------------------------------------------- helpers

    def _count_wait(self, story: Story, since: Moment, num_steps: int) -> None:
        story.counts.num_wait_steps += num_steps
        story.counts.wait_seconds += self.now.seconds - since.seconds


def _sample(name: str) -> int:
    """Of a sequence's name."""
    return int(name.partition(".")[2] or 0)
