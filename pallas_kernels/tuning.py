"""Tile sizes of the kernels, by device kind and problem. Data, not code: see `tuned/*.json`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Static sizes of one launch; hashable. A kernel checks that it can run with them."""

    kernel: Literal["columns", "rows", "mma", "tpu"]
    rows: int  # query rows of a tile (columns of the swapped product)
    kv_tile: int  # positions of a KV tile
    stages: int  # KV tiles in flight
    workers: int  # CTAs that run at once (GPU)
    split: bool = False  # rows may be cut, and their parts merged
    split_p: bool = True  # P as a 16-bit high and a low part: 1e-6 instead of 1e-3
