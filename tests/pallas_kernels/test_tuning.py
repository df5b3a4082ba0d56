"""Tuned sizes: which entry is chosen for a problem, and that a damaged file says what is wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from pallas_kernels import tuning
from pallas_kernels.tuning import TUNED, Chip, Entry, KernelConfig

H200 = Chip("NVIDIA H200", "sm_90", 132)
HALF = ("bfloat16", "float16")


@dataclass(frozen=True)
class Sizes:
    page_size: int = 64
    head_dim: int = 128
    dtype: str = "bfloat16"
    group: int = 4


def entry(**values: Any) -> Entry:
    base = Entry("decode", HALF, 128, 64, 8, "columns", 8, 64, 3, 2, True, True)
    return dataclasses.replace(base, **values)


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes one file of these entries for a device; returns its folder."""

    def write(device: str, *entries: Entry) -> Path:
        tuning.save(tmp_path / tuning.file_name(device), device, "made up", entries)
        return tmp_path

    return write


def chosen(folder: Path, chip: Chip = H200, kind: Any = "decode", **sizes: Any) -> Entry:
    return tuning.find(chip, kind, Sizes(**sizes), folder)


# ----------------------------------------------------------------------------- which entry is used


def test_lookup_counts_workers_by_the_cores_of_the_chip(folder: Callable[..., Path]) -> None:
    path = folder("sm_90", entry(workers_per_core=2, stages=5))
    config = tuning.lookup("mosaic_gpu", "decode", Sizes(), chip=H200, folder=path)
    assert config == KernelConfig("columns", 8, 64, 5, 264, True, True)


def test_a_wider_entry_serves_a_narrower_head(folder: Callable[..., Path]) -> None:
    path = folder("sm_90", entry(head_dim=64), entry(head_dim=128), entry(head_dim=256))
    assert [chosen(path, head_dim=d).head_dim for d in (64, 96, 128, 192)] == [64, 128, 128, 256]


def test_a_head_wider_than_all_entries_is_refused(folder: Callable[..., Path]) -> None:
    path = folder("sm_90", entry(head_dim=64))
    with pytest.raises(NotImplementedError, match=r"head_dim 128 .* sm_90\.json"):
        chosen(path)


def test_group_takes_the_smallest_that_fits_or_the_largest(folder: Callable[..., Path]) -> None:
    path = folder("sm_90", entry(group=8), entry(group=16), entry(group=32))
    assert [chosen(path, group=g).group for g in (1, 8, 9, 32, 33)] == [8, 8, 16, 32, 32]


def test_page_size_takes_the_nearest_by_ratio(folder: Callable[..., Path]) -> None:
    path = folder("sm_90", entry(page_size=16), entry(page_size=64))
    nearest = [chosen(path, page_size=p).page_size for p in (8, 16, 32, 64, 128)]
    assert nearest == [16, 16, 64, 64, 64]


def test_head_dim_weighs_more_than_group_and_page(folder: Callable[..., Path]) -> None:
    path = folder("sm_90", entry(head_dim=256, group=4), entry(group=32, page_size=8))
    assert chosen(path).head_dim == 128


def test_class_and_dtype_must_agree(folder: Callable[..., Path]) -> None:
    path = folder("sm_90", entry(), entry(kernel_class="prefill", dtypes=("int8",)))
    assert chosen(path, kind="prefill", dtype="int8").kernel_class == "prefill"
    with pytest.raises(NotImplementedError, match=r"prefill .* pages of bfloat16"):
        chosen(path, kind="prefill")


def test_own_file_comes_before_the_architectures(folder: Callable[..., Path]) -> None:
    folder("sm_90", entry(stages=2), entry(kernel_class="prefill", stages=4))
    path = folder("NVIDIA H200", entry(stages=6))
    assert chosen(path).stages == 6
    assert chosen(path, Chip("NVIDIA H100 PCIe", "sm_90", 114)).stages == 2
    assert chosen(path, kind="prefill").stages == 4  # its own file has no such entry


def test_unknown_architecture_takes_an_older_one_of_its_major(folder: Callable[..., Path]) -> None:
    path = folder("sm_80", entry(stages=1))
    for i, arch in enumerate(("sm_89", "sm_90", "sm_100", "sm_120"), 2):
        folder(arch, entry(stages=i))
    asked = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_103", "sm_121")
    assert [chosen(path, Chip("x", a, 1)).stages for a in asked] == [1, 1, 1, 2, 4, 5]
    with pytest.raises(NotImplementedError, match="Looked in: no file"):
        chosen(path, Chip("Tesla T4", "sm_75", 40))


# -------------------------------------------------------------------------------- the chip at hand


