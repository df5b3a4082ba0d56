"""The page pool as a few lines of text: which pages are free, held, shared, cached; and whose.

Owns characters, colours and how many pages a character stands for. Reads the host half's records
and changes nothing; knows nothing of terminals, clocks or devices.

    .  free        o  cached, nobody holds it        #  one holder        2..9, +  so many holders
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

FREE, EVICTABLE, HELD = ".", "o", "#"
MANY = "+"  # ten holders or more
_DIM, _RESET = "\x1b[2m", "\x1b[0m"
_COLOURS = (31, 32, 33, 34, 35, 36, 91, 92, 93, 94, 95, 96)  # of a terminal's sixteen


class Pool(Protocol):
    """What is read of an allocator of pages."""

    num_pages: int

    def references(self, page: int) -> int:
        """Holders of a page."""
        ...

    def is_cached(self, page: int) -> bool:
        """Whether the prefix cache knows it."""
        ...


class Roster(Protocol):
    """What is read of the scheduler's queues."""

    @property
    def running(self) -> Iterable[Any]:
        """Sequences with slots, each with a `table` of pages and an `owner`."""
        ...


@dataclass(frozen=True, slots=True)
class Cell:
    """What one character stands for."""

    char: str
    owner: int | None = None  # a number for the request that holds it alone


def draw(
    pool: Pool,
    roster: Roster | None,
    *,
    name: str = "pages",
    width: int = 80,
    height: int = 8,
    colour: bool = True,
) -> list[str]:
    """A legend and at most `height` rows of at most `width` characters.

    Args:
      roster: None: nothing is known of who holds what, so nothing is coloured.
      name: begins the legend.
      colour: with ANSI codes, one colour for each request; they take no room on a terminal.
    """
    owners = {} if roster is None else _owners(roster)
    cells = [_cell(pool, page, owners) for page in range(1, pool.num_pages)]
    counts = Counter(_kind(cell.char) for cell in cells)
    per_char = -(-len(cells) // (width * height))
    shown = [_together(cells[i : i + per_char]) for i in range(0, len(cells), per_char)]
    rows = [shown[i : i + width] for i in range(0, len(shown), width)]
    return [_legend(name, counts, per_char)[:width], *(_row(row, colour) for row in rows)]


def _owners(roster: Roster) -> dict[int, int]:
    """Page -> a number for a request that holds it."""
    found: dict[int, int] = {}
    for live in roster.running:
        number = live.owner.request.arrival
        found.update(dict.fromkeys(live.table.pages, number))
    return found


def _cell(pool: Pool, page: int, owners: dict[int, int]) -> Cell:
    references = pool.references(page)
    if references == 0:
        return Cell(EVICTABLE if pool.is_cached(page) else FREE)
    if references == 1:
        return Cell(HELD, owners.get(page))
    return Cell(str(references) if references < 10 else MANY)


def _kind(char: str) -> str:
    return MANY if char.isdigit() else char


def _together(cells: Sequence[Cell]) -> Cell:
    """One character for several pages: what most of them are, the busiest of equals."""
    if len(cells) == 1:
        return cells[0]
    order = (FREE, EVICTABLE, HELD, MANY)
    counts = Counter(_kind(cell.char) for cell in cells)
    kind = max(counts, key=lambda k: (counts[k], order.index(k)))
    owners = Counter(cell.owner for cell in cells if cell.char == HELD)
    return Cell(kind, owners.most_common(1)[0][0] if kind == HELD else None)


def _row(cells: Sequence[Cell], colour: bool) -> str:
    if not colour:
        return "".join(cell.char for cell in cells)
    text, state = "", ""
    for cell in cells:
        wanted = _code(cell)
        if wanted != state:
            text += (_RESET if state else "") + wanted
            state = wanted
        text += cell.char
    return text + (_RESET if state else "")


def _code(cell: Cell) -> str:
    if cell.char == FREE:
        return _DIM
    if cell.owner is None:
        return ""
    return f"\x1b[{_COLOURS[cell.owner % len(_COLOURS)]}m"


def _legend(name: str, counts: Counter[str], per_char: int) -> str:
    scale = f", {per_char} pages a character" if per_char > 1 else ""
    return (
        f"{name}: {counts[HELD]} held #  {counts[MANY]} shared 2-9+  "
        f"{counts[EVICTABLE]} cached o  {counts[FREE]} free .{scale}"
    )
