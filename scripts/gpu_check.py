"""Proves and measures the kernels on a machine with a GPU: correctness first, then speed.

Parts, in this order, each within its share of `--budget` seconds: what the device is; the kernel
suite, compiled, with poisoned memory; float64, and which implementation answered; cascades and
batch invariance; ceilings; decode, prefill and page updates beside XLA's; other libraries where
they are installed; the engine with a model of random weights. The results file is written after
each part. Exit status: 0 when what was to be correct was run and is correct, 1 otherwise.

`--small` runs every part on a CPU in little time, to test this program and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SUITES = ("tests/pallas_kernels/test_every_implementation.py",)
SMALL_SUITES = ("tests/pallas_kernels/test_tuning.py",)


@dataclass(slots=True)
class Run:
    """What the parts share: options, time and the results file."""

    small: bool
    output: Path
    ends: float  # time.monotonic() at which the budget is spent
    results: dict[str, Any]

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.ends - time.monotonic()

    def write(self) -> None:
        """Puts the results on disk, whole: a kill leaves the last file that was complete."""
        partial = self.output.with_name(self.output.name + ".partial")
        partial.write_text(json.dumps(self.results, indent=1) + "\n", "utf-8")
        os.replace(partial, self.output)


@dataclass(frozen=True, slots=True)
class Part:
    """One section of the check."""

    name: str
    share: float  # seconds after which it begins nothing new
    run: Callable[[Run, float], dict[str, Any]]  # (run, deadline) -> its results
    must_pass: bool = False  # its result has `passed`, which decides the exit status


# ------------------------------------------------------------------------------------ correctness


def device_facts(run: Run, deadline: float) -> dict[str, Any]:
    """The device, its driver and the software."""
    del deadline
    from scripts import kernel_timing

    found = kernel_timing.facts()
    query = "name,driver_version,clocks.max.sm,clocks.max.memory,memory.total"
    found["nvidia_smi"] = _output(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"])
    found["python"] = sys.version.split()[0]
    found["passed"] = run.small or found["platform"] == "gpu"
    if not found["passed"]:
        found["error"] = f"no GPU: JAX has {found['platform']!r}"
    return found


def kernel_suite(run: Run, deadline: float) -> dict[str, Any]:
    """The tests of the kernels through pytest, in a process of its own, compiled."""
    suites = SMALL_SUITES if run.small else SUITES
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
    # Warnings are no errors here: they come from libraries of other versions than the pinned ones.
    command += ["--noconftest", "-W", "default", "--tb=short", *suites]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if not run.small:
        environment["PAGEDJAX_TEST_COMPILED"] = "1"
    try:
        result = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=max(10.0, deadline - time.monotonic()),
        )
        text, status = result.stdout + result.stderr, result.returncode
    except subprocess.TimeoutExpired as expired:
        text, status = _text(expired.stdout) + "\ntimed out", 124
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", text)}
    return {
        "passed": status == 0 and counts.get("passed", 0) > 0,
        "status": status,
        "counts": counts,
        "tail": text[-6000:] if status else text[-300:],
    }


def against_float64(run: Run, deadline: float) -> dict[str, Any]:
    """Values against NumPy in float64, and that the kernels gave them: XLA's would be right too."""
    from scripts import kernel_proofs

    return kernel_proofs.against_float64(kernel_proofs.asked_for(run.small), run.small, deadline)


def properties(run: Run, deadline: float) -> dict[str, Any]:
    """What the kernels promise: a cascade changes no result, a batch no bit of a row."""
    del deadline
    from scripts import kernel_proofs

    found = {
        "cascade": kernel_proofs.cascade(run.small),
        "batch_invariant": kernel_proofs.batch_invariance(
            kernel_proofs.asked_for(run.small), run.small
        ),
    }
    return {"passed": all(part["passed"] for part in found.values()), **found}


# ------------------------------------------------------------------------------------------ speed


def ceilings(run: Run, deadline: float) -> dict[str, Any]:
    """What this device copies, reads and multiplies in a second."""
    del run, deadline
    from scripts import kernel_timing

    return kernel_timing.ceilings(kernel_timing.Device.at_hand())


def sweep(run: Run, deadline: float) -> dict[str, Any]:
    """Decode, prefill, writes and copies with the kernels, and a few lines with XLA."""
    from scripts import bench_kernels, kernel_timing

    limits = run.results.get("ceilings") or {}
    if "copy_bytes_per_s" not in limits:
        return {"skipped": "no ceilings were measured"}
    device = kernel_timing.Device.at_hand()
    lines: list[dict[str, Any]] = []
    skipped = 0
    for what, sizes, implementation in _measurements(run.small):
        if time.monotonic() > deadline:
            skipped += 1
            continue
        line = kernel_timing.measure(what, sizes, device, implementation, limits)
        lines.append(line)
        _say(bench_kernels.table([line]).splitlines()[-1])
        run.results["sweep"] = {"lines": lines}
        run.write()
    _say(bench_kernels.table(lines))
    return {"lines": lines, "skipped": skipped}


