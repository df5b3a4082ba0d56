"""The compiled steps: donation, memory, packing, and the order of what a step does."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import SamplingParams
from pagedjax import runner as runner_module
from pagedjax.config import SchedulerConfig
from pagedjax.errors import TransferError
from pagedjax.host_pool import MovePrograms
from pagedjax.kv_cache import KVCache
from pagedjax.models import contract
from pagedjax.packing import PackedLayout
from pagedjax.plan import (
    NO_TARGET,
    PageCopy,
    PageMove,
    RowUpdate,
    SamplingRows,
    StepPlan,
    StepResult,
)
from pagedjax.rates import MovingMedian, Rates
from pagedjax.runner import ModelRunner
from tests.helpers import VOCAB, TinyLM, dense_greedy
from tests.tiny_engine import answers, drain, tiny_engine, tiny_llm, tokens_of

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
F32 = jnp.dtype(jnp.float32)


@contextmanager
def compilations() -> Iterator[Counter[str]]:
    """Counts what JAX compiles (or fetches compiled) meanwhile."""
    count: Counter[str] = Counter()

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        del duration_secs, kwargs
        if event == COMPILE_EVENT:
            count["compiled"] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def runner() -> ModelRunner:
    found = tiny_llm().engine.runner
    assert isinstance(found, ModelRunner)
    return found


class Recorder:
    """Stands in for the runner and keeps the plans."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> Any:
        self.plans.append(plan)
        return self.runner.launch(plan)

    def recover(self) -> bool:
        return self.runner.recover()


def run(runner: ModelRunner, plan: StepPlan) -> StepResult:
    """Launches a step and waits for it."""
    return runner.launch(plan)()


def recorded_plans() -> list[StepPlan]:
    """Steps of a small workload with forks, penalties and prompt logprobs in it."""
    # One step at a time, so that each plan says all its tokens itself.
    engine = tiny_engine(async_scheduling=False)
    engine.runner = recorder = Recorder(engine.runner)
    params = SamplingParams(max_tokens=5, n=3, seed=1, presence_penalty=1.0, prompt_logprobs=2)
    answers(engine, {"a": ([1, 2, 3, 4, 5], params), "b": ([7] * 40, SamplingParams(seed=2))})
    assert any(plan.copies for plan in recorder.plans)
    assert any(plan.row_updates for plan in recorder.plans)
    return recorder.plans


# --------------------------------------------------------------------------------- nothing compiles


def test_the_counter_of_compilations_counts() -> None:
    with compilations() as count:
        jax.jit(lambda x: x * 3 + 1)(jnp.arange(5, dtype=jnp.float32))
    assert count["compiled"] > 0


def test_no_kind_of_step_compiles_after_warm_up() -> None:
    tiny_llm()
    with compilations() as count:
        plans = recorded_plans()
    assert len({plan.bucket for plan in plans}) > 2
    assert count["compiled"] == 0


def test_warm_up_compiles_each_program_once(runner: ModelRunner) -> None:
    config = tiny_llm().engine.scheduler.config
    # Pools, rows; a sampler, copy, row update; gather and scatter of two widths.
    assert len(runner.programs.log) == 2 + len(config.buckets) + 1 + 2 + 4


def test_a_step_before_warm_up_is_an_error() -> None:
    plan = recorded_plans()[0]
    config = tiny_llm().engine.scheduler.config
    cold = ModelRunner(contract.flatten(TinyLM()), config, cache_dtype=F32)
    assert [it.name for it in cold.programs.log] == ["page pool of a layer", "sampler's rows"]
    with pytest.raises(KeyError):
        run(cold, replace(plan, copies=(), row_updates=()))
    with pytest.raises(RuntimeError, match="`warm_up` must be called before `run`"):
        run(cold, replace(plan, copies=(PageCopy(1, 2),)))
    with pytest.raises(RuntimeError, match="`warm_up` must be called before `run`"):
        run(cold, replace(plan, copies=(), row_updates=(empty_row(0),)))


# -------------------------------------------------------------------------------------- donation


