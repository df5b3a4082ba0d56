"""Frequencies of every scaling variant against transformers' figures, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.errors import ModelFormatError
from pagedjax.models import llama
from pagedjax.models.rope import RopeConfig, inverse_frequencies, rotate, rotation
from tests.models.checkpoints import tiny_config

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "llama_golden.json").read_text()
)


@pytest.mark.parametrize("case", GOLDEN)
def test_frequencies_equal_transformers(case: str) -> None:
    config = llama.from_hf(tiny_config(**GOLDEN[case]["changes"]))
    got = inverse_frequencies(config.rope, config.head_dim)
    np.testing.assert_allclose(got, GOLDEN[case]["inverse_frequencies"], rtol=1e-6)
    assert config.rope.attention_factor == pytest.approx(GOLDEN[case]["attention_factor"])


def test_divisors_divide_each_frequency() -> None:
    rope = RopeConfig(theta=100.0, kind="divisors", divisors=(1.0, 4.0))
    np.testing.assert_allclose(inverse_frequencies(rope, 4), [1.0, 0.1 / 4])


def test_rotation_keeps_length_and_depends_on_distance_alone() -> None:
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 3, 8)), jnp.float32) for _ in range(2))

    def score(q_position: int, k_position: int) -> np.ndarray:
        turned = []
        for x, position in ((q, q_position), (k, k_position)):
            cos, sin = rotation(RopeConfig(), 8, jnp.asarray([position], jnp.int32))
            turned.append(np.asarray(rotate(x, cos, sin)))
        np.testing.assert_allclose(
            np.linalg.norm(turned[0], axis=-1), np.linalg.norm(q, axis=-1), rtol=1e-5
        )
        return (turned[0] * turned[1]).sum(-1)

    np.testing.assert_allclose(score(7, 3), score(104, 100), atol=1e-4)
    assert np.abs(score(7, 3) - score(7, 4)).max() > 0.01


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su"])
def test_types_that_depend_on_the_length_are_refused_by_name(kind: str) -> None:
    config = tiny_config(rope_scaling={"rope_type": kind})
    with pytest.raises(ModelFormatError, match=f"rope type '{kind}' changes the frequencies"):
        llama.from_hf(config)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "mrope"}, "`rope_type` must be one of: default, linear, llama3, yarn"),
        ({"type": "linear"}, "rope scaling: `factor` is missing"),
        ({"type": "linear", "factor": 0.0}, "`factor` must be a positive finite number"),
        ({"type": "linear", "factor": 2.0, "twist": 1}, "rope scaling: 1 unknown.*`twist`"),
        ({"type": "default", "partial_rotary_factor": 0.5}, "`partial_rotary_factor` must be"),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 16,
            },
            "`low_freq_factor` must be positive and below `high_freq_factor`",
        ),
    ],
)
def test_wrong_scaling_is_refused(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        llama.from_hf(tiny_config(rope_scaling=scaling))
