"""Which test files reach the line of a planted defect: measured, so that a run need not try all others.

python -m tests.planted.reach [ROOM ...]

A copy of the project gets a probe before the line of each defect, and the tests of its rooms run once. A
probe notes the test under way. In the service and in workers that is the test that started them, so what
counts is the file. A line that is reached outside of tests, by an import, is not measured.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import defaultdict

from . import runs
from .defects import ROOMS, ROOT, Defect, load

HITS = "hits"
PROBE = f"""
import os
from pathlib import Path

seen = set()

def hit(number):
    found = f"{{number}} {{os.environ.get('PYTEST_CURRENT_TEST', '').partition('::')[0]}}\\n"
    if found not in seen:
        seen.add(found)
        with open(Path(__file__).with_name({HITS!r}), "a") as file:
            file.write(found)
"""


def probed(defects: list[Defect]) -> str:
    """The content of the file of some defects with a probe for each, before its statement."""
    code = (ROOT / defects[0].file).read_text()
    lines, parsed = code.splitlines(keepends=True), ast.parse(code)
    for defect in sorted(defects, key=lambda one: _line(one, code), reverse=True):
        at = _line(defect, code)
        around = [
            node
            for node in ast.walk(parsed)
            if isinstance(node, ast.stmt) and node.lineno <= at <= (node.end_lineno or at)
        ]
        # An `elif` has no room before it.
        inner = max(
            (node for node in around if not lines[node.lineno - 1].lstrip().startswith("elif")),
            key=lambda node: node.lineno,
        )
        probe = f"{' ' * inner.col_offset}__import__('planted_probe').hit({defect.number})\n"
        lines.insert(inner.lineno - 1, probe)
    return "".join(lines)


def _line(defect: Defect, code: str) -> int:
    """The number of the line that the defect changes."""
    first = code[: code.index(defect.old)].count("\n") + 1
    old, new = defect.old.splitlines(), defect.new.splitlines()
    same = next((n for n, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), len(new))
    return first + min(same, len(old) - 1)


def measure(rooms: list[str]) -> None:
    """Run the tests of these rooms with probes, and keep what they reach."""
    found: dict[str, set[str]] = defaultdict(set)
    chosen = [defect for defect in load() if defect.room in rooms]
    with runs.tree(None) as copy:
        for file in {defect.file for defect in chosen}:
            (copy / file).write_text(probed([defect for defect in chosen if defect.file == file]))
        (copy / "planted_probe.py").write_text(PROBE)
        places = sorted({place for room in rooms for place in runs.REACH[room]})
        print(runs.pytest(copy, places)[-2000:])
        hits = (copy / HITS).read_text().splitlines()
    names = {str(defect.number): defect.name for defect in chosen}
    for line in hits:
        number, _, file = line.partition(" ")
        found[names[number]].add(file)
    measured = [defect.name for defect in chosen if "" not in found[defect.name]]
    document = runs.reached() | {name: sorted(found[name]) for name in measured}
    document["*"] = sorted({file for room in ROOMS for file in runs.test_files(room)})
    runs.REACHED.write_text(json.dumps(dict(sorted(document.items())), indent=1) + "\n")


if __name__ == "__main__":
    measure(sys.argv[1:] or list(ROOMS))
