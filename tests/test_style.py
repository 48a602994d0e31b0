"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "qkwatch").glob("*.py"))


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy", "--strict", "qkwatch"],
    ],
    ids=lambda command: " ".join(command),
)
def test_tools_are_content(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_examples_in_docstrings_run(path: Path) -> None:
    if path.stem == "__main__":
        return
    module = importlib.import_module("qkwatch" if path.stem == "__init__" else f"qkwatch.{path.stem}")
    failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_one_idea_a_file(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 360
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno <= 62, node.name


def test_public_names_exist_and_are_documented() -> None:
    import qkwatch

    for name in qkwatch.__all__:
        assert getattr(qkwatch, name).__doc__, name
