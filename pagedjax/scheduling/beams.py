"""Beam search on pages: lanes are sequences that wait for each other, fork and are freed.

A lane whose offers are in is *idle*: it has nothing to run until those of its siblings are in, too.
Then the search selects, and the lanes turn over. The first child of a lane stays where its parent
is; every further one takes the place of a lane without children and forks the parent's pages, a
partial last one too, which is copied when one of them writes. Where the parent is swapped, the
child shares its host pages; where the place has no slot, the child waits and is computed again
like any preempted sequence.

Idle lanes may give their pages up and keep their offers (*parked*); `lane_to_park` says when one
must. Knows nothing of budgets, nor of the rules of the search itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain

from pagedjax.paging import PrefixChain
from pagedjax.request import Logprob, Sequence, SequenceStatus, TokenLogprobs
from pagedjax.scheduling.beam_search import BeamSearch, Child, Offers
from pagedjax.scheduling.draft import StepDraft
from pagedjax.scheduling.journal import JournaledAllocator
from pagedjax.scheduling.live import LiveRequest, LiveSequence
from pagedjax.scheduling.plan_builder import PlanBuilder
from pagedjax.scheduling.roster import Roster


@dataclass(frozen=True, slots=True, eq=False)
class _Heir:
    """A child that leaves its parent's place, with what it takes over from there."""

    lane: LiveSequence  # whose place it takes
    parent: LiveSequence
    slot: int | None  # it runs on in it, with the parent's pages; None: it waits
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs | None]
    chain: PrefixChain
    num_computed_tokens: int


class BeamTurner:
    """Takes in the offers of lanes, and turns the lanes of a request over when all are in."""

    def __init__(self, allocator: JournaledAllocator, roster: Roster, builder: PlanBuilder):
        """Is handed its collaborators."""
        self._allocator = allocator
        self._roster = roster
        self._builder = builder

    def take(self, live: LiveSequence, search: BeamSearch, offers: Offers) -> list[Sequence]:
        """A lane's offers are in; returns the lanes that got a token or ended, best first."""
        owner = live.owner
        live.offers = offers
        lanes = owner.lanes or [live]  # the first one computes the prompt for all
        offered = [lane.offers for lane in lanes if lane.offers is not None]
        if len(offered) < len(lanes):
            return []
        num_tokens = live.sequence.num_output_tokens
        totals = [lane.sequence.cumulative_logprob for lane in lanes]
        ended, children = search.turn(offered, totals, num_tokens)
        for child in ended:
            self._keep(search, lanes[child.parent], child)
        if search.is_done(children, num_tokens + 1):
            return self._finish(owner, search)
        self._turn_over(owner, lanes, children)
        return [lane.sequence for lane in owner.lanes]

    def _keep(self, search: BeamSearch, parent: LiveSequence, child: Child) -> None:
        sequence = parent.sequence
        logprobs = [*sequence.output_logprobs, *_reported(parent, child)]
        search.keep(child, [*sequence.output_token_ids, child.token], logprobs)

    def _finish(self, owner: LiveRequest, search: BeamSearch) -> list[Sequence]:
        """The request's sequences become its hypotheses, best first."""
        members = list(owner.members)
        pairs = list(zip(members, search.hypotheses, strict=True))
        for live, hypothesis in reversed(pairs):  # one that has the prompt to compute goes last
            sequence = live.sequence
            sequence.tokens[sequence.num_prompt_tokens :] = hypothesis.tokens
            sequence.output_logprobs = hypothesis.logprobs
            sequence.cumulative_logprob = hypothesis.total
            sequence.stop_reason = hypothesis.stop_reason
            self._roster.close(live, hypothesis.reason)
        return [live.sequence for live in members]

    def _turn_over(
        self, owner: LiveRequest, lanes: list[LiveSequence], children: list[Child]
    ) -> None:
        owner.is_forked = True
        places: dict[int, LiveSequence] = {}  # child, by its place -> the lane that it becomes
        taken: set[int] = set()
        for at, child in enumerate(children):
            if child.parent not in taken:
                taken.add(child.parent)
                places[at] = lanes[child.parent]
        spare = [live for live in owner.members if live not in places.values()]
        heirs = self._heirs(
            [(at, lanes[c.parent]) for at, c in enumerate(children) if at not in places], spare
        )
        self._move_pages(heirs.values(), spare)
        for heir in heirs.values():
            self._settle(heir)
        if self._roster.events is not None:
            self._roster.events.turned(
                [(heir.lane, heir.parent, heir.slot is not None) for heir in heirs.values()]
            )
        places |= {at: heir.lane for at, heir in heirs.items()}
        reported = [_reported(lanes[child.parent], child) for child in children]
        owner.lanes = [places[at] for at in range(len(children))]
        for lane, child, logprobs in zip(owner.lanes, children, reported, strict=True):
            sequence = lane.sequence
            sequence.tokens.append(child.token)
            sequence.output_logprobs += logprobs
            sequence.cumulative_logprob = child.total
            lane.offers = None

    def _heirs(
        self, forks: list[tuple[int, LiveSequence]], spare: list[LiveSequence]
    ) -> dict[int, _Heir]:
        """Places for the children that fork: those with pages first, and running lanes first."""
        free = iter(self._roster.unpromised_slots())
        forks = sorted(forks, key=lambda fork: not _is_running(fork[1]))
        places = sorted(spare, key=lambda live: not _is_running(live))
        heirs: dict[int, _Heir] = {}
        for (at, parent), lane in zip(forks, places, strict=True):
            slot = None
            if _is_running(parent):
                slot = lane.sequence.slot if _is_running(lane) else next(free, None)
            has_pages = slot is not None or bool(parent.host_pages)
            sequence = parent.sequence
            heirs[at] = _Heir(
                lane=lane,
                parent=parent,
                slot=slot,
                tokens=list(sequence.tokens),
                logprobs=list(sequence.output_logprobs),
                prompt_logprobs=list(sequence.prompt_logprobs),
                chain=parent.chain.fork(),
                num_computed_tokens=sequence.num_computed_tokens if has_pages else 0,
            )
        return heirs

    def _move_pages(self, heirs: Collection[_Heir], spare: list[LiveSequence]) -> None:
        """Lanes without children give theirs up, and those that run on share their parents'."""
        with self._allocator.transaction():
            for lane in spare:
                lane.table.save()
                lane.table.release()
            for heir in heirs:
                if heir.slot is not None:
                    heir.lane.table.adopt(heir.parent.table.pages, heir.parent.table.num_tokens)

    def _settle(self, heir: _Heir) -> None:
        """What follows from the pages' move; nothing here can fail."""
        lane, parent, sequence = heir.lane, heir.parent, heir.lane.sequence
        was_running = _is_running(lane)
        self._roster.swapped.release(lane)
        if heir.slot is None and was_running:
            self._roster.requeue(lane)
        elif heir.slot is not None and not was_running:
            self._roster.go_on(lane, heir.slot)
            self._builder.set_slot(heir.slot, lane)
        if heir.slot is None:
            self._roster.swapped.share(lane, parent)
        sequence.tokens = heir.tokens
        sequence.output_logprobs = heir.logprobs
        if len(heir.prompt_logprobs) > len(sequence.prompt_logprobs):
            sequence.prompt_logprobs = heir.prompt_logprobs
        sequence.num_computed_tokens = heir.num_computed_tokens
        lane.chain = heir.chain
        if heir.slot is not None:
            lane.capacity = parent.capacity
            lane.shares_tail = parent.shares_tail = True
            self._builder.set_pages(lane)


