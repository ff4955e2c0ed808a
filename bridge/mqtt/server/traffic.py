"""Counters of the packets and bytes of all clients."""

from __future__ import annotations

from bridge.mqtt.broker.message import LARGE


class Traffic:
    """The counters. A plain PUBLISH costs two additions.

    `published` counts the received PUBLISH packets, `others` all other received packets, `connects` the
    CONNECT packets among those. `sent_bytes` does not include acknowledgements.
    """

    __slots__ = (
        "_sent", "acknowledged_bytes", "connects", "other_bytes", "others", "published", "received_bytes",
        "sent_bytes",
    )  # fmt: skip

    def __init__(self) -> None:
        self.received_bytes = self.other_bytes = self.published = self.others = self.connects = 0
        self.sent_bytes = self.acknowledged_bytes = self._sent = 0

    def count_sent(self, size: int) -> None:
        """Count a packet, or the payload of a packet whose header was counted before."""
        self.sent_bytes += size
        self._sent += size <= LARGE

    @property
    def sent_packets(self) -> int:
        """The number of packets sent. An acknowledgement with a reason counts as more than one."""
        return self._sent + (self.acknowledged_bytes >> 2)

    @property
    def all_sent_bytes(self) -> int:
        """The bytes of all packets sent."""
        return self.sent_bytes + self.acknowledged_bytes

    @property
    def published_bytes(self) -> int:
        """The bytes of received PUBLISH packets."""
        return self.received_bytes - self.other_bytes
