"""The output: a stream that takes answers once, or a file that a later run can continue.

Owns which files a job has, and what an earlier run left in them::

    OUT             all answers; it is there when the job is done, and not before
    OUT.partial     the answers so far, see `journal.py`; it becomes OUT by a rename
    OUT.manifest.json   which job this is
    OUT.lock        only while a run is at work
    OUT.input       what came through a pipe
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from contextlib import ExitStack
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import BinaryIO

from pagedjax.batch_job import files
from pagedjax.batch_job import manifest as manifests
from pagedjax.batch_job.answers import Answers, AsFinished, InputOrder
from pagedjax.batch_job.errors import CannotStart
from pagedjax.batch_job.job import Summary
from pagedjax.batch_job.journal import Journal, Recovered, recover
from pagedjax.batch_job.manifest import Manifest
from pagedjax.batch_job.messages import say
from pagedjax.batch_job.source import Source, spool


class Stage(Enum):
    """How far a job is."""

    NEW = "new"
    BEGUN = "begun"
    DONE = "done"


class StreamOutput:
    """Standard output, a pipe or a device: answers go out once, and nothing can be continued."""

    def __init__(self, path: str | None, stack: ExitStack) -> None:
        """Opens it; None: standard output."""
        self.name = "standard output" if path is None else path
        self._is_stdout = path is None
        if path is None:
            if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
                raise CannotStart("standard output is closed: give --output a file.")
            self._file: BinaryIO = sys.stdout.buffer
        else:
            try:
                self._file = stack.enter_context(Path(path).open("ab", buffering=0))  # noqa: SIM115
            except OSError as error:
                raise CannotStart(f"cannot write the output {path}: {error.strerror}") from error

    def answers(self, *, ordered: bool) -> Answers:
        """What takes a job's answers."""
        return InputOrder(self.write) if ordered else AsFinished(self.write)

    def write(self, line: str) -> None:
        """Writes one whole line, at once."""
        rest = memoryview(line.encode("utf-8"))
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            self._file.flush()
        except OSError as error:
            if self._is_stdout:
                # Python would try again to write, and complain, when it closes the stream.
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._file.fileno())
            message = f"cannot write to {self.name}: {error.strerror}"
            raise OSError(error.errno or errno.EIO, message) from error


def is_stream(path: str | None) -> bool:
    """True for standard output, pipes and devices."""
    if path is None:
        return True
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


_SUFFIXES = (
    ".partial", ".partial.sorted", ".manifest.json", ".manifest.json.new", ".lock", ".input",
    ".input.new",
)  # fmt: skip


