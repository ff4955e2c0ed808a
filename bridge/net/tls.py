"""Listeners with TLS: their certificates, and sockets that count from their accept on.

A TLS server of asyncio reports a connection when its handshake is over. Until then no limit would hold, and
clients that open sockets and send nothing could use up all descriptors. So these sockets are accepted here,
and a front end decides about each before its handshake begins.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from bridge.errors import ConfigError
from bridge.net.listening import Listening

BURST = 100  # sockets accepted in one turn of the event loop
RETRY_INTERVAL = 1.0  # seconds until the next accept when there are no descriptors or no memory

log = logging.getLogger(__name__)


class Acceptor:
    """Accepts the sockets of a listener and hands over each, non-blocking, with its address."""

    def __init__(
        self, listening: Listening, limit: str, accepted: Callable[[socket.socket, str], None]
    ) -> None:
        """`limit` is the option that bounds the connections."""
        self._listening, self._limit, self._accepted = listening, limit, accepted
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
                    "no TLS client is accepted for %g s: %s; see LimitNOFILE and %s",
                    RETRY_INTERVAL,
                    error,
                    self._limit,
                )
                self._loop.remove_reader(listening)
                self._loop.call_later(RETRY_INTERVAL, self._watch, listening)
                return
            sock.setblocking(False)
            self._accepted(sock, str(peer[0]))


def server_context(
    option: str, cert: Path, key: Path, client_ca: Path | None = None, crl: Path | None = None
) -> ssl.SSLContext:
    """A server's context from certificate files; with `client_ca` each client needs a certificate of it.

    With `crl`, the CA that has signed a client's certificate must have a list in there that is not expired,
    and does not have the certificate. Raises ConfigError, which names the option.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        if crl is not None:
            context.load_verify_locations(crl)
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    except (OSError, ssl.SSLError) as error:
        asked = "" if client_ca is None else f", client_ca {client_ca}"
        asked += "" if crl is None else f", crl_file {crl}"
        raise ConfigError(f"{option}: cert {cert}, key {key}{asked}: {error}") from error
    return context
