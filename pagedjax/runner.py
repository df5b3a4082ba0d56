"""The device half's front door: parameters, the KV cache, and the compiled steps.

The only file with `jax.jit`. A step is one packed transfer in, one compiled call that donates the
cache and the sampler's state, and one readback. Every bucket is compiled ahead of time: after
`warm_up` an unknown shape is an error, never a compilation. Knows nothing of requests or queues.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax import kv_cache as kv_caches
from pagedjax import sampling
from pagedjax.attention import Batch
from pagedjax.config import SchedulerConfig
from pagedjax.kv_cache import KVCache
from pagedjax.models.contract import FlatModel
from pagedjax.plan import MAX_LOGPROBS, PageCopy, RowUpdate, SamplingRows, StepPlan, StepResult

type Progress = Callable[[int, int], None]  # (done, total) compiled shapes

_ROW_FIELDS = tuple(field.name for field in fields(SamplingRows))
_FLOAT_ROWS = frozenset(
    ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
)
_RESULT_COLUMNS = 4 + 2 * MAX_LOGPROBS  # token, rank, corrupted, logprob, top ids, top logprobs


class CompiledStep(Protocol):
    """An executable: donates cache and sampler state, returns them and the packed result."""

    def __call__(
        self, leaves: Any, kv_cache: KVCache, sampler: Any, packed: Any
    ) -> tuple[KVCache, Any, jax.Array]:
        """Runs one step."""
        ...


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where each array of a plan lies in the one i32 vector that is sent to the device."""

    num_tokens: int
    max_seqs: int
    pages_per_seq: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape, in the order of packing."""
        t, s = self.num_tokens, self.max_seqs
        plan = {
            "tokens": (t,),
            "positions": (t,),
            "slot_mapping": (t,),
            "page_table": (s, self.pages_per_seq),
            "kv_lens": (s,),
            "cu_q_lens": (s + 1,),
            "num_seqs": (),
        }
        rows = {name: (s, 2) if name == "seed" else (s,) for name in _ROW_FIELDS}
        return plan | rows

    @property
    def size(self) -> int:
        """Length of the vector."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def pack(self, plan: StepPlan) -> np.ndarray:
        """i32[size]; floats and unsigned integers keep their bits."""
        arrays = [getattr(plan.rows if name in _ROW_FIELDS else plan, name) for name in self.shapes]
        views = [np.asarray(a, _dtype_of(a)).reshape(-1).view(np.int32) for a in arrays]
        packed = np.concatenate(views)
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
            array = jax.lax.slice(packed, (start,), (start + size,)).reshape(shape)
            if name in _FLOAT_ROWS:
                array = jax.lax.bitcast_convert_type(array, jnp.float32)
            elif name == "seed":
                array = jax.lax.bitcast_convert_type(array, jnp.uint32)
            arrays[name] = array
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
    ) -> None:
        """Allocates the pool and the sampler's rows; compiles nothing yet.

        Args:
          model: the parameters as flat leaves and the function to put them together.
          config: resolved sizes.
          cache_dtype: of keys and values in pages.
          implementation: of paged attention; None: the best for the device.
        """
        self.model = model
        self._config = config
        self._cache_dtype = cache_dtype
        self._implementation = implementation
        self._steps: dict[int, CompiledStep] = {}
        self._copy: Callable[[KVCache, Any], KVCache] | None = None
        self._set_row: Callable[..., Any] | None = None
        self.kv_cache = self._new_cache()
        self._sampler = sampling.init_state(config.max_num_seqs, model.vocab_size)

    @property
    def num_compiled(self) -> int:
        """Step shapes compiled so far."""
        return len(self._steps)

    def layout(self, bucket: int) -> PackedLayout:
        """How a plan of this bucket is packed."""
        rows = self._config.rows_in(bucket)
        return PackedLayout(bucket, rows, self._config.pages_per_seq)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compiles every bucket, the page copy and the row update; runs each once."""
        buckets = self._config.buckets
        lowered = [self._lower(bucket) for bucket in buckets]
        with ThreadPoolExecutor(2) as pool:  # XLA compiles one program mostly on one thread
            compiled = pool.map(lambda program: program.compile(), lowered)
            for done, (bucket, step) in enumerate(zip(buckets, compiled, strict=True), 1):
                self._steps[bucket] = step
                if progress:
                    progress(done, len(buckets))
        self._compile_updates()
        for bucket in buckets:
            self._call(bucket, self._idle(bucket))

    def temp_bytes(self, bucket: int) -> int:
        """Temporary device memory of one step of this bucket, by the compiler's account."""
        analysis = self._lower(bucket).compile().memory_analysis()
        return 0 if analysis is None else int(analysis.temp_size_in_bytes)

    def run(self, plan: StepPlan) -> StepResult:
        """Runs one step: page copies, row updates, then the model and the sampler.

        Raises:
          KeyError: the plan's bucket was not warmed up.
        """
        if plan.copies:
            self._run_copies(plan.copies)
        for update in plan.row_updates:
            self._run_row_update(update)
        packed = self.layout(plan.bucket).pack(plan)
        return _unpack_result(np.asarray(self._call(plan.bucket, packed)))

    def _call(self, bucket: int, packed: np.ndarray) -> jax.Array:
        self.kv_cache, self._sampler, result = self._steps[bucket](
            self.model.leaves, self.kv_cache, self._sampler, packed
        )
        return result

    def _run_copies(self, copies: tuple[PageCopy, ...]) -> None:
        if self._copy is None:
            raise RuntimeError("`warm_up` must be called before `run`.")
        width = self._copy_width
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

    @property
    def _copy_width(self) -> int:
        return min(self._config.max_num_seqs, 32)  # a step with more copies runs several batches

    def _new_cache(self) -> KVCache:
        return kv_caches.init_kv_cache(
            num_layers=self.model.num_layers,
            num_pages=self._config.num_pages,
            num_kv_heads=self.model.num_kv_heads,
            page_size=self._config.page_size,
            head_dim=self.model.head_dim,
            dtype=self._cache_dtype,
        )

    def _lower(self, bucket: int) -> jax.stages.Lowered:
        layout = self.layout(bucket)
        step = functools.partial(_step, self.model.merge, layout, self._implementation)
        jitted = jax.jit(step, donate_argnums=(1, 2))
        packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
        return jitted.lower(self.model.leaves, self.kv_cache, self._sampler, packed)

    def _compile_updates(self) -> None:
        pairs = np.full((2, self._copy_width), self._config.num_pages, np.int32)
        copy = jax.jit(_copy_pages, donate_argnums=0).lower(self.kv_cache, pairs).compile()
        self.kv_cache = copy(self.kv_cache, pairs)
        empty = RowUpdate(0, {}, None, {}, frozenset())
        row = sampling.densify(empty, self.model.vocab_size)
        update = jax.jit(sampling.set_row, donate_argnums=0)
        set_row = update.lower(self._sampler, np.int32(0), *row).compile()
        self._sampler = set_row(self._sampler, np.int32(0), *row)
        self._copy, self._set_row = copy, set_row

    def _idle(self, bucket: int) -> np.ndarray:
        """A packed plan that runs no sequence and writes nowhere."""
        layout = self.layout(bucket)
        packed = np.zeros(layout.size, np.int32)
        dropped = self._config.num_pages * self._config.page_size
        start = 2 * bucket
        packed[start : start + bucket] = dropped + np.arange(bucket)
        return packed


