#!/usr/bin/env python3
"""Answers a file of requests with a model on paged memory: arguments -> pagedjax.batch_job.

Owns the command line, and the search for a Python that has the project. Old Pythons (3.6 and later)
can read this file, so that a wrong one finds the right one, or tells where it comes from.
"""

import argparse
import atexit
import importlib.util
import os
import signal
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NEEDED = ("jax", "flax", "tokenizers", "tqdm")

# What is asked of the job and not of the engine.
JOB_OPTIONS = (
    "check",
    "max_inflight",
    "on_bad_line",
    "ordered",
    "overwrite",
    "page_map",
    "rate",
    "ray",
    "ray_workers",
    "request_timeout",
    "stats",
)

USAGE = "%(prog)s INPUT.jsonl [--output OUT] [--model M] [job and engine options]"

DESCRIPTION = """\
Answers the requests of INPUT.jsonl, one a line, with one line each.

A request is a line of OpenAI's batch format, for /v1/completions or /v1/chat/completions:

  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages":
   [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 32}}

(without the line break), or just the body of one:

  {"prompt": "The sea is", "max_tokens": 16, "temperature": 0}
  {"messages": [{"role": "user", "content": "List three fruits."}], "seed": 7, "n": 2}

A prompt is a text, a list of token ids, or a list of either. Sampling parameters have OpenAI's
names and vLLM's (top_k, min_p, repetition_penalty, stop_token_ids, ignore_eos, prompt_logprobs,
...). One that is unknown or not supported is refused, never ignored. "return_token_ids": true adds
the ids. A request without a seed draws as its custom_id and --seed decide: the order of the lines
changes no answer. A line in the short form may have a custom_id too; without one it is line-N.

A bad line becomes an error line that tells its number; all others are answered.

With --output OUT the job can be killed at any moment: the same command continues it. Answers are
appended to OUT.partial as they come (tail it) and synced every two seconds; OUT is there when all
are, at once. OUT.manifest.json says which job it is: with another input, model or parameter OUT is
refused. Sizes and memory may change. Answers hold no times ("created" is 0) and no counts of
cached tokens, so the same job gives the same output, with --ordered the same bytes; sums of
floating point numbers depend on what runs together, unless --batch-invariant is given."""

EPILOG = """\
exit status:
  0  every line was answered (an empty input too)
  2  nothing was started: no such file or model, a bad option, too little memory, OUT is in use or
     belongs to another job
  3  done, and some lines got an error: their "error" is not null, their status_code is not 200
  75 interrupted (Ctrl-C and SIGTERM finish the step), or a file could not be written, such as on a
     full disk: the same command continues
  70 the engine failed: the same command continues
  130 interrupted, 70 broken off, without --output: nothing to continue

example:
  scripts/demo                                    once: makes .venv and gets the default model
  scripts/serve_batch.py examples/prompts.jsonl --output answers.jsonl
  zcat prompts.jsonl.gz | scripts/serve_batch.py - --output answers.jsonl --ordered

Progress and messages go to standard error."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in two lines; the whole usage would bury it."""

    def error(self, message: str) -> None:  # type: ignore[override]
        """Ends the program with status 2."""
        self.exit(2, "serve_batch: error: " + message + "\nserve_batch: see --help\n")


def ensure_environment() -> None:
    """Starts this program again with the checkout's own Python, unless this one will do."""
    fits = sys.version_info >= (3, 12)
    if fits and all(importlib.util.find_spec(name) for name in NEEDED):
        sys.path.insert(0, ROOT)  # this checkout, and not what else may be installed
        return
    environment = os.path.join(ROOT, ".venv")
    python = os.path.join(environment, "bin", "python")
    if os.path.realpath(sys.prefix) != os.path.realpath(environment) and os.access(python, os.X_OK):
        os.environ.pop("PYTHONHOME", None)  # that of this Python would break the other one
        os.execv(python, [python, os.path.abspath(__file__)] + sys.argv[1:])  # noqa: RUF005
    sys.stderr.write(
        f"serve_batch: error: this Python ({sys.executable}) lacks what pagedjax needs: run "
        "scripts/demo once, which makes .venv, then this program again.\n"
    )
    sys.exit(2)


