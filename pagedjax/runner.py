"""The device half's front door: parameters, the KV cache, and the compiled steps.

A step is one packed transfer in, a compiled forward pass that
donates the cache, a compiled sampler that donates its state, and one readback. They are two
programs because a sampler serves many buckets, and compiling costs seconds. All are compiled ahead
of time: after `warm_up` an unknown shape is an error, never a compilation. What a step that raised
took with it, `recover` makes anew. Knows nothing of requests or queues.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
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
from pagedjax.plan import (
    MAX_LOGPROBS,
    NO_TARGET,
    PageCopy,
    RowUpdate,
    SamplingRows,
    StepPlan,
    StepResult,
)
from pagedjax.programs import Handle, Program, ProgramSet, Progress, abstract
from pagedjax.rates import MovingMedian, Rates

_FLOAT_ROWS = frozenset(
    ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
)
# Column of each field in a row of words; the seed has two.
_ROW_COLUMNS = tuple(field.name for field in fields(SamplingRows) if field.name != "seed")
_ROW_WORDS = len(_ROW_COLUMNS) + 2
_RESULT_COLUMNS = 4 + 2 * MAX_LOGPROBS  # token, rank, corrupted, logprob, top ids, top logprobs
_SMALL_SAMPLER = 8  # rows; a sampler compiles once for all steps of at most so many rows


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where each array of a plan lies in the one i32 vector that is sent to the device."""

    num_tokens: int
    max_seqs: int
    pages_per_seq: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape, in the order of packing; `rows` is a matrix of words."""
        t, s = self.num_tokens, self.max_seqs
        return {
            "tokens": (t,),
            "positions": (t,),
            "slot_mapping": (t,),
            "page_table": (s, self.pages_per_seq),
            "kv_lens": (s,),
            "cu_q_lens": (s + 1,),
            "num_seqs": (),
            "rows": (s, _ROW_WORDS),
        }

    @property
    def size(self) -> int:
        """Length of the vector."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def pack(self, plan: StepPlan) -> np.ndarray:
        """i32[size], a fresh array."""
        arrays = [_row_words(plan.rows)]
        arrays[:0] = [np.asarray(getattr(plan, n), np.int32) for n in self.shapes if n != "rows"]
        packed = np.concatenate([array.reshape(-1) for array in arrays])
        if packed.size != self.size:
            raise ValueError(
                f"`plan` must fill bucket {plan.bucket} exactly ({self.size} words). "
                f"Got {packed.size}."
            )
        return packed

    def unpack(self, packed: jax.Array) -> dict[str, jax.Array]:
        """The arrays again, on the device."""
        arrays: dict[str, jax.Array] = {}
        start = 0
        for name, shape in self.shapes.items():
            size = math.prod(shape)
            arrays[name] = jax.lax.slice(packed, (start,), (start + size,)).reshape(shape)
            start += size
        return arrays


