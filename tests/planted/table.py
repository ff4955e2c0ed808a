"""The results: what finds each planted defect (`results.json`), and their summary in `docs/proof.md`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .defects import ROOT, Defect, load
from .runs import Found

RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "proof.md"
BEGIN, END = "<!-- planted -->", "<!-- /planted -->"

Results = dict[str, dict[str, Found]]  # by the name of the defect, then "simulation" or "tests"


def read() -> Results:
    """Read the results. A defect that has not been tried yet has none."""
    if not RESULTS.exists():
        return {}
    stored: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text())
    return {name: {way: Found(**found) for way, found in ways.items()} for name, ways in stored.items()}


def keep(defect: Defect, way: str, found: Found) -> None:
    """Add one result to those of earlier runs."""
    known = read()
    known.setdefault(defect.name, {})[way] = found
    document = {
        name: {way: {"by": one.by, "seconds": round(one.seconds)} for way, one in sorted(ways.items())}
        for name, ways in sorted(known.items())
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


def rendered(defects: list[Defect], results: Results) -> str:
    """The summary, in Markdown: a line for each set."""
    lines = []
    for number, title in enumerate(("first", "second", "third"), 1):
        some = [defect for defect in defects if defect.set == number]
        lines.append(f"* The {title} set. {_summary(some, results)}")
    return "\n".join(lines)


def _summary(defects: list[Defect], results: Results) -> str:
    def names(way: str, *, by: bool) -> set[str]:
        ran = {defect.name: results.get(defect.name, {}).get(way) for defect in defects}
        return {name for name, found in ran.items() if found is not None and (bool(found.by) or not by)}

    parts = []
    for way, what in (("simulation", "the simulation"), ("tests", "the other tests")):
        if ran := names(way, by=False):
            parts.append(f"{len(names(way, by=True))} of {len(ran)} by {what}")
    either = names("simulation", by=True) | names("tests", by=True)
    missed = names("simulation", by=False) | names("tests", by=False)
    return f"Found: {'; '.join(parts) or 'not run yet'}. By none of them: {len(missed - either)}."


def page(content: str, summary: str) -> str:
    """Return the page with the summary between its markers."""
    before, _, rest = content.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{summary}\n\n{END}{after}"


def write() -> None:
    """Update the page from the results."""
    PAGE.write_text(page(PAGE.read_text(), rendered(load(), read())))


if __name__ == "__main__":
    write()
