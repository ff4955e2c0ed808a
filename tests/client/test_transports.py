"""One client for asyncio and threads, over MQTT and over the Stream Manager protocol."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import logging
import os
import socket
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import cbor2
import pytest

import bridge.client
from bridge.client import (
    AsyncStreamManagerClient,
    ClientException,
    ConnectFailedException,
    ConsumerConfig,
    ExportDefinition,
    InvalidRequestException,
    KinesisConfig,
    Limits,
    MessageStreamDefinition,
    NotEnoughMessagesException,
    ReadMessagesOptions,
    ResourceNotFoundException,
    StrategyOnFull,
    StreamManagerClient,
    StreamManagerException,
    UnknownOperationException,
    ValidationException,
)
from bridge.mqtt.wire.packets import V5
from tests.client.conftest import Broker, Line
from tests.greengrass import test_guide
from tests.greengrass.harness import Server
from tests.mqtt.harness import publish

NEW = {"strategy_on_full": StrategyOnFull.RejectNewData}
FAST = (0.05, 0.2)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "server") as running:
        yield running


def connections_to(port: int) -> list[socket.socket]:
    """Copies of this process's sockets that are connected to a port."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # another kind of file, or closed since
            sock = socket.socket(fileno=os.dup(int(path.name)))
            if sock.family == socket.AF_INET and sock.getpeername()[1] == port:
                found.append(sock)
            else:
                sock.close()
    return found


