"""The protocol byte by byte: what no SDK would send, and what a client must never see."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge import cbor
from bridge.greengrass.connection import MAX_FRAME
from bridge.greengrass.frontend import Bounds
from tests.fakes.measured import least
from tests.greengrass.harness import CONNECT, Raw, Server, frame, many


@pytest.mark.parametrize(
    ("connect", "status"),
    [
        ({**CONNECT, "protocolVersion": "9.0.0"}, 0),  # the older one that it offers beside is known
        ({"requestId": "c", "protocolVersion": "1.0.0"}, 0),
        ({"requestId": "c", "protocolVersion": "1.1.0", "authToken": None}, 0),
        ({"requestId": "c", "protocolVersion": "1.1"}, 10),
        ({"requestId": "c"}, 11),
        ({"requestId": "c", "protocolVersion": 1}, 11),
    ],
)
def test_versions_are_negotiated(server: Server, connect: dict[str, Any], status: int) -> None:
    with Raw(server, connect=None) as raw:
        raw.socket.sendall(b"\x01" + frame(1, connect))
        answer = raw.greeted()
        assert answer["status"] == status
        assert answer["requestId"] == "c"
        assert answer["supportedProtocolVersions"] == ["1.1.0", "1.0.0"]
        assert status or answer["protocolVersion"] in ("1.1.0", "1.0.0")
        assert not status or raw.ended()


def test_another_connect_version_and_another_first_operation_are_answered(server: Server) -> None:
    for sent, status in (b"\x02", 8), (b"GET / HTTP/1.1\r\n\r\n", 8), (b"\x01" + frame(11, {}), 9):
        with Raw(server, connect=None) as raw:
            raw.socket.sendall(sent)
            assert raw.greeted()["status"] == status
            assert raw.ended()


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack(">ib", 0, 11),
        struct.pack(">ib", -5, 11),
        struct.pack(">ib", (1 << 30) + 1, 4),
        frame(11, b""),
        frame(11, b"\xff"),
        frame(11, b"\x80"),
        frame(11, b"\xa1\x69requestId"),
        frame(11, b"\xa0"),
        frame(11, {"requestId": ""}),
        frame(11, {"requestId": 5}),
        frame(4, b"\xd9\xd9\xf7\xa0"),
        frame(1, CONNECT),
        frame(4, b"\x9f" * 1000),
    ],
)
def test_a_breach_ends_the_connection_with_fin_and_no_other(server: Server, sent: bytes) -> None:
    with Raw(server) as bystander, Raw(server) as raw:
        raw.socket.sendall(sent + b"more that nobody reads" * 1000)
        assert raw.ended()
        assert bystander.ask(11)["status"] == 0


def test_nonsense_in_a_good_frame_gets_an_answer_of_its_operation(server: Server) -> None:
    server.stream()
    options: dict[str, Any]
    with Raw(server) as raw:
        for op, body, status in (
            (2, {}, 3),
            (2, {"definition": {"name": "a/b", "strategyOnFull": 0}}, 3),
            (2, {"definition": {"name": "x", "strategyOnFull": "Reject"}}, 3),
            (2, {"definition": {"name": "x"}}, 3),
            (2, {"definition": []}, 3),
            (2, {"definition": {"name": "x", "strategyOnFull": 0, "exportDefinition": {"kinesis": {}}}}, 3),
            (2, {"definition": {"name": "x", "strategyOnFull": 0, "exportDefinition": [1]}}, 3),
            (15, {"definition": {"name": "s", "strategyOnFull": 0, "exportDefinition": {"kinesis": [1]}}}, 3),
            (3, {"name": 7}, 3),
            (4, {"name": "s"}, 3),
            (4, {"name": "s", "payload": "text"}, 3),
            (4, {"name": "s", "payload": b""}, 3),
            (5, {"streamName": "s", "readMessagesOptions": {"minMessageCount": 0}}, 3),
            (5, {"streamName": "s", "readMessagesOptions": 5}, 3),
            (5, {"streamName": "s", "readMessagesOptions": {"minMessageCount": 2, "maxMessageCount": 1}}, 3),
            (13, {}, 3),
        ):
            reply = raw.ask(op, **body)
            assert (reply["op"], reply["status"]) == (
                {2: 7, 15: 16, 3: 8, 4: 9, 5: 10, 13: 14}[op],
                status,
            ), (
                op,
                body,
                reply,
            )
            assert reply["errorMessage"]
        options = {"minMessageCount": 1, "unheardOf": True, "maxMessageCount": None, "topic": "#"}
        assert raw.ask(5, streamName="s", readMessagesOptions=options)["status"] == 13
        for op in (0, 6, 12, 14, 18, 127):
            reply = raw.ask(op)
            assert (reply["op"], reply["status"]) == (17, 18)
        assert raw.ask(11)["streams"] == ["s"]


def test_frames_may_arrive_byte_by_byte_and_many_at_once(server: Server) -> None:
    server.stream()
    with Raw(server, connect=None) as raw:
        raw.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"\x01" + frame(1, CONNECT) + frame(4, {"requestId": "0", "name": "s", "payload": b"0"}):
            raw.socket.sendall(bytes((byte,)))
        assert raw.greeted()["status"] == 0
        assert raw.receive()[1] == {"requestId": "0", "status": 0, "sequenceNumber": 0}
        appends = [frame(4, {"requestId": str(n), "name": "s", "payload": b"%d" % n}) for n in range(1, 500)]
        read = {"requestId": "read", "streamName": "s", "readMessagesOptions": {"minMessageCount": 500}}
        raw.socket.sendall(b"".join(appends) + frame(5, read))
        replies = {body["requestId"]: body for _, body in (raw.receive() for _ in range(500))}
        assert [replies[str(n)]["sequenceNumber"] for n in range(1, 500)] == list(range(1, 500))
        assert [m["payload"] for m in replies["read"]["messages"]] == [b"%d" % n for n in range(500)]


def test_a_request_that_is_too_large_is_passed_over_and_answered(server: Server) -> None:
    server.stream()
    with Raw(server) as raw:
        length = MAX_FRAME + 1000
        beginning = cbor2.dumps({"requestId": "big", "name": "s"})
        raw.socket.sendall(struct.pack(">ib", length, 4) + beginning)
        left = length - 1 - len(beginning)
        while left:
            left -= raw.socket.send(bytes(min(left, 1 << 20)))
        op, reply = raw.receive()
        assert (op, reply["requestId"], reply["status"]) == (9, "big", 4)
        assert raw.ask(4, name="s", payload=b"x")["sequenceNumber"] == 0


def test_a_minimum_that_no_reply_can_hold_is_an_error_and_a_large_maximum_is_cut(tmp_path: Path) -> None:
    with Server(tmp_path, read_step=100_000, read_bytes=1_000_000) as server, Raw(server) as raw:
        server.stream()
        server.append(*[b"x" * 10_000] * 150)
        for options, number in (
            ({"maxMessageCount": 150}, 9),
            ({"minMessageCount": 90, "maxMessageCount": 150}, 90),
        ):
            reply = raw.ask(5, streamName="s", readMessagesOptions=options)
            assert len(reply["messages"]) >= number, options
            assert len(reply["messages"]) < 110
            assert [m["sequenceNumber"] for m in reply["messages"]] == list(range(len(reply["messages"])))
        reply = raw.ask(5, streamName="s", readMessagesOptions={"minMessageCount": 150})
        assert reply["status"] == 7


def test_a_large_maximum_gives_what_takes_no_long_turn_and_a_large_minimum_all_of_it(server: Server) -> None:
    server.stream()
    server.append(*[b"x"] * 25_000)
    with Raw(server) as raw:
        most = {"minMessageCount": 1, "maxMessageCount": 1_000_000}
        numbers = [
            m["sequenceNumber"] for m in raw.ask(5, streamName="s", readMessagesOptions=most)["messages"]
        ]
        assert numbers == list(range(10_000))
        least = {"minMessageCount": 24_000, "desiredStartSequenceNumber": 500}
        found = raw.ask(5, streamName="s", readMessagesOptions=least)["messages"]
        assert [message["sequenceNumber"] for message in found] == list(range(500, 24_500))


def test_thousands_of_waiting_reads_are_woken_by_what_they_need_alone(server: Server) -> None:
    server.stream()
    with many(20, lambda: Raw(server)) as clients:
        for number, client in enumerate(clients):
            for n in range(100):
                options = {"minMessageCount": 1 + n % 10, "readTimeoutMillis": 50_000}
                body = {"requestId": f"{number}-{n}", "streamName": "s", "readMessagesOptions": options}
                client.send(5, body)
        server.wait_until(lambda: len(server.manager._reads.waiting) == 2000, "2000 reads wait")
        for number in range(1, 11):
            server.append(b"x")
            for client in clients:
                found = [client.receive()[1] for _ in range(10)]
                assert {len(reply["messages"]) for reply in found} == {number}
            assert len(server.manager._reads.waiting) == 2000 - number * 200


def test_reads_that_wait_cost_no_time_until_something_comes(server: Server) -> None:
    server.stream()
    clock = time.pthread_getcpuclockid(server._thread.ident or 0)

    def appends() -> float:
        """The CPU time of a hundred messages."""
        before = time.clock_gettime(clock)
        for _ in range(100):
            server.append(b"x")
        return time.clock_gettime(clock) - before

    alone = appends()
    with many(4, lambda: Raw(server)) as clients:
        options = {"desiredStartSequenceNumber": 1000, "readTimeoutMillis": 50_000}
        for client in clients:
            for n in range(500):
                client.send(5, {"requestId": str(n), "streamName": "s", "readMessagesOptions": options})
        server.wait_until(lambda: len(server.manager._reads.waiting) == 2000, "2000 reads wait")

        def idle() -> float:
            before = time.clock_gettime(clock)
            threading.Event().wait(0.5)  # a span of idleness is what is measured
            return time.clock_gettime(clock) - before

        assert least(idle, 0.1) < 0.1
        assert least(appends, 10 * alone) < 10 * alone


def test_reads_that_gave_up_are_forgotten(server: Server) -> None:
    server.stream()
    with Raw(server) as raw:
        options = {"desiredStartSequenceNumber": 1000, "readTimeoutMillis": 30}
        for _ in range(20):
            for n in range(50):
                raw.send(5, {"requestId": str(n), "streamName": "s", "readMessagesOptions": options})
            assert {raw.receive()[1]["status"] for _ in range(50)} == {13}
        assert len(server.manager._reads.waiting) < 200


def test_reads_that_wait_end_with_their_connection(server: Server) -> None:
    server.stream()
    options = {"desiredStartSequenceNumber": 1000, "readTimeoutMillis": 9_000_000_000_000}
    for _ in range(10):
        with Raw(server) as raw:
            for n in range(100):
                raw.send(5, {"requestId": str(n), "streamName": "s", "readMessagesOptions": options})
            server.wait_until(lambda: len(server.manager._reads.waiting) >= 100, "the reads wait")
        server.wait_until(lambda: not server.front.connections, "the connection is gone")
    assert len(server.manager._reads.waiting) < 250


def test_deleting_a_stream_wakes_the_reads_that_wait(server: Server) -> None:
    server.stream()
    with Raw(server) as raw:
        raw.send(
            5, {"requestId": "w", "streamName": "s", "readMessagesOptions": {"readTimeoutMillis": 50_000}}
        )
        server.wait_until(lambda: len(server.manager._reads.waiting), "a read waits")
        server.call(server.manager.delete, "s")
        assert raw.receive()[1]["status"] == 5


def test_an_append_whose_stream_is_deleted_before_it_is_stored_learns_that_the_stream_is_gone(
    server: Server,
) -> None:
    server.stream()
    with Raw(server) as raw:
        append, delete = {"requestId": "a", "name": "s", "payload": b"x"}, {"requestId": "d", "name": "s"}
        raw.socket.sendall(frame(4, append) + frame(3, delete))
        replies = {reply["requestId"]: reply for _, reply in (raw.receive(), raw.receive())}
        assert (replies["a"]["status"], replies["d"]["status"]) == (5, 0)
        assert replies["a"]["errorMessage"] == "stream 's' was deleted before the message was stored"


def test_a_stop_answers_what_was_read_and_ends_with_fin(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        server.stream()
        raw = Raw(server)
        raw.send(
            5, {"requestId": "w", "streamName": "s", "readMessagesOptions": {"readTimeoutMillis": 50_000}}
        )
        server.wait_until(lambda: len(server.manager._reads.waiting), "a read waits")
        began = time.monotonic()
    with raw:
        assert time.monotonic() - began < 40, "it does not wait for what the read waits for"
        assert raw.receive()[1]["status"] == 13
        assert raw.ended()
    assert not (server.data_dir / "streambridge.sock").exists()


def test_a_client_that_does_not_read_its_replies_is_not_read_from(server: Server) -> None:
    server.stream()
    server.append(*[b"x" * 100_000] * 100)
    with Raw(server) as bystander, Raw(server) as raw:
        for n in range(300):
            body = {"requestId": str(n), "streamName": "s", "readMessagesOptions": {"minMessageCount": 100}}
            raw.send(5, body)
        for _ in range(20):
            assert bystander.ask(11)["status"] == 0
        held, ends = 0, time.monotonic() + 60
        while not held:  # the first reply is being written
            assert time.monotonic() < ends
            assert bystander.ask(11)["status"] == 0
            held = sum(c.transport.get_write_buffer_size() for c in list(server.front.connections))
        assert held < 30_000_000
        for _ in range(10):
            assert len(raw.receive()[1]["messages"]) == 100


def test_a_client_that_leaves_in_the_middle_leaves_nothing_behind(server: Server) -> None:
    server.stream()
    for cut in range(1, 60, 7):
        with Raw(server) as raw:
            raw.send(
                5, {"requestId": "w", "streamName": "s", "readMessagesOptions": {"readTimeoutMillis": 50_000}}
            )
            append = frame(4, {"requestId": "a", "name": "s", "payload": b"x" * 30})
            raw.socket.sendall(append + append[:cut])
    server.wait_until(lambda: not server.front.connections, "all connections are gone")
    assert server.newest() == 8  # what was whole is stored
    assert not server.front._partial
    assert not server.front._tasks


def test_slow_writers_are_ended(tmp_path: Path) -> None:
    with Server(tmp_path, bounds=Bounds(handshake=0.1)) as server, Raw(server, connect=None) as silent:
        assert silent.ended()
    with Server(tmp_path, bounds=Bounds(stalled=0.1)) as server:
        with Raw(server) as stalled:
            stalled.socket.sendall(frame(11, {"requestId": "x"})[:-1])
            assert stalled.ended()
        with Raw(server) as idle:  # without a frame begun it may be silent longer
            threading.Event().wait(0.3)
            assert idle.ask(11)["status"] == 0


def test_unfinished_frames_are_bounded_over_all_clients(tmp_path: Path) -> None:
    whole = frame(4, {"requestId": "a", "name": "s", "payload": bytes(600_000)})
    with (
        Server(tmp_path, bounds=Bounds(partial_bytes=1_000_000)) as server,
        Raw(server) as first,
        Raw(server) as second,
    ):
        server.stream()
        first.socket.sendall(whole[:-1])
        server.wait_until(lambda: server.front._partial, "half a frame is there")
        second.socket.sendall(whole[:-1])
        assert second.ended()
        first.socket.sendall(whole[-1:])
        assert first.receive()[1]["status"] == 0
        assert not server.front._partial


# -- the codec, and anything at all ------------------------------------------------------------

PLAIN = st.recursive(
    st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary() | st.booleans() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), PLAIN))
def test_the_codec_agrees_with_another_one(value: dict[str, Any]) -> None:
    assert cbor.decode_map(cbor2.dumps(value)) == value


def test_items_are_counted_in_maps_and_arrays_of_any_length() -> None:
    some = {"a": [[], {}], "b": {"c": "", "d": 1.5}, "e": list(range(40)), "f": [b"x"] * 40, "payload": b"x"}
    items = 2 + 2 + 40 // 4 + 40 // 4
    assert cbor.decode_map(cbor2.dumps(some), most=items) == some
    with pytest.raises(cbor.TooMany, match=f"^more than {items - 1} items$"):
        cbor.decode_map(cbor2.dumps(some), most=items - 1)
    endless = cbor2.dumps(some, indefinite_containers=True)
    assert cbor.decode_map(endless, most=200) == some
    with pytest.raises(cbor.TooMany):
        cbor.decode_map(endless, most=80)
    payload = cbor2.dumps({"requestId": "r", "name": "s", "payload": bytes(60 << 20)})
    assert len(cbor.decode_map(payload, most=0)["payload"]) == 60 << 20


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_malformed(data: bytes) -> None:
    with contextlib.suppress(cbor.Malformed):
        cbor.decode_map(data)
    cbor.first_entries(data)


def test_indefinite_lengths_as_the_java_sdk_sends_them_are_read() -> None:
    data = b"\xbf\x69requestId\x61a\x67payload\x5f\x41x\x41y\xff"
    data += b"\x61t\x7f\x61a\xff\x61l\x9f\x01\x20\xff\x61n\xf6\xff"
    assert cbor.decode_map(data) == {"requestId": "a", "payload": b"xy", "t": "a", "l": [1, -1], "n": None}


@settings(max_examples=25)
@given(st.randoms(use_true_random=False))
def test_whatever_is_sent_the_server_answers_or_ends_and_lives_on(rnd: random.Random) -> None:
    server = FUZZED[0]
    good = [
        frame(2, {"requestId": "c", "definition": {"name": "f", "strategyOnFull": 1}}),
        frame(4, {"requestId": "a", "name": "f", "payload": b"x" * 50}),
        frame(5, {"requestId": "r", "streamName": "f", "readMessagesOptions": {"maxMessageCount": 9}}),
        frame(13, {"requestId": "d", "name": "f"}),
        frame(3, {"requestId": "x", "name": "f"}),
    ]
    data = bytearray(b"".join(rnd.choices(good, k=6)))
    for _ in range(rnd.randrange(4)):
        at = rnd.randrange(len(data))
        data[at : at + rnd.randrange(3)] = rnd.randbytes(rnd.randrange(4))
    with Raw(server) as raw:
        raw.socket.sendall(data)
        raw.socket.shutdown(socket.SHUT_WR)
        assert raw.ended()


FUZZED: list[Server] = []


@pytest.fixture(autouse=True, scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One server for all examples; that it stops well at the end is part of the test."""
    with Server(tmp_path_factory.mktemp("fuzzed")) as server:
        FUZZED.append(server)
        yield
        with Raw(server) as raw:
            assert raw.ask(11)["status"] == 0
        server.wait_until(lambda: not server.front.connections, "all connections are gone")
    FUZZED.clear()
