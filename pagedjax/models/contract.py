"""What the engine asks of a model, checked at start-up with errors that teach.

A model maps `(tokens [num_tokens], positions [num_tokens], kv_cache, batch)` to
`(hidden [num_tokens, embed_dim], kv_cache)`, has `logits(hidden) -> [num_rows, vocab_size]`, and
says `num_layers` (attention layers), `num_kv_heads`, `head_dim` and `vocab_size`. It is a Flax NNX
module, or any registered pytree of arrays with these methods (a Linen module with its parameters
in a small dataclass, say).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.attention import Batch
from pagedjax.errors import ConfigError
from pagedjax.kv_cache import KVCache, init_kv_cache

_SIZES = ("num_layers", "num_kv_heads", "head_dim", "vocab_size")
_PROBE_TOKENS, _PROBE_SEQS, _PROBE_PAGES, _PROBE_PAGE_SIZE = 6, 4, 3, 16
_SIGNATURE = "(tokens, positions, kv_cache, batch) -> (hidden, kv_cache)"


@dataclass(frozen=True, slots=True)
class FlatModel:
    """A model taken apart once, so that a step's call passes plain arrays."""

    leaves: tuple[jax.Array, ...]
    merge: Callable[[Any], Any]  # leaves -> the model; called under a trace
    dtype: jnp.dtype  # of most of its floating-point matrices, by bytes; 8-bit ones are not asked
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    # All that `merge` adds to the leaves, as a text; None: not known, it is a user's own model.
    identity: str | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(_num_bytes(leaf) for leaf in self.leaves)


def flatten(model: Any, *, is_abstract: bool = False, identity: str | None = None) -> FlatModel:
    """Takes a model apart.

    Args:
      model: with its parameters.
      is_abstract: they are only shapes and dtypes, as `nnx.eval_shape` makes them; such a model
        can be sized and traced, not run.
      identity: see `FlatModel`.

    Raises:
      ConfigError: it has no parameters, or a size is missing or no positive integer.
    """
    sizes = {name: _size(model, name) for name in _SIZES}
    if isinstance(model, nnx.Module):
        graphdef, state = nnx.split(model)
        leaves, tree = jax.tree.flatten(state)

        def merge(arrays: Any) -> Any:
            return nnx.merge(graphdef, jax.tree.unflatten(tree, arrays))
    else:
        leaves, tree = jax.tree.flatten(model)

        def merge(arrays: Any) -> Any:
            return jax.tree.unflatten(tree, arrays)

    kind = jax.ShapeDtypeStruct if is_abstract else jax.Array
    if not leaves or not all(isinstance(leaf, kind) for leaf in leaves):
        raise ConfigError(
            "`model` must be a Flax NNX module or a registered pytree whose leaves are all JAX "
            f"arrays (its parameters). Got {type(model).__name__} with "
            f"{sorted({type(leaf).__name__ for leaf in leaves}) or 'no leaves'}."
        )
    dtype = _main_dtype(leaves)
    return FlatModel(tuple(leaves), merge, dtype, **sizes, identity=identity)


def check(model: FlatModel, cache_dtype: jnp.dtype) -> None:
    """Traces the model abstractly (no memory, no time) and compares with the contract.

    Raises:
      ConfigError: says what the model must return and what came.
    """
    cache = _abstract_cache(model, cache_dtype)
    untouched: list[int] = []
    try:
        new_cache, logits = _trace(model, cache, _abstract_batch("xla"), untouched)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"`model` must map {_SIGNATURE} with tokens and positions i32[{_PROBE_TOKENS}] and a "
            f"cache of dtype {cache_dtype}. Tracing it raised {type(error).__name__}: {error}"
        ) from error
    _check_shape("logits(hidden)", logits, (_PROBE_SEQS, model.vocab_size))
    _check_cache(cache, new_cache, untouched)


def check_implementation(
    model: FlatModel,
    cache_dtype: jnp.dtype,
    name: str,
    *,
    page_size: int = _PROBE_PAGE_SIZE,
    head_dim: int | None = None,
) -> None:
    """Traces a model that passed `check` with the implementation of attention that was asked for.

    Args:
      model, cache_dtype: as for `check`.
      name: of the implementation.
      page_size, head_dim: of the pool; None: the model's.

    Raises:
      ConfigError: there is none of that name, or it cannot do what the model asks.
    """
    cache = _abstract_cache(model, cache_dtype, page_size, head_dim)
    try:
        _trace(model, cache, _abstract_batch(name), [])
    except Exception as error:
        raise ConfigError(
            f"`attention_implementation` must be one that can run this model here. Got {name!r}: "
            f"{error}"
        ) from error


