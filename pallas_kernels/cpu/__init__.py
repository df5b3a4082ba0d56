"""Kernels for a CPU, in C++: where XLA's own are far from what the processor could do.

They are compiled on the machine that runs them, for its processor, by whatever C++ compiler it
has, and called through JAX's foreign function interface. Without a compiler nothing is lost but
speed: `is_loaded()` is False, and callers use XLA.
"""

from pallas_kernels.cpu.attention import attention, attention_limit
from pallas_kernels.cpu.library import (
    BuildError,
    Recipe,
    find_recipe,
    is_loaded,
    load,
    loaded_compiler,
    loaded_key,
)
from pallas_kernels.cpu.product import can_gate, can_multiply, gated_product, product

__all__ = [
    "BuildError",
    "Recipe",
    "attention",
    "attention_limit",
    "can_gate",
    "can_multiply",
    "find_recipe",
    "gated_product",
    "is_loaded",
    "load",
    "loaded_compiler",
    "loaded_key",
    "product",
]
