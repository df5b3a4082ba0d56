"""`plan_attention`: everything about a step's attention that does not depend on q, K or V.

Owns the choice of tile classes and their kernels' sizes. A plan is a pytree made once a step; all
layers with the same window share it. Knows nothing of how a kernel computes.
"""

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import cascade as cascades
from pallas_kernels import tuning
from pallas_kernels.tuning import KernelClass, KernelConfig
from pallas_kernels.work_plan import QueryTiles, TileShape, WorkList, plan_tiles, plan_work

KERNELS = {"mosaic_gpu": ("columns", "rows", "mma"), "mosaic_tpu": ("tpu",)}
CHUNK = 512  # positions of an item when results must not depend on the batch ...
MOST_CHUNKS = 8  # ... and the most items of a row: longer contexts have longer chunks


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan was made for: static, compared when it is used."""

    implementation: str
    num_tokens: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int  # of the pool
    page_size: int
    dtype: str  # of the pool
    max_seqs: int
    pages_per_seq: int
    sliding_window: int | None
    max_q_len: int | None
    batch_invariant: bool

    @classmethod
    def of(
        cls,
        q: Any,
        kv_pages: Any,
        page_table: Any,
        *,
        implementation: str,
        sliding_window: int | None,
        max_q_len: int | None,
        batch_invariant: bool,
    ) -> "Problem":
        """From arrays, or anything else with their shape and dtype."""
        return cls(
            implementation=implementation,
            num_tokens=q.shape[0],
            num_q_heads=q.shape[1],
            num_kv_heads=kv_pages.shape[2],
            head_dim=kv_pages.shape[4],
            page_size=kv_pages.shape[3],
            dtype=jnp.dtype(kv_pages.dtype).name,
            max_seqs=page_table.shape[0],
            pages_per_seq=page_table.shape[1],
            sliding_window=sliding_window,
            max_q_len=max_q_len,
            batch_invariant=batch_invariant,
        )

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def max_len(self) -> int:
        """Positions that a page table row can hold."""
        return self.pages_per_seq * self.page_size


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class TileClass:
    """Tiles that one launch computes."""

    tiles: QueryTiles
    work: WorkList | None  # None: the kernel runs over the tiles themselves (TPU)
    config: KernelConfig = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """`paged_attention(plan=...)`. Each token is in at most one of `classes`."""

    classes: tuple[TileClass, ...]
    prefix: TileClass | None  # cascade: the shared runs; its results are merged with the others
    problem: Problem = field(metadata={"static": True})

    def check(self, problem: Problem) -> None:
        """Raises `ValueError` unless the plan was made for `problem`."""
        made_for, asked = dataclasses.asdict(self.problem), dataclasses.asdict(problem)
        wrong = [n for n in asked if asked[n] != made_for[n]]
        if wrong:
            told = ", ".join(f"{n} {made_for[n]!r} (now {asked[n]!r})" for n in wrong)
            raise ValueError(f"`plan` must be made for the same problem. Got one made for {told}.")


def make_plan(
    problem: Problem,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    cascade: bool = False,
    decode: KernelConfig | None = None,
    prefill: KernelConfig | None = None,
) -> AttentionPlan:
    """A plan for one step; see `pallas_kernels.plan_attention`.

    Args:
      problem: static facts.
      page_table, kv_lens, cu_q_lens, num_seqs: as `paged_attention` takes them.
      cascade: read long runs of pages that sequences share once. Only for plain causal attention.
      decode, prefill: sizes of the launches; None: the tuned ones for the device.
    """
    decode = decode or tuned_config(problem, "decode")
    prefill = prefill or tuned_config(problem, "prefill")
    _check_configs(problem, decode, prefill, cascade)
    return _make_plan(
        page_table,
        kv_lens,
        cu_q_lens,
        num_seqs,
        problem=problem,
        cascade=cascade,
        decode=decode,
        prefill=prefill,
    )


@functools.partial(jax.jit, static_argnames=("problem", "cascade", "decode", "prefill"))
def _make_plan(
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    problem: Problem,
    cascade: bool,
    decode: KernelConfig,
    prefill: KernelConfig,
) -> AttentionPlan:
    decode_shape, prefill_shape = (_tile_shape(problem, config) for config in (decode, prefill))
    metadata = (kv_lens, cu_q_lens, num_seqs)
    few = decode_shape.tokens_per_tile  # a sequence with more new tokens is prefill
    shared = None
    prefix = None
    if cascade:
        groups = cascades.find_groups(
            page_table,
            *metadata,
            page_size=problem.page_size,
            multiple=max(decode.kv_tile, problem.page_size),
        )
        shared = groups.shared_lens
        tiles = cascades.plan_prefix(groups, cu_q_lens, decode_shape, problem.num_tokens)
        prefix = _deal(problem, tiles, decode)
    tiles = plan_tiles(
        *metadata,
        shape=decode_shape,
        num_tokens=problem.num_tokens,
        up_to=few,
        sliding_window=problem.sliding_window,
        kv_begin=shared,
    )
    classes = [_deal(problem, tiles, decode)]
    if problem.max_q_len is None or problem.max_q_len > few:
        tiles = plan_tiles(
            *metadata,
            shape=prefill_shape,
            num_tokens=problem.num_tokens,
            above=few,
            sliding_window=problem.sliding_window,
        )
        classes.append(_deal(problem, tiles, prefill))
    return AttentionPlan(tuple(classes), prefix, problem)


def _tile_shape(problem: Problem, config: KernelConfig) -> TileShape:
    multiple = 8 if config.kernel in ("columns", "tpu") else min(config.rows, 64)
    return TileShape.fit(problem.group, rows=config.rows, multiple=multiple, kv_tile=config.kv_tile)


def _deal(problem: Problem, tiles: QueryTiles, config: KernelConfig) -> TileClass:
    if config.kernel == "tpu":
        return TileClass(tiles, None, config)
    chunk = None
    most = -(-problem.max_len // config.kv_tile)
    if problem.batch_invariant and config.split:
        # From sizes that no batch changes: the row is cut at the same places in every step.
        chunk = max(CHUNK // config.kv_tile, -(-most // MOST_CHUNKS))
    work = plan_work(
        tiles,
        heads=problem.num_kv_heads * tiles.shape.passes,
        workers=config.workers,
        split=config.split,
        chunk=chunk,
        max_kv_tiles=most,
    )
    return TileClass(tiles, work, config)


def tuned_config(problem: Problem, kind: str) -> KernelConfig:
    """Sizes of the "decode" or the "prefill" launch on the device that is traced for."""
    kernel_class: KernelClass = "decode" if kind == "decode" else "prefill"
    config = tuning.lookup(problem.implementation, kernel_class, problem)
    if problem.batch_invariant or config.kernel == "tpu":
        return dataclasses.replace(config, split=kind == "decode" and config.kernel != "tpu")
    shape = _tile_shape(problem, config)
    heads = problem.num_kv_heads * shape.passes
    tiles = problem.max_seqs
    if kind == "prefill":
        tiles = problem.num_tokens // shape.tokens_per_tile + 1
    # With many more rows than workers the lengths even out, and whole rows need no merge.
    few_rows = tiles * heads < (4 if kind == "decode" else 1) * config.workers
    return dataclasses.replace(config, split=few_rows)


def _check_configs(
    problem: Problem, decode: KernelConfig, prefill: KernelConfig, cascade: bool
) -> None:
    if cascade and problem.sliding_window is not None:
        raise NotImplementedError(
            "`cascade` does not work with `sliding_window`: a window reads no shared prefix. Use "
            "a plan without it."
        )
    if cascade and problem.batch_invariant:
        raise NotImplementedError(
            "`cascade` does not work with `batch_invariant`: who shares a prefix is a matter of "
            "the batch. Use a plan without it."
        )
    for name, config in (("decode", decode), ("prefill", prefill)):
        known = KERNELS[problem.implementation]
        if config.kernel not in known:
            raise ValueError(
                f"`{name}` must have a kernel of {', '.join(known)} for "
                f"{problem.implementation!r}. Got {config.kernel!r}."
            )
        if min(config.rows, config.kv_tile, config.stages, config.workers) < 1:
            raise ValueError(f"`{name}` must have positive sizes. Got {config}.")
        tile, page = config.kv_tile, problem.page_size
        if tile % page and page % tile:
            raise ValueError(
                f"`{name}` must have a kv_tile that divides the page size {page} or is a "
                f"multiple of it. Got {tile}."
            )
