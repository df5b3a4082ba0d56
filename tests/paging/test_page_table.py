"""Growth, sharing, copy-on-write and the addresses of positions."""

import numpy as np
import pytest

from pagedjax.errors import AllocationError, IntegrityError
from pagedjax.paging import PageAllocator, PageTable, resolve_copies
from pagedjax.plan import PageCopy


def filled_table(
    num_pages: int, page_size: int, num_tokens: int
) -> tuple[PageAllocator, PageTable]:
    allocator = PageAllocator(num_pages)
    table = PageTable(allocator, page_size)
    table.append(num_tokens)
    return allocator, table


def test_walk_through_six_tokens_over_free_pages_11_to_16() -> None:
    """The README's example: a prompt of six tokens, page size 4, free pages 11 to 16."""
    allocator = PageAllocator(17)
    others = allocator.allocate(10)
    table = PageTable(allocator, 4)

    assert table.append(6) == [11, 12]  # the prompt
    assert table.waste == 2
    assert table.append(1) == []  # tokens 7 and 8 fit
    assert table.append(1) == []
    assert table.append(1) == [13]  # the ninth does not
    assert table.pages == [11, 12, 13]
    assert table.slot_mapping(6, 3).tolist() == [12 * 4 + 2, 12 * 4 + 3, 13 * 4]

    table.release()
    assert table.pages == []
    assert allocator.eviction_order() == [11, 12, 13, 14, 15, 16]
    allocator.check_integrity([others])


