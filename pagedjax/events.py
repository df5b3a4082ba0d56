"""The event log: what the scheduler was told and what it decided, as typed events in JSON lines.

Owns the events, their form on disk (`encode`, `decode`), the writer that never stops an engine
(`EventLog`) and the reader (`read_events`). Knows nothing of how decisions are made.

A log is one header and then, in the order in which things happened, *inputs* (`Added`, `Costs`,
`Result`, `Dropped`, `Called`, and `Step` or `Stalled` for a call of `schedule`) each followed by
the *decisions* that it led to (`Step` itself, `Restarted`, `Turned`, `Ended`): so it replays.
Sequences are named by their request's order of arrival, and their sample after a dot: "7", "7.2".
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from pagedjax.errors import ConfigError, EventLogError
from pagedjax.request import Request, SamplingParams

SCHEMA = 1  # of the log's form; a reader refuses any other
FLUSH_LINES, FLUSH_SECONDS = 512, 1.0  # so many lines, or so old, are written out

logger = logging.getLogger("pagedjax")


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first line: what wrote the log, and all that decisions depend on but the inputs."""

    schema: int
    version: str  # of pagedjax
    config: dict[str, Any]  # SchedulerConfig, field by field


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """A request was queued; `decode_request` makes it again."""

    request: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The rates that the next step weighs victims with, in seconds; said when they changed."""

    rates: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step was planned: what runs in it, and what became of pages.

    Attributes:
      step: counts planned steps from 1.
      gone: sequences that ran in the step before and do not run in this one.
      runs: [sequence, tokens] of those that run now and did not, or run more than one token. All
        others of the step before run again, one token each.
      admitted: [sequence, cached tokens, host pages] of those that left the queue. The host pages
        are by logical page, 0 where the device had it; empty when it had all of them.
      pages: [sequence, logical page, page ids]: what a page table has from there on.
      preempted: [sequence, mode, sequence that needed pages, pages it needed, pages free].
      copies: [sequence, source page, its own copy].
      swaps_out, swaps_in: [page, host page].
      evicted, host_evicted: pages and host pages whose cached content was given up.
      waiting: [head of the queue, reason, needed, free, reserved] when head or reason is new. For
        the reason "prefix" `needed` tokens are awaited, and the sequence that computes them is
        added.
      free, host_free: pages and host pages that could be allocated after it.
      digest: CRC-32 of the arrays that go to the device.
    """

    step: int
    gone: list[str] = field(default_factory=list[str])
    runs: list[list[Any]] = field(default_factory=list[list[Any]])
    admitted: list[list[Any]] = field(default_factory=list[list[Any]])
    pages: list[list[Any]] = field(default_factory=list[list[Any]])
    preempted: list[list[Any]] = field(default_factory=list[list[Any]])
    copies: list[list[Any]] = field(default_factory=list[list[Any]])
    swaps_out: list[list[int]] = field(default_factory=list[list[int]])
    swaps_in: list[list[int]] = field(default_factory=list[list[int]])
    evicted: list[int] = field(default_factory=list[int])
    host_evicted: list[int] = field(default_factory=list[int])
    waiting: list[Any] = field(default_factory=list[Any])
    free: int
    host_free: int = 0
    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    """`schedule` found nothing to run, and the head of the queue or its reason is new."""

    waiting: list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a step sampled.

    Attributes:
      tokens: of its rows, padding left out.
      corrupted: rows that held NaN.
      lost: host pages whose content is lost.
      candidates: [row, token ids, logprobs] of rows whose likeliest tokens decide something.
    """

    step: int
    tokens: list[int] = field(default_factory=list[int])
    corrupted: list[int] = field(default_factory=list[int])
    lost: list[int] = field(default_factory=list[int])
    candidates: list[list[Any]] = field(default_factory=list[list[Any]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """No result will come of a step; `arguments` are those of `Scheduler.drop`."""

    step: int
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """Another method of the scheduler was called, with these arguments."""

    method: str
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted:
    """A sequence lost its pages, and not because others needed them: it is computed again."""

    sequence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """Beams that go on from others: `moves` are [sequence, parent, whether it runs on the parent's
    pages]; where it does not, it waits to be computed again."""

    moves: list[list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A sequence ended: `reason` is a FinishReason's value, `tokens` what it had generated."""

    sequence: str
    reason: str
    tokens: int
    error: str | None = None


