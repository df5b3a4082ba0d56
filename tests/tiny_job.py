"""A batch job of a tiny model, run in processes of its own that may be ended at any moment.

Owns the job's input, its files, what an undisturbed run gives, and the comparison with that.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.fork_server import ForkServer
from tests.tiny_checkpoint import arguments

POLL = 0.001


def requests(count: int) -> str:
    """Lines of many kinds: greedy and drawn, several samples, logprobs, stops, bad ones."""
    rng = random.Random(3)
    lines: list[str] = []
    for i in range(count):
        prompt = "".join(rng.choice("abcdefgh") for _ in range(rng.randint(1, 20)))
        body = {"custom_id": f"r{i}", "prompt": prompt, "max_tokens": rng.randint(1, 24)}
        body |= [{}, {"temperature": 0}, {"n": 3}, {"logprobs": 2}, {"stop": "a"}, {"n": 0}][i % 6]
        lines.append(json.dumps(body) if i % 17 else "not JSON")
    return "\n".join(lines) + "\n"


@dataclass
class Job:
    """One input and the outputs of its runs.

    Attributes:
      folder: of the input and the logs, and of the outputs until `out_folder` is another.
      count: of lines.
      wanted: the output of a run that nobody disturbed.
    """

    server: ForkServer
    folder: Path
    model: Path
    count: int
    rng: random.Random = field(default_factory=lambda: random.Random(11))
    num_outputs: int = 0
    wanted: bytes = b""

    def __post_init__(self) -> None:
        self.out_folder = self.folder
        self.input.write_text(requests(self.count))
        self.renew()
        self.start()
        assert self.server.wait() == 3, self.log.read_text()
        self.wanted = self.out.read_bytes()
        assert self.wanted.count(b"\n") == self.count
        self.renew()

    @property
    def input(self) -> Path:
        return self.folder / "in.jsonl"

    @property
    def out(self) -> Path:
        return self.out_folder / f"out-{self.num_outputs}.jsonl"

    @property
    def partial(self) -> Path:
        return self.beside(".partial")

    @property
    def log(self) -> Path:
        return self.folder / f"log-{self.num_outputs}"

    def beside(self, suffix: str) -> Path:
        """One of the files beside the output."""
        return self.out.with_name(self.out.name + suffix)

    def renew(self) -> None:
        """From here on another output."""
        self.num_outputs += 1

    def start(self, more: Sequence[object] = ()) -> int:
        """Starts a run, with these options too; returns its process id."""
        given = [self.input, "--output", self.out, "--ordered", *more]
        return self.server.start([*given, "--model", self.model, *arguments()], self.log)

    def run(self, more: Sequence[object] = ()) -> tuple[int, str]:
        """A run to its end: its exit status, and what it said."""
        before = len(self.log.read_text()) if self.log.exists() else 0
        self.start(more)
        status = self.server.wait()
        return status, self.log.read_text()[before:]

    def wait_for_answers(self, more: int, until: float) -> None:
        """Returns when the run wrote so many answers, or when it is time."""
        wanted = self.num_answers() + more
        while self.num_answers() < wanted and time.monotonic() < until and not self.out.exists():
            time.sleep(POLL)

    def num_answers(self) -> int:
        """Whole lines that are there."""
        return self.count if self.out.exists() else self.written().count(b"\n")

    def written(self) -> bytes:
        """What the journal holds."""
        try:
            return self.partial.read_bytes()
        except FileNotFoundError:
            return b""

    def whole_lines(self) -> bytes:
        data = self.written()
        return data[: data.rfind(b"\n") + 1]

    def side_files(self) -> set[str]:
        """Suffixes of what is beside the output."""
        return {name[len(self.out.name) :] for name in os.listdir(self.out_folder)
                if name.startswith(self.out.name)} - {""}  # fmt: skip

    def finish(self) -> None:
        """Runs to the end: the output is that of the run that nobody disturbed."""
        status, shown = self.run()
        assert status == 3, shown
        self.check()

    def check(self) -> None:
        assert self.out.read_bytes() == self.wanted
        assert self.side_files() == {".manifest.json"}
        ids = [json.loads(line)["custom_id"] for line in self.wanted.splitlines()]
        given = [i for i in ids if i is not None]
        assert len(given) == len(set(given)) == self.count - -(-self.count // 17)
