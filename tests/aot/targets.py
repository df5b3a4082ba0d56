"""The chips that programs are compiled for without having them.

Owns their names and limits, and what must be in the environment before JAX is imported. NVIDIA
GPUs are described by files under tests/data/targets, TPUs by names that libtpu knows.
"""

from __future__ import annotations

import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

DESCRIPTIONS = Path(__file__).parent.parent / "data" / "targets"
RESERVED = 1024  # bytes of shared memory that CUDA keeps for itself in every block


@dataclass(frozen=True, slots=True)
class Target:
    """One chip."""

    name: str
    platform: Literal["cuda", "tpu"]
    architecture: str  # as ptxas says it: "sm_90a"; "tpu"
    topology: str

    @property
    def is_gpu(self) -> bool:
        """True for NVIDIA's."""
        return self.platform == "cuda"

    @property
    def description(self) -> str:
        """Of a GPU: the text that XLA compiles for."""
        return (DESCRIPTIONS / f"nvidia_{self.name}.txtpb").read_text("utf-8")

    def limit(self, field: str) -> int:
        """A number of the description."""
        found = re.search(rf"^\s*{field}: (\d+)", self.description, re.MULTILINE)
        if found is None:
            raise ValueError(f"the description of {self.name} must have {field}. Got none.")
        return int(found[1])

    def resident_blocks(self, threads: int, registers: int, shared_bytes: int) -> int:
        """Blocks of such a kernel that one multiprocessor runs at once."""
        allocated = -(-registers // 8) * 8 * threads  # registers come in eights
        return min(
            self.limit("threads_per_core_limit") // threads,
            self.limit("registers_per_core_limit") // allocated,
            self.limit("shared_memory_per_core") // (shared_bytes + RESERVED),
        )

    def devices(self) -> Any:
        """A topology with this chip in it; imports JAX."""
        from jax.experimental import topologies

        if self.is_gpu:
            return topologies.get_topology_desc(
                platform="cuda", target_config=self.description, topology=self.topology
            )
        return topologies.get_topology_desc(self.topology, platform="tpu")


TARGETS = {
    target.name: target
    for target in (
        Target("a100", "cuda", "sm_80", "1x1x1"),
        Target("l4", "cuda", "sm_89", "1x1x1"),
        Target("h200", "cuda", "sm_90a", "1x1x1"),
        Target("b200", "cuda", "sm_100a", "1x1x1"),
        Target("v4", "tpu", "tpu", "v4:2x2x1"),
        Target("v5e", "tpu", "tpu", "v5e:2x2"),
        Target("v5p", "tpu", "tpu", "v5p:2x2x1"),
        Target("v6e", "tpu", "tpu", "v6e:2x2"),
        Target("tpu7x", "tpu", "tpu", "tpu7x:2x2x1"),
    )
}

# Architectures that the kernels are meant for and that nothing here describes.
UNDESCRIBED = {
    "sm_86": "RTX 30 and A10: compiled as sm_80 was, with less shared memory (99 KB a block)",
    "sm_120": "RTX 50 and RTX PRO: compiled as sm_100 was, with less shared memory (99 KB a block)",
}


def environment() -> dict[str, str]:
    """Variables of a process that compiles; it may compile for ONE GPU.

    The first Mosaic kernel of a process fixes the architecture that ptxas is told. What Mosaic and
    ptxas say of each kernel goes to standard output.
    """
    dumps = {f"MOSAIC_GPU_DUMP_{what}": "1" for what in ("PTX", "PTXAS", "RESOURCES")}
    return dumps | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # processes that only compile share no TPU
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={cuda_folder()}",
    }


def cuda_folder() -> Path:
    """Where the packages put ptxas."""
    return Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13"
