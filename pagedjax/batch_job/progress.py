"""What is seen of a running job, always on standard error; and a file of figures.

Owns when and how figures are shown: on a terminal a bar, a line of figures and the page map, drawn
in place; elsewhere a line every ten seconds.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from pagedjax import environment, page_map
from pagedjax.batch_job.errors import CannotStart
from pagedjax.batch_job.job import Summary
from pagedjax.batch_job.messages import STANDARD_ERROR, say
from pagedjax.batch_job.meter import Figures, Meter

LINE_SECONDS = 10.0  # between progress lines where there is no terminal
DRAW_SECONDS = 0.25  # between two states of the bar
STATS_SECONDS = 1.0  # between lines of the file of figures
MAP_SHARE = 0.02  # of the time goes into drawing page maps at most
MAP_ROWS = 8

logger = logging.getLogger("pagedjax")


class Progress:
    """Shows a job; call it after every step."""

    def __init__(
        self,
        scheduler: Any,
        num_lines: int | None,
        *,
        num_before: int = 0,
        stats: TextIO | None = None,
        shows_pages: bool = False,
    ) -> None:
        """Begins to show.

        Args:
          scheduler: the engine's.
          num_lines: of the input; None: not known.
          num_before: answered by earlier runs.
          stats: gets figures as JSON lines.
          shows_pages: draw the page map, on a terminal.
        """
        self._meter = Meter(scheduler, num_lines)
        self._stats = stats
        self._figures: Figures | None = None
        self._screen = None
        if STANDARD_ERROR.isatty():
            self._screen = _Screen(num_lines, num_before, scheduler if shows_pages else None)
        elif shows_pages:
            say("--page-map draws on terminals only")
        now = time.monotonic()
        self._next_draw, self._next_line, self._next_stats = now, now + LINE_SECONDS, now

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._figures is not None:
            if self._screen is not None:
                self._screen.draw(self._figures)
            self._note(self._figures, is_final=True)
        if self._screen is not None:
            self._screen.close()

    def __call__(self, summary: Summary) -> None:
        """Shows what is due."""
        now = time.monotonic()
        if now < min(self._next_draw, self._next_line, self._next_stats):
            return
        self._figures = figures = self._meter.read(summary)
        if now >= self._next_draw:
            self._next_draw = now + DRAW_SECONDS
            if self._screen is not None:
                self._screen.draw(figures)
        if now >= self._next_line:
            self._next_line = now + LINE_SECONDS
            if self._screen is None:
                say(str(figures))
        if now >= self._next_stats:
            self._next_stats = now + STATS_SECONDS
            self._note(figures)

    def finish(self, summary: Summary) -> None:
        """The last figures, which are shown and noted when this is left."""
        self._figures = self._meter.read(summary)

    def _note(self, figures: Figures, *, is_final: bool = False) -> None:
        if self._stats is None:
            return
        record = {"time": round(time.time(), 3), **figures.to_dict(), "final": is_final}
        try:
            self._stats.write(json.dumps(record) + "\n")
            self._stats.flush()
        except OSError as error:
            say(f"warning: no more figures are written: {error.strerror}")
            self._stats = None


@contextmanager
def stats_file(path: str | None) -> Iterator[TextIO | None]:
    """Opens the file of figures, which a run that is continued goes on with."""
    if path is None:
        yield None
        return
    try:
        file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 (its errors are caught alone)
    except OSError as error:
        raise CannotStart(f"cannot write --stats {path}: {error.strerror}") from error
    try:
        yield file
    finally:
        with suppress(OSError):  # a full disk was told when it was written
            file.close()


class _Screen:
    """A bar, and lines below it, that are drawn in place."""

    def __init__(self, num_lines: int | None, num_before: int, scheduler: Any) -> None:
        self._bar = tqdm(
            total=num_lines,
            initial=num_before,
            unit="line",
            file=STANDARD_ERROR,
            dynamic_ncols=True,
            bar_format=None
            if num_lines is None
            else "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
        )
        self._below = [_text_line(1)]
        self._scheduler = scheduler
        self._next_map = 0.0

    def draw(self, figures: Figures) -> None:
        self._bar.set_postfix_str(f"{figures.failed} failed", refresh=False)
        self._bar.n = figures.lines
        self._bar.refresh()
        self._below[0].set_description_str(figures.engine())
        if self._scheduler is not None and time.monotonic() >= self._next_map:
            self._draw_pages()

    def close(self) -> None:
        for line in reversed(self._below):
            line.close()
        self._bar.close()

    def _draw_pages(self) -> None:
        started = time.monotonic()
        rows = pages_of(self._scheduler, width=shutil.get_terminal_size().columns - 1)
        while len(self._below) <= len(rows):
            self._below.append(_text_line(len(self._below) + 1))
        for line, row in zip(self._below[1:], rows, strict=False):
            line.set_description_str(row)
        now = time.monotonic()
        self._next_map = now + max(DRAW_SECONDS, (now - started) / MAP_SHARE)


def pages_of(scheduler: Any, *, width: int) -> list[str]:
    """The page map of an engine's pools."""
    how: dict[str, Any] = {"width": width, "colour": not environment.read().no_color}
    rows = page_map.draw(scheduler.allocator, scheduler.roster, height=MAP_ROWS, **how)
    if scheduler.config.num_host_pages:
        host = scheduler.host.allocator
        rows += page_map.draw(host, None, name="host pages", height=MAP_ROWS // 2, **how)
    return rows


def _text_line(position: int) -> Any:
    """A line of text at a fixed place below the bar."""
    return tqdm(
        bar_format="{desc}", position=position, leave=False, file=STANDARD_ERROR, dynamic_ncols=True
    )


class _BarSafeHandler(logging.Handler):
    """Log lines that do not tear a progress bar; without the engine's own line of figures."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record above the bar."""
        if record.module != "throughput":
            tqdm.write(self.format(record), file=STANDARD_ERROR)


@contextmanager
def log_to_stderr() -> Iterator[None]:
    """Shows the start-up report and what goes wrong while the program runs."""
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
