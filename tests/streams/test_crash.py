"""SIGKILL at random instants, hundreds of times; a power cut; and what a start costs."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.operations.manager import committed
from bridge.streams.layout import Files
from bridge.streams.meta import StorageSettings
from bridge.streams.store import StreamStore

from .conftest import House, everything, payloads, put, run

FS_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2


def writer(root: Path, label: str, report: int) -> None:
    """Append to both streams without end, and write each acknowledged payload to `report`."""

    async def work() -> None:
        store = StreamStore(root / "data", root / "memory", on_event=lambda *what: None)
        for name, flush in (("written", False), ("synced", True)):
            if name not in store.streams:
                store.create(name, StorageSettings(segment_size=16384, max_size=1 << 40, flush=flush), b"{}")
        keeping = asyncio.create_task(store.keep(0.02))
        number = 0
        while True:
            streams = list(store.streams.values())
            acked = b""
            for stream in streams:
                for _ in range(random.randrange(1, 30)):
                    payload = b"%s-%d-" % (label.encode(), number) + b"x" * random.randrange(200)
                    stream.append(b"t", payload)
                    acked += b"%s %d\n" % (stream.name.encode(), number)
                    number += 1
            for stream in streams:
                await committed(stream)
            os.write(report, acked)
            assert not keeping.done()

    asyncio.run(work())


def forked(root: Path, label: str) -> tuple[int, int]:
    """Run `writer` in a child; returns its pid and the pipe to which it writes acknowledgements."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read_end)
            writer(root, label, write_end)
        finally:
            os._exit(1)
    os.close(write_end)
    return child, read_end


def acknowledged(pipe: int) -> list[tuple[str, int]]:
    with os.fdopen(pipe, "rb") as acked:
        lines = acked.read().split(b"\n")[:-1]  # the last line may be cut by the kill
    return [(name.decode(), int(number)) for name, number in (line.split() for line in lines)]


def rounds(house: House, root: Path, number: int, seed: int) -> int:
    """Kill `number` writers one after the other, checking after each; returns how much they stored."""
    draw = random.Random(seed)
    seen = {"written": 0, "synced": 0}
    total = 0

    async def check(label: str, acked: list[tuple[str, int]]) -> None:
        nonlocal total
        async with house.store() as store:
            for name, stream in store.streams.items():
                new = everything(stream, seen[name])
                assert [m.sequence_number for m in new] == list(range(seen[name], stream.next_sequence))
                numbers = []
                for message in new:
                    made_by, count, rest = message.payload.split(b"-", 2)
                    assert made_by.decode() == label
                    assert rest.strip(b"x") == b""
                    numbers.append(int(count))
                assert numbers == sorted(set(numbers)), "a message is there twice, or out of order"
                mine = {number for stream_name, number in acked if stream_name == name}
                assert mine <= set(numbers), f"{name}: acknowledged, and not there: {mine - set(numbers)}"
                seen[name] = stream.next_sequence
                total += len(new)

    for n in range(number):
        label = f"r{n}"
        child, pipe = forked(root, label)
        time.sleep(draw.uniform(0.01, 0.06))  # the instant of the kill, not a wait for anything
        os.kill(child, signal.SIGKILL)
        acked = acknowledged(pipe)
        os.waitpid(child, 0)
        run(check(label, acked))
    return total


def test_nothing_acknowledged_is_missing_and_nothing_appears_after_hundreds_of_kills(tmp_path: Path) -> None:
    house = House(tmp_path)
    assert rounds(house, tmp_path, 200, seed=1) > 1000
    assert not [event for event in house.events if "lost" in event]


