"""The power-cut league: what brokers and logs lose of what they have acknowledged.

    python -m benchmarks.league [--only NAME ...] [--mosquitto DIR] [--nats PATH] [--rounds 2]

Needs root, loop devices and strace; a row or a column that cannot be run here says why. It takes half an
hour, and writes `docs/league.json`; `--page` makes `docs/league.md` and the README's table from that alone.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import page, trials
from .contenders import Contender, Options, contenders, version
from .trials import Outcome

RAW = page.DOCS / "league.json"
FLIPS, CUTS, RATES = 4, 3, 3


def outcomes(contender: Contender, root: Path, rounds: int) -> Iterator[tuple[str, Outcome]]:
    """Every trial of a contender."""
    draw = random.Random(contender.name)
    plain: list[tuple[str, Callable[[Contender, Path, random.Random], Outcome], int]] = [
        ("SIGKILL", trials.killed, rounds),
        ("power cut, ext4", trials.power_cut("ext4"), rounds),
        ("power cut, xfs", trials.power_cut("xfs"), rounds),
        ("full disk", trials.full_disk, 1),
        ("failing syncs", trials.failing_syncs, 1),
    ]
    for fault, trial, times in plain:
        for _ in range(times):
            with tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True) as place:
                yield fault, _done(lambda trial=trial, place=place: trial(contender, Path(place), draw))
    with tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True) as place:
        made: list[trials.Spoiler] = []
        spoils = [("bit flip", trials.flip(draw, inside=number % 2 == 0)) for number in range(FLIPS)]
        spoils += [("truncation", trials.cut(draw))] * CUTS
        for fault, spoil in spoils:

            def spoiled(spoil: Callable[[trials.Spoiler], str] = spoil) -> Outcome:
                if not made:
                    made.append(trials.Spoiler(contender, Path(place)))
                return made[0].trial(spoil)

            yield fault, _done(spoiled)


def _done(trial: Callable[[], Outcome]) -> Outcome:
    """What a trial comes to; an error of the trial itself is a note, and counts for nothing."""
    try:
        return trial()
    except (trials.Refused, OSError, ValueError, AssertionError) as error:
        traceback.print_exc()
        return Outcome(0, note=f"not run here: {error}"[:300])


def _rates(rows: list[Contender], root: Path | None) -> dict[str, list[float]]:
    """Messages acknowledged per second, all in turn, so that what else the machine does harms all alike."""
    found: dict[str, list[float]] = {row.name: [] for row in rows}
    for turn in range(RATES):
        for row in rows:
            with tempfile.TemporaryDirectory(prefix="league-", dir=root, ignore_cleanup_errors=True) as place:
                outcome = _done(lambda row=row, place=place: trials.rate(row, Path(place)))
            print(f"{row.name}: {outcome.rate:.0f}/s in turn {turn + 1}", flush=True)
            found[row.name].append(outcome.rate)
    return found


def main() -> None:
    """Run what is asked for, then write the numbers and the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows whose name has one of these words")
    parser.add_argument("--mosquitto", type=Path, metavar="DIR", help="a source tree of 2.1, built in build/")
    parser.add_argument("--nats", type=Path, metavar="PATH", help="a nats-server that is not in the path")
    parser.add_argument("--rounds", type=int, default=2, help="of SIGKILL and power cuts")
    parser.add_argument("--root", type=Path, help="a directory on a disk; not on a tmpfs")
    parser.add_argument("--raw", type=Path, default=RAW, help="where the numbers are kept")
    parser.add_argument("--rates", action="store_true", help="measure the rates anew, and nothing else")
    parser.add_argument("--page", action="store_true", help="only make the page anew")
    given = parser.parse_args()
    raw: dict[str, Any] = json.loads(given.raw.read_text()) if given.raw.exists() else {}
    rows = contenders(Options(given.mosquitto, given.nats))
    chosen = [
        row for row in rows
        if not given.only or any(word.lower() in row.name.lower() for word in given.only)
    ]  # fmt: skip
    for contender in chosen if not given.page and not given.rates else []:
        print(f"--- {contender.name}", flush=True)
        found: dict[str, list[dict[str, Any]]] = {}
        entry = {
            "promise": contender.promise, "config": contender.config.replace(str(given.mosquitto), "DIR"),
            "version": version(contender),
            "date": time.strftime("%Y-%m-%d", time.gmtime()), "missing": "", "trials": found,
        }  # fmt: skip
        if contender.program is None:
            entry["missing"] = contender.why
        else:
            with tempfile.TemporaryDirectory(prefix="league-", dir=given.root) as root:
                for fault, outcome in outcomes(contender, Path(root), given.rounds):
                    print(f"{fault}: {outcome}", flush=True)
                    found.setdefault(fault, []).append(
                        outcome._replace(note=page.note(outcome.note))._asdict()
                    )
        if contender.program is not None or contender.name not in raw:
            raw[contender.name] = entry
        order = [row.name for row in rows]
        raw = {name: raw[name] for name in sorted(raw, key=order.index) if name in order}
        given.raw.write_text(json.dumps(raw, indent=1) + "\n")
    if not given.page:
        for name, rates in _rates(
            [row for row in chosen if row.program and row.name in raw], given.root
        ).items():
            raw[name]["rates"] = rates
        given.raw.write_text(json.dumps(raw, indent=1) + "\n")
    if given.raw == RAW:
        page.write(raw)


if __name__ == "__main__":
    main()
