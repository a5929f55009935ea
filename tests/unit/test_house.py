"""House rules that a linter does not hold."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("autopar", "runtime", "cost_models", "tests", "examples")
PYTHON_FILES = sorted({file.resolve() for folder in CODE for file in (ROOT / folder).rglob("*.py")})
TEXT_FILES = [
    *PYTHON_FILES,
    *ROOT.glob("*.md"),
    ROOT / "pyproject.toml",
    ROOT / ".ci" / "run",
]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
# Folders of a particular machine; "/" + to keep this file clean itself.
ABSOLUTE = re.compile(
    "(?<![\\w./~-])/(?:"
    + "|".join(("home", "root", "tmp", "work", "opt", "usr", "mnt", "var"))
    + r")/\w"
)


def relative(file: Path) -> str:
    return str(file.relative_to(ROOT))


def test_there_are_files():
    assert len(PYTHON_FILES) > 30


@pytest.mark.parametrize("file", PYTHON_FILES, ids=relative)
def test_files_and_functions_are_short(file: Path):
    text = file.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    long = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            documented = ast.get_docstring(node) is not None
            start = node.body[0].end_lineno if documented else node.lineno
            assert start is not None
            if node.end_lineno - start > MAX_FUNCTION_LINES:
                long.append(node.name)
    assert not long


def test_no_machine_is_named():
    found = []
    for file in TEXT_FILES:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if ABSOLUTE.search(line) and not line.startswith("#!"):
                found.append(f"{relative(file)}:{number}: {line.strip()}")
    assert not found


def test_nothing_is_left_to_do():
    marks = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")))
    found = [
        f"{relative(file)}:{number}"
        for file in TEXT_FILES
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if marks.search(line)
    ]
    assert not found


def test_symlinks_point_at_the_rooms():
    for name in ("runtime", "cost_models"):
        link = ROOT / "autopar" / name
        assert link.is_symlink()
        assert str(link.readlink()) == f"../{name}"


def test_ci_runs_the_readme():
    readme, script = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    for command in ("pip install -e . && autopar quickstart", 'pip install -e ".[test]" && pytest'):
        assert f"    {command}\n" in readme
        assert command in script
