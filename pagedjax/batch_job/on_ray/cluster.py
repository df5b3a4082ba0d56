"""The cluster: started here or joined, what it offers to engines, and its end.

Owns Ray's process-wide state: its start, its noise, the signal handlers that it takes.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagedjax.batch_job.errors import CannotStart
from pagedjax.batch_job.messages import STANDARD_ERROR

LOCAL = ""  # the address of a cluster that is started here
OBJECT_STORE_BYTES = 256 * 2**20  # of a cluster that is started here: only texts go through it
START_ATTEMPTS = 3
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Set before Ray is imported, unless the user did.
_QUIET = {
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # its C++ half writes to standard error
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster that this process is connected to.

    Attributes:
      ray: the module.
      node_id: the node that this process is on.
      num_workers: engines.
      resources: what each engine takes, as arguments of `map_batches`.
      on_accelerator: engines run on GPUs or TPUs.
    """

    ray: Any
    node_id: str
    num_workers: int
    on_accelerator: bool
    resources: dict[str, Any] = field(default_factory=dict[str, Any])


def connect(address: str, num_workers: int | None, stack: ExitStack) -> Cluster:
    """Starts a cluster on this machine, or joins one.

    Args:
      address: `LOCAL`, "auto" or HOST:PORT.
      num_workers: engines; None: one for each accelerator, or for each host without any.
      stack: at its end the cluster is left: what was started there ends, and the cluster too if it
        was started here.

    Raises:
      CannotStart: Ray is not installed, there is no such cluster, or it offers nothing.
    """
    if address.startswith("ray://"):
        raise CannotStart(
            f"--ray must be given on a machine of the cluster, without an address, with auto or "
            f"HOST:PORT. Got {address}, for clients elsewhere."
        )
    ray = _import()
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    local: dict[str, Any] = {
        "num_cpus": max(os.cpu_count() or 1, num_workers or 1),
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
    }
    stack.enter_context(_without_stdout())
    stack.callback(_leave, ray)
    try:
        with _own_signals(), _silence():
            if address == LOCAL:
                start(ray, **local, **quiet)
            else:
                ray.init(address=address, **quiet)
        return offer(ray, num_workers)
    except SystemExit:  # Ray's own answer to SIGTERM while it starts
        raise KeyboardInterrupt from None
    except CannotStart:
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:500]
        if address == LOCAL:
            raise CannotStart(f"cannot start Ray here: {why}") from error
        raise CannotStart(
            f"cannot join the Ray cluster at {address}: {why}. It must run, with this machine in "
            "it; one that wants a token needs RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN here too."
        ) from error


def offer(ray: Any, num_workers: int | None) -> Cluster:
    """What a cluster has room for; raises as `connect` does."""
    offered = ray.cluster_resources()
    hosts = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    room = len(hosts)
    if offered.get("GPU"):
        room = most = int(offered["GPU"])
        each, kind = {"num_gpus": 1}, "GPUs"
    elif offered.get("TPU"):
        room = most = int(offered["TPU"])
        each, kind = {"resources": {"TPU": 1}}, "TPU chips"
    else:
        most = int(sum(node["Resources"]["CPU"] for node in hosts))
        each, kind = {"num_cpus": 1}, "CPUs"
    if not most:
        raise CannotStart("the Ray cluster must offer a GPU, a TPU or a CPU. It has none.")
    if num_workers is not None and num_workers > most:
        raise CannotStart(
            f"--ray-workers must be at most {most}, the cluster's {kind}. Got {num_workers}."
        )
    return Cluster(
        ray=ray,
        node_id=ray.get_runtime_context().get_node_id(),
        num_workers=num_workers or room,
        resources=each,
        on_accelerator=kind != "CPUs",
    )


def _import() -> Any:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.data")
    except ImportError as error:
        raise CannotStart(
            f"--ray needs Ray Data, which is not installed ({error}): pip install 'pagedjax[ray]'"
        ) from error
    data = logging.getLogger("ray.data")
    for handler in list(data.handlers):  # its files keep what was logged
        if "File" not in type(handler).__name__:
            data.removeHandler(handler)
    data.propagate = False
    return ray


def start(ray: Any, **how: Any) -> None:
    """Starts a cluster; Ray gives one 30 s, which a busy machine may exceed, so not once only."""
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            ray.init(address="local", **how)
            return
        except Exception as error:
            ray.shutdown()
            if attempt == START_ATTEMPTS or "timed out" not in str(error):
                raise


def _leave(ray: Any) -> None:
    with _own_signals():
        ray.shutdown()


@contextmanager
def _without_stdout() -> Iterator[None]:
    """Ray prints what its machinery says to standard output, where answers may go."""
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        yield


@contextmanager
def _silence() -> Iterator[None]:
    """Ray's C++ half writes past Python to standard error; what fails is raised all the same."""
    STANDARD_ERROR.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray installs handlers of its own; ours come back."""
    try:
        before = {number: signal.getsignal(number) for number in _SIGNALS}
    except ValueError:
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
