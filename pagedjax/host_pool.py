"""The host pool: the bytes of pages that were swapped out, and their way there and back.

Owns one NumPy array of host pages, a checksum for each, and the transfers in flight. A store is
a gather on the device, dispatched before anything that writes the pages, a copy to the host that
runs beside the step, and a `drain` that files what arrived. Knows nothing of who swaps or why.

**Epochs.** A host page belongs to the last store that named it: what an older one brings is
dropped when it arrives, and a load waits for the newest. **Losses.** What did not arrive whole, or
is not what was stored (CRC-32), is never handed out: a load raises `TransferError`, a store's
failure is reported by `take_lost`.
"""

from __future__ import annotations

import functools
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax import kv_cache as kv_caches
from pagedjax.capacity import GIB
from pagedjax.errors import CapacityError, TransferError
from pagedjax.kv_cache import KVCache
from pagedjax.plan import PageMove
from pagedjax.programs import Program, abstract
from pagedjax.rates import MovingMedian

NARROW, WIDE = 8, 64  # pages that one call moves: a few, and many
WIDE_BYTES = 64 * 2**20  # a wide call moves no more than this, where that is more than NARROW
MAX_IN_FLIGHT = 4  # gathered batches that may wait for their copy, so that memory is bounded

type Moved = tuple[Any, ...]  # arrays: (pages,) or (pages, scales), see `kv_cache.gather`


@dataclass(frozen=True, slots=True)
class MovePrograms:
    """The compiled calls of one width, which takes exactly so many page ids."""

    gather: Callable[[KVCache, Any], Moved]
    scatter: Callable[[KVCache, Any, Moved], KVCache]  # DONATES the cache


@dataclass(frozen=True, slots=True, eq=False)
class _Transfer:
    """A batch on its way to the host."""

    host_pages: tuple[int, ...]
    arrays: Moved  # [width, ...]; entries past `host_pages` mean nothing
    dispatch_seconds: float


