"""The tls and wss listeners: their certificate, and sockets that count from their accept on.

A TLS server of asyncio reports a connection when its handshake is over. Until then `limits` would not
hold, and clients that open sockets and send nothing could use up all descriptors. So these sockets are
accepted here: `Connections` is asked for room, and only then TLS begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from typing import TYPE_CHECKING

from bridge.errors import ConfigError
from bridge.net.addresses import network_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.mqtt.server.connection import Connection
    from bridge.mqtt.server.connections import Connections
    from bridge.mqtt.settings import TlsSettings
    from bridge.net.listening import Listening

log = logging.getLogger(__name__)

BURST = 100  # sockets accepted in one turn of the event loop
HANDSHAKE_BYTES = 28 * 1024  # that TLS needs during a handshake, counted against `guest_bytes`
TURN = 0.1  # seconds until another handshake has its turn
RETRY_INTERVAL = 1.0  # seconds until the next accept when there are no descriptors or no memory


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
                # The socket stays readable: without a pause this would be tried without end.
                log.error(
                    "no TLS client is accepted for %g s: %s; see LimitNOFILE and [mqtt.limits] connections",
                    RETRY_INTERVAL,
                    error,
                )
                self._loop.remove_reader(listening)
                self._loop.call_later(RETRY_INTERVAL, self._watch, listening)
                return
            sock.setblocking(False)
            conn, protocol = self._factory()
            if self._connections.expect(conn, str(peer[0]), sock.fileno()):
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
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.cert, tls.key)
        if tls.client_ca is not None:
            context.load_verify_locations(tls.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"mqtt.tls: cert {tls.cert}, key {tls.key}, client_ca {tls.client_ca}: {error}"
        ) from error
    return context
