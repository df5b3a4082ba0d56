"""Fills a module's parameters from a checkpoint, after reporting all its problems at once.

The module is made abstractly (`nnx.eval_shape`), so memory holds the final weights and a few
tensors being read, one a thread, never initial values or a second copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from pagedjax import threads
from pagedjax.models.family import Layout, Source
from pagedjax.weights.checkpoint import Checkpoint, StoredTensor
from pagedjax.weights.quantize import quantize_rows
from pallas_kernels.quantize import LARGEST

type Progress = Callable[[int, int], None]  # (done, total) bytes of the finished weights

MAX_THREADS = 4  # each holds a tensor beside the final weights
_CHUNK_ELEMENTS = 2**18  # decoded at once: stays in a core's cache, yet dwarfs a call's cost


def assemble(
    build: Callable[[], nnx.Module],
    layout: Layout,
    checkpoint: Checkpoint,
    progress: Progress | None = None,
) -> nnx.Module:
    """The module with the checkpoint's weights, on the default device.

    Parameters get the dtypes of the module. An 8-bit `weight` is quantised as it is read, from the
    file's numbers in float32, and its rows' scales go to the `scale` beside it.

    Args:
      build: makes the module; only traced.
      layout: where each parameter comes from.
      checkpoint: the tensors.
      progress: called after each parameter.

    Raises:
      ModelFormatError: lists all tensors that are missing, unexpected, damaged, of a wrong shape,
        or of a kind that cannot be decoded.
    """
    check(layout, checkpoint)
    graphdef, state = nnx.split(nnx.eval_shape(build))
    paths, tree = jax.tree.flatten_with_path(state)
    leaves = {_dotted(key_path): leaf for key_path, leaf in paths}
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
    arrays: dict[str, jax.Array] = {}
    done = 0
    with threads.pool(MAX_THREADS) as pool:
        # Decoding is NumPy's, which leaves Python's lock.
        futures = [
            pool.submit(_parameter, name, sources, checkpoint, leaves)
            for name, sources in layout.sources.items()
        ]
        for future in futures:
            loaded = future.result()
            arrays |= loaded
            done += sum(array.nbytes for array in loaded.values())
            if progress:
                progress(done, total)
    return nnx.merge(graphdef, jax.tree.unflatten(tree, [arrays[name] for name in leaves]))


def check(layout: Layout, checkpoint: Checkpoint) -> None:
    """Compares names, shapes and kinds; raises one `ModelFormatError` for everything wrong."""
    problems = checkpoint.problems
    expected = {source.name: source for parts in layout.sources.values() for source in parts}
    for name, source in expected.items():
        tensor = checkpoint.tensors.get(name)
        if tensor is None:
            problems.add("missing", name)
        elif tensor.shape != source.shape:
            problems.add(
                "of a wrong shape",
                f"{name} (expected {list(source.shape)}, got {list(tensor.shape)})",
            )
        elif tensor.decode is None:
            problems.add("of a type that pagedjax does not decode", f"{name} ({tensor.kind})")
    for name in sorted(checkpoint.tensors.keys() - expected.keys() - layout.ignored):
        problems.add("unexpected", name)
    problems.raise_if_any(checkpoint.name)


def _parameter(
    name: str, sources: tuple[Source, ...], checkpoint: Checkpoint, leaves: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """A parameter, and its scales if it has any: the rows of all sources, one after another."""
    leaf, scale_name = leaves[name], name.removesuffix("weight") + "scale"
    names = [name, scale_name] if leaf.dtype in LARGEST else [name]
    outs = [np.empty(leaves[part].shape, leaves[part].dtype) for part in names]
    start = 0
    for source in sources:
        stop = start + source.shape[0]
        parts = [out[start:stop] for out in outs]
        _read_into(parts, checkpoint.tensors[source.name])
        if source.interleaved_heads:
            for part in parts:
                _to_halves(part, source.interleaved_heads)
        start = stop
    assert start == leaf.shape[0], "the layout's sources fill the parameter"
    return dict(zip(names, map(jax.device_put, outs), strict=True))


def _read_into(outs: Sequence[np.ndarray], tensor: StoredTensor) -> None:
    """Decodes a tensor chunk by chunk into `outs`: its numbers, or 8-bit values and scales."""
    rows = outs[0].reshape(tensor.num_rows, -1)
    for start, stop in _chunks(tensor.num_rows, rows.shape[1]):
        chunk = tensor.read_rows(start, stop)
        if len(outs) == 1:
            rows[start:stop] = chunk
        else:
            rows[start:stop], outs[1][start:stop] = quantize_rows(chunk, rows.dtype)


def _chunks(num_rows: int, row_size: int) -> Iterator[tuple[int, int]]:
    step = max(1, _CHUNK_ELEMENTS // row_size)
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def _to_halves(rows: np.ndarray, num_heads: int) -> None:
    """Reorders each head's rows in place: (0, 1), (2, 3), ... -> 0, 2, ..., 1, 3, ..."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    rows[...] = pairs.swapaxes(1, 2).reshape(rows.shape)


def _dotted(key_path: tuple[Any, ...]) -> str:
    """layers.0.qkv.weight, from the state's key path."""
    keys = [getattr(key, "key", getattr(key, "name", None)) for key in key_path]
    return ".".join(str(key) for key in keys if key not in (None, "value"))
