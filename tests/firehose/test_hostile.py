"""Hostile and broken clients of the Firehose API: each hurts itself at most."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.testbed.certificates import Authority
from bridge.firehose.frontend import LIMITS
from bridge.firehose.settings import FirehoseTls
from tests.firehose.harness import S3, Gateway, records, request, trusting

PUT = b'{"DeliveryStreamName": "plant", "Record": {"Data": "YQ=="}}'


@pytest.fixture
def hurried(tmp_path: Path) -> Iterator[Gateway]:
    """A gateway that waits half a second for anything."""
    limits = dataclasses.replace(LIMITS, head_timeout=0.5, body_timeout=0.5, idle_timeout=0.5)
    with Gateway(tmp_path, limits=limits) as running:
        yield running


def alive(gateway: Gateway) -> None:
    gateway.client().list_delivery_streams()


def code(answer: bytes) -> tuple[int, str]:
    """The status and the error of the first answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/x-amz-json-1.1" in head, answer
    return int(head.split(b" ")[1]), json.loads(body)["__type"]


def test_a_slow_head_and_an_idle_connection_are_closed(hurried: Gateway) -> None:
    assert hurried.send(b"POST / HTTP/1.1\r\nHost: x\r\n") == b""
    assert hurried.send() == b""
    alive(hurried)


def test_a_slow_body_is_answered_and_closed(hurried: Gateway) -> None:
    hurried.create()
    whole = request("PutRecord", PUT)
    assert code(hurried.send(whole[:-5])) == (408, "InvalidArgumentException")
    assert hurried.newest("plant") == -1
    alive(hurried)


def test_a_body_that_ends_early_stores_nothing(gateway: Gateway) -> None:
    gateway.create()
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as connection:
        connection.sendall(request("PutRecord", PUT)[:-5])
        connection.shutdown(socket.SHUT_WR)
        assert code(connection.recv(65536)) == (400, "InvalidArgumentException")
    assert gateway.newest("plant") == -1


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"Content-Length": str(LIMITS.body + 1)}, 413),
        ({"Content-Length": "9" * 30}, 413),
        ({"Content-Length": "-1"}, 400),
        ({"Content-Length": "5, 5"}, 400),
        ({"Content-Length": "x"}, 400),
        ({"Transfer-Encoding": "chunked"}, 400),
        ({"Transfer-Encoding": "gzip, chunked"}, 501),
        ({"X-Large": "x" * 20_000}, 431),
        ({"X Bad": "1"}, 400),
    ],
)
def test_a_head_that_is_wrong_is_refused_before_the_body_is_read(
    gateway: Gateway, fields: dict[str, str], status: int
) -> None:
    whole = request("PutRecord", b"", fields)
    answer = gateway.send(whole)
    assert answer.startswith(b"HTTP/1.1 "), answer
    assert code(answer)[0] in (status, 400, 411)
    alive(gateway)


def test_a_body_that_is_too_large_is_told_the_limit(gateway: Gateway) -> None:
    answer = gateway.send(request("PutRecordBatch", b"", {"Content-Length": str(LIMITS.body + 1)}))
    assert code(answer) == (413, "InvalidArgumentException")
    assert b"at most 500 records of 4 MiB together" in answer
    assert b"put fewer records in each request" in answer


def test_a_client_with_tls_at_a_listener_without_is_closed_and_logged(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "bridge.http")
    context = ssl.create_default_context()
    with (
        socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as connection,
        pytest.raises(ssl.SSLError),
    ):
        context.wrap_socket(connection, server_hostname="localhost")
    assert [record.message for record in caplog.records if "it speaks TLS" in record.message]
    alive(gateway)


@pytest.mark.parametrize(
    "chunks", [b"0\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n", b"ffffffffffffffff\r\n", b"x\r\n", b""]
)
def test_chunked_bodies_are_refused_whatever_they_are(gateway: Gateway, chunks: bytes) -> None:
    head = request("PutRecord", b"", {"Transfer-Encoding": "chunked"}).replace(b"Content-Length: 0\r\n", b"")
    assert code(gateway.send(head + chunks)) == (411, "InvalidArgumentException")
    alive(gateway)


