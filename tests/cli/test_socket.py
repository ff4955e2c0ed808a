"""Commands whose service ends while they ask it, or is only starting."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bridge.control import address
from tests.cli.conftest import Fill, streambridge


@contextmanager
def listening(data_dir: Path) -> Iterator[socket.socket]:
    """The control socket of a service that does not answer."""
    with socket.socket(socket.AF_UNIX) as listener, address(data_dir) as name:
        listener.bind(name)
        listener.listen()
        yield listener


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