def _step(
    merge: Callable[[Any], Any],
    layout: PackedLayout,
    implementation: str | None,
    leaves: tuple[jax.Array, ...],
    kv_cache: KVCache,
    sampler: sampling.SamplerState,
    packed: jax.Array,  # i32[layout.size]
) -> tuple[KVCache, sampling.SamplerState, jax.Array]:
    """**DONATES** cache and sampler state. The whole step; result i32[R, _RESULT_COLUMNS]."""
    arrays = layout.unpack(packed)
    rows = sampling.DeviceRows(**{name: arrays[name] for name in _ROW_FIELDS})
    batch = Batch(
        page_table=arrays["page_table"],
        kv_lens=arrays["kv_lens"],
        cu_q_lens=arrays["cu_q_lens"],
        num_seqs=arrays["num_seqs"],
        slot_mapping=arrays["slot_mapping"],
        implementation=implementation,
    )
    model = merge(leaves)
    hidden, kv_cache = model(arrays["tokens"], arrays["positions"], kv_cache, batch)
    logits = model.logits(hidden[rows.token_index])
    sampler, sampled = sampling.sample(logits, rows, sampler)
    return kv_cache, sampler, _pack_result(sampled)


def _copy_pages(kv_cache: KVCache, pairs: jax.Array) -> KVCache:
    """**DONATES** the cache. pairs: i32[2, n], sources and destinations."""
    return kv_caches.copy(kv_cache, pairs[0], pairs[1])


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


def _dtype_of(array: Any) -> np.dtype[Any]:
    dtype = np.asarray(array).dtype
    return np.dtype(np.int32) if dtype.kind == "i" else dtype
