"""The consumers of all streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge.consumers.consumer import Consumer, Host
from bridge.consumers.journal import ENDING, directory_of, path_of
from bridge.errors import ConsumerNotFound
from bridge.model import ExportStatus
from bridge.plugin.api import convert_config
from bridge.plugin.consumer import ClientExporter, ConsumerConfig
from bridge.streams.stream import Stream

log = logging.getLogger(__name__)


class Consumers:
    """Follows the definitions of the streams. Must be used in the event loop's thread."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._streams: dict[str, dict[str, Consumer]] = {}
        self._closing: dict[Path, asyncio.Future[None]] = {}  # files with a last write in progress

    def define(self, stream: Stream, raw: Iterable[Mapping[str, Any]], paused: Collection[str] = ()) -> None:
        """Set the consumers of a stream that was opened, created or updated.

        `paused` has the identifiers of exports that an operator has paused.
        """
        known = self._streams.get(stream.name, {})
        wanted = {config.identifier: config for config in _understood(stream.name, raw)}
        for identifier in [one for one in known if one not in wanted]:
            self._end(known.pop(identifier))
        for identifier, config in wanted.items():
            if identifier in known:
                known[identifier].configure(stream, config)
            else:
                before = self._closing.get(path_of(self._host.data_dir, stream.name, identifier))
                known[identifier] = Consumer(self._host, stream, config, before)
            known[identifier].paused = identifier in paused
        if known:
            self._streams[stream.name] = known
        else:
            self._streams.pop(stream.name, None)
        self._forget_others(stream.name, [consumer.path for consumer in known.values()])

    def forget(self, name: str) -> None:
        """Remove the consumers of a deleted stream."""
        for consumer in self._streams.pop(name, {}).values():
            self._end(consumer)
        directory = directory_of(self._host.data_dir, name)
        if not any(path.parent == directory for path in self._closing):
            shutil.rmtree(directory, ignore_errors=True)

    def get(self, name: str, identifier: str) -> Consumer:
        """Return a consumer of a stream. Raises ConsumerNotFound."""
        known = self._streams.get(name, {})
        if identifier not in known:
            hint = f"its consumers are: {', '.join(known)}" if known else "it has no consumer"
            raise ConsumerNotFound(f"stream {name!r} has no consumer {identifier[:255]!r}; {hint}")
        return known[identifier]

    def of(self, name: str) -> Iterable[Consumer]:
        """The consumers of a stream."""
        return self._streams.get(name, {}).values()

    def statuses(self, name: str) -> dict[str, ExportStatus]:
        """The status of each consumer of a stream, by identifier."""
        return {consumer.config.identifier: consumer.status() for consumer in self.of(name)}

    def settled_upto(self, name: str, holding: Collection[str] | None = None) -> int | None:
        """The lowest number that not all enabled consumers have settled on the disk; None without any.

        With `holding`, only these count; one that does not exist has settled none.
        """
        if holding is None:
            return min((one.saved_upto for one in self.of(name) if not one.config.disabled), default=None)
        upto = {one.config.identifier: one.saved_upto for one in self.of(name)}
        return min((upto.get(one, 0) for one in holding), default=None)

    def wake(self, name: str) -> None:
        """Wake the consumers of a stream that has new messages."""
        for consumer in self.of(name):
            consumer.wake()

    def refresh(self, name: str) -> None:
        """Apply everything that depends on time and on dropped messages. Called every second."""
        for consumer in self.of(name):
            consumer.refresh()

    def close(self) -> None:
        """Close the files."""
        for known in self._streams.values():
            for consumer in known.values():
                consumer.close()
        self._streams.clear()

    def _end(self, consumer: Consumer) -> None:
        """Remove a consumer, and its file once no write is in progress."""
        flight = consumer.close()
        if flight is None:
            self._remove(consumer.path)
            return
        self._closing[consumer.path] = flight

        def ended(_: object) -> None:
            self._remove(consumer.path)
            if self._closing.get(consumer.path) is flight:
                del self._closing[consumer.path]

        flight.add_done_callback(ended)

    def _remove(self, path: Path) -> None:
        """Remove a file durably, because a new consumer of the same name must begin at its start."""
        with contextlib.suppress(OSError):  # the next start tries again
            self._host.files.unlink(path)
            self._host.files.sync_directory(path.parent)

    def _forget_others(self, name: str, kept: Sequence[Path]) -> None:
        """Remove the files of consumers that were deleted when the process ended."""
        directory = directory_of(self._host.data_dir, name)
        for path in directory.glob(f"*{ENDING}") if directory.is_dir() else ():
            if path not in kept and path not in self._closing:
                self._remove(path)


def _understood(name: str, raw: Iterable[Mapping[str, Any]]) -> Iterator[ConsumerConfig]:
    """Return the configurations. One that another version stored and that is invalid here is reported."""
    for one in raw:
        try:
            yield convert_config(ClientExporter, one)
        except ValueError as error:
            log.error("consumer %s: %s; update it", one.get("identifier"), error, extra={"stream": name})
