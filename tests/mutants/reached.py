"""Which tests run a line: recorded by a run of all tests with a probe in each block, and kept.

`reached.json.xz` has, for each block of the product, up to `KEPT` tests that run it, quick ones first and of
as many files as possible. A block is named by its function and its number in it, so that a record of older
code serves: a block that it does not know has the tests of its function. Code outside of functions runs at
the import. Its tests are those of the functions, anywhere, that mention the name that it defines.

A process that a test starts counts for that test, and for its whole file if a fixture started it.
"""

from __future__ import annotations

import ast
import json
import lzma
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

from tests.planted import runs
from tests.planted.defects import ROOT

from .probe import HEAD, Blocks

FILE = Path(__file__).with_name("reached.json.xz")
KEPT = 16  # tests of a block
PLACES = ("bridge", "plugins")
LIMIT = 3 * 3600.0  # seconds, for a recorded run


def sources(root: Path = ROOT) -> list[str]:
    """All files that have mutants."""
    listed = ["git", "ls-files", "--", *(f"{place}/*.py" for place in PLACES)]
    names = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout.split()
    return [name for name in names if (root / name).stat().st_size]


class Reached:
    """The record. `tests` has the seconds of each test, `blocks` the tests of each block of a file."""

    def __init__(self) -> None:
        self.tests: dict[str, float] = {}
        self.blocks: dict[str, dict[str, list[str]]] = {}

    @classmethod
    def load(cls) -> Reached:
        """Read the record that is kept; an empty one if there is none."""
        record = cls()
        if FILE.exists():
            document = json.loads(lzma.decompress(FILE.read_bytes()))
            names = list(document["tests"])
            record.tests = document["tests"]
            record.blocks = {
                file: {key: [names[number] for number in numbers] for key, numbers in blocks.items()}
                for file, blocks in document["blocks"].items()
            }
        return record

    def save(self) -> None:
        """Keep the record, with only those tests that a block has."""
        mine = {name for blocks in self.blocks.values() for tests in blocks.values() for name in tests}
        tests = {name: seconds for name, seconds in sorted(self.tests.items()) if name in mine}
        numbers = {name: number for number, name in enumerate(tests)}
        document = {
            "tests": tests,
            "blocks": {
                file: {key: [numbers[name] for name in tests] for key, tests in sorted(blocks.items())}
                for file, blocks in sorted(self.blocks.items())
            },
        }
        FILE.write_bytes(lzma.compress(json.dumps(document, separators=(",", ":")).encode(), preset=9))

    def record(self, places: Iterable[str], processes: int) -> None:
        """Run the tests in these places with probes, and take what they reach in place of what was known."""
        places = tuple(places)
        with runs.tree(None) as tree:
            code = {name: (tree / name).read_text() for name in sources()}
            blocks = {name: Blocks(text) for name, text in code.items()}
            offsets, end = {}, 0
            for name, found in blocks.items():
                offsets[name] = end
                end += len(found.keys)
            (tree / "hits").mkdir()
            (tree / "hits/offsets").write_text(json.dumps(offsets | {"": end}))
            (tree / "sitecustomize.py").write_text(Path(__file__).with_name("probe.py").read_text())
            command = [sys.executable, "-m", "pytest", *runs.OPTIONS, "-p", "tests.mutants.recorder"]
            command += ["--numprocesses", str(processes), "--dist", "loadfile", *places]
            print(runs.run(command, tree, LIMIT)[1][-3000:], flush=True)
            seconds, reaching = _hits(tree / "hits")
        for file in self.blocks.values():
            for key, tests in file.items():
                file[key] = [name for name in tests if not name.startswith(places)]
        self.tests |= seconds
        for name, found in blocks.items():
            mine = self.blocks.setdefault(name, {})
            for number, key in enumerate(found.keys):
                now = reaching.get(offsets[name] + number, set())
                mine[key] = self._chosen(now.union(mine.get(key, ())))

    def _chosen(self, tests: Iterable[str], kept: int = KEPT) -> list[str]:
        """Some of these tests: the quickest one of each file, then the next one of each."""
        files: dict[str, list[str]] = defaultdict(list)
        for name in sorted(tests, key=lambda name: (self.tests[name], name)):
            files[name.partition("::")[0]].append(name)
        ranks = [(rank, self.tests[name], name) for mine in files.values() for rank, name in enumerate(mine)]
        return [name for _, _, name in sorted(ranks)[:kept]]

    def reaching(self, file: str, code: str, line: int) -> list[str]:
        """The tests that run a line of a file with this code, quick ones first."""
        found, known = Blocks(code), self.blocks.get(file, {})
        block = found.lines.get(line)
        if block is None:
            return self._chosen(self._mentioning(file, code, line))
        key = found.keys[block]
        if key in known:
            return known[key]
        function = key.partition("#")[0]
        return self._chosen(
            {name for other in known for name in known[other] if other.startswith(f"{function}#")}
        )

    def _mentioning(self, file: str, code: str, line: int) -> set[str]:
        """The tests of functions that mention what a line outside of functions defines."""
        names: set[str] = set()
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or line):
                match node:
                    case ast.Assign(targets=targets):
                        names |= {
                            inner.id
                            for to in targets
                            for inner in ast.walk(to)
                            if isinstance(inner, ast.Name)
                        }
                    case ast.AnnAssign(target=ast.Name(id=name)):
                        names.add(name)
                    case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                        names.add(name)
        functions = {function for name in names for function in self._mentions.get(name, ())}
        near = {one for one in functions if one[0] == file} or functions
        return {
            test
            for place, function in near
            for key, tests in self.blocks.get(place, {}).items()
            if key.partition("#")[0] == function
            for test in tests
        }

    @cached_property
    def _mentions(self) -> dict[str, set[tuple[str, str]]]:
        """The functions that mention each name, with their files."""
        mentions: dict[str, set[tuple[str, str]]] = defaultdict(set)
        for file in sources():
            parsed = Blocks((ROOT / file).read_text())
            for name, function in _mentioned(parsed.parsed, ""):
                mentions[name].add((file, function))
        return mentions


def _mentioned(node: ast.AST, outer: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inner = outer
        match child:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                inner = f"{outer}.{name}" if outer else name
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                if outer:
                    yield name, outer
        yield from _mentioned(child, inner)


def _hits(place: Path) -> tuple[dict[str, float], dict[int, set[str]]]:
    """The seconds of each test and file that passed, and the tests that reach each block."""
    seconds: dict[str, float] = defaultdict(float)
    reaching: dict[int, set[str]] = defaultdict(set)
    for file in place.glob("*.tests"):
        for line in file.read_text().splitlines():
            test, took, blocks = json.loads(line)
            seconds[test] += took
            for block in blocks:
                reaching[block].add(test)
    for test in list(seconds):
        seconds[test.partition("::")[0]] += seconds[test]
    for file in place.glob("*-*"):
        head, content = file.read_bytes()[:HEAD], file.read_bytes()[HEAD:]
        test, _, stage = head.rstrip(b"\n").decode(errors="replace").rpartition(" ")
        test = test if stage == "(call)" else test.partition("::")[0]
        if test in seconds:
            for block, hit in enumerate(content):
                if hit:
                    reaching[block].add(test)
    return dict(seconds), reaching
