"""The formula for memory: what it promises is what page tables take, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax import CapacityError
from pagedjax.capacity import (
    CPU_POOL_BYTES,
    GIB,
    PageLayout,
    PoolSize,
    host_pages_in,
    pool_budget,
    size_pool,
)
from pagedjax.paging import PageAllocator
from pagedjax.paging.page_table import PageTable

SMALL = PageLayout(num_layers=2, num_kv_heads=2, head_dim=8, page_size=4, itemsize=4)


def sized(
    budget: int = GIB,
    model_len: int = 4096,
    asked_len: int | None = None,
    asked_pages: int | None = None,
    max_num_seqs: int = 8,
) -> PoolSize:
    return size_pool(
        SMALL,
        budget=budget,
        model_len=model_len,
        asked_len=asked_len,
        asked_pages=asked_pages,
        max_num_seqs=max_num_seqs,
    )


def test_a_pages_bytes_are_keys_and_values_of_all_layers() -> None:
    assert SMALL.page_bytes == 2 * (2 * 2 * 8 * 4) * 4
    llama = PageLayout(num_layers=32, num_kv_heads=8, head_dim=128, page_size=16, itemsize=2)
    assert llama.page_bytes == 2 * 2**20  # 128 KiB a token


def test_a_hundred_tokens_take_seven_pages_of_sixteen() -> None:
    layout = PageLayout(1, 1, 1, page_size=16, itemsize=1)
    assert layout.pages_for(100) == 7
    assert 7 * 16 - 100 == 12


@given(st.integers(0, 8).map(lambda k: 2**k), st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_the_predictor_is_the_allocator(page_size: int, grown: list[int]) -> None:
    layout = PageLayout(1, 1, 1, page_size, 1)
    allocator = PageAllocator(1 + layout.pages_for(sum(grown)))
    table = PageTable(allocator, page_size)
    for i, more in enumerate(grown):
        table.append(more)
        assert len(table.pages) == layout.pages_for(sum(grown[: i + 1]))
    assert allocator.num_free == 0  # exactly as many as predicted, and the null page


@given(st.integers(0, 10**6))
def test_pages_in_is_the_floor(num_bytes: int) -> None:
    pages = SMALL.pages_in(num_bytes)
    assert pages * SMALL.page_bytes <= num_bytes < (pages + 1) * SMALL.page_bytes


def test_a_negative_budget_holds_no_page() -> None:
    assert SMALL.pages_in(-1) == 0


@pytest.mark.parametrize(
    ("utilization", "free_gib", "expected"),
    [
        (None, 4, GIB),  # a quarter of the free RAM ...
        (None, 100, CPU_POOL_BYTES),  # ... but never more than the cap
        (0.5, 4, 2 * GIB),
        (1.0, 100, 100 * GIB),  # who asks gets it
    ],
)
def test_a_cpus_pool_is_a_share_of_free_ram(
    utilization: float | None, free_gib: int, expected: int
) -> None:
    got = pool_budget(
        on_cpu=True, free_bytes=free_gib * GIB, total_bytes=128 * GIB, utilization=utilization
    )
    assert got == expected


@pytest.mark.parametrize(
    ("utilization", "free_gib", "expected_gib"), [(None, 70, 62), (0.5, 70, 30), (0.5, 30, 0)]
)
def test_an_accelerators_share_is_of_its_whole_memory(
    utilization: float | None, free_gib: int, expected_gib: int
) -> None:
    got = pool_budget(
        on_cpu=False, free_bytes=free_gib * GIB, total_bytes=80 * GIB, utilization=utilization
    )
    assert got == pytest.approx(expected_gib * GIB, abs=2)


def test_no_more_pages_than_the_sequences_can_fill() -> None:
    pool = sized(model_len=1000)
    assert pool == PoolSize(1 + 8 * 250, 1000)
    assert pool.concurrency(SMALL) == 8.0


def test_a_length_that_nobody_asked_for_is_cut_to_the_pool() -> None:
    pool = sized(budget=501 * SMALL.page_bytes, model_len=4096)
    assert pool == PoolSize(501, 2000)
    assert pool.concurrency(SMALL) == 1.0


def test_a_number_of_pages_is_taken_as_asked() -> None:
    assert sized(budget=0, asked_pages=5000, asked_len=100) == PoolSize(5000, 100)
    assert sized(budget=0, asked_pages=300) == PoolSize(300, 1196)


def test_too_few_pages_say_how_many_are_needed() -> None:
    with pytest.raises(CapacityError) as caught:
        sized(asked_pages=26, asked_len=101)
    assert str(caught.value) == (
        "`num_pages` must be at least 27 for one request of `max_model_len` 101 at `page_size` 4 "
        "(one page is the null page). Got 26, which holds 100 tokens: set `num_pages` to 27 or "
        "more, or `max_model_len` to at most 100."
    )
    assert sized(asked_pages=27, asked_len=101).max_model_len == 101
    assert sized(asked_pages=26, asked_len=100).max_model_len == 100


def test_too_little_memory_says_what_is_needed_and_what_would_fit() -> None:
    layout = PageLayout(num_layers=32, num_kv_heads=8, head_dim=128, page_size=16, itemsize=2)

    def pool(asked_len: int) -> PoolSize:
        return size_pool(
            layout,
            budget=GIB,
            model_len=131072,
            asked_len=asked_len,
            asked_pages=None,
            max_num_seqs=1,
        )

    with pytest.raises(CapacityError) as caught:
        pool(16384)
    assert str(caught.value) == (
        "one request of `max_model_len` 16384 needs 2.002 GiB of pages; 1.000 GiB are available, "
        "which hold 8176 tokens. Set `max_model_len` to at most 8176, raise `memory_utilization`, "
        "choose a smaller `dtype`, or free memory on the device."
    )
    assert pool(8176) == PoolSize(512, 8176)  # what the message promises holds


def test_a_default_length_is_not_cut_below_a_useful_one() -> None:
    with pytest.raises(CapacityError, match="`max_model_len` 1024 needs"):
        sized(budget=200 * SMALL.page_bytes, model_len=4096)
    with pytest.raises(CapacityError, match="`max_model_len` 900 needs"):
        sized(budget=200 * SMALL.page_bytes, model_len=900)
    with pytest.raises(CapacityError, match="hold 0 tokens"):
        sized(budget=0)


def test_pages_that_memory_does_not_hold_are_refused_with_the_numbers() -> None:
    layout = PageLayout(num_layers=2, num_kv_heads=2, head_dim=8, page_size=4, itemsize=4)
    free = 10 * layout.page_bytes
    asked = {"budget": 0, "model_len": 16, "asked_len": 16, "max_num_seqs": 1}
    size = size_pool(layout, **asked, asked_pages=10, free_bytes=free)
    assert size.num_pages == 10
    with pytest.raises(
        CapacityError, match=r"`num_pages` 11 needs .* Set `num_pages` to at most 10"
    ):
        size_pool(layout, **asked, asked_pages=11, free_bytes=free)


def test_swap_space_becomes_whole_pages_or_is_refused_with_the_numbers() -> None:
    layout = PageLayout(num_layers=32, num_kv_heads=8, head_dim=128, page_size=16, itemsize=2)
    assert layout.page_bytes == 2**21
    assert host_pages_in(layout, 1.5, free_bytes=2 * GIB) == 768
    assert host_pages_in(layout, 1 / 1024, free_bytes=GIB) == 0  # half a page
    assert host_pages_in(layout, 2, free_bytes=2 * GIB) == 1024
    with pytest.raises(CapacityError) as caught:
        host_pages_in(layout, 2.5, free_bytes=2 * GIB)
    assert str(caught.value) == (
        "`swap_space` must fit into the host's free memory, 2.000 GiB. Got 2.5 GiB: lower it, or "
        "free memory on the host."
    )
