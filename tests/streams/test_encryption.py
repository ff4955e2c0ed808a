"""Encrypted streams, as the store keeps them: what is on the disk, keys, damage, switching."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest

from bridge.encryption import Keys, is_used, new_master
from bridge.errors import CorruptData, EncryptionKeyError, KeyUnavailable, OtherFormat
from bridge.operations.manager import committed
from bridge.streams import formats, segment
from bridge.streams.drops import DropReason
from bridge.streams.formats import Format
from bridge.streams.layout import Files
from bridge.streams.meta import StorageSettings
from bridge.streams.reader import StreamReader
from bridge.streams.segment import FRAME, HEADER
from bridge.streams.store import StreamStore
from bridge.streams.stream import Stream
from bridge.streams.verify import repair, verify

from .conftest import House, check, payloads, put, run

MARKER = b"a-secret-that-nobody-may-read"


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path, encrypted=True)


def files(house: House) -> Iterator[tuple[Path, bytes]]:
    for path in house.data_dir.rglob("*"):
        if path.is_file():
            yield path, path.read_bytes()


def pairs(data_dir: Path) -> Iterator[tuple[tuple[bytes, bytes], bytes]]:
    """Each (what decides over the key, nonce) with what was sealed with it, of all frames in a directory."""
    for path in data_dir.rglob("*.seg*"):
        data = path.read_bytes()
        header = segment.decode_header(data)
        pos = HEADER.size
        while (frame := segment.frame_at(data, pos)) is not None and frame.end <= len(data):
            body = data[frame.start + FRAME.size : frame.end]
            if frame.columns & segment.SEALED:
                opening, counter = body[:8], body[8:16]
                yield (opening + repr((path.parent.name, header)).encode(), counter), body
            pos = frame.end


def test_nothing_of_a_message_is_on_the_disk(house: House) -> None:
    async def work() -> None:
        async with house.stream(segment_size=4096, dedup_window=60_000, flush=True) as stream:
            for n in range(50):
                stream.append(MARKER + b"/%d" % n, MARKER, MARKER, MARKER + b"%d" % n)
                await put(stream, MARKER * 20, topic=MARKER)
            assert len(stream.log.sizes) > 5
        async with house.stream() as stream:
            assert len(payloads(stream)) == 100
            assert stream.find(MARKER + b"7") == 14

    run(work())
    assert not [path for path, data in files(house) if MARKER in data]


def test_what_is_stored_comes_back_over_restarts(house: House) -> None:
    async def work() -> None:
        expected = []
        for n in range(4):
            async with house.stream(segment_size=2000) as stream:
                expected += [b"%d-%d-" % (n, i) + bytes(i) for i in range(30)]
                await put(stream, *expected[-30:])
                assert payloads(stream) == expected
                check(stream)
                assert payloads(stream) == expected

    run(work())
    assert house.events == []


def test_a_key_is_on_the_disk_with_its_name_before_anything_is_sealed_with_it(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: set[str] = set()  # what the directory had when it was synced
    fsync = os.fsync

    def noted(fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        fsync(fd)
        if path == house.data_dir / "keys":
            named.update(one.name for one in path.iterdir())

    monkeypatch.setattr(os, "fsync", noted)
    keys = house.keys()
    assert f"{keys.own():016x}.key" in named


def test_no_key_and_nonce_come_twice_after_truncated_restored_and_doubled_directories(
    house: House, tmp_path: Path
) -> None:
    seen: dict[tuple[bytes, bytes], bytes] = {}
    openings = set()

    def note(data_dir: Path) -> None:
        for pair, body in pairs(data_dir):
            assert seen.setdefault(pair, body) == body, "a key was used twice with a nonce"
            openings.add(body[:8])

    async def write(place: House, text: bytes) -> None:
        async with place.stream(flush=True) as stream:
            for n in range(5):
                await put(stream, text + b"%d" % n)

    run(write(house, b"first"))
    note(house.data_dir)
    backup = tmp_path / "backup"
    shutil.copytree(house.data_dir, backup, symlinks=True)
    run(write(house, b"second"))
    note(house.data_dir)
    newest = max(house.directory().glob("*.seg"))
    with newest.open("r+b") as file:  # a torn tail: the last two messages are written again, as others
        file.truncate(newest.stat().st_size - 70)
    newest.with_suffix(".idx").unlink(missing_ok=True)
    run(write(house, b"third"))
    note(house.data_dir)
    doubled = House(tmp_path / "twin", encrypted=True, key_file=house.key_file)
    shutil.copytree(house.data_dir, doubled.data_dir, symlinks=True)
    run(write(house, b"here"))
    run(write(doubled, b"there"))
    note(house.data_dir)
    note(doubled.data_dir)
    shutil.rmtree(house.data_dir)
    shutil.copytree(backup, house.data_dir, symlinks=True)
    run(write(house, b"again"))
    note(house.data_dir)
    assert len(openings) == 6
    assert len(seen) == 30


def test_after_a_failed_sync_no_nonce_is_used_for_other_messages(house: House) -> None:
    class Failing(Files):
        fails = False

        def sync(self, fd: int) -> None:
            if self.fails:
                self.fails = False
                raise OSError(5, "injected")
            super().sync(fd)

    house.files = failing = Failing()

    async def work() -> None:
        seen: dict[tuple[bytes, bytes], bytes] = {}
        async with house.stream(flush=True) as stream:
            for n in range(6):
                failing.fails = n % 2 == 1
                await put(stream, b"%d" % n)
                for pair, body in pairs(house.data_dir):
                    assert seen.setdefault(pair, body) == body
            assert payloads(stream) == [b"%d" % n for n in range(6)]
        async with house.stream(flush=False) as stream:
            assert len(payloads(stream)) == 6

    run(work())


@pytest.mark.parametrize("what", ["missing", "another", "empty", "not configured"])
def test_without_the_key_nothing_starts_and_nothing_changes(house: House, what: str) -> None:
    async def write() -> None:
        async with house.stream() as stream:
            await put(stream, b"one", b"two")

    run(write())
    before = dict(files(house))
    good = house.key_file.read_text()
    if what == "missing":
        house.key_file.unlink()
    elif what == "another":
        house.key_file.write_text(new_master())
    elif what == "empty":
        house.key_file.write_text("# nothing\n")
    keys = Keys(house.data_dir, None if what == "not configured" else house.key_file)

    def start() -> None:
        StreamStore(house.data_dir, house.memory_dir, on_event=lambda *_: None, keys=keys)

    async def refused() -> None:
        with pytest.raises(EncryptionKeyError, match=r"another key|restore it|no key is configured") as error:
            start()
        assert "Nothing was changed" in str(error.value)

    run(refused())
    assert dict(files(house)) == before
    house.key_file.write_text(good)

    async def read() -> None:
        async with house.stream() as stream:
            assert payloads(stream) == [b"one", b"two"]

    run(read())


def test_a_key_file_survives_damage_of_either_copy_and_without_both_only_its_streams_stay_closed(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    async def write(name: str, **settings: bool) -> None:
        async with house.stream(name, **settings) as stream:
            await put(stream, b"one")

    run(write("s"))
    (path,) = (house.data_dir / "keys").glob("*.key")
    good = path.read_bytes()
    for start in (0, 4096):
        bad = bytearray(good)
        bad[start + 30] ^= 1
        path.write_bytes(bad)

        (damaged,) = verify(house.data_dir)[1:]  # without the key, and without a change
        assert [problem.path for problem in damaged.problems] == [str(path)]
        assert damaged.problems[0].what == "one of its two copies is damaged"
        assert path.read_bytes() == bad

        async def read() -> None:
            async with house.stream() as stream:
                assert payloads(stream) == [b"one"]

        caplog.clear()
        run(read())
        assert f"{path}: one of its two copies was damaged; written again" in caplog.text
        assert path.read_bytes() == good
        assert len(verify(house.data_dir, keys=house.keys())) == 1
    run(write("other", encryption=False))
    bad[30] ^= 1
    path.write_bytes(bad)
    (damaged,) = verify(house.data_dir)[2:]
    assert [problem.what for problem in damaged.problems] == [
        "both its copies are damaged; restore it from a backup"
    ]

    async def both() -> None:
        async with house.store() as store:
            assert list(store.streams) == ["other"]
            assert "is damaged" in store.unopened["s"].why
            assert "restore it from a backup" in store.unopened["s"].why
            assert store.openings() is None  # so no key is deleted
            assert payloads(store.streams["other"]) == [b"one"]

    run(both())
    path.write_bytes(good)
    run(read())


def test_repair_writes_a_damaged_copy_of_a_key_again_and_reports_it(house: House) -> None:
    async def write() -> None:
        async with house.stream() as stream:
            await put(stream, b"one")

    run(write())
    (path,) = (house.data_dir / "keys").glob("*.key")
    good = path.read_bytes()
    path.write_bytes(good[:4096])
    stream, damaged = repair(house.data_dir, lambda name: b"{}", keys=house.keys())
    assert (stream.name, stream.problems) == ("s", [])
    assert [problem.path for problem in damaged.problems] == [str(path)]
    assert path.read_bytes() == good
    assert [found.name for found in repair(house.data_dir, lambda name: b"{}", keys=house.keys())] == ["s"]


def test_damage_and_a_wrong_key_are_told_apart(house: House) -> None:
    async def write() -> None:
        async with house.stream() as stream:
            await put(stream, b"one")
            await put(stream, b"two")
            await put(stream, b"three")

    run(write())
    (found,) = verify(house.data_dir, keys=house.keys())
    assert (found.problems, found.frames, found.encrypted, found.unopened) == ([], 3, 1, 0)
    (found,) = verify(house.data_dir)  # without the key
    assert (found.problems, found.frames, found.encrypted, found.unopened) == ([], 3, 1, 3)
    other = house.key_file.with_name("other")
    other.write_text(new_master())
    with pytest.raises(EncryptionKeyError, match="another key than the one that"):
        verify(house.data_dir, keys=Keys(house.data_dir, other))
    (path,) = house.directory().glob("*.seg")
    data = bytearray(path.read_bytes())
    second = next(segment.scan(bytes(data), HEADER.size, salt := segment.decode_header(data)[2])).end
    data[second + FRAME.size + 20] ^= 1
    path.write_bytes(data)
    for keys in (None, house.keys()):
        (found,) = verify(house.data_dir, keys=keys)
        assert [problem.lost for problem in found.problems] == [[(1, 1)]]
    # Somebody who can write to the disk makes the checksum fit: only the key shows it.
    frame = segment.frame_at(bytes(data), second)
    assert frame is not None
    check_ = segment.crc32(bytes(data[frame.start + 8 : frame.end]), salt)
    data[frame.start + 4 : frame.start + 8] = check_.to_bytes(4, "little")
    path.write_bytes(data)
    (found,) = verify(house.data_dir)
    assert (found.problems, found.unopened) == ([], 3)
    (found,) = verify(house.data_dir, keys=house.keys())
    assert [problem.lost for problem in found.problems] == [[(1, 1)]]
    with pytest.raises(EncryptionKeyError, match="no key is configured"):
        repair(house.data_dir, lambda name: b"{}")
    (found,) = repair(house.data_dir, lambda name: b"{}", keys=house.keys())
    assert found.lost == [(1, 1)]

    async def read() -> None:
        async with house.stream() as stream:
            assert payloads(stream) == [b"one", b"three"]

    run(read())


def test_a_flipped_bit_anywhere_never_gives_a_wrong_message_and_loses_only_its_frame(house: House) -> None:
    async def write() -> None:
        async with house.stream() as stream:
            for n in range(3):
                await put(stream, b"%d" % n * 10)
            stream.log.replace_active()

    run(write())
    path = min(house.directory().glob("*.seg"))
    good = path.read_bytes()

    async def read(bit: int) -> None:
        async with house.stream() as stream:
            check(stream)
            found = payloads(stream)
        assert set(found) <= {b"%d" % n * 10 for n in range(3)}, bit
        assert len(found) >= 2, bit

    for bit in range(0, len(good) * 8, 37):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        path.with_suffix(".idx").unlink(missing_ok=True)
        (house.directory() / "drops.log").write_bytes(bytes(4096))
        run(read(bit))


@pytest.mark.parametrize("what", ["to another stream", "to another epoch", "to another segment"])
def test_a_frame_that_is_moved_is_not_accepted(house: House, what: str) -> None:
    async def write() -> None:
        async with house.store() as store:
            for name in ("s", "other"):
                stream = store.create(name, StorageSettings(encryption=True), b"{}")
                await put(stream, name.encode())
                stream.log.replace_active()
                await put(stream, name.encode())

    run(write())
    source, second = sorted(house.directory("s").glob("*.seg"))
    header = segment.decode_header(source.read_bytes())
    assert header is not None
    frame = source.read_bytes()[HEADER.size :]
    opening = segment.opening_in(source.read_bytes())
    directory, base, epoch = house.directory("s"), 0, header[1]
    if what == "to another stream":
        directory = house.directory("other")
    elif what == "to another epoch":
        epoch += 1
    else:
        source = second
        base = 1
        changed = bytearray(frame)
        changed[segment.FRAME.size - 24 : segment.FRAME.size - 16] = (1).to_bytes(8, "little")
        frame = bytes(changed)
    salt = (
        header[2]
        if directory == house.directory("s")
        else segment.decode_header((directory / source.name).read_bytes())[2]
    )
    frame = frame[:4] + segment.crc32(frame[8:], salt).to_bytes(4, "little") + frame[8:]
    head = segment.encode_header(base, epoch, 0, salt, opening)
    (directory / source.name).write_bytes(head + frame)
    with closing(StreamReader(directory, keys=house.keys())) as reader, pytest.raises(CorruptData):
        reader.read(base, end=base + 1, max_messages=1, max_bytes=100)


def test_switching_begins_a_new_segment_and_old_ones_stay_readable_until_they_are_dropped(
    house: House,
) -> None:
    async def work() -> None:
        async with house.stream(encryption=False, segment_size=1024) as stream:
            for n in range(40):
                await put(stream, b"plain %2d" % n * 8)
            status = stream.encryption()
            assert (status.state, status.encrypted_segments, status.text) == ("DISABLED", 0, "off")
            older = status.unencrypted_segments
            assert older > 1
            _encrypt(stream, wanted=True)
            assert stream.encryption().state == "ENABLED"
            await put(stream, MARKER)
            assert stream.encryption().text == f"on, {older} older segments are not encrypted"
        async with house.stream() as stream:
            assert stream.encryption().text == f"on, {older} older segments are not encrypted"
            assert len(payloads(stream)) == 41
            stream.drop_upto(40, DropReason.PURGED)
            assert stream.encryption().text == "on"
            _encrypt(stream, wanted=False)
            await put(stream, b"plain again")
            assert stream.encryption().text == "off, 1 older segment is encrypted"
            assert payloads(stream) == [MARKER, b"plain again"]

    run(work())
    assert not [path for path, data in files(house) if MARKER in data]


def test_while_a_group_is_written_a_stream_is_enabling(house: House) -> None:
    async def work() -> None:
        async with house.stream(encryption=False, flush=True) as stream:
            stream.append(b"t", b"one")
            committing = asyncio.ensure_future(committed(stream))
            while not stream.busy:
                await asyncio.sleep(0)
            _encrypt(stream, wanted=True)
            assert stream.encryption().state == "ENABLING"
            await committing
            await put(stream, MARKER)
            assert stream.encryption().text == "on, 1 older segment is not encrypted"
            stream.append(b"t", b"two")
            committing = asyncio.ensure_future(committed(stream))
            while not stream.busy:
                await asyncio.sleep(0)
            _encrypt(stream, wanted=False)
            assert stream.encryption().state == "DISABLING"
            await committing

    run(work())


def test_an_encrypted_stream_needs_a_key(house: House) -> None:
    house.encrypted = False

    async def work() -> None:
        async with house.store() as store:
            with pytest.raises(KeyUnavailable, match="set key_file in \\[encryption\\]"):
                store.create("s", StorageSettings(encryption=True), b"{}")
            assert not house.directory().exists()

    run(work())
    assert not is_used(house.data_dir)


def test_an_attempt_to_encrypt_without_a_readable_key_leaves_the_format_as_it_is(house: House) -> None:
    key = house.key_file.read_text()

    async def work() -> None:
        async with house.stream("plain", encryption=False) as stream:
            await put(stream, b"one")
        async with house.store() as store:
            house.key_file.unlink()
            with pytest.raises(KeyUnavailable, match="cannot be read"):
                store.create("s", StorageSettings(encryption=True), b"{}")
            assert formats.find(house.data_dir) == Format(2)
            house.key_file.write_text(key)
            store.create("s", StorageSettings(encryption=True), b"{}")
            assert formats.find(house.data_dir) == Format(3)

    run(work())


def test_the_directory_has_format_3_before_anything_is_encrypted_and_format_2_until_then(
    house: House,
) -> None:
    numbers = []

    class Watching(Files):
        def open(self, path: Path, flags: int) -> int:
            if path.suffix == ".seg" and flags & os.O_CREAT:
                numbers.append(formats.find(house.data_dir))
            return super().open(path, flags)

    house.files = Watching()

    async def work() -> None:
        async with house.stream("plain", encryption=False) as stream:
            await put(stream, b"one")
        assert formats.find(house.data_dir) == Format(2)
        numbers.clear()
        async with house.stream() as stream:
            await put(stream, b"one")

    run(work())
    assert set(numbers) == {Format(3)}

    async def again() -> None:
        async with house.stream() as stream:
            assert payloads(stream) == [b"one"]

    run(again())
    assert formats.find(house.data_dir) == Format(3)
    text = (house.data_dir / "format").read_text().replace("format 3", "format 4").rpartition(" ")[0]
    (house.data_dir / "format").write_text(f"{text} {segment.crc32(text.encode()):08x}\n")
    with pytest.raises(OtherFormat, match="newer streambridge"):
        formats.find(house.data_dir)


def test_keys_that_nothing_needs_are_deleted_and_all_others_stay(house: House) -> None:
    async def work() -> None:
        for n in range(3):
            async with house.stream() as stream:
                await put(stream, b"%d" % n)
        assert len(list((house.data_dir / "keys").glob("*.key"))) == 3
        async with house.store() as store:
            assert store.keys.collect(store.openings, store.settle) == 0
            stream = store.streams["s"]
            stream.drop_upto(2, DropReason.PURGED)
            assert store.keys.collect(lambda: None, store.settle) == 0
            await deleted(stream)
            assert store.keys.collect(store.openings, store.settle) == 2
            assert payloads(stream) == [b"2"]
            await put(stream, b"3")
            assert len(list((house.data_dir / "keys").glob("*.key"))) == 2
            # Another process seals with its key, and has stored nothing yet.
            other = house.keys()
            other.own()
            assert store.keys.collect(store.openings, store.settle) == 0
        async with house.stream() as stream:
            assert payloads(stream) == [b"2", b"3"]

    run(work())


async def deleted(stream: Stream) -> None:
    """Wait until what was dropped is deleted."""
    async with asyncio.timeout(60):
        while stream.obsolete.any():
            await asyncio.sleep(0.005)


def test_a_key_stays_until_what_is_sealed_with_it_is_deleted(house: House, tmp_path: Path) -> None:
    """A service is killed after its start has dropped old segments, and before it has deleted them."""
    killed = threading.Event()

    class Late(Files):
        def unlink(self, path: Path) -> None:
            if path.suffix == ".seg":
                killed.wait(60)
            super().unlink(path)

    async def work() -> None:
        for n in range(3):
            async with house.stream() as stream:
                await put(stream, b"%d" % n)
        house.files = Late()
        async with house.store() as store:
            store.streams["s"].drop_upto(2, DropReason.PURGED)
            assert store.keys.collect(store.openings, store.settle) == 0
            shutil.copytree(house.data_dir, tmp_path / "killed" / "data", symlinks=True)
            killed.set()
        found = House(tmp_path / "killed", encrypted=True, key_file=house.key_file)
        async with found.stream() as stream:
            assert payloads(stream) == [b"2"]
            await deleted(stream)
        async with found.store() as store:
            assert store.keys.collect(store.openings, store.settle) == 2

    run(work())


def test_a_key_is_deleted_only_once_it_is_certain_that_its_segments_are_gone(house: House) -> None:
    """The names of deleted segments may come back with a power cut, until their directory is synced."""
    calls: list[str] = []

    class Noting(Files):
        def unlink(self, path: Path) -> None:
            super().unlink(path)
            if path.suffix == ".seg":
                calls.append("unlink")

        def sync_directory(self, path: Path) -> None:
            super().sync_directory(path)
            if path.name == "s":
                calls.append("sync")

        def sync(self, fd: int) -> None:
            super().sync(fd)
            calls.append(f"sync {Path(f'/proc/self/fd/{fd}').readlink().suffix}")

    async def work() -> None:
        for n in range(2):
            async with house.stream() as stream:
                await put(stream, b"%d" % n)
        house.files = Noting()
        async with house.store() as store:
            store.streams["s"].drop_upto(1, DropReason.PURGED)
            await deleted(store.streams["s"])
            assert "unlink" in calls
            calls.clear()
            assert store.keys.collect(store.openings, store.settle) == 1
            assert calls == ["sync .seg", "sync"]  # a killed process may have left all in the page cache

    run(work())


def test_a_sync_that_fails_before_keys_are_deleted_is_not_forgotten(house: House) -> None:
    """The kernel reports a failed sync once; what was to be synced is written elsewhere."""

    class Once(Files):
        fail = False

        def sync(self, fd: int) -> None:
            if self.fail and Path(f"/proc/self/fd/{fd}").readlink().suffix == ".seg":
                self.fail = False
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().sync(fd)

    async def work() -> None:
        for n in range(2):
            async with house.stream() as stream:
                await put(stream, b"%d" % n)
        house.files = disk = Once()
        async with house.store() as store:
            stream = store.streams["s"]
            stream.drop_upto(1, DropReason.PURGED)
            await deleted(stream)
            disk.fail = True
            with pytest.raises(OSError, match="Input/output error"):
                store.keys.collect(store.openings, store.settle)
            await store.committer.sync([stream])
            assert "what was not on the disk was written to a new file" in house.events[-1]
            assert store.keys.collect(store.openings, store.settle) == 1

    run(work())


def test_the_key_of_a_file_that_was_cut_stays_until_the_disk_has_it_cut(house: House, tmp_path: Path) -> None:
    """A full disk: files are cut before they are deleted, and a process is killed in between."""
    synced: list[str] = []

    class Noting(Files):
        def unlink(self, path: Path) -> None:
            if path.suffix == ".seg":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().unlink(path)

        def sync(self, fd: int) -> None:
            super().sync(fd)
            synced.append(Path(f"/proc/self/fd/{fd}").readlink().name)

    async def work() -> None:
        for n in range(2):
            async with house.stream() as stream:
                await put(stream, b"%d" % n)
        cut = f"{0:020d}.seg"
        house.files = Noting()
        async with house.store() as store:
            stream = store.streams["s"]
            stream.drop_upto(1, DropReason.PURGED)
            with pytest.raises(OSError, match="Input/output error"):
                stream.obsolete.delete_now(stream.oldest)
            assert (house.directory() / cut).stat().st_size == 0
            shutil.copytree(house.data_dir, tmp_path / "killed" / "data", symlinks=True)
        found = House(tmp_path / "killed", encrypted=True, key_file=house.key_file)
        found.files = Noting()
        async with found.store() as store:
            synced.clear()
            store.keys.collect(store.openings, store.settle)
            assert cut in synced

    run(work())


def test_damaged_files_in_the_quarantine_keep_their_key(house: House) -> None:
    async def work() -> None:
        async with house.stream() as stream:
            await put(stream, b"one")
        (path,) = house.directory().glob("*.seg")
        bad = bytearray(path.read_bytes())
        bad[-1] ^= 1
        path.write_bytes(bad)
        async with house.store() as store:
            stream = store.streams["s"]
            assert payloads(stream) == []
            stream.drop_upto(1, DropReason.PURGED)
            assert store.keys.collect(store.openings, store.settle) == 0

    run(work())


@pytest.mark.parametrize(
    ("number", "flipped", "cuts"),
    [(3, None, 1), (1, None, 2), (1, 0, 2), (1, 4096, 2)],
    ids=["three keys", "twice", "twice, first copy damaged", "twice, second copy damaged"],
)
def test_whenever_a_rotation_is_cut_off_everything_can_be_read_and_the_next_one_completes_it(
    house: House, tmp_path: Path, number: int, flipped: int | None, cuts: int
) -> None:
    async def write(text: bytes) -> None:
        async with house.stream() as stream:
            await put(stream, text)

    def read() -> list[bytes]:
        with closing(StreamReader(house.directory(), keys=house.keys())) as reader:
            return [row.payload for row in reader.read(0, end=number, max_messages=9, max_bytes=999)]

    messages = [b"%d" % n for n in range(number)]
    for text in messages:
        run(write(text))
    keys, before, key = house.data_dir / "keys", tmp_path / "before", house.key_file.read_text()
    if flipped is not None:
        (path,) = keys.glob("*.key")
        bad = bytearray(path.read_bytes())
        bad[flipped + 30] ^= 1
        path.write_bytes(bad)
    shutil.copytree(keys, before)
    writes = 2 + 2 * number  # the key file twice, and both copies of each key
    with rotations(house) as rotate:
        for cut_at in itertools.product(range(writes + 1), repeat=cuts):
            shutil.rmtree(keys)
            shutil.copytree(before, keys)
            house.key_file.write_text(key)
            assert rotate(cut_at[0]) is (cut_at[0] == writes)
            assert read() == messages, cut_at
            for again in cut_at[1:]:
                rotate(again)
                assert read() == messages, cut_at
            house.keys().rotate()
            assert read() == messages, cut_at
            assert len(house.key_file.read_text().split()) == 1
            assert house.key_file.read_text() != key
    house.key_file.write_text(key)
    with pytest.raises(EncryptionKeyError, match="another key"):
        house.keys().check()


def test_a_new_key_is_in_the_same_file_with_the_same_mode_and_owner(house: House, tmp_path: Path) -> None:
    """The configuration names a link, the real file is on another disk, and a group may read it."""
    disk, etc = tmp_path / "usb", tmp_path / "etc"
    disk.mkdir()
    etc.mkdir()
    real, house.key_file = disk / "real.key", etc / "encryption.key"
    real.write_text(new_master())
    real.chmod(0o640)
    house.key_file.symlink_to(real)
    before, owner = real.read_text(), (real.stat().st_uid, real.stat().st_gid)
    house.keys().own()
    umask = os.umask(0o077)
    try:
        assert house.keys().rotate() == (1, True)
    finally:
        os.umask(umask)
    assert house.key_file.is_symlink()
    assert house.key_file.readlink() == real
    assert list(etc.iterdir()) == [house.key_file]
    assert list(disk.iterdir()) == [real]
    assert real.read_text() != before
    assert real.stat().st_mode & 0o777 == 0o640
    assert (real.stat().st_uid, real.stat().st_gid) == owner
    assert house.keys().check() == []


def test_a_rotation_that_cannot_write_the_key_file_leaves_no_other_file_with_keys(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.keys().own()
    before, write = house.key_file.read_text(), os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        if len(data) < 4096:  # not a key file of the data directory
            write(fd, data[:70], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        house.keys().rotate()
    assert house.key_file.read_text() == before
    assert [path for path in house.key_file.parent.iterdir() if path.is_file()] == [house.key_file]
    assert house.keys().check() == []


def test_a_new_key_is_never_put_into_a_credential_of_systemd(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd makes the credential again from its source, so the new key would be lost at the next start."""
    directory = tmp_path / "credentials"
    directory.mkdir()
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(directory))
    source = house.key_file
    old = source.read_text()
    house.key_file = directory / "encryption-key"
    house.key_file.write_text(old)
    house.keys().own()
    with pytest.raises(EncryptionKeyError, match="create one with a new key before the old one"):
        house.keys().rotate()
    assert house.key_file.read_text() == old
    both = new_master() + old
    for path in (house.key_file, source):
        path.write_text(both)
    assert house.keys().rotate() == (1, False)
    assert house.key_file.read_text() == both
    house.key_file.write_text(new := both.splitlines()[0])
    assert house.keys().check() == [], "all keys are encrypted with the new one"
    assert Keys(house.data_dir, source).rotate() == (1, True)
    assert source.read_text().strip() == new


