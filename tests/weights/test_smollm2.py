"""The real model, loaded from GGUF, through the dense path: figures of an independent engine.

One pass over prompt and answer stands for all its greedy steps: each golden token must be the
likeliest one after the tokens before it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax.models.decoder import Decoder
from pagedjax.weights import LoadedModel, load_model, resolve_model
from tests.smollm2 import needs_weights

pytestmark = needs_weights

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text()
)["cases"]
TOLERANCE = 1e-3
PADDED = 128  # one shape for every case


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(resolve_model("smollm2-135m-instruct"), dtype="float32")


def test_metadata_of_the_bundled_model(loaded: LoadedModel) -> None:
    config = loaded.config
    assert (config.num_layers, config.num_q_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.head_dim, config.vocab_size, config.tied_embeddings) == (64, 49152, True)
    assert (loaded.bos_token_id, loaded.eos_token_ids) == (1, (2,))
    assert loaded.num_bytes == 4 * 134_515_008


@pytest.fixture(scope="module")
def logprobs(loaded: LoadedModel) -> Any:
    assert isinstance(loaded.model, Decoder)
    graphdef, state = nnx.split(loaded.model)

    @jax.jit
    def run(state: Any, tokens: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(nnx.merge(graphdef, state).dense(tokens))

    return lambda tokens: np.asarray(run(state, jnp.asarray(tokens)))


@pytest.mark.parametrize("case", CASES[1:3], ids=lambda case: case["name"])
def test_dense_greedy_tokens_and_logprobs_equal_the_golden(case: Any, logprobs: Any) -> None:
    prompt, answer = case["prompt_ids"], case["greedy_ids"]
    tokens = np.zeros(PADDED, np.int32)
    tokens[: len(prompt) + len(answer)] = prompt + answer
    got = logprobs(tokens)
    after = got[len(prompt) - 1 :][: len(answer)]  # f32[64, V], row i: what follows i tokens
    assert after.argmax(axis=1).tolist() == answer
    for row, top in zip(after, case["top5_logprobs"], strict=True):
        ids, expected = zip(*top, strict=True)
        np.testing.assert_allclose(row[list(ids)], expected, atol=TOLERANCE)
    of_prompt = got[np.arange(len(prompt) - 1), prompt[1:]]
    np.testing.assert_allclose(of_prompt, case["prompt_logprobs"][1:], atol=TOLERANCE)
