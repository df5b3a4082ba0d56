"""Pages that running sequences are about to fill, by content: what a queued prompt may wait for.

Owns the rule when a wait is worth it. Made anew for each draft from who runs in it, so that who
ends, fails or gives way is waited for no longer. Knows nothing of budgets or of the order of the
queue.

A page is hit once its keys and values are on the device, so requests with one prefix that arrive
together would all compute it. Instead the oldest of them does, the others wait until its pages are
registered, and start from there.

**The rule.** A sequence waits for a `maker` when the maker is older, computes in this step or in
one whose result is awaited, and will fill, right behind what the sequence would hit now, pages
with `WORTH_WAITING` tokens of its prompt at least. Older, so that the oldest of all never waits
and what was preempted never waits for who came later; computing, so that each step of a wait brings
its end nearer.

**The cost.** Chains that agree meet in the same node (see `prefix_cache.py`), and a node implies
all before it. One look, at the page where the wait would begin to be worth it, thus says whether
a prompt goes on like another: by depth, a map from node to maker.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from pagedjax.paging import PrefixNode
from pagedjax.scheduling.live import LiveSequence

# Tokens. Waiting takes a request a step, or the few whose results are late; each of them costs what
# some ten tokens of a prompt do on a CPU and some hundred on a large GPU. A system prompt is worth
# it, the fixed words of a chat template are not.
WORTH_WAITING = 128


class ToCome(NamedTuple):
    """What a queued sequence waits for: the full pages of its first tokens."""

    maker: LiveSequence
    num_tokens: int  # that it shares with the maker; those that it would hit now are among them


class PagesToCome:
    """What is being computed while one step is drafted."""

    def __init__(
        self,
        lives: Seq[LiveSequence],
        running: Seq[LiveSequence],
        num_decoding: int,
        page_size: int,
    ):
        """Reads nothing yet.

        Args:
          lives: what runs in the step; may grow, and what is added is seen.
          running: what ran before it; the results of some may be awaited.
          num_decoding: so many at the front of `lives` fill no page that others could wait for.
          page_size: token positions of one page.
        """
        self._lives = lives
        self._num_seen = num_decoding  # of `lives`
        self._late: Seq[LiveSequence] | None = running  # None: seen
        self._size = page_size
        self._num_pages = -(-WORTH_WAITING // page_size)  # that are worth it
        self._makers: list[LiveSequence] = []
        # By depth, the logical page that is looked at. Both maps have the same depths: who will
        # fill it, and who is waited for with it already.
        self._filling: dict[int, dict[PrefixNode, LiveSequence]] = {}
        self._awaited: dict[int, dict[PrefixNode, LiveSequence]] = {}

    def again(self, live: LiveSequence) -> ToCome | None:
        """What a sequence that may read the cache waits for, if one before it waits for the same:
        then it needs no look at the cache."""
        if not self._awaited:
            return None
        live.chain.extend(live.sequence.tokens)
        nodes, most = live.chain.nodes, self._most_hits(live)
        for depth, makers in self._awaited.items():
            maker = makers.get(nodes[depth]) if depth < most else None
            if maker is not None:
                return self._shared(live, maker, depth)
        return None

    def behind(self, live: LiveSequence, num_hits: int) -> ToCome | None:
        """What a sequence that would hit `num_hits` pages waits for behind them."""
        depth = num_hits + self._num_pages - 1
        if depth >= min(self._most_hits(live), len(live.chain.nodes)):
            return None
        node = live.chain.nodes[depth]
        self._catch_up()
        maker = self._at(depth).get(node)
        if maker is None or maker.key > live.key:
            return None
        if maker.sequence.num_computed_tokens // self._size > num_hits:
            return None  # it has computed what is missing, and nobody may hit it
        self._awaited[depth][node] = maker
        return self._shared(live, maker, depth)

    def _catch_up(self) -> None:
        """Sees who computes since it looked last."""
        if self._late is not None:
            for live in self._late:
                if live.in_flight is not None:
                    self._see(live)
            self._late = None
        for live in self._lives[self._num_seen :]:
            self._see(live)
        self._num_seen = len(self._lives)

    def _see(self, live: LiveSequence) -> None:
        sequence, size = live.sequence, self._size
        num_pages = sequence.num_tokens // size - sequence.num_computed_tokens // size
        if num_pages < self._num_pages:
            return  # most that run decode
        # One that may not read the cache was not hashed when it was admitted.
        live.chain.extend(sequence.tokens, sequence.num_prompt_tokens)
        self._makers.append(live)
        for depth, nodes in self._filling.items():
            _enter(nodes, live, depth)

    def _at(self, depth: int) -> dict[PrefixNode, LiveSequence]:
        nodes = self._filling.get(depth)
        if nodes is None:
            nodes = self._filling[depth] = {}
            self._awaited[depth] = {}
            for live in self._makers:
                _enter(nodes, live, depth)
        return nodes

    def _most_hits(self, live: LiveSequence) -> int:
        """Pages that it can hit at most: its last token is run in any case."""
        return (live.sequence.num_tokens - 1) // self._size

    def _shared(self, live: LiveSequence, maker: LiveSequence, depth: int) -> ToCome:
        """Halves the distance to the end of what both share, which is `depth` at least."""
        ours, theirs = live.chain.nodes, maker.chain.nodes
        first, last = depth + 1, min(self._most_hits(live), len(theirs))
        while first < last:
            middle = (first + last) // 2
            if ours[middle] is theirs[middle]:
                first = middle + 1
            else:
                last = middle
        return ToCome(maker, first * self._size)


def _enter(nodes: dict[PrefixNode, LiveSequence], live: LiveSequence, depth: int) -> None:
    """Of several with one content the oldest is waited for."""
    if depth < len(live.chain.nodes):
        known = nodes.get(live.chain.nodes[depth])
        if known is None or live.key < known.key:
            nodes[live.chain.nodes[depth]] = live
