"""Thirty bugs that engines of this kind have had, and the tests that keep them out of this one.

`BUGS` is the list; docstrings elsewhere that say "bug 12" mean its numbers. A bug names the tests
that fail when it is put in: tests in other files, whose names or docstrings say what they guard,
or tests below. What cannot happen here says why not.
"""

from __future__ import annotations

import ast
import functools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from gc import get_referents
from itertools import chain
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import SamplingParams
from pagedjax.engine import LLMEngine
from pagedjax.plan import StepPlan, StepResult
from pagedjax.request import FinishReason
from tests.helpers import VOCAB as MODEL_VOCAB
from tests.helpers import dense_greedy
from tests.test_runner import fill, idle_plan, recorded_plans
from tests.test_scheduler import Bench, scheduled
from tests.tiny_engine import HOST_PAGES, answer, answers, drain, tiny_engine, tiny_llm, tokens_of

TESTS = Path(__file__).parent
HERE = "test_bugs_never_to_have.py::"


class Bug(NamedTuple):
    """What went wrong elsewhere and the rule against it; who guards the rule, and with what words.

    Each guard must have one of `words` in its name or docstring. `absent` says what of the bug, or
    all of it, has no place here.
    """

    rule: str
    words: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()
    absent: str = ""


SCHEDULER, BEAMS, SWAP = "test_scheduler.py::", "test_beams.py::", "test_swap.py::"
CACHE, ALLOCATOR = "paging/test_prefix_cache.py::", "paging/test_allocator.py::"
MACHINE, TABLE = "paging/test_paging_state_machine.py::", "paging/test_page_table.py::"
RUNNER, HOST, ENGINE = "test_runner.py::", "test_host_pool.py::", "test_engine.py::"
POLICY, TEXT, SAMPLING = "test_policy.py::", "test_detokenizer.py::", "test_sampling.py::"
UPDATES, ATTENTION = (
    "pallas_kernels/test_kv_update.py::",
    "pallas_kernels/test_paged_attention.py::",
)

