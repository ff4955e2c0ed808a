"""What the broker needs of a client's connection; `server.connection` is one, and a test may be another."""

from __future__ import annotations

from typing import Protocol


class Line(Protocol):
    """A connection to one client. The broker writes packets to it, and holds what the client sends."""

    address: str  # the client's host
    level: int  # of the protocol: `packets.V31`, `V311` or `V5`
    bridge: bool  # the client is another broker
    writable: bool  # False while the client does not read what it is sent
    receive_maximum: int  # QoS 1 and 2 messages that the client takes at a time
    max_packet_out: int  # bytes of a packet that the client takes
    explains: bool  # the client may be sent Reason Strings and User Properties (MQTT-3.1.2-29)
    receipts: bool  # and wants to know where its messages are stored (`receipts`)

    @property
    def name(self) -> str:
        """The client, for the log."""

    @property
    def local(self) -> bool:
        """Whether the client is on this machine."""

    @property
    def gone(self) -> bool:
        """Whether it is closed, or is being closed."""

    def full_of_subscriptions(self, count: int) -> str:
        """Why a client that has `count` topic filters may have no more; empty if it may."""

    def send(self, data: bytes) -> None:
        """Write a packet; nothing happens if it is gone."""

    def acknowledge(self, acks: bytes | bytearray) -> None:
        """Write acknowledgements; nothing happens if it is gone."""

    def hold(self, why: str) -> None:
        """Read no further from the client until `release` is called with the same reason."""

    def release(self, why: str) -> None:
        """Read on, unless there is another reason not to; nothing happens if this was none."""

    def fail(self, counter: str, why: str, reason: int) -> None:
        """Close it, with an MQTT 5 reason code for the client; `counter` and `why` are for us."""


class Gone:
    """The line of an inbox that has nothing more to answer, so that the connection is held by nothing."""

    address = name = ""
    level, bridge, local, writable, gone = 4, False, False, False, True
    explains = receipts = False
    receive_maximum = max_packet_out = 0

    def full_of_subscriptions(self, count: int) -> str:
        """Nobody subscribes."""
        return ""

    def send(self, data: bytes) -> None:
        """Nothing is sent."""

    def acknowledge(self, acks: bytes | bytearray) -> None:
        """Nothing is acknowledged."""

    def hold(self, why: str) -> None:
        """Nothing is read."""

    release = hold

    def fail(self, counter: str, why: str, reason: int) -> None:
        """It is closed."""


GONE = Gone()
