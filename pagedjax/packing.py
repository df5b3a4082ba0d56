"""How plans and results travel: one i32 vector to the device, one i32 matrix back.

Floats and unsigned integers keep their bits. Knows nothing of models or of what is done with it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.config import SchedulerConfig
from pagedjax.plan import MAX_LOGPROBS, NO_TARGET, SamplingRows, StepPlan, StepResult
from pagedjax.sampling import DeviceRows, Sampled

_FLOAT_ROWS = frozenset(
    ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
)
# Column of each field in a row of words; the seed has two.
ROW_COLUMNS = tuple(field.name for field in fields(SamplingRows) if field.name != "seed")
ROW_WORDS = len(ROW_COLUMNS) + 2


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
            "rows": (s, ROW_WORDS),
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

    def idle(self, config: SchedulerConfig) -> np.ndarray:
        """A packed plan that runs no sequence and writes nowhere."""
        packed = np.zeros(self.size, np.int32)
        tokens = self.num_tokens
        dropped = config.num_pages * config.page_size
        packed[2 * tokens : 3 * tokens] = dropped + np.arange(tokens)  # slot_mapping is third
        rows = packed[self.size - self.max_seqs * ROW_WORDS :].reshape(-1, ROW_WORDS)
        rows[:] = neutral_row(config)
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


def _row_words(rows: SamplingRows) -> np.ndarray:
    """i32[R, ROW_WORDS]; floats and unsigned integers keep their bits."""
    columns = [getattr(rows, name)[:, None].view(np.int32) for name in ROW_COLUMNS]
    return np.concatenate([*columns, rows.seed.view(np.int32)], axis=1)


def neutral_row(config: SchedulerConfig) -> np.ndarray:
    """i32[ROW_WORDS]: greedy, nothing adjusted, nothing asked for."""
    values = dict.fromkeys(ROW_COLUMNS, 0) | {
        "slot": config.max_num_seqs,
        "token_slot": config.max_num_seqs,
        "target": NO_TARGET,
        "num_logprobs": -1,
        "top_p": int(np.float32(1.0).view(np.int32)),
        "repetition_penalty": int(np.float32(1.0).view(np.int32)),
    }
    return np.array([*values.values(), 0, 0], np.int32)


def pack_result(sampled: Sampled) -> jax.Array:
    """i32[R, 4 + 2 * MAX_LOGPROBS]."""
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


def unpack_result(packed: np.ndarray) -> StepResult:
    """What `pack_result` packed."""
    top = 4 + MAX_LOGPROBS
    return StepResult(
        tokens=packed[:, 0],
        ranks=packed[:, 1],
        corrupted=packed[:, 2] != 0,
        logprobs=np.ascontiguousarray(packed[:, 3]).view(np.float32),
        top_ids=packed[:, 4:top],
        top_logprobs=np.ascontiguousarray(packed[:, top:]).view(np.float32),
    )


def unpack_rows(words: jax.Array) -> tuple[DeviceRows, jax.Array]:
    """Rows of words i32[R, ROW_WORDS] as the sampler takes them, and their `token_slot`."""
    columns: dict[str, jax.Array] = {}
    for i, name in enumerate(ROW_COLUMNS):
        column = words[:, i]
        if name in _FLOAT_ROWS:
            column = jax.lax.bitcast_convert_type(column, jnp.float32)
        columns[name] = column
    seed = jax.lax.bitcast_convert_type(words[:, len(ROW_COLUMNS) :], jnp.uint32)
    token_slot = columns.pop("token_slot")
    return DeviceRows(seed=seed, **columns), token_slot
