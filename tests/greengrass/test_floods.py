"""Floods on port 8088: guesses are slow, connections, memory and the work for one request bounded."""

from __future__ import annotations

import contextlib
import time
import tracemalloc
from pathlib import Path

import cbor2
import msgspec
import pytest

from bridge.access.guesses import AT_A_TIME, FIRST_DELAY
from bridge.net.addresses import network_of

from ..fakes.measured import ATTEMPTS, least, plain_loop
from .harness import CONNECT, DEADLINE, Raw, Server, frame

STRANGER = 65534  # a local user who needs a token


class Limited(Server):
    """A server with other limits."""

    def __init__(self, root: Path, token: bytes | None = None, **limits: int) -> None:
        file = root / "token"
        if token is not None:
            file.write_bytes(token)
        super().__init__(
            root, token_file=None if token is None else file, owner=None if token is None else STRANGER
        )
        self.config = msgspec.structs.replace(self.config, **limits)


def guess(server: Server, token: str) -> Raw:
    """A client that has sent a token and waits for its answer."""
    client = Raw(server, connect=None)
    client.socket.sendall(b"\x01" + frame(1, {**CONNECT, "authToken": token}))
    return client


def test_each_wrong_token_is_answered_later_and_a_right_one_at_once(tmp_path: Path) -> None:
    with Limited(tmp_path, b"right") as server:
        took = []
        for _ in range(3):
            began = time.monotonic()
            with guess(server, "wrong") as client:
                assert client.greeted()["status"] != 0
                assert client.ended()
            took.append(time.monotonic() - began)
        assert took[0] >= FIRST_DELAY
        assert took[2] >= 4 * FIRST_DELAY, "later each time"

        def right() -> float:
            began = time.monotonic()
            with guess(server, "right") as client:
                assert client.greeted()["status"] == 0
            return time.monotonic() - began

        assert least(right, 4 * FIRST_DELAY) < 4 * FIRST_DELAY


def test_guessing_in_parallel_is_no_faster_even_for_clients_that_disconnect(tmp_path: Path) -> None:
    with Limited(tmp_path, b"right") as server:
        for _ in range(5):  # so that the answers to come are late
            server.call(server.front.guesses.wrong, network_of("127.0.0.1"))
        for number in range(16):
            guess(server, f"wrong{number}").socket.close()
        server.wait_until(lambda: len(server.front.connections) == 16)
        deadline = time.monotonic() + DEADLINE
        refusal = None
        while refusal is None:
            assert time.monotonic() < deadline, (
                "all 16 have been looked at, and their answers are still to come"
            )
            with guess(server, "right") as client:
                refusal = client.greeted().get("errorMessage")
        assert "too many wrong tokens" in refusal, "a guess that is not looked at"


def test_wrong_tokens_of_others_keep_no_client_out_whose_token_was_right_before(tmp_path: Path) -> None:
    old, removed = "the-right-token-here", "a-token-that-is-removed"
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text(f"old {old}\ngone {removed}\n")

    with Server(tmp_path, tokens_file=tokens, owner=STRANGER) as server:

        def shown(token: str) -> str:
            """Why a token is refused; empty if it is not."""
            with guess(server, token) as client:
                return str(client.greeted().get("errorMessage", ""))

        assert [shown(token) for token in (old, removed)] == ["", ""]
        tokens.write_text(f"old {old}\n")
        for _ in range(5):  # so that the answers to come are late
            server.call(server.front.guesses.wrong, network_of("127.0.0.1"))
        for _ in range(ATTEMPTS):  # on a machine that stands still, the answers have come before the end
            with contextlib.ExitStack() as stack:
                for number in range(AT_A_TIME):
                    stack.enter_context(guess(server, f"wrong{number}"))
                server.wait_until(
                    lambda: sum("token" in one.holds for one in server.front.connections) == AT_A_TIME
                )
                answers = [shown(old), shown(old)]
                if "too many wrong tokens" in (why := shown(removed)):
                    break
                assert why, "it has been removed"
        else:
            raise AssertionError("16 wrong tokens are looked at, and one more")
        assert answers == ["", ""]


