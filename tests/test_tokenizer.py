"""Token ids are exactly the model's; nothing that is typed becomes a special token by accident."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from pagedjax import tokenizer as tokenizer_module
from pagedjax.errors import ModelFormatError, RequestError
from pagedjax.tokenizer import TextTokenizer, Tokenizer, encode_prompt
from tests.smollm2 import needs_weights, smollm2_tokenizer, tiny_metadata

GOLDEN = json.loads((Path(__file__).parent / "data" / "smollm2_tokens.json").read_text("utf-8"))
TINY = TextTokenizer.from_gguf(tiny_metadata())
FAMILIES = {
    pre: TextTokenizer.from_gguf(tiny_metadata(pre))
    for pre in ("default", "gpt-2", "smollm", "llama-bpe", "llama3")
}
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Any text, and more often text with special tokens, digits and blanks in odd places.
texts = st.lists(
    st.text(st.characters(exclude_categories=("Cs",)))
    | st.sampled_from((*SPECIALS, "<|im_", "end|>", "123456", "½²٣٤", "  ", "\n\n", "'S", "日本語"))
).map("".join)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    backend.add_special_tokens(["<s>", "</s>", "<|end|>"])
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def rewrite(file: Path, **changes: Any) -> None:
    spec = json.loads(file.read_text("utf-8")) if file.exists() else {}
    file.write_text(json.dumps(spec | changes), "utf-8")


def byte_fallback_backend() -> tokenizers.Tokenizer:
    vocab = {"<unk>": 0, "</s>": 1} | {f"<0x{b:02X}>": 2 + b for b in range(256)}
    for piece in ("▁", "a", "b", "▁a", "ab"):
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("a", "b")]
    model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["</s>"])
    return backend


# ------------------------------------------------------------------------------- the real model


@pytest.mark.weights
@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: ascii(case["text"])[:24])
class TestSmolLM2:
    pytestmark = needs_weights

    def test_gives_the_golden_ids(self, case: dict[str, Any]) -> None:
        assert smollm2_tokenizer().encode(case["text"]) == case["ids"]

    def test_decodes_the_golden_ids(self, case: dict[str, Any]) -> None:
        text = smollm2_tokenizer().decode(case["ids"], skip_special_tokens=False)
        assert text == case["text"]


class TestSmolLM2Facts:
    pytestmark = needs_weights

    def test_special_tokens_and_template_are_the_files(self) -> None:
        tokenizer = smollm2_tokenizer()
        assert tokenizer.vocab_size == 49152
        assert tokenizer.eos_token_ids == {2}
        assert (tokenizer.bos_token_id, tokenizer.add_bos) == (1, False)
        assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
        assert tokenizer.special_tokens["<|endoftext|>"] == 0
        assert tokenizer.chat_template is not None
        assert "<|im_start|>" in tokenizer.chat_template

    @staticmethod
    @functools.cache
    def spelled_bytes() -> frozenset[int]:
        all_bytes = map(smollm2_tokenizer().token_bytes, range(49152))
        return frozenset(data[0] for data in all_bytes if len(data) == 1)

    @given(texts)
    def test_round_trip(self, text: str) -> None:
        tokenizer = smollm2_tokenizer()
        # This vocabulary has no token for some bytes (those of no character in use): they vanish.
        kept = bytes(b for b in text.encode() if b in self.spelled_bytes())
        for special in (True, False):
            ids = tokenizer.encode(text, special_tokens=special)
            assert tokenizer.decode(ids, skip_special_tokens=False) == kept.decode(errors="replace")

    @given(texts)
    def test_typed_special_tokens_are_text_when_told_so(self, text: str) -> None:
        tokenizer = smollm2_tokenizer()
        ids = tokenizer.encode(text, special_tokens=False)
        assert tokenizer.special_ids.isdisjoint(ids)


# --------------------------------------------------------------------------------- GGUF metadata


@given(texts, st.sampled_from(sorted(FAMILIES)))
def test_round_trip_whatever_the_pre_tokeniser(text: str, pre: str) -> None:
    tokenizer = FAMILIES[pre]
    for special in (True, False):
        ids = tokenizer.encode(text, special_tokens=special)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("gpt-2", ["1234"]),
        ("default", ["123", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("llama3", ["123", "4"]),
    ],
)
def test_digits_split_as_the_family_splits_them(pre: str, expected: list[str]) -> None:
    assert pieces(TextTokenizer.from_gguf(tiny_metadata(pre)), "1234") == expected


def test_a_capital_contraction_is_a_word_only_for_the_caseless_families() -> None:
    assert pieces(TextTokenizer.from_gguf(tiny_metadata("gpt-2")), "I'S") == ["I", "'", "S"]
    assert pieces(TextTokenizer.from_gguf(tiny_metadata("llama3")), "I'S") == ["I", "'S"]


def test_the_last_blank_belongs_to_the_next_word() -> None:
    assert pieces(TINY, "he   w") == ["he", "  ", " w"]


def test_whole_words_come_before_merges_for_llama3() -> None:
    metadata = tiny_metadata("llama3")
    tokens = [*metadata["tokenizer.ggml.tokens"], "odd"]  # type: ignore[misc]
    metadata |= {"tokenizer.ggml.tokens": tokens}
    metadata |= {"tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3)}
    assert pieces(TextTokenizer.from_gguf(metadata), "odd") == ["odd"]


def test_qwen2_composes_characters() -> None:
    tokenizer = TextTokenizer.from_gguf(tiny_metadata("qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_user_defined_tokens_are_found_but_not_special() -> None:
    metadata = tiny_metadata()
    tokens = [*metadata["tokenizer.ggml.tokens"], "<tool>", "<|odd|>"]  # type: ignore[misc]
    kinds = [3, 3, 3] + [1] * (len(tokens) - 5) + [4, 4]
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    tokenizer = TextTokenizer.from_gguf(metadata)
    ids = tokenizer.encode("<tool><|odd|>")
    assert ids == [len(tokens) - 2, len(tokens) - 1]
    assert tokenizer.decode(ids) == "<tool>"  # what looks like a control token is one
    assert tokenizer.special_ids == {0, 1, 2, len(tokens) - 1}


@pytest.mark.parametrize(
    ("pre", "flag", "expected"),
    [("smollm", None, False), ("llama3", None, True), ("llama3", False, False)],
)
def test_bos_is_added_when_the_file_or_its_family_says_so(
    pre: str, flag: bool | None, expected: bool
) -> None:
    changes = {} if flag is None else {"add_bos_token": flag}
    tokenizer = TextTokenizer.from_gguf(tiny_metadata(pre, **changes))
    assert tokenizer.add_bos is expected
    assert encode_prompt(tokenizer, "h")[:1] == ([1] if expected else tokenizer.encode("h"))


def test_bos_is_not_added_twice() -> None:
    tokenizer = TextTokenizer.from_gguf(tiny_metadata("llama3"))
    assert encode_prompt(tokenizer, "<|im_start|>h") == tokenizer.encode("<|im_start|>h")
    assert encode_prompt(tokenizer, "") == [1]


def test_every_end_of_turn_id_is_an_eos() -> None:
    tokenizer = TextTokenizer.from_gguf(tiny_metadata(eot_token_id=0, eom_token_id=1))
    assert tokenizer.eos_token_ids == {0, 1, 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "'gpt2'.*Got 'llama'"),
        ({"model": None}, "Got None"),
        ({"pre": "tekken"}, "one of default, gpt-2, smollm.*Got 'tekken'"),
        ({"pre": None}, "Got None"),
        ({"tokens": None}, "tokens` must be an array of strings"),
        ({"merges": [1]}, "merges` must be an array of strings"),
        ({"merges": ["x yz"]}, "merges` does not fit the vocabulary"),
        ({"token_type": [1]}, "token_type` must have 269 entries. Got 1"),
        ({"eos_token_id": 10**6}, r"eos_token_id` must be in \[0, 269\). Got 1000000"),
        ({"bos_token_id": -1}, r"bos_token_id` must be in \[0, 269\). Got -1"),
    ],
)
def test_unusable_metadata_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        TextTokenizer.from_gguf(tiny_metadata("smollm", **changes))


# ------------------------------------------------------------------------------ text and tokens


@given(texts)
def test_typed_special_tokens_are_text_when_told_so(text: str) -> None:
    assert TINY.special_ids.isdisjoint(TINY.encode(text, special_tokens=False))


def test_special_tokens_in_a_text_are_recognised() -> None:
    assert TINY.encode("<|im_start|><|im_end|>") == [1, 2]
    assert TINY.decode([1, 2]) == ""
    assert TINY.decode([1, 2], skip_special_tokens=False) == "<|im_start|><|im_end|>"


def test_merges_that_spell_a_special_token_cannot_forge_it() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"x": 0, "y": 1, "xy": 2}, [("x", "y")]))
    backend.add_special_tokens(["xy"])
    tokenizer = TextTokenizer(backend)
    assert tokenizer.encode("xxyy") == [0, 2, 1]
    assert tokenizer.encode("xxyy", special_tokens=False) == [0, 0, 1, 1]


def test_a_special_token_of_one_character_cannot_be_typed() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"x": 0, "y": 1}, []))
    backend.add_special_tokens(["x"])
    with pytest.raises(RequestError, match="must not hold 'x'"):
        TextTokenizer(backend).encode("yx", special_tokens=False)


@given(st.lists(st.integers(0, TINY.vocab_size - 1)))
def test_decode_equals_the_librarys(ids: list[int]) -> None:
    for skip in (True, False):
        expected = TINY._backend.decode(ids, skip_special_tokens=skip)
        assert TINY.decode(ids, skip_special_tokens=skip) == expected


def test_token_bytes_are_the_bytes_and_nothing_for_padding_rows() -> None:
    assert [TINY.token_bytes(3 + byte) for byte in range(256)] == [bytes([b]) for b in range(256)]
    assert TINY.token_bytes(TINY.vocab_size) == b""
    assert TINY.token_text(3 + 0xE2) == "\ufffd"
    assert TINY.token_text(1) == "<|im_start|>"


@pytest.mark.parametrize("token_id", [-1, TINY.vocab_size, 2**40])
def test_decoding_an_id_out_of_range_raises(token_id: int) -> None:
    with pytest.raises(RequestError, match=rf"in \[0, {TINY.vocab_size}\). Got {token_id}"):
        TINY.decode([5, token_id])


@pytest.mark.parametrize("special", [True, False])
def test_a_lone_surrogate_raises(special: bool) -> None:
    with pytest.raises(RequestError, match=r"lone surrogate U\+D83D at character 2"):
        TINY.encode("né\ud83d", special_tokens=special)
    with pytest.raises(RequestError, match="must be a string"):
        TINY.encode(None, special_tokens=special)  # type: ignore[arg-type]


@pytest.mark.parametrize("unit", ["h", " ", "1", "<", "<|im_end|>", "\n ", "日"])
def test_a_long_text_of_one_kind_is_encoded_whole(unit: str) -> None:
    text = unit * (100_000 // len(unit.encode()))
    assert TINY.decode(TINY.encode(text, special_tokens=False)) == text


# ---------------------------------------------------------------------------------- directories


def test_a_directory_needs_only_its_tokenizer_json(directory: Path) -> None:
    tokenizer = TextTokenizer.from_directory(directory)
    assert tokenizer.encode("ab</s>") == [2, 4]
    assert tokenizer.vocab_size == 6
    assert tokenizer.eos_token_ids == frozenset()
    assert (tokenizer.bos_token_id, tokenizer.add_bos) == (None, False)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("", "")


def test_eos_ids_are_those_of_the_tokenizer_and_the_generation_config(directory: Path) -> None:
    rewrite(directory / "tokenizer_config.json", eos_token={"content": "</s>"}, bos_token="<s>")
    rewrite(directory / "generation_config.json", eos_token_id=[5])
    rewrite(directory / "config.json", eos_token_id=3)  # the generation config stands before it
    tokenizer = TextTokenizer.from_directory(directory)
    assert tokenizer.eos_token_ids == {4, 5}
    assert tokenizer.bos_token == "<s>"
    (directory / "generation_config.json").unlink()
    assert TextTokenizer.from_directory(directory).eos_token_ids == {3, 4}


def test_bos_follows_the_post_processor_unless_the_config_decides(directory: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 3)])
    backend.save(str(directory / "tokenizer.json"))
    rewrite(directory / "special_tokens_map.json", bos_token="<s>")
    tokenizer = TextTokenizer.from_directory(directory)
    assert tokenizer.add_bos
    assert tokenizer.encode("a") == [0]  # encode itself adds nothing
    rewrite(directory / "tokenizer_config.json", add_bos_token=False)
    assert not TextTokenizer.from_directory(directory).add_bos


def test_truncation_padding_and_dropout_in_the_file_change_nothing(directory: Path) -> None:
    file = directory / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    backend.save(str(file))
    model = json.loads(file.read_text("utf-8"))["model"]
    rewrite(file, model=model | {"dropout": 1.0})
    assert TextTokenizer.from_directory(directory).encode("abab" * 3) == [2] * 6


def test_a_control_token_that_the_file_forgot_to_mark_is_special(directory: Path) -> None:
    file = directory / "tokenizer.json"
    added = json.loads(file.read_text("utf-8"))["added_tokens"]
    rewrite(file, added_tokens=[token | {"special": False} for token in added])
    assert TextTokenizer.from_directory(directory).special_tokens == {"<|end|>": 5}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer_config.json", '{"chat_template": "one"}'),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "tool_use", "template": "two"},'
            ' {"name": "default", "template": "one"}]}',
        ),
        ("chat_template.jinja", "one"),
    ],
)
def test_the_chat_template_is_found(directory: Path, name: str, text: str) -> None:
    (directory / name).write_text(text)
    assert TextTokenizer.from_directory(directory).chat_template == "one"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("tokenizer.json", b"{", "tokenizer.json is not valid JSON"),
        ("tokenizer.json", b"[" * 100_000, "tokenizer.json is not valid JSON"),
        ("tokenizer.json", b"[]", "tokenizer.json must hold a JSON object. Got list"),
        ("tokenizer.json", b"{}", "tokenizer.json is not a usable tokenizer"),
        ("tokenizer_config.json", b"\xff", "tokenizer_config.json is not UTF-8"),
        ("tokenizer_config.json", b'{"chat_template": 1}', "`chat_template` must be text. Got 1"),
        ("generation_config.json", b'{"eos_token_id": "x"}', "generation_config.json.*Got 'x'"),
    ],
)
def test_a_damaged_file_is_named(directory: Path, name: str, data: bytes, message: str) -> None:
    (directory / name).write_bytes(data)
    with pytest.raises(ModelFormatError, match=message):
        TextTokenizer.from_directory(directory)


def test_a_missing_or_huge_file_is_named(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelFormatError, match=r"none.tokenizer\.json is missing"):
        TextTokenizer.from_directory(tmp_path / "none")
    monkeypatch.setattr(tokenizer_module, "MAX_FILE_BYTES", 10)
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json must be at most 10 bytes"):
        TextTokenizer.from_directory(directory)


# ------------------------------------------------------------------------------- other decoders


@given(st.text("ab é日\U0001f600", max_size=12))
def test_byte_fallback_round_trip_drops_the_added_space(text: str) -> None:
    tokenizer = TextTokenizer(byte_fallback_backend())
    assert (tokenizer.is_bytewise, tokenizer.dropped_prefix) == (True, " ")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_byte_tokens_and_spaces_have_their_bytes() -> None:
    tokenizer = TextTokenizer(byte_fallback_backend())
    assert tokenizer.token_bytes(2 + 0xE2) == b"\xe2"
    assert tokenizer.token_bytes(261) == b" a"


def test_a_decoder_that_is_not_bytewise_is_the_librarys() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = TextTokenizer(backend)
    assert not tokenizer.is_bytewise
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"


def test_an_own_tokenizer_writes_three_members() -> None:
    class Letters(Tokenizer):
        @property
        def vocab_size(self) -> int:
            return 26

        def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
            return [ord(letter) - 97 for letter in text]

        def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
            return "".join(chr(97 + i) for i in ids)

    tokenizer = Letters()
    assert (tokenizer.token_text(1), tokenizer.token_bytes(1)) == ("b", b"b")
    assert (tokenizer.special_ids, tokenizer.eos_token_ids) == (frozenset(), frozenset())
    assert encode_prompt(tokenizer, "ab") == [0, 1]