class ModelRunner:
    """Owns the parameters, the cache and the sampler's state; runs plans."""

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
        # The largest first: several threads then end at about the same time.
        pools, rows, vocab_size = self.kv_cache, self._sampler, self.model.vocab_size
        programs = {
            **{("forward", bucket): self._forward_program(bucket) for bucket in reversed(buckets)},
            **{("sampler", width): _sampler_program(rows, vocab_size, width) for width in widths},
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
        static = {**self._static, "max_q_len": 1 if is_decode else None}
        neutral = np.tile(_neutral_row(self._config), (_sampler_width(self._config, bucket), 1))
        packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
        kv_cache, identity = abstract(self.kv_cache), self.model.identity
        return Program(
            name=f"decoding {bucket} tokens" if is_decode else f"step of {bucket} tokens",
            function=functools.partial(_forward, self.model.merge, layout, static, neutral),
            holds=None if identity is None else f"{identity} {layout} {static} {neutral.tolist()}",
            arguments=(self.model.leaves, kv_cache, packed),
            result=(kv_cache, 0, 0),
            donated=(1,),
        )

    def run(self, plan: StepPlan) -> StepResult:
        """Runs one step: swaps, page copies, row updates, then the model and the sampler.

        While the device computes, pages that were swapped out are filed in the host pool.

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
        self.host_pool.drain()
        result = _unpack_result(np.asarray(dispatched))
        if not is_swapping:
            self._note_time(plan.bucket, plan.num_tokens, started)
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
        bucket = self._config.buckets[0]
        jax.block_until_ready(self._call(bucket, self._idle(bucket)))
        jax.block_until_ready((self.kv_cache, self._sampler))
        return is_lost

    def forward(self, bucket: int, packed: Any) -> tuple[jax.Array, jax.Array]:
        """One bare forward pass over the cache: logits, and the sampling rows as words.

        Args:
          packed: i32[layout(bucket).size], as `PackedLayout.pack` makes it.
        """
        self.kv_cache, logits, rows = self._forwards[bucket](
            self.model.leaves, self.kv_cache, packed
        )
        return logits, rows

    def _call(self, bucket: int, packed: np.ndarray) -> jax.Array:
        logits, rows = self.forward(bucket, packed)
        sample = self._samplers[_sampler_width(self._config, bucket)]
        self._sampler, result = sample(self._sampler, logits, rows)
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
            jax.block_until_ready(self._call(bucket, self._idle(bucket)))
            self._note_time(bucket, bucket, started)

    def _idle(self, bucket: int) -> np.ndarray:
        """A packed plan that runs no sequence and writes nowhere."""
        layout = self.layout(bucket)
        packed = np.zeros(layout.size, np.int32)
        dropped = self._config.num_pages * self._config.page_size
        packed[2 * bucket : 3 * bucket] = dropped + np.arange(bucket)  # slot_mapping is third
        rows = packed[layout.size - layout.max_seqs * _ROW_WORDS :].reshape(-1, _ROW_WORDS)
        rows[:] = _neutral_row(self._config)
        return packed

    def _note_time(self, bucket: int, num_tokens: int, started: float) -> None:
        """Steps that prompts fill tell what a token costs; others are mostly the weights."""
        if num_tokens * 2 > bucket and not self._config.is_decode_bucket(bucket):
            self._seconds_per_token.add((time.perf_counter() - started) / num_tokens)


def _sampler_width(config: SchedulerConfig, bucket: int) -> int:
    """Rows that the sampler of this bucket has: padded, so that few samplers compile."""
    small = min(_SMALL_SAMPLER, config.max_rows)
    return small if config.rows_in(bucket) <= small else config.max_rows


def _sampler_program(state: sampling.SamplerState, vocab_size: int, width: int) -> Program:
    logits = jax.ShapeDtypeStruct((width, vocab_size), jnp.float32)
    rows = jax.ShapeDtypeStruct((width, _ROW_WORDS), jnp.int32)
    return Program(
        name=f"sampling {width} rows",
        function=_sample,
        holds="",
        arguments=(abstract(state), logits, rows),
        result=(abstract(state), 0),
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


def _forward(
    merge: Callable[[Any], Any],
    layout: PackedLayout,
    static: dict[str, Any],  # the batch's static fields
    neutral: np.ndarray,  # i32[width, _ROW_WORDS], rows that pad the step's rows
    leaves: tuple[jax.Array, ...],
    kv_cache: KVCache,
    packed: jax.Array,  # i32[layout.size]
) -> tuple[KVCache, jax.Array, jax.Array]:
    """**DONATES** the cache. Returns it, f32 logits [width, vocab_size], i32 rows of words."""
    arrays = layout.unpack(packed)
    batch = Batch(
        page_table=arrays["page_table"],
        kv_lens=arrays["kv_lens"],
        cu_q_lens=arrays["cu_q_lens"],
        num_seqs=arrays["num_seqs"],
        slot_mapping=arrays["slot_mapping"],
        **static,
    )
    model = merge(leaves)
    hidden, kv_cache = model(arrays["tokens"], arrays["positions"], kv_cache, batch)
    rows = arrays["rows"]
    logits = model.logits(hidden[rows[:, _ROW_COLUMNS.index("token_index")]]).astype(jnp.float32)
    extra = neutral.shape[0] - rows.shape[0]
    logits = jnp.pad(logits, ((0, extra), (0, 0)))
    return kv_cache, logits, jnp.concatenate([rows, neutral[:extra]])


def _sample(
    state: sampling.SamplerState, logits: jax.Array, words: jax.Array
) -> tuple[sampling.SamplerState, jax.Array]:
    """**DONATES** the state. words: i32[R, _ROW_WORDS]; the result is i32[R, _RESULT_COLUMNS]."""
    columns: dict[str, jax.Array] = {}
    for i, name in enumerate(_ROW_COLUMNS):
        column = words[:, i]
        if name in _FLOAT_ROWS:
            column = jax.lax.bitcast_convert_type(column, jnp.float32)
        columns[name] = column
    seed = jax.lax.bitcast_convert_type(words[:, len(_ROW_COLUMNS) :], jnp.uint32)
    state, sampled = sampling.sample(logits, sampling.DeviceRows(seed=seed, **columns), state)
    return state, _pack_result(sampled)


def _row_words(rows: SamplingRows) -> np.ndarray:
    """i32[R, _ROW_WORDS]; floats and unsigned integers keep their bits."""
    columns = [getattr(rows, name)[:, None].view(np.int32) for name in _ROW_COLUMNS]
    return np.concatenate([*columns, rows.seed.view(np.int32)], axis=1)


def _neutral_row(config: SchedulerConfig) -> np.ndarray:
    """i32[_ROW_WORDS]: greedy, nothing adjusted, nothing asked for."""
    values = dict.fromkeys(_ROW_COLUMNS, 0) | {
        "slot": config.max_num_seqs,
        "target": NO_TARGET,
        "num_logprobs": -1,
        "top_p": int(np.float32(1.0).view(np.int32)),
        "repetition_penalty": int(np.float32(1.0).view(np.int32)),
    }
    return np.array([*values.values(), 0, 0], np.int32)


def _pack_result(sampled: sampling.Sampled) -> jax.Array:
    as_int = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.int32)
    columns = (
        sampled.tokens[:, None],
        sampled.ranks[:, None],
        sampled.corrupted.astype(jnp.int32)[:, None],
        as_int(sampled.logprobs)[:, None],
        sampled.top_ids,
        as_int(sampled.top_logprobs),
    )
    return jnp.concatenate(columns, axis=1)


def _unpack_result(packed: np.ndarray) -> StepResult:
    top = 4 + MAX_LOGPROBS
    return StepResult(
        tokens=packed[:, 0],
        ranks=packed[:, 1],
        corrupted=packed[:, 2] != 0,
        logprobs=np.ascontiguousarray(packed[:, 3]).view(np.float32),
        top_ids=packed[:, 4:top],
        top_logprobs=np.ascontiguousarray(packed[:, top:]).view(np.float32),
    )
