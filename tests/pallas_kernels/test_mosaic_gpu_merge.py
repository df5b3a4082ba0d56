"""`merge_items`: the parts of each row joined, in the interpreter, against float64."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.mosaic_gpu_merge import merge_items
from tests.pallas_kernels.cases import error
from tests.pallas_kernels.races import no_gpu_race

COUNTS = [1, 0, 3, 1, 2]  # items of each row


def make_items(
    rng: np.random.Generator, rows: int, head_dim: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """o f32[num_items, rows, head_dim], lse f32[num_items, rows] and row_items of COUNTS rows."""
    num_items = sum(COUNTS) + 2  # two that belong to no row
    o = rng.standard_normal((num_items, rows, head_dim)).astype(np.float32)
    lse = rng.uniform(-60, 60, (num_items, rows)).astype(np.float32)
    lse[:, 1] = -np.inf  # a row that sees nothing anywhere
    lse[2] = -np.inf  # an empty item
    lse[-2:] = np.nan
    o[np.isneginf(lse)] = np.nan
    return o, lse, np.cumsum([0, *COUNTS]).astype(np.int32)


def expected(
    o: np.ndarray, lse: np.ndarray, row_items: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    o = np.where(np.isneginf(lse)[..., None], 0, o)
    merged = []
    for first, last in itertools.pairwise(row_items):
        nothing = np.zeros_like(o[:1]), np.full_like(lse[:1], -np.inf)
        outs = np.concatenate([nothing[0], o[first:last]])
        merged.append(reference.merge_states(outs, np.concatenate([nothing[1], lse[first:last]])))
    return np.stack([m[0] for m in merged]), np.stack([m[1] for m in merged])


def run(o: Any, lse: Any, row_items: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    with no_gpu_race():
        arrays = map(jnp.asarray, (o, lse, row_items))
        return jax.tree.map(np.asarray, merge_items(*arrays, interpret=True, **options))


@pytest.mark.parametrize(
    ("rows", "head_dim", "transposed"),
    [(8, 128, True), (16, 64, False), (64, 128, False)],
    ids=["columns", "mma", "rows"],
)
def test_rows_are_joined_from_their_items(
    rng: np.random.Generator, rows: int, head_dim: int, transposed: bool
) -> None:
    o, lse, row_items = make_items(rng, rows, head_dim)
    given = np.ascontiguousarray(o.swapaxes(1, 2)) if transposed else o
    out, out_lse = run(given, lse, row_items, transposed=transposed)
    want, want_lse = expected(o, lse, row_items)
    assert error(out.swapaxes(1, 2) if transposed else out, want) <= 5e-6
    assert error(out_lse, want_lse) <= 1e-6


def test_result_has_the_dtype_asked_for(rng: np.random.Generator) -> None:
    o, lse, row_items = make_items(rng, 16, 64)
    out, _ = run(o, lse, row_items, transposed=False, out_dtype=jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    assert error(out, expected(o, lse, row_items)[0]) <= 4e-3


def test_one_item_comes_back_as_it_was(rng: np.random.Generator) -> None:
    o, lse, row_items = make_items(rng, 8, 64)
    out, out_lse = run(o.swapaxes(1, 2), lse, row_items, transposed=True)
    seen = ~np.isneginf(lse[0])
    np.testing.assert_array_equal(out[0].T[seen], o[0][seen])
    np.testing.assert_array_equal(out_lse[0], lse[0])


def test_shapes_that_no_layout_fits_are_refused() -> None:
    o, lse, bounds = jnp.zeros((2, 8, 64)), jnp.zeros((2, 8)), jnp.zeros(3, jnp.int32)
    with pytest.raises(NotImplementedError, match=r"rows \(of 16\).*Got \(8, 64\)"):
        merge_items(o, lse, bounds, transposed=False)