def empty_row(slot: int) -> RowUpdate:
    return RowUpdate(slot, {}, None, {}, frozenset())


def pointers(arrays: Any) -> list[int]:
    return [array.unsafe_buffer_pointer() for array in jax.tree.leaves(arrays)]


def test_every_step_reuses_the_pools_buffers(runner: ModelRunner) -> None:
    plans = recorded_plans()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "Some donated buffers were not usable"
        for plan in plans:
            pools, state = runner.kv_cache, runner._sampler
            before = pointers(pools), pointers(state)
            run(runner, plan)
            assert all(pool.is_deleted() for pool in pools.kv_pages)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
            assert (pointers(runner.kv_cache), pointers(runner._sampler)) == before


def test_a_stale_handle_raises_when_it_is_read(runner: ModelRunner) -> None:
    stale = runner.kv_cache.kv_pages[0]
    run(runner, recorded_plans()[0])
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(stale)


def test_copies_and_row_updates_reuse_the_buffers(runner: ModelRunner) -> None:
    pools, before = runner.kv_cache, pointers(runner.kv_cache)
    runner._run_copies((PageCopy(1, 2),))
    assert all(pool.is_deleted() for pool in pools.kv_pages)
    assert pointers(runner.kv_cache) == before
    state, before = runner._sampler, pointers(runner._sampler)
    runner._run_row_update(empty_row(3))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert pointers(runner._sampler) == before


def test_no_forward_pass_holds_a_second_pool() -> None:
    config = SchedulerConfig(
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=64,
        page_size=4,
        num_pages=8001,
        vocab_size=VOCAB,
    )
    runner = ModelRunner(contract.flatten(TinyLM()), config, cache_dtype=F32)
    one_pool = runner.kv_cache.kv_pages[0].nbytes  # a layer's
    assert one_pool == 8001 * 2 * 2 * 4 * 8 * 4
    assert config.buckets == (1, 2, 16)
    for bucket in config.buckets:
        memory = runner.lower_forward(bucket).compile().memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < one_pool / 4
        assert memory.alias_size_in_bytes >= runner.kv_cache.nbytes
        outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
        assert outputs < one_pool / 4
    assert 0 < runner.temp_bytes(2) < one_pool / 4


# ----------------------------------------------------------------------------- what a step does


def fill(runner: ModelRunner, seed: int) -> list[np.ndarray]:
    """Puts random numbers in all pages; returns them."""
    rng = np.random.default_rng(seed)
    pools = [rng.normal(size=pool.shape).astype(np.float32) for pool in runner.kv_cache.kv_pages]
    runner.kv_cache = KVCache(tuple(jnp.array(pool) for pool in pools))
    return pools


def idle_plan(runner: ModelRunner) -> StepPlan:
    """A real plan whose writes are dropped."""
    plan = next(plan for plan in recorded_plans() if not plan.copies and not plan.row_updates)
    config = tiny_llm().engine.scheduler.config
    past = config.num_pages * config.page_size + np.arange(plan.bucket, dtype=np.int32)
    return replace(plan, slot_mapping=past)


