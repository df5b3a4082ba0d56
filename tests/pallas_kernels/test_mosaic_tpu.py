"""Attention by the TPU kernel, interpreted: equal to float64, race-free, blind to unused memory.

Every batch holds NaN wherever no length reaches, and garbage in the tails of its page table.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import mosaic_tpu_attend, reference, work_plan
from pallas_kernels.mosaic_tpu_attend import attend_tpu
from pallas_kernels.score_rule import ScoreRule
from pallas_kernels.tuning import KernelConfig
from pallas_kernels.work_plan import QueryTiles, TileShape
from tests.pallas_kernels.cases import Batch, Shape, error, make_batch
from tests.pallas_kernels.races import assert_no_tpu_race

EAGER = pltpu.InterpretParams(
    detect_races=True, dma_execution_mode="eager", out_of_bounds_reads="raise"
)
BF16, F32 = ml_dtypes.bfloat16, np.float32
EXACT, PLAIN = 1e-5, 3e-3  # P in two 16-bit parts, and in one
RAGGED = ((33, 1, 20, 16), (9, 1, 5, 16))  # lengths and query rows: a chunk, ..., a whole prompt
DECODE = ((40, 1, 8, 17, 3), (1, 1, 1, 1, 1))


@dataclass(frozen=True)
class Case:
    """A batch and how to attend to it."""

    dtype: Any = BF16
    lengths: tuple[tuple[int, ...], tuple[int, ...]] = RAGGED
    page_size: int = 8
    num_kv_heads: int = 2
    group: int = 4
    head_dim: int = 128
    rows: int = 8
    kv_tile: int = 16
    stages: int = 2
    workers: int = 1
    sliding_window: int | None = None
    soft_cap: float | None = None
    slopes: bool = False
    split_p: bool = True
    interpret: Any = True

    @property
    def shape(self) -> Shape:
        kv_lens, q_lens = self.lengths
        return Shape(
            self.page_size,
            self.num_kv_heads,
            self.group,
            self.head_dim,
            len(kv_lens) + 1,
            sum(q_lens) + 3,
            max(kv_lens),
        )

    def batch(self, rng: np.random.Generator) -> Batch:
        kv_lens, q_lens = self.lengths
        return make_batch(self.shape, rng, list(kv_lens), list(q_lens), self.dtype)

    def tiles(self, batch: Batch) -> QueryTiles:
        multiple = 8 if batch.q.dtype == F32 else 16
        fit = TileShape.fit(self.group, rows=self.rows, multiple=multiple, kv_tile=self.kv_tile)
        return work_plan.plan_tiles(
            jnp.asarray(batch.kv_lens),
            jnp.asarray(batch.cu_q_lens),
            jnp.asarray(batch.num_seqs),
            shape=fit,
            num_tokens=self.shape.num_tokens,
            sliding_window=self.sliding_window,
        )

    def attend(
        self, batch: Batch, tiles: QueryTiles, scales: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """out and lse of every token, after a check for races."""
        shape = self.shape
        slopes = None
        if self.slopes:
            slopes = self.slope_of_heads.reshape(-1, self.group)  # one pass: a KV head's group
            rows = np.arange(tiles.shape.rows) % self.group
            slopes = jnp.asarray(slopes[:, rows])
        q_tiles = work_plan.pack_queries(
            jnp.asarray(batch.q), tiles, self.num_kv_heads, self.head_dim
        )
        o, lse = attend_tpu(
            q_tiles,
            jnp.asarray(batch.kv_pages),
            jnp.asarray(batch.page_table),
            tiles,
            rule=ScoreRule(self.head_dim**-0.5, self.sliding_window, self.soft_cap),
            config=KernelConfig(
                "tpu",
                tiles.shape.rows,
                self.kv_tile,
                self.stages,
                self.workers,
                split_p=self.split_p,
            ),
            slopes=slopes,
            kv_scales=None if scales is None else jnp.asarray(scales),
            out_dtype=jnp.float32,
            interpret=self.interpret,
        )
        out = work_plan.unpack_rows(o, tiles, shape.num_q_heads, 0.0)
        lse = work_plan.unpack_rows(lse, tiles, shape.num_q_heads, -np.inf)
        out, lse = np.asarray(out), np.asarray(lse)
        assert_no_tpu_race()
        return out, lse

    @property
    def slope_of_heads(self) -> np.ndarray:
        return np.exp2(-np.arange(1, self.shape.num_q_heads + 1)).astype(np.float32)

    def expected(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        return reference.paged_attention(
            *batch.arrays,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            alibi_slopes=self.slope_of_heads if self.slopes else None,
            return_lse=True,
        )


@pytest.fixture(autouse=True)
def _fresh_interpreter() -> Iterator[None]:
    """An error inside a kernel leaves the interpreter unusable for the next test."""
    yield
    pltpu.reset_tpu_interpret_mode_state()


def check(case: Case, rng: np.random.Generator) -> None:
    batch = case.batch(rng)
    out, lse = case.attend(batch, case.tiles(batch))
    expected, expected_lse = case.expected(batch)
    assert error(out, expected) <= (EXACT if case.split_p else PLAIN)
    assert error(lse, expected_lse) <= EXACT


CASES = {
    "chunks and a prompt": Case(),
    "decode in passes, three pages a block": Case(
        lengths=DECODE, num_kv_heads=1, group=12, kv_tile=24, stages=3
    ),
    "everything at once": Case(
        F32, sliding_window=7, soft_cap=5.0, slopes=True, workers=2, rows=16, interpret=EAGER
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_equals_float64(case: Case, rng: np.random.Generator) -> None:
    check(case, rng)


MORE_CASES = [
    *[Case(page_size=p, kv_tile=2 * p) for p in (16, 32, 64, 128)],
    *[Case(group=g, lengths=DECODE) for g in (1, 2, 7, 8, 16)],
    *[Case(stages=s, lengths=DECODE, workers=w) for s in (2, 4) for w in (1, 2, 5)],
    *[Case(sliding_window=w, dtype=d) for w in (1, 8, 17) for d in (BF16, F32)],
    Case(head_dim=256),
    Case(split_p=False),
    Case(kv_tile=8),
    Case(rows=32, lengths=((70, 64), (64, 64)), slopes=True),
    Case(soft_cap=2.0, interpret=EAGER),
    Case(stages=3, interpret=EAGER, lengths=((0, 5, 0, 33), (0, 1, 0, 1))),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_CASES, ids=str)
def test_attention_equals_float64_everywhere(case: Case, rng: np.random.Generator) -> None:
    check(case, rng)


def quantized(batch: Batch, dtype: Any) -> tuple[Batch, np.ndarray, Batch]:
    """The batch in eight bits, its scales (NaN where nothing is), and what it stands for."""
    pool = batch.kv_pages.astype(np.float32)
    largest = 127 if dtype == np.int8 else 448
    scales = np.abs(pool).max(axis=-1) / largest  # NaN in unused positions
    scales[0] = 1  # the null page
    with np.errstate(invalid="ignore"):
        values = pool / scales[..., None]
        values = np.rint(values) if dtype == np.int8 else values
        values = np.where(np.isnan(values) & (dtype == np.int8), 77, values).astype(dtype)
        stands_for = values.astype(np.float32) * scales[..., None]
    return (
        dataclasses.replace(batch, kv_pages=values),
        scales,
        dataclasses.replace(batch, kv_pages=stands_for),
    )


@pytest.mark.parametrize(
    ("dtype", "q_dtype"),
    [
        pytest.param(ml_dtypes.float8_e4m3fn, BF16, id="e4m3"),
        pytest.param(np.int8, BF16, id="int8", marks=pytest.mark.slow),
        pytest.param(np.int8, F32, id="int8 with f32 queries", marks=pytest.mark.slow),
    ],
)
def test_quantized_pages_equal_what_they_stand_for(
    dtype: Any, q_dtype: Any, rng: np.random.Generator
) -> None:
    case = Case(q_dtype, lengths=((33, 12), (1, 5)))
    batch, scales, stands_for = quantized(case.batch(rng), dtype)
    out, lse = case.attend(batch, case.tiles(batch), scales)
    expected, expected_lse = case.expected(stands_for)
    assert error(out, expected) <= EXACT
    assert error(lse, expected_lse) <= EXACT


def test_empty_tiles_see_nothing(rng: np.random.Generator) -> None:
    """Tiles whose positions are all someone else's part, between others and last."""
    case = Case(lengths=DECODE)
    batch = case.batch(rng)
    tiles = case.tiles(batch)
    empty = np.zeros(tiles.num_tiles, bool)
    empty[[1, 4]] = True
    begin = jnp.where(jnp.asarray(empty), tiles.kv_end, tiles.kv_begin)
    out, lse = case.attend(batch, dataclasses.replace(tiles, kv_begin=begin))
    expected, expected_lse = case.expected(batch)
    for token in range(5):
        if empty[token]:
            assert not out[token].any()
            assert np.isneginf(lse[token]).all()
        else:
            assert error(out[token], expected[token]) <= EXACT
            assert error(lse[token], expected_lse[token]) <= EXACT


