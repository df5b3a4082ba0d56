"""Race detection for interpreted kernels, whatever the JAX version.

The only file that may use JAX's private modules: JAX 0.11 prints a race and goes on, 0.12 raises,
and neither says so when a test forgot to switch the detection on. Also teaches interpret mode
`plgpu.mma`, which it lacks.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as tpu
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as gpu
from jax.interpreters import mlir


@contextlib.contextmanager
def no_gpu_race() -> Iterator[None]:
    """Every kernel interpreted inside ran with race detection, and no race was found.

    Results must be read (np.asarray, block_until_ready) inside: that is when a kernel runs. After
    an error the interpreter is reset, or it would refuse the next kernel.
    """
    found: list[Any] = []
    state = gpu.GPURaceDetectionState

    def record(*args: Any, **kwargs: Any) -> Any:
        found.append(state(*args, **kwargs))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "GPURaceDetectionState", record)
        try:
            yield
        except BaseException:
            gpu.reset_gpu_interpret_mode_state()
            raise
    assert found, "no kernel was interpreted"
    assert all(one.writes for one in found), "race detection was off"
    assert not any(one.races_found for one in found), "a race was found; see the log"


def assert_no_gpu_race() -> None:
    """The last interpreted GPU kernel had no race."""
    assert not gpu.get_races().races_found


def assert_no_tpu_race() -> None:
    """The last interpreted TPU kernel had no race."""
    assert tpu.races is not None
    assert not tpu.races.races_found, "a race was found; see the log"


def interpret_mma() -> None:
    """Lets interpret mode run `plgpu.mma`; call it once, at import."""
    rule = mlir.lower_fun(
        lambda acc, a, b: acc + jnp.dot(a, b, preferred_element_type=acc.dtype),
        multiple_results=False,
    )
    mlir.register_lowering(primitives.mma_p, rule, platform="cpu")