BUGS: dict[int, Bug] = {
    1: Bug(
        "Keys kept beside the hash of a page let children collide: all identity is in the chain.",
        ("salt", "extra_keys", "prefix"),
        (
            CACHE + "test_extra_keys_are_inherited_by_the_whole_chain",
            CACHE + "test_the_same_page_after_another_prefix_is_no_hit",
            SCHEDULER + "test_salts_keep_requests_apart",
        ),
        absent="No images and no adapters: the salt is the one extra key that a request can bring.",
    ),
    2: Bug(
        "Crafted prompts met in one hash: the root is random, and tokens are compared.",
        ("root", "collision"),
        (
            CACHE + "test_the_root_is_secret_and_drawn_for_each_cache",
            CACHE + "test_a_collision_costs_a_miss_and_never_gives_a_wrong_page",
        ),
    ),
    3: Bug(
        "Keys and values of another adapter of that name were hit: keys are tagged and sized.",
        ("extra_keys",),
        (
            CACHE + "test_extra_keys_never_pass_for_one_another",
            CACHE + "test_extra_keys_have_one_canonical_form",
        ),
        absent="No adapters, and an engine's weights never change under it.",
    ),
    4: Bug(
        "An image's key said neither where in the prompt it is nor its shape.",
        absent="No images. The place of a page is in its chain: see bug 1.",
    ),
    5: Bug(
        "Cached pages were registered again, since a count began at 0 after a hit: no count.",
        ("registered", "registration"),
        (
            CACHE + "test_registration_goes_on_from_the_hit",
            SCHEDULER + "test_pages_are_registered_once_and_only_when_computed",
        ),
    ),
    6: Bug(
        "An inverted condition dropped an entry that had pages left: the map against a model.",
        ("same_content", "plain_model", "exact_accounts"),
        (
            CACHE + "test_two_held_pages_with_the_same_content_are_both_kept",
            MACHINE + "test_random_trace_keeps_exact_accounts",
            MACHINE + "test_paging_agrees_with_the_plain_model",
        ),
    ),
    7: Bug(
        "A page was hit before it was written: it is registered when its step was read.",
        ("before_it_was_committed", "only_when_computed", "did not run", "did_not_run", "fails"),
        (
            CACHE + "test_nothing_is_found_before_it_was_committed",
            SCHEDULER + "test_pages_are_registered_once_and_only_when_computed",
            SWAP + "test_running_sequences_keep_their_pages_when_a_transfer_fails",
        ),
    ),
    8: Bug(
        "A waiting request remembered hits that were evicted meanwhile: no memory across steps.",
        ("looked_up_anew",),
        (
            SCHEDULER + "test_hits_are_looked_up_anew_at_each_step",
            SWAP + "test_a_waiting_request_is_looked_up_anew_in_each_step",
        ),
    ),
    9: Bug(
        "A hit of the whole prompt left nothing to run: the last token always runs.",
        ("leaves_a_token_to_run",),
        (
            CACHE + "test_a_full_hit_leaves_a_token_to_run",
            SCHEDULER + "test_a_full_hit_leaves_a_token_to_run",
        ),
    ),
    10: Bug(
        "A victim was part of the step that made it one: a schedule is a transaction.",
        ("changes_nothing", "changes_neither", "victim"),
        (
            SCHEDULER + "test_a_schedule_that_fails_changes_nothing",
            SCHEDULER + "test_an_interrupted_schedule_changes_nothing",
            SWAP + "test_a_schedule_that_fails_changes_neither_pool",
            BEAMS + "test_a_step_that_cannot_be_made_changes_nothing_of_parked_lanes",
            HERE + "test_no_plan_holds_a_victim_of_its_own",
        ),
    ),
    11: Bug(
        "A heap compared requests where their keys were equal: keys are (rank, arrival, sample).",
        ("never_compared",),
        (POLICY + "test_requests_with_equal_ranks_are_never_compared_themselves",),
    ),
    12: Bug(
        "A token was lost or came twice around a preemption: a result is for one epoch, once.",
        ("dropped", "read_once", "done_again"),
        (
            SCHEDULER + "test_a_result_for_a_preempted_sequence_is_dropped",
            SCHEDULER + "test_a_result_is_read_once",
            SCHEDULER + "test_a_dropped_step_is_done_again",
            HERE + "test_a_decoded_token_is_read_once_while_the_next_is_on_its_way",
            HERE + "test_a_token_decoded_before_a_preemption_is_dropped_after_it",
        ),
    ),
    13: Bug(
        "A host buffer changed while a device still read it: a plan's arrays are fresh.",
        ("fresh", "share_no_memory", "buffer"),
        (
            SCHEDULER + "test_plans_share_no_memory_with_each_other_or_the_scheduler",
            RUNNER + "test_packing_is_fresh_and_exact",
            HERE + "test_what_is_handed_to_the_device_for_a_swap_in_is_a_fresh_buffer",
        ),
    ),
    14: Bug(
        "Masked positions held NaN, and 0 x NaN is NaN; padding wrote the null page.",
        ("nan", "null_page", "no_page"),
        (
            RUNNER + "test_pages_full_of_nan_do_not_reach_an_answer",
            ATTENTION + "TestRows::test_nan_in_one_sequence_reaches_no_other",
            RUNNER + "test_warm_up_writes_no_page_and_no_row",
            HERE + "test_the_null_page_is_neither_read_nor_written",
        ),
    ),
    15: Bug(
        "The tail of a table row was that of an older sequence; -1 wrapped: lengths bound reads, "
        "and what is to be dropped is past the end.",
        ("tail", "outside_the_pool", "past_the_lengths"),
        (
            UPDATES + "test_write_kv_drops_slots_outside_the_pool",
            UPDATES + "test_copy_pages_drops_destinations_outside_the_pool",
            HERE + "test_stale_tails_of_page_tables_are_never_read",
        ),
    ),
    16: Bug(
        "A request that can never run stood at the head of the queue for ever: refused early.",
        ("refused", "smallest_pool", "bug_that_is_told", "must_fit"),
        (
            SCHEDULER + "test_a_request_that_can_never_be_served_is_refused_at_the_door",
            SCHEDULER + "test_a_lone_request_of_max_model_len_fits_the_smallest_pool",
            BEAMS + "test_a_search_that_can_never_be_served_is_refused",
            ENGINE + "test_requests_that_cannot_be_scheduled_are_a_bug_that_is_told",
            "test_startup.py::TestRefusals::test_one_request_must_fit_the_pages_asked_for",
        ),
    ),
    17: Bug(
        "min_tokens returned before the length was looked at: it is looked at always.",
        ("length",),
        (
            SCHEDULER + "test_length_is_checked_whatever_min_tokens_says",
            ENGINE + "test_the_length_cap_always_holds",
        ),
    ),
    18: Bug(
        "Samples of a request shared state: each sequence owns its own.",
        ("owns_its_state", "has_its_own", "its_own"),
        (
            SCHEDULER + "test_each_sample_owns_its_state",
            BEAMS + "test_each_lane_owns_its_state",
            TEXT + "test_a_fork_keeps_its_own_undecided_text",
            ENGINE + "TestStopStrings::test_each_sample_has_its_own",
        ),
    ),
    19: Bug(
        "Repeated pages were freed twice, pages freed before their transfer ended, copies made "
        "before what they copy: distinct pages count, transfers have epochs, the order is fixed.",
        ("named_twice", "once", "late", "before", "did_not_run"),
        (
            ALLOCATOR + "test_a_page_named_twice_loses_two_references_and_is_listed_once",
            TABLE + "test_fork_of_a_fork_frees_each_page_once",
            HOST + "test_an_older_store_that_arrives_late_is_dropped",
            HOST + "test_a_page_is_read_before_the_same_step_writes_it",
            RUNNER + "test_copies_come_before_the_steps_writes",
            RUNNER + "test_swaps_out_come_before_swaps_in_and_those_before_copies",
            SWAP + "test_copies_that_did_not_run_are_not_believed",
            HERE + "test_copies_of_a_step_are_made_before_anything_of_it_is_written",
        ),
    ),
    20: Bug(
        "Prompt logprobs were short, or of an unwritten buffer, after a preemption or a hit.",
        ("prompt_logprobs", "prompt logprobs"),
        (
            SCHEDULER + "test_prompt_logprobs_come_once_after_preemption",
            SCHEDULER + "test_prompt_logprobs_do_not_read_the_prefix_cache_but_fill_it",
            SCHEDULER + "test_prompt_logprobs_are_complete_whatever_the_rows",
            SWAP + "test_a_prompt_is_swapped_in_the_middle_and_goes_on",
        ),
    ),
    21: Bug(
        "Pages leaked, gauges stuck, samples outlived their request: all is empty at the end.",
        ("all_its_samples", "all_of_them", "all_of_it", "leaves_no", "gauge"),
        (
            SCHEDULER + "test_aborting_a_request_ends_all_its_samples",
            POLICY + "test_aborting_every_sample_of_a_request_frees_all_of_them",
            BEAMS + "test_an_abort_of_a_search_frees_all_of_it",
            SWAP + "test_a_swapped_sequence_ends_once_and_leaves_no_host_page",
            HERE + "test_every_gauge_is_zero_again_however_requests_end",
        ),
    ),
    22: Bug(
        "One bad request harmed others: it is checked at the door, and rows are neutral.",
        ("refused", "alone", "others", "nothing"),
        (
            SCHEDULER + "test_a_request_that_can_never_be_served_is_refused_at_the_door",
            SCHEDULER + "test_a_corrupted_row_ends_its_request_alone",
            SCHEDULER + "test_a_result_that_cannot_be_handled_fails_its_request_alone",
            SAMPLING + "test_one_odd_row_changes_nothing_in_the_others",
            RUNNER + "test_a_padding_row_asks_for_nothing",
            "test_recovery.py::test_a_request_that_makes_every_step_fail_fails_alone",
        ),
    ),
    23: Bug(
        "Broken UTF-8, text of the stop string, the wrong reason where stop string and stop token "
        "meet: streams are cut at every place.",
        ("text", "stop"),
        (
            TEXT + "test_pushes_and_finish_are_the_decoded_text",
            TEXT + "test_a_foreign_tokenizer_streams_its_text",
            TEXT + "test_text_is_cut_at_the_first_stop_string",
            TEXT + "test_text_that_may_become_a_stop_string_is_withheld_until_decided",
            HERE + "test_a_stop_string_and_a_stop_token_in_one_token",
            HERE + "test_a_withheld_beginning_of_a_stop_string_is_text_when_eos_comes",
        ),
    ),
    24: Bug(
        "A seeded answer changed after a preemption: the key is (seed, sample, position).",
        ("seeded", "no_draw", "seed_sample_position"),
        (
            SCHEDULER + "test_a_seeded_answer_is_the_same_after_preemption",
            SWAP + "test_the_seeded_answer_of_a_swapped_sequence_is_the_same",
            ENGINE + "test_preemption_changes_no_draw",
            SAMPLING + "test_a_draw_depends_on_seed_sample_position_and_logits_alone",
        ),
    ),
    25: Bug(
        "A victim's pages were free only after a transfer, so others had to go: they count now.",
        ("frees_its_pages",),
        (SWAP + "test_a_victim_frees_its_pages_in_the_step_that_moves_them",),
    ),
    26: Bug(
        "Order reversed by preemption, wrong status after a load, an abort that raced the end: one "
        "state machine, and who ends first wins.",
        ("races", "after_the_abort", "once", "starts_over_at_the_front", "goes_on"),
        (
            SCHEDULER + "test_the_latest_gives_way_and_starts_over_at_the_front",
            SWAP + "test_a_swapped_sequence_goes_on_where_it_was",
            POLICY + "test_an_abort_that_races_a_finish_changes_nothing",
            POLICY + "test_a_result_that_comes_after_the_abort_is_dropped",
            SWAP + "test_a_swapped_sequence_ends_once_and_leaves_no_host_page",
        ),
    ),
    27: Bug(
        "What admission expected was not what the allocator did: the predictor is the allocator.",
        ("predictor", "draft_counts", "count_as_pages"),
        (
            "test_capacity.py::test_the_predictor_is_the_allocator",
            SWAP + "test_what_the_draft_counts_is_what_the_allocators_do",
            SCHEDULER + "test_hits_that_nobody_holds_count_as_pages_to_take",
        ),
    ),
    28: Bug(
        "A cached count outlived a preemption; a chunk had the length of the whole prompt; a page "
        "that was hit was wiped; a reused page kept its hash.",
        ("counts_its_hits_once", "chunks", "not_evicted", "back", "no_hash"),
        (
            SCHEDULER + "test_a_preempted_request_counts_its_hits_once",
            "test_paged_equals_dense.py::test_a_prompt_in_chunks_equals_dense",
            SCHEDULER + "test_a_hit_is_not_evicted_by_what_runs_in_the_same_step",
            ALLOCATOR + "test_a_hit_brings_an_evictable_page_back",
            CACHE + "test_a_reused_page_carries_no_hash_over",
        ),
    ),
    29: Bug(
        "A row of allowed ids stayed when rows moved, an id out of range hit another row: a slot "
        "is written anew for who gets it, and the host checks every id.",
        ("row_update", "replace", "set_row", "refused", "parked"),
        (
            SCHEDULER + "test_a_row_update_comes_with_the_slot_and_after_a_fork_and_a_preemption",
            SCHEDULER + "test_a_request_that_can_never_be_served_is_refused_at_the_door",
            BEAMS + "test_a_step_that_cannot_be_made_changes_nothing_of_parked_lanes",
            SAMPLING + "test_set_row_replaces_all_that_the_slot_held",
            RUNNER + "test_a_row_update_replaces_what_the_slot_held",
        ),
    ),
    30: Bug(
        "A page was lost in a thousand requests, a list on the host never emptied: long runs.",
        ("two_thousand", "ten_thousand", "grows", "bounded"),
        (
            "test_scheduler_soak.py::test_nothing_leaks_in_two_thousand_requests_with_aborts",
            "test_policy_trace.py::test_twice_ten_thousand_operations_with_exact_accounting",
            ENGINE + "test_two_thousand_requests_with_aborts_lose_no_page",
            HOST + "test_batches_in_flight_are_bounded",
            HERE + "test_nothing_grows_with_the_number_of_requests",
        ),
    ),
}


