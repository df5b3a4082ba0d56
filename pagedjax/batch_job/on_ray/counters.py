"""The figures of many engines as if they were one's: what progress reads.

Totals count what dead workers did too; gauges are of the living.
"""

from __future__ import annotations

from typing import Any

from pagedjax.batch_job.on_ray.roster import Roll

LIVING_SECONDS = 10.0  # since a worker was heard


class FleetCounters:
    """Sums over workers; see `pagedjax.throughput.Counters`, and `stats` of it is this too."""

    def __init__(self) -> None:
        """Nobody worked yet."""
        self._figures: dict[str, dict[str, Any]] = {}  # of every worker ever, as it last said
        self._living: list[str] = []

    def update(self, roll: Roll) -> None:
        """Takes what the roster knows."""
        self._figures |= {name: figures for name, figures in roll.figures.items() if figures}
        heard = [name for name, seconds in roll.silent.items() if seconds < LIVING_SECONDS]
        self._living = [name for name in heard if name in self._figures]

    @property
    def stats(self) -> FleetCounters:
        """Totals since the start."""
        return self

    @property
    def num_prompt_tokens(self) -> int:
        """Computed by all."""
        return self._total("num_prompt_tokens")

    @property
    def num_generated_tokens(self) -> int:
        """Computed by all."""
        return self._total("num_generated_tokens")

    @property
    def num_preemptions(self) -> int:
        """In all engines."""
        return self._total("num_preemptions")

    @property
    def num_cow_copies(self) -> int:
        """In all engines."""
        return self._total("num_cow_copies")

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return sum(self._figures[name]["num_running"] for name in self._living)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queues."""
        return sum(self._figures[name]["num_waiting"] for name in self._living)

    @property
    def kv_usage(self) -> float:
        """Mean share of the pools' pages that are held, 0 to 1."""
        shares = [self._figures[name]["kv_usage"] for name in self._living]
        return sum(shares) / len(shares) if shares else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of prompt tokens found in a prefix cache, 0 to 1."""
        tokens = self.num_prompt_tokens
        hits = sum(f["prefix_hit_rate"] * f["num_prompt_tokens"] for f in self._figures.values())
        return hits / tokens if tokens else 0.0

    def _total(self, name: str) -> int:
        return sum(figures[name] for figures in self._figures.values())
