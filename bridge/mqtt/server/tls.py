"""Connections that begin with more than MQTT: a PROXY header, a TLS handshake, or both.

Sockets count from their accept on (see `bridge.net.tls`): `Connections` is asked for room, then the header is
read (`net.proxyheader`), `Connections` is asked again, now for the client that it names, and only then TLS
begins. Handshakes have turns. Each of the two may take as long as a CONNECT.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from typing import TYPE_CHECKING

from bridge.audit import Origin, record
from bridge.net import proxyheader
from bridge.net.addresses import network_of
from bridge.net.tls import Acceptor, server_context
from bridge.net.tlstransport import accept_tls

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.mqtt.server.connection import Connection
    from bridge.mqtt.server.connections import Connections
    from bridge.mqtt.settings import TlsSettings
    from bridge.net.listening import Listening

HANDSHAKE_BYTES = 28 * 1024  # that TLS needs during a handshake, counted against `guest_bytes`
TURN = 0.1  # seconds until another handshake has its turn


class TlsServer:
    """Listening sockets whose connections begin with a PROXY header, a TLS handshake, or both."""

    def __init__(
        self,
        connections: Connections,
        factory: Callable[[], tuple[Connection, asyncio.Protocol]],
        listening: Listening,
    ) -> None:
        """`factory` makes a connection, and the protocol that gets what TLS has decrypted."""
        self._connections, self._factory = connections, factory
        self._loop = asyncio.get_running_loop()
        self._acceptor = Acceptor(listening, "[mqtt.limits] connections", self._accepted)

    def close(self) -> None:
        """Accept no more sockets."""
        self._acceptor.close()

    def _accepted(self, sock: socket.socket, address: str) -> None:
        conn, protocol = self._factory()
        if self._connections.expect(conn, address, sock.fileno()):
            task = self._connections.spawn(self._begin(sock, conn, protocol))
            self._connections.logging_in[conn] = task
        else:
            sock.close()

    async def _begin(self, sock: socket.socket, conn: Connection, protocol: asyncio.Protocol) -> None:
        connections, listener = self._connections, conn.endpoint.listener
        try:
            if listener.proxies and not await self._named(sock, conn):
                return
            if not conn.endpoint.address.secure:
                await self._loop.connect_accepted_socket(lambda: protocol, sock)
                return
            if not await self._turn(sock, conn):
                return
            connections.guests.keep(conn, conn.address, HANDSHAKE_BYTES)
            context, limits = conn.endpoint.listener.context, conn.endpoint.listener.limits
            assert context is not None
            await accept_tls(sock, context, protocol, limits.connect_timeout / 1000)
        except ConnectionAbortedError:
            connections.given_up(conn, "refused_timeout", "no complete TLS handshake in time")
        except ssl.SSLError as error:
            why = f"TLS handshake failed: {_reason(error)}"
            record("login", "refused", origin=Origin("mqtt", conn.address), proven=False, why=why)
            connections.given_up(conn, "refused_tls", why)
        except OSError as error:
            # As port scanners do, and some clients that do not trust us.
            what = "%s hung up in its TLS handshake or PROXY header%s; does it trust our certificate?"
            connections.broker.reports.log(
                "tls_hung_up", logging.INFO, what, conn.name, f" ({error})" if str(error) else ""
            )
        finally:
            if connections.logging_in.get(conn) is asyncio.current_task():
                del connections.logging_in[conn]
            connections.given_up(conn)

    async def _named(self, sock: socket.socket, conn: Connection) -> bool:
        """Learn whose connection it is; returns whether it may go on. Raises OSError if the proxy is gone."""
        connections = self._connections
        try:
            async with asyncio.timeout(conn.endpoint.listener.limits.connect_timeout / 1000):
                address = await proxyheader.read(sock)
            if connections.named(conn, address):
                return True
        except TimeoutError:
            connections.given_up(conn, "refused_timeout", "no whole PROXY header in time")
        except proxyheader.BadHeader as error:
            connections.given_up(conn, "refused_proxy", str(error))
        except BaseException:
            sock.close()
            raise
        sock.close()
        return False

    async def _turn(self, sock: socket.socket, conn: Connection) -> bool:
        """Wait for the handshake's turn; returns whether it came. Raises OSError if the client has gone."""
        connections, turns = self._connections, self._connections.handshake_turns
        if turns is None:
            return True
        network = network_of(conn.address)
        try:
            listener = conn.endpoint.listener
            async with asyncio.timeout(listener.limits.connect_timeout / 1000):
                await turns.wait(network, known=listener.access.knows_network(network))
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
            option = "crl_file" if "CRL" in why or "revoked" in why else "client_ca"
            return f"its certificate is not accepted ({why}); see mqtt.tls.{option}"
        case "HTTP_REQUEST":
            return "it speaks HTTP without TLS"
        case alert if "ALERT" in alert and ("CERTIFICATE" in alert or "UNKNOWN_CA" in alert):
            return f"it does not accept our certificate ({reason}); see mqtt.tls.cert and what it trusts"
    return f"{reason}; does it speak TLS 1.2 or newer?"


def tls_context(option: str, tls: TlsSettings) -> ssl.SSLContext:
    """A server context from certificate files, or a ConfigError, which names the option."""
    return server_context(option, tls.cert, tls.key, tls.client_ca, tls.crl_file)
