"""What the files of a data directory say about its streams: the reading behind `streams ...`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bridge.errors import CorruptData, StreamNotFound
from bridge.export.cursor import stored_status
from bridge.model import ExportStatus, MessageStreamDefinition
from bridge.streams.reader import StreamMeta, StreamReader, list_damaged, list_streams
from bridge.streams.segment import StreamMessage
from bridge.streams.store import MEMORY, is_running
from bridge.streams.verify import check_end

_MOST = 1 << 20  # bytes per read


def find(data_dir: Path, name: str) -> StreamMeta:
    """The stream of this name; raises StreamNotFound with one that is like it, or CorruptData."""
    known = {meta.name: meta for meta in list_streams(data_dir)}
    if name not in known:
        if name in list_damaged(data_dir):
            raise CorruptData(damaged(name))
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known) or 'none'}"
        raise StreamNotFound(f"{data_dir}: there is no stream {name}; {hint}")
    return known[name]


def damaged(name: str) -> str:
    """What is said of a stream whose definition is lost."""
    return (
        f"{name}: the stream is there, but both copies of its definition are damaged; stop the service and "
        "run `streambridge repair`"
    )


def messages_of(data_dir: Path, name: str) -> Path:
    """The directory of a stream's segments; raises StreamNotFound or CorruptData."""
    meta = find(data_dir, name)
    directory = _files(data_dir, meta)
    if not directory.is_dir():
        raise StreamNotFound(f"{directory}: the messages of {name} were in memory, and are gone")
    return directory


def _files(data_dir: Path, meta: StreamMeta) -> Path:
    return data_dir / MEMORY / meta.directory.name if meta.memory else meta.directory


def unreadable_end(data_dir: Path, name: str) -> list[str]:
    """What a stopped service has left behind the last readable message."""
    if is_running(data_dir):
        return []  # it may be in the middle of a write
    return [
        f"{problem.path}: {problem.what}" for problem in check_end(data_dir, find(data_dir, name).directory)
    ]


def describe_stream(
    data_dir: Path, meta: StreamMeta, statuses: list[ExportStatus] | None = None
) -> dict[str, Any]:
    """What --json prints; enums by name, everything else as on the wire.

    How far the exports are stands in their cursors, unless the service has said it (`statuses`).
    """
    directory = _files(data_dir, meta)
    definition = msgspec.json.decode(meta.definition, type=MessageStreamDefinition)
    wire = msgspec.to_builtins(definition)
    wire["strategyOnFull"] = definition.strategy_on_full.name
    wire["persistence"] = definition.persistence.name
    held = _holding(directory) if directory.is_dir() else _Holding()
    return {
        "name": meta.name,
        "epoch": meta.epoch,
        "directory": str(directory),
        "messages": held.messages,
        "oldestIngestTime": held.first,
        "newestIngestTime": held.last,
        "lost": held.lost,
        "storageStatus": {
            "oldestSequenceNumber": held.oldest,
            "newestSequenceNumber": held.end - 1,
            "totalBytes": held.size,
        },
        "exportStatuses": [*_exports(data_dir, meta, definition)] if statuses is None else statuses,
        "definition": wire,
    }


def _exports(data_dir: Path, meta: StreamMeta, definition: MessageStreamDefinition) -> Iterator[ExportStatus]:
    """How far each export is, from its cursor; one that never ran has none."""
    for kind, items in definition.export_definition.items():
        for item in items:
            yield stored_status(data_dir, meta.name, meta.epoch, kind, str(item.get("identifier", "")))


class _Holding(NamedTuple):
    """What a stream holds; times in ms."""

    oldest: int = 0
    end: int = 0
    messages: int = 0
    size: int = 0
    lost: Sequence[tuple[int, int]] = ()
    first: int | None = None
    last: int | None = None


def _holding(directory: Path) -> _Holding:
    with closing(StreamReader(directory)) as reader:
        oldest, end = reader.bounds()
        times = [
            message.ingest_time
            for number in (oldest, end - 1)
            if oldest < end
            for message in reader.read(number, end=end, max_messages=1, max_bytes=1)
        ]
        return _Holding(
            oldest,
            end,
            end - oldest - reader.dropped(oldest, end),
            reader.total_bytes(),
            reader.lost(),
            next(iter(times), None),
            next(iter(times[1:]), None),
        )


def read_messages(reader: StreamReader, start: int, end: int) -> Iterator[StreamMessage]:
    """The messages start..end-1 that are stored, in order; raises CorruptData."""
    while start < end:
        found = reader.read(start, end=end, max_messages=1000, max_bytes=_MOST)
        if not found:
            return
        yield from found
        start = found[-1].sequence_number + 1


def first_since(reader: StreamReader, low: int, high: int, millis: int) -> int:
    """The first number whose message is not older; numbers grow with the ingest time."""
    while low < high:
        middle = (low + high) // 2
        found = reader.read(middle, end=high, max_messages=1, max_bytes=1)
        if found and found[0].ingest_time < millis:
            low = found[0].sequence_number + 1
        else:
            high = middle
    return low
