"""What is written to a flash card: bytes and syncs at the block device, for each message stored.

    python -m benchmarks.flash [--only NAME ...] [--rates 10,1000] [--seconds 60] [--output DIR]

Each system stores the same messages, with payloads of 256 bytes, at a fixed rate: one by one, and if it
falls behind, what is due at once. Its data is in an ext4 file system of its own on a loop device, made and
mounted with the defaults, so what its journal writes counts too. Read are the device's counters in
/sys/block: bytes written, and flushes of its cache. What is left in the page cache counts: the file system
is synced before and after. Some systems run at the same time, because a number of bytes does not depend on
what else the machine does, as long as the rate is reached; it is in the table. Needs root and loop devices.

Caveats. Mosquitto stores a message only for a session that waits for it, so the benchmark has one. Each save
writes all waiting messages, so its figures grow with the time. NATS syncs every two minutes by default, and
`SQLite, 1 s` commits and syncs once a second. Flash is written in pages and erased in blocks, so a card
wears faster than these bytes suggest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sqlite3
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.league.clients import Client, payload
from benchmarks.league.contenders import Contender, Options, contenders
from benchmarks.league.trials import World, mounted
from benchmarks.testbed.web import Web

SIZE = 256
TOPIC = 7  # bytes
SECTOR = 512  # bytes, the unit of the counters
WARM = 5.0  # seconds before the counters are read: files are made, exports are open
DAY = 86_400
TOGETHER = 3
EXPORT = """\
[[streams.bench.export.http]]
identifier = "web"
endpoint_url = "{url}"
"""


class Counters(NamedTuple):
    """What a block device has written so far."""

    writes: int
    size: int
    flushes: int

    @classmethod
    def of(cls, place: Path) -> Counters:
        """The device of the file system that is mounted there, after a sync."""
        fd = os.open(place, os.O_RDONLY)
        try:
            number = os.fstat(fd).st_dev
            subprocess.run(["sync", "-f", place], check=True)
        finally:
            os.close(fd)
        name = f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat"
        fields = [int(field) for field in Path(name).read_text(encoding="ascii").split()]
        return cls(fields[4], fields[6] * SECTOR, fields[15])


class Sqlite:
    """A table in WAL mode. A commit is synced; one comes after each message, or after `every` seconds."""

    size = SIZE

    def __init__(self, path: Path, every: float) -> None:
        self._path, self._every = path, every
        self._due = 0.0
        self._connection: sqlite3.Connection | None = None

    def prepare(self, *, again: bool = False) -> None:
        """Make the table."""
        self._connection = sqlite3.connect(self._path, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute("CREATE TABLE m (id INTEGER PRIMARY KEY, topic TEXT, payload BLOB)")

    def publish(self, numbers: range) -> Iterator[int]:
        """As `Client`."""
        if self._connection is None:
            self.prepare()
            assert self._connection is not None
        if not self._connection.in_transaction:
            self._connection.execute("BEGIN")
        for number in numbers:
            self._connection.execute(
                "INSERT INTO m VALUES (?, 'bench/a', ?)", (number, payload(number, SIZE))
            )
        if time.monotonic() >= self._due:
            self._connection.execute("COMMIT")
            self._due = time.monotonic() + self._every
        yield from numbers

    def read(self) -> list[bytes]:
        """As `Client`."""
        assert self._connection is not None
        return [row[0] for row in self._connection.execute("SELECT payload FROM m ORDER BY id")]

    def close(self) -> None:
        """Commit and close."""
        if self._connection is not None:
            with contextlib.suppress(sqlite3.OperationalError):
                self._connection.execute("COMMIT")
            self._connection.close()


class Result(NamedTuple):
    """What one system has written."""

    name: str
    rate: int
    messages: int
    seconds: float
    written: Counters

    def row(self) -> dict[str, float | int | str]:
        """For the tables."""
        size = self.written.size
        return {
            "system": self.name,
            "messages_per_s": self.rate,
            "reached": round(self.messages / self.seconds),
            "bytes_per_message": round(size / self.messages),
            "times_the_data": round(size / self.messages / (SIZE + TOPIC), 2),
            "gb_per_day": round(size / self.messages * self.rate * DAY / 1e9, 2),
            "flushes_per_s": round(self.written.flushes / self.seconds, 1),
            "writes_per_s": round(self.written.writes / self.seconds, 1),
        }


def paced(client: Client, rate: int, first: int, seconds: float) -> int:
    """Publish `rate` messages a second, what is due at a time; returns the number of the next."""
    began, number = time.monotonic(), first
    end = began + seconds
    while (now := time.monotonic()) < end:
        due = first + int((now - began) * rate)
        for _ in client.publish(range(number, due + 1)):
            number += 1
        time.sleep(max(0.0, began + (number - first) / rate - time.monotonic()))
    return number


def measured(name: str, client: Client, place: Path, rate: int, seconds: float) -> Result:
    """Publish for so long, and read the counters before and after."""
    client.size = SIZE
    at = paced(client, rate, 0, WARM)
    before, began = Counters.of(place), time.monotonic()
    end = paced(client, rate, at, seconds)
    took = time.monotonic() - began
    after = Counters.of(place)
    written = Counters(*(b - a for a, b in zip(before, after, strict=True)))
    return Result(name, rate, end - at, took, written)


def server(contender: Contender, root: Path, rate: int, seconds: float) -> Result:
    """Measure a server of the league. All its files are on the device."""
    with mounted(root, "ext4") as place:
        world = World(contender, root / "home", place / "data")
        try:
            return measured(contender.name, world.start(), place, rate, seconds)
        finally:
            world.kill()
            for _ in range(50):  # its files are closed a moment later
                if not subprocess.run(["umount", place], capture_output=True, check=False).returncode:
                    break
                time.sleep(0.1)


def library(name: str, every: float, root: Path, rate: int, seconds: float) -> Result:
    """Measure SQLite."""
    with mounted(root, "ext4") as place:
        client = Sqlite(place / "messages", every)
        try:
            return measured(name, client, place, rate, seconds)
        finally:
            client.close()


def systems(web: Web) -> dict[str, Contender | float]:
    """What is measured, by name; for SQLite the seconds between two commits."""
    found: dict[str, Contender | float] = {}
    for contender in contenders(Options(None, None)):
        if contender.name.startswith(("streambridge", "Mosquitto,", "NATS")) and contender.program:
            found[contender.name] = contender
        if contender.name.startswith("streambridge"):
            name = contender.name + ", http export"
            config = contender.config + EXPORT.format(url=web.url)
            found[name] = contender._replace(name=name, config=config)
    return found | {"SQLite, 1 s": 1.0, "SQLite, each": 0.0}


class Measuring(threading.Thread):
    """Measures one system; `result` is None if it could not be run."""

    def __init__(self, name: str, system: Contender | float, root: Path, rate: int, seconds: float) -> None:
        super().__init__(name=name)
        self.result: Result | None = None
        self._system, self._place = system, (root, rate, seconds)

    def run(self) -> None:
        """Measure, and keep the result."""
        if isinstance(self._system, Contender):
            self.result = server(self._system, *self._place)
        else:
            self.result = library(self.name, self._system, *self._place)


def run(only: Sequence[str], rates: Sequence[int], seconds: float, images: Path) -> list[Result]:
    """Measure all systems, `TOGETHER` at a time, for one rate after the other."""
    results: list[Result] = []
    web = Web()
    try:
        for rate in rates:
            threads: list[Measuring] = []
            with tempfile.TemporaryDirectory(dir=images, ignore_cleanup_errors=True) as name:
                for number, (what, system) in enumerate(systems(web).items()):
                    if only and not any(word.lower() in what.lower() for word in only):
                        continue
                    root = Path(name) / str(number)
                    root.mkdir()

                    for thread in threads[: 1 - TOGETHER]:
                        thread.join()
                    threads.append(Measuring(what, system, root, rate, seconds))
                    threads[-1].start()
                    time.sleep(1)  # mounting and starting are not what is measured
                for thread in threads:
                    thread.join()
                    if thread.result is not None:
                        results.append(thread.result)
    finally:
        web.close()
    return results


def tables(rows: Sequence[dict[str, float | int | str]]) -> str:
    """The results in Markdown."""
    parts = []
    for rate in dict.fromkeys(row["messages_per_s"] for row in rows):
        lines = [
            f"{rate:,} messages a second, of {SIZE} bytes and a topic of {TOPIC}:\n",
            "| | reached | bytes per message | times topic and payload | GB a day | flushes/s | writes/s |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [
            "| {system} | {reached:,} | {bytes_per_message:,} | {times_the_data} | {gb_per_day} "
            "| {flushes_per_s} | {writes_per_s} |".format(**row)
            for row in rows
            if row["messages_per_s"] == rate
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="systems with one of these words"
    )
    parser.add_argument("--rates", default="10,1000", help="messages a second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--images", type=Path, default=Path("/dev/shm"), help="where the file systems are")
    parser.add_argument("--output", type=Path, default=Path("benchmark-output"))
    given = parser.parse_args()
    rates = [int(rate) for rate in given.rates.split(",")]
    results = run(given.only, rates, given.seconds, given.images)
    rows = [result.row() for result in sorted(results, key=lambda one: (one.rate, one.name))]
    for row in rows:
        print(json.dumps(row), flush=True)
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "flash.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    (given.output / "flash.md").write_text(tables(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
