"""`python -m tests.aot.check`: compiles the kernels for chips that are not here, and judges.

A process for each chip, for a process can compile for one GPU only; two at a time. The parent
prints progress, a table, one line of JSON and what was not checked. Exit status: 0 all is well,
1 something is not, 2 wrong usage, 3 nothing could be checked.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.aot import configurations
from tests.aot.configurations import Case
from tests.aot.targets import TARGETS, UNDESCRIBED, Target, cuda_folder, environment

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS_BETWEEN_LINES = 15.0
TEMPORARY_SHARE = 0.1  # of a pool: more temporary memory than that in an update is a copy


@dataclass(slots=True)
class Outcome:
    """What became of one case."""

    chip: str
    what: str
    case: str
    problems: list[str] = field(default_factory=list)  # none: all is well
    kernels: list[dict[str, Any]] = field(default_factory=list)
    launches: dict[str, int] | None = None
    temp_bytes: int = 0
    seconds: float = 0.0


# ------------------------------------------------------------------------- in a process for a chip


def compile_cases(target: Target, cases: Iterable[Case]) -> None:
    """Compiles one case after the other; prints an outcome a line on standard output."""
    from tests.aot.compiling import Compiler

    compiler = Compiler(target)
    for case in cases:
        print(json.dumps({"begin": case.name}), flush=True)
        started = time.perf_counter()
        outcome = Outcome(target.name, case.what, case.name)
        try:
            _compile(compiler, target, case, outcome)
        except Exception as error:  # whatever a compiler raises is this case's result
            outcome.problems.append(f"{type(error).__name__}: {str(error)[:500]}")
        outcome.seconds = time.perf_counter() - started
        print(json.dumps(asdict(outcome)), flush=True)


def _compile(compiler: Any, target: Target, case: Case, outcome: Outcome) -> None:
    import jax

    from tests.aot import programs

    with jax.sharding.use_abstract_mesh(compiler.mesh):
        program = programs.build(case, target)
    counted = target.is_gpu and case.what == "step"
    compiled = compiler.compile(program.fn, program.args, program.donate, count_launches=counted)
    outcome.temp_bytes = compiled.temp_bytes
    outcome.kernels = [asdict(kernel) for kernel in compiled.kernels]
    outcome.launches = compiled.launches and asdict(compiled.launches)
    for kernel in compiled.kernels:
        outcome.problems += kernel_problems(target, kernel, program.planned_blocks)
    outcome.problems += pool_problems(compiled, program.pools)


def kernel_problems(target: Target, kernel: Any, planned_blocks: int | None) -> list[str]:
    """What is wrong with a Mosaic GPU kernel's figures."""
    found = []
    if kernel.architecture != target.architecture:
        found.append(f"{kernel.name} is for {kernel.architecture}, not {target.architecture}")
    if kernel.spill_bytes:
        found.append(f"{kernel.name} spills {kernel.spill_bytes} bytes")
    most = target.limit("shared_memory_per_block_optin")
    if kernel.shared_bytes > most:
        found.append(f"{kernel.name} takes {kernel.shared_bytes} of {most} bytes shared memory")
    if planned_blocks is not None and kernel.name.startswith("attend"):
        blocks = target.resident_blocks(kernel.threads, kernel.registers, kernel.shared_bytes)
        if blocks < planned_blocks:
            found.append(
                f"{kernel.name} was planned for {planned_blocks} blocks a multiprocessor, which "
                f"has room for {blocks}: {kernel.registers} registers, "
                f"{kernel.shared_bytes} bytes shared"
            )
    return found


def pool_problems(compiled: Any, pools: tuple[Any, ...]) -> list[str]:
    """Whether every pool is changed in place: aliased, no copy of it, no memory for one."""
    if not pools:
        return []
    sizes = [pool.size * pool.dtype.itemsize for pool in pools]
    found = []
    if compiled.alias_bytes < sum(sizes):  # a TPU counts the padding of its tiles too
        found.append(f"{compiled.alias_bytes} bytes aliased, not the {sum(sizes)} of the pools")
    if compiled.temp_bytes > TEMPORARY_SHARE * max(sizes):
        found.append(f"{compiled.temp_bytes} temporary bytes beside pools of {max(sizes)}")
    for shape in {pool.shape for pool in pools}:
        found += [f"copies a pool: {line[:160]}" for line in compiled.copies_of(shape)]
    return found


