"""Who gives way when pages run out, and what becomes of its pages: to the host, or computed again.

Owns the choice of victim and mode, and the arithmetic of host pages while a step is drafted.
Changes nothing: what it decides is done by `page_mover.py`. Knows nothing of budgets.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from pagedjax.config import SchedulerConfig
from pagedjax.paging import NULL_PAGE, HostTier, PrefixCache, PrefixNode
from pagedjax.scheduling.cost_model import CostModel
from pagedjax.scheduling.live import LiveSequence

type Mode = Literal["swap", "recompute"]
type Content = PrefixNode | int  # a full page by what it holds; any other by its device page


@dataclass(frozen=True, slots=True, eq=False)
class Victim:
    """A sequence that gives all its device pages up, and why."""

    live: LiveSequence
    mode: Mode
    needed_by: LiveSequence | None  # whom it gives way to; None: an idle beam, to its siblings
    num_pages_needed: int  # by that one ...
    num_pages_free: int  # ... when so many were free
    # Swap: what to keep, by logical page, and where it is already; NULL_PAGE: not on the host yet.
    # Empty for one that has its host pages still.
    contents: tuple[Content, ...] = ()
    host_pages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Price:
    """What preempting one sequence means."""

    seconds_swap: float
    seconds_recompute: float
    num_freed: int  # device pages that nobody else holds

    def seconds_per_page(self, mode: Mode) -> float:
        seconds = self.seconds_swap if mode == "swap" else self.seconds_recompute
        return seconds / self.num_freed if self.num_freed else float("inf")


class VictimChooser:
    """Chooses victims for one draft, and counts the host pages that they take."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: PrefixCache,
        host: HostTier,
        costs: CostModel,
        count: Callable[[int], int],
    ):
        """`count` tells the references of a device page as the draft has them by now."""
        self._config = config
        self._cache = cache
        self._host = host
        self._costs = costs
        self._count = count
        self._swaps = host.allocator.usable > 0 and config.preemption_mode != "recompute"
        self._host_free = host.allocator.num_free
        self._on_host: set[Content] = set()  # what this draft's victims move or hold there

    def choose(self, kept: Seq[LiveSequence], at: int) -> int:
        """Index in `kept`, by age, of who gives way to the one before index `at`, which is that
        one itself when nothing comes after it.

        A sequence of the same request gives way when nobody else is left: its siblings would wait
        for it, or end later, for a page that a newcomer could have done without.
        """
        last = len(kept) - 1
        if self._config.victim_policy == "latest" or at >= last:
            return last
        after = range(last, at - 1, -1)
        strangers = [i for i in after if kept[i].owner is not kept[at - 1].owner]
        return min(strangers or after, key=lambda i: self._least_seconds_per_page(kept[i]))

    def decide(
        self,
        live: LiveSequence,
        needed_by: LiveSequence,
        num_pages_needed: int,
        num_pages_free: int,
    ) -> Victim:
        """What becomes of a victim's pages; counts the host pages that it takes."""
        contents, host_pages = self._contents(live)
        taken = self._host_pages_taken(contents, host_pages)
        mode: Mode = "recompute"
        if contents and taken <= self._host_free:
            mode = self._mode(self._price(live))
        if mode == "recompute":
            return Victim(live, mode, needed_by, num_pages_needed, num_pages_free)
        self._host_free -= taken
        self._on_host.update(contents)
        return Victim(live, mode, needed_by, num_pages_needed, num_pages_free, contents, host_pages)

    def _least_seconds_per_page(self, live: LiveSequence) -> float:
        price, contents = self._price(live), self._contents(live)
        can_swap = contents[0] and self._host_pages_taken(*contents) <= self._host_free
        return price.seconds_per_page(self._mode(price) if can_swap else "recompute")

    def _mode(self, price: _Price) -> Mode:
        """What `preemption_mode` says of a sequence that can be swapped."""
        if self._config.preemption_mode != "auto":
            return self._config.preemption_mode
        return "swap" if price.seconds_swap <= price.seconds_recompute else "recompute"

    def _contents(self, live: LiveSequence) -> tuple[tuple[Content, ...], tuple[int, ...]]:
        """What its computed positions are, by logical page, and where the host has that already.

        Empty when nothing is computed or nothing is ever swapped.
        """
        computed, size = live.sequence.num_computed_tokens, self._config.page_size
        if not self._swaps or computed == 0:
            return (), ()
        live.chain.extend(live.sequence.tokens, computed)
        contents: list[Content] = list(live.chain.nodes[: computed // size])
        for at in range(len(contents), -(-computed // size)):
            contents.append(live.table.page_at(at))
        found = [
            self._host.page_of(content) if isinstance(content, PrefixNode) else None
            for content in contents
        ]
        return tuple(contents), tuple(page or NULL_PAGE for page in found)

    def _host_pages_taken(self, contents: Seq[Content], host_pages: Seq[int]) -> int:
        """By how much keeping them lowers the host's free pages."""
        references = self._host.allocator.references
        return sum(
            page == NULL_PAGE or references(page) == 0
            for content, page in zip(contents, host_pages, strict=True)
            if content not in self._on_host
        )

    def _price(self, live: LiveSequence) -> _Price:
        """Pages that others hold cost nothing either way when the prefix cache knows them: they
        will be there when the sequence comes back."""
        computed, size = live.sequence.num_computed_tokens, self._config.page_size
        num_out = num_in = num_freed = 0
        num_hits, is_hit = 0, live.owner.may_read_cache(live.sequence)
        for at, page in enumerate(live.table.pages):
            is_alone = self._count(page) == 1
            num_freed += is_alone
            if at * size >= computed:
                continue
            node = self._cache.node_of(page)
            stays = node is not None and not is_alone
            is_hit = is_hit and stays
            num_hits += is_hit
            if not stays:
                num_in += 1
                num_out += node is None or self._host.page_of(node) is None
        swap = self._costs.swap_seconds(num_out, num_in)
        recompute = self._costs.recompute_seconds(computed - num_hits * size)
        return _Price(swap, recompute, num_freed)
