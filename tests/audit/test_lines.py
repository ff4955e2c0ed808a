"""The audit log by itself: what is in the files, whatever happens to them."""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import socket
import stat
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bridge import audit
from bridge.audit import Origin, record
from bridge.audit.repeats import Bounds
from bridge.audit.settings import AuditSettings
from bridge.audit.sinks import FileSink
from bridge.audit.writer import Outlet
from bridge.errors import ConfigError

HERE = Origin("mqtt", "192.0.2.1")


@contextlib.contextmanager
def audited(bounds: Bounds | None = None, **settings: Any) -> Iterator[None]:
    """An audit log in this process."""
    audit.begin(AuditSettings(**settings), bounds)
    try:
        yield
    finally:
        audit.end()


def lines(*paths: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_line_says_who_did_what_and_is_only_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with audited(file=path):
        record("login", origin=HERE, user="ann", client="pump-7", why="password")
        record("updateMessageStream", on="s", before={"tags": {}}, after={"tags": {"a": "b"}})
        until(lambda: len(lines(path)) == 2)
    login, update = lines(path)
    assert login.pop("time").endswith("Z")
    assert login == {
        "seq": 1,
        "event": "login",
        "outcome": "ok",
        "front_end": "mqtt",
        "address": "192.0.2.1",
        "user": "ann",
        "client": "pump-7",
        "why": "password",
    }
    assert (update["seq"], update["before"], update["after"]) == (2, {"tags": {}}, {"tags": {"a": "b"}})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_hostile_names_make_neither_lines_nor_long_ones(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with audited(file=path):
        record("login", "refused", origin=HERE, user='x"}\n{"event": "login"', proven=False)
        record("login", "refused", origin=HERE, user="\ud800\u202e\x1b[2J", proven=False)
        record("login", "refused", origin=HERE, user="y" * 100_000, proven=False)
        record(
            "createMessageStream", after={"tags": "z" * 1_000_000, "url": "https://ann:secret@example.com/"}
        )
    text = path.read_bytes().decode()
    assert len(lines(path)) == 4
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "secret" not in text
    assert len(text) < 3_000


def test_no_line_is_lost_when_files_are_rotated_and_only_so_many_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with audited(Bounds(alike=1_000_000), file=path, max_size=4096, files=5):
        for number in range(60):
            record("login", client=f"c{number}", why="x" * 100)
    files = [tmp_path / f"audit.jsonl.{number}" for number in (4, 3, 2, 1)] + [path]
    found = lines(*files)
    assert [line["client"] for line in found] == [f"c{number}" for number in range(60)]
    there = [file.stat() for file in files if file.exists()]
    assert len(there) == 4
    assert all(found.st_size <= 4096 and stat.S_IMODE(found.st_mode) == 0o600 for found in there)
    with audited(Bounds(alike=1_000_000), file=path, max_size=4096, files=2):
        for number in range(200):
            record("login", client=f"d{number}", why="x" * 100)
    assert lines(tmp_path / "audit.jsonl.1", path)[-1]["client"] == "d199"


def test_what_repeats_is_counted_and_summed_up_and_hides_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with audited(Bounds(alike=3), file=path):
        for number in range(1000):
            record("login", "refused", origin=HERE, user=f"u{number}", proven=False, why="wrong password")
        record("login", "refused", origin=Origin("mqtt", "192.0.2.2"), user="u", proven=False)
        record("login", origin=HERE, user="ann")
        for number in range(10):
            record("purgeMessageStream", origin=HERE, user="ann", on=f"s{number}")
    found = lines(path)
    refused = [line for line in found if line["outcome"] == "refused"]
    assert [line.get("repeated") for line in refused] == [None, None, None, None, 997]
    assert refused[-1]["address"] == "192.0.2.1"
    assert "user" not in refused[-1], "the names that one client makes up say nothing"
    assert [line["user"] for line in found if line["event"] == "login" and line["outcome"] == "ok"] == ["ann"]
    purges = [line for line in found if line["event"] == "purgeMessageStream"]
    assert [line["on"] for line in purges] == ["s0", "s1", "s2", [f"s{number}" for number in range(3, 10)]]
    assert (purges[-1]["user"], purges[-1]["repeated"]) == ("ann", 7)


def test_many_addresses_get_no_more_lines_than_the_bound_of_their_kind(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with audited(Bounds(unproven=50), file=path):
        for number in range(5000):
            origin = Origin("mqtt", f"2001:db8:{number:x}::1")
            record("login", "refused", origin=origin, user="root", proven=False)
            if number % 1000 == 0:
                record("login", origin=origin, user="ann")
    found = lines(path)
    assert sum(line["outcome"] == "refused" for line in found) == 51
    assert found[-1]["repeated"] == 4950
    assert "address" not in found[-1]
    assert sum(line["outcome"] == "ok" for line in found) == 5


def test_summaries_come_at_the_end_of_each_window(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with audited(Bounds(window=0.2, alike=1), file=path):
        for _ in range(5):
            record("login", origin=HERE, user="ann")
        until(lambda: len(lines(path)) == 2)
        record("login", origin=HERE, user="ann")
        until(lambda: len(lines(path)) == 3)
    first, summary, next_one = lines(path)
    assert (summary["repeated"], summary["user"]) == (4, "ann")
    assert summary["since"] >= first["time"]
    assert "repeated" not in next_one


def test_long_names_that_wait_for_the_disk_take_little_memory(tmp_path: Path) -> None:
    path, write, gate = tmp_path / "audit.jsonl", os.write, threading.Event()

    def late(fd: int, data: Any) -> int:
        gate.wait(60)
        return write(fd, data)

    with pytest.MonkeyPatch.context() as patch, audited(Bounds(alike=10_000, unproven=10_000), file=path):
        patch.setattr(os, "write", late)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for number in range(500):
                long = f"{number}" + "x" * 60_000
                record(
                    "login", "refused", origin=HERE, user=long, client=long, proven=False, on=long, why=long
                )
            assert tracemalloc.get_traced_memory()[0] - before < 500 * 4 * 60_000 / 20
        finally:
            tracemalloc.stop()
            gate.set()
    assert {len(line["user"]) for line in lines(path)} == {500}


def test_lines_wait_while_the_disk_is_full_and_are_whole_afterwards(tmp_path: Path) -> None:
    path, write, full = tmp_path / "audit.jsonl", os.write, True

    def refuse(fd: int, data: Any) -> int:
        if full and os.readlink(f"/proc/self/fd/{fd}") == str(path):  # noqa: PTH115 - called all the time
            if len(data) > 50:
                return write(fd, bytes(data)[:50])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    with pytest.MonkeyPatch.context() as patch, audited(file=path):
        patch.setattr(os, "write", refuse)
        for number in range(5):
            record("login", client=f"c{number}")
        time.sleep(0)
        full = False
        until(lambda: len(lines(path)) == 5)
    assert [line["client"] for line in lines(path)] == [f"c{number}" for number in range(5)]


def test_a_file_that_was_moved_away_or_torn_goes_on_with_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text('{"event": "tor')
    path.chmod(0o600)
    with audited(file=path):
        record("start")
        until(lambda: path.read_text().count("}\n") == 2)
        path.rename(tmp_path / "taken")
        record("stop")
        until(path.exists)
    assert [line["event"] for line in lines(tmp_path / "taken")] == ["lost", "start"], "no half line"
    assert [line["event"] for line in lines(path)] == ["stop"]


@pytest.mark.parametrize("broken", ["full", "hangs"])
def test_a_file_that_cannot_be_written_keeps_no_line_from_the_journal(tmp_path: Path, broken: str) -> None:
    path, address, write, gate = tmp_path / "audit.jsonl", tmp_path / "socket", os.write, threading.Event()

    def refuse(fd: int, data: Any) -> int:
        if not gate.is_set() and os.readlink(f"/proc/self/fd/{fd}") == str(path):  # noqa: PTH115
            if broken == "hangs":
                gate.wait(60)
            else:
                raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    with pytest.MonkeyPatch.context() as patch, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(address))
        receiver.settimeout(60)
        patch.setattr(os, "write", refuse)
        with audited(Bounds(alike=1000), file=path, journald=True, journald_socket=address):
            for number in range(180):
                record("createMessageStream", on=f"s{number}")
            got = [_fields(receiver.recv(1 << 20))["STREAMBRIDGE_ON"] for _ in range(180)]
            assert got == [f"s{number}" for number in range(180)]
            if broken == "full":
                until(lambda: audit.troubles() == {f"file:{path}": "[Errno 28] No space left on device"})
            gate.set()
            until(lambda: len(lines(path)) == 180 and not audit.troubles())


def test_numbers_go_on_over_starts_and_files_and_what_found_no_room_is_counted(tmp_path: Path) -> None:
    path, write, gate = tmp_path / "audit.jsonl", os.write, threading.Event()
    for _ in range(2):
        with audited(Bounds(alike=1000), file=path, max_size=4096, files=9):
            for number in range(50):
                record("login", client=f"c{number}", why="x" * 100)
    path.rename(tmp_path / "audit.jsonl.0")

    def late(fd: int, data: Any) -> int:
        gate.wait(60)
        return write(fd, data)

    with pytest.MonkeyPatch.context() as patch, audited(Bounds(alike=100_000), file=path):
        patch.setattr(os, "write", late)
        for number in range(30_000):
            record("login", client=f"d{number}")
        gate.set()
        until(lambda: path.stat().st_size)
        record("stop")
    files = [tmp_path / f"audit.jsonl.{number}" for number in (9, 8, 7, 6, 5, 4, 3, 2, 1, 0)]
    assert [line["seq"] for line in lines(*files)] == list(range(1, 101))
    found = lines(path)
    numbers = [line["seq"] for line in found]
    assert numbers == sorted(set(numbers))
    told = sum(line["repeated"] for line in found if line["event"] == "lost")
    assert sum(line["event"] != "lost" for line in found) + told == 30_001


def test_what_cannot_be_an_audit_log_is_refused_with_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.touch(mode=0o600)
    path.chmod(0o622)
    for settings, why in (
        ({"file": path}, "chmod go-w"),
        ({"file": tmp_path}, "directory"),
        ({"file": tmp_path / "missing" / "audit.jsonl"}, "No such file"),
        ({"journald": True, "journald_socket": tmp_path / "none"}, "journald does not run here"),
    ):
        with pytest.raises(ConfigError, match=why):
            audit.begin(AuditSettings(**settings))  # type: ignore[arg-type]
    path.chmod(0o600)
    with audited(file=path):
        with pytest.raises(ConfigError, match="another process"):
            audit.Audit(AuditSettings(file=path))
        with pytest.raises(ConfigError):
            audit.reload(AuditSettings(file=tmp_path / "missing" / "x"))
        record("login", user="ann")
        audit.reload(AuditSettings(file=tmp_path / "other.jsonl"))
        record("login", user="bob")
    assert [line["user"] for line in lines(path)] == ["ann"]
    assert [line["user"] for line in lines(tmp_path / "other.jsonl")] == ["bob"]


def entries(receiver: socket.socket) -> list[dict[str, str]]:
    """What journald would have taken from its socket."""
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            data, ancillary, _, _ = receiver.recvmsg(1 << 20, socket.CMSG_SPACE(4))
            for _, _, raw in ancillary:
                (fd,) = array.array("i", raw[:4])
                with open(fd, "rb") as file:
                    file.seek(0)
                    data = file.read()
            found.append(_fields(data))
    return found


def _fields(data: bytes) -> dict[str, str]:
    found = {}
    while data:
        name, _, rest = data.partition(b"\n")
        if b"=" in name:
            name, _, value = name.partition(b"=")
            data = rest
        else:
            size = int.from_bytes(rest[:8], "little")
            value, data = rest[8 : 8 + size], rest[9 + size :]
        found[name.decode()] = value.decode()
    return found


def test_journald_gets_fields_whatever_is_in_them(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))
        receiver.setblocking(False)
        with audited(journald=True, journald_socket=path):
            record("login", "refused", origin=HERE, user="an\nPRIORITY=0", proven=False, why="wrong password")
            values = {f"k{number}": "v" * 60_000 for number in range(20)}
            record("createMessageStream", on="s", after=values)
        refused, created = entries(receiver)
    assert refused["PRIORITY"] == "4"
    assert refused["STREAMBRIDGE_USER"] == "an\nPRIORITY=0"
    assert refused["MESSAGE"].startswith("login refused mqtt 192.0.2.1 user='an\\nPRIORITY=0'")
    assert refused["SYSLOG_IDENTIFIER"] == "streambridge-audit"
    assert json.loads(created["STREAMBRIDGE_AFTER"]) == values


def test_no_error_that_repeats_what_a_client_sent_forges_an_entry_of_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    forged = "invalid value 'x\nlogin ok mqtt 10.0.0.1 user='ann'\x1b[2J\u202e"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))
        receiver.setblocking(False)
        with audited(journald=True, journald_socket=path):
            record("updateMessageStream", "failed", origin=HERE, user="bob", why=forged)
        (entry,) = entries(receiver)
    assert entry["STREAMBRIDGE_WHY"] == forged
    assert entry["MESSAGE"].isprintable()
    assert entry["MESSAGE"].startswith("updateMessageStream failed mqtt 192.0.2.1 user='bob': invalid value")


class Steady(FileSink):
    """A file; `written` is set when lines are in it. It counts its syncs."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.written, self.syncs = threading.Event(), 0

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        super().write(lines)
        self.written.set()

    def sync(self) -> None:
        super().sync()
        self.syncs += 1


@pytest.mark.parametrize("interval", [0.02, 0.1])
def test_a_steady_load_of_lines_does_not_postpone_their_sync(tmp_path: Path, interval: float) -> None:
    sink = Steady(tmp_path / "audit.jsonl")
    outlet = Outlet("file", sink, interval)
    number, end = 0, time.monotonic() + 30
    try:
        while sink.syncs < 3:
            assert time.monotonic() < end
            number += 1
            sink.written.clear()
            outlet.put([{"seq": number, "time": 0.0}])
            assert sink.written.wait(30)
    finally:
        outlet.close()
        outlet.join()
