"""Greedy answers over pages are the dense answers, whatever way the pages were filled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pagedjax import LLM, SamplingParams
from tests.helpers import VOCAB, ByteTokenizer, TinyLM, dense_greedy, dense_logprobs

NUM_NEW = 24
PAGE_SIZES = (1, 4, 16, 64)


POOL_TOKENS = 512  # enough for every test here but the one that wants preemption


@pytest.fixture(scope="module", params=PAGE_SIZES)
def llm(request: pytest.FixtureRequest) -> LLM:
    return LLM(
        TinyLM(),
        tokenizer=ByteTokenizer(),
        page_size=request.param,
        num_pages=1 + POOL_TOKENS // request.param,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=32,
    )


@pytest.fixture(autouse=True)
def _nothing_leaks(llm: LLM) -> Iterator[None]:
    yield
    llm.engine.check_integrity()
    assert llm.engine.reset_prefix_cache()


def greedy(**values: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_NEW, **values)


def prompts_around(page_size: int) -> list[list[int]]:
    rng = np.random.default_rng(page_size)
    lengths = {1, max(1, page_size - 1), page_size, page_size + 1, 50, 97}
    return [rng.integers(0, VOCAB, length).tolist() for length in sorted(lengths)]


def tokens_of(output: Any, sample: int = 0) -> list[int]:
    assert output.error is None
    return output.outputs[sample].token_ids


def test_a_request_alone_equals_dense(llm: LLM) -> None:
    for prompt in prompts_around(llm.report.page_size):
        assert tokens_of(llm.generate(prompt, greedy())[0]) == dense_greedy(prompt, NUM_NEW)


def test_a_batch_equals_dense(llm: LLM) -> None:
    prompts = prompts_around(llm.report.page_size)
    outputs = llm.generate(prompts, greedy())
    assert [tokens_of(o) for o in outputs] == [dense_greedy(p, NUM_NEW) for p in prompts]


def test_a_prompt_in_chunks_equals_dense(llm: LLM) -> None:
    prompt = np.random.default_rng(1).integers(0, VOCAB, 100).tolist()  # budget is 32 a step
    others = [[i] * 3 for i in range(1, 6)]
    outputs = llm.generate([*others, prompt], greedy())
    expected = [dense_greedy(p, NUM_NEW) for p in [*others, prompt]]
    assert [tokens_of(o) for o in outputs] == expected


def test_forked_samples_equal_dense(llm: LLM) -> None:
    for prompt in prompts_around(llm.report.page_size):
        output = llm.generate(prompt, greedy(n=4))[0]
        expected = dense_greedy(prompt, NUM_NEW)
        assert [tokens_of(output, sample) for sample in range(4)] == [expected] * 4


def test_forks_that_diverge_each_equal_dense_logprobs(llm: LLM) -> None:
    prompt = np.random.default_rng(3).integers(0, VOCAB, 21).tolist()
    params = SamplingParams(
        n=5, temperature=1.0, seed=7, max_tokens=NUM_NEW, ignore_eos=True, logprobs=0
    )
    output = llm.generate(prompt, params)[0]
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 5
    for sample in output.outputs:
        expected = dense_logprobs([*prompt, *sample.token_ids])
        assert sample.logprobs is not None
        for i, token in enumerate(sample.token_ids):
            got = sample.logprobs[i][token].logprob
            assert got == pytest.approx(expected[len(prompt) + i - 1, token], abs=1e-4)


def test_a_prefix_hit_equals_dense(llm: LLM) -> None:
    page_size = llm.report.page_size
    prefix = np.random.default_rng(2).integers(0, VOCAB, 70).tolist()
    llm.generate(prefix, greedy())
    for extra in ([], [3], [5, 6, 7]):
        prompt = [*prefix, *extra]
        output = llm.generate(prompt, greedy())[0]
        shared = min(len(prefix), len(prompt) - 1)
        assert output.num_cached_tokens == shared // page_size * page_size
        assert tokens_of(output) == dense_greedy(prompt, NUM_NEW)


def test_prompt_logprobs_equal_dense(llm: LLM) -> None:
    prompt = np.random.default_rng(4).integers(0, VOCAB, 45).tolist()
    output = llm.generate(prompt, greedy(prompt_logprobs=3, logprobs=3))[0]
    expected = dense_logprobs(prompt)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for i, entry in enumerate(output.prompt_logprobs[1:], 1):
        assert entry is not None
        best = np.argsort(-expected[i - 1], kind="stable")[:3]
        assert set(entry) == {prompt[i], *best.tolist()}
        for token, logprob in entry.items():
            assert logprob.logprob == pytest.approx(expected[i - 1, token], abs=1e-4)


def test_preempted_requests_equal_dense(llm: LLM) -> None:
    """Eight requests want 900 positions of a pool that has 512."""
    rng = np.random.default_rng(5)
    prompts = [
        rng.integers(0, VOCAB, length).tolist() for length in (50, 45, 60, 48, 53, 27, 61, 56)
    ]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=64)
    before = llm.engine.scheduler.stats.num_preemptions
    outputs = llm.generate(prompts, params)
    assert llm.engine.scheduler.stats.num_preemptions > before
    assert [tokens_of(o) for o in outputs] == [dense_greedy(p, 64) for p in prompts]