type Event = (
    Header | Added | Costs | Step | Stalled | Result | Dropped | Called | Restarted | Turned | Ended
)

KINDS: dict[str, type[Any]] = {
    kind.__name__.lower(): kind
    for kind in (
        Header,
        Added,
        Costs,
        Step,
        Stalled,
        Result,
        Dropped,
        Called,
        Restarted,
        Turned,
        Ended,
    )
}


class EventSink(Protocol):
    """What takes events as they happen."""

    def emit(self, event: Event) -> None:
        """Takes one; never raises because of where it goes to."""
        ...

    def flush(self) -> None:
        """Nothing happens for a while; as harmless as `emit`."""
        ...


class Logged(NamedTuple):
    """One line of a log."""

    line: int  # from 1
    seconds: float  # since the log was begun, for people only
    event: Any  # one of `Event`


# ------------------------------------------------------------------------------------ on the disk


def _default(item: Any) -> Any:
    return item.default_factory() if item.default_factory is not MISSING else item.default


_DEFAULTS = {
    kind: {item.name: _default(item) for item in fields(kind)} for kind in KINDS.values()
}  # MISSING: a field that must be there
_NAMES = {kind: name for name, kind in KINDS.items()}
_to_json = json.JSONEncoder(separators=(",", ":")).encode


def encode(event: Event, seconds: float | None = None) -> str:
    """One line, without its end; fields that say nothing are left out."""
    kind = type(event)
    document: dict[str, Any] = {"e": _NAMES[kind]}
    if seconds is not None:
        document["t"] = seconds
    for name, default in _DEFAULTS[kind].items():
        value = getattr(event, name)
        if value != default:
            document[name] = value
    return _to_json(document)


def decode(text: str | bytes) -> tuple[Event, float | None]:
    """An event and its time stamp; raises ValueError, saying what is wrong."""
    document: Any = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError("it must be an object")
    name, seconds = document.pop("e", None), document.pop("t", None)
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"{name!r} is no kind of event")
    defaults = _DEFAULTS[kind]
    unknown = document.keys() - defaults.keys()
    missing = [n for n, value in defaults.items() if value is MISSING and n not in document]
    if unknown or missing:
        raise ValueError(f"a {name} has no {sorted(unknown)}" if unknown else f"no {missing}")
    for item in fields(kind):
        if item.name in document and not _fits(document[item.name], str(item.type)):
            raise ValueError(f"`{item.name}` must be {item.type}")
    if seconds is not None and not isinstance(seconds, int | float):
        raise ValueError("`t` must be a number")
    return kind(**document), seconds


def _fits(value: Any, annotation: str) -> bool:
    """Whether a value is of the outer type of a field's annotation."""
    outer = annotation.removesuffix(" | None").split("[")[0]
    if value is None:
        return annotation.endswith("None")
    expected = {"int": int, "str": str, "list": list, "dict": dict}[outer]
    return isinstance(value, expected) and not isinstance(value, bool)


def encode_request(request: Request) -> dict[str, Any]:
    """What decisions need of a request, for `Added`.

    The text of the prompt is left out, and the cache salt, a secret, is replaced by its digest:
    equal ones stay equal.
    """
    document: dict[str, Any] = {}
    for item in fields(Request):
        value = getattr(request, item.name)
        if item.name == "params":
            document["params"] = _encode_params(value)
        elif item.name != "prompt" and value != _default(item):
            document[item.name] = sorted(value) if isinstance(value, frozenset) else value
    if request.cache_salt is not None:
        document["cache_salt"] = salt_digest(request.cache_salt)
    return document


def salt_digest(salt: str | None) -> str | None:
    """What stands for a cache salt in a log."""
    if salt is None:
        return None
    return hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def decode_request(document: Mapping[str, Any]) -> Request:
    """The request of an `Added`; raises ValueError or TypeError for what is none."""
    values = {name: _frozen(value) for name, value in document.items()}
    params = dict(document["params"])
    values["params"] = SamplingParams.from_dict(params)
    values["eos_token_ids"] = frozenset(values.get("eos_token_ids", ()))
    return Request(**values)


def _encode_params(params: SamplingParams) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for item in fields(SamplingParams):
        value = getattr(params, item.name)
        if value != _default(item):
            document[item.name] = dict(value) if isinstance(value, Mapping) else value
    return document


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


