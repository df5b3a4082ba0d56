"""The key of a compiled program: a digest of all that decides what the compiler makes of it.

Two programs with one key are the same machine code for the same processor. So a key covers this
package's own sources, the CPU kernels that are loaded, the versions of what traces and compiles,
the device, the processor's features (machine code for one does not run on another), the flags and
options that JAX and XLA read, the shapes, and what the program's function holds. It does not cover
code that is replaced at run time: who patches pagedjax sets `PAGEDJAX_CACHE_DIR` to nothing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from pagedjax.threads import num_cpus
from pallas_kernels import cpu

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu")
_FOLDERS = ("pagedjax", "pallas_kernels")  # whose sources make programs
_SUFFIXES = (".py", ".json", ".cc", ".h")
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "JAX_PLATFORMS")
# Lines of /proc/cpuinfo that say what code a processor runs; x86 and ARM have other names.
_CPU_LINES = ("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU architecture")
# Options of JAX that say where things are kept or what is logged, and nothing about programs.
_NO_MATTER = ("cache", "_log_", "_logging_", "dump", "traceback", "profiler")
_IMPORTED = time.time()


def surroundings() -> dict[str, str]:
    """What decides the code of every program of this process, by its name."""
    device = jax.devices()[0]
    return {
        "sources": _sources(Path(__file__).resolve().parent.parent),
        "versions": " ".join([sys.version, *(f"{name} {_version(name)}" for name in _PACKAGES)]),
        "device": f"{device.platform} {device.device_kind} {device.client.platform_version} "
        f"of {jax.device_count()}",
        "processor": f"{platform.machine()} x{os.cpu_count()}, {num_cpus()} for us\n{_processor()}",
        "variables": repr([os.environ.get(name) for name in _VARIABLES]),
        "options": repr(_options()),
        "kernels": cpu.loaded_key(),
    }


def make_key(around: Mapping[str, str], holds: str, arguments: Any, out_shardings: Any) -> str:
    """Hexadecimal, 64 digits.

    Args:
      around: as `surroundings` returns it.
      holds: what the program is, beside its arguments: the function and what it closes over, or
        the text that it was lowered to.
      arguments: pytrees of what has a shape and a dtype.
      out_shardings: where results go.
    """
    leaves, tree = jax.tree.flatten(arguments)
    shapes = [(leaf.shape, str(leaf.dtype), bool(getattr(leaf, "weak_type", 0))) for leaf in leaves]
    parts = {**around, "holds": holds, "arguments": f"{tree} {shapes}", "out": repr(out_shardings)}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def has_outdated_code() -> bool:
    """True when a source was written after this process began to import them.

    What it compiles then is not what the next process would, and must not be kept for it.
    """
    files = _source_files(Path(__file__).resolve().parent.parent)
    return any(path.stat().st_mtime > _IMPORTED for path in files)


def is_portable(arguments: Any) -> bool:
    """True when all arguments are on the default device, or nowhere: others are not kept."""
    if jax.config.jax_default_device is not None:
        return False
    first = {jax.devices()[0]}
    placed = (leaf.sharding for leaf in jax.tree.leaves(arguments) if isinstance(leaf, jax.Array))
    return all(sharding.device_set == first for sharding in placed)


@functools.cache  # a process does not see its own sources change
def _sources(root: Path) -> str:
    digest = hashlib.sha256()
    for path in _source_files(root):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def _source_files(root: Path) -> Iterator[Path]:
    for folder in _FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in _SUFFIXES and path.is_file():
                yield path


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    found = (line.split(":", 1) for line in lines if line.startswith(_CPU_LINES))
    return "\n".join(sorted({f"{name.strip()}:{value.strip()}" for name, value in found}))


def _options() -> list[tuple[str, str]]:
    """Of JAX, as this thread sees them: a context manager may have set some."""
    values = jax.config.values
    names = [name for name in values if not any(part in name for part in _NO_MATTER)]
    return sorted((name, repr(getattr(jax.config, name, values[name]))) for name in names)
