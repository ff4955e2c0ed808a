"""Attacks on the status page and its requests, and on the API of Data Firehose. 5 s together."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest

from bridge.http.clients import Directory
from bridge.net.connected import Connected

from .conftest import Gateway

GOOD = base64.b64encode(b"operator:right").decode()


def exchange(gateway: Gateway, request: bytes, port: str = "http") -> tuple[int, bytes]:
    """What a request is answered with, up to the end of the connection."""
    attacker = gateway.attack(port)
    attacker.send(request)
    answer = attacker.rest()
    attacker.close()
    return (int(answer.split(b" ", 2)[1]), answer) if answer.startswith(b"HTTP/1.1 ") else (0, answer)


@pytest.mark.parametrize(
    "path",
    [
        "/../users", "/..%2fusers", "/%2e%2e/users", "/static/../../users", "//etc/passwd", "/....//users",
        "/console.js%00.html", "/\\..\\users", "/streams/..%2f..%2fusers",
    ],
)  # fmt: skip
def test_no_spelling_of_a_path_reads_a_file(gateway: Gateway, path: str) -> None:
    request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()
    status, answer = exchange(gateway, request)
    assert status in (400, 404, 401), answer[:200]
    assert b"$7$" not in answer
    assert b"root:" not in answer


@pytest.mark.parametrize("port", ["http", "firehose"])
@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Content-Length: 5\r\nContent-Length: 6",
        "Content-Length: +5",
        "Content-Length: 0x5",
        "Transfer-Encoding: identity, chunked",
        "Transfer-Encoding : chunked",
    ],
)
def test_a_body_of_doubtful_length_smuggles_no_second_request(gateway: Gateway, port: str, head: str) -> None:
    body = b"0\r\n\r\nGET /status.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    request = f"POST /requests/listStreams HTTP/1.1\r\nHost: 127.0.0.1\r\n{head}\r\n\r\n".encode() + body
    status, answer = exchange(gateway, request, port)
    assert status in (0, 400, 401, 403, 404, 411, 413, 501), answer[:300]
    assert answer.count(b"HTTP/1.1 ") <= 1, answer


@pytest.mark.parametrize("port", ["http", "firehose"])
def test_a_head_that_never_ends_is_cut_off(gateway: Gateway, port: str) -> None:
    attacker = gateway.attack(port)
    attacker.send(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")
    before = gateway.memory()
    for number in range(200):
        attacker.send(b"X-%d: %s\r\n" % (number, b"y" * 8_000))
    answer = attacker.rest()
    assert not answer or answer.split(b" ")[1] in (b"400", b"431"), answer[:100]
    assert gateway.memory() - before < 16 << 20


def test_an_operation_needs_a_user_whatever_header_claims_otherwise(gateway: Gateway) -> None:
    for claim in (
        "X-Forwarded-For: 127.0.0.1", "X-Forwarded-User: operator", "Authorization: Basic",
        "Cookie: session=operator",
        "Authorization: Basic " + base64.b64encode(b"operator:").decode(),
        "Authorization: Basic " + base64.b64encode(b"operator:\xff\xfe").decode(),
        "Authorization: Bearer " + GOOD,
    ):  # fmt: skip
        status, answer = exchange(
            gateway,
            f"POST /requests/deleteMessageStream HTTP/1.1\r\nHost: 127.0.0.1\r\n{claim}\r\n"
            "Content-Type: application/json\r\nContent-Length: 19\r\nConnection: close\r\n\r\n"
            '{"name":"readings"}'.encode(),
        )
        assert status in (400, 401), (claim, answer[:200])


def test_a_page_of_another_site_does_nothing_even_with_the_right_password(gateway: Gateway) -> None:
    body = b'{"name":"readings"}'
    for foreign in (
        "Host: 127.0.0.1\r\nOrigin: http://evil.example",
        "Host: 127.0.0.1\r\nOrigin: null",
        "Host: evil.example",
        "Host: 127.0.0.1\r\nContent-Type: text/plain",
        "Host: 127.0.0.1\r\nContent-Type: application/x-www-form-urlencoded",
    ):
        kind = "" if "Content-Type" in foreign else "Content-Type: application/json\r\n"
        head = f"{foreign}\r\n{kind}Authorization: Basic {GOOD}\r\nContent-Length: {len(body)}"
        request = (
            f"POST /requests/deleteMessageStream HTTP/1.1\r\n{head}\r\nConnection: close\r\n\r\n".encode()
            + body
        )
        status, answer = exchange(gateway, request)
        assert status in (400, 403, 415, 421), (foreign, answer[:300])
    assert gateway.device.next()


def test_markup_in_a_name_stays_text_in_metrics_and_documents(gateway: Gateway) -> None:
    name = '"} 1\n<script>alert(1)</script>'
    attacker = gateway.attack()
    attacker.log_in(name)
    for path in ("/metrics", "/clients.json", "/status.json"):
        _, answer = exchange(
            gateway, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()
        )
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"nosniff" in head, head
        if path == "/metrics":
            assert b"\n<script>" not in body
        else:
            assert b"text/html" not in head
            json.loads(body)
    attacker.close()


@pytest.mark.parametrize("depth", [1_000, 200_000])
def test_json_that_is_nested_deep_is_refused_by_the_firehose_api_unread(gateway: Gateway, depth: int) -> None:
    body = b"[" * depth
    status, answer = exchange(
        gateway,
        b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Amz-Target: Firehose_20150804.PutRecord\r\n"
        b"Content-Type: application/x-amz-json-1.1\r\nConnection: close\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body,
        "firehose",
    )
    assert status in (400, 403), answer[:300]
    assert b"MissingAuthenticationToken" in answer, answer[:300]


class Crowd:
    """A front end whose clients have the longest ids."""

    unreachable = None

    def __init__(self) -> None:
        ids = [f"{number:04}" + "\u0130" * 1_000 for number in range(5_000)]
        self.peers = [Connected(one, None, "a", "p", 0, 0, 0, 0) for one in ids]
        self.refused: dict[str, str] = {}

    def clients(self) -> list[Connected]:
        return self.peers

    def subscriptions(self, client: str, most: int) -> list[str]:
        return []

    def unmatched(self) -> list[dict[str, Any]]:
        return []


def test_a_search_among_clients_with_long_ids_lets_others_go_first() -> None:
    async def turns(find: str) -> tuple[int, int]:
        """How often others had their turn meanwhile, and how many clients were found."""
        directory, count = Directory({"crowd": Crowd()}), 0
        await directory.page("", "id", 0)  # makes the list
        task = asyncio.create_task(directory.page(find, "id", 0))
        while not task.done():
            await asyncio.sleep(0)
            count += 1
        return count, (await task).found

    count, found = asyncio.run(turns("12\u0130"))
    assert found == 50
    assert count > 50, "ids of 5 MB together"
