"""Which NVIDIA chip a kernel is traced for. Knows the limits of chips, and nothing of kernels."""

import functools
from dataclasses import dataclass
from typing import Any

import jax

_KIB = 1024
# Most shared memory of one block, by compute capability; chips that are not here: see `_smem_bytes`
_SMEM_BYTES = {(8, 0): 163 * _KIB, (8, 7): 163 * _KIB, (12, 0): 99 * _KIB, (12, 1): 99 * _KIB}


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """What a kernel has to know of its chip while it is traced; hashable."""

    kind: str  # as JAX names it
    arch: tuple[int, int]  # compute capability
    num_sms: int
    smem_bytes: int  # most that one block can have

    @property
    def has_tma(self) -> bool:
        """Copies by the tensor memory accelerator and barriers; else by cp.async."""
        return self.arch >= (9, 0)

    @property
    def has_wgmma(self) -> bool:
        """Products of a warpgroup from shared memory: Hopper alone has them."""
        return self.arch[0] == 9


# What stands for a chip where there is none: kernels are interpreted as if for a small Hopper.
_INTERPRETED = GpuTarget("interpreted", (9, 0), 4, 227 * _KIB)


def target() -> GpuTarget:
    """The chip of the current abstract mesh, else of this process, else an imagined Hopper.

    An abstract device names its chip by an attribute `compute_capability` ("9.0"), as concrete
    ones do; one without it is refused, because code for the wrong chip would be the result.
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None and abstract.platform == "gpu":
        capability = getattr(abstract, "compute_capability", None)
        if capability is None and jax.default_backend() == "gpu":
            return _of_device(jax.devices()[0])
        if capability is None:
            raise ValueError(
                "`abstract_device` of the mesh must have an attribute `compute_capability` where "
                f"no GPU is present. Got {abstract}."
            )
        return _describe(abstract.device_kind, capability, abstract.num_cores)
    if abstract is None and jax.default_backend() == "gpu":
        return _of_device(jax.devices()[0])
    return _INTERPRETED


def _of_device(device: Any) -> GpuTarget:
    return _describe(device.device_kind, device.compute_capability, device.core_count)


@functools.cache
def _describe(kind: str, capability: str, num_sms: int | None) -> GpuTarget:
    major, minor = (int(part) for part in capability.split("."))
    return GpuTarget(kind, (major, minor), num_sms or 1, _smem_bytes((major, minor)))


def _smem_bytes(arch: tuple[int, int]) -> int:
    """99 KiB on chips for graphics, 227 on those for data centres, and less before Hopper."""
    return _SMEM_BYTES.get(arch, 99 * _KIB if arch < (9, 0) else 227 * _KIB)
