"""One sequence's page table: which page holds which token positions, and who may write them.

Owns the list of a sequence's pages and how many positions of them are in use; the copy-on-write
rule lives here. Knows nothing of token values, hashes, other sequences or devices.

The pages cover the positions without a gap, and no page is kept that holds none of them::

    logical page     0            1            2
    page id        [11]         [12]         [13]
    positions    0 ... 3      4 ... 7      8 . . .     num_tokens = 9, page_size = 4, waste = 3

A page may be written by the sequence that holds its only reference, unless the prefix cache
knows it. `make_writable` brings that about, and `slot_mapping`, which turns positions into the
addresses that a step writes, refuses a page for which it was forgotten.
"""

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pagedjax.errors import IntegrityError
from pagedjax.paging.allocator import PageAllocator
from pagedjax.plan import PageCopy


class PageTable:
    """The pages of one sequence, each counted as one reference. A call that raises changes nothing.

    Attributes:
      num_tokens: positions in use, 0 up to `num_tokens - 1`. Read only.
      page_size: positions in a page.
    """

    def __init__(self, allocator: PageAllocator, page_size: int):
        """Starts with no page."""
        if page_size < 1:
            raise IntegrityError(f"`page_size` must be at least 1. Got {page_size}.")
        self.page_size = page_size
        self.num_tokens = 0
        self._allocator = allocator
        self._pages = array("i")  # i32: a row of the plan is one memory copy away

    @property
    def pages(self) -> list[int]:
        """The page ids by logical page, as a list of the caller's own."""
        return self._pages.tolist()

    def page_at(self, logical_page: int) -> int:
        """The page id of one logical page, without a copy of the list."""
        return self._pages[logical_page]

    @property
    def waste(self) -> int:
        """Allocated positions that hold no token: at most `page_size - 1`, all in the last page."""
        return len(self._pages) * self.page_size - self.num_tokens

    def num_pages_needed(self, n_more: int) -> int:
        """Pages that `append(n_more)` allocates."""
        if n_more < 0:
            raise IntegrityError(f"`n_more` must not be negative. Got {n_more}.")
        return -(-(self.num_tokens + n_more) // self.page_size) - len(self._pages)

    def pages_to_append(self, n: int) -> int:
        """Pages that `extend(n)` allocates: those of `append(n)` and the copy of a shared tail."""
        needed = self.num_pages_needed(n)
        if n > 0 and self.num_tokens % self.page_size:
            needed += self._allocator.references(self._pages[-1]) > 1
        return needed

    def append(self, n_tokens: int) -> list[int]:
        """Grows by `n_tokens` positions and returns the ids of the pages added for them.

        It leaves a shared last page shared: `make_writable` comes before its write (`extend` does
        both).

        Raises:
          AllocationError: too few pages are free.
        """
        needed = self.num_pages_needed(n_tokens)
        new_pages = self._allocator.allocate(needed) if needed else []
        self._pages.extend(new_pages)
        self.num_tokens += n_tokens
        return new_pages

    def extend(self, n_tokens: int) -> PageCopy | None:
        """Grows by `n_tokens` positions that may be written; all or nothing.

        It is `append` and, for a partial last page that others hold too or that the prefix cache
        knows, `make_writable`.

        Raises:
          AllocationError: fewer than `pages_to_append(n_tokens)` pages are free.
        """
        copy = None
        if n_tokens > 0 and self.num_tokens % self.page_size:
            last = len(self._pages) - 1
            if not self._allocator.is_writable(self._pages[last]):
                needed = self.pages_to_append(n_tokens)
                if needed > self._allocator.num_free:
                    self._allocator.allocate(needed)  # raises, with the numbers
                copy = self.make_writable(last)
        self.append(n_tokens)
        return copy

    def adopt(self, pages: Sequence[int], num_tokens: int) -> None:
        """Starts from pages that already hold the first `num_tokens` positions; shares each.

        `pages` are of `PrefixCache.match`, with no allocation between the match and this call, or
        of another table.
        """
        allocator = self._allocator
        if self._pages:
            raise IntegrityError(f"`adopt` needs an empty table. Got one of {len(self._pages)}.")
        if len(pages) != -(-num_tokens // self.page_size):
            raise IntegrityError(
                f"`pages` must be exactly those of {num_tokens} positions at page size "
                f"{self.page_size}. Got {len(pages)}."
            )
        if len(set(pages)) != len(pages):
            raise IntegrityError(f"`pages` must not repeat a page. Got {list(pages)}.")
        lost = [p for p in pages if not allocator.references(p) and not allocator.is_cached(p)]
        if lost:
            raise IntegrityError(f"`pages` must be held or cached. Got {lost}, which are free.")
        for page in pages:
            allocator.share(page)
        self._pages.extend(pages)
        self.num_tokens = num_tokens

    def fork(self) -> "PageTable":
        """A second table over the same pages, a partial last one too; nothing is copied yet."""
        child = PageTable(self._allocator, self.page_size)
        child.adopt(self.pages, self.num_tokens)
        return child

    def truncate(self, num_tokens: int) -> None:
        """Forgets the positions from `num_tokens` on and frees the pages that held only those."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise IntegrityError(
                f"`num_tokens` must be in [0, {self.num_tokens}]. Got {num_tokens}."
            )
        keep = -(-num_tokens // self.page_size)
        self._allocator.free(self._pages[keep:][::-1])
        del self._pages[keep:]
        self.num_tokens = num_tokens

    def make_writable(self, logical_page: int) -> PageCopy | None:
        """Makes this sequence the only one that can see the page, before the page is written.

        A page with more references is replaced by a new one: the returned copy must run on the
        device before this step's writes. A page that only this sequence holds but that the prefix
        cache knows (the sequence was truncated into it) is taken out of the cache instead: a copy
        would cost a page, which could be the last one, to save content that nobody holds.

        Raises:
          AllocationError: a copy is needed and no page is free.
        """
        if not 0 <= logical_page < len(self._pages):
            raise IntegrityError(
                f"`logical_page` must be in [0, {len(self._pages)}). Got {logical_page}."
            )
        allocator, page = self._allocator, self._pages[logical_page]
        if allocator.is_writable(page):
            return None
        if allocator.references(page) == 1:
            allocator.unmark(page)
            return None
        (new_page,) = allocator.allocate()
        allocator.free([page])
        self._pages[logical_page] = new_page
        return PageCopy(src=page, dst=new_page)

    def slot_mapping(self, start: int, n: int) -> NDArray[np.int32]:
        """The slots (page * page_size + offset) that positions [start, start + n) are written to.

        Raises:
          IntegrityError: a position is not allocated, or its page is not writable.
        """
        if n < 0 or start < 0 or start + n > self.num_tokens:
            raise IntegrityError(
                f"positions must be in [0, {self.num_tokens}). Got {n} positions from {start}."
            )
        if n == 0:
            return np.empty(0, np.int32)
        first = start // self.page_size
        pages = self._pages[first : (start + n - 1) // self.page_size + 1]
        for page in pages:
            if not self._allocator.is_writable(page):
                raise IntegrityError(
                    f"a page must be writable before its slots are handed out. Got page {page} "
                    f"with {self._allocator.references(page)} references, cached: "
                    f"{self._allocator.is_cached(page)}. Call `make_writable` first."
                )
        return _slots(pages, start - first * self.page_size, n, self.page_size)

    def write_row(self, row: NDArray[np.int32]) -> None:
        """Writes the page ids to the front of `row`, i32[pages_per_seq]; the rest is left as is."""
        row[: len(self._pages)] = np.frombuffer(self._pages, np.int32)

    def release(self) -> None:
        """Frees all pages, the last one first; the table is empty and may be released again."""
        self.truncate(0)


def resolve_copies(copies: Iterable[PageCopy]) -> list[PageCopy]:
    """The one batch of copies that does the same as `copies` one after another.

    In the batch every source is read before any destination is written, and no destination
    appears twice. Within one step a page can be copied to and then copied from (fork after fork),
    or be a destination, be freed, and be a destination again; copies as a plain list would then
    depend on an order that a kernel does not have.
    """
    origin: dict[int, int] = {}  # page -> the page whose content from before the step it gets
    for copy in copies:
        origin[copy.dst] = origin.get(copy.src, copy.src)
    return [PageCopy(src, dst) for dst, src in origin.items() if src != dst]


def _slots(pages: "array[int]", offset: int, n: int, page_size: int) -> NDArray[np.int32]:
    """Slots of n positions that start `offset` positions into the first of `pages`."""
    if n == 1:  # every decoding sequence, each step: the general way costs several times more
        return np.array([pages[0] * page_size + offset], np.int32)
    starts = np.frombuffer(pages, np.int32) * np.int32(page_size)  # i32[num_pages]
    slots = starts[:, None] + np.arange(page_size, dtype=np.int32)  # i32[num_pages, page_size]
    return slots.reshape(-1)[offset : offset + n]
