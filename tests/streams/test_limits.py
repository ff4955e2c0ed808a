"""Limits: those of Stream Manager by segment, those of JetStream by message, purge, and what they record."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from bridge.errors import MessageTooLarge, StreamFull
from bridge.operations.manager import committed
from bridge.streams.drops import Drop, DropReason
from bridge.streams.meta import MessageLimits, StorageSettings
from bridge.streams.stream import Stream

from .conftest import House, everything, payloads, put, run


def limit(stream: Stream, **limits: int | bool | None) -> None:
    """Change the message limits, as an update would."""
    stream.configure(msgspec.structs.replace(stream.settings, limits=MessageLimits(**limits)), b"{}")


def test_the_walk_through_of_jetstreams_limits_example(house: House) -> None:
    """https://natsbyexample.com/examples/jetstream/limits-stream/go, with sizes of our own."""

    async def work() -> None:
        async with house.stream() as stream:
            for n in range(6):
                await put(stream, b"%d" % n, topic=b"page_loaded")
            assert stream.live_messages() == 6
            limit(stream, max_messages=10)
            assert stream.live_messages() == 6
            for n in range(6, 13):
                await put(stream, b"%d" % n, topic=b"page_loaded")
            assert [m.sequence_number for m in everything(stream)] == list(range(3, 13))
            limit(stream, max_messages=10, max_bytes=100)
            assert sum(len(m.topic) + len(m.payload) for m in everything(stream)) <= 100
            assert [m.sequence_number for m in everything(stream)] == list(range(5, 13))
            limit(stream, max_messages=10, max_bytes=100, max_age=100)
            stream.maintain(stream.clock.now() + 101)
            assert stream.live_messages() == 0
            assert payloads(stream) == []
            assert await put(stream, b"x") == [13]
        async with house.stream() as stream:
            assert (stream.oldest, stream.next_sequence) == (13, 14)

    run(work())


@pytest.mark.parametrize("group", [1, 3, 50])
def test_max_messages_is_exact_after_every_commit(house: House, group: int) -> None:
    async def work() -> None:
        async with house.stream(segment_size=1024, limits=MessageLimits(max_messages=7)) as stream:
            for start in range(0, 200, group):
                await put(stream, *(b"%d" % n for n in range(start, start + group)))
                assert payloads(stream) == [
                    b"%d" % n for n in range(max(0, start + group - 7), start + group)
                ]
        async with house.stream() as stream:
            assert stream.live_messages() == 7

    run(work())


def test_max_bytes_is_exact_also_after_a_restart_in_the_middle_of_a_segment(house: House) -> None:
    async def work() -> None:
        for _ in range(4):
            async with house.stream(segment_size=1024, limits=MessageLimits(max_bytes=500)) as stream:
                for n in range(40):
                    await put(stream, b"x" * (n % 13), b"y" * (n % 7))
                    rows = everything(stream)
                    size = sum(len(m.topic) + len(m.payload) for m in rows)
                    following = everything(stream)[0].sequence_number
                    assert size <= 500
                    assert following == stream.oldest
                    assert size + 14 > 500 or stream.oldest == 0

    run(work())


def test_max_age_drops_single_messages_and_only_those_that_are_too_old(house: House) -> None:
    async def work() -> None:
        async with house.stream(limits=MessageLimits(max_age=1000)) as stream:
            await put(stream, b"a")
            (first,) = everything(stream)
            came = stream.clock.now()
            while stream.clock.now() < came + 20:
                await put(stream, b"b")
            stream.maintain(came + 1000)
            rest = everything(stream)
            assert rest
            assert all(m.sequence_number > first.sequence_number for m in rest)

    run(work())


def test_max_messages_per_topic_keeps_the_newest_of_each_topic(house: House) -> None:
    async def work() -> None:
        limits = MessageLimits(max_messages_per_topic=2)
        for _ in range(3):
            async with house.stream(segment_size=1024, limits=limits) as stream:
                for n in range(60):
                    await put(stream, b"%d" % n, topic=b"t%d" % (n % 5))
                rows = everything(stream)
                assert len(rows) == 10
                assert [m.sequence_number for m in rows] == list(
                    range(stream.next_sequence - 10, stream.next_sequence)
                )
                await put(stream, b"last", topic=b"t0")
                assert len([m for m in everything(stream) if m.topic == b"t0"]) == 2

    run(work())