# ----------------------------------------------------------------------------- the list is true

# Decorators that keep a test among those that run everywhere: no skip, no xfail, no mark of a
# device or of slowness.
RUNS_ANYWAY = (
    "pytest.mark.parametrize(", "pytest.mark.usefixtures(", "given(", "settings(", "example(",
)  # fmt: skip


@functools.cache
def definitions(file: str) -> dict[str, ast.FunctionDef]:
    """The tests of a file that pytest collects and runs everywhere: "test" or "Class::test"."""
    body = ast.parse((TESTS / file).read_text("utf-8")).body
    if any("pytestmark" in ast.unparse(node) for node in body if isinstance(node, ast.Assign)):
        return {}
    found: dict[str, ast.FunctionDef] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test") and is_plain(node):
            methods = [child for child in node.body if isinstance(child, ast.FunctionDef)]
            found |= {f"{node.name}::{method.name}": method for method in methods}
    runs = lambda node: node.name.startswith("test_") and is_plain(node)  # noqa: E731
    return {name: node for name, node in found.items() if runs(node)}


def is_plain(node: ast.FunctionDef | ast.ClassDef) -> bool:
    decorators = map(ast.unparse, node.decorator_list)
    return all(decorator.startswith(RUNS_ANYWAY) for decorator in decorators)


