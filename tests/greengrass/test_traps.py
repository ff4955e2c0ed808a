"""The traps of the real SDKs (what kills or confuses them), each with the real SDK."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from benchmarks.testbed.local import free_port
from bridge.model import Limits, StrategyOnFull
from tests.greengrass.conftest import Sdk, finish
from tests.greengrass.harness import Raw, Server


def test_descriptions_hold_no_null_no_extension_and_every_list(server: Server, sdk: Sdk) -> None:
    server.stream(
        "S",
        topics=["a/#"],
        limits=Limits(max_messages=10),
        retention="exported",
        deduplication_window_millis=1000,
        export_definition={
            "s3": [{"identifier": "files", "bucket": "bucket"}],
            "kinesis": [{"identifier": "k", "kinesisStreamName": "x", "lingerMillis": 5}],
        },
    )
    with Raw(server) as raw:
        info = raw.ask(13, name="S")["messageStreamInfo"]
    assert info["definition"]["exportDefinition"] == {
        "http": [],
        "iotAnalytics": [],
        "kinesis": [{"identifier": "k", "kinesisStreamName": "x"}],
        "IotSitewise": [],
        "s3TaskExecutor": [],
    }
    assert set(info["definition"]) == {
        "name", "maxSize", "streamSegmentSize", "strategyOnFull", "persistence", "flushOnWrite",
        "exportDefinition",
    }  # fmt: skip
    assert [status["exportConfigIdentifier"] for status in info["exportStatuses"]] == ["k"]
    assert "null" not in json.dumps(info)
    sdk.run(
        """
        client = StreamManagerClient()
        info = client.describe_message_stream("S")
        assert info.definition.export_definition.iot_sitewise == []
        info.definition.max_size *= 2
        info.definition.export_definition.iot_sitewise = [IoTSiteWiseConfig(identifier="w")]
        client.update_message_stream(info.definition)
        """,
        server,
    )
    stored = server.manager.definitions["S"]
    assert (stored.topics, stored.retention, stored.limits) == (["a/#"], "exported", Limits(max_messages=10))
    assert stored.deduplication_window_millis == 1000
    assert stored.export_definition["s3"] == [{"identifier": "files", "bucket": "bucket"}]
    assert stored.export_definition["kinesis"][0]["lingerMillis"] == 5
    assert stored.export_definition["IotSitewise"][0]["identifier"] == "w"


@pytest.mark.parametrize("retention", ["limits", "exported"])
def test_streams_of_clients_have_the_retention_of_the_configuration(
    tmp_path: Path, sdk: Sdk, retention: Literal["limits", "exported"]
) -> None:
    with Server(tmp_path, retention=retention) as server:
        sdk.run(
            """
            client = StreamManagerClient()
            full = StrategyOnFull.RejectNewData
            client.create_message_stream(MessageStreamDefinition(name="S", strategy_on_full=full))
            info = client.describe_message_stream("S")
            info.definition.max_size *= 2
            client.update_message_stream(info.definition)
            """,
            server,
        )
        assert server.manager.definitions["S"].retention == retention


def test_every_error_reaches_the_application_as_its_exception(server: Server, sdk: Sdk) -> None:
    server.stream("full", max_size=2048, stream_segment_size=1024)
    sdk.run(
        """
        client = StreamManagerClient()
        def raises(expected, text, call, *args, **options):
            try:
                call(*args, **options)
            except StreamManagerException as error:
                assert type(error).__name__ == expected, repr(error)
                assert text in error.message, error.message
            else:
                raise AssertionError(f"{expected} was not raised")
        definition = MessageStreamDefinition(name="S", strategy_on_full=StrategyOnFull.RejectNewData)
        client.create_message_stream(definition)
        raises("InvalidRequestException", "exists", client.create_message_stream, definition)
        small = MessageStreamDefinition(
            name="T", strategy_on_full=StrategyOnFull.RejectNewData, max_size=1024)
        raises("InvalidRequestException", "streamSegmentSize", client.create_message_stream, small)
        raises("ResourceNotFoundException", "nope", client.append_message, "nope", b"x")
        raises("ResourceNotFoundException", "nope", client.read_messages, "nope")
        raises("ResourceNotFoundException", "nope", client.delete_message_stream, "nope")
        raises("NotEnoughMessagesException", "greater than the last sequence number",
               client.read_messages, "S", ReadMessagesOptions(desired_start_sequence_number=5))
        raises("UnknownFailureException", "is full",
               lambda: [client.append_message("full", b"x" * 100) for _ in range(100)])
        raises("RequestPayloadTooLargeException", "larger than the stream",
               client.append_message, "full", b"x" * 5000)
        two = ExportDefinition(kinesis=[KinesisConfig(identifier="k", kinesis_stream_name="x")] * 2)
        raises("InvalidRequestException", "another", client.create_message_stream, MessageStreamDefinition(
            name="U", strategy_on_full=StrategyOnFull.RejectNewData, export_definition=two))
        assert client.append_message("S", b"still alive") == 0
        """,
        server,
    )


def test_a_message_that_is_too_large_for_the_protocol_is_refused_and_the_connection_lives(
    server: Server, sdk: Sdk
) -> None:
    server.stream("S")
    sdk.run(
        """
        client = StreamManagerClient()
        try:
            client.append_message("S", bytes(65 * 1024 * 1024))
        except RequestPayloadTooLargeException as error:
            assert "smaller" in error.message
        assert client.append_message("S", bytes(20 * 1024 * 1024)) == 0
        assert len(client.read_messages("S")[0].payload) == 20 * 1024 * 1024
        """,
        server,
    )


def test_many_threads_share_one_connection_and_a_waiting_read_delays_no_other(
    server: Server, sdk: Sdk
) -> None:
    server.stream("S")
    sdk.run(
        """
        client = StreamManagerClient()
        got = []
        options = ReadMessagesOptions(min_message_count=400, read_timeout_millis=30000)
        readers = [threading.Thread(target=lambda: got.append(client.read_messages("S", options)))
                   for _ in range(20)]
        numbers = []
        def write():
            numbers.extend(client.append_message("S", b"x") for _ in range(40))
        writers = [threading.Thread(target=write) for _ in range(10)]
        for thread in readers + writers: thread.start()
        for thread in readers + writers: thread.join()
        assert sorted(numbers) == list(range(400))
        assert [len(messages) for messages in got] == [400] * 20
        """,
        server,
    )


def test_a_read_that_waits_in_vain_is_answered_inside_its_time(server: Server, sdk: Sdk) -> None:
    server.stream("S")
    program = """
        client = StreamManagerClient(request_timeout=1)
        for wait in (1, 30, 1000):
            began = time.monotonic()
            try:
                client.read_messages("S", ReadMessagesOptions(read_timeout_millis=wait))
            except NotEnoughMessagesException:
                took = time.monotonic() - began
                assert took < max(wait, 100) / 1000, (wait, took)
                assert took > wait * 0.9 / 1000 - 0.03, (wait, took)
            else:
                raise AssertionError("it found something")
        client.append_message("S", b"alive")  # a late answer would have killed the client
        """
    for left in reversed(range(5)):  # on a machine that stands still, an answer may be late
        try:
            sdk.run(program, server)
            break
        except AssertionError:
            if not left:
                raise


def test_the_client_reconnects_after_a_restart_of_the_service(tmp_path: Path, sdk: Sdk) -> None:
    port = free_port()
    with Server(tmp_path, port=port) as server:
        server.stream("S")
        program = sdk.start(
            """
            client = StreamManagerClient()
            print(client.append_message("S", b"one"), flush=True)
            input()
            while True:
                try:
                    print(client.append_message("S", b"two"), flush=True)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.01)
                except ConnectionResetError:
                    raise AssertionError("the connection was reset: this client never recovers")
            """,
            server,
        )
        assert program.stdout is not None
        assert program.stdin is not None
        assert program.stdout.readline() == "0\n"
    with Server(tmp_path, port=port) as server:
        program.stdin.write("\n")
        program.stdin.flush()
        assert finish(program) == "1\n"


def test_a_wrong_token_is_refused(tmp_path: Path, sdk: Sdk) -> None:
    file = tmp_path / "token"
    code = """
        try:
            StreamManagerClient().list_streams()
        except ConnectFailedException:
            print("refused")
    """
    with Server(tmp_path, token_file=file, owner=65534) as server:
        assert sdk.run(code, server, AWS_CONTAINER_AUTHORIZATION_TOKEN="x") == "refused\n"  # no file yet
        file.write_text("\n")
        assert sdk.run(code, server, AWS_CONTAINER_AUTHORIZATION_TOKEN="x") == "refused\n"
        file.write_text("grüß\n")
        assert sdk.run(code, server) == "refused\n"
        assert sdk.run(code, server, AWS_CONTAINER_AUTHORIZATION_TOKEN="x") == "refused\n"
        assert sdk.run(code, server, AWS_CONTAINER_AUTHORIZATION_TOKEN="grüß", PYTHONUTF8="1") == ""


def test_the_node_sdk_gets_refusals_as_errors_and_names_survive(
    server: Server, node: Callable[..., str]
) -> None:
    server.stream("a , .log", strategy_on_full=StrategyOnFull.OverwriteOldestData)
    server.append(b"x", name="a , .log")
    node(
        """
        const [message] = await client.readMessages((await client.listStreams())[0]);
        assert.strictEqual(message.streamName, "a , .log");
        await assert.rejects(client.readMessages("a , .log",
            new ReadMessagesOptions().withMinMessageCount(2).withReadTimeoutMillis(50)),
            NotEnoughMessagesException);
        """,
        server,
    )


def test_a_reply_never_arrives_in_pieces_that_the_client_misreads(server: Server, sdk: Sdk) -> None:
    """The client asks once for the four bytes of a length, and takes what has come for all of it."""
    server.stream("S")
    server.append(*[bytes(1000)] * 1000, name="S")
    sdk.run(
        """
        heads, whole = [], asyncio.StreamReader.read
        async def read(self, n=-1):
            data = await whole(self, n)
            if n == 4:
                heads.append((len(data), len(self._buffer) > 0))
            return data
        asyncio.StreamReader.read = read
        client = StreamManagerClient()
        everything = ReadMessagesOptions(min_message_count=1000)
        def work():
            for _ in range(20):
                client.append_message("S", b"x")
                client.describe_message_stream("S")
            assert len(client.read_messages("S", everything)) == 1000
        work()
        threads = [threading.Thread(target=work) for _ in range(5)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert len(heads) > 6 * 41
        # Each length is there as a whole, and the frame's operation and body with it.
        assert set(heads[:-1]) <= {(4, True), (0, False)}, set(heads)
        """,
        server,
    )


def test_request_ids_that_are_all_the_same_are_no_hindrance(
    server: Server, sdk: Sdk, node: Callable[..., str]
) -> None:
    """The newer JavaScript SDK, which npm has not, sends a single space with every request."""
    python = sdk.start(
        """
        import uuid
        uuid.uuid4 = lambda: " "
        client = StreamManagerClient()
        client.create_message_stream(
            MessageStreamDefinition(name="P", strategy_on_full=StrategyOnFull.RejectNewData))
        print("ready", flush=True)
        assert [client.append_message("P", b"x") for _ in range(200)] == list(range(200))
        assert len(client.read_messages("P", ReadMessagesOptions(min_message_count=200))) == 200
        assert client.describe_message_stream("P").storage_status.newest_sequence_number == 199
        client.delete_message_stream("P")
        """,
        server,
    )
    assert python.stdout is not None
    assert python.stdout.readline() == "ready\n"
    node(
        """
        require('aws-greengrass-core-sdk/stream-manager/utilInternal').uuidv4 = () => ' ';
        await client.createMessageStream(new MessageStreamDefinition()
            .withName("N").withStrategyOnFull(StrategyOnFull.RejectNewData));
        const began = Date.now();
        for (let i = 0; i < 100; i++)
            assert.strictEqual(await client.appendMessage("N", Buffer.from("y")), i);
        // This SDK writes a frame in two pieces: without an answer to the first, each call takes 40 ms.
        assert.ok(Date.now() - began < 3000, `${Date.now() - began} ms`);
        const messages = await client.readMessages("N", new ReadMessagesOptions().withMinMessageCount(100));
        assert.strictEqual(messages.length, 100);
        await assert.rejects(client.readMessages("missing"), ResourceNotFoundException);
        await client.deleteMessageStream("N");
        """,
        server,
    )
    assert finish(python) == ""
    assert server.call(server.manager.names) == []
