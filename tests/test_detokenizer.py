"""Streamed text is the whole text, however it is cut, and ends exactly at the stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.detokenizer import MAX_PENDING_TOKENS, Detokenizer
from pagedjax.errors import RequestError
from pagedjax.tokenizer import TextTokenizer, Tokenizer
from tests.smollm2 import needs_weights, smollm2_tokenizer, tiny_metadata
from tests.test_tokenizer import byte_fallback_backend

TINY = TextTokenizer.from_gguf(tiny_metadata())
SPACED = TextTokenizer(byte_fallback_backend())
# Uniform ids are mostly invalid UTF-8; text is mostly valid: both, mixed.
TEXTS = st.text(st.sampled_from("ab é日\U0001f600h\n") | st.characters(exclude_categories=("Cs",)))


class Foreign(Tokenizer):
    """The tiny tokenizer as a stranger's: nothing known of its bytes."""

    @property
    def vocab_size(self) -> int:
        return TINY.vocab_size

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        return TINY.encode(text, special_tokens=special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return TINY.decode(ids, skip_special_tokens=skip_special_tokens)


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    anything = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20)
    return st.lists(anything | TEXTS.map(tokenizer.encode), max_size=4).map(
        lambda parts: [i for part in parts for i in part]
    )


def stream(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    """Every push and the finish, with what must hold after each."""
    pieces: list[str] = []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        assert detokenizer.text == "".join(pieces)
    pieces.append(detokenizer.finish())
    assert detokenizer.text == "".join(pieces)
    return pieces


def check_streams_whole_text(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    """The text is decode's; what a fork at any point adds is the rest of it."""
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    for n, token_id in enumerate(ids):
        fork = detokenizer.fork()
        given = detokenizer.text
        assert expected.startswith(given)
        assert given + "".join(stream_rest(fork, ids[n:])) == expected
        assert detokenizer.text == given  # the fork left it alone
        detokenizer.push(token_id)
    detokenizer.finish()
    assert detokenizer.text == expected


def stream_rest(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """(where it begins, which): complete first, then longest; by looking at every end."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            best = max(ending, key=len)
            return end - len(best), best
    return None


# ------------------------------------------------------------------------------------ characters


@given(ids_of(TINY), st.booleans())
def test_pushes_and_finish_are_the_decoded_text(ids: list[int], skip: bool) -> None:
    check_streams_whole_text(TINY, ids, skip)


@given(ids_of(SPACED), st.booleans())
def test_byte_fallback_streams_its_text_without_the_added_space(ids: list[int], skip: bool) -> None:
    check_streams_whole_text(SPACED, ids, skip)


@given(ids_of(TINY), st.booleans())
def test_a_foreign_tokenizer_streams_its_text(ids: list[int], skip: bool) -> None:
    check_streams_whole_text(Foreign(), ids[:MAX_PENDING_TOKENS], skip)


@given(TEXTS)
def test_a_foreign_tokenizer_streams_valid_text_of_any_length(text: str) -> None:
    assert "".join(stream(Detokenizer(Foreign()), Foreign().encode(text))) == text


class TestSmolLM2:
    pytestmark = needs_weights

    def test_any_ids_stream_as_they_decode(self) -> None:
        @given(ids_of(smollm2_tokenizer()), st.booleans())
        def check(ids: list[int], skip: bool) -> None:
            check_streams_whole_text(smollm2_tokenizer(), ids, skip)

        check()


@pytest.mark.parametrize("tokenizer", [TINY, Foreign()], ids=["bytes", "window"])
def test_half_a_character_is_withheld(tokenizer: Tokenizer) -> None:
    ids = TINY.encode("é\U0001f600!")
    assert stream(Detokenizer(tokenizer), ids) == ["", "é", "", "", "", "\U0001f600", "!", ""]


def test_an_unfinished_character_becomes_a_replacement_at_the_end() -> None:
    assert stream(Detokenizer(TINY), TINY.encode("日")[:2]) == ["", "", "\ufffd"]


def test_invalid_bytes_are_replaced_as_soon_as_they_are_known() -> None:
    ids = [3 + 0xFF, 3 + 0xE2, 3 + ord("h")]
    assert stream(Detokenizer(TINY), ids) == ["\ufffd", "", "\ufffdh", ""]


def test_endless_invalid_bytes_of_a_foreign_tokenizer_are_not_kept_forever() -> None:
    detokenizer = Detokenizer(Foreign())
    pushes = [detokenizer.push(3 + 0xFF) for _ in range(3 * (MAX_PENDING_TOKENS + 1))]
    assert [len(text) for text in pushes if text] == [MAX_PENDING_TOKENS + 1] * 3


def test_special_tokens_are_shown_only_when_asked_for() -> None:
    ids = [*TINY.encode("h"), 2]
    assert stream(Detokenizer(TINY), ids) == ["h", "", ""]
    assert stream(Detokenizer(TINY, skip_special_tokens=False), ids) == ["h", "<|im_end|>", ""]


def test_padding_rows_have_no_text_and_negative_ids_raise() -> None:
    detokenizer = Detokenizer(TINY)
    assert detokenizer.push(TINY.vocab_size + 7) == ""
    with pytest.raises(RequestError, match=r"Token ids must be >= 0\. Got -1"):
        detokenizer.push(-1)


def test_a_token_is_looked_at_once() -> None:
    class Counting(TextTokenizer):
        calls = 0

        def token_bytes(self, token_id: int) -> bytes:
            self.calls += 1
            return super().token_bytes(token_id)

        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            raise AssertionError("the whole text must not be decoded again")

    tokenizer = Counting.__new__(Counting)
    tokenizer.__dict__.update(TINY.__dict__)
    stream(Detokenizer(tokenizer, stop=["zz"]), [3 + ord("z"), 3 + ord("a")] * 50)
    assert tokenizer.calls == 100


# ---------------------------------------------------------------------------------- stop strings


@given(
    st.lists(st.integers(0, TINY.vocab_size - 1) | st.sampled_from(TINY.encode("abhe1")))
    | st.text("ab1h", max_size=30).map(TINY.encode),
    st.lists(st.text("ab1h", min_size=1, max_size=4), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 6),
)
def test_text_is_cut_at_the_first_stop_string(
    ids: list[int], stops: list[str], include: bool, min_tokens: int
) -> None:
    plain = Detokenizer(TINY)
    head = "".join(plain.push(token_id) for token_id in ids[:min_tokens])
    tail = "".join(stream_rest(plain, ids[min_tokens:]))
    found = first_stop(tail, stops) if len(ids) > min_tokens else None
    detokenizer = Detokenizer(TINY, stop=stops, include_stop=include, min_tokens=min_tokens)
    whole = "".join(stream(detokenizer, ids))
    if found is None:
        assert (whole, detokenizer.stopped) == (head + tail, None)
    else:
        start, stop = found
        assert whole == head + tail[:start] + (stop if include else "")
        assert detokenizer.stopped == stop


def test_text_that_may_become_a_stop_string_is_withheld_until_decided() -> None:
    ids = [3 + ord(c) for c in "xababc"]
    assert stream(Detokenizer(TINY, stop=["abc"]), ids) == ["x", "", "", "ab", "", "", ""]
    assert stream(Detokenizer(TINY, stop=["abc"]), ids[:-1]) == ["x", "", "", "ab", "", "ab"]


def test_a_stop_string_inside_a_token_cuts_what_follows_it() -> None:
    (hell,) = TINY.encode("hell")
    detokenizer = Detokenizer(TINY, stop=["el"])
    assert (detokenizer.push(hell), detokenizer.stopped) == ("h", "el")
    kept = Detokenizer(TINY, stop=["el"], include_stop=True)
    assert kept.push(hell) == "hel"


def test_after_the_stop_nothing_comes() -> None:
    detokenizer = Detokenizer(TINY, stop=["h"])
    assert stream(detokenizer, TINY.encode("ah") + TINY.encode("more")) == ["a", *[""] * 6]
    assert detokenizer.finish() == ""
    assert detokenizer.text == "a"


def test_the_stop_that_is_complete_first_wins_and_the_longest_of_those() -> None:
    for order in (["abcd", "bc", "abc"], ["abc", "bc", "abcd"]):
        detokenizer = Detokenizer(TINY, stop=order)
        assert "".join(stream(detokenizer, TINY.encode("xabcd"))) == "x"
        assert detokenizer.stopped == "abc"


def test_a_stop_string_may_hold_any_character() -> None:
    ids = TINY.encode("a日本\U0001f600b")
    detokenizer = Detokenizer(TINY, stop=["本\U0001f600"])
    assert "".join(stream(detokenizer, ids)) == "a日"


def test_the_end_of_the_text_can_complete_a_stop_string() -> None:
    detokenizer = Detokenizer(TINY, stop=["\ufffd"])
    assert stream(detokenizer, [3 + ord("a"), 3 + 0xE2]) == ["a", "", ""]
    assert detokenizer.stopped == "\ufffd"


def test_stop_strings_are_not_looked_for_in_the_first_tokens() -> None:
    ids = [3 + ord(c) for c in "aabab"]
    detokenizer = Detokenizer(TINY, stop=["ab"], min_tokens=2)
    # "ab" of the second and third token begins too early; the next one counts.
    assert "".join(stream(detokenizer, ids)) == "aab"
    assert detokenizer.stopped == "ab"


def test_a_fork_keeps_its_own_undecided_text() -> None:
    detokenizer = Detokenizer(TINY, stop=["abc"])
    for char in "ab":
        detokenizer.push(3 + ord(char))
    fork = detokenizer.fork()
    assert detokenizer.push(3 + ord("c")) == ""
    assert detokenizer.stopped == "abc"
    assert fork.push(3 + ord("x")) == "abx"
    assert fork.stopped is None