def _measurements(small: bool) -> Iterator[tuple[str, Any, str]]:
    """What matters most first: the rest is skipped when time is short."""
    from scripts.kernel_proofs import TINY
    from scripts.kernel_timing import Sizes

    ours = "xla" if small else "mosaic_gpu"
    if small:
        yield "decode", Sizes(batch=2, context=64, page_size=16, **TINY), ours
        yield "prefill", Sizes(batch=1, context=32, new=32, page_size=16, **TINY), ours
        yield "write_kv", Sizes(batch=2, context=64, page_size=16, **TINY), ours
        yield "copy_pages", Sizes(batch=2, context=64, page_size=16, **TINY), ours
        return
    for page_size in (64, 16):
        yield "decode", Sizes(context=8192, page_size=page_size), ours
    yield "decode", Sizes(context=8192, dtype="float8_e4m3fn"), ours
    for new in (2048, 8192):
        yield "prefill", Sizes(batch=1, context=new, new=new), ours
    yield "prefill", Sizes(batch=1, context=8192, new=1024), ours
    for batch in (64, 256):
        yield "write_kv", Sizes(batch=batch, context=1024), ours
    yield "write_kv", Sizes(batch=1, context=2048, new=2048), ours
    yield "copy_pages", Sizes(batch=32, context=1024), ours
    yield "decode", Sizes(context=8192), "xla"
    yield "prefill", Sizes(batch=1, context=2048, new=2048), "xla"
    for batch in (1, 8, 256):
        for context in (1024, 8192, 32768):
            if batch * context <= 2**22:
                yield "decode", Sizes(batch=batch, context=context), ours
    for context in (1024, 32768):
        for page_size, dtype in ((64, "bfloat16"), (16, "bfloat16"), (64, "float8_e4m3fn")):
            yield "decode", Sizes(context=context, page_size=page_size, dtype=dtype), ours
    yield "write_kv", Sizes(batch=64, context=1024), "xla"
    yield "copy_pages", Sizes(batch=32, context=1024), "xla"


OTHERS = {
    "jax_triton": """
import warnings; warnings.simplefilter("ignore")
import json, sys; sys.path.insert(0, {root!r})
import jax, jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import paged_attention as op
from scripts import kernel_timing as t
s = t.Sizes(context=8192, page_size=64); d = t.Device.at_hand(); tables = t.tables(s, 2)
k, v = jax.random.normal(jax.random.key(0), (2, 8, 1 + 2 * 64 * 128, 64, 128), jnp.bfloat16)
q = jax.random.normal(jax.random.key(1), (64, 32, 128), jnp.bfloat16)
lens = jnp.full((64,), 8192, jnp.int32)
f = jax.jit(lambda q, k, v, table: op.paged_attention(q, k, v, table, lens))
print(json.dumps({{"seconds": t.seconds_a_call(lambda: f(q, k, v, tables[0]), d),
                   "bytes": s.kv_bytes}}))
""",
    "torch_sdpa": """
import json, time, statistics, torch
q = torch.randn(64, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
k, v = (torch.randn(64, 8, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
f = torch.nn.functional.scaled_dot_product_attention
for _ in range(3): f(q, k, v, enable_gqa=True)
torch.cuda.synchronize(); runs = []
for _ in range(7):
    started = time.perf_counter()
    for _ in range(20): f(q, k, v, enable_gqa=True)
    torch.cuda.synchronize(); runs.append((time.perf_counter() - started) / 20)
print(json.dumps({"seconds": statistics.median(runs), "bytes": k.nbytes + v.nbytes}))
""",
}


def other_libraries(run: Run, deadline: float) -> dict[str, Any]:
    """Decode of 64 sequences of 8,192 positions by others: dense (torch) or paged (JAX)."""
    found: dict[str, Any] = {}
    programs = {"none": "print('{\"seconds\": 1.0}')"} if run.small else OTHERS
    for name, program in programs.items():
        left = deadline - time.monotonic()
        if left < 5:
            found[name] = "skipped: no time"
            continue
        source = program.format(root=str(ROOT)) if "{root" in program else program
        environment = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"}
        try:
            result = subprocess.run(
                [sys.executable, "-c", source],
                capture_output=True,
                text=True,
                check=False,
                timeout=left,
                env=environment,
            )
            found[name] = json.loads(result.stdout.strip().splitlines()[-1])
        except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
            found[name] = f"{type(error).__name__}: {str(error)[:200]}"
    return found


