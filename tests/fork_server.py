"""Processes that run the batch program, started quickly: a server that has imported JAX forks them.

Owns the children's start and end. Whoever kills a child does so by its process id. The server
itself never starts a JAX backend: one does not survive a fork.

    in   {"arguments": [...], "log": FILE}      out  the child's process id
    in   an empty line                          out  its exit status, negative for a signal

Until the second line the child, ended or not, keeps its process id: no other process can be hit.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "serve_batch.py"


class ForkServer:
    """Starts children, one at a time."""

    def __init__(self, cache: Path) -> None:
        """Starts the server; `cache` is for compiled steps, which the children share."""
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": str(ROOT),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT,
        )  # fmt: skip

    def start(self, arguments: Sequence[object], log: Path) -> int:
        """Starts `serve_batch.py` with these arguments; returns its process id."""
        request = {"arguments": [str(argument) for argument in arguments], "log": str(log)}
        return self._ask(json.dumps(request))

    def wait(self) -> int:
        """Exit status of the child; minus the signal's number when one ended it."""
        return self._ask("")

    def close(self) -> None:
        """Ends the server."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def _ask(self, line: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the server is gone"
        return int(answer)


def serve() -> None:
    """The server's loop."""
    import pagedjax.batch_job
    import pagedjax.llm  # and with it JAX

    del pagedjax
    warnings.simplefilter("ignore")  # of Python and JAX, about forks among threads: there are none
    for line in sys.stdin:
        request = json.loads(line)
        # Held until the child is whole: Python drops what a signal raises while it forks, and
        # leaves locks taken that it was to give back.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        child = os.fork()
        if child == 0:
            # As on a terminal: what a shell starts in the background has SIGINT ignored.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os._exit(_run(request))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        print(child, flush=True)
        sys.stdin.readline()
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(request: Any) -> int:
    """The child: as if the script had been started."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    sys.argv = [str(SCRIPT), *request["arguments"]]
    spec = importlib.util.spec_from_file_location("serve_batch", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    try:
        status = script.main()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    serve()
