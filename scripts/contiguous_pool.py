"""What served language models before pages: every sequence reserves one contiguous piece of memory.

Owns two ways to find the piece (buddy blocks, first fit), the three policies of how much to ask
for, and a server with continuous batching over them. Knows nothing of pages.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from typing import Literal, Protocol

from scripts.length_distributions import MAX_MODEL_LEN, SimulatedRequest
from scripts.paging_simulation import StepWork, Usage

type Policy = Literal["max", "pow2", "oracle"]


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n` >= 1."""
    return 1 << (n - 1).bit_length()


class Pool(Protocol):
    """A contiguous allocator over positions."""

    def allocate(self, size: int) -> tuple[int, int] | None:
        """(start, positions really taken), or None when no piece is large enough."""
        ...

    def free(self, start: int, taken: int) -> None:
        """Gives back what `allocate` returned."""
        ...


class BuddyPool:
    """Blocks of powers of two, split in halves and merged again.

    A pool that is no power of two is the powers that it is the sum of: 15,728 = 8,192 + 4,096 +
    2,048 + 1,024 + 256 + 64 + 32 + 16.
    """

    def __init__(self, num_positions: int):
        """Starts with the largest blocks free."""
        self._free: dict[int, list[int]] = {}  # size -> starts, ascending
        self._roots: list[tuple[int, int]] = []  # (start, size)
        start = 0
        for bit in reversed(range(num_positions.bit_length())):
            size = 1 << bit
            if num_positions & size:
                self._roots.append((start, size))
                self._free[size] = [start]
                start += size

    def allocate(self, size: int) -> tuple[int, int] | None:
        """As in `Pool`: the lowest block of the smallest size that will do."""
        wanted = next_power_of_two(size)
        found = min((s for s, starts in self._free.items() if starts and s >= wanted), default=None)
        if found is None:
            return None
        start = self._free[found].pop(0)
        while found > wanted:
            found //= 2
            insort(self._free.setdefault(found, []), start + found)
        return start, wanted

    def free(self, start: int, taken: int) -> None:
        """As in `Pool`: merges with the other half as long as that is free too."""
        most = next(size for root, size in self._roots if root <= start < root + size)
        while taken < most:
            buddy = start ^ taken  # every root starts at a multiple of its size
            starts = self._free.setdefault(taken, [])
            if buddy not in starts:
                break
            starts.remove(buddy)
            start = min(start, buddy)
            taken *= 2
        insort(self._free.setdefault(taken, []), start)


class FirstFitPool:
    """The lowest gap that is large enough; neighbouring gaps are one."""

    def __init__(self, num_positions: int):
        """Starts with one gap."""
        self._gaps = [(0, num_positions)]  # (start, end), ascending

    def allocate(self, size: int) -> tuple[int, int] | None:
        """As in `Pool`; exactly `size` is taken."""
        for i, (start, end) in enumerate(self._gaps):
            if end - start >= size:
                self._gaps[i : i + 1] = [(start + size, end)] if end - start > size else []
                return start, size
        return None

    def free(self, start: int, taken: int) -> None:
        """As in `Pool`."""
        insort(self._gaps, (start, start + taken))
        merged: list[tuple[int, int]] = []
        for gap in self._gaps:
            if merged and merged[-1][1] == gap[0]:
                merged[-1] = (merged[-1][0], gap[1])
            else:
                merged.append(gap)
        self._gaps = merged


POOLS: dict[str, type[BuddyPool] | type[FirstFitPool]] = {
    "buddy": BuddyPool,
    "first-fit": FirstFitPool,
}


def asked_positions(policy: Policy, prompt_tokens: int, output_tokens: int) -> int:
    """Positions that a policy reserves for a sequence.

    `max`: the model's maximum. `pow2`: the prompt and the next power of two of the answer, which it
    thus over-reserves by less than twice. `oracle`: what it will have in the end.
    """
    if policy == "max":
        return MAX_MODEL_LEN
    output = output_tokens if policy == "oracle" else next_power_of_two(output_tokens)
    return min(prompt_tokens + output, MAX_MODEL_LEN)


