"""Which implementation of paged attention an engine uses, and what that asks of the pool.

The choice is made once, at start-up, by tracing the model with it; the report says it and why.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

import pallas_kernels
from pagedjax import device
from pagedjax.device import Platform
from pagedjax.errors import ConfigError
from pagedjax.models import contract
from pagedjax.models.contract import FlatModel
from pallas_kernels import cpu
from pallas_kernels.platform import KERNELS, NATIVE_CPU


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """An implementation that runs the model on this device."""

    implementation: str
    head_dim: int  # of the pages: the model's, or what the kernels want instead
    reason: str

    def __str__(self) -> str:
        """For the start-up report."""
        return f"{self.implementation} ({self.reason})"


def choose(
    model: FlatModel,
    cache_dtype: jnp.dtype,
    page_size: int,
    asked: str | None,
    platform: Platform | None = None,
) -> KernelChoice:
    """The implementation that was asked for, or the fastest that can run the model.

    Args:
      model: as `contract.flatten` takes it apart.
      cache_dtype, page_size: of the pool.
      asked: a name; None: choose.
      platform: of a device that is only described; None: the one at hand.

    Raises:
      ConfigError: the one that was asked for does not exist or cannot run the model here.
    """
    if asked == "reference":
        raise ConfigError(
            "`attention_implementation` must be one that can be compiled. Got 'reference', which "
            "computes in NumPy and is for tests. Use 'xla'."
        )
    if asked is not None:
        return _try(model, cache_dtype, page_size, asked, "asked for")
    is_here = platform is None
    platform = platform or device.platform()
    kernels, kind = KERNELS[platform], platform.upper()
    reason = f"the portable one; device is a {kind}"
    if kernels != NATIVE_CPU or (is_here and cpu.is_loaded()):
        try:
            return _try(model, cache_dtype, page_size, kernels, f"the kernels for a {kind}")
        except ConfigError as error:
            reason = f"the portable one; {kernels} cannot run this: {error.__cause__}"
    return KernelChoice("xla", model.head_dim, reason)


def _try(
    model: FlatModel, cache_dtype: jnp.dtype, page_size: int, name: str, reason: str
) -> KernelChoice:
    try:
        head_dim = pallas_kernels.padded_head_dim(model.head_dim, name)
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"`attention_implementation` must be one that can run this model here. Got {name!r}: "
            f"{error}"
        ) from error
    choice = KernelChoice(name, head_dim, reason)
    contract.check_implementation(model, cache_dtype, name, page_size=page_size, head_dim=head_dim)
    return choice
