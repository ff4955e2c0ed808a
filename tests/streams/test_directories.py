"""Directories that are made outlive a power cut: each is synced into the one that it was made in."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.export.cursor import CursorFile
from bridge.mqtt.broker.journal import Journal
from bridge.runtime import LoopRuntime
from bridge.streams import meta
from bridge.streams.layout import Files

from .conftest import House, put, run


class Disk:
    """Notes which directories were made, and which of them would be gone after a power cut."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path) -> None:
        self.lost: set[Path] = set()
        self.made: set[Path] = set()
        mkdir, fsync, rename = os.mkdir, os.fsync, os.rename

        def made(path: str | Path, *options: object, **more: object) -> None:
            mkdir(path, *options, **more)  # type: ignore[arg-type]  # as it came
            if Path(path).is_relative_to(root):
                self.lost.add(Path(path))
                self.made.add(Path(path))

        def synced(fd: int) -> None:
            fsync(fd)
            here = Path(f"/proc/self/fd/{fd}").readlink()
            self.lost = {path for path in self.lost if path.parent != here}

        def renamed(old: str | Path, new: str | Path) -> None:
            rename(old, new)
            if Path(old) in self.made:
                self.lost = self.lost - {Path(old)} | {Path(new)}

        patch.setattr(os, "mkdir", made)
        patch.setattr(os, "fsync", synced)
        patch.setattr(os, "rename", renamed)


def _stream(house: House) -> None:
    async def work() -> None:
        async with house.stream() as stream:
            await put(stream, b"a")

    run(work())


def _quarantine(house: House) -> None:
    _stream(house)
    for name in meta.NAMES:
        (house.directory() / name).touch()
    (path,) = house.directory().glob("*.seg")
    path.write_bytes(path.read_bytes() + b"SBF2 and no frame")
    _stream(house)
    assert (house.directory() / "quarantine").is_dir()


def _journal(house: House) -> None:
    async def work() -> None:
        journal = Journal(house.data_dir / "mqtt" / "sessions.journal", "boot", LoopRuntime(1, "test"))
        journal.open()
        journal.close()

    run(work())


def _cursor(house: House) -> None:
    CursorFile(house.data_dir / "exports" / "s" / "e.cursor").close()


@pytest.mark.parametrize("work", [_stream, _quarantine, _journal, _cursor])
def test_a_directory_that_is_made_is_synced_into_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[[House], None]
) -> None:
    root = tmp_path / "new" / "below"
    disk = Disk(monkeypatch, tmp_path)
    work(House(root))
    memory = {path for path in disk.made if path == root / "memory"}
    assert disk.made - memory
    assert disk.lost - memory == set()


def test_a_directory_that_a_killed_process_made_is_synced_by_the_next(tmp_path: Path) -> None:
    synced: list[Path] = []

    class Noting(Files):
        def sync_directory(self, directory: Path) -> None:
            synced.append(directory)
            super().sync_directory(directory)

    house = House(tmp_path)
    (house.data_dir / "streams").mkdir(parents=True)
    house.files = Noting()
    _stream(house)
    assert house.data_dir in synced