def parser() -> Parser:
    """The command line."""
    made = Parser(
        prog="serve_batch.py",
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    made.add_argument(
        "input",
        metavar="INPUT.jsonl",
        help="the requests: a file, also packed by gzip, or - for standard input, which is kept "
        "in OUT.input until the job is done (to continue, give it again, or < /dev/null)",
    )
    _add_output(made)
    _add_job(made)
    _add_ray(made)
    _add_engine(made)
    return made


def _add_output(made: Parser) -> None:
    group = made.add_argument_group("output and model")
    group.add_argument(
        "--output",
        "-o",
        metavar="OUT",
        help="the answers (default: standard output, from which nothing can be continued)",
    )
    group.add_argument(
        "--ordered",
        action="store_true",
        help="answers in the order of the input (default: as they come)",
    )
    group.add_argument(
        "--overwrite",
        action="store_true",
        help="remove what another job, or this one when it was done, left as OUT; a job that was "
        "begun is continued all the same",
    )
    group.add_argument(
        "--model",
        metavar="M",
        help="a directory in Hugging Face's layout, a .gguf file, a hub id (needs a network), or "
        "smollm2-135m-instruct, the default, which scripts/demo installs",
    )
    group.add_argument(
        "--dtype",
        help="of weights and pages: auto (default: the weights' own; for quantised files float32 "
        "on a CPU, bfloat16 elsewhere), float32, bfloat16 or float16",
    )
    group.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="with its custom_id, what a request without a seed draws from (default 0)",
    )


def _add_job(made: Parser) -> None:
    group = made.add_argument_group("job")
    group.add_argument(
        "--check",
        action="store_true",
        help="run nothing: read all lines, show bad ones, count requests and tokens (exit status "
        "3 with bad lines)",
    )
    group.add_argument(
        "--rate",
        type=float,
        metavar="N",
        help="output tokens/s, for --check's estimate of time (default: those of OUT's last run)",
    )
    group.add_argument(
        "--on-bad-line",
        metavar="WHAT",
        help="error-record (default), or abort: start nothing when a line is bad",
    )
    group.add_argument(
        "--max-inflight",
        type=int,
        metavar="N",
        help="sequences in the engine at once, running and waiting; memory is bounded by it "
        "(default: 4 x --max-num-seqs)",
    )
    group.add_argument(
        "--stats",
        metavar="FILE",
        help="append the figures of progress as JSON lines, one a second",
    )
    group.add_argument(
        "--page-map",
        action="store_true",
        help="draw the page pool while it works, on a terminal: # held (a colour for each "
        "request), 2-9 + shared by so many, o cached, . free",
    )


def _add_ray(made: Parser) -> None:
    group = made.add_argument_group(
        "many machines",
        "the same job through Ray Data (pip install 'pagedjax[ray]'); options of the engine and\n"
        "--max-inflight hold for each worker's",
    )
    group.add_argument(
        "--ray",
        nargs="?",
        const="",
        type=ray_address,
        metavar="ADDRESS",
        help="answer on a Ray cluster: auto or HOST:PORT joins the one that this machine belongs "
        "to; without ADDRESS one is started here. M must be there on every machine",
    )
    group.add_argument(
        "--ray-workers",
        type=int,
        metavar="N",
        help="engines (default: one for each GPU or TPU chip of the cluster, or for each host "
        "where there are none)",
    )


def ray_address(text: str) -> str:
    """What --ray takes; the name of a file behind it is INPUT."""
    if text in ("", "auto") or ":" in text:
        return text
    raise argparse.ArgumentTypeError(
        f"ADDRESS must be auto or HOST:PORT. Got {text}: put --ray behind INPUT"
    )


def _add_engine(made: Parser) -> None:
    group = made.add_argument_group("engine (vLLM's names where it is the same thing)")
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="longest prompt plus answer in tokens; one such request must fit into the pool "
        "(default: what the model allows and the pool holds)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        "--memory-utilization",
        dest="memory_utilization",
        type=float,
        metavar="F",
        help="share of the device's memory for weights, pool and temporaries (default 0.9; on a "
        "CPU a quarter of the available RAM, at most 2 GiB, for the pool)",
    )
    group.add_argument(
        "--num-pages",
        type=int,
        metavar="N",
        help="pages of the pool, instead of sizing it by memory",
    )
    group.add_argument(
        "--page-size",
        "--block-size",
        dest="page_size",
        type=int,
        metavar="N",
        help="tokens of a page, a power of two up to 256 (default: CPU 16, GPU 64, TPU 128)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help="sequences in one step (default: CPU 32, GPU and TPU 256)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="tokens in one step (default: CPU 512, GPU 8192, TPU 2048)",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action="store_true",
        help="keep the pages of finished prompts for requests that begin alike (default)",
    )
    group.add_argument(
        "--no-enable-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="compute every prompt anew",
    )
    group.add_argument(
        "--attention-implementation",
        metavar="NAME",
        help="the kernel: mosaic_gpu, mosaic_tpu, native_cpu or xla (default: the best one for the "
        "device)",
    )
    group.add_argument(
        "--cascade-attention",
        action="store_true",
        help="sequences that share a long prefix read it once (Pallas kernels only)",
    )
    _add_steps(made)
    _add_narrow_types(made)
    _add_memory_pressure(made)
    _add_event_log(made)
    _add_policy(made)


