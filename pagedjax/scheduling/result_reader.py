"""What a step's result means for one sequence: its tokens, logprobs, fork and end.

Owns the order in which a result is taken in: first what makes it void, then computed positions
and their registration in the prefix cache, then logprobs, then tokens and their stop checks. Knows
nothing of budgets, and of pages only that computed ones are registered and forks share them.
"""

from __future__ import annotations

from pagedjax.config import SchedulerConfig
from pagedjax.errors import IntegrityError
from pagedjax.paging import HostTier, PrefixCache
from pagedjax.plan import MAX_LOGPROBS, ScheduledSequence, StepResult
from pagedjax.request import FinishReason, Logprob, Sequence, TokenLogprobs
from pagedjax.scheduling.beam_search import Offers
from pagedjax.scheduling.beams import BeamTurner
from pagedjax.scheduling.journal import JournaledAllocator
from pagedjax.scheduling.live import LiveSequence
from pagedjax.scheduling.plan_builder import PlanBuilder
from pagedjax.scheduling.roster import Roster


class Readback:
    """A result whose tokens and flags are lists: a sequence looks at one entry, not at an array."""

    __slots__ = ("corrupted", "has_corrupted", "result", "tokens")

    def __init__(self, result: StepResult):
        """Converts once a step."""
        self.result = result
        self.tokens: list[int] = result.tokens.tolist()
        self.corrupted: list[bool] = result.corrupted.tolist()
        self.has_corrupted = any(self.corrupted)


