"""Device pages while a step is drafted: how many are free, and who holds which, by arithmetic.

Starts from what the allocator says and changes nothing of it. Knows nothing of who gets pages or
why; what is counted here is what `page_mover.py` then does.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagedjax.paging import NULL_PAGE, PageAllocator
from pagedjax.scheduling.admission import Admission


class PageBudget:
    """The pages of one draft.

    Attributes:
      free: pages that can be had by now.
    """

    def __init__(self, allocator: PageAllocator, page_size: int):
        """Starts with the pages that are free or evictable."""
        self.free = allocator.num_free
        self._allocator = allocator
        self._page_size = page_size
        self._references: dict[int, int] = {}  # where they differ from the allocator's by now
        self._arriving: set[int] = set()  # host pages of full content that were brought in

    def references(self, page: int) -> int:
        """Holders of a page by now."""
        known = self._references.get(page)
        return self._allocator.references(page) if known is None else known

    def drop(self, pages: Iterable[int]) -> None:
        """Takes a reference from each; those without any are free."""
        for page in pages:
            count = self._references[page] = self.references(page) - 1
            self.free += count == 0

    def taken_by(self, admission: Admission) -> int:
        """Free pages that the start of an admitted sequence takes: what nobody holds now, and what
        is brought in for the first time in this step."""
        hits, arriving = admission.hits, self._arriving
        revived = sum(page != NULL_PAGE and self.references(page) == 0 for page in hits.pages)
        brought = sum(page != NULL_PAGE and page not in arriving for page in hits.host_pages)
        return revived + brought

    def hold(self, admission: Admission) -> None:
        """Notes what an admitted sequence holds; the caller lowers `free`."""
        hits = admission.hits
        for page in hits.pages:
            if page != NULL_PAGE:
                self._references[page] = self.references(page) + 1
        num_full = admission.num_tokens // self._page_size
        self._arriving.update(page for page in hits.host_pages[:num_full] if page != NULL_PAGE)