class HostPool:
    """Stores pages of the device pool by host page id, 1 to `num_host_pages`.

    Attributes:
      programs: by width; set by the runner once they are compiled.
      seconds_out, seconds_in: host time of a page's way out and back, moving medians.
    """

    def __init__(self, num_host_pages: int, kv_cache: KVCache) -> None:
        """Reserves the memory; it is touched when pages come.

        Raises:
          CapacityError: the host has not as much.
        """
        self.programs: Mapping[int, MovePrograms] = {}
        self.seconds_out, self.seconds_in = MovingMedian(), MovingMedian()
        self._num_device_pages = kv_cache.num_pages
        parts = jax.eval_shape(kv_caches.gather, kv_cache, _struct(1))
        self._parts = tuple((part.shape[1:], np.dtype(part.dtype)) for part in parts)
        self.page_bytes = kv_cache.nbytes // kv_cache.num_pages
        self.widths = widths(self.page_bytes)
        try:
            self._bytes = np.empty((num_host_pages + 1, self.page_bytes), np.uint8)
        except MemoryError as error:
            raise CapacityError(
                f"`swap_space` must fit into the host's memory. Got {num_host_pages} pages of "
                f"{self.page_bytes / GIB:.3f} GiB: lower it, or free memory on the host."
            ) from error
        self._checksums = np.zeros(num_host_pages + 1, np.uint32)
        self._is_whole = np.zeros(num_host_pages + 1, bool)
        self._newest: dict[int, _Transfer] = {}  # host page -> the store that is to fill it
        self._in_flight: deque[_Transfer] = deque()
        self._lost: set[int] = set()

    def swap(
        self, kv_cache: KVCache, out: Sequence[PageMove], back: Sequence[PageMove]
    ) -> Iterator[KVCache]:
        """**DONATES** the cache, batch by batch. Reads the pages of `out`, then writes `back`.

        Yields:
          the cache after each batch that was written; the one before it is gone.

        Raises:
          TransferError: pages of `back` are lost, or the device does not take them.
        """
        self.verify(move.host_page for move in back)
        self.store(kv_cache, out)
        for width, batch in self._batches(back):
            started = time.perf_counter()
            try:
                kv_cache = self._bring(kv_cache, width, batch)
            except Exception as error:
                raise TransferError(
                    f"{len(batch)} pages could not be moved to the device "
                    f"({type(error).__name__}: {error}). They are computed again.",
                    host_pages=frozenset(move.host_page for move in batch),
                ) from error
            yield kv_cache
            self.seconds_in.add((time.perf_counter() - started) / len(batch))

    def store(self, kv_cache: KVCache, moves: Sequence[PageMove]) -> None:
        """Starts to copy device pages out; they may be written as soon as this returns.

        A host page that cannot be filled is among those that `take_lost` returns later.
        """
        for move in moves:
            self._is_whole[move.host_page] = False
            self._newest.pop(move.host_page, None)
            self._lost.discard(move.host_page)
        for width, batch in self._batches(moves):
            started = time.perf_counter()
            while len(self._in_flight) >= MAX_IN_FLIGHT:
                self._finish(self._in_flight[0])
            host_pages = tuple(move.host_page for move in batch)
            ids = np.zeros(width, np.int32)
            ids[: len(batch)] = [move.page for move in batch]
            try:
                arrays = self.programs[width].gather(kv_cache, ids)
                for array in arrays:
                    array.copy_to_host_async()
            except Exception:  # no memory for it, or the device is in trouble: the step will tell
                self._lost.update(host_pages)
                continue
            transfer = _Transfer(host_pages, arrays, time.perf_counter() - started)
            self._newest.update(dict.fromkeys(host_pages, transfer))
            self._in_flight.append(transfer)

    def verify(self, host_pages: Iterable[int]) -> None:
        """Waits for what is still on its way to these pages and compares their checksums.

        Raises:
          TransferError: names those of them whose content is lost; the others are whole.
        """
        wrong = frozenset(page for page in host_pages if not self._is_intact(page))
        if wrong:
            self._is_whole[list(wrong)] = False
            self._lost -= wrong
            raise TransferError(
                f"{len(wrong)} host pages do not hold what was stored in them: {sorted(wrong)}. "
                "What they held is computed again.",
                host_pages=wrong,
            )

    def drain(self, *, wait: bool = False) -> None:
        """Files what has arrived; with `wait`, all that is on its way."""
        while self._in_flight:
            first = self._in_flight[0]
            if not wait and not all(array.is_ready() for array in first.arrays):
                return
            self._finish(first)

    def rehearse(self, kv_cache: KVCache) -> KVCache:
        """**DONATES** the cache. Runs each program once, which gives the first measured times.

        Page 0 goes to host page 1 and from there nowhere, to ids outside the pool.
        """
        for width in self.programs:
            started = time.perf_counter()
            arrays = self.programs[width].gather(kv_cache, np.zeros(width, np.int32))
            rows = [np.asarray(array) for array in arrays]
            for at in range(width):
                self._file(1, [row[at] for row in rows])
            middle = time.perf_counter()
            self._is_intact(1)
            moves = [PageMove(self._num_device_pages + at, 1) for at in range(width)]
            kv_cache = jax.block_until_ready(self._bring(kv_cache, width, moves))
            self.seconds_out.add((middle - started) / width)
            self.seconds_in.add((time.perf_counter() - middle) / width)
        self._is_whole[1] = False
        return kv_cache

    def take_lost(self) -> frozenset[int]:
        """Host pages whose store failed, each told once."""
        lost = frozenset(self._lost)
        self._lost.clear()
        return lost

    @property
    def num_in_flight(self) -> int:
        """Batches on their way to the host."""
        return len(self._in_flight)

    def _bring(self, kv_cache: KVCache, width: int, batch: Sequence[PageMove]) -> KVCache:
        """**DONATES** the cache. Writes one batch of verified host pages into it."""
        ids = self._num_device_pages + np.arange(width, dtype=np.int32)  # dropped past the batch
        ids[: len(batch)] = [move.page for move in batch]
        parts = self._read([move.host_page for move in batch], width)
        pages = tuple(jax.device_put(part) for part in parts)
        return self.programs[width].scatter(kv_cache, ids, pages)

    def _batches(self, moves: Sequence[PageMove]) -> Iterator[tuple[int, Sequence[PageMove]]]:
        narrow, wide = self.widths
        start = 0
        while start < len(moves):
            width = narrow if len(moves) - start <= narrow else wide
            yield width, moves[start : start + width]
            start += width

    def _finish(self, transfer: _Transfer) -> None:
        """Waits for one batch and files it, but for pages that a newer store took over."""
        started = time.perf_counter()
        places = [
            (at, host_page)
            for at, host_page in enumerate(transfer.host_pages)
            if self._newest.get(host_page) is transfer
        ]
        try:
            rows = [np.asarray(array) for array in transfer.arrays] if places else []
            for at, host_page in places:
                self._file(host_page, [row[at] for row in rows])
        except Exception:
            lost = {host_page for _, host_page in places if not self._is_whole[host_page]}
            self._lost |= lost
            for host_page in lost:
                del self._newest[host_page]
        self._in_flight.remove(transfer)
        seconds = transfer.dispatch_seconds + time.perf_counter() - started
        self.seconds_out.add(seconds / len(transfer.host_pages))

    def _file(self, host_page: int, parts: Sequence[np.ndarray]) -> None:
        checksum = at = 0
        for part in parts:
            data = part.reshape(-1).view(np.uint8)
            checksum = zlib.crc32(data, checksum)
            self._bytes[host_page, at : at + data.size] = data
            at += data.size
        self._checksums[host_page] = checksum
        self._is_whole[host_page] = True
        self._newest.pop(host_page, None)

    def _is_intact(self, host_page: int) -> bool:
        transfer = self._newest.get(host_page)
        if transfer is not None:
            self._finish(transfer)
        if not self._is_whole[host_page]:
            return False
        return zlib.crc32(self._bytes[host_page]) == self._checksums[host_page]

    def _read(self, host_pages: Sequence[int], width: int) -> list[np.ndarray]:
        """Fresh arrays [width, ...]: JAX may go on using the memory that it is given."""
        parts: list[np.ndarray] = []
        at = 0
        for shape, dtype in self._parts:
            part = np.empty((width, *shape), dtype)
            rows = part.reshape(width, -1).view(np.uint8)
            size = rows.shape[1]
            source, target = self._bytes[:, at : at + size], rows[: len(host_pages)]
            np.take(source, host_pages, axis=0, out=target, mode="clip")  # "raise" copies twice
            parts.append(part)
            at += size
        return parts


