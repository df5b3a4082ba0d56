"""The decisions of one step, by arithmetic alone: who runs, how many tokens each, who gives way.

Owns the policy: running sequences first, oldest first; then waiting ones in order, of which only
those are passed that wait for pages that another one is filling; one token budget for both; who
needs a page makes others give theirs up. Nothing it reads is changed, so a draft can be thrown
away. Knows nothing of arrays or devices.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import chain, islice
from typing import Literal, NamedTuple

from pagedjax.config import SchedulerConfig
from pagedjax.errors import IntegrityError
from pagedjax.paging import HostTier, PageAllocator, PrefixCache
from pagedjax.plan import FROM_SLOT, ScheduledSequence
from pagedjax.request import Sequence
from pagedjax.scheduling.admission import Admission, admission_of, looks_for_hits
from pagedjax.scheduling.cost_model import CostModel
from pagedjax.scheduling.live import LiveRequest, LiveSequence
from pagedjax.scheduling.page_budget import PageBudget
from pagedjax.scheduling.pages_to_come import PagesToCome, ToCome
from pagedjax.scheduling.victims import Victim, VictimChooser

type BlockReason = Literal["preempting", "slots", "tokens", "rows", "pages", "prefix"]


class Blocked(NamedTuple):
    """Why the head of the queue was not admitted: what it needs, of which there is too little.

    `reserved` of the `free` pages are kept for what runs; of slots, for samples that will fork.
    For the reason "prefix" it waits for its first `needed` tokens, which `maker` computes.
    """

    live: LiveSequence
    reason: BlockReason
    needed: int = 1
    free: int = 0
    reserved: int = 0
    maker: LiveSequence | None = None


class StepDraft:
    """One step in the making.

    Attributes:
      scheduled, lives, starts, slots: parallel: what runs, its record, its first position in
        this step and its slot.
      front_tokens: of the first of them, as many as only run their last token: that token, or
        where the device has it.
      special: indices of those with prompt-logprob rows or with several samples.
      grown: those that need a page or a copy, with the positions they must cover, in order.
      victims: those that give all their pages up, in the order in which they were chosen.
      admitted: those that leave the queue, with the pages they start from.
      step: number of the step, for the plan.
      short_of_pages: the one at the front of the queue, where only pages kept it out.
      blocked: the head of the queue that stays, and why; None: nobody waits any more.
      must_wait: a sequence needs a page that others would have to give up, while results are
        awaited that may free some. The draft is not whole then, and must not be used.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        allocator: PageAllocator,
        cache: PrefixCache,
        host: HostTier,
        costs: CostModel,
        *,
        is_ahead: bool = False,
    ):
        """Starts with whole budgets; `is_ahead`: results of earlier steps are awaited."""
        self.scheduled: list[ScheduledSequence] = []
        self.lives: list[LiveSequence] = []
        self.starts: list[int] = []
        self.slots: list[int] = []
        self.special: list[int] = []
        self.front_tokens: list[int] = []
        self.grown: list[tuple[LiveSequence, int]] = []
        self.victims: list[Victim] = []
        self.admitted: list[Admission] = []
        self.short_of_pages: LiveSequence | None = None
        self.blocked: Blocked | None = None
        self.must_wait = False
        self.num_tokens = 0
        self.num_rows = 0
        self.step = 0
        self._config = config
        self._cache = cache
        self._host = host
        self._costs = costs
        self._chooser: VictimChooser | None = None  # made when pages run out
        self._max_rows = config.max_rows
        self._pages = PageBudget(allocator, config.page_size)
        self._num_parked = 0
        self._slots_left = 0  # for who is admitted
        self._reserved = 0  # pages that who is admitted must leave
        self._is_ahead = is_ahead
        self._passed: list[LiveSequence] = []  # by the front: their results must be read first

    def park(self, idle: LiveSequence) -> None:
        """An idle lane of a beam search gives its pages up; to be called first of all."""
        self.victims.append(Victim(idle, "recompute", None, 0, self._pages.free))
        self._pages.drop(idle.table.pages)
        self._num_parked += 1

    def schedule_running(self, running: Seq[LiveSequence]) -> None:
        """Gives each running sequence its tokens, oldest first; preempts among the later ones."""
        kept = list(running)  # victims leave it, behind the place where the loop is
        budget = self._config.max_num_batched_tokens
        self._decode_front(running)
        done = len(self.front_tokens) + len(self._passed)
        for at, live in enumerate(islice(kept, done, None), done + 1):
            if self.num_tokens >= budget:
                return
            if live.offers is not None:
                continue
            sequence = live.sequence
            start: int | None = sequence.num_computed_tokens
            if live.in_flight is not None:
                start = live.start_ahead()
                if start is None:
                    continue
            num_tokens, num_prompt_rows, num_samples = 1, 0, 1
            is_decode = start >= len(sequence.tokens) - 1 and live.owner.is_forked
            if not is_decode:
                num_tokens, num_prompt_rows, num_samples = self._chunk(live, start)
            if num_tokens == 0 or self.num_rows + num_samples > self._max_rows:
                continue
            total = start + num_tokens
            needs_page = total > live.capacity or live.shares_tail
            if needs_page and not self._make_room(live, total, kept, at):
                return
            self._add(live, start, live.held_slot, num_tokens, num_prompt_rows, num_samples)

    def admit(
        self, waiting: Seq[LiveSequence], running: Seq[LiveSequence], free_slots: Seq[int]
    ) -> None:
        """Takes from the front of the queue what fits whole, while budgets and slots last.

        A prompt fits when its pages, all of them, are free now beside what this step takes, what
        admitted prompts still need, and the next page of each running sequence that is about to
        need one. An idle engine thus takes anything that passed the door.

        A prompt that goes on along pages that an older sequence is filling waits for them where
        it is in the queue, and those behind it may pass. The slots and pages that it will need
        are kept, so that nobody who passes makes it wait longer.
        """
        if not waiting or self.must_wait:
            return
        gives_way = len(self.victims) > self._num_parked
        if gives_way or not free_slots or self.num_tokens >= self._config.max_num_batched_tokens:
            reason = "preempting" if gives_way else "tokens" if free_slots else "slots"
            self.blocked = Blocked(waiting[0], reason)
            return
        promised = sum(live.width - 1 for live in running if not live.owner.is_forked)
        self._slots_left = len(free_slots) - promised
        self._reserved = self._reserved_for(running)
        front = len(self.front_tokens)
        to_come = PagesToCome(self.lives, running, front, self._config.page_size)
        parked: LiveRequest | None = None
        for live in waiting:
            if live.offers is not None:
                parked = live.owner
                continue
            if parked is not None and live.owner is not parked:
                return  # the lanes in front will need the room once their search turns
            blocked = self._start(live, free_slots, to_come)
            if blocked is None:
                continue
            if self.blocked is None:
                self.blocked = blocked
                self.short_of_pages = live if blocked.reason == "pages" else None
            if blocked.reason != "prefix":
                return

    def _start(
        self, live: LiveSequence, free_slots: Seq[int], to_come: PagesToCome
    ) -> Blocked | None:
        """Admits a waiting sequence, or says why not."""
        if live.width > self._slots_left:
            free = len(free_slots) - len(self.admitted)
            return Blocked(live, "slots", live.width, free, free - self._slots_left)
        if self.num_tokens >= self._config.max_num_batched_tokens:
            return Blocked(live, "tokens")
        looks = looks_for_hits(live)
        if looks and (awaited := to_come.again(live)) is not None:
            return self._hold_back(live, awaited)
        admission = admission_of(live, self._cache)
        start, hits = admission.num_tokens, admission.hits
        if looks and (awaited := to_come.behind(live, len(hits))) is not None:
            return self._hold_back(live, awaited)
        num_tokens, num_prompt_rows, num_samples = self._chunk(live, start)
        if num_tokens == 0:
            return Blocked(live, "rows", live.width)
        taken = self._pages.taken_by(admission)
        whole = self._pages_for(live.sequence.num_tokens) - len(hits) + taken
        if whole > self._pages.free - self._reserved:
            return Blocked(live, "pages", whole, self._pages.free, self._reserved)
        self._pages.hold(admission)
        total = start + num_tokens
        slot = free_slots[len(self.admitted)]
        self._pages.free -= self._pages_for(total) - len(hits) + taken
        self._reserved += self._reserve(live, total)
        self._slots_left -= live.width
        self.admitted.append(admission)
        self.grown.append((live, total))
        self._add(live, start, slot, num_tokens, num_prompt_rows, num_samples)
        return None

    def _hold_back(self, live: LiveSequence, awaited: ToCome) -> Blocked:
        """It waits for pages to come, and keeps its claim to what it will need beside them."""
        shared = awaited.num_tokens
        whole = self._pages_for(live.sequence.num_tokens) - shared // self._config.page_size
        if whole > self._pages.free - self._reserved:
            return Blocked(live, "pages", whole, self._pages.free, self._reserved)
        self._reserved += self._reserve(live, shared)
        self._slots_left -= live.width
        return Blocked(live, "prefix", shared, maker=awaited.maker)

    def _decode_front(self, running: Seq[LiveSequence]) -> None:
        """Plans those at the front that run their last token and have, or find, the page for it.

        Most of what runs is there, and all it needs is a short loop. Those whose result must be
        read first are passed over.
        """
        scheduled, lives, starts, slots = self.scheduled, self.lives, self.starts, self.slots
        front_tokens = self.front_tokens
        free_pages = self._pages.free
        row = 0
        for live in running:
            sequence = live.sequence
            tokens, start, slot = sequence.tokens, sequence.num_computed_tokens, sequence.slot
            if row == self._max_rows or live.shares_tail or slot is None:
                break
            if live.in_flight is None:
                if start != len(tokens) - 1 or not live.owner.is_forked:
                    break
                token = tokens[start]
            else:
                start = live.start_ahead()
                if start is None:
                    self._passed.append(live)
                    continue
                if start != len(tokens):
                    break
                token = FROM_SLOT - slot
            if start >= live.capacity:
                if free_pages == 0:
                    break
                free_pages -= 1
                self.grown.append((live, start + 1))
            note = live.decode_note
            if note is None or note.first_row != row or note.epoch != sequence.epoch:
                note = live.decode_note = ScheduledSequence(sequence, sequence.epoch, 1, row, 0, 1)
            scheduled.append(note)
            lives.append(live)
            starts.append(start)
            slots.append(slot)
            front_tokens.append(token)
            row += 1
        self._pages.free = free_pages
        self.num_tokens = self.num_rows = row

    @property
    def is_decode(self) -> bool:
        """True when every sequence runs its last token and draws the next one."""
        return not self.special and self.num_rows == self.num_tokens == len(self.scheduled)

    def _add(
        self,
        live: LiveSequence,
        start: int,
        slot: int,
        num_tokens: int,
        num_prompt_rows: int,
        num_samples: int,
    ) -> None:
        sequence = live.sequence
        if num_prompt_rows or num_samples > 1:
            self.special.append(len(self.scheduled))
        self.scheduled.append(
            ScheduledSequence(
                sequence, sequence.epoch, num_tokens, self.num_rows, num_prompt_rows, num_samples
            )
        )
        self.lives.append(live)
        self.starts.append(start)
        self.slots.append(slot)
        self.num_tokens += num_tokens
        self.num_rows += num_prompt_rows + num_samples

    def _chunk(self, live: LiveSequence, start: int) -> tuple[int, int, int]:
        """(tokens, prompt-logprob rows, samples) that the budgets have for it; no token: not now.

        The last chunk draws for every sequence of the request at once; where its rows are not to
        be had, it is cut before its last token.
        """
        sequence = live.sequence
        rows_left = self._max_rows - self.num_rows
        remaining = sequence.num_tokens - start
        num_tokens = min(remaining, self._config.max_num_batched_tokens - self.num_tokens)
        samples = live.num_draws
        if num_tokens == remaining:
            prompt_rows = _prompt_rows(sequence, start, num_tokens)[0]
            if prompt_rows + samples <= rows_left:
                return num_tokens, prompt_rows, samples
            num_tokens -= 1
        prompt_rows, rowless = _prompt_rows(sequence, start, num_tokens)
        if prompt_rows > rows_left:
            num_tokens, prompt_rows = rowless + rows_left, rows_left
        return num_tokens, prompt_rows, 0

    def _make_room(self, live: LiveSequence, total: int, kept: list[LiveSequence], at: int) -> bool:
        """Counts the pages that `live` needs; False when it had to give way itself."""
        while (needed := self._pages_needed(live, total)) > self._pages.free:
            if self._is_ahead:
                self.must_wait = True
                return False
            if len(kept) == 1:
                raise IntegrityError(
                    f"the oldest sequence, {live.key}, must fit alone. Got {total} positions, "
                    f"{needed} more pages needed, {self._pages.free} free."
                )
            if self._chooser is None:
                self._chooser = VictimChooser(
                    self._config, self._cache, self._host, self._costs, self._pages.references
                )
            victim = kept.pop(self._chooser.choose(kept, at))
            self.victims.append(self._chooser.decide(victim, live, needed, self._pages.free))
            self._pages.drop(victim.table.pages)
            if victim is live:
                return False
        self._pages.free -= needed
        if self._copies_tail(live):
            self._pages.drop([live.table.last_page])  # held by others, too
        self.grown.append((live, total))
        return True

    def _pages_needed(self, live: LiveSequence, total: int) -> int:
        pages = self._pages_for(total) - live.capacity // self._config.page_size
        return max(0, pages) + self._copies_tail(live)

    def _copies_tail(self, live: LiveSequence) -> bool:
        if not live.shares_tail or live.sequence.num_computed_tokens == live.capacity:
            return False
        return self._pages.references(live.table.last_page) > 1

    def _reserved_for(self, running: Seq[LiveSequence]) -> int:
        """Pages to keep for all running sequences."""
        size, front = self._config.page_size, len(self.front_tokens)
        pages = sum((start + 1) % size == 0 for start in self.starts[:front])
        triples = zip(self.lives[front:], self.starts[front:], self.scheduled[front:], strict=True)
        ends = {live: start + s.num_tokens for live, start, s in triples}
        others = chain(self._passed, islice(running, front + len(self._passed), None))
        return pages + sum(self._reserve(live, ends.get(live)) for live in others)

    def _reserve(self, live: LiveSequence, end: int | None) -> int:
        """Pages to keep for a running sequence: of known tokens past `end`, and of its next one."""
        if end is None:
            end = live.sequence.num_computed_tokens + live.num_in_flight
        num_tokens = max(live.sequence.num_tokens, end)
        is_full = num_tokens % self._config.page_size == 0
        next_pages = live.width if is_full else live.width - 1
        return self._pages_for(num_tokens) - self._pages_for(end) + next_pages

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.page_size)


def _prompt_rows(sequence: Sequence, start: int, num_tokens: int) -> tuple[int, int]:
    """Prompt-logprob rows of a chunk, and how many tokens at its front need none.

    The logprob of prompt token t is read at position t - 1; those that an earlier pass collected
    are not asked for again.
    """
    if sequence.request.params.prompt_logprobs is None:
        return 0, num_tokens
    first = max(start, len(sequence.prompt_logprobs) - 1, 0)  # first position with a row
    last = min(start + num_tokens, sequence.num_prompt_tokens - 1)
    return max(0, last - first), first - start
