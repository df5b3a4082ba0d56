"""Text to token ids and back: the interface a user may replace, and ours over `tokenizers`.

Owns how a model's own files (a tokenizer.json, or a GGUF file's metadata) become a tokenizer, what
counts as a special token, and the bytes that each token stands for. Knows nothing of requests,
chat messages or devices, and reads no GGUF file itself: it gets the metadata as a mapping.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast, runtime_checkable

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from pagedjax.errors import ModelFormatError, RequestError

MAX_FILE_BYTES = 256 * 2**20  # the largest published tokenizer.json is under 40 MiB


@runtime_checkable
class Tokenizer(Protocol):
    """What the engine asks of a tokenizer. Subclass it: only the first three must be written.

    Attributes:
      eos_token_ids: ids that end a sequence unless the request ignores them.
      bos_token_id: id that begins a text, or None.
      add_bos: a completion's prompt begins with bos_token_id (see `encode_prompt`).
      special_tokens: text -> id of the control tokens; a chat message's content cannot forge them.
      chat_template: the model's own Jinja source, or None.
      is_bytewise: decode(ids) is the UTF-8 reading, with U+FFFD for invalid bytes, of all
        `token_bytes` joined, less `dropped_prefix`. Streaming is exact and cheapest then.
      dropped_prefix: what decode removes once from the very start of the text.
    """

    eos_token_ids: frozenset[int] = frozenset()
    bos_token_id: int | None = None
    add_bos: bool = False
    special_tokens: Mapping[str, int] = MappingProxyType({})
    chat_template: str | None = None
    is_bytewise: bool = False
    dropped_prefix: str = ""

    @property
    def vocab_size(self) -> int:
        """Number of token ids: every id is in [0, vocab_size)."""
        ...

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Ids of a text, nothing added; False: special tokens in it are ordinary text."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; an id outside the vocabulary raises `RequestError`."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""
        return frozenset(self.special_tokens.values())

    def token_text(self, token_id: int) -> str:
        """One token for display; empty where an id has no text."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, maybe a part of a character."""
        return self.token_text(token_id).encode()


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a completion's prompt: special tokens recognised, a bos before it if it wants one."""
    ids = tokenizer.encode(text)
    bos = tokenizer.bos_token_id
    if tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
        return [bos, *ids]
    return ids


