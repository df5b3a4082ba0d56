"""What is compiled: the problems that the engine can bring to a kernel, or a covering sample.

Owns the lists; needs no JAX, so that a parent process can count what its children compile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tests.aot.targets import TARGETS, Target

type What = Literal["decode", "prefill", "write_kv", "copy_pages", "step"]
type Level = Literal["sample", "pairs", "all"]

PAGE_SIZES = (8, 16, 32, 64, 128)
GROUPS = (1, 2, 4, 7, 8, 16)
OPTIONS = ("none", "window", "cap", "slopes")
QUANTISED = ("float8_e4m3fn", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One program. Fields that do not matter to `what` are at their defaults."""

    what: What
    page_size: int = 64
    head_dim: int = 128
    group: int = 4
    dtype: str = "bfloat16"
    split: bool = False
    option: str = "none"
    num_tokens: int = 64

    @property
    def name(self) -> str:
        """For people; unique."""
        parts = [self.what, f"P{self.page_size}", f"D{self.head_dim}", self.dtype]
        if self.what in ("decode", "prefill"):
            parts += [f"G{self.group}", "split" if self.split else "whole", self.option]
        return " ".join([*parts, f"T{self.num_tokens}"])

    @property
    def is_attention(self) -> bool:
        """True for the kernels that attend, alone."""
        return self.what in ("decode", "prefill")


def cases(target: Target, level: Level = "sample") -> list[Case]:
    """Programs to compile for a chip.

    Args:
      level: "pairs": attention in so many configurations that every pair of two options' values
        occurs; "sample": these are dealt to decode and prefill of the chips that run the same
        kernels, and a few are compiled for all; "all": every combination (hours).
    """
    points: list[tuple[What, dict[str, Any]]] = []
    if level == "sample":
        points += itertools.product(_TOKENS, _common(target))
        points += _share(target)
    else:
        every = list(product(_axes(target))) if level == "all" else _pairs(target)
        points += itertools.product(_TOKENS, every)
    found = [Case(what=what, num_tokens=_TOKENS[what], **point) for what, point in points]
    found = [case for case in found if _is_served(target, case)]
    return list(dict.fromkeys([*found, *_updates(target), *_steps(target)]))


def family(target: Target) -> list[Target]:
    """Chips that run the same attention kernels."""

    def kernels(chip: Target) -> str:
        if not chip.is_gpu:
            return "tpu"
        return "wgmma" if chip.architecture == "sm_90a" else "mma"

    return [chip for chip in TARGETS.values() if kernels(chip) == kernels(target)]


def dtypes(target: Target) -> tuple[str, ...]:
    """Of pools that the kernels serve on a chip."""
    if not target.is_gpu:
        return ("bfloat16", "float32", *QUANTISED)
    if target.architecture == "sm_80":  # it cannot convert from float8
        return ("bfloat16", "float16", "int8")
    return ("bfloat16", "float16", *QUANTISED)


def _is_served(target: Target, case: Case) -> bool:
    """False for what the kernels say they cannot do on a chip (`NotImplementedError`)."""
    if case.dtype not in dtypes(target):
        return False
    if case.dtype in QUANTISED and not target.is_gpu and case.page_size != 128:
        return False
    width = {"bfloat16": 2, "float16": 2, "float32": 4}.get(case.dtype, 1)
    slab = case.page_size * case.head_dim * width  # one head's keys in a page
    return slab >= 1024 or target.architecture not in ("sm_80", "sm_89")


_TOKENS: dict[What, int] = {"decode": 64, "prefill": 2048}  # of a step


def _common(target: Target) -> list[dict[str, Any]]:
    return [{}, {"head_dim": 256, "dtype": "int8", "page_size": _quantised_page(target)}]


def _quantised_page(target: Target) -> int:
    """A TPU's kernels take quantised pages of 128 tokens only."""
    return 64 if target.is_gpu else 128


def _axes(target: Target) -> dict[str, tuple[Any, ...]]:
    every = dict.fromkeys(dtype for chip in family(target) for dtype in dtypes(chip))
    return {
        "page_size": PAGE_SIZES,
        "head_dim": (64, 128, 256) if target.is_gpu else (128, 256),
        "group": GROUPS,
        "dtype": tuple(every),
        "option": OPTIONS,
        "split": (True, False) if target.is_gpu else (False,),
    }


def _share(target: Target) -> list[tuple[What, dict[str, Any]]]:
    """What of the pairs of its family falls to a chip, as decode or as prefill.

    Each goes to a chip that serves its dtype, and to the one of the two in which more of its
    values are new: so every value occurs in both on some chip.
    """
    mine: list[tuple[What, dict[str, Any]]] = []
    load = dict.fromkeys([chip.name for chip in family(target)], 0)
    seen: dict[What, list[tuple[str, Any]]] = {what: [] for what in _TOKENS}
    for point in _pairs(target):
        able = [chip.name for chip in family(target) if point["dtype"] in dtypes(chip)]
        least = min(able, key=load.__getitem__)
        load[least] += 1
        chip = TARGETS[least]
        if not _is_served(chip, Case(what="decode", **point)):
            continue
        what = min(_TOKENS, key=lambda w: (sum(i in seen[w] for i in point.items()), len(seen[w])))
        seen[what] += point.items()
        if least == target.name:
            mine.append((what, point))
    return mine


def _pairs(target: Target) -> list[dict[str, Any]]:
    """Few points of what some chip of the family serves, in which every pair of values occurs."""

    def is_served(point: dict[str, Any]) -> bool:
        return any(_is_served(chip, Case(what="decode", **point)) for chip in family(target))

    return pairwise(_axes(target), is_served)


def _updates(target: Target) -> Iterator[Case]:
    yield Case(what="copy_pages", num_tokens=32)
    for dtype in dtypes(target):
        page_size = _quantised_page(target) if dtype in QUANTISED else 64
        yield Case(what="write_kv", dtype=dtype, page_size=page_size)
    yield Case(what="write_kv", page_size=8, num_tokens=2048)
    yield Case(what="write_kv", page_size=128, head_dim=256, num_tokens=2048)
    yield Case(what="copy_pages", page_size=8, dtype="int8", num_tokens=32)


def _steps(target: Target) -> Iterator[Case]:
    page_size = 64 if target.is_gpu else 128
    yield Case(what="step", page_size=page_size, num_tokens=64)  # a decode bucket
    if target.name in ("h200", "v5e"):
        yield Case(what="step", page_size=page_size, num_tokens=512)  # a mixed one


def product(axes: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Every combination of the axes' values."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def pairwise(
    axes: dict[str, tuple[Any, ...]], allowed: Callable[[dict[str, Any]], bool] = lambda _: True
) -> list[dict[str, Any]]:
    """Few allowed combinations in which every pair of values of two axes that can occur does.

    Greedy and deterministic: of all combinations the one with the most new pairs, again and again.
    """
    points = [point for point in product(axes) if allowed(point)]
    pairs = [frozenset(itertools.combinations(point.items(), 2)) for point in points]
    missing = frozenset().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(points)), key=lambda i: len(pairs[i] & missing))
        chosen.append(points[best])
        missing -= pairs[best]
    return chosen
