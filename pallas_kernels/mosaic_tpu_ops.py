"""What the Mosaic TPU kernels share."""

from typing import Any

from jax.experimental.pallas import tpu as pltpu


def interpret_params(interpret: Any) -> Any:
    """The `interpret` of a kernel call; True means the strictest there is: races are errors."""
    if interpret is not True:
        return interpret
    return pltpu.InterpretParams(
        detect_races=True,
        dma_execution_mode="on_wait",
        uninitialized_memory="nan",
        out_of_bounds_reads="raise",
    )
