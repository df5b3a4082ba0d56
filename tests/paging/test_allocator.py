"""Page ids, references, the order of reuse, and what misuse says."""

from collections.abc import Callable

import pytest

from pagedjax.errors import AllocationError, IntegrityError
from pagedjax.paging import NULL_PAGE, PageAllocator


def snapshot(allocator: PageAllocator) -> tuple[object, ...]:
    pages = range(1, allocator.num_pages)
    return (
        allocator.eviction_order(),
        [allocator.references(page) for page in pages],
        [allocator.is_cached(page) for page in pages],
        allocator.num_free,
        allocator.num_evictable,
        allocator.num_held,
    )


def allocator_with(num_pages: int, *, held: int, cached: tuple[int, ...] = ()) -> PageAllocator:
    """Pages 1..held are held once; those of `cached` are known to a prefix cache."""
    allocator = PageAllocator(num_pages)
    allocator.allocate(held)
    for page in cached:
        allocator.mark_cached(page)
    return allocator


def test_the_null_page_is_never_handed_out_nor_counted() -> None:
    allocator = PageAllocator(5)
    assert allocator.usable == allocator.num_free == 4  # N - 1: a check against N hung elsewhere
    assert allocator.allocate(4) == [1, 2, 3, 4]
    assert allocator.usage == 1.0
    with pytest.raises(AllocationError, match=r"at most the 0 pages that are free \(of 4; 4 are"):
        allocator.allocate()
    assert NULL_PAGE not in allocator.eviction_order()


def test_usage_counts_distinct_held_pages() -> None:
    allocator = allocator_with(9, held=2)
    allocator.share(1)
    assert (allocator.num_held, allocator.num_free, allocator.usage) == (2, 6, 0.25)
    assert allocator.references(1) == 2
    assert allocator.references(3) == 0


def test_too_few_pages_says_the_numbers_and_changes_nothing() -> None:
    allocator = allocator_with(6, held=3, cached=(1,))
    allocator.free([1])
    before = snapshot(allocator)
    with pytest.raises(AllocationError, match=r"`n` must be at most the 3 .* Got 4\. Free 1 more"):
        allocator.allocate(4)
    assert snapshot(allocator) == before
    assert allocator.allocate(0) == []


def test_uncached_pages_are_reused_before_cached_ones_and_last_freed_first() -> None:
    allocator = allocator_with(7, held=6, cached=(1, 3))
    allocator.free([1])
    allocator.free([2])
    allocator.free([3])
    allocator.free([4])
    assert allocator.eviction_order() == [4, 2, 1, 3]
    assert allocator.num_evictable == 2
    assert allocator.allocate(3) == [4, 2, 1]


def test_eviction_order_worked_example() -> None:
    """Ten usable pages. A holds 1 2 3 (all full, cached) and 4 (partial); B shares 1 2 and holds
    5 6 (full, cached) and 7 (partial); 8 9 10 were never used.

    A ends: its pages come back in reverse. 4 is worthless, so it goes to the head; 3 is evictable
    and goes to the tail; 2 and 1 are still B's. B ends the same way: 7 to the head, then 6 5 2 1
    to the tail. The longest, least sharable prefixes go first, and page 1, which most prompts
    could share, goes last.
    """
    allocator = PageAllocator(11)
    a = allocator.allocate(4)
    b = [1, 2, *allocator.allocate(3)]
    for page in (1, 2):
        allocator.share(page)
    for page in (1, 2, 3, 5, 6):
        allocator.mark_cached(page)
    allocator.free(a[::-1])
    assert allocator.eviction_order() == [4, 8, 9, 10, 3]
    allocator.free(b[::-1])
    assert allocator.eviction_order() == [7, 4, 8, 9, 10, 3, 6, 5, 2, 1]

    allocator.share(6)  # a hit takes a page out of the middle ...
    assert allocator.eviction_order() == [7, 4, 8, 9, 10, 3, 5, 2, 1]
    allocator.free([6])  # ... and it comes back as the most recently used
    assert allocator.eviction_order() == [7, 4, 8, 9, 10, 3, 5, 2, 1, 6]
    assert allocator.allocate(7) == [7, 4, 8, 9, 10, 3, 5]
    allocator.check_integrity()


def test_a_cached_page_is_given_up_when_it_is_reused_not_when_it_is_freed() -> None:
    allocator = allocator_with(4, held=3, cached=(1, 2))
    evicted: list[int] = []
    allocator.on_evict = evicted.append
    allocator.free([3, 2, 1])
    assert evicted == []
    assert allocator.allocate(2) == [3, 2]
    assert evicted == [2]
    assert not allocator.is_cached(2)
    assert allocator.is_cached(1)


def test_a_hit_brings_an_evictable_page_back() -> None:
    allocator = allocator_with(4, held=3, cached=(2,))
    allocator.free([2])
    assert (allocator.num_free, allocator.num_evictable) == (1, 1)
    assert allocator.count_evictable([1, 2, 2]) == 1
    allocator.share(2)
    assert (allocator.num_free, allocator.num_evictable, allocator.references(2)) == (0, 0, 1)
    allocator.check_integrity([[1, 2, 3]])


def test_unmark_makes_an_evictable_page_free_and_leaves_a_held_one_held() -> None:
    allocator = allocator_with(5, held=4, cached=(1, 2))
    evicted: list[int] = []
    allocator.on_evict = evicted.append
    allocator.free([4, 1])
    assert allocator.eviction_order() == [4, 1]
    allocator.unmark(1)
    allocator.unmark(2)
    assert evicted == [1, 2]
    assert allocator.eviction_order() == [1, 4]
    assert (allocator.num_evictable, allocator.references(2)) == (0, 1)
    allocator.check_integrity([[2, 3]])


