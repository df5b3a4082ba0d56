"""Start-up: from a model and options to a warm engine, and the report of what was decided.

Resolves every "choose for the device" into a number, sizes the pool, compiles all buckets.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pagedjax import cpu_kernels, device, environment, host_pool, kernel_choice, program_key
from pagedjax.capacity import (
    GIB,
    PageLayout,
    PoolSize,
    host_pages_in,
    pool_budget,
    size_pool,
)
from pagedjax.config import (
    KV_CACHE_DTYPES,
    SMALLEST_MIXED_BUCKET,
    EngineConfig,
    SchedulerConfig,
    check_page_size,
)
from pagedjax.device import DeviceDefaults, Target
from pagedjax.engine import LLMEngine
from pagedjax.errors import ConfigError
from pagedjax.events import EventLog
from pagedjax.kernel_choice import KernelChoice
from pagedjax.models import contract
from pagedjax.models.contract import FlatModel
from pagedjax.program_store import ProgramStore, open_folder
from pagedjax.programs import CompiledProgram, ProgramSet, Progress
from pagedjax.runner import ModelRunner
from pagedjax.scheduler import Scheduler
from pagedjax.tokenizer import Tokenizer
from pallas_kernels.platform import NATIVE_CPU
from pallas_kernels.quantize import LARGEST

logger = logging.getLogger("pagedjax")


@dataclass(frozen=True, slots=True)
class StartupReport:
    """What an operator wants to know of a running engine."""

    model: str
    device: str
    dtype: str
    quantization: str  # of the layers' matrices; "none": they are in `dtype`
    kv_cache_dtype: str
    attention: str  # implementation, and why
    products: str  # what computes them, and why
    weights_bytes: int
    load_seconds: float
    memory_free_bytes: int  # before the pool was allocated
    pool_bytes: int
    page_size: int
    num_pages: int
    num_host_pages: int  # of the swap space
    page_bytes: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_concurrency: float  # requests of max_model_len at once
    buckets: tuple[int, ...]
    programs: tuple[CompiledProgram, ...]  # a forward pass for each bucket, samplers, updates
    compile_seconds: float  # until the programs were ready, or known to be kept
    total_seconds: float

    @property
    def num_programs(self) -> int:
        """Programs that are ready, kept ones too."""
        return len(self.programs)

    @property
    def num_compiled(self) -> int:
        """Programs that this start compiled."""
        return sum(not program.is_kept for program in self.programs)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        programs = [dataclasses.asdict(program) for program in self.programs]
        counts = {"num_programs": self.num_programs, "num_compiled": self.num_compiled}
        return dataclasses.asdict(self) | {"programs": programs} | counts

    def program_lines(self) -> list[str]:
        """Each program's name and seconds, the slowest first."""
        slowest = sorted(self.programs, key=lambda program: -program.seconds)
        return [f"  {program}" for program in slowest]

    def lines(self) -> list[str]:
        """For people."""
        tokens = (self.num_pages - 1) * self.page_size
        swap_gib = self.num_host_pages * self.page_bytes / GIB
        quantized = "" if self.quantization == "none" else f" in {self.quantization}"
        swap = f", {self.num_host_pages} more in {swap_gib:.2f} GiB of swap space"
        return [
            f"Model {self.model} in {self.dtype} on {self.device}: weights{quantized} "
            f"{self.weights_bytes / GIB:.2f} GiB, loaded in {self.load_seconds:.1f} s",
            f"Memory: {self.memory_free_bytes / GIB:.2f} GiB free, "
            f"{self.pool_bytes / GIB:.2f} GiB for the KV cache: {self.num_pages} pages of "
            f"{self.page_size} tokens in {self.kv_cache_dtype}, {self.page_bytes:,} bytes a page"
            + (swap if self.num_host_pages else ""),
            f"KV cache size: {tokens:,} tokens. Maximum concurrency for {self.max_model_len:,} "
            f"tokens per request: {self.max_concurrency:.2f}x",
            f"Attention: {self.attention}. Steps of at most {self.max_num_seqs} sequences and "
            f"{self.max_num_batched_tokens} tokens. Products: {self.products}",
            f"Programs for steps of {list(self.buckets)} tokens: {self.num_compiled} compiled, "
            f"{self.num_programs - self.num_compiled} kept from earlier starts, in "
            f"{self.compile_seconds:.1f} s",
            f"Start-up took {self.total_seconds:.1f} s",
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What start-up has to know of a model beside its parameters."""

    name: str
    max_model_len: int | None  # None: the options must say it
    eos_token_ids: frozenset[int] = frozenset()
    load_seconds: float = 0.0
    identity: str | None = None  # see `FlatModel.identity`


def start_engine(
    model: Any,
    tokenizer: Tokenizer | None,
    options: EngineConfig,
    facts: ModelFacts,
    progress: Progress | None = None,
) -> tuple[LLMEngine, StartupReport]:
    """Checks the model, sizes the pool, compiles every step shape.

    Raises:
      ConfigError: the model breaks the contract, or options contradict each other.
      CapacityError: one request of `max_model_len` does not fit.
    """
    started = time.monotonic()
    events = None if options.event_log is None else EventLog(options.event_log)
    store = open_store()
    products = cpu_kernels.prepare(store)
    programs = ProgramSet(store)
    flat = contract.flatten(model, identity=facts.identity)
    target = device.here()
    sizes = decide(flat, options, facts, target, programs)
    config, layout = sizes.config, sizes.layout
    runner = _runner(flat, config, sizes.cache_dtype, sizes.choice, options, programs)
    compiling = time.monotonic()
    runner.warm_up(progress)
    now = time.monotonic()
    engine = LLMEngine(
        Scheduler(config, events=events),
        runner,
        tokenizer,
        seed=options.seed,
        eos_token_ids=facts.eos_token_ids,
        rates=lambda: runner.rates,
        async_scheduling=options.async_scheduling,
    )
    report = StartupReport(
        model=facts.name,
        device=target.name,
        dtype=str(sizes.dtype),
        quantization=options.quantization,
        kv_cache_dtype=str(sizes.cache_dtype),
        attention=str(sizes.choice),
        products=products,
        weights_bytes=flat.num_bytes,
        load_seconds=facts.load_seconds,
        memory_free_bytes=target.memory.free,
        pool_bytes=runner.kv_cache.nbytes,
        page_size=config.page_size,
        num_pages=config.num_pages,
        num_host_pages=config.num_host_pages,
        page_bytes=layout.page_bytes,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_concurrency=sizes.pool.concurrency(layout),
        buckets=config.buckets,
        programs=programs.log,
        compile_seconds=now - compiling,
        total_seconds=now - started + facts.load_seconds,
    )
    for line in report.lines():
        logger.info(line)
    return engine, report


def open_store() -> ProgramStore | None:
    """Where compiled programs are kept, if anywhere."""
    folder = environment.read().cache_dir
    if folder is not None and program_key.has_outdated_code():
        logger.warning("not keeping compiled programs: the sources changed after this import")
        return None
    folder = None if folder is None else open_folder(folder)
    return None if folder is None else ProgramStore(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What every option that nobody set became, and how much the pool has room for.

    Attributes:
      dtype: of the model.
      cache_dtype: of pages.
      choice: of the implementation of attention.
      config, layout, pool: the sizes themselves.
      step_bytes: temporaries of the largest step, taken off the pool's memory; None: not known,
        because it was not compiled (it is for an accelerator at hand, to size the pool).
      transfer_bytes: what pages on their way to the swap space take, taken off too.
    """

    dtype: jnp.dtype
    cache_dtype: jnp.dtype
    choice: KernelChoice
    config: SchedulerConfig
    layout: PageLayout
    pool: PoolSize
    step_bytes: int | None
    transfer_bytes: int


def decide(
    flat: FlatModel,
    options: EngineConfig,
    facts: ModelFacts,
    target: Target,
    programs: ProgramSet | None = None,
) -> Sizes:
    """Resolves every "choose for the device"; allocates nothing that stays.

    Args:
      flat: the model; shapes and dtypes are enough.
      options: what was asked for.
      facts: what else is known of the model.
      target: the device, its free memory without the weights'.
      programs: what compiles, on an accelerator, the largest step for its memory.

    Raises:
      ConfigError, CapacityError: as `start_engine` does.
    """
    dtype = flat.dtype if options.dtype == "auto" else jnp.dtype(options.dtype)
    cache_dtype = _cache_dtype(options, dtype)
    if flat.identity is None:  # our own models keep the contract; tracing one takes a while
        contract.check(flat, cache_dtype)
    page_size = options.page_size or target.defaults.page_size
    check_page_size(page_size)
    choice = kernel_choice.choose(
        flat,
        cache_dtype,
        page_size,
        options.attention_implementation,
        None if target.is_here else target.platform,
    )
    _check_cascade(options, choice)
    layout = PageLayout(
        flat.num_layers,
        flat.num_kv_heads,
        choice.head_dim,
        page_size,
        cache_dtype.itemsize,
        jnp.dtype(jnp.float32).itemsize if cache_dtype in LARGEST else 0,
    )
    step_bytes = None
    if target.is_here and target.platform != "cpu" and options.num_pages is None:
        step_bytes = _step_bytes(flat, options, layout, cache_dtype, choice, programs)
    transfer_bytes = host_pool.temp_bytes(layout.page_bytes) if options.swap_space else 0
    budget = pool_budget(
        on_cpu=target.platform == "cpu",
        free_bytes=target.memory.free - transfer_bytes - (step_bytes or 0),
        total_bytes=target.memory.total,
        utilization=options.memory_utilization,
    )
    fine = choice.implementation == NATIVE_CPU  # a second compiles each of its programs
    config, pool = _resolve(flat.vocab_size, options, facts, layout, target, budget, fine)
    return Sizes(
        dtype=dtype,
        cache_dtype=cache_dtype,
        choice=choice,
        config=config,
        layout=layout,
        pool=pool,
        step_bytes=step_bytes,
        transfer_bytes=transfer_bytes,
    )


def _resolve(
    vocab_size: int,
    options: EngineConfig,
    facts: ModelFacts,
    layout: PageLayout,
    target: Target,
    budget: int,  # bytes that the pool may take
    fine_buckets: bool,
) -> tuple[SchedulerConfig, PoolSize]:
    defaults = target.defaults
    max_num_seqs = options.max_num_seqs or min(
        defaults.max_num_seqs, options.max_num_batched_tokens or defaults.max_num_seqs
    )
    model_len = _model_len(options, facts)
    pool = size_pool(
        layout,
        budget=budget,
        model_len=model_len,
        asked_len=options.max_model_len,
        asked_pages=options.num_pages,
        max_num_seqs=max_num_seqs,
        free_bytes=target.memory.free,
    )
    most_tokens = max_num_seqs * pool.max_model_len
    tokens = options.max_num_batched_tokens or max(
        max_num_seqs, min(_default_tokens(options, defaults), most_tokens)
    )
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=tokens,
        max_model_len=pool.max_model_len,
        page_size=layout.page_size,
        num_pages=pool.num_pages,
        vocab_size=vocab_size,
        enable_prefix_caching=options.enable_prefix_caching,
        batch_invariant=options.batch_invariant,
        num_host_pages=_num_host_pages(options, layout, pool, target),
        preemption_mode=options.preemption_mode,
        victim_policy=options.victim_policy,
        scheduling_policy=options.scheduling_policy,
        priority_ageing=options.priority_ageing,
        max_queue_requests=options.max_queue_requests,
        max_queue_tokens=options.max_queue_tokens,
        fine_buckets=fine_buckets,
    )
    return config, pool


