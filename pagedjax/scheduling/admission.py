"""What a waiting sequence starts from: cached pages, its own pages on the host, or nothing.

Decides nothing and changes nothing. Knows nothing of budgets or of the other sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedjax.paging import PrefixCache, PrefixHits
from pagedjax.scheduling.live import LiveSequence


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """A sequence that leaves the queue, and the pages that it starts from."""

    live: LiveSequence
    num_tokens: int  # positions with keys and values in those pages
    hits: PrefixHits  # where the pages are


def looks_for_hits(live: LiveSequence) -> bool:
    """True when it starts from what the prefix cache has of its tokens."""
    return not live.host_pages and live.owner.may_read_cache(live.sequence)


def admission_of(live: LiveSequence, cache: PrefixCache) -> Admission:
    """What a waiting sequence would start from in the next step."""
    sequence = live.sequence
    if live.host_pages:  # swapped: it goes on where it was
        computed = sequence.num_computed_tokens
        return Admission(live, computed, cache.locate(live.chain, live.host_pages, computed))
    if not live.owner.may_read_cache(sequence):
        return Admission(live, 0, PrefixHits([], []))
    hits = cache.find(sequence.tokens, live.chain)
    return Admission(live, len(hits) * cache.page_size, hits)
