"""The journal of sessions while a snapshot takes its place, and while it cannot be written."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bridge.encryption import new_master
from bridge.mqtt.broker.journalfile import SYNC_INTERVAL, JournalFile

from ..fakes.byhand import ByHand
from .harness import Bridge, Client, Packet, ack, bridge_test, copied, found_again, full_disk, publish, until


class Held:
    """A sync that is held back until `gate` is open."""

    def __init__(self) -> None:
        self.reached, self.gate = threading.Event(), threading.Event()


class SlowSnapshots:
    """The disk takes snapshots of the journal when `gate` is open, and not before."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.gate, self.began = threading.Event(), threading.Event()
        self.threads: set[threading.Thread] = set()
        self.synced: list[str] = []  # the names of files, when their sync begins
        self._held: dict[str, Held] = {}
        self._sync = os.fdatasync
        patch.setattr(os, "fdatasync", self._slow)

    def _slow(self, fd: int) -> None:
        name = Path(f"/proc/self/fd/{fd}").readlink().name
        self.synced.append(name)
        if name == "sessions.new" and not self.gate.is_set():
            self.threads.add(threading.current_thread())
            self.began.set()
            self.gate.wait(60)
        elif (held := self._held.pop(name, None)) is not None:
            held.reached.set()
            held.gate.wait(60)
        self._sync(fd)

    def hold(self, name: str) -> Held:
        """Hold the next sync of a file back."""
        held = self._held[name] = Held()
        return held

    async def begin(self, publisher: Client, subscriber: Client) -> None:
        """Let the journal grow until a snapshot is under way."""
        number = 0
        while not self.began.is_set():
            number += 1
            assert number < 1000
            await publisher.exchange(publish("plain", b"%d" % number * 50_000, 1, number))
            await subscriber.message()


async def late_messages(taken: Bridge) -> list[bytes]:
    client = await taken.connect("s", clean=False)
    found = [(await client.message()).payload for _ in range(3)]
    assert await client.silent()
    return found


@bridge_test
async def test_nobody_waits_for_the_disk_while_the_journal_is_made_smaller(bridge: Bridge) -> None:
    subscriber, publisher = await bridge.connect("s", clean=False), await bridge.connect("p")
    await subscriber.subscribe(("plain", 1))
    journal = bridge.root / "data" / "mqtt" / "sessions.journal"
    with pytest.MonkeyPatch.context() as patch:
        disk = SlowSnapshots(patch)
        await disk.begin(publisher, subscriber)
        for number in range(1, 4):  # into both files
            await publisher.exchange(publish("plain", b"%d" % number, 1, number))
            await subscriber.receive()
        assert threading.main_thread() not in disk.threads
        before = copied(bridge)
        disk.gate.set()
        await until(lambda: not journal.with_suffix(".new").exists())
        assert journal.stat().st_size < (before / "data" / "mqtt" / "sessions.journal").stat().st_size - 9_000
    after = copied(bridge)
    for taken in (before, after):
        async with found_again(bridge, taken) as again:
            assert await late_messages(again) == [b"1", b"2", b"3"]


@bridge_test(hurry=20)
async def test_what_came_while_the_journal_was_made_smaller_is_synced_without_anything_else(
    bridge: Bridge,
) -> None:
    """It came after the last sync of the new file and of the old one had begun."""
    subscriber, publisher = await bridge.connect("s", clean=False), await bridge.connect("p")
    await subscriber.subscribe(("plain", 1))
    journal = bridge.root / "data" / "mqtt" / "sessions.journal"
    with pytest.MonkeyPatch.context() as patch:
        disk = SlowSnapshots(patch)
        await disk.begin(publisher, subscriber)
        new, old = disk.hold("sessions.new"), disk.hold("sessions.journal")
        disk.gate.set()
        await publisher.exchange(publish("plain", b"1", 1, 1))
        await until(lambda: new.reached.is_set() and old.reached.is_set())
        await publisher.exchange(publish("plain", b"2", 1, 2))
        new.gate.set()
        await until(lambda: not journal.with_suffix(".new").exists())
        disk.synced.clear()
        old.gate.set()
        await until(lambda: disk.synced, what="the record of the last message is synced")


