"""What expires when: time that passes counts, and steps of the wall clock do not."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path

import pytest

from bridge.streams.meta import MessageLimits, StorageSettings
from bridge.streams.store import StreamStore
from bridge.streams.stream import Stream

from ..fakes.clock import DAY, NOON_2026, Machine
from .conftest import House, everything, payloads, put, run

BOOT_1970 = 40.0
LIMITS = [
    {"ttl": 7 * 86_400_000, "segment_size": 128},
    {"limits": MessageLimits(max_age=7 * 86_400_000)},
]


def keep(store: StreamStore) -> Stream:
    """What the service does every second; returns the stream."""
    store.clock.watch()
    stream = store.streams["s"]
    store.committer.maintain([stream])
    return stream


@pytest.fixture
def machine(house: House) -> Machine:
    house.system = machine = Machine()
    return machine


@pytest.mark.parametrize("settings", LIMITS, ids=["ttl", "max_age"])
@pytest.mark.parametrize("seconds", [56 * 365 * DAY, 8 * DAY, -8 * DAY, -50 * 365 * DAY])
def test_a_step_of_the_wall_clock_expires_nothing_and_time_that_passes_does(
    house: House, machine: Machine, settings: dict[str, object], seconds: float
) -> None:
    async def work() -> None:
        async with house.stream(**settings) as stream:
            for n in range(10):
                await put(stream, b"%d" % n)
            machine.step(seconds)
            await put(stream, b"after")
            keep_all = [b"%d" % n for n in range(10)] + [b"after"]
            stream.maintain(stream.clock.now())
            assert payloads(stream) == keep_all
            machine.sleep(6.9 * DAY)
            machine.step(-seconds)
            await put(stream, b"last")
            stream.maintain(stream.clock.now())
            assert payloads(stream) == [*keep_all, b"last"]
            machine.sleep(0.2 * DAY)
            stream.maintain(stream.clock.now())
            assert payloads(stream) == [b"last"]

    run(work())


@pytest.mark.parametrize("settings", LIMITS, ids=["ttl", "max_age"])
def test_a_boot_in_1970_and_ntp_after_it_drop_nothing_and_are_logged(
    house: House, machine: Machine, settings: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with house.stream(**settings) as stream:
            await put(stream, b"before")
        machine.reboot(BOOT_1970, off=DAY)
        async with house.store() as store:
            stream = keep(store)
            await put(stream, b"in 1970")
            machine.sleep(60)
            machine.set_wall(NOON_2026 + DAY + 70)
            with caplog.at_level(logging.INFO, "bridge.clock"):
                stream = keep(store)
            assert (
                "the wall clock was set forward by 20455 days, 11:59:30, to 2026-01-02T12:01:10+00:00"
                in caplog.text
            )
            assert "the wall clock is synchronised" in caplog.text
            assert (store.clock.steps, store.clock.last_step // 1000) == (1, int(NOON_2026 + DAY + 70) - 100)
            await put(stream, b"in 2026")
            keep(store)
            rows = everything(stream)
            assert [row.payload for row in rows] == [b"before", b"in 1970", b"in 2026"]
            assert [row.ingest_time // 1000 for row in rows] == [
                int(NOON_2026),
                int(BOOT_1970),
                int(NOON_2026 + DAY + 70),
            ]
        async with house.store() as store:  # and what came in 1970 is not young forever
            machine.sleep(7 * DAY - 30)
            assert payloads(keep(store)) == [b"in 2026"]

    run(work())


@pytest.mark.parametrize(
    ("then", "now", "off", "kept"),
    [
        (True, True, 8 * DAY, False),
        (True, True, 6 * DAY, True),
        (True, True, -8 * DAY, True),
        (True, False, 8 * DAY, True),
        (False, True, 8 * DAY, True),
    ],
)
def test_across_boots_the_wall_clock_counts_if_it_was_synchronised_then_and_is_now(
    house: House, machine: Machine, then: bool, now: bool, off: float, kept: bool
) -> None:
    async def work() -> None:
        machine.synced = then
        async with house.stream(limits=MessageLimits(max_age=7 * 86_400_000)) as stream:
            await put(stream, b"a")
        machine.reboot(off=off, synchronised=now)
        async with house.store() as store:
            assert payloads(keep(store)) == ([b"a"] if kept else [])

    run(work())


def test_ages_go_on_where_they_were_after_a_power_cut_without_a_new_anchor(
    house: House, machine: Machine
) -> None:
    async def work() -> None:
        async with house.stream(limits=MessageLimits(max_age=600_000)) as stream:
            await put(stream, b"first")
            anchor = (house.data_dir / "clock").read_bytes()
            machine.sleep(500)
            await put(stream, b"second")
        (house.data_dir / "clock").write_bytes(anchor)  # the power was cut: there was no clean stop
        machine.reboot(BOOT_1970)
        async with house.store() as store:
            machine.sleep(99)
            assert payloads(keep(store)) == [b"first", b"second"]
            machine.sleep(2)
            assert payloads(keep(store)) == [b"second"]
            machine.sleep(600)
            assert payloads(keep(store)) == []

    run(work())


def test_a_kill_after_a_power_cut_makes_no_message_younger(house: House, machine: Machine) -> None:
    async def work() -> None:
        async with house.stream(limits=MessageLimits(max_age=600_000)) as stream:
            anchor = (house.data_dir / "clock").read_bytes()
            machine.sleep(500)
            await put(stream, b"first")
        (house.data_dir / "clock").write_bytes(anchor)  # the power was cut: there was no clean stop
        machine.reboot(BOOT_1970)
        async with house.stream(limits=MessageLimits(max_age=600_000)):
            anchor = (house.data_dir / "clock").read_bytes()
            machine.sleep(400)
        (house.data_dir / "clock").write_bytes(anchor)  # and a kill
        async with house.store() as store:
            assert payloads(keep(store)) == [b"first"]
            machine.sleep(201)
            assert payloads(keep(store)) == []

    run(work())


@pytest.mark.parametrize("anchor", [None, b"", b"nonsense", b"SBCLK\0\0\1" + bytes(40)])
def test_without_its_anchor_a_clock_goes_on_at_the_newest_message(
    house: House, machine: Machine, anchor: bytes | None
) -> None:
    async def work() -> None:
        async with house.stream(limits=MessageLimits(max_age=600_000)) as stream:
            await put(stream, b"first")
            machine.sleep(500)
            await put(stream, b"second")
        (house.data_dir / "clock").unlink()
        if anchor is not None:
            (house.data_dir / "clock").write_bytes(anchor)
        machine.reboot(off=365 * DAY, synchronised=True)
        async with house.store() as store:
            assert payloads(keep(store)) == [b"first", b"second"]
            machine.sleep(101)
            assert payloads(keep(store)) == [b"second"]

    run(work())


def test_a_stream_copied_from_another_gateway_ages_no_other(house: House, tmp_path: Path) -> None:
    async def work() -> None:
        house.system = Machine(BOOT_1970)
        async with house.stream(limits=MessageLimits(max_age=86_400_000)) as stream:
            await put(stream, b"ours")
        other = House(tmp_path / "other")
        other.system = Machine()
        async with other.stream("theirs") as stream:
            await put(stream, b"theirs")
        other.directory("theirs").rename(house.directory("theirs"))
        async with house.store() as store:
            assert payloads(keep(store)) == [b"ours"]
            assert payloads(store.streams["theirs"]) == [b"theirs"]

    run(work())


@pytest.mark.parametrize("restarts", [(), (30,), (59,), (10, 30, 59)], ids=str)
def test_a_message_is_a_duplicate_as_long_as_the_window_and_no_longer(
    house: House, machine: Machine, restarts: tuple[int, ...]
) -> None:
    async def work() -> None:
        async with house.stream(dedup_window=60_000) as stream:
            assert await put(stream, b"a", ids=True) == [0]
        for before, after in pairwise((0, *restarts)):
            machine.sleep(after - before)
            async with house.stream() as stream:
                assert await put(stream, b"a", ids=True) == [0]
        machine.sleep(59 - max(restarts, default=0))
        async with house.stream() as stream:
            assert await put(stream, b"a", ids=True) == [0]
            machine.sleep(2)
            stream.maintain(stream.clock.now())
            assert await put(stream, b"a", ids=True) == [1]

    run(work())


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("seconds", [3600.0, -3600.0])
def test_a_step_of_the_wall_clock_changes_nothing_about_what_is_a_duplicate(
    house: House, machine: Machine, restart: bool, seconds: float
) -> None:
    async def work() -> None:
        async with house.stream(dedup_window=60_000) as stream:
            assert await put(stream, b"a", ids=True) == [0]
            machine.step(seconds)
            if not restart:
                assert await put(stream, b"b", b"a", ids=True) == [1, 0]
        async with house.stream() as stream:
            machine.sleep(59)
            stream.maintain(stream.clock.now())
            assert await put(stream, b"a", ids=True) == [0]
            machine.sleep(2)
            stream.maintain(stream.clock.now())
            assert await put(stream, b"a", ids=True) == [1 if restart else 2]

    run(work())


def test_without_a_boot_id_the_time_of_a_restart_counts_and_that_of_another_boot_does_not(
    house: House, machine: Machine
) -> None:
    async def work() -> None:
        machine.boot, machine.synced = "", False
        async with house.stream(limits=MessageLimits(max_age=60_000)) as stream:
            await put(stream, b"a")
        machine.sleep(50)
        async with house.store() as store:
            assert payloads(keep(store)) == [b"a"]
        machine.reboot(off=3600)
        machine.boot = ""
        async with house.store() as store:
            machine.sleep(9)
            assert payloads(keep(store)) == [b"a"]
            machine.sleep(60)
            assert payloads(keep(store)) == []

    run(work())


def test_a_clock_that_is_not_synchronised_gives_no_two_gateways_the_same_epoch(tmp_path: Path) -> None:
    async def work() -> None:
        epochs = set[int]()
        for life in range(50):
            house = House(tmp_path / str(life))
            house.system = Machine(BOOT_1970, synchronised=False)
            async with house.stream("a") as stream:
                mine = [stream.epoch]
            async with house.stream("b") as stream:
                mine.append(stream.epoch)
            assert all(len(str(epoch)) <= 13 for epoch in mine)
            epochs.update(mine)
        assert len(epochs) == 100

    run(work())


def test_a_stream_made_again_has_another_epoch_whatever_the_clock_does(house: House) -> None:
    machine = house.system = Machine()

    async def work() -> None:
        async with house.store() as store:
            epochs = [store.create("s", StorageSettings(), b"{}").epoch]
            for step in (0, -5, 0, 3, -3600, -DAY, 0, 2):
                machine.step(step)
                store.delete("s")
                epochs.append(store.create("s", StorageSettings(), b"{}").epoch)
            assert sorted(set(epochs)) == epochs, "later epochs are larger"

    run(work())
