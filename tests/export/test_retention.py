"""Retention "exported": what exports have sent is freed, and nothing that one of them still has to send."""

from __future__ import annotations

import asyncio
import json
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


def letters(gateway: Gateway, name: str) -> list[int]:
    """The numbers of the messages in a dead-letter stream."""
    return [json.loads(letter)["sequenceNumber"] for letter in gateway.read(name)]


def test_what_a_client_adds_to_a_declared_stream_holds_none_of_its_messages(recorder: Path) -> None:
    """Not an export that fails, nor a consumer that nobody asks."""

    async def scenario() -> None:
        async with running(recorder) as gateway:
            exports = {"recorder": [to(recorder)]}
            gateway.create("a", exports, **SMALL)
            gateway.manager.declare({"a": gateway.manager.definitions["a"]})
            added = {"identifier": "y", "path": str(recorder / "other"), "fault": "wait"}
            exports = {"recorder": [to(recorder), added], "consumer": [{"identifier": "c"}]}
            gateway.update("a", exports, **SMALL)
            for first in range(0, 3000, 100):
                await gateway.append("a", *(b"%04d" % n * 30 for n in range(first, first + 100)))
                await until(lambda end=first + 100: numbers(recorder / "out")[-1:] == [end - 1])
                await freed(gateway, first + 100)
            assert gateway.store.streams["a"].oldest > 2000
            assert gateway.manager.is_exported(gateway.store.streams["a"]) is False, "the others still wait"

    asyncio.run(scenario())


@pytest.mark.parametrize("change", ["removed", "disabled"])
def test_a_declared_export_that_a_client_removes_or_disables_still_holds_its_messages(
    recorder: Path, change: str
) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            declared = to(recorder, fault="wait")
            gateway.create("a", {"recorder": [declared]}, **SMALL)
            gateway.manager.declare({"a": gateway.manager.definitions["a"]})
            mine = {"identifier": "y", "path": str(recorder / "mine")}
            kept = [] if change == "removed" else [{**declared, "disabled": True}]
            gateway.update("a", {"recorder": [*kept, mine]}, **SMALL)
            with pytest.raises(StreamFull, match="retention"):
                for _ in range(10):
                    await gateway.append("a", *(b"%04d" % n * 30 for n in range(100)))
                    await gateway.manager.refresh()
            assert gateway.store.streams["a"].oldest == 0

    asyncio.run(scenario())


def test_a_full_stream_says_which_message_waits_and_what_retention_would_do(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("held", {"recorder": [to(recorder, fault="wait")]}, **SMALL)
            gateway.create("kept", {}, **SMALL)
            gateway.create("plain", {}, maxSize=65_536, streamSegmentSize=8_192)
            texts = {
                "held": "waits at message 0: see `streambridge exports`",
                "kept": "frees nothing here, because it has no enabled export",
                "plain": 'set retention = "exported", which frees what its exports have delivered',
            }
            for name, text in texts.items():
                with pytest.raises(StreamFull, match=text):
                    await gateway.append(name, *[bytes(1000)] * 70)

    asyncio.run(scenario())


def test_a_rejected_message_is_kept_by_default_before_its_segment_goes(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", {"recorder": [to(recorder, fault="reject_all")]}, **SMALL)
            for first in range(0, 1000, 100):
                await gateway.append("a", *(b"%04d" % n * 30 for n in range(first, first + 100)))
                await freed(gateway, first + 100)
            assert gateway.store.streams["a"].oldest > 0
            assert letters(gateway, "a-rejected") == list(range(1000))
            kept = gateway.manager.definitions["a-rejected"]
            assert (kept.flush_on_write, kept.strategy_on_full.name) == (True, "RejectNewData")

    asyncio.run(scenario())


def test_while_the_dead_letter_stream_is_full_the_export_holds_and_says_why(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a-rejected", {}, maxSize=8_192, streamSegmentSize=8_192)
            gateway.create("a", {"recorder": [to(recorder, fault="reject_all")]}, **SMALL)
            await gateway.append("a", *(bytes(200) for _ in range(100)))
            await until(lambda: "is full" in (gateway.status("a").error_message or ""))
            first = len(gateway.read("a-rejected"))
            assert gateway.status("a").rejected_messages_count == first < 100
            gateway.update("a-rejected", {}, maxSize=1 << 20, streamSegmentSize=8_192)
            await gateway.exported("a", 99)
            assert sorted(set(letters(gateway, "a-rejected"))) == list(range(100))

    asyncio.run(scenario())


@pytest.mark.parametrize(("letters", "retention"), [("", "exported"), (None, "limits")])
def test_without_a_dead_letter_stream_none_is_made(
    recorder: Path, letters: str | None, retention: str
) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            config = to(recorder, fault="reject_all") | ({} if letters is None else {"deadLetterStream": ""})
            gateway.create("a", {"recorder": [config]}, **SMALL | {"retention": retention})
            await gateway.append("a", b"x")
            await until(lambda: gateway.status("a").rejected_messages_count == 1)
            assert list(gateway.store.streams) == ["a"]

    asyncio.run(scenario())


def test_limits_that_discard_new_messages_also_free_what_is_exported(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            limits = {"maxMessages": 200, "discard": "new"}
            gateway.create("a", {"recorder": [to(recorder)]}, **SMALL, limits=limits)
            for first in range(0, 1000, 50):
                await gateway.append("a", *(b"%04d" % n * 30 for n in range(first, first + 50)))
                await until(lambda end=first + 50: numbers(recorder / "out")[-1:] == [end - 1])
                await freed(gateway, first + 50)
            assert gateway.store.streams["a"].live_messages() <= 200
            assert {drop.reason for drop in gateway.store.streams["a"].drops.ranges} == {DropReason.EXPORTED}

    asyncio.run(scenario())