def test_the_list_has_every_bug_and_says_who_guards_it_or_why_nobody_must() -> None:
    assert list(BUGS) == list(range(1, 31))
    for number, bug in BUGS.items():
        assert bug.guards or bug.absent, number
        assert bool(bug.guards) == bool(bug.words), number
        assert len(set(bug.guards)) == len(bug.guards), number


@pytest.mark.parametrize(
    ("number", "guard"), [(number, guard) for number, bug in BUGS.items() for guard in bug.guards]
)
def test_a_guard_is_collected_and_says_what_it_guards(number: int, guard: str) -> None:
    file, _, name = guard.partition("::")
    test = definitions(file).get(name)
    assert test is not None, f"{guard} is no test that runs everywhere"
    says = f"{name} {ast.get_docstring(test) or ''}".lower()
    assert any(word in says for word in BUGS[number].words), (number, says)


def test_every_test_below_guards_a_bug() -> None:
    named = set(chain.from_iterable(bug.guards for bug in BUGS.values()))
    own = {HERE + name for name in definitions(Path(__file__).name)}
    about_the_list = {HERE + f.__name__ for f in (
        test_the_list_has_every_bug_and_says_who_guards_it_or_why_nobody_must,
        test_a_guard_is_collected_and_says_what_it_guards,
        test_every_test_below_guards_a_bug,
        test_a_test_that_is_skipped_or_misspelt_is_no_guard,
    )}  # fmt: skip
    assert own - about_the_list == {guard for guard in named if guard.startswith(HERE)}


