"""What is dropped before it was exported is a loss: counted exactly for each export, never as exported."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bridge.streams.drops import LOST_TO_EXPORTS, DropReason

from .harness import FAST, Gateway, numbers, recorded, running, until

RING = {"maxSize": 65_536, "streamSegmentSize": 8_192, "strategyOnFull": 1}


def to(root: Path, name: str = "x", **more: Any) -> dict[str, Any]:
    return {"identifier": name, "path": str(root / name), **more}


async def fill(gateway: Gateway, count: int) -> None:
    first = gateway.store.streams["a"].next_sequence
    await gateway.append("a", *(b"%04d" % n * 30 for n in range(first, first + count)))
    await gateway.manager.refresh()


def gone(gateway: Gateway) -> set[int]:
    """The numbers that were dropped for a reason that nobody wanted."""
    drops = gateway.store.streams["a"].drops.ranges
    return {n for drop in drops if drop.reason in LOST_TO_EXPORTS for n in range(drop.first, drop.last + 1)}


async def counted(gateway: Gateway, lost: int, number: int = 0) -> Any:
    """Wait until an export counts so many messages as lost; return its status."""
    await until(
        lambda: gateway.status("a", number).lost_messages_count == lost,
        describe=lambda: f"{lost} lost: {gateway.status('a', number)}",
    )
    return gateway.status("a", number)


@pytest.mark.parametrize("kind", ["recorder", "whole"])
@pytest.mark.parametrize("order", ["oldest first", "newest first"])
@pytest.mark.parametrize("fault", ["hang", "wait"], ids=["never answers", "fails"])
def test_a_destination_that_never_answers_has_nothing_and_the_rest_is_lost(
    recorder: Path, fault: str, order: str, kind: str
) -> None:
    tuning = FAST if fault == "wait" else msgspec.structs.replace(FAST, hang=1.0)

    async def scenario() -> None:
        async with running(recorder, tuning=tuning) as gateway:
            config = to(recorder, fault=fault, order=order)
            gateway.manager.create({"name": "a", "exportDefinition": {kind: [config]}, **RING})
            stream = gateway.store.streams["a"]
            for _ in range(20):
                await fill(gateway, 100)
            assert stream.oldest > 1000
            status = await counted(gateway, stream.oldest)
            assert status.last_exported_sequence_number == -1
            assert status.exported_messages_count == 0
            assert status.last_lost == (0, stream.oldest - 1)
            assert status.last_lost_time == stream.drops.time_of(stream.oldest - 1) > 0
            assert status.pending(stream.oldest, stream.next_sequence) == 2000 - stream.oldest

    asyncio.run(scenario())


WAYS: dict[str, dict[str, Any]] = {
    "overwritten": RING,
    "limits": {"limits": {"maxMessages": 300}},
    "bytes": {"limits": {"maxBytes": 40_000}},
    "topics": {"limits": {"maxMessagesPerTopic": 200}},
    "age": {"limits": {"maxAgeMillis": 1}},
}


@pytest.mark.parametrize("kind", ["recorder", "whole"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("killed", [False, True], ids=["restarted", "killed"])
def test_every_way_of_dropping_is_counted_once_over_restarts_and_kills(
    recorder: Path, way: str, killed: bool, kind: str
) -> None:
    """One export delivers all; another loses what goes while it waits, and delivers the rest."""
    go, second = recorder / "go", to(recorder, "y", fault="wait", once=str(recorder / "go" / "now"))
    settings = {"strategyOnFull": 0, "streamSegmentSize": 8_192}

    async def scenario() -> None:
        async with running(recorder) as gateway:
            exports = {kind: [to(recorder), second]}
            gateway.manager.create({"name": "a", "exportDefinition": exports, **settings})
            await fill(gateway, 100)
            await until(lambda: gateway.status("a", 1).error_message)
            gateway.manager.update({"name": "a", "exportDefinition": exports, **settings, **WAYS[way]})
            for _ in range(10):
                await fill(gateway, 100)
                stream = gateway.store.streams["a"]
                stream.maintain(stream.clock.now())
            await until(lambda: numbers(recorder / "x") or way == "age")
            before = len(gone(gateway))
            assert before > 500
            if killed:
                assert gateway.exports.pid is not None
                os.kill(gateway.exports.pid, signal.SIGKILL)
            await counted(gateway, before, 1)
        async with running(recorder) as gateway:
            await counted(gateway, before, 1)
            go.mkdir()
            (go / "now").touch()
            stream = gateway.store.streams["a"]
            await until(lambda: gateway.status("a", 1).pending(stream.oldest, stream.next_sequence) == 0)
            for number, name in enumerate("xy"):
                sent = set(numbers(recorder / name))
                assert sent | gone(gateway) == set(range(1100))
                if not killed or name == "y":
                    await counted(gateway, len(gone(gateway) - sent), number)
                    continue
                # A batch that had arrived when the worker was killed may not be known to have.
                unknown = max(len(batch[2]) for batch in recorded(recorder / "x"))
                over = gateway.status("a", number).lost_messages_count - len(gone(gateway) - sent)
                assert 0 <= over <= unknown
            assert gateway.status("a", 1).exported_messages_count == len(set(numbers(recorder / "y")))

    asyncio.run(scenario())


def test_a_paused_export_and_filters_lose_too_and_what_is_purged_or_older_than_the_export_does_not(
    recorder: Path,
) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            paused = to(recorder, "p")
            filtered = to(recorder, "f", topics=["streams/#"], fault="wait")
            exports: dict[str, Any] = {"recorder": [paused, filtered, to(recorder, "off", disabled=True)]}
            gateway.manager.create({"name": "a", "exportDefinition": exports, **RING})
            gateway.manager.pause("a", "p", paused=True)
            await fill(gateway, 200)
            stream = gateway.store.streams["a"]
            await gateway.manager.purge("a", upto=100)
            await gateway.manager.refresh()
            for _ in range(10):
                await fill(gateway, 100)
            for number in (0, 1):
                status = await counted(gateway, stream.oldest - 100, number)
                assert status.last_exported_sequence_number == -1
                assert status.last_lost == (100, stream.oldest - 1)
            assert gateway.status("a", 2).lost_messages_count == 0, "a disabled export wants nothing"
            exports["recorder"] = [*exports["recorder"], to(recorder, "new")]
            gateway.manager.update({"name": "a", "exportDefinition": exports, **RING})
            await until(lambda: len(numbers(recorder / "new")) == 1200 - stream.oldest)
            await counted(gateway, 0, 3)

    asyncio.run(scenario())


def test_damage_before_the_export_is_a_loss_and_what_others_have_delivered_is_none(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", {"recorder": [to(recorder, fault="wait", once=str(recorder / "go" / "now"))]})
            for payload in (b"first", b"second", b"third"):
                await gateway.append("a", payload)
            await until(lambda: gateway.status("a").error_message)
            gateway.flip("a", b"second")
            gateway.heal("a")
            (recorder / "go").mkdir()
            (recorder / "go" / "now").touch()
            await until(lambda: numbers(recorder / "x") == [0, 2])
            status = await counted(gateway, 1)
            assert (status.last_lost, status.last_exported_sequence_number) == ((1, 1), 2)
            assert gateway.store.streams["a"].drops.ranges[0].reason == DropReason.DAMAGED

    asyncio.run(scenario())


def test_a_batch_under_way_whose_messages_are_dropped_is_not_lost_if_it_arrives(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            config = to(recorder, fault="until_released", once="")
            gateway.manager.create({"name": "a", "exportDefinition": {"recorder": [config]}, **RING})
            await fill(gateway, 100)
            await until(lambda: (recorder / "x.attempts").exists())
            for _ in range(10):
                await fill(gateway, 100)
            stream = gateway.store.streams["a"]
            assert stream.oldest > 100
            (recorder / "x.release").touch()
            await until(lambda: gateway.status("a").pending(stream.oldest, stream.next_sequence) == 0)
            sent = set(numbers(recorder / "x"))
            assert recorded(recorder / "x")[0][0] == 0, "the first batch has arrived"
            await counted(gateway, len(gone(gateway) - sent))

    asyncio.run(scenario())
