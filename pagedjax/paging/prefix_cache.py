"""The prefix cache: finds pages that already hold the keys and values of a prompt's first tokens.

Owns the map from chained hashes of full pages to page ids, and hit statistics. Knows the
allocator, whose evictable pages are the cache's content; knows nothing of requests or devices.

**Identity.** A page's content depends on all tokens before it, on the model and adapter that
computed it, and on the salt that keeps strangers apart. Its hash is therefore a chain::

    seed   = SHA-256( seed-tag,  root, {name: value} of the extra keys, each tagged and sized )
    hash_0 = SHA-256( page-tag, seed,   tokens of page 0 )
    hash_i = SHA-256( page-tag, hash_i-1, tokens of page i )

The root is a secret of the process, so that nobody can prepare two prompts with one hash.

**Truth.** A hash only finds a candidate. Each distinct content is one `PrefixNode` that refers to
the node of the page before it; a sequence's chain and a cached page agree when they meet in the
same node, and a node is shared only after its parent, tokens and extra keys were compared. `match`
compares the tokens again. So even with a hash function that always returns the same value, a
collision costs a miss and never gives a wrong page.

**Life of an entry.** `insert` comes once a page's keys and values are on the device. Two pages
computed at the same time may hold the same content; the node then names both. An entry goes when
its page is reused (`evict`, called by the allocator), written again, or replaced by a newer copy.

A node may also name one page of the host pool with its content; `host_tier.py` says which.
"""

import hashlib
import secrets
import sys
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from pagedjax.errors import IntegrityError
from pagedjax.paging.allocator import NULL_PAGE, PageAllocator
from pagedjax.paging.page_table import PageTable

ROOT_BYTES = 32

type ExtraKeys = Mapping[str, str | bytes | int | None]
type Tokens = Sequence[int] | NDArray[np.integer]


@dataclass(slots=True)
class PrefixCacheStats:
    """Counts in tokens, each request once: `record` is for its first admission only."""

    num_requests: int = 0
    num_query_tokens: int = 0
    num_hit_tokens: int = 0

    def record(self, num_query_tokens: int, num_hit_tokens: int) -> None:
        """Counts one request's prompt and the part of it that was found."""
        self.num_requests += 1
        self.num_query_tokens += num_query_tokens
        self.num_hit_tokens += num_hit_tokens

    @property
    def hit_rate(self) -> float:
        """Part of all prompt tokens that was found, 0 to 1."""
        return self.num_hit_tokens / max(self.num_query_tokens, 1)


@dataclass(slots=True, eq=False, weakref_slot=True)
class PrefixNode:
    """One distinct content: a full page's tokens after everything before them.

    `host_page` is written by the host tier alone.
    """

    hash: bytes
    parent: "PrefixNode | None"
    tokens: bytes  # i64 little-endian, page_size of them
    extra: bytes  # canonical extra keys of the whole chain; one object shared by its nodes
    # Cached pages with this content, oldest first.
    pages: list[int] = field(default_factory=list[int])
    host_page: int | None = None  # page of the host pool with this content


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """Where the first pages of a sequence are; both lists are by logical page.

    Each page is on the device (`pages`), or it is NULL_PAGE there and on the host (`host_pages`,
    NULL_PAGE for the others).
    """

    pages: list[int]
    host_pages: list[int]

    def __len__(self) -> int:
        """Pages found."""
        return len(self.pages)


