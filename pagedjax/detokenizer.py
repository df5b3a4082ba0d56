"""Token ids to text as they come, one sequence at a time: `Detokenizer`.

Owns the bytes that are not yet a character and the text that may yet become a stop string. What
was given out is never taken back: all pushes and the finish joined are the text, cut at the stop.
Knows nothing of eos or stop ids, requests or scheduling.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Sequence

from pagedjax.errors import RequestError
from pagedjax.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# A character has four bytes, so tokens that end in U+FFFD for this long are really invalid.
MAX_PENDING_TOKENS = 32


class Detokenizer:
    """Turns one sequence's tokens into text; the cost of a token does not grow with the text.

    Of several stop strings the one that is complete first in the text wins, whatever the tokens
    are; of those that end at the same character the longest (it begins first). Text of the first
    `min_tokens` tokens is given out unexamined and is no part of a later stop string.

    Args:
      tokenizer: ids of `tokenizer.vocab_size` and above (a model's padding rows) have no text.
      skip_special_tokens: leave special tokens out.
      stop: strings that end the text, none of them empty.
      include_stop: keep the stop string at the end of the text.
      min_tokens: stop strings are looked for after so many tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ):
        # A user's own tokenizer may lack the optional attributes.
        is_bytewise = getattr(tokenizer, "is_bytewise", False)
        kind = _ByteReader if is_bytewise else _WindowReader
        self._reader = kind(tokenizer, skip_special_tokens)
        self._vocab_size = tokenizer.vocab_size
        self._stops = _StopMatcher(stop, include_stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._parts: list[str] = []
        self._is_finished = False

    @property
    def text(self) -> str:
        """All text given out so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.found

    def push(self, token_id: int) -> str:
        """New text that is safe to give out; after a stop or `finish()` always empty."""
        if token_id < 0:
            raise RequestError(f"Token ids must be >= 0. Got {token_id}.", param="token_ids")
        if self._is_finished or self.stopped is not None:
            return ""
        self._num_tokens += 1
        if token_id >= self._vocab_size:
            return ""
        return self._give(self._examine(self._reader.push(token_id)))

    def finish(self) -> str:
        """The text still withheld; what is left of an unfinished character is U+FFFD."""
        if self._is_finished or self.stopped is not None:
            return ""
        self._is_finished = True
        new = self._examine(self._reader.finish())
        return self._give(new + self._stops.release())

    def fork(self) -> Detokenizer:
        """A copy that goes on by itself (parallel samples)."""
        other = copy.copy(self)
        other._reader = self._reader.fork()
        other._stops = self._stops.fork()
        other._parts = list(self._parts)
        return other

    def _examine(self, new: str) -> str:
        return new if self._num_tokens <= self._min_tokens else self._stops.push(new)

    def _give(self, new: str) -> str:
        if new:
            self._parts.append(new)
        return new


class _ByteReader:
    """Characters of a byte-wise tokenizer: exact, constant work a token."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._undropped = tokenizer.dropped_prefix  # of the very first text, not yet seen

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._drop(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        return self._drop(self._decoder.decode(b"", final=True))

    def fork(self) -> _ByteReader:
        other = copy.copy(self)
        other._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        other._decoder.setstate(self._decoder.getstate())
        return other

    def _drop(self, new: str) -> str:
        if new and self._undropped:
            new, self._undropped = new.removeprefix(self._undropped), ""
        return new


class _WindowReader:
    """Characters of any other tokenizer, from what `decode` adds to the few tokens before."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []  # tokens given out (context for decode), then pending ones
        self._num_given = 0  # tokens at the front of the window whose text was given out

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        is_long = len(self._window) - self._num_given > MAX_PENDING_TOKENS
        return self._advance(give_incomplete=is_long)

    def finish(self) -> str:
        return self._advance(give_incomplete=True)

    def fork(self) -> _WindowReader:
        other = copy.copy(self)
        other._window = list(self._window)
        return other

    def _advance(self, *, give_incomplete: bool) -> str:
        before = self._decode(self._window[: self._num_given])
        after = self._decode(self._window)
        if len(after) <= len(before) or (after.endswith(REPLACEMENT) and not give_incomplete):
            return ""
        del self._window[: self._num_given]
        self._num_given = len(self._window)
        return after[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""


class _StopMatcher:
    """Finds stop strings in text that comes in pieces; withholds what may be the start of one.

    One Knuth-Morris-Pratt automaton a stop string: the work for a character does not depend on
    the lengths of the stop strings, nor on how the text was cut.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool):
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._fallbacks = tuple(_fallback_table(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)  # characters of each stop that end the text so far
        self._held = ""  # the longest of those ends: not yet given out
        self.found: str | None = None

    def push(self, new: str) -> str:
        if not self._stops:
            return new
        if not self._held and all(stop[0] not in new for stop in self._stops):
            return new  # nothing was matched, and nothing begins
        text = self._held + new
        for end, character in enumerate(new, start=len(self._held) + 1):
            self._advance(character)
            if self.found is not None:
                self._held = ""
                return text[: end if self._include_stop else end - len(self.found)]
        split = len(text) - max(self._matched)
        self._held = text[split:]
        return text[:split]

    def release(self) -> str:
        held, self._held = self._held, ""
        return held

    def fork(self) -> _StopMatcher:
        other = copy.copy(self)
        other._matched = list(self._matched)
        return other

    def _advance(self, character: str) -> None:
        for n, (stop, fallback) in enumerate(zip(self._stops, self._fallbacks, strict=True)):
            matched = self._matched[n]
            while matched and stop[matched] != character:
                matched = fallback[matched - 1]
            matched += stop[matched] == character
            self._matched[n] = matched
            if matched == len(stop) and (self.found is None or len(stop) > len(self.found)):
                self.found = stop


def _fallback_table(stop: str) -> list[int]:
    """Entry i: length of the longest proper prefix of stop[: i + 1] that also ends it."""
    table = [0] * len(stop)
    for i in range(1, len(stop)):
        k = table[i - 1]
        while k and stop[k] != stop[i]:
            k = table[k - 1]
        table[i] = k + (stop[k] == stop[i])
    return table
