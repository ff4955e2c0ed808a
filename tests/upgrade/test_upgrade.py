"""Data directories of earlier versions, opened by this one: all is there, and a newer one is refused.

The archives are made by `make.py`: `format-1` with the code of 40e5b2e, `format-2` with that of the commit
that brought this file.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed.web import Web
from bridge.clock import System
from bridge.errors import DataDirectoryBusy
from bridge.mqtt.settings import MqttConfig
from bridge.mqtt.wire.packets import V5
from bridge.streams import formats, layout
from bridge.streams.drops import LOSSES
from bridge.streams.formats import Format
from tests.fakes.clock import Shifted
from tests.mqtt.harness import Bridge, Client, ack, publish, run_async, until
from tests.streams.conftest import House, everything

from .make import ACKNOWLEDGED, COMPLETE, ENDS, RECEIVED, RELEASE, Service, payloads, unpacked

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ARCHIVES = sorted(path.name.removesuffix(".tar.xz") for path in HERE.glob("*.tar.xz"))
QUEUED = [b"queued %d" % number for number in range(5)]
KILLED = 9


def archive(name: str) -> Path:
    return HERE / f"{name}.tar.xz"


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where there is one: these tests open hundreds, and no power goes off in them."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as name:
        yield Path(name)


async def received(client: Client, count: int) -> list[tuple[str, bytes]]:
    """So many messages, in the order of topic and payload, each acknowledged."""
    found = []
    for _ in range(count):
        packet = await client.receive()
        while packet.head == RELEASE:  # an id that it may hold for a message that a power cut has taken
            client.send(ack(COMPLETE, int.from_bytes(packet.body[:2], "big")))
            packet = await client.receive()
        message = client.parse(*packet)
        if message.qos == 1:
            client.send(ack(ACKNOWLEDGED, message.packet_id))
        if message.qos == 2:
            client.send(ack(RECEIVED, message.packet_id))
            assert await client.receive() == (RELEASE, message.packet_id.to_bytes(2, "big"))
            client.send(ack(COMPLETE, message.packet_id))
        found.append((message.topic, message.payload))
    return sorted(found)


def test_every_format_was_made_in_both_ways() -> None:
    wanted = [f"format-{number}-{end}" for number in range(1, formats.PRESENT + 1) for end in ENDS]
    assert sorted(wanted) == ARCHIVES


@pytest.mark.parametrize("name", ARCHIVES)
def test_all_that_an_earlier_version_left_is_stored_delivered_and_exported(tmp_path: Path, name: str) -> None:
    expected = unpacked(archive(name), tmp_path)
    web = Web()
    service = Service(ROOT, tmp_path, web.url)

    async def check() -> None:
        service.start()
        await service.ready()
        assert _read(service.config) == expected["stored"]

        device = await service.connect("device")
        answer = await device.exchange(publish("sensors/room3", b"once", 2, 77, dup=True))
        assert answer.head == RECEIVED
        assert (await device.exchange(ack(RELEASE, 77))).head == COMPLETE
        sensors = _read(service.config)["sensors"]
        # After another boot it is not known which ids are in use, and twice is better than never.
        twice = name.endswith("killed") and expected["boot"] != System().boot
        assert sensors == expected["stored"]["sensors"] + ["once"] * twice

        reader = await service.connect("reader")
        queued = [("plain/a", payload) for payload in QUEUED] + [("plain/b", b"not expired")]
        assert await received(reader, 7) == [*queued, ("wills/mortal", b"gone")]
        modern = await service.connect("modern", level=V5)
        assert await received(modern, 6) == queued
        await device.subscribe(("state/#", 1))
        assert await received(device, 2) == [("state/a", b"state/a"), ("state/b", b"state/b")]

        def exported() -> list[str]:
            return [payload for body in web.bodies for payload in payloads(body)]

        await until(lambda: len(exported()) >= len(sensors) - len(expected["exported"]), 30)
        assert expected["exported"] + exported() == sensors

    try:
        asyncio.run(check())
        service.end(ENDS["stopped"])
        verify = command("verify", "-c", service.config)
        assert verify.returncode == 0, verify.stdout
    finally:
        service.end()
        web.close()


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bridge", *map(str, arguments)], capture_output=True, text=True, cwd=ROOT
    )


def _read(config: Path) -> dict[str, list[str]]:
    found = {}
    for name in ("sensors", "ledger", "latest", "scratch"):
        done = command("streams", "read", name, "--json", "--count", "1000", "-c", config)
        assert done.returncode == 0, done.stderr
        found[name] = [json.loads(line)["payload"] for line in done.stdout.splitlines()]
    return found


class Calls:
    """Ends the process right before the `left`-th of its calls that change a file or a name."""

    NAMES = (
        "write", "pwrite", "pwritev", "fsync", "fdatasync", "ftruncate", "unlink", "rename", "replace",
        "mkdir", "rmdir", "link", "symlink",
    )  # fmt: skip

    def __init__(self, left: int) -> None:
        self.left = left

    def watch(self) -> None:
        """For this process and for good: for a child that ends by it."""
        for name in self.NAMES:
            setattr(os, name, self._counted(getattr(os, name)))
        real = os.open

        def opened(path: Any, flags: int, *rest: Any, **options: Any) -> int:
            if flags & (os.O_CREAT | os.O_TRUNC):
                self._count()
            return real(path, flags, *rest, **options)

        os.open = opened

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **options: Any) -> Any:
            self._count()
            return call(*given, **options)

        return counted

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            os._exit(KILLED)


def is_killed(root: Path, call: int) -> bool:
    """Start and stop a bridge in a child that is killed at a call; returns False if it came to its end."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            Calls(call).watch()
            run_async(_start_and_stop(root))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, KILLED), f"call {call}: its traceback is on stderr"
    return status == KILLED


