"""Plans: every visible (query row, position) pair is computed once, by someone, and nothing else.

A plain JAX kernel that obeys a plan to the letter stands in for the Pallas ones, so that packing,
tiles, items, merging and cascades are checked over many batches in little time.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import attention_plan, reference, work_plan
from pallas_kernels.attention_plan import AttentionPlan, Problem, TileClass, make_plan
from pallas_kernels.merge import merge_states
from pallas_kernels.paged_attention_mosaic import paged_attention_mosaic
from pallas_kernels.score_rule import ScoreRule
from pallas_kernels.tuning import KernelConfig
from pallas_kernels.work_plan import TileShape
from tests.pallas_kernels.cases import Batch, Shape, error, make_batch, random_batch

DECODE = KernelConfig("columns", rows=8, kv_tile=16, stages=2, workers=5)
PREFILL = KernelConfig("rows", rows=16, kv_tile=16, stages=2, workers=5)
WIDE = KernelConfig("columns", rows=8, kv_tile=64, stages=2, workers=5)  # than a page
SPLIT = KernelConfig("columns", rows=8, kv_tile=16, stages=2, workers=5, split=True)


def obey(
    q_tiles: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    part: TileClass,
    *,
    rule: ScoreRule,
    slopes: jax.Array | None,
    kv_scales: jax.Array | None,
    out_dtype: Any,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Dense attention of every item over just the positions of its KV tiles."""
    del kv_scales, interpret, out_dtype
    assert part.work is not None
    shape, items = part.tiles.shape, part.work.items
    heads, num_tiles = q_tiles.shape[:2]
    num_pages, _, _, page_size, _ = kv_pages.shape

    def one(item: jax.Array) -> tuple[jax.Array, jax.Array]:
        tile, head, begin, end, seq, position, kv_end, _ = item
        at = jnp.arange(page_table.shape[1] * page_size, dtype=jnp.int32)
        read = (at >= begin * shape.kv_tile) & (at < end * shape.kv_tile) & (at < kv_end)
        pages = kv_pages[jnp.clip(page_table[seq, at // page_size], 0, num_pages - 1)]
        kv = pages[jnp.arange(at.size), :, head // shape.passes, at % page_size]
        k, v = (jnp.where(read[:, None], kv[:, i], 0.0) for i in (0, 1))
        q = q_tiles[head, tile] * rule.scale
        rows = position + jnp.arange(shape.rows, dtype=jnp.int32) // shape.group
        scores = jnp.matmul(q, k.T, precision="highest")
        if rule.soft_cap is not None:
            scores = rule.soft_cap * jnp.tanh(scores / rule.soft_cap)
        if slopes is not None:
            distance = (at[None] - rows[:, None]).astype(jnp.float32)
            scores = scores + slopes[head][:, None] * distance
        seen = read[None] & (at[None] <= rows[:, None])
        if rule.sliding_window is not None:
            seen &= at[None] > rows[:, None] - rule.sliding_window
        scores = jnp.where(seen, scores, -jnp.inf)
        peak = scores.max(axis=1)
        weights = jnp.exp(scores - jnp.where(jnp.isneginf(peak), 0.0, peak)[:, None])
        total = weights.sum(axis=1)
        safe = jnp.where(total == 0, 1.0, total)
        out = jnp.matmul(weights / safe[:, None], v, precision="highest")
        return out, jnp.where(total == 0, -jnp.inf, peak + jnp.log(safe))

    o, lse = jax.vmap(one)(items)
    o, lse = join(o, lse, part.work.row_items, heads * num_tiles)
    o = o.reshape(num_tiles, heads, *o.shape[1:]).swapaxes(0, 1)
    return o, lse.reshape(num_tiles, heads, -1).swapaxes(0, 1)


def join(
    o: jax.Array, lse: jax.Array, row_items: jax.Array, num_rows: int
) -> tuple[jax.Array, jax.Array]:
    """What `merge_items` does: the items of each row as one."""
    index = jnp.arange(o.shape[0], dtype=jnp.int32)

    def one(row: jax.Array) -> tuple[jax.Array, jax.Array]:
        mine = (index >= row_items[row]) & (index < row_items[row + 1])
        out, log = merge_states(o[:, None], jnp.where(mine[:, None], lse, -jnp.inf)[:, None])
        return out[0], log[0]

    return jax.vmap(one)(jnp.arange(num_rows, dtype=jnp.int32))


@functools.partial(jax.jit, static_argnames=("problem", "rule", "cascade", "decode"))
def attend(
    *arrays: jax.Array,
    problem: Problem,
    rule: ScoreRule,
    decode: KernelConfig,
    cascade: bool = False,
    **per_head: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    plan = make_plan(problem, *arrays[2:], cascade=cascade, decode=decode, prefill=PREFILL)
    options: dict[str, Any] = {"sinks": None, "alibi_slopes": None, "kv_scales": None} | per_head
    q, kv_pages, page_table = arrays[:3]
    return paged_attention_mosaic(
        q,
        kv_pages,
        page_table,
        plan,
        obey,
        rule=rule,
        **options,
        out_dtype=jnp.float32,
        interpret=False,
    )


def arrays_of(batch: Batch) -> Any:
    """NumPy's, which JAX takes as well as its own."""
    return batch.arrays


def problem_of(shape: Shape, **changes: Any) -> Problem:
    values: dict[str, Any] = {
        "implementation": "mosaic_gpu",
        "num_tokens": shape.num_tokens,
        "num_q_heads": shape.num_q_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "page_size": shape.page_size,
        "dtype": "float32",
        "max_seqs": shape.max_seqs,
        "pages_per_seq": shape.pages_per_seq,
        "sliding_window": None,
        "max_q_len": None,
        "batch_invariant": False,
    }
    return Problem(**(values | changes))


FAMILIES: list[tuple[Shape, KernelConfig, dict[str, Any]]] = [
    (Shape(8, 2, 3, 8, 5, 60, 150), DECODE, {}),
    (Shape(8, 2, 3, 8, 5, 60, 150), SPLIT, {}),
    (Shape(8, 2, 3, 8, 5, 60, 150), SPLIT, {"batch_invariant": True}),
    (Shape(32, 1, 11, 8, 4, 50, 100), SPLIT, {"sliding_window": 30}),
    (Shape(16, 1, 1, 8, 6, 70, 100), DECODE, {"sliding_window": 5, "alibi_slopes": True}),
    (Shape(16, 2, 20, 8, 3, 40, 90), SPLIT, {"sinks": True, "soft_cap": 3.0}),
]


@pytest.mark.parametrize(("shape", "config", "options"), FAMILIES)
def test_obeying_a_plan_is_attention(
    shape: Shape, config: KernelConfig, options: dict[str, Any]
) -> None:
    rng = np.random.default_rng(7)
    options = dict(options)
    changes = {n: options.pop(n) for n in ("batch_invariant", "sliding_window") if n in options}
    problem = problem_of(shape, **changes)
    per_head = {n: rng.standard_normal(shape.num_q_heads).astype(np.float32)
                for n in ("sinks", "alibi_slopes") if n in options}  # fmt: skip
    rule = ScoreRule(shape.head_dim**-0.5, changes.get("sliding_window"), options.get("soft_cap"))
    for _ in range(12):
        batch = random_batch(shape, rng)
        out, lse = attend(*batch.arrays, problem=problem, rule=rule, decode=config, **per_head)
        expected, expected_lse = reference.paged_attention(
            *batch.arrays,
            return_lse=True,
            soft_cap=rule.soft_cap,
            sliding_window=rule.sliding_window,
            **per_head,
        )
        assert error(out, expected) < 1e-5
        assert error(lse, expected_lse) < 1e-5


def shared_batch(
    shape: Shape, rng: np.random.Generator, groups: list[tuple[int, int]], alone: int
) -> Batch:
    """Decoding sequences of which (members, shared pages) share leading pages; some share none."""
    page = shape.page_size
    lens = [
        shared * page + int(rng.integers(1, 40))
        for members, shared in groups
        for _ in range(members)
    ]
    lens += [int(rng.integers(1, shape.max_len)) for _ in range(alone)]
    batch = make_batch(shape, rng, lens, [1] * len(lens))
    first = 0
    for members, shared in groups:
        batch.page_table[first : first + members, :shared] = batch.page_table[first, :shared]
        first += members
    order = rng.permutation(len(lens))
    batch.page_table[: len(lens)] = batch.page_table[order]
    batch.kv_lens[: len(lens)] = batch.kv_lens[order]
    return batch


CASCADED = Shape(16, 2, 3, 8, 14, 14, 420)
GROUPINGS = [
    ([(5, 18), (6, 20)], 2),  # two groups
    ([(3, 18), (6, 16)], 4),  # one too few members; one of exactly the least length
    ([(12, 15)], 1),  # too short a run
    ([(14, 24)], 0),
    ([], 9),
]


@pytest.mark.parametrize(("groups", "alone"), GROUPINGS)
@pytest.mark.parametrize("config", [DECODE, SPLIT, WIDE], ids=["whole", "split", "wide"])
def test_cascade_equals_flat(
    groups: list[tuple[int, int]], alone: int, config: KernelConfig
) -> None:
    rng = np.random.default_rng(3)
    problem, rule = problem_of(CASCADED), ScoreRule(CASCADED.head_dim**-0.5)
    call = functools.partial(attend, problem=problem, rule=rule, decode=config)
    for _ in range(3):
        batch = shared_batch(CASCADED, rng, groups, alone)
        out, lse = call(*batch.arrays, cascade=True)
        expected, expected_lse = reference.paged_attention(*batch.arrays, return_lse=True)
        assert error(out, expected) < 1e-5
        assert error(lse, expected_lse) < 1e-5


def kv_tiles_read(plan: AttentionPlan) -> int:
    """Over all items of all classes."""
    parts = [part for part in (*plan.classes, plan.prefix) if part is not None]
    items = [np.asarray(part.work.items) for part in parts if part.work is not None]
    return sum(int((i[:, work_plan.END] - i[:, work_plan.BEGIN]).sum()) for i in items)


def test_a_cascade_reads_a_shared_run_once_for_each_tile_of_members() -> None:
    batch = shared_batch(CASCADED, np.random.default_rng(1), [(8, 20)], 0)
    problem = problem_of(CASCADED)
    make = functools.partial(
        make_plan, problem, *arrays_of(batch)[2:], decode=DECODE, prefill=PREFILL
    )
    heads, members_per_tile = CASCADED.num_kv_heads, 2
    saved = kv_tiles_read(make()) - kv_tiles_read(make(cascade=True))
    assert saved == (8 - 8 // members_per_tile) * 20 * heads


def test_prompts_and_idle_sequences_are_in_no_group() -> None:
    rng = np.random.default_rng(2)
    batch = make_batch(CASCADED, rng, [400] * 5, [1, 0, 3, 1, 0])
    batch.page_table[:5] = batch.page_table[0]
    plan = make_plan(
        problem_of(CASCADED), *arrays_of(batch)[2:], cascade=True, decode=DECODE, prefill=PREFILL
    )
    assert plan.prefix is not None
    assert int(plan.prefix.tiles.count) == 0


@pytest.mark.parametrize("kwargs", [{}, {"split": True}, {"split": True, "chunk": 3}])
def test_items_cover_each_kv_tile_of_each_row_once_and_workers_are_balanced(
    kwargs: dict[str, Any],
) -> None:
    shape, rng = Shape(8, 2, 4, 8, 6, 54, 200), np.random.default_rng(0)
    tile = TileShape.fit(4, rows=8, multiple=8, kv_tile=16)
    workers, heads = 5, 2
    for _ in range(20):
        batch = random_batch(shape, rng)
        window = int(rng.integers(1, 90)) if rng.random() < 0.5 else None
        metadata = [jnp.asarray(a) for a in batch.arrays[3:]]
        tiles = work_plan.plan_tiles(
            *metadata, shape=tile, num_tokens=shape.num_tokens, sliding_window=window
        )
        kwargs = {"split": False, "max_kv_tiles": 14} | kwargs
        work = work_plan.plan_work(tiles, heads=heads, workers=workers, **kwargs)
        items, dealt = np.asarray(work.items), np.asarray(work.worker_items)
        assert dealt[0] == 0
        assert (items[dealt[-1] :, work_plan.BEGIN] == items[dealt[-1] :, work_plan.END]).all()
        assert (np.diff(dealt) >= 0).all()
        covered = [
            (t, h, k) for t, h, begin, end, *_ in items for k in range(begin, end)
        ]  # fmt: skip
        assert len(set(covered)) == len(covered)
        begins, ends = np.asarray(tiles.kv_begin), np.asarray(tiles.kv_end)
        assert set(covered) == {
            (t, h, k)
            for t in range(tiles.num_tiles)
            for h in range(heads)
            if ends[t] > begins[t]
            for k in range(begins[t] // 16, -(-ends[t] // 16))
        }
        rows = np.asarray(work.row_items)
        row_of = items[:, work_plan.TILE] * heads + items[:, work_plan.HEAD]
        assert all(rows[r] <= i < rows[r + 1] for i, r in enumerate(row_of[: dealt[-1]]))
        assert rows[-1] == dealt[-1]  # a merge reads what was run and nothing else
        if kwargs == {"split": True, "max_kv_tiles": 14}:
            loads = [
                sum(int(i[3] - i[2]) for i in items[dealt[w] : dealt[w + 1]])
                for w in range(workers)
            ]
            assert max(loads) <= max(4, -(-len(covered) // workers))


def test_fixed_chunks_do_not_depend_on_the_batch() -> None:
    shape = Shape(8, 1, 4, 8, 6, 6, 200)
    problem = problem_of(shape, batch_invariant=True)
    rng = np.random.default_rng(5)

    def cuts(kv_lens: list[int]) -> list[tuple[int, int]]:
        batch = make_batch(shape, rng, kv_lens, [1] * len(kv_lens))
        plan = make_plan(problem, *arrays_of(batch)[2:], decode=SPLIT, prefill=PREFILL)
        work = plan.classes[0].work
        assert work is not None
        items = np.asarray(work.items)
        first = items[(items[:, 0] == 0) & (items[:, 2] < items[:, 3])]
        return [(int(i[2]), int(i[3])) for i in first]

    assert cuts([170]) == cuts([170, 3, 90, 199, 1, 44])


def test_a_large_group_goes_in_passes() -> None:
    assert TileShape.fit(71, rows=32, multiple=8, kv_tile=64) == TileShape(24, 3, 1, 24, 64)
    assert TileShape.fit(7, rows=128, multiple=64, kv_tile=64) == TileShape(7, 1, 18, 128, 64)
    assert TileShape.fit(1, rows=8, multiple=8, kv_tile=64) == TileShape(1, 1, 8, 8, 64)


def test_a_plan_for_another_problem_is_refused() -> None:
    shape = Shape(8, 2, 3, 64, 5, 60, 150)
    batch = make_batch(shape, np.random.default_rng(0), [9], [1], jnp.bfloat16)
    q, pool, table, *metadata = arrays_of(batch)
    make = functools.partial(
        pallas_kernels.plan_attention,
        *metadata,
        q=q,
        kv_pages=pool,
        page_table=table,
        implementation="mosaic_gpu",
        decode=DECODE,
        prefill=PREFILL,
    )
    with pytest.raises(ValueError, match=r"made for sliding_window 8 \(now None\)"):
        pallas_kernels.paged_attention(
            *arrays_of(batch),
            plan=make(sliding_window=8),
            implementation="mosaic_gpu",
            interpret=True,
        )
    with pytest.raises(NotImplementedError, match="`cascade` does not work with `sliding_window`"):
        make(sliding_window=8, cascade=True)
    tile = KernelConfig("columns", rows=8, kv_tile=12, stages=2, workers=5)
    with pytest.raises(ValueError, match=r"`decode` must have a kv_tile that divides.*Got 12"):
        make(decode=tile)


def test_chunks_grow_with_the_longest_context_so_that_items_stay_few() -> None:
    shape = Shape(16, 1, 1, 8, 2, 2, 65_536)
    problem = problem_of(shape, batch_invariant=True)
    config = KernelConfig("columns", rows=8, kv_tile=64, stages=2, workers=5, split=True)
    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    plan = jax.eval_shape(
        functools.partial(make_plan, problem, decode=config, prefill=config),
        *(i32(s) for s in ((2, shape.pages_per_seq), (2,), (3,), ())),
    )
    items = plan.classes[0].work.items.shape[0]
    assert items <= 2 * (attention_plan.MOST_CHUNKS + 1)


def refused(match: str, error: type[Exception] = NotImplementedError, **options: Any) -> None:
    """A plan of these options is refused."""
    shape = Shape(8, 2, 3, 64, 5, 60, 150)
    q, pool, table, *metadata = arrays_of(
        make_batch(shape, np.random.default_rng(0), [9], [1], jnp.bfloat16)
    )
    call = functools.partial(
        pallas_kernels.plan_attention, *metadata, q=q, kv_pages=pool, page_table=table
    )
    with pytest.raises(error, match=match):
        call(**{"implementation": "mosaic_gpu"} | options)


def test_what_a_plan_cannot_hold_is_refused() -> None:
    refused("`cascade` does not work with `batch_invariant`", cascade=True, batch_invariant=True)
    refused("`cascade` must be used with a Mosaic", cascade=True, implementation="xla")
    tpu = KernelConfig("tpu", rows=8, kv_tile=64, stages=2, workers=1)
    refused("`decode` must have a kernel of columns, rows, mma", ValueError, decode=tpu)
    empty = KernelConfig("columns", rows=8, kv_tile=64, stages=0, workers=1)
    refused("`decode` must have positive sizes", ValueError, decode=empty)


def test_a_cascade_is_refused_where_rows_need_their_positions() -> None:
    batch = shared_batch(Shape(16, 1, 2, 64, 6, 6, 420), np.random.default_rng(0), [(5, 20)], 0)
    q, pool, table, *metadata = arrays_of(batch)
    q, pool = q.astype(jnp.bfloat16), pool.astype(jnp.bfloat16)
    plan = pallas_kernels.plan_attention(
        *metadata,
        q=q,
        kv_pages=pool,
        page_table=table,
        cascade=True,
        implementation="mosaic_gpu",
        decode=DECODE,
        prefill=PREFILL,
    )
    with pytest.raises(NotImplementedError, match="without `cascade` for `alibi_slopes`"):
        pallas_kernels.paged_attention(
            *(q, pool, table, *metadata),
            plan=plan,
            alibi_slopes=jnp.ones((2,), jnp.float32),
            implementation="mosaic_gpu",
            interpret=True,
        )
