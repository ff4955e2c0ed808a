"""`StreamManagerClient` and `AsyncStreamManagerClient`: the AWS SDK's client, blocking and for asyncio.

The methods, classes and exceptions are those of the package `stream-manager`, so a program only changes its
import line. Both clients have the operations of `operations.py`, with the same names and arguments.

    StreamManagerClient("gateway")                        MQTT, port 1883, or 8883 with `tls`
    StreamManagerClient("mqtt://gateway:1883")            the same
    StreamManagerClient("mqtts://gateway")                MQTT over TLS, port 8883
    StreamManagerClient("streammanager://127.0.0.1")      the Stream Manager protocol, port 8088

Calls wait for a lost connection to be restored, for up to `request_timeout`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import secrets
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Concatenate, NamedTuple, ParamSpec, Self, TypeVar
from urllib.parse import SplitResult, urlsplit

from bridge.client.exceptions import ClientException, ValidationException
from bridge.client.link import Link, Reconnect, Reply
from bridge.client.mqttlink import MqttLink
from bridge.client.operations import Operations
from bridge.client.smlink import StreamManagerLink

P = ParamSpec("P")
T = TypeVar("T")
PORTS = {"mqtt": 1883, "mqtts": 8883, "streammanager": 8088}
TOKEN = "AWS_CONTAINER_AUTHORIZATION_TOKEN"  # noqa: S105 - the variable that the SDKs read
LOGGER = logging.getLogger("StreamManagerClient")  # the SDK's name


class _Address(NamedTuple):
    """Where to connect and how, from the arguments of a client."""

    scheme: str
    host: str
    port: int
    connect_timeout: float
    client_id: str | None
    username: str | None
    password: str | None
    tls: ssl.SSLContext | None
    auth_token: str | None
    reconnect_delay: tuple[float, float]
    logger: logging.Logger

    def connect(self) -> Link:
        """Connect; blocks."""
        reconnect = Reconnect(*self.reconnect_delay)
        if self.scheme == "streammanager":
            return StreamManagerLink(
                self.host,
                self.port,
                auth_token=self.auth_token or os.environ.get(TOKEN),
                connect_timeout=self.connect_timeout,
                reconnect=reconnect,
                logger=self.logger,
            )
        return MqttLink(
            self.host,
            self.port,
            client_id=self.client_id or f"sm-{secrets.token_hex(8)}",
            username=self.username,
            password=self.password,
            tls=self.tls,
            connect_timeout=self.connect_timeout,
            reconnect=reconnect,
            logger=self.logger,
        )


class _Client:
    """What both clients take, and their address."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int | None = None,
        connect_timeout: float = 3,
        request_timeout: float = 60,
        logger: logging.Logger = LOGGER,
        *,
        client_id: str | None = None,
        username: str | None = None,
        password: str | None = None,
        tls: ssl.SSLContext | None = None,
        auth_token: str | None = None,
        reconnect_delay: tuple[float, float] = (1, 8),
    ) -> None:
        """Connect to a service; the client for asyncio only does so in `async with` or `connect`.

        * `host` is a host, or a URL with one of the schemes `mqtt`, `mqtts` and `streammanager`.
        * `port` is by default 1883 for MQTT, 8883 for MQTT over TLS, 8088 for the Stream Manager protocol.
        * `connect_timeout` and `request_timeout` are in seconds.
        * `client_id` (by default a random one), `username`, `password` and `tls` are for MQTT.
        * `auth_token` (by default the environment variable AWS_CONTAINER_AUTHORIZATION_TOKEN) is for the
          Stream Manager protocol. Processes of root and of the service user on the same machine need none.
        * `reconnect_delay` has the seconds to wait before the first attempt to reconnect, and the longest
          wait: it doubles with every attempt.

        Raises ValidationException for a URL of another kind, ConnectionError if nothing answers there, and
        ConnectFailedException if the service refuses.
        """
        url = _split(host, port)
        if url.scheme == "mqtts" and tls is None:
            tls = ssl.create_default_context()
        given = {"client_id": client_id, "username": username, "password": password, "tls": tls}
        if url.scheme != "streammanager":
            given = {"auth_token": auth_token}
        for name, value in given.items():
            if value is not None:
                raise ValidationException(f"{name} has no meaning for {url.scheme}://")
        scheme = "mqtts" if tls is not None else url.scheme
        assert url.hostname is not None
        self.host, self.port = url.hostname, url.port or PORTS[scheme]
        self.connect_timeout, self.request_timeout, self.logger = connect_timeout, request_timeout, logger
        self._address = _Address(
            scheme,
            self.host,
            self.port,
            connect_timeout,
            client_id,
            username,
            password,
            tls,
            auth_token,
            reconnect_delay,
            logger,
        )
        self._begin()

    def _begin(self) -> None:
        """Called when the address is known; nothing to do unless the client connects at once."""


def _split(host: str, port: int | None) -> SplitResult:
    """The URL of a host and a port, or of a URL; raises ValidationException."""
    if "://" in host:
        text = host if port is None else f"{host}:{port}"
    else:
        bracketed = f"[{host}]" if ":" in host else host
        text = f"mqtt://{bracketed}" + ("" if port is None else f":{port}")
    try:
        url = urlsplit(text)
    except ValueError:  # a bracket is missing
        raise ValidationException(f"{host!r} is not an address; give a host or a URL") from None
    try:
        whole = url.hostname and not (url.path.strip("/") or url.query or url.fragment or url.username)
        whole = whole and url.port != 0 and bool(str(url.hostname).encode("idna"))
    except ValueError:  # the port is not a number, or the host no name
        whole = False
    if url.scheme not in PORTS or not whole:
        known = ", ".join(f"{scheme}://host:{default}" for scheme, default in PORTS.items())
        raise ValidationException(f"{host!r} is not an address; give a host, or one of {known}")
    return url