def lane_to_park(
    draft: StepDraft, roster: Roster, parked: Collection[LiveSequence]
) -> LiveSequence | None:
    """The idle lane that must give its pages and its slot up before `draft` is made again, if any.

    One must where nothing could run otherwise, the latest first; and one of a request whose own
    lane waits for pages: what that holds would wait for it.
    """
    short = draft.short_of_pages
    if draft.scheduled and (short is None or not short.owner.lanes):
        return None
    if not draft.scheduled and any(live.in_flight is not None for live in roster.running):
        return None
    idle = [live for live in roster.running if live.offers is not None and live not in parked]
    if draft.scheduled and short is not None:
        idle = [live for live in idle if live.owner is short.owner]
    return idle[-1] if idle else None


def lane_problems(owner: LiveRequest) -> list[str]:
    """What is wrong with a request's lanes; for `check_integrity`."""
    if not owner.lanes:
        waits = [live.key for live in owner.members if live.offers is not None]
        return [f"offers before the fork: {waits}"] if waits else []
    facts = f"lanes {[live.key for live in owner.lanes]}, members {len(owner.members)}"
    lengths = {live.sequence.num_tokens for live in owner.lanes}
    found: list[str] = []
    if owner.beams is None or {*owner.lanes} != {*owner.members}:
        found.append(f"lanes must be the members of a search: {facts}")
    if len(lengths) > 1:
        found.append(f"lanes must be equally long: {facts}, tokens {sorted(lengths)}")
    if all(live.offers is not None for live in owner.lanes):
        found.append(f"a search with all its offers must turn: {facts}")
    totals = [live.sequence.cumulative_logprob for live in owner.lanes]
    if totals != sorted(totals, reverse=True):
        found.append(f"lanes must be ordered by logprob: {facts}, {totals}")
    return found


def _is_running(live: LiveSequence) -> bool:
    return live.sequence.status is SequenceStatus.RUNNING


def _reported(parent: LiveSequence, child: Child) -> list[TokenLogprobs]:
    """The logprobs that a child's token is reported with; none when they are not asked for."""
    num_top = parent.sequence.request.params.logprobs
    if num_top is None:
        return []
    offers = parent.offers or []
    top = enumerate(offers[:num_top], 1)
    chosen = (child.token, Logprob(child.logprob, child.rank))
    return [
        dict(chain([chosen], ((t, Logprob(p, rank)) for rank, (t, p) in top if t != child.token)))
    ]
