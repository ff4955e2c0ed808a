"""The tls and wss listeners: handshakes in turns, and within the limits of connections and memory.

Sockets count from their accept on (see `bridge.net.tls`): `Connections` is asked for room, and only then TLS
begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from typing import TYPE_CHECKING

from bridge.net.addresses import network_of
from bridge.net.tls import Acceptor, server_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.mqtt.server.connection import Connection
    from bridge.mqtt.server.connections import Connections
    from bridge.mqtt.settings import TlsSettings
    from bridge.net.listening import Listening

HANDSHAKE_BYTES = 28 * 1024  # that TLS needs during a handshake, counted against `guest_bytes`
TURN = 0.1  # seconds until another handshake has its turn


class TlsServer:
    """Listening sockets whose connections begin with a TLS handshake."""

    def __init__(
        self,
        connections: Connections,
        context: ssl.SSLContext,
        factory: Callable[[], tuple[Connection, asyncio.Protocol]],
        listening: Listening,
    ) -> None:
        """`factory` makes a connection, and the protocol that gets what TLS has decrypted."""
        self.context = context  # of the handshakes that begin from now on
        self._connections, self._factory = connections, factory
        self._loop = asyncio.get_running_loop()
        self._acceptor = Acceptor(listening, "[mqtt.limits] connections", self._accepted)

    def close(self) -> None:
        """Accept no more sockets."""
        self._acceptor.close()

    def _accepted(self, sock: socket.socket, address: str) -> None:
        conn, protocol = self._factory()
        if self._connections.expect(conn, address, sock.fileno()):
            task = self._connections.spawn(self._shake_hands(sock, conn, protocol))
            self._connections.logging_in[conn] = task
        else:
            sock.close()

    async def _shake_hands(self, sock: socket.socket, conn: Connection, protocol: asyncio.Protocol) -> None:
        connections = self._connections
        try:
            if not await self._turn(sock, conn):
                return
            connections.guests.keep(conn, conn.address, HANDSHAKE_BYTES)
            await self._loop.connect_accepted_socket(
                lambda: protocol,
                sock,
                ssl=self.context,
                ssl_handshake_timeout=connections.limits.connect_timeout / 1000,
            )
        except ConnectionAbortedError:
            connections.given_up(conn, "refused_timeout", "no complete TLS handshake in time")
        except ssl.SSLError as error:
            connections.given_up(conn, "refused_tls", f"TLS handshake failed: {_reason(error)}")
        except OSError as error:
            # As port scanners do, and some clients that do not trust us.
            what = "%s hung up in its TLS handshake%s; does it trust our certificate?"
            connections.broker.reports.log(
                "tls_hung_up", logging.INFO, what, conn.name, f" ({error})" if str(error) else ""
            )
        finally:
            if connections.logging_in.get(conn) is asyncio.current_task():
                del connections.logging_in[conn]
            connections.given_up(conn)

    async def _turn(self, sock: socket.socket, conn: Connection) -> bool:
        """Wait for the handshake's turn; returns whether it came. Raises OSError if the client has gone."""
        connections, turns = self._connections, self._connections.handshake_turns
        if turns is None:
            return True
        network = network_of(conn.address)
        try:
            async with asyncio.timeout(connections.limits.connect_timeout / 1000):
                await turns.wait(network, known=connections.broker.access.knows_network(network))
            self._loop.call_later(TURN, turns.done)
            with contextlib.suppress(BlockingIOError):
                if not sock.recv(1, socket.MSG_PEEK):
                    raise ConnectionResetError
        except TimeoutError:
            sock.close()
            connections.given_up(conn, "refused_busy", "too many TLS handshakes; see handshakes_per_second")
            return False
        except BaseException:
            sock.close()
            raise
        return True


def _reason(error: ssl.SSLError) -> str:
    """Why a handshake failed, and what to look at."""
    reason = (error.reason or str(error)).lower().replace("_", " ")
    match error.reason or "":
        case "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            return "it sent no certificate; mqtt.tls.client_ca asks for one"
        case "CERTIFICATE_VERIFY_FAILED":
            why = getattr(error, "verify_message", reason)
            return f"its certificate is not accepted ({why}); see mqtt.tls.client_ca"
        case "HTTP_REQUEST":
            return "it speaks HTTP without TLS"
        case alert if "ALERT" in alert and ("CERTIFICATE" in alert or "UNKNOWN_CA" in alert):
            return f"it does not accept our certificate ({reason}); see mqtt.tls.cert and what it trusts"
    return f"{reason}; does it speak TLS 1.2 or newer?"


def tls_context(tls: TlsSettings) -> ssl.SSLContext:
    """A server context from certificate files, or a ConfigError."""
    return server_context("mqtt.tls", tls.cert, tls.key, tls.client_ca)