class TextTokenizer(Tokenizer):
    """A model's own tokenizer, run by the `tokenizers` library. Safe to share between threads.

    Ids are decoded here and not by the library where its decoder is a byte-level or a byte-fallback
    one: only so can text be streamed that never changes afterwards.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Sequence[int] = (),
        bos_token_id: int | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
        vocab_size: int | None = None,
    ):
        """Takes the library's tokenizer over: truncation and padding are switched off in it."""
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._literal: tokenizers.Tokenizer | None = None  # knows no special tokens; made when used
        self._literal_lock = threading.Lock()
        self._added = {id_: token.content for id_, token in added.items()}
        self._byte_level, self._byte_fallback, self.dropped_prefix = _decoder_kind(backend)
        self.is_bytewise = self._byte_level or self._byte_fallback
        self._vocab_size = vocab_size or max(backend.get_vocab().values(), default=-1) + 1
        self._bytes: list[bytes | None] = [None] * self._vocab_size  # filled when first used
        self.special_tokens = {t.content: i for i, t in added.items() if t.special}
        self._special_ids = frozenset(self.special_tokens.values())
        self.eos_token_ids = frozenset(eos_token_ids)
        self.bos_token_id = bos_token_id
        self.add_bos = add_bos and bos_token_id is not None
        self.chat_template = chat_template

    @staticmethod
    def from_directory(path: str | Path) -> TextTokenizer:
        """Reads tokenizer.json and what stands beside it (all of that is optional)."""
        return _from_directory(Path(path))

    @staticmethod
    def from_gguf(metadata: Mapping[str, object]) -> TextTokenizer:
        """Builds the tokenizer that a GGUF file's `tokenizer.*` keys describe."""
        return _from_gguf(metadata)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._vocab_size

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the control tokens."""
        return self._special_ids

    @property
    def bos_token(self) -> str:
        """Text of the bos token; empty when there is none."""
        return "" if self.bos_token_id is None else self.token_text(self.bos_token_id)

    @property
    def eos_token(self) -> str:
        """Text of the eos token (of the highest id, if there are several); may be empty."""
        return self.token_text(max(self.eos_token_ids)) if self.eos_token_ids else ""

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Ids of a text; lone surrogates raise `RequestError`, for no bytes stand for them."""
        _check_text(text)
        if special_tokens:
            return self._backend.encode(text, add_special_tokens=False).ids
        return self._encode_literally(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; invalid UTF-8 becomes U+FFFD."""
        for token_id in ids:
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"Token ids must be in [0, {self._vocab_size}). Got {token_id}.",
                    param="token_ids",
                )
        if not self.is_bytewise:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        skipped = self._special_ids if skip_special_tokens else frozenset[int]()
        data = b"".join(self.token_bytes(i) for i in ids if i not in skipped)
        return data.decode("utf-8", "replace").removeprefix(self.dropped_prefix)

    def token_text(self, token_id: int) -> str:
        """One token for display; U+FFFD where it is a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; empty for an id that no token has (a model's padding rows)."""
        if not 0 <= token_id < self._vocab_size:
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def _find_bytes(self, token_id: int) -> bytes:
        text = self._added.get(token_id)
        if text is not None:
            return (text.replace("\u2581", " ") if self._byte_fallback else text).encode()
        text = self._backend.id_to_token(token_id) or ""
        if self._byte_level:
            return _byte_level_bytes(text)
        if self._byte_fallback:
            return _fallback_bytes(text)
        return text.encode()

    def _encode_literally(self, text: str) -> list[int]:
        encoding = self._without_special_tokens().encode(text, add_special_tokens=False)
        ids = encoding.ids
        if self._special_ids.isdisjoint(ids):
            return ids
        # The merges themselves spell a special token: the text is broken inside it.
        safe: list[int] = []
        for token_id, (start, end) in zip(ids, encoding.offsets, strict=True):
            if token_id not in self._special_ids:
                safe.append(token_id)
            elif end - start > 1:
                safe += self._encode_literally(text[start : start + 1])
                safe += self._encode_literally(text[start + 1 : end])
            else:
                raise RequestError(
                    f"The text must not hold {text[start:end]!r} here: this model's vocabulary has "
                    "no ordinary token for it.",
                )
        return safe

    def _without_special_tokens(self) -> tokenizers.Tokenizer:
        with self._literal_lock:
            if self._literal is None:
                # A copy, for the switch is the object's and other threads are encoding with it.
                literal = tokenizers.Tokenizer.from_str(self._backend.to_str())
                literal.encode_special_tokens = True
                self._literal = literal
            return self._literal


# ------------------------------------------------------------------------------------ from files


def _from_directory(path: Path) -> TextTokenizer:
    spec = _read_json(path / "tokenizer.json")
    if spec is None:
        raise ModelFormatError(f"{path / 'tokenizer.json'} is missing: it holds the tokenizer.")
    config = _read_json(path / "tokenizer_config.json") or {}
    names = {**(_read_json(path / "special_tokens_map.json") or {}), **config}
    backend = _backend_of(spec, path / "tokenizer.json")
    bos = backend.token_to_id(_content(names.get("bos_token")))
    add_bos = config.get("add_bos_token")
    if not isinstance(add_bos, bool):  # then the post-processor decides, as in Hugging Face's
        add_bos = bos is not None and backend.encode("").ids[:1] == [bos]
    return TextTokenizer(
        backend,
        eos_token_ids=_eos_of(path, backend, _content(names.get("eos_token"))),
        bos_token_id=bos,
        add_bos=add_bos,
        chat_template=_template_of(path, config),
    )


def _backend_of(spec: dict[str, Any], path: Path) -> tokenizers.Tokenizer:
    # Dropout would make the same text other tokens each time.
    if isinstance(spec.get("model"), dict):
        spec["model"]["dropout"] = None
    for token in spec.get("added_tokens") or ():
        if isinstance(token, dict) and _looks_special(str(token.get("content"))):
            token["special"] = True
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # the library raises plain Exception
        raise ModelFormatError(f"{path} is not a usable tokenizer: {error}.") from error


def _looks_special(content: str) -> bool:
    """Some published files forget to mark `<|im_start|>` and its kind as special."""
    ends = (content[:2], content[-2:])
    return len(content) > 4 and ends in {("<|", "|>"), ("<\uff5c", "\uff5c>")}


def _eos_of(path: Path, backend: tokenizers.Tokenizer, eos_token: str) -> list[int]:
    ids = [backend.token_to_id(eos_token)]
    for name in ("generation_config.json", "config.json"):
        value = (_read_json(path / name) or {}).get("eos_token_id")
        if value is not None:
            listed = value if isinstance(value, list) else [value]
            if not all(isinstance(i, int) and not isinstance(i, bool) for i in listed):
                raise ModelFormatError(
                    f"{path / name}: `eos_token_id` must be an id or a list of ids. Got {value!r}."
                )
            ids += listed
            break
    return [i for i in ids if i is not None]


def _template_of(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return _read_text(file)
    source = config.get("chat_template")
    if isinstance(source, list):  # several named ones
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = named.get("default")
    if source is not None and not isinstance(source, str):
        raise ModelFormatError(
            f"{path / 'tokenizer_config.json'}: `chat_template` must be text. Got {source!r:.80}."
        )
    return source


def _content(token: object) -> str:
    """A token's text, written as a string or as an object with a `content`."""
    if isinstance(token, dict):
        token = cast("dict[str, object]", token).get("content")
    return token if isinstance(token, str) else ""


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path} must hold a JSON object. Got {type(value).__name__}.")
    return value


def _read_text(path: Path) -> str:
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ModelFormatError(f"{path} must be at most {MAX_FILE_BYTES} bytes. Got {size}.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{path} is not UTF-8 text: {error}.") from error


# ------------------------------------------------------------------------------------- from GGUF

# A GGUF file carries no pre-tokeniser, only the name of one. Published with each model family.
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2_WORDS,),
    "smollm": (r"\p{N}", _GPT2_WORDS),  # digits one by one, before anything else
    "llama-bpe": (_CASELESS_WORDS % r"\p{N}{1,3}",),
    "llama3": (_CASELESS_WORDS % r"\p{N}{1,3}",),
    "qwen2": (_CASELESS_WORDS % r"\p{N}",),
}
_LLAMA3 = ("llama-bpe", "llama3")  # whole words before merges; a bos unless the file says no
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type