# ------------------------------------------------------------------------------------- the parent


class Progress:
    """Lines for people: failures at once, counts now and then."""

    def __init__(self, verbose: bool) -> None:
        self._verbose = verbose
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._last = 0.0

    def note(self, target: Target, done: int, of: int, outcome: Outcome) -> None:
        """One case ended."""
        with self._lock:
            now = time.monotonic() - self._started
            if outcome.problems or self._verbose:
                state = "FAILED: " + "; ".join(outcome.problems) if outcome.problems else "ok"
                print(f"{target.name}: {outcome.case}: {state}", flush=True)
            elif now - self._last >= SECONDS_BETWEEN_LINES or done == of:
                self._last = now
                print(f"{target.name}: {done} of {of} compiled, {now:.0f} s", flush=True)


def run_target(target: Target, cases: list[Case], level: str, progress: Progress) -> list[Outcome]:
    """Compiles in child processes: a new one where a compiler brought the last one down."""
    outcomes: list[Outcome] = []
    while len(outcomes) < len(cases):
        command = [sys.executable, "-m", "tests.aot.check", "--child", target.name]
        command += ["--level", level, "--names", *(c.name for c in cases[len(outcomes) :])]
        began: str | None = None
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stdout is not None
            assert child.stderr is not None
            noise: list[str] = []
            reader = threading.Thread(target=_keep_tail, args=(child.stderr, noise))
            reader.start()
            for line in child.stdout:
                message = _message(line)
                if message is None:
                    continue
                if "begin" in message:
                    began = message["begin"]
                    continue
                began = None
                outcomes.append(Outcome(**message))
                progress.note(target, len(outcomes), len(cases), outcomes[-1])
            reader.join()
        if child.returncode == 0 and began is None:
            break
        case = cases[len(outcomes)] if len(outcomes) < len(cases) else cases[-1]
        why = f"the process ended with status {child.returncode}: {' '.join(noise[-3:])[-400:]}"
        outcomes.append(Outcome(target.name, case.what, case.name, [why]))
        progress.note(target, len(outcomes), len(cases), outcomes[-1])
    return outcomes


def _message(line: str) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def _keep_tail(stream: Iterable[str], lines: list[str]) -> None:
    for line in stream:
        lines.append(line.strip())
        del lines[:-20]


