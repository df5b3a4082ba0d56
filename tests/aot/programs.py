"""From a case to a function and its abstract arguments. Runs in a process that compiles.

Owns the sizes that all cases share. To be called inside the abstract mesh of the target
(`Compiler.mesh`): the plan and the tuned sizes are those of its chip.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagedjax import runner
from pagedjax.config import SchedulerConfig
from pagedjax.kv_cache import KVCache
from pagedjax.models.decoder import Decoder, ModelConfig
from pagedjax.packing import PackedLayout, neutral_row
from pallas_kernels import attention_plan, tuning
from pallas_kernels.attention_plan import Problem
from pallas_kernels.kv_update import copy_pages, write_kv
from pallas_kernels.paged_attention_mosaic import row_slopes
from pallas_kernels.score_rule import ScoreRule
from tests.aot.configurations import QUANTISED, Case
from tests.aot.targets import Target

NUM_KV_HEADS = 8
MAX_SEQS = 64
MAX_LEN = 8192
NUM_PAGES = 4097
LAYERS = 2

_Struct = jax.ShapeDtypeStruct


@dataclass(frozen=True, slots=True)
class Program:
    """What is compiled, and what must be true of the result."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    pools: tuple[Any, ...] = ()  # abstract arrays that must be changed in place
    planned_blocks: int | None = None  # blocks of the attention kernel that a multiprocessor runs


def build(case: Case, target: Target) -> Program:
    """The program of a case.

    Raises:
      NotImplementedError: the kernels cannot do it on this chip.
    """
    if case.is_attention:
        return _attend(case, target)
    if case.what == "write_kv":
        return _write(case, target)
    if case.what == "copy_pages":
        pool, ids = _pool(case), _i32(case.num_tokens)
        fn = functools.partial(copy_pages, implementation=_updates_by(target))
        return Program(fn, (pool, ids, ids), (0,), (pool,))
    return _step(case)


def implementation(target: Target) -> str:
    """Of attention."""
    return "mosaic_gpu" if target.is_gpu else "mosaic_tpu"


def _updates_by(target: Target) -> str:
    """Of page updates: the kernel needs TMA, which sm_80 and sm_89 do not have."""
    return "xla" if target.architecture in ("sm_80", "sm_89") else implementation(target)


def _attend(case: Case, target: Target) -> Program:
    """One launch: the tiles of a class, and the merge where rows are cut."""
    pool, scales = _pool(case), _scales(case)
    q = _Struct((case.num_tokens, NUM_KV_HEADS * case.group, case.head_dim), _q_dtype(case))
    table = _i32(MAX_SEQS, MAX_LEN // case.page_size)
    problem = Problem.of(
        q,
        pool,
        table,
        implementation=implementation(target),
        sliding_window=1000 if case.option == "window" else None,
        max_q_len=1 if case.what == "decode" else None,
        batch_invariant=False,
    )
    kernels = _kernels(target)
    kernels.check(problem, q.dtype, scales is not None)
    tuned = attention_plan.tuned_config(problem, case.what)
    config = dataclasses.replace(tuned, split=case.split)
    plan = jax.eval_shape(
        functools.partial(attention_plan.make_plan, problem, **{case.what: config}),
        table,
        _i32(MAX_SEQS),
        _i32(MAX_SEQS + 1),
        _i32(),
    )
    part = plan.classes[0 if case.what == "decode" else 1]
    rule = ScoreRule(
        case.head_dim**-0.5, problem.sliding_window, 30.0 if case.option == "cap" else None
    )
    shape = part.tiles.shape
    heads = NUM_KV_HEADS * shape.passes
    q_tiles = _Struct((heads, part.tiles.num_tiles, shape.rows, case.head_dim), q.dtype)

    def attend(q_tiles: Any, pool: Any, table: Any, part: Any, slopes: Any, scales: Any) -> Any:
        if slopes is not None:
            slopes = row_slopes(slopes, shape, NUM_KV_HEADS)
        return kernels.attend_tiles(
            q_tiles,
            pool,
            table,
            part,
            rule=rule,
            slopes=slopes,
            kv_scales=scales,
            out_dtype=q.dtype,
            interpret=False,
        )

    slopes = _Struct((q.shape[1],), jnp.float32) if case.option == "slopes" else None
    args = (q_tiles, pool, table, part, slopes, scales)
    blocks = None
    if target.is_gpu:
        blocks = config.workers // tuning.current_chip("mosaic_gpu").cores
    return Program(attend, args, planned_blocks=blocks)


def _kernels(target: Target) -> Any:
    if target.is_gpu:
        from pallas_kernels import paged_attention_mosaic_gpu as kernels
    else:
        from pallas_kernels import paged_attention_mosaic_tpu as kernels
    return kernels


def _write(case: Case, target: Target) -> Program:
    pool, scales = _pool(case), _scales(case)
    new = _Struct((case.num_tokens, NUM_KV_HEADS, case.head_dim), _q_dtype(case))
    by = _updates_by(target)

    def write(pool: Any, scales: Any, k: Any, v: Any, slots: Any) -> Any:
        return write_kv(pool, k, v, slots, kv_scales=scales, implementation=by)

    changed = (pool,) if scales is None else (pool, scales)
    return Program(write, (pool, scales, new, new, _i32(case.num_tokens)), (0, 1), changed)


def _step(case: Case) -> Program:
    """The engine's forward pass over layers of the sizes of Llama-3-8B."""
    config = SchedulerConfig(
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=512,
        max_model_len=MAX_LEN,
        page_size=case.page_size,
        num_pages=NUM_PAGES,
        vocab_size=SIZES["vocab_size"],
    )
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: Decoder(ModelConfig(**SIZES), dtype=jnp.bfloat16))
    )
    leaves, tree = jax.tree.flatten(state)

    def merge(arrays: Any) -> Any:
        return nnx.merge(graphdef, jax.tree.unflatten(tree, arrays))

    layout = PackedLayout(case.num_tokens, config.rows_in(case.num_tokens), config.pages_per_seq)
    cache = KVCache(tuple(_pool(case) for _ in range(LAYERS)))  # pyright: ignore[reportArgumentType]
    is_decode = config.is_decode_bucket(case.num_tokens)
    static = {"implementation": None, "max_q_len": 1 if is_decode else None}
    neutral = np.tile(neutral_row(config), (config.max_rows, 1))
    shape = runner.StepShape(layout, static, neutral)
    fn = functools.partial(runner.forward_pass, merge, shape)
    arguments = (tuple(leaves), cache, _i32(config.max_num_seqs), _i32(layout.size))
    return Program(fn, arguments, (1,), cache.kv_pages)


SIZES: dict[str, Any] = {
    "vocab_size": 128256,
    "embed_dim": 4096,
    "ffw_dim": 14336,
    "num_layers": LAYERS,
    "num_q_heads": 32,
    "num_kv_heads": NUM_KV_HEADS,
    "head_dim": 128,
    "max_positions": MAX_LEN,
}


def _pool(case: Case) -> Any:
    shape = (NUM_PAGES, 2, NUM_KV_HEADS, case.page_size, case.head_dim)
    return _Struct(shape, jnp.dtype(case.dtype))


def _scales(case: Case) -> Any:
    """Of a quantised pool, else None."""
    return _Struct(_pool(case).shape[:4], jnp.float32) if case.dtype in QUANTISED else None


def _q_dtype(case: Case) -> Any:
    return jnp.dtype(jnp.bfloat16 if case.dtype in QUANTISED else case.dtype)


def _i32(*shape: int) -> Any:
    return _Struct(shape, jnp.int32)
