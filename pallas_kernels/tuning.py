"""Tile sizes of the kernels, by device and problem. Data, not code: see `tuned/*.json`.

Owns the files' schema and the rules by which an entry is chosen; knows nothing of how a kernel
computes. A file is named after a device kind (`nvidia_h200.json`) or after an architecture
(`sm_90.json`, `tpu.json`), which serves the devices that have no file of their own:

  {"version": 1, "device": "sm_90", "source": "compiled, not measured", "entries": [
    {"class": "decode", "dtypes": ["bfloat16", "float16"], "head_dim": 128, "page_size": 64,
     "group": 8, "kernel": "columns", "rows": 8, "kv_tile": 64, "stages": 3,
     "workers_per_core": 2, "split": true, "split_p": true}]}

The entry that is used, of those of the class that list the pool's dtype: the smallest `head_dim`
that is not below the asked one (a tile of a larger one would not fit), of those the smallest
`group` not below (or the largest there is: the rest goes into passes), of those the `page_size`
nearest by ratio, the larger of two. A device's own file comes first, its architecture's where it
has no such entry. An architecture without a file takes the newest older one of its major version.
"""

import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol

import jax

from pallas_kernels import mosaic_gpu_target
from pallas_kernels.platform import traced_platform

type KernelClass = Literal["decode", "prefill"]

VERSION = 1
TUNED = Path(__file__).parent / "tuned"
KERNELS = ("columns", "rows", "mma", "tpu")
CLASSES = ("decode", "prefill")
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "int8")


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Static sizes of one launch; hashable. A kernel checks that it can run with them."""

    kernel: Literal["columns", "rows", "mma", "tpu"]
    rows: int  # query rows of a tile (columns of the swapped product)
    kv_tile: int  # positions of a KV tile
    stages: int  # KV tiles in flight
    workers: int  # CTAs that run at once (GPU)
    split: bool = False  # rows may be cut, and their parts merged
    split_p: bool = True  # P as a 16-bit high and a low part: 1e-6 instead of 1e-3


@dataclass(frozen=True, slots=True)
class Chip:
    """What of a device decides the sizes."""

    kind: str  # as JAX calls it: "NVIDIA H200", "TPU v5 lite"
    architecture: str  # "sm_90", "tpu"
    cores: int  # streaming multiprocessors; 1 on a TPU


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a file: which problems it is for, and the sizes."""

    kernel_class: KernelClass
    dtypes: tuple[str, ...]
    head_dim: int
    page_size: int
    group: int  # query heads a KV head
    kernel: Literal["columns", "rows", "mma", "tpu"]
    rows: int
    kv_tile: int
    stages: int
    workers_per_core: int
    split: bool
    split_p: bool

    def config(self, cores: int) -> KernelConfig:
        """The sizes on a chip of so many cores."""
        return KernelConfig(
            self.kernel,
            self.rows,
            self.kv_tile,
            self.stages,
            self.workers_per_core * cores,
            self.split,
            self.split_p,
        )


@dataclass(frozen=True, slots=True)
class TunedFile:
    """The contents of one file."""

    device: str
    source: str  # where the numbers come from: "compiled, not measured", or a measurement
    entries: tuple[Entry, ...]


class Problem(Protocol):
    """What decides the sizes; `attention_plan.Problem` is one."""

    @property
    def page_size(self) -> int:
        """Of the pool."""
        ...

    @property
    def head_dim(self) -> int:
        """Of the pool."""
        ...

    @property
    def dtype(self) -> str:
        """Of the pool."""
        ...

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        ...


def current_chip(implementation: str) -> Chip:
    """The chip that the trace is for; an imagined one where it can only be interpreted."""
    if implementation == "mosaic_gpu":
        gpu = mosaic_gpu_target.target()
        return Chip(gpu.kind, f"sm_{gpu.arch[0]}{gpu.arch[1]}", gpu.num_sms)
    if traced_platform() != "tpu":
        return Chip("interpreted", "tpu", 1)
    described = jax.sharding.get_abstract_mesh().abstract_device
    kind = jax.devices()[0].device_kind if described is None else described.device_kind
    return Chip(kind, "tpu", 1)  # a program runs on one TensorCore


def lookup(
    implementation: str,
    kernel_class: KernelClass,
    problem: Problem,
    *,
    chip: Chip | None = None,
    folder: Path = TUNED,
) -> KernelConfig:
    """The sizes for a problem on a chip, by the rules at the head of this file.

    Args:
      implementation: "mosaic_gpu" or "mosaic_tpu".
      kernel_class: "decode" (few query rows a sequence) or "prefill".
      problem: page_size, head_dim, dtype (of the pool) and group.
      chip: None: the one that the trace is for.
      folder: where the files are.

    Raises:
      NotImplementedError: no file serves the chip, or no entry the problem.
      ValueError: a file is malformed.
    """
    chip = chip or current_chip(implementation)
    return find(chip, kernel_class, problem, folder).config(chip.cores)


def find(chip: Chip, kernel_class: KernelClass, problem: Problem, folder: Path = TUNED) -> Entry:
    """The entry behind `lookup`."""
    paths = files_for(chip, folder)
    for path in paths:
        fitting = [
            entry
            for entry in load(path).entries
            if entry.kernel_class == kernel_class
            and problem.dtype in entry.dtypes
            and entry.head_dim >= problem.head_dim
        ]
        if fitting:
            return min(fitting, key=functools.partial(_distance, problem))
    raise NotImplementedError(
        f"no tuned sizes for {kernel_class} with head_dim {problem.head_dim} and pages of "
        f"{problem.dtype} on {chip.kind!r} ({chip.architecture}). Looked in: "
        f"{', '.join(path.name for path in paths) or 'no file'}. Use implementation='xla'."
    )


