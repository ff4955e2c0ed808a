"""The shape of the code, beside the contracts of import-linter in pyproject.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]


def circles() -> list[list[str]]:
    """The groups of modules that import each other, type-only imports included (Tarjan's algorithm)."""
    graph = grimp.build_graph("bridge")
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        stack.append(module)
        for other in graph.find_modules_directly_imported_by(module):
            if other not in number:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == number[module]:
            at = stack.index(module)
            found.append(stack[at:])
            del stack[at:]

    for module in sorted(graph.modules):
        if module not in number:
            visit(module)
    return [group for group in found if len(group) > 1]


def test_no_more_than_two_files_import_each_other_and_none_of_different_packages() -> None:
    for group in circles():
        assert len(group) == 2, f"a circle of imports: {group}"
        assert len({module.rpartition(".")[0] for module in group}) == 1, f"a circle of packages: {group}"


def test_the_wheel_carries_every_package() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in ROOT.glob("bridge/**/__init__.py")}
    assert found <= listed
