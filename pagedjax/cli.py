"""The command `pagedjax`: arguments -> what reads event logs. Loads JAX for none of it.

Exit status: 0 done (of `replay`: every decision was the same), 1 a decision differs, 2 a file or a
name is wrong.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from pagedjax.errors import PagedJaxError
from pagedjax.version import __version__

OK, DIFFERS, WRONG = 0, 1, 2  # exit status


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except PagedJaxError as error:
        print(f"pagedjax: error: {error}", file=sys.stderr)
        return WRONG
    except BrokenPipeError:  # `| head` has what it wanted
        # Python would try again to write, and complain, when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="pagedjax", description="Tells what an engine did, from its event log."
    )
    made.add_argument("--version", action="version", version=f"pagedjax {__version__}")
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    _add_explain(commands)
    _add_replay(commands)
    return made


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    made = commands.add_parser(
        "explain",
        help="why a request waited, gave way, hit or missed the prefix cache",
        description="Tells in words what happened to a request, or, without one, lists all.",
    )
    made.add_argument("request", nargs="?", metavar="REQUEST", help="id of a request")
    made.add_argument(
        "--event-log",
        required=True,
        metavar="FILE",
        help="what `event_log=` of LLM or --event-log of serve_batch.py wrote",
    )
    made.set_defaults(run=_explain)


def _add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    made = commands.add_parser(
        "replay",
        help="whether the same inputs lead to the same decisions",
        description="Gives the inputs of an event log to a scheduler of this version and compares "
        "every decision with the log's.",
    )
    made.add_argument("file", metavar="FILE", help="an event log")
    made.set_defaults(run=_replay)


def _explain(options: argparse.Namespace) -> int:
    from pagedjax.explain import explain, overview
    from pagedjax.history import History

    history = History.load(options.event_log)
    print(overview(history) if options.request is None else explain(history, options.request))
    return OK


def _replay(options: argparse.Namespace) -> int:
    from pagedjax.replay import replay

    # What the scheduler said when the log was made, it says again: nobody wants to read it here.
    logging.getLogger("pagedjax").addHandler(logging.NullHandler())
    report = replay(options.file)
    if report.version != __version__:
        print(f"the log is of pagedjax {report.version}, this is {__version__}")
    print(
        f"{report.num_lines} lines, {report.num_steps} steps, {report.num_decisions} decisions "
        + ("are the same" if report.difference is None else "up to the first difference:")
    )
    if report.difference is not None:
        print(report.difference)
        return DIFFERS
    return OK