class EventLog:
    """Writes events to a file. A disk that fails ends the log, with one warning, and nothing else.

    Lines are kept back for at most a second, or until `flush` or the end of the process.
    """

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.monotonic):
        """Opens a file that only its owner may read: a log holds prompts, as token ids.

        What it holds stays until the first event comes.

        Raises:
          ConfigError: the file cannot be written.
        """
        self.path = str(path)
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(
                f"`event_log` must be a file that can be written. Got {self.path}: "
                f"{error.strerror}."
            ) from error
        self._clock = clock
        self._begun = self._flushed = clock()  # the header begins it anew
        self._stamp = -1.0
        self._lines: list[str] = []
        self._file: BinaryIO | None = os.fdopen(descriptor, "wb", buffering=0)
        # Not `__del__`: this also runs at the end of the process, and while modules still exist.
        self._finalizer = weakref.finalize(self, _close, self._file, self._lines)

    def emit(self, event: Event) -> None:
        """Takes an event."""
        if self._file is None:
            return
        if isinstance(event, Header):
            self._empty(self._file)
            self._begun = self._clock()
        now = self._clock()
        stamp: float | None = round(now - self._begun, 3)
        if stamp == self._stamp:  # the same instant as the line before
            stamp = None
        else:
            self._stamp = stamp
        self._lines.append(encode(event, stamp))
        if len(self._lines) >= FLUSH_LINES or now - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes what was kept back."""
        self._flushed = self._clock()
        if self._file is None or not self._lines:
            return
        try:
            _write(self._file, self._lines)
        except OSError as error:
            logger.warning(
                "the event log %s ends here: %s", self.path, error.strerror or str(error)
            )
            self._lines.clear()
            self.close()

    def _empty(self, file: BinaryIO) -> None:
        with contextlib.suppress(OSError):  # a pipe, which has nothing to empty
            file.truncate(0)

    def close(self) -> None:
        """Writes the rest; events that come later are ignored. May be called again."""
        if self._file is not None:
            self._file = None
            self._finalizer()


def _write(file: BinaryIO, lines: list[str]) -> None:
    """Empties `lines` into an unbuffered file, whole lines at once as far as the system does so."""
    rest = memoryview("".join(f"{line}\n" for line in lines).encode("ascii"))
    lines.clear()
    while rest:
        rest = rest[file.write(rest) or 0 :]


def _close(file: BinaryIO, lines: list[str]) -> None:
    try:
        if lines:
            _write(file, lines)
        file.close()
    except OSError as error:
        logger.warning("the end of an event log was lost: %s", error.strerror or str(error))


def read_events(path: str | Path) -> Iterator[Logged]:
    """The lines of a log, its `Header` first. A torn last line, of a killed process, is ignored.

    Raises:
      EventLogError: the file cannot be read, is no log, is of another schema, or a line of it is
        damaged.
    """
    try:
        with open(path, "rb") as file:
            yield from _read_lines(file, str(path))
    except OSError as error:
        raise EventLogError(f"cannot read the event log {path}: {error.strerror}.") from error


def _read_lines(file: BinaryIO, path: str) -> Iterator[Logged]:
    seconds, number = 0.0, 0
    for number, text in enumerate(file, 1):
        if number == 1:
            _check_header(text, path)
        try:
            event, stamp = decode(text)
        except (ValueError, RecursionError) as error:
            if not text.endswith(b"\n") and number > 1:
                return
            raise EventLogError(f"{path}, line {number} is damaged: {error}.") from error
        if number > 1 and isinstance(event, Header):
            raise EventLogError(f"{path}, line {number} is damaged: it is a second header.")
        seconds = seconds if stamp is None else stamp
        yield Logged(number, seconds, event)
    if number == 0:
        raise EventLogError(f"{path} must hold the header of an event log. Got an empty file.")


def _check_header(text: bytes, path: str) -> None:
    """Before the line is decoded: of another schema, its fields may be others too."""
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or document.get("e") != _NAMES[Header]:
        raise EventLogError(f"{path} must be an event log: its first line is no header of one.")
    if document.get("schema") != SCHEMA:
        raise EventLogError(
            f"{path} must be an event log of schema {SCHEMA}. Got {document.get('schema')!r}, "
            f"written by pagedjax {document.get('version')}: read it with that version."
        )
