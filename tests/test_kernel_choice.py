"""Which kernels an engine takes, and that it answers the same through all of them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import pallas_kernels
from pagedjax import LLM, ConfigError, SamplingParams, device, kernel_choice
from pagedjax.models import contract
from pallas_kernels.quantize import dequantize, quantize
from tests.helpers import ByteTokenizer, TinyLM
from tests.pallas_kernels import races

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
SIZES: dict[str, Any] = {
    "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16, "num_pages": 40,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=4, logprobs=1)


class Hopper(AbstractDevice):
    compute_capability = "9.0"


class Volta(AbstractDevice):
    compute_capability = "7.0"


@contextlib.contextmanager
def traced_for(chip: AbstractDevice) -> Iterator[None]:
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=chip)
    with pytest.MonkeyPatch.context() as patch, jax.sharding.use_abstract_mesh(mesh):
        patch.setattr(device, "platform", lambda: chip.platform)
        yield


def choose(chip: AbstractDevice, dtype: Any = BF16, page_size: int = 16, **options: Any) -> Any:
    model = contract.flatten(TinyLM(dtype=dtype))
    with traced_for(chip):
        return kernel_choice.choose(model, dtype, page_size, options.get("asked"))


HOPPER = Hopper("NVIDIA H200", 132, "gpu")
V5E = AbstractDevice("TPU v5 lite", 1, "tpu")


def test_each_device_gets_its_kernels_and_the_pool_their_width() -> None:
    gpu, tpu = choose(HOPPER), choose(V5E)
    assert (gpu.implementation, gpu.head_dim) == ("mosaic_gpu", 64)
    assert str(gpu) == "mosaic_gpu (the kernels for a GPU)"
    assert (tpu.implementation, tpu.head_dim) == ("mosaic_tpu", 128)


@pytest.mark.usefixtures("cpu_kernels")
def test_a_cpu_gets_its_own_kernels_where_they_can_run_the_model() -> None:
    for dtype in (F32, BF16):
        choice = kernel_choice.choose(contract.flatten(TinyLM(dtype=dtype)), dtype, 16, None)
        assert str(choice) == "native_cpu (the kernels for a CPU)"
        assert choice.head_dim == TinyLM.head_dim
    choice = kernel_choice.choose(contract.flatten(TinyLM()), jnp.dtype(jnp.int8), 16, None)
    assert choice.implementation == "xla"
    assert "native_cpu cannot run this: " in choice.reason
    assert "not float32 and int8" in choice.reason


@pytest.mark.usefixtures("cpu_kernels")
def test_nothing_is_known_of_the_kernels_of_a_cpu_that_is_not_here() -> None:
    choice = kernel_choice.choose(contract.flatten(TinyLM()), F32, 16, None, "cpu")
    assert choice.implementation == "xla"


@pytest.mark.usefixtures("no_cpu_kernels")
def test_a_cpu_without_its_own_kernels_gets_the_portable_one() -> None:
    model = contract.flatten(TinyLM())
    choice = kernel_choice.choose(model, F32, 16, None)
    assert str(choice) == "xla (the portable one; device is a CPU)"
    assert choice.head_dim == TinyLM.head_dim


@pytest.mark.parametrize(
    ("chip", "dtype", "page_size", "why"),
    [
        (HOPPER, F32, 16, "`q` must be bfloat16 or float16"),
        (HOPPER, BF16, 4, "page_size from 8 to 128"),
        (Volta("NVIDIA V100", 80, "gpu"), BF16, 16, "needs compute capability 8.0"),
        (V5E, BF16, 256, "page_size from 8 to 128"),
    ],
)
def test_what_the_kernels_cannot_run_goes_through_xla_and_the_report_says_why(
    chip: AbstractDevice, dtype: Any, page_size: int, why: str
) -> None:
    choice = choose(chip, dtype, page_size)
    assert (choice.implementation, choice.head_dim) == ("xla", TinyLM.head_dim)
    assert why in choice.reason


@pytest.mark.usefixtures("no_cpu_kernels")
def test_kernels_of_a_cpu_that_were_asked_for_are_never_replaced() -> None:
    with pytest.raises(ConfigError, match=r"Got 'native_cpu': .*kernels are not loaded"):
        kernel_choice.choose(contract.flatten(TinyLM()), F32, 16, "native_cpu")


def test_kernels_that_were_asked_for_are_never_replaced() -> None:
    with pytest.raises(ConfigError, match=r"Got 'mosaic_gpu': .*`q` must be bfloat16"):
        choose(HOPPER, F32, asked="mosaic_gpu")
    with pytest.raises(ConfigError, match=r"'mosaic_gpu' does not run on a CPU\. Use"):
        LLM(TinyLM(dtype=BF16), attention_implementation="mosaic_gpu")


def test_the_reference_is_refused_before_anything_is_compiled() -> None:
    with pytest.raises(
        ConfigError, match=r"one that can be compiled. Got 'reference', .*Use 'xla'"
    ):
        LLM(TinyLM(), attention_implementation="reference")


def test_a_cascade_needs_the_kernels() -> None:
    with pytest.raises(ConfigError, match=r"`cascade_attention` must be used with the Pallas"):
        LLM(TinyLM(), cascade_attention=True)


def logprobs(llm: LLM, prompts: list[str]) -> tuple[list[list[int]], np.ndarray]:
    outputs = [output.outputs[0] for output in llm.generate(prompts, GREEDY)]
    found = [
        [step[token].logprob for step, token in zip(o.logprobs or (), o.token_ids, strict=True)]
        for o in outputs
    ]
    return [o.token_ids for o in outputs], np.array(found)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_an_engine_on_quantised_pages_is_one_whose_keys_and_values_were_rounded(name: str) -> None:
    dtype = jnp.dtype({"fp8": jnp.float8_e4m3fn, "int8": jnp.int8}[name])

    class Rounded(TinyLM):
        def project(self, layer: int, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            q, k, v = super().project(layer, x)
            k, v = (dequantize(*quantize(a, dtype)) for a in (k, v))
            return q, k, v

    options: dict[str, Any] = {"tokenizer": ByteTokenizer(), "page_size": 4, **SIZES}
    llm = LLM(TinyLM(), kv_cache_dtype=name, **options)
    tokens, found = logprobs(llm, ["abcdefghij", "kl"])
    expected_tokens, expected = logprobs(LLM(Rounded(), **options), ["abcdefghij", "kl"])
    assert tokens == expected_tokens
    assert np.abs(found - expected).max() < 1e-4
    llm.engine.check_integrity()


def test_quantised_pages_hold_more() -> None:
    options: dict[str, Any] = {"tokenizer": ByteTokenizer(), "page_size": 4, **SIZES}
    report = LLM(TinyLM(), kv_cache_dtype="int8", **options).report
    per_vector = TinyLM.head_dim + 4  # a byte each, and a scale
    assert report.page_bytes == 2 * 2 * 2 * 4 * per_vector
    assert report.pool_bytes == 40 * report.page_bytes
    assert (report.dtype, report.kv_cache_dtype) == ("float32", "int8")


def interpreted(operation: Callable[..., Any], kind: str) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        if options["implementation"] != "xla":
            options |= {"implementation": kind, "interpret": True}
        return operation(*args, **options)

    return call


@pytest.mark.parametrize(
    ("kind", "cache"),
    [
        ("mosaic_gpu", "auto"),
        ("mosaic_tpu", "auto"),
        pytest.param("mosaic_gpu", "int8", marks=pytest.mark.slow),
        pytest.param("mosaic_tpu", "int8", marks=pytest.mark.slow),
    ],
)
def test_an_engine_on_interpreted_kernels_answers_as_one_on_xla(
    kind: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"max_model_len": 16, "max_num_seqs": 1, "max_num_batched_tokens": 4, "num_pages": 4}
    page_size = 128 if (kind, cache) == ("mosaic_tpu", "int8") else 8
    options: dict[str, Any] = {"tokenizer": ByteTokenizer(), "page_size": page_size, **sizes}
    model = TinyLM(dtype=BF16)
    expected_tokens, expected = logprobs(LLM(model, kv_cache_dtype=cache, **options), ["abcdef"])
    for name in ("paged_attention", "write_kv", "copy_pages"):
        monkeypatch.setattr(pallas_kernels, name, interpreted(getattr(pallas_kernels, name), kind))
    races.interpret_mma()
    llm = LLM(model, attention_implementation=kind, kv_cache_dtype=cache, **options)
    assert llm.report.attention == f"{kind} (asked for)"
    tokens, found = logprobs(llm, ["abcdef"])
    assert tokens == expected_tokens
    assert np.abs(found - expected).max() < 0.02  # one rounding of bfloat16
