"""`merge_states`: parts of a context, merged, equal the whole."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import reference
from tests.pallas_kernels.cases import error


def dense_parts(
    rng: np.random.Generator, cuts: list[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Attention of 5 late queries over positions cut at `cuts`: the whole, then stacked parts."""
    q = rng.standard_normal((5, 4, 16))
    k, v = rng.standard_normal((2, cuts[-1], 2, 16))
    options: dict[str, Any] = {
        "scale": 0.25,
        "sliding_window": None,
        "soft_cap": None,
        "sinks": np.full(4, -np.inf),
        "slopes": np.zeros(4),
    }
    ends = zip([0, *cuts], cuts, strict=False)
    parts = []
    for start, end in ends:
        # Every query sees every position: as decode rows, one at a time.
        rows = [reference.dense_attention(q[i : i + 1], k[start:end], v[start:end], **options)
                if end > start else (np.zeros((1, 4, 16)), np.full((1, 4), -np.inf))
                for i in range(5)]  # fmt: skip
        parts.append([np.concatenate(x) for x in zip(*rows, strict=True)])
    whole = [reference.dense_attention(q[i : i + 1], k, v, **options) for i in range(5)]
    out, lse = (np.concatenate(x) for x in zip(*whole, strict=True))
    return out, lse, np.stack([p[0] for p in parts]), np.stack([p[1] for p in parts])


@pytest.mark.parametrize("cuts", [[7], [1, 30], [10, 10, 25, 40], [0, 64]])
def test_parts_of_a_context_merge_to_the_whole(rng: np.random.Generator, cuts: list[int]) -> None:
    out, lse, outs, lses = dense_parts(rng, cuts)
    got, got_lse = jax.jit(pallas_kernels.merge_states)(
        outs.astype(np.float32), lses.astype(np.float32)
    )
    assert error(got, out) < 1e-6
    assert error(got_lse, lse) < 1e-6
    exact, exact_lse = reference.merge_states(outs, lses)
    assert error(exact, out) < 1e-13
    assert error(exact_lse, lse) < 1e-13


def test_an_empty_part_is_ignored_even_when_it_holds_nan(rng: np.random.Generator) -> None:
    outs = rng.standard_normal((2, 3, 4, 16)).astype(np.float32)
    lses = np.stack([np.full((3, 4), -np.inf), rng.standard_normal((3, 4))]).astype(np.float32)
    outs[0] = np.nan
    got, got_lse = pallas_kernels.merge_states(jnp.asarray(outs), jnp.asarray(lses))
    np.testing.assert_allclose(np.asarray(got), outs[1], rtol=1e-6)
    np.testing.assert_allclose(np.asarray(got_lse), lses[1], rtol=1e-6)


def test_only_empty_parts_give_the_empty_state() -> None:
    outs, lses = jnp.zeros((3, 2, 4, 8)), jnp.full((3, 2, 4), -jnp.inf)
    got, got_lse = pallas_kernels.merge_states(outs, lses)
    assert np.all(np.asarray(got) == 0)
    assert np.all(np.isneginf(np.asarray(got_lse)))


def test_merging_keeps_the_dtype_of_the_outputs(rng: np.random.Generator) -> None:
    outs = jnp.asarray(rng.standard_normal((2, 3, 4, 16)), jnp.bfloat16)
    lses = jnp.asarray(rng.standard_normal((2, 3, 4)), jnp.float32)
    got, got_lse = pallas_kernels.merge_states(outs, lses)
    assert (got.dtype, got_lse.dtype) == (jnp.bfloat16, jnp.float32)
    exact, _ = reference.merge_states(outs, lses)
    assert error(got, exact) < 4e-3


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        ((3, 2, 4), (3, 2), r"`outs` must have shape .* Got \(3, 2, 4\)"),
        ((3, 2, 4, 8), (3, 2), r"`lses` must have shape \(3, 2, 4\), as `outs`. Got \(3, 2\)"),
    ],
)
def test_wrong_shapes_are_refused(
    outs: tuple[int, ...], lses: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pallas_kernels.merge_states(jnp.zeros(outs), jnp.zeros(lses))