def engine(run: Run, deadline: float) -> dict[str, Any]:
    """Tokens a second of the engine with random weights of the sizes of Llama-3-8B."""
    del deadline
    import jax.numpy as jnp
    from flax import nnx

    from pagedjax import LLM, SamplingParams
    from pagedjax.models.decoder import Decoder, ModelConfig

    sizes: dict[str, Any] = {
        "vocab_size": 128256, "embed_dim": 4096, "ffw_dim": 14336, "num_layers": 32,
        "num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "max_positions": 4096,
    }  # fmt: skip
    batch, prompt, answer = 64, 512, 128
    options: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 4096}
    if run.small:
        sizes = {
            "vocab_size": 64, "embed_dim": 32, "ffw_dim": 64, "num_layers": 2,
            "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8, "max_positions": 64,
        }  # fmt: skip
        batch, prompt, answer = 4, 8, 4
        options = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_pages": 32}
    dtype = jnp.float32 if run.small else jnp.bfloat16
    model = Decoder(ModelConfig(**sizes), dtype=dtype, rngs=nnx.Rngs(0))
    llm = LLM(model, max_model_len=min(2048, sizes["max_positions"]), progress=False, **options)
    prompts = [[(7 * i + j) % sizes["vocab_size"] for j in range(prompt)] for i in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False)
    seconds: list[float] = []
    outputs: list[Any] = []
    for turn in range(3):
        for ids in prompts:
            ids[0] = (ids[0] + 1 + turn) % sizes["vocab_size"]  # no prefix of the turn before
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
    generated = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "passed": generated == batch * answer and not any(o.error for o in outputs),
        "output_tokens_per_s": generated / min(seconds[1:]),
        "seconds": seconds,
        "batch": batch,
        "prompt": prompt,
        "answer": answer,
        "report": llm.report.to_dict(),
    }


PARTS = (
    Part("device", 30, device_facts, must_pass=True),
    Part("suite", 200, kernel_suite, must_pass=True),
    Part("float64", 30, against_float64, must_pass=True),
    Part("properties", 40, properties, must_pass=True),
    Part("ceilings", 20, ceilings),
    Part("sweep", 120, sweep),
    Part("others", 30, other_libraries),
    Part("engine", 90, engine, must_pass=True),
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the parts; writes the results after each."""
    args = _parse(arguments)
    started = time.monotonic()
    run = Run(args.small, args.output, started + args.budget, {})
    unsure = []
    for part in PARTS:
        if args.only and part.name not in args.only:
            continue
        result = run_part(part, run)
        run.results[part.name] = result
        run.results["seconds"] = round(time.monotonic() - started, 1)
        if part.must_pass and not result.get("passed"):
            unsure.append(part.name)
        # Until every part that must pass has run, nothing is passed: a kill leaves "false".
        ran = all(p.name in run.results for p in PARTS if p.must_pass)
        run.results["passed"] = ran and not unsure
        run.write()
    _say(f"{'ok' if not unsure else 'NOT ok: ' + ', '.join(unsure)}; all of it in {run.output}")
    return 1 if unsure else 0


def run_part(part: Part, run: Run) -> dict[str, Any]:
    """One part; whatever it raises is its result. Skipped when the budget is spent."""
    if run.left < min(10.0, part.share):
        _say(f"{part.name}: skipped, the time is spent")
        return {"skipped": "the time was spent"}
    began = time.monotonic()
    try:
        result = part.run(run, began + min(part.share, run.left))
    except Exception as error:  # the next part may still tell something
        result = {"passed": False, "error": f"{type(error).__name__}: {str(error)[:2000]}"}
    seconds = round(time.monotonic() - began, 1)
    told = (
        result.get("error") or {True: "passed", False: "FAILED", None: "ran"}[result.get("passed")]
    )
    _say(f"{part.name}: {told}, {seconds} s")
    return {**result, "part_seconds": seconds}


def _output(command: list[str]) -> str | None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _text(output: str | bytes | None) -> str:
    return output.decode("utf-8", "replace") if isinstance(output, bytes) else output or ""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--budget", type=float, default=480.0, help="seconds in all")
    parser.add_argument("--small", action="store_true", help="a dry run on a CPU")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", type=lambda s: s.split(","), help=f"parts, of {','.join(names)}")
    args = parser.parse_args(arguments)
    unknown = sorted(set(args.only or ()) - set(names))
    if unknown:
        parser.error(f"`--only` must be of {', '.join(names)}. Got {unknown}.")
    return args


if __name__ == "__main__":
    sys.exit(main())
