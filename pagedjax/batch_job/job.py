"""Lines on their way from the input to the output.

Owns their order, how many are in flight, and what becomes of each: an answer, or an error that is
this line's alone. Knows nothing of files, progress or exit status.

    parse_json -> parse_body -> submit (bounded) -> step ... -> answer -> put
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from pagedjax.batch_job.answers import Answers
from pagedjax.batch_job.entry import (
    INTERNAL_ERROR,
    Json,
    Line,
    answer_text,
    error_text,
    read_line,
)
from pagedjax.batch_job.ids import CustomIds
from pagedjax.batch_job.lines import split_line
from pagedjax.errors import RequestError
from pagedjax.openai_api import (
    failure_of,
    parse_body,
    response_body,
)
from pagedjax.request import RequestOutput, SamplingParams
from pagedjax.tokenizer import Tokenizer

DEFAULT_IN_FLIGHT = 1024  # sequences in the engine at once
MAX_TOLD = 20  # failing lines that are named one by one
LINES_PER_REPORT = 1000  # of lines that were answered before, or cannot be
CREATED = 0  # seconds since 1970 in every answer: the same job gives the same bytes, whenever

logger = logging.getLogger("pagedjax")


class Engine(Protocol):
    """What a job needs of the engine."""

    @property
    def has_unfinished(self) -> bool:
        """True while `step` has something to do."""
        ...

    @property
    def has_queue_room(self) -> bool:
        """False while `add_request` would refuse any request."""
        ...

    def add_request(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        label: str | None = None,
    ) -> None:
        """Queues a request or raises `RequestError`."""
        ...

    def step(self) -> list[RequestOutput]:
        """Runs one step."""
        ...

    def abort(self, request_id: str) -> bool:
        """Cancels a request."""
        ...


class Model(Protocol):
    """What a job needs of an `LLM`."""

    @property
    def engine(self) -> Engine:
        """Runs the requests."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Shows single tokens, where a request asks for logprobs."""
        ...

    @property
    def model_name(self) -> str:
        """Shown in answers whose request names none."""
        ...

    @property
    def default_params(self) -> dict[str, Any]:
        """Sampling parameters that hold where a request gives none."""
        ...

    def encode_chat(self, messages: Any) -> list[int]:
        """Token ids of a conversation, or `RequestError`."""
        ...


@dataclass(slots=True, kw_only=True)
class Summary:
    """What a job did so far."""

    blank: int = 0  # lines that ask nothing and get no answer
    answered: int = 0
    failed: int = 0
    answered_before: int = 0  # by earlier runs of the same job
    failed_before: int = 0
    prompt_tokens: int = 0  # of answers of this run
    output_tokens: int = 0
    seconds: float = 0.0  # of this run
    interrupted: bool = False

    @property
    def num_lines(self) -> int:
        """Lines of the input that are done with."""
        return self.blank + self.num_before + self.answered + self.failed

    @property
    def num_before(self) -> int:
        """Lines that earlier runs answered."""
        return self.answered_before + self.failed_before

    @property
    def any_failed(self) -> bool:
        """True when the output holds an error line."""
        return bool(self.failed + self.failed_before)

    def __str__(self) -> str:
        rate = self.output_tokens / self.seconds if self.seconds else 0.0
        before = f"; {self.num_before} were done before" if self.num_before else ""
        return (
            f"{self.answered} answered, {self.failed} failed{before}; {self.prompt_tokens} tokens "
            f"in, {self.output_tokens} out, in {self.seconds:.1f} s ({rate:.1f} tokens/s out)"
        )


