"""Floods of filters and of requests: what a few clients ask for stalls nobody else."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import cbor2

from tests.fakes.measured import STEPS, plain_loop

from .harness import PING, Bridge, bridge_test, publish, unsubscribe, until

STALL = 40  # work in one turn of the event loop, our clients' included: so many times a plain loop of STEPS
CLIENTS, FILTERS, LEVELS = 10, 990, 60
WIDTH = 500  # publishers, and subscribers of each


@asynccontextmanager
async def no_stall(what: str, most: int = STALL) -> AsyncIterator[None]:
    """Fails if one turn of the event loop takes too much CPU time.

    Not counted: other processes, other threads, and what earlier tests left for the garbage collector.
    """
    worst = 0.0

    async def watch() -> None:
        nonlocal worst
        while True:
            began = time.thread_time()
            await asyncio.sleep(0.001)
            worst = max(worst, time.thread_time() - began)

    gc.collect()
    gc.freeze()  # as the service does when it has started
    unit = plain_loop()
    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0)  # it watches from here on
    try:
        yield
        await asyncio.sleep(0.002)
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        gc.unfreeze()
        unit = max(unit, plain_loop())
    assert worst < most * unit, (
        f"{what}: others had no turn for {worst / unit:.1f} times a plain loop of {STEPS:,}"
    )


@bridge_test(seconds=240)
async def test_a_flood_of_wildcard_filters_stalls_nobody(bridge: Bridge) -> None:
    rng = random.Random(1)
    filters = [
        [("/".join(rng.choice("+a") for _ in range(LEVELS)), number % 2) for number in range(FILTERS)]
        for _ in range(CLIENTS)
    ]
    hostile = [await bridge.connect(f"h{number}") for number in range(CLIENTS)]
    async with no_stall("subscribing"):
        await asyncio.gather(*(c.subscribe(*wanted) for c, wanted in zip(hostile, filters, strict=True)))
    begin = ["a"] * (LEVELS - 2)

    async def publish_much(number: int) -> None:
        client = await bridge.connect(f"p{number}")
        topics = ["/".join([*begin, chr(97 + n), chr(97 + number)]) for n in range(8)]
        client.send(*(publish(topic, b"x", n % 2, n + 1) for n, topic in enumerate(topics)), PING)
        while (await client.receive(60)).head != 0xD0:
            pass

    async with no_stall("publishing on many topics at once"):
        await asyncio.gather(*(publish_much(number) for number in range(CLIENTS)))
    client = await bridge.connect("p")
    topic = "/".join("a" * LEVELS)
    async with no_stall("publishing to all of them"):
        client.send(*(publish(topic, b"%d" % n) for n in range(500)), PING)
        assert (await client.receive(60)).head == 0xD0
        for one in hostile:
            received: list[bytes] = []
            while received[-1:] != [b"499"]:
                received += [payload for payload in [(await one.message(60)).payload] if payload != b"x"]
            assert received == [b"%d" % n for n in range(500)], "in order, and each once"
    async with no_stall("unsubscribing"):
        for one, wanted in zip(hostile, filters, strict=True):
            one.send(unsubscribe(3, *(name for name, _ in wanted[::3])), PING)
        for one in hostile:
            while (await one.receive(60)).head != 0xD0:
                pass
    async with no_stall("going"):
        for one in hostile:
            one.abort()
        await until(lambda: bridge.stat("sessions") == CLIENTS + 1)
        await until(lambda: len(bridge.broker.router._tree) == 0, what="the filters are forgotten")


@bridge_test(seconds=120, queued_messages=1)
async def test_many_publishers_to_many_subscribers_at_once_stall_nobody(bridge: Bridge) -> None:
    for number in range(WIDTH):
        away = await bridge.connect(f"s{number}", clean=False)
        await away.subscribe(("plain", 1))
        away.disconnect()
    publishers = [await bridge.connect(f"p{number}") for number in range(WIDTH)]
    for number in (1, 2):  # at first the route is looked up, then it is known
        async with no_stall(f"message {number} of each"):
            for one in publishers:
                one.send(publish("plain", b"x", 1, number))
            for one in publishers:
                assert (await one.receive(60)).head == 0x40


ANNOUNCED = b"\x9a" + (1_000_000).to_bytes(4, "big")
MAPS = b"\xa2\x69requestId\x617\x61x" + ANNOUNCED + b"\xa0" * 1_000_000
NESTED = b'{"requestId": "7", "definition": {"x": [' + b",".join([b"{}"] * 340_000) + b"]}}"


@bridge_test(seconds=120)
async def test_a_request_of_many_small_items_stalls_nobody(bridge: Bridge) -> None:
    client = await bridge.connect("c")
    for operation, body, why in (
        ("listStreams", MAPS, "more than 20,000 items"),
        ("listStreams", MAPS.replace(ANNOUNCED, b"\x9f"), "more than 20,000 items"),
        ("ackMessages", MAPS.replace(b"\xa0", b"\x01"), "more than 20,000 items"),
        ("noSuchThing", MAPS, "there is no operation"),
        ("createMessageStream", NESTED, "more than 20,000 items"),
    ):
        async with no_stall(f"{operation} of {len(body):,} bytes", 12):
            client.send(publish(f"streambridge/c/{operation}", body))
            raw = (await client.message(60)).payload
        reply = json.loads(raw) if body[:1] == b"{" else cbor2.loads(raw)
        assert reply["requestId"] == "7"
        assert why in reply["errorMessage"]