def test_a_page_named_twice_loses_two_references_and_is_listed_once() -> None:
    """Seen elsewhere: a free that counted repeated pages once too often."""
    allocator = allocator_with(4, held=1)
    allocator.share(1)
    allocator.free([1, 1])
    assert allocator.eviction_order() == [1, 2, 3]
    allocator.check_integrity([])


MISUSE: dict[str, tuple[Callable[[PageAllocator], object], str]] = {
    "double free": (lambda a: a.free([2, 3]), r"page 3 at place 1 of 2, .* freed twice"),
    "free twice in one call": (lambda a: a.free([2, 1, 2]), r"page 2 at place 2 of 3"),
    "free the null page": (lambda a: a.free([1, 0]), r"in \[1, 6\)\. Got the null page"),
    "free -1": (lambda a: a.free([2, -1]), r"in \[1, 6\)\. Got page -1"),
    "free past the end": (lambda a: a.free([6]), r"`free` must be in \[1, 6\)\. Got page 6"),
    "share a free page": (lambda a: a.share(4), r"Got page 4, which is free"),
    "share the null page": (lambda a: a.share(0), r"`share` .* the null page"),
    "share past the end": (lambda a: a.share(6), r"Got page 6"),
    "allocate -1": (lambda a: a.allocate(-1), r"`n` must not be negative\. Got -1"),
    "references of -1": (lambda a: a.references(-1), r"Got page -1"),
    "cache a free page": (lambda a: a.mark_cached(4), r"page 4 with 0 references"),
    "cache an evictable page": (lambda a: a.mark_cached(3), r"page 3 with 0 ref.* cached: True"),
    "cache twice": (lambda a: a.mark_cached(1), r"page 1 with 1 references, cached: True"),
    "unmark an uncached page": (lambda a: a.unmark(2), r"Got page 2, which is not"),
}


@pytest.mark.parametrize("kind", MISUSE)
def test_misuse_is_named_and_changes_nothing(kind: str) -> None:
    allocator = allocator_with(6, held=3, cached=(1, 3))
    allocator.free([3])  # 1 held and cached, 2 held, 3 evictable, 4 5 free
    before = snapshot(allocator)
    misuse, message = MISUSE[kind]
    with pytest.raises(IntegrityError, match=message):
        misuse(allocator)
    assert snapshot(allocator) == before
    allocator.check_integrity([[1, 2]])


def test_a_pool_without_the_null_page_is_refused() -> None:
    with pytest.raises(IntegrityError, match="`num_pages` must be at least 1"):
        PageAllocator(0)


def test_a_pool_of_the_null_page_alone_has_nothing_to_give() -> None:
    allocator = PageAllocator(1)
    assert (allocator.usable, allocator.num_free, allocator.usage) == (0, 0, 0.0)
    with pytest.raises(AllocationError, match="at most the 0 pages that are free"):
        allocator.allocate()
    assert allocator.allocate(0) == []
    allocator.check_integrity([])


def test_references_are_counted_together() -> None:
    allocator = PageAllocator(6)
    first, second = allocator.allocate(2)
    allocator.share(second)
    assert (allocator.num_references, allocator.num_held) == (3, 2)
    allocator.free([second, first])
    assert (allocator.num_references, allocator.num_held) == (1, 1)
    with pytest.raises(IntegrityError):
        allocator.free([second, second])
    assert allocator.num_references == 1
    allocator.num_references = 2
    with pytest.raises(IntegrityError, match=r"num_references must be the sum of all, 1\. Got 2"):
        allocator.check_integrity()


def _break_free_count(allocator: PageAllocator) -> None:
    allocator.num_free -= 1


def _break_evictable_count(allocator: PageAllocator) -> None:
    allocator.num_evictable += 1


def _hold_a_listed_page(allocator: PageAllocator) -> None:
    allocator._references[4] = 1


def _lose_a_reference(allocator: PageAllocator) -> None:
    allocator._references[1] = 0


def _share_the_null_page(allocator: PageAllocator) -> None:
    allocator._references[NULL_PAGE] = 1
    allocator._references[1] = 0


def _cut_the_list(allocator: PageAllocator) -> None:
    allocator._list._next[4] = NULL_PAGE


def _list_a_page_twice(allocator: PageAllocator) -> None:
    allocator._list._next[5] = 4


def _cache_the_null_page(allocator: PageAllocator) -> None:
    allocator._cached[NULL_PAGE] = True


@pytest.mark.parametrize(
    "damage",
    [
        _break_free_count,
        _break_evictable_count,
        _hold_a_listed_page,
        _lose_a_reference,
        _share_the_null_page,
        _cut_the_list,
        _list_a_page_twice,
        _cache_the_null_page,
    ],
)
def test_check_integrity_finds(damage: Callable[[PageAllocator], None]) -> None:
    allocator = allocator_with(8, held=3, cached=(2,))
    allocator.check_integrity([[1, 2, 3]])
    damage(allocator)
    with pytest.raises(IntegrityError):
        allocator.check_integrity()


def test_check_integrity_compares_references_with_the_entries_that_name_a_page() -> None:
    allocator = allocator_with(5, held=2)
    allocator.share(2)
    allocator.check_integrity([[1, 2], [2]])
    with pytest.raises(IntegrityError, match=r"\{2: \(1, 2\)\}"):
        allocator.check_integrity([[1, 2]])
    with pytest.raises(IntegrityError, match=r"\{3: \(1, 0\)\}"):
        allocator.check_integrity([[1, 2], [2, 3]])
