"""What limits cost when much must go: reading that grows with what goes, in steps that let others in."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from bridge.streams.drops import DropReason
from bridge.streams.layout import Files
from bridge.streams.message_limits import STEP
from bridge.streams.meta import MessageLimits, StorageSettings
from bridge.streams.store import StreamStore
from bridge.streams.stream import Stream

from .conftest import House, everything, put, run
from .test_commit import until
from .test_drops import flip


class Counting(Files):
    """Counts the bytes that are read."""

    def __init__(self) -> None:
        self.bytes = 0

    def read(self, fd: int, size: int, offset: int) -> bytes:
        data = super().read(fd, size, offset)
        self.bytes += len(data)
        return data


async def aged(stream: Stream) -> None:
    """Wait until all messages are more than a millisecond old."""
    newest = stream.clock.now()
    await until(lambda: stream.clock.now() > newest + 2)


async def one_by_one(stream: Stream, number: int) -> None:
    """Messages in frames of their own."""
    for n in range(number):
        await put(stream, b"%05d" % n * 40, topic=b"t%d" % (n % 7))


LIMITS = [
    MessageLimits(max_age=1),
    MessageLimits(max_bytes=300),
    MessageLimits(max_messages=1, max_messages_per_topic=10_000),
    MessageLimits(max_bytes=300, max_messages_per_topic=10_000),
]


@pytest.mark.parametrize("limits", LIMITS)
def test_what_is_read_to_drop_messages_grows_with_their_number_and_not_with_its_square(
    house: House, limits: MessageLimits
) -> None:
    async def work() -> None:
        house.files = files = Counting()
        read: list[int] = []
        async with house.store() as store:
            for number in (400, 1600):
                stream = store.create(f"s{number}", StorageSettings(), b"{}")
                await one_by_one(stream, number)
                await aged(stream)
                before = files.bytes
                stream.configure(StorageSettings(limits=limits), b"{}")
                await until(lambda: stream.live_messages() <= 1)  # noqa: B023 - before the next one
                read.append(files.bytes - before)
        assert read[1] < 8 * read[0]

    run(work())


@pytest.mark.parametrize(
    "limits",
    [MessageLimits(max_bytes=20_200), MessageLimits(max_messages=100, max_messages_per_topic=10_000)],
)
def test_what_a_message_costs_that_drops_another_does_not_grow_with_those_before_it(
    house: House, limits: MessageLimits
) -> None:
    async def work() -> None:
        house.files = files = Counting()
        async with house.stream(limits=limits) as stream:
            read: list[int] = []
            for _ in range(4):
                before = files.bytes
                await one_by_one(stream, 500)
                read.append(files.bytes - before)
            assert stream.live_messages() == 100
            assert read[3] < 2 * read[1]

    run(work())


def test_many_messages_are_dropped_in_steps_and_the_loop_runs_between_them(house: House) -> None:
    async def work() -> None:
        async with house.stream() as stream:
            await put(stream, *[b"x"] * STEP * 4)
            await aged(stream)
            stream.configure(StorageSettings(limits=MessageLimits(max_age=1)), b"{}")
            seen = [stream.live_messages()]
            while seen[-1]:
                await asyncio.sleep(0)
                seen.append(stream.live_messages())
                assert len(seen) < 100, "nothing continues"
            assert [a - b for a, b in pairwise([STEP * 4, *seen]) if a > b] == [STEP] * 4

    run(work())


def test_a_start_that_is_interrupted_while_it_drops_leaves_less_to_the_next_one(house: House) -> None:
    async def work() -> None:
        async with house.stream() as stream:
            await put(stream, *[b"x"] * STEP * 4)
            await aged(stream)
            stream.configure(StorageSettings(limits=MessageLimits(max_age=1)), b"{}")
            kept = [shutil.copytree(house.data_dir, house.data_dir.with_name("killed-0"))]
        for n in range(1, 3):
            killed = House(house.data_dir.parent)
            killed.data_dir = kept[-1]
            async with killed.stream() as stream:
                assert stream.live_messages() == STEP * (3 - n)
                kept.append(shutil.copytree(kept[-1], kept[-1].with_name(f"killed-{n}")))

    run(work())


def test_a_commit_leaves_no_more_to_later_steps_than_it_found(house: House) -> None:
    async def work() -> None:
        async with house.stream(limits=MessageLimits(max_bytes=1000)) as stream:
            await put(stream, *[b"x"] * STEP * 3)
            assert stream.live_messages() == 500

    run(work())


def test_the_file_of_the_oldest_segment_is_closed_when_it_is_dropped(house: House) -> None:
    async def work() -> None:
        async with house.stream(segment_size=1024, limits=MessageLimits(max_bytes=2100)) as stream:
            for _ in range(3):
                await one_by_one(stream, 50)
                await until(lambda: not open_but_gone(house))

    def open_but_gone(house: House) -> list[str]:
        files = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
        return [name for name in files if str(house.data_dir) in name and name.endswith("(deleted)")]

    run(work())


async def overwrite(store: StreamStore, stream: Stream) -> None:
    while stream.log.first < 1000:
        await one_by_one(stream, 50)


async def expire(store: StreamStore, stream: Stream) -> None:
    while stream.log.first < 1000:
        await store.committer.sync([stream])
        stream.maintain(stream.summary(stream.log.first).last_age + HOUR)


async def export(store: StreamStore, stream: Stream) -> None:
    while stream.log.first < 1000:
        stream.exported_upto = stream.next_sequence
        await one_by_one(stream, 50)


async def purge(store: StreamStore, stream: Stream) -> None:
    for upto in range(200, 1200, 200):
        stream.drop_upto(upto, DropReason.PURGED)
        await put(stream, b"x")


HOUR = 3_600_000


@pytest.mark.parametrize(
    ("settings", "drop"),
    [
        (StorageSettings(max_size=310_000, overwrite=True), overwrite),
        (StorageSettings(ttl=HOUR), expire),
        (StorageSettings(max_size=310_000, free_exported=True), export),
        (StorageSettings(), purge),
    ],
)
def test_with_a_limit_per_topic_a_drop_at_the_front_does_not_read_everything_again(
    house: House, settings: StorageSettings, drop: Callable[[StreamStore, Stream], Awaitable[None]]
) -> None:
    async def work() -> None:
        house.files = files = Counting()
        limits = MessageLimits(max_messages_per_topic=1_000_000)
        settings_ = msgspec.structs.replace(settings, limits=limits, segment_size=20_000)
        async with house.store() as store:
            stream = store.create("s", settings_, b"{}")
            await one_by_one(stream, 1200)
            before = files.bytes
            await drop(store, stream)
            assert stream.oldest >= 1000
            assert files.bytes - before < 20_000

    run(work())


@pytest.mark.parametrize("also", [{}, {"max_bytes": 30_000}, {"max_messages": 200}])
def test_the_limit_per_topic_is_exact_while_the_front_is_overwritten_and_purged(
    house: House, also: dict[str, int]
) -> None:
    async def work() -> None:
        limits = MessageLimits(max_messages_per_topic=40, **also)
        settings = StorageSettings(max_size=60_000, segment_size=10_000, overwrite=True, limits=limits)
        async with house.store() as store:
            stream = store.create("s", settings, b"{}")
            for n in range(1500):
                await put(stream, b"x" * (n % 300), topic=b"t%d" % (n % 7 if n % 40 else 7))
                if n % 250 == 0:
                    stream.drop_upto(stream.oldest + 20, DropReason.PURGED)
                if n % 50 == 0:
                    rows = everything(stream)
                    counted = Counter(row.topic for row in rows)
                    assert max(counted.values(), default=0) <= 40
                    assert sum(len(row.topic) + len(row.payload) for row in rows) <= (
                        limits.max_bytes or 1 << 30
                    )
            assert {drop.reason for drop in stream.drops.ranges} >= {DropReason.LIMITS, DropReason.PURGED}
            assert stream.live_messages() > 100

    run(work())


def test_the_limit_per_topic_holds_also_after_unnoticed_damage(house: House) -> None:
    async def work() -> None:
        limits = MessageLimits(max_messages_per_topic=20)
        async with house.stream(segment_size=2048, limits=limits) as stream:
            await one_by_one(stream, 280)
            damaged = list(stream.log.sizes)[-9]
            assert damaged > stream.next_sequence - 140
        flip(house.directory() / f"{damaged:020d}.seg")
        async with house.stream() as stream:
            for _ in range(3):
                await one_by_one(stream, 35)
                counted = Counter(row.topic for row in everything(stream))
                assert max(counted.values()) == 20
            assert "it is damaged" in " ".join(house.events)
            assert stream.counters["corrupt_reads"] > 0

    run(work())
