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
# What the README shows of it.
SOME = (
    "streambridge",
    "Mosquitto 2.1, persist-sqlite",
    "NATS JetStream",
    "NATS JetStream, sync always",
    "RabbitMQ, quorum queue",
    "Redis Streams, everysec",
)
CUT = ("SIGKILL", "power cut, ext4", "full disk")
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

This page shows how many acknowledged messages each server loses after a fault. A server survives a power cut
without loss only if it syncs before it acknowledges.

One client publishes messages of 128 bytes in groups of 100. A message counts if its acknowledgement arrived
before the fault. Afterwards the server is started again on the remaining data, and all messages are read.
Each server runs as a single node, without the replication that some of them need for their full promise.

```sh
python -m benchmarks.league --mosquitto DIRECTORY --nats PATH   # as root; --help says more
```

[league.json](league.json) has every trial, its date, and the configuration of each server. A cell shows the
**lost** messages of all acknowledged ones, over all trials of that fault; for bit flips and cut files, it
shows the trial with the largest loss. *No start*: the server did not start within 90 s, or its messages could
not be read within another 30 s. *Wrong* counts messages with bytes that nobody has sent, and *twice* those
that were read more than once.

"""
KINDS = """\
## The faults

* **SIGKILL**: the server and all its processes are killed after 2 to 3 s of load.
* **Power cut**: after 2.2 to 3.4 s of load, the file system of the data, on a loop device, is shut down
  without writing its journal (`FS_IOC_SHUTDOWN`). Then a copy of that disk is mounted.
* **Failing syncs**: under load, `strace` makes every sync fail with EIO. The power is cut 2 s later (ext4). A
  server that continues to acknowledge loses these messages.
* **Full disk**: under load, another program takes all remaining space. After 2 s the server is killed and
  started on the full disk. Then space is freed, and the server is started again.
* **One bit flipped**: after SIGKILL, one bit is flipped in a stored message or anywhere in the files.
* **Newest file cut**: after SIGKILL, the file with the newest message is cut in the middle of that message.
  The question is which other messages are lost.

What the results do not show:

* No real machine lost its power, so no disk lied about a sync, and a loop device reorders less than a disk
  may. A 0 means only that this run lost nothing.
* The rates are rough, the best of three turns: they show what a setting costs, not how fast a server can be
  ([Results](../benchmarks/results.md)).
* streambridge writes messages that arrive together as one record with one checksum. A flipped bit costs the
  whole record, and is reported.
* Mosquitto replaces `mosquitto.db` as a whole, so a power cut does not cut it off.
* From Mosquitto and RabbitMQ, the messages are read by a session or a consumer. From the others, they are
  read where they are stored.

## Servers

| server | version | its promise at this setting |
|---|---|---|
"""


def write(raw: dict[str, Any]) -> None:
    """Make the page and the README's part; `raw` is what is in `league.json`."""
    parts = [HEAD, _table(raw, tuple(FAULTS)), "\n\n", KINDS]
    for name, row in raw.items():
        version = "not run here" if row["missing"] else row["version"]
        parts.append(f"| {name} | {version} | {row['promise']} |\n")
    PAGE.write_text("".join(parts))
    some = _table({name: raw[name] for name in SOME if name in raw}, CUT)
    README.write_text(PART.sub(lambda found: f"{found[1]}{some}\n{found[2]}", README.read_text()))


def note(text: str) -> str:
    """What a trial says, in one line and without the directories of the run."""
    line = re.sub(r"/[^\s:,]*/league-[^/\s]*/", "", " ".join(text.split()))
    return re.sub(r"\x1b\[[0-9;]*m", "", line)[:160].replace("<", "&lt;").replace("*", "\\*")


def _table(raw: dict[str, Any], faults: tuple[str, ...]) -> str:
    heads = ["", *(FAULTS[fault] for fault in faults), "messages/s"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, row in raw.items():
        if row["missing"]:
            cells = ["not run here"] + [""] * len(faults)
        else:
            cells = [_cell(fault, row["trials"].get(fault, [])) for fault in faults]
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
    whole = f"**all {lost:,}**" if lost == acknowledged else f"**{lost:,}** of {acknowledged:,}"
    return whole if lost else "0"