@pytest.fixture
def journaled(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of its own on a loop device, if the machine can make one."""
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    made = subprocess.run(["mkfs.ext4", "-q", image], capture_output=True).returncode == 0
    if not made or subprocess.run(["mount", "-o", "loop", image, place], capture_output=True).returncode:
        pytest.skip("cannot mount an ext4 image here (needs root and a loop device)")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], capture_output=True)


def test_with_flush_on_write_nothing_acknowledged_is_missing_after_a_power_cut(journaled: Path) -> None:
    """The file system is shut down with its journal unflushed: what was not synced is gone."""
    for number in range(4):
        child, pipe = forked(journaled, f"p{number}")
        assert select.select([pipe], [], [], 30)[0], "nothing was acknowledged"
        time.sleep(0.05 + random.random() / 5)  # the instant of the cut
        fd = os.open(journaled, os.O_RDONLY)
        fcntl.ioctl(fd, FS_IOC_SHUTDOWN, NO_LOG_FLUSH.to_bytes(4, "little"))
        os.close(fd)
        os.kill(child, signal.SIGKILL)
        acked = acknowledged(pipe)
        os.waitpid(child, 0)
        subprocess.run(["umount", journaled], check=True)
        subprocess.run(["mount", "-o", "loop", journaled.parent / "image", journaled], check=True)
        synced = {n for name, n in acked if name == "synced"}
        house = House(journaled)

        async def check(house: House = house, number: int = number, synced: set[int] = synced) -> None:
            """All of the synced stream is there; what the other one lost is a hole that is recorded."""
            async with house.store() as store:
                found = [m.payload.split(b"-") for m in everything(store.streams["synced"])]
                assert synced <= {int(count) for made_by, count, _ in found if made_by == b"p%d" % number}
                written = store.streams["written"]
                there = {m.sequence_number for m in everything(written)}
                lost = {n for d in written.drops.ranges for n in range(d.first, d.last + 1)}
                assert there | lost == set(range(written.next_sequence))

        asyncio.run(check())
        assert synced, "the test has to have acknowledged something"


class Counting(Files):
    """Counts the bytes that are read."""

    def __init__(self) -> None:
        self.bytes_read = 0

    def read(self, fd: int, size: int, offset: int) -> bytes:
        data = super().read(fd, size, offset)
        self.bytes_read += len(data)
        return data


class Starting:
    """A stream of so many messages of 200 bytes, to be opened again and again."""

    def __init__(self, root: Path, messages: int) -> None:
        self.house, self.messages = House(root), messages
        run(self._fill())
        self.house.files = self.counting = Counting()

    async def _fill(self) -> None:
        async with self.house.stream(segment_size=4 << 20, max_size=1 << 40) as stream:
            for _ in range(self.messages // 1000):
                await put(stream, *([bytes(200)] * 1000))

    def open(self) -> float:
        """Open it; returns the CPU time that it took, which other processes disturb least."""

        async def start() -> float:
            began = time.process_time()
            async with self.house.stream() as stream:
                took = time.process_time() - began
                assert stream.next_sequence == self.messages
                return took

        return asyncio.run(start())


@pytest.mark.parametrize("many", [500_000, pytest.param(5_000_000, marks=pytest.mark.slow(seconds=10))])
def test_a_start_reads_only_the_last_segment_however_long_the_stream(tmp_path: Path, many: int) -> None:
    short = Starting(tmp_path / "few", 18_000)  # 3.7 MB: one segment, nearly full
    long = Starting(tmp_path / "many", many)
    short.open()
    long.open()
    assert long.counting.bytes_read <= 4 << 20
    assert long.counting.bytes_read <= short.counting.bytes_read * 2
    times = [(short.open(), long.open()) for _ in range(15)]
    assert min(time for _, time in times) < 2 * min(time for time, _ in times)


def test_a_hundred_restarts_without_a_message_change_nothing(house: House) -> None:
    async def work() -> None:
        async with house.stream() as stream:
            await put(stream, b"a")
        before = sorted(path.name for path in house.directory().iterdir())
        for _ in range(100):
            async with house.stream() as stream:
                assert payloads(stream) == [b"a"]
        assert sorted(path.name for path in house.directory().iterdir()) == before

    run(work())
