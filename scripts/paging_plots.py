"""Plots of the paging experiments beside the paper's published values, as PNG and SVG.

Owns their looks. matplotlib is optional: `pip install "pagedjax[bench]"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scripts.paging_experiments import PAPER_BATCHED, PAPER_MEMORY, WINDOW
from scripts.paging_runs import NAMES, SYSTEMS, Experiment

COLOURS = {"max": "#9a9a9a", "pow2": "#c98f3c", "oracle": "#4f9d69", "paged": "#2f5fa8"}
KINDS = {  # of E1: label, colour
    "tokens": ("tokens", "#2f5fa8"),
    "reserved": ("reserved for later tokens", "#8fb3e0"),
    "internal": ("never used (internal)", "#c98f3c"),
    "rounding": ("rounding to blocks", "#e6c894"),
    "free": ("free, or too small to use (external)", "#dddddd"),
}
PAPER_MARK = {"marker": "D", "color": "black", "linestyle": "none", "markersize": 6, "zorder": 5}
MISSING = (
    "`--plots` needs matplotlib, which is not installed. Install it with "
    '`pip install "pagedjax[bench]"` (in a checkout: `pip install -e ".[bench]"`), or leave '
    "`--plots` out."
)


def require_matplotlib() -> None:
    """Raises `ModuleNotFoundError` with what to do, before anything is simulated."""
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError(MISSING)


def save(experiments: Sequence[Experiment], folder: Path) -> list[Path]:
    """Draws each experiment that has a plot; returns the files written."""
    require_matplotlib()
    library: Any = import_module("matplotlib")  # optional, so loaded here and not at the top
    library.use("Agg")
    # Text stays text in the SVG, and the same figures give the same file.
    library.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "pagedjax"})
    plt: Any = import_module("matplotlib.pyplot")
    folder.mkdir(parents=True, exist_ok=True)
    drawers = {
        "E1": _memory,
        "E2": _rates,
        "E3": _batched,
        "E4": _rates,
        "E5": _sharing,
        "E6": _rates,
        "E7": _rates,
        "E9": _page_sizes,
        "E10": _preemption,
        "E10B": _pressure,
    }
    written: list[Path] = []
    for experiment in experiments:
        if experiment.key not in drawers:
            continue
        figure = drawers[experiment.key](plt, experiment)
        for ending in ("png", "svg"):
            path = folder / f"{experiment.key.lower()}.{ending}"
            metadata = {"Date": None} if ending == "svg" else {"Software": None}
            figure.savefig(path, dpi=150, metadata=metadata)
            written.append(path)
        plt.close(figure)
    return written


def _panels(plt: Any, count: int, *, height: float = 4.0) -> tuple[Any, list[Any]]:
    figure, axes = plt.subplots(
        1, count, figsize=(max(6.4, 5.2 * count), height), squeeze=False, layout="constrained"
    )
    for panel in axes[0]:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#e8e8e8")
        panel.set_axisbelow(True)
    return figure, list(axes[0])


def _legend_below(figure: Any, columns: int) -> None:
    """One legend for all panels, where it hides nothing; a label once."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        found, labels = axes.get_legend_handles_labels()
        handles.update(dict(zip(labels, found, strict=True)))
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=columns,
        frameon=False, fontsize=9,
    )  # fmt: skip


def _memory(plt: Any, experiment: Experiment) -> Any:
    figure, (panel,) = _panels(plt, 1, height=4.6)
    shares = experiment.figures["shares"]
    bottoms = [0.0] * len(SYSTEMS)
    for kind, (label, colour) in KINDS.items():
        values = [100 * shares[system][kind] for system in SYSTEMS]
        panel.bar(
            range(len(SYSTEMS)), values, 0.6, bottom=bottoms, label=label, color=colour,
            edgecolor="white", linewidth=0.5,
        )  # fmt: skip
        if kind == "tokens":
            for at, value in enumerate(values):
                panel.text(at, value / 2, f"{value:.1f}", ha="center", va="center", color="white")
        bottoms = [bottom + value for bottom, value in zip(bottoms, values, strict=True)]
    published = [PAPER_MEMORY[system][0] for system in SYSTEMS]
    panel.plot(range(len(SYSTEMS)), published, label="tokens, in the paper", **PAPER_MARK)
    panel.set_xticks(range(len(SYSTEMS)), [NAMES[system] for system in SYSTEMS])
    panel.set_ylabel("share of the KV memory, %")
    panel.set_ylim(0, 100)
    panel.set_title("What the KV memory holds", fontsize=11)
    _legend_below(figure, 2)
    return figure


