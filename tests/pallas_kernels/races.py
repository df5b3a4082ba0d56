"""Race detection for interpreted kernels, whatever the JAX version.

The only file that may use JAX's private modules: JAX 0.11 prints a race and goes on, 0.12 raises,
and neither says so when a test forgot to switch the detection on. Also fills what interpret mode
lacks:

- it does not look at what wgmma reads. Here a wgmma that did not wait for its operands, a copy that
  overwrites them too early, and a missing `commit_smem` before it are races like any other;
- a TMA copy from outside an array brings zeros, as on the hardware. Here it is an error;
- `plgpu.mma` does not exist (`interpret_mma`).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as tpu
from jax._src.pallas.mosaic.interpret.race_detection_state import _ranges_overlap
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.interpreters import mlir

gpu: Any = gpu_callbacks
_wgmma, _commit_smem = gpu.wgmma, gpu.memory.GPUSharedMemory.commit_smem
_committed: dict[Any, int] = {}  # thread -> its own time at its last commit_smem
_read_times: set[tuple[Any, int]] = set()  # (thread, its own time) of the reads of wgmma


def _own_time(memory: Any, thread: Any) -> tuple[int, int]:
    """The place of a thread in a vector clock, and what its own clock has there."""
    place = memory.thread_to_vc_position(thread)
    return place, int(memory.clocks[thread].generic_clock.clock[place])


def _commit_and_note(memory: Any, thread: Any) -> None:
    _commit_smem(memory, thread)
    if memory.detect_races:
        _committed[thread] = _own_time(memory, thread)[1]


def _checked_wgmma(**call: Any) -> Any:
    memory = gpu._get_shared_memory()
    if memory.detect_races:
        for operand in ("a", "b"):
            _check_operand(memory, call, operand)
    return _wgmma(**call)


@gpu.fail_on_exception
def _check_operand(memory: Any, call: dict[str, Any], operand: str) -> None:
    """Compares a wgmma's read of an operand with every write of it; later writes see the read."""
    thread, races = call["thread"], gpu.get_races()
    key = gpu.HostAllocationKey.from_array(call[f"{operand}_allocation_key_as_array"])
    transforms = gpu._remove_noop_transforms(call[f"{operand}_transforms"])
    access = memory.access(key, jax.tree.map(int, transforms))
    with memory.lock:
        place, before = _own_time(memory, thread)
        memory.clocks[thread].generic_clock.inc(place)
        # The kernels wait for the product at once, so the thread has seen the read; and the
        # read needs no commit_smem, which is what else brings the thread's time to this clock.
        clock = memory.clocks[thread].async_smem_clock
        clock.clock[place] = before + 1
        _read_times.add((thread, before + 1))
        read = clock.copy()
    with races.lock:
        mine = [(c, where) for owner, c, where, _ in races.writes[key] if owner == thread]
    for written, where in mine:  # by the thread itself, or by a copy that it started
        time = int(written.clock[place])
        by_itself = (thread, time) not in _read_times
        if by_itself and time > _committed.get(thread, 0) and _ranges_overlap(where, access.range):
            raise RuntimeError(f"RACE DETECTED: no commit_smem before wgmma reads {key}")
    races.check_read(thread, read, key, access, call.get("source_info"))


gpu.wgmma = _checked_wgmma
gpu.memory.GPUSharedMemory.commit_smem = _commit_and_note


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
        patch.setattr(gpu.AsyncCopyGmemToSmemTask, "out_of_bounds_source_fill", None)
        _committed.clear()
        _read_times.clear()
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