@pytest.mark.parametrize("method", ["GET", "PUT", "HEAD", "DELETE", "OPTIONS", "CONNECT"])
def test_methods_other_than_post_are_refused(gateway: Gateway, method: str) -> None:
    answer = gateway.send(f"{method} / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith((b"HTTP/1.1 405 ", b"HTTP/1.1 400 "))
    alive(gateway)


def test_another_path_or_a_query_is_refused(gateway: Gateway) -> None:
    for target in (b"/x", b"/?a=b", b"//", b"*", b"http://x/"):
        whole = request("PutRecord", PUT).replace(b"POST / ", b"POST %b " % target)
        assert code(gateway.send(whole.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")))[0] in (
            400,
            404,
        )
    alive(gateway)


def test_the_body_of_a_caller_without_a_key_is_never_read(gateway: Gateway) -> None:
    body = b" " * 1_000_000
    head = request("PutRecord", body, {"Authorization": "AWS4-HMAC-SHA256 Credential=no"})[: -len(body)]
    assert code(gateway.send(head)) == (400, "IncompleteSignatureException")


def test_unfinished_bodies_together_take_bounded_memory(tmp_path: Path) -> None:
    limits = dataclasses.replace(LIMITS, bodies=1_000_000)
    with Gateway(tmp_path, limits=limits) as gateway, contextlib.ExitStack() as stack:
        whole = request("PutRecord", b" " * 500_000)
        held = [
            stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port), timeout=60))
            for _ in range(12)
        ]
        for connection in held:
            with contextlib.suppress(OSError):
                connection.sendall(whole[:-1])
        server = gateway.front._server
        gateway.wait_until(lambda: len(server.connections) <= 4)
        assert server.guests.total <= 1_100_000
        alive(gateway)


def test_random_changes_of_a_request_are_answered_or_end_the_connection(gateway: Gateway) -> None:
    gateway.create()
    dice = random.Random(1)
    valid = request("PutRecord", PUT, {"Connection": "close"})
    for _ in range(300):
        changed = bytearray(valid)
        for _ in range(dice.randint(1, 6)):
            place = dice.randrange(len(changed))
            changed[place : place + dice.randint(0, 3)] = dice.randbytes(dice.randint(0, 3))
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as connection:
            connection.sendall(changed)
            connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                answer = b"".join(iter(lambda: connection.recv(65536), b""))
                assert not answer or answer.startswith(b"HTTP/1.1 "), bytes(changed)
                assert b"InternalFailure" not in answer, bytes(changed)
    alive(gateway)
    assert set(gateway.stored()) <= {b"a"}


def test_one_address_cannot_take_all_connections(tmp_path: Path) -> None:
    with Gateway(tmp_path, connections=4, connections_per_address=3) as gateway:
        idle = [socket.create_connection(("127.0.0.1", gateway.port), timeout=60) for _ in range(3)]
        over = socket.create_connection(("127.0.0.1", gateway.port), timeout=60)
        with contextlib.suppress(ConnectionResetError):
            assert over.recv(1) == b""
        other = socket.create_connection(("127.0.0.1", gateway.port), 60, source_address=("127.0.0.9", 0))
        other.sendall(request("ListDeliveryStreams", b"{}"))
        assert other.recv(65536).startswith(b"HTTP/1.1 200 ")
        for connection in (*idle, over, other):
            connection.close()


# -- TLS ------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def secured(tmp_path: Path, authority: Authority) -> Iterator[Gateway]:
    pair = authority.issue("gateway")
    with Gateway(tmp_path, tls=FirehoseTls(cert=pair.cert, key=pair.key)) as running:
        yield running


def test_records_come_over_tls_in_any_size(secured: Gateway, authority: Authority) -> None:
    assert secured.url.startswith("https://")
    client = secured.client(verify=str(authority.cert))
    client.create_delivery_stream(DeliveryStreamName="plant", S3DestinationConfiguration=S3)
    large = [bytes([n]) * 900_000 for n in range(4)]
    client.put_record_batch(DeliveryStreamName="plant", Records=records(*large))
    assert secured.stored() == large


def test_clients_that_break_the_handshake_hurt_nobody(secured: Gateway, authority: Authority) -> None:
    assert b"HTTP/1.1" not in secured.send(b"POST / HTTP/1.1\r\nHost: x\r\n\r\n"), "it speaks TLS only"
    with contextlib.suppress(OSError):
        secured.send(b"\x16\x03\x01\x02\x00\x01")  # and then nothing, until it is too late
    with socket.create_connection(("127.0.0.1", secured.port), timeout=60):
        pass
    secured.client(verify=str(authority.cert)).list_delivery_streams()
    server = secured.front._server
    secured.wait_until(lambda: len(server.connections) <= 1)


def test_a_certificate_is_exchanged_on_reload(secured: Gateway, authority: Authority) -> None:
    def serial() -> object:
        plain = socket.create_connection(("127.0.0.1", secured.port), timeout=60)
        with trusting(authority.cert).wrap_socket(plain, server_hostname="127.0.0.1") as one:
            return one.getpeercert()["serialNumber"]  # type: ignore[index]

    before = serial()
    authority.issue("gateway")
    secured.call(secured.front.reload)
    assert serial() != before
    with (
        pytest.raises(ssl.SSLError),
        socket.create_connection(("127.0.0.1", secured.port), timeout=60) as plain,
    ):
        ssl.create_default_context().wrap_socket(plain, server_hostname="127.0.0.1")