class Awaiting(ast.NodeTransformer):
    """Makes a program for the blocking client one for asyncio."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node.func:
            case ast.Name("StreamManagerClient") | ast.Attribute(ast.Name("client")):
                return ast.Await(node)
        return node


def url(server: Server, port: int | None = None) -> str:
    return f"streammanager://127.0.0.1:{port or server.port}"


def test_both_clients_have_the_same_operations_with_the_same_arguments_and_documentation() -> None:
    names = {name for name in dir(StreamManagerClient) if name[0] != "_"} - {"close", "connected"}
    others = {name for name in dir(AsyncStreamManagerClient) if name[0] != "_"}
    assert others == names | {"close", "connected", "connect", "request_timeout"} - {"request_timeout"}
    for name in names:
        ours, theirs = getattr(StreamManagerClient, name), getattr(AsyncStreamManagerClient, name)
        assert inspect.signature(ours) == inspect.signature(theirs)
        assert ours.__doc__
        assert not inspect.iscoroutinefunction(ours)
    assert inspect.signature(StreamManagerClient) == inspect.signature(AsyncStreamManagerClient)


@pytest.mark.parametrize("snippet", ["OPERATIONS", "UPDATE", "TASKS"])
def test_the_guides_snippets_run_over_the_stream_manager_protocol(server: Server, snippet: str) -> None:
    names = {name: getattr(bridge.client, name) for name in bridge.client.__all__}
    names["StreamManagerClient"] = lambda: StreamManagerClient(url(server))
    code = textwrap.dedent(getattr(test_guide, snippet))
    exec("import asyncio, json, time, uuid\n" + code, names)


@pytest.mark.parametrize("snippet", ["OPERATIONS", "UPDATE", "TASKS"])
def test_the_guides_snippets_run_with_asyncio(broker: Broker, snippet: str) -> None:
    names = {name: getattr(bridge.client, name) for name in bridge.client.__all__}
    names["StreamManagerClient"] = lambda: AsyncStreamManagerClient(port=broker.port).connect()
    code = ast.parse(textwrap.dedent(getattr(test_guide, snippet)))
    main = f"async def main():\n{textwrap.indent(ast.unparse(Awaiting().visit(code)), '    ')}"
    exec(f"import asyncio, json, time, uuid\n{main}", names)
    asyncio.run(names["main"]())


def test_an_address_names_the_transport(broker: Broker, server: Server) -> None:
    for address in (f"mqtt://127.0.0.1:{broker.port}", f"mqtt://127.0.0.1:{broker.port}/"):
        with StreamManagerClient(address) as client:
            assert (client.host, client.port, client.connected) == ("127.0.0.1", broker.port, True)
    with StreamManagerClient("streammanager://127.0.0.1", server.port) as client:
        assert client.list_streams() == []
    assert AsyncStreamManagerClient("mqtt://h").port == 1883
    assert AsyncStreamManagerClient("mqtts://h").port == 8883
    assert AsyncStreamManagerClient("streammanager://h").port == 8088
    assert AsyncStreamManagerClient("::1").host == "::1"
    for wrong in (
        "tcp://h:1883",
        "http://h",
        "mqtt://",
        "mqtt://h:x",
        "mqtt://h/path",
        "mqtt://u:p@h",
        "",
    ):
        with pytest.raises(ValidationException, match="is not an address"):
            AsyncStreamManagerClient(wrong)
    with pytest.raises(ValidationException, match="username has no meaning for streammanager://"):
        StreamManagerClient("streammanager://h", username="u")
    with pytest.raises(ValidationException, match="auth_token has no meaning for mqtt://"):
        StreamManagerClient("h", auth_token="t")


def test_what_the_stream_manager_protocol_lacks_is_refused_and_not_ignored(server: Server) -> None:
    server.stream("s")
    with StreamManagerClient(url(server)) as client:
        for definition, what in (
            (MessageStreamDefinition("t", topics=["a/#"], **NEW), "topics"),
            (MessageStreamDefinition("t", limits=Limits(max_messages=1), **NEW), "limits"),
            (
                MessageStreamDefinition(
                    "t", export_definition=ExportDefinition(consumer=[ConsumerConfig("c")]), **NEW
                ),
                "consumer",
            ),
            (
                MessageStreamDefinition(
                    "t",
                    export_definition=ExportDefinition(
                        kinesis=[KinesisConfig("k", "n", more={"partitionKey": "x"})]
                    ),
                    **NEW,
                ),
                "partitionKey",
            ),
        ):
            with pytest.raises(ValidationException, match=rf"has no {what}; use mqtt://"):
                client.create_message_stream(definition)
        with pytest.raises(ValidationException, match="ifVersion"):
            client.update_message_stream(MessageStreamDefinition("s", **NEW), if_version="1")
        with pytest.raises(ValidationException, match="topic"):
            client.read_messages("s", ReadMessagesOptions(topic="a/#"))
        for append in (client.append_message, client.append_messages):
            with pytest.raises(ValidationException, match="message_id"):
                many = append == client.append_messages
                append("s", [b"x"], message_ids=[b"i"]) if many else append("s", b"x", message_id=b"i")
        for call in (
            lambda: client.purge_message_stream("s"),
            lambda: client.fetch_messages("s", "c"),
            lambda: client.ack_messages("s", "c", [1]),
            lambda: client.pause_exports("s"),
        ):
            with pytest.raises(UnknownOperationException, match="use mqtt://"):
                call()
        assert client.list_streams() == ["s"]


def test_many_messages_go_one_by_one_over_the_stream_manager_protocol(server: Server) -> None:
    server.stream("s", limits=Limits(max_messages=3, discard="new"))
    with StreamManagerClient(url(server)) as client:
        with pytest.raises(StreamManagerException, match="max_messages") as failed:
            client.append_messages("s", [b"%d" % number for number in range(5)])
        assert failed.value.sequence_numbers == [0, 1, 2]
        assert [info.definition.name for info in client.describe_message_streams()] == ["s"]
        assert [message.payload for message in client.tail("s", 0, timeout=0.1)] == [b"0", b"1", b"2"]


def test_an_append_whose_reply_is_lost_is_left_to_the_caller_over_the_stream_manager_protocol(
    server: Server,
) -> None:
    server.stream("s")
    with (
        Line(server.port) as line,
        StreamManagerClient(url(server, line.port), reconnect_delay=FAST) as client,
    ):
        line.lose_replies = True
        with pytest.raises(ConnectionError, match="check whether appendMessage was carried out"):
            client.append_message("s", b"x")
        assert client.describe_message_stream("s").storage_status.newest_sequence_number == 0
        line.lose_replies = True
        assert [message.payload for message in client.read_messages("s")] == [b"x"]  # reads are repeated
        assert line.cuts == 2


def test_a_token_is_sent_and_a_wrong_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text("right\n")
    with Server(tmp_path, token_file=token, owner=65534) as server:
        with StreamManagerClient(url(server), auth_token="right") as client:
            assert client.list_streams() == []
        with pytest.raises(ConnectFailedException, match="the token is not in"):
            StreamManagerClient(url(server), auth_token="wrong")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "wrong")
        with pytest.raises(ConnectFailedException, match="the token is not in"):
            StreamManagerClient(url(server))


def test_a_service_that_is_absent_or_speaks_otherwise_is_an_error_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"streammanager://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConnectionError, match="does not answer in the Stream Manager protocol"):
            StreamManagerClient(address, connect_timeout=0.2)
    with pytest.raises(ConnectionError, match="cannot connect"):
        StreamManagerClient(address)


def test_the_kernel_finds_out_within_a_minute_that_the_service_has_vanished(server: Server) -> None:
    with StreamManagerClient(f"streammanager://127.0.0.1:{server.port}"):
        (sock,) = connections_to(server.port)
        with sock:
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle, between, probes = (
                sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{what}"))
                for what in ("IDLE", "INTVL", "CNT")
            )
    assert idle + probes * between == 60  # seconds


@pytest.mark.parametrize("host", ["a" * 70 + ".example", "a..example", "[::1"])
@pytest.mark.parametrize("scheme", ["", "mqtt://", "streammanager://"])
def test_a_host_that_is_none_is_an_address_that_is_none(scheme: str, host: str) -> None:
    with pytest.raises(ValidationException, match="is not an address"):
        StreamManagerClient(f"{scheme}{host}")


@pytest.mark.parametrize(
    "reply",
    [b"\xa1irequestId\x80", b"\x81" * 100_000 + b"\1", b"\xc0ax", b"\xbf\xff", b"\x01", b""],
    ids=["list", "nested", "tag", "empty", "number", "nothing"],
)
def test_whatever_comes_as_a_reply_the_connection_stays(reply: bytes) -> None:
    """A broker that lets strangers publish replies sends one, and then the right one."""

    def serve(listener: socket.socket) -> None:
        line, _ = listener.accept()
        with line:
            line.recv(1000)
            line.sendall(b"\x20\3\0\0\0")
            line.sendall(b"\x90\4" + line.recv(1000)[2:4] + b"\0\0")
            line.sendall(publish("streambridge/victim/x/reply", reply, level=V5))
            request = line.recv(1000)
            request_id = cbor2.loads(request[request.index(b"\xa1") :])["requestId"]
            found = cbor2.dumps({"requestId": request_id, "status": 0, "streams": ["s"]})
            line.sendall(publish("streambridge/victim/listStreams/reply", found, level=V5))
            line.recv(1000)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=serve, args=(listener,))
        serving.start()
        with StreamManagerClient(port=listener.getsockname()[1], client_id="victim") as client:
            assert client.list_streams() == ["s"]
        serving.join()


def test_the_asyncio_client_leaves_no_connection_behind(server: Server) -> None:
    address = f"streammanager://127.0.0.1:{server.port}"

    async def together() -> None:
        client = AsyncStreamManagerClient(address)
        await asyncio.gather(client.connect(), client.connect())
        await client.close()

    async def closed_meanwhile() -> None:
        client = AsyncStreamManagerClient(address)
        connecting = asyncio.create_task(client.connect())
        await asyncio.sleep(0)
        await client.close()
        await connecting

    async def cancelled() -> None:
        client = AsyncStreamManagerClient(address)
        connecting = asyncio.create_task(client.connect())
        await asyncio.sleep(0)
        connecting.cancel()
        await asyncio.wait({connecting})
        await client.close()

    async def tried_again() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
        client = AsyncStreamManagerClient(f"streammanager://127.0.0.1:{port}")
        for _ in range(2):
            with pytest.raises(ConnectionError):
                await client.connect()

    for work in (together, closed_meanwhile, cancelled, tried_again):
        asyncio.run(work())
        server.wait_until(lambda: not server.front.connections, f"no connection is left by {work.__name__}")


def test_the_asyncio_client_raises_what_the_other_one_raises(broker: Broker) -> None:
    async def work() -> None:
        client = AsyncStreamManagerClient(port=broker.port, reconnect_delay=FAST)
        with pytest.raises(ClientException, match="not connected; use `async with`"):
            await client.list_streams()
        async with client:
            await client.create_message_stream(MessageStreamDefinition("s", **NEW))
            with pytest.raises(InvalidRequestException):
                await client.create_message_stream(MessageStreamDefinition("s", **NEW))
            with pytest.raises(ResourceNotFoundException):
                await client.append_message("none", b"x")
            with pytest.raises(NotEnoughMessagesException):
                await client.read_messages("s")
            assert await client.append_messages("s", [b"0", b"1"]) == [0, 1]
            assert await client.pause_exports("s") == []
            assert [one.definition.name async for one in client.describe_message_streams()] == ["s"]
            waiting = asyncio.create_task(client.read_messages("s", ReadMessagesOptions(9, 1, 1, 50_000)))
            reading = broker.manager._reads
            await asyncio.to_thread(broker.wait_until, lambda: len(reading.waiting), "a read waits")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            last = asyncio.create_task(client.read_messages("s", ReadMessagesOptions(9, 1, 1, 50_000)))
            await asyncio.to_thread(broker.wait_until, lambda: len(reading.waiting) > 1, "another waits")
        with pytest.raises(ClientException, match="closed"):
            await last
        with pytest.raises(ClientException, match="closed"):
            await client.list_streams()

    asyncio.run(work())


def test_calls_of_the_asyncio_client_end_at_their_timeout(broker: Broker) -> None:
    async def work() -> None:
        with Line(broker.port) as line:
            async with AsyncStreamManagerClient(port=line.port, request_timeout=0.3) as client:
                await asyncio.to_thread(line.__exit__)
                with pytest.raises(ConnectionError):
                    await client.list_streams()

    asyncio.run(work())


def test_consumers_share_work_with_asyncio(broker: Broker) -> None:
    async def work() -> None:
        async with AsyncStreamManagerClient(port=broker.port) as client:
            exports = ExportDefinition(consumer=[ConsumerConfig("workers")])
            await client.create_message_stream(
                MessageStreamDefinition("jobs", export_definition=exports, **NEW)
            )
            await client.append_messages("jobs", [b"a", b"b", b"c"])
            seen = []
            async for message in client.consume("jobs", "workers", timeout=0.2):
                seen.append(message.payload)
                assert await client.ack_messages("jobs", "workers", [message.sequence_number]) == []
            assert seen == [b"a", b"b", b"c"]

    asyncio.run(work())


def test_the_log_says_once_that_a_connection_is_lost(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "StreamManagerClient"),
        Line(server.port) as line,
        StreamManagerClient(url(server, line.port), reconnect_delay=FAST) as client,
    ):
        line.cut()
        client.list_streams()
    assert [record.getMessage() for record in caplog.records] == [
        "connection lost: the service has ended it; reconnecting"
    ]
