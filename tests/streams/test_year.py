"""A leap year of a gateway in seconds: a message an hour, clock steps, power cuts; and where clocks end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise

import pytest

from bridge.objectkeys import data_key, parse_key
from bridge.streams import verify
from bridge.streams.meta import MessageLimits, StorageSettings
from bridge.streams.store import StreamStore

from ..fakes.clock import DAY, Machine
from .conftest import House, everything, payloads, put, run

HOUR = 3600.0
WEEK = 7 * 24  # hours
STREAMS = {
    "all": StorageSettings(),
    "aged": StorageSettings(limits=MessageLimits(max_age=WEEK * 3_600_000)),
    "ttl": StorageSettings(ttl=WEEK * 3_600_000, segment_size=1024),
    "ids": StorageSettings(dedup_window=25 * 3_600_000),
}


def unix(*date: int) -> float:
    return datetime(*date, tzinfo=UTC).timestamp()  # type: ignore[arg-type, misc]


@pytest.fixture
def summer_time() -> Iterator[None]:
    """Local time with clock changes: nothing may depend on it."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = "Europe/Berlin"
    time.tzset()
    yield
    if before is None:
        del os.environ["TZ"]
    else:
        os.environ["TZ"] = before
    time.tzset()


def keep(store: StreamStore) -> None:
    """What the service does every second."""
    store.clock.watch()
    store.committer.maintain(store.streams.values())


@pytest.mark.slow(seconds=20)
@pytest.mark.usefixtures("summer_time")
def test_through_a_leap_year_with_clock_steps_and_power_cuts_nothing_expires_early_or_late(
    house: House,
) -> None:
    house.system = machine = Machine(unix(2028, 1, 1))
    hours = 366 * 24 + 24  # into 2029
    elapsed: list[int] = []  # by number, hours since the start
    walls: list[int] = []  # by number, Unix time in ms

    async def month(first: int, last: int) -> None:
        async with house.store() as store:
            for name, settings in STREAMS.items():
                if name not in store.streams:
                    store.create(name, settings, b"{}")
            for hour in range(first, last):
                if hour % 500 == 100:  # NTP, or a person who confuses local time with UTC
                    machine.step(3600.0 if hour % 1000 == 100 else -3600.0)
                    keep(store)
                walls.append(store.clock.wall())
                elapsed.append(hour)
                for name in ("all", "aged", "ttl"):
                    assert await put(store.streams[name], b"%d" % hour) == [hour]
                # The same id every 24 hours: known for 25 hours from when it was stored.
                known = store.streams["ids"].next_sequence
                (number,) = await put(store.streams["ids"], b"%d" % (hour % 24), ids=True)
                assert number == (known if hour // 24 % 2 == 0 else known - 24 + hour % 24), hour
                machine.sleep(HOUR)
                keep(store)
                if hour % 24 == 0:
                    aged = payloads(store.streams["aged"])
                    assert aged == [b"%d" % old for old in range(max(0, hour - WEEK + 2), hour + 1)], hour
                    kept = payloads(store.streams["ttl"])
                    assert kept[-len(aged) :] == aged
                    assert len(kept) < len(aged) + 30  # a segment of them

    async def year() -> None:
        for first, last in pairwise([*range(0, hours, 732), hours]):
            await month(first, last)
            machine.reboot(synchronised=True)
        async with house.store() as store:
            rows = everything(store.streams["all"])
            assert [row.sequence_number for row in rows] == list(range(hours))
            assert [row.ingest_time for row in rows] == walls
            assert store.streams["all"].drops.number == 0

    run(year())
    keys = [data_key("g", "all", 1, n, n, wall, "parquet") for n, wall in enumerate(walls)]
    names = [found for key in keys if (found := parse_key(key)) is not None]
    assert [found.first for found in names] == list(range(hours))
    days = sorted({found.date for found in names})
    assert len(days) == 367
    assert {"2028-02-29", "2028-12-31", "2029-01-01"} < set(days)
    assert all(f"{found.date}T{found.hour:02d}" == datetime.fromtimestamp(wall / 1000, UTC).isoformat()[:13]
               for found, wall in zip(names, walls, strict=True))  # fmt: skip
    assert not any(found.problems for found in verify.verify(house.data_dir))


@pytest.mark.parametrize(
    "begin",
    [-5.0, -56 * 365 * DAY, 2.0**31 - 2, 2.0**32 - 2, unix(2028, 2, 28, 23, 59, 58), unix(2261, 12, 31)],
    ids=["1969", "long before 1970", "2038", "2106", "leap day", "the kernel's last year"],
)
def test_messages_are_stored_and_expire_where_clocks_end(house: House, begin: float) -> None:
    house.system = machine = Machine(begin)

    async def work() -> None:
        async with house.stream(limits=MessageLimits(max_age=10_000)) as stream:
            for n in range(4):
                assert await put(stream, b"%d" % n) == [n]
                machine.sleep(1)
            wanted = [max(0, int((begin + n) * 1000)) for n in range(4)]
            assert [row.ingest_time for row in everything(stream)] == wanted
            for row in everything(stream):
                key = data_key("g", "s", stream.epoch, 0, 0, row.ingest_time, "parquet")
                assert parse_key(key) is not None
        machine.reboot(synchronised=True)
        async with house.store() as store:
            keep(store)
            assert payloads(store.streams["s"]) == [b"0", b"1", b"2", b"3"]
            machine.sleep(7)
            keep(store)
            assert payloads(store.streams["s"]) in ([b"2", b"3"], [b"1", b"2", b"3"])  # kept rather too long
            machine.step(-begin)  # to 1970
            machine.sleep(4)
            keep(store)
            assert payloads(store.streams["s"]) == []

    run(work())
    assert not any(found.problems for found in verify.verify(house.data_dir))
