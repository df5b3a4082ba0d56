"""Chat messages to a prompt: a model's own Jinja template, run in a sandbox, without forged turns.

Owns the check of messages, the bounds of rendering and which special tokens are the template's.
Knows nothing of requests and takes any tokenizer that has `encode` and `special_tokens`.

What is bounded: the template's size, all loops and writes by one deadline, `range`, the output's
length, and the size of what `+`, `*`, `**`, `~` and captured sections make. What is not: a single
filter or method call, which runs to its end, so that a template made to do harm can still waste
time or memory (`"".ljust(10**9)`). Templates are the model's, messages are the users': nothing
in a message is ever run.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, NoReturn, Protocol, cast

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from pagedjax.errors import ModelFormatError, RequestError

MAX_TEMPLATE_CHARS = 256 * 1024  # published ones are below 30,000
MAX_RENDER_SECONDS = 2.0
OUTPUT_PER_INPUT = 4  # output <= 4 x input + the allowance
OUTPUT_ALLOWANCE = 64 * 1024
MAX_NESTING = 64  # of lists and objects in messages, tools and template arguments
ROLES = ("system", "user", "assistant", "tool")
MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
_BUDGET = "render budget"  # with a space: no template can name it
_OWN_NAMES = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
_OWN_NAMES |= {"raise_exception", "strftime_now"}

type Messages = Sequence[Mapping[str, Any]]
type Tools = Sequence[Mapping[str, Any]] | None


class ChatEncoder(Protocol):
    """What `encode_chat` asks of a tokenizer; its `special_tokens`, if any, cannot be forged."""

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Ids of a text; False: special tokens in it are ordinary text."""
        ...


