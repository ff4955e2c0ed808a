"""Floods of bounded rate on every port, by strangers, while a durable device publishes.

What is measured is how long its messages take, first in quiet and then during the flood, three times in turn.
p99 may be three times as long at most, in the median of the three.
"""

from __future__ import annotations

import ssl
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from benchmarks.testbed.mqtt import connect, publish

from ..fakes.measured import least
from .conftest import Attacker, Gateway

RATE = 50  # connections a second
HELLOS = 500  # of TLS a second, which cost the attacker nothing: it sends the same one each time
MESSAGES = 250
OPEN = 200  # connections that the attacker keeps

HALF_CONNECT = connect("x" * 60, will=("w", b"x" * 63_000, 0))[:-1_000]
UPGRADE = b"GET /mqtt HTTP/1.1\r\nHost: gateway\r\nUpgrade: websocket\r\n"
UNSIGNED = (
    b"POST / HTTP/1.1\r\nHost: gateway\r\nX-Amz-Target: Firehose_20150804.PutRecord\r\n"
    b"Content-Type: application/x-amz-json-1.1\r\nContent-Length: 1000000\r\n\r\n" + b"[" * 10_000
)
LOGIN = (
    b"POST /requests/listStreams HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Authorization: Basic b3BlcmF0b3I6Z3Vlc3M=\r\nContent-Length: 2\r\n\r\n{}"
)


def hello() -> bytes:
    """What a client of TLS says first."""
    context, said = ssl.create_default_context(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), said, server_hostname="gateway").do_handshake()
    return said.read()


FLOODS = {
    "connections that send nothing": ("mqtt", b""),
    "connects that are never finished": ("mqtt", HALF_CONNECT),
    "guessed passwords": ("mqtt", connect("x", user="pump-8", password=b"guess")),
    "messages without a login": ("mqtt", publish("sensors/pump-8/x", b"x" * 60_000, 1, 1)),
    "half upgrades to WebSocket": ("ws", UPGRADE),
    "hellos that are no TLS": ("mqtts", b"\x16\x03\x01\x40\x00" + b"x" * 16_000),
    "hellos of TLS": ("mqtts", hello()),
    "frames that announce a gigabyte": ("greengrass", b"\x01\x3f\xff\xff\xff\x01" + b"x" * 16_000),
    "heads that never end": ("http", b"GET / HTTP/1.1\r\nX: " + b"x" * 8_000),
    "logins at the page": ("http", LOGIN),
    "bodies without a signature": ("firehose", UNSIGNED),
}


@contextmanager
def flood(gateway: Gateway, port: str, data: bytes, rate: int) -> Iterator[None]:
    """So many connections a second, each with this; the oldest are closed for the newest."""
    end, kept = threading.Event(), list[Attacker]()

    def attack() -> None:
        while not end.wait(1 / rate):
            try:
                attacker = Attacker(gateway.port[port])
            except OSError:  # the gateway takes no more
                continue
            attacker.socket.setblocking(False)
            with suppress(OSError):
                attacker.socket.send(data)
            kept.append(attacker)
            if len(kept) > OPEN:
                kept.pop(0).close()

    thread = threading.Thread(target=attack)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        for attacker in kept:
            attacker.close()


def p99(took: list[float]) -> float:
    return sorted(took)[len(took) * 99 // 100]


@pytest.mark.slow(seconds=8)
@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_by_strangers_makes_no_message_three_times_as_slow(gateway: Gateway, name: str) -> None:
    port, data = FLOODS[name]

    def slower() -> float:
        """How many times as slow messages are."""
        ratios = []
        for _ in range(3):
            quiet = p99(gateway.device.next(MESSAGES))
            with flood(gateway, port, data, HELLOS if name == "hellos of TLS" else RATE):
                gateway.device.next(MESSAGES // 5)  # it has begun
                ratios.append(p99(gateway.device.next(MESSAGES)) / quiet)
        print(f"{name}: {', '.join(f'{ratio:.2f}' for ratio in ratios)} times the p99 in quiet")
        return statistics.median(ratios)

    assert least(slower, 3, attempts=3) < 3
