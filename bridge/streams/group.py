"""The messages of one commit, as they wait in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bridge.streams.segment import RECORD_OVERHEAD


@dataclass(slots=True)
class Group:
    """Messages that are committed together: topics and payloads in turn, the rest by position."""

    parts: list[bytes] = field(default_factory=list)
    headers: dict[int, bytes] = field(default_factory=dict)
    ids: dict[int, bytes] = field(default_factory=dict)
    size: int = 0

    def part(self, low: int, high: int) -> Group:
        """The messages at the positions low..high-1."""
        if low == 0 and high * 2 == len(self.parts):
            return self
        headers = {i - low: h for i, h in self.headers.items() if low <= i < high}
        ids = {i - low: h for i, h in self.ids.items() if low <= i < high}
        return Group(self.parts[2 * low : 2 * high], headers, ids)

    def record_sizes(self) -> Sequence[int]:
        """How many bytes of a frame each message takes."""
        sizes = [
            len(topic) + len(payload) + RECORD_OVERHEAD
            for topic, payload in zip(self.parts[::2], self.parts[1::2], strict=True)
        ]
        for column in (self.headers, self.ids):
            if column:
                sizes = [size + 4 + len(column.get(i, b"")) for i, size in enumerate(sizes)]
        return sizes
