"""A runner without a device, whose "model" is a hash of what it reads from pages, and its twin.

Each position holds a number made of its token, its place and *every* number before it, read
through page tables; a token is drawn from all numbers of its sequence, read back after the step's
writes. A wrong page, a missing copy, stale content or a wrong hit therefore changes the tokens.
`plain_answer` says what they must be, from the list of tokens alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagedjax.config import SchedulerConfig
from pagedjax.errors import TransferError
from pagedjax.paging import PageAllocator
from pagedjax.plan import FROM_SLOT, MAX_LOGPROBS, NO_TARGET, RowUpdate, StepPlan, StepResult
from pagedjax.request import FinishReason, Request

MASK = 2**64 - 1
MAX_TRIES = 400  # draws until one is not banned; every token of a small vocabulary comes up


def mix(*parts: int) -> int:
    """A 64-bit number from others; any change of any of them changes it."""
    value = 0x9E3779B97F4A7C15
    for part in parts:
        value = ((value ^ (part & MASK)) * 0xBF58476D1CE4E5B9) & MASK
        value ^= value >> 29
    return value


def draw(
    state: int,
    key: tuple[int, int, int],
    banned: Iterable[int],
    counts: Mapping[int, int],
    vocab_size: int,
) -> int:
    """The token drawn after `state`; `key` is (seed, sample, position)."""
    banned = set(banned)
    seen = mix(*(number for pair in sorted(counts.items()) for number in pair))
    tries = (mix(state, *key, seen, i) % vocab_size for i in range(MAX_TRIES))
    return next(token for token in tries if token not in banned)


def logprob(state: int, token: int) -> tuple[float, int]:
    """(logprob, rank) that the model gives a token after `state`."""
    number = mix(state, token)
    return -float(number % 4096) / 256, 1 + number % 7


def likeliest(state: int, vocab_size: int) -> tuple[list[int], list[float]]:
    """(ids, logprobs) of the tokens that the model finds likeliest, best first."""
    first, number = mix(state, 1) % vocab_size, mix(state, 2)
    steps = [1 + (number >> 3 * i) % 8 for i in range(MAX_LOGPROBS)]  # in sixteenths: exact in f32
    values = [-sum(steps[: i + 1]) / 16 for i in range(MAX_LOGPROBS)]
    return [(first + i) % vocab_size for i in range(MAX_LOGPROBS)], values


def advance(state: int, token: int, position: int) -> tuple[int, int]:
    """(number of the position, state after it): the state sums all numbers so far."""
    number = mix(token, position, state) >> 1
    return number, (state + number * (2 * position + 1)) & MASK


class FakeRunner:
    """Runs plans over pools of numbers; `allocator` only tells which pages to spoil.

    `stored` is the host pool: what was swapped out and not spoilt since.
    """

    def __init__(self, config: SchedulerConfig, allocator: PageAllocator) -> None:
        self._config = config
        self._allocator = allocator
        self._rng = np.random.default_rng(7)
        self._slots: dict[int, RowUpdate] = {}
        self._counts: dict[int, Counter[int]] = {}
        self._last_tokens: dict[int, int] = {}  # by slot
        self._pool = self._garbage(config.num_pages * config.page_size)
        self.stored: dict[int, NDArray[np.uint64]] = {}
        self._damaged: set[int] = set()  # host pages whose checksum is wrong
        self._lost: set[int] = set()  # host pages to be reported with the next result

    def run(self, plan: StepPlan) -> StepResult:
        """One step: swaps, copies, row updates, writes, then reads and draws."""
        self._swap(plan)
        size = self._config.page_size
        pages = self._pool.reshape(-1, size)
        sources, targets = ({getattr(copy, end) for copy in plan.copies} for end in ("src", "dst"))
        assert not sources & targets, "a device may copy in any order"
        old = [pages[copy.src].copy() for copy in plan.copies]
        for copy, content in zip(plan.copies, old, strict=True):
            pages[copy.dst] = content
        for update in plan.row_updates:
            self._slots[update.slot] = update
            self._counts[update.slot] = Counter(update.output_counts)
        states = self._write(plan)
        return self._sample(plan, states)

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Runs the step at once; its result is told when it is asked for."""
        result = self.run(plan)
        return lambda: result

    def recover(self) -> bool:
        """After a step that raised: all pages hold what they held."""
        return False

    def fail(self, plan: StepPlan, result: StepResult | None = None) -> None:
        """A step that broke off: what it would have written holds anything now."""
        for slot in plan.slot_mapping[: plan.num_tokens]:
            self._pool[slot] = self._garbage(1)[0]
        pages = self._pool.reshape(-1, self._config.page_size)
        for move in plan.swaps_in:
            pages[move.page] = self._garbage(1)
        for move in plan.swaps_out:
            self.stored.pop(move.host_page, None)
        if result is not None:
            self._lost |= result.lost_host_pages

    def lose(self, host_page: int, *, is_noticed: bool) -> None:
        """A host page lost its content: said with the next result, or found when it is read."""
        self._damaged.add(host_page)
        if is_noticed:
            self._lost.add(host_page)

    def _swap(self, plan: StepPlan) -> None:
        pages = self._pool.reshape(-1, self._config.page_size)
        for move in plan.swaps_out:
            self.stored[move.host_page] = pages[move.page].copy()
            self._damaged.discard(move.host_page)
        self._spoil_unused(plan)
        wanted = {move.host_page for move in plan.swaps_in}
        assert wanted <= self.stored.keys(), "a host page is read that was never filled"
        if damaged := wanted & self._damaged:
            raise TransferError("checksum", host_pages=frozenset(damaged))
        for move in plan.swaps_in:
            pages[move.page] = self.stored[move.host_page]

    def _garbage(self, n: int) -> NDArray[np.uint64]:
        return self._rng.integers(0, 2**63, n, dtype=np.uint64)

    def _spoil_unused(self, plan: StepPlan) -> None:
        """Pages that nobody holds and the prefix cache does not know hold anything."""
        free = [
            page
            for page in range(1, self._config.num_pages)
            if not self._allocator.references(page) and not self._allocator.is_cached(page)
        ]
        pages = self._pool.reshape(-1, self._config.page_size)
        pages[free] = self._garbage(len(free))[:, None]
        pages[0] = self._garbage(1)

    def _addresses(self, plan: StepPlan, row: int) -> NDArray[np.int64]:
        """Where the positions of one sequence lie, by its page table."""
        positions = np.arange(plan.kv_lens[row])
        size = self._config.page_size
        return plan.page_table[row][positions // size].astype(np.int64) * size + positions % size

    def _write(self, plan: StepPlan) -> list[int]:
        """Computes and writes all new positions; the state after each packed token."""
        written: dict[int, int] = {}
        for row in range(plan.num_seqs):
            first, last = plan.cu_q_lens[row], plan.cu_q_lens[row + 1]
            old = self._pool[self._addresses(plan, row)[: int(plan.kv_lens[row] - (last - first))]]
            state = _sum(old)
            for at in range(first, last):
                token = int(plan.tokens[at])
                token = self._last_tokens[FROM_SLOT - token] if token < 0 else token
                number, state = advance(state, token, int(plan.positions[at]))
                assert int(plan.slot_mapping[at]) not in written, "two tokens write one place"
                written[int(plan.slot_mapping[at])] = number
        self._pool[list(written)] = np.array(list(written.values()), np.uint64)
        states: list[int] = []
        for row in range(plan.num_seqs):
            numbers = self._pool[self._addresses(plan, row)]
            first, last = plan.cu_q_lens[row], plan.cu_q_lens[row + 1]
            states += [_sum(numbers[: plan.positions[at] + 1]) for at in range(first, last)]
        return states

    def _sample(self, plan: StepPlan, states: list[int]) -> StepResult:
        rows, num_rows = plan.rows, len(plan.rows.slot)
        vocab_size = self._config.vocab_size
        result = StepResult(
            tokens=np.zeros(num_rows, np.int32),
            logprobs=np.zeros(num_rows, np.float32),
            ranks=np.zeros(num_rows, np.int32),
            top_ids=np.zeros((num_rows, MAX_LOGPROBS), np.int32),
            top_logprobs=np.zeros((num_rows, MAX_LOGPROBS), np.float32),
            corrupted=np.zeros(num_rows, bool),
            lost_host_pages=frozenset(self._lost),
        )
        self._lost.clear()
        for row in range(plan.num_rows):
            state, slot = states[rows.token_index[row]], int(rows.slot[row])
            token = int(rows.target[row])
            if token == NO_TARGET:
                high, low = (int(half) for half in rows.seed[row])
                key = (high << 32 | low, int(rows.sample[row]), int(rows.position[row]))
                uses_counts = rows.repetition_penalty[row] != 1 or rows.presence_penalty[row] != 0
                counts = self._counts[slot] if uses_counts else Counter[int]()
                token = draw(state, key, self._banned(slot), counts, vocab_size)
                if rows.counts[row]:
                    self._counts[slot][token] += 1
            result.tokens[row] = token
            if rows.token_slot[row] < self._config.max_num_seqs:
                self._last_tokens[int(rows.token_slot[row])] = token
            if rows.num_logprobs[row] >= 0:
                result.logprobs[row], result.ranks[row] = logprob(state, token)
                result.top_ids[row], result.top_logprobs[row] = likeliest(state, vocab_size)
        return result

    def _banned(self, slot: int) -> set[int]:
        if slot == self._config.max_num_seqs:
            return set()
        update = self._slots[slot]
        banned = {token for token, bias in update.bias.items() if bias == -np.inf}
        if update.allowed is not None:
            banned |= set(range(self._config.vocab_size)) - update.allowed
        return banned


def _sum(numbers: NDArray[np.uint64]) -> int:
    weights = 2 * np.arange(len(numbers), dtype=np.uint64) + np.uint64(1)
    return int((numbers * weights).sum(dtype=np.uint64))


@dataclass
class PlainAnswer:
    """What one sample must be."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, tuple[float, int]]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, tuple[float, int]] | None] = field(default_factory=list)
    reason: FinishReason = FinishReason.LENGTH
    stop_reason: int | None = None


def plain_answer(request: Request, sample: int, config: SchedulerConfig) -> PlainAnswer:
    """One sample, one token after another, without pages, batches or a scheduler."""
    params, answer, state = request.params, PlainAnswer(), 0
    prompt = list(request.prompt_token_ids)
    for position, token in enumerate(prompt):
        if params.prompt_logprobs is not None:
            entry = _entry(state, token, params.prompt_logprobs, config) if position else None
            answer.prompt_logprobs.append(entry)
        state = advance(state, token, position)[1]
    most = min(params.max_tokens or config.max_model_len, config.max_model_len - len(prompt))
    while len(answer.tokens) < most:
        position = len(prompt) + len(answer.tokens)
        counts = Counter(answer.tokens if params.has_penalties else [])
        banned = _banned(request, answer.tokens, config.vocab_size)
        key = (request.seed, sample, position)
        token = draw(state, key, banned, counts, config.vocab_size)
        answer.tokens.append(token)
        if params.logprobs is not None:
            answer.logprobs.append(_entry(state, token, params.logprobs, config))
        if token in request.stop_ids and len(answer.tokens) > params.min_tokens:
            answer.reason = FinishReason.STOP
            answer.stop_reason = token if token in params.stop_token_ids else None
            break
        state = advance(state, token, position)[1]
    return answer


def _entry(
    state: int, token: int, num_top: int, config: SchedulerConfig
) -> dict[int, tuple[float, int]]:
    entry = {token: logprob(state, token)}
    ids, values = likeliest(state, config.vocab_size)
    for rank in range(min(num_top, config.vocab_size)):
        entry.setdefault(ids[rank], (values[rank], rank + 1))
    return entry


def _banned(request: Request, output: list[int], vocab_size: int) -> set[int]:
    params = request.params
    banned = set(params.bad_token_ids)
    if params.allowed_token_ids is not None:
        banned |= set(range(vocab_size)) - set(params.allowed_token_ids)
    if len(output) < params.min_tokens:
        banned |= request.stop_ids
    for word in request.bad_sequences:
        if (
            output[len(output) - len(word) + 1 :] == list(word[:-1])
            and len(word) <= len(output) + 1
        ):
            banned.add(word[-1])
    return banned


def check_plan(plan: StepPlan, config: SchedulerConfig) -> None:
    """Shapes, budgets and padding of a plan, as plan.py words them."""
    width, bucket = config.rows_in(plan.bucket), plan.bucket
    num_tokens, num_seqs, num_rows = plan.num_tokens, plan.num_seqs, plan.num_rows
    assert bucket in config.buckets
    decode_only = all(s.num_tokens == 1 for s in plan.scheduled)
    assert bucket == config.bucket_for(num_tokens, num_rows, decode_only=decode_only)
    assert 0 < num_tokens <= config.max_num_batched_tokens
    assert num_seqs == len(plan.scheduled) <= min(width, config.max_num_seqs)
    assert num_rows <= width
    assert num_rows == sum(s.num_prompt_rows + s.num_samples for s in plan.scheduled)
    for array in (plan.tokens, plan.positions, plan.slot_mapping):
        assert array.shape == (bucket,)
        assert array.dtype == np.int32
    assert plan.page_table.shape == (width, config.pages_per_seq)
    assert plan.kv_lens.shape == (width,)
    assert not plan.kv_lens[num_seqs:].any()
    assert plan.cu_q_lens.shape == (width + 1,)
    assert (plan.cu_q_lens[num_seqs:] == num_tokens).all()
    past = config.num_pages * config.page_size
    assert (plan.slot_mapping[num_tokens:] >= past).all()
    assert (plan.slot_mapping[:num_tokens] >= config.page_size).all()  # never the null page
    assert (plan.slot_mapping[:num_tokens] < past).all()
    assert len(set(plan.slot_mapping.tolist())) == bucket
    neutral = {"top_p": 1, "repetition_penalty": 1, "slot": config.max_num_seqs}
    neutral |= {"num_logprobs": -1, "target": NO_TARGET, "token_slot": config.max_num_seqs}
    for name in plan.rows.__slots__:
        values = getattr(plan.rows, name)
        assert values.shape[0] == width, name
        assert (values[num_rows:] == neutral.get(name, 0)).all(), name
    assert len(plan.copies) <= num_seqs
    stored = [move.host_page for move in plan.swaps_out]
    loaded = {move.host_page for move in plan.swaps_in}
    assert len(set(stored)) == len(stored), "a host page is filled twice"
    assert not loaded & set(stored), "a host page is filled and read"
    assert all(0 < page <= config.num_host_pages for page in (*stored, *loaded))
    read = [move.page for move in plan.swaps_out]
    filled = [*(move.page for move in plan.swaps_in), *(copy.dst for copy in plan.copies)]
    for moved in (read, filled):
        assert len(set(moved)) == len(moved)
        assert all(0 < page < config.num_pages for page in moved)
