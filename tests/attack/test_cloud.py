"""Attacks by the destination of an export: answers that never end, or lead elsewhere. 5 s together."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from bridge.plugin.api import Retry
from bridge.plugin.testing import make_batch
from tests.export.test_services import make

MOST = 256 << 20  # bytes that a server sends until it gives up
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-amz-json-1.1\r\n"
ENDLESS: dict[str, tuple[bytes, bytes]] = {
    "a body in chunks": (
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
        b"10000\r\n" + b"x" * 65536 + b"\r\n",
    ),
    "a body of a length": (HEAD + b"Content-Length: 999999999999\r\n\r\n", b"x" * 0x10000),
    "a body without a length": (HEAD + b"\r\n", b"x" * 0x10000),
    "a failure": (HEAD.replace(b"200 OK", b"500 Error") + b"\r\n", b"x" * 0x10000),
    "a bomb": (HEAD + b"Content-Encoding: gzip\r\n\r\n", b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + b"\0" * 0x10000),
}


SERVICES: dict[str, dict[str, str]] = {
    "http": {"uri": ""},
    "kinesis": {"kinesisStreamName": "s", "endpointUrl": ""},
    "firehose": {"deliveryStreamName": "s", "endpointUrl": ""},
    "s3": {"bucket": "plant", "endpointUrl": ""},
}


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")


def send(kind: str, url: str) -> None:
    """Export a message with an exporter of this kind."""
    options = {name: value or url for name, value in SERVICES[kind].items()}
    make(kind, **options).export(make_batch([b"x"]))


@contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that reads a request and then does as it likes."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                try:
                    answer(connection)
                except OSError:
                    continue

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


@pytest.mark.parametrize("kind", SERVICES)
@pytest.mark.parametrize("what", ENDLESS)
def test_an_answer_that_never_ends_is_cut_off_before_it_fills_the_memory(kind: str, what: str) -> None:
    """It was read until the memory was full, and what the kernel killed then may have been the service."""
    head, more = ENDLESS[what]
    sent = [0]

    def answer(connection: socket.socket) -> None:
        connection.sendall(head)
        while sent[0] < MOST:
            connection.sendall(more)
            sent[0] += len(more)

    with server(answer) as url:
        with pytest.raises(Retry):
            send(kind, url)
        assert sent[0] < 64 << 20, "the rest is not even taken"


@pytest.mark.parametrize("kind", ["http", "kinesis", "firehose"])  # S3's own clients look for another region
@pytest.mark.parametrize("where", ["file:///etc/passwd", "http://169.254.169.254/latest/", "http://[::1]:1/"])
def test_no_redirect_is_followed(kind: str, where: str) -> None:
    asked = [0]

    def answer(connection: socket.socket) -> None:
        asked[0] += 1
        connection.sendall(
            f"HTTP/1.1 307 Go\r\nLocation: {where}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )

    with server(answer) as url, pytest.raises(Retry, match="307"):
        send(kind, url)
    assert asked[0] == 1
