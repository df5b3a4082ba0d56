"""Paged attention and the operations on pages that it stands on; needs only JAX and NumPy.

Owns the public names of the package. Knows nothing of engines, models or sequences: arrays in,
arrays out. Every operation has a NumPy oracle of the same signature in `pallas_kernels.reference`.
"""

from pallas_kernels.attention_plan import AttentionPlan
from pallas_kernels.kv_update import copy_pages, gather_pages, scatter_pages, write_kv
from pallas_kernels.merge import merge_states
from pallas_kernels.metadata import check_metadata
from pallas_kernels.paged_attention import (
    best_implementation,
    padded_head_dim,
    paged_attention,
    plan_attention,
)
from pallas_kernels.tuning import KernelConfig

__all__ = [
    "AttentionPlan",
    "KernelConfig",
    "best_implementation",
    "check_metadata",
    "copy_pages",
    "gather_pages",
    "merge_states",
    "padded_head_dim",
    "paged_attention",
    "plan_attention",
    "scatter_pages",
    "write_kv",
]
