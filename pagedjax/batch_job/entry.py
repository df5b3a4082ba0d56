"""A line of the input as a request of its own: who it is, and the text that answers it.

Owns identity and the form of answer lines. Knows nothing of engines, order or files: whoever
computes an answer, here or on another machine, writes the same bytes.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass, field
from typing import Any, Protocol

from pagedjax.batch_job.ids import CustomIds, id_key, number_key
from pagedjax.batch_job.lines import parse_json
from pagedjax.errors import RequestError
from pagedjax.openai_api import ApiRequest, error_body
from pagedjax.request import RequestOutput

INTERNAL_ERROR = "internal error while handling this line; the log has more"

# Breaks a line for some reader, or cannot be written as UTF-8: then the line is written in ASCII.
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")

logger = logging.getLogger("pagedjax")

type Json = dict[str, Any]


@dataclass(slots=True, eq=False)
class Line:
    """One request of the input, as far as it could be read."""

    number: int  # 1-based, blank lines counted
    custom_id: str | None = None
    key: str = field(init=False)  # what ids and draws depend on: the custom_id, where there is one
    request: ApiRequest | None = None
    outputs: list[RequestOutput | None] = field(default_factory=list[RequestOutput | None])

    def __post_init__(self) -> None:
        """A line without an id is known by its number."""
        self.key = number_key(self.number) if self.custom_id is None else id_key(self.custom_id)

    def identify(self, custom_id: str) -> None:
        """Takes the id, on which the key depends from now on."""
        self.custom_id = custom_id
        self.key = id_key(custom_id)


class Counts(Protocol):
    """What answers are counted in."""

    answered: int
    failed: int
    prompt_tokens: int
    output_tokens: int


def without_mark(raw: bytes) -> bytes:
    """Without the byte order mark that some editors begin a file with."""
    return raw.removeprefix(b"\xef\xbb\xbf")


def read_line(
    number: int, raw: bytes, ids: CustomIds
) -> tuple[Line, Json, Exception | None] | None:
    """A line's identity and document, and what stops it already; None for a blank one."""
    raw = without_mark(raw)
    if not raw.strip():
        return None
    line = Line(number)
    try:
        document = parse_json(raw)
        line.identify(ids.take(number, document))
        return line, document, None
    except Exception as error:
        return line, {}, error


def answer_text(line: Line, status: int, body: Json, error: Json | None) -> str:
    """The output line, with its line break."""
    response = {"status_code": status, "request_id": f"req_{line.key}", "body": body}
    return _dump({
        "id": f"batch_req_{line.key}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    })  # fmt: skip


def error_text(line: Line, status: int, message: str, code: str, param: str | None = None) -> str:
    """The output line of a request that failed."""
    kind = "invalid_request_error" if status == 400 else "server_error"
    body = error_body(message, param=param, code=code, kind=kind)
    error = {"code": code, "message": f"line {line.number}: {message}"}
    return answer_text(line, status, body, error)


def failure_text(line: Line, error: Exception) -> str:
    """The output line of a request that could not even be read."""
    if isinstance(error, RequestError):
        return error_text(line, 400, str(error), error.code, error.param)
    logger.error("line %d failed", line.number, exc_info=error)
    return error_text(line, 500, INTERNAL_ERROR, "internal_error")


def count_answer(counts: Counts, document: Json) -> None:
    """Counts an output line, parsed."""
    if document.get("error") is not None:
        counts.failed += 1
        return
    usage = document["response"]["body"].get("usage", {})
    counts.answered += 1
    counts.prompt_tokens += usage.get("prompt_tokens", 0)
    counts.output_tokens += usage.get("completion_tokens", 0)


def _dump(document: Json) -> str:
    text = json.dumps(document, ensure_ascii=False, allow_nan=False)
    if _UNSAFE.search(text):
        text = json.dumps(document, allow_nan=False)
    return text + "\n"
