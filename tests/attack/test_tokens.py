"""Attacks on the files of tokens of port 8088: what is broken lets nobody in, and throws nobody out."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.greengrass.harness import CONNECT, frame
from tests.http.conftest import CONFIG, Service, eventually

ANN, BOB = "a" * 16, "b" * 16


def shown(port: int, token: str) -> tuple[socket.socket, bool]:
    """A client with a token, and whether it was let in."""
    client = socket.create_connection(("127.0.0.1", port), timeout=30)
    client.sendall(b"\x01" + frame(1, {**CONNECT, "authToken": token}))
    answer = b""
    while len(answer) < 10 and (more := client.recv(4096)):
        answer += more
    return client, b"Success" in answer or b"\x66status\x00" in answer


@pytest.mark.parametrize(
    "broken", ["ann\n", f"ann {ANN}\nbob {ANN}\n", "", "ann short\n", f"ann {ANN}\x00{BOB}\n", None]
)
def test_a_broken_file_of_tokens_lets_nobody_in_and_throws_nobody_out(
    tmp_path: Path, broken: str | None
) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"ann {ANN}\n")
    path.chmod(0o600)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "CONFIG", CONFIG)
    service = Service(tmp_path, "")
    service.process.terminate()
    service.process.wait()
