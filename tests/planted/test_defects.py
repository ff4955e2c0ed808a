"""The planted defects still apply, each to one place, and are what they say: one line."""

from __future__ import annotations

from collections import Counter

import pytest

from . import table
from .defects import ROOMS, ROOT, Defect, load

DEFECTS = load()


def test_there_are_sixty_defects_spread_over_the_rooms_and_two_more_sets() -> None:
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS)
    first = Counter(defect.room for defect in DEFECTS if defect.set == 1)
    assert (first.total(), len(first)) == (60, 4)
    assert min(first.values()) >= 13
    assert Counter(defect.set for defect in DEFECTS) == {1: 60, 2: 20, 3: 9}
    assert {defect.room for defect in DEFECTS} == set(ROOMS)


@pytest.mark.parametrize("defect", DEFECTS, ids=str)
def test_the_defect_applies_to_one_line_and_compiles(defect: Defect) -> None:
    planted = defect.plant()
    compile(planted, defect.file, "exec")
    gone, added = defect.changed_lines()
    assert gone == 1, "it changes more than one line"
    assert added <= 1, "it adds lines"
    assert planted != (ROOT / defect.file).read_text()
    assert defect.harm.endswith(".")


def test_the_page_shows_the_results_as_they_are() -> None:
    content = table.PAGE.read_text()
    assert content == table.page(content, table.rendered(DEFECTS, table.read())), (
        "run python -m tests.planted.table"
    )


def test_the_results_are_those_of_these_defects() -> None:
    assert set(table.read()) <= {defect.name for defect in DEFECTS}