class ResultReader:
    """Takes in results, a sequence at a time.

    Attributes:
      num_prompt_tokens: prompt positions computed so far.
      num_generated_tokens: tokens sampled so far.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        allocator: JournaledAllocator,
        cache: PrefixCache,
        host: HostTier,
        roster: Roster,
        builder: PlanBuilder,
    ):
        """Is handed its collaborators."""
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self._config = config
        self._vocab_size = config.vocab_size
        self._allocator = allocator
        self._cache = cache
        self._host = host
        self._roster = roster
        self._builder = builder
        self._beams = BeamTurner(allocator, roster, builder)

    def read(
        self, live: LiveSequence, scheduled: ScheduledSequence, readback: Readback
    ) -> list[Sequence]:
        """Takes in one sequence's part of a result; returns what got a token or ended."""
        tokens, corrupted, result = readback.tokens, readback.corrupted, readback.result
        sequence, first = live.sequence, scheduled.first_row
        drawing = first + scheduled.num_prompt_rows
        end = drawing + scheduled.num_samples
        if end > first and any(corrupted[first:end]):
            self._forget_pages(live)
            message = _corrupted_message(sequence)
            return self._roster.close_all(live.owner, FinishReason.ERROR, message)
        live.in_flight, live.ahead = live.ahead, None
        self._count_computed(live, scheduled.num_tokens)
        for row in range(first, drawing):
            logprobs = sequence.prompt_logprobs
            target = sequence.tokens[len(logprobs)]
            num_top = sequence.request.params.prompt_logprobs or 0
            logprobs.append(self._logprobs(target, result, row, num_top))
        if scheduled.num_samples == 0:
            return []
        if live.owner.beams is not None:
            self.num_generated_tokens += 1
            return self._beams.take(live, live.owner.beams, self._offers(result, drawing))
        if scheduled.num_samples == 1:
            members, rows = self._fork(live) if live.is_leader else [live], [drawing]
        else:
            members, drawn = self._fork(live, shared_slot=True), live.owner.drawn
            # Some may have ended since the plan was made.
            rows = [drawing + drawn.index(member.sequence.sample) for member in members]
        for row, member in zip(rows, members, strict=True):
            self._append(member, tokens[row], result, row)
        return [member.sequence for member in members]

    def read_token(self, live: LiveSequence, token: int) -> None:
        """What `read` does for a plain sequence that decoded: one token more."""
        self._count_computed(live, 1)
        live.in_flight, live.ahead = live.ahead, None
        self._end_or_go_on(live, token)

    def _count_computed(self, live: LiveSequence, num_tokens: int) -> None:
        """The positions are on the device now: full pages of them may be hit from here on."""
        sequence, size = live.sequence, self._config.page_size
        start = sequence.num_computed_tokens
        total = sequence.num_computed_tokens = start + num_tokens
        if live.restored is not None:  # they came from the host before the step ran
            for at in live.restored:
                self._cache.insert(live.chain, at, live.table.page_at(at))
            self._roster.swapped.release(live)
            live.restored = None
        if start < sequence.num_prompt_tokens:
            self.num_prompt_tokens += min(total, sequence.num_prompt_tokens) - start
        if total // size > start // size:
            live.catch_up()
            self._cache.insert_computed(live.chain, sequence.tokens, live.table, total)

    def _fork(self, leader: LiveSequence, *, shared_slot: bool = False) -> list[LiveSequence]:
        """The prompt is computed: every sequence of the request goes on from its pages.

        `shared_slot`: all drew on the leader's slot, where none of their tokens was counted.
        """
        owner, members = leader.owner, list(leader.owner.members)
        with self._allocator.transaction():
            tables = [leader.table, *(leader.table.fork() for _ in members[1:])]
        owner.is_forked = True
        for member, table in zip(members, tables, strict=True):
            member.table = table
            member.capacity = leader.capacity
            member.shares_tail = len(members) > 1
            if shared_slot:
                member.row_state = None
            if member is leader:
                continue
            member.chain = leader.chain.fork()
            member.sequence.num_computed_tokens = leader.sequence.num_computed_tokens
            slot = self._roster.free_slots[0]
            self._roster.take_slot(member, slot)
            self._builder.set_slot(slot, member)
            self._builder.set_pages(member)
        return members

    def _append(self, live: LiveSequence, token: int, result: StepResult, row: int) -> None:
        """One sampled token, and whether it is the last."""
        sequence = live.sequence
        params = sequence.request.params
        if params.logprobs is not None:
            sequence.output_logprobs.append(self._logprobs(token, result, row, params.logprobs))
        if params.row_logprobs is not None:
            sequence.cumulative_logprob += float(result.logprobs[row])
        self._end_or_go_on(live, token)

    def _end_or_go_on(self, live: LiveSequence, token: int) -> None:
        sequence, owner = live.sequence, live.owner
        if not 0 <= token < self._vocab_size:
            raise IntegrityError(f"a token must be in [0, {self._vocab_size}). Got {token}.")
        sequence.tokens.append(token)
        self.num_generated_tokens += 1
        num_output = len(sequence.tokens) - sequence.num_prompt_tokens
        params = sequence.request.params
        if token in owner.stop_ids and num_output > params.min_tokens:
            sequence.stop_reason = token if token in params.stop_token_ids else None
            self._roster.close(live, FinishReason.STOP)
        elif num_output >= owner.max_output_tokens:
            self._roster.close(live, FinishReason.LENGTH)

    def _offers(self, result: StepResult, row: int) -> Offers:
        """The likeliest tokens that a row reports, as many as there are."""
        count = min(MAX_LOGPROBS, self._config.vocab_size)
        ids: list[int] = result.top_ids[row, :count].tolist()
        if min(ids) < 0 or max(ids) >= self._config.vocab_size:
            raise IntegrityError(f"tokens must be in [0, {self._config.vocab_size}). Got {ids}.")
        return list(zip(ids, result.top_logprobs[row, :count].tolist(), strict=True))

    def _logprobs(self, token: int, result: StepResult, row: int, num_top: int) -> TokenLogprobs:
        num_top = min(num_top, self._config.vocab_size)
        entry = {token: Logprob(float(result.logprobs[row]), int(result.ranks[row]))}
        ids: list[int] = result.top_ids[row, :num_top].tolist()
        values: list[float] = result.top_logprobs[row, :num_top].tolist()
        for rank, (top, value) in enumerate(zip(ids, values, strict=True), 1):
            entry.setdefault(top, Logprob(value, rank))
        return entry

    def _forget_pages(self, live: LiveSequence) -> None:
        """Takes a sequence's pages out of the prefix cache: what they hold cannot be trusted."""
        for page in live.table.pages:
            if self._allocator.is_cached(page):
                self._allocator.unmark(page)
        for node in live.chain.nodes[: live.table.num_tokens // self._config.page_size]:
            if node.host_page is not None:
                self._host.lose(node.host_page)


def _corrupted_message(sequence: Sequence) -> str:
    return (
        f"the model gave no usable numbers (NaN or infinity) for this request after "
        f"{sequence.num_tokens} tokens; other requests are not affected"
    )
