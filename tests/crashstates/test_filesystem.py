"""The model of a file system allows what the file systems do, and no more."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random

import pytest

from .filesystem import KILLED, ORDERED, UNJOURNALED, WRITEBACK, FileSystem, State, digest
from .trace import Call, parse

OLD, NEW = b"old" * 300, b"new" * 300


class Script:
    """Calls, one after the other, under a model."""

    def __init__(self, root: Path, model: str) -> None:
        self.root, self.line = root, 0
        self.files = FileSystem(root, model)

    def __call__(self, name: str, path: str, other: str = "", **what: object) -> None:
        other = f"{self.root}/{other}" if other else ""
        call = Call(self.line, self.line, name, f"{self.root}/{path}".rstrip("/"), other, **what)  # type: ignore[arg-type]
        self.line += 1
        if name in ("fsync", "fdatasync"):
            self.files.sync(call)
        else:
            self.files.apply(call)

    def make(self, path: str, data: bytes) -> None:
        self("open", path, flags="O_CREAT")
        self("write", path, data=data, offset=0)

    def states(self) -> list[State]:
        found = {digest(state): state for state in itertools.islice(self.files.states(Random(1)), 3000)}
        return list(found.values())

    def contents(self, path: str) -> set[object]:
        return {state.get(path, "missing") for state in self.states()}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(OLD)
    return tmp_path


JOURNALED = [ORDERED, WRITEBACK]
CUT = [ORDERED, WRITEBACK, UNJOURNALED]


@pytest.mark.parametrize("model", CUT)
def test_what_is_synced_with_its_directory_is_there_in_every_state(tmp_path: Path, model: str) -> None:
    script = Script(tmp_path, model)
    script.make("file", NEW)
    script("fdatasync", "file")
    script("fsync", "")
    assert script.contents("file") == {NEW}


def test_a_name_whose_directory_was_not_synced_may_be_missing_without_a_journal(tmp_path: Path) -> None:
    for model, expected in ((ORDERED, {NEW}), (UNJOURNALED, {NEW, "missing"})):
        script = Script(tmp_path, model)
        script.make("file", NEW)
        script("fdatasync", "file")
        assert script.contents("file") == expected


def test_after_a_kill_everything_is_there(old: Path) -> None:
    script = Script(old, KILLED)
    script("write", "file", data=b"x" * 5000, offset=100)
    assert script.contents("file") == {OLD[:100] + b"x" * 5000}


@pytest.mark.parametrize("model", CUT)
def test_any_sector_of_what_is_written_over_may_be_old_or_new(old: Path, model: str) -> None:
    script = Script(old, model)
    script("write", "file", data=NEW, offset=0)
    assert script.contents("file") == {one[:512] + two[512:] for one in (OLD, NEW) for two in (OLD, NEW)}


@pytest.mark.parametrize("model", CUT)
def test_a_file_that_replaces_another_unsynced_may_be_empty(old: Path, model: str) -> None:
    script = Script(old, model)
    script.make("file.tmp", NEW)
    script("rename", "file.tmp", "file")
    assert {OLD, NEW, b""} <= script.contents("file")


@pytest.mark.parametrize("model", JOURNALED)
def test_a_synced_file_replaces_another_as_a_whole(old: Path, model: str) -> None:
    script = Script(old, model)
    script.make("file.tmp", NEW)
    script("fdatasync", "file.tmp")
    script("rename", "file.tmp", "file")
    assert script.contents("file") == {OLD, NEW}
    assert {(state.get("file.tmp"), state["file"]) for state in script.states()} == {(NEW, OLD), (None, NEW)}


def test_without_a_journal_a_rename_is_two_changes(old: Path) -> None:
    script = Script(old, UNJOURNALED)
    script("rename", "file", "moved")
    assert {frozenset(state) for state in script.states()} == {
        frozenset({"file"}),
        frozenset({"moved"}),
        frozenset({"file", "moved"}),
        frozenset(),
    }


@pytest.mark.parametrize("model", JOURNALED)
def test_with_a_journal_names_reach_the_disk_in_their_order(tmp_path: Path, model: str) -> None:
    script = Script(tmp_path, model)
    for name in ("a", "b", "c"):
        script("mkdir", name)
    assert {tuple(state) for state in script.states()} == {(), ("a",), ("a", "b"), ("a", "b", "c")}
    script("fsync", "")
    assert {tuple(state) for state in script.states()} == {("a", "b", "c")}


def test_the_size_follows_the_data_of_new_blocks_only_in_ordered_mode(tmp_path: Path) -> None:
    found = {}
    for model in JOURNALED:
        script = Script(tmp_path, model)
        script.make("file", NEW)
        script("fsync", "")
        found[model] = script.contents("file")
    assert found[ORDERED] == {b"", NEW}
    assert bytes(len(NEW)) in found[WRITEBACK], "zeros where the data should be"
    assert any(b"SBF2" in content for content in found[WRITEBACK] if isinstance(content, bytes))


@pytest.mark.parametrize("model", JOURNALED)
def test_within_a_block_that_was_there_the_size_may_come_before_the_data(old: Path, model: str) -> None:
    script = Script(old, model)
    script("write", "file", data=b"n" * 50, offset=len(OLD))
    assert script.contents("file") == {OLD, OLD + b"n" * 50, OLD + bytes(50)}


@pytest.mark.parametrize("model", JOURNALED)
def test_a_size_is_never_ahead_of_the_names_before_it(tmp_path: Path, model: str) -> None:
    script = Script(tmp_path, model)
    script("open", "file", flags="O_CREAT")
    script("mkdir", "a")
    script("write", "file", data=NEW, offset=0)
    assert all("a" in state for state in script.states() if state.get("file"))


@pytest.mark.parametrize("model", CUT)
def test_a_sync_covers_only_what_had_returned_before_it_began(tmp_path: Path, model: str) -> None:
    script = Script(tmp_path, model)
    script.make("file", NEW)
    script("fsync", "file")
    script("fsync", "")
    script.files.apply(Call(10, 12, "write", f"{tmp_path}/file", data=b"late", offset=len(NEW)))
    script.files.sync(Call(11, 13, "fdatasync", f"{tmp_path}/file"))
    assert NEW in script.contents("file")
    script.files.sync(Call(14, 15, "fdatasync", f"{tmp_path}/file"))
    assert script.contents("file") == {NEW + b"late"}


@pytest.mark.parametrize("model", JOURNALED)
def test_what_a_truncation_has_freed_is_not_back_with_a_later_size(tmp_path: Path, model: str) -> None:
    (tmp_path / "file").write_bytes(b"o" * 9000)
    script = Script(tmp_path, model)
    script("truncate", "file", offset=0)
    script("write", "file", data=b"n" * 9000, offset=0)
    for content in script.contents("file"):
        assert isinstance(content, bytes)
        assert len(content) == 9000 or b"o" not in content
        assert b"o" not in content or set(content) <= set(b"on")


def test_calls_of_threads_that_overlap_are_put_together() -> None:
    path = "".join(f"\\x{byte:02x}" for byte in b"/d/f")
    log = f"""7 1.0 pwrite64(3<{path}>, "\\x61\\x62", 2, 5 <unfinished ...>
8 1.1 fdatasync(4<{path}>) = 0
7 1.2 <... pwrite64 resumed>) = 2
8 1.3 write(5<TCP:[127.0.0.1:1883->127.0.0.1:4000]>, "\\x40\\x02\\x00\\x01", 4) = 4
8 1.4 openat(AT_FDCWD<{path}>, "\\x78", O_RDONLY) = -1 ENOENT (No such file or directory)
"""
    assert parse(log.splitlines()) == [
        Call(0, 2, "write", "/d/f", data=b"ab", offset=5),
        Call(1, 1, "fdatasync", "/d/f"),
        Call(3, 3, "send", data=b"\x40\2\0\1", peer=4000),
    ]
