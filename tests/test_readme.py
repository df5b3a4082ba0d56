"""The README keeps its word: its file tree is the tree, its commands and options exist."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def fenced(text: str, language: str) -> list[str]:
    """The blocks between fences that name this language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M)
    return [body for name, body in blocks if name == language]


def tree_entries(text: str) -> set[str]:
    """Paths in the README's drawing of the tree: a folder's entries are indented below it."""
    drawing = next(block for block in fenced(text, "") if "merge.py" in block)
    entries: set[str] = set()
    folder = ""
    for line in drawing.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = name
        elif name != "--":
            entries.add(folder + name.rstrip("/"))
    return entries


def test_the_tree_names_every_module_and_no_other() -> None:
    found = {
        f"{package}/{path.name}"
        for package in ("pagedjax", "pallas_kernels")
        for path in (ROOT / package).iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").is_file()) and path.stem != "__init__"
    }
    assert tree_entries(README) == found


def test_python_blocks_are_python_and_import_what_exists() -> None:
    blocks = fenced(README, "python")
    assert blocks
    for block in blocks:
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                code = ast.unparse(node)
                subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_files_and_scripts_that_it_names_exist() -> None:
    named = set(re.findall(r"\b((?:scripts|examples)/(?:\w+/)*[\w.]+)", README))
    made_by_demo = {"examples/prompts.out.jsonl"}
    assert named
    for name in named - made_by_demo:
        assert (ROOT / name).is_file(), name


def test_help_of_the_batch_program_names_what_the_readme_promises() -> None:
    run = subprocess.run(
        [sys.executable, ROOT / "scripts" / "serve_batch.py", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    section = README[README.index("## Batch jobs") : README.index("## What it is")]
    promised = set(re.findall(r"`(--[a-z][a-z-]+)", section))
    assert {"--check", "--ordered", "--overwrite", "--page-map", "--stats"} <= promised
    for option in promised | {"--output", "--model", "--max-model-len", "--page-size", "--seed"}:
        assert option in run.stdout
