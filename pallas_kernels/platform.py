"""The kind of device that the code being traced is for, and which kernels run there.

A trace may be for a chip that is not here: an abstract mesh with an abstract device says so.
"""

import dataclasses
from typing import Any, Literal

import jax

type Platform = Literal["cpu", "gpu", "tpu"]

NATIVE_CPU = "native_cpu"  # the kernels in C++

# Which implementation holds the kernels of a platform: Pallas', which can be interpreted, and all.
MOSAIC: dict[Platform, str] = {"gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}
KERNELS: dict[Platform, str] = {**MOSAIC, "cpu": NATIVE_CPU}


def traced_platform() -> Platform:
    """Of the abstract device in the current mesh, else of JAX's default backend."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    name = jax.default_backend() if described is None else described.platform
    if name in ("gpu", "cuda"):
        return "gpu"
    return "tpu" if name == "tpu" else "cpu"


def check_interpret(implementation: str | None, interpret: Any) -> None:
    """Checks the argument `interpret` of an operation.

    Args:
      implementation: as it was named; None: it was not.
      interpret: as it was given.

    Raises:
      TypeError: neither a bool nor parameters of Pallas' interpreters.
      ValueError: there is nothing to interpret.
    """
    is_parameters = dataclasses.is_dataclass(interpret) and not isinstance(interpret, type)
    if not isinstance(interpret, bool) and not is_parameters:
        raise TypeError(
            "`interpret` must be False, True or the parameters of Pallas' interpreter. "
            f"Got {interpret!r}."
        )
    if interpret and implementation not in MOSAIC.values():
        raise ValueError(
            f"`interpret` must be used with a Mosaic implementation. Got {implementation!r}: "
            "name one."
        )


def check_runs(implementation: str, interpret: Any) -> None:
    """Raises `NotImplementedError` for kernels that neither run here nor are interpreted."""
    here = traced_platform()
    if interpret or implementation not in KERNELS.values() or KERNELS[here] == implementation:
        return
    instead = ", or interpret=True, which is slow and meant for tests"
    raise NotImplementedError(
        f"`implementation` {implementation!r} does not run on a {here.upper()}. Use 'xla'"
        f"{instead if implementation in MOSAIC.values() else ''}."
    )
