"""How a score is made of q . k: what every kernel of this package is told, as one static value."""

from dataclasses import dataclass

LOG2_E = 1.4426950408889634  # kernels compute exp(x) as exp2(x * LOG2_E), which hardware has
LN_2 = 0.6931471805599453


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """The options of `paged_attention` that act on scores; hashable.

    In this order: `scale * q . k`; `soft_cap * tanh(score / soft_cap)`; ALiBi (an array, not
    here); positions that are not seen become -inf.
    """

    scale: float
    sliding_window: int | None = None  # a query sees so many positions, its own included
    soft_cap: float | None = None
