"""The program around a batch job: files, progress, messages and the exit status.

Owns what is checked before the model is loaded, because loading takes long, and every sentence that
the program says. Knows nothing of lines or of the engine's inside.

Exit status: 0 all lines answered, 2 not started, 3 some lines got an error, 70 the engine or a file
failed in between, 130 interrupted. An input without lines is answered completely: 0.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from tqdm import tqdm

from pagedjax.batch_job.job import Summary, run_batch
from pagedjax.batch_job.lines import read_lines
from pagedjax.config import EngineConfig
from pagedjax.errors import PagedJaxError
from pagedjax.intake import MAX_TIMEOUT

OK, NOT_STARTED, SOME_FAILED, BROKEN_OFF, INTERRUPTED = 0, 2, 3, 70, 130  # exit status
QUEUE_DEPTH = 4  # x max_num_seqs in the engine: enough waiting ones that no slot is left empty
PROGRESS_SECONDS = 10.0  # between progress lines where there is no terminal

logger = logging.getLogger("pagedjax")


class CannotStart(Exception):
    """Something is wrong before the first line was read; the text is for the user."""


def main(
    input_path: str,
    output_path: str | None,
    *,
    model: str,
    options: Mapping[str, Any],
    request_timeout: float | None = None,
) -> int:
    """Answers a file of requests; returns the exit status.

    Args:
      output_path: None: standard output. Messages and progress go to standard error always.
      model: what `LLM` takes.
      options: of the engine, see `pagedjax.config.EngineConfig`.
      request_timeout: see `run_batch`.
    """
    with ExitStack() as stack:
        try:
            EngineConfig.from_options(options)
            _check_timeout(request_timeout)
            source = stack.enter_context(_open_input(input_path))
            output = stack.enter_context(_Output(input_path, output_path))
            _check_event_log(options.get("event_log"), input_path, output_path)
            stack.enter_context(_log_to_stderr())
            if os.fstat(source.fileno()).st_size == 0 and _is_regular(source):
                output.start()
                _say(f"{input_path} is empty: nothing to answer")
                return OK
            _say(f"loading {model}; the first time here, compiling takes a while")
            llm = _load(model, options)
            output.start()
        except (CannotStart, PagedJaxError) as error:
            _say(f"error: {error}")
            return NOT_STARTED
        except KeyboardInterrupt:
            _say("interrupted before the first line was read")
            return INTERRUPTED
        return _answer(llm, source, output, request_timeout)


def _check_timeout(seconds: float | None) -> None:
    if seconds is not None and not 0.0 < seconds <= MAX_TIMEOUT:
        raise CannotStart(
            f"--request-timeout must be seconds in (0, {MAX_TIMEOUT:g}]. Got {seconds:g}."
        )


def _answer(llm: Any, source: BinaryIO, output: _Output, request_timeout: float | None) -> int:
    try:
        with _Progress(_count_lines(source)) as progress, _interrupt_flag() as flag:
            summary = run_batch(
                llm,
                read_lines(source),
                output.write,
                max_in_flight=QUEUE_DEPTH * llm.report.max_num_seqs,
                request_timeout=request_timeout,
                on_progress=progress,
                should_stop=flag.is_set,
            )
    except KeyboardInterrupt:
        _say(f"interrupted; the answers so far are in {output.name}")
        return INTERRUPTED
    except OSError as error:
        _say(f"error: {error.strerror or error}; the answers so far are in {output.name}")
        return BROKEN_OFF
    except Exception as error:
        logger.exception("the engine failed")
        _say(f"error: the engine failed ({error}); the answers so far are in {output.name}")
        return BROKEN_OFF
    _say(str(summary))
    if summary.interrupted:
        _say(f"interrupted; the answers so far are in {output.name}")
        return INTERRUPTED
    return SOME_FAILED if summary.failed else OK


def _load(model: str, options: Mapping[str, Any]) -> Any:
    """Loads and compiles; whatever stops it becomes one message."""
    try:
        # Here and not at the top: JAX takes seconds to import, and what is wrong with a path or
        # an option is said before.
        from pagedjax.llm import LLM

        return LLM(model, **options)
    except PagedJaxError:
        raise
    except OSError as error:
        raise CannotStart(f"cannot read the model {model!r}: {error}") from error
    except ImportError as error:
        raise CannotStart(
            f"cannot load the model {model!r}: {error}. Install what is missing (scripts/demo "
            "installs everything into .venv)."
        ) from error
    except Exception as error:
        raise CannotStart(_unexpected(model, error)) from error


def _unexpected(model: str, error: Exception) -> str:
    text = " ".join(str(error).split())[:500]
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        return (
            f"out of memory while loading the model {model!r}: {text}. Lower "
            "--gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs, or free memory."
        )
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = "" if frame is None else f" ({Path(frame.tb_frame.f_code.co_filename).name}, line "
    where += "" if frame is None else f"{frame.tb_lineno})"
    return f"cannot load the model {model!r}: {type(error).__name__}: {text}{where}"


# ------------------------------------------------------------------------------------------ files


@contextmanager
def _open_input(path: str) -> Iterator[BinaryIO]:
    _refuse_url(path, "the input")
    try:
        if os.path.isdir(path):
            raise CannotStart(f"the input {path} must be a file of JSON lines. Got a directory.")
        file = open(path, "rb")  # noqa: SIM115 (this block is for its errors only)
    except OSError as error:
        raise CannotStart(f"cannot read the input {path}: {error.strerror}") from error
    with file:
        yield file


class _Output:
    """The file of answers. It keeps what it holds until `start`, so that a job that cannot start
    destroys nothing."""

    def __init__(self, input_path: str, path: str | None) -> None:
        self.name = "standard output" if path is None else path
        self._path = path
        self._is_new = path is not None and not os.path.lexists(path)
        self._file: BinaryIO = sys.stdout.buffer if path is None else _open_output(input_path, path)
        self._started = False

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *_: object) -> None:
        if self._path is None:
            return
        self._file.close()
        if self._is_new and not self._started:
            os.unlink(self._path)

    def start(self) -> None:
        """Empties the file: answers come now."""
        if self._path is not None and _is_regular(self._file):
            self._file.truncate(0)
        self._started = True

    def write(self, line: str) -> None:
        """Writes one whole line, at once."""
        rest = memoryview(line.encode("utf-8"))
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            self._file.flush()
        except OSError as error:
            if self._path is None:
                # Python would try again to write, and complain, when it closes the stream.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            message = f"cannot write to {self.name}: {error.strerror}"
            raise OSError(error.errno or errno.EIO, message) from error


def _open_output(input_path: str, path: str) -> BinaryIO:
    _refuse_url(path, "the output")
    if os.path.exists(path) and os.path.samefile(path, input_path):
        raise CannotStart(f"the output {path} must not be the input itself: give another name.")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise CannotStart(f"the output's folder {folder} must exist. Make it, or give another one.")
    try:
        return open(path, "ab", buffering=0)
    except OSError as error:
        raise CannotStart(f"cannot write the output {path}: {error.strerror}") from error


def _check_event_log(path: str | None, input_path: str, output_path: str | None) -> None:
    """What would stop the engine after it loaded the model, or destroy another file."""
    if path is None:
        return
    for other in (input_path, output_path):
        if other is not None and os.path.exists(path) and os.path.samefile(path, other):
            raise CannotStart(f"the event log {path} must not be the input or the output.")
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.path.isdir(folder):
        raise CannotStart(f"the event log {path} must be a file in a folder that exists.")


def _refuse_url(path: str, what: str) -> None:
    if path.lower().startswith(("http://", "https://")):
        raise CannotStart(f"{what} must be a local file. Got the address {path}.")


def _is_regular(file: BinaryIO) -> bool:
    return stat.S_ISREG(os.fstat(file.fileno()).st_mode)


def _count_lines(file: BinaryIO) -> int | None:
    """Lines of a file that can be read twice; None for a pipe."""
    if not _is_regular(file):
        return None
    count, last = 0, b"\n"
    while chunk := file.read(2**20):
        count += chunk.count(b"\n")
        last = chunk[-1:]
    file.seek(0)
    return count + (last != b"\n")


# --------------------------------------------------------------------------------------- messages


class _Progress:
    """A bar on a terminal, a line every ten seconds elsewhere; always on standard error."""

    def __init__(self, num_lines: int | None) -> None:
        self._total = "" if num_lines is None else f" of {num_lines}"
        is_terminal = sys.stderr.isatty()
        self._bar = tqdm(total=num_lines, unit="line", disable=not is_terminal, file=sys.stderr)
        self._next = None if is_terminal else time.monotonic() + PROGRESS_SECONDS

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def __call__(self, summary: Summary) -> None:
        self._bar.set_postfix_str(f"{summary.failed} failed", refresh=False)
        self._bar.update(summary.num_lines - self._bar.n)
        now = time.monotonic()
        if self._next is not None and now >= self._next:
            self._next = now + PROGRESS_SECONDS
            _say(f"{summary.num_lines}{self._total} lines: {summary}")


@contextmanager
def _interrupt_flag() -> Iterator[threading.Event]:
    """Ctrl-C sets the flag, so that no line is torn; a second one interrupts at once."""
    flag = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        del number, frame  # what a signal handler is called with
        if flag.is_set():
            raise KeyboardInterrupt
        flag.set()
        # Not through a buffered stream: the signal may have come in the middle of its work.
        os.write(2, b"\nstopping after this step; Ctrl-C again stops at once\n")

    if threading.current_thread() is not threading.main_thread():
        yield flag  # only the main thread may handle signals
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)


class _BarSafeHandler(logging.Handler):
    """Log lines that do not tear a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record above the bar."""
        tqdm.write(self.format(record), file=sys.stderr)


@contextmanager
def _log_to_stderr() -> Iterator[None]:
    """Shows the start-up report and the periodic line while the program runs."""
    handler = _BarSafeHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _say(text: str) -> None:
    tqdm.write(f"serve_batch: {text}", file=sys.stderr)
