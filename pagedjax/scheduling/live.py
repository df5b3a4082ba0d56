"""A request while it is served: its sequences with their pages, and what was compiled from it.

Owns the checks that a request must pass to be queued. Knows nothing of queues or budgets; the
scheduler alone changes these records.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pagedjax.config import SchedulerConfig
from pagedjax.errors import IntegrityError, RequestError
from pagedjax.paging import PrefixChain
from pagedjax.plan import MAX_LOGPROBS, PageCopy, ScheduledSequence
from pagedjax.request import Request, Sequence
from pagedjax.scheduling.adjustments import Adjustments, BanState
from pagedjax.scheduling.beam_search import BeamSearch, Offers
from pagedjax.scheduling.journal import JournaledTable

# (rank, arrival, sample): the order of the queues, and of who gives way. `arrival` is unique, so
# comparing keys never comes to comparing anything else.
type SequenceKey = tuple[float, int, int]


@dataclass(slots=True, eq=False)
class LiveSequence:
    """A sequence that is not finished, with its pages."""

    sequence: Sequence
    owner: LiveRequest
    table: JournaledTable
    chain: PrefixChain
    key: SequenceKey
    capacity: int = 0  # positions that the table's pages cover
    shares_tail: bool = False  # forked, and its partial last page may have other holders still
    in_flight: ScheduledSequence | None = None  # what a plan computes whose result is not read yet
    ahead: ScheduledSequence | None = None  # what the plan after that one computes
    decode_note: ScheduledSequence | None = None  # of its last decode step, to be used again
    row_state: BanState | None = None  # what its slot's sampler row says; None: nothing of it yet
    # Of beam search: what may follow its last token. It is idle, with nothing to run, until the
    # offers of all lanes of its request are in.
    offers: Offers | None = None
    # Swapped: the host pages of its computed positions by logical page, a reference each. It
    # keeps them and `num_computed_tokens` while it waits, and until the first result after that
    # is in: if that step fails, nothing is lost.
    host_pages: tuple[int, ...] = ()
    # Full logical pages that the plan in flight brings in; None: it brings in nothing.
    restored: tuple[int, ...] | None = None
    num_lost_tokens: int = 0  # computed when it gave its pages up last, to be computed again

    @property
    def is_leader(self) -> bool:
        """True while it computes the prompt for all sequences of its request."""
        return not self.owner.is_forked

    @property
    def width(self) -> int:
        """Slots that it needs: at the fork, one for each sequence of the request."""
        return 1 if self.owner.is_forked else len(self.owner.members)

    @property
    def num_in_flight(self) -> int:
        """Positions that plans compute whose results are not read yet."""
        if self.in_flight is None:
            return 0
        return self.in_flight.num_tokens + (0 if self.ahead is None else self.ahead.num_tokens)

    @property
    def held_slot(self) -> int:
        """Its slot, which it must have."""
        slot = self.sequence.slot
        if slot is None:
            raise IntegrityError(f"running sequence {self.key} has no slot.")
        return slot

    @property
    def num_draws(self) -> int:
        """Rows that draw once its tokens are run: at the fork of samples, one for each of them."""
        return self.width if self.owner.beams is None else 1

    def start_ahead(self) -> int | None:
        """First position for a step behind the one in flight; None: its result must be read first.

        What that step draws is not known to the host, only that it draws. So it must not end the
        sequence by its length, fork it or change what its slot's sampler row says.
        """
        flight, owner = self.in_flight, self.owner
        if (
            flight is None
            or self.ahead is not None
            or self.restored is not None
            or owner.beams is not None
            or not owner.is_forked
            or flight.num_prompt_rows
        ):
            return None
        sequence = self.sequence
        start = sequence.num_computed_tokens + flight.num_tokens
        if flight.num_samples == 0:
            return start
        num_output = start + 1 - sequence.num_prompt_tokens
        if num_output >= owner.max_output_tokens:
            return None
        if owner.adjustments is not None:
            state = owner.adjustments.state_after(num_output)
            if state is None or state != self.row_state:
                return None
        return start

    def catch_up(self) -> None:
        """Tells the table of positions that were computed without a new page.

        A decoding sequence needs its table only when a page is full, so until then nothing is
        done for it but counting.
        """
        behind = self.sequence.num_computed_tokens - self.table.num_tokens
        if behind > 0:  # negative when it is admitted: hits count as computed at the commit
            self.table.append(behind)

    def start_over(self) -> None:
        """Its pages are gone, here and on the host."""
        self.num_lost_tokens = self.sequence.num_computed_tokens
        self.sequence.num_computed_tokens = 0

    def rewind(self) -> None:
        """What the last plan was to compute is to be scheduled anew; nothing was written."""
        self.in_flight = None if self.ahead is None else self.in_flight
        self.ahead = self.row_state = self.restored = None
        planned = self.sequence.num_computed_tokens + self.num_in_flight
        if self.table.num_tokens > planned:
            self.table.truncate(planned)
        self.capacity = self.table.capacity

    def grow(self, num_tokens: int) -> PageCopy | None:
        """Makes positions up to `num_tokens` writable; inside a transaction."""
        self.table.save()
        self.catch_up()
        return self.table.extend(num_tokens - self.table.num_tokens)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request with at least one sequence that is not finished."""

    request: Request
    max_output_tokens: int
    stop_ids: frozenset[int]
    adjustments: Adjustments | None
    members: list[LiveSequence] = field(default_factory=list[LiveSequence])  # not finished
    is_forked: bool = True  # False: members[0] is to compute the prompt for all of them
    drawn: tuple[int, ...] = ()  # samples that the fork in flight draws for, in the order of rows
    was_admitted: bool = False
    reports_tokens_only: bool = False  # neither logprobs nor beams are read from its rows
    beams: BeamSearch | None = None
    lanes: list[LiveSequence] = field(default_factory=list[LiveSequence])  # of beams, best first

    def may_read_cache(self, sequence: Sequence) -> bool:
        """False while logprobs of the prompt are missing: cached positions give no logits."""
        wants = self.request.params.prompt_logprobs is not None
        return not wants or len(sequence.prompt_logprobs) == sequence.num_prompt_tokens


