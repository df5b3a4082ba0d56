"""Lines of the input: what one may hold, and why it is refused.

Owns the bytes: bounds, encoding, JSON in its strict form, and the forms that a line comes in. Knows
nothing of the parameters in a body, nor of what becomes of a line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, NoReturn

from pagedjax.errors import RequestError
from pagedjax.openai_api import Endpoint

MAX_LINE_BYTES = 16 * 2**20
MAX_DEPTH = 64  # of nested lists and objects in a line

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

# What JSON calls the values that a line may hold instead of an object.
_KINDS = {
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}

type Json = dict[str, Any]


def read_lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines of a file; one that is too long is cut, so that memory stays bounded."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield line
        while not line.endswith(b"\n") and (line := file.readline(MAX_LINE_BYTES)):
            pass


def parse_json(raw: bytes) -> Json:
    """The object that a line holds.

    Raises:
      RequestError: it is no JSON object, or one that readers of JSON disagree about.
    """
    if len(raw) - raw.endswith(b"\n") > MAX_LINE_BYTES:
        refuse(f"a line must have at most {MAX_LINE_BYTES} bytes. Got more.", "line_too_long")
    document = _loads(raw)
    if not isinstance(document, dict):
        got = _KINDS[type(document)]
        refuse(f"a line must be a JSON object. Got {got}.", "invalid_json")
    _check_depth(document)
    if _SURROGATE.search(raw) and _has_lone_surrogate(document):
        refuse("a line must be valid Unicode. Got half of a surrogate pair.", "invalid_json")
    return document


def split_line(document: Json) -> tuple[Endpoint, Any]:
    """Endpoint and body of a line, in OpenAI's form or in one of the short ones."""
    full = [name for name in ("method", "url", "body") if name in document]
    if not full:
        body = {name: value for name, value in document.items() if name != "custom_id"}
        kinds = [name for name in ("prompt", "messages") if body.get(name) is not None]
        if len(kinds) != 1:
            got = " and ".join(f"`{name}`" for name in kinds) or "none of them"
            refuse(
                f"a line must have `method`, `url` and `body`, or `prompt`, or `messages`. "
                f"Got {got}."
            )
        return (Endpoint.CHAT if kinds == ["messages"] else Endpoint.COMPLETIONS), body
    for name in document:
        if name not in ("custom_id", "method", "url", "body"):
            shown = name if len(name) <= 64 else name[:61] + "..."
            refuse(
                f"`{shown}` is not a field of a batch request; parameters go into `body`.",
                "unknown_parameter",
                shown,
            )
    if document.get("method") != "POST":
        refuse('`method` must be "POST".', param="method")
    urls = [endpoint.value for endpoint in Endpoint]
    if document.get("url") not in urls:
        refuse(f"`url` must be {' or '.join(urls)}.", "invalid_url", "url")
    return Endpoint(document["url"]), document.get("body")


def refuse(message: str, code: str = "invalid_value", param: str | None = None) -> NoReturn:
    """Raises the error that answers this line."""
    raise RequestError(message, param=param, code=code)


def _loads(raw: bytes) -> Any:
    try:
        text = raw.decode("utf-8").strip()
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except RequestError:
        raise
    except UnicodeDecodeError as error:
        where = f"Byte {error.start + 1} is 0x{raw[error.start]:02x}"
        refuse(f"a line must be UTF-8 text. {where}.", "invalid_json")
    except json.JSONDecodeError as error:
        what = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
        refuse(f"a line must be one JSON object. Got {what}.", "invalid_json")
    except RecursionError:
        _refuse_depth()
    except ValueError:  # Python's own bound on the digits of an integer
        refuse("a number must have fewer digits. Got thousands.", "invalid_json")


def _refuse_constant(name: str) -> NoReturn:
    refuse(f"a line must be JSON, which has no {name}.", "invalid_json")


def _refuse_depth() -> NoReturn:
    refuse(
        f"a line must not nest lists and objects deeper than {MAX_DEPTH}. Got more.",
        "invalid_json",
    )


def _object(pairs: list[tuple[str, Any]]) -> Json:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)[:64]
        refuse(f"`{twice}` must be given once. Got it twice.", "invalid_json", twice)
    return found


def _check_depth(document: Json) -> None:
    level: list[Any] = [document]
    for _ in range(MAX_DEPTH):
        items = (i for c in level for i in (c.values() if isinstance(c, dict) else c))
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return
    _refuse_depth()


def _has_lone_surrogate(document: Json) -> bool:
    try:
        json.dumps(document, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False
