"""Commands that change something while the service is stopped, with the rights of one user or another."""

from __future__ import annotations

import json
import os
import pwd
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.model import Persistence
from bridge.streams import meta
from tests.cli.conftest import Fill, streambridge
from tests.cli.test_check import WITHOUT_RIGHTS

GONE = Path("/proc/gone/streambridge-1234")  # nobody can make a directory there, as in /run


ME = pwd.getpwuid(os.geteuid()).pw_name
NOBODY = pwd.getpwnam("nobody")


def everything(data_dir: Path) -> list[Path]:
    return [data_dir, *data_dir.rglob("*")]


@pytest.mark.parametrize("command", [("repair",), ("streams", "create", "new", "persistence=Memory")])
def test_memory_that_systemd_has_removed_at_the_stop_is_not_needed(
    fill: Fill, command: tuple[str, ...]
) -> None:
    data = fill([("a", b"1")])
    fill([("a", b"1")], name="fast", persistence=Persistence.Memory)
    link = data / "memory"
    link.unlink()
    link.symlink_to(GONE)
    done = streambridge(*command, *((data,) if command == ("repair",) else ("--data-dir", data)))
    assert (done.returncode, done.stderr) == (0, "")
    assert link.readlink() == GONE
    listed = streambridge("streams", "list", "--data-dir", data)
    assert (listed.returncode, "fast" in listed.stdout) == (0, True)


def test_memory_in_the_data_directory_itself_stays_there(fill: Fill) -> None:
    data = fill([("a", b"1")])
    place = data / "memory"
    place.unlink()
    place.mkdir(mode=0o700)
    (place / "fast").mkdir()
    assert streambridge("repair", data).returncode == 0
    assert place.is_dir()
    assert not place.is_symlink()


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A data directory of another user, in a place where that user gets to."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as somebody else")
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)  # pytest's own are closed to others
        data = Path(directory) / "data"
        (data / "streams").mkdir(parents=True)
        (data / "memory").symlink_to(GONE)
        for path in everything(data):
            os.chown(path, NOBODY.pw_uid, NOBODY.pw_gid, follow_symlinks=False)
        yield data


def test_root_changes_streams_as_the_user_that_owns_them(elsewhere: Path) -> None:
    as_nobody = ("setpriv", f"--reuid={NOBODY.pw_uid}", f"--regid={NOBODY.pw_gid}", "--clear-groups")
    for command in (
        ("streams", "create", "pumps", "--data-dir", elsewhere),
        ("streams", "append", "pumps", "one", "--data-dir", elsewhere),
        ("repair", elsewhere),
    ):
        done = streambridge(*command)
        assert (done.returncode, done.stderr) == (0, "")
    assert {path.owner() for path in everything(elsewhere) if not path.is_symlink()} == {"nobody"}
    assert {path.group() for path in everything(elsewhere) if not path.is_symlink()} == {
        (elsewhere / "streams").group()
    }
    done = streambridge("streams", "append", "pumps", "two", "--data-dir", elsewhere, prefix=as_nobody)
    assert (done.returncode, done.stdout) == (0, "stored as 1\n")


@pytest.mark.parametrize(
    "command", [("verify",), ("repair",), ("streams", "list"), ("streams", "describe", "other")]
)
def test_a_definition_that_may_not_be_read_is_not_taken_for_a_damaged_one(
    fill: Fill, command: tuple[str, ...]
) -> None:
    data = fill([("a", b"1")])
    fill([("a", b"1")], name="other")
    closed = data / "streams" / "other"
    closed.chmod(0)
    done = streambridge(
        *command, *(("--data-dir", data) if "streams" in command else (data,)), prefix=WITHOUT_RIGHTS
    )
    closed.chmod(0o700)
    assert done.returncode == 1
    assert done.stderr == f"streambridge: {closed}/{meta.NAMES[0]}: Permission denied for user {ME}\n"
    assert streambridge("verify", data).returncode == 0


def test_an_error_about_permissions_names_the_user_that_has_access(elsewhere: Path) -> None:
    (elsewhere / "streams").chmod(0o700)
    done = streambridge("streams", "list", "--data-dir", elsewhere, prefix=WITHOUT_RIGHTS)
    assert done.returncode == 1
    assert done.stderr == (
        f"streambridge: {elsewhere}/streams: Permission denied for user root; run this as user nobody\n"
    )


def test_a_stream_that_may_not_be_read_stays_closed_and_the_others_are_changed(fill: Fill) -> None:
    data = fill([("a", b"1")])
    fill([("a", b"1")], name="other")
    closed = data / "streams" / "other"
    closed.chmod(0)
    here = ("--data-dir", data)
    appended = streambridge("streams", "append", "sensors", "two", *here, prefix=WITHOUT_RIGHTS)
    refused = streambridge("streams", "append", "other", "two", *here, prefix=WITHOUT_RIGHTS)
    shown = streambridge("streams", "read", "sensors", "--json", *here, prefix=WITHOUT_RIGHTS)
    closed.chmod(0o700)
    assert (appended.returncode, appended.stdout) == (0, "stored as 1\n")
    assert f"{closed}/{meta.NAMES[0]}: user" in refused.stderr
    assert "chown" in refused.stderr
    assert "damaged" not in refused.stderr
    assert [json.loads(line)["payload"] for line in shown.stdout.splitlines()] == ["1", "two"]
