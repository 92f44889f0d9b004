"""The structure of the code: no circle of modules, and no folder with more modules than one can look over."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("entrypoint", "train")
MAX_MODULES = 16


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {module_name(path): path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}


def imported(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports anywhere: at its top, in functions and for type checkers."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                yield member if member in MODULES else node.module


def test_no_circle_of_modules() -> None:
    graph = {name: set(imported(path)) & set(MODULES) - {name} for name, path in MODULES.items()}
    assert graph["entrypoint.__main__"]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of modules: {' -> '.join(error.args[1])}")


def test_no_folder_is_crowded() -> None:
    folders = {path.parent for path in MODULES.values()}
    modules = {folder: set(folder.glob("*.py")) - {folder / "__init__.py"} for folder in folders}
    counts = {str(folder.relative_to(ROOT)): len(files) for folder, files in modules.items()}
    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES} == {}
