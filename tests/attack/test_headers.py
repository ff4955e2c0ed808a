"""Bytes that no program sends in headers, on every listener that speaks HTTP."""

from __future__ import annotations

import random
import re

import pytest

from tests.attack.conftest import Gateway

PATHS = (
    "GET /", "GET /metrics", "GET /healthz", "GET /readyz", "GET /status.json", "GET /session.json",
    "GET /clients.json", "GET /events.json", "GET /nothing", "POST /login", "POST /logout", "POST /request",
)  # fmt: skip
REQUESTS = [*(("http", path) for path in PATHS), ("firehose", "POST /"), ("ws", "GET /mqtt")]
NAMES = (
    "Accept", "Accept-Encoding", "Authorization", "Connection", "Content-Length", "Content-Type", "Cookie",
    "Date", "Expect", "Host", "If-None-Match", "Origin", "Range", "Sec-WebSocket-Key",
    "Sec-WebSocket-Protocol", "Sec-WebSocket-Version", "Transfer-Encoding", "Upgrade", "User-Agent",
    "X-Amz-Content-Sha256", "X-Amz-Date", "X-Amz-Target", "X-Forwarded-For", "X-Streambridge-Token",
)  # fmt: skip
USUAL = {
    "Authorization": b"Basic b3BlcmF0b3I6cmlnaHQ=",
    "Content-Type": b"application/json",
    "Host": b"localhost",
    "Sec-WebSocket-Protocol": b"mqtt",
    "Sec-WebSocket-Version": b"13",
    "Upgrade": b"websocket",
    "X-Amz-Date": b"20261127T000000Z",
    "X-Amz-Target": b"Firehose_20150804.PutRecord",
}
ODD = (b"\xff", b"\xc3\xbc", b"\xa0", b"\xb2", b"\xed\xa0\x80", b"Basic \xff", b"Basic \xc3\xbc", b"=", b"")


def usual(line: str) -> dict[str, bytes]:
    """Fields that are right for a request."""
    return USUAL | ({"Content-Length": b"2"} if line.startswith("POST") else {})


def answer(gateway: Gateway, port: str, line: str, fields: dict[str, bytes]) -> tuple[int, bytes]:
    """The status, and all that came; 0 if the connection was closed without an answer."""
    attacker = gateway.attack(port)
    head = b"".join(b"%s: %s\r\n" % (name.encode(), value) for name, value in fields.items())
    attacker.send(f"{line} HTTP/1.1\r\n".encode() + head + b"Connection: close\r\n\r\n{}")
    got = attacker.read(1 << 20) if port != "ws" else attacker.read(13)
    attacker.close()
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", got)
    assert found or not got, got[:80]
    return int(found[1]) if found else 0, got


@pytest.mark.parametrize(("port", "line"), REQUESTS)
def test_credentials_that_are_not_ascii_are_a_bad_request_on_every_listener(
    gateway: Gateway, port: str, line: str
) -> None:
    for value in (b"Basic \xff", b"Basic YTpi\xc3\xbc", b"Bearer \xe9", b"\xff"):
        assert answer(gateway, port, line, {**usual(line), "Authorization": value})[0] == 400, value
    gateway.check()


@pytest.mark.parametrize(("port", "line"), REQUESTS)
def test_no_bytes_in_any_header_are_an_internal_error(gateway: Gateway, port: str, line: str) -> None:
    chance = random.Random(line)
    for name in NAMES:
        values = [*ODD, chance.randbytes(20).translate(None, b"\r\n\0"), USUAL.get(name, b"x") + b"\xff"]
        for value in values:
            status, got = answer(gateway, port, line, {**usual(line), name: value})
            assert status != 500, (name, value, got[:200])
    gateway.check()
