"""The key of a program: every part that decides the machine code changes it, nothing else does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pagedjax import program_key, startup
from pagedjax.program_key import is_portable, make_key, surroundings

AROUND = {"sources": "1", "versions": "2", "device": "3"}


def struct(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def test_a_key_is_the_same_each_time() -> None:
    one, two = [make_key(surroundings(), "it", (struct((2,)),), None) for _ in range(2)]
    assert one == two
    assert len(one) == 64


@pytest.mark.parametrize(
    ("around", "holds", "arguments", "out"),
    [
        ({**AROUND, "sources": "4"}, "it", (struct((2, 3)),), None),
        ({**AROUND, "device": "2", "versions": "3"}, "it", (struct((2, 3)),), None),
        (AROUND, "another", (struct((2, 3)),), None),
        (AROUND, "it", (struct((3, 2)),), None),
        (AROUND, "it", (struct((2, 3), jnp.bfloat16),), None),
        (AROUND, "it", ((struct((2, 3)),),), None),
        (AROUND, "it", (struct((2, 3)), struct((2, 3))), None),
        (AROUND, "it", (struct((2, 3)),), "pinned_host"),
    ],
)
def test_each_part_changes_the_key(around: Any, holds: str, arguments: Any, out: Any) -> None:
    assert make_key(around, holds, arguments, out) != make_key(
        AROUND, "it", (struct((2, 3)),), None
    )


def test_weakly_typed_arguments_are_others() -> None:
    weak, strong = jnp.asarray(1.0), jnp.zeros((), jnp.float32)
    assert weak.weak_type
    assert make_key(AROUND, "it", (weak,), None) != make_key(AROUND, "it", (strong,), None)


def test_any_source_file_counts(tmp_path: Path) -> None:
    def digest() -> str:
        return program_key._sources.__wrapped__(tmp_path)

    kernel, tuned = tmp_path / "pallas_kernels/a.py", tmp_path / "pallas_kernels/tuned/b.json"
    seen = {digest()}
    native, header = (tmp_path / f"pallas_kernels/cpu/e.{suffix}" for suffix in ("cc", "h"))
    for path in (tmp_path / "pagedjax/models/c.py", kernel, tuned, native, header):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
        seen.add(digest())
    kernel.write_text("2")
    seen.add(digest())
    tuned.rename(tmp_path / "pallas_kernels/tuned/d.json")
    seen.add(digest())
    assert len(seen) == 8
    (tmp_path / "pagedjax/notes.txt").write_text("no source")
    assert digest() in seen


def test_this_packages_own_sources_are_found() -> None:
    root = Path(program_key.__file__).parent.parent
    found = {p.name for folder in program_key._FOLDERS for p in (root / folder).rglob("*.py")}
    assert {"runner.py", "decoder.py", "paged_attention_xla.py"} <= found


@pytest.mark.usefixtures("cpu_kernels")
def test_the_kernels_that_are_loaded_count(request: pytest.FixtureRequest) -> None:
    loaded = surroundings()
    request.getfixturevalue("no_cpu_kernels")
    without = surroundings()
    assert {name for name in loaded if loaded[name] != without[name]} == {"kernels"}
    assert make_key(loaded, "it", (), None) != make_key(without, "it", (), None)


@pytest.mark.parametrize("name", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_flags_of_xla_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = surroundings()
    monkeypatch.setenv(name, "--a-flag=1")
    assert surroundings()["variables"] != before["variables"]


def test_options_of_jax_count_and_its_caches_do_not() -> None:
    before = surroundings()
    with jax.default_matmul_precision("bfloat16"):  # of this thread alone
        assert surroundings()["options"] != before["options"]
    with jax.numpy_rank_promotion("allow"):
        assert surroundings()["options"] != before["options"]
    folder = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", "elsewhere")
        assert surroundings() == before
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)


def test_an_option_that_only_sounds_like_a_log_counts() -> None:
    """`jax_use_hlo_logistic_lowering` decides how SwiGLU's sigmoid is computed."""
    names = {name for name, _ in program_key._options()}
    assert "jax_use_hlo_logistic_lowering" in names
    assert not names & {"jax_log_compiles", "jax_logging_level", "jax_debug_log_modules"}


def test_sources_that_changed_since_they_were_imported_are_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("PAGEDJAX_CACHE_DIR", str(tmp_path / "kept"))
    files = list(program_key._source_files(Path(program_key.__file__).parent.parent))
    newest = max(path.stat().st_mtime for path in files)
    monkeypatch.setattr(program_key, "_IMPORTED", newest)
    assert startup.open_store() is not None
    monkeypatch.setattr(program_key, "_IMPORTED", newest - 1)
    assert startup.open_store() is None
    assert "the sources changed" in caplog.text


def test_another_processor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = surroundings()
    monkeypatch.setattr(program_key, "_processor", lambda: "flags:sse2")
    assert surroundings()["processor"] != before["processor"]
    monkeypatch.undo()
    monkeypatch.setattr(program_key.os, "cpu_count", lambda: 1024)
    assert surroundings()["processor"] != before["processor"]
    monkeypatch.undo()
    monkeypatch.setattr(program_key.os, "sched_getaffinity", lambda _: set(range(1024)))
    assert surroundings()["processor"] != before["processor"]


def test_what_a_processor_can_run_is_read_from_the_kernels_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "processor : 0\nmodel name : X\ncpu MHz : 1\nflags : avx2 fma\n\nprocessor : 1\n"
    text += "model name : X\ncpu MHz : 2\nflags : avx2 fma\n"
    monkeypatch.setattr(program_key.Path, "read_text", lambda path: text)
    assert program_key._processor() == "flags:avx2 fma\nmodel name:X"


def test_another_version_of_a_package_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = surroundings()
    for package in ("jax", "jaxlib", "flax"):
        monkeypatch.setattr(
            program_key, "version", lambda name, it=package: "9.9" if name == it else "1"
        )
        changed = surroundings()["versions"]
        monkeypatch.setattr(program_key, "version", lambda name: "1")
        assert changed != surroundings()["versions"] != before["versions"]


def test_what_is_placed_by_hand_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    here = jnp.zeros((2,))
    assert is_portable((here, struct((2,))))
    assert is_portable(())
    with jax.default_device(jax.devices()[0]):
        assert not is_portable((here,))
    monkeypatch.setattr(program_key.jax, "devices", lambda: ["another"])
    assert not is_portable((here,))