@contextmanager
def rotations(house: House) -> Iterator[Callable[[int], bool]]:
    """A function that rotates the key, killed at its n-th write; it returns whether the end came first."""
    command = [sys.executable, "-c", KILLED, str(house.data_dir), str(house.key_file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def rotate(number: int) -> bool:
            stdin.write(f"{number}\n")
            stdin.flush()
            status = int(stdout.readline())
            assert status in (0, -signal.SIGKILL)
            return not status

        yield rotate


# Rotations that are killed at the write whose number is on stdin. A part of that write reaches the file.
KILLED = """
import os, signal, sys
from pathlib import Path
from bridge.encryption import Keys
write = os.pwrite
def pwrite(fd, data, offset):
    global left
    if not left:
        write(fd, data[:len(data) // 60], offset)
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return write(fd, data, offset)
for line in sys.stdin:
    left = int(line)
    child = os.fork()
    if not child:
        os.pwrite = pwrite
        Keys(Path(sys.argv[1]), Path(sys.argv[2])).rotate()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def _encrypt(stream: Stream, *, wanted: bool) -> None:
    stream.configure(msgspec.structs.replace(stream.settings, encryption=wanted), b"{}")


def test_what_is_stored_is_kept_when_encryption_is_switched_on_and_off_again_on_a_full_disk(
    tmp_path: Path,
) -> None:
    class NoSegments(Files):
        full = False

        def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
            if self.full and Path(f"/proc/self/fd/{fd}").readlink().suffix == ".seg":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().write(fd, parts, offset)

    house = House(tmp_path, encrypted=True)
    house.files = disk = NoSegments()

    async def work() -> None:
        async with house.stream(encryption=False) as stream:
            disk.full = True
            stream.configure(StorageSettings(encryption=True), b"{}")
            disk.full = False
            stream.configure(StorageSettings(), b"{}")
            assert await put(stream, b"a") == [0]
            assert payloads(stream) == [b"a"]
        async with house.stream() as stream:
            assert payloads(stream) == [b"a"]

    run(work())
