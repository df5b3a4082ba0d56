"""Engines on a cluster, as something that answers lines: Ray Data's pipeline, and who lives in it.

Owns one pipeline at a time, a round. Ray restarts the process of a worker that dies; what that one
had begun is lost to the round, and the job sees to it (`job.py`). Ray's own retries are off: it
would retry on the same worker only, and count the answers that a lost one handed over already.
"""

from __future__ import annotations

import importlib
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagedjax import __version__
from pagedjax.batch_job.errors import CannotStart, EnginesLost
from pagedjax.batch_job.on_ray import feed
from pagedjax.batch_job.on_ray.cluster import Cluster
from pagedjax.batch_job.on_ray.counters import FleetCounters
from pagedjax.batch_job.on_ray.roster import Roll, Roster
from pagedjax.batch_job.on_ray.worker import EngineWorker, Numbered

CALLS = 16  # groups of lines in an engine at once: few, because each costs Ray some milliseconds
MIN_GROUP, MAX_GROUP = 4, 64  # lines of a group
FEED_AHEAD = 32  # groups that are read before a worker asks
POLL_SECONDS = 0.1  # between two looks for answers
READ_SECONDS = 1.0  # between two looks at the roster
LOST_SECONDS = 120.0  # without a sign of any worker, once there was one
WAIT_SECONDS = 60.0  # without any worker until that is told
ANSWER_SECONDS = 30.0  # that the roster, on this machine, may take
STARTS_PER_WORKER = 4  # without a line begun in between, then they are given up

