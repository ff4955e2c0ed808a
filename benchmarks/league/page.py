"""The league's page and the README's table, made of the raw numbers alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .trials import NOTHING

Trials = list[dict[str, Any]]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = DOCS / "league.md"
README = ROOT / "README.md"
PART = re.compile(r"(<!-- league -->\n).*?(<!-- /league -->)", re.DOTALL)
FAULTS = {
    "SIGKILL": "SIGKILL",
    "power cut, ext4": "power cut, ext4",
    "power cut, xfs": "power cut, xfs",
    "failing syncs": "failing syncs, then a cut",
    "full disk": "full disk",
    "bit flip": "one bit flipped",
    "truncation": "newest file cut",
}
HEAD = """\
# The power-cut league

<!-- Made by `python -m benchmarks.league`; a change here is lost. -->

What brokers and logs lose of what they have acknowledged, when something goes wrong. One client publishes
messages of 128 bytes, in groups of 100; a message counts when its acknowledgement has arrived before the
harm. Then the server is started again on what is left, and everything is read. Each server is alone on
its machine: no replication, which some of them need for their full promise.

```sh
python -m benchmarks.league --mosquitto DIRECTORY --nats PATH   # as root; --help says more
```

[league.json](league.json) has every trial. A cell is what was **lost** of all that was acknowledged, over
all trials of that kind; for bit flips and cuts, the most that one trial has lost. *No start*: the server
did not start again within 90 s, or what it stores could not be read within 30 s after that. *Wrong* are
messages whose bytes nobody has sent, *twice* those that came more than once.

"""
KINDS = """\
## What is done

* **SIGKILL**: the server and all its processes are killed after 2 to 3 s of load.
* **power cut**: the data is on a file system of its own, on a loop device, which is synced once before
  the load. After 2.2 to 3.4 s of load it is shut down with its journal unflushed (`FS_IOC_SHUTDOWN`):
  from then on nothing reaches the disk. A copy of that disk is mounted.
* **failing syncs**: under load, `strace` makes every `fsync`, `fdatasync`, `msync`, `sync_file_range` and
  `syncfs` fail with EIO; 2 s later the power is cut (ext4). A server that goes on acknowledging loses
  that.
* **full disk**: under load, another program takes all room that is left; 2 s later SIGKILL, a start on
  the full disk, then room, and another start.
* **one bit flipped**: after SIGKILL, in turn in a stored message and anywhere in the server's files; each
  trial has a copy of its own.
* **newest file cut**: after SIGKILL, the file that holds the newest message is cut in the middle of it.
  What was there is gone; the question is what else is.

No real machine lost its power, so that no disk has lied about a sync, and a loop device reorders less
than a disk may. A 0 says that this run has lost none, and no more: other work ran on the machine
meanwhile, which makes some loads small. The rates are rough: those of one connection that waits for each
group of 100, the best of three turns over all servers. They say what a setting costs, not how fast a
server can be ([Results](results.md) does).

streambridge writes what comes together as one record with one checksum: a flipped bit costs all of it,
and is reported. Mosquitto replaces `mosquitto.db` as a whole, so that a power cut does not tear it; the last
column shows what another cause would do. Mosquitto and RabbitMQ deliver the messages to a session or a
consumer, and the others are read where they are stored.

## Who, and how configured

`{data}` is the directory that is harmed, `{home}` one that is not.

"""


def write(raw: dict[str, Any]) -> None:
    """Make the page and the README's part; `raw` is what is in `league.json`."""
    parts = [HEAD, _table(raw, ""), "\n\n", KINDS]
    for name, row in raw.items():
        parts.append(f"### {name}\n\n")
        if row["missing"]:
            parts.append(f"Not run here: {row['missing']}.\n\n")
        else:
            parts.append(f"Version {row['version']}, {row['date']}. ")
        parts.append(
            f"Its promise at this setting: {row['promise']}.\n\n```text\n"
            f"{row['config'].format_map(_Kept())}```\n\n"
        )
        notes = [
            f"* {FAULTS[fault]}: {trial['note']}\n"
            for fault, trials in row["trials"].items()
            for trial in trials
            if trial["note"] and fault not in ("bit flip", "truncation")
        ]
        parts += [*notes, "\n"] if notes else []
    PAGE.write_text("".join(parts).rstrip() + "\n")
    text = README.read_text()
    README.write_text(PART.sub(lambda found: f"{found[1]}{_table(raw, 'docs/league.md')}\n{found[2]}", text))


class _Kept(dict[str, str]):
    """Leaves the places of a configuration as they are."""

    def __missing__(self, key: str) -> str:
        return f"{{{key}}}"


def note(text: str) -> str:
    """What a trial says, in one line and without the directories of the run."""
    line = re.sub(r"/[^\s:,]*/league-[^/\s]*/", "", " ".join(text.split()))
    return re.sub(r"\x1b\[[0-9;]*m", "", line)[:160].replace("<", "&lt;").replace("*", "\\*")


def _table(raw: dict[str, Any], page: str) -> str:
    heads = ["", *FAULTS.values(), "messages/s"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, row in raw.items():
        if row["missing"]:
            cells = ["not run here"] + [""] * len(FAULTS)
        else:
            cells = [_cell(fault, row["trials"].get(fault, [])) for fault in FAULTS]
            rate = max(row.get("rates", [0]))
            cells.append(f"{rate:,.0f}" if rate else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(fault: str, trials: Trials) -> str:
    """What the trials of one fault come to, in a few words."""
    run = [trial for trial in trials if trial["acknowledged"]]
    if not run:
        notes = {trial["note"] for trial in trials}
        return "" if not trials else "nothing stored" if notes == {NOTHING} else "not run here"
    read = [trial for trial in run if not trial["refused"]]
    total: Callable[[str], int] = lambda key: sum(trial[key] for trial in read)  # noqa: E731
    words = []
    if read and fault in ("bit flip", "truncation"):
        worst = max(read, key=lambda trial: int(trial["lost"]))
        words.append(_lost(worst["lost"], worst["acknowledged"]))
    elif read:
        words.append(_lost(total("lost"), total("acknowledged")))
    words += [
        f"{total(key):,} {key if key == 'wrong' else 'twice'}"
        for key in ("wrong", "duplicated")
        if total(key)
    ]
    if len(read) < len(run):
        words.append("**no start**" if not read else f"**no start** in {len(run) - len(read)} of {len(run)}")
    return ", ".join(words)


def _lost(lost: int, acknowledged: int) -> str:
    return f"**{lost:,}** of {acknowledged:,}" if lost else "0"