def test_100_tokens_at_page_size_16_take_7_pages_and_waste_12_positions() -> None:
    _, table = filled_table(20, 16, 100)
    assert len(table.pages) == 7
    assert table.waste == 12


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
def test_waste_is_less_than_a_page_at_every_length(page_size: int) -> None:
    allocator = PageAllocator(200)
    table = PageTable(allocator, page_size)
    for length in range(1, 130):
        needed = table.num_pages_needed(1)
        assert len(table.append(1)) == needed
        assert len(table.pages) == -(-length // page_size)
        assert 0 <= table.waste < page_size
    assert table.num_pages_needed(0) == 0


def test_append_is_all_or_nothing() -> None:
    allocator, table = filled_table(4, 2, 3)
    with pytest.raises(AllocationError):
        table.append(4)
    assert (table.pages, table.num_tokens, allocator.num_free) == ([1, 2], 3, 1)
    assert table.append(0) == []
    assert table.append(3) == [3]


def test_pages_is_a_list_of_the_callers_own() -> None:
    _, table = filled_table(4, 2, 3)
    table.pages.append(9)
    assert table.pages == [1, 2]


def test_fork_shares_all_pages_a_partial_last_one_too() -> None:
    allocator, parent = filled_table(10, 4, 6)
    child = parent.fork()
    assert child.pages == parent.pages == [1, 2]
    assert child.num_tokens == 6
    assert [allocator.references(page) for page in (1, 2)] == [2, 2]
    assert allocator.num_held == 2
    parent.release()
    assert child.pages == [1, 2]
    child.release()
    assert allocator.num_held == 0


def test_fork_of_a_fork_frees_each_page_once() -> None:
    """Seen elsewhere: a double free when a forked table named a page repeatedly."""
    allocator, parent = filled_table(10, 4, 6)
    family = [parent, parent.fork()]
    family.append(family[1].fork())
    for table in family:
        table.release()
        table.release()
    assert sorted(allocator.eviction_order()) == list(range(1, 10))
    allocator.check_integrity([])


def test_write_after_fork_copies_the_shared_page_once() -> None:
    allocator, parent = filled_table(10, 4, 6)
    child = parent.fork()
    assert child.pages_to_append(1) == 1  # no new page for the token, one for the copy
    assert child.extend(1) == PageCopy(src=2, dst=3)
    assert child.pages == [1, 3]
    assert parent.pages_to_append(1) == 0  # it holds page 2 alone now
    assert parent.extend(1) is None
    assert parent.pages == [1, 2]
    allocator.check_integrity([parent.pages, child.pages])


def test_write_after_fork_at_a_page_boundary_copies_nothing() -> None:
    _, parent = filled_table(10, 4, 8)
    child = parent.fork()
    assert child.pages_to_append(1) == child.num_pages_needed(1) == 1
    assert child.extend(1) is None
    assert child.pages == [1, 2, 3]


@pytest.mark.parametrize("free_pages", [0, 1, 2])
def test_extend_is_all_or_nothing_over_copy_and_growth(free_pages: int) -> None:
    allocator, parent = filled_table(3 + free_pages, 4, 6)
    child = parent.fork()
    assert child.pages_to_append(3) == 2
    if free_pages < 2:
        with pytest.raises(AllocationError, match=f"at most the {free_pages} .* Got 2"):
            child.extend(3)
        assert (child.pages, child.num_tokens) == ([1, 2], 6)
    else:
        assert child.extend(3) == PageCopy(2, 3)
        assert child.pages == [1, 3, 4]
    allocator.check_integrity([parent.pages, child.pages])


def test_make_writable_works_on_any_logical_page_and_before_or_after_append() -> None:
    allocator, parent = filled_table(10, 2, 5)
    child = parent.fork()
    assert child.make_writable(0) == PageCopy(1, 4)
    assert child.make_writable(0) is None
    assert child.append(2) == [5]
    assert child.make_writable(2) == PageCopy(3, 6)
    assert child.pages == [4, 2, 6, 5]
    allocator.check_integrity([parent.pages, child.pages])
    for wrong in (-1, 4):
        with pytest.raises(IntegrityError, match=rf"`logical_page` .* \[0, 4\)\. Got {wrong}"):
            child.make_writable(wrong)


def test_make_writable_without_a_free_page_changes_nothing() -> None:
    allocator, parent = filled_table(3, 4, 6)
    child = parent.fork()
    with pytest.raises(AllocationError):
        child.make_writable(1)
    assert child.pages == [1, 2]
    allocator.check_integrity([parent.pages, child.pages])


def test_slots_of_a_shared_page_are_never_handed_out() -> None:
    """Rule 2 of the design: a write to a page with more references is preceded by its copy."""
    _, parent = filled_table(10, 4, 6)
    child = parent.fork()
    child.append(1)
    for table in (parent, child):
        with pytest.raises(IntegrityError, match=r"page 2 with 2 references.* `make_writable`"):
            table.slot_mapping(5, 1)
    assert child.make_writable(1) == PageCopy(2, 3)
    assert child.slot_mapping(6, 1).tolist() == [3 * 4 + 2]
    assert parent.slot_mapping(5, 1).tolist() == [2 * 4 + 1]


def test_slots_of_a_cached_page_are_never_handed_out() -> None:
    allocator, table = filled_table(10, 4, 6)
    allocator.mark_cached(1)
    assert table.slot_mapping(4, 2).tolist() == [8, 9]
    with pytest.raises(IntegrityError, match=r"page 1 with 1 references, cached: True"):
        table.slot_mapping(3, 2)


def test_a_cached_page_written_after_truncation_leaves_the_cache_without_a_copy() -> None:
    allocator, table = filled_table(3, 4, 8)
    allocator.mark_cached(2)
    table.truncate(6)
    assert allocator.num_free == 0
    assert table.pages_to_append(1) == 0  # a copy would need a page, and there is none
    assert table.extend(1) is None
    assert not allocator.is_cached(2)
    assert table.slot_mapping(6, 1).tolist() == [2 * 4 + 2]


def test_a_cached_page_that_others_hold_is_copied_and_stays_cached() -> None:
    allocator, table = filled_table(5, 4, 8)
    allocator.mark_cached(2)
    other = table.fork()
    table.truncate(6)
    assert table.extend(1) == PageCopy(2, 3)
    assert allocator.is_cached(2)
    allocator.check_integrity([table.pages, other.pages])


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_slot_mapping_is_page_times_page_size_plus_offset(page_size: int) -> None:
    allocator = PageAllocator(64)
    holes = allocator.allocate(20)
    allocator.free(holes[::3])
    table = PageTable(allocator, page_size)
    table.append(min(40, 30 * page_size))
    pages = table.pages
    expected = [
        pages[position // page_size] * page_size + position % page_size
        for position in range(table.num_tokens)
    ]
    for start in range(table.num_tokens + 1):
        for n in range(table.num_tokens - start + 1):
            slots = table.slot_mapping(start, n)
            assert slots.dtype == np.int32
            assert slots.tolist() == expected[start : start + n]


@pytest.mark.parametrize(("start", "n"), [(-1, 1), (0, 7), (6, 1), (2, -1)])
def test_slots_outside_the_sequence_are_refused(start: int, n: int) -> None:
    """Seen elsewhere: -1 as an index wraps; a length bounds every access."""
    _, table = filled_table(5, 4, 6)
    with pytest.raises(IntegrityError, match=rf"in \[0, 6\)\. Got {n} positions from {start}"):
        table.slot_mapping(start, n)


def test_write_row_leaves_the_tail_of_the_row_alone() -> None:
    _, table = filled_table(9, 4, 10)
    row = np.full((6,), 77, np.int32)
    table.write_row(row)
    assert row.tolist() == [1, 2, 3, 77, 77, 77]
    table.append(4)  # the row is a copy, so the table can still grow
    assert row.tolist() == [1, 2, 3, 77, 77, 77]


def test_truncate_frees_exactly_the_pages_that_hold_nothing() -> None:
    allocator, table = filled_table(9, 4, 16)
    table.truncate(9)
    assert (table.pages, table.num_tokens, table.waste) == ([1, 2, 3], 9, 3)
    table.truncate(8)
    assert table.pages == [1, 2]
    table.truncate(0)
    assert (table.pages, allocator.num_free) == ([], 8)
    for wrong in (-1, 1):
        with pytest.raises(IntegrityError, match=rf"in \[0, 0\]\. Got {wrong}"):
            table.truncate(wrong)


def test_release_frees_the_last_page_first() -> None:
    allocator, table = filled_table(4, 4, 12)
    for page in (1, 2, 3):
        allocator.mark_cached(page)
    table.release()
    assert allocator.eviction_order() == [3, 2, 1]


def test_adopt_shares_and_append_goes_on_from_there() -> None:
    allocator, parent = filled_table(9, 4, 8)
    child = PageTable(allocator, 4)
    child.adopt(parent.pages[:1], 4)
    assert child.append(2) == [3]
    assert child.pages == [1, 3]
    assert child.slot_mapping(4, 2).tolist() == [12, 13]
    allocator.check_integrity([parent.pages, child.pages])


def test_adopt_refuses_what_cannot_be_and_changes_nothing() -> None:
    allocator, parent = filled_table(9, 4, 8)
    table = PageTable(allocator, 4)
    cases = {
        r"exactly those of 9 positions .* Got 2": ([1, 2], 9),
        r"exactly those of 4 positions": ([1, 2], 4),
        r"not repeat a page": ([1, 1], 8),
        r"Got \[5\], which are free": ([1, 5], 8),
        r"the null page": ([1, 0], 8),
    }
    for message, (pages, num_tokens) in cases.items():
        with pytest.raises(IntegrityError, match=message):
            table.adopt(pages, num_tokens)
    with pytest.raises(IntegrityError, match=r"needs an empty table. Got one of 2"):
        parent.adopt([1], 4)
    assert table.pages == []
    allocator.check_integrity([parent.pages])


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(IntegrityError, match=r"`page_size` must be at least 1. Got 0"):
        PageTable(PageAllocator(3), 0)
    _, table = filled_table(3, 4, 1)
    for call in (table.append, table.extend, table.num_pages_needed, table.pages_to_append):
        with pytest.raises(IntegrityError, match=r"`n_more` must not be negative. Got -1"):
            call(-1)


def test_resolve_copies_follows_chains_and_keeps_the_last_use_of_a_page() -> None:
    """Seen elsewhere: copies in one step must not depend on an order the device does not have."""
    assert resolve_copies([PageCopy(1, 2), PageCopy(2, 3)]) == [PageCopy(1, 2), PageCopy(1, 3)]
    assert resolve_copies([PageCopy(1, 5), PageCopy(2, 5)]) == [PageCopy(2, 5)]
    assert resolve_copies([PageCopy(1, 2), PageCopy(3, 1)]) == [PageCopy(1, 2), PageCopy(3, 1)]
    assert resolve_copies([PageCopy(1, 2), PageCopy(2, 1)]) == [PageCopy(1, 2)]
    assert resolve_copies([]) == []


def test_resolved_copies_in_one_batch_equal_the_copies_one_by_one(
    rng: np.random.Generator,
) -> None:
    for _ in range(300):
        pairs = rng.integers(1, 8, size=(rng.integers(0, 9), 2)).tolist()
        copies = [PageCopy(src, dst) for src, dst in pairs if src != dst]
        one_by_one = np.arange(8)
        for copy in copies:
            one_by_one[copy.dst] = one_by_one[copy.src]
        batch = resolve_copies(copies)
        at_once = np.arange(8)
        at_once[[copy.dst for copy in batch]] = at_once[[copy.src for copy in batch]]
        assert at_once.tolist() == one_by_one.tolist()
        assert len({copy.dst for copy in batch}) == len(batch)
