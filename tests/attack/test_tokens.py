"""Attacks on the file of tokens of port 8088: a broken one changes nothing."""

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


def test_a_broken_file_of_tokens_lets_in_those_of_the_last_good_one_and_throws_nobody_out(
    gateway: Gateway,
) -> None:
    path, good, new = gateway.data.parent / "tokens", TOKENS["pump-8"], "f4" * 10
    sound = path.read_text()
    twice = f"pump-8 {new}\npump-7 {new}\n"
    lines = ("", "pump-8\n", twice, f"pump-8 {new}\n\xff", f"pump-9 {new}\n{sound}x")
    try:
        path.write_text(f"{sound}pump-7 {new}\n")
        assert show(gateway, new)[1]  # one that never was in the file is no token; root needs none
        path.write_text(sound)
        assert not show(gateway, new)[1]
        stays, came_in = show(gateway, good)
        assert came_in
        for broken in lines:
            path.write_text(broken, encoding="latin-1")
            assert show(gateway, good)[1], broken
            assert not show(gateway, new)[1], broken
            path.write_text(sound)
            assert show(gateway, good)[1], "and the next guess is not delayed for longer"
        path.write_text(f"{sound}pump-7 {new}\n")
        path.chmod(0o604)
        assert not show(gateway, new)[1], "others can read it"
        eventually(
            lambda: "it has secrets" in gateway.log() and "its last good content stays" in gateway.log()
        )
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