@bridge_test(hurry=20)
async def test_a_write_that_fails_while_the_journal_is_made_smaller_costs_nothing(bridge: Bridge) -> None:
    subscriber, publisher = await bridge.connect("s", clean=False), await bridge.connect("p")
    await subscriber.subscribe(("plain", 1))
    with pytest.MonkeyPatch.context() as patch:
        disk = SlowSnapshots(patch)
        await disk.begin(publisher, subscriber)
        with full_disk(times=1):
            publisher.send(publish("plain", b"1", 1, 1))
            assert await publisher.closed(), "it is not acknowledged"
        disk.gate.set()
        publisher = await bridge.connect("p")
        for number in (2, 3):
            await publisher.exchange(publish("plain", b"%d" % number, 1, number))
        for _ in range(3):
            await subscriber.receive()
    async with found_again(bridge, copied(bridge)) as again:
        assert await late_messages(again) == [b"1", b"2", b"3"]


@contextmanager
def no_room_for_keys() -> Iterator[None]:
    """A full disk that has used up what it keeps for a key."""
    pwrite = os.pwrite

    def full(fd: int, data: Any, offset: int) -> int:
        if "/data/keys/" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        yield


@bridge_test(hurry=20)
async def test_an_encrypted_gateway_starts_on_a_disk_without_room_for_its_key(bridge: Bridge) -> None:
    (bridge.root / "key").write_text(new_master())
    await bridge.restart()
    bridge.stream("secret", "secret", encryption=True)
    subscriber = await bridge.connect("s", clean=False)
    await subscriber.subscribe(("plain", 1))
    taken = copied(bridge)
    shutil.copy(bridge.root / "key", taken)
    with no_room_for_keys():
        again = Bridge(taken, bridge.config, system=bridge.system, hurry=20)
        await again.start()
        publisher = await again.connect("p")
        publisher.send(publish("plain", b"1", 1, 1))
        closed = await publisher.closed()
    try:
        assert closed, "it is not acknowledged"
        assert again.stat("protocol_errors") == 0
        publisher = await again.connect("p")
        await publisher.exchange(publish("plain", b"2", 1, 1))
        late = await again.connect("s", clean=False)
        assert (await late.message()).payload == b"1"
        assert (await late.message()).payload == b"2"
    finally:
        await again.stop()


@pytest.mark.parametrize("loss", ["missing", "damaged"])
def test_sessions_whose_key_is_lost_are_kept_in_a_file_and_the_gateway_runs(
    tmp_path: Path, loss: str, caplog: pytest.LogCaptureFixture
) -> None:
    @bridge_test
    async def run(bridge: Bridge) -> None:
        (bridge.root / "key").write_text(new_master())
        await bridge.restart()
        bridge.stream("secret", "secret", encryption=True)
        subscriber = await bridge.connect("s", clean=False)
        await subscriber.subscribe(("plain", 1))
        subscriber.disconnect()
        publisher = await bridge.connect("p")
        await publisher.exchange(publish("plain", b"waits", 1, 1))
        await bridge.stop()
        (key_file,) = (bridge.root / "data" / "keys").glob("*.key")
        good = key_file.read_bytes()
        if loss == "missing":
            key_file.unlink()
        else:
            key_file.write_bytes(bytes(len(good)))
        await bridge.start()
        await (await bridge.open()).connect("s", clean=False, expect=0)
        publisher = await bridge.connect("p")
        await publisher.exchange(publish("plain", b"none", 1, 1))
        await bridge.stop()
        journal = bridge.root / "data" / "mqtt" / "sessions.journal"
        kept = journal.with_name(f"{journal.name}.{key_file.stem}")
        assert f"rename {kept} to {journal.name}" in caplog.text
        key_file.write_bytes(good)
        kept.rename(journal)
        await bridge.start()
        subscriber = await bridge.connect("s", clean=False)
        assert (await subscriber.message()).payload == b"waits"
        assert await subscriber.silent()

    run(tmp_path)


@pytest.mark.parametrize("released", [False, True])
def test_ids_of_sessions_that_come_back_with_their_key_do_not_hide_new_messages(
    tmp_path: Path, released: bool
) -> None:
    """Meanwhile, the client has had a session of its own, and has used its packet ids again."""

    @bridge_test
    async def run(bridge: Bridge) -> None:
        (bridge.root / "key").write_text(new_master())
        await bridge.restart()
        bridge.stream("secret", "secret", encryption=True)

        async def send(packet_id: int) -> None:
            client = await bridge.connect("p", clean=False)
            await client.exchange(publish("in/a", b"%d" % packet_id, 2, packet_id))
            if released:
                await client.exchange(ack(0x62, packet_id))
            client.disconnect()
            await bridge.stop()

        await send(1)
        (key_file,) = (bridge.root / "data" / "keys").glob("*.key")
        good = key_file.read_bytes()
        key_file.unlink()
        await bridge.start()
        await send(2)
        journal = bridge.root / "data" / "mqtt" / "sessions.journal"
        key_file.write_bytes(good)
        journal.with_name(f"{journal.name}.{key_file.stem}").rename(journal)
        await bridge.start()
        client = await bridge.connect("p", clean=False)
        for packet_id in (1, 2):
            answer = await client.exchange(publish("in/a", b"new %d" % packet_id, 2, packet_id))
            assert answer == Packet(0x50, bytes([0, packet_id]))
        assert (await bridge.payloads("s"))[2:] == [b"new 1", b"new 2"]

    run(tmp_path)