def _trace(
    model: FlatModel, cache: KVCache, batch: Batch, untouched: list[int]
) -> tuple[KVCache, Any]:
    """Cache and logits, abstractly; adds the layers that were not written to `untouched`."""

    def probe(leaves: Any, kv_cache: KVCache, batch: Batch) -> tuple[Any, Any]:
        module = _merge_and_check(model, leaves)
        tokens = jnp.zeros((_PROBE_TOKENS,), jnp.int32)
        hidden, new_cache = _pair(module(tokens, tokens, kv_cache, batch))
        _check_shape("hidden", hidden, (_PROBE_TOKENS, None))
        untouched.extend(_untouched_layers(kv_cache, new_cache))
        return new_cache, module.logits(hidden[:_PROBE_SEQS])

    return jax.eval_shape(probe, model.leaves, cache, batch)


def _merge_and_check(model: FlatModel, leaves: Any) -> Any:
    """The model again, with both methods there."""
    module = model.merge(leaves)
    for name in ("__call__", "logits"):
        if not callable(getattr(module, name, None)):
            raise ConfigError(
                f"`model` must have a method `{name}`: it maps {_SIGNATURE} and has "
                f"`logits(hidden)`. Got {type(module).__name__} without it."
            )
    return module


def _size(model: Any, name: str) -> int:
    value = getattr(model, name, None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"`model.{name}` must be a positive integer: the engine sizes the page pool and the "
            f"sampler by it. Got {value!r} on {type(model).__name__}."
        )
    return value


def _num_bytes(leaf: Any) -> int:
    return leaf.size * leaf.dtype.itemsize


def _main_dtype(leaves: Any) -> jnp.dtype:
    """What a model computes in: not what its weights are packed in, nor what their scales are."""
    wide = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    wide = [leaf for leaf in wide if leaf.dtype.itemsize > 1]
    sizes: Counter[jnp.dtype] = Counter()
    for leaf in [leaf for leaf in wide if leaf.ndim > 1] or wide:
        sizes[jnp.dtype(leaf.dtype)] += _num_bytes(leaf)
    return sizes.most_common(1)[0][0] if sizes else jnp.dtype(jnp.float32)


def _abstract_cache(
    model: FlatModel,
    dtype: jnp.dtype,
    page_size: int = _PROBE_PAGE_SIZE,
    head_dim: int | None = None,
) -> KVCache:
    make = functools.partial(
        init_kv_cache,
        num_layers=model.num_layers,
        num_pages=_PROBE_PAGES,
        num_kv_heads=model.num_kv_heads,
        page_size=page_size,
        head_dim=head_dim or model.head_dim,
        dtype=dtype,
    )
    return jax.eval_shape(make)


def _abstract_batch(implementation: str | None) -> Batch:
    def i32(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    return Batch(
        page_table=i32(_PROBE_SEQS, 2),
        kv_lens=i32(_PROBE_SEQS),
        cu_q_lens=i32(_PROBE_SEQS + 1),
        num_seqs=i32(),
        slot_mapping=i32(_PROBE_TOKENS),
        implementation=implementation,
    )


def _pair(result: Any) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], KVCache):
        got = type(result).__name__
        if isinstance(result, tuple):
            got = f"({', '.join(type(part).__name__ for part in result)})"
        raise ConfigError(
            f"`model(...)` must return (hidden, kv_cache), the cache being the one that the last "
            f"`attend` returned. Got {got}."
        )
    return result


def _untouched_layers(before: KVCache, after: KVCache) -> list[int]:
    pairs = zip(before.kv_pages, after.kv_pages, strict=False)
    return [layer for layer, (old, new) in enumerate(pairs) if old is new]


def _check_shape(what: str, array: Any, expected: tuple[int | None, ...]) -> None:
    shape = tuple(getattr(array, "shape", ()))
    matches = len(shape) == len(expected) and all(
        want in (None, got) for want, got in zip(expected, shape, strict=True)
    )
    if not matches:
        shown = ", ".join("embed_dim" if want is None else str(want) for want in expected)
        raise ConfigError(
            f"`{what}` of the model must have shape [{shown}] when it runs {_PROBE_TOKENS} tokens "
            f"and {_PROBE_SEQS} of them are sampled. Got {list(shape)}."
        )


def _check_cache(before: KVCache, after: KVCache, untouched: list[int]) -> None:
    old = [(pool.shape, pool.dtype) for pool in before.kv_pages]
    new = [(pool.shape, pool.dtype) for pool in after.kv_pages]
    if old != new:
        raise ConfigError(
            f"`model(...)` must return the cache with the shapes and dtypes it came with "
            f"({len(old)} layers of {old[0]}). Got {len(new)} layers, first {new[:1]}."
        )
    if untouched:
        raise ConfigError(
            f"`model(...)` must call `attend(..., layer=i)` for each of its `num_layers` = "
            f"{len(old)} layers and pass the returned cache on. Layers {untouched} were not "
            f"written: is a returned cache dropped, or `num_layers` too large?"
        )