# -- asyncio -------------------------------------------------------------------------------
class AsyncStreamManagerClient(_Client, Operations):
    """A connection to streambridge for asyncio, with the methods of `StreamManagerClient`.

    `async with AsyncStreamManagerClient(...) as client:` connects and disconnects. Tasks may share it.
    """

    _made: Link | None = None
    _making: asyncio.Task[None] | None = None
    _closed = False

    @property
    def _link(self) -> Link:
        if self._closed or self._made is None:
            how = "closed; make a new one" if self._closed else "not connected; use `async with` or `connect`"
            raise ClientException(f"the client is {how}")
        return self._made

    async def connect(self) -> Self:
        """Connect; returns the client.

        Raises ConnectionError if nothing answers, ConnectFailedException if the service refuses.
        """
        if self._made is None and not self._closed:
            if self._making is None:
                self._making = asyncio.create_task(self._make())
                self._making.add_done_callback(self._has_tried)
            # One attempt for all that wait. It goes on if one of them is cancelled, so that `close` finds the
            # connection: nothing stops the thread that makes it.
            await asyncio.shield(self._making)
        return self

    async def _make(self) -> None:
        self._made = await asyncio.to_thread(self._address.connect)

    def _has_tried(self, making: asyncio.Task[None]) -> None:
        self._making = None
        if not making.cancelled():
            making.exception()  # else asyncio logs it if nobody waits any more

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def connected(self) -> bool:
        """Whether the client is connected now."""
        return self._made is not None and self._made.connected

    async def close(self) -> None:
        """Disconnect; pending calls fail, and the client cannot be used again."""
        self._closed = True
        if self._making is not None:
            await asyncio.wait({self._making})
        if self._made is not None:
            await asyncio.to_thread(self._made.close)

    async def _ask(self, operation: str, body: dict[str, Any], *, repeatable: bool) -> Reply:
        link = self._link
        request = link.submit(operation, body, repeatable=repeatable)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(request.reply), self.request_timeout)
        except TimeoutError:
            raise link.overdue(request, self.request_timeout) from None
        finally:
            link.forget(request)


# -- blocking ------------------------------------------------------------------------------
class _Blocking(Operations):
    """The operations on a link, blocking where they would wait."""

    def __init__(self, link: Link, request_timeout: float) -> None:
        self._connection, self.request_timeout = link, request_timeout

    @property
    def _link(self) -> Link:
        return self._connection

    async def _ask(self, operation: str, body: dict[str, Any], *, repeatable: bool) -> Reply:
        link = self._connection
        request = link.submit(operation, body, repeatable=repeatable)
        try:
            return request.reply.result(self.request_timeout)
        except FutureTimeout:
            raise link.overdue(request, self.request_timeout) from None
        finally:
            link.forget(request)


def _finished(work: Awaitable[T]) -> T:
    """The result of a coroutine that is never suspended."""
    try:
        work.__await__().send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a coroutine of the blocking client was suspended")


def _blocking(
    method: Callable[Concatenate[Operations, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[StreamManagerClient, P], T]:
    """The blocking form of an operation."""

    @functools.wraps(method)
    def call(self: StreamManagerClient, /, *args: P.args, **options: P.kwargs) -> T:
        return _finished(method(self._operations, *args, **options))

    return call


def _iterating(
    method: Callable[Concatenate[Operations, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[StreamManagerClient, P], Iterator[T]]:
    """The blocking form of an operation that is iterated over."""

    @functools.wraps(method)
    def call(self: StreamManagerClient, /, *args: P.args, **options: P.kwargs) -> Iterator[T]:
        found = method(self._operations, *args, **options)
        while True:
            try:
                one = _finished(anext(found))
            except StopAsyncIteration:
                return
            yield one

    return call


class StreamManagerClient(_Client):
    """A connection to streambridge. Threads may share it."""

    def _begin(self) -> None:
        self._link = self._address.connect()
        self._operations = _Blocking(self._link, self.request_timeout)
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        """Whether the client is connected now."""
        return self._link.connected

    def close(self) -> None:
        """Disconnect; pending calls fail, and the client cannot be used again."""
        if not self._closed:
            self._closed = True
            self._link.close()

    create_message_stream = _blocking(Operations.create_message_stream)
    update_message_stream = _blocking(Operations.update_message_stream)
    delete_message_stream = _blocking(Operations.delete_message_stream)
    describe_message_stream = _blocking(Operations.describe_message_stream)
    list_streams = _blocking(Operations.list_streams)
    append_message = _blocking(Operations.append_message)
    read_messages = _blocking(Operations.read_messages)
    describe_message_streams = _iterating(Operations.describe_message_streams)
    append_messages = _blocking(Operations.append_messages)
    tail = _iterating(Operations.tail)
    purge_message_stream = _blocking(Operations.purge_message_stream)
    fetch_messages = _blocking(Operations.fetch_messages)
    ack_messages = _blocking(Operations.ack_messages)
    consume = _iterating(Operations.consume)
    pause_exports = _blocking(Operations.pause_exports)
    resume_exports = _blocking(Operations.resume_exports)
    retry_exports = _blocking(Operations.retry_exports)
