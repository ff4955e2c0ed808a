"""A stream read from one number to another by its own writer, which sets damage aside on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bridge.errors import CorruptData
from bridge.streams.reader import StreamReader
from bridge.streams.segment import Frame

if TYPE_CHECKING:
    from bridge.streams.stream import Stream


def frames(stream: Stream, reader: StreamReader, start: int, end: int) -> Iterator[tuple[bytes, Frame]]:
    """The sound frames with numbers of start..end-1, in order, each with its buffer; raises OSError.

    Where damage cannot be set aside just now, the rest of its segment is passed over; `Stream.maintain`
    sets it aside when it can.
    """
    position, healed = start, set[int]()
    while position < end:
        before = position
        try:
            for data, frame in reader.frames(position, end):
                position = frame.next
                yield data, frame
            if position == before:
                return
        except CorruptData as error:
            stream.count("corrupt_reads")
            if error.segment in healed or not stream.heal(error.segment):
                position = max(position + 1, stream.log.following(error.segment))
            healed.add(error.segment)
