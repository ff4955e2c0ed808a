"""Retention "exported": what exports have sent is freed, and nothing that one of them still has to send."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import InvalidRequest, StorageFailed, StreamFull
from bridge.streams.drops import DropReason

from .harness import Gateway, numbers, running, until

SMALL = {"maxSize": 65_536, "streamSegmentSize": 8_192, "retention": "exported"}


def to(root: Path, **more: Any) -> dict[str, Any]:
    return {"identifier": "x", "path": str(root / "out"), **more}


async def freed(gateway: Gateway, upto: int) -> None:
    """Wait until the stream knows that so much is exported."""
    async with asyncio.timeout(60):
        while gateway.store.streams["a"].exported_upto != upto:
            await gateway.manager.refresh()
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("segment", [65_536, 16 << 20], ids=["segments", "active"])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_file_system_that_others_fill_takes_messages_again_once_all_is_exported(
    recorder: Path, mounted: Path, restarted: bool, segment: int
) -> None:
    """A thousand of a thousand, far below `max_size`, with no restart and no purge, and soon."""
    (recorder / "data").symlink_to(mounted)
    stored: list[int] = []

    async def fill(gateway: Gateway) -> None:
        config = to(recorder, fault="wait", once=str(recorder / "go" / "now"))  # fails until that is there
        gateway.create("a", {"recorder": [config]}, streamSegmentSize=segment, retention="exported")
        await gateway.append("a", bytes(500))
        stored.append(0)
        await until(lambda: gateway.status("a").error_message)  # it has begun, and has a cursor
        with pytest.raises(StorageFailed, match="No space left on device"):
            while True:
                await gateway.append("a", bytes(500))
                if len(stored) == 600:
                    with (mounted / "ballast").open("wb", buffering=0) as ballast, pytest.raises(OSError):
                        while True:
                            ballast.write(bytes(4096))
                stored.append(len(stored))

    async def after(gateway: Gateway) -> None:
        (recorder / "go").mkdir()
        (recorder / "go" / "now").touch()
        await gateway.exported("a", len(stored) - 1)
        began = time.monotonic()
        await freed(gateway, len(stored))
        seconds = []
        for _ in range(2):
            for _ in range(1000):
                await gateway.append("a", bytes(100))
                await gateway.manager.refresh()
            seconds.append(time.monotonic() - began)
            began = time.monotonic()
        assert seconds[0] < 10 * seconds[1] + 5, "the space is freed at once"
        await gateway.exported("a", len(stored) + 1999)
        stream = gateway.store.streams["a"]
        assert stream.oldest > 0
        assert {drop.reason for drop in stream.drops.ranges} == {DropReason.EXPORTED}
        assert numbers(recorder / "out") == list(range(len(stored) + 2000)), "nothing went unexported"

    async def scenario() -> None:
        async with running(recorder) as gateway:
            await fill(gateway)
            if not restarted:
                await after(gateway)
        if restarted:
            async with running(recorder) as gateway:
                await after(gateway)

    asyncio.run(scenario())


@pytest.mark.parametrize("moved", ["start", "kind"])
def test_a_redefined_export_holds_its_data_until_the_worker_reports_its_position(
    recorder: Path, moved: str
) -> None:
    config = to(recorder)

    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", {"recorder": [config]}, **SMALL)
            await gateway.append("a", *(b"%04d" % n * 30 for n in range(400)))
            await gateway.exported("a", 399)
            await freed(gateway, 400)
            new = {"identifier": "x", "uri": "http://127.0.0.1:1/"}
            if moved == "start":
                gateway.update("a", {"recorder": [{**config, "startSequenceNumber": 100}]}, **SMALL)
            else:
                gateway.update("a", {"http": [new]}, **SMALL)
            stream = gateway.store.streams["a"]
            assert stream.exported_upto == 0
            with pytest.raises(StreamFull):  # before the worker has heard of it, and after
                await gateway.append("a", *(b"%04d" % n * 30 for n in range(400, 900)))
            assert stream.oldest == 0
            if moved == "start":
                await until(lambda: numbers(recorder / "out")[400:401] == [100])
                end = stream.next_sequence
                await gateway.exported("a", end - 1)
                assert numbers(recorder / "out") == [*range(400), *range(100, end)]
                await freed(gateway, end)
                await gateway.append("a", *(b"%04d" % n * 30 for n in range(200)))
                await gateway.exported("a", end + 199)
                assert numbers(recorder / "out") == [*range(400), *range(100, end + 200)]

    asyncio.run(scenario())


@pytest.mark.parametrize("start", [0, 100])
def test_an_update_that_also_lowers_the_size_frees_nothing_that_its_new_start_wants(
    recorder: Path, start: int
) -> None:
    config = to(recorder)

    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", {"recorder": [{**config, "startSequenceNumber": 50}]}, **SMALL)
            await gateway.append("a", *(b"%04d" % n * 30 for n in range(400)))
            await gateway.exported("a", 399)
            await freed(gateway, 400)
            smaller = {**SMALL, "maxSize": SMALL["maxSize"] // 2}
            gateway.update("a", {"recorder": [{**config, "startSequenceNumber": start}]}, **smaller)
            assert gateway.store.streams["a"].oldest == 0
            await until(lambda: numbers(recorder / "out")[350:] == [*range(start, 400)])

    asyncio.run(scenario())


def test_a_report_from_before_a_redefinition_frees_nothing(recorder: Path) -> None:
    out, config = recorder / "out", to(recorder)

    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", {"recorder": [config]}, **SMALL)
            stream = gateway.store.streams["a"]
            await gateway.append("a", *(b"%04d" % n * 30 for n in range(100)))
            await gateway.exported("a", 99)
            for start in (50, 10, 30):
                first = stream.next_sequence
                await gateway.append("a", *(b"%04d" % n * 30 for n in range(40)))
                await asyncio.sleep(0.2)  # the worker hears of it
                while numbers(out)[-1] < first + 39:  # without the event loop, which would read its report
                    time.sleep(0.01)
                time.sleep(0.3)
                sent = len(numbers(out))
                gateway.update("a", {"recorder": [{**config, "startSequenceNumber": start}]}, **SMALL)
                while len(numbers(out)) < sent + first + 40 - start:
                    await asyncio.sleep(0)
                    await gateway.manager.refresh()
                    upto = stream.exported_upto
                    assert upto is not None
                    assert upto <= max([start - 1, *numbers(out)[sent:]]) + 1, "more than it has sent"
                await gateway.exported("a", first + 39)

    asyncio.run(scenario())


def test_a_start_that_moves_keeps_the_counts(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", {"recorder": [to(recorder)]})
            await gateway.append("a", *(b"0123456789" for _ in range(10)))
            await gateway.exported("a", 9)
            gateway.update("a", {"recorder": [to(recorder, startSequenceNumber=4)]})
            await until(lambda: len(numbers(recorder / "out")) == 16)
            await until(lambda: gateway.status("a").exported_messages_count == 16)
            assert gateway.status("a").exported_bytes_from_stream == 160
            with pytest.raises(InvalidRequest, match="must be less than the newest sequence number 9"):
                gateway.update("a", {"recorder": [to(recorder, identifier="new", startSequenceNumber=9)]})
            gateway.update("a", {"recorder": [to(recorder, identifier="new", startSequenceNumber=8)]})
            await until(lambda: numbers(recorder / "out")[16:] == [8, 9])

    asyncio.run(scenario())
