"""What all clients have sent and were sent."""

from __future__ import annotations

from bridge.mqtt.broker.message import LARGE


class Traffic:
    """The packets of all clients, and their bytes. What a plain PUBLISH costs here is two additions.

    `published` are received PUBLISH packets, `others` the rest, `connects` those of them that are CONNECT;
    `sent_bytes` are all that is sent but acknowledgements.
    """

    __slots__ = (
        "_sent", "acknowledged_bytes", "connects", "other_bytes", "others", "published", "received_bytes",
        "sent_bytes",
    )  # fmt: skip

    def __init__(self) -> None:
        self.received_bytes = self.other_bytes = self.published = self.others = self.connects = 0
        self.sent_bytes = self.acknowledged_bytes = self._sent = 0

    def count_sent(self, size: int) -> None:
        """Count a packet, or the payload of one whose head was sent before it."""
        self.sent_bytes += size
        self._sent += size <= LARGE

    @property
    def sent_packets(self) -> int:
        """How many were sent; an acknowledgement with a reason counts by its length, as more than one."""
        return self._sent + (self.acknowledged_bytes >> 2)

    @property
    def all_sent_bytes(self) -> int:
        """The bytes of everything that was sent."""
        return self.sent_bytes + self.acknowledged_bytes

    @property
    def published_bytes(self) -> int:
        """The bytes of received PUBLISH packets."""
        return self.received_bytes - self.other_bytes
