"""The journal of sessions while a snapshot takes its place."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from .harness import Bridge, Client, bridge_test, copied, found_again, full_disk, publish, until


class SlowSnapshots:
    """The disk takes snapshots of the journal when `gate` is open, and not before."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.gate, self.began = threading.Event(), threading.Event()
        self.threads: set[threading.Thread] = set()
        self._sync = os.fdatasync
        patch.setattr(os, "fdatasync", self._slow)

    def _slow(self, fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().name == "sessions.new" and not self.gate.is_set():
            self.threads.add(threading.current_thread())
            self.began.set()
            self.gate.wait(60)
        self._sync(fd)

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
