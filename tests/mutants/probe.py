"""Notes which blocks of the product's code each process runs. In a tree it is called `sitecustomize`.

Every process that imports `bridge` or `plugins` from the tree gets a file in `hits/`, mapped into memory, so
that what a killed process ran is known too. The first `HEAD` bytes are the test that started the process,
padded with line breaks; then comes a byte for each block, 1 once the block has begun.

A block is a run of statements that are reached together: the start of a function, of a branch, of a loop, of
an `except` or `case`, and what follows any of these. Blocks of a file are numbered in the order of its code.
"""

import ast
import builtins
import importlib.machinery
import json
import mmap
import os
from pathlib import Path

TREE = Path(__file__).resolve().parent
HITS = TREE / "hits"
HEAD = 512  # bytes for the name of the test
COMPOUND = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.With, ast.AsyncWith, ast.Match)


class Blocks:
    """The blocks of a file's code. `lines` has the block of each line within a function."""

    def __init__(self, code: str, first: int = 0) -> None:
        self.parsed = ast.parse(code)
        self.keys: list[str] = []  # the function of each block, and its number there: `Stream.append#3`
        self.lines: dict[int, int] = {}
        self._first = first
        self._within(self.parsed, "")

    def _within(self, node: ast.AST, name: str) -> None:
        """Find the functions in a module, class or function."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                self._function(child, f"{name}{child.name}")
            elif isinstance(child, ast.ClassDef):
                self._within(child, f"{name}{child.name}.")
            elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._within(child, name)

    def _function(self, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> None:
        number = len(self.keys)
        self._body(function.body, name, number)
        for child in function.body:
            self._nested(child, name)

    def _nested(self, node: ast.AST, name: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._function(node, f"{name}.{node.name}")
        elif isinstance(node, ast.ClassDef):
            self._within(node, f"{name}.{node.name}.")
        else:
            for child in ast.iter_child_nodes(node):
                self._nested(child, name)

    def _body(self, body: list[ast.stmt], name: str, start: int) -> None:
        """A list of statements: a new block at its beginning, and after each compound statement."""
        written: list[ast.stmt] = []
        block = None
        for statement in body:
            text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            leading = isinstance(statement, ast.Nonlocal | ast.Global)
            if block is None and not (text or leading):
                block = len(self.keys)
                self.keys.append(f"{name}#{block - start}")
                written.append(self._probe(block, statement))
            compound = isinstance(statement, COMPOUND)
            for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1):
                if block is not None:
                    self.lines[line] = block
            written.append(statement)
            if compound:
                self._inner(statement, name, start)
                block = None
        body[:] = written

    def _inner(self, statement: ast.stmt, name: str, start: int) -> None:
        for field in ("body", "orelse", "finalbody"):
            inner = getattr(statement, field, None)
            if inner:
                self._body(inner, name, start)
        for inner in [*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]:
            self._body(inner.body, name, start)

    def _probe(self, block: int, before: ast.stmt) -> ast.stmt:
        probe = ast.parse(f"_hit[{HEAD + self._first + block}] = 1").body[0]
        for node in ast.walk(probe):
            node.lineno = node.end_lineno = before.lineno
            node.col_offset = node.end_col_offset = before.col_offset
        return probe


def begin() -> None:
    """Probe what this process imports from now on."""
    offsets = json.loads((HITS / "offsets").read_text())
    plain = importlib.machinery.SourceFileLoader.source_to_code
    hits: list[mmap.mmap] = []

    def probed(self, data, path, *, _optimize=-1):
        place = str(path).removeprefix(f"{TREE}/")
        if place not in offsets:
            return plain(self, data, path, _optimize=_optimize)
        if not hits:
            name = HITS / f"{os.getpid()}-{os.urandom(4).hex()}"
            name.write_bytes(os.environ.get("PYTEST_CURRENT_TEST", "").encode()[:HEAD].ljust(HEAD, b"\n"))
            os.truncate(name, HEAD + offsets[""])
            with name.open("r+b") as file:
                hits.append(mmap.mmap(file.fileno(), 0))
            builtins._hit = hits[0]
        blocks = Blocks(bytes(data).decode(), offsets[place])
        return compile(blocks.parsed, path, "exec", dont_inherit=True, optimize=_optimize)

    importlib.machinery.SourceFileLoader.source_to_code = probed


if __name__ == "sitecustomize":
    begin()