def test_a_step_behind_another_is_timed_from_the_end_of_that_one(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its tokens would seem to cost what two steps take."""
    times = iter([0.0, 1.0, 10.0, 10.0, 12.0, 12.0])  # two launches, then each result and its note
    config = tiny_llm().engine.scheduler.config
    is_full = [not config.is_decode_bucket(p.bucket) and p.num_tokens * 2 > p.bucket
               for p in recorded_plans()]  # fmt: skip
    plan = replace(recorded_plans()[is_full.index(True)], copies=(), row_updates=())
    noted = MovingMedian()
    monkeypatch.setattr(runner, "_seconds_per_token", noted)
    monkeypatch.setattr(runner_module.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(runner, "_last_read", -1.0)
    first, second = runner.launch(plan), runner.launch(plan)
    first()
    assert noted.value == 10.0 / plan.num_tokens
    second()
    assert noted.value == (10.0 + 2.0) / 2 / plan.num_tokens


def test_all_copies_of_a_step_are_done_and_nothing_else(runner: ModelRunner) -> None:
    plan = idle_plan(runner)
    pools = fill(runner, 0)
    copies = tuple(PageCopy(1 + i, 60 + 2 * i) for i in range(21))  # more than one batch of copies
    run(runner, replace(plan, copies=copies))
    for pool, got in zip(pools, runner.kv_cache.kv_pages, strict=True):
        for copy in copies:
            pool[copy.dst] = pool[copy.src]
        np.testing.assert_array_equal(np.asarray(got), pool)


def test_copies_come_before_the_steps_writes(runner: ModelRunner) -> None:
    plan = next(plan for plan in recorded_plans() if plan.copies)
    pools = fill(runner, 1)
    run(runner, plan)
    written = {int(at) // 4 for at in plan.slot_mapping[: plan.num_tokens]}
    assert {copy.dst for copy in plan.copies} & written
    for pool, got in zip(pools, runner.kv_cache.kv_pages, strict=True):
        for copy in plan.copies:
            pool[copy.dst] = pool[copy.src]
        after = np.asarray(got)
        places = {divmod(int(at), 4) for at in plan.slot_mapping[: plan.num_tokens]}
        for page in range(len(pool)):
            for offset in range(4):
                is_same = np.array_equal(after[page, :, :, offset], pool[page, :, :, offset])
                assert is_same == ((page, offset) not in places), (page, offset)


def test_swaps_out_come_before_swaps_in_and_those_before_copies(runner: ModelRunner) -> None:
    """One page goes out, gets another's content from the host, and that is copied on."""
    plan = idle_plan(runner)
    pools = fill(runner, 4)
    run(runner, replace(plan, swaps_out=(PageMove(20, 1), PageMove(21, 2))))
    run(
        runner,
        replace(
            plan,
            swaps_out=(PageMove(22, 3),),
            swaps_in=(PageMove(22, 1), PageMove(23, 2)),
            copies=(PageCopy(22, 30), PageCopy(23, 31)),
        ),
    )
    result = run(runner, replace(plan, swaps_in=(PageMove(40, 3),)))
    assert result.lost_host_pages == frozenset()
    for pool, got in zip(pools, runner.kv_cache.kv_pages, strict=True):
        pool[40] = pool[22]
        pool[22], pool[23] = pool[20], pool[21]
        pool[30], pool[31] = pool[22], pool[23]
        np.testing.assert_array_equal(np.asarray(got), pool)


def test_nothing_compiles_when_pages_move(runner: ModelRunner) -> None:
    plan = idle_plan(runner)
    out = tuple(PageMove(i, i) for i in range(1, 60))
    with compilations() as count:
        run(runner, replace(plan, swaps_out=out[:3]))
        run(runner, replace(plan, swaps_out=out[3:], swaps_in=out[:3]))
        run(runner, replace(plan, swaps_in=out[3:]))
    assert count["compiled"] == 0


def test_a_damaged_host_page_is_an_error_before_anything_is_done(runner: ModelRunner) -> None:
    plan = idle_plan(runner)
    run(runner, replace(plan, swaps_out=(PageMove(20, 1), PageMove(21, 2))))
    runner.host_pool.drain(wait=True)
    runner.host_pool._bytes[2, 7] ^= 16
    pools = fill(runner, 5)
    with pytest.raises(TransferError) as caught:
        run(
            runner,
            replace(plan, swaps_in=(PageMove(30, 1), PageMove(31, 2)), copies=(PageCopy(1, 2),)),
        )
    assert caught.value.host_pages == {2}
    for pool, got in zip(pools, runner.kv_cache.kv_pages, strict=True):
        np.testing.assert_array_equal(np.asarray(got), pool)


def test_a_lost_store_is_told_with_a_result(runner: ModelRunner) -> None:
    plan = idle_plan(runner)
    good = runner.host_pool.programs

    def failing(*_: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED")

    runner.host_pool.programs = {n: MovePrograms(failing, each.scatter) for n, each in good.items()}
    try:
        result = run(runner, replace(plan, swaps_out=(PageMove(20, 7),)))
    finally:
        runner.host_pool.programs = good
    assert result.lost_host_pages == {7}
    assert run(runner, plan).lost_host_pages == frozenset()


def test_rates_are_measured(runner: ModelRunner) -> None:
    for rate in (field.name for field in fields(Rates)):
        value = getattr(runner.rates, rate)
        assert value is not None, rate
        assert 0 < value < 60, rate


# --------------------------------------------------------------------------------------- recovery


def test_a_runner_that_lost_nothing_keeps_its_pages(runner: ModelRunner) -> None:
    pools = fill(runner, 6)
    assert runner.recover() is False
    for pool, got in zip(pools, runner.kv_cache.kv_pages, strict=True):
        np.testing.assert_array_equal(np.asarray(got), pool)


def test_a_lost_pool_is_made_anew(runner: ModelRunner) -> None:
    fill(runner, 7)
    runner.kv_cache.kv_pages[1].delete()
    assert runner.recover() is True
    assert not any(np.asarray(pool).any() for pool in runner.kv_cache.kv_pages)
    with compilations() as count:
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        output = answers(tiny_engine(), {"a": ([3, 1, 4], params)})["a"]
    assert tokens_of(output) == dense_greedy([3, 1, 4], 9)
    assert count["compiled"] == 0


def test_lost_sampler_rows_are_made_anew(runner: ModelRunner) -> None:
    pools = fill(runner, 8)
    jax.tree.leaves(runner._sampler)[0].delete()
    assert runner.recover() is True
    for pool, got in zip(pools, runner.kv_cache.kv_pages, strict=True):
        np.testing.assert_array_equal(np.asarray(got), pool)
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(runner._sampler))


def test_a_pool_that_cannot_be_read_is_lost(runner: ModelRunner) -> None:
    """What a failed asynchronous call returned looks like an array until somebody waits for it."""

    class Poisoned:
        def block_until_ready(self) -> None:
            raise RuntimeError("INTERNAL: the step failed")

        def is_deleted(self) -> bool:
            return False

        def delete(self) -> None:
            pass

    good = runner.kv_cache
    runner.kv_cache = KVCache((good.kv_pages[0], Poisoned()))  # pyright: ignore[reportArgumentType]
    assert runner.recover() is True
    assert good.kv_pages[0].is_deleted()
    assert not any(np.asarray(pool).any() for pool in runner.kv_cache.kv_pages)


def test_a_dead_device_is_an_error_of_recovery(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("INTERNAL: no device")

    monkeypatch.setattr(runner, "_forwards", dict.fromkeys(runner._forwards, failing))
    with pytest.raises(RuntimeError, match="no device"):
        runner.recover()


def test_warm_up_writes_no_page_and_no_row(runner: ModelRunner) -> None:
    pools = fill(runner, 2)
    state = [np.asarray(leaf).copy() for leaf in jax.tree.leaves(runner._sampler)]
    for bucket in tiny_llm().engine.scheduler.config.buckets:
        runner._call(bucket, runner.layout(bucket).idle(runner._config))
    for pool, got in zip(pools, runner.kv_cache.kv_pages, strict=True):
        np.testing.assert_array_equal(np.asarray(got), pool)
    for old, new in zip(state, jax.tree.leaves(runner._sampler), strict=True):
        np.testing.assert_array_equal(old, np.asarray(new))


def test_a_row_update_replaces_what_the_slot_held(runner: ModelRunner) -> None:
    """A slot that banned everything but one token serves the next request unharmed."""
    engine = tiny_engine()
    only = SamplingParams(temperature=0, allowed_token_ids=(9,), max_tokens=4, ignore_eos=True)
    free = SamplingParams(temperature=0, logit_bias={31: 1e-9}, max_tokens=4, ignore_eos=True)
    for i in range(8):
        engine.add_request(f"only{i}", [1 + i, 2], only)
    assert all(tokens_of(output) == [9] * 4 for output in drain(engine).values())
    for i in range(8):
        engine.add_request(f"free{i}", [1 + i, 2], free)
    for i, output in enumerate(drain(engine).values()):
        assert tokens_of(output) == dense_greedy(output.prompt_token_ids, 4), i


def test_pages_full_of_nan_do_not_reach_an_answer(runner: ModelRunner) -> None:
    runner.kv_cache = jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), runner.kv_cache)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = {str(n): (list(range(1, n + 1)), params) for n in (1, 3, 4, 5, 31)}
    for name, output in answers(tiny_engine(), prompts).items():
        assert output.error is None
        assert tokens_of(output) == dense_greedy(prompts[name][0], 12)
    fill(runner, 3)  # later tests keep finite numbers