def test_what_a_limit_per_topic_drops_takes_no_room_of_a_limit_in_bytes(house: House) -> None:
    async def work() -> None:
        limits = MessageLimits(max_messages_per_topic=1, max_bytes=1000)
        async with house.stream(limits=limits) as stream:
            await put(stream, b"first", topic=b"other")
            for number in range(100):
                await put(stream, b"%050d" % number, topic=b"busy")
            assert payloads(stream) == [b"first", b"%050d" % 99]

    run(work())


def test_a_limit_per_topic_leaves_holes_and_the_segments_that_it_empties_are_deleted(house: House) -> None:
    async def work() -> None:
        async with house.stream(segment_size=1024, limits=MessageLimits(max_messages_per_topic=1)) as stream:
            await put(stream, b"rare", topic=b"rare")
            for n in range(500):
                await put(stream, b"%d" % n, topic=b"often")
            assert payloads(stream) == [b"rare", b"499"]
            assert stream.live_messages() == 2
            await put(stream, b"rare again", topic=b"rare")
            assert payloads(stream) == [b"499", b"rare again"]
            assert len(stream.log.sizes) <= 2

    run(work())


@pytest.mark.parametrize(
    ("limits", "taken"),
    [
        (MessageLimits(max_messages=3, discard_new=True), 3),
        (MessageLimits(max_bytes=50, discard_new=True), 4),
        (MessageLimits(max_messages_per_topic=2, discard_new=True), 2),
    ],
)
@pytest.mark.parametrize("one_group", [True, False])
def test_discard_new_refuses_what_would_pass_a_limit(
    house: House, limits: MessageLimits, taken: int, one_group: bool
) -> None:
    async def work() -> None:
        async with house.stream(limits=limits) as stream:
            for n in range(10):
                if n < taken:
                    stream.append(b"t", b"%011d" % n)
                else:
                    with pytest.raises(StreamFull, match="discards new messages"):
                        stream.append(b"t", b"%011d" % n)
                if not one_group:
                    await committed(stream)
            await committed(stream)
            assert payloads(stream) == [b"%011d" % n for n in range(taken)]
            stream.drop_upto(stream.next_sequence, DropReason.PURGED)
            assert await put(stream, b"%011d" % 1) == [taken]

    run(work())


@pytest.mark.parametrize(
    "limits",
    [
        {"max_messages": 4},
        {"max_bytes": 4 * len(b"tx")},
        {"max_messages_per_topic": 4},
    ],
)
def test_limits_that_change_while_messages_wait_count_these(house: House, limits: dict[str, int]) -> None:
    async def work() -> None:
        async with house.stream(limits=MessageLimits(**limits, discard_new=True)) as stream:
            for number in range(2):
                stream.append(b"t", b"x")
                limit(stream, **limits, discard_new=True, max_age=3_600_000 + number)
            await asyncio.sleep(0)  # their group is on its way to the disk
            for number in range(2):
                limit(stream, **limits, discard_new=True, max_age=7_200_000 + number)
                stream.append(b"t", b"x")
            with pytest.raises(StreamFull):
                stream.append(b"t", b"x")
            await committed(stream)
            assert stream.live_messages() == 4
            with pytest.raises(StreamFull):
                stream.append(b"t", b"x")
            stream.drop_upto(1, DropReason.PURGED)
            assert await put(stream, b"x") == [4]

    run(work())


def test_max_message_size_refuses_one_message_and_takes_the_next(house: House) -> None:
    async def work() -> None:
        async with house.stream(limits=MessageLimits(max_message_size=10)) as stream:
            with pytest.raises(MessageTooLarge, match=r"over limits\.max_message_size 10"):
                stream.append(b"t", b"x" * 10)
            assert await put(stream, b"x" * 9) == [0]

    run(work())


