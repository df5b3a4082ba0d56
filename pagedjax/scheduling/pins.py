"""Pinned prefixes: cached pages that are held for nobody in particular, so that none is evicted.

Owns one reference on each page of each pinned prefix, and the rule that the rest of the pool can
still hold a request of `max_model_len`. Knows nothing of who computes the pages, or of queues.

A pin outlives the requests that use it and every preemption. It ends with `unpin`, when the prefix
cache is reset, and when the device lost its pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from pagedjax.config import SchedulerConfig
from pagedjax.errors import CapacityError, ConfigError
from pagedjax.paging import PageAllocator, PrefixCache
from pagedjax.scheduling.live import check_ids
from pagedjax.scheduling.recorder import Recorder

type _Key = tuple[tuple[int, ...], str | None]  # the prefix's tokens, whole pages; its salt


@dataclass(frozen=True, slots=True, eq=False)
class PinnedPrefix:
    """One pinned prefix.

    Attributes:
      token_ids: its tokens, a whole number of pages.
      cache_salt: of the requests that it is for.
      pages: where they are, in order.
    """

    token_ids: tuple[int, ...]
    cache_salt: str | None
    pages: list[int]
    _allocator: PageAllocator

    @property
    def num_hit_tokens(self) -> int:
        """How many tokens a hit finds now. Fewer than all only after a request that used them gave
        numbers that cannot be trusted; pin the prefix again then."""
        good = takewhile(self._allocator.is_cached, self.pages)
        return sum(1 for _ in good) * (len(self.token_ids) // len(self.pages))


class Pins:
    """The pinned prefixes of one pool."""

    def __init__(self, config: SchedulerConfig, allocator: PageAllocator, cache: PrefixCache):
        """Starts with none."""
        self.events: Recorder | None = None
        self._config = config
        self._allocator = allocator
        self._cache = cache
        self._held: dict[_Key, PinnedPrefix] = {}  # in the order of pinning

    @property
    def pages(self) -> list[list[int]]:
        """The pages of each pin; what two prefixes share is in both."""
        return [pin.pages for pin in self._held.values()]

    @property
    def num_pages(self) -> int:
        """Distinct pages held. O(pages)."""
        return len(self._distinct())

    @property
    def listing(self) -> tuple[PinnedPrefix, ...]:
        """What is pinned, in the order of pinning."""
        return tuple(self._held.values())

    def prefix_of(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The part of a prompt that can be pinned: its full pages."""
        return tokens[: len(tokens) // self._config.page_size * self._config.page_size]

    def check(self, prefix: tuple[int, ...], salt: str | None) -> None:
        """Raises unless a prefix of whole pages may be pinned.

        Raises:
          RequestError: a token is not in the vocabulary.
          ConfigError: there is no prefix cache.
          CapacityError: too little of the pool would be left.
        """
        check_ids("prompt", prefix, self._config.vocab_size)
        if not self._cache.enabled:
            raise ConfigError(
                "`enable_prefix_caching` must be true to pin a prefix. Got false: what is pinned "
                "could not be found again."
            )
        self._check_room(len(prefix) // self._config.page_size, self._match(prefix, salt))

    def pin(self, prefix: tuple[int, ...], salt: str | None) -> bool:
        """Holds the pages of a prefix that passed `check`, all of which must be on the device.

        Returns:
          False, and nothing changed, when one is not. What is pinned already stays so.
        """
        pages, key = self._match(prefix, salt), (prefix, salt)
        if len(pages) < len(prefix) // self._config.page_size:
            return False
        if key in self._held and self._held[key].pages == pages:
            return True
        if self.events is not None:
            self.events.pins_changed("pin", prefix, salt)
        for page in pages:
            self._allocator.share(page)
        self._let_go(prefix, salt)  # of an earlier pin, some of whose pages were not to be trusted
        self._held[key] = PinnedPrefix(prefix, salt, pages, self._allocator)
        return True

    def unpin(self, prefix: tuple[int, ...], salt: str | None) -> bool:
        """Lets go of a prefix, which stays cached for now; False when it is not pinned."""
        if (prefix, salt) in self._held and self.events is not None:
            self.events.pins_changed("unpin", prefix, salt)
        return self._let_go(prefix, salt)

    def clear(self) -> int:
        """Lets go of all; returns how many prefixes."""
        count = len(self._held)
        for prefix, salt in list(self._held):
            self._let_go(prefix, salt)
        return count

    def _let_go(self, prefix: tuple[int, ...], salt: str | None) -> bool:
        pin = self._held.pop((prefix, salt), None)
        if pin is None:
            return False
        self._allocator.free(pin.pages[::-1])
        return True

    def _match(self, prefix: tuple[int, ...], salt: str | None) -> list[int]:
        """Its cached pages, up to the last: a match leaves out the last token, so one is added."""
        return self._cache.match((*prefix, 0), self._cache.chain((), {"salt": salt}))

    def _check_room(self, num_full: int, cached: list[int]) -> None:
        pinned = self._distinct()
        num_new = num_full - len(pinned.intersection(cached))
        usable, needed = self._allocator.usable, self._config.pages_per_seq
        left = usable - len(pinned) - num_new
        if left < needed:
            most = max(0, usable - len(pinned) - needed)
            raise CapacityError(
                f"`prompt` must leave {needed} pages for one request of `max_model_len` "
                f"{self._config.max_model_len} when it is pinned. Got {num_full} pages, of which "
                f"{num_new} are not pinned yet, beside {len(pinned)} pinned ones of {usable}: that "
                f"leaves {left}. Pin at most {most} more ({most * self._config.page_size} tokens), "
                f"unpin others, raise `num_pages`, or lower `max_model_len`."
            )

    def _distinct(self) -> set[int]:
        return {page for pages in self.pages for page in pages}
