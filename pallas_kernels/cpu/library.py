"""The library of C++ kernels: how it is compiled, and how JAX learns of what is in it.

Owns the compiler's command line and the names of the entry points. Where the compiled library is
kept between runs is the caller's business; here it is bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import jax

# Functions of the library, and what JAX calls them.
TARGETS = ("pagedjax_attention", "pagedjax_gated_product", "pagedjax_product")

_FOLDER = Path(__file__).resolve().parent
_COMPILERS = ("c++", "g++", "clang++")
# No option that lets the order of a sum change: results must not depend on the tile they are in.
_OPTIONS = ("-std=c++17", "-O3", "-fPIC", "-shared")
_TIMEOUT = 300.0  # seconds; compiling takes four
_PATIENCE = 5.0  # seconds until a killed compiler must be gone
_SHOWN = 400  # characters of a compiler's complaint

# JAX's registry of targets belongs to the process, and so does this: what is in it.
_lock = threading.Lock()
_loaded: dict[str, tuple[str, ctypes.CDLL]] = {}  # by the recipe's key its compiler; at most one


class BuildError(Exception):
    """The compiler at hand cannot build the kernels, or the loader cannot load them."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the kernels are built here.

    Attributes:
      compiler: for people, "g++ 12.2.0".
      command: the compiler and its options, without files.
      key: a digest of all that decides what comes out; hexadecimal, 64 digits.
    """

    compiler: str
    command: tuple[str, ...]
    key: str

    def build(self) -> bytes:
        """Compiles the kernels: the shared library, as bytes. Takes some seconds.

        Raises:
          BuildError: what the compiler says, or that there is no room for what it makes.
        """
        try:
            with tempfile.TemporaryDirectory(prefix="pagedjax-") as folder:
                library = Path(folder) / "kernels.so"
                sources = [str(path) for path in _sources(".cc")]
                _run([*self.command, *sources, "-o", str(library)], folder)
                return library.read_bytes()
        except OSError as error:
            raise BuildError(f"what {self.compiler} makes cannot be kept: {error}") from error


def find_recipe() -> Recipe | None:
    """The recipe for this machine; None without a C++ compiler ($CXX, c++, g++, clang++)."""
    compiler = _compiler()
    if compiler is None:
        return None
    machine = platform.machine().lower()
    native = "-march=native" if machine in ("x86_64", "amd64") else "-mcpu=native"
    command = (*compiler, *_OPTIONS, native, "-isystem", jax.ffi.include_dir())
    try:
        # What the compiler takes the processor for, and which one it is itself.
        macros = _run([*compiler, *_OPTIONS, native, "-dM", "-E", "-x", "c++", os.devnull])
    except BuildError:
        return None
    digest = hashlib.sha256("\0".join([*command, macros, jax.__version__]).encode())
    for path in _sources(".cc", ".h"):
        data = path.read_bytes()
        digest.update(f"{path.name}\0{len(data)}\0".encode() + data)
    return Recipe(_version(compiler, macros), command, digest.hexdigest())


def load(recipe: Recipe, library: bytes) -> None:
    """Makes the kernels known to JAX, once in a process.

    Args:
      recipe: how it was built.
      library: what `Recipe.build` returned.

    Raises:
      BuildError: it cannot be loaded, or this process has loaded another one.
    """
    with _lock:
        if recipe.key in _loaded:
            return
        if _loaded:
            raise BuildError("this process has loaded other kernels already")
        try:
            handle = _open(library)
            functions = [getattr(handle, name) for name in TARGETS]
        except (OSError, AttributeError) as error:
            raise BuildError(f"the compiled kernels cannot be loaded: {error}") from error
        for name, function in zip(TARGETS, functions, strict=True):
            capsule = jax.ffi.pycapsule(function)
            jax.ffi.register_ffi_target(name, capsule, platform="cpu")
        _loaded[recipe.key] = recipe.compiler, handle


def is_loaded() -> bool:
    """True when programs that are traced for a CPU may call the kernels."""
    return bool(_loaded)


def loaded_key() -> str:
    """The recipe's key of what is loaded; empty: nothing is."""
    return next(iter(_loaded), "")


def loaded_compiler() -> str:
    """The recipe's compiler of what is loaded, for people; empty: nothing is."""
    return next(iter(_loaded.values()))[0] if _loaded else ""


def _compiler() -> tuple[str, ...] | None:
    given = os.environ.get("CXX")
    if given:
        try:
            words = tuple(shlex.split(given))
        except ValueError:  # an open quotation
            return None
        return words if words and shutil.which(words[0]) else None
    found = next((name for name in _COMPILERS if shutil.which(name)), None)
    return None if found is None else (found,)


def _version(compiler: tuple[str, ...], macros: str) -> str:
    """From the macros that the compiler defines: `__VERSION__` of GCC and Clang."""
    lines = (line.split(" ", 2) for line in macros.splitlines())
    version = next((line[2] for line in lines if line[1:2] == ["__VERSION__"]), "")
    return f"{Path(compiler[0]).name} {version.strip(chr(34))}".strip()


def _sources(*suffixes: str) -> list[Path]:
    return sorted(path for path in _FOLDER.iterdir() if path.suffix in suffixes)


def _run(command: list[str], temporary: str | None = None) -> str:
    """What a compiler prints; `temporary` is the folder for what its programs hand on."""
    folder = {} if temporary is None else {"TMPDIR": temporary}
    try:
        # A session of its own: the compiler starts others, and they all end with it. Ctrl-C, which
        # a terminal sends to ours alone, ends them through `_communicate`.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **folder},
            start_new_session=True,
        )
        stdout, stderr = _communicate(process)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from error
    if process.returncode:
        said = stderr.decode(errors="replace").strip()
        raise BuildError(f"{command[0]} ended with {process.returncode}: {said[:_SHOWN]}")
    return stdout.decode(errors="replace")


def _communicate(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """What a process prints until its end; whatever breaks the wait off ends its whole group."""
    with process:
        try:
            return process.communicate(timeout=_TIMEOUT)
        except BaseException:  # KeyboardInterrupt, too
            with contextlib.suppress(ProcessLookupError, PermissionError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)
            # Until the last one has closed its end: none writes into a folder that is removed.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_PATIENCE)
            raise


def _open(data: bytes) -> ctypes.CDLL:
    """Loads a library from memory where possible: a folder may forbid to run what it has."""
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryDirectory(prefix="pagedjax-") as folder:
            path = Path(folder) / "kernels.so"
            path.write_bytes(data)
            return ctypes.CDLL(str(path))
    descriptor = os.memfd_create("pagedjax-kernels")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        # Left open: the loader takes what has the path of a library that it knows for that library.
        return ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    except BaseException:
        os.close(descriptor)
        raise
