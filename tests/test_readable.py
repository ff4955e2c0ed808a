"""Files that the configuration names: what counts as a change, and what is said of one that is broken."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge.access.accesskeys import read_access_keys
from bridge.access.tokens import read_tokens
from bridge.access.users import read_users
from bridge.errors import ConfigError
from bridge.readable import Kept
from bridge.service.watch import Watch

# A reader, a file that it takes, and a mode that is too open for it.
FILES: dict[str, tuple[Callable[[Path], Any], str, int]] = {
    "users": (read_users, "ann:$7$101$YWJjZGVmZ2hpams=$YWJj\n", 0o620),
    "tokens": (lambda path: read_tokens("tokens", path), "ann 0123456789abcdef\n", 0o604),
    "access keys": (lambda path: read_access_keys("keys", path), "AKIA1 0123456789abcdef ann\n", 0o604),
}


@pytest.fixture(params=FILES)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Callable[[Kept], Any], str, int]:
    read, text, wide = FILES[request.param]
    path = tmp_path / "file"
    return path, lambda kept: kept.read(("file", path), "option", (path,), lambda: read(path)), text, wide


def test_a_file_is_told_as_missing_or_broken_until_it_is_in_order(
    file: tuple[Path, Callable[[Kept], Any], str, int],
) -> None:
    path, read, text, wide = file
    kept = Kept()

    def missing(what: str) -> None:
        with pytest.raises(ConfigError, match=what):
            read(kept)
        assert (list(kept.missing), list(kept.broken)) == (["option"], [])

    def broken(what: str) -> None:
        assert read(kept) == good, "the last good content"
        assert (list(kept.missing), list(kept.broken)) == ([], ["option"])
        assert what in kept.broken["option"]

    missing("No such file")
    path.write_text(text)
    path.chmod(wide)
    missing("chmod")
    path.chmod(0o600)
    good = read(kept)
    assert not kept.missing
    for _ in range(2):
        path.chmod(wide)
        broken("chmod")
        path.unlink()
        broken("No such file")
        path.write_text("nonsense")
        path.chmod(0o600)
        broken("line 1")
        path.write_text(text)
        assert read(kept) == good
        assert not kept.broken


def test_only_what_has_changed_is_made_again_and_only_what_is_named_is_kept(tmp_path: Path) -> None:
    path, kept, made = tmp_path / "file", Kept(), list[str]()
    path.write_text("one")

    def read(name: str, *also: object) -> None:
        kept.read((name, path), name, (path,), lambda: made.append(name), *also)

    for name in ("a", "a", "b"):
        read(name)
    assert made == ["a", "b"]
    path.touch()
    os.utime(path, (1, 1))
    read("a")
    assert made == ["a", "b"], "the same content"
    read("a", "also")
    read("a", "also")
    path.write_text("two")
    read("a", "also")
    assert made == ["a", "b", "a", "a"]
    kept.forget(lambda key: key[0] == "a")
    read("a", "also")
    assert made[4:] == ["a"]


@pytest.mark.parametrize("what", ["content", "mode", "replaced", "removed", "made"])
def test_the_watch_sees_whatever_may_make_a_file_be_taken_or_refused(tmp_path: Path, what: str) -> None:
    path, other, seen = tmp_path / "file", tmp_path / "other", asyncio.Queue[list[Path]]()
    other.write_text("text")
    if what != "made":
        path.write_text("text")
        path.chmod(0o644)

    async def test() -> None:
        watch = Watch(lambda: [path, other], seen.put, 0.01)
        task = asyncio.create_task(watch.run())
        match what:
            case "content" | "made":
                path.write_text("other text")
            case "mode":
                path.chmod(0o600)
            case "replaced":
                fresh = tmp_path / "fresh"
                fresh.write_text("TEXT")
                os.utime(fresh, ns=(0, path.stat().st_mtime_ns))
                fresh.replace(path)
            case "removed":
                path.unlink()
        try:
            async with asyncio.timeout(60):
                assert await seen.get() == [path]
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(test())