def _default_tokens(options: EngineConfig, defaults: DeviceDefaults) -> int:
    """Tokens of a step; few where every step has as many."""
    return SMALLEST_MIXED_BUCKET if options.batch_invariant else defaults.max_num_batched_tokens


def _num_host_pages(
    options: EngineConfig, layout: PageLayout, pool: PoolSize, target: Target
) -> int:
    if options.swap_space == 0:
        if options.preemption_mode == "swap":
            logger.warning(
                "`preemption_mode` is swap and `swap_space` is 0: nothing can be moved, so what "
                "gives way is computed again. Set `swap_space` to some GiB."
            )
        return 0
    free = target.host_memory.free
    if target.platform == "cpu":  # where the page pool is in the same memory
        free -= pool.num_pages * layout.page_bytes
    num_host_pages = host_pages_in(layout, options.swap_space, free)
    if num_host_pages == 0:
        logger.warning(
            "`swap_space` of %g GiB holds no page of %d bytes: there is none.",
            options.swap_space,
            layout.page_bytes,
        )
    return num_host_pages


def _model_len(options: EngineConfig, facts: ModelFacts) -> int:
    if facts.max_model_len is None:
        if options.max_model_len is None:
            raise ConfigError(
                "`max_model_len` must be given: the model does not say how long a sequence may "
                "be. Pass `max_model_len=...`, or give the model an attribute `max_model_len`."
            )
        return options.max_model_len
    longest: Any = facts.max_model_len  # of a user's own model: whatever its attribute holds
    if isinstance(longest, bool) or not isinstance(longest, int) or longest < 1:
        raise ConfigError(f"`model.max_model_len` must be a positive integer. Got {longest!r}.")
    if options.max_model_len is not None and options.max_model_len > facts.max_model_len:
        raise ConfigError(
            f"`max_model_len` must be at most {facts.max_model_len}, what the model was made for. "
            f"Got {options.max_model_len}."
        )
    return facts.max_model_len