def test_time_to_live_drops_a_segment_only_when_all_of_it_has_expired(house: House) -> None:
    async def work() -> None:
        async with house.stream(segment_size=1024, ttl=60_000) as stream:
            before = stream.clock.now()
            for n in range(100):
                await put(stream, b"%d" % n * 10)
            written = everything(stream)
            stream.maintain(before + 59_999)
            assert everything(stream) == written
            stream.maintain(stream.clock.now() + 60_000)
            assert payloads(stream) == []
            assert stream.counters["expired"] == 100
            assert await put(stream, b"next") == [100]
        async with house.stream() as stream:
            assert (stream.oldest, stream.next_sequence) == (100, 101)

    run(work())


def test_retention_exported_frees_what_all_exports_have_passed_before_it_rejects(house: House) -> None:
    async def work() -> None:
        async with house.stream(max_size=4096, segment_size=1024, free_exported=True) as stream:
            with pytest.raises(StreamFull):
                for _ in range(100):
                    await put(stream, b"x" * 100)
            full = stream.next_sequence
            stream.exported_upto = full - 5
            await put(stream, b"x" * 100)
            assert 0 < stream.oldest <= full - 5
            assert {drop.reason for drop in stream.drops.ranges} == {DropReason.EXPORTED}
            with pytest.raises(StreamFull):
                for _ in range(100):
                    await put(stream, b"x" * 100)
            assert stream.oldest <= full - 5

    run(work())


def test_switching_to_overwrite_and_to_a_smaller_size_drops_old_segments_at_once(house: House) -> None:
    async def work() -> None:
        async with house.stream(max_size=65536, segment_size=1024) as stream:
            for n in range(300):
                await put(stream, b"%d" % n * 20)
            stream.configure(StorageSettings(max_size=8192, segment_size=1024, overwrite=True), b"{}")
            assert stream.total_bytes <= 8192
            assert 0 < stream.oldest < 300
            assert everything(stream)[-1].sequence_number == 299

    run(work())


def test_every_drop_is_recorded_with_its_range_and_reason_and_survives_a_restart(house: House) -> None:
    async def work() -> None:
        async with house.stream(limits=MessageLimits(max_messages=5)) as stream:
            await put(stream, *(b"%d" % n for n in range(10)))
            stream.drop([(7, 7)], DropReason.PURGED)
        async with house.stream() as stream:
            assert [(d.first, d.last, d.reason) for d in stream.drops.ranges] == [
                (0, 4, DropReason.LIMITS),
                (7, 7, DropReason.PURGED),
            ]
            assert payloads(stream) == [b"5", b"6", b"8", b"9"]
            await put(stream, b"10")
            assert payloads(stream) == [b"5", b"6", b"8", b"9", b"10"]

    run(work())


def test_the_record_of_drops_stays_small_however_many_there_are(house: House) -> None:
    async def work() -> None:
        async with house.stream(segment_size=4096, limits=MessageLimits(max_messages_per_topic=1)) as stream:
            for n in range(3000):
                await put(stream, b"%d" % n, topic=b"even" if n % 2 else b"odd %d" % (n % 400))
            assert (stream.directory / "drops.log").stat().st_size < 200_000
            live = payloads(stream)
        async with house.stream() as stream:
            assert payloads(stream) == live

    run(work())


def test_the_cost_of_a_commit_does_not_grow_with_the_messages_that_were_dropped(house: House) -> None:
    """Counted, not timed: how many of the dropped ranges are looked at."""

    class Counted(list[Drop]):
        looks = 0

        def __getitem__(self, at: Any) -> Any:
            self.looks += 1
            return super().__getitem__(at)

    async def work() -> None:
        limits = MessageLimits(max_messages=3000, max_messages_per_topic=1)
        async with house.stream(limits=limits) as stream:
            for _ in range(2500):  # a hole behind each message that stays
                stream.append(b"keep-%d" % stream.queue.next, b"x")
                stream.append(b"hot", b"x")
            await put(stream, b"x")
            assert len(stream.drops.ranges) == 2499
            stream.drops.ranges = counted = Counted(stream.drops.ranges)
            for n in range(100):
                await put(stream, b"%d" % n, topic=b"hot")
            assert counted.looks < 100 * 100
            limit(stream, max_messages=2000, max_messages_per_topic=1)
            counted.looks = 0
            for n in range(100):  # also where each drops the oldest message
                await put(stream, b"%d" % n, topic=b"new-%d" % n)
            assert counted.looks < 100 * 100
            assert stream.live_messages() == len(everything(stream)) == 2000

    run(work())
