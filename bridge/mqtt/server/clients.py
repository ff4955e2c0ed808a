"""The operations on MQTT clients: list them, disconnect some, delete a session.

A client id belongs to the user who opened its session, until the session ends. If the wrong user has an id,
an operator frees it by deleting the session.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any

from bridge.errors import InvalidRequest
from bridge.mqtt.server.server import certificate_of
from bridge.mqtt.wire.packets import V5, V31, V311
from bridge.net.addresses import Network, is_within, parse_network
from bridge.net.connected import Connected
from bridge.net.crl import certified

if TYPE_CHECKING:
    from bridge.mqtt.broker.sessions import Session
    from bridge.mqtt.server.connections import Member
    from bridge.mqtt.server.server import Server
    from bridge.operations.catalog import OfClients

PROTOCOLS = {V31: "MQTT 3.1", V311: "MQTT 3.1.1", V5: "MQTT 5"}


class ServerClients:
    """The clients of a server; used as `Operations.clients`."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def known(self) -> list[dict[str, Any]]:
        """Return all clients that are connected or have a session, sorted by id."""
        found = sorted(self._server.broker.sessions.all(), key=lambda session: session.client_id)
        return [describe(self._server, session) for session in found]

    def unmatched(self) -> list[dict[str, Any]]:
        """Return the topics that no stream takes (`broker.unmatched`)."""
        return self._server.broker.publisher.unmatched.listed()

    def disconnect(self, asked: OfClients) -> list[str]:
        """Close the connections of some clients and return their ids. Sessions stay; wills are published.

        Raises InvalidRequest if the request selects nothing, or names an unknown client.
        """
        if not asked.about:
            raise InvalidRequest("the request: give `client`, `user`, `certificate` or `address`")
        if asked.client is not None:
            self._session(asked.client)
        digits = None if asked.certificate is None else _digits(asked.certificate)
        network = None if asked.address is None else _network(asked.address)
        found = []
        for conn in list(self._server.connections.open):
            session = conn.session
            if (
                session is not None
                and session.line is conn.inbox.line
                and asked.client in (None, session.client_id)
                and asked.user in (None, session.identity.user)
                and (network is None or is_within(conn.address, [network]))
                and (digits is None or _shows(conn, digits))
            ):
                self._server.broker.disconnect(session)
                found.append(session.client_id)
        return sorted(found)

    async def forget(self, client: str) -> bool:
        """Delete a session with its subscriptions, messages and will. Returns whether it was connected.

        Raises InvalidRequest if there is no such session.
        """
        session = self._session(client)
        connected = session.line is not None
        self._server.broker.forget(session)
        await self._server.journaled()
        return connected

    def _session(self, client: str) -> Session:
        session = self._server.broker.sessions.get(client)
        if session is None:
            raise InvalidRequest(f"no client {client!r} is connected or has a session")
        return session


def _digits(certificate: str) -> str:
    digits = certificate.replace(":", "").lower()
    if not re.fullmatch("[0-9a-f]{1,64}", digits):
        raise InvalidRequest(
            f"the request: `certificate`: {certificate[:100]!r} is not hexadecimal; give the SHA-256 "
            "fingerprint or the serial number"
        )
    return digits


def _network(address: str) -> Network:
    try:
        return parse_network(address, strict=False)
    except ValueError:
        raise InvalidRequest(
            f"the request: `address`: {address[:100]!r} is not an address; give one like 192.0.2.7 or "
            "192.0.2.0/24"
        ) from None


def _shows(conn: Member, digits: str) -> bool:
    """Return whether a client uses the certificate with this fingerprint or serial number."""
    der = certificate_of(conn)
    if not der:
        return False
    serial = int.from_bytes(certified(der)[1], "big")
    return hashlib.sha256(der).hexdigest() == digits or serial == int(digits, 16)


def peer(conn: Member, session: Session) -> Connected:
    """Describe a connected client for the status page."""
    return Connected(
        session.client_id,
        session.identity.user,
        conn.address,
        PROTOCOLS.get(conn.level, "MQTT"),
        conn.since,
        conn.published,
        len(session.subscriptions),
        len(session.outbox),
        conn.metering.slowed,
    )


def describe(server: Server, session: Session) -> dict[str, Any]:
    """Describe a session. `left` is when it disconnected, `expires` when it ends, in Unix time in ms."""
    broker, conn, left, ends = server.broker, session.line, None, None
    if conn is None:
        left = round(session.left * 1000 + broker.clock.wall() - broker.clock.now())
        ends = left + round(broker.sessions.lifetime(session) * 1000)
    return {
        "client": session.client_id,
        "user": session.identity.user,
        "address": None if conn is None else conn.address,
        "protocol": None if conn is None else PROTOCOLS.get(conn.level, "MQTT"),
        "persistent": session.persistent,
        "subscriptions": len(session.subscriptions),
        "queued": len(session.outbox),
        "left": left,
        "expires": ends,
    }
