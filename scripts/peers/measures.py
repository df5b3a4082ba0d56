"""Arithmetic of a benchmark: ratios with their spread, latencies, goodput. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from .drive import UNKNOWN_TOKEN

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], rank: float) -> float:
    """With linear interpolation between the two nearest ranks; NaN of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    at = (len(ordered) - 1) * rank / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def paired_ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Spread of ours over theirs, repetition by repetition: what slowed both down cancels out."""
    return spread([one / other for one, other in zip(ours, theirs, strict=True)])


def latencies(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Means and percentiles in milliseconds, counted from each request's arrival.

    Args:
      records: `arrival_s` and `times` of each request, as `drive` gives them.

    Returns:
      `ttft_ms_mean`, `ttft_ms_p50` and so on: time to first token, between tokens (of all requests
      alike), and to the last token (`e2e`).
    """
    kinds = {
        "ttft": [record["times"][0] - record["arrival_s"] for record in records],
        "tbt": [gap for record in records for gap in _gaps(record)],
        "e2e": [record["times"][-1] - record["arrival_s"] for record in records],
    }
    told: dict[str, float] = {}
    for kind, values in kinds.items():
        told[f"{kind}_ms_mean"] = sum(values) / len(values) * 1e3 if values else float("nan")
        for rank in PERCENTILES:
            told[f"{kind}_ms_p{rank}"] = percentile(values, rank) * 1e3
    return told


def goodput(
    records: Sequence[dict[str, Any]], seconds: float, max_ttft_ms: float, max_tbt_ms: float
) -> dict[str, float]:
    """Requests that kept both bounds: their share, and how many of them there were a second.

    A request keeps them when its first token came within `max_ttft_ms` of its arrival and its
    others came `max_tbt_ms` apart or less, on average.
    """
    good = sum(
        (record["times"][0] - record["arrival_s"]) * 1e3 <= max_ttft_ms
        and statistics.fmean(_gaps(record) or [0.0]) * 1e3 <= max_tbt_ms
        for record in records
    )
    return {"good_share": good / len(records), "goodput_rps": good / seconds}


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> dict[str, float]:
    """How far greedy answers agree.

    Returns:
      `requests`: the share of answers that are equal; `tokens`: the share of tokens before an
      answer's first difference (after it, two answers continue different texts). An unknown token
      counts as equal.
    """
    same = [_common(one, other) for one, other in zip(ours, theirs, strict=True)]
    equal = sum(
        count == len(one) == len(other)
        for count, one, other in zip(same, ours, theirs, strict=True)
    )
    return {"requests": equal / len(same), "tokens": sum(same) / sum(len(one) for one in ours)}


def _gaps(record: dict[str, Any]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(record["times"])]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b and UNKNOWN_TOKEN not in (a, b):
            return position
    return min(len(one), len(other))
