"""One compiled tiny engine for all tests of a process, and fresh engines over its programs.

An engine is a scheduler, a runner and some dictionaries; only the runner costs seconds. So each
test may have an engine of its own, with other seeds, tokenizers, ends or a smaller pool, over the
one runner. What earlier tests left in pages and sampler rows is part of the test.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pagedjax import LLM, RequestOutput, SamplingParams
from pagedjax.engine import LLMEngine
from pagedjax.intake import Prompt
from pagedjax.scheduler import Scheduler
from pagedjax.tokenizer import Tokenizer
from tests.helpers import ByteTokenizer, TinyLM

POOL_TOKENS = 512
HOST_PAGES = 64
EOS = ByteTokenizer.eos_token_ids


def tiny_llm(page_size: int = 4) -> LLM:
    """Eight sequences, steps of 32 tokens; the shapes that other tests compile, too."""
    return _tiny_llm(page_size)


@functools.cache
def _tiny_llm(page_size: int) -> LLM:
    return LLM(
        TinyLM(),
        tokenizer=ByteTokenizer(),
        page_size=page_size,
        num_pages=1 + POOL_TOKENS // page_size,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        swap_space=HOST_PAGES * page_size * 256 / 2**30,  # 256 bytes a position
    )


def tiny_engine(
    *,
    page_size: int = 4,
    tokenizer: Tokenizer | None = None,
    has_text: bool = True,
    seed: int = 0,
    eos_token_ids: frozenset[int] = EOS,
    async_scheduling: bool = True,
    **sizes: Any,
) -> LLMEngine:
    """A fresh engine over the shared programs; `sizes` shrinks its part of the pool.

    There is no host pool unless `num_host_pages`, up to HOST_PAGES, asks for it.
    """
    shared = tiny_llm(page_size).engine
    config = replace(shared.scheduler.config, **{"num_host_pages": 0, **sizes})
    return LLMEngine(
        Scheduler(config),
        shared.runner,
        (tokenizer or ByteTokenizer()) if has_text else None,
        seed=seed,
        eos_token_ids=eos_token_ids,
        async_scheduling=async_scheduling,
    )


def drain(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Steps until nothing is in flight; outputs by request id."""
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        for output in engine.step():
            assert output.request_id not in outputs
            outputs[output.request_id] = output
    engine.check_integrity()
    return outputs


def until_interrupted(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Steps until one raises `KeyboardInterrupt`, which one must; outputs so far by request id."""
    outputs: dict[str, RequestOutput] = {}

    def step_on() -> None:
        while engine.has_unfinished:
            outputs.update({output.request_id: output for output in engine.step()})

    with pytest.raises(KeyboardInterrupt):
        step_on()
    return outputs


def answer(
    engine: LLMEngine, prompt: Prompt, params: SamplingParams, request_id: str = "a"
) -> RequestOutput:
    """One request alone, which must not fail."""
    engine.add_request(request_id, prompt, params)
    output = drain(engine)[request_id]
    assert output.error is None
    return output


def answers(
    engine: LLMEngine, requests: Mapping[str, tuple[Prompt, SamplingParams]]
) -> dict[str, RequestOutput]:
    """Several requests at once."""
    for request_id, (prompt, params) in requests.items():
        engine.add_request(request_id, prompt, params)
    return drain(engine)


def tokens_of(output: RequestOutput, sample: int = 0) -> list[int]:
    """The generated ids of one sample."""
    return output.outputs[sample].token_ids
