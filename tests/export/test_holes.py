"""What is missing of a stream, and what an export makes of it: damage, drops, what was before it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.export.harness import Gateway, attempted, numbers, recorded, running, until


def config(root: Path, **more: Any) -> dict[str, Any]:
    return {"recorder": [{"identifier": "out", "path": str(root / "out"), **more}]}


async def three_groups(gateway: Gateway, name: str) -> None:
    """Messages 0 to 29 in three commit groups, each a frame of its own."""
    for group in range(3):
        await gateway.append(name, *(b"message-%02d" % n for n in range(group * 10, group * 10 + 10)))


def test_damage_in_a_batch_that_waits_costs_no_message_behind_it(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            batch = {"batchSize": 30, "lingerMillis": 60_000}
            gateway.create("a", config(recorder, fault="wait", **batch))
            await three_groups(gateway, "a")
            await until(lambda: attempted(recorder / "out.attempts"))
            gateway.flip("a", b"message-15")
            gateway.update("a", config(recorder, **batch))
            await gateway.exported("a", 29)
            assert gateway.status("a").skipped_messages_count == 10

    asyncio.run(scenario())
    assert [row[:3] for row in recorded(recorder / "out")] == [[0, 29, [*range(10), *range(20, 30)]]]


def test_damage_right_behind_purged_messages_costs_no_message_behind_it(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", config(recorder))
            await gateway.append("a", b"x")
            await gateway.exported("a", 0)
            gateway.update("a", config(recorder, disabled=True))
            await three_groups(gateway, "a")
            await gateway.manager.purge("a", upto=11)
            gateway.flip("a", b"message-15")
            gateway.update("a", config(recorder))
            await gateway.exported("a", 30)
            assert gateway.status("a").skipped_messages_count == 20

    asyncio.run(scenario())
    assert numbers(recorder / "out") == [0, *range(21, 31)]


def test_drops_before_an_export_began_are_not_reported_to_it(tmp_path: Path) -> None:
    tasks = {"identifier": "up", "statusConfig": {"statusStreamName": "status", "statusLevel": 4}}

    async def scenario() -> list[Any]:
        async with running(tmp_path) as gateway:
            gateway.create("status", {})
            gateway.create("tasks", {})
            await three_groups(gateway, "tasks")
            await gateway.manager.purge("tasks", upto=29)
            gateway.update("tasks", {"s3TaskExecutor": [tasks]})
            await gateway.exported("tasks", 29)
            assert gateway.status("tasks").skipped_messages_count == 29
            return [json.loads(message) for message in gateway.read("status")]

    reported = asyncio.run(scenario())
    assert [message["statusContext"]["sequenceNumber"] for message in reported if message["status"] != 2] == [
        29
    ]


def test_an_export_that_is_deleted_and_made_again_at_once_begins_at_its_start(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", config(recorder), retention="exported")
            await gateway.append("a", *(b"x" for _ in range(5)))
            await gateway.exported("a", 4)
            gateway.update("a", {}, retention="exported")
            gateway.update("a", config(recorder), retention="exported")
            assert gateway.status("a").last_exported_sequence_number == -1
            assert gateway.exports.exported_upto("a") == 0
            await until(lambda: len(numbers(recorder / "out")) == 10)

    asyncio.run(scenario())
    assert numbers(recorder / "out") == [*range(5), *range(5)]
