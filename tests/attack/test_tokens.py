"""Attacks on the file of tokens of port 8088: a broken one lets nobody in, and throws nobody out."""

from __future__ import annotations

from tests.attack.conftest import TOKENS, Attacker, Gateway
from tests.greengrass.harness import CONNECT, frame
from tests.http.conftest import eventually

LIST = 11


def show(gateway: Gateway, token: str) -> tuple[Attacker, bool]:
    """A client with a token, and whether it was let in."""
    client = gateway.attack("greengrass")
    client.send(b"\x01" + frame(1, {**CONNECT, "authToken": token}))
    return client, alive(client, skip=1)


def alive(client: Attacker, *, skip: int = 0) -> bool:
    """Whether the gateway still answers it; `skip` bytes are read first."""
    client.read(skip)
    if skip:
        client.read(int.from_bytes(client.read(4), "big"))  # the answer to CONNECT
    client.send(frame(LIST, {"requestId": "r"}))
    size = client.read(4)
    return len(size) == 4 and len(client.read(int.from_bytes(size, "big"))) > 1


def test_a_broken_file_of_tokens_lets_nobody_in_and_throws_nobody_out(gateway: Gateway) -> None:
    path, good = gateway.data.parent / "tokens", TOKENS["pump-8"]
    sound = path.read_text()
    lines = ("", "pump-8\n", f"pump-8 {good}\npump-7 {good}\n", f"pump-8 {good}\n\xff", f"{sound}x")
    try:
        stays, came_in = show(gateway, good)
        assert came_in
        for broken in lines:
            path.write_text(broken, encoding="latin-1")
            assert not show(gateway, good)[1], broken
            path.write_text(sound)
            assert show(gateway, good)[1], "and the next guess is not delayed for longer"
        path.chmod(0o604)
        assert not show(gateway, good)[1], "others can read it"
        eventually(lambda: "reload of [mqtt] failed" in gateway.log() and "tokens_file" in gateway.log())
        assert good not in gateway.log()
        assert alive(stays)
    finally:
        path.write_text(sound)
        path.chmod(0o600)
    assert show(gateway, good)[1]
    path.write_text(sound.replace(good, "e" * 20))
    try:
        assert stays.rest() == b"", "its token is gone"
    finally:
        path.write_text(sound)
