"""Imports run one way, and torch stays out of the rooms that must load in milliseconds."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "autopar"

# Low to high; rooms of one level do not see each other. The order is CONTRIBUTING.md's.
LEVELS = (
    {"errors"},
    {"registry", "units", "presets"},
    {"graph"},
    {"trace", "sharding", "schedules"},
    {"plan"},
    {"cost_models", "imports"},
    {"search", "runtime"},
    {"planning"},
    {"api", "check", "export", "report"},
    {"cli"},
    {"__main__"},
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
# A plan file is enough to run: the runtime knows nothing of prices.
FORBIDDEN = {("runtime", "cost_models"), ("runtime", "search")}
WITHOUT_TORCH = {
    "errors", "registry", "units", "graph", "sharding", "schedules", "plan", "cost_models",
    "search", "report", "export", "imports", "check", "cli",
}  # fmt: skip

HEAVY = {"torch", "numpy", "networkx", "ortools", "rich", "yaml"}


def modules() -> Iterator[tuple[str, Path]]:
    """Import name and file of every module of the package."""
    for folder in (PACKAGE, *(entry for entry in PACKAGE.iterdir() if entry.is_dir())):
        files = folder.glob("*.py") if folder == PACKAGE else folder.rglob("*.py")
        for file in sorted(files):
            parts = file.relative_to(PACKAGE).with_suffix("").parts
            name = ".".join(("autopar", *parts)).removesuffix(".__init__")
            yield name, file


MODULES = dict(modules())


def room_of(module: str) -> str:
    return module.split(".")[1]


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every module a file imports, at any depth, and the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import at line {node.lineno}"
            assert node.module is not None
            yield node.module, node.lineno
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def own_imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for target, line in imports(tree):
        if target.startswith("autopar."):
            room = room_of(target)
            if room in LEVEL:
                yield room, line


ROOM_MODULES = sorted(name for name in MODULES if name != "autopar")


def test_the_whole_package_is_looked_at():
    assert {"autopar.runtime.comm", "autopar.cost_models.cluster"} <= set(MODULES)
    assert {room_of(name) for name in ROOM_MODULES} <= set(LEVEL)


@pytest.mark.parametrize("module", ROOM_MODULES)
def test_imports_run_one_way(module: str):
    room = room_of(module)
    wrong = [
        f"{MODULES[module].name}:{line} imports {other}"
        for other, line in own_imports(ast.parse(MODULES[module].read_text()))
        if other != room and (LEVEL[other] >= LEVEL[room] or (room, other) in FORBIDDEN)
    ]
    assert not wrong


def test_torch_distributed_appears_only_in_runtime():
    wrong = []
    for module in ROOM_MODULES:
        if room_of(module) == "runtime":
            continue
        tree = ast.parse(MODULES[module].read_text())
        found = {target for target, _ in imports(tree) if target.startswith("torch.distributed")}
        attributes = {
            ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)
        }
        if found or "torch.distributed" in attributes:
            wrong.append(module)
    assert not wrong


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_rooms_without_torch_load_without_torch():
    names = [name for name in ROOM_MODULES if room_of(name) in WITHOUT_TORCH]
    assert len(names) > 20
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
        "print('loaded')"
    )
    assert run_python(code) == "loaded"


def test_import_autopar_is_light():
    code = f"import sys, autopar; print(sorted({HEAVY!r} & set(sys.modules)))"
    assert run_python(code) == "[]"


def test_help_is_light():
    code = (
        "import sys, contextlib, io\n"
        "from autopar.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    main(['--help'])\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    assert run_python(code) == "[]"