class PrefixCache:
    """Finds and registers full pages by the tokens they hold and everything before them.

    Attributes:
      enabled: False makes every match empty and every insert a no-op.
      stats: hit counts; the caller records each request once.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        page_size: int,
        *,
        root: bytes | None = None,
        enabled: bool = True,
        _digest: Callable[[bytes], bytes] | None = None,
    ):
        """Takes the allocator's `on_evict`; `root` (32 bytes) is drawn at random unless given."""
        root = secrets.token_bytes(ROOT_BYTES) if root is None else root
        if len(root) != ROOT_BYTES:
            raise IntegrityError(f"`root` must be {ROOT_BYTES} bytes. Got {len(root)}.")
        if allocator.on_evict is not None:
            raise IntegrityError("`allocator` must not serve another prefix cache already.")
        self.page_size = page_size
        self.enabled = enabled
        self.stats = PrefixCacheStats()
        self._allocator = allocator
        self._root = root
        self._digest = _digest or _sha256
        # A node lives as long as a chain, a cached page or a later page's node refers to it.
        self._nodes: weakref.WeakValueDictionary[bytes, PrefixNode] = weakref.WeakValueDictionary()
        self._node_of: list[PrefixNode | None] = [None] * allocator.num_pages
        allocator.on_evict = self.evict

    @property
    def num_cached(self) -> int:
        """Pages the cache knows, held or evictable. O(num_pages)."""
        return sum(node is not None for node in self._node_of)

    def chain(self, tokens: Tokens = (), extra_keys: ExtraKeys | None = None) -> "PrefixChain":
        """The hasher of one sequence, fed with `tokens`.

        Args:
          tokens: the sequence's first tokens; more can follow through `PrefixChain.extend`.
          extra_keys: all that the keys and values depend on besides the tokens, by name: model and
            adapter revision, cache salt. A value of None is the same as no entry.
        """
        chain = PrefixChain(self, encode_extra_keys(extra_keys or {}))
        chain.extend(tokens)
        return chain

    def match(self, tokens: Tokens, chain: "PrefixChain") -> list[int]:
        """The longest run of cached pages from the first on that hold `tokens`. Changes nothing.

        At most `(len(tokens) - 1) // page_size` pages: the last token has to be run in any case,
        for its logits. Pass them to `PageTable.adopt` before anything is allocated.
        """
        return list(takewhile(bool, self.find(tokens, chain).pages))

    def find(self, tokens: Tokens, chain: "PrefixChain") -> PrefixHits:
        """As `match`, with pages of the host pool where the device has none."""
        if not self.enabled:
            return PrefixHits([], [])
        chain.extend(tokens)
        pages: list[int] = []
        host_pages: list[int] = []
        known: list[bytes] = []
        for node in chain.nodes[: max(len(tokens) - 1, 0) // self.page_size]:
            if node.pages:
                pages.append(self._best_page(node))
                host_pages.append(NULL_PAGE)
            elif node.host_page is not None:
                pages.append(NULL_PAGE)
                host_pages.append(node.host_page)
            else:
                break
            known.append(node.tokens)
        num_equal = _count_equal(known, tokens, self.page_size)
        return PrefixHits(pages[:num_equal], host_pages[:num_equal])

    def locate(
        self, chain: "PrefixChain", host_pages: Sequence[int], num_tokens: int
    ) -> PrefixHits:
        """Where the first `num_tokens` of a sequence are that has them in these host pages: full
        pages on the device where it still has their content, else there. Changes nothing."""
        pages = [NULL_PAGE] * len(host_pages)
        left = list(host_pages)
        for at, node in enumerate(chain.nodes[: num_tokens // self.page_size]):
            if node.pages:
                pages[at], left[at] = self._best_page(node), NULL_PAGE
        return PrefixHits(pages, left)

    def node_of(self, page: int) -> PrefixNode | None:
        """What a device page is registered as."""
        return self._node_of[page]

    def insert(self, chain: "PrefixChain", page_index: int, page: int) -> bool:
        """Registers a held page as logical page `page_index` of the chain's sequence.

        Only for a full page whose keys and values are on the device. False when there is nothing
        to do: already registered, cache off, or its hash belongs to other content (a collision).
        """
        if not self.enabled:
            return False
        if not 0 <= page_index < len(chain.nodes):
            raise IntegrityError(
                f"`page_index` must be in [0, {len(chain.nodes)}), the chain's full pages. "
                f"Got {page_index}."
            )
        node = chain.nodes[page_index]
        if self._allocator.is_cached(page):
            if self._node_of[page] is node:
                return False
            raise IntegrityError(f"`page` must not hold other cached content. Got page {page}.")
        if self._nodes.get(node.hash) is not node:
            return False
        self._allocator.mark_cached(page)
        self._drop_unheld(node)
        node.pages.append(page)
        self._node_of[page] = node
        return True

    def insert_computed(
        self, chain: "PrefixChain", tokens: Tokens, table: PageTable, num_computed_tokens: int
    ) -> int:
        """Registers the full pages of the first `num_computed_tokens` tokens; returns how many.

        Called after each commit; what was registered or adopted before is recognised by its page,
        so there is no count that a hit or a preemption could make stale.
        """
        last = min(num_computed_tokens, table.num_tokens) // self.page_size
        if not self.enabled or last == 0:
            return 0
        first = last
        while first > 0 and not self._allocator.is_cached(table.page_at(first - 1)):
            first -= 1
        hashed = min(len(chain.nodes), last)
        if hashed < last:
            chain.extend(tokens, last * self.page_size)
        if first < hashed:  # those that were hashed just now need no second look
            known = [node.tokens for node in chain.nodes[first:hashed]]
            if _count_equal(known, tokens[first * self.page_size :], self.page_size) < len(known):
                raise IntegrityError(
                    "`chain` must be of `tokens`. Got other tokens in pages "
                    f"{first} to {last - 1}: a truncated sequence truncates its chain too."
                )
        return sum(self.insert(chain, index, table.page_at(index)) for index in range(first, last))

    def evict(self, page: int) -> None:
        """Forgets a page; the allocator calls it when the page's content is given up."""
        node = self._node_of[page]
        if node is None:
            raise IntegrityError(f"`page` must be registered. Got page {page}, which is not.")
        node.pages.remove(page)
        self._node_of[page] = None

    def reset(self) -> bool:
        """Forgets everything; False, and nothing changed, while any sequence holds a page."""
        if self._allocator.num_held:
            return False
        for page, node in enumerate(self._node_of):
            if node is not None:
                self._allocator.unmark(page)
        return True

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the map and the allocator's flags name the same pages."""
        for page in range(1, self._allocator.num_pages):
            node, cached = self._node_of[page], self._allocator.is_cached(page)
            if cached != (node is not None):
                raise IntegrityError(
                    f"page {page} must be cached and registered or neither. Got cached: {cached}."
                )
            if node is None:
                continue
            if node.pages.count(page) != 1:
                raise IntegrityError(f"page {page} must be once in its entry. Got {node.pages}.")
            if self._nodes.get(node.hash) is not node:
                raise IntegrityError(f"page {page} is registered under a hash that cannot find it.")
            if any(self._node_of[twin] is not node for twin in node.pages):
                raise IntegrityError(f"pages {node.pages} share an entry but not its content.")

    def intern(self, parent: "PrefixNode | None", extra: bytes, tokens: bytes) -> "PrefixNode":
        """The node of this content, found or new; for `PrefixChain`."""
        if parent is None:
            before = self._digest(b"seed" + _sized(self._root) + _sized(extra))
        else:
            before = parent.hash
        digest = self._digest(b"page" + _sized(before) + _sized(tokens))
        found = self._nodes.get(digest)
        if found is None:
            node = PrefixNode(digest, parent, tokens, extra)
            self._nodes[digest] = node
            return node
        if found.parent is parent and found.tokens == tokens and found.extra == extra:
            return found
        return PrefixNode(digest, parent, tokens, extra)  # a collision: known to its own chain only

    def _best_page(self, node: PrefixNode) -> int:
        """A held page if there is one: sharing it takes nothing from the free pages."""
        if len(node.pages) > 1:
            for page in node.pages:
                if self._allocator.references(page):
                    return page
        return node.pages[0]

    def _drop_unheld(self, node: PrefixNode) -> None:
        """Frees older copies that nobody holds, so that a repeated prompt cannot fill the pool."""
        for page in list(node.pages):
            if self._allocator.references(page) == 0:
                self._allocator.unmark(page)


class PrefixChain:
    """The hashed full pages of one sequence; each is hashed once in the sequence's life.

    It stays valid over preemption and page moves, since it knows tokens and no pages.
    """

    def __init__(self, cache: PrefixCache, extra: bytes):
        """For `PrefixCache.chain`; `extra` are the canonical extra keys."""
        self.nodes: list[PrefixNode] = []
        self._cache = cache
        self._extra = extra

    @property
    def hashes(self) -> list[bytes]:
        """The chained hash of each full page so far."""
        return [node.hash for node in self.nodes]

    def extend(self, tokens: Tokens, num_tokens: int | None = None) -> None:
        """Hashes the pages that became full.

        Args:
          tokens: all tokens of the sequence, those already hashed included.
          num_tokens: how many of them count; the rest may still be placeholders.
        """
        if not self._cache.enabled:
            return
        size, done = self._cache.page_size, len(self.nodes)
        full = (len(tokens) if num_tokens is None else min(num_tokens, len(tokens))) // size
        if full <= done:
            return
        data = _token_bytes(tokens[done * size : full * size])
        width = len(data) // (full - done)
        parent = self.nodes[-1] if self.nodes else None
        for at in range(0, len(data), width):
            parent = self._cache.intern(parent, self._extra, data[at : at + width])
            self.nodes.append(parent)

    def truncate(self, num_tokens: int) -> None:
        """Forgets the pages that are not full of the first `num_tokens` tokens."""
        del self.nodes[num_tokens // self._cache.page_size :]

    def fork(self) -> "PrefixChain":
        """A second chain with the same past."""
        child = PrefixChain(self._cache, self._extra)
        child.nodes = list(self.nodes)
        return child


def encode_extra_keys(extra_keys: ExtraKeys) -> bytes:
    """Canonical bytes: equal for equal keys in any order, different for all others.

    Each name and value carries its type and its size, so that no value can pass for another key.
    """
    parts: list[bytes] = []
    for name in sorted(extra_keys):
        value = extra_keys[name]
        if value is None:
            continue
        if isinstance(value, str):
            kind, data = (
                b"s",
                value.encode("utf-8", "surrogatepass"),
            )  # JSON may hold lone surrogates
        elif isinstance(value, bytes):
            kind, data = b"b", value
        else:
            kind, data = b"i", str(int(value)).encode()
        parts.append(_sized(name.encode("utf-8", "surrogatepass")) + kind + _sized(data))
    return b"".join(parts)


def _count_equal(known: Sequence[bytes], tokens: Tokens, page_size: int) -> int:
    """How many of the `known` pages, from the first on, hold exactly the tokens of the prompt."""
    if not known:
        return 0
    data = _token_bytes(tokens[: len(known) * page_size])
    if b"".join(known) == data:
        return len(known)
    width = len(known[0])
    pairs = enumerate(known)
    return next(i for i, page in pairs if data[i * width : (i + 1) * width] != page)


def _token_bytes(tokens: Tokens) -> bytes:
    if isinstance(tokens, list) and sys.byteorder == "little":
        return array("q", tokens).tobytes()  # several times as fast, and the same bytes
    return np.asarray(tokens, dtype="<i8").tobytes()  # i64: no token id can wrap into another


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
