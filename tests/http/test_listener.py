"""The HTTP server under a front end that takes bodies: another listener, other limits, the same guards."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import pytest

from bridge.errors import ConfigError
from bridge.net.httpserver import HttpError, HttpLimits, HttpRequest, HttpResponse, HttpServer
from bridge.net.limits import ConnectionLimits
from bridge.net.peer import ESTABLISHED, Address, Found, Owners
from tests.mqtt.harness import run_async

MANY = 4 * 1024 * 1024
POSTS = HttpLimits(methods=("POST",), body=MANY)
HEAD = b"POST /echo HTTP/1.1\r\nHost: localhost\r\n"
ANSWERED: list[str] = []  # queries
Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def on_the_services_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test as the service runs: on uvloop."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        run_async(test(**arguments))

    return run


async def echo(request: HttpRequest) -> HttpResponse:
    body = await request.body()
    return HttpResponse(HTTPStatus.OK, "application/json", b"%d %b" % (len(body), body[:100]))


async def large(request: HttpRequest) -> HttpResponse:
    ANSWERED.append(request.query)
    return HttpResponse(HTTPStatus.OK, "text/plain", bytes(MANY // 4))


async def locked(request: HttpRequest) -> HttpResponse:
    if request.headers.get("x-key") != "right":
        raise HttpError(HTTPStatus.UNAUTHORIZED)
    return await echo(request)


@asynccontextmanager
async def serving(limits: HttpLimits = POSTS, owners: Owners | None = None) -> AsyncIterator[int]:
    """A listener for bodies; its port."""
    server = HttpServer(
        "x.listen",
        "127.0.0.1:0",
        {"/echo": echo, "/large": large, "/locked": locked},
        ConnectionLimits(9, 9),
        limits,
        owners=owners,
    )
    url = await server.start()
    try:
        yield int(url.rstrip("/").rpartition(":")[2])
    finally:
        await server.stop()


@asynccontextmanager
async def client(port: int) -> AsyncIterator[Pipe]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bytes]:
    """Status, head and body of the next answer."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
    return int(head.split()[1]), head, await asyncio.wait_for(reader.readexactly(length), 60)


async def ended(reader: asyncio.StreamReader) -> bool:
    """Whether the connection ends, in order: with FIN."""
    return await asyncio.wait_for(reader.read(1), 60) == b""


@on_the_services_loop
async def test_bodies_up_to_the_limit_are_taken_one_after_the_other_on_one_connection() -> None:
    async with serving() as port, client(port) as (reader, writer):
        for size in (MANY, 0, 5, MANY):
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % size + b"x" * size)
            status, _, body = await answer(reader)
            assert (status, body) == (200, b"%d %b" % (size, b"x" * min(size, 100)))


@on_the_services_loop
async def test_requests_that_are_sent_at_once_are_answered_in_order() -> None:
    async with serving() as port, client(port) as (reader, writer):
        writer.write(b"".join(HEAD + b"Content-Length: 1\r\n\r\n%d" % n for n in range(9)))
        assert [(await answer(reader))[2] for _ in range(9)] == [b"1 %d" % n for n in range(9)]


@on_the_services_loop
async def test_a_request_may_come_byte_by_byte() -> None:
    async with serving() as port, client(port) as (reader, writer):
        for byte in HEAD + b"Content-Length: 3\r\n\r\nabc":
            writer.write(bytes((byte,)))
            await writer.drain()
            await asyncio.sleep(0)
        assert (await answer(reader))[2] == b"3 abc"


@on_the_services_loop
async def test_a_client_that_expects_it_gets_continue_before_the_body_unless_it_is_refused() -> None:
    expecting = b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n"
    async with serving() as port:
        async with client(port) as (reader, writer):
            writer.write(HEAD + expecting)
            assert (await answer(reader))[0] == 100
            writer.write(b"abc")
            assert (await answer(reader))[2] == b"3 abc"
        async with client(port) as (reader, writer):
            writer.write(HEAD.replace(b"echo", b"locked") + expecting)
            assert (await answer(reader))[0] == 401
            assert await ended(reader)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (b"Content-Length: %d" % (MANY + 1), 413),
        (b"Content-Length: 99999999999999999999", 413),
        (b"Transfer-Encoding: chunked", 411),
        (b"Transfer-Encoding: gzip", 501),
        (b"Content-Length: 5\r\nTransfer-Encoding: chunked", 411),
        (b"Content-Length: 5\r\nContent-Length: 5", 400),
        (b"Content-Length: 5, 5", 400),
        (b"Content-Length: -5", 400),
        (b"Content-Length: 5\nX: 1", 400),
        (b"X: 1\r\n Content-Length: 5", 400),
    ],
)
@on_the_services_loop
async def test_a_body_whose_length_is_too_large_or_in_doubt_is_refused_unread(
    fields: bytes, status: int
) -> None:
    async with serving() as port, client(port) as (reader, writer):
        writer.write(HEAD + fields + b"\r\n\r\n")
        assert (await answer(reader))[0] == status
        assert await ended(reader)


@pytest.mark.parametrize("path", [b"/locked", b"/nothing"])
@on_the_services_loop
async def test_an_answer_arrives_although_its_requests_body_was_not_read(path: bytes) -> None:
    async with serving() as port, client(port) as (reader, writer):
        writer.write(HEAD.replace(b"/echo", path) + b"Content-Length: %d\r\n\r\n" % MANY)
        writer.write(b"x" * MANY)
        assert (await answer(reader))[0] in (401, 404)
        assert await ended(reader)


