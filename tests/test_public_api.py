"""What `pagedjax` exports, where each name lives, and that importing it costs nothing."""

import importlib
import re
import subprocess
import sys

import pytest

import pagedjax

PUBLIC = {
    "Batch": "attention",
    "CapacityError": "errors",
    "CompletionOutput": "request",
    "ConfigError": "errors",
    "FinishReason": "request",
    "KVCache": "kv_cache",
    "LLM": "llm",
    "Logprob": "request",
    "ModelFormatError": "errors",
    "PagedJaxError": "errors",
    "RequestError": "errors",
    "RequestOutput": "request",
    "SamplingParams": "request",
    "attend": "attention",
}  # a name that changes here changes for every user


def test_exported_names_are_these() -> None:
    assert set(pagedjax.__all__) == set(PUBLIC)
    assert set(PUBLIC) | {"__version__"} <= set(dir(pagedjax))


@pytest.mark.parametrize(("name", "module"), PUBLIC.items())
def test_name_is_its_home_modules_own(name: str, module: str) -> None:
    home = importlib.import_module(f"pagedjax.{module}")
    assert getattr(pagedjax, name) is getattr(home, name)
    assert getattr(home, name).__module__ == f"pagedjax.{module}"
    assert getattr(home, name).__doc__


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'pagedjax' has no attribute 'LLMM'"):
        _ = pagedjax.LLMM  # pyright: ignore[reportAttributeAccessIssue]


def test_version_is_a_release() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", pagedjax.__version__)


def test_import_and_dir_load_neither_jax_nor_numpy() -> None:
    program = (
        "import sys, pagedjax; dir(pagedjax); pagedjax.ConfigError;"
        "sys.exit(', '.join({'jax', 'flax', 'numpy'} & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_errors_are_caught_by_the_base() -> None:
    for name in ("CapacityError", "ConfigError", "ModelFormatError", "RequestError"):
        assert issubclass(getattr(pagedjax, name), pagedjax.PagedJaxError)