def test_a_test_that_is_skipped_or_misspelt_is_no_guard() -> None:
    skipped = ast.parse("@pytest.mark.slow\ndef test_a(): ...").body[0]
    assert isinstance(skipped, ast.FunctionDef)
    assert not is_plain(skipped)
    found = definitions("test_scheduler_soak.py")
    assert "test_nothing_leaks_in_two_thousand_requests_with_aborts" in found
    assert "test_after_a_hundred_thousand_requests_the_pages_are_back_at_the_start" not in found


# ------------------------------------------------------------------------------------ the scheduler


@pytest.mark.parametrize("policy", ["latest", "least_cost"])
def test_no_plan_holds_a_victim_of_its_own(policy: str) -> None:
    """Bug 10: what gave its pages up waits, and what is in the plan runs in its slot."""
    sizes: dict[str, Any] = {"num_pages": 18, "max_num_seqs": 8, "victim_policy": policy}
    bench = Bench(**sizes, preemption_mode="recompute", enable_prefix_caching=False)
    # The old ones are short, hence cheap to take from, and in the plan when pages run out.
    shapes = [(2, 1, 50), (3, 1, 50), (1, 1, 50), (4, 1, 40), (14, 2, 20), (20, 1, 20), (17, 1, 12)]
    requests = [bench.add(length, n=n, max_tokens=tokens) for length, n, tokens in shapes]
    everyone = list(chain.from_iterable(requests))
    num_victims = 0
    while bench.scheduler.has_work:
        before = {sequence: sequence.num_preemptions for sequence in everyone}
        plan = bench.schedule()
        victims = {s for s in everyone if s.num_preemptions > before[s]}
        runs = {scheduled.sequence for scheduled in plan.scheduled}
        assert not victims & runs
        assert len(runs) == len(plan.scheduled)
        assert all(scheduled.epoch == scheduled.sequence.epoch for scheduled in plan.scheduled)
        num_victims += len(victims)
        bench.update(plan)
    assert num_victims > 5
    bench.finish_all(*requests)


