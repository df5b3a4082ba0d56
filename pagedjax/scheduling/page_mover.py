"""Does with pages what a draft decided: device pages change hands, host pages are filled and read.

`take` works inside one transaction over both allocators and leaves in a `PageWork` what has to wait
until nothing can fail any more: `settle` then links contents to host pages, and lets go of what was
held for the step only. Knows nothing of budgets or of why anything moves.

The order matters. Hits are held first, on the device and on the host, before anything is
allocated, since that could evict them. Host pages that are read in this step are held until
`settle`, so that nothing of the same step is written to them. What the step evicts from the
device is known last, and is copied to the host if there is room.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from functools import partial

from pagedjax.config import SchedulerConfig
from pagedjax.paging import NULL_PAGE, HostTier, PrefixCache, PrefixHits, PrefixNode
from pagedjax.plan import PageMove
from pagedjax.scheduling.draft import StepDraft
from pagedjax.scheduling.journal import JournaledAllocator, JournaledTable
from pagedjax.scheduling.live import LiveSequence
from pagedjax.scheduling.page_work import PageWork
from pagedjax.scheduling.plan_builder import PlanBuilder
from pagedjax.scheduling.victims import Content, Victim

MAX_SPILLED_PAGES = 64  # evicted prefix pages that one step copies to the host: bounds its delay


class PageMover:
    """The scheduler's hands."""

    def __init__(
        self,
        config: SchedulerConfig,
        allocator: JournaledAllocator,
        host_allocator: JournaledAllocator,
        cache: PrefixCache,
        host: HostTier,
        builder: PlanBuilder,
    ):
        """Is handed its collaborators; `host_allocator` is that of `host`."""
        self._config = config
        self._allocator = allocator
        self._host_allocator = host_allocator
        self._cache = cache
        self._host = host
        self._builder = builder

    @contextmanager
    def transaction(self) -> Generator[None]:
        """Everything inside happens to device and host pages, or nothing does."""
        with self._allocator.transaction(), self._host_allocator.transaction():
            yield

    def take(self, draft: StepDraft, slots: Mapping[LiveSequence, int]) -> PageWork:
        """Does what the draft decided; inside a transaction, which takes all of it back."""
        work = PageWork()
        if draft.victims:
            self._swap_out(draft.victims, work)
        for victim in draft.victims:
            victim.live.table.save()
            victim.live.table.release()
        if draft.admitted:
            self._admit(draft, slots, work)
        self._grow(draft, slots, work)
        if self._allocator.evicted and self._host_allocator.num_free:
            self._spill(work)
        return work

    def settle(self, work: PageWork) -> None:
        """After the transaction: nothing here can fail."""
        for node, host_page in work.attached:
            self._host.attach(node, host_page)
        self._host_allocator.free(work.spilled)
        self._host_allocator.free(work.guarded[::-1])

    def _grow(self, draft: StepDraft, slots: Mapping[LiveSequence, int], work: PageWork) -> None:
        by_one: list[tuple[LiveSequence, int]] = []
        for live, total in draft.grown:
            if total == live.capacity + 1 and not live.shares_tail:
                by_one.append((live, total))
                continue
            copy = live.grow(total)
            if copy is not None:
                work.copies.append(copy)
            self._builder.set_pages(live, slots[live])
        pages = self._allocator.allocate(len(by_one))
        before = [(live.table, live.table.num_pages, live.table.num_tokens) for live, _ in by_one]
        self._allocator.record(partial(_take_back, before))
        for (live, total), page in zip(by_one, pages, strict=True):
            self._builder.set_page(slots[live], live.table.num_pages, page)
            live.table.add_page(page, total)

    def _swap_out(self, victims: Seq[Victim], work: PageWork) -> None:
        swapped = [victim for victim in victims if victim.contents]
        for victim in swapped:
            for host_page in victim.host_pages:
                if host_page != NULL_PAGE:
                    self._host_allocator.share(host_page)
        filled: dict[Content, int] = {}  # by this step
        for victim in swapped:
            pages = victim.live.table.pages
            table = list(victim.host_pages)
            for at, content in enumerate(victim.contents):
                if table[at] != NULL_PAGE:
                    continue
                if content in filled:
                    table[at] = filled[content]
                    self._host_allocator.share(table[at])
                    continue
                (table[at],) = self._host_allocator.allocate()
                filled[content] = table[at]
                work.swaps_out.append(PageMove(pages[at], table[at]))
                if isinstance(content, PrefixNode):
                    work.attached.append((content, table[at]))
            work.host_tables[victim.live] = tuple(table)

    def _admit(self, draft: StepDraft, slots: Mapping[LiveSequence, int], work: PageWork) -> None:
        for admission in draft.admitted:
            self._hold(admission.hits, work)
        arrived: dict[int, int] = {}  # host page of full content -> the device page it goes to
        for admission in draft.admitted:
            live, hits = admission.live, admission.hits
            pages = self._bring_in(hits, admission.num_tokens, arrived, work)
            live.table.save()
            live.table.take_over(pages, admission.num_tokens)
            num_full = admission.num_tokens // self._config.page_size
            if live.host_pages or any(hits.host_pages):
                work.restored[live] = tuple(
                    at for at, page in enumerate(hits.pages[:num_full]) if page == NULL_PAGE
                )
            self._builder.set_slot(slots[live], live)

    def _hold(self, hits: PrefixHits, work: PageWork) -> None:
        for page, host_page in zip(hits.pages, hits.host_pages, strict=True):
            if page != NULL_PAGE:
                self._allocator.share(page)
            else:
                self._host_allocator.share(host_page)
                work.guarded.append(host_page)

    def _bring_in(
        self, hits: PrefixHits, num_tokens: int, arrived: dict[int, int], work: PageWork
    ) -> list[int]:
        """The device pages of an admitted sequence, a reference each; full ones from the host are
        shared by all that the step admits, a partial one is the sequence's own."""
        pages = list(hits.pages)
        for at, host_page in enumerate(hits.host_pages):
            if host_page == NULL_PAGE:
                continue
            if host_page in arrived:
                pages[at] = arrived[host_page]
                self._allocator.share(pages[at])
                continue
            (pages[at],) = self._allocator.allocate()
            work.swaps_in.append(PageMove(pages[at], host_page))
            if (at + 1) * self._config.page_size <= num_tokens:
                arrived[host_page] = pages[at]
        return pages

    def _spill(self, work: PageWork) -> None:
        """Keeps on the host what this step evicts from the device, the latest used of it."""
        nodes: dict[PrefixNode, int] = {}
        swapped = {node for node, _ in work.attached}
        for page in self._allocator.evicted:
            node = self._cache.node_of(page)
            if node is not None and node not in swapped and self._is_last_copy(node):
                nodes[node] = page
        room = min(MAX_SPILLED_PAGES, self._host_allocator.num_free, len(nodes))
        kept = list(nodes.items())[len(nodes) - room :]
        work.spilled = self._host_allocator.allocate(room)
        for (node, page), host_page in zip(kept, work.spilled, strict=True):
            work.swaps_out.append(PageMove(page, host_page))
            work.attached.append((node, host_page))

    def _is_last_copy(self, node: PrefixNode) -> bool:
        """Whether content that a page gave up is nowhere else by now."""
        if self._host.page_of(node) is not None:
            return False
        return not any(self._allocator.is_cached(page) for page in node.pages)


def _take_back(before: Seq[tuple[JournaledTable, int, int]]) -> None:
    for table, num_pages, num_tokens in before:
        table.shorten(num_pages, num_tokens)