type Event = list[Numbered] | Exception | None  # None: the round is over


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """What every worker is made from.

    Attributes:
      model, options: see `loading.load`.
      identity: of the model's files.
      request_timeout: see `run_batch`.
      in_flight: lines in an engine at once.
    """

    model: str
    identity: str
    in_flight: int
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    request_timeout: float | None = None

    def shape(self, alone: bool) -> tuple[int, int]:
        """Groups in an engine at once, and lines of a group."""
        if alone:
            return 1, 1
        calls = min(CALLS, -(-self.in_flight // MIN_GROUP))
        return calls, min(MAX_GROUP, -(-self.in_flight // calls))


class Fleet:
    """One engine for each worker, for as long as a job runs."""

    def __init__(
        self, cluster: Cluster, plan: WorkerPlan, input_path: Path, say: Callable[[str], None]
    ) -> None:
        """Starts nothing yet.

        Args:
          input_path: where the input is once the job has begun.
          say: shows a message to the user.
        """
        self.counters = FleetCounters()
        self.num_workers = cluster.num_workers
        self._cluster, self._plan, self._input, self.say = cluster, plan, input_path, say
        self._round: _Round | None = None  # started, and not given lines yet
        self.last_begun: set[int] = set()  # lines that an engine got in the last round
        self.feed_trouble: str | None = None  # why the input was not read to its end there

    def start(self) -> None:
        """Starts the workers, and waits until one of them has its model.

        Raises:
          CannotStart: a worker cannot load it, or none lives long enough.
        """
        self._round = started = self._new_round(alone=False)
        try:
            while not started.roll.num_ready:
                started.poll(POLL_SECONDS)
                if started.roll.refusals:
                    raise CannotStart(started.roll.refusals[0])
                if started.is_over:
                    raise CannotStart("Ray Data ended before a worker was ready.")
        except EnginesLost as error:
            raise CannotStart(str(error)) from error

    def answers(
        self, todo: bytes, stamp: tuple[int, int], *, alone: bool = False
    ) -> Iterator[list[Numbered]]:
        """Answers lines, some of them: what dies with a worker is left out.

        Args:
          todo, stamp: see `Roster.publish`.
          alone: one line at a time in each engine, so that what kills it is known.

        Yields:
          answers as they come, and nothing several times a second, so that the caller can stop.

        Raises:
          EnginesLost: no worker lives, or the cluster is gone.
        """
        current = self._round if self._round is not None else self._new_round(alone)
        current.publish(todo, stamp)
        while not current.is_over:
            yield current.poll(POLL_SECONDS)
        self._round = None
        self.last_begun = current.begun()
        self.feed_trouble = current.read().feed_trouble

    def _new_round(self, alone: bool) -> _Round:
        return _Round(self._cluster, self._plan, self._input, alone, self._saw)

    def _saw(self, roll: Roll) -> None:
        for note in roll.notes:
            self.say(f"warning: {note}")
        self.counters.update(roll)


class _Round:
    """One run of the pipeline, in a thread that hands over what comes out of it."""

    def __init__(
        self,
        cluster: Cluster,
        plan: WorkerPlan,
        input_path: Path,
        alone: bool,
        on_roll: Callable[[Roll], None],
    ) -> None:
        self.roll = Roll()
        self.is_over = False
        self._cluster, self._ray, self._on_roll = cluster, cluster.ray, on_roll
        here = {"ray.io/node-id": cluster.node_id}
        self._roster = self._ray.remote(Roster).options(num_cpus=0, label_selector=here).remote()
        calls, lines = plan.shape(alone)
        dataset = _dataset(cluster, plan, feed.datasource(input_path, lines, self._roster), calls,
                           self._roster)  # fmt: skip
        self._events: queue.Queue[Event] = queue.Queue(maxsize=4 * CALLS)
        threading.Thread(target=_drain, args=(dataset, self._events), daemon=True).start()
        self._began = self._moved = self._read_at = time.monotonic()
        self._joined_before = 0  # when a line was begun last
        self._told_waiting = False

    def publish(self, todo: bytes, stamp: tuple[int, int]) -> None:
        """The feed begins."""
        self._call("publish", todo, stamp)

    def begun(self) -> set[int]:
        """Lines that were given to an engine."""
        return self._call("begun")

    def poll(self, seconds: float) -> list[Numbered]:
        """What comes within some seconds, or nothing."""
        if time.monotonic() - self._read_at >= READ_SECONDS:
            self._watch(self.read())
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            return []
        if isinstance(event, list):
            return event
        self.is_over = True
        if event is not None:
            roll = self.read()
            why = roll.refusals[0] if roll.refusals else " ".join(str(event).split())[:500]
            raise EnginesLost(f"Ray Data failed: {why}") from event
        return []

    def read(self) -> Roll:
        """Asks the roster."""
        before, self.roll = self.roll, self._call("read")
        self._read_at = time.monotonic()
        if self.roll.num_begun > before.num_begun:
            self._joined_before = self.roll.num_joined
        self._on_roll(self.roll)
        return self.roll

    def _watch(self, roll: Roll) -> None:
        """Raises `EnginesLost` when nothing can come any more."""
        now, workers = time.monotonic(), self._cluster.num_workers
        if not roll.silent and now - self._began > WAIT_SECONDS and not self._told_waiting:
            self._told_waiting = True
            self._on_roll(Roll(notes=["no worker has begun yet: the cluster may be in use"]))
        if roll.silent and min(roll.silent.values()) > LOST_SECONDS:
            raise EnginesLost(f"no worker was heard for {LOST_SECONDS:.0f} s")
        if roll.num_joined - self._joined_before > STARTS_PER_WORKER * workers:
            why = f": {roll.refusals[0]}" if roll.refusals else ", before they began a line"
            raise EnginesLost(f"the workers die again and again{why}")

    def _call(self, what: str, *values: Any) -> Any:
        try:
            return self._ray.get(
                getattr(self._roster, what).remote(*values), timeout=ANSWER_SECONDS
            )
        except Exception as error:
            raise EnginesLost(f"the cluster is gone ({type(error).__name__})") from error


def _dataset(cluster: Cluster, plan: WorkerPlan, source: Any, calls: int, roster: Any) -> Any:
    """The pipeline, not started."""
    data = importlib.import_module("ray.data")
    context = data.DataContext.get_current()
    context.target_max_block_size = 1  # a group is a block of its own, and an answer leaves at once
    context.max_errored_blocks = -1  # what a dead worker had is given out again in another round
    # Ray looks for new rows ten times a second, and takes as many as wait then.
    context._max_num_blocks_in_streaming_gen_buffer = FEED_AHEAD
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    here = {"ray.io/node-id": cluster.node_id}
    lines = data.read_datasource(source, override_num_blocks=1, num_cpus=0, label_selector=here)
    pool = data.ActorPoolStrategy(
        size=cluster.num_workers,
        max_tasks_in_flight_per_actor=calls,
        max_concurrent_calls_per_actor=calls,
        enable_true_multi_threading=True,
    )
    made_from = (
        plan.model, plan.options, plan.identity, plan.request_timeout, __version__, roster,
    )  # fmt: skip
    with warnings.catch_warnings():
        # `max_restarts` and `max_task_retries` go by another way from Ray 2.64 on.
        warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
        return lines.map_batches(
            EngineWorker,
            fn_constructor_args=made_from,
            batch_size=1,
            batch_format="pyarrow",
            compute=pool,
            max_restarts=-1,
            max_task_retries=0,
            **cluster.resources,
        )


def _drain(dataset: Any, events: queue.Queue[Event]) -> None:
    """Runs the pipeline; in a thread."""
    try:
        for rows in dataset.iter_batches(
            batch_size=None, prefetch_batches=0, batch_format="pyarrow"
        ):
            for row in rows.to_pylist():
                events.put(list(zip(row["numbers"], row["texts"], strict=True)))
        events.put(None)
    except BaseException as error:
        events.put(error if isinstance(error, Exception) else RuntimeError(str(error)))
