"""The mutants that are made, the tests that are chosen for them, and what counts as seen."""

from __future__ import annotations

import pytest

from tests.planted import runs

from . import operators
from .__main__ import Trial, sample, table
from .operators import Mutant
from .probe import HEAD, Blocks
from .reached import Reached

CODE = '''"""Nothing here has a mutant: max_size=3000 < 5."""

LIMIT = 3000  # milliseconds


def take(self, size: int = 1, *, keep=True) -> int:
    """Nor here."""
    log.info("took %d", size + 1)
    if size > self.room:
        self.held -= size
        self.told.clear()
    else:
        self.send(min(size, LIMIT), urgent=False)
    return size
'''
MADE = {
    3: {"LIMIT = 3000000  # milliseconds", "LIMIT = 3  # milliseconds"},
    6: {
        "def take(self, size: int = 2, *, keep=True) -> int:",
        "def take(self, size: int = 1, *, keep=False) -> int:",
    },
    9: {"if size >= self.room:", "if False:"},
    10: {"self.held += size", "self.held = size", "pass"},
    11: {"pass"},
    13: {
        "pass",
        "self.send(max(size, LIMIT), urgent=False)",
        "self.send(min(size, LIMIT), urgent=True)",
        "self.send(min(size, LIMIT), )",
    },
}


def test_each_kind_of_change_is_made_and_nothing_that_no_user_sees():
    made: dict[int, set[str]] = {}
    for number in range(len(operators.places(CODE))):
        mutant = operators.mutant("any.py", CODE, number)
        assert mutant is not None
        made.setdefault(mutant.line, set()).add(mutant.new.strip())
    assert made == MADE


def test_a_block_that_was_run_is_marked_and_no_other():
    code = CODE.replace("    log.info", "    # log.info")
    blocks, hits = Blocks(code), bytearray(HEAD + 100)
    space: dict[str, object] = {"_hit": hits}  # in a recorded run, a builtin
    exec(compile(blocks.parsed, "any.py", "exec"), space)
    sent: list[int] = []

    class Taker:
        room = 5

        def send(self, size: int, urgent: bool) -> None:
            sent.append(size)

    space["take"](Taker(), 2)
    assert sent == [2]
    run = {blocks.keys[number] for number in range(len(blocks.keys)) if hits[HEAD + number]}
    assert run == {"take#0", "take#2", "take#3"}
    assert [blocks.keys[blocks.lines[line]] for line in (9, 10, 11, 13, 14)] == [
        "take#0",
        "take#1",
        "take#1",
        "take#2",
        "take#3",
    ]


def test_the_tests_of_a_line_are_those_of_its_block_of_its_function_or_of_the_name_that_it_defines():
    file = "bridge/units.py"
    code = (runs.ROOT / file).read_text()
    record = Reached()
    blocks = Blocks(code)
    function = next(key.partition("#")[0] for key in blocks.keys if key.endswith("#1"))
    record.tests = {"tests/a.py::one": 2.0, "tests/a.py::two": 1.0, "tests/b.py::three": 3.0}
    record.blocks = {file: {f"{function}#0": ["tests/a.py::one", "tests/a.py::two", "tests/b.py::three"]}}
    line_of = {blocks.keys[block]: line for line, block in blocks.lines.items()}
    known = ["tests/a.py::one", "tests/a.py::two", "tests/b.py::three"]
    assert record.reaching(file, code, line_of[f"{function}#0"]) == known
    by_function = [
        "tests/a.py::two",
        "tests/b.py::three",
        "tests/a.py::one",
    ]  # the quickest of each file first
    assert record.reaching(file, code, line_of[f"{function}#1"]) == by_function
    constant = f"{code}\n{function.upper()} = 5\n"
    assert record.reaching(file, constant, constant.count("\n")) == []
    header = next(n for n, line in enumerate(code.splitlines(), 1) if line.startswith(f"def {function}("))
    assert set(record.reaching(file, code, header)) <= set(known)


def test_the_same_seed_makes_the_same_sample_and_only_of_the_lines_asked_for():
    lines = {"bridge/units.py": set(range(1, 400)), "bridge/net/limits.py": set(range(1, 400))}
    one, two = ([mutant.name for mutant in sample(lines, 8, 7)] for _ in range(2))
    assert one == two
    assert len(set(one)) > 1
    line = next(iter(sample(lines, 1, 3)))
    assert {mutant.line for mutant in sample({line.file: {line.line}}, 5, 1)} == {line.line}


@pytest.mark.parametrize(("old", "new", "seen"), [("2.5", "3.5", True), ("# a comment", "# another", False)])
def test_a_mutant_is_seen_by_a_test_that_fails_with_it_and_not_without(tmp_path, old, new, seen):
    code = "HALF = 2.5  # a comment\n".replace(old, new)
    test = "from pathlib import Path\n\ndef test_half():\n    assert '2.5' in Path('half.py').read_text()\n"
    for tree in ("tree", "clean"):
        (tmp_path / tree).mkdir()
        (tmp_path / tree / "half.py").write_text("HALF = 2.5  # a comment\n")
        (tmp_path / tree / "test_half.py").write_text(test)
        (tmp_path / tree / "test_always.py").write_text("def test_that_fails_always():\n    assert False\n")
    record = Reached()
    mutant = Mutant("half.py", 0, 1, "number", old, new, code)
    trial = Trial(record, root=tmp_path / "clean", new=["test_always.py", "test_half.py"])
    verdict = trial.run(mutant, tmp_path / "tree", tmp_path / "clean")
    assert verdict.by == ("test_half.py::test_half" if seen else "")
    assert (tmp_path / "tree/half.py").read_text() == "HALF = 2.5  # a comment\n"
    assert ("survived" in table([verdict])) is not seen