class FileOutput:
    """The files of one job. While this is in use, no other run can be."""

    def __init__(self, path: str, input_path: str, stack: ExitStack) -> None:
        """Checks the name and takes the lock; raises `CannotStart`."""
        if path.lower().startswith(("http://", "https://")):
            raise CannotStart(f"the output must be a local file. Got the address {path}.")
        if os.path.exists(path) and os.path.exists(input_path) and os.path.samefile(
            path, input_path
        ):  # fmt: skip
            raise CannotStart(f"the output {path} must not be the input itself: give another name.")
        if os.path.islink(path):
            path = os.path.realpath(path)  # a rename would replace the link and not the file
        self.path = Path(path)
        folder = self.path.parent
        if not folder.is_dir():
            raise CannotStart(
                f"the output's folder {folder} must exist. Make it, or give another one."
            )
        if self.path.is_dir():
            raise CannotStart(f"cannot write the output {path}: it is a directory.")
        self.partial = self._beside(".partial")
        self._manifest_path = manifest_of(path)
        self._manifest: Manifest | None = None
        self._lock(stack)

    def keep_pipe(self, source: Source, stack: ExitStack) -> Source:
        """The same input in a file, so that it can be read again."""
        return spool(source, self._beside(".input.new"), self._beside(".input"), stack)

    def stage(self, job: Manifest, *, overwrite: bool) -> Stage:
        """How far this job is.

        Args:
          job: without its model's identity, that is not compared.
          overwrite: another job's files are no hindrance, and a job that is done starts anew.

        Raises:
          CannotStart: the files are another job's, or nobody knows whose.
        """
        old = self._read_manifest(overwrite)
        if old is None:
            if not overwrite and (_has_content(self.path) or _has_content(self.partial)):
                raise CannotStart(
                    f"{self.path} must be a new file, or one that the same command began: nothing "
                    "says which job it holds answers of. Give another name, or --overwrite."
                )
            return Stage.NEW
        found = manifests.differences(old, job)
        if found:
            if overwrite:
                return Stage.NEW
            raise CannotStart(
                f"{self.path} belongs to another job: {'; '.join(found)}. Run the command of then "
                "to continue it, or give another name, or --overwrite to begin anew."
            )
        if not old.is_complete:
            self._manifest = old
            return Stage.BEGUN
        is_there = self.path.exists()  # else it was taken away: it may be made again
        return Stage.DONE if is_there and not overwrite else Stage.NEW

    @property
    def last_run(self) -> Summary:
        """Counts of a job that is done."""
        old = manifests.read(self._manifest_path)
        counts = {} if old is None else old.last_run
        return Summary(
            answered_before=counts.get("answered", 0), failed_before=counts.get("failed", 0)
        )

    def begin(self, job: Manifest) -> Journal:
        """Makes a new job's files, and removes what was there; raises `CannotStart`."""
        try:
            for path in (self.path, self.partial):
                files.remove(path)  # before a manifest says that what is there is this job's
            journal = Journal(self.partial, job.input["lines"], Recovered())
            job.write(self._manifest_path)
            self._take_pipe()
        except OSError as error:
            raise self._cannot_write(error) from error
        self._manifest = job
        return journal

    def resume(self) -> tuple[Journal, Recovered]:
        """Opens the files of a job that was begun; raises `CannotStart`."""
        assert self._manifest is not None, "`stage` found it"
        try:
            if not self.partial.exists() and self.path.exists():
                # A run was killed between the rename and the note that the job is done.
                files.replace(self.path, self.partial)
            self._take_pipe()
            found = recover(self.partial) if self.partial.exists() else Recovered()
            return Journal(self.partial, self._manifest.input["lines"], found), found
        except OSError as error:
            raise self._cannot_write(error) from error

    @property
    def num_answers(self) -> int:
        """How many answers the job that was begun has to give."""
        assert self._manifest is not None, "`stage` found it"
        return self._manifest.input["answers"]

    def publish(self, journal: Journal, summary: Summary, *, ordered: bool) -> None:
        """Makes the output; the job is done."""
        journal.publish(self.path, ordered=ordered)
        self._note(summary, is_complete=True)
        files.remove(self._beside(".input"))

    def interrupted(self, summary: Summary) -> None:
        """Notes what a run did that ended early."""
        self._note(summary, is_complete=False)

    def _note(self, summary: Summary, *, is_complete: bool) -> None:
        assert self._manifest is not None, "`begin` or `stage` set it"
        seconds = max(summary.seconds, 1e-9)
        done: dict[str, float] = {
            "answered": summary.answered + summary.answered_before,
            "failed": summary.failed + summary.failed_before,
        }
        if summary.answered:
            done["output_tokens_per_s"] = summary.output_tokens / seconds
        noted = replace(self._manifest, is_complete=is_complete, last_run=done)
        noted.write(self._manifest_path)

    def _take_pipe(self) -> None:
        """What came through a pipe belongs to this job."""
        fresh = self._beside(".input.new")
        if fresh.exists():
            files.replace(fresh, self._beside(".input"))

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)

    def _read_manifest(self, overwrite: bool) -> Manifest | None:
        try:
            return manifests.read(self._manifest_path)
        except ValueError as error:
            if overwrite:
                return None
            raise CannotStart(f"{error}: remove it, or give --overwrite.") from error
        except OSError as error:
            raise CannotStart(f"cannot read {self._manifest_path}: {error.strerror}") from error

    def _lock(self, stack: ExitStack) -> None:
        path = self._beside(".lock")
        try:
            if not stack.enter_context(files.locked(path)):
                say(f"warning: {path.parent} has no locks: do not run two jobs for one output")
        except files.Locked as error:
            raise CannotStart(f"the output {self.path} is in use by {error}.") from error
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> CannotStart:
        return CannotStart(f"cannot write the output {self.path}: {error.strerror}")


def files_of(path: str) -> list[str]:
    """The output and every file that a job keeps beside it, whether they exist or not."""
    path = os.path.realpath(path)
    return [path, *(path + suffix for suffix in _SUFFIXES)]


def manifest_of(path: str) -> Path:
    """Where the manifest of an output is."""
    return Path(path + ".manifest.json")


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False
