"""Commands whose service ends while they ask it, or is only starting."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bridge.control import SOCKET, address
from tests.cli.conftest import Fill, streambridge


@contextmanager
def listening(data_dir: Path) -> Iterator[socket.socket]:
    """The control socket of a service that does not answer."""
    with socket.socket(socket.AF_UNIX) as listener, address(data_dir) as name:
        listener.bind(name)
        listener.listen()
        yield listener


@contextmanager
def locked(data_dir: Path) -> Iterator[None]:
    """What a service does first at its start: it locks the data directory."""
    lock = os.open(data_dir / "lock", os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@pytest.mark.parametrize(
    "command",
    [
        ("append", "sensors", "x"),
        ("create", "other"),
        ("update", "sensors", "description=x"),
        ("purge", "sensors", "--yes"),
        ("delete", "sensors", "--yes"),
    ],
    ids=lambda command: command[0],
)
def test_a_change_says_so_if_the_service_ends_meanwhile(fill: Fill, command: tuple[str, ...]) -> None:
    data = fill([("sensors/a", b"1")])
    with listening(data) as listener:
        listener.settimeout(60)

        def end() -> None:
            asked, _ = listener.accept()
            asked.close()

        ending = threading.Thread(target=end)
        ending.start()
        done = streambridge("streams", *command, "--data-dir", data)
        ending.join()
    assert (done.returncode, "check whether the operation was carried out" in done.stderr) == (1, True)


@pytest.mark.parametrize("command", [("streams", "describe", "sensors"), ("exports",), ("streams", "list")])
def test_queries_are_answered_while_the_service_starts_after_a_kill(
    fill: Fill, command: tuple[str, ...]
) -> None:
    data = fill(
        [("sensors/a", b"1")], export_definition={"http": [{"identifier": "h", "uri": "http://127.0.0.1:1/"}]}
    )
    with listening(data):
        pass  # the socket of the killed one stays
    assert (data / SOCKET).is_socket()
    with locked(data):
        done = streambridge(*command, "--data-dir", data)
    assert (done.returncode, done.stderr) == (0, "")
    assert "sensors" in done.stdout