# ---------------------------------------------------------------------------------------- packing


def random_plan(layout: PackedLayout, rng: np.random.Generator) -> StepPlan:
    def ints(*shape: int) -> np.ndarray:
        return rng.integers(-(2**31), 2**31, shape).astype(np.int32)

    seqs = layout.max_seqs
    rows: dict[str, Any] = {}
    for field in fields(SamplingRows):
        words = ints(seqs, 2) if field.name == "seed" else ints(seqs)
        if field.name == "seed":
            rows[field.name] = words.view(np.uint32)
        elif field.type == "F32":
            rows[field.name] = rng.normal(size=seqs).astype(np.float32)
        else:
            rows[field.name] = words
    return StepPlan(
        bucket=layout.num_tokens,
        tokens=ints(layout.num_tokens),
        positions=ints(layout.num_tokens),
        slot_mapping=ints(layout.num_tokens),
        page_table=ints(seqs, layout.pages_per_seq),
        kv_lens=ints(seqs),
        cu_q_lens=ints(seqs + 1),
        num_seqs=seqs - 1,
        rows=SamplingRows(**rows),
        num_rows=seqs,
    )


@pytest.mark.parametrize("sizes", [(2, 2, 1), (8, 8, 5), (32, 8, 32)])
def test_unpacking_is_the_inverse_of_packing(sizes: tuple[int, int, int]) -> None:
    layout = PackedLayout(*sizes)
    plan = random_plan(layout, np.random.default_rng(5))
    packed = layout.pack(plan)
    assert packed.dtype == np.int32
    assert packed.shape == (layout.size,)
    arrays = layout.unpack(jnp.asarray(packed))
    for name in ("tokens", "positions", "slot_mapping", "page_table", "kv_lens", "cu_q_lens"):
        np.testing.assert_array_equal(np.asarray(arrays[name]), getattr(plan, name))
    assert int(arrays["num_seqs"]) == plan.num_seqs
    words = np.asarray(arrays["rows"])
    columns = [field.name for field in fields(SamplingRows) if field.name != "seed"]
    for i, name in enumerate(columns):
        expected = getattr(plan.rows, name)
        np.testing.assert_array_equal(words[:, i].copy().view(expected.dtype), expected)
    np.testing.assert_array_equal(words[:, len(columns) :].copy().view(np.uint32), plan.rows.seed)


def test_packing_is_fresh_and_exact() -> None:
    layout = PackedLayout(4, 2, 3)
    plan = random_plan(layout, np.random.default_rng(6))
    first, second = layout.pack(plan), layout.pack(plan)
    assert not np.shares_memory(first, second)  # a step may still read the one before
    assert not np.shares_memory(first, plan.tokens)
    with pytest.raises(ValueError, match=r"`plan` must fill bucket 4 exactly \(\d+ words\). Got"):
        PackedLayout(4, 2, 4).pack(plan)


def test_a_padding_row_asks_for_nothing(runner: ModelRunner) -> None:
    result = run(runner, idle_plan(runner))
    plan = idle_plan(runner)
    assert result.tokens.shape[0] >= len(plan.rows.slot)
    assert (plan.rows.target[plan.num_rows :] == NO_TARGET).all()
    assert not result.corrupted[plan.num_rows :].any()
