"""`streambridge users`: the users file is changed atomically, and a password is typed twice or not at all."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from bridge.access.users import read_users
from tests.cli.conftest import COMMAND, environment, streambridge
from tests.cli.terminal import Terminal


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "streambridge.toml"
    path.write_text('[gateway]\ndata_dir = "data"\n[mqtt]\nusers_file = "users"\n')
    return path


def users(config: Path, *arguments: str, given: str = "", code: int = 0) -> str:
    done = streambridge("users", *arguments, "-c", config, given=given)
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


def test_users_are_added_changed_listed_and_removed(config: Path) -> None:
    path = config.with_name("users")
    assert users(config, "add", "ann", given="first\n") == "added ann\n"
    assert path.stat().st_mode & 0o777 == 0o600
    users(config, "add", "pump 7", given="other\n")
    assert json.loads(users(config, "list", "--json")) == ["ann", "pump 7"]
    assert users(config, "passwd", "ann", given="second\n") == "changed the password of ann\n"
    found = read_users(path)
    assert found["ann"].verify(b"second")
    assert not found["ann"].verify(b"first")
    assert found["pump 7"].verify(b"other")
    assert users(config, "remove", "ann", "--yes") == "removed ann\n"
    assert users(config, "list") == "pump 7\n"
    assert [one.name for one in config.parent.iterdir() if one.name.startswith(".")] == []


def test_comments_mode_and_a_link_to_the_file_stay(config: Path) -> None:
    real = config.with_name("elsewhere")
    users(config, "add", "ann", "--file", str(real), given="a\n")
    real.write_text("# who may come\n\n" + real.read_text())
    real.chmod(0o640)
    config.with_name("users").symlink_to(real)
    users(config, "add", "bob", given="b\n")
    assert config.with_name("users").is_symlink()
    lines = real.read_text().splitlines()
    assert (lines[0], [line.partition(":")[0] for line in lines[2:]]) == ("# who may come", ["ann", "bob"])
    assert real.stat().st_mode & 0o777 == 0o640


def test_what_would_leave_a_wrong_file_is_refused_and_changes_nothing(config: Path) -> None:
    path = config.with_name("users")
    users(config, "add", "ann", given="a\n")
    before = path.read_bytes()
    assert "already" in users(config, "add", "ann", given="b\n", code=1)
    assert "empty" in users(config, "add", "bob", given="\n", code=1)
    assert "MQTT cannot send" in users(config, "add", "bob", given="x" * 65_536 + "\n", code=1)
    assert "MQTT cannot send" in users(config, "add", "b" * 65_536, given="b\n", code=2)
    assert "all users" in users(config, "add", "*", given="b\n", code=2)
    for wrong in ("a:b", "", "# x", "tab\t"):
        assert "not a valid user name" in users(config, "add", wrong, given="b\n", code=2)
    assert "there is no user bob; the users are: ann" in users(config, "passwd", "bob", given="b\n", code=1)
    assert "there is no user nobody" in users(config, "remove", "nobody", "--yes", code=1)
    assert "last user" in users(config, "remove", "ann", "--yes", code=1)
    assert users(config, "add", "ann", given="b\n", code=1).count("\n") == 1
    assert path.read_bytes() == before
    path.write_text("not a line\n")
    assert "line 1" in users(config, "add", "bob", given="b\n", code=78)
    assert path.read_text() == "not a line\n"


def test_a_password_on_standard_input_may_have_any_bytes(config: Path) -> None:
    """MQTT's passwords are binary."""
    command = [*COMMAND, "users", "add", "ann", "-c", str(config)]
    done = subprocess.run(command, input=b"\xff\x00 \n", env=environment(), capture_output=True)
    assert done.returncode == 0, done.stderr
    assert read_users(config.with_name("users"))["ann"].verify(b"\xff\x00 ")


def test_on_a_terminal_the_password_is_typed_twice(config: Path) -> None:
    command = [*COMMAND, "users", "add", "ann", "-c", str(config)]
    with Terminal(command) as terminal:
        terminal.wait_for("Password of ann: ")
        terminal.type("one\n")
        terminal.wait_for("Repeat the password: ")
        terminal.type("two\n")
        terminal.wait_for("the two passwords differ")
        assert terminal.end() == 1
        assert "Usage" not in terminal.seen
    assert not config.with_name("users").exists()
    with Terminal(command) as terminal:
        for prompt in ("Password of ann: ", "Repeat the password: "):
            terminal.wait_for(prompt)
            terminal.type("one\n")
        terminal.wait_for("added ann")
        assert terminal.end() == 0
        assert "one" not in terminal.seen
    assert read_users(config.with_name("users"))["ann"].verify(b"one")


def test_two_changes_at_once_both_count(config: Path) -> None:
    users(config, "add", "ann", given="a\n")
    names = [f"user{number}" for number in range(3)]
    command = [*COMMAND, "users", "add"]
    running = [
        subprocess.Popen([*command, name, "-c", str(config)], stdin=subprocess.PIPE, env=environment())
        for name in names
    ]
    for process in running:
        process.communicate(b"secret\n", timeout=60)
    assert [process.returncode for process in running] == [0, 0, 0]
    assert set(read_users(config.with_name("users"))) == {"ann", *names}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_new_file_of_root_belongs_to_the_user_of_the_service(config: Path) -> None:
    data = config.with_name("data")
    data.mkdir()
    os.chown(data, 12345, 12346)
    users(config, "add", "ann", given="a\n")
    users(config, "add", "ann", "--file", str(config.with_name("others")), given="a\n")
    for name in ("users", "others"):
        found = config.with_name(name).stat()
        assert (found.st_uid, found.st_gid) == (12345, 12346)


def test_a_file_of_users_needs_no_configuration(tmp_path: Path) -> None:
    users(tmp_path / "none.toml", "add", "ann", "--file", str(tmp_path / "users"), given="a\n")
    assert (tmp_path / "users").stat().st_uid == os.geteuid()
