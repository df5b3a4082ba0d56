"""The programs that make and change what a device holds between steps: pools, rows, page copies.

Owns their shapes. Knows nothing of a step, nor of when which of them runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax import kv_cache as kv_caches
from pagedjax import sampling
from pagedjax.config import SchedulerConfig
from pagedjax.kv_cache import KVCache
from pagedjax.models.contract import FlatModel
from pagedjax.plan import RowUpdate
from pagedjax.programs import Program, abstract


def layer_program(
    model: FlatModel, config: SchedulerConfig, dtype: jnp.dtype, head_dim: int
) -> Program:
    """Makes the pool of one layer; all layers at once would be one array, copied."""
    sizes = {
        "num_layers": 1,
        "num_pages": config.num_pages,
        "num_kv_heads": model.num_kv_heads,
        "page_size": config.page_size,
        "head_dim": head_dim,
        "dtype": jnp.dtype(dtype),
    }
    make = functools.partial(kv_caches.init_kv_cache, **sizes)
    return Program(
        name="page pool of a layer",
        function=make,
        holds=repr(sizes),
        arguments=(),
        result=jax.eval_shape(make),
    )


def state_program(max_num_seqs: int, vocab_size: int) -> Program:
    """Makes the sampler's rows."""
    make = functools.partial(sampling.init_state, max_num_seqs, vocab_size)
    return Program(
        name="sampler's rows",
        function=make,
        holds=f"{max_num_seqs} {vocab_size}",
        arguments=(),
        result=jax.eval_shape(make),
    )


def new_cache(new_layer: Callable[[], KVCache], num_layers: int) -> KVCache:
    """A cache of zeros, layer by layer."""
    return kv_caches.joined([new_layer() for _ in range(num_layers)])


def copy_program(kv_cache: KVCache, config: SchedulerConfig, implementation: Any) -> Program:
    """Copies pages of all layers, `copy_width` at once; **DONATES** the cache."""
    return Program(
        name="page copies",
        function=functools.partial(_copy_pages, implementation),
        holds=f"{implementation}",
        arguments=(abstract(kv_cache), no_copies(config)),
        result=abstract(kv_cache),
        donated=(0,),
    )


def row_program(state: sampling.SamplerState, vocab_size: int) -> Program:
    """Writes one row of the sampler's state, which it **DONATES**."""
    return Program(
        name="row update",
        function=sampling.set_row,
        holds="",
        arguments=(abstract(state), np.int32(0), *empty_row(vocab_size)),
        result=abstract(state),
        donated=(0,),
    )


def copy_width(config: SchedulerConfig) -> int:
    """Page copies that one call makes."""
    return min(config.max_num_seqs, 32)  # a step with more copies runs several batches


def no_copies(config: SchedulerConfig) -> np.ndarray:
    """i32[2, width]; every destination is past the end."""
    return np.full((2, copy_width(config)), config.num_pages, np.int32)


def empty_row(vocab_size: int) -> tuple[Any, ...]:
    """What `row_program` takes after the slot, for a request that changes no logit."""
    return sampling.densify(RowUpdate(0, {}, None, {}, frozenset()), vocab_size)


def _copy_pages(implementation: str | None, kv_cache: KVCache, pairs: jax.Array) -> KVCache:
    """**DONATES** the cache. pairs: i32[2, n], sources and destinations."""
    return kv_caches.copy(kv_cache, pairs[0], pairs[1], implementation=implementation)
