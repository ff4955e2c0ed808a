"""Connections that begin with a PROXY header.

A socket counts as a connection of its proxy as soon as it is accepted. Once its header is read
(`net.proxyheader`), it counts as a connection of the address in the header. If there is room both times, TLS
or MQTT begins. The header may take as long as a CONNECT.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial
from typing import TYPE_CHECKING

from bridge.net import proxyheader
from bridge.net.addresses import normal

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.mqtt.server.connection import Connection
    from bridge.mqtt.server.connections import Connections
    from bridge.net.listening import Listening

BURST = 100  # sockets accepted in one turn of the event loop
RETRY_INTERVAL = 1.0  # seconds to the next accept after a lack of descriptors or memory

log = logging.getLogger(__name__)


class ProxyServer:
    """Listening sockets whose connections begin with a PROXY header."""

    def __init__(
        self,
        connections: Connections,
        factory: Callable[[], tuple[Connection, asyncio.Protocol]],
        listening: Listening,
    ) -> None:
        """`factory` makes a connection, and the protocol that reads its socket after the header."""
        self._connections, self._factory, self._listening = connections, factory, listening
        self._loop = asyncio.get_running_loop()
        for sock in listening.sockets:
            self._watch(sock)

    def close(self) -> None:
        """Accept no more sockets."""
        for listening in self._listening.sockets:
            self._loop.remove_reader(listening)
        self._listening.close()

    def _watch(self, listening: socket.socket) -> None:
        if listening in self._listening.sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(BURST):
            try:
                sock, peer = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # The socket stays readable, so without a pause this would repeat in a busy loop.
                log.error(
                    "no client is accepted for %g s: %s; see LimitNOFILE and [mqtt.limits] connections",
                    RETRY_INTERVAL,
                    error,
                )
                self._loop.remove_reader(listening)
                self._loop.call_later(RETRY_INTERVAL, self._watch, listening)
                return
            sock.setblocking(False)
            self._accepted(sock, normal(str(peer[0])))

    def _accepted(self, sock: socket.socket, address: str) -> None:
        conn, protocol = self._factory()
        if self._connections.expect(conn, address, sock.fileno()):
            task = self._connections.spawn(self._begin(sock, conn, protocol))
            self._connections.logging_in[conn] = task
            task.add_done_callback(partial(self._over, sock, conn))
        else:
            sock.close()

    async def _begin(self, sock: socket.socket, conn: Connection, protocol: asyncio.Protocol) -> None:
        connections = self._connections
        try:
            if await self._named(sock, conn):
                await self._loop.connect_accepted_socket(lambda: protocol, sock)
        except OSError as error:
            what = "%s hung up in its PROXY header (%s)"
            connections.broker.reports.log("proxy_hung_up", logging.INFO, what, conn.name, error)

    def _over(self, sock: socket.socket, conn: Connection, task: asyncio.Task[None]) -> None:
        """No header is awaited any more. A callback, because a task that is cancelled may not have begun."""
        if task.cancelled():
            sock.close()
        if self._connections.logging_in.get(conn) is task:
            del self._connections.logging_in[conn]
        self._connections.given_up(conn)

    async def _named(self, sock: socket.socket, conn: Connection) -> bool:
        """Read the header. Returns whether the connection may go on. Raises OSError if the proxy is gone."""
        connections = self._connections
        try:
            async with asyncio.timeout(conn.endpoint.listener.limits.connect_timeout / 1000):
                address = await proxyheader.read(sock)
            if connections.named(conn, address):
                return True
        except TimeoutError:
            connections.given_up(conn, "refused_timeout", "no complete PROXY header in time")
        except proxyheader.BadHeader as error:
            connections.given_up(conn, "refused_proxy", str(error))
        except BaseException:
            sock.close()
            raise
        sock.close()
        return False