@pytest.mark.parametrize("failures", [1, 100])
def test_a_stop_writes_the_sessions_anew_if_they_cannot_be_synced_and_says_so_if_that_fails_too(
    tmp_path: Path, failures: int, caplog: pytest.LogCaptureFixture
) -> None:
    @bridge_test
    async def run(bridge: Bridge) -> None:
        subscriber = await bridge.connect("s", clean=False)
        await subscriber.subscribe(("plain", 1))
        subscriber.disconnect()
        journal = bridge.root / "data" / "mqtt" / "sessions.journal"
        publisher = await bridge.connect("p")
        on_disk, left, sync = journal.read_bytes(), failures, os.fdatasync

        def failing(fd: int) -> None:
            nonlocal left
            if left and Path(f"/proc/self/fd/{fd}").readlink().name.startswith("sessions."):
                left -= 1
                raise OSError(errno.EIO, "Input/output error")
            sync(fd)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fdatasync", failing)
            await publisher.exchange(publish("plain", b"waits", 1, 1))
            await bridge.stop()
        lost = "a power cut now, or the next start, may bring back older sessions"
        assert (lost in caplog.text) is bridge.front.failed is (failures > 1)
        assert journal.read_bytes() != on_disk
        await bridge.start()
        subscriber = await bridge.connect("s", clean=False)
        assert (await subscriber.message()).payload == b"waits"

    run(tmp_path)


@pytest.mark.parametrize("why", ["its key is lost", "its definition is lost", "its segment is unreadable"])
def test_sessions_stay_encrypted_while_the_only_encrypted_stream_cannot_be_opened(
    tmp_path: Path, why: str
) -> None:
    secret = b"a-secret-that-nobody-may-read"
    data = tmp_path / "data"

    def with_secret() -> list[Path]:
        return [path for path in data.rglob("*") if path.is_file() and secret in path.read_bytes()]

    @bridge_test
    async def run(bridge: Bridge) -> None:
        (bridge.root / "key").write_text(new_master())
        await bridge.restart()
        bridge.stream("secret", "secret", encryption=True)
        (key_of_stream,) = (data / "keys").glob("*.key")
        client = await bridge.connect("p")
        await client.exchange(publish("secret", b"1", 1, 1))
        await bridge.restart()  # from here on, another key encrypts the sessions
        client = await bridge.connect("p")
        await client.exchange(publish("plain", secret, 1, 1, retain=True))
        await bridge.stop()
        assert with_secret() == []
        if why == "its key is lost":
            key_of_stream.unlink()
        elif why == "its definition is lost":
            for path in (data / "streams" / "secret").glob("meta*"):
                path.write_bytes(bytes(8192))
        else:
            (segment,) = (data / "streams" / "secret").glob("*.seg")
            segment.unlink()
            segment.mkdir()
        await bridge.start()
        assert list(bridge.store.unopened) == ["secret"]
        client = await bridge.connect("s")
        await client.subscribe(("plain", 1))
        assert (await client.message()).payload == secret
        assert with_secret() == []

    run(tmp_path)
    assert with_secret() == []


class Working(ByHand):
    """A runtime that notes when threads got work."""

    def __init__(self) -> None:
        super().__init__()
        self.worked: list[float] = []

    def work(self, do: Callable[[], object], done: Callable[[BaseException | None], object]) -> None:
        self.worked.append(self.time)
        super().work(do, done)


@pytest.mark.parametrize("pause", [0.001, 0.03, 0.4, 0.999, 1.5])
def test_a_steady_load_of_writes_is_synced_once_in_each_interval(tmp_path: Path, pause: float) -> None:
    runtime = Working()
    began = runtime.time
    journal = JournalFile(tmp_path / "mqtt" / "sessions.journal", runtime, list)
    journal.open()
    while runtime.time < began + 20:
        journal.add(b"record")
        runtime.run(runtime.time + pause)
    journal.close()
    between = [later - earlier for earlier, later in pairwise([began, *runtime.worked, runtime.time])]
    assert max(between) < SYNC_INTERVAL + 2 * pause
    assert min(between[1:-1]) > SYNC_INTERVAL - 0.001