class ContiguousServer:
    """Continuous batching, strictly first come first served, over a contiguous pool.

    A request is admitted when all its sequences have their pieces; it then never waits again. The
    prompt is computed once and whole, and copied to the pieces of its other sequences.
    """

    def __init__(
        self,
        num_positions: int,
        policy: Policy,
        *,
        pool: str = "buddy",
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
    ):
        """Starts empty."""
        self.policy: Policy = policy
        self.num_positions = num_positions
        self._pool: Pool = POOLS[pool](num_positions)
        self._slots_left = max_num_seqs
        self._max_tokens = max_num_batched_tokens
        self._waiting: deque[tuple[int, SimulatedRequest]] = deque()
        self._ends: list[tuple[int, int]] = []  # heap of (last step, request's index)
        self._held: dict[int, tuple[SimulatedRequest, list[tuple[int, int]]]] = {}
        self._step = 0
        # Sums over the running sequences; each grows by a token a step, so that a step costs
        # nothing for those that neither start nor end.
        self._num_seqs = self._tokens = self._final = self._asked = self._taken = 0
        self._reordered = 0.0  # positions that beams copy in a step

    def add(self, index: int, request: SimulatedRequest) -> None:
        """Queues a request under its index."""
        self._waiting.append((index, request))

    def plan(self) -> StepWork | None:
        """Admits what fits, and says what the next step does; None when nothing runs."""
        decoding, context = self._num_seqs, self._tokens + self._num_seqs
        reordered = self._reordered
        prompt_tokens = copied = 0
        while self._waiting:
            index, request = self._waiting[0]
            budget = self._max_tokens - decoding - prompt_tokens
            if prompt_tokens and request.prompt_tokens > budget:
                break  # the first prompt of a step is computed whole, whatever its length
            if request.num_sequences > self._slots_left or not self._take(index, request):
                break
            self._waiting.popleft()
            prompt_tokens += request.prompt_tokens
            copied += (request.num_sequences - 1) * request.prompt_tokens
        self._tokens += decoding
        if not self._num_seqs:
            return None
        return StepWork(
            tokens=decoding + prompt_tokens,
            context=context + prompt_tokens,
            copied_positions=copied + reordered,
            sequences=self._num_seqs,
        )

    def finish_step(self) -> list[int]:
        """Ends the step; indices of the requests that have all their tokens."""
        self._step += 1
        ended: list[int] = []
        while self._ends and self._ends[0][0] <= self._step:
            index = heapq.heappop(self._ends)[1]
            request, pieces = self._held.pop(index)
            for start, taken in pieces:
                self._pool.free(start, taken)
                self._taken -= taken
            self._count(request, -1)
            self._tokens -= request.num_sequences * (request.total_tokens - 1)
            ended.append(index)
        return ended

    def usage(self) -> Usage:
        """Who has the pool's positions in the step that was planned last."""
        return Usage(
            requests=len(self._held),
            tokens=self._tokens,
            reserved=self._final - self._tokens,
            internal=self._asked - self._final,
            rounding=self._taken - self._asked,
            free=self.num_positions - self._taken,
        )

    def generated(self, index: int, request: SimulatedRequest) -> list[int]:
        """Output tokens of each sequence of a finished request."""
        del index  # a contiguous server counts steps: what ended has run them all
        return [request.output_tokens] * request.num_sequences

    def _take(self, index: int, request: SimulatedRequest) -> bool:
        asked = asked_positions(self.policy, request.prompt_tokens, request.output_tokens)
        pieces: list[tuple[int, int]] = []
        for _ in range(request.num_sequences):
            piece = self._pool.allocate(asked)
            if piece is None:
                for start, taken in pieces:
                    self._pool.free(start, taken)
                return False
            pieces.append(piece)
        self._taken += sum(taken for _, taken in pieces)
        self._held[index] = (request, pieces)
        self._count(request, 1)
        self._tokens += request.num_sequences * request.prompt_tokens
        heapq.heappush(self._ends, (self._step + request.output_tokens, index))
        return True

    def _count(self, request: SimulatedRequest, sign: int) -> None:
        n = request.num_sequences * sign
        self._num_seqs += n
        self._slots_left -= n
        self._final += n * request.total_tokens
        asked = asked_positions(self.policy, request.prompt_tokens, request.output_tokens)
        self._asked += n * asked
        if request.is_beam:
            self._reordered += sign * _moved_positions(request)


def _moved_positions(request: SimulatedRequest) -> float:
    """Positions that a beam copies in a step: without sharing, a lane taken over is a copy.

    With parents drawn evenly, k lanes go on from k (1 - (1 - 1/k)^k) of them on average. The mean
    length over its life stands for the length now.
    """
    k = request.num_sequences
    moved = k * (1 - 1 / k) ** k
    return moved * (request.prompt_tokens + request.output_tokens / 2)