@on_the_services_loop
async def test_other_methods_than_the_listeners_are_refused() -> None:
    async with serving() as port, client(port) as (reader, writer):
        writer.write(b"GET /echo HTTP/1.1\r\nHost: localhost\r\n\r\n")
        status, head, _ = await answer(reader)
        assert (status, b"Allow: POST\r\n" in head) == (405, True)


@pytest.mark.parametrize(
    ("limits", "sent", "said"),
    [
        (HttpLimits(head_timeout=0.1), b"GET / HT", b""),
        (HttpLimits(idle_timeout=0.1), b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"HTTP/1.1 404 "),
        (
            HttpLimits(("POST",), body=9, body_timeout=0.1),
            HEAD + b"Content-Length: 3\r\n\r\nab",
            b"HTTP/1.1 408 ",
        ),
    ],
)
@on_the_services_loop
async def test_a_client_that_stops_sending_is_disconnected(
    limits: HttpLimits, sent: bytes, said: bytes
) -> None:
    async with serving(limits) as port, client(port) as (reader, writer):
        writer.write(sent)
        assert (await asyncio.wait_for(reader.read(), 60)).startswith(said)


@on_the_services_loop
async def test_a_client_that_sends_no_more_is_still_answered() -> None:
    async with serving() as port, client(port) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 3\r\n\r\nabc")
        writer.write_eof()
        assert (await answer(reader))[2] == b"3 abc"
        assert await ended(reader)


@on_the_services_loop
async def test_a_body_that_breaks_off_is_a_bad_request() -> None:
    async with serving() as port, client(port) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 3\r\n\r\nab")
        writer.write_eof()
        assert (await answer(reader))[0] == 400


@on_the_services_loop
async def test_a_client_that_does_not_read_its_answers_gets_no_more_of_them() -> None:
    ANSWERED.clear()
    async with serving() as port, client(port) as (reader, writer), client(port) as (others, other):
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        for n in range(100):
            writer.write(b"POST /large?%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % n)
        for _ in range(50):
            other.write(HEAD + b"Content-Length: 1\r\n\r\nx")
            assert (await answer(others))[0] == 200
        assert len(ANSWERED) < 10
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(100):
            assert (await answer(reader))[0] == 200
        assert [str(n) for n in range(100)] == ANSWERED


async def gone(reader: asyncio.StreamReader) -> bool:
    """Whether the connection ends, in whatever way."""
    try:
        return await asyncio.wait_for(reader.read(), 60) == b""
    except ConnectionError:
        return True


DISPLACING = replace(POSTS, displace=True)
HOLDS = (b"", b"POST /echo HT", HEAD + b"Content-Length: 3\r\n\r\na")  # nothing, half a head, half a body


@on_the_services_loop
async def test_whoever_holds_most_sockets_loses_the_idle_ones_and_not_who_comes_next() -> None:
    strangers: set[int] = set()

    def ask(theirs: Address, _ours: Address) -> Found:
        return Found(ESTABLISHED, 1001 if theirs[1] in strangers else 0)

    async def held(stack: AsyncExitStack, port: int, sent: bytes = b"") -> Pipe:
        reader, writer = await stack.enter_async_context(client(port))
        writer.write(sent)
        return reader, writer

    async def ask_and_get(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"Content-Length: 1\r\n\r\nx")
        assert (await answer(reader))[0] == 200

    async with serving(DISPLACING, Owners(ask)) as port, AsyncExitStack() as stack:
        mine = [await held(stack, port) for _ in range(2)]
        for pipe in mine:
            await ask_and_get(*pipe)
        theirs = []
        for number in range(20):
            with socket.socket() as sock:
                sock.bind(("127.0.0.1", 0))
                sock.setblocking(False)
                strangers.add(sock.getsockname()[1])
                await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
                reader, writer = await asyncio.open_connection(sock=sock.dup())
            stack.callback(writer.close)
            writer.write(HOLDS[number % 3])
            theirs.append(reader)
        for reader in theirs[:13]:
            assert await gone(reader), "the oldest of who has most"
        for pipe in mine:
            await ask_and_get(*pipe)
        for _ in range(5):
            async with client(port) as pipe:
                await ask_and_get(*pipe)


@on_the_services_loop
async def test_without_other_users_the_longest_idle_socket_makes_room() -> None:
    async with serving(DISPLACING) as port, AsyncExitStack() as stack:
        held = [await stack.enter_async_context(client(port)) for _ in range(30)]
        for number, (_, writer) in enumerate(held):
            writer.write(HOLDS[number % 3])
        for _ in range(3):
            async with client(port) as (reader, writer):
                writer.write(HEAD + b"Content-Length: 1\r\n\r\nx")
                assert (await answer(reader))[0] == 200
        assert [await gone(reader) for reader, _ in held[:20]] == [True] * 20


@on_the_services_loop
async def test_an_offer_to_speak_another_protocol_is_ignored() -> None:
    async with serving() as port, client(port) as (reader, writer):
        for _ in range(2):
            writer.write(HEAD + b"Upgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 3\r\n\r\nabc")
            assert (await answer(reader))[2] == b"3 abc"


@on_the_services_loop
async def test_an_address_that_is_taken_is_named_with_its_option_and_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = HttpServer("firehose.listen", f"127.0.0.1:{port}", {}, ConnectionLimits(9, 9))
        with pytest.raises(ConfigError) as caught:
            await server.start()
    said = str(caught.value)
    assert said.startswith(
        f"firehose.listen: cannot listen at 127.0.0.1:{port}: another program listens there"
    )
    assert "choose another port" in said
