"""The TLS handshakes of the MQTT listeners: their order, their memory, and the reasons for failures."""

from __future__ import annotations

import logging
import ssl
from typing import TYPE_CHECKING

from bridge.audit import Origin, record
from bridge.net.addresses import network_of
from bridge.net.tls import kept_context

if TYPE_CHECKING:
    from bridge.mqtt.server.connection import Connection
    from bridge.mqtt.settings import TlsSettings
    from bridge.readable import Kept

HANDSHAKE_BYTES = 28 * 1024  # memory of one TLS handshake, counted in `guest_bytes`


class Handshake:
    """The handshake of one connection; implements `bridge.net.tlslayer.Handshaking`."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        conn.awaited = "TLS handshake"

    def turn(self) -> tuple[str, bool]:
        conn = self._conn
        network = network_of(conn.address)
        return network, conn.endpoint.listener.access.knows_network(network)

    def begins(self) -> None:
        self._conn.connections.guests.keep(self._conn, self._conn.address, HANDSHAKE_BYTES)

    def made(self) -> None:
        listener = self._conn.endpoint.listener
        if listener.asks:
            listener.revocations.keep(self._conn.transport.get_extra_info("ssl_object"))
        self._conn.connections.guests.keep(self._conn, self._conn.address, 0)
        self._conn.await_connect()

    def failed(self, error: OSError) -> None:
        conn = self._conn
        if isinstance(error, ssl.SSLError):
            why = f"TLS handshake failed: {_reason(error)}"
            record("login", "refused", origin=Origin("mqtt", conn.address), proven=False, why=why)
            conn.end("refused_tls", why)
        else:
            # Port scanners do this, and some clients that do not trust our certificate.
            what = "%s hung up in its TLS handshake; does it trust our certificate?"
            conn.broker.reports.log("tls_hung_up", logging.INFO, what, conn.name)


def _reason(error: ssl.SSLError) -> str:
    """Return why a handshake failed, and what to check."""
    reason = (error.reason or str(error)).lower().replace("_", " ")
    match error.reason or "":
        case "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            return "it sent no certificate; client_ca of the listener or of [mqtt.tls] asks for one"
        case "CERTIFICATE_VERIFY_FAILED":
            why = getattr(error, "verify_message", reason)
            option = "crl_file" if "CRL" in why or "revoked" in why else "client_ca"
            return f"its certificate is not accepted ({why}); see {option} of the listener or of [mqtt.tls]"
        case "HTTP_REQUEST":
            return "it speaks HTTP without TLS"
        case alert if "ALERT" in alert and ("CERTIFICATE" in alert or "UNKNOWN_CA" in alert):
            return f"it does not accept our certificate ({reason}); see mqtt.tls.cert and what it trusts"
    return f"{reason}; does it speak TLS 1.2 or newer?"


def tls_context(option: str, tls: TlsSettings, kept: Kept) -> ssl.SSLContext:
    """Return a server context from certificate files. Raises ConfigError, which names the option."""
    return kept_context(kept, option, tls.cert, tls.key, tls.client_ca, tls.crl_file)
