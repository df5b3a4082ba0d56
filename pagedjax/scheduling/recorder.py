"""Turns what the scheduler is told and what it decides into events, as short as they can be.

Owns what the last events said, so that a step of 256 sequences that go on decoding is one short
line. Reads the scheduler's records and changes none. Knows nothing of files or clocks.
"""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import asdict, fields
from typing import Any, Concatenate

from pagedjax.config import SchedulerConfig
from pagedjax.events import (
    SCHEMA,
    Added,
    Called,
    Costs,
    Dropped,
    Ended,
    EventSink,
    Header,
    Restarted,
    Result,
    Stalled,
    Step,
    Turned,
    encode_request,
    salt_digest,
)
from pagedjax.plan import StepPlan, StepResult
from pagedjax.request import Request, Sequence
from pagedjax.scheduling.admission import Admission
from pagedjax.scheduling.cost_model import CostModel
from pagedjax.scheduling.draft import Blocked, StepDraft
from pagedjax.scheduling.journal import JournaledAllocator
from pagedjax.scheduling.live import LiveSequence
from pagedjax.scheduling.victims import Victim
from pagedjax.version import __version__

logger = logging.getLogger("pagedjax")


def _harmless[**P](
    method: Callable[Concatenate[Recorder, P], None],
) -> Callable[Concatenate[Recorder, P], None]:
    """A recorder that breaks falls silent, with a traceback in the log; the engine goes on."""

    @functools.wraps(method)
    def wrapper(self: Recorder, *arguments: P.args, **named: P.kwargs) -> None:
        if self.is_broken:
            return
        try:
            method(self, *arguments, **named)
        except Exception:
            self.is_broken = True
            logger.exception("the event log ends here: recording failed")

    return wrapper


class Recorder:
    """What a scheduler calls at its decision points.

    Attributes:
      is_broken: recording failed; nothing is recorded any more.
    """

    def __init__(
        self,
        sink: EventSink,
        config: SchedulerConfig,
        *,
        pools: tuple[JournaledAllocator, JournaledAllocator],
        costs: CostModel,
    ):
        """Emits the header; `pools` are that of the device and that of the host."""
        self.is_broken = False
        self._sink = sink
        self._page_size = config.page_size
        self._allocator, self._host_allocator = pools
        self._costs = costs
        self._rates: dict[str, float] = {}  # as said last
        self._last: list[LiveSequence] = []  # what ran in the last step
        self._has_beams = False  # a request with beams came
        self._waiting: list[str] | None = None  # head of the queue and reason, as said last
        self._victims: set[LiveSequence] = set()  # of the step that is being committed
        self._sink.emit(Header(schema=SCHEMA, version=__version__, config=asdict(config)))

    # --------------------------------------------------------------------------------- inputs

    @_harmless
    def added(self, request: Request) -> None:
        """A request was queued."""
        self._has_beams |= request.params.beam_width is not None
        self._sink.emit(Added(request=encode_request(request)))

    @_harmless
    def result(self, plan: StepPlan, result: StepResult) -> None:
        """A result is about to be taken in."""
        num_rows = plan.num_rows
        self._sink.emit(
            Result(
                step=plan.step,
                tokens=result.tokens[:num_rows].tolist(),
                corrupted=result.corrupted[:num_rows].nonzero()[0].tolist(),
                lost=sorted(result.lost_host_pages),
                candidates=_candidates(plan, result) if self._has_beams else [],
            )
        )

    @_harmless
    def dropped(self, plan: StepPlan, lost: Iterable[int], *, has_run: bool) -> None:
        """A plan is about to be dropped; arguments as in `Scheduler.drop`."""
        arguments = {"lost": sorted(lost), "has_run": has_run}
        self._sink.emit(Dropped(step=plan.step, arguments=arguments))

    @_harmless
    def called(self, method: str, **arguments: Any) -> None:
        """Another method is about to do something; `arguments` are as JSON has them."""
        if method == "schedule":  # what it decides follows at once, and may look at the rates
            self._say_rates()
        self._sink.emit(Called(method=method, arguments=arguments))

    @_harmless
    def pins_changed(self, method: str, prefix: Seq[int], salt: str | None) -> None:
        """A prefix is about to be pinned, or let go of: `method` is "pin" or "unpin"."""
        self.called(method, prefix=list(prefix), salt=salt_digest(salt))

    # ------------------------------------------------------------------------------ decisions

    @_harmless
    def planned(self, plan: StepPlan, draft: StepDraft) -> None:
        """A step was planned, and its pages taken; before sequences change places."""
        gone, runs = self._changes(draft)
        self._victims = {victim.live for victim in draft.victims}
        if self._victims:  # nobody looks at the rates otherwise
            self._say_rates()
        self._sink.emit(
            Step(
                step=plan.step,
                gone=gone,
                runs=runs,
                admitted=[_admitted(admission) for admission in draft.admitted],
                pages=self._new_pages(draft),
                preempted=[_preempted(victim) for victim in draft.victims],
                copies=_copies(plan, draft),
                swaps_out=[[move.page, move.host_page] for move in plan.swaps_out],
                swaps_in=[[move.page, move.host_page] for move in plan.swaps_in],
                evicted=list(self._allocator.last_evicted),
                host_evicted=list(self._host_allocator.last_evicted),
                waiting=self._news(draft.blocked),
                free=self._allocator.usable - self._allocator.num_held,
                host_free=self._host_allocator.usable - self._host_allocator.num_held,
                digest=digest(plan),
            )
        )

    @_harmless
    def stalled(self, draft: StepDraft) -> None:
        """Nothing can run now. What leaves no line changes nothing: a replay does not see it."""
        if draft.blocked is not None and (waiting := self._news(draft.blocked)):
            self._sink.emit(Stalled(waiting=waiting))

    @_harmless
    def restarted(self, live: LiveSequence) -> None:
        """A running sequence gave its pages up and waits again."""
        if live in self._victims:  # its step said so already
            self._victims.discard(live)
        else:
            self._last = [one for one in self._last if one is not live]  # its next run is news
            self._sink.emit(Restarted(sequence=name_of(live.sequence)))

    @_harmless
    def turned(self, heirs: Seq[tuple[LiveSequence, LiveSequence, bool]]) -> None:
        """Beams took others over: the lane, its new parent, and whether it runs on its pages."""
        moves = [
            [name_of(lane.sequence), name_of(parent.sequence), runs] for lane, parent, runs in heirs
        ]
        stopped = {lane for lane, _, runs in heirs if not runs}
        if stopped:
            self._last = [live for live in self._last if live not in stopped]
        if moves:
            self._sink.emit(Turned(moves=moves))

    @_harmless
    def ended(self, sequence: Sequence) -> None:
        """A sequence ended."""
        assert sequence.finish_reason is not None
        self._sink.emit(
            Ended(
                sequence=name_of(sequence),
                reason=sequence.finish_reason.value,
                tokens=sequence.num_output_tokens,
                error=sequence.error,
            )
        )

    def flush(self) -> None:
        """Nothing happens for a while: what is kept back may be written."""
        self._sink.flush()

    # --------------------------------------------------------------------------------- helpers

    def _say_rates(self) -> None:
        rates = asdict(self._costs)
        if rates != self._rates:
            self._rates = rates
            self._sink.emit(Costs(rates=rates))

    def _changes(self, draft: StepDraft) -> tuple[list[str], list[list[Any]]]:
        """Who left since the last step, and who came or runs more than one token."""
        lives, last = draft.lives, self._last
        self._last = lives
        is_decode = draft.num_tokens == len(lives)
        if is_decode and lives == last:  # compares identities, at the speed of a memcmp
            return [], []
        before, now = set(last), set(lives)
        gone = [name_of(live.sequence) for live in last if live not in now]
        runs = [
            [name_of(live.sequence), scheduled.num_tokens]
            for live, scheduled in zip(lives, draft.scheduled, strict=True)
            if scheduled.num_tokens != 1 or live not in before
        ]
        return gone, runs

    def _new_pages(self, draft: StepDraft) -> list[list[Any]]:
        admitted = {admission.live for admission in draft.admitted}
        found: list[list[Any]] = []
        for live, _ in draft.grown:
            first = 0 if live in admitted else live.capacity // self._page_size
            pages = list(live.table.pages[first:])
            if pages:
                found.append([name_of(live.sequence), first, pages])
        return found

    def _news(self, blocked: Blocked | None) -> list[Any]:
        """Why the head of the queue waits, unless that was said already."""
        if blocked is None:
            self._waiting = None
            return []
        head = name_of(blocked.live.sequence)
        maker = [] if blocked.maker is None else [name_of(blocked.maker.sequence)]
        if self._waiting == [head, blocked.reason, *maker]:
            return []
        self._waiting = [head, blocked.reason, *maker]
        return [head, blocked.reason, blocked.needed, blocked.free, blocked.reserved, *maker]