class ChatTemplate:
    """A compiled template; safe to share between threads.

    Args:
      source: Jinja source as Hugging Face models carry it; too long or not Jinja raises
        `ModelFormatError`.
      bos_token, eos_token: texts that the template may write; None writes nothing.
      now: the clock behind the template's `strftime_now`.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        now: Callable[[], datetime] = datetime.now,
    ):
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelFormatError(
                f"The chat template must be at most {MAX_TEMPLATE_CHARS} characters. "
                f"Got {len(source)}."
            )
        environment = _Environment()
        try:
            tree = environment.parse(source)
            self._options = meta.find_undeclared_variables(tree) - _OWN_NAMES
            bounded = _BoundLoops().visit(tree)
            code = environment.compile(bounded)
            self._template = jinja2.Template.from_code(environment, code, environment.globals)
        except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            raise ModelFormatError(f"The chat template cannot be compiled: {error}.") from error
        self._constants = {
            "bos_token": bos_token or "",
            "eos_token": eos_token or "",
            "raise_exception": _refuse,
            "strftime_now": lambda form: now().strftime(form),
        }

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Tools = None,
        **options: Any,
    ) -> str:
        """The prompt's text; `options` are other names that this template reads."""
        return self._render(self._inputs(messages, add_generation_prompt, tools, options))

    def _inputs(
        self, messages: Messages, prompted: bool, tools: Tools, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        for name in options:
            if name not in self._options:
                known = ", ".join(sorted(self._options)) or "none"
                raise RequestError(
                    f"`{name}` is not an option of this model's chat template. Options: {known}.",
                    param=name,
                    code="unknown_parameter",
                )
        return {
            "messages": check_messages(messages),
            "tools": _checked_tools(tools),
            "add_generation_prompt": prompted,
            **{name: _map_strings(value, _check_unicode, name) for name, value in options.items()},
        }

    def _render(self, inputs: Mapping[str, Any]) -> str:
        budget = _Budget(_count_chars(inputs))
        values = {**self._constants, **inputs, _BUDGET: budget}
        pieces: list[str] = []
        try:
            for piece in self._template.generate(values):
                budget.spend(len(piece))
                pieces.append(piece)
        except RequestError:
            raise
        except _TemplateRefusal as error:
            raise RequestError(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from error
        except Exception as error:  # a template can raise anything
            why = f"{type(error).__name__}: {error}"
            raise RequestError(
                f"The model's chat template failed on these messages: {why}", param="messages"
            ) from error
        return "".join(pieces)


def encode_chat(
    tokenizer: ChatEncoder,
    template: ChatTemplate | None,
    messages: Messages,
    *,
    add_generation_prompt: bool = True,
    tools: Tools = None,
    **options: Any,
) -> list[int]:
    """Token ids of a chat: the template's special tokens are recognised, a message's are not.

    What a user's strings spell, alone or with the text beside them, is encoded as ordinary text.
    """
    if template is None:
        why = "This model has no chat template. Give one (`chat_template`), or send a `prompt`."
        raise RequestError(why, param="messages")
    inputs = template._inputs(messages, add_generation_prompt, tools, options)
    guard = _Guard(getattr(tokenizer, "special_tokens", ()))
    marked = {name: _map_strings(value, guard.mark, name) for name, value in inputs.items()}
    for message, original in zip(marked["messages"], inputs["messages"], strict=True):
        message["role"] = original["role"]  # one of ours: nothing to guard, and templates compare
    return guard.encode(tokenizer, template._render(marked))


def check_messages(messages: Messages) -> list[dict[str, Any]]:
    """Copies of the messages as templates want them: text parts joined, arguments as objects."""
    if not isinstance(messages, list | tuple) or not messages:
        raise _bad("messages", "a list of at least one message", messages)
    return [_checked_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


# ------------------------------------------------------------------------------- forged turns


class _Guard:
    """Marks special tokens in users' strings, and encodes what a template made of them.

    A mark is a random number, so that no user can write it, and digits survive what templates do
    to strings (trim, upper, tojson). Inside a token's text it hides the token from the search for
    the template's own; it is taken out again before anything is encoded. Not covered: a template
    that cuts something out of the middle of a content, and so makes a token of its two sides.
    """

    def __init__(self, special_tokens: Iterable[str]):
        self._tokens = [token for token in special_tokens if token]
        folded = [token.casefold() for token in self._tokens]
        self._starts = {token[:k] for token in folded for k in range(1, len(token))}
        self._ends = {token[-k:] for token in folded for k in range(1, len(token))}
        self._longest = max(map(len, self._tokens), default=0)
        secret = secrets.randbelow(10**39)
        self._inside = f"0{secret:039d}0"
        self._after = f"1{secret:039d}1"  # after a token of one character: it has no inside

    def mark(self, text: str, _: str = "") -> str:
        """The text, marked in all special tokens (in any case) and in parts of one at its ends."""
        marks: dict[int, str] = {}
        present = self._present(text, fold=str.casefold)
        if present:  # a lookahead finds overlapping tokens too: each of them is broken
            for match in re.finditer(f"(?=({present}))", text, re.IGNORECASE):
                single = len(match[1]) == 1
                marks[match.start() + 1] = self._after if single else self._inside
        for k in range(1, min(self._longest, len(text) + 1)):
            if text[:k].casefold() in self._ends:
                marks.setdefault(k - 1, self._inside)
            if text[-k:].casefold() in self._starts:
                marks.setdefault(len(text) - k + 1, self._inside)
        return _insert(text, marks) if marks else text

    def encode(self, tokenizer: ChatEncoder, rendered: str) -> list[int]:
        """Ids of rendered text: the special tokens in it that hold no mark are the template's."""
        clean = self._clean(rendered)
        present = self._present(clean)
        if not present:
            return tokenizer.encode(clean)
        parts: list[tuple[str, str]] = []  # (ordinary text, the template's special token after it)
        places: list[int] = []  # where those tokens begin in the clean text
        start = position = 0
        for match in re.finditer(f"(?:{present})(?!{self._after})", rendered):
            parts.append((self._clean(rendered[start : match.start()]), match[0]))
            places.append(position + len(parts[-1][0]))
            position = places[-1] + len(match[0])
            start = match.end()
        if places == [match.start() for match in re.finditer(present, clean)]:
            return tokenizer.encode(clean)  # nothing is forged
        ids: list[int] = []
        for text, token in (*parts, (self._clean(rendered[start:]), "")):
            ids += tokenizer.encode(text, special_tokens=False)
            ids += tokenizer.encode(token)
        return ids

    def _present(self, text: str, fold: Callable[[str], str] = str) -> str:
        """A pattern of the special tokens in the text, longest first; empty when there is none."""
        folded = fold(text)
        found = [token for token in self._tokens if fold(token) in folded]
        return "|".join(map(re.escape, sorted(found, key=len, reverse=True)))

    def _clean(self, text: str) -> str:
        return text.replace(self._inside, "").replace(self._after, "")


def _insert(text: str, marks: Mapping[int, str]) -> str:
    cuts = sorted({0, *marks, len(text)})
    return marks.get(0, "") + "".join(text[i:j] + marks.get(j, "") for i, j in pairwise(cuts))


# ------------------------------------------------------------------------------------ messages


def _checked_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _bad(where, "an object with `role` and `content`", message)
    role = message.get("role")
    if role not in ROLES:
        raise _bad(f"{where}.role", f"one of {', '.join(ROLES)}", role)
    checked: dict[str, Any] = {"role": role, "content": _checked_content(message, where)}
    for name, value in message.items():
        if name in checked or value is None:
            continue
        if name == "tool_calls":
            checked[name] = _checked_calls(value, f"{where}.{name}")
        elif name in MESSAGE_FIELDS:
            if not isinstance(value, str):
                raise _bad(f"{where}.{name}", "a string", value)
            checked[name] = _check_unicode(value, f"{where}.{name}")
        elif value not in ([], {}):  # clients send back all fields of an answer, most of them empty
            raise RequestError(
                f"`{where}` must have no field but {', '.join(MESSAGE_FIELDS)}. Got {name!r:.80}.",
                param=f"{where}.{name}",
                code="unknown_parameter",
            )
    return checked


def _checked_content(message: Mapping[Any, Any], where: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return _check_unicode(content, f"{where}.content")
    if content is None and message.get("role") == "assistant" and message.get("tool_calls"):
        return ""
    if not isinstance(content, list | tuple):
        raise _bad(f"{where}.content", "a string or a list of text parts", content)
    texts: list[str] = []
    for j, part in enumerate(content):
        place = f"{where}.content[{j}]"
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise _bad(place, 'a part {"type": "text", "text": ...}', part)
        if not isinstance(part.get("text"), str):
            raise _bad(f"{place}.text", "a string", part.get("text"))
        texts.append(_check_unicode(part["text"], f"{place}.text"))
    return "".join(texts)


def _checked_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise _bad(where, "a list of tool calls", calls)
    checked: list[dict[str, Any]] = []
    for j, call in enumerate(calls):
        place = f"{where}[{j}].function"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _bad(place, "an object with a `name`", function)
        arguments = function.get("arguments")
        if isinstance(arguments, str):  # OpenAI sends text, templates write an object
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise _bad(f"{place}.arguments", "a JSON object", arguments) from error
        if not isinstance(arguments, Mapping):
            raise _bad(f"{place}.arguments", "a JSON object", arguments)
        copied = {**call, "function": {**function, "arguments": arguments}}
        checked.append(_map_strings(copied, _check_unicode, f"{where}[{j}]"))
    return checked


def _checked_tools(tools: Any) -> list[Any] | None:
    listed = () if tools is None else tools
    if not isinstance(listed, list | tuple) or not all(isinstance(t, Mapping) for t in listed):
        raise _bad("tools", "a list of objects", tools)
    return _map_strings(listed, _check_unicode, "tools") or None


def _map_strings(value: Any, change: Callable[[str, str], str], where: str, depth: int = 0) -> Any:
    """A copy of JSON-like data with every string, keys too, put through `change(text, where)`."""
    if depth > MAX_NESTING:
        raise _bad(where, f"nested at most {MAX_NESTING} deep", "more")
    if isinstance(value, str):
        return change(value, where)
    if isinstance(value, Mapping):
        return {
            _map_key(str(k), change, where): _map_strings(v, change, where, depth + 1)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [_map_strings(v, change, where, depth + 1) for v in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise _bad(where, "made of JSON values only", value)


def _map_key(key: str, change: Callable[[str, str], str], where: str) -> str:
    # Templates look names up: `content` must stay so, even beside a special token "t>".
    return key if key.isidentifier() and key.isascii() else change(key, where)


def _check_unicode(text: str, where: str) -> str:
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = f"lone surrogate at character {error.start}"
        raise _bad(where, "valid Unicode", surrogate) from error
    return text


def _count_chars(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(_count_chars(k) + _count_chars(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_count_chars, value))
    return len(value) if isinstance(value, str) else 8  # as much as most numbers take


def _bad(where: str, wanted: str, got: object) -> RequestError:
    return RequestError(f"`{where}` must be {wanted}. Got {got!r:.80}.", param=where)


# ------------------------------------------------------------------------------------- sandbox


class _TemplateRefusal(jinja2.TemplateError):
    """The template itself called `raise_exception`."""


def _refuse(message: object) -> NoReturn:
    raise _TemplateRefusal(str(message))


class _Budget:
    """How much one rendering may still write and how long it may still take."""

    def __init__(self, num_input_chars: int):
        self._max_chars = OUTPUT_PER_INPUT * num_input_chars + OUTPUT_ALLOWANCE
        self._num_chars = 0
        self._deadline = time.monotonic() + MAX_RENDER_SECONDS

    def spend(self, num_chars: int) -> None:
        self._num_chars += num_chars
        self.check_size(self._num_chars)
        if time.monotonic() > self._deadline:
            raise RequestError(
                f"The chat template took longer than {MAX_RENDER_SECONDS:g} s for these messages.",
                param="messages",
            )

    def check_size(self, num_chars: int) -> None:
        if num_chars > self._max_chars:
            raise RequestError(
                f"The chat template must write at most {self._max_chars} characters for these "
                f"messages. Got {num_chars} or more.",
                param="messages",
            )


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it: Hugging Face's names and switches, bounded."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        # Optimised, constant filters would run while compiling, outside all bounds.
        extensions = ("jinja2.ext.loopcontrols", _GenerationTag)
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=extensions
        )
        self.filters["tojson"] = _to_json
        self.filters[_EACH] = _each
        self.filters[_SIZED] = _sized

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Looks at the operands before a product is made, and at the result of the rest."""
        budget: _Budget = context[_BUDGET]
        if operator == "*":
            if isinstance(left, int):
                left, right = right, left
            size = len(left) if hasattr(left, "__len__") else abs(left).bit_length() / 8
            budget.check_size(int(size * (right if hasattr(left, "__len__") else 1)))
        elif operator == "**" and not (abs(left) < 2**32 and abs(right) < 64):
            raise SecurityError("a power is too large")
        elif operator == "%" and isinstance(left, str):
            raise SecurityError("% on text is not available")  # "%999999999d" writes a gigabyte
        result = super().call_binop(context, operator, left, right)
        budget.check_size(len(result) if hasattr(result, "__len__") else 0)
        return result


_EACH = "each turn"  # filters with a space in the name: no template can name them
_SIZED = "sized"


class _BoundLoops(NodeTransformer):
    """Puts every loop's iterable, `~` and captured section of a template through a check."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(cast(nodes.Expr, node.iter), _EACH)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _SIZED)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = _filtered(node.filter, _SIZED)  # pyright: ignore[reportAttributeAccessIssue]
        return node


def _filtered(node: nodes.Expr | None, name: str) -> nodes.Filter:
    line = node.lineno if node is not None else 1
    return nodes.Filter(node, name, [], [], None, None, lineno=line)


@jinja2.pass_context
def _each(context: Context, iterable: Iterable[Any]) -> Iterator[Any]:
    budget: _Budget = context[_BUDGET]
    for item in iterable:
        budget.spend(0)
        yield item


@jinja2.pass_context
def _sized(context: Context, text: str) -> str:
    budget: _Budget = context[_BUDGET]
    budget.check_size(len(text))
    return text


class _GenerationTag(Extension):
    """`{% generation %}` marks what a model wrote, for training; here it only holds its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **how: Any) -> str:
    # Jinja's own would write <, > and & as escapes, which no model was trained on.
    if not how.keys() <= {"separators", "sort_keys"}:
        raise TypeError(f"tojson has no arguments {sorted(how)}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **how)
