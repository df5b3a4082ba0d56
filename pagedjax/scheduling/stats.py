"""Totals of a scheduler since its start, and how its pools are used now."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedjax.scheduling.pins import PinnedPrefix


@dataclass(slots=True, kw_only=True)
class SwapStats:
    """What moved between the device and the host, and what was computed again instead."""

    num_swaps: int = 0  # preemptions whose pages went to the host
    num_pages_out: int = 0  # moved, of preempted sequences
    num_tokens_out: int = 0  # computed positions of those sequences, moved or on the host already
    num_pages_in: int = 0  # moved, of swapped sequences and of hits
    num_tokens_in: int = 0  # positions with which swapped sequences came back
    num_spilled_pages: int = 0  # moved to the host when the device evicted them
    num_hit_tokens: int = 0  # prompt tokens found on the host only, at first admissions
    num_recomputed_tokens: int = 0  # positions of preempted sequences computed again
    num_lost_pages: int = 0  # of the host, by failed or late transfers and wrong checksums
    num_host_pages: int = 0  # that can be used
    num_held_host_pages: int = 0  # by swapped sequences, now
    num_cached_host_pages: int = 0  # kept for hits only, now


@dataclass(slots=True, kw_only=True)
class SchedulerStats:
    """Totals since the start, and use of the pools now."""

    num_requests: int
    num_preemptions: int
    num_cow_copies: int
    num_prompt_tokens: int  # prompt positions computed
    num_generated_tokens: int
    prefix_query_tokens: int  # prompt tokens looked up, each request once
    prefix_hit_tokens: int
    num_pages: int  # that can be used
    num_held_pages: int  # of those, now
    num_saved_pages: int = 0  # that sequences would hold beside those without sharing, now
    pinned: tuple[PinnedPrefix, ...] = ()  # prefixes that are held for later requests
    swap: SwapStats = field(default_factory=SwapStats)

    @property
    def kv_usage(self) -> float:
        """Share of the pool's pages that sequences hold, 0 to 1."""
        return self.num_held_pages / max(self.num_pages, 1)

    @property
    def prefix_hit_rate(self) -> float:
        """Share of prompt tokens found in the prefix cache, 0 to 1."""
        return self.prefix_hit_tokens / max(self.prefix_query_tokens, 1)
