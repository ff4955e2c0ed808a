"""The commit delay: devices that pause share a sync, and a client that hurries is not slowed down.

Time is turned by hand, so nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bridge.errors import StreamError
from bridge.streams.delay import Delay
from bridge.streams.layout import Files
from bridge.streams.meta import StorageSettings
from bridge.streams.store import StreamStore

from ..fakes.byhand import ByHand

DELAY = 0.25


class Synced(Files):
    """The files of a store, which count syncs of data."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs = 0

    def sync(self, fd: int) -> None:
        self.syncs += 1
        super().sync(fd)


class World:
    """A stream that flushes on write, and clients that publish to it."""

    def __init__(self, store: StreamStore, runtime: ByHand, files: Synced) -> None:
        self.runtime, self.files = runtime, files
        self.stream = store.create("s", StorageSettings(flush=True), b"{}")
        self.began = files.syncs
        self.waited: list[float] = []  # how long each acknowledgement took
        self._heard: dict[str, float] = {}  # when each client was last heard

    @property
    def syncs(self) -> int:
        return self.files.syncs - self.began

    def publish(self, client: str, then: Callable[[], object] = lambda: None) -> None:
        """Publish as a device does; `then` is called at the acknowledgement."""
        now = self.runtime.now()
        self.stream.append(b"t", b"1")
        self.stream.after_commit(self._told(now, then), self._heard.get(client, now - 1))
        self._heard[client] = now

    def request(self) -> None:
        """Append as an operation does."""
        self.stream.append(b"t", b"1")
        self.stream.after_commit(self._told(self.runtime.now(), lambda: None))

    def _told(self, since: float, then: Callable[[], object]) -> Callable[[StreamError | None], None]:
        def told(error: StreamError | None) -> None:
            assert error is None
            self.waited.append(self.runtime.now() - since)
            then()

        return told

    def every(self, period: float, client: str, times: int, start: float = 0.0) -> None:
        """Let a client publish at fixed times, whatever is acknowledged."""
        for n in range(times):
            self.runtime.later(start + n * period, self.publish, client)

    def hurry(self, client: str, times: int, pause: float) -> None:
        """Let a client publish so long after each acknowledgement."""
        if times:
            again = lambda: self.runtime.later(pause, self.hurry, client, times - 1, pause)  # noqa: E731
            self.publish(client, again)

    def run(self, seconds: float) -> None:
        self.runtime.run(self.runtime.now() + seconds)


@asynccontextmanager
async def world(tmp_path: Path, delay: float = DELAY) -> AsyncIterator[World]:
    runtime, files = ByHand(), Synced()
    store = StreamStore(
        tmp_path / "data",
        tmp_path / "memory",
        on_event=lambda stream, what: pytest.fail(f"{stream}: {what}"),
        files=files,
        runtime=runtime,
        commit_delay=delay,
    )
    yield World(store, runtime, files)
    await store.close()


def test_devices_that_send_now_and_then_share_a_sync(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            for n in range(10):
                here.every(1.0, f"device {n}", 20, start=n / 10 + 0.01 * (n % 3))
            here.run(30)
            assert len(here.waited) == 200
            assert here.syncs < 80, "three share a sync, on average"
            assert max(here.waited) <= DELAY + 1e-6

    asyncio.run(scenario())


@pytest.mark.parametrize("clients", [1, 3, 10])
@pytest.mark.parametrize("pause", [0.0001, 0.005, 0.05])
def test_a_client_that_waits_for_each_acknowledgement_is_delayed_only_once(
    tmp_path: Path, clients: int, pause: float
) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            for n in range(clients):
                here.runtime.later(n * 0.001, here.hurry, f"program {n}", 100, pause * (1 + n / 50))
            here.run(60)
            assert len(here.waited) == 100 * clients
            late = sum(waited > DELAY / 2 for waited in here.waited)
            assert late <= clients, "only first messages have waited"

    asyncio.run(scenario())


def test_a_program_among_slow_devices_is_not_held_for_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            for n in range(20):
                here.every(2.0, f"device {n}", 10, start=n / 10)
            here.runtime.later(1.0, here.hurry, "program", 500, 0.01)
            here.run(30)
            assert len(here.waited) == 700
            assert sum(here.waited) < 200 * DELAY + DELAY, "only the devices have waited"

    asyncio.run(scenario())


def test_an_operation_is_never_delayed_and_takes_along_what_waits(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            here.every(10, "device", 1)
            here.run(0.1)
            assert not here.waited
            here.request()
            here.run(0)
            assert [round(waited, 3) for waited in here.waited] == [0.1, 0.0]
            assert here.syncs == 1

    asyncio.run(scenario())


def test_sixteen_messages_wait_for_no_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            here.every(0.001, "device", 16)
            here.run(0.0155)
            assert len(here.waited) == 16
            assert here.syncs == 1

    asyncio.run(scenario())


def test_without_a_delay_each_message_has_its_sync_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, delay=0) as here:
            here.every(0.1, "device", 10)
            here.run(2)
            assert here.waited == [0.0] * 10
            assert here.syncs == 10

    asyncio.run(scenario())


def test_a_stop_commits_what_waits(tmp_path: Path) -> None:
    async def scenario() -> list[StreamError | None]:
        told: list[StreamError | None] = []
        store = StreamStore(
            tmp_path / "data", tmp_path / "memory", on_event=lambda *_: None, commit_delay=3600.0
        )
        stream = store.create("s", StorageSettings(flush=True), b"{}")
        stream.append(b"t", b"1")
        stream.after_commit(told.append, 0.0)
        await asyncio.sleep(0)
        assert not told
        await store.close()
        return told

    assert asyncio.run(scenario()) == [None]


def test_acknowledgements_that_are_not_recent_take_no_memory() -> None:
    """Under pressure, nobody asks whether to wait."""
    delay = Delay(DELAY)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(20_000):
            delay.committed(number / 100, 0)
        assert tracemalloc.get_traced_memory()[0] - before < 20_000
    finally:
        tracemalloc.stop()
