"""The decoder against float64 Llama, against transformers' figures, and against itself on pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax.attention import Batch
from pagedjax.errors import ModelFormatError
from pagedjax.kv_cache import init_kv_cache
from pagedjax.models import contract
from pagedjax.models.decoder import Decoder, ModelConfig
from pagedjax.weights import load_model
from tests.models import llama_reference
from tests.models.checkpoints import LENGTH, tiny_config, tiny_tensors, tiny_tokens, write_hf

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "llama_golden.json").read_text()
)
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "embed_dim": 24,
    "ffw_dim": 36,
    "num_layers": 2,
    "num_q_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_positions": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "multi_head": {"num_key_value_heads": 4},
    "one_kv_head": {"num_key_value_heads": 1},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {"rope_scaling": LLAMA3},
    "window": {"architectures": ["MistralForCausalLM"], "sliding_window": 5},
}


def load_tiny(directory: Path, changes: dict[str, Any], dtype: str = "float32") -> Decoder:
    config = tiny_config(**changes)
    write_hf(directory, config, tiny_tensors(config))
    model = load_model(directory, dtype=dtype).model
    assert isinstance(model, Decoder)
    return model


def packed(lengths: list[int], cached: list[int], page_size: int) -> tuple[Batch, np.ndarray]:
    """Metadata of a step: new tokens per sequence after so many in pages; pages are shuffled."""
    totals = np.add(lengths, cached)
    width = -(-LENGTH // page_size) + 1
    ids = np.random.default_rng(3).permutation(np.arange(1, 1 + width * len(lengths)))
    table = ids.reshape(len(lengths), width).astype(np.int32)
    positions = np.concatenate(
        [np.arange(start, start + n) for n, start in zip(lengths, cached, strict=True)]
    ).astype(np.int32)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    slots = table[rows, positions // page_size] * page_size + positions % page_size
    batch = Batch(
        page_table=jnp.asarray(table),
        kv_lens=jnp.asarray(totals, jnp.int32),
        cu_q_lens=jnp.asarray(np.cumsum([0, *lengths]), jnp.int32),
        num_seqs=jnp.asarray(len(lengths), jnp.int32),
        slot_mapping=jnp.asarray(slots, jnp.int32),
    )
    return batch, positions


@pytest.mark.parametrize("variant", VARIANTS)
def test_dense_logits_equal_float64_llama(variant: str, tmp_path: Path) -> None:
    config = tiny_config(**VARIANTS[variant])
    tokens = tiny_tokens(config)
    expected = llama_reference.logits(config, tiny_tensors(config), tokens)
    got = load_tiny(tmp_path, VARIANTS[variant]).dense(jnp.asarray(tokens))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("case", GOLDEN)
def test_dense_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    changes = GOLDEN[case]["changes"]
    tokens = tiny_tokens(tiny_config(**changes))
    got = load_tiny(tmp_path, changes).dense(jnp.asarray(tokens))
    np.testing.assert_allclose(got[-2:], GOLDEN[case]["last_logits"], atol=1e-5)


@pytest.mark.parametrize(("variant", "page_size"), [("plain", 1), ("window", 4), ("llama3", 16)])
def test_paged_equals_dense(variant: str, page_size: int, tmp_path: Path) -> None:
    model = load_tiny(tmp_path, VARIANTS[variant])
    tokens = np.stack([np.roll(tiny_tokens(tiny_config()), shift) for shift in (0, 5, 11)])
    expected = np.stack([model.dense(jnp.asarray(row)) for row in tokens])  # f32[3, LENGTH, V]
    cache = init_kv_cache(
        num_layers=2,
        num_pages=3 * (-(-LENGTH // page_size) + 1) + 1,
        num_kv_heads=2,
        page_size=page_size,
        head_dim=8,
        dtype=jnp.dtype(jnp.float32),
    )
    graphdef, state = nnx.split(model)

    @jax.jit
    def step(state: Any, tokens: Any, positions: Any, cache: Any, batch: Any) -> Any:
        model = nnx.merge(graphdef, state)
        hidden, cache = model(tokens, positions, cache, batch)
        return model.logits(hidden), cache

    # A chunk of each prompt, then the rest of two with one token of the third between.
    done = [0, 0, 0]
    for counts in ([9, 3, 10], [15, 1, 6]):  # as many tokens: one shape to compile
        batch, positions = packed(counts, done, page_size)
        rows = np.repeat(np.arange(3), counts)
        logits, cache = step(state, tokens[rows, positions], positions, cache, batch)
        np.testing.assert_allclose(logits, expected[rows, positions], atol=1e-5)
        done = [start + n for start, n in zip(done, counts, strict=True)]


def test_dense_takes_one_sequence_or_a_batch(tmp_path: Path) -> None:
    graphdef, state = nnx.split(load_tiny(tmp_path, {}))
    first = tiny_tokens(tiny_config())
    tokens = np.stack([first, first[::-1]])
    dense = jax.jit(lambda state, tokens: nnx.merge(graphdef, state).dense(tokens))
    both = dense(state, tokens)
    assert both.shape == (2, LENGTH, 40)
    for row, alone in zip(both, tokens, strict=True):
        np.testing.assert_allclose(row, dense(state, alone), atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_keep_float32_logits(dtype: str, tmp_path: Path) -> None:
    model = load_tiny(tmp_path, {}, dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(dtype)}
    config = tiny_config()
    tokens = tiny_tokens(config)
    got = model.dense(jnp.asarray(tokens))
    assert got.dtype == jnp.float32
    expected = llama_reference.logits(config, tiny_tensors(config), tokens)
    np.testing.assert_allclose(got, expected, atol=0.06)


def test_model_keeps_the_contract_that_any_model_keeps() -> None:
    model = Decoder(ModelConfig(**SIZES, attention_bias=True), rngs=nnx.Rngs(0))
    flat = contract.flatten(model)
    contract.check(flat, jnp.dtype(jnp.float32))
    assert (flat.num_layers, flat.num_kv_heads, flat.head_dim, flat.vocab_size) == (2, 2, 8, 40)


def test_random_weights_differ_and_without_rngs_are_zeros() -> None:
    random = Decoder(ModelConfig(**SIZES), rngs=nnx.Rngs(0))
    first, second = random.layers[0].down.weight[...], random.layers[1].down.weight[...]
    assert float(jnp.abs(first).max()) > 0
    assert not np.array_equal(first, second)
    assert not Decoder(ModelConfig(**SIZES)).embedding.weight[...].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_q_heads": 3}, "`num_q_heads` must be a multiple of `num_kv_heads` .2.. Got 3"),
        ({"head_dim": 7}, "`head_dim` must be even.*Got 7"),
        ({"vocab_size": 0}, "`vocab_size` must be an integer in"),
        ({"num_layers": 10**6}, "`num_layers` must be an integer in"),
        ({"norm_epsilon": 0.0}, "`norm_epsilon` must be between 0 and 1"),
        ({"sliding_window": 0}, "`sliding_window` must be an integer in"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        ModelConfig(**(SIZES | changes))
