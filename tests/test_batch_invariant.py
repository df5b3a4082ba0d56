"""`batch_invariant=True`: the same bits, whatever else runs and becomes of a request's pages."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import LLM, SamplingParams
from pagedjax.config import EngineConfig
from pagedjax.engine import LLMEngine
from pagedjax.errors import ConfigError
from pagedjax.scheduler import Scheduler
from tests.helpers import VOCAB, ByteTokenizer, TinyLM
from tests.tiny_engine import HOST_PAGES, drain

DTYPES = ["float32", "bfloat16"]
PAGE_SIZE = 4


@functools.cache
def llm(dtype: str, *, is_invariant: bool = True) -> LLM:
    return LLM(
        TinyLM(dtype=jnp.dtype(dtype)),
        tokenizer=ByteTokenizer(),
        page_size=PAGE_SIZE,
        num_pages=129,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        batch_invariant=is_invariant,
        swap_space=HOST_PAGES * PAGE_SIZE * 256 / 2**30,
    )


def engine_of(
    dtype: str, *, is_invariant: bool = True, async_scheduling: bool = True, **sizes: Any
) -> LLMEngine:
    """A fresh engine, without a host pool unless asked, over programs that are compiled once."""
    shared = llm(dtype, is_invariant=is_invariant).engine
    config = replace(shared.scheduler.config, **{"num_host_pages": 0, **sizes})
    return LLMEngine(
        Scheduler(config),
        shared.runner,
        ByteTokenizer(),
        seed=5,
        async_scheduling=async_scheduling,
    )


def params(seed: int, **changes: Any) -> SamplingParams:
    """Draws with everything that the sampler reads logits for."""
    drawn = {"temperature": 0.8, "top_k": 12, "top_p": 0.95, "presence_penalty": 0.3}
    shared = {"seed": seed, "max_tokens": 24, "ignore_eos": True, "logprobs": 5}
    return SamplingParams(**{**drawn, **shared, **changes})


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


ASKED: dict[str, tuple[list[int], SamplingParams]] = {
    "short": (prompt(1, 3), params(1)),
    "long": (prompt(2, 61), params(2, prompt_logprobs=3)),
    "greedy": (prompt(3, 30), params(3, temperature=0.0)),
    "forked": (prompt(4, 14), params(4, n=3)),
}


def answer_of(output: Any) -> Any:
    """Tokens and the bits of all logprobs; floats are compared as what they are."""
    assert output.error is None
    samples = [
        (sample.token_ids, sample.cumulative_logprob, sample.logprobs) for sample in output.outputs
    ]
    return samples, output.prompt_logprobs


def alone(dtype: str, name: str, *, is_invariant: bool = True) -> Any:
    engine = engine_of(dtype, is_invariant=is_invariant)
    engine.add_request(name, *ASKED[name])
    return answer_of(drain(engine)[name])


def together(
    engine: LLMEngine, others: Mapping[str, tuple[list[int], SamplingParams]], delay: int = 0
) -> dict[str, Any]:
    """All that is asked among others, each request `delay` steps after the one before."""
    outputs: dict[str, Any] = {}
    for name, (tokens, each) in {**others, **ASKED}.items():
        engine.add_request(name, tokens, each)
        for _ in range(delay):
            outputs |= {output.request_id: output for output in engine.step()}
    outputs |= drain(engine)
    return {name: answer_of(outputs[name]) for name in ASKED}


def crowd(seed: int, count: int) -> dict[str, tuple[list[int], SamplingParams]]:
    rng = np.random.default_rng(seed)
    return {
        f"other {i}": (prompt(100 * seed + i, int(rng.integers(1, 70))), params(i, logprobs=None))
        for i in range(count)
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("seed", "delay", "sizes"),
    [
        (1, 0, {}),
        (2, 1, {}),
        (3, 3, {"enable_prefix_caching": False}),
        (4, 0, {"num_pages": 33}),
        (5, 1, {"num_pages": 40, "num_host_pages": 40, "preemption_mode": "swap"}),
        (6, 0, {"num_pages": 33, "num_host_pages": 9, "enable_prefix_caching": False}),
        (7, 2, {"num_pages": 50, "victim_policy": "least_cost"}),
    ],
)
def test_the_bits_of_a_request_do_not_depend_on_what_else_runs(
    dtype: str, seed: int, delay: int, sizes: dict[str, Any]
) -> None:
    found = together(engine_of(dtype, **sizes), crowd(seed, 9), delay)
    for name in ASKED:
        assert found[name] == alone(dtype, name), name


def test_a_pool_under_pressure_was_tried() -> None:
    engine = engine_of("float32", num_pages=33)
    together(engine, crowd(4, 9))
    assert engine.scheduler.stats.num_preemptions > 3
    engine = engine_of("float32", num_pages=40, num_host_pages=40, preemption_mode="swap")
    together(engine, crowd(5, 9), 1)
    assert engine.scheduler.stats.swap.num_pages_in > 3


@pytest.mark.usefixtures("no_cpu_kernels")
def test_without_it_bits_do_depend_on_what_else_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this file compares can tell the difference (XLA's products and attention have one)."""
    monkeypatch.setenv("PAGEDJAX_CPU_KERNELS", "0")
    engine = engine_of("float32", is_invariant=False)
    found = together(engine, crowd(1, 9))
    assert any(found[name] != alone("float32", name, is_invariant=False) for name in ASKED)


def test_every_step_is_one_program() -> None:
    runner = llm("float32").engine.runner
    config = llm("float32").engine.scheduler.config
    assert config.buckets == (32,)
    assert len(runner.programs.log) == 2 + 1 + 1 + 2 + 4  # pyright: ignore[reportAttributeAccessIssue]
    assert not config.is_decode_bucket(32)
    assert config.bucket_for(1, 1, decode_only=True) == 32


def test_it_is_refused_beside_a_cascade() -> None:
    with pytest.raises(ConfigError, match="`batch_invariant` must be used without `cascade_att"):
        EngineConfig(batch_invariant=True, cascade_attention=True)


def test_the_default_step_is_a_small_one() -> None:
    made = LLM(
        TinyLM(), batch_invariant=True, page_size=4, num_pages=65, max_model_len=64, max_num_seqs=2
    )
    assert made.report.max_num_batched_tokens == 64
    assert made.report.buckets == (64,)
