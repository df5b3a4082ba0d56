"""The device half's front door: parameters, the KV cache, and the compiled steps.

A step is one packed transfer in, a compiled forward pass that donates the cache, a compiled sampler
that donates its state, and one readback. They are two programs because a sampler serves many
buckets, and compiling costs seconds. All are compiled ahead of time: after `warm_up` an unknown
shape is an error, never a compilation. A step may be launched before the last one was read: what
that one drew stays on the device, by slot. What a step that raised took with it, `recover` makes
anew. Knows nothing of requests or queues.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax import host_pool, sampling, state_programs
from pagedjax.attention import Batch
from pagedjax.config import SchedulerConfig
from pagedjax.host_pool import HostPool, MovePrograms
from pagedjax.kv_cache import KVCache
from pagedjax.models.contract import FlatModel
from pagedjax.packing import (
    ROW_COLUMNS,
    ROW_WORDS,
    PackedLayout,
    neutral_row,
    pack_result,
    unpack_result,
    unpack_rows,
)
from pagedjax.plan import FROM_SLOT, PageCopy, RowUpdate, StepPlan, StepResult
from pagedjax.programs import Handle, Program, ProgramSet, Progress, abstract
from pagedjax.rates import MovingMedian, Rates

_SMALL_SAMPLER = 8  # rows; a sampler compiles once for all steps of at most so many rows


@dataclass(frozen=True, slots=True)
class StepShape:
    """What is fixed of a bucket's forward pass."""

    layout: PackedLayout
    static: dict[str, Any]  # the batch's static fields
    neutral: np.ndarray  # i32[width, ROW_WORDS], rows that pad the step's rows for the sampler

    @property
    def text(self) -> str:
        """All of it; two that differ have different texts."""
        return f"{self.layout} {self.static} {self.neutral.tolist()}"


