"""What somebody reads who has made a mistake: each message names the place and the remedy."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from tests.cli.conftest import streambridge
from tests.cli.test_check import QUIET, WITHOUT_RIGHTS

ME = pwd.getpwuid(os.geteuid()).pw_name
USER = "pump:$7$1000$c2FsdA==$aGFzaA==\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.toml"


def test_a_users_file_that_the_service_may_not_read_is_reported_with_its_user_and_the_remedy(
    path: Path,
) -> None:
    users = path.parent / "users"
    users.write_text(USER)
    users.chmod(0)
    path.write_text(QUIET.replace("[mqtt]", '[mqtt]\nusers_file = "users"'))
    for command in ("run", "check"):
        done = streambridge(command, "-c", path, prefix=WITHOUT_RIGHTS)
        assert done.returncode == 78
        assert (done.stdout + done.stderr).endswith(
            f"{path}:6: mqtt.users_file: {users} cannot be read: Permission denied for user {ME}; "
            f"chmod u+r {users}\n"
        )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_file_of_another_user_is_given_to_the_user_of_the_service(path: Path) -> None:
    users, closed = path.parent / "users", path.parent / "closed"
    users.write_text(USER)
    users.chmod(0o600)
    os.chown(users, 12345, 12345)
    done = streambridge("users", "list", "--file", users, prefix=WITHOUT_RIGHTS)
    assert done.stderr == (
        f"streambridge: mqtt.users_file {users}: Permission denied for user {ME}; chown {ME} {users}\n"
    )
    closed.mkdir(mode=0)
    done = streambridge("users", "list", "--file", closed / "users", prefix=WITHOUT_RIGHTS)
    assert done.stderr.endswith(f"Permission denied for user {ME}; chmod a+x {closed}\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_is_warned_of_files_that_the_user_of_the_service_may_not_read(path: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    data, users = path.parent / "data", path.parent / "users"
    data.mkdir()
    os.chown(data, nobody.pw_uid, nobody.pw_gid)
    users.write_text(USER)
    users.chmod(0o600)
    path.write_text(QUIET.replace("[mqtt]", '[mqtt]\nusers_file = "users"'))
    done = streambridge("check", "-c", path)
    assert done.returncode == 0
    assert f"warning: {path}:6: mqtt.users_file: {users} cannot be read by user nobody" in done.stdout
    assert f"; chown nobody {users}" in done.stdout
    # Its own files are no use to somebody else: the user of the service is.
    os.chown(users, 12345, 12345)
    done = streambridge("check", "-c", path, prefix=WITHOUT_RIGHTS)
    assert f"Permission denied for user {ME}; run this as user nobody, as the service does" in done.stdout


def test_a_configuration_that_cannot_be_read_is_no_wrong_usage(path: Path) -> None:
    path.write_text("")
    path.chmod(0)
    closed, broken = path.parent / "closed", path.parent / "broken.toml"
    closed.mkdir(mode=0)
    broken.write_bytes(b"\n\xff\n")
    for given, what in (
        (path, f"{path}: cannot be read: Permission denied for user {ME}; chmod u+r {path}"),
        (closed / "x.toml", f"cannot be read: Permission denied for user {ME}; chmod a+x {closed}"),
        (path.parent, f"{path.parent}: cannot be read: it is a directory; name a file"),
        (broken, f"{broken}:2: not valid UTF-8; save the file as UTF-8"),
        (path.parent / "gone.toml", "gone.toml: there is no such file; give another one with --config, or"),
    ):
        for command in (["run"], ["check"], ["streams", "list"]):
            done = streambridge(*command, "-c", given, prefix=WITHOUT_RIGHTS)
            assert done.returncode == 78
            assert what in done.stdout + done.stderr
            assert len((done.stdout + done.stderr).splitlines()) == 1
    closed.chmod(0o700)


def test_fragments_that_cannot_be_read_are_not_left_out(path: Path) -> None:
    """They may have the rules."""
    path.write_text(QUIET)
    fragments = path.parent / "conf.d"
    fragments.mkdir(mode=0)
    for command in ("run", "check"):
        done = streambridge(command, "-c", path, prefix=WITHOUT_RIGHTS)
        assert done.returncode == 78
        assert (
            f"{fragments}: cannot be read: Permission denied for user {ME}; chmod u+r {fragments}\n"
            in done.stdout + done.stderr
        )
    fragments.chmod(0o700)


def test_two_tables_of_one_name_are_both_named(path: Path) -> None:
    budget = '[[mqtt.budget]]\nname = "slow"\nper = "user"\nconnections = {}\n'
    path.write_text(QUIET + budget.format(1) + budget.format(2))
    done = streambridge("check", "-c", path)
    assert done.returncode == 78
    assert done.stdout == (
        f'error: {path}:16: mqtt.budget[1].name = "slow": another has this name (mqtt.budget[0], '
        f"{path}:12); choose another\n"
    )


def test_a_start_that_fails_reports_all_mistakes_as_check_does(path: Path) -> None:
    text = QUIET.replace("[mqtt]", '[mqtt]\nusers_file = "users"\n{}').replace(
        '[http]\nlisten = ""', '[http]\nlisten = ""\n[audit]\nfile = "gone/audit"\n[log]\n{}'
    )
    text += '[mqtt.tls]\ncert = "cert"\nkey = "key"\n[streams.a]\ntopics = ["a/#/b", "a"]\nmax_size = "{}"\n'
    for mistakes, number in ((("", "", "1GiB"), 5), (("lisen = 1", 'level = "loud"', "1 GO"), 8)):
        path.write_text(text.format(*mistakes))
        found = streambridge("check", "-c", path)
        assert found.stdout.count("error: ") == number
        done = streambridge("run", "-c", path)
        assert done.returncode == 78
        lines = [line for line in done.stderr.splitlines() if line.startswith("streambridge: ")]
        assert "".join(f"{line.replace('streambridge', 'error', 1)}\n" for line in lines) == found.stdout
