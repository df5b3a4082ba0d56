"""Engine options and what they resolve to: frozen, checked, few. Knows nothing of devices or files.

`EngineConfig` is what a user writes (None = choose for the device). `SchedulerConfig` is what it
becomes once model, device and pool are known; the scheduler and the runner read only that.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from pagedjax.errors import ConfigError

type Dtype = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES = ("auto", "float32", "bfloat16", "float16")
type PreemptionMode = Literal["auto", "swap", "recompute"]
type VictimPolicy = Literal["latest", "least_cost"]
type SchedulingPolicy = Literal["fcfs", "priority"]

PREEMPTION_MODES = ("auto", "swap", "recompute")
VICTIM_POLICIES = ("latest", "least_cost")
SCHEDULING_POLICIES = ("fcfs", "priority")
MAX_AGEING = (
    1e6  # seconds for a level; times the largest priority, a float still tells 0.25 s apart
)

# kv_cache_dtype as users of vLLM write it -> the dtype's name.
KV_CACHE_DTYPES = {
    "auto": "auto",
    "float8_e4m3fn": "float8_e4m3fn",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "int8": "int8",
}
# quantization -> the dtype's name; None: weights stay as they are.
QUANTIZATIONS = {"none": None, "int8": "int8", "float8": "float8_e4m3fn", "fp8": "float8_e4m3fn"}
ALIASES = {"gpu_memory_utilization": "memory_utilization", "block_size": "page_size"}
MAX_PAGE_SIZE = 256
SMALLEST_MIXED_BUCKET = 64  # smaller prompts are padded: a compilation costs more than that
FEW_SEQUENCES = 8  # one sequence has a decode bucket of its own; two to so many share the next


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Engine options, named as in vLLM where the thing is the same. Raises `ConfigError`.

    Attributes:
      dtype: of weights, activations and pages; "auto" is the weights' own (float32 for
        quantised files on a CPU, bfloat16 elsewhere).
      seed: what draws of requests without a seed of their own depend on.
      max_model_len: longest prompt plus answer, in tokens; None: what the model allows and the
        pool can hold.
      memory_utilization: share of the memory for weights, pool and temporaries; None: 0.9 of an
        accelerator; on a CPU a quarter of the available RAM, at most 2 GiB, for the pool.
      max_num_seqs: sequences in one step.
      max_num_batched_tokens: tokens in one step, prompts and answers together.
      page_size: token positions of one page, a power of two.
      num_pages: pages of the pool (the null page included), instead of sizing by memory.
      enable_prefix_caching: keep the pages of finished prompts for requests that begin alike.
      attention_implementation: kernel to use; None: the best for the device.
      kv_cache_dtype: of pages; "auto" is `dtype`. "fp8" (float8_e4m3fn) and "int8" hold about
        twice as many tokens, each vector with a scale of its own.
      quantization: of the layers' matrices, when they are loaded: "int8", or "float8" (also "fp8":
        float8_e4m3fn), with a float32 scale for each output; activations, embeddings and the output
        head stay in `dtype`. Halves the weights of a 16-bit model. "none": they stay as they are.
      cascade_attention: sequences that share a long prefix read it once (Pallas kernels only).
      batch_invariant: a request gets the same bits whatever else runs, however its prompt is cut
        and whatever becomes of its pages. Every step is then padded to `max_num_batched_tokens`
        (default: `max_num_seqs`, at least 64), so that decoding costs what as many prompt tokens
        cost; not with `cascade_attention`.
      async_scheduling: each step is launched before the last one was read, so that the device never
        waits for the host. A sequence that turns out to have ended was run once more for nothing.
      swap_space: GiB of host memory for pages of preempted requests and evicted prefixes; 0: none.
      preemption_mode: what becomes of the pages of a request that gives way: "swap" moves them to
        `swap_space`, "recompute" drops them, "auto" does what is estimated to be faster. A swap
        that finds no room is a recompute.
      victim_policy: which request gives way to an older one: the "latest", or the one whose pages
        are restored at "least_cost" each.
      scheduling_policy: "fcfs", by arrival; or "priority": a request's `priority` first, smaller
        values earlier. It orders the queue and says who gives pages up; it stops nobody by itself.
      priority_ageing: seconds of waiting that make up for one level of priority, so that nothing
        starves: a request goes before one of d levels more urgent that came d times as many
        seconds later.
      max_queue_requests, max_queue_tokens: `add_request` refuses while so many requests, or prompt
        tokens, wait that never ran; None: no limit. `LLM.generate` feeds its prompts as room
        appears.
      event_log: file for all that the scheduler is asked and decides, prompts as token ids
        included; `pagedjax explain` and `pagedjax replay` read it. None: no log.
    """

    dtype: Dtype = "auto"
    seed: int = 0
    max_model_len: int | None = None
    memory_utilization: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    page_size: int | None = None
    num_pages: int | None = None
    enable_prefix_caching: bool = True
    attention_implementation: str | None = None
    kv_cache_dtype: str = "auto"
    quantization: str = "none"
    cascade_attention: bool = False
    batch_invariant: bool = False
    async_scheduling: bool = True
    swap_space: float = 0.0
    preemption_mode: PreemptionMode = "auto"
    victim_policy: VictimPolicy = "latest"
    scheduling_policy: SchedulingPolicy = "fcfs"
    priority_ageing: float = 60.0
    max_queue_requests: int | None = None
    max_queue_tokens: int | None = None
    event_log: str | None = None

    def __post_init__(self) -> None:
        """Checks each option alone; combinations are checked once the rest is known."""
        _check_choice("dtype", self.dtype, DTYPES)
        _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1, 2**31 - 1)
        if self.num_pages is not None:
            _check_int("num_pages", self.num_pages, 2, 2**31 - 1)
        if self.page_size is not None:
            check_page_size(self.page_size)
        if self.memory_utilization is not None:
            _check_fraction("memory_utilization", self.memory_utilization)
        named: Any = self.attention_implementation
        if named is not None and not isinstance(named, str):
            raise ConfigError(f"`attention_implementation` must be a name or None. Got {named!r}.")
        cache: Any = self.kv_cache_dtype
        if not isinstance(cache, str) or cache not in KV_CACHE_DTYPES:
            raise ConfigError(
                f"`kv_cache_dtype` must be one of {', '.join(KV_CACHE_DTYPES)}. Got {cache!r}."
            )
        quantized_dtype(self.quantization)
        for option in fields(self):
            name, value = option.name, getattr(self, option.name)
            if isinstance(option.default, bool) and not isinstance(value, bool):
                raise ConfigError(f"`{name}` must be true or false. Got {value!r}.")
        if self.batch_invariant and self.cascade_attention:
            raise ConfigError(
                "`batch_invariant` must be used without `cascade_attention`: who shares a prefix "
                "is a matter of what else is in the batch. Got both: turn one off."
            )
        _check_swap_space(self.swap_space)
        _check_file_name("event_log", self.event_log)
        _check_choice("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        _check_choice("victim_policy", self.victim_policy, VICTIM_POLICIES)
        _check_policy(self)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Builds from names and values as users write them; aliases are accepted.

        Raises:
          ConfigError: an unknown option (with the nearest known one), or one given twice.
        """
        known = [f.name for f in fields(cls)]
        values: dict[str, Any] = {}
        for name, value in options.items():
            canonical = ALIASES.get(name, name)
            if canonical not in known:
                near = difflib.get_close_matches(str(name), [*known, *ALIASES], n=1)
                hint = f" Did you mean `{near[0]}`?" if near else f" Known: {', '.join(known)}."
                raise ConfigError(f"`{name}` is not an engine option.{hint}")
            if canonical in values:
                raise ConfigError(f"`{canonical}` must be given once. Got it twice, as `{name}`.")
            values[canonical] = value
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Resolved sizes that scheduler and runner share. Raises `ConfigError`.

    `num_host_pages` counts pages that can be used, ids 1 to `num_host_pages`; 0: no host pool.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    num_pages: int
    vocab_size: int
    enable_prefix_caching: bool = True
    batch_invariant: bool = False
    num_host_pages: int = 0
    preemption_mode: PreemptionMode = "auto"
    victim_policy: VictimPolicy = "latest"
    scheduling_policy: SchedulingPolicy = "fcfs"
    priority_ageing: float = 60.0
    max_queue_requests: int | None = None
    max_queue_tokens: int | None = None
    fine_buckets: bool = False  # more of them: less padding, for programs that compile fast

    def __post_init__(self) -> None:
        """Checks the combination."""
        check_page_size(self.page_size)
        _check_int("num_host_pages", self.num_host_pages, 0, 2**31 - 2)
        _check_choice("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        _check_choice("victim_policy", self.victim_policy, VICTIM_POLICIES)
        _check_policy(self)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"`max_num_batched_tokens` must be at least `max_num_seqs` ({self.max_num_seqs}), "
                f"a token for each. Got {self.max_num_batched_tokens}."
            )
        if self.num_pages - 1 < self.pages_per_seq:
            raise ConfigError(
                f"`num_pages` must be at least {self.pages_per_seq + 1} for one request of "
                f"`max_model_len` {self.max_model_len} at `page_size` {self.page_size} (one page "
                f"is the null page). Got {self.num_pages}: raise it, or lower `max_model_len` to "
                f"{(self.num_pages - 1) * self.page_size}."
            )

    @property
    def pages_per_seq(self) -> int:
        """Width of a page table: pages of a sequence of `max_model_len`."""
        return -(-self.max_model_len // self.page_size)

    @property
    def max_rows(self) -> int:
        """Sequences, and sampling rows, that the largest step has room for."""
        return self.max_num_seqs

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        """Token counts of steps in which each sequence runs one token: 1, 8, 32, ...

        Reading the weights is most of such a step's time, so padding costs it little; only one row
        alone is a cheaper kind of product. On a CPU rows cost more: 1, 4, 8, 12, 16, 24, 32, ...
        None where all steps must be one program.
        """
        if self.batch_invariant:
            return ()
        few = min(FEW_SEQUENCES, self.max_rows)
        if self.fine_buckets:
            return tuple(sorted({1, min(4, few), *growing_finely(few, self.max_rows)}))
        return tuple(sorted({1, *growing(few, self.max_rows, factor=4)}))

    @property
    def mixed_buckets(self) -> tuple[int, ...]:
        """Token counts of steps with prompts in them; all are larger than a decode bucket."""
        if self.batch_invariant:
            return (max(self.max_rows, self.max_num_batched_tokens),)
        smallest = min(SMALLEST_MIXED_BUCKET, self.max_num_batched_tokens)
        while smallest <= self.max_rows:
            smallest *= 2
        if self.fine_buckets:
            return growing_finely(smallest, self.max_num_batched_tokens)
        return growing(smallest, self.max_num_batched_tokens, factor=2)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Packed token counts that a step is padded to, ascending; each compiles once."""
        return self.decode_buckets + self.mixed_buckets

    def bucket_for(self, num_tokens: int, num_rows: int, *, decode_only: bool) -> int:
        """Smallest bucket with room for so many tokens and sampling rows.

        `decode_only`: no sequence of the step runs more than one token.
        """
        candidates = self.buckets if decode_only else self.mixed_buckets
        return next(bucket for bucket in candidates if bucket >= max(num_tokens, num_rows))

    def is_decode_bucket(self, bucket: int) -> bool:
        """True for steps in which each sequence runs one token."""
        return bucket in self.decode_buckets

    def rows_in(self, bucket: int) -> int:
        """Sequences, and sampling rows, that a step of this bucket has room for."""
        return min(bucket, self.max_rows)


def growing(low: int, high: int, *, factor: int) -> tuple[int, ...]:
    """`low`, multiplied until `high` is reached; the last one is `high` itself where that fits."""
    values = [low]
    while values[-1] < high:
        values.append(min(values[-1] * factor, high))
    return tuple(values)


def growing_finely(low: int, high: int) -> tuple[int, ...]:
    """`growing` by a factor of 2, and what lies halfway between."""
    values = growing(low, high, factor=2)
    halfway = ((value + following) // 2 for value, following in itertools.pairwise(values))
    return tuple(sorted({*values, *halfway}))


def quantized_dtype(quantization: Any) -> str | None:
    """The name of the dtype of quantised weights, None for "none"; raises `ConfigError`."""
    if not isinstance(quantization, str) or quantization not in QUANTIZATIONS:
        raise ConfigError(
            f"`quantization` must be one of {', '.join(QUANTIZATIONS)}. Got {quantization!r}."
        )
    return QUANTIZATIONS[quantization]


def check_page_size(page_size: int) -> None:
    """Raises `ConfigError` unless it is a power of two in [1, 256]."""
    _check_int("page_size", page_size, 1, MAX_PAGE_SIZE)
    if page_size & (page_size - 1):
        raise ConfigError(
            f"`page_size` must be a power of two, 1 to {MAX_PAGE_SIZE}. Got {page_size}."
        )


def _check_policy(options: EngineConfig | SchedulerConfig) -> None:
    _check_choice("scheduling_policy", options.scheduling_policy, SCHEDULING_POLICIES)
    ageing: Any = options.priority_ageing
    is_number = isinstance(ageing, int | float) and not isinstance(ageing, bool)
    if not is_number or not 0.0 < ageing <= MAX_AGEING:
        raise ConfigError(
            f"`priority_ageing` must be seconds in (0, {MAX_AGEING:g}]: with none, a request could "
            f"wait for ever. Got {ageing!r}."
        )
    for name in ("max_queue_requests", "max_queue_tokens"):
        if getattr(options, name) is not None:
            _check_int(name, getattr(options, name), 1, 2**31 - 1)


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        # Python refuses to print integers of thousands of digits.
        huge = isinstance(value, int) and value.bit_length() > 1024
        got = f"an integer of {value.bit_length()} bits" if huge else repr(value)
        raise ConfigError(f"`{name}` must be an integer in [{low}, {high}]. Got {got}.")


def _check_file_name(name: str, value: Any) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"`{name}` must be the name of a file or None. Got {value!r}.")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:  # an array may not say what it equals
        shown = f"{', '.join(choices[:-1])} or {choices[-1]}"
        raise ConfigError(f"`{name}` must be {shown}. Got {value!r}.")


def _check_swap_space(value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise ConfigError(
            f"`swap_space` must be a finite number of GiB, 0 (none) or more. Got {value!r}."
        )


def _check_fraction(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0.0 < value <= 1.0:
        raise ConfigError(f"`{name}` must be a number in (0, 1]. Got {value!r}.")
