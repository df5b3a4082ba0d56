"""The command `pagedjax`: what fits into memory, and what reads event logs (these load no JAX).

Exit status: 0 done (of `plan`: it fits; of `replay`: every decision was the same), 1 it does not
fit, or a decision differs, 2 a file, a name or an option is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from pagedjax.config import ALIASES, EngineConfig
from pagedjax.errors import CapacityError, ConfigError, PagedJaxError
from pagedjax.version import __version__

OK, DIFFERS, WRONG = 0, 1, 2  # exit status
DOES_NOT_FIT = 1

_ENGINE_OPTIONS = {field.name: str(field.type) for field in dataclasses.fields(EngineConfig)}
_UNITS = {"": 1, "MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}  # of --memory

type _Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:
        print(f"pagedjax: error: {_unknown(unknown, options.known)}", file=sys.stderr)
        return WRONG
    try:
        return options.run(options)
    except CapacityError as error:
        print(f"pagedjax: it does not fit: {error}", file=sys.stderr)
        return DOES_NOT_FIT
    except PagedJaxError as error:
        print(f"pagedjax: error: {error}", file=sys.stderr)
        return WRONG
    except BrokenPipeError:  # `| head` has what it wanted
        # Python would try again to write, and complain, when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="pagedjax",
        description="Tells what an engine would have room for, and, from its event log, what it "
        "did.",
    )
    made.add_argument("--version", action="version", version=f"pagedjax {__version__}")
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_plan, _add_explain, _add_replay):
        command = add(commands)
        command.set_defaults(known=list(command._option_string_actions))
    return made


def _unknown(arguments: Sequence[str], known: Sequence[str]) -> str:
    """What to say of arguments that the command does not have."""
    first = next((name for name in arguments if name.startswith("-")), arguments[0])
    near = difflib.get_close_matches(first.split("=")[0], known, n=1)
    hint = f" Did you mean {near[0]}?" if near else " See --help."
    return f"unknown {'option' if first.startswith('-') else 'argument'} {first}.{hint}"


def _add_plan(commands: _Commands) -> argparse.ArgumentParser:
    made = commands.add_parser(
        "plan",
        help="what of a model fits into memory, without loading it",
        description="Says what an engine with these options would have room for: pages, tokens, "
        "requests, the memory of each part, the step sizes that it compiles. Reads the headers of "
        "the model's files, and no weights.",
        allow_abbrev=False,
    )
    made.add_argument(
        "model",
        metavar="MODEL",
        help="a directory in Hugging Face's layout, a .gguf file, a hub id, or "
        "smollm2-135m-instruct",
    )
    made.add_argument(
        "--length", type=int, metavar="N", help="count the requests of so many tokens, too"
    )
    made.add_argument("--json", action="store_true", help="print one JSON object")
    made.add_argument(
        "--memory",
        type=_bytes,
        metavar="SIZE",
        help="plan for a device that is not here and of whose memory JAX may take so much (unless "
        "told otherwise, it takes three quarters of a GPU's): bytes, or as in 24GB or 80GiB",
    )
    made.add_argument(
        "--platform",
        choices=("cpu", "gpu", "tpu"),
        help="of that device: gpu (default; as for a Hopper), tpu (as for a v5e) or cpu",
    )
    group = made.add_argument_group("engine options (`EngineConfig` tells what they mean)")
    for name, kind in _ENGINE_OPTIONS.items():
        names = [name, *(alias for alias, meant in ALIASES.items() if meant == name)]
        group.add_argument(
            *("--" + each.replace("_", "-") for each in names),
            dest=name,
            default=argparse.SUPPRESS,
            **_value(kind),
        )
    made.set_defaults(run=_plan)
    return made


def _value(kind: str) -> dict[str, Any]:
    """How an option of such a type is read; its value is checked by `EngineConfig`."""
    if kind == "bool":
        return {"action": argparse.BooleanOptionalAction}
    if kind.startswith("int"):
        return {"type": int, "metavar": "N"}
    return {"type": float if kind.startswith("float") else str, "metavar": "X"}


def _bytes(text: str) -> int:
    """80GiB, 24GB or 1000000 -> bytes."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)", text)
    unit = None if found is None else _UNITS.get(found[2].upper())
    if found is None or unit is None or (number := int(float(found[1]) * unit)) < 1:
        raise argparse.ArgumentTypeError(
            f"must be bytes, or a number of MiB, GiB, MB or GB, such as 80GiB. Got {text!r}."
        )
    return number


def _add_explain(commands: _Commands) -> argparse.ArgumentParser:
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
    return made


def _add_replay(commands: _Commands) -> argparse.ArgumentParser:
    made = commands.add_parser(
        "replay",
        help="whether the same inputs lead to the same decisions",
        description="Gives the inputs of an event log to a scheduler of this version and compares "
        "every decision with the log's.",
    )
    made.add_argument("file", metavar="FILE", help="an event log")
    made.set_defaults(run=_replay)
    return made


def _plan(options: argparse.Namespace) -> int:
    given = vars(options)
    config = EngineConfig(**{name: given[name] for name in _ENGINE_OPTIONS if name in given})
    if options.platform is not None and options.memory is None:
        raise ConfigError("`--platform` must be given with `--memory`, of a device not here.")
    from pagedjax.memory_plan import described, make_plan

    target = None
    if options.memory is not None:
        target = described(options.platform or "gpu", options.memory)
    plan = make_plan(options.model, config, length=options.length, target=target)
    print(json.dumps(plan.to_dict()) if options.json else "\n".join(plan.lines()))
    return OK


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
