"""The page pool as text: every state of a page, who holds it, and several pages a character."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from pagedjax import SamplingParams, page_map
from pagedjax.paging import PageAllocator
from tests.tiny_engine import drain, tiny_engine


@pytest.fixture
def pool() -> PageAllocator:
    """Pages 1 and 2 with one holder, 3 and 4 with 2 and 12, 5 cached, 6 to 10 free."""
    made = PageAllocator(11)
    made.allocate(5)
    made.share(3)
    for _ in range(11):
        made.share(4)
    made.mark_cached(5)
    made.free([5])
    return made


def roster(*tables: tuple[int, list[int]]) -> Any:
    """Requests by number, with pages."""
    return SimpleNamespace(running=[
        SimpleNamespace(
            owner=SimpleNamespace(request=SimpleNamespace(arrival=arrival)),
            table=SimpleNamespace(pages=pages),
        )
        for arrival, pages in tables
    ])  # fmt: skip


def test_every_state_has_a_character(pool: PageAllocator) -> None:
    assert page_map.draw(pool, None) == [
        "pages: 2 held #  2 shared 2-9+  1 cached o  5 free .",
        "\x1b[0m".join(["##2+o\x1b[2m.....", ""]),
    ]


def test_rows_are_as_wide_as_asked(pool: PageAllocator) -> None:
    assert page_map.draw(pool, None, width=4, height=3, colour=False)[1:] == ["##2+", "o...", ".."]


def test_a_large_pool_takes_several_pages_a_character(pool: PageAllocator) -> None:
    # Of a page with 2 holders and one with 12, and of a cached and a free one, the busier is shown.
    assert page_map.draw(pool, None, width=5, height=1, colour=False) == ["pages", "#+o.."]
    big = PageAllocator(1 + 80 * 8 + 1)
    legend, *rows = page_map.draw(big, None, colour=False)
    assert legend == "pages: 0 held #  0 shared 2-9+  0 cached o  641 free ., 2 pages a character"
    assert [len(row) for row in rows] == [80, 80, 80, 80, 1]


def test_pages_of_one_request_have_one_colour_and_shared_pages_none(pool: PageAllocator) -> None:
    row = page_map.draw(pool, roster((0, [1, 3]), (1, [2, 3])))[1]
    first, second = (f"\x1b[{code}m" for code in page_map._COLOURS[:2])
    assert row.startswith(f"{first}#\x1b[0m{second}#\x1b[0m2+o\x1b[2m.")
    assert "\x1b" not in page_map.draw(pool, roster((0, [1])), colour=False)[1]


def test_map_of_an_engine_counts_what_the_allocator_counts() -> None:
    engine = tiny_engine()
    for i in range(4):
        params = SamplingParams(temperature=0, max_tokens=20, n=1 + i % 2, ignore_eos=True)
        engine.add_request(f"r{i}", [1, 2, 3, 4, 5, 6, 7, 8, 9 + i], params)
    for _ in range(6):
        engine.step()
    scheduler = engine.scheduler
    allocator = scheduler.allocator
    lines = page_map.draw(allocator, scheduler.roster, name="device")
    held, shared, cached, free = map(int, re.findall(r"\d+(?= [hscf])", lines[0]))
    assert held + shared == allocator.num_held > 0
    assert shared > 0, "four requests share two pages"
    assert cached == allocator.num_evictable
    assert free == allocator.num_free - cached
    assert lines[0].startswith("device: ")
    assert max(len(re.sub(r"\x1b\[\d+m", "", line)) for line in lines) <= 80
    drain(engine)
