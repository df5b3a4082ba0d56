"""The kind of device that the code being traced is for.

A trace may be for a chip that is not here: an abstract mesh with an abstract device says so.
"""

from typing import Literal

import jax

type Platform = Literal["cpu", "gpu", "tpu"]

# Which implementation holds the kernels of a platform; others have none.
MOSAIC: dict[str, str] = {"gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}


def traced_platform() -> Platform:
    """Of the abstract device in the current mesh, else of JAX's default backend."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    name = jax.default_backend() if described is None else described.platform
    if name in ("gpu", "cuda"):
        return "gpu"
    return "tpu" if name == "tpu" else "cpu"
