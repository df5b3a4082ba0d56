"""A page pool with visible content, driven through pagedjax.paging and a plain model side by side.

`PlainPool` says what must happen, with dicts and lists and no thought of speed: which page comes
next, what a prompt hits, what is evicted. `World` does each operation on both sides, keeps the
content that a device would hold (each position holds a value made of the salt and *all* tokens up
to it, as real keys and values do), and `check` compares everything that can be seen.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from pagedjax.errors import AllocationError
from pagedjax.paging import PageAllocator, PageTable, PrefixCache, PrefixChain, resolve_copies
from pagedjax.plan import PageCopy

POISON = -1  # what a page holds before it is written: no real value is negative
CLEAN = 1 << 40  # `Stream.dirty_from` of a stream whose content is all made of its tokens


def prefix_value(before: int, token: int) -> int:
    """What one position holds: depends on everything before it and on its token."""
    return hash((before, token)) & 0x7FFFFFFFFFFF


def salt_value(salt: str | None) -> int:
    return {None: 1, "a": 2, "b": 3}[salt]


@dataclass
class PlainPool:
    """The allocator and the prefix cache as a list and three dicts."""

    num_pages: int
    page_size: int
    order: list[int] = field(default_factory=list)  # pages nobody holds, next one first
    references: dict[int, int] = field(default_factory=dict)
    content: dict[int, tuple[str | None, tuple[int, ...]]] = field(default_factory=dict)

    def __post_init__(self):
        self.order = list(range(1, self.num_pages))

    def take(self, n: int) -> list[int] | None:
        if n > len(self.order):
            return None
        taken, self.order = self.order[:n], self.order[n:]
        for page in taken:
            self.references[page] = 1
            self.content.pop(page, None)
        return taken

    def share(self, page: int) -> None:
        if page not in self.references:
            self.order.remove(page)
        self.references[page] = self.references.get(page, 0) + 1

    def drop(self, page: int) -> None:
        self.references[page] -= 1
        if self.references[page] == 0:
            del self.references[page]
            if page in self.content:
                self.order.append(page)
            else:
                self.order.insert(0, page)

    def forget(self, page: int) -> None:
        del self.content[page]
        if page in self.order:
            self.order.remove(page)
            self.order.insert(0, page)

    def match(self, salt: str | None, tokens: list[int]) -> list[int]:
        hits = []
        for end in range(self.page_size, len(tokens), self.page_size):  # < len: one token is run
            key = (salt, tuple(tokens[:end]))
            same = [page for page, known in self.content.items() if known == key]
            if not same:
                break
            held = [page for page in same if page in self.references]
            hits.append((held or same)[0])
        return hits

    def register(self, salt: str | None, tokens: list[int], pages: list[int], computed: int) -> int:
        last = computed // self.page_size
        first = last
        while first and pages[first - 1] not in self.content:
            first -= 1
        for i in range(first, last):
            key = (salt, tuple(tokens[: (i + 1) * self.page_size]))
            for page, known in list(self.content.items()):
                if known == key and page not in self.references:
                    self.forget(page)
            self.content[pages[i]] = key
        return last - first


@dataclass
class Stream:
    """One sequence on both sides."""

    table: PageTable
    chain: PrefixChain
    salt: str | None
    tokens: list[int]
    pages: list[int]  # the model's page table
    values: list[int]  # what each position must hold
    dirty_from: int = CLEAN  # from here on the content is not what its tokens say


class World:
    """Both sides and the simulated device memory. `check` raises at the first difference."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        digest: Callable[[bytes], bytes] | None = None,
    ):
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.cache = PrefixCache(self.allocator, page_size, root=bytes(32), _digest=digest)
        self.plain = PlainPool(num_pages, page_size)
        self.memory = np.full((num_pages * page_size,), POISON, np.int64)
        self.streams: list[Stream] = []

    # ------------------------------------------------------------------ operations

    def start(self, tokens: list[int], salt: str | None) -> Stream | None:
        """A new sequence: what the cache has, then pages for the rest. None: too few pages."""
        chain = self.cache.chain(extra_keys={"cache_salt": salt})
        hits = self.cache.match(tokens, chain)
        assert hits == self.plain.match(salt, tokens)
        table = PageTable(self.allocator, self.page_size)
        hit_tokens = len(hits) * self.page_size
        new_pages = -(-len(tokens) // self.page_size) - len(hits)
        needed = self.allocator.count_evictable(hits) + new_pages
        assert needed == sum(page in self.plain.order for page in hits) + new_pages
        if needed > len(self.plain.order):
            return None
        table.adopt(hits, hit_tokens)
        for page in hits:
            self.plain.share(page)
        stream = Stream(table, chain, salt, tokens[:hit_tokens], hits, [])
        stream.values = self._values(stream)
        self.streams.append(stream)
        assert self.grow(stream, tokens[hit_tokens:])
        return stream

    def grow(self, stream: Stream, tokens: list[int], *, copy_last: bool = False) -> bool:
        """Appends and writes tokens. `copy_last`: append first, then make_writable. False: full."""
        copies = self._plan_growth(stream, tokens, copy_last)
        if copies is None:
            return False
        self._copy(copies)
        self._write(stream, tokens)
        return True

    def grow_together(self, streams: list[Stream], tokens: list[int]) -> None:
        """One step for all streams: all are planned, then one batch of copies, then all writes."""
        copies: list[PageCopy] = []
        grown: list[Stream] = []
        for stream in streams:
            planned = self._plan_growth(stream, tokens, copy_last=False)
            if planned is not None:
                copies += planned
                grown.append(stream)
        self._copy(copies)
        for i, stream in enumerate(grown):
            self._write(stream, [(token + i) % 3 for token in tokens])

    def fork(self, stream: Stream) -> Stream:
        child = Stream(
            stream.table.fork(),
            stream.chain.fork(),
            stream.salt,
            list(stream.tokens),
            list(stream.pages),
            list(stream.values),
            stream.dirty_from,
        )
        for page in stream.pages:
            self.plain.share(page)
        self.streams.append(child)
        return child

    def truncate(self, stream: Stream, num_tokens: int) -> None:
        stream.table.truncate(num_tokens)
        stream.chain.truncate(num_tokens)
        keep = -(-num_tokens // self.page_size)
        for page in reversed(stream.pages[keep:]):
            self.plain.drop(page)
        del stream.pages[keep:], stream.tokens[num_tokens:], stream.values[num_tokens:]
        if stream.dirty_from >= num_tokens:
            stream.dirty_from = CLEAN

    def overwrite(self, stream: Stream, logical_page: int) -> bool:
        """Writes other content over one page of the stream. False: too few pages for its copy."""
        page = stream.pages[logical_page]
        shared = self.plain.references[page] > 1
        if shared and not self.plain.order:
            with pytest.raises(AllocationError):
                stream.table.make_writable(logical_page)
            return False
        copy = stream.table.make_writable(logical_page)
        assert copy == self._plain_writable(stream, logical_page)
        self._copy([copy] if copy else [])
        start = logical_page * self.page_size
        stop = min(start + self.page_size, len(stream.tokens))
        for position in range(start, stop):
            stream.values[position] += 1
        stream.dirty_from = min(stream.dirty_from, start)
        self.memory[stream.table.slot_mapping(start, stop - start)] = stream.values[start:stop]
        return True

    def register(self, stream: Stream, computed: int) -> None:
        computed = min(computed, stream.dirty_from, len(stream.tokens))
        got = self.cache.insert_computed(stream.chain, stream.tokens, stream.table, computed)
        assert got == self.plain.register(stream.salt, stream.tokens, stream.pages, computed)

    def release(self, stream: Stream) -> None:
        stream.table.release()
        stream.table.release()
        for page in reversed(stream.pages):
            self.plain.drop(page)
        self.streams.remove(stream)

    def reset(self) -> bool:
        done = self.cache.reset()
        assert done == (not self.plain.references)
        if done:
            for page in sorted(self.plain.content):
                self.plain.forget(page)
        return done

    # ------------------------------------------------------------------ comparison

    def check_counts(self) -> None:
        """What can be compared after every one of many operations."""
        evictable = len(self.plain.content.keys() - self.plain.references.keys())
        assert self.allocator.num_free == len(self.plain.order)
        assert self.allocator.num_held == len(self.plain.references)
        assert self.allocator.num_evictable == evictable

    def check(self) -> None:
        """Everything: integrity, order, references, tables, and the content of every page."""
        self.check_counts()
        tables = [stream.table.pages for stream in self.streams]
        self.allocator.check_integrity(tables)
        self.cache.check_integrity()
        assert self.allocator.eviction_order() == self.plain.order
        for page in range(1, self.allocator.num_pages):
            assert self.allocator.references(page) == self.plain.references.get(page, 0)
            assert self.allocator.is_cached(page) == (page in self.plain.content)
        for stream, pages in zip(self.streams, tables, strict=True):
            assert pages == stream.pages
            assert stream.table.num_tokens == len(stream.tokens)
            assert stream.table.waste < self.page_size
            assert self._read(pages)[: len(stream.tokens)] == stream.values
        for page, (salt, tokens) in self.plain.content.items():
            assert self._read([page]) == self._values_of(salt, tokens)[-self.page_size :]
        assert (self.memory[: self.page_size] == POISON).all(), "the null page was written"

    def finish(self) -> None:
        """Releases everything: no page, cached content or hash may stay behind."""
        for stream in list(self.streams):
            self.release(stream)
        self.check()
        assert self.reset()
        self.check()
        assert self.allocator.num_free == self.allocator.usable
        assert self.allocator.num_evictable == self.cache.num_cached == 0

    # ------------------------------------------------------------------ parts

    def _plan_growth(
        self, stream: Stream, tokens: list[int], copy_last: bool
    ) -> list[PageCopy] | None:
        n, table = len(tokens), stream.table
        partial = len(stream.tokens) % self.page_size != 0
        shared = partial and n > 0 and self.plain.references[stream.pages[-1]] > 1
        needed = -(-(len(stream.tokens) + n) // self.page_size) - len(stream.pages)
        assert table.num_pages_needed(n) == needed
        assert table.pages_to_append(n) == needed + shared
        if needed + shared > len(self.plain.order):
            with pytest.raises(AllocationError):
                table.extend(n)
            return None
        copies: list[PageCopy | None] = []
        first = len(stream.tokens) // self.page_size
        if copy_last:
            stream.pages += self._plain_take(needed)
            assert table.append(n) == (stream.pages[-needed:] if needed else [])
            if partial and n:
                copies.append(table.make_writable(first))
                assert copies[-1] == self._plain_writable(stream, first)
        else:
            copies.append(table.extend(n))
            if partial and n:
                assert copies[-1] == self._plain_writable(stream, first)
            stream.pages += self._plain_take(needed)
        return [copy for copy in copies if copy is not None]

    def _plain_take(self, n: int) -> list[int]:
        taken = self.plain.take(n)
        assert taken is not None
        for page in taken:
            self.memory[page * self.page_size : (page + 1) * self.page_size] = POISON
        return taken

    def _plain_writable(self, stream: Stream, logical_page: int) -> PageCopy | None:
        page = stream.pages[logical_page]
        if self.plain.references[page] == 1:
            if page in self.plain.content:
                self.plain.forget(page)
            return None
        (new_page,) = self._plain_take(1)
        self.plain.drop(page)
        stream.pages[logical_page] = new_page
        return PageCopy(page, new_page)

    def _copy(self, copies: list[PageCopy]) -> None:
        """As the device does it: all sources are read before any destination is written."""
        batch = resolve_copies(copies)
        pages = self.memory.reshape(-1, self.page_size)
        pages[[copy.dst for copy in batch]] = pages[[copy.src for copy in batch]]

    def _write(self, stream: Stream, tokens: list[int]) -> None:
        start = len(stream.tokens)
        stream.tokens += tokens
        stream.values += self._values(stream)[start:]
        slots = stream.table.slot_mapping(start, len(tokens))
        self.memory[slots] = stream.values[start:]

    def _values(self, stream: Stream) -> list[int]:
        return self._values_of(stream.salt, stream.tokens)

    @staticmethod
    def _values_of(salt: str | None, tokens: list[int] | tuple[int, ...]) -> list[int]:
        values, value = [], salt_value(salt)
        for token in tokens:
            value = prefix_value(value, token)
            values.append(value)
        return values

    def _read(self, pages: list[int]) -> list[int]:
        rows = self.memory.reshape(-1, self.page_size)[np.array(pages, np.int64)]
        return rows.reshape(-1).tolist()
