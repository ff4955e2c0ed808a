"""Where the product waits: every `await`, hand-over to a thread, timer and callback of a commit.

A site is named by its file, its function and what is called there, so that its name outlives moved lines:
`bridge/x.py Class.function: await self.call`. The second equal one of a function has ` 2` behind it.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("bridge", "plugins")
# What the method of a call says: its callback runs later, in a thread or in another turn of the event loop.
LATER = {
    "Thread", "after_commit", "call_at", "call_later", "call_soon_threadsafe", "later", "run_in_executor",
    "soon", "to_thread", "when_settled",
}  # fmt: skip
Position = tuple[int, int, int, int]  # first and last line, first and last column


class Site(NamedTuple):
    """A site in a file. `position` is that of the `await`, or of the call."""

    file: str
    what: str
    position: Position

    def __str__(self) -> str:
        return f"{self.file} {self.what}"

    @property
    def function(self) -> str:
        """The function that waits."""
        return self.what.partition(":")[0]


def sites() -> list[Site]:
    """All of them, in the order of the files."""
    files = [path for place in PLACES for path in sorted((ROOT / place).rglob("*.py"))]
    return [site for path in files for site in of_file(path.relative_to(ROOT).as_posix())]


@cache
def of_file(file: str) -> tuple[Site, ...]:
    """The sites of a file."""
    return tuple(found_in(file, (ROOT / file).read_text()))


def found_in(file: str, text: str) -> Iterator[Site]:
    """The sites of a file with this text."""
    seen: Counter[str] = Counter()
    for what, node in _within(ast.parse(text), ""):
        seen[what] += 1
        again = f" {seen[what]}" if seen[what] > 1 else ""
        position = (node.lineno, node.end_lineno or 0, node.col_offset, node.end_col_offset or 0)
        yield Site(file, what + again, position)


def _within(node: ast.AST, function: str) -> Iterator[tuple[str, ast.expr]]:
    for child in ast.iter_child_nodes(node):
        inner = function
        match child:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                inner = f"{function}.{child.name}" if function else child.name
            case ast.Await():
                yield f"{function}: await {_named(child.value)}", child
            case ast.AsyncFor():
                yield f"{function}: async for {_named(child.iter)}", child.iter
            case ast.AsyncWith():
                for item in child.items:
                    yield f"{function}: async with {_named(item.context_expr)}", item.context_expr
            case ast.Call() if _is_later(child.func):
                yield f"{function}: {_named(child)}", child
        yield from _within(child, inner)


def _is_later(func: ast.expr) -> bool:
    match func:
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in LATER:
            return True
        case ast.Attribute(attr="work", value=ast.Attribute(attr=owner) | ast.Name(id=owner)):
            return owner.endswith("runtime")  # the others are coroutines
    return False


def _named(node: ast.expr) -> str:
    match node:
        case ast.Call():
            return ast.unparse(node.func)
        case ast.IfExp():
            return f"{_named(node.body)} or {_named(node.orelse)}"
    return ast.unparse(node)
