"""Why the queue stood still, and what a request's wait was for. Knows nothing of pages."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from pagedjax.history.story import Moment, Story, Wait


@dataclass(slots=True)
class Block:
    """Why the head of the queue waited, from one moment to another (None: to the next block)."""

    since: Moment
    head: str  # sequence
    story: Story
    reason: str
    needed: int
    free: int
    reserved: int
    whose: str  # name of the request that computes what is awaited; empty: it is not that
    until: Moment | None = None


class QueueWaits:
    """Remembers what the heads of the queue waited for."""

    def __init__(self) -> None:
        """Starts with an empty queue."""
        self._blocks: list[Block] = []

    def block(self, block: Block) -> None:
        """From its moment on the head of the queue waits for this."""
        self._blocks.append(block)

    def leave(self, at: Moment, name: str) -> None:
        """A sequence does not wait any more."""
        if self._blocks and self._blocks[-1].head == name:
            self._blocks[-1].until = at

    def parts(self, story: Story, since: Moment, until: Moment) -> list[Wait]:
        """What a wait was for, in the steps after `since` and before `until`, longest first."""
        found: dict[tuple[int, str, str], Wait] = {}
        for block, following in pairwise([*self._blocks, None]):
            assert block is not None
            end = block.until or (following.since if following else until)
            num_steps = min(end.step, until.step) - max(block.since.step, since.step + 1)
            if num_steps <= 0:
                continue
            key = (id(block.story), block.reason, block.whose)
            before = found.get(key)
            found[key] = Wait(
                head=block.story.name,
                is_head=block.story is story,
                reason=block.reason,
                needed=block.needed if before is None else before.needed,
                free=block.free if before is None else before.free,
                reserved=block.reserved if before is None else before.reserved,
                whose=block.whose,
                num_steps=num_steps + (before.num_steps if before else 0),
            )
        return sorted(found.values(), key=lambda wait: -wait.num_steps)
