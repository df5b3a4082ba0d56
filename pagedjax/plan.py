"""What crosses from the host half to the device half and back: one plan in, one result out, a step.

Everything is NumPy with static shapes: a plan for bucket `b` has `b` packed token positions and
`min(b, max_num_seqs)` sequences and sampling rows. Arrays are fresh for each plan and never changed
after it was handed over (JAX may alias NumPy memory on a CPU). Knows nothing of scheduling or JAX.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagedjax.request import MAX_LOGPROBS as MAX_LOGPROBS  # the width of the top-n arrays
from pagedjax.request import Sequence

NO_TARGET = -1  # in `row_target`: draw a token; any other value asks for that token's logprob
# In `tokens`, of a sequence whose last token the host does not know yet: FROM_SLOT - slot, the last
# token that was drawn for that slot.
FROM_SLOT = -1

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
U32 = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class PageCopy:
    """One copy-on-write: the content of page `src` goes to page `dst` before the step's writes."""

    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class PageMove:
    """One page between the device pool and the host pool; which way, its place in the plan says."""

    page: int  # device page id
    host_page: int  # host page id, 1 .. num_host_pages


@dataclass(frozen=True, slots=True)
class RowUpdate:
    """New content of one slot's row in the sampler's device state; replaces all that was there.

    Sent when a sequence with logit adjustments or penalties gets its slot, and whenever what its
    adjustments say changes (min_tokens reached, a bad word's prefix matched, a fork).
    """

    slot: int
    bias: dict[int, float]  # token id -> value added to its logit; -inf bans it
    allowed: frozenset[int] | None  # every other token id is banned; None: all are allowed
    output_counts: dict[int, int]  # token id -> times generated so far
    prompt_tokens: frozenset[int]  # distinct token ids of the prompt (repetition penalty)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """One row for each logits row of the step, padded to R rows with neutral values.

    A row either draws the next token of a sequence or, with `target >= 0`, only asks for the
    logprob of a prompt token. Padding rows are greedy, read token 0 and are never looked at.
    """

    token_index: I32  # i32[R], packed token position whose hidden state gives the row's logits
    slot: I32  # i32[R], slot whose adjustment row applies; max_num_seqs: none
    token_slot: I32  # i32[R], slot whose last token the drawn one becomes; max_num_seqs: none
    counts: I32  # i32[R], 1 where the drawn token is added to the slot's output counts, else 0
    position: I32  # i32[R], index in its sequence of the token to draw (part of the random key)
    sample: I32  # i32[R], sample index within the request (part of the random key)
    target: I32  # i32[R], NO_TARGET, or the token id whose logprob is asked for
    num_logprobs: I32  # i32[R], -1: none; n >= 0: the chosen token's logprob and the n likeliest
    top_k: I32  # i32[R], 0: off
    seed: U32  # u32[R, 2], the request's 64-bit seed, high word first
    temperature: F32  # f32[R], 0: greedy
    top_p: F32  # f32[R], 1: off
    min_p: F32  # f32[R], 0: off
    repetition_penalty: F32  # f32[R], 1: off
    presence_penalty: F32  # f32[R], 0: off
    frequency_penalty: F32  # f32[R], 0: off


@dataclass(slots=True)  # not frozen: a frozen one takes five times as long to make, 256 a step
class ScheduledSequence:
    """Host-side note of what a plan does for one sequence; `update` reads it back."""

    sequence: Sequence
    epoch: int  # the sequence's epoch when scheduled; a result with an older one is dropped
    num_tokens: int  # positions computed in this step
    first_row: int  # first row of this sequence in `SamplingRows`
    num_prompt_rows: int  # rows with a target (prompt logprobs); they come first
    num_samples: int  # rows that draw: 0 (prompt unfinished), 1, or n at a request's fork


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. T = bucket, S = R = min(bucket, max_num_seqs), W = pages_per_seq.

    The order inside a step: pages of `swaps_out` are read, those of `swaps_in` are written, then
    come `copies`, `row_updates` and the forward pass. So a device page may be swapped out and be
    anything else's in the same step, and a page that was swapped in may be copied. A host page is
    filled at most once in a step, and read only if an earlier step filled it and this one does not;
    it may be read into several device pages (forks that shared a partial page). One that the
    scheduler freed may be filled again by any later step.
    """

    bucket: int
    tokens: I32  # i32[T], packed token ids, or FROM_SLOT - slot; padding 0
    positions: I32  # i32[T], position of each token in its sequence; padding 0
    slot_mapping: I32  # i32[T], page * page_size + offset; padding >= num_pages * page_size
    page_table: I32  # i32[S, W], row i = i-th sequence of this step; tails hold anything
    kv_lens: I32  # i32[S], positions with keys and values, this step's included; padding 0
    cu_q_lens: I32  # i32[S + 1], prefix sums of the tokens of each sequence; padding repeats
    num_seqs: int
    rows: SamplingRows
    num_rows: int
    copies: tuple[PageCopy, ...] = ()  # at most S; run before the step's writes
    row_updates: tuple[RowUpdate, ...] = ()  # applied before the step
    scheduled: tuple[ScheduledSequence, ...] = field(default=())
    swaps_out: tuple[PageMove, ...] = ()  # device -> host, read before this step writes anything
    swaps_in: tuple[PageMove, ...] = ()  # host -> device, after `swaps_out`, before `copies`
    step: int = 0  # number of the step; a result is taken in once

    @property
    def num_tokens(self) -> int:
        """Tokens really run, padding excluded."""
        return int(self.cu_q_lens[self.num_seqs])


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step sampled; row i belongs to row i of the plan's `SamplingRows`."""

    tokens: I32  # i32[R], drawn token ids (the target itself where one was given)
    logprobs: F32  # f32[R], logprob of that token under the raw logits; 0 where not asked for
    ranks: I32  # i32[R], 1 = likeliest; 0 where not asked for
    top_ids: I32  # i32[R, MAX_LOGPROBS], likeliest ids, best first, ties by id
    top_logprobs: F32  # f32[R, MAX_LOGPROBS]
    corrupted: NDArray[np.bool_]  # bool[R], the row's logits held NaN; its token means nothing
    # Host pages whose swap-out failed or whose checksum is wrong, learnt since the last result.
    lost_host_pages: frozenset[int] = frozenset()