class ModelRunner:
    """Owns the parameters, the cache and the sampler's state; runs plans.

    Attributes:
      kv_cache: the pools; every call that changes them DONATES them.
      last_tokens: i32[max_num_seqs], the token that was drawn last for each slot.
      host_pool: the bytes of pages that were swapped out.
      programs: what was compiled, and what that took.
    """

    def __init__(
        self,
        model: FlatModel,
        config: SchedulerConfig,
        *,
        cache_dtype: jnp.dtype,
        implementation: str | None = None,
        head_dim: int | None = None,
        cascade: bool = False,
        programs: ProgramSet | None = None,
    ) -> None:
        """Allocates the pool and the sampler's rows; compiles nothing else yet.

        Args:
          model: the parameters as flat leaves and the function to put them together.
          config: resolved sizes.
          cache_dtype: of keys and values in pages.
          implementation: of paged attention; None: the best for the device.
          head_dim: of the pages, at least the model's; None: the model's.
          cascade: read long prefixes that sequences share once.
          programs: what compiles; None: one that keeps nothing.
        """
        self.model = model
        self.programs = programs or ProgramSet()
        self._config = config
        self._static = {
            "implementation": implementation,
            "cascade": cascade,
            "batch_invariant": config.batch_invariant,
        }
        self._forwards: Mapping[int, Handle] = {}
        self._samplers: Mapping[int, Callable[..., Any]] = {}
        self._copy: Callable[[KVCache, Any], KVCache] | None = None
        self._set_row: Callable[..., Any] | None = None
        fresh = self.programs.compile({
            "layer": state_programs.layer_program(
                model, config, cache_dtype, head_dim or model.head_dim
            ),
            "rows": state_programs.state_program(config.max_num_seqs, model.vocab_size),
        })  # fmt: skip
        self._new_cache = functools.partial(
            state_programs.new_cache, fresh["layer"], model.num_layers
        )
        self._new_sampler: Callable[[], sampling.SamplerState] = fresh["rows"]
        self.kv_cache = self._new_cache()
        self._sampler = self._new_sampler()
        self.last_tokens = _no_tokens(config)
        self._last_read = 0.0  # when, in seconds
        self.host_pool = HostPool(config.num_host_pages, self.kv_cache)
        self._seconds_per_token = MovingMedian()

    @property
    def rates(self) -> Rates:
        """What a page's way and a token's computation took lately."""
        host = self.host_pool
        per_token = self._seconds_per_token.value
        return Rates(host.seconds_out.value, host.seconds_in.value, per_token)

    def layout(self, bucket: int) -> PackedLayout:
        """How a plan of this bucket is packed."""
        rows = self._config.rows_in(bucket)
        return PackedLayout(bucket, rows, self._config.pages_per_seq)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compiles every bucket's forward pass, the samplers and the updates.

        What was compiled runs once. Of what was kept from an earlier start, a prompt's smallest
        step runs once, and the rest may still be read when this returns.
        """
        buckets = self._config.buckets
        widths = sorted({_sampler_width(self._config, bucket) for bucket in buckets})
        host = self.host_pool
        smallest = self._config.mixed_buckets[0]
        move_widths = host.widths if self._config.num_host_pages else ()
        implementation = self._static["implementation"]
        pools, rows, vocab_size = self.kv_cache, self._sampler, self.model.vocab_size
        tokens = abstract(self.last_tokens)
        sampler_program = functools.partial(_sampler_program, rows, tokens, vocab_size)
        # The largest first: several threads then end at about the same time.
        programs = {
            **{("forward", bucket): self._forward_program(bucket) for bucket in reversed(buckets)},
            **{("sampler", width): sampler_program(width) for width in widths},
            ("copy", 0): state_programs.copy_program(pools, self._config, implementation),
            ("row", 0): state_programs.row_program(rows, vocab_size),
            **host_pool.move_programs(move_widths, pools, implementation),
        }
        sampler = ("sampler", _sampler_width(self._config, smallest))
        first = [("forward", smallest), sampler, ("copy", 0), ("row", 0)]
        compiled = self.programs.compile(programs, progress, first=first)
        self._forwards = {bucket: compiled["forward", bucket] for bucket in buckets}
        self._samplers = {width: compiled["sampler", width] for width in widths}
        self._copy, self._set_row = compiled["copy", 0], compiled["row", 0]
        host.programs = {
            width: MovePrograms(compiled["gather", width], compiled["scatter", width])
            for width in move_widths
        }
        self._rehearse()

    def temp_bytes(self, bucket: int) -> int:
        """Temporary device memory of one forward pass of this bucket, by the compiler's account."""
        program = self._forward_program(bucket)
        handle = self.programs.compile({0: replace(program, name="largest step, for its memory")})
        analysis = handle[0].compiled.memory_analysis()
        return 0 if analysis is None else int(analysis.temp_size_in_bytes)

    def lower_forward(self, bucket: int) -> jax.stages.Lowered:
        """One bucket's forward pass, traced and lowered; what it was compiled from."""
        return self._forward_program(bucket).lower()

    def _forward_program(self, bucket: int) -> Program:
        layout = self.layout(bucket)
        is_decode = self._config.is_decode_bucket(bucket)
        shape = StepShape(
            layout,
            {**self._static, "max_q_len": 1 if is_decode else None},
            np.tile(neutral_row(self._config), (_sampler_width(self._config, bucket), 1)),
        )
        packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
        kv_cache, identity = abstract(self.kv_cache), self.model.identity
        return Program(
            name=f"decoding {bucket} tokens" if is_decode else f"step of {bucket} tokens",
            function=functools.partial(forward_pass, self.model.merge, shape),
            holds=None if identity is None else f"{identity} {shape.text}",
            arguments=(self.model.leaves, kv_cache, abstract(self.last_tokens), packed),
            result=(kv_cache, 0, 0),
            donated=(1,),
        )

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Starts one step: swaps, page copies, row updates, then the model and the sampler.

        While the device computes, pages that were swapped out are filed in the host pool.

        Returns:
          what waits for the result, to be called once, in the order of the launches.

        Raises:
          KeyError: the plan's bucket was not warmed up.
          TransferError: pages could not be swapped in; nothing else was done.
        """
        started = time.perf_counter()
        is_swapping = bool(plan.swaps_out or plan.swaps_in)
        if is_swapping:
            caches = self.host_pool.swap(self.kv_cache, plan.swaps_out, plan.swaps_in)
            for self.kv_cache in caches:
                pass  # each batch donates the pools: the handle has to go along
        if plan.copies:
            self._run_copies(plan.copies)
        for update in plan.row_updates:
            self._run_row_update(update)
        packed = self.layout(plan.bucket).pack(plan)
        dispatched = self._call(plan.bucket, packed)
        dispatched.copy_to_host_async()
        return functools.partial(self._read, plan, dispatched, None if is_swapping else started)

    def _read(self, plan: StepPlan, dispatched: jax.Array, launched: float | None) -> StepResult:
        """Waits for a step; `launched`: when, None: its time says nothing of its tokens."""
        self.host_pool.drain()
        result = unpack_result(np.asarray(dispatched))
        if launched is not None:  # it could not begin before the one in front of it ended
            self._note_time(plan.bucket, plan.num_tokens, max(launched, self._last_read))
        self._last_read = time.perf_counter()
        lost = self.host_pool.take_lost()
        return replace(result, lost_host_pages=lost) if lost else result

    def recover(self) -> bool:
        """Makes the runner usable after a step that raised, and tries it with an idle step.

        What a step had donated when it raised is lost; pools and sampler rows are made anew then,
        with every page zero. Host pages keep what they hold.

        Returns:
          True when the content of pages or of sampler rows was lost.

        Raises:
          Exception: whatever the device raises when it does not compute any more.
        """
        is_lost = False
        if not _is_alive(self.kv_cache):
            _delete(self.kv_cache)  # before there are new ones: both would not fit
            self.kv_cache = self._new_cache()
            is_lost = True
        if not _is_alive(self._sampler):
            self._sampler = self._new_sampler()
            is_lost = True
        self.last_tokens = _no_tokens(self._config)  # nothing in flight is left
        bucket = self._config.buckets[0]
        jax.block_until_ready(self._call(bucket, self.layout(bucket).idle(self._config)))
        jax.block_until_ready((self.kv_cache, self._sampler))
        return is_lost

    def forward(self, bucket: int, packed: Any) -> tuple[jax.Array, jax.Array]:
        """One bare forward pass over the cache: logits, and the sampling rows as words.

        Args:
          packed: i32[layout(bucket).size], as `PackedLayout.pack` makes it.
        """
        self.kv_cache, logits, rows = self._forwards[bucket](
            self.model.leaves, self.kv_cache, self.last_tokens, packed
        )
        return logits, rows

    def _call(self, bucket: int, packed: np.ndarray) -> jax.Array:
        logits, rows = self.forward(bucket, packed)
        sample = self._samplers[_sampler_width(self._config, bucket)]
        self._sampler, self.last_tokens, result = sample(
            self._sampler, self.last_tokens, logits, rows
        )
        return result

    def _run_copies(self, copies: tuple[PageCopy, ...]) -> None:
        if self._copy is None:
            raise RuntimeError("`warm_up` must be called before `run`.")
        width = state_programs.copy_width(self._config)
        for start in range(0, len(copies), width):
            pairs = np.zeros((2, width), np.int32)
            pairs[1] = self._config.num_pages + np.arange(width)  # past the end: dropped
            for i, page_copy in enumerate(copies[start : start + width]):
                pairs[:, i] = page_copy.src, page_copy.dst
            self.kv_cache = self._copy(self.kv_cache, pairs)

    def _run_row_update(self, update: RowUpdate) -> None:
        if self._set_row is None:
            raise RuntimeError("`warm_up` must be called before `run`.")
        row = sampling.densify(update, self.model.vocab_size)
        self._sampler = self._set_row(self._sampler, np.int32(update.slot), *row)

    def _rehearse(self) -> None:
        """Runs programs once, which changes nothing: errors, if any, come now."""
        if self._config.num_host_pages:
            self.kv_cache = self.host_pool.rehearse(self.kv_cache)
        if self._copy is not None and self._set_row is not None:
            self.kv_cache = self._copy(self.kv_cache, state_programs.no_copies(self._config))
            row = state_programs.empty_row(self.model.vocab_size)
            self._sampler = self._set_row(self._sampler, np.int32(0), *row)
        smallest = self._config.mixed_buckets[0]
        for bucket in self._config.buckets:
            if bucket != smallest and self._forwards[bucket].was_kept:
                continue
            started = time.perf_counter()
            jax.block_until_ready(self._call(bucket, self.layout(bucket).idle(self._config)))
            self._note_time(bucket, bucket, started)

    def _note_time(self, bucket: int, num_tokens: int, started: float) -> None:
        """Steps that prompts fill tell what a token costs; others are mostly the weights."""
        if num_tokens * 2 > bucket and not self._config.is_decode_bucket(bucket):
            self._seconds_per_token.add((time.perf_counter() - started) / num_tokens)


def _no_tokens(config: SchedulerConfig) -> jax.Array:
    return jax.device_put(np.zeros(config.max_num_seqs, np.int32))


def _sampler_width(config: SchedulerConfig, bucket: int) -> int:
    """Rows that the sampler of this bucket has: padded, so that few samplers compile."""
    small = min(_SMALL_SAMPLER, config.max_rows)
    return small if config.rows_in(bucket) <= small else config.max_rows


def _sampler_program(
    state: sampling.SamplerState, last_tokens: jax.Array, vocab_size: int, width: int
) -> Program:
    logits = jax.ShapeDtypeStruct((width, vocab_size), jnp.float32)
    rows = jax.ShapeDtypeStruct((width, ROW_WORDS), jnp.int32)
    return Program(
        name=f"sampling {width} rows",
        function=_sample,
        holds="",
        arguments=(abstract(state), last_tokens, logits, rows),
        result=(abstract(state), 0, 0),
        donated=(0,),
    )


def _is_alive(tree: Any) -> bool:
    """False when an array was donated to a call that failed, or is what such a call left."""
    try:
        jax.block_until_ready(tree)
    except Exception:
        return False
    return not any(array.is_deleted() for array in jax.tree.leaves(tree))


def _delete(tree: Any) -> None:
    for array in jax.tree.leaves(tree):
        if not array.is_deleted():
            array.delete()


def forward_pass(
    merge: Callable[[Any], Any],
    shape: StepShape,
    leaves: tuple[jax.Array, ...],
    kv_cache: KVCache,
    last_tokens: jax.Array,  # i32[max_num_seqs], by slot
    packed: jax.Array,  # i32[shape.layout.size]
) -> tuple[KVCache, jax.Array, jax.Array]:
    """**DONATES** the cache. Returns it, f32 logits [width, vocab_size], i32 rows of words."""
    arrays = shape.layout.unpack(packed)
    batch = Batch(
        page_table=arrays["page_table"],
        kv_lens=arrays["kv_lens"],
        cu_q_lens=arrays["cu_q_lens"],
        num_seqs=arrays["num_seqs"],
        slot_mapping=arrays["slot_mapping"],
        **shape.static,
    )
    model = merge(leaves)
    tokens = arrays["tokens"]
    drawn = last_tokens.at[FROM_SLOT - tokens].get(mode="clip")  # of those below 0
    tokens = jnp.where(tokens < 0, drawn, tokens)
    hidden, kv_cache = model(tokens, arrays["positions"], kv_cache, batch)
    rows = arrays["rows"]
    logits = model.logits(hidden[rows[:, ROW_COLUMNS.index("token_index")]]).astype(jnp.float32)
    extra = shape.neutral.shape[0] - rows.shape[0]
    logits = jnp.pad(logits, ((0, extra), (0, 0)))
    return kv_cache, logits, jnp.concatenate([rows, shape.neutral[:extra]])


def _sample(
    state: sampling.SamplerState,
    last_tokens: jax.Array,  # i32[max_num_seqs], by slot
    logits: jax.Array,  # f32[R, vocab_size]
    words: jax.Array,  # i32[R, ROW_WORDS]
) -> tuple[sampling.SamplerState, jax.Array, jax.Array]:
    """**DONATES** the state. Returns it, the last tokens, and the packed result."""
    rows, token_slot = unpack_rows(words)
    state, sampled = sampling.sample(logits, rows, state)
    last_tokens = last_tokens.at[token_slot].set(sampled.tokens, mode="drop")
    return state, last_tokens, pack_result(sampled)
