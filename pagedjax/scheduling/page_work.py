"""What one step does with pages: its copies and moves, and what is to be settled afterwards.

Knows nothing of who decided it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedjax.paging import PrefixNode
from pagedjax.plan import PageCopy, PageMove
from pagedjax.scheduling.live import LiveSequence


@dataclass(slots=True, eq=False)
class PageWork:
    """What a step does with pages, for its plan and for `settle`.

    Attributes:
      copies, swaps_out, swaps_in: of the plan.
      host_tables: of swapped victims: their host pages by logical page, a reference each.
      restored: of admitted sequences that come from the host, the logical pages that are full:
        known to the prefix cache once the step has run.
      spilled: host pages for evicted prefix pages, least recently used first; one reference each.
      guarded: host pages of hits; a reference each, for this step.
      attached: which content the filled host pages have, where others may find it.
    """

    copies: list[PageCopy] = field(default_factory=list[PageCopy])
    swaps_out: list[PageMove] = field(default_factory=list[PageMove])
    swaps_in: list[PageMove] = field(default_factory=list[PageMove])
    host_tables: dict[LiveSequence, tuple[int, ...]] = field(
        default_factory=dict["LiveSequence", tuple[int, ...]]
    )
    restored: dict[LiveSequence, tuple[int, ...]] = field(
        default_factory=dict["LiveSequence", tuple[int, ...]]
    )
    spilled: list[int] = field(default_factory=list[int])
    guarded: list[int] = field(default_factory=list[int])
    attached: list[tuple[PrefixNode, int]] = field(default_factory=list[tuple[PrefixNode, int]])