def files_for(chip: Chip, folder: Path = TUNED) -> list[Path]:
    """Files that serve a chip, the most special first."""
    own = folder / file_name(chip.kind)
    generic = folder / f"{_known_architecture(chip.architecture, folder)}.json"
    return [path for path in (own, generic) if path.is_file()]


def file_name(device: str) -> str:
    """Of a device kind or an architecture: "NVIDIA H200" -> "nvidia_h200.json"."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_") + ".json"


def _known_architecture(architecture: str, folder: Path) -> str:
    """The newest "sm_*" with a file that is of the same major version and not newer."""
    if not architecture.startswith("sm_"):
        return architecture
    wanted = int(architecture.removeprefix("sm_"))
    known = [int(match[1]) for p in folder.glob("sm_*.json") if (match := _SM.match(p.name))]
    older = [sm for sm in known if sm // 10 == wanted // 10 and sm <= wanted]
    return f"sm_{max(older, default=wanted)}"


_SM = re.compile(r"sm_(\d+)\.json")


def _distance(problem: Problem, entry: Entry) -> tuple[float, ...]:
    enough = entry.group >= problem.group
    ratio = problem.page_size / entry.page_size
    ratio = max(ratio, 1 / ratio)
    return (
        entry.head_dim,
        not enough,
        entry.group if enough else -entry.group,
        ratio,
        -entry.page_size,
    )


# ------------------------------------------------------------------------------------------ files


@functools.cache
def load(path: Path) -> TunedFile:
    """Reads and checks a file.

    Raises:
      ValueError: says what is wrong, and in which entry.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"`{path.name}` must be JSON. Got: {error}.") from error
    _check_keys(path.name, content, {"version", "device", "source", "entries"})
    if content["version"] != VERSION:
        raise ValueError(
            f"`version` of `{path.name}` must be {VERSION}. Got {content['version']!r}."
        )
    for name in ("device", "source"):
        _check(path.name, name, content[name], isinstance(content[name], str), "text")
    _check(path.name, "entries", content["entries"], type(content["entries"]) is list, "a list")
    entries = [_entry(f"{path.name} entry {i}", raw) for i, raw in enumerate(content["entries"])]
    return TunedFile(content["device"], content["source"], tuple(entries))


def save(path: Path, device: str, source: str, entries: Iterable[Entry]) -> None:
    """Writes a file, an entry a line, sorted."""
    lines = [json.dumps(_raw(entry)) for entry in sorted(entries, key=_order)]
    head = f'{{"version": {VERSION}, "device": {json.dumps(device)},\n'
    head += f' "source": {json.dumps(source)},\n "entries": [\n  '
    path.write_text(head + ",\n  ".join(lines) + "\n]}\n", "utf-8")
    load.cache_clear()


_INTEGERS = {  # field -> smallest, largest
    "head_dim": (16, 1024),
    "page_size": (1, 256),
    "group": (1, 1024),
    "rows": (1, 4096),
    "kv_tile": (1, 65536),
    "stages": (1, 64),
    "workers_per_core": (1, 32),
}
_NAMES = {"kernel_class": "class"}  # field -> key, where they differ


def _entry(where: str, raw: Any) -> Entry:
    names = [_NAMES.get(field.name, field.name) for field in fields(Entry)]
    _check_keys(where, raw, set(names))
    _check(where, "class", raw["class"], raw["class"] in CLASSES, f"one of {CLASSES}")
    _check(where, "kernel", raw["kernel"], raw["kernel"] in KERNELS, f"one of {KERNELS}")
    dtypes = raw["dtypes"]
    listed = type(dtypes) is list and bool(dtypes) and all(d in DTYPES for d in dtypes)
    _check(where, "dtypes", dtypes, listed, f"a list of {DTYPES}")
    for name, (low, high) in _INTEGERS.items():
        inside = type(raw[name]) is int and low <= raw[name] <= high
        _check(where, name, raw[name], inside, f"an integer in [{low}, {high}]")
    for name in ("split", "split_p"):
        _check(where, name, raw[name], type(raw[name]) is bool, "true or false")
    values = {**raw, "kernel_class": raw["class"], "dtypes": tuple(dtypes)}
    del values["class"]
    return Entry(**values)


def _raw(entry: Entry) -> dict[str, Any]:
    return {_NAMES.get(f.name, f.name): getattr(entry, f.name) for f in fields(Entry)}


def _order(entry: Entry) -> tuple[Any, ...]:
    return tuple(getattr(entry, field.name) for field in fields(Entry))


def _check_keys(where: str, content: Any, expected: set[str]) -> None:
    _check(where, "value", content, type(content) is dict, "an object")
    if set(content) != expected:
        missing, unknown = sorted(expected - set(content)), sorted(set(content) - expected)
        raise ValueError(
            f"`{where}` must have exactly the keys {sorted(expected)}. "
            f"Got missing {missing}, unknown {unknown}."
        )


def _check(where: str, name: str, value: Any, is_good: bool, expected: str) -> None:
    if not is_good:
        raise ValueError(f"`{name}` of `{where}` must be {expected}. Got {value!r}.")
