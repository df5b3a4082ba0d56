"""The page allocator: which page ids are held, how often, and in which order the rest is reused.

Owns the reference counts, the flag "the prefix cache knows this page", and one list of all pages
that nobody holds. Knows nothing of tokens, sequences, hashes or devices.

A page is in exactly one of four states::

    NULL_PAGE   page 0: never allocated, shared, freed or listed
    held        references >= 1
    evictable   references == 0, cached: its content may be hit again until the page is reused
    free        references == 0, not cached: its content is worth nothing

Free and evictable pages share one list, taken from the head::

    head | free pages, last freed first ...  | evictable pages, least recently freed first | tail

A page that is freed without being cached goes to the head, so no cached content is lost while a
worthless page is left, and recently written memory is written again. A cached page goes to the
tail; it leaves the list when it is hit (`share`) or, with its content, when it is reused.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from pagedjax.errors import AllocationError, IntegrityError

NULL_PAGE = 0


class PageAllocator:
    """Hands out page ids in [1, num_pages) with reference counts; every operation is O(1) a page.

    A call that raises has changed nothing.

    Attributes:
      num_pages: pages in the pool, the null page included.
      num_free: pages that `allocate` can hand out now: free plus evictable. Read only.
      num_evictable: those of them whose content the prefix cache still knows. Read only.
      num_references: of all pages together; what exceeds `num_held` is what sharing saves. Read
        only.
      on_evict: called with a page whose cached content is given up, so that the prefix cache
        forgets it. It must not call the allocator.
    """

    def __init__(self, num_pages: int):
        """Makes all page records at once; pages are first handed out in the order 1, 2, 3, ..."""
        if num_pages < 1:
            raise IntegrityError(f"`num_pages` must be at least 1, the null page. Got {num_pages}.")
        self.num_pages = num_pages
        self.num_free: int = num_pages - 1
        self.num_evictable = 0
        self.num_references: int = 0
        self.on_evict: Callable[[int], None] | None = None
        self._references = [0] * num_pages
        self._cached = bytearray(num_pages)
        self._list = _PageList(num_pages)

    @property
    def usable(self) -> int:
        """Pages that can hold anything: all but the null page."""
        return self.num_pages - 1

    @property
    def num_held(self) -> int:
        """Distinct pages with at least one reference."""
        return self.usable - self.num_free

    @property
    def usage(self) -> float:
        """Held part of the usable pages, 0 to 1."""
        return self.num_held / max(self.usable, 1)

    def references(self, page: int) -> int:
        """How many holders `page` has."""
        _check_id(page, self.num_pages, "references")
        return self._references[page]

    def is_cached(self, page: int) -> bool:
        """Whether the prefix cache knows the content of `page`."""
        _check_id(page, self.num_pages, "is_cached")
        return bool(self._cached[page])

    def is_writable(self, page: int) -> bool:
        """Whether its one holder may write `page`: nobody else, nor the cache, can see it."""
        _check_id(page, self.num_pages, "is_writable")
        return self._references[page] == 1 and not self._cached[page]

    def count_evictable(self, pages: Iterable[int]) -> int:
        """How much sharing `pages` would lower `num_free`: the distinct ones with no holder."""
        return sum(self.references(page) == 0 for page in set(pages))

    def eviction_order(self) -> list[int]:
        """The pages nobody holds in the order `allocate` takes them. O(num_free): for tests."""
        return list(self._list)

    def allocate(self, n: int = 1) -> list[int]:
        """Takes `n` pages with one reference each; cached content of reused pages is given up here.

        Raises:
          AllocationError: fewer than `n` pages are free or evictable.
        """
        if n < 0:
            raise IntegrityError(f"`n` must not be negative. Got {n}.")
        if n > self.num_free:
            raise AllocationError(
                f"`n` must be at most the {self.num_free} pages that are free (of {self.usable}; "
                f"{self.num_held} are held). Got {n}. Free {n - self.num_free} more first."
            )
        taken = self._list.take(n)
        self.num_free -= n
        self.num_references += n
        for page in taken:
            self._references[page] = 1
            if self._cached[page]:
                self.num_evictable -= 1
                self.unmark(page)
        return taken

    def share(self, page: int) -> None:
        """Adds a reference to a held page, or brings an evictable one back with its content."""
        _check_id(page, self.num_pages, "share")
        if self._references[page] == 0:
            if not self._cached[page]:
                raise IntegrityError(
                    f"`page` must be held or cached to be shared. Got page {page}, which is free."
                )
            self._list.remove(page)
            self.num_free -= 1
            self.num_evictable -= 1
        self._references[page] += 1
        self.num_references += 1

    def free(self, pages: Sequence[int]) -> None:
        """Drops one reference for each entry, in the given order.

        A caller gives a sequence's pages in reverse: its last page, which the fewest can share,
        is then the first to be evicted. A page named twice loses two references.
        """
        references = self._references
        released: list[int] = []
        for count, page in enumerate(pages):
            if not 0 < page < self.num_pages or references[page] == 0:
                for undone in pages[:count]:
                    references[undone] += 1
                _check_id(page, self.num_pages, "free")
                raise IntegrityError(
                    f"`pages` must name held pages only. Got page {page} at place {count} of "
                    f"{len(pages)}, which has no reference left: it would be freed twice."
                )
            references[page] -= 1
            if references[page] == 0:
                released.append(page)
        for page in released:
            if self._cached[page]:
                self._list.push_back(page)
                self.num_evictable += 1
            else:
                self._list.push_front(page)
        self.num_free += len(released)
        self.num_references -= len(pages)

    def mark_cached(self, page: int) -> None:
        """The prefix cache knows the content of this held page from now on."""
        _check_id(page, self.num_pages, "mark_cached")
        if self._references[page] == 0 or self._cached[page]:
            raise IntegrityError(
                f"`page` must be held and not yet cached. Got page {page} with "
                f"{self._references[page]} references, cached: {bool(self._cached[page])}."
            )
        self._cached[page] = True

    def unmark(self, page: int) -> None:
        """Gives up the cached content of `page` (calls `on_evict`); unheld, it is free at once."""
        _check_id(page, self.num_pages, "unmark")
        if not self._cached[page]:
            raise IntegrityError(f"`page` must be cached. Got page {page}, which is not.")
        if self._references[page] == 0:
            self._list.remove(page)
            self._list.push_front(page)
            self.num_evictable -= 1
        self._cached[page] = False
        if self.on_evict is not None:
            self.on_evict(page)

    def check_integrity(self, holders: Iterable[Iterable[int]] | None = None) -> None:
        """Raises IntegrityError unless counters, list and references agree.

        Args:
          holders: the pages that each holder (page table, swap) names; when given, each page's
            references must equal the number of times it is named.
        """
        listed = self._list.walk_checked()
        evictable = sum(self._cached[page] for page in listed)
        held = sum(count > 0 for count in self._references)
        facts = (
            f"num_pages {self.num_pages}, num_free {self.num_free}, num_evictable "
            f"{self.num_evictable}; found listed {len(listed)}, evictable {evictable}, held {held}"
        )
        if len(listed) + held + 1 != self.num_pages or len(listed) != self.num_free:
            raise IntegrityError(f"free + evictable + held + 1 must equal num_pages: {facts}.")
        if evictable != self.num_evictable:
            raise IntegrityError(f"num_evictable must count the cached pages listed: {facts}.")
        wrong = [page for page in listed if self._references[page]]
        if wrong or min(self._references) < 0 or self._references[NULL_PAGE]:
            raise IntegrityError(
                f"a page is listed and held: {wrong}, or the null page is: {facts}."
            )
        if sum(self._references) != self.num_references:
            raise IntegrityError(
                f"num_references must be the sum of all, {sum(self._references)}. "
                f"Got {self.num_references}."
            )
        if self._cached[NULL_PAGE]:
            raise IntegrityError("the null page must never be cached.")
        if holders is not None:
            _check_holders(self._references, holders)


class _PageList:
    """A doubly linked list of page ids inside two preallocated lists.

    The null page is never a member, so its record serves as both ends: `next` of it is the head,
    `prev` of it the tail.
    """

    def __init__(self, num_pages: int):
        self._next = [*range(1, num_pages), NULL_PAGE]
        self._prev = [num_pages - 1, *range(num_pages - 1)]

    def __iter__(self) -> Iterator[int]:
        page = self._next[NULL_PAGE]
        while page != NULL_PAGE:
            yield page
            page = self._next[page]

    def take(self, n: int) -> list[int]:
        """Unlinks the first n pages, of which there must be as many."""
        next_page = self._next
        taken: list[int] = []
        page = next_page[NULL_PAGE]
        for _ in range(n):
            taken.append(page)
            page = next_page[page]
        next_page[NULL_PAGE] = page
        self._prev[page] = NULL_PAGE
        return taken

    def remove(self, page: int) -> None:
        before, after = self._prev[page], self._next[page]
        self._next[before] = after
        self._prev[after] = before

    def push_front(self, page: int) -> None:
        self._insert(NULL_PAGE, page, self._next[NULL_PAGE])

    def push_back(self, page: int) -> None:
        self._insert(self._prev[NULL_PAGE], page, NULL_PAGE)

    def walk_checked(self) -> list[int]:
        """The members in order; raises when the links do not form one closed ring."""
        pages: list[int] = []
        before, page = NULL_PAGE, self._next[NULL_PAGE]
        while page != NULL_PAGE and len(pages) < len(self._next):
            if self._prev[page] != before:
                raise IntegrityError(
                    f"the page list is broken: {before} -> {page}, but {page} is after "
                    f"{self._prev[page]}."
                )
            pages.append(page)
            before, page = page, self._next[page]
        if page != NULL_PAGE or self._prev[NULL_PAGE] != before or len(set(pages)) != len(pages):
            raise IntegrityError(f"the page list does not close after {len(pages)} pages.")
        return pages

    def _insert(self, before: int, page: int, after: int) -> None:
        self._next[before] = page
        self._prev[page] = before
        self._next[page] = after
        self._prev[after] = page


def _check_id(page: int, num_pages: int, verb: str) -> None:
    if not 0 < page < num_pages:
        got = "the null page" if page == NULL_PAGE else f"page {page}"
        raise IntegrityError(f"`page` of `{verb}` must be in [1, {num_pages}). Got {got}.")


def _check_holders(references: Sequence[int], holders: Iterable[Iterable[int]]) -> None:
    named = [0] * len(references)
    for pages in holders:
        for page in pages:
            named[page] += 1
    wrong = {
        page: pair
        for page, pair in enumerate(zip(named, references, strict=True))
        if pair[0] != pair[1]
    }
    if wrong:
        raise IntegrityError(
            "a page's references must equal the entries that name it. Got, as {page: (entries, "
            f"references)}}: {wrong}."
        )
