"""Host pages in the hands of sequences: let go, shared, lost.

Owns no state but the tier's; a sequence's host pages are in its own record. Knows nothing of
queues, or of why a sequence was swapped.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagedjax.paging import HostTier
from pagedjax.scheduling.live import LiveSequence
from pagedjax.scheduling.recorder import Recorder


class Swapped:
    """What becomes of the host pages of swapped sequences.

    Attributes:
      num_lost_pages: whose content was lost.
    """

    def __init__(self, host: HostTier):
        """Is handed the tier."""
        self.num_lost_pages = 0
        self.events: Recorder | None = None  # hears of sequences that start over
        self._host = host

    def release(self, live: LiveSequence) -> None:
        """Lets a sequence's host pages go; full ones may be hit until they are reused."""
        if live.host_pages:
            self._host.allocator.free(live.host_pages[::-1])
            live.host_pages = ()

    def forget(self, live: LiveSequence) -> None:
        """A swapped sequence starts over when its turn comes; nothing happens to any other."""
        if live.host_pages:
            self.release(live)
            live.start_over()
            if self.events is not None:
                self.events.restarted(live)

    def share(self, live: LiveSequence, parent: LiveSequence) -> None:
        """A waiting sequence without pages starts from the host pages of `parent`, too."""
        for page in parent.host_pages:
            self._host.allocator.share(page)
        live.host_pages = parent.host_pages

    def lose(
        self, lost: frozenset[int], waiting: Iterable[LiveSequence], running: Iterable[LiveSequence]
    ) -> None:
        """The content of host pages is gone: who waits with one of them starts over."""
        if not lost:
            return
        self.num_lost_pages += len(lost)
        for page in sorted(lost):
            self._host.lose(page)
        for live in waiting:
            if not lost.isdisjoint(live.host_pages):
                self.forget(live)
        for live in running:  # it has them on the device by now, or that step fails
            if not lost.isdisjoint(live.host_pages):
                self.release(live)
