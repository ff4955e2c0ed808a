"""No client stalls the others: one budget of work for a turn of the event loop, for all kinds of work.

The tests count slices of work, and no seconds. They go through the catalogue of operations and the table of
packet types: one that is added needs a row here, with the worst that a client can make of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.testbed.mqtt import PING, ack, connect, publish, subscribe, unsubscribe
from bridge.access.rules import AccessRule, Identity
from bridge.audit import Origin
from bridge.mqtt.server.states import OPEN, TRANSITIONS, State
from bridge.mqtt.wire import packets
from bridge.net.turns import LIMIT, TAKE, Turns
from bridge.operations.catalog import OPERATIONS, Operations
from bridge.operations.codec import answer
from bridge.operations.manager import StreamManager
from bridge.operations.manager import committed as stored
from bridge.plugin import discovery
from bridge.runtime import LoopRuntime
from bridge.streams.store import StreamStore

from ..fakes.byhand import Wire, World
from ..mqtt.harness import NoExports as Without

MESSAGES, STREAMS = 10_000, 40
CLIENTS = 20  # of one user, which all ask at the same time
REPLY = 1024 * 1024
HERE, THERE = "10.0.0.1", "10.0.0.2"


# -- operations ------------------------------------------------------------

SCAN = {"maxMessageCount": 1, "topic": "nothing/here"}
OWN = {"definition": {"name": "own", "maxSize": 1 << 20, "streamSegmentSize": 1 << 20}}
# By operation: the worst request that we know, and the slices that one scan of everything has at least.
WORST: dict[str, tuple[dict[str, Any], int]] = {
    "createMessageStream": (OWN, 1),
    "updateMessageStream": (OWN, 1),
    "deleteMessageStream": ({"name": "own"}, 1),
    "describeMessageStream": ({"name": "big"}, 1),
    "listStreams": ({"details": True}, STREAMS // 5),
    "appendMessage": ({"name": "big", "payload": "eA=="}, 2),
    "appendMessages": ({"name": "big", "payloads": ["eA=="] * 5_000}, 5),
    "readMessages": ({"streamName": "big", "readMessagesOptions": SCAN}, MESSAGES // 2_000),
    "fetchMessages": ({"name": "big", "consumer": "idle"}, 1),
    "ackMessages": ({"name": "big", "consumer": "idle", "ack": [0] * 10_000}, 1),
    "purgeMessageStream": ({"name": "big", "topic": "nothing/here"}, MESSAGES // 2_000),
    "pauseExports": ({"name": "big"}, 1),
    "resumeExports": ({"name": "big"}, 1),
    "retryExports": ({"name": "big"}, 1),
    "listClients": ({}, 1),
    "disconnectClients": ({"user": "nobody"}, 1),
    "forgetClient": ({"client": "nobody"}, 1),
}
LAST_OF_EACH = {"streamName": "each", "readMessagesOptions": SCAN | {"lastPerTopic": True}}


class NoExports(Without):
    """The export side, of a manager whose exports are retried."""

    def retry(self, name: str, identifiers: object) -> None:
        return


class Counted(LoopRuntime):
    """The event loop, with a clock that counts the looks at it, so each slice of work takes half a turn."""

    def __init__(self) -> None:
        super().__init__(1, "test")
        self.looks = 0
        self.now = self._look

    def _look(self) -> float:
        self.looks += 1
        return self.looks * LIMIT / 2


def caller(user: str, number: int = 0) -> Identity:
    """A client that may do everything; `number` is that of its connection."""
    rule = AccessRule(publish=["#"], subscribe=["#"], manage=["#"])
    found = Identity(f"{user}-{number}", user, [rule])
    found.origin = Origin("mqtt", THERE)
    return found


def definition(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "strategyOnFull": 1, **more}


def with_operations(root: Path, test: Callable[[Operations], Awaitable[None]]) -> None:
    async def run() -> None:
        runtime = Counted()
        store = StreamStore(root / "data", root / "memory", on_event=lambda *what: None)
        manager = StreamManager(store, discovery.load(), NoExports())
        try:
            consumer = {"identifier": "idle", "topics": ["nothing/#"]}
            big = manager.create(definition("big", exportDefinition={"consumer": [consumer]}))
            each = manager.create(definition("each", limits={"maxMessagesPerTopic": 1}))
            for number in range(MESSAGES):
                big.append(b"in/%d" % (number % 9), b"x")
                each.append(b"each/%d" % number, b"x")
            await stored(big)
            await stored(each)
            for number in range(STREAMS):
                manager.create(definition(f"s{number}"))
            await test(Operations(manager, turns=Turns(runtime)))
        finally:
            manager.close()
            await store.close()
            runtime.close()

    asyncio.run(run())


async def most_in_a_turn(turns: Turns, work: Awaitable[object]) -> tuple[int, int]:
    """The most slices in one round of the loop, and those of all."""
    task, before, most = asyncio.ensure_future(work), turns.slices, 0
    first = before
    while not task.done():
        await asyncio.sleep(0)
        most = max(most, turns.slices - before)
        before = turns.slices
    await task
    return most, before - first


REQUESTS = [
    *((name, *WORST[name]) for name in OPERATIONS),
    ("readMessages", LAST_OF_EACH, MESSAGES // 2_000),
]


@pytest.mark.parametrize(("name", "body", "least"), REQUESTS)
def test_every_operation_is_done_in_slices_of_which_a_turn_has_few(
    tmp_path: Path, name: str, body: dict[str, Any], least: int
) -> None:
    async def test(operations: Operations) -> None:
        encoded = msgspec.json.encode(body)

        async def ask(number: int) -> None:
            await answer(operations, name, encoded, REPLY, caller("device", number))

        alone, slices = await most_in_a_turn(operations.turns, ask(0))
        assert slices >= least, "what is long has many slices"
        assert alone <= 6
        together = asyncio.gather(*(ask(number) for number in range(CLIENTS)))
        most, slices = await most_in_a_turn(operations.turns, together)
        assert slices >= CLIENTS, "each had a turn"
        assert most <= 6, "a turn has as few, however many ask"

    with_operations(tmp_path, test)


def test_another_user_waits_for_one_slice_of_each_other_and_not_for_their_work(tmp_path: Path) -> None:
    async def test(operations: Operations) -> None:
        turns = operations.turns
        scan = msgspec.json.encode(WORST["readMessages"][0])
        floods = [
            asyncio.create_task(answer(operations, "readMessages", scan, REPLY, caller("device", number)))
            for number in range(100)
        ]
        for _ in range(5):
            await asyncio.sleep(0)
        before = turns.slices
        other = asyncio.create_task(
            answer(operations, "describeMessageStream", b'{"name": "big"}', REPLY, caller("other"))
        )
        await other
        assert turns.slices - before <= 12
        assert sum(task.done() for task in floods) < 50
        for task in floods[:50]:
            task.cancel()
        await asyncio.gather(*floods, return_exceptions=True)
        assert b"NotEnoughMessages" in floods[-1].result()
        assert not floods[0].cancelled() or turns.slices  # those that were cancelled wait for nothing

    with_operations(tmp_path, test)


def test_turns_go_round_users_and_in_each_user_round_addresses() -> None:
    async def test() -> None:
        turns, order = Turns(LoopRuntime(1, "test"), limit=1e-9), []

        async def work(name: str) -> None:
            order.append(name)

        who = [("a", HERE)] * 3 + [("a", THERE), ("b", HERE), ("b", HERE), ("c", THERE)]
        names = ["a1", "a2", "a3", "a-there", "b1", "b2", "c"]
        tasks = [
            asyncio.create_task(_await(turns, one, work(name))) for one, name in zip(who, names, strict=True)
        ]
        turns.spend(turns.begin() - 1)  # this turn is over
        await asyncio.gather(*tasks)
        assert order == ["a1", "b1", "c", "a-there", "b2", "a2", "a3"]

    asyncio.run(test())


async def _await(turns: Turns, who: tuple[str, str], work: Any) -> Any:
    return await turns.work(who, work)


def test_work_that_fails_or_is_cancelled_leaves_the_turns_to_others() -> None:
    async def test() -> None:
        turns, seen = Turns(LoopRuntime(1, "test"), limit=1e-9), Counter[str]()

        async def fails() -> None:
            await asyncio.sleep(0)
            raise KeyError("mine")

        async def cleans_up() -> None:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                seen["cleaned"] += 1

        async def adds() -> int:
            await asyncio.sleep(0)
            seen["added"] += 1
            return await _await(turns, ("b", HERE), _seven())

        async def _seven() -> int:
            return 7

        with pytest.raises(KeyError):
            await _await(turns, ("a", HERE), fails())
        waiting = [asyncio.create_task(_await(turns, ("a", HERE), cleans_up())) for _ in range(20)]
        for _ in range(100):
            await asyncio.sleep(0)
        late = [asyncio.create_task(_await(turns, ("a", HERE), cleans_up())) for _ in range(20)]
        await asyncio.sleep(0)
        for task in (*waiting, *late):
            task.cancel()
        await asyncio.gather(*waiting, *late, return_exceptions=True)
        assert seen["cleaned"] >= 20
        assert await _await(turns, ("b", HERE), adds()) == 7, "within its own turn, at once"

    asyncio.run(test())


# -- packets ------------------------------------------------------------


def _many(one: bytes) -> bytes:
    return one * (8_192 // len(one))


FLOODS = 100
WILL = connect("flood", will=("flood/all", b"x", 0))
PACKETS: dict[int, list[bytes]] = {
    packets.CONNECT: [],
    packets.PUBLISH: [
        _many(publish("in/x", b"x", 1, 1)),
        _many(publish("in/x", b"x", 2, 1) + ack(0x62, 1)),
        _many(publish("other/x", b"x", retain=True)),
        b"".join(publish(f"new/{number}", b"x") for number in range(200)),
        publish("flood/all", b"x"),
        publish("flood/all", b"x" * 3_000),
    ],
    packets.PUBACK: [_many(ack(0x40, 7))],
    packets.PUBREC: [_many(ack(0x50, 7))],
    packets.PUBREL: [_many(ack(0x62, 7))],
    packets.PUBCOMP: [_many(ack(0x70, 7))],
    packets.SUBSCRIBE: [
        subscribe(1, ("kept/#", 0)),
        subscribe(1, *((f"+/{number}", 0) for number in range(30))),
    ],
    packets.UNSUBSCRIBE: [unsubscribe(1, "x"), unsubscribe(1, *(f"x/{number}" for number in range(300)))],
    packets.PINGREQ: [_many(PING)],
    packets.DISCONNECT: [b""],  # the network connection ends: the will
}


def sent() -> Iterator[tuple[str, bytes]]:
    for row in TRANSITIONS:
        if row.state is OPEN and isinstance(row.on, int):
            for number, data in enumerate(PACKETS[row.on]):
                yield f"{row.on:#x}-{number}", data
        elif row.state is State.NEW and isinstance(row.on, int):
            assert row.on in PACKETS
            yield "connect", b""


@pytest.mark.parametrize(("what", "data"), list(sent()))
def test_a_turn_handles_a_few_reads_whatever_the_packets_and_however_many_send_them(
    tmp_path: Path, what: str, data: bytes
) -> None:
    world = World(tmp_path, tick=LIMIT / 4)
    for stream in world.streams.definitions.values():
        stream.by_itself = True
    turns = world.broker.turns
    device = world.connect(connect("device"), address=THERE)
    assert device.got()[:1] == b"\x20"
    for number in range(500):
        device.send(publish(f"kept/{number}", b"x", retain=True))
        world.run()
    floods: list[Wire] = []
    if what == "connect":
        before = turns.slices
        floods = [world.connect(connect(f"f{number}")) for number in range(FLOODS)]
    else:
        for number in range(FLOODS):
            floods.append(world.connect(connect(f"f{number}", will=("flood/all", b"x", 0))))
            floods[-1].send(subscribe(1, ("flood/all", 0)))
            assert floods[-1].got()[:1] == b"\x20"
        before = turns.slices
        for flood in floods:
            if data:
                flood.send(data)
            else:
                flood.lose()
    assert turns.slices - before <= 12, "the others wait for another turn"
    waiting = sum("turn" in flood.connection.holds for flood in floods)
    assert waiting >= FLOODS - 12 or what == f"{packets.DISCONNECT:#x}-0"
    device.send(subscribe(1, ("own", 0)) + publish("in/device", b"", 1, 1))
    while not device.transport.written.endswith(ack(0x40, 1)):
        assert world.runtime.step()
    assert turns.slices - before <= FLOODS, "it waits for some of them, and not for all"
    world.run(3600)
    assert not any("turn" in flood.connection.holds for flood in floods), "and everything is done"


def test_a_connection_that_is_closed_while_it_waits_is_forgotten(tmp_path: Path) -> None:
    world = World(tmp_path, tick=LIMIT / 4)
    floods = [world.connect(connect(f"f{number}")) for number in range(20)]
    world.run()
    for flood in floods:
        flood.send(_many(PING))
    for flood in floods:
        flood.lose()
    world.run(1)
    assert TAKE < LIMIT
    assert world.connect(connect("next")).got()[:1] == b"\x20"