def _from_gguf(metadata: Mapping[str, object]) -> TextTokenizer:
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelFormatError(
            "`tokenizer.ggml.model` must be 'gpt2' (byte-level BPE), the only kind that is read "
            f"from a GGUF file. Got {model!r}. A directory with the model's tokenizer.json works."
        )
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _SPLITS:
        raise ModelFormatError(
            f"`tokenizer.ggml.pre` must be one of {', '.join(_SPLITS)}. Got {pre!r}: another way "
            "of splitting words would give wrong token ids in silence."
        )
    pre = str(pre)
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", pre in _LLAMA3)
    template = metadata.get("tokenizer.chat_template")
    ids = [_token_id(metadata, name, len(tokens)) for name in ("eos", "eot", "eom")]
    return TextTokenizer(
        _gguf_backend(metadata, tokens, pre),
        eos_token_ids=[i for i in ids if i is not None],
        bos_token_id=_token_id(metadata, "bos", len(tokens)),
        add_bos=bool(add_bos),
        chat_template=template if isinstance(template, str) else None,
        vocab_size=len(tokens),
    )


def _gguf_backend(
    metadata: Mapping[str, object], tokens: Sequence[str], pre: str
) -> tokenizers.Tokenizer:
    vocab: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        vocab.setdefault(token, token_id)
    merges: list[tuple[str, str]] = []
    for merge in _strings(metadata, "tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    try:
        model = models.BPE(vocab, merges, ignore_merges=pre in _LLAMA3)
        backend = tokenizers.Tokenizer(model)
    except Exception as error:  # the library raises plain Exception
        raise ModelFormatError(
            f"`tokenizer.ggml.merges` does not fit the vocabulary: {error}."
        ) from error
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(tokenizers.Regex(s), "isolated") for s in _SPLITS[pre]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, tokens, _token_types(metadata, len(tokens)))
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    added: list[tokenizers.AddedToken] = []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token:
            special = kind != _USER_DEFINED or _looks_special(token)
            added.append(tokenizers.AddedToken(token, normalized=False, special=special))
    backend.add_tokens(added)


def _strings(metadata: Mapping[str, object], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
        raise ModelFormatError(f"`{key}` must be an array of strings. Got {value!r:.80}.")
    return list(value)


def _token_types(metadata: Mapping[str, object], num_tokens: int) -> list[int]:
    value: Any = metadata.get("tokenizer.ggml.token_type")
    if value is None:
        return [1] * num_tokens
    if len(value) != num_tokens:
        raise ModelFormatError(
            f"`tokenizer.ggml.token_type` must have {num_tokens} entries. Got {len(value)}."
        )
    return [int(kind) for kind in value]


def _token_id(metadata: Mapping[str, object], name: str, num_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value: Any = metadata.get(key)
    if value is None:
        return None
    if not 0 <= int(value) < num_tokens:
        raise ModelFormatError(f"`{key}` must be in [0, {num_tokens}). Got {value}.")
    return int(value)


# ----------------------------------------------------------------------------------------- bytes


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character; this is the way back."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(rest)}


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(text: str) -> bytes:
    try:
        return bytes([_BYTE_OF[c] for c in text])
    except KeyError:  # not written in the alphabet: it stands for itself
        return text.encode()


def _fallback_bytes(text: str) -> bytes:
    if re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
        return bytes.fromhex(text[3:5])
    return text.replace("\u2581", " ").encode()


def _decoder_kind(backend: tokenizers.Tokenizer) -> tuple[bool, bool, str]:
    """(byte-level?, byte-fallback?, prefix dropped from the text); neither: the library decodes."""
    decoder: Any = backend.decoder
    if decoder is None:
        return False, False, ""
    spec = json.loads(decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return True, False, ""
    space = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0] == space:
        if not steps[3:]:
            return False, True, ""
        if steps[3:] == [strip]:
            return False, True, " "
    return False, False, ""


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise RequestError(f"The text must be a string. Got {text!r:.80}.", param="prompt")
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            "The text must be valid Unicode. Got the lone surrogate "
            f"U+{ord(text[error.start]):04X} at character {error.start}.",
            param="prompt",
        ) from error
