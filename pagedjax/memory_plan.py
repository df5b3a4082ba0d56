"""What fits where, without loading weights: headers and options -> sizes, by start-up's formulas.

Behind `pagedjax plan`. The device is the one at hand, or one that is only described: then none is
asked, and what only its compiler knows is left out, and said to be.
"""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pagedjax import cpu_kernels, device
from pagedjax.capacity import GIB
from pagedjax.config import EngineConfig
from pagedjax.device import DeviceMemory, Platform, Target
from pagedjax.errors import CapacityError, ConfigError
from pagedjax.models import contract
from pagedjax.startup import ModelFacts, Sizes, decide, open_store
from pagedjax.weights import resolve_model
from pagedjax.weights.assemble import check
from pagedjax.weights.headers import read_headers

_WIDTH, _INDENT = 96, 22  # columns of text, and where a line's second part begins


class _Hopper(AbstractDevice):
    compute_capability = "9.0"


# The chip that stands for a platform when attention is traced for a device that is not here.
_CHIPS: dict[Platform, AbstractDevice] = {
    "cpu": AbstractDevice("cpu", 1, "cpu"),
    "gpu": _Hopper("NVIDIA H100 80GB HBM3", 132, "gpu"),
    "tpu": AbstractDevice("TPU v5 lite", 1, "tpu"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What start-up would decide.

    Attributes:
      model: name of the file or directory.
      target: the device, with the memory that is free before the weights are loaded.
      quantization: of the model's matrices.
      weights_bytes: of the model on the device.
      sizes: the decisions.
      products: what computes them, and why.
      length: tokens of a request that was asked about; None: of none.
    """

    model: str
    target: Target
    quantization: str
    weights_bytes: int
    sizes: Sizes
    products: str
    length: int | None = None

    def requests_of(self, length: int) -> int:
        """Requests of so many tokens, prompt and answer, that the pool holds at once."""
        return int(self.sizes.pool.concurrency(self.sizes.layout, length))

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool holds."""
        return (self.sizes.pool.num_pages - 1) * self.sizes.layout.page_size

    @property
    def pool_bytes(self) -> int:
        """Of the page pool."""
        return self.sizes.pool.num_pages * self.sizes.layout.page_bytes

    @property
    def host_pool_bytes(self) -> int:
        """Of the pages in the host's memory."""
        return self.sizes.config.num_host_pages * self.sizes.layout.page_bytes

    @property
    def left_bytes(self) -> int:
        """Free on the device once all that is known has its part; negative: too little."""
        sizes, target = self.sizes, self.target
        taken = self.weights_bytes + self.pool_bytes + sizes.transfer_bytes
        on_same = self.host_pool_bytes if target.platform == "cpu" else 0
        return target.memory.free - taken - on_same - (sizes.step_bytes or 0)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; names as in the start-up report."""
        sizes, config, target = self.sizes, self.sizes.config, self.target
        return {
            "model": self.model,
            "device": target.name,
            "platform": target.platform,
            "dtype": str(sizes.dtype),
            "quantization": self.quantization,
            "kv_cache_dtype": str(sizes.cache_dtype),
            "attention": str(sizes.choice),
            "products": self.products,
            "memory_free_bytes": target.memory.free,
            "memory_total_bytes": target.memory.total,
            "weights_bytes": self.weights_bytes,
            "pool_bytes": self.pool_bytes,
            "host_pool_bytes": self.host_pool_bytes,
            "transfer_bytes": sizes.transfer_bytes,
            "step_bytes": sizes.step_bytes,
            "left_bytes": self.left_bytes,
            "page_size": config.page_size,
            "num_pages": config.num_pages,
            "num_host_pages": config.num_host_pages,
            "page_bytes": sizes.layout.page_bytes,
            "num_tokens": self.num_tokens,
            "max_model_len": config.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "max_concurrency": sizes.pool.concurrency(sizes.layout),
            "length": self.length,
            "requests_of_length": None if self.length is None else self.requests_of(self.length),
            "buckets": list(config.buckets),
        }

    def lines(self) -> list[str]:
        """For people, within 100 columns."""
        sizes, config = self.sizes, self.sizes.config
        parts = [*self._memory(), ("tokens", f"{self.num_tokens:,} in the pool")]
        longest = config.max_model_len
        parts.append(("requests at once", f"{self._requests(longest)} (max_model_len)"))
        if self.length is not None:
            parts.append(("", self._requests(self.length)))
        parts += [
            ("step", f"at most {config.max_num_seqs} sequences, {config.max_num_batched_tokens} "
             "tokens"),
            ("compiled sizes", f"{len(config.buckets)}: {_buckets(self)}"),
            ("attention", str(sizes.choice)),
            ("products", self.products),
        ]  # fmt: skip
        lines = [f"{self.model} in {sizes.dtype} on {self.target.name}"]
        for label, text in parts:
            lines += textwrap.wrap(
                text,
                _WIDTH,
                initial_indent=f"  {label}".ljust(_INDENT),
                subsequent_indent=" " * _INDENT,
            )
        return lines

    def _memory(self) -> list[tuple[str, str]]:
        sizes, layout = self.sizes, self.sizes.layout
        pages = f"{sizes.pool.num_pages:,} pages of {layout.page_size} tokens in "
        quantized = "" if self.quantization == "none" else f"  matrices in {self.quantization}"
        parts = [
            ("free memory", _gib(self.target.memory.free)),
            ("weights", _gib(self.weights_bytes) + quantized),
            ("page pool", f"{_gib(self.pool_bytes)}  {pages}{sizes.cache_dtype}, "
             f"{layout.page_bytes:,} bytes a page"),
            ("largest step", _step(sizes, self.target)),
        ]  # fmt: skip
        if sizes.transfer_bytes:
            parts += [
                ("transfers", f"{_gib(sizes.transfer_bytes)}  pages on their way to the host"),
                ("swap space", f"{_gib(self.host_pool_bytes)}  {sizes.config.num_host_pages:,} "
                 "pages in host memory"),
            ]  # fmt: skip
        return [*parts, ("left", _gib(self.left_bytes))]

    def _requests(self, length: int) -> str:
        return f"{self.requests_of(length):,} of {length:,} tokens"


def make_plan(
    model: str,
    options: EngineConfig,
    *,
    length: int | None = None,
    target: Target | None = None,
) -> MemoryPlan:
    """Plans for a model by its name, as `resolve_model` takes it.

    Args:
      model: its files' headers are read, no weight.
      options: of the engine that would start.
      length: of requests to count, in tokens.
      target: a device that `described` made; None: the one at hand, as it is now.

    Raises:
      CapacityError: weights, or one request of `max_model_len`, do not fit; says what would.
      ConfigError, ModelFormatError: as start-up would.
    """
    path = resolve_model(model)
    target = target or device.here()
    headers = read_headers(
        path,
        dtype=options.dtype,
        default_dtype=target.defaults.dtype,
        quantization=options.quantization,
    )
    check(headers.layout, headers.checkpoint)
    flat = contract.flatten(nnx.eval_shape(headers.build), is_abstract=True)
    facts = ModelFacts(name=headers.name, max_model_len=headers.config.max_positions)
    if flat.num_bytes > target.memory.free:
        raise CapacityError(
            f"the weights of {headers.name} in {headers.dtype} take {_gib(flat.num_bytes)}; "
            f"{_gib(target.memory.free)} are free on {target.name}. Choose a smaller `dtype`, or a "
            "device with more memory."
        )
    products = _products(target)
    with _traced_for(target):
        sizes = decide(flat, options, facts, _with_weights(target, flat.num_bytes))
    longest = sizes.config.max_model_len
    if length is not None and not 1 <= length <= longest:
        raise ConfigError(
            f"`length` must be in [1, {longest}], the `max_model_len` of this plan. Got {length}."
        )
    return MemoryPlan(
        model=headers.name,
        target=target,
        quantization=options.quantization,
        weights_bytes=flat.num_bytes,
        sizes=sizes,
        products=products,
        length=length,
    )


def _products(target: Target) -> str:
    """What computes them; on the device at hand, kernels are made ready for that."""
    if target.is_here:
        return cpu_kernels.prepare(open_store())
    is_cpu = target.platform == "cpu"
    return "XLA, or own kernels where there is a C++ compiler" if is_cpu else "XLA"


def described(platform: Platform, memory_bytes: int) -> Target:
    """A device that is not here and has so much memory, all of it free."""
    return Target(
        name=f"a {platform.upper()} of {_gib(memory_bytes)}",
        platform=platform,
        memory=DeviceMemory(memory_bytes, memory_bytes),
        # Of an accelerator's host nothing is known: `swap_space` is taken as it was asked for.
        host_memory=DeviceMemory(*[memory_bytes if platform == "cpu" else 2**63] * 2),
        is_here=False,
    )


def _with_weights(target: Target, num_bytes: int) -> Target:
    """The device once the weights are on it."""
    memory, host = target.memory, target.host_memory
    if target.platform == "cpu":
        host = replace(host, free=host.free - num_bytes)
    return replace(target, memory=replace(memory, free=memory.free - num_bytes), host_memory=host)


@contextlib.contextmanager
def _traced_for(target: Target) -> Iterator[None]:
    """Traces are for the described device; for the one at hand they are anyway."""
    if target.is_here:
        yield
        return
    mesh = AbstractMesh(
        (1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=_CHIPS[target.platform]
    )
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def _step(sizes: Sizes, target: Target) -> str:
    if sizes.step_bytes is not None:
        return f"{_gib(sizes.step_bytes)}  temporaries, by the compiler's account"
    if target.platform == "cpu":
        return "not known: only compiling it tells; it comes out of what is left"
    if target.is_here:
        return "not known: not compiled where `num_pages` is given"
    return "not known: only the device's compiler tells; taken off the pool at start"


def _buckets(plan: MemoryPlan) -> str:
    config = plan.sizes.config
    kinds = [(config.decode_buckets, "decoding"), (config.mixed_buckets, "with prompts")]
    return "; ".join(
        f"{', '.join(map(str, sizes))} tokens {what}" for sizes, what in kinds if sizes
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
