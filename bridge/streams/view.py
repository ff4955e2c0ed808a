"""What the policies see of a stream: limits, deduplication. They read, and `Stream` does what they ask for.

Reading may meet damage, which the stream then sets aside: nothing goes that could still be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from bridge.streams.meta import StorageSettings
from bridge.streams.reader import StreamReader
from bridge.streams.segment import Frame, SegmentSummary


class Segments(Protocol):
    """The segments of a stream, told apart by their first numbers. Sizes in bytes."""

    @property
    def sizes(self) -> Mapping[int, int]:
        """Of all segments, ascending; the last one is the active one."""

    @property
    def total_bytes(self) -> int:
        """Their sum."""

    @property
    def first(self) -> int:
        """The first number of the oldest segment."""

    @property
    def next(self) -> int:
        """The number after the newest committed message."""

    def following(self, base: int) -> int:
        """The first number after the segment that begins at `base`."""


class Dropped(Protocol):
    """The numbers that were dropped."""

    def live(self, first: int, last: int) -> list[tuple[int, int]]:
        """The parts of first..last that were not."""

    def each_live(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """As `live`, one by one."""

    def count(self, first: int, last: int) -> int:
        """How many of first..last were."""


class View(Protocol):
    """A stream, to be read only."""

    @property
    def name(self) -> str:
        """The stream's name."""

    @property
    def settings(self) -> StorageSettings:
        """How it is stored."""

    @property
    def segments(self) -> Segments:
        """What it consists of."""

    @property
    def drops(self) -> Dropped:
        """What is gone."""

    @property
    def oldest(self) -> int:
        """All numbers below it are gone."""

    @property
    def exported_upto(self) -> int | None:
        """All exports have passed the numbers below it; None where there are none."""

    @property
    def busy(self) -> bool:
        """Whether a group is in flight: the active segment must stay."""

    def live_messages(self) -> int:
        """How many messages can be read."""

    def summary(self, base: int) -> SegmentSummary:
        """What a segment holds; raises OSError."""

    def reader(self) -> StreamReader:
        """A new reader; the caller closes it."""

    def frames(self, start: int, end: int) -> Iterator[tuple[bytes, Frame]]:
        """The sound frames with numbers of start..end-1, each with its buffer; raises OSError."""

    def damaged(self, base: int) -> bool:
        """A reader has met damage in a segment; whether it is set aside now. Raises OSError."""