def run_batch(
    llm: Model,
    lines: Iterable[bytes],
    answers: Answers,
    *,
    max_in_flight: int = DEFAULT_IN_FLIGHT,
    request_timeout: float | None = None,
    before: Summary | None = None,
    on_progress: Callable[[Summary], None] = lambda summary: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Summary:
    """Answers every line that is not blank, and was not answered in an earlier run, with one line.

    Args:
      lines: of the input, read as they are needed.
      answers: takes them.
      max_in_flight: sequences in the engine at once; with what waits in `answers` they are all
        that is held in memory, beside a hash for each line.
      request_timeout: seconds that a prompt may take in the engine, where its body gives no
        `timeout`; a line with one that takes longer gets an error of code "timeout".
      before: with the lines of earlier runs; it is counted on, and returned.
      on_progress: called after every step, and now and then between lines that need none, with
        the counts so far.
      should_stop: asked after every step; True ends the job, with the answers that there are.

    Whatever the engine, `lines` or `answers` raises is raised on, after the answers that are ready
    were handed over.
    """
    job = BatchJob(llm, answers, max_in_flight=max_in_flight, request_timeout=request_timeout)
    job.summary = before or job.summary
    started = time.monotonic()

    def report() -> None:
        job.summary.seconds = time.monotonic() - started
        on_progress(job.summary)

    def advance() -> None:
        job.step()
        report()

    try:
        for number, raw in enumerate(lines, 1):
            job.accept(number, raw)
            if number % LINES_PER_REPORT == 0:
                report()
            while job.is_full and not should_stop():
                advance()
            if should_stop():
                job.summary.interrupted = True
                break
        while job.is_busy and not should_stop():
            advance()
    except BaseException:
        answers.close()
        raise
    if job.is_busy:
        job.summary.interrupted = True
    answers.close()
    job.abort()
    report()
    return job.summary


def all_answered(lines: Iterable[bytes], answers: Answers) -> bool:
    """Whether earlier runs answered every line, so that no model is needed."""
    ids = CustomIds()
    for number, raw in enumerate(lines, 1):
        found = read_line(number, raw, ids)
        if found is not None and answers.expect(number, found[0].key):
            return False
    return True


class _Failures:
    """Names lines that fail, for people: the first of them."""

    def __init__(self) -> None:
        self._count = 0

    def tell(self, line: Line, message: str) -> None:
        self._count += 1
        if self._count <= MAX_TOLD:
            logger.error("line %d failed: %s", line.number, message)
        elif self._count == MAX_TOLD + 1:
            logger.error("more lines failed: the output says which and why")


class BatchJob:
    """Lines on their way from the input to the output. See `run_batch`."""

    def __init__(
        self,
        llm: Model,
        answers: Answers,
        *,
        max_in_flight: int,
        request_timeout: float | None = None,
    ) -> None:
        self.summary = Summary()
        self._llm = llm
        self._max_in_flight = max_in_flight
        self._request_timeout = request_timeout
        self._ids = CustomIds()
        self._waiting: OrderedDict[str, str | list[int]] = OrderedDict()  # not in the engine yet
        self._running: dict[str, tuple[Line, int]] = {}  # request id -> line, index of the prompt
        self._num_sequences = 0
        self._failures = _Failures()
        self._ready: deque[tuple[int, str]] = deque()  # answers: number of the line, text
        self._answers = answers

    @property
    def is_busy(self) -> bool:
        """True while a line has no answer."""
        return bool(self._running)

    @property
    def is_full(self) -> bool:
        """True when another line has to wait, for the engine or for an earlier line's answer."""
        return self.is_busy and (
            self._num_sequences >= self._max_in_flight or self._answers.is_full
        )

    def accept(self, number: int, raw: bytes) -> None:
        """Takes a line of the input: puts it into the engine, or answers it with its error."""
        found = read_line(number, raw, self._ids)
        if found is None:
            self.summary.blank += 1
            return
        line, document, trouble = found
        if self._answers.expect(number, line.key):
            self.begin(line, document, trouble)

    def begin(self, line: Line, document: Json, trouble: Exception | None = None) -> None:
        """Puts a line whose identity is known into the engine, or answers it with its error."""
        with self._boundary(line):
            if trouble is not None:
                raise trouble
            self._parse(line, document)
            self._submit(line)
        # Outside the boundary: trouble with the output is not the fault of a line.
        self._feed()
        self._hand_over()

    def step(self) -> None:
        """Runs one step of the engine and answers the lines that ended in it."""
        for output in self._llm.engine.step():
            if output.finished and output.request_id in self._running:
                line, index = self._running[output.request_id]
                with self._boundary(line):
                    self._collect(line, index, output)
        self._feed()
        self._hand_over()
        self._answers.tick()

    def abort(self) -> None:
        """Cancels what is running."""
        if not self._running:
            return
        for request_id in list(self._running):
            self._forget(request_id)
            self._llm.engine.abort(request_id)
        self._llm.engine.step()  # hands over what was cancelled, so that the engine forgets it

    def _hand_over(self) -> None:
        while self._ready:
            self._answers.put(*self._ready.popleft())

    @contextmanager
    def _boundary(self, line: Line) -> Iterator[None]:
        """Whatever goes wrong inside becomes the answer of this line, and of no other."""
        try:
            yield
        except RequestError as error:
            if line.request is not None:  # else its form is wrong: the check of all lines told it
                self._failures.tell(line, str(error))
            self._fail(line, 400, str(error), error.code, error.param)
        except Exception:
            logger.exception("line %d failed", line.number)
            self._fail(line, 500, INTERNAL_ERROR, "internal_error")

    def _parse(self, line: Line, document: Json) -> None:
        endpoint, body = split_line(document)
        line.request = parse_body(endpoint, body, self._llm.default_params)

    def _submit(self, line: Line) -> None:
        request = line.request
        assert request is not None
        prompts = request.prompts
        if request.messages is not None:
            prompts = (self._llm.encode_chat(request.messages),)
        line.outputs = [None] * len(prompts)
        for index, prompt in enumerate(prompts):
            request_id = f"{line.key}-{index}"
            self._running[request_id] = (line, index)
            self._num_sequences += request.params.num_sequences
            self._waiting[request_id] = prompt

    def _feed(self) -> None:
        """Puts waiting prompts into the engine, as far as its queue has room."""
        while self._waiting and self._llm.engine.has_queue_room:
            request_id, prompt = next(iter(self._waiting.items()))
            line = self._running[request_id][0]
            with self._boundary(line):
                self._add(line, request_id, prompt)
            self._waiting.pop(request_id, None)

    def _add(self, line: Line, request_id: str, prompt: str | list[int]) -> None:
        request = line.request
        assert request is not None
        timeout = self._request_timeout if request.timeout is None else request.timeout
        self._llm.engine.add_request(
            request_id,
            prompt,
            request.params,
            cache_salt=request.cache_salt,
            priority=request.priority,
            timeout=timeout,
            label=_label(line, request_id),
        )

    def _collect(self, line: Line, index: int, output: RequestOutput) -> None:
        request = line.request
        assert request is not None
        failure = failure_of(output)
        if failure is not None:
            self._failures.tell(line, failure.message)
            self._fail(line, failure.status, failure.message, failure.code, failure.param)
            return
        self._forget(output.request_id)
        line.outputs[index] = output
        outputs = [output for output in line.outputs if output is not None]
        if len(outputs) < len(line.outputs):
            return
        body = response_body(
            request,
            outputs,
            response_id=line.key,
            created=CREATED,
            model=self._llm.model_name,
            tokenizer=self._llm.tokenizer,
        )
        del body["usage"]["prompt_tokens_details"]  # a run that was interrupted finds other pages
        self._ready.append((line.number, answer_text(line, 200, body, None)))
        self.summary.answered += 1
        self.summary.prompt_tokens += body["usage"]["prompt_tokens"]
        self.summary.output_tokens += body["usage"]["completion_tokens"]

    def _fail(
        self, line: Line, status: int, message: str, code: str, param: str | None = None
    ) -> None:
        for index in range(len(line.outputs)):
            request_id = f"{line.key}-{index}"
            is_waiting = self._waiting.pop(request_id, None) is not None
            if self._forget(request_id) and not is_waiting:
                self._llm.engine.abort(request_id)
        self._ready.append((line.number, error_text(line, status, message, code, param)))
        self.summary.failed += 1

    def _forget(self, request_id: str) -> bool:
        entry = self._running.pop(request_id, None)
        if entry is None:
            return False
        request = entry[0].request
        assert request is not None
        self._num_sequences -= request.params.num_sequences
        return True


def _label(line: Line, request_id: str) -> str | None:
    """What people call a prompt: its line's id, and its number where there are several."""
    index = request_id.rpartition("-")[2]
    return line.custom_id if len(line.outputs) == 1 else f"{line.custom_id}[{index}]"
