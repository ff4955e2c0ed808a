"""Arguments and standard streams that no shell makes by accident: each is one line, and no traceback."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import CHECKOUT, COMMAND, Fill, environment

HUGE = "9" * 30


def said(
    *arguments: str | bytes | Path, redirect: str = "</dev/null", **env: str
) -> subprocess.CompletedProcess[bytes]:
    """Run the command as a shell does with this redirection."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirect}', "sh", *COMMAND, *map(os.fsencode, arguments)],
        cwd=CHECKOUT,
        env=environment() | env,
        capture_output=True,
        timeout=120,
    )
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return done


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("append", "sensors", b"\xff"), b"an argument is not valid UTF-8"),
        (("delete", b"\xff", "--yes"), b"an argument is not valid UTF-8"),
        (("update", "sensors", "description=" + "[" * 5000), b"nested too deeply"),
        (("purge", "sensors", "--upto", HUGE, "--yes"), b"a number has at most 64 bits"),
        (("ack", "sensors", "c", HUGE), b"a number has at most 64 bits"),
        (("fetch", "sensors", "c", "--count", HUGE), b"a number has at most 64 bits"),
    ],
    ids=["payload", "name", "nested", "upto", "number", "count"],
)
def test_an_odd_argument_is_refused_in_one_line(
    fill: Fill, arguments: tuple[str | bytes, ...], told: bytes
) -> None:
    done = said("streams", *arguments, "--data-dir", fill([("sensors/a", b"1")]))
    assert (done.returncode in (1, 2), told in done.stderr, done.stderr.count(b"\n")) == (True, True, 1)


@pytest.mark.parametrize("redirect", [">&-", "2>&-", ">&- 2>&- <&-"])
@pytest.mark.parametrize(
    "command", [("streams", "list"), ("streams", "append", "sensors", "x"), ("exports",)]
)
def test_commands_work_without_standard_streams(fill: Fill, command: tuple[str, ...], redirect: str) -> None:
    done = said(*command, "--data-dir", fill([("sensors/a", b"1")]), redirect=redirect)
    assert (done.returncode, done.stderr) == (0, b"")


def test_without_standard_input_nothing_is_appended_and_nothing_deleted(fill: Fill) -> None:
    data = fill([("sensors/a", b"1")])
    said("streams", "append", "sensors", "--data-dir", data, redirect="<&-")
    refused = said("streams", "delete", "sensors", "--data-dir", data, redirect="<&-")
    assert (refused.returncode, b"--yes" in refused.stderr) == (2, True)
    assert b'"messages":1,' in said("streams", "list", "--json", "--data-dir", data).stdout


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_an_encoding_without_a_character_gets_it_escaped(fill: Fill, option: tuple[str, ...]) -> None:
    data = fill([("sensors/a", "\u20ac".encode())])
    done = said("streams", "read", "sensors", *option, "--data-dir", data, PYTHONIOENCODING="ascii")
    assert (done.returncode, b"\\u20ac" in done.stdout) == (0, True)
