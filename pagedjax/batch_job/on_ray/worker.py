"""A worker: one engine for its life, which several groups of lines share.

Ray calls a worker from many threads, a group of lines in each; one more thread steps the engine. So
the engine is never drained between two groups, and answers leave as they are there.
"""

from __future__ import annotations

import importlib
import logging
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from pagedjax import __version__
from pagedjax.batch_job import loading
from pagedjax.batch_job.entry import Line, without_mark
from pagedjax.batch_job.errors import CannotStart
from pagedjax.batch_job.job import BatchJob
from pagedjax.batch_job.lines import parse_json
from pagedjax.errors import PagedJaxError

HEARTBEAT_SECONDS = 1.0
HANDOVER_SECONDS = 1.0  # that an answer waits for others of its group at most, roughly
ENGINE_FAILED = 70  # exit status of a worker whose engine failed: Ray starts another process

type Numbered = tuple[int, str]  # number of a line, its answer
type Answered = queue.SimpleQueue[Numbered]

logger = logging.getLogger("pagedjax")


class SharedEngine:
    """An engine that answers several groups of lines at once."""

    is_full = False

    def __init__(
        self, llm: Any, request_timeout: float | None, on_failure: Callable[[Exception], None]
    ) -> None:
        """Starts its thread; `on_failure` is called in it when the engine fails."""
        self._job = BatchJob(llm, self, max_in_flight=1, request_timeout=request_timeout)
        self._on_failure = on_failure
        self._arrived: queue.SimpleQueue[tuple[Line, bytes, Answered]] = queue.SimpleQueue()
        self._askers: dict[int, Answered] = {}  # number of a line -> who waits for its answer
        threading.Thread(target=self._run, daemon=True).start()

    def answer(self, entries: list[tuple[Line, bytes]]) -> Iterator[list[Numbered]]:
        """Answers lines; yields those that are there, about once a second."""
        answered: Answered = queue.SimpleQueue()
        for line, raw in entries:
            self._arrived.put((line, raw, answered))
        waiting, ready = len(entries), list[Numbered]()
        due = time.monotonic() + HANDOVER_SECONDS
        while waiting:
            try:
                ready.append(answered.get(timeout=max(0.0, due - time.monotonic())))
                waiting -= 1
            except queue.Empty:
                due = time.monotonic() + HANDOVER_SECONDS
                if ready:
                    yield ready
                    ready = []
        yield ready

    # ------------------------------------------------------- what takes answers, for the BatchJob

    def expect(self, number: int, key: str) -> bool:
        """The driver asked for it."""
        del number, key  # nothing was answered before
        return True

    def put(self, number: int, text: str) -> None:
        """Hands an answer to whoever waits for it."""
        self._askers.pop(number).put((number, text))

    def tick(self) -> None:
        """Nothing waits for time to pass."""

    def close(self) -> None:
        """Nothing is kept."""

    # --------------------------------------------------------------------------- the engine's side

    def _run(self) -> None:
        try:
            while True:
                self._take()
                self._job.step()
        except Exception as error:
            self._on_failure(error)

    def _take(self) -> None:
        """Begins all lines that arrived; waits for one when there is nothing to do."""
        while True:
            try:
                line, raw, asker = self._arrived.get(block=not self._job.is_busy)
            except queue.Empty:
                return
            self._askers[line.number] = asker
            self._job.begin(line, parse_json(without_mark(raw)))


class EngineWorker:
    """What Ray Data makes for each accelerator; called with groups of lines."""

    def __init__(
        self,
        model: str,
        options: dict[str, Any],
        identity: str,
        request_timeout: float | None,
        version: str,
        roster: Any,
    ) -> None:
        """Loads the model; what stops it is told to the roster, in the words for users.

        Args:
          model, options: see `loading.load`.
          identity: of the model's files on the driver's machine.
          request_timeout: see `run_batch`.
          version: of pagedjax on the driver's machine.
        """
        self._ray, self._roster = importlib.import_module("ray"), roster
        self._name = uuid.uuid4().hex
        self._figures: dict[str, Any] = {}
        self._tell("join", self._name)
        self._scheduler: Any = None
        threading.Thread(target=self._beat, daemon=True).start()
        try:
            _check_same(model, identity, version)
            llm = loading.load(model, options)
        except (CannotStart, PagedJaxError) as error:
            self._tell("refuse", f"{error} (on {socket.gethostname()})")
            raise RuntimeError(str(error)) from error
        self._scheduler = llm.engine.scheduler
        self._engine = SharedEngine(llm, request_timeout, self._fail)
        self._tell("ready", self._name)

    def __call__(self, group: Any) -> Iterator[Any]:
        """Answers a row of `feed.groups`; yields rows of `numbers` and `texts`."""
        arrow = importlib.import_module("pyarrow")
        (row,) = group.to_pylist()
        self._tell("begin", row["numbers"])
        lines = map(Line, row["numbers"], row["custom_ids"])
        for ready in self._engine.answer(list(zip(lines, row["lines"], strict=True))):
            numbers, texts = zip(*ready, strict=True)
            yield arrow.table({"numbers": [numbers], "texts": [texts]})

    def _tell(self, what: str, *values: Any) -> None:
        """Calls the roster, and waits until it knows."""
        self._ray.get(getattr(self._roster, what).remote(*values))

    def _beat(self) -> None:
        """Signs of life, from the first second on: loading takes long."""
        while True:
            try:
                self._tell("report", self._name, figures_of(self._scheduler))
            except Exception:  # the driver is gone, and Ray ends this process
                return
            time.sleep(HEARTBEAT_SECONDS)

    def _fail(self, error: Exception) -> None:
        """Ends the process: Ray starts another one, and the driver gives its lines to others."""
        try:
            self._tell("note", f"the engine on {socket.gethostname()} failed: {error}")
        finally:
            os._exit(ENGINE_FAILED)


def figures_of(scheduler: Any) -> dict[str, Any]:
    """What the driver shows of an engine; empty while there is none."""
    if scheduler is None:
        return {}
    stats = scheduler.stats
    return {
        "num_prompt_tokens": stats.num_prompt_tokens,
        "num_generated_tokens": stats.num_generated_tokens,
        "num_preemptions": stats.num_preemptions,
        "num_cow_copies": stats.num_cow_copies,
        "kv_usage": stats.kv_usage,
        "prefix_hit_rate": stats.prefix_hit_rate,
        "num_running": scheduler.num_running,
        "num_waiting": scheduler.num_waiting,
    }


def _check_same(model: str, identity: str, version: str) -> None:
    """Raises `CannotStart` where answers would not be those of the driver's machine."""
    if version != __version__:
        raise CannotStart(
            f"pagedjax must be {version} on every machine, as where the job runs. "
            f"Got {__version__}."
        )
    if loading.identify(model)["identity"] != identity:
        raise CannotStart(
            f"the model {model} must be the same files on every machine as where the job runs. "
            "Got others: copy them there, or give a path that all machines share."
        )
