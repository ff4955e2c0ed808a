"""The command as a whole: help, errors, exit codes, plugins."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bridge.access.users import hash_password, read_users
from bridge.config.settings import DEFAULT_CONFIG
from tests.cli.conftest import CHECKOUT, COMMAND, Fill, environment, streambridge


def test_help_names_every_command_and_exit_code() -> None:
    text = streambridge("--help").stdout
    for word in (
        "run",
        "check",
        "demo",
        "bench",
        "streams",
        "plugins",
        "verify",
        "repair",
        "ingest",
        "exports",
        "hash-password",
        "install-service",
        "users",
        "support",
        "Examples:",
        "78",
    ):
        assert word in text


@pytest.mark.parametrize("command", [["run"], ["streams", "list"], ["streams", "read"], ["check"]])
def test_help_of_a_command_shows_its_defaults(command: list[str]) -> None:
    done = streambridge(*command, "--help")
    assert "/etc/streambridge/streambridge.toml" in done.stdout
    assert "STREAMBRIDGE_CONFIG" in done.stdout


def test_a_missing_configuration_is_reported_in_one_line() -> None:
    done = streambridge("run", "-c", "/nowhere/streambridge.toml")
    assert done.returncode == 78
    assert done.stderr == (
        "streambridge: /nowhere/streambridge.toml: there is no such file; give another one with --config, or "
        f"begin with the sample: `cp {CHECKOUT}/config/streambridge.toml .`\n"
    )


@pytest.mark.skipif(DEFAULT_CONFIG.exists(), reason="streambridge is installed on this machine")
def test_without_a_configuration_the_error_says_how_to_begin() -> None:
    done = streambridge("run")
    assert done.returncode == 78
    assert f"begin with the sample: `cp {CHECKOUT}/config/streambridge.toml .`" in done.stderr


def test_every_mistake_of_a_configuration_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("[gatway]\n[mqtt]\nmode = 1\n")
    done = streambridge("run", env={"STREAMBRIDGE_CONFIG": str(path)})
    assert done.returncode == 78
    assert [line.split(": ")[1] for line in done.stderr.splitlines()] == [f"{path}:1", f"{path}:3"]
    assert "Traceback" not in done.stderr


def test_a_missing_data_directory_is_reported_in_one_line(tmp_path: Path) -> None:
    done = streambridge("streams", "list", "--data-dir", tmp_path / "none")
    assert done.returncode == 78
    assert done.stderr.count("\n") == 1
    assert "there is no such data directory; start the service once" in done.stderr


def test_reading_streams_needs_neither_the_secrets_nor_a_perfect_configuration(
    fill: Fill, tmp_path: Path
) -> None:
    fill([("a", b"1")])
    config = tmp_path / "x.toml"
    config.write_text(
        '[gateway]\ndata_dir = "data"\n[greengrass]\ntoken_file = "${CREDENTIALS_DIRECTORY}/token"\n'
        '[aws]\nproxies = { https = "http://me:${STREAMBRIDGE_PASSWORD}@proxy" }\n[mqtt]\nmode = 5\n'
    )
    done = streambridge("streams", "read", "sensors", "-c", config)
    assert (done.returncode, done.stderr) == (0, "")
    done = streambridge("check", "-c", config)
    assert "CREDENTIALS_DIRECTORY" not in done.stdout
    assert "STREAMBRIDGE_PASSWORD is not set" in done.stdout
    config.write_text("[gateway]\ndata_dir = 5\n")
    assert streambridge("streams", "list", "-c", config).returncode == 78


def test_a_directory_of_something_else_is_not_taken_for_a_sound_one(tmp_path: Path) -> None:
    (tmp_path / "hosts").touch()
    done = streambridge("verify", tmp_path)
    assert (done.returncode, done.stdout) == (78, "")
    assert f"{tmp_path}: this is not a data directory of streambridge" in done.stderr


def test_a_password_becomes_a_line_of_the_users_file_and_is_never_an_argument(tmp_path: Path) -> None:
    users = tmp_path / "users"
    password = subprocess.run(
        [*COMMAND, "hash-password", "pump 7"],
        env=environment(), input="hunter2\n", capture_output=True, text=True, check=True,
    )  # fmt: skip
    users.write_text(password.stdout)
    assert read_users(users)["pump 7"].verify(b"hunter2")
    assert "hunter2" not in users.read_text()
    for wrong in ("a:b", ""):
        assert streambridge("hash-password", wrong).returncode == 2


def test_an_unknown_command_is_wrong_usage() -> None:
    done = streambridge("strems")
    assert done.returncode == 2
    assert "streams" in done.stderr


def test_nothing_is_coloured_in_a_pipe() -> None:
    assert "\x1b" not in streambridge("plugins", env={"FORCE_COLOR": "1"}).stdout


def test_plugins_lists_shipped_and_broken_ones(tmp_path: Path) -> None:
    drop_in = tmp_path / "plugins"
    drop_in.mkdir()
    (drop_in / "broken.py").write_text("import no_such_module\n")
    path = tmp_path / "x.toml"
    path.write_text('[export]\nplugin_dirs = ["plugins"]\n')
    done = streambridge("plugins", "-c", path, "--json")
    found = {plugin["name"]: plugin for plugin in json.loads(done.stdout)}
    assert found["broken"]["error"] == (
        "ModuleNotFoundError: No module named 'no_such_module' (broken.py, line 1); install it into the "
        "environment of streambridge, or correct its name"
    )
    assert found["s3"]["error"] is None
    assert found["s3"]["kinds"] == ["s3"]
    assert "failed: ModuleNotFoundError" in streambridge("plugins", "-c", path).stdout


def complete(line: str) -> list[str]:
    """What bash is offered at the end of a line."""
    words = line.split(" ")
    env = {
        "_STREAMBRIDGE_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    return streambridge(env=env).stdout.split()


def test_the_shell_completes_commands_and_names_of_streams(fill: Fill) -> None:
    data = fill(name="sensors")
    fill(name="alarms")
    assert complete("streambridge str") == ["streams"]
    assert complete(f"streambridge streams read --data-dir {data} s") == ["sensors"]
    assert complete("streambridge streams read --data-dir /nowhere s") == []


@pytest.mark.parametrize("command", ["verify", "repair"])
def test_a_wrong_directory_is_reported_with_the_options_of_that_command(command: str, tmp_path: Path) -> None:
    done = streambridge(command, tmp_path / "nope")
    assert done.returncode == 78
    assert f"{tmp_path}/nope: there is no such data directory; start the service once" in done.stderr
    assert f"give another one with --config or as `{command} DIR`" in done.stderr
    assert "--data-dir" not in done.stderr
    (tmp_path / "file").write_text("")
    for arguments in ((command, tmp_path / "file"), ("streams", "list", "--data-dir", tmp_path / "file")):
        done = streambridge(*arguments)
        assert done.returncode == 78
        assert f"{tmp_path}/file: this is not a directory" in done.stderr


def test_help_is_as_wide_as_the_terminal_and_names_values_plainly() -> None:
    wide, narrow = (
        streambridge("streams", "update", "-h", env={"COLUMNS": columns}).stdout for columns in ("160", "60")
    )
    assert max(map(len, wide.splitlines())) > 100
    assert max(len(line) for line in narrow.partition("Examples:")[0].splitlines()) <= 60
    assert "Usage: streambridge streams update [OPTIONS] STREAM [KEY=VALUE]..." in wide
    for words in ([], ["ingest"], ["bench"], ["streams", "read"]):
        text = streambridge(*words, "-h").stdout
        assert not re.search(r"<(str|int|float|list|path)|\{[A-Z]+\}", text), words


def test_the_manual_page_has_every_command_and_no_faults() -> None:
    page = streambridge("man").stdout
    for name in ("exports pause", "streams update", "ingest prune", "users add", "support"):
        assert f".SS streambridge {name}".replace("-", r"\-") in page
    if (groff := shutil.which("groff")) is None:
        pytest.skip("no groff")
    done = subprocess.run(
        [groff, "-man", "-Tutf8", "-ww"], input=page, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert "STREAMBRIDGE(1)" in done.stdout


def test_names_of_streams_exports_and_users_complete_in_the_shell(fill: Fill, tmp_path: Path) -> None:
    exports = {"consumer": [{"identifier": "workers"}, {"identifier": "others"}]}
    data = fill([], name="sensors", export_definition=exports)
    fill([], name="pumps")
    users = tmp_path / "users"
    users.write_text(f"ann:{hash_password(b'x')}\n")
    users.chmod(0o600)
    config = tmp_path / "x.toml"
    config.write_text(f'[gateway]\ndata_dir = "{data}"\n[mqtt]\nusers_file = "{users}"\n')

    def complete(*words: str) -> list[str]:
        asked = {"_STREAMBRIDGE_COMPLETE": "complete_bash", "STREAMBRIDGE_CONFIG": str(config)}
        asked |= {"COMP_WORDS": " ".join(["streambridge", *words]), "COMP_CWORD": str(len(words))}
        return streambridge(env=asked).stdout.split()

    assert complete("streams", "describe", "") == ["pumps", "sensors"]
    assert complete("exports", "pause", "se") == ["sensors"]
    assert complete("exports", "pause", "sensors", "") == ["workers", "others"]
    assert complete("streams", "update", "sensors", "--export", "w") == ["workers"]
    assert complete("streams", "fetch", "sensors", "o") == ["others"]
    assert complete("users", "passwd", "") == ["ann"]
    assert complete("exports", "pa") == ["pause"]