def _batched(plt: Any, experiment: Experiment) -> Any:
    figures = experiment.figures
    figure, panels = _panels(plt, len(figures))
    for panel, (source, means) in zip(panels, figures.items(), strict=True):
        end = 0.0
        for system in SYSTEMS:
            times, values = experiment.curves[f"{source}/{system}"]
            minutes = [time / 60 for time in times]
            end = max(end, minutes[-1])
            label = NAMES[system]
            panel.plot(minutes, values, color=COLOURS[system], label=label, linewidth=1.4)
        published = PAPER_BATCHED.get(source, ())
        for system, value in zip(SYSTEMS, published, strict=False):
            mark = PAPER_MARK | {"color": COLOURS[system], "markeredgecolor": "black"}
            panel.plot([end * 1.03], [value], clip_on=False, **mark)
        if published:
            panel.plot([], [], label="the paper's mean", **PAPER_MARK)
        host = means["paged, 2023 host"]
        panel.axhline(
            host, color=COLOURS["paged"], linestyle=":", label="paged behind a 2023 host, mean"
        )
        panel.set_xlabel("simulated time, minutes")
        panel.set_ylabel(f"requests batched, mean over {WINDOW:g} s")
        panel.set_ylim(bottom=0)
        panel.set_xlim(0, end)
        panel.set_title(source, fontsize=11)
    _legend_below(figure, 3)
    return figure


PUBLISHED_RATIOS = {  # (experiment, row) -> lowest and highest of paged / Oracle
    ("E2", "ShareGPT-like"): (1.7, 2.7),
    ("E6", "80 tokens"): (1.67, 1.67),
    ("E6", "341 tokens"): (3.58, 3.58),
    ("E7", "chat"): (2.0, 2.0),
}


def _rates(plt: Any, experiment: Experiment) -> Any:
    figures = experiment.figures
    figure, panels = _panels(plt, len(figures))
    for panel, (name, found) in zip(panels, figures.items(), strict=True):
        for at, (system, rate) in enumerate(found.items()):
            panel.bar(at, rate, 0.6, color=COLOURS[system])
            panel.text(at, rate, f"{rate:.2f}", ha="center", va="bottom", fontsize=9)
        published = PUBLISHED_RATIOS.get((experiment.key, name))
        if published is not None:
            at = list(found).index("paged")
            low, high = (found["oracle"] * ratio for ratio in published)
            panel.errorbar(
                [at], [(low + high) / 2], yerr=[(high - low) / 2], fmt="D", color="black",
                capsize=5, label="Oracle's rate here times the paper's ratio",
            )  # fmt: skip
        panel.set_xticks(range(len(found)), [NAMES[system] for system in found])
        panel.set_ylabel("requests/s sustained")
        panel.margins(y=0.12)
        panel.set_title(name, fontsize=11)
    _legend_below(figure, 1)
    return figure


PUBLISHED_SHARING = {
    ("Alpaca-like", "samples"): (6.09, 8.53, 9.79),
    ("Alpaca-like", "beams"): (37.56, 53.13, 55.16),
    ("ShareGPT-like", "samples"): (16.2, None, 30.5),
    ("ShareGPT-like", "beams"): (44.3, None, 66.3),
}


