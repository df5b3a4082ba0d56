#!/usr/bin/env python3
"""Measures the kernels on the device at hand: a table, then one JSON line.

decode and prefill attend with a plan made beforehand, as the layers of a model do; write_kv and
copy_pages change a donated pool. Every figure is the median of several runs; a run goes over more
memory than the device's caches hold, all of it random, and the ceilings (a copy, a read, a matrix
product) are measured in the same process: compare within one output only.

`--sweep` tries tile sizes around the tuned ones; with `--save` the fastest go to
pallas_kernels/tuned/, in a file named after the device.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from pallas_kernels import attention_plan, tuning  # noqa: E402
from pallas_kernels.attention_plan import Problem  # noqa: E402
from pallas_kernels.paged_attention import MAX_PAGE_SIZE, best_implementation  # noqa: E402
from pallas_kernels.platform import MOSAIC  # noqa: E402
from pallas_kernels.tuning import KernelConfig  # noqa: E402
from scripts import kernel_timing  # noqa: E402
from scripts.kernel_timing import QUANTISED, Device, Sizes, q_dtype  # noqa: E402

OPERATIONS = ("decode", "prefill", "write_kv", "copy_pages")
IMPLEMENTATIONS = ("mosaic_gpu", "mosaic_tpu", "native_cpu", "xla")
DTYPES = ("bfloat16", "float16", "float32", *QUANTISED)
MOST = 2**31 - 1  # of a size on the command line
SWEPT: dict[str, tuple[Any, ...]] = {
    "kv_tile": (32, 64, 128),
    "stages": (2, 3, 4),
    "split": (True, False),
    "blocks": (1, 2, 3),  # workers a core
    "split_p": (True, False),
}


# ------------------------------------------------------------------------------------------- sweep


def candidates(base: KernelConfig, cores: int) -> Iterator[KernelConfig]:
    """Sizes around `base`, one axis at a time, then the pairs of the two that matter most."""
    yield base
    seen = {base}
    axes = [[(name, value)] for name, values in SWEPT.items() for value in values]
    axes += [
        [("kv_tile", tile), ("stages", stages)]
        for tile in SWEPT["kv_tile"]
        for stages in SWEPT["stages"]
    ]
    for changes in axes:
        values = dict(changes)
        if "blocks" in values:
            values = {"workers": values["blocks"] * cores}
        config = dataclasses.replace(base, **values)
        if config not in seen:
            seen.add(config)
            yield config


def sweep(
    what: str, sizes: Sizes, device: Device, limits: dict[str, float]
) -> tuple[list[dict[str, Any]], tuning.Entry | None]:
    """All candidates for a problem, and the fastest one that is as exact as the tuned one."""
    implementation, chip, base = tuned(what, sizes)
    lines = []
    for config in candidates(base, chip.cores):
        line = kernel_timing.measure(what, sizes, device, implementation, limits, **{what: config})
        lines.append(line | {"config": dataclasses.asdict(config)})
        _say(
            f"{what} {config}: {line.get('error') or format(line['seconds'] * 1e6, '.1f') + ' us'}"
        )
    exact = [
        line for line in lines if "seconds" in line and line["config"]["split_p"] == base.split_p
    ]
    if not exact:
        return lines, None
    best = min(exact, key=lambda line: line["seconds"])["config"]
    known = {k: v for k, v in best.items() if k != "workers"}
    dtypes = QUANTISED if sizes.dtype in QUANTISED else ("bfloat16", "float16")
    entry = tuning.Entry(
        kernel_class=what,  # pyright: ignore[reportArgumentType]
        dtypes=dtypes,
        head_dim=sizes.head_dim,
        page_size=sizes.page_size,
        group=sizes.num_q_heads // sizes.num_kv_heads,
        workers_per_core=max(1, best["workers"] // chip.cores),
        **known,
    )
    return lines, entry


def tuned(what: str, sizes: Sizes) -> tuple[str, tuning.Chip, KernelConfig]:
    """The kernels' implementation here, the chip, and the sizes that it takes for a problem."""
    q = jax.ShapeDtypeStruct(
        (sizes.batch * sizes.new, sizes.num_q_heads, sizes.head_dim), q_dtype(sizes)
    )
    pool = (2, 2, sizes.num_kv_heads, sizes.page_size, sizes.head_dim)
    table = jax.ShapeDtypeStruct((sizes.batch, sizes.pages_per_seq), jnp.int32)
    pages = jax.ShapeDtypeStruct(pool, jnp.dtype(sizes.dtype))
    implementation, why = best_implementation(q, pages, table)
    if implementation not in MOSAIC.values():
        raise NotImplementedError(f"`--sweep` needs a device with kernels. Got none: {why}.")
    problem = Problem.of(
        q,
        pages,
        table,
        implementation=implementation,
        sliding_window=None,
        max_q_len=sizes.new,
        batch_invariant=False,
    )
    chip = tuning.current_chip(implementation)
    return implementation, chip, attention_plan.tuned_config(problem, what)


def save(chip: tuning.Chip, entries: Sequence[tuning.Entry], folder: Path = tuning.TUNED) -> Path:
    """Adds entries to the file of a device; those for the same problem are replaced."""
    path = folder / tuning.file_name(chip.kind)
    old = tuning.load(path).entries if path.is_file() else ()

    def problem(entry: tuning.Entry) -> tuple[Any, ...]:
        return (
            entry.kernel_class, entry.dtypes, entry.head_dim, entry.page_size, entry.group
        )  # fmt: skip

    merged = {problem(entry): entry for entry in (*old, *entries)}
    source = f"measured {datetime.date.today().isoformat()} with jax {jax.__version__}"
    tuning.save(path, chip.kind, source, merged.values())
    return path


