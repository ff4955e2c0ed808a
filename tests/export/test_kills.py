"""Each exporter over faults of all kinds: cut links, a destination that fails, killed workers."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from bridge.export.wire import Tuning
from tests.export.destinations import Destinations, entry, payload
from tests.export.harness import Gateway, running, until

QUICK = Tuning(beat=0.1, silence=10.0, first_backoff=0.05, max_backoff=0.4, drain=1.0)
KINDS = [
    "kinesis",
    "kinesis gzip",
    "kinesis keys",
    "kinesis keys gzip",
    "firehose",
    "iotAnalytics",
    "IotSitewise",
    "http",
    "http lists",
    "mqtt impatient",
]
# The other kinds have no order, or only for each key: all messages have one topic here.
ORDERED = {"kinesis keys", "kinesis keys gzip", "http", "http lists", "mqtt impatient"}


async def faults(gateway: Gateway, destinations: Destinations, chance: random.Random, seconds: float) -> None:
    """Cut the link, break the destination and kill the worker, at random."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        match chance.randrange(4):
            case 0:
                with destinations.forwarder.shut():
                    await asyncio.sleep(chance.uniform(0, 0.4))
            case 1 | 2:
                with chance.choice(destinations.faults)():
                    await asyncio.sleep(chance.uniform(0, 0.4))
            case 3 if gateway.exports.pid:
                os.kill(gateway.exports.pid, signal.SIGKILL)
                await asyncio.sleep(chance.uniform(0.2, 1.0))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_missing_and_order_holds_after_kills_cuts_and_failures(tmp_path: Path, kind: str) -> None:
    chance = random.Random(kind)

    async def scenario(stack: ExitStack) -> list[int]:
        destinations = Destinations(stack, tmp_path)
        async with running(tmp_path, tuning=QUICK) as gateway:
            gateway.create("a", destinations.exports(kind))
            breaking = asyncio.create_task(faults(gateway, destinations, chance, 6.0))
            number = 0
            while not breaking.done() or number < 100:
                make = entry if kind == "IotSitewise" else payload
                count = chance.randint(1, 20)
                await gateway.append("a", *(make(number + n) for n in range(count)))
                number += count
                await asyncio.sleep(0.03)
            await breaking
            await gateway.exported("a", number - 1, within=90)
            await until(lambda: len(set(destinations.arrived())) == number, within=10)
        return destinations.arrived()

    with ExitStack() as stack:
        arrived = asyncio.run(scenario(stack))
    if kind in ORDERED:
        newest = -1
        for number in arrived:  # again is allowed, and nothing before the one that precedes it
            assert number <= newest + 1
            newest = max(newest, number)