def _step_bytes(
    flat: FlatModel,
    options: EngineConfig,
    layout: PageLayout,
    cache_dtype: jnp.dtype,
    choice: KernelChoice,
    programs: ProgramSet | None,
) -> int:
    """Temporaries of the largest step, compiled once over a pool of two pages."""
    defaults = device.defaults()
    seqs = options.max_num_seqs or defaults.max_num_seqs
    tokens = options.max_num_batched_tokens or _default_tokens(options, defaults)
    probe = SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=max(seqs, tokens),
        max_model_len=layout.page_size,
        page_size=layout.page_size,
        num_pages=2,
        vocab_size=flat.vocab_size,
        batch_invariant=options.batch_invariant,
    )
    runner = _runner(flat, probe, cache_dtype, choice, options, programs)
    return runner.temp_bytes(probe.buckets[-1])


def _runner(
    flat: FlatModel,
    config: SchedulerConfig,
    cache_dtype: jnp.dtype,
    choice: KernelChoice,
    options: EngineConfig,
    programs: ProgramSet | None,
) -> ModelRunner:
    return ModelRunner(
        flat,
        config,
        cache_dtype=cache_dtype,
        implementation=choice.implementation,
        head_dim=choice.head_dim,
        cascade=options.cascade_attention,
        programs=programs,
    )


def _cache_dtype(options: EngineConfig, dtype: jnp.dtype) -> jnp.dtype:
    name = KV_CACHE_DTYPES[options.kv_cache_dtype]
    return dtype if name == "auto" else jnp.dtype(name)


def _check_cascade(options: EngineConfig, choice: KernelChoice) -> None:
    if options.cascade_attention and not choice.implementation.startswith("mosaic"):
        raise ConfigError(
            f"`cascade_attention` must be used with the Pallas kernels (mosaic_gpu, mosaic_tpu). "
            f"Got attention through {choice}."
        )
