"""What the tests of the store share: opening it, appending and waiting, reading all back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from bridge import books
from bridge.clock import System
from bridge.encryption import Keys, new_master
from bridge.operations.manager import committed
from bridge.streams.layout import Files
from bridge.streams.meta import StorageSettings
from bridge.streams.segment import StreamMessage
from bridge.streams.store import StreamStore
from bridge.streams.stream import Stream

from ..fakes.clock import Shifted

T = TypeVar("T")


class House:
    """A data directory in which a test opens and reopens the store."""

    def __init__(self, root: Path, *, encrypted: bool = False, key_file: Path | None = None) -> None:
        """`encrypted`: new streams are, with the key in `key_file`."""
        self.encrypted, self.key_file = encrypted, key_file or root / "key"
        if encrypted and not self.key_file.exists():
            root.mkdir(parents=True, exist_ok=True)
            self.key_file.write_text(new_master())
        self.data_dir = root / "data"
        self.memory_dir = root / "memory"
        self.files = Files()
        self.system: System = Shifted()  # the machine's clocks
        self.events: list[str] = []
        self.floors: dict[str, int] = {}
        self.unsynced: list[str] = []  # streams that the last stop could not sync

    def keys(self) -> Keys:
        """The keys of the directory, as another process has them."""
        return Keys(self.data_dir, self.key_file if self.encrypted else None)

    @asynccontextmanager
    async def store(self) -> AsyncIterator[StreamStore]:
        store = StreamStore(
            self.data_dir,
            self.memory_dir,
            on_event=lambda stream, what: self.events.append(f"{stream}: {what}"),
            floor=lambda name, epoch: self.floors.get(name, 0),
            files=self.files,
            system=self.system,
            keys=self.keys(),
        )
        try:
            yield store
            books.check()  # before it is closed
        finally:
            self.unsynced = await store.close()

    @asynccontextmanager
    async def stream(self, name: str = "s", **settings: Any) -> AsyncIterator[Stream]:
        """The stream of this name, made with these settings if it is not there."""
        async with self.store() as store:
            if name not in store.streams:
                store.create(name, StorageSettings(**({"encryption": self.encrypted} | settings)), b"{}")
            yield store.streams[name]

    def directory(self, name: str = "s") -> Path:
        return self.data_dir / "streams" / name


@pytest.fixture
def house(tmp_path: Path, request: pytest.FixtureRequest) -> House:
    return House(tmp_path, encrypted=getattr(request, "param", False))


async def put(stream: Stream, *payloads: bytes, topic: bytes = b"t", ids: bool = False) -> list[int]:
    """Append in one group, wait for the commit, return the numbers."""
    numbers = [stream.append(topic, payload, b"", b"id-" + payload if ids else b"") for payload in payloads]
    await committed(stream)
    return numbers


def everything(stream: Stream, start: int = 0) -> list[StreamMessage]:
    """All messages of a stream from number `start` on, read from its files."""
    reader = stream.reader()
    try:
        found: list[StreamMessage] = []
        position = max(start, stream.oldest)
        while rows := reader.read(position, end=stream.next_sequence, max_messages=1000, max_bytes=1 << 20):
            found += rows
            position = rows[-1].sequence_number + 1
        return found
    finally:
        reader.close()


def check(stream: Stream) -> None:
    """Check every frame of every segment, setting damage aside."""
    for base in list(stream.log.sizes):
        stream.repair(base)


def payloads(stream: Stream) -> list[bytes]:
    return [message.payload for message in everything(stream)]


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)
