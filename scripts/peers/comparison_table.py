"""A comparison's rows for people: one table of speed and memory, one of latencies under load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SPEED = ("workload", "at", "dtype", "engine", "out tok/s", "ours / it", "RSS MiB", "same tokens")
_LATENCY = (
    *("workload", "at", "dtype", "engine", "TTFT ms p50", "p99", "TBT ms p50", "p99"),
    *("E2E ms p50", "p99", "in bounds", "of them /s"),
)


def comparison_table(rows: Sequence[dict[str, Any]]) -> str:
    """All rows; those with arrival times in a second table, too."""
    tables = [aligned([_SPEED, *map(_speed, rows)])]
    open_loop = [row for row in rows if row["open_loop"]]
    if open_loop:
        tables.append(aligned([_LATENCY, *map(_latency, open_loop)]))
    return "\n\n".join(tables)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Cells to the right of columns as wide as their widest."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def _speed(row: dict[str, Any]) -> list[str]:
    rss, agreement = row["peak_rss_mib"], row["agreement"]
    return [
        *_where(row),
        _spread(row["output_tokens_per_s"], "{:.1f}"),
        "-" if row["ratio"] is None else _spread(row["ratio"], "{:.2f}"),
        "-" if rss is None else f"{rss:,.0f}",
        "-" if agreement is None else f"{agreement['tokens']:.1%}",
    ]


def _latency(row: dict[str, Any]) -> list[str]:
    waits = [
        f"{row['latency'][f'{kind}_ms_p{rank}']:,.0f}"
        for kind in ("ttft", "tbt", "e2e")
        for rank in (50, 99)
    ]
    kept = row["goodput"]
    return [*_where(row), *waits, f"{kept['good_share']:.0%}", f"{kept['goodput_rps']:.2f}"]


def _where(row: dict[str, Any]) -> list[str]:
    return [row["workload"], str(row["concurrency"]), row["dtype"], row["engine"]]


def _spread(values: dict[str, float], form: str) -> str:
    """`median (least..largest)`."""
    median, least, most = (form.format(values[key]) for key in ("median", "min", "max"))
    return f"{median} ({least}..{most})"
