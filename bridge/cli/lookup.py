"""Reads the streams of a data directory from its files, for `streams ...`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from bridge.consumers import consumer
from bridge.errors import CorruptData, StreamNotFound
from bridge.export.cursor import stored_status
from bridge.model import ExportStatus, MessageStreamDefinition, encryption_status, with_pauses
from bridge.operations.definitions import without_secrets
from bridge.plugin.consumer import KIND
from bridge.streams.drops import DropLog
from bridge.streams.layout import Files
from bridge.streams.reader import StreamMeta, StreamReader, list_damaged, list_streams
from bridge.streams.segment import StreamMessage
from bridge.streams.store import MEMORY, is_running
from bridge.streams.verify import check_end

_MOST = 1 << 20  # bytes per read


def find(data_dir: Path, name: str) -> StreamMeta:
    """Return the stream with this name. Raises StreamNotFound or CorruptData."""
    known = {meta.name: meta for meta in list_streams(data_dir)}
    if name not in known:
        if name in list_damaged(data_dir):
            raise CorruptData(damaged(name))
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the streams are: {', '.join(known) or 'none'}"
        raise StreamNotFound(f"{data_dir}: there is no stream {name}; {hint}")
    return known[name]


def damaged(name: str) -> str:
    """Return the message for a stream whose definition is damaged."""
    return (
        f"{name}: the stream exists, but both copies of its definition are damaged; stop the service and run "
        "`streambridge repair`"
    )


def messages_of(data_dir: Path, name: str) -> Path:
    """Return the directory of a stream's segments. Raises StreamNotFound or CorruptData."""
    meta = find(data_dir, name)
    directory = _files(data_dir, meta)
    if not directory.is_dir():
        raise StreamNotFound(f"{directory}: the messages of {name} were in memory and are lost")
    return directory


def _files(data_dir: Path, meta: StreamMeta) -> Path:
    return data_dir / MEMORY / meta.directory.name if meta.memory else meta.directory


def unreadable_end(data_dir: Path, name: str) -> list[str]:
    """Return the problems after the last readable message; none while the service runs."""
    if is_running(data_dir):
        return []  # the service may be writing the last message
    return [
        f"{problem.path}: {problem.what}" for problem in check_end(data_dir, find(data_dir, name).directory)
    ]


def describe_stream(
    data_dir: Path, meta: StreamMeta, statuses: list[ExportStatus] | None = None
) -> dict[str, Any]:
    """Describe a stream as --json prints it: enums by name, everything else as on the wire.

    `statuses` are those of the exports from the running service; without them, the cursors are read.
    """
    directory = _files(data_dir, meta)
    definition = msgspec.json.decode(meta.definition, type=MessageStreamDefinition)
    wire = msgspec.to_builtins(without_secrets(definition))
    wire["strategyOnFull"] = definition.strategy_on_full.name
    wire["persistence"] = definition.persistence.name
    contents = _contents(directory, wanted=definition.encryption)
    if statuses is None:
        oldest = contents["storageStatus"]["oldestSequenceNumber"]
        statuses = with_pauses(_exports(data_dir, meta, definition, oldest), meta.paused)
    return {
        "name": meta.name,
        "epoch": meta.epoch,
        "directory": str(directory),
        **contents,
        "exportStatuses": statuses,
        "definition": wire,
    }


def _exports(
    data_dir: Path, meta: StreamMeta, definition: MessageStreamDefinition, oldest: int
) -> Iterator[ExportStatus]:
    """Yield the status of each export, from its cursor if it has one."""
    drops = DropLog(Files(), _files(data_dir, meta))
    for kind, items in definition.export_definition.items():
        for item in items:
            identifier = str(item.get("identifier", ""))
            if kind == KIND:
                yield consumer.stored_status(data_dir, meta.name, meta.epoch, identifier, drops)
            else:
                upto = 0 if item.get("disabled") else oldest
                yield stored_status(data_dir, meta.name, meta.epoch, kind, identifier, drops, upto)


def _contents(directory: Path, *, wanted: bool) -> dict[str, Any]:
    """Return the contents of a stream, with times in ms. `wanted`: its definition asks for encryption."""
    oldest = end = messages = size = 0
    lost: Sequence[tuple[int, int]] = ()
    times: list[int] = []
    encrypted, unencrypted, is_sealed = 0, 0, False
    if directory.is_dir():
        with closing(StreamReader(directory)) as reader:
            oldest, end = reader.bounds()
            messages, size = end - oldest - reader.dropped(oldest, end), reader.total_bytes()
            lost = reader.lost()
            firsts = [reader.moment_of(number, end) for number in (oldest, end - 1) if oldest < end]
            times = [first.time for first in firsts if first is not None]
            encrypted, unencrypted, is_sealed = reader.encryption()
    return {
        "messages": messages,
        "oldestIngestTime": next(iter(times), None),
        "newestIngestTime": next(iter(times[1:]), None),
        "lost": lost,
        "storageStatus": {
            "oldestSequenceNumber": oldest,
            "newestSequenceNumber": end - 1,
            "totalBytes": size,
        },
        "encryption": encryption_status(
            wanted=wanted, active=is_sealed, encrypted=encrypted, unencrypted=unencrypted
        ),
    }


def read_messages(reader: StreamReader, start: int, end: int) -> Iterator[StreamMessage]:
    """Yield the stored messages among start..end-1, in order. Raises CorruptData."""
    while start < end:
        found = reader.read(start, end=end, max_messages=1000, max_bytes=_MOST)
        if not found:
            return
        yield from found
        start = found[-1].sequence_number + 1