async def _start_and_stop(root: Path) -> None:
    bridge = _bridge(root)
    await bridge.start()
    await bridge.stop()


def _bridge(root: Path) -> Bridge:
    return Bridge(root, MqttConfig(listen=["tcp://127.0.0.1:0"]), system=Shifted("another boot"))


@pytest.mark.parametrize(
    "name", ["format-1-killed", pytest.param("format-1-stopped", marks=pytest.mark.slow(seconds=20))]
)
def test_a_kill_at_any_call_of_the_first_start_leaves_a_directory_with_all_in_it(
    quick: Path, name: str
) -> None:
    origin = quick / "origin"
    origin.mkdir()
    expected = unpacked(archive(name), origin)

    async def check(root: Path) -> None:
        bridge = _bridge(root)
        await bridge.start()
        try:
            assert bridge.store.unopened == {}
            assert formats.find(root / "data") == Format(formats.PRESENT)
            for stream in bridge.store.streams.values():
                found = [message.payload.decode() for message in everything(stream)]
                assert found == expected["stored"][stream.name]
                assert not [drop for drop in stream.drops.ranges if drop.reason in LOSSES]
                assert not (stream.directory / layout.QUARANTINE).exists()
                assert stream.clock.now() >= everything(stream)[-1].ingest_time if found else True
            reader = await bridge.connect("reader", clean=False)
            assert [payload for _, payload in await received(reader, 7)] == [*QUEUED, b"not expired", b"gone"]
            device = await bridge.connect("device")
            await device.subscribe(("state/#", 1))
            assert [payload for _, payload in await received(device, 2)] == [b"state/a", b"state/b"]
        finally:
            await bridge.stop()

    call, killed = 0, True
    while killed:
        call += 1
        root = quick / str(call)
        shutil.copytree(origin, root)
        killed = is_killed(root, call)
        run_async(check(root))
        shutil.rmtree(root)
    assert call > 60, "each of the segments was brought to the present format"


# -- damage in what is upgraded ------------------------------------------------------------------
@pytest.fixture
def ledger(quick: Path) -> tuple[House, list[bytes]]:
    """A directory of format 1 with one stream, and what is in it."""
    expected = unpacked(archive("format-1-stopped"), quick)
    for name in ("sensors", "latest", "scratch"):
        shutil.rmtree(quick / "data" / "streams" / name)
    return House(quick), [payload.encode() for payload in expected["stored"]["ledger"]]


def changed(house: House, number: int, path: Path, data: bytes) -> House:
    """A copy of the directory with other bytes in one file."""
    root = house.data_dir.parent / str(number)
    shutil.copytree(house.data_dir, root / "data")
    (root / path.relative_to(house.data_dir.parent)).write_bytes(data)
    return House(root)


def test_the_last_old_segment_cut_at_any_byte_loses_only_the_frames_that_are_cut(
    ledger: tuple[House, list[bytes]],
) -> None:
    house, stored = ledger
    path = max(house.directory("ledger").glob("*.seg"))
    data, base = path.read_bytes(), int(path.stem)

    async def check(cut: House, least: int) -> int:
        async with cut.stream("ledger") as stream:
            found = [message.payload for message in everything(stream)]
            assert least <= len(found) <= len(stored)
            assert found == stored[: len(found)]
            assert stream.next_sequence == len(found)
            return len(found)

    least = base
    for size in range(len(data) + 1):
        cut = changed(house, size, path, data[:size])
        least = asyncio.run(check(cut, least))
        shutil.rmtree(cut.data_dir.parent)
    assert least == len(stored)


