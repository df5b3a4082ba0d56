"""Whether products on a CPU are our own kernels, and where those are kept between starts.

Owns the decision and the words for it. How they are built and what they compute is in
`pallas_kernels.cpu`.
"""

from __future__ import annotations

import logging
import time

import jax

from pagedjax import device, environment
from pagedjax.program_store import Entry, ProgramStore
from pallas_kernels import cpu
from pallas_kernels.cpu import BuildError, Recipe

logger = logging.getLogger("pagedjax")


def prepare(store: ProgramStore | None) -> str:
    """Builds or reads the kernels and loads them, where this process computes on a CPU.

    Whatever stands against it, the products are XLA's then; before any program is traced.

    Args:
      store: where the compiled library is kept; None: it is built at each start.

    Returns:
      what computes the products, for people.
    """
    if device.platform() != "cpu":
        return "XLA"
    if cpu.is_loaded():  # and stays in use, whatever was set meanwhile
        return _own(cpu.loaded_compiler())
    if not environment.read().cpu_kernels:
        return "XLA (PAGEDJAX_CPU_KERNELS is off)"
    if jax.local_device_count() > 1:
        return "XLA (the CPU is split into several devices)"
    recipe = cpu.find_recipe()
    if recipe is None:
        return "XLA (there is no C++ compiler to build faster ones)"
    try:
        _load(recipe, store)
    except BuildError as error:
        logger.warning("products are XLA's, and slower: %s", error)
        return f"XLA ({recipe.compiler} cannot build faster ones)"
    return _own(recipe.compiler)


def _own(compiler: str) -> str:
    return f"own kernels, built by {compiler}"


def _load(recipe: Recipe, store: ProgramStore | None) -> None:
    entry = None if store is None else store.read(recipe.key)
    if store is not None and entry is not None:
        try:
            cpu.load(recipe, entry.payload)
            return
        except BuildError as error:
            logger.warning("building the CPU's kernels anew: %s", error)
            store.remove(recipe.key)
    started = time.perf_counter()
    library = recipe.build()
    entry = Entry("CPU kernels", time.perf_counter() - started, library)
    cpu.load(recipe, library)
    if store is not None:  # only what can be loaded
        store.write(recipe.key, entry)