def described(kind: str, platform: str, **attributes: str) -> AbstractMesh:
    cls = type("Described", (AbstractDevice,), attributes)
    device = cls(kind, 108, platform)
    return AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)


def test_chip_is_that_of_the_abstract_mesh() -> None:
    with use_abstract_mesh(described("NVIDIA A100", "gpu", compute_capability="8.0")):
        assert tuning.current_chip("mosaic_gpu") == Chip("NVIDIA A100", "sm_80", 108)
    with use_abstract_mesh(described("TPU v5 lite", "tpu")):
        assert tuning.current_chip("mosaic_tpu") == Chip("TPU v5 lite", "tpu", 1)


def test_without_a_chip_a_small_one_is_imagined() -> None:
    for implementation, architecture in (("mosaic_gpu", "sm_90"), ("mosaic_tpu", "tpu")):
        chip = tuning.current_chip(implementation)
        assert (chip.kind, chip.architecture) == ("interpreted", architecture)
        assert chip.cores <= 4


# ------------------------------------------------------------------------------------------- files


def test_saved_files_read_back_sorted(tmp_path: Path) -> None:
    entries = [entry(head_dim=256), entry(), entry(dtypes=("int8",))]
    path = tmp_path / tuning.file_name("NVIDIA GeForce RTX 4090 (D)")
    assert path.name == "nvidia_geforce_rtx_4090_d.json"
    tuning.save(path, "NVIDIA GeForce RTX 4090 (D)", "measured", entries)
    assert tuning.load(path).source == "measured"
    assert set(tuning.load(path).entries) == set(entries)
    before = path.read_text()
    tuning.save(path, "NVIDIA GeForce RTX 4090 (D)", "measured", reversed(entries))
    assert path.read_text() == before


def test_saving_replaces_what_was_read(folder: Callable[..., Path]) -> None:
    assert chosen(folder("sm_90", entry(stages=2))).stages == 2
    assert chosen(folder("sm_90", entry(stages=3))).stages == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("source"), r"sm_90\.json` must have exactly the keys.*missing \['source'"),
        (lambda c: c.update(notes=""), r"unknown \['notes'\]"),
        (lambda c: c.update(version=2), "`version` of `sm_90.json` must be 1. Got 2"),
        (lambda c: c.update(entries={}), "`entries` of .* must be a list"),
        (lambda c: c["entries"][0].pop("rows"), r"entry 0` must have exactly .*missing \['rows'\]"),
        (lambda c: c["entries"][0].update(stages=0), r"`stages` of `sm_90.json entry 0`.*Got 0"),
        (lambda c: c["entries"][0].update(stages=True), "`stages` .* must be an integer"),
        (lambda c: c["entries"][0].update(kernel="cuda"), "`kernel` .* must be one of"),
        (lambda c: c["entries"][0].update({"class": "both"}), "`class` .* must be one of"),
        (lambda c: c["entries"][0].update(dtypes=["bf16"]), "`dtypes` .* must be a list of"),
        (lambda c: c["entries"][0].update(split=1), "`split` .* must be true or false"),
    ],
)
def test_damaged_files_say_what_is_wrong(
    folder: Callable[..., Path], change: Callable[[Any], Any], message: str
) -> None:
    path = folder("sm_90", entry()) / "sm_90.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        chosen(path.parent)


def test_text_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sm_90.json").write_text("{")
    with pytest.raises(ValueError, match=r"`sm_90\.json` must be JSON"):
        chosen(tmp_path)


# --------------------------------------------------------------------------- the files of this tree


@pytest.mark.parametrize("path", sorted(TUNED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_files_are_sound(path: Path) -> None:
    tuned = tuning.load(path)
    assert path.name == tuning.file_name(tuned.device)
    assert tuned.source
    keys = [
        (e.kernel_class, dtype, e.head_dim, e.page_size, e.group)
        for e in tuned.entries
        for dtype in e.dtypes
    ]
    assert len(keys) == len(set(keys)), "two entries for one problem"


@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "tpu"])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_every_architecture_has_sizes_for_every_problem(architecture: str, kind: Any) -> None:
    chip = Chip("unheard of", architecture, 10)
    eight = ("int8",) if architecture == "sm_80" else ("int8", "float8_e4m3fn")
    for dtype in ("bfloat16", *eight):
        for head_dim in (128, 256) if architecture == "tpu" else (64, 128, 256):
            for page_size in (8, 16, 32, 64, 128):
                found = chosen(
                    TUNED, chip, kind, page_size=page_size, head_dim=head_dim, dtype=dtype
                )
                assert found.kv_tile % page_size == 0 or page_size % found.kv_tile == 0