@pytest.mark.slow
def test_no_tile_at_all_runs(rng: np.random.Generator) -> None:
    case = Case(lengths=((5,), (1,)), workers=2)
    batch = case.batch(rng)
    batch = dataclasses.replace(batch, num_seqs=np.array(0, np.int32))
    out, lse = case.attend(batch, case.tiles(batch))
    assert not out.any()
    assert np.isneginf(lse).all()


def test_a_planted_page_id_outside_the_pool_is_reported(rng: np.random.Generator) -> None:
    """A test of the tests: an entry that a length reaches, so the kernel follows it."""
    case = Case(lengths=((20,), (1,)))
    batch = case.batch(rng)
    batch.page_table[0, 1] = len(batch.kv_pages)
    with pytest.raises(Exception, match=r"(?i)out.of.bounds"):
        case.attend(batch, case.tiles(batch))


def test_a_planted_race_is_reported(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test of the tests: nobody waits for the copies of a block."""
    monkeypatch.setattr(mosaic_tpu_attend, "_wait_for_block", lambda *_: None)
    case = Case(lengths=((40,), (1,)), interpret=EAGER)
    batch = case.batch(rng)
    with pytest.raises(Exception, match=r"(?i)race"):
        case.attend(batch, case.tiles(batch))


def test_what_the_memories_cannot_hold_is_refused() -> None:
    def attend(pages_per_seq: int, rows: int) -> Any:
        i32, tiles = jnp.int32, jnp.zeros(4, jnp.int32)
        plan = QueryTiles(
            tokens=tiles[:, None],
            seq=tiles,
            position=tiles,
            kv_begin=tiles,
            kv_end=tiles,
            count=jnp.int32(0),
            place=tiles,
            shape=TileShape(1, 1, rows, rows, 512),
        )
        return jax.eval_shape(
            lambda q, pool, table: attend_tpu(
                q,
                pool,
                table,
                plan,
                rule=ScoreRule(1.0),
                config=KernelConfig("tpu", rows, 512, 2, 1),
                slopes=None,
                kv_scales=None,
                out_dtype=jnp.float32,
                interpret=False,
            ),
            jax.ShapeDtypeStruct((32, 4, rows, 128), jnp.float32),
            jax.ShapeDtypeStruct((9, 2, 32, 64, 128), jnp.float32),
            jax.ShapeDtypeStruct((2, pages_per_seq), i32),
        )

    assert attend(64, 8)[0].shape == (32, 4, 8, 128)
    with pytest.raises(NotImplementedError, match=r"921600 bytes of scalar memory. Got 200000"):
        attend(200_000, 8)
    with pytest.raises(NotImplementedError, match=r"50331648 bytes of vector memory. Got \d+"):
        attend(64, 1024)