def table(outcomes: list[Outcome]) -> str:
    """A line for each chip and kind of program."""
    head = ("chip", "what", "cases", "failed", "registers", "spills", "shared KB", "seconds")
    rows: list[tuple[str, ...]] = [head]
    keys = dict.fromkeys((o.chip, o.what) for o in outcomes)
    for chip, what in keys:
        group = [o for o in outcomes if (o.chip, o.what) == (chip, what)]
        kernels = [kernel for o in group for kernel in o.kernels]
        figures = ["-"] * 3
        if kernels:
            registers = [kernel["registers"] for kernel in kernels]
            figures = [
                f"{min(registers)}-{max(registers)}",
                str(sum(kernel["spill_bytes"] for kernel in kernels)),
                f"{max(kernel['shared_bytes'] for kernel in kernels) / 1024:.0f}",
            ]
        failed = sum(bool(o.problems) for o in group)
        seconds = sum(o.seconds for o in group)
        rows.append((chip, what, str(len(group)), str(failed), *figures, f"{seconds:.0f}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = []
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join(left + right).rstrip())
    return "\n".join(lines)


def steps(outcomes: list[Outcome]) -> list[str]:
    """How a GPU launches a whole step."""
    lines = []
    for o in outcomes:
        if o.launches:
            n = o.launches
            lines.append(
                f"{o.chip} {o.case}: {n['total']} launches ({n['last_layer']} for the last layer, "
                f"{n['mosaic']} of ours), {n['total'] - n['outside']} of them in "
                f"{n['buffers']} command buffers, {n['loops']} loops"
            )
    return lines


def missing(target: Target) -> str | None:
    """The package without which nothing can be compiled for a chip, if it is missing."""
    if not target.is_gpu:
        return None if importlib.util.find_spec("libtpu") else "libtpu"
    if not importlib.util.find_spec("jax_plugins.xla_cuda13"):
        return "jax-cuda13-pjrt"
    return None if (cuda_folder() / "bin" / "ptxas").is_file() else "nvidia-cuda-nvcc"


def main(arguments: list[str] | None = None) -> int:
    """Parses, compiles, prints."""
    args = _parse(arguments)
    if args.child:
        target = TARGETS[args.child]
        wanted = set(args.names)
        compile_cases(
            target, [c for c in configurations.cases(target, args.level) if c.name in wanted]
        )
        return 0
    chosen = [TARGETS[name] for name in args.chips]
    not_checked = {t.name: f"{package} is not installed" for t in chosen if (package := missing(t))}
    todo = {
        target: cases
        for target in chosen
        if target.name not in not_checked and (cases := _cases(target, args))
    }
    if not todo:
        print(f"Nothing was checked: {not_checked or 'no case matches'}")
        return 3 if not_checked else 2
    started = time.monotonic()
    count = sum(map(len, todo.values()))
    print(f"Compiling {count} programs for {len(todo)} chips, {args.jobs} at a time", flush=True)
    progress = Progress(args.verbose)
    with ThreadPoolExecutor(args.jobs) as pool:
        # The longest first, so that the processes end at about the same time.
        order = sorted(todo, key=lambda target: -len(todo[target]))
        work = [pool.submit(run_target, t, todo[t], args.level, progress) for t in order]
        outcomes = [outcome for future in work for outcome in future.result()]
    return report(outcomes, not_checked, time.monotonic() - started)


def report(outcomes: list[Outcome], not_checked: dict[str, str], seconds: float) -> int:
    """Prints everything; returns the exit status."""
    failed = [o for o in outcomes if o.problems]
    print()
    print(table(outcomes))
    for line in steps(outcomes):
        print(line)
    for o in failed:
        print(f"FAILED {o.chip} {o.case}: {'; '.join(o.problems)}")
    print("Not checked: whether a kernel launches, its values and its speed; those need the chip.")
    for name, why in {**UNDESCRIBED, **not_checked}.items():
        print(f"Not checked: {name}: {why}")
    summary = {
        "programs": len(outcomes),
        "failed": len(failed),
        "chips": sorted({o.chip for o in outcomes}),
        "not_checked": sorted([*UNDESCRIBED, *not_checked]),
        "spill_bytes": sum(k["spill_bytes"] for o in outcomes for k in o.kernels),
        "most_registers": max((k["registers"] for o in outcomes for k in o.kernels), default=0),
        "steps": {f"{o.chip} {o.case}": o.launches for o in outcomes if o.launches},
        "seconds": round(seconds, 1),
    }
    print(json.dumps(summary))
    return 1 if failed else 0


def _cases(target: Target, args: argparse.Namespace) -> list[Case]:
    pattern = re.compile(args.only)
    return [c for c in configurations.cases(target, args.level) if pattern.search(c.name)]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="aot_check", description=(__doc__ or "").split("\n\n")[0])
    names = ", ".join(TARGETS)
    parser.add_argument(
        "--chips", default=list(TARGETS), type=lambda s: s.split(","), help=f"of {names}"
    )
    parser.add_argument(
        "--level",
        choices=("sample", "pairs", "all"),
        default="sample",
        help="configurations: dealt to the chips of a family; all pairs on each; all (hours)",
    )
    parser.add_argument("--all", dest="level", action="store_const", const="all")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--verbose", action="store_true", help="a line for each case")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--names", nargs="*", default=[], help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    unknown = [name for name in args.chips if name not in TARGETS]
    if unknown:
        parser.error(f"`--chips` must be of {names}. Got {', '.join(unknown)}.")
    if args.jobs < 1:
        parser.error(f"`--jobs` must be at least 1. Got {args.jobs}.")
    return args


if __name__ == "__main__":
    sys.exit(main())
