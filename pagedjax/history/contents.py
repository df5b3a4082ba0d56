"""Whose tokens a page holds, and what became of the prefixes that were computed.

Owns the digests that find equal prefixes within one log. Knows nothing of queues or of who runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from pagedjax.events import Step
from pagedjax.history.story import Miss, Story

KEY_BYTES = 12  # of a page's chained digest

type Place = tuple[Story, int]  # a request, and a logical page of one of its samples
type Owners = dict[int, Place]  # page -> whose content it has


@dataclass(slots=True)
class _Content:
    """A full page of a prompt that was computed."""

    story: Story
    step: int
    on_device: bool = True
    on_host: bool = False
    evicted: int | None = None  # the step in which it was given up on both

    def drop(self, step: int, *, device: bool) -> None:
        if device:
            self.on_device = False
        else:
            self.on_host = False
        if not self.on_device and not self.on_host:
            self.evicted = step


class Contents:
    """Follows pages of the device and of the host by what they hold."""

    def __init__(self, page_size: int, *, is_cached: bool):
        """`is_cached`: there is a prefix cache."""
        self._size = page_size
        self._is_cached = is_cached
        self._owners: Owners = {}
        self._host_owners: Owners = {}
        self._keys: dict[str, list[bytes]] = {}  # request -> what names its prompt's full pages
        self._plain_keys: dict[str, list[bytes]] = {}  # the same as if there were no salts
        self._contents: dict[bytes, _Content] = {}
        self._salted: dict[bytes, Story] = {}  # plain key -> who computed it first
        self._num_reset = 0  # step of the last reset of the prefix cache

    def add(self, story: Story) -> None:
        """A request came."""
        keys = self._keys[story.arrival] = _page_keys(story.tokens, story.salt, self._size)
        plain = _page_keys(story.tokens, "", self._size) if story.salt else keys
        self._plain_keys[story.arrival] = plain

    def reset(self, step: int) -> None:
        """The prefix cache forgot everything."""
        self._num_reset = step

    def compute(self, story: Story, first: int, last: int, step: int) -> None:
        """Full pages of a prompt are computed in a step: logical pages `first` to before `last`."""
        for key in self._keys[story.arrival][first:last]:
            known = self._contents.get(key)
            if known is None or known.evicted is not None or known.step <= self._num_reset:
                self._contents[key] = _Content(story, step)
        for key in self._plain_keys[story.arrival][first:last]:
            self._salted.setdefault(key, story)

    def undo(self, story: Story, step: int) -> None:
        """A step broke off: what a request computed in it, or later, was never registered."""
        for key in self._keys[story.arrival]:
            known = self._contents.get(key)
            if known is not None and known.story is story and known.step >= step:
                del self._contents[key]

    def own(self, story: Story, logical: int, page: int) -> None:
        """A page is written for a request from now on."""
        self._owners[page] = (story, logical)

    def move_out(self, event: Step) -> None:
        """What a step evicts and copies to the host."""
        for host_page in event.host_evicted:
            self._drop(self._host_owners, host_page, event.step, device=False)
        for page, host_page in event.swaps_out:
            self._host_owners.pop(host_page, None)
            if page in self._owners:
                self._host_owners[host_page] = self._owners[page]
                content = self._content_of(self._owners, page)
                if content is not None:
                    content.on_host = True
        for page in event.evicted:
            self._drop(self._owners, page, event.step, device=True)

    def move_in(self, event: Step) -> None:
        """What a step copies from the host."""
        for page, host_page in event.swaps_in:
            if host_page in self._host_owners:
                self._owners[page] = self._host_owners[host_page]
                content = self._content_of(self._owners, page)
                if content is not None:
                    content.on_device = True

    def sources(self, pages: list[int], host_pages: list[int]) -> dict[str, int]:
        """Who computed the pages that a sequence starts from: name -> how many."""
        found: dict[str, int] = {}
        for logical, page in enumerate(pages):
            host_page = host_pages[logical] if logical < len(host_pages) else 0
            owner = self._host_owners.get(host_page) if host_page else self._owners.get(page)
            if owner is not None:
                found[owner[0].name] = found.get(owner[0].name, 0) + 1
        return found

    def miss(
        self, story: Story, num_tokens: int, step: int, running: Iterable[Story]
    ) -> Miss | None:
        """Why no more than `num_tokens` of a prompt were found; None when nothing was left to look
        for, since the last token is always computed."""
        at = num_tokens // self._size
        if at >= (len(story.tokens) - 1) // self._size:
            return None
        span = at * self._size, (at + 1) * self._size - 1
        if not self._is_cached:
            return Miss("off", *span)
        if story.document["params"].get("prompt_logprobs") is not None:
            return Miss("logprobs", *span)
        known = self._contents.get(self._keys[story.arrival][at])
        if known is None:
            return self._miss_of_new(story, at, span, running)
        whose = known.story.name
        if known.evicted is not None:
            return Miss("evicted", *span, whose, known.evicted)
        if known.step <= self._num_reset:
            return Miss("reset", *span, whose, self._num_reset)
        if known.step >= step - 1:
            return Miss("pending", *span, whose, known.step)
        return Miss("gone", *span, whose, known.step)

    def _miss_of_new(
        self, story: Story, at: int, span: tuple[int, int], running: Iterable[Story]
    ) -> Miss:
        for other in running:
            keys = self._keys[other.arrival]
            if at < len(keys) and keys[at] == self._keys[story.arrival][at]:
                return Miss("pending", *span, other.name)
        other = self._salted.get(self._plain_keys[story.arrival][at])
        if other is None or other.salt == story.salt:
            return Miss("new", *span)
        return Miss("salt", *span, other.name)

    def _drop(self, owners: Owners, page: int, step: int, *, device: bool) -> None:
        content = self._content_of(owners, page)
        if content is not None:
            content.drop(step, device=device)

    def _content_of(self, owners: Owners, page: int) -> _Content | None:
        """What is known of a page's content; None for what was generated, or is no full page."""
        if page not in owners:
            return None
        story, logical = owners[page]
        keys = self._keys[story.arrival]
        return self._contents.get(keys[logical]) if logical < len(keys) else None


def _page_keys(tokens: list[int], salt: str, page_size: int) -> list[bytes]:
    """A digest of each full page and all before it; equal for equal prefixes and salts."""
    key, found = salt.encode(), list[bytes]()
    for start in range(0, len(tokens) - page_size + 1, page_size):
        page = ",".join(map(str, tokens[start : start + page_size])).encode()
        key = hashlib.blake2b(key + b"|" + page, digest_size=KEY_BYTES).digest()
        found.append(key)
    return found