@pytest.mark.parametrize("which", ["first", pytest.param("last", marks=pytest.mark.slow(seconds=15))])
def test_a_flipped_bit_in_an_old_segment_costs_one_frame_at_most_and_is_told(
    ledger: tuple[House, list[bytes]], which: str
) -> None:
    house, stored = ledger
    paths = sorted(house.directory("ledger").glob("*.seg"))
    path = paths[0] if which == "first" else paths[-1]
    data = path.read_bytes()

    async def check(damaged: House) -> None:
        async with damaged.stream("ledger") as stream:
            found = {message.sequence_number: message.payload for message in everything(stream)}
            assert all(stored[number] == payload for number, payload in found.items())
            missing = set(range(len(stored))) - set(found)
            assert len(missing) <= 1
            if not all(
                stream.drops.count(number, number) for number in missing
            ):  # the last frame is no frame any more
                assert missing == {len(stored) - 1}
                assert any("torn tail" in event for event in damaged.events)

    for number in [*range(100), *range(100, len(data), 29)]:
        flipped = data[:number] + bytes([data[number] ^ 1 << number % 8]) + data[number + 1 :]
        damaged = changed(house, number, path, flipped)
        asyncio.run(check(damaged))
        shutil.rmtree(damaged.data_dir.parent)


def test_a_lost_definition_of_an_old_stream_is_rebuilt_and_its_messages_read(
    ledger: tuple[House, list[bytes]],
) -> None:
    house, stored = ledger
    for name in ("meta.0", "meta.1"):
        (house.directory("ledger") / name).write_bytes(b"")
    done = command("repair", house.data_dir)
    assert "written again with default settings" in done.stdout, done.stderr

    async def check() -> None:
        async with house.store() as store:
            assert [message.payload for message in everything(store.streams["ledger"])] == stored

    asyncio.run(check())


# -- which version may open what -----------------------------------------------------------------
def digests(directory: Path) -> dict[str, str]:
    """Every file, directory and link below a directory, with what is in it."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else ""
        for path in sorted(directory.rglob("*"))
    }


def newer(house: House) -> None:
    formats.save(house.files, house.data_dir, Format(formats.ENCRYPTED + 1))


@pytest.mark.parametrize(
    "arguments",
    [
        ("run",), ("verify",), ("repair",), ("streams", "list"), ("streams", "read", "ledger"), ("exports",),
        ("streams", "purge", "ledger", "--yes"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_directory_of_a_newer_version_is_refused_and_not_changed(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    unpacked(archive("format-2-stopped"), tmp_path)
    house = House(tmp_path)
    newer(house)
    before = digests(tmp_path / "data")
    config = tmp_path / "streambridge.toml"
    config.write_text('[gateway]\ndata_dir = "data"\n[mqtt]\nlisten = ["tcp://127.0.0.1:0"]\n')
    done = command(*arguments, "-c", config)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"streambridge: {tmp_path}/data: was written by a newer streambridge "
        f"(format {formats.ENCRYPTED + 1}; this one knows up to {formats.ENCRYPTED}); install that version "
        "again; nothing was changed"
    )
    assert digests(tmp_path / "data") == before


def test_a_damaged_note_of_the_format_is_written_again(tmp_path: Path) -> None:
    unpacked(archive("format-2-stopped"), tmp_path)
    house = House(tmp_path)
    path = house.data_dir / formats.NAME
    sound = path.read_bytes()
    for number in range(len(sound)):
        path.write_bytes(sound[:number] + bytes([sound[number] ^ 1]) + sound[number + 1 :])

        async def check() -> None:
            async with house.store() as store:
                assert store.unopened == {}

        asyncio.run(check())
        assert path.read_bytes() == sound


def test_the_build_that_knew_no_formats_cannot_take_its_lock_any_more(tmp_path: Path) -> None:
    """It opens the lock before all else, with these flags, and ends with the error."""
    unpacked(archive("format-1-stopped"), tmp_path)
    house = House(tmp_path)

    async def check() -> None:
        async with house.store():
            pass

    asyncio.run(check())
    with pytest.raises(IsADirectoryError):
        os.open(house.data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def test_a_directory_in_use_by_the_earlier_version_is_left_alone(tmp_path: Path) -> None:
    unpacked(archive("format-1-stopped"), tmp_path)
    house = House(tmp_path)
    before = digests(house.data_dir)

    async def check() -> None:
        with pytest.raises(DataDirectoryBusy):
            async with house.store():
                pass

    with (house.data_dir / "lock").open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        asyncio.run(check())
    assert digests(house.data_dir) == before


def test_a_directory_that_was_not_upgraded_is_not_read_as_if_it_were_empty(tmp_path: Path) -> None:
    unpacked(archive("format-1-stopped"), tmp_path)
    for arguments in (("streams", "read", "ledger", "--data-dir"), ("verify",)):
        done = command(*arguments, tmp_path / "data")
        assert done.returncode == 1
        assert "start the service once, which brings it to the present one" in done.stderr


def test_a_segment_of_another_format_in_an_upgraded_directory_keeps_its_stream_closed(tmp_path: Path) -> None:
    unpacked(archive("format-1-stopped"), tmp_path)
    house = House(tmp_path)
    formats.save(house.files, house.data_dir, Format(formats.PRESENT))
    before = digests(house.directory("ledger"))

    async def check() -> None:
        async with house.store() as store:
            assert "ledger" in store.unopened
            assert "has the format of an earlier version" in store.unopened["ledger"].why

    asyncio.run(check())
    assert digests(house.directory("ledger")) == before