def test_a_decoded_token_is_read_once_while_the_next_is_on_its_way() -> None:
    """Bug 12: steps that go on decoding may share their note of a sequence."""
    bench = Bench()
    request = bench.add(4)
    bench.step(2)
    plan = bench.schedule()
    result = bench.runner.run(plan)
    assert bench.update(plan, result) == request
    later = bench.schedule()
    assert bench.update(plan, result) == []
    assert bench.update(later) == request
    bench.finish_all(request)


def test_a_token_decoded_before_a_preemption_is_dropped_after_it() -> None:
    """Bug 12: the sequence decodes again, in the same row, when the old result comes."""
    bench = Bench()
    request = bench.add(4)
    bench.step(2)
    old = bench.schedule()
    result = bench.runner.run(old)
    assert bench.scheduler.reset_prefix_cache(reset_running=True)
    again = bench.schedule()
    results = [bench.runner.run(again)]
    new = bench.schedule()
    results.append(bench.runner.run(new))
    assert scheduled(new) == {"0.0": 1}
    assert bench.update(old, result) == []
    assert bench.update(again, results[0]) == request
    assert bench.update(new, results[1]) == request
    bench.finish_all(request)


@pytest.mark.parametrize("end", ["answer", "abort", "fail", "finish", "lost device"])
def test_every_gauge_is_zero_again_however_requests_end(end: str) -> None:
    """Bug 21: with sequences that run, wait, are swapped, forked and not yet forked."""
    bench = Bench(num_pages=20, num_host_pages=30, preemption_mode="swap", max_num_seqs=6)
    requests = [bench.add(n, n=1 + n % 3, max_tokens=20) for n in (7, 14, 11, 12)]
    while not bench.scheduler.stats.swap.num_held_host_pages:
        bench.step()
    requests += [bench.add(9, n=2)]
    scheduler = bench.scheduler
    assert scheduler.num_running > 1
    assert scheduler.num_waiting > 1
    assert scheduler.roster.num_queued_requests > 0
    for sequence in chain.from_iterable(requests):
        {
            "answer": lambda _: None,
            "abort": lambda s: scheduler.abort(s.request.request_id),
            "fail": lambda s: scheduler.fail(s, "no", reason=FinishReason.TIMEOUT),
            "finish": lambda s: scheduler.finish(s, FinishReason.STOP),
            "lost device": lambda _: scheduler.forget_device_pages(),
        }[end](sequence)
    bench.finish_all()
    stats, roster = scheduler.stats, scheduler.roster
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    assert (roster.num_queued_requests, roster.num_queued_tokens) == (0, 0)
    assert (stats.num_held_pages, stats.num_saved_pages, stats.kv_usage) == (0, 0, 0)
    assert stats.swap.num_held_host_pages == 0