# ------------------------------------------------------------------------------------------ output

COLUMNS = (
    ("what", "what", "{}"),
    ("implementation", "with", "{}"),
    ("batch", "batch", "{}"),
    ("context", "context", "{}"),
    ("new", "new", "{}"),
    ("page_size", "page", "{}"),
    ("dtype", "dtype", "{}"),
    ("seconds", "us", "{:.1f}"),
    ("bytes_per_s", "GB/s", "{:.0f}"),
    ("of_copy", "of copy", "{:.2f}"),
    ("of_read", "of read", "{:.2f}"),
    ("flops_per_s", "TFLOP/s", "{:.1f}"),
)
_UNITS = {"seconds": 1e6, "bytes_per_s": 1e-9, "flops_per_s": 1e-12}


def table(lines: Sequence[dict[str, Any]]) -> str:
    """For people; a line that failed ends with its error."""
    rows = [[title for _, title, _ in COLUMNS]]
    for line in lines:
        cells = []
        for key, _, form in COLUMNS:
            value = line.get(key)
            shown = value * _UNITS[key] if value is not None and key in _UNITS else value
            cells.append("-" if shown is None else form.format(shown))
        rows.append(cells)
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    text = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    for i, line in enumerate(lines, 1):
        text[i] += f"  {line['error']}" if "error" in line else ""
    return "\n".join(text)


def main(arguments: list[str] | None = None) -> int:
    """Parses, measures, prints."""
    args = _parse(arguments)
    device = Device.at_hand()
    limits = kernel_timing.ceilings(device)
    _say("  ".join(f"{name} {value:.3g}" for name, value in limits.items()))
    lines, entries = [], []
    for what, sizes in _problems(args):
        if args.sweep:
            tried, entry = sweep(what, sizes, device, limits)
            lines += tried
            entries += [entry] if entry else []
            continue
        for implementation in args.implementation or _both(sizes):
            lines.append(kernel_timing.measure(what, sizes, device, implementation, limits))
            _say(table(lines[-1:]).splitlines()[-1])
    if args.save and entries:
        _say(f"saved {save(tuning.current_chip(tuned('decode', Sizes())[0]), entries)}")
    print(table(lines))
    print(json.dumps({**kernel_timing.facts(), **limits, "lines": lines}))
    return 0 if any("seconds" in line for line in lines) else 1


def _both(sizes: Sizes) -> list[str]:
    """The kernels, where this device has some, and XLA."""
    try:
        return [tuned("decode", sizes)[0], "xla"]
    except NotImplementedError:
        return ["xla"]


def _problems(args: argparse.Namespace) -> Iterator[tuple[str, Sizes]]:
    pools = list(itertools.product(args.page_size, args.dtype))
    heads = {
        "num_q_heads": args.heads[0], "num_kv_heads": args.heads[1], "head_dim": args.head_dim
    }  # fmt: skip
    for what, (page_size, dtype) in itertools.product(args.operations, pools):
        common = {"page_size": page_size, "dtype": dtype, **heads}
        if what == "prefill":
            for context in args.context:
                yield what, Sizes(batch=1, context=context, new=context, **common)
            continue
        contexts = args.context if what == "decode" else args.context[:1]
        for batch, context in itertools.product(args.batch, contexts):
            yield what, Sizes(batch=batch, context=context, **common)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def names(known: Sequence[str]) -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            values = text.split(",")
            if not set(values) <= set(known):
                raise argparse.ArgumentTypeError(f"must be of {', '.join(known)}. Got {text!r}.")
            return values

        return parse

    def numbers(text: str) -> list[int]:
        return [number(part) for part in text.split(",")]

    def number(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 12 and 1 <= int(text) <= MOST):
            raise argparse.ArgumentTypeError(f"must be from 1 to {MOST}. Got {text[:20]!r}.")
        return int(text)

    small = jax.default_backend() == "cpu"
    parser.add_argument("--operations", type=names(OPERATIONS), default=list(OPERATIONS))
    parser.add_argument(
        "--implementation", type=names(IMPLEMENTATIONS), help="default: the kernels, and xla"
    )
    parser.add_argument("--batch", type=numbers, default=[2] if small else [1, 8, 64, 256])
    parser.add_argument("--context", type=numbers, default=[256] if small else [1024, 8192, 32768])
    parser.add_argument("--page-size", type=numbers, default=[16] if small else [16, 64])
    parser.add_argument("--dtype", type=names(DTYPES), default=["bfloat16"], help="of the pool")
    parser.add_argument("--heads", type=numbers, default=[32, 8], help="query,kv heads")
    parser.add_argument("--head-dim", type=number, default=128)
    parser.add_argument("--sweep", action="store_true", help="try tile sizes")
    parser.add_argument("--save", action="store_true", help="with --sweep: keep the fastest")
    args = parser.parse_args(arguments)
    sizes = [size for size in args.page_size if size > MAX_PAGE_SIZE or size & (size - 1)]
    if sizes:
        parser.error(f"`--page-size` must be powers of two up to {MAX_PAGE_SIZE}. Got {sizes}.")
    if len(args.heads) != 2 or args.heads[0] % args.heads[1]:
        parser.error(
            f"`--heads` must be query heads, a multiple of the kv heads. Got {args.heads}."
        )
    if args.save and not args.sweep:
        parser.error("`--save` must be used with `--sweep`. Got it alone.")
    if args.sweep:
        args.operations = [name for name in args.operations if name in ("decode", "prefill")]
        if not args.operations:
            parser.error("`--sweep` must be of decode or prefill. Got other `--operations`.")
    return args


if __name__ == "__main__":
    sys.exit(main())