def check_policy(priority: int, policy: str) -> None:
    """Raises `RequestError` for a priority that the engine would not heed."""
    if priority != 0 and policy == "fcfs":
        raise RequestError(
            f"`priority` must be 0 unless the engine runs with `scheduling_policy` priority. "
            f"Got {priority}.",
            param="priority",
        )


def rank_of(request: Request, config: SchedulerConfig) -> float:
    """When the request would have arrived if its priority were 0, in seconds; smaller goes first.

    It never changes while the request lives, so queues stay sorted, and later arrivals have ever
    larger ranks, so nothing starves.
    """
    if config.scheduling_policy == "fcfs":
        return 0.0
    return request.arrival_time + request.priority * config.priority_ageing


def check_request(request: Request, config: SchedulerConfig) -> None:
    """Raises `RequestError` for a request that this engine can never serve."""
    length, params = len(request.prompt_token_ids), request.params
    if length == 0:
        raise RequestError("`prompt` must hold at least one token. Got none.", param="prompt")
    if length + 1 > config.max_model_len:
        raise RequestError(
            f"`prompt` must leave room for at least one token within `max_model_len` "
            f"{config.max_model_len}. Got {length} prompt tokens: shorten the prompt to at most "
            f"{config.max_model_len - 1} tokens, or raise `max_model_len`.",
            param="prompt",
            code="context_length_exceeded",
        )
    if params.num_sequences > config.max_num_seqs:
        name = "beam_width" if params.beam_width else "best_of" if params.best_of else "n"
        raise RequestError(
            f"`{name}` must be at most `max_num_seqs` ({config.max_num_seqs}). "
            f"Got {params.num_sequences}.",
            param=name,
        )
    if params.beam_width is not None:
        _check_beams(request, params.beam_width, config.vocab_size)
    check_policy(request.priority, config.scheduling_policy)
    ids: dict[str, Iterable[int]] = {
        "prompt": request.prompt_token_ids,
        "stop_token_ids": params.stop_token_ids,
        "bad_token_ids": params.bad_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": params.logit_bias,
        "bad_words": [token for word in request.bad_sequences for token in word],
    }
    for name, tokens in ids.items():
        check_ids(name, tokens, config.vocab_size)
    if not all(request.bad_sequences):
        raise RequestError("`bad_words` must hold no empty word. Got one.", param="bad_words")
    adjustments = Adjustments.of(request, config.vocab_size)
    if adjustments is not None and adjustments.leaves_nothing:
        raise RequestError(
            f"`allowed_token_ids` must hold a token that may be sampled. Got "
            f"{len(params.allowed_token_ids or ())} ids, and each is a bad token, or a stop token "
            f"that `min_tokens` {params.min_tokens} bans.",
            param="allowed_token_ids",
        )


def _check_beams(request: Request, beam_width: int, vocab_size: int) -> None:
    """Among the tokens that a step reports must be enough that end no beam."""
    most = min(MAX_LOGPROBS, vocab_size) - len(request.stop_ids)
    if beam_width > most:
        raise RequestError(
            f"`beam_width` must be at most {most} with {len(request.stop_ids)} tokens that end a "
            f"beam (eos and `stop_token_ids`). Got {beam_width}.",
            param="beam_width",
        )


def check_ids(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    """Raises `RequestError` for token ids that are not in the vocabulary."""
    low, high = min(tokens, default=0), max(tokens, default=0)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise RequestError(
            f"`{name}` must hold token ids in [0, {vocab_size}), the model's vocabulary. "
            f"Got {wrong}.",
            param=name,
        )