# --------------------------------------------------------------------------------------- the device


class Between:
    """Stands in for a runner and changes each plan before it runs."""

    def __init__(self, engine: LLMEngine, change: Callable[[StepPlan], StepPlan]) -> None:
        self.runner = engine.runner
        self.change = change
        engine.runner = self

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        return self.runner.launch(self.change(plan))

    def recover(self) -> bool:
        return self.runner.recover()


def greedy(max_tokens: int, **values: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **values)


PROMPTS = {str(n): list(range(1, n + 1)) for n in (1, 3, 4, 9, 20, 31)}


def ask(engine: LLMEngine) -> None:
    """Six prompts of several lengths, in a pool that is too small, against dense attention."""
    found = answers(engine, {name: (ids, greedy(24)) for name, ids in PROMPTS.items()})
    for name, ids in PROMPTS.items():
        assert tokens_of(found[name]) == dense_greedy(ids, 24), name


@pytest.fixture
def pools() -> Iterator[Callable[[], list[np.ndarray]]]:
    """The pools of the shared runner as they are by now; their null pages hold NaN meanwhile."""
    runner: Any = tiny_llm().engine.runner

    def fill_null_page(value: float) -> None:
        runner.kv_cache = jax.tree.map(lambda pool: pool.at[0].set(value), runner.kv_cache)

    fill_null_page(jnp.nan)
    yield lambda: [np.asarray(pool) for pool in jax.tree.leaves(runner.kv_cache)]
    fill_null_page(0.0)


def test_the_null_page_is_neither_read_nor_written(pools: Callable[[], list[np.ndarray]]) -> None:
    """Bug 14: padding, forks, preemptions and swaps are about."""
    engine = tiny_engine(num_pages=33, num_host_pages=HOST_PAGES, preemption_mode="swap")
    ask(engine)
    answers(engine, {"forks": ([5, 6, 7], SamplingParams(n=3, seed=1, max_tokens=9))})
    assert engine.scheduler.stats.swap.num_pages_in > 0
    assert engine.scheduler.stats.num_cow_copies > 0
    for pool in pools():
        assert np.isnan(pool[0]).all()


def test_copies_of_a_step_are_made_before_anything_of_it_is_written() -> None:
    """Bug 19: later they would bring what a sibling writes to the same place of its own page."""
    runner: Any = tiny_llm().engine.runner
    plan = next(plan for plan in recorded_plans() if plan.copies)
    alone = replace(idle_plan(runner), copies=plan.copies)
    found: list[list[np.ndarray]] = []
    for steps in ((plan,), (alone, replace(plan, copies=()))):
        fill(runner, 1)
        for step in steps:
            runner.launch(step)()
        found.append([np.array(pool) for pool in runner.kv_cache.kv_pages])
    for together, apart in zip(*found, strict=True):
        np.testing.assert_array_equal(together, apart)


