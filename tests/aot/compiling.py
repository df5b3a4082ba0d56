"""Compiles a function for a chip that is not here, and reads what the compilers said of it.

Owns the trick by which JAX lowers for a described device. To be used in a process of its own with
the variables of `targets.environment`.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
)

from tests.aot.targets import Target


@dataclass(frozen=True, slots=True)
class KernelFigures:
    """What ptxas and Mosaic said of one Mosaic GPU kernel."""

    name: str
    architecture: str  # that ptxas compiled for
    registers: int
    spill_bytes: int
    threads: int  # of a block
    shared_bytes: int  # of a block


@dataclass(frozen=True, slots=True)
class Launches:
    """How a GPU runs a program: kernels and copies, alone or in command buffers (CUDA graphs)."""

    total: int
    outside: int  # of command buffers: the host launches each
    buffers: int
    loops: int
    last_layer: int  # of `total`, those that the model's last layer brought
    mosaic: int  # of `total`, kernels of Mosaic, by the HLO


@dataclass(frozen=True, slots=True)
class Compiled:
    """One compiled program."""

    alias_bytes: int  # of outputs that are inputs
    temp_bytes: int
    text: str  # HLO after all passes
    kernels: tuple[KernelFigures, ...] = ()  # Mosaic GPU's that this process had not compiled yet
    launches: Launches | None = None  # where they were asked for

    def copies_of(self, shape: tuple[int, ...]) -> list[str]:
        """HLO instructions that copy an array of this shape."""
        dims = ",".join(map(str, shape))
        found = re.findall(rf"^.*\[{dims}\]\S* copy(?:-start)?\(.*$", self.text, re.MULTILINE)
        return [line.strip() for line in found]


class Compiler:
    """Compiles for one target."""

    def __init__(self, target: Target) -> None:
        """Describes the device to JAX."""
        device = target.devices().devices[0]
        capability = getattr(device, "compute_capability", None)  # "9.0"; TPUs have none
        cores = getattr(device, "core_count", None) or getattr(device, "num_cores", 1)
        kind = AbstractDevice
        if capability is not None:
            # Mosaic reads the architecture off this attribute, which AbstractDevice does not have.
            kind = type("Described", (AbstractDevice,), {"compute_capability": capability})
        described = kind(device.device_kind, cores, "gpu" if capability else "tpu")
        self.mesh = AbstractMesh(
            (1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=described
        )
        self._sharding = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
        self._platform = "cuda" if capability else "tpu"

    def compile(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        donate: tuple[int, ...] = (),
        *,
        count_launches: bool = False,
    ) -> Compiled:
        """Machine code for `fn` of abstract `args` (pytrees of anything with shape and dtype)."""
        put = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._sharding), args
        )
        with tempfile.TemporaryDirectory() as dump, captured_stdout() as said:
            options = {"xla_dump_to": dump} if count_launches else None
            with jax.sharding.use_abstract_mesh(self.mesh):
                traced = jax.jit(fn, donate_argnums=donate).trace(*put)
                lowered = traced.lower(lowering_platforms=(self._platform,))
                program = lowered.compile(compiler_options=options)
            text = program.as_text() or ""
            launches = read_launches(Path(dump), text) if count_launches else None
            names = re.findall(r"([a-z_]\w*)_mosaic_gpu\b", lowered.as_text())
            kernels = read_kernels(said(), names)
        memory: Any = program.memory_analysis()
        return Compiled(
            int(memory.alias_size_in_bytes),
            int(memory.temp_size_in_bytes),
            text,
            tuple(kernels),
            launches,
        )


@contextlib.contextmanager
def captured_stdout() -> Iterator[Callable[[], str]]:
    """Sends file descriptor 1 to a file, whoever writes to it; what is yielded reads that file."""
    sys.stdout.flush()
    saved = os.dup(1)
    file: IO[bytes]
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)

        def said() -> str:
            sys.stdout.flush()
            file.seek(0)
            return file.read().decode("utf-8", "replace")

        try:
            yield said
        finally:
            sys.stdout.flush()
            os.dup2(saved, 1)
            os.close(saved)


def read_kernels(said: str, names: list[str]) -> list[KernelFigures]:
    """Figures of the kernels in the output of one compilation.

    Args:
      said: what Mosaic printed: resources of all kernels as they were lowered; code and ptxas' log
        of those that this process had not compiled before.
      names: of all kernels, in the order of lowering.
    """
    sizes = [_shared_bytes(line) for line in re.findall(r"^Resources\(.*$", said, re.MULTILINE)]
    shared: dict[str, int] = {}
    for name, size in zip(names, sizes, strict=False):
        shared[name] = max(size, shared.get(name, 0))
    figures = []
    for code in said.split("// Generated by LLVM NVPTX Back-End")[1:]:
        name = _first(r"\.visible \.entry (\w+?)_mosaic_gpu_kernel", code)
        threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?", code)
        spills = re.findall(r"(\d+) bytes spill", code)
        if threads is None or not spills:
            raise ValueError(f"the log of {name} must tell threads and spills. Got none.")
        figures.append(
            KernelFigures(
                name=name,
                architecture=_first(r"Compiling entry function '\w+' for '(sm_\w+)'", code),
                registers=int(_first(r"Used (\d+) registers", code)),
                spill_bytes=sum(map(int, spills)),
                threads=int(np.prod([int(n) for n in threads.groups() if n])),
                shared_bytes=shared.get(name, max(sizes, default=0)),
            )
        )
    return figures


def _shared_bytes(resources: str) -> int:
    """Scratch, and eight bytes for each barrier."""
    barriers = re.findall(r"num_barriers=(\d+)[^:]*?\): (\d+)", resources)
    scratch = int(_first(r"smem_scratch_bytes=(\d+)", resources))
    return scratch + 8 * sum(int(number) * int(times) for number, times in barriers)


def read_launches(dump: Path, text: str) -> Launches | None:
    """From XLA's dump of a program's thunks; None where this XLA writes no such file."""
    files = sorted(dump.glob("*thunk_sequence*.txt"))
    if not files:
        return None
    final = [file for file in files if "after_thunk_passes" in file.name] or files
    total = outside = buffers = loops = 0
    depth: int | None = None  # of the command buffer that we are in
    for line in final[-1].read_text().splitlines():
        found = re.match(r"(\s*)\d+: (k\w+)", line)
        if found is None:
            continue
        indent, kind = len(found[1]), found[2]
        if depth is not None and indent <= depth:
            depth = None
        if kind == "kCommandBuffer":
            buffers, depth = buffers + 1, indent
        elif kind == "kWhile":
            loops += 1
        else:
            total += 1
            outside += depth is None
    names = _launched(dump)
    layers = {name: _layer(name, text) for name in names}
    last = max((layer for layer in layers.values() if layer is not None), default=None)
    mosaic = text.count('custom_call_target="mosaic_gpu')  # some stand in a fusion of their own
    in_last = sum(last is not None and layers[name] == last for name in names)
    return Launches(total, outside, buffers, loops, in_last, mosaic)


def _launched(dump: Path) -> list[str]:
    """Names of the HLO instructions behind the launches, one for each launch."""
    text = "".join(file.read_text() for file in dump.glob("*thunk_metadata.txt"))
    names = []
    for block in text.split("thunk_metadata {")[1:]:
        kind = re.search(r'thunk_kind: "(\w+)"', block)
        name = re.search(r'profile_annotation: "([^"]+)"', block)
        if kind and name and kind[1] not in ("kCommandBuffer", "kWhile", "kSequential"):
            names.append(name[1])
    return names


def _instruction(name: str, text: str) -> str:
    found = re.search(rf"^.*%?{re.escape(name)} = .*$", text, re.MULTILINE)
    return found[0] if found else ""


def _layer(name: str, text: str) -> int | None:
    found = re.search(r'op_name="[^"]*layer_(\d+)/', _instruction(name, text))
    return int(found[1]) if found else None


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the compiler's output must have {pattern!r}. Got {text[:300]!r}.")
    return found[1]
