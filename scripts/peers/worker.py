"""A peer's side of the protocol: `python -m peers.worker NAME` in the peer's own Python.

JSON lines. Asked on standard input, answered on what was standard output before a library could
print there:
  {"do": "find"}                     -> {"ok": null}, when the engine is installed
  {"do": "load", "settings": {...}}  -> {"ok": {"version": ..., "options": {...}}}
  {"do": "run", "requests": [...]}   -> {"ok": {"seconds": ..., "requests": [...]}}, see `drive`
  end of the input                   -> the worker ends
What fails is answered with `{"error": "..."}`; the worker stays.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any, TextIO

from .drive import drive
from .orphans import die_with_parent


def main() -> int:
    """Serves requests until the input ends."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes beside the errors
    serve(sys.argv[1], sys.stdin, answers)
    return 0


def serve(name: str, asked: TextIO, answers: TextIO) -> None:
    """Answers each line in turn."""
    engine: Any = None
    for line in asked:
        message = json.loads(line)
        try:
            answer: Any = None
            if message["do"] == "find":
                adapter(name).find()
            elif message["do"] == "load":
                engine = adapter(name).load(message["settings"])
                answer = {"version": engine.version, "options": engine.options}
            else:
                answer = drive(engine, message["requests"])
            told = {"ok": answer}
        except BaseException as error:  # whatever it was, the other side has to hear of it
            traceback.print_exc()
            told = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(told) + "\n")
        answers.flush()


def adapter(name: str) -> Any:
    """The module that knows this peer.

    Its `find()` raises when the peer is not installed; `load(settings)` gives a `drive.Engine` that
    has a `version` and tells its `options`.
    """
    return importlib.import_module(f".{name.replace('-', '_')}_peer", __package__)


if __name__ == "__main__":
    sys.exit(main())