def name_of(sequence: Sequence) -> str:
    """How the log names a sequence: by order of arrival, and samples but the first by number."""
    arrival = sequence.request.arrival
    return f"{arrival}.{sequence.sample}" if sequence.sample else str(arrival)


def digest(plan: StepPlan) -> int:
    """CRC-32 of what a plan sends to the device. Page tables are left out: events have their
    changes, and their tails may hold anything."""
    rows, value = plan.rows, plan.bucket
    for array in (
        plan.tokens,
        plan.positions,
        plan.slot_mapping,
        plan.kv_lens,
        plan.cu_q_lens,
        *(getattr(rows, item.name) for item in fields(rows)),
    ):
        value = zlib.crc32(array.data, value)
    for update in plan.row_updates:
        value = zlib.crc32(str(update.slot).encode(), value)
    return value


def _admitted(admission: Admission) -> list[Any]:
    host_pages = list(admission.hits.host_pages)
    name = name_of(admission.live.sequence)
    return [name, admission.num_tokens, host_pages if any(host_pages) else []]


def _preempted(victim: Victim) -> list[Any]:
    needer = "" if victim.needed_by is None else name_of(victim.needed_by.sequence)
    name = name_of(victim.live.sequence)
    return [name, victim.mode, needer, victim.num_pages_needed, victim.num_pages_free]


def _candidates(plan: StepPlan, result: StepResult) -> list[list[Any]]:
    """The likeliest tokens of rows that belong to a beam."""
    found: list[list[Any]] = []
    for scheduled in plan.scheduled:
        if scheduled.sequence.request.params.beam_width is not None:
            first = scheduled.first_row + scheduled.num_prompt_rows
            for row in range(first, first + scheduled.num_samples):
                ids, logprobs = result.top_ids[row], result.top_logprobs[row]
                found.append([row, ids.tolist(), logprobs.tolist()])
    return found


def _copies(plan: StepPlan, draft: StepDraft) -> list[list[Any]]:
    found: list[list[Any]] = []
    for copy in plan.copies:
        owner = next(live for live, _ in draft.grown if copy.dst in live.table.pages)
        found.append([name_of(owner.sequence), copy.src, copy.dst])
    return found
