"""Seconds that giving a sequence's pages up costs, by swap and by recompute.

Owns three rates. They start as estimates; the engine replaces them by what it measured. Knows
nothing of clocks: the same rates give the same decisions.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CostModel:
    """Rates that `preemption_mode` auto and `victim_policy` least_cost weigh with.

    The estimates are of a page of half a MiB over a bus of 2.5 GB/s, and of 2,000 tokens computed
    a second: they prefer to swap until something was measured.
    """

    seconds_per_page_out: float = 2e-4  # device -> host
    seconds_per_page_in: float = 2e-4  # host -> device
    seconds_per_token: float = 5e-4  # of a prompt, in full steps

    def swap_seconds(self, num_pages_out: int, num_pages_in: int) -> float:
        """Time to move so many pages out now, and so many in again later."""
        out, back = self.seconds_per_page_out, self.seconds_per_page_in
        return num_pages_out * out + num_pages_in * back

    def recompute_seconds(self, num_tokens: int) -> float:
        """Time to compute so many positions again."""
        return num_tokens * self.seconds_per_token
