"""A small HTTP/1.1 server for read-only answers, and the guards before them.

Refused, before anything else is looked at: heads over 8 KiB or slower than 10 s, other methods than
GET and HEAD, bodies, and a Host that is neither an IP address, nor localhost, nor this machine's name.
A page on the web can have a name of its own point at our address (DNS rebinding), but its requests
then carry that name; they cannot carry an address or our name.

Every answer forbids browsers to embed, to guess types, to keep, and to load anything from elsewhere.
As many connections are open as `ConnectionLimits` allow; one that idles is closed after 30 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple

from bridge.errors import ConfigError
from bridge.net.addresses import host_and_port
from bridge.net.limits import ConnectionLimits, keep_alive

HEAD_LIMIT = 8 * 1024
HEAD_TIMEOUT = 10.0
IDLE_TIMEOUT = 30.0
SEND_TIMEOUT = 30.0
ONCE = {"host", "content-length", "transfer-encoding"}  # fields that no request may have twice (RFC 9112)

log = logging.getLogger("bridge.http")

_NOTHING = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_GUARDS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": _NOTHING,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Answer(NamedTuple):
    """What a route gives back; `policy` replaces the Content-Security-Policy."""

    status: HTTPStatus
    content_type: str
    body: bytes
    policy: str | None = None


Route = Callable[[str], Awaitable[Answer]]  # called with the query string


class Refused(Exception):  # noqa: N818 - named for what happened
    """Raised for a request that is not answered; the connection ends."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


class Server:
    """Serves `routes` by their path."""

    def __init__(self, listen: str, routes: dict[str, Route], limits: ConnectionLimits) -> None:
        self._host, self._port = host_and_port(listen)
        self._routes, self._limits = routes, limits
        self._names = _names(self._host)
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def start(self) -> str:
        """Listen; returns the url with the port really taken. Raises ConfigError."""
        try:
            self._server = await asyncio.start_server(
                self._connected, self._host, self._port, limit=HEAD_LIMIT
            )
        except OSError as error:
            raise ConfigError(f"http.listen {self._host}:{self._port}: {error}") from error
        port = self._server.sockets[0].getsockname()[1]
        return f"http://[{self._host}]:{port}/" if ":" in self._host else f"http://{self._host}:{port}/"

    async def stop(self) -> None:
        """Close the listener and all connections."""
        if self._server is not None:
            self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        address = str((writer.get_extra_info("peername") or ("local",))[0])
        self._open[task] = writer
        try:
            if self._limits.enter(address, keep_alive(writer.transport)):
                writer.transport.abort()
                return
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                await self._serve(reader, writer)
        except asyncio.CancelledError:
            pass  # the service stops; streams would log it as an error
        finally:
            self._limits.leave(address)
            del self._open[task]
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        idle = HEAD_TIMEOUT
        goes_on = True
        while goes_on:
            try:
                async with asyncio.timeout(idle):
                    head = await reader.readuntil(b"\r\n\r\n")
                method, target, goes_on = self._check(head)
                answer = await self._answer(target)
            except asyncio.LimitOverrunError:
                method, goes_on = "GET", False
                answer = _plain(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            except Refused as refusal:
                method, goes_on = "GET", False
                answer = _plain(refusal.status)
            writer.write(_head(answer, goes_on) + (b"" if method == "HEAD" else answer.body))
            async with asyncio.timeout(SEND_TIMEOUT):
                await writer.drain()
            idle = IDLE_TIMEOUT

    def _check(self, head: bytes) -> tuple[str, str, bool]:
        """Method, target, and whether the connection stays; raises Refused."""
        try:
            first, *lines = head[:-4].decode("ascii").split("\r\n")
            method, target, release = first.split(" ")
            fields: dict[str, str] = {}
            for line in lines:
                name, colon, value = line.partition(":")
                if not colon or not name or name != name.strip() or name.lower() in fields.keys() & ONCE:
                    raise ValueError(line)
                fields[name.lower()] = value.strip()
        except ValueError:
            raise Refused(HTTPStatus.BAD_REQUEST) from None
        if release not in ("HTTP/1.1", "HTTP/1.0") or not target.startswith("/"):
            raise Refused(HTTPStatus.BAD_REQUEST)
        self._check_host(fields.get("host"), release)
        if method not in ("GET", "HEAD"):
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED)
        if fields.get("content-length", "0") != "0" or "transfer-encoding" in fields:
            raise Refused(HTTPStatus.BAD_REQUEST)
        stays = release == "HTTP/1.1" and fields.get("connection", "").lower() != "close"
        return method, target, stays

    def _check_host(self, host: str | None, release: str) -> None:
        if host is None:
            if release == "HTTP/1.0":  # no browser sends that
                return
            raise Refused(HTTPStatus.BAD_REQUEST)
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if name.lower().rstrip(".") in self._names:
            return
        try:
            ipaddress.ip_address(name)
        except ValueError:
            log.warning("refused a request for host %.80r: it is not a name of this machine", host)
            raise Refused(HTTPStatus.MISDIRECTED_REQUEST) from None

    async def _answer(self, target: str) -> Answer:
        path, _, query = target.partition("?")
        route = self._routes.get(path)
        if route is None:
            return _plain(HTTPStatus.NOT_FOUND)
        try:
            return await route(query)
        except Exception:
            log.exception("a request for %s failed", path)
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR)


def _plain(status: HTTPStatus) -> Answer:
    return Answer(status, "text/plain; charset=utf-8", f"{status.value} {status.phrase}\n".encode())


def _head(answer: Answer, goes_on: bool) -> bytes:
    fields = _GUARDS | {
        "Date": formatdate(usegmt=True),
        "Content-Type": answer.content_type,
        "Content-Length": str(len(answer.body)),
        "Connection": "keep-alive" if goes_on else "close",
    }
    if answer.policy is not None:
        fields["Content-Security-Policy"] = answer.policy
    if answer.status is HTTPStatus.METHOD_NOT_ALLOWED:
        fields["Allow"] = "GET, HEAD"
    lines = [
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        *(f"{k}: {v}" for k, v in fields.items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


def _names(host: str) -> set[str]:
    """The names that this machine may be asked for by, beside addresses."""
    own = socket.gethostname().lower()
    short = own.partition(".")[0]
    return {"localhost", host.lower(), own, short, f"{short}.local"}