def _add_steps(made: Parser) -> None:
    group = made.add_argument_group("steps")
    group.add_argument(
        "--batch-invariant",
        action="store_true",
        help="the same bits for a prompt whatever else runs; every step then has "
        "--max-num-batched-tokens (default here: --max-num-seqs, at least 64)",
    )
    group.add_argument(
        "--no-async-scheduling",
        dest="async_scheduling",
        action="store_false",
        help="wait for each step before the next one is planned and launched",
    )


def _add_policy(made: Parser) -> None:
    group = made.add_argument_group("who goes first, and how long")
    group.add_argument(
        "--scheduling-policy",
        metavar="POLICY",
        help='fcfs (default), in the order of the lines, or priority: by the lines\' "priority", '
        "smaller numbers first",
    )
    group.add_argument(
        "--priority-ageing",
        type=float,
        metavar="S",
        help="seconds of waiting that make up for one level of priority (default 60)",
    )
    group.add_argument(
        "--request-timeout",
        type=float,
        metavar="S",
        help="seconds that a prompt may take once the engine has it; a line that takes longer gets "
        'an error of code "timeout" (default: none; "timeout" in a line goes before it)',
    )


def _add_event_log(made: Parser) -> None:
    made.add_argument_group("afterwards").add_argument(
        "--event-log",
        metavar="FILE",
        help="write all that the scheduler is asked and decides (prompts as token ids, too); "
        "`pagedjax explain --event-log FILE` then says why a request waited or was slow; each run "
        "begins the file anew, one that continues a job too",
    )


def _add_narrow_types(made: Parser) -> None:
    group = made.add_argument_group("eight bits")
    group.add_argument(
        "--kv-cache-dtype",
        metavar="TYPE",
        help="of keys and values in pages: auto (default), fp8 or int8; the last two hold about "
        "twice as many tokens",
    )
    group.add_argument(
        "--quantization",
        metavar="TYPE",
        help="of the layers' matrices, as they are loaded: int8 or float8 (also fp8); half the "
        "memory of 16-bit ones; no faster on a CPU (default: none)",
    )


def _add_memory_pressure(made: Parser) -> None:
    group = made.add_argument_group("when pages run out")
    group.add_argument(
        "--swap-space",
        type=float,
        metavar="GIB",
        help="host memory for pages of requests that give way and of evicted prefixes "
        "(default 0: none)",
    )
    group.add_argument(
        "--preemption-mode",
        metavar="MODE",
        help="auto (default: the faster one by measured times), swap (move pages to the swap "
        "space) or recompute (drop them); without room in the swap space always recompute",
    )
    group.add_argument(
        "--victim-policy",
        metavar="POLICY",
        help="who gives way: latest (default) or least_cost",
    )


def main() -> int:
    """Runs the program; returns its exit status."""
    options = vars(parser().parse_args())
    ensure_environment()
    source, output = options.pop("input"), options.pop("output", None)
    try:
        from pagedjax import batch_job
    except KeyboardInterrupt:  # later ones are the job's own matter
        sys.stderr.write("serve_batch: interrupted before it began\n")
        return 130 if output is None else 75
    model = options.pop("model", "smollm2-135m-instruct")
    how = {name: options.pop(name) for name in JOB_OPTIONS if name in options}
    run = batch_job.main if how.get("ray") is None else batch_job.guarded_main
    return run(source, output, model=model, options=options, **how)


def run_as_program() -> None:
    """Ends with the status of `main`, which a signal does not change any more when it is known."""
    atexit.register(_ignore_signals)  # as the first one, it is called last
    status = main()

    def end(*_: object) -> None:
        os._exit(status)  # what is still to come, threads that end say, may take long

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)
    sys.exit(status)


def _ignore_signals() -> None:
    """Python gives signals their default actions back before it is at its end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    run_as_program()
