"""What plugins may import of streambridge, and that the shipped ones keep to it."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

import bridge

ROOT = Path(__file__).parents[2]
PLUGINS = sorted([*ROOT.glob("plugins/*.py"), *ROOT.glob("examples/streambridge-*/**/*.py")])
THEIR_TESTS = [ROOT / "tests/auth/test_jwt.py"]


def imported(source: str) -> set[str]:
    """The modules of streambridge that a program imports; of `from bridge import x` the name, too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "bridge":
            found |= {f"bridge.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return {name for name in found if name.split(".")[0] == "bridge"}


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: path.name)
def test_a_plugin_imports_what_is_for_plugins_and_nothing_else(path: Path) -> None:
    allowed = {"bridge", *bridge.FOR_PLUGINS, *(f"bridge.{name}" for name in bridge.__all__)}
    assert imported(path.read_text(encoding="utf-8")) <= allowed


def test_the_examples_of_the_documentation_import_what_is_for_plugins_and_nothing_else() -> None:
    text = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    named = set().union(*(imported(one) for one in examples))
    assert len(named) > 10
    assert named <= {*bridge.FOR_PLUGINS, *(f"bridge.{name}" for name in bridge.__all__)}
    for name in ("Credentials", "AwsSettings"):
        assert hasattr(import_module("bridge.plugin.aws"), name)
    private = set(
        re.findall(r"`(bridge\.[\w.]+)`", (ROOT / "docs/reference/hooks.md").read_text(encoding="utf-8"))
    )
    assert {name for name in private if name.count(".") == 2} <= set(bridge.FOR_PLUGINS)


def test_every_module_for_plugins_is_there_used_and_in_the_documentation() -> None:
    text = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    used = set().union(*(imported(path.read_text(encoding="utf-8")) for path in [*PLUGINS, *THEIR_TESTS]))
    for name in bridge.FOR_PLUGINS:
        import_module(name)
        assert f"| `{name}` |" in text
    assert set(bridge.FOR_PLUGINS) <= used