def widths(page_bytes: int) -> tuple[int, int]:
    """Pages of a narrow and of a wide call."""
    return NARROW, max(NARROW, min(WIDE, WIDE_BYTES // page_bytes))


def temp_bytes(page_bytes: int) -> int:
    """Most device memory that transfers take at a time: gathered batches, and one in the making."""
    return (MAX_IN_FLIGHT + 2) * widths(page_bytes)[1] * page_bytes


def move_programs(
    widths: tuple[int, ...], kv_cache: KVCache, implementation: str | None
) -> dict[tuple[str, int], Program]:
    """The calls that move pages out of ("gather") and into ("scatter") these pools, by width."""
    gather = functools.partial(kv_caches.gather, implementation=implementation)
    scatter = functools.partial(kv_caches.scatter, implementation=implementation)
    programs: dict[tuple[str, int], Program] = {}
    for width in widths:
        ids = jax.ShapeDtypeStruct((width,), jnp.int32)
        pages = jax.eval_shape(gather, kv_cache, ids)
        programs["gather", width] = Program(
            name=f"{width} pages out",
            function=gather,
            holds=f"{implementation}",
            arguments=(abstract(kv_cache), ids),
            result=pages,
            out_shardings=landing(),
        )
        programs["scatter", width] = Program(
            name=f"{width} pages back",
            function=scatter,
            holds=f"{implementation}",
            arguments=(abstract(kv_cache), ids, pages),
            result=abstract(kv_cache),
            donated=(0,),
        )
    return programs


def landing() -> jax.sharding.Sharding | None:
    """Where gathered pages go: pinned host memory where the device has it; None: they stay."""
    device = jax.devices()[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    if "pinned_host" not in kinds or device.default_memory().kind == "pinned_host":
        return None
    return jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")


def _struct(width: int) -> Any:
    return jax.ShapeDtypeStruct((width,), np.int32)
