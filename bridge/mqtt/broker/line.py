"""A client's connection as the broker uses it. `server.connection` implements it, and so may a test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from bridge.net.budgets import Refusal
    from bridge.net.turns import Who


class Line(Protocol):
    """A connection to one client. The broker writes packets to it, and can stop reading from it."""

    address: str  # the client's host
    level: int  # of the protocol: `packets.V31`, `V311` or `V5`
    bridge: bool  # the client is another broker
    writable: bool  # False while the client does not read its packets
    receive_maximum: int  # QoS 1 and 2 messages that the client accepts at a time
    max_packet_out: int  # the largest packet that the client accepts, in bytes
    explains: bool  # the client may be sent Reason Strings and User Properties (MQTT-3.1.2-29)
    receipts: bool  # the client asks where its messages are stored (`receipts`)

    @property
    def refuses_unmatched(self) -> bool:
        """Whether messages of its clients are refused on topics that no stream takes."""

    @property
    def name(self) -> str:
        """The client, for the log."""

    @property
    def turn(self) -> Who:
        """Who it takes turns as (`net.turns`)."""

    @property
    def local(self) -> bool:
        """Whether the client is on this machine."""

    @property
    def drops_forbidden(self) -> bool:
        """Whether what the rules forbid is acknowledged and dropped where no stream takes the topic."""

    @property
    def gone(self) -> bool:
        """Return whether it is closed or being closed."""

    def admits(self, user: str | None, proof: bytes) -> bool:
        """Return whether its listener would admit it now as this user, after it has given this proof."""

    def full_of_subscriptions(self, count: int) -> Refusal | None:
        """Return why a client with `count` topic filters may not have more; None if it may."""

    def send(self, data: bytes) -> None:
        """Write a packet. Does nothing if the client is gone."""

    def acknowledge(self, acks: bytes | bytearray) -> None:
        """Write acknowledgements. Does nothing if the client is gone."""

    def hold(self, why: str) -> None:
        """Stop reading from the client until `release` is called with the same reason."""

    def release(self, why: str) -> None:
        """Resume reading, unless another reason holds. Does nothing if this reason does not hold."""

    def fail(self, counter: str, why: str, reason: int, told: str = "") -> None:
        """Close it, with an MQTT 5 reason code and a text for the client.

        `counter` and `why` are for the operator.
        """


class Gone:
    """The line of an inbox that has nothing more to answer, so that the connection can be freed."""

    address = name = ""
    turn: Who = ("", "")
    level, bridge, local, writable, gone = 4, False, False, False, True
    explains = receipts = drops_forbidden = refuses_unmatched = False
    receive_maximum = max_packet_out = 0

    def admits(self, user: str | None, proof: bytes) -> bool:
        """Nobody comes in."""
        return False

    def full_of_subscriptions(self, count: int) -> Refusal | None:
        """Nobody subscribes."""
        return None

    def send(self, data: bytes) -> None:
        """Nothing is sent."""

    def acknowledge(self, acks: bytes | bytearray) -> None:
        """Nothing is acknowledged."""

    def hold(self, why: str) -> None:
        """Nothing is read."""

    release = hold

    def fail(self, counter: str, why: str, reason: int, told: str = "") -> None:
        """It is closed."""


GONE = Gone()
