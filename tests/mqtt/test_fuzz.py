"""Hostile input: mutated sessions, and the corpus of packets that once were, or are likely to be, trouble.

`corpus/*.hex` are connections as hexadecimal bytes, one packet or piece a line, `#` for comments. A
session of the fuzzer that makes a probe fail is to be added there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from pathlib import Path

import psutil
import pytest

from bridge.mqtt.wire.packets import V5, V311

from .harness import (
    DEADLINE,
    PING,
    Bridge,
    Packet,
    ack,
    bridge_test,
    connect,
    publish,
    subscribe,
    unsubscribe,
)

CORPUS = Path(__file__).parent / "corpus"
SECONDS = float(os.environ.get("FUZZ_SECONDS", "6"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))


def pieces(path: Path) -> list[bytes]:
    lines = (line.partition("#")[0] for line in path.read_text().splitlines())
    return [bytes.fromhex(line) for line in lines if line.strip()]


def session(rng: random.Random) -> list[bytes]:
    """A valid session, as packets."""
    level = rng.choice((V311, V5))
    topics = ("in/a", "plain/b", "$x/y", "a" * 200, "in/" + "x/" * 30, "streambridge/f/listStreams")
    filters = ("in/#", "#", "+/b", "plain/+", "$share/g/x", "a/#/b", "streambridge/#")
    will = (rng.choice(topics), b"w", rng.randrange(3)) if rng.random() < 0.3 else None
    name = rng.choice(("f", "g", "", "h" * 50))
    out = [connect(name, level=level, clean=rng.random() < 0.7, keep_alive=rng.randrange(5), will=will)]
    for _ in range(rng.randrange(1, 8)):
        number = rng.randrange(1, 10)
        out.append(
            rng.choice(
                (
                    publish(
                        rng.choice(topics),
                        rng.randbytes(rng.randrange(200)),
                        rng.randrange(3),
                        number,
                        retain=rng.random() < 0.2,
                        level=level,
                    ),
                    subscribe(number, (rng.choice(filters), rng.randrange(3)), level=level),
                    unsubscribe(number, rng.choice(filters), level=level),
                    ack(rng.choice((0x40, 0x50, 0x62, 0x70)), number),
                    PING,
                    b"\xe0\0",
                )
            )
        )
    return out


def mutated(rng: random.Random, packet: bytes) -> bytes:
    data = bytearray(packet)
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(data)) if data else 0
        match rng.randrange(6):
            case 0 if data:
                data[place] = rng.randrange(256)
            case 1 if data:
                data[place] ^= 1 << rng.randrange(8)
            case 2:
                data[place:place] = rng.randbytes(rng.randrange(8))
            case 3:
                del data[place : place + rng.randrange(1, 8)]
            case 4:
                data = data[:place]
            case 5:
                data[1:2] = rng.choice((b"\xff\xff\xff\xff\x01", b"\xff\xff\xff\x7f", b"\0", b"\x7f"))
    return bytes(data)


async def attack(bridge: Bridge, packets: list[bytes]) -> None:
    try:
        client = await bridge.open()
        for packet in packets:
            client.send(packet)
            await asyncio.sleep(0)
        async with asyncio.timeout(0.02):
            await client.reader.read(65536)
    except (TimeoutError, OSError, RuntimeError):
        pass  # RuntimeError: uvloop's word for a closed transport
    client.abort()


async def probe(bridge: Bridge, number: int) -> None:
    """A good client is served: connect, QoS 1 to a stream, and to a subscriber."""
    async with asyncio.timeout(DEADLINE):
        client = await bridge.connect(f"probe-{number % 3}")
        await client.subscribe(("probe", 1))
        client.send(publish("in/probe", b"", 1, 1), publish("probe", b"%d" % number, 1, 2))
        got = [await client.receive() for _ in range(3)]
        assert Packet(0x40, b"\0\1") in got
        assert any(packet.body.endswith(b"%d" % number) for packet in got)
        client.disconnect()


def test_mutated_sessions_never_disturb_anybody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    rng = random.Random(SEED)

    @bridge_test(seconds=SECONDS + 240)
    async def run(bridge: Bridge) -> None:
        loop, done, memory = asyncio.get_running_loop(), 0, []
        end = loop.time() + SECONDS
        while loop.time() < end or done <= 100:
            attacks = []
            for _ in range(10):
                packets = session(rng)
                attacks.append([mutated(rng, p) if rng.random() < 0.5 else p for p in packets])
            await asyncio.gather(*(attack(bridge, packets) for packets in attacks))
            done += len(attacks)
            await probe(bridge, done)
            memory.append(psutil.Process().memory_info().rss)
        print(f"{done} connections, {len(memory)} probes, RSS {memory[0] >> 20} to {max(memory) >> 20} MiB")
        settled = memory[len(memory) // 3 :]
        assert max(settled) - settled[0] < 30 << 20, "memory is flat"

    run(tmp_path)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == [], "no traceback"


@bridge_test
async def test_the_corpus_never_disturbs_anybody(bridge: Bridge) -> None:
    paths = sorted(CORPUS.glob("*.hex"))
    assert len(paths) >= 10
    for number, path in enumerate(paths):
        raw = pieces(path)
        await attack(bridge, raw)
        await attack(bridge, [connect("corpus"), *raw])
        await attack(bridge, [connect("corpus", level=V5), *raw])
        await probe(bridge, number)
