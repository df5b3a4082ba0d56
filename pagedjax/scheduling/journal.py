"""Page bookkeeping that can be taken back: what makes `Scheduler.schedule` a transaction.

Owns the undo log of one open transaction over an allocator and its tables. Knows nothing of
tokens, sequences, budgets or why pages change hands.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial

from pagedjax.errors import IntegrityError
from pagedjax.paging import PageAllocator, PageTable


class JournaledAllocator(PageAllocator):
    """An allocator whose changes inside `transaction` vanish when an exception leaves it.

    References, the order of eviction and cached content are then exactly what they were. The
    prefix cache hears of evictions when the transaction is over, so nothing may be looked up in
    it or registered meanwhile.
    """

    def __init__(self, num_pages: int):
        """Starts with all pages free and no transaction open."""
        super().__init__(num_pages)
        self._undo: list[Callable[[], None]] | None = None
        self._evicted: list[int] = []
        self.last_evicted: Sequence[int] = ()  # pages whose content the last transaction gave up

    @property
    def evicted(self) -> Sequence[int]:
        """Pages whose cached content the open transaction gives up, least recently used first."""
        return self._evicted

    @contextmanager
    def transaction(self) -> Generator[None]:
        """Everything inside happens, or nothing does."""
        if self._undo is not None:
            raise IntegrityError("`transaction` must not be opened inside another one.")
        forget, self.on_evict = self.on_evict, self._evicted.append
        self._undo = []
        try:
            yield
        except BaseException:
            for undo in reversed(self._undo):
                undo()
            self._evicted.clear()
            raise
        finally:
            self.on_evict, self._undo = forget, None
        evicted, self._evicted = self._evicted, []
        self.last_evicted = evicted
        if forget is not None:
            for page in evicted:
                forget(page)

    def record(self, undo: Callable[[], None]) -> None:
        """Adds a way to take back what the caller does next."""
        if self._undo is not None:
            self._undo.append(undo)

    def allocate(self, n: int = 1) -> list[int]:
        """As in `PageAllocator`."""
        first = len(self._evicted)
        pages = super().allocate(n)
        if self._undo is not None and pages:
            self._undo.append(partial(self._untake, pages, self._evicted[first:]))
        return pages

    def share(self, page: int) -> None:
        """As in `PageAllocator`."""
        before = None
        if self._undo is not None and self.references(page) == 0:
            before = self._list._prev[page]  # pyright: ignore[reportPrivateUsage]
        super().share(page)
        if self._undo is not None:
            self._undo.append(partial(self._unshare, page, before))

    def free(self, pages: Sequence[int]) -> None:
        """As in `PageAllocator`."""
        super().free(pages)
        if self._undo is not None and pages:
            self._undo.append(partial(self._unfree, list(pages)))

    def _untake(self, pages: list[int], evicted: list[int]) -> None:
        for page in reversed(pages):
            self._references[page] = 0
            self._list.push_front(page)
        for page in evicted:
            self._cached[page] = True
        self.num_free += len(pages)
        self.num_evictable += len(evicted)
        self.num_references -= len(pages)

    def _unshare(self, page: int, before: int | None) -> None:
        self._references[page] -= 1
        self.num_references -= 1
        if before is not None:  # it was evictable, and goes back to its place among those
            after = self._list._next[before]  # pyright: ignore[reportPrivateUsage]
            self._list._insert(before, page, after)  # pyright: ignore[reportPrivateUsage]
            self.num_free += 1
            self.num_evictable += 1

    def _unfree(self, pages: list[int]) -> None:
        for page in reversed(pages):
            if self._references[page] == 0:
                self._list.remove(page)
                self.num_free -= 1
                self.num_evictable -= self._cached[page]
            self._references[page] += 1
        self.num_references += len(pages)


class JournaledTable(PageTable):
    """A page table that a transaction of its allocator can take back, once it was saved."""

    def __init__(self, allocator: JournaledAllocator, page_size: int):
        """Starts with no page."""
        super().__init__(allocator, page_size)
        self._journal = allocator

    @property
    def capacity(self) -> int:
        """Positions that its pages cover."""
        return len(self._pages) * self.page_size

    @property
    def last_page(self) -> int:
        """Id of the last page; there must be one."""
        return self._pages[-1]

    @property
    def num_pages(self) -> int:
        """Pages that it names."""
        return len(self._pages)

    def add_page(self, page: int, num_tokens: int) -> None:
        """One page more, whose reference is for this table already, for all its `num_tokens`."""
        self._pages.append(page)
        self.num_tokens = num_tokens

    def shorten(self, num_pages: int, num_tokens: int) -> None:
        """Takes `add_page` back; the pages' references are the allocator's business."""
        del self._pages[num_pages:]
        self.num_tokens = num_tokens

    def take_over(self, pages: Sequence[int], num_tokens: int) -> None:
        """Starts from pages with the first `num_tokens` positions that each have a reference for
        this table already; it must be empty."""
        if self._pages or len(pages) != -(-num_tokens // self.page_size):
            raise IntegrityError(
                f"`take_over` needs an empty table and the pages of {num_tokens} positions. Got "
                f"{len(pages)} pages for a table of {len(self._pages)}."
            )
        self._pages.extend(pages)
        self.num_tokens = num_tokens

    def save(self) -> None:
        """To be called inside a transaction before this table is changed."""
        self._journal.record(partial(self._restore, self._pages[:], self.num_tokens))

    def fork(self) -> JournaledTable:
        """As in `PageTable`."""
        child = JournaledTable(self._journal, self.page_size)
        child.adopt(self.pages, self.num_tokens)
        return child

    def _restore(self, pages: array[int], num_tokens: int) -> None:
        self._pages = pages
        self.num_tokens = num_tokens
