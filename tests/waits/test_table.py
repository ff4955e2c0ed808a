"""The table of waits is complete: no wait of the product is missing, and each row has one."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

from .sites import ROOT, found_in, sites

COLUMNS = {
    "rights", "users", "certificates", "configuration", "keys", "deleted", "leases", "takeover", "disk",
    "stop",
}  # fmt: skip
TABLE = tomllib.loads((Path(__file__).parent / "table.toml").read_text())
HOW = "see `tests/waits` in CONTRIBUTING.md"


def rows() -> dict[tuple[str, str], int]:
    """How many sites the table has of each function; `*` stands for all of a file."""
    found = {}
    for file, functions in TABLE.items():
        for key in functions:
            function, _, number = key.rpartition(" *")
            found[file, function] = int(number)
    return found


def cells() -> list[tuple[str, str, str, str]]:
    """File, function, column and content of each cell."""
    return [
        (file, key, column, content)
        for file, functions in TABLE.items()
        for key, row in functions.items()
        if isinstance(row, dict)
        for column, content in row.items()
        if column != "checked"
    ]


def test_every_wait_of_the_product_is_in_the_table_and_no_other() -> None:
    known = rows()
    actual: Counter[tuple[str, str]] = Counter()
    for site in sites():
        actual[site.file, "*" if (site.file, "*") in known else site.function] += 1
    wrong = {key: (actual[key], known.get(key, 0)) for key in actual.keys() | known.keys()}
    wrong = {key: numbers for key, numbers in wrong.items() if numbers[0] != numbers[1]}
    assert not wrong, f"waits in the code and in the table; {HOW}: {wrong}"


def test_each_row_says_what_was_checked_and_each_cell_names_a_test_or_says_why_there_is_none() -> None:
    tests = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    for functions in TABLE.values():
        for key, row in functions.items():
            assert isinstance(row, str) or (
                row.keys() - {"checked"} <= COLUMNS and row.keys() > {"checked"}
            ), key
    for file, key, column, content in cells():
        assert content in tests or re.fullmatch("- .{5,}", content), (file, key, column, content)


def test_a_new_wait_is_noticed_and_another_one_like_it_too() -> None:
    text = "class C:\n    async def f(self):\n        await self.g(1)\n"
    assert [str(site) for site in found_in("x.py", text)] == ["x.py C.f: await self.g"]
    again = text + "        await self.g(2)\n        self._runtime.work(f, g)\n        await turns.work(f)\n"
    assert [site.what for site in found_in("x.py", again)] == [
        "C.f: await self.g", "C.f: await self.g 2", "C.f: self._runtime.work", "C.f: await turns.work"
    ]  # fmt: skip