def _sharing(plt: Any, experiment: Experiment) -> Any:
    figures = experiment.figures
    figure, panels = _panels(plt, len(figures))
    for panel, (source, kinds) in zip(panels, figures.items(), strict=True):
        for (kind, saved), style in zip(kinds.items(), ("o-", "s-", "s--"), strict=True):
            colour = COLOURS["oracle"] if kind == "samples" else COLOURS["paged"]
            widths = [int(width) for width in saved]
            values = [100 * value for value in saved.values()]
            panel.plot(widths, values, style, color=colour, label=kind)
        for kind in ("samples", "beams"):
            published = PUBLISHED_SHARING.get((source, kind), ())
            points = [(w, v) for w, v in zip((2, 4, 6), published, strict=False) if v is not None]
            if points:
                panel.plot(*zip(*points, strict=True), label="the paper", **PAPER_MARK)
        panel.set_xlabel("sequences of a request")
        panel.set_ylabel("pages saved by sharing, %")
        panel.set_ylim(0, 100)
        panel.set_xticks([2, 4, 6])
        panel.set_title(source, fontsize=11)
    _legend_below(figure, 4)
    return figure


def _page_sizes(plt: Any, experiment: Experiment) -> Any:
    figure, panels = _panels(plt, 2)
    sizes = [int(size) for size in next(iter(experiment.figures.values()))]
    best = {
        "ShareGPT-like": (16, 128, 0.03),
        "Alpaca-like": (16, 32, 0.07),
    }  # and where it is drawn
    colours = (COLOURS["paged"], COLOURS["pow2"])
    for (source, by_size), colour in zip(experiment.figures.items(), colours, strict=False):
        latencies = [1e3 * found["normalized_latency"] for found in by_size.values()]
        waste = [100 * found["waste"] for found in by_size.values()]
        panels[0].plot(sizes, latencies, "o-", color=colour, label=source)
        panels[1].plot(sizes, waste, "o-", color=colour, label=source)
        if source in best:
            low, high, height = best[source]
            panels[0].plot(
                [low, high], [height, height], "D-", color=colour, markeredgecolor="black",
                linewidth=4, label=f"best in the paper, {source}",
                transform=panels[0].get_xaxis_transform(),
            )  # fmt: skip
    titles = ("Latency", "Memory")
    labels = ("ms an output token, mean", "unused positions of held pages, %")
    for panel, title, label in zip(panels, titles, labels, strict=True):
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [str(size) for size in sizes])
        panel.set_xlabel("page size, positions")
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
        panel.set_title(title, fontsize=11)
    _legend_below(figure, 4)
    return figure


def _preemption(plt: Any, experiment: Experiment) -> Any:
    figure, (panel,) = _panels(plt, 1, height=4.4)
    sizes = [int(size) for size in experiment.figures]
    labels = {
        "recompute": ("recompute", "o-", COLOURS["oracle"]),
        "swap_page_by_page": ("swap, a copy a page and layer", "s--", COLOURS["pow2"]),
        "swap_gathered": ("swap, gathered", "s-", COLOURS["paged"]),
    }
    for key, (label, style, colour) in labels.items():
        values = [1e3 * costs[key] for costs in experiment.figures.values()]
        panel.plot(sizes, values, style, color=colour, label=label)
    panel.axvspan(16, 64, color="#bbbbbb", alpha=0.25, label="equal in the paper")
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes, [str(size) for size in sizes])
    panel.set_xlabel("page size, positions")
    panel.set_ylabel("ms to give up and get back 458 tokens")
    panel.set_title("Swap against recompute", fontsize=11)
    panel.set_ylim(bottom=0)
    _legend_below(figure, 2)
    return figure


def _pressure(plt: Any, experiment: Experiment) -> Any:
    figure, panels = _panels(plt, len(experiment.figures))
    colours = {
        "recompute": COLOURS["oracle"],
        "swap": COLOURS["pow2"],
        "auto": COLOURS["paged"],
    }
    for panel, (link, modes) in zip(panels, experiment.figures.items(), strict=True):
        for at, (mode, found) in enumerate(modes.items()):
            panel.bar(at, found["latency"], 0.6, color=colours[mode])
            panel.text(
                at, found["latency"], f"{found['latency']:.1f}", ha="center", va="bottom",
                fontsize=9,
            )  # fmt: skip
        panel.set_xticks(range(len(modes)), list(modes))
        panel.set_xlabel("preemption mode")
        panel.set_ylabel("mean latency, s")
        panel.set_ylim(0, 1.15 * max(found["latency"] for found in modes.values()))
        panel.set_title(f"A burst of four times what fits, {link}", fontsize=11)
    return figure