@pytest.mark.parametrize("limit", ["connections", "connections_per_address"])
def test_connections_are_bounded_in_all_and_per_address(tmp_path: Path, limit: str) -> None:
    with Limited(tmp_path, **{limit: 5}) as server, contextlib.ExitStack() as stack:
        kept = [stack.enter_context(Raw(server)) for _ in range(5)]
        for _ in range(20):
            with Raw(server, connect=None) as refused:
                assert refused.ended()
        assert server.front.stats()["refused_limit"] == 20
        assert all(client.ask(8)["op"] for client in kept)
        kept[0].socket.close()
        server.wait_until(lambda: len(server.front.connections) == 4)
        with Raw(server) as client:
            assert client.ask(8)["op"]


def test_a_client_that_asks_for_nothing_is_disconnected_and_one_that_asks_is_not(tmp_path: Path) -> None:
    with Limited(tmp_path, idle_timeout=1000) as server:

        def outlived() -> bool:
            """Whether the busy one is still there; on a machine that stands still it may seem idle, too."""
            server.wait_until(lambda: not server.front.connections)
            with Raw(server) as silent, Raw(server) as busy:
                try:
                    while len(server.front.connections) == 2:
                        assert busy.ask(8)["op"]
                    assert silent.ended(), "with FIN, so that the SDK connects again"
                    return bool(busy.ask(8)["op"])
                except (EOFError, OSError):
                    return False

        assert any(outlived() for _ in range(5))
        assert server.front.stats()["idle"] >= 1


def test_half_connects_are_bounded_in_all_and_others_come_in(tmp_path: Path) -> None:
    with Limited(tmp_path) as server, contextlib.ExitStack() as stack:
        half = b"\x01" + frame(1, b"x" * 60_000)[:-1000]
        for number in range(300):
            client = stack.enter_context(Raw(server, connect=None))
            with contextlib.suppress(OSError):
                client.socket.sendall(half)
            if number % 100 == 99:
                with Raw(server) as good:
                    assert good.ask(8)["op"]
        server.wait_until(lambda: server.front.stats().get("ended", 0) > 100)
        assert server.front.guests.total <= 8 << 20, "300 of them would be 17 MiB"


@pytest.mark.parametrize("op", [4, 5, 11, 99])
def test_a_request_of_many_small_items_is_answered_without_being_decoded(tmp_path: Path, op: int) -> None:
    maps = b"\x9a" + (1 << 21).to_bytes(4, "big") + b"\xa0" * (1 << 21)
    body = b"\xa2" + cbor2.dumps("requestId") + cbor2.dumps("r") + cbor2.dumps("more") + maps
    with Server(tmp_path) as server, Raw(server) as client:

        def cost() -> float:
            unit, began = plain_loop(), server.call(time.thread_time)
            client.send(op, body)
            found = client.receive()[1]
            assert (found["requestId"], found["status"]) == ("r", 3)
            assert "at most 20,000 items" in found["errorMessage"]
            return (server.call(time.thread_time) - began) / unit

        assert least(cost, 12) < 12, "so many times a plain loop"
        assert client.ask(11)["status"] == 0, "and the connection goes on"


def test_a_waiting_read_keeps_little_of_its_request(tmp_path: Path) -> None:
    with Server(tmp_path) as server, Raw(server) as client:
        server.stream()
        options = {"desiredStartSequenceNumber": 1, "readTimeoutMillis": 10**9}
        tracemalloc.start()
        try:
            for number in range(100):
                body = {"requestId": str(number), "streamName": "s", "readMessagesOptions": options}
                client.send(5, {**body, "more": "x" * (1 << 20)})
            assert client.ask(11)["status"] == 0, "all were read, and none is answered"
            assert tracemalloc.get_traced_memory()[0] < 16 << 20
        finally:
            tracemalloc.stop()
        client.send(5, {**body, "requestId": "x" * 1025})
        assert client.ended(), "a long requestId would be kept"


def test_a_connect_of_many_items_ends_its_connection(tmp_path: Path) -> None:
    with Server(tmp_path) as server, Raw(server, connect=None) as client:
        client.socket.sendall(b"\x01" + frame(1, {**CONNECT, "otherSupportedProtocolVersions": [""] * 2000}))
        assert client.ended()
        assert server.front.counts["ended"] == 1
