"""What a client may create is bounded, per definition, per user and in all; a refusal names the bound."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from bridge.access.rules import TRUSTED, AccessRule, Identity
from bridge.errors import LimitReached
from bridge.net.limits import FOR_HEALTH, SPARE_DESCRIPTORS, ConnectionLimits
from bridge.operations.bounds import Bounds
from bridge.operations.catalog import Define, Operations, Update
from bridge.operations.manager import StreamManager
from bridge.plugin import discovery
from bridge.streams.store import StreamStore
from tests.mqtt.harness import NoExports

EVERYTHING = AccessRule(publish=["#"], subscribe=["#"], manage=["#"])
ANN, BOB = (Identity(name, name, [EVERYTHING]) for name in ("ann", "bob"))
MIB = 1 << 20


def with_operations(
    root: Path, bounds: Bounds, test: Callable[[Operations], Awaitable[None]], times: int = 1
) -> None:
    """Run a test, on the same data directory each time."""

    async def run() -> None:
        store = StreamStore(root / "data", root / "memory", on_event=lambda *what: None)
        try:
            await test(Operations(StreamManager(store, discovery.load(), NoExports()), bounds=bounds))
        finally:
            await store.close()

    for _ in range(times):
        asyncio.run(run())


def definition(name: str, consumers: int = 0, **more: Any) -> dict[str, Any]:
    exports = {"consumer": [{"identifier": f"c{number}"} for number in range(consumers)]}
    return {"name": name, "strategyOnFull": 0, "exportDefinition": exports if consumers else {}, **more}


async def create(operations: Operations, caller: Identity, name: str, **more: Any) -> None:
    await operations.call("createMessageStream", Define(definition=definition(name, **more)), caller)


def memory(size: int) -> dict[str, Any]:
    return {"persistence": 1, "maxSize": size * MIB, "streamSegmentSize": MIB}


@pytest.mark.parametrize(
    ("bound", "value", "first", "second", "for_another"),
    [
        ("streams_per_user", 1, {}, {}, True),
        ("streams", 1, {}, {}, False),
        ("exports_per_stream", 3, {}, {"consumers": 4}, False),
        ("exports_per_user", 3, {"consumers": 2}, {"consumers": 2}, True),
        ("exports", 3, {"consumers": 2}, {"consumers": 2}, False),
        ("memory_stream_bytes", 4 * MIB, {}, memory(5), False),
        ("memory_stream_bytes_per_user", 4 * MIB, memory(3), memory(3), True),
    ],
)
def test_what_would_pass_a_bound_is_refused_with_its_name(
    tmp_path: Path, bound: str, value: int, first: dict[str, Any], second: dict[str, Any], for_another: bool
) -> None:
    async def test(operations: Operations) -> None:
        await create(operations, ANN, "first", **first)
        with pytest.raises(LimitReached, match=rf"\b{bound} = "):
            await create(operations, ANN, "second", **second)
        assert operations.manager.names() == ["first"]
        if for_another:
            await create(operations, BOB, "his", **second)
        await create(operations, TRUSTED, "declared", **second)

    with_operations(tmp_path, Bounds()._replace(**{bound: value}), test)


def test_an_update_is_refused_only_if_it_adds_and_others_streams_count_for_their_owner(
    tmp_path: Path,
) -> None:
    async def test(operations: Operations) -> None:
        await create(operations, TRUSTED, "declared", consumers=5)
        await create(operations, ANN, "own", consumers=2)

        async def update(caller: Identity, name: str, consumers: int) -> None:
            changed = definition(name, consumers)
            await operations.call("updateMessageStream", Update(definition=changed), caller)

        await update(ANN, "declared", 4)
        await update(BOB, "own", 3)
        with pytest.raises(LimitReached, match="exports_per_user"):
            await update(BOB, "own", 4)
        with pytest.raises(LimitReached, match="exports_per_stream"):
            await update(ANN, "declared", 5)

    with_operations(tmp_path, Bounds(exports_per_user=3, exports_per_stream=4), test)


def test_health_checks_are_answered_when_clients_have_taken_all_their_descriptors() -> None:
    last = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - FOR_HEALTH - 1
    clients = ConnectionLimits(9, 9)
    health = ConnectionLimits(9, 9, SPARE_DESCRIPTORS - FOR_HEALTH)
    assert "file descriptors" in clients.enter("192.0.2.1", last)
    assert not health.enter("192.0.2.1", last)
    assert "file descriptors" in health.enter("192.0.2.1", last + FOR_HEALTH)


def test_who_created_a_stream_outlives_a_restart(tmp_path: Path) -> None:
    async def test(operations: Operations) -> None:
        if not operations.manager.names():
            await create(operations, ANN, "own")
            return
        with pytest.raises(LimitReached, match="streams_per_user"):
            await create(operations, ANN, "second")

    with_operations(tmp_path, Bounds(streams_per_user=1), test, times=2)
