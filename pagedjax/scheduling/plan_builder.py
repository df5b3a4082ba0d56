"""Turns a drafted step into the arrays of a `StepPlan`.

Owns, for each slot, a copy of its page table row and its sampling parameters, so that a step
gathers rows instead of visiting sequences. Every array of a plan is fresh. Knows nothing of
budgets, queues or page counts.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedjax.config import SchedulerConfig
from pagedjax.plan import (
    F32,
    FROM_SLOT,
    I32,
    NO_TARGET,
    U32,
    RowUpdate,
    SamplingRows,
    ScheduledSequence,
    StepPlan,
)
from pagedjax.scheduling.draft import StepDraft
from pagedjax.scheduling.live import LiveSequence
from pagedjax.scheduling.page_work import PageWork

# Rows of the per-slot parameter tables.
INTS = ("slot", "token_slot", "counts", "sample", "num_logprobs", "top_k")
FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
NO_LOGPROBS = -1


class PlanBuilder:
    """Gathers plans from per-slot tables; column `max_num_seqs` of them is the neutral row."""

    def __init__(self, config: SchedulerConfig):
        """Starts with neutral parameters in every slot."""
        self._config = config
        none = config.max_num_seqs
        self._pages = np.zeros((none, config.pages_per_seq), np.int32)
        self._ints = np.zeros((len(INTS), none + 1), np.int32)
        self._floats = np.zeros((len(FLOATS), none + 1), np.float32)
        self._seeds = np.zeros((none + 1, 2), np.uint32)
        # Of the last step: the slots of its rows, and what `_parameters` made of them.
        self._last: tuple[NDArray[np.intp], tuple[I32, F32, U32]] | None = None
        self._ones = np.ones(config.max_rows, np.int32)
        self._ramp = np.arange(config.max_rows)
        past = config.num_pages * config.page_size
        self._past_the_pool = past + np.arange(config.buckets[-1], dtype=np.int32)
        neutral = {
            "slot": none,
            "token_slot": none,
            "num_logprobs": NO_LOGPROBS,
            "top_p": 1,
            "repetition_penalty": 1,
        }
        for table, names in ((self._ints, INTS), (self._floats, FLOATS)):
            table[:] = np.array([neutral.get(name, 0) for name in names])[:, None]

    def set_slot(self, slot: int, live: LiveSequence) -> None:
        """The slot's sampling parameters are those of `live` from now on."""
        self._last = None
        self._ints[:, slot], self._floats[:, slot], self._seeds[slot] = self._column_of(slot, live)

    def has_slot_of(self, live: LiveSequence) -> bool:
        """Whether the parameters of its slot are those of a running sequence; for checks."""
        slot = live.held_slot
        ints, floats, seed = self._column_of(slot, live)
        return (
            self._ints[:, slot].tolist() == ints
            and self._floats[:, slot].tolist() == np.array(floats, np.float32).tolist()
            and self._seeds[slot].tolist() == seed
        )

    def set_pages(self, live: LiveSequence, slot: int | None = None) -> None:
        """A slot's page table row, its own unless given, is that of `live` from now on."""
        slot = live.sequence.slot if slot is None else slot
        if slot is not None and live.table.num_tokens:
            live.table.write_row(self._pages[slot])

    def set_page(self, slot: int, logical_page: int, page: int) -> None:
        """One entry of a slot's page table row."""
        self._pages[slot, logical_page] = page

    def pages_of(self, slot: int, num_pages: int) -> list[int]:
        """The first entries of a slot's row; for checks."""
        return self._pages[slot, :num_pages].tolist()

    def build(self, draft: StepDraft, work: PageWork, row_updates: list[RowUpdate]) -> StepPlan:
        """The plan of a drafted step."""
        config, scheduled = self._config, draft.scheduled
        num_tokens, num_rows = draft.num_tokens, draft.num_rows
        decode_only = num_tokens == len(scheduled)
        bucket = config.bucket_for(num_tokens, num_rows, decode_only=decode_only)
        width = config.rows_in(bucket)
        num_seqs = len(scheduled)
        slots = np.array(draft.slots, np.intp)
        starts = np.array(draft.starts, np.int32)
        if decode_only:
            lengths, seq_of_token = self._ones[:num_seqs], self._ramp[:num_seqs]
            positions = starts
        else:
            lengths = np.array([s.num_tokens for s in scheduled], np.int32)
            seq_of_token = np.repeat(np.arange(num_seqs), lengths)
            firsts = np.cumsum(lengths) - lengths
            positions = (np.arange(num_tokens) + (starts - firsts)[seq_of_token]).astype(np.int32)
        kv_lens = starts + lengths
        cu_q_lens = np.full(width + 1, num_tokens, np.int32)
        cu_q_lens[0] = 0
        np.cumsum(lengths, out=cu_q_lens[1 : num_seqs + 1])
        page_table = self._page_table(slots, width, int(kv_lens.max()))
        return StepPlan(
            bucket=bucket,
            tokens=_padded(_packed_tokens(draft), bucket),
            positions=_padded(positions, bucket),
            slot_mapping=self._slot_mapping(page_table, seq_of_token, positions, bucket),
            page_table=page_table,
            kv_lens=_padded(kv_lens, width),
            cu_q_lens=cu_q_lens,
            num_seqs=num_seqs,
            rows=self._rows(draft, slots, cu_q_lens, kv_lens, width),
            num_rows=num_rows,
            copies=tuple(work.copies),
            row_updates=tuple(row_updates),
            scheduled=tuple(scheduled),
            step=draft.step,
            swaps_out=tuple(work.swaps_out),
            swaps_in=tuple(work.swaps_in),
        )

    def _column_of(self, slot: int, live: LiveSequence) -> tuple[list[int], list[float], list[int]]:
        """A column of `_ints`, one of `_floats`, and a row of `_seeds`."""
        request, owner = live.sequence.request, live.owner
        params = request.params
        logprobs = NO_LOGPROBS if params.row_logprobs is None else params.row_logprobs
        row = self._config.max_num_seqs if owner.adjustments is None else slot
        counts = int(params.has_penalties)
        ints = [row, slot, counts, live.sequence.sample, logprobs, params.top_k]
        floats = [getattr(params, name) for name in FLOATS]
        return ints, floats, [request.seed >> 32, request.seed & 0xFFFFFFFF]

    def _page_table(self, slots: NDArray[np.intp], width: int, longest: int) -> I32:
        """i32[width, pages_per_seq]: the slots' rows, as far as the longest sequence needs them."""
        used = -(-longest // self._config.page_size)
        page_table = np.zeros((width, self._config.pages_per_seq), np.int32)
        page_table[: len(slots), :used] = self._pages[:, :used].take(slots, axis=0)
        return page_table

    def _slot_mapping(
        self, page_table: I32, seq_of_token: NDArray[np.intp], positions: I32, bucket: int
    ) -> I32:
        """i32[bucket]; padding is past the pool, and distinct so that a scatter may rely on it."""
        size = self._config.page_size
        mapping = self._past_the_pool[:bucket].copy()
        shift = size.bit_length() - 1  # a page size is a power of two
        pages = page_table[seq_of_token, positions >> shift]
        mapping[: len(positions)] = (pages << shift) + (positions & (size - 1))
        return mapping

    def _rows(
        self,
        draft: StepDraft,
        slots: NDArray[np.intp],
        cu_q_lens: I32,
        kv_lens: I32,
        width: int,
    ) -> SamplingRows:
        if draft.is_decode:
            slot_of_row, lasts, position = slots, cu_q_lens[: len(slots)], kv_lens
        else:
            per_seq = [s.num_prompt_rows + s.num_samples for s in draft.scheduled]
            seq_of_row = np.repeat(np.arange(len(per_seq)), per_seq)
            slot_of_row, position = slots[seq_of_row], kv_lens[seq_of_row]
            lasts = cu_q_lens[1:][seq_of_row] - 1
        column = np.full(width, self._config.max_num_seqs, np.intp)
        column[: draft.num_rows] = slot_of_row
        ints, floats, seeds = self._parameters(column)
        token_index, position = _padded(lasts, width), _padded(position, width)
        target = np.full(width, NO_TARGET, np.int32)
        rows = _rows_of(ints, floats, seeds, token_index, position, target)
        for i in draft.special:
            scheduled, live, start = draft.scheduled[i], draft.lives[i], draft.starts[i]
            if scheduled.num_prompt_rows:
                self._ask_prompt(rows, scheduled, start, int(cu_q_lens[i]))
            if scheduled.num_samples > 1:
                first = scheduled.first_row + scheduled.num_prompt_rows
                drawing = slice(first, first + scheduled.num_samples)
                rows.sample[drawing] = [member.sequence.sample for member in live.owner.members]
                rows.counts[drawing] = 0  # all n on one slot: their counts come with the fork
        return rows

    def _parameters(self, column: NDArray[np.intp]) -> tuple[I32, F32, U32]:
        """The rows' sampling parameters; gathered once while the same sequences run."""
        if self._last is None or not np.array_equal(self._last[0], column):
            ints, floats = self._ints.take(column, axis=1), self._floats.take(column, axis=1)
            self._last = column, (ints, floats, self._seeds.take(column, axis=0))
        ints, floats, seeds = self._last[1]
        return ints.copy(), floats.copy(), seeds.copy()

    def _ask_prompt(
        self, rows: SamplingRows, scheduled: ScheduledSequence, start: int, offset: int
    ) -> None:
        """Rows for the logprobs of prompt tokens, each read at the token before it."""
        sequence = scheduled.sequence
        asking = slice(scheduled.first_row, scheduled.first_row + scheduled.num_prompt_rows)
        first = max(start + 1, len(sequence.prompt_logprobs), 1)
        targets = range(first, first + scheduled.num_prompt_rows)
        none = self._config.max_num_seqs
        for table, names in ((self._ints, INTS), (self._floats, FLOATS)):
            for name, values in zip(names, table, strict=True):
                getattr(rows, name)[asking] = values[none]
        rows.seed[asking] = 0
        rows.num_logprobs[asking] = sequence.request.params.prompt_logprobs or 0
        rows.position[asking] = targets
        rows.token_index[asking] = np.arange(targets.start, targets.stop) + (offset - 1 - start)
        rows.target[asking] = sequence.tokens[targets.start : targets.stop]


def _rows_of(
    ints: I32, floats: F32, seeds: U32, token_index: I32, position: I32, target: I32
) -> SamplingRows:
    parameters: dict[str, Any] = dict(zip(INTS, ints, strict=True))
    parameters.update(zip(FLOATS, floats, strict=True))
    return SamplingRows(
        token_index=token_index, position=position, target=target, seed=seeds, **parameters
    )


def _packed_tokens(draft: StepDraft) -> I32:
    front = len(draft.front_tokens)
    if front == draft.num_tokens:
        return np.array(draft.front_tokens, np.int32)
    spans = list(zip(draft.scheduled, draft.starts, draft.slots, strict=True))[front:]
    tokens = [
        # Past its tokens: the last one is not read yet.
        s.sequence.tokens[start : start + s.num_tokens] or [FROM_SLOT - slot]
        for s, start, slot in spans
    ]
    packed = chain(draft.front_tokens, chain.from_iterable(tokens))
    return np.fromiter(packed, np.int32, draft.num_tokens)


def _padded(values: NDArray[Any], size: int) -> I32:
    padded = np.zeros(size, np.int32)
    padded[: len(values)] = values
    return padded
