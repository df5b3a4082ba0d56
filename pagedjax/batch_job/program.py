"""The program around a batch job: what happens in which order, messages and the exit status.

Owns what is checked before the model is loaded, because loading takes long. Knows nothing of lines
or of the engine's inside.

Exit status: 0 all lines answered; 2 nothing started; 3 done, and some lines got an error; 75
interrupted, or a file could not be written: the same command continues; 70 the engine failed: the
same command continues too; 130 interrupted without a file to continue. An input without lines is
answered completely: 0.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal, TextIO

from pagedjax.batch_job import loading, manifest, on_ray
from pagedjax.batch_job.answers import Answers
from pagedjax.batch_job.errors import CannotStart, EnginesLost, InputChanged, UnreadableInput
from pagedjax.batch_job.job import Summary, all_answered, run_batch
from pagedjax.batch_job.messages import fill_closed_streams, say
from pagedjax.batch_job.meter import duration
from pagedjax.batch_job.output import (
    FileOutput,
    Stage,
    StreamOutput,
    files_of,
    is_stream,
    manifest_of,
)
from pagedjax.batch_job.precheck import Precheck, check_lines
from pagedjax.batch_job.progress import Progress, log_to_stderr, stats_file
from pagedjax.batch_job.source import Source, open_source
from pagedjax.config import EngineConfig
from pagedjax.errors import IntegrityError, PagedJaxError
from pagedjax.intake import MAX_TIMEOUT
from pagedjax.interrupts import DeferredInterrupt

# Exit status. 75 is EX_TEMPFAIL of sysexits.h: run it again.
OK, NOT_STARTED, SOME_FAILED, BROKEN_OFF, RESUMABLE, INTERRUPTED = 0, 2, 3, 70, 75, 130
QUEUE_DEPTH = 4  # x max_num_seqs in the engine: enough waiting ones that no slot is left empty
STOPPING = b"\nserve_batch: stopping after this step; a second signal stops at once\n"
_LOST = (
    "serve_batch: error: the Ray cluster is gone, and Ray ended the process that ran the job "
    "({how}). Answers that were written are kept; the same command continues an --output."
)

logger = logging.getLogger("pagedjax")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """How and where a job runs; nothing here changes an answer, but for `request_timeout`.

    Attributes:
      request_timeout: see `run_batch`.
      max_inflight: sequences in the engine at once; None: four times what a step holds.
      ordered: the output is in the order of the input, and not as answers come.
      overwrite: what another job left under the output's name is removed.
      on_bad_line: what a bad line is: an "error-record" in the output, or a reason to "abort"
        before anything runs.
      check: only say what would run.
      rate: output tokens a second, for the estimate of time.
      stats: name of a file that gets figures as JSON lines.
      page_map: draw the page pool, on a terminal.
      ray: address of a Ray cluster whose machines answer the lines; "": one is started here; None:
        this process answers them.
      ray_workers: engines there; None: one for each accelerator, or for each host without any.
    """

    request_timeout: float | None = None
    max_inflight: int | None = None
    ordered: bool = False
    overwrite: bool = False
    on_bad_line: Literal["error-record", "abort"] = "error-record"
    check: bool = False
    rate: float | None = None
    stats: str | None = None
    page_map: bool = False
    ray: str | None = None
    ray_workers: int | None = None

    def __post_init__(self) -> None:
        """Raises `CannotStart` for what makes no sense."""
        timeout = self.request_timeout
        if timeout is not None and not 0.0 < timeout <= MAX_TIMEOUT:
            raise CannotStart(
                f"--request-timeout must be seconds in (0, {MAX_TIMEOUT:g}]. Got {timeout:g}."
            )
        if self.max_inflight is not None and self.max_inflight < 1:
            raise CannotStart(f"--max-inflight must be at least 1. Got {self.max_inflight}.")
        if self.rate is not None and not 0.0 < self.rate < 1e12:
            raise CannotStart(f"--rate must be tokens a second, more than 0. Got {self.rate:g}.")
        if self.on_bad_line not in ("error-record", "abort"):
            raise CannotStart(
                f"--on-bad-line must be error-record or abort. Got {self.on_bad_line}."
            )
        if self.ray_workers is not None and (self.ray is None or self.ray_workers < 1):
            got = "it without --ray" if self.ray is None else self.ray_workers
            raise CannotStart(f"--ray-workers must be at least 1, beside --ray. Got {got}.")
        if self.ray is not None and self.page_map:
            raise CannotStart("--page-map must be used without --ray: it draws one engine's pool.")


def main(
    input_path: str,
    output_path: str | None,
    *,
    model: str,
    options: Mapping[str, Any],
    **how: Any,
) -> int:
    """Answers a file of requests; returns the exit status.

    Args:
      input_path: a file, or "-" for standard input.
      output_path: None: standard output. Messages and progress go to standard error always.
      model: what `LLM` takes.
      options: of the engine, see `pagedjax.config.EngineConfig`.
      how: see `JobOptions`.
    """
    fill_closed_streams()
    signals = DeferredInterrupt(signal.SIGINT, signal.SIGTERM, notice=STOPPING)
    begun = _Begun()
    with signals, ExitStack() as stack:
        try:
            with signals.alone():
                signals.expose()
                stack.enter_context(log_to_stderr())
                program = Program(model, options, JobOptions(**how), signals, stack, begun)
                return program.run(input_path, output_path)
        except (CannotStart, PagedJaxError) as error:
            say(f"error: {error}")
            return NOT_STARTED
        except InputChanged:
            say(f"error: the input {input_path} was written while it was read")
            return BROKEN_OFF if is_stream(output_path) else RESUMABLE
        except KeyboardInterrupt:
            say(f"interrupted{begun.then()}")
            return INTERRUPTED if is_stream(output_path) else RESUMABLE
        finally:
            signals.finish()


def guarded_main(input_path: str, output_path: str | None, **how: Any) -> int:
    """Does what `main` does, in a process of its own that Ray may end."""
    fill_closed_streams()
    return on_ray.guarded(
        lambda: main(input_path, output_path, **how),
        frozenset({OK, NOT_STARTED, SOME_FAILED, BROKEN_OFF, RESUMABLE, INTERRUPTED}),
        BROKEN_OFF if is_stream(output_path) else RESUMABLE,
        _LOST,
    )


@dataclass(slots=True)
class _Begun:
    """How a program that is interrupted can be continued, as far as it has come.

    Attributes:
      then: what follows "interrupted" in the message.
    """

    then: Callable[[], str] = lambda: (
        " before the first line was answered; the same command starts again"
    )


class Program:
    """One call of `main`."""

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any],
        how: JobOptions,
        signals: DeferredInterrupt,
        stack: ExitStack,
        begun: _Begun,
    ) -> None:
        self._model, self._options, self.how, self.begun = model, options, how, begun
        self._config = EngineConfig.from_options(options)
        self._signals, self._stack = signals, stack
        self.policy = self._config.scheduling_policy
        self._stats: TextIO | None = None

    def run(self, input_path: str, output_path: str | None) -> int:
        """Does what was asked; returns the exit status."""
        source = open_source(input_path, self._stack)
        others = [input_path, *([] if output_path is None else files_of(output_path))]
        if self.how.ray is not None and self._config.event_log is not None:
            raise CannotStart("--event-log must be used without --ray: it is one engine's log.")
        _check_own_file("the event log", self._config.event_log, [*others, self.how.stats])
        _check_event_log(self._config.event_log)
        _check_own_file("--stats", self.how.stats, [*others, self._config.event_log])
        self._stats = self._stack.enter_context(stats_file(self.how.stats))
        if self.how.check:
            return self._check(source, output_path)
        if is_stream(output_path):
            return self._to_stream(source, StreamOutput(output_path, self._stack))
        assert output_path is not None, "standard output is a stream"
        output = FileOutput(output_path, input_path, self._stack)
        return self._to_file(source, output)

    # ------------------------------------------------------------------------------ three jobs

    def _check(self, source: Source, output_path: str | None) -> int:
        """Says what would run, and how long that takes."""
        text = loading.read_text(self._model, self._options)
        try:
            found = check_lines(source.lines(), self.policy, text)
        except UnreadableInput as error:
            raise CannotStart(str(error)) from error
        for line in found.lines():
            say(line)
        say(found.sentence())
        rate, where = self.how.rate, "--rate"
        if rate is None and output_path is not None:
            rate, where = _rate_of(output_path), "this output's last run"
        if rate is None:
            say("no estimate of time: give --rate N, output tokens a second, or run a part first")
        else:
            # Prompts cost little beside answers, and most answers end before their limit.
            longest = duration(found.max_new_tokens / rate)
            say(f"at most about {longest}, at {rate:.3g} output tokens/s ({where})")
        return SOME_FAILED if found.num_bad else OK

    def _to_stream(self, source: Source, output: StreamOutput) -> int:
        """Answers once, with nothing to continue from."""
        if self.how.ray is not None and source.path is None:
            raise CannotStart(
                "--ray needs an input that others can read: give a file, or --output, which keeps "
                "a copy of what comes through a pipe."
            )
        num_lines = None
        if source.is_regular:
            num_lines = source.measure()["lines"]
            if num_lines == 0:
                say(f"{source.name} is empty: nothing to answer")
                return OK
            self.report_bad(check_lines(source.lines(), self.policy))
        llm = self.load(source)
        answers = output.answers(ordered=self.how.ordered)
        summary = Summary()
        try:
            self.answer(llm, source, answers, num_lines, summary)
        except KeyboardInterrupt:
            summary.interrupted = True
        except OSError as error:
            say(f"error: {error.strerror or error}; the answers so far are in {output.name}")
            return BROKEN_OFF
        except (EnginesLost, InputChanged) as error:
            why = str(error) or f"the input {source.name} was written while it was read"
            say(f"error: {why}; the answers so far are in {output.name}")
            return BROKEN_OFF
        except Exception as error:
            return self.engine_failed(error, f"the answers so far are in {output.name}")
        say(str(summary))
        if summary.interrupted:
            say(f"interrupted; the answers so far are in {output.name}")
            return INTERRUPTED
        return SOME_FAILED if summary.any_failed else OK

    def _to_file(self, source: Source, output: FileOutput) -> int:
        """Answers what earlier runs did not."""
        if not source.is_regular or (self.how.ray is not None and source.path is None):
            source = output.keep_pipe(source, self._stack)
        job = manifest.Manifest(
            input=source.measure(),
            model={"name": self._model, "identity": None},
            parameters=manifest.parameters(self._config, self.how.request_timeout),
        )
        output.stage(job, overwrite=self.how.overwrite)  # cheap reasons to refuse come first
        if job.input["lines"]:
            job = replace(job, model=loading.identify(self._model))
        stage = output.stage(job, overwrite=self.how.overwrite)
        if stage is Stage.DONE:
            before = output.last_run
            say(
                f"{output.path} is complete: {before.answered_before} answered, "
                f"{before.failed_before} failed; --overwrite would answer all anew"
            )
            return SOME_FAILED if before.any_failed else OK
        return _FileJob(self, source, output).run(stage, job)

    # ----------------------------------------------------------------------------------- parts

    def report_bad(self, found: Precheck) -> None:
        """Shows bad lines; raises `CannotStart` where one is enough to stop."""
        for line in found.lines():
            say(line)
        if found.num_bad and self.how.on_bad_line == "abort":
            raise CannotStart(f"{found.num_bad} lines are bad, and --on-bad-line is abort.")
        if found.num_bad:
            say(f"{found.num_bad} bad lines will be error lines")

    def load(self, source: Source) -> Any:
        """The model, ready; or a fleet of engines that have it."""
        if self.how.ray is not None:
            return self._start_fleet(self.how.ray, source)
        say(f"loading {self._model}; the first time here, compiling takes a while")
        return loading.load(self._model, self._options)

    def answer(
        self, llm: Any, source: Source, answers: Answers, num_lines: int | None, summary: Summary
    ) -> None:
        """Runs the job; counts in `summary`, which begins with what earlier runs did."""
        if self.how.ray is not None:
            self._answer_on_fleet(llm, source, answers, num_lines, summary)
            return
        max_in_flight = self.how.max_inflight or QUEUE_DEPTH * llm.report.max_num_seqs
        shown = Progress(
            llm.engine.scheduler,
            num_lines,
            num_before=summary.num_before,
            stats=self._stats,
            shows_pages=self.how.page_map,
        )
        with self._signals.alone(), shown as progress:
            self._signals.defer()
            run_batch(
                llm,
                source.lines(),
                answers,
                max_in_flight=max_in_flight,
                request_timeout=self.how.request_timeout,
                before=summary,
                on_progress=progress,
                should_stop=lambda: self._signals.is_pending,
            )
            progress.finish(summary)

    def _start_fleet(self, address: str, source: Source) -> on_ray.Fleet:
        assert source.path is not None, "`run` saw to it"
        say("starting Ray" if address == on_ray.LOCAL else f"joining the Ray cluster at {address}")
        identity = loading.identify(self._model)["identity"]
        cluster = on_ray.connect(address, self.how.ray_workers, self._stack)
        slots = self._config.max_num_seqs or (256 if cluster.on_accelerator else 32)
        plan = on_ray.WorkerPlan(
            model=self._model,
            options=dict(self._options),
            identity=identity,
            request_timeout=self.how.request_timeout,
            in_flight=self.how.max_inflight or QUEUE_DEPTH * slots,
        )
        fleet = on_ray.Fleet(cluster, plan, source.path, say)
        say(
            f"loading {self._model} in {cluster.num_workers} workers; the first time on a machine, "
            "compiling takes a while"
        )
        fleet.start()
        return fleet

    def _answer_on_fleet(
        self, fleet: Any, source: Source, answers: Answers, num_lines: int | None, summary: Summary
    ) -> None:
        shown = Progress(
            fleet.counters, num_lines, num_before=summary.num_before, stats=self._stats
        )
        with self._signals.alone(), shown as progress:
            self._signals.defer()
            on_ray.run_on_fleet(
                fleet,
                source,
                answers,
                before=summary,
                on_progress=progress,
                should_stop=lambda: self._signals.is_pending,
            )
            progress.finish(summary)

    def engine_failed(self, error: Exception, then: str) -> int:
        """Says so, and what to do then; returns the exit status."""
        logger.error("the engine failed", exc_info=error)
        say(f"error: the engine failed ({error}); {then}")
        return BROKEN_OFF


class _FileJob:
    """A job whose answers go into a file, and which is not done yet."""

    def __init__(self, program: Program, source: Source, output: FileOutput) -> None:
        self._program, self._source, self._output = program, source, output
        self._how = program.how

    def run(self, stage: Stage, job: manifest.Manifest) -> int:
        program, output = self._program, self._output
        summary = Summary()
        if stage is Stage.BEGUN:
            program.begun.then = lambda: f". {self._then()}"
            journal, found = output.resume()
            summary = Summary(answered_before=found.answered, failed_before=found.failed)
            self._tell_resumed(summary, found.num_cut)
            is_done = len(found.places) == output.num_answers and all_answered(
                self._source.lines(), journal
            )
            llm = None if is_done else program.load(self._source)
        else:
            found = check_lines(self._source.lines(), program.policy)
            program.report_bad(found)
            answers = found.requests + found.num_bad
            llm = program.load(self._source) if answers else None
            journal = output.begin(replace(job, input={**job.input, "answers": answers}))
            program.begun.then = lambda: f". {self._then()}"
        try:
            return self._finish(llm, journal, summary, job.input["lines"])
        finally:
            journal.release()

    def _finish(self, llm: Any, journal: Any, summary: Summary, num_lines: int) -> int:
        """Answers the rest, and makes the output."""
        program, output = self._program, self._output
        try:
            if llm is not None:
                program.answer(llm, self._source, journal, num_lines, summary)
            if summary.interrupted:
                output.interrupted(summary)
            elif self._source.has_changed:
                raise InputChanged
            else:
                output.publish(journal, summary, ordered=self._how.ordered)
        except KeyboardInterrupt:
            summary.interrupted = True
        except UnreadableInput as error:
            say(f"error: {error}. {self._then()}")
            return RESUMABLE
        except OSError as error:
            say(f"error: cannot write {output.path}: {error.strerror or error}. {self._then()}")
            return RESUMABLE
        except EnginesLost as error:
            output.interrupted(summary)
            say(f"error: {error}. {self._then()}")
            return RESUMABLE
        except InputChanged:
            # It is another input now, and `stage` will say so; or it was only touched.
            say(f"error: the input {self._source.name} was written while it was read")
            return RESUMABLE
        except IntegrityError as error:
            say(f"error: {error}")
            return BROKEN_OFF
        except Exception as error:
            return program.engine_failed(error, self._then())
        say(str(summary))
        if summary.interrupted:
            say(f"interrupted. {self._then()}")
            return RESUMABLE
        return SOME_FAILED if summary.any_failed else OK

    def _then(self) -> str:
        partial = self._output.partial
        where = f"The answers so far are in {partial}" if partial.exists() else "It was at its end"
        return f"{where}; run the same command again to continue."

    def _tell_resumed(self, summary: Summary, num_cut: int) -> None:
        cut = f"; {num_cut} bytes of a torn line were cut" if num_cut else ""
        say(f"continuing {self._output.path}: {summary.num_before} lines are answered{cut}")


def _check_own_file(what: str, path: str | None, others: Iterable[str | None]) -> None:
    """What would destroy another file of the job."""
    for other in others:
        if path is not None and other is not None and _is_same_file(path, other):
            raise CannotStart(
                f"{what} {path} must be a file of its own, not the input, the output, a file "
                "beside it, the event log or that of --stats."
            )


def _check_event_log(path: str | None) -> None:
    """What would stop the engine after it loaded the model."""
    if path is None:
        return
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.path.isdir(folder):
        raise CannotStart(f"the event log {path} must be a file in a folder that exists.")


def _is_same_file(path: str, other: str) -> bool:
    """Whether two names mean one file, even one that does not exist yet; a device is none."""
    if is_stream(path):
        return False
    if os.path.realpath(path) == os.path.realpath(other):
        return True
    return os.path.exists(path) and os.path.exists(other) and os.path.samefile(path, other)


def _rate_of(output_path: str) -> float | None:
    """Output tokens a second of the last run for this output."""
    try:
        old = manifest.read(manifest_of(output_path))
    except (ValueError, OSError):
        return None
    return None if old is None else old.last_run.get("output_tokens_per_s")
