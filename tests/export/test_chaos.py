"""Hours of faults, compressed: at the end every message is at its destination."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path

import pytest

from benchmarks.testbed.aws import FakeAws, error, partial, reset
from benchmarks.testbed.forwarder import Forwarder
from bridge import objectkeys
from bridge.export.wire import Tuning
from tests.export.harness import Bucket, Gateway, running, until

QUICK = Tuning(beat=0.1, silence=10.0, first_backoff=0.05, max_backoff=0.4, drain=1.0)


async def faults(
    gateway: Gateway, fake: FakeAws, forwarder: Forwarder, chance: random.Random, seconds: float
) -> None:
    """Cut the link, break the service and kill the worker, at random."""
    end = time.monotonic() + seconds
    answers = [
        error(400, "ProvisionedThroughputExceededException"),
        error(500, "InternalFailure"),
        error(400, "ExpiredTokenException"),
        reset,
        partial(fake, lambda n, _: n % 3 == 1, "InternalFailure"),
    ]
    while time.monotonic() < end:
        match chance.randrange(4):
            case 0:
                with forwarder.shut():
                    await asyncio.sleep(chance.uniform(0, 0.4))
            case 1:
                with fake.broken(chance.choice(answers)):
                    await asyncio.sleep(chance.uniform(0, 0.4))
            case 2 if gateway.exports.pid:
                os.kill(gateway.exports.pid, signal.SIGKILL)
                await asyncio.sleep(chance.uniform(0, 0.8))
            case _:
                await asyncio.sleep(chance.uniform(0, 0.3))


async def publish(gateway: Gateway, chance: random.Random, total: int, from_number: int) -> None:
    sent = from_number
    while sent < total:
        count = min(chance.randint(1, 30), total - sent)
        for name in ("keyed", "objects"):
            await gateway.append(name, *(b"message %d" % (sent + n) for n in range(count)))
        sent += count
        await asyncio.sleep(0.01)


def rounds(root: Path, bucket: Bucket, rounds: int, messages: int, seconds: float, seed: int) -> None:
    """Several lives of a gateway; each but the last ends by force, as after SIGKILL of the bridge."""
    chance = random.Random(seed)
    fake, forwarder = FakeAws(), Forwarder(bucket.url)

    async def life(number: int) -> None:
        async with running(root, tuning=QUICK) as gateway:
            if number == 0:
                keyed = {"identifier": "k", "kinesisStreamName": "s", "endpointUrl": fake.url}
                keyed |= {"partitionKey": "{stream}", "batchSize": 20, "orderPerKey": False}
                gateway.create("keyed", {"kinesis": [keyed]})
                gateway.create(
                    "objects", {"s3": [bucket.config(endpointUrl=forwarder.url, sizeHintBytes=2000)]}
                )
            await asyncio.gather(
                faults(gateway, fake, forwarder, chance, seconds),
                publish(gateway, chance, (number + 1) * messages, number * messages),
            )
            if number < rounds - 1:
                if gateway.exports.pid:
                    os.kill(gateway.exports.pid, signal.SIGKILL)
                return
            last = rounds * messages - 1
            await gateway.exported("keyed", last, 60)
            await gateway.exported("objects", last, 60)
            await until(lambda: bucket.reported_exported() == [last])

    try:
        for number in range(rounds):
            asyncio.run(life(number))
    finally:
        forwarder.close()
        fake.close()
    total = rounds * messages
    arrived = [int(record["Data"].split()[1]) for record in fake.taken]
    assert set(arrived) == set(range(total))
    names = [name for key in bucket.data_keys() if (name := objectkeys.parse_key(key))]
    covered = sorted(n for name in names for n in range(name.first, name.last + 1))
    assert covered == list(range(total))  # objects neither miss nor overlap
    for key in bucket.data_keys():
        name = objectkeys.parse_key(key)
        assert name is not None
        rows = [row["sequence_number"] for row in bucket.rows(key)]
        assert rows == list(range(name.first, name.last + 1))
    assert bucket.report()["streams"][0]["dropped"] == []


def test_nothing_is_missing_after_faults_of_all_kinds(tmp_path: Path, bucket: Bucket) -> None:
    rounds(tmp_path, bucket, rounds=2, messages=600, seconds=4, seed=20261121)


@pytest.mark.slow
def test_nothing_is_missing_after_minutes_of_faults(tmp_path: Path, bucket: Bucket) -> None:
    seed = int(time.time())
    print("seed", seed)
    rounds(tmp_path, bucket, rounds=6, messages=5000, seconds=30, seed=seed)