@pytest.mark.parametrize("stale", [-1, 10**6, "another"])
def test_stale_tails_of_page_tables_are_never_read(stale: int | str) -> None:
    """Bug 15: past the pages of a row, and in rows of nobody, a table may hold anything."""
    engine = tiny_engine(num_pages=40)

    def spoil(plan: StepPlan) -> StepPlan:
        table = plan.page_table.copy()
        used = -(-plan.kv_lens // 4)
        tail = np.arange(table.shape[1]) >= used[:, None]
        assert tail.any()
        table[tail] = table[0, 0] if stale == "another" else int(stale)
        return replace(plan, page_table=table)

    Between(engine, spoil)
    ask(engine)
    assert engine.scheduler.stats.num_preemptions > 0


def test_what_is_handed_to_the_device_for_a_swap_in_is_a_fresh_buffer() -> None:
    """Bug 13: JAX may go on reading the memory that it was given."""
    pool: Any = tiny_llm().engine.runner
    pool = pool.host_pool
    first, second = (pool._read([1, 2], 8) for _ in range(2))
    for a in first:
        assert not np.shares_memory(a, pool._bytes)
        assert not any(np.shares_memory(a, b) for b in second)


# --------------------------------------------------------------------------------------------- text


PROMPT = [3, 9, 27, 1, 14, 5, 30]


def chosen() -> tuple[list[int], str]:
    """A greedy answer, and its text: one character a token."""
    ids = dense_greedy(PROMPT, 20)
    return ids, "".join(chr(96 + token) for token in ids)


def first_seen(ids: list[int]) -> int:
    """The place, not too early, of a token that did not come before."""
    return next(at for at in range(3, 20) if ids[at] not in ids[:at])


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_stop_string_and_a_stop_token_in_one_token(is_kept: bool) -> None:
    """Bug 23: the text is cut at the string, and the reason says so."""
    ids, text = chosen()
    at = first_seen(ids)
    stop = text[at - 1 : at + 1]
    params = greedy(
        20,
        stop=(stop,),
        stop_token_ids=(ids[at],),
        include_stop_str_in_output=is_kept,
        skip_special_tokens=False,
    )
    output = answer(tiny_engine(), PROMPT, params).outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == text[: at + 1 if is_kept else at - 1]
    assert output.token_ids == ids[: at + 1]


def test_a_withheld_beginning_of_a_stop_string_is_text_when_eos_comes() -> None:
    """Bug 23: what was held back belongs to the answer once no more can come."""
    ids, text = chosen()
    at = first_seen(ids)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=20,
        stop=(text[at - 2 : at + 1] + "~",),
        skip_special_tokens=False,
    )
    engine = tiny_engine(eos_token_ids=frozenset({ids[at]}))
    output = answer(engine, PROMPT, params).outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert output.text == text[: at + 1]


# ------------------------------------------------------------------------------------------- memory


def containers(root: Any) -> Iterator[Any]:
    """All lists, dictionaries, sets and deques that are reached from an object of ours."""
    seen, stack = {id(root)}, [root]
    while stack:
        found = stack.pop()
        if isinstance(found, list | dict | set | deque | tuple):
            yield found
        for part in get_referents(found):
            home = type(part).__module__.partition(".")[0]
            is_code = isinstance(part, type | ModuleType | FunctionType)
            is_ours = home in ("pagedjax", "builtins", "collections")
            if is_ours and not is_code and id(part) not in seen:
                seen.add(id(part))
                stack.append(part)


def test_nothing_grows_with_the_number_of_requests() -> None:
    """Bug 30: no list, set or dictionary of engine, scheduler or host pool has an entry for each.

    Requests end by length and by abort, with beams, samples and swaps. Deadlines are swept now and
    then: `test_policy.py` bounds them.
    """
    engine = tiny_engine(num_pages=33, num_host_pages=8, preemption_mode="swap")
    rng = np.random.default_rng(5)
    ends: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}

    def serve(name: str) -> None:
        samples, beams = SamplingParams(n=2, **ends), SamplingParams(beam_width=2, **ends)
        for number, params in enumerate((samples, beams, SamplingParams(**ends), samples, beams)):
            ids = rng.integers(1, MODEL_VOCAB, 12).tolist()
            engine.add_request(f"{name}.{number}", ids, params)
        for _ in range(8):
            engine.step()
        engine.abort(next(iter(engine._live)))
        drain(engine)

    def size() -> int:
        parts = (engine, engine.scheduler, tiny_llm().engine.runner)
        return sum(len(found) for part in parts for found in containers(part))

    sizes: list[int] = []
    for number in range(16):
        serve(str(number))
        sizes.append(size())
    assert engine.scheduler.stats.swap.num_swaps > 10
    assert max(sizes[12:]) - max(sizes[3:7]) < 30, sizes  # one a request: 45
