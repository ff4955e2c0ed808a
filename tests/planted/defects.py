"""The planted defects: `defects.toml`, read and applied."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("defects.toml")
ROOMS = ("store", "broker", "export", "ingest", "consumers", "frontends")


@dataclass(frozen=True, slots=True)
class Defect:
    """One line of code that is wrong; the fields are those of `defects.toml`.

    `number` counts from 1, in the order of the file.
    """

    number: int
    name: str
    room: str
    file: str
    old: str
    new: str
    harm: str
    hole: int | None = None
    set: int = 1

    def __str__(self) -> str:
        return f"{self.number}. {self.name}"

    def plant(self, tree: Path = ROOT) -> str:
        """Return the content of the defect's file in a tree, with the defect.

        Raises ValueError if the code has changed, so that the defect no longer applies.
        """
        code = (tree / self.file).read_text()
        found = code.count(self.old)
        if found != 1:
            raise ValueError(
                f"planted defect {self}: {self.file} has its `old` text {found} times. The code there has "
                f"changed: adapt `old` and `new` in {FILE.relative_to(ROOT)} so that the defect stays"
            )
        return code.replace(self.old, self.new)

    def changed_lines(self) -> tuple[int, int]:
        """Return how many lines the defect takes away and adds."""
        before, after = (ROOT / self.file).read_text().splitlines(), self.plant().splitlines()
        lines = list(difflib.ndiff(before, after))
        return sum(line.startswith("- ") for line in lines), sum(line.startswith("+ ") for line in lines)


def load() -> list[Defect]:
    """Read all defects. The line breaks that begin and end a text are not part of it."""
    tables = tomllib.loads(FILE.read_text())["defect"]
    return [
        Defect(
            number,
            **{key: text.rstrip("\n") if key in ("old", "new") else text for key, text in table.items()},
        )
        for number, table in enumerate(tables, 1)
    ]
