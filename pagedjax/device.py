"""The device that JAX computes on: its kind, its memory, and the defaults that suit it.

Knows nothing of models or pages; the numbers go to `capacity.py`, which decides.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax

type Platform = Literal["cpu", "gpu", "tpu"]

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of the device's memory (of the host's RAM for a CPU)."""

    free: int
    total: int


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """Engine options that nobody set."""

    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str  # for weights that are quantised in their file


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What sizes are decided for: the device at hand, or one that is only described."""

    name: str
    platform: Platform
    memory: DeviceMemory
    host_memory: DeviceMemory
    is_here: bool = True

    @property
    def defaults(self) -> DeviceDefaults:
        """Engine options that nobody set."""
        return _DEFAULTS[self.platform]


# CPU: a step of 512 tokens is bound by its matrix products already, a longer one only delays
# the running requests. GPU and TPU: what keeps their matrix units busy.
_DEFAULTS: dict[Platform, DeviceDefaults] = {
    "cpu": DeviceDefaults(16, 32, 512, "float32"),
    "gpu": DeviceDefaults(64, 256, 8192, "bfloat16"),
    "tpu": DeviceDefaults(128, 256, 2048, "bfloat16"),
}


def platform() -> Platform:
    """Kind of the default device."""
    kind = jax.devices()[0].platform
    return "gpu" if kind in ("gpu", "cuda", "rocm") else "tpu" if kind == "tpu" else "cpu"


def name() -> str:
    """What a person calls the default device."""
    device = jax.devices()[0]
    return f"{device.device_kind} x{os.cpu_count()}" if platform() == "cpu" else device.device_kind


def here() -> Target:
    """The default device as it is now."""
    return Target(name=name(), platform=platform(), memory=memory(), host_memory=host_memory())


def defaults() -> DeviceDefaults:
    """Defaults of the device at hand."""
    return _DEFAULTS[platform()]


def memory() -> DeviceMemory:
    """Memory now. On an accelerator: what JAX may take, less what is in use."""
    stats = None if platform() == "cpu" else jax.devices()[0].memory_stats()
    if stats:
        limit = int(stats["bytes_limit"])
        return DeviceMemory(limit - int(stats["bytes_in_use"]), limit)
    return host_memory()


def peak_bytes() -> int | None:
    """Most bytes in use at once on an accelerator; None on a CPU, which keeps no count."""
    stats = None if platform() == "cpu" else jax.devices()[0].memory_stats()
    return int(stats["peak_bytes_in_use"]) if stats else None


def host_memory() -> DeviceMemory:
    """The host's RAM now; a container's limit counts."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = _meminfo("MemAvailable") or total // 2
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit is not None and limit < total:  # a container sees the host's RAM in /proc/meminfo
        total, free = limit, min(free, limit - (used or 0))
    return DeviceMemory(max(free, 0), total)


def _meminfo(field: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(field + ":")]
    return int(found[0]) * 1024 if found else None


def _cgroup(file: str) -> int | None:
    try:
        text = (_CGROUP / file).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
