"""Weights in eight bits: the rule, its bounds, what is loaded from files, and a model that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from pagedjax import LLM, SamplingParams
from pagedjax.errors import ConfigError
from pagedjax.models import contract
from pagedjax.models.decoder import Decoder, ModelConfig
from pagedjax.models.layers import Linear
from pagedjax.weights import load_model
from pagedjax.weights.quantize import quantize_rows
from pallas_kernels.quantize import quantize
from tests.helpers import TinyLM
from tests.models import llama_reference
from tests.models.checkpoints import Tensors, tiny_config, tiny_tensors, tiny_tokens, write_hf
from tests.tiny_checkpoint import ENGINE, tiny_checkpoint
from tests.weights.test_gguf import CONFIG, parameters, to_gguf, write_gguf

DTYPES = {"int8": jnp.dtype(jnp.int8), "float8": jnp.dtype(jnp.float8_e4m3fn)}
SEED = 14  # of weights with which no greedy choice is close
ROUNDING = 1e-6  # relative, of float32 arithmetic
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def rows_of_all_sizes(rng: np.random.Generator) -> np.ndarray:
    """f32[64, 48], rows of very different size, each with small numbers in it."""
    rows = rng.normal(0, 1, (64, 48)) * np.logspace(-6, 6, 64)[:, None]
    return (rows * rng.choice([1, 1e-2, 1e-4], rows.shape)).astype(np.float32)


def read_back(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return values.astype(np.float64) * scales.astype(np.float64)[:, None]


def most_error(rows: np.ndarray, quantization: str) -> np.ndarray:
    """What the definition of each type allows: half a step of int8, 3 bits of float8."""
    largest = np.abs(rows).max(axis=-1, keepdims=True).astype(np.float64)
    if quantization == "int8":
        return np.broadcast_to(largest / 254, rows.shape) * (1 + ROUNDING)
    return np.maximum(np.abs(rows) / 16, largest / 448 / 2**10) * (1 + ROUNDING)


def in_eight_bits(tensors: Tensors, quantization: str) -> Tensors:
    """What a quantised model should stand for, by rounding of its own: float64 projections."""

    def rounded(rows: np.ndarray) -> np.ndarray:
        rows = rows.astype(np.float64)
        scale = np.abs(rows).max(axis=-1, keepdims=True) / (127 if quantization == "int8" else 448)
        if quantization == "int8":
            return np.round(rows / scale) * scale
        # From float64 by way of float32 could round twice; no number here is that near a tie.
        return (rows / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale

    return {
        name: rounded(tensor) if tensor.ndim == 2 and name.split(".")[-2] in PROJECTIONS else tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("quantization", DTYPES)
def test_weights_are_rounded_as_pages_are(quantization: str, rng: np.random.Generator) -> None:
    rows = rows_of_all_sizes(rng)
    rows[3], rows[5, 7], rows[6, 0], rows[8] = 0, np.inf, np.nan, 1e-38
    values, scales = quantize_rows(rows, DTYPES[quantization])
    expected, expected_scales = quantize(jnp.asarray(rows), DTYPES[quantization])
    assert (values.dtype, scales.dtype) == (DTYPES[quantization], np.float32)
    np.testing.assert_array_equal(values.view(np.uint8), np.asarray(expected).view(np.uint8))
    np.testing.assert_array_equal(scales, expected_scales)
    assert np.isnan(scales[[5, 6]]).all()
    assert scales[3] == scales[8] == 1


@pytest.mark.parametrize("quantization", DTYPES)
def test_each_number_comes_back_within_half_a_step(
    quantization: str, rng: np.random.Generator
) -> None:
    rows = rows_of_all_sizes(rng)
    error = np.abs(read_back(*quantize_rows(rows, DTYPES[quantization])) - rows)
    allowed = most_error(rows, quantization)
    assert (error <= allowed).all()
    assert (error / allowed).max() > 0.9  # the bound is no larger than the rule needs


def test_what_eight_bits_hold_comes_back_exactly() -> None:
    rows = np.arange(-127, 128, dtype=np.float32)[None] * 2.0**-10
    np.testing.assert_array_equal(read_back(*quantize_rows(rows, jnp.int8)), rows)
    eighths = np.asarray([[448, 240, -15, 2**-6, 2**-9, 0]], np.float32)
    np.testing.assert_array_equal(read_back(*quantize_rows(eighths, "float8_e4m3fn")), eighths)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("quantization", DTYPES)
def test_a_product_is_off_by_what_its_weights_are(
    quantization: str, dtype: str, rng: np.random.Generator
) -> None:
    rows = rng.normal(0, 1, (40, 48)).astype(np.float32)
    bias = rng.normal(0, 1, 40).astype(np.float32)
    x = jnp.asarray(rng.normal(0, 1, (5, 48)), dtype)
    values, scales = quantize_rows(rows, DTYPES[quantization])
    linear = Linear(
        48,
        40,
        use_bias=True,
        dtype=jnp.dtype(jnp.float32),
        weight_dtype=DTYPES[quantization],
        rngs=None,
    )
    assert linear.scale is not None
    assert linear.bias is not None
    linear.weight[...], linear.scale[...] = jnp.asarray(values), jnp.asarray(scales)
    linear.bias[...] = jnp.asarray(bias)
    got = np.asarray(linear(x).astype(jnp.float32), np.float64)
    wide = np.asarray(x.astype(jnp.float32), np.float64)
    step = float(jnp.finfo(x.dtype).eps)
    # Nothing but the weights was rounded before the result was.
    exact = wide @ read_back(values, scales).T + bias
    np.testing.assert_allclose(got, exact, rtol=step, atol=2e-5)
    allowed = np.abs(wide) @ most_error(rows, quantization).T
    assert (np.abs(got - (wide @ rows.T + bias)) <= allowed + step * np.abs(exact) + 2e-5).all()


@pytest.mark.parametrize("quantization", DTYPES)
def test_a_step_widens_one_matrix_at_a_time(quantization: str) -> None:
    """Of twelve; all of them at once would take more memory than weights that were never packed."""
    width, depth = 128, 12
    arguments: dict[str, Any] = {
        "dtype": jnp.dtype(jnp.bfloat16),
        "weight_dtype": DTYPES[quantization],
    }
    layers = nnx.List([Linear(width, width, rngs=None, **arguments) for _ in range(depth)])
    graphdef, state = nnx.split(layers)

    def step(state: Any, x: jax.Array) -> jax.Array:
        for layer in nnx.merge(graphdef, state):
            x = layer(x)
        return x

    compiled = jax.jit(step).lower(state, jnp.zeros((8, width), jnp.bfloat16)).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    matrix = width * width * 2
    assert analysis.temp_size_in_bytes < 2 * matrix


@pytest.mark.parametrize("quantization", DTYPES)
def test_logits_are_those_of_the_rounded_weights(quantization: str, tmp_path: Path) -> None:
    config = tiny_config(attention_bias=True, mlp_bias=True)
    tensors, tokens = tiny_tensors(config), tiny_tokens(config)
    loaded = load_model(write_hf(tmp_path, config, tensors), quantization=quantization)
    expected = llama_reference.logits(config, in_eight_bits(tensors, quantization), tokens)
    assert isinstance(loaded.model, Decoder)
    got = np.asarray(loaded.model.dense(jnp.asarray(tokens)))
    np.testing.assert_allclose(got, expected, atol=2e-5)
    plain = llama_reference.logits(config, tensors, tokens)
    off = np.abs(got - plain).max() / np.abs(plain).max()
    assert 1e-3 < off < (0.03 if quantization == "int8" else 0.15)  # 0.008 and 0.046 here


@pytest.mark.parametrize("quantization", DTYPES)
def test_both_formats_give_the_same_parameters(quantization: str, tmp_path: Path) -> None:
    tensors = tiny_tensors(CONFIG)
    hf = load_model(write_hf(tmp_path / "hf", CONFIG, tensors), quantization=quantization)
    path = write_gguf(tmp_path / "tiny.gguf", to_gguf(tensors, CONFIG))
    gguf = load_model(path, quantization=quantization)
    expected, got = parameters(hf), parameters(gguf)
    assert expected.keys() == got.keys()
    for name, array in expected.items():
        assert array.dtype == got[name].dtype
        np.testing.assert_array_equal(array.view(np.uint8), got[name].view(np.uint8), name)
    assert (hf.num_bytes, hf.dtype) == (gguf.num_bytes, jnp.dtype(jnp.float32))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16", "BF16"])
def test_packed_files_are_rounded_from_their_own_numbers(kind: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", to_gguf(tiny_tensors(CONFIG), CONFIG), kind=kind)
    wide = parameters(load_model(path, dtype="float32"))["layers.1.gate_up.weight"]
    # Not by way of `dtype`: bfloat16 keeps 8 bits of each number, which the largest lacks here.
    got = parameters(load_model(path, dtype="bfloat16", quantization="int8"))
    values, scales = quantize_rows(wide, jnp.int8)
    np.testing.assert_array_equal(got["layers.1.gate_up.weight"], values)
    np.testing.assert_array_equal(got["layers.1.gate_up.scale"], scales)


@pytest.mark.parametrize("quantization", DTYPES)
def test_only_the_layers_matrices_are_quantised_and_bytes_are_counted(
    quantization: str, tmp_path: Path
) -> None:
    config = tiny_config(attention_bias=True, mlp_bias=True)
    write_hf(tmp_path, config, tiny_tensors(config))
    done: list[tuple[int, int]] = []
    loaded = load_model(
        tmp_path,
        dtype="bfloat16",
        quantization=quantization,
        progress=lambda *figures: done.append(figures),
    )
    got = parameters(loaded)
    narrow = {name for name, array in got.items() if array.dtype == DTYPES[quantization]}
    names = [f"layers.{i}.{part}" for i in (0, 1) for part in ("qkv", "out", "gate_up", "down")]
    assert narrow == {f"{name}.weight" for name in names}
    scales = {name for name, array in got.items() if array.dtype == np.float32}
    assert scales == {f"{name}.scale" for name in names}
    assert {str(got[name].dtype) for name in got.keys() - narrow - scales} == {"bfloat16"}
    plain = load_model(tmp_path, dtype="bfloat16").num_bytes
    weights, outputs = 24 * (64 + 2 * 36) + 32 * 24 + 36 * 24, 64 + 24 + 2 * 36 + 24  # of a layer
    assert loaded.num_bytes == plain - 2 * weights + 2 * outputs * 4
    assert done[-1] == (loaded.num_bytes, loaded.num_bytes)
    flat = contract.flatten(loaded.model)
    assert (flat.num_bytes, str(flat.dtype)) == (loaded.num_bytes, "bfloat16")


@pytest.mark.parametrize(("quantization", "dtype"), [("int8", "float32"), ("fp8", "bfloat16")])
def test_an_engine_answers_with_quantised_weights(
    quantization: str, dtype: str, tmp_path: Path
) -> None:
    config = tiny_config(num_hidden_layers=1)
    tensors = tiny_tensors(config, SEED)
    tiny_checkpoint(tmp_path, SEED)
    llm = LLM(tmp_path, dtype=dtype, quantization=quantization, **ENGINE)
    report = llm.report
    assert (report.quantization, report.dtype) == (quantization, dtype)
    assert report.kv_cache_dtype == dtype
    alone = load_model(tmp_path, dtype=dtype, quantization=quantization)
    assert report.weights_bytes == alone.num_bytes
    assert f"weights in {quantization} " in report.lines()[0]
    prompt = [5, 9, 3]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    got = llm.generate([prompt], params)[0].outputs[0].token_ids
    name = "int8" if quantization == "int8" else "float8"
    expected, margin = greedy(config, in_eight_bits(tensors, name), prompt, 6)
    assert margin > 0.05  # else bfloat16's rounding may decide
    assert got == expected == greedy(config, tensors, prompt, 6)[0]
    assert len(set(got)) == 6


def greedy(
    config: dict[str, Any], tensors: Tensors, prompt: list[int], count: int
) -> tuple[list[int], float]:
    """Tokens by float64 logits, and by how much the nearest second was beaten."""
    tokens, margin = list(prompt), np.inf
    for _ in range(count):
        logits = llama_reference.logits(config, tensors, np.asarray(tokens))[-1]
        second, first = np.sort(logits)[-2:]
        margin = min(margin, float(first - second))
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :], margin


def test_random_models_can_be_quantised_too() -> None:
    config = ModelConfig(
        vocab_size=40,
        embed_dim=24,
        ffw_dim=36,
        num_layers=1,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_positions=64,
    )
    plain = Decoder(config, rngs=nnx.Rngs(0))
    narrow = Decoder(config, weight_dtype=jnp.int8, rngs=nnx.Rngs(0))
    values, scales = quantize_rows(np.asarray(plain.layers[0].down.weight[...]), jnp.int8)
    np.testing.assert_array_equal(narrow.layers[0].down.weight[...], values)
    assert narrow.layers[0].down.scale is not None
    np.testing.assert_array_equal(narrow.layers[0].down.scale[...], scales)
    contract.check(contract.flatten(narrow), jnp.dtype(jnp.float32))


def test_a_model_of_ones_own_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`quantization` must be used with a model.*a TinyLM"):
        LLM(TinyLM(), quantization="int8")


@pytest.mark.parametrize("wrong", ["int4", "", None, 8])
def test_other_types_are_refused(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`quantization` must be one of none, int8, float8, fp8"):
        load_model(tmp_path, quantization=wrong)
