"""`StreamManagerClient` over MQTT: the guide's snippets, interruptions, many messages, tailing."""

from __future__ import annotations

import socket
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

import bridge.client
from bridge.client import (
    ConnectFailedException,
    ConsumerConfig,
    ExportDefinition,
    KinesisConfig,
    MessageStreamDefinition,
    NotEnoughMessagesException,
    Quality,
    ReadMessagesOptions,
    RequestPayloadTooLargeException,
    ResourceNotFoundException,
    ResponsePayloadTooLargeException,
    StatusMessage,
    StrategyOnFull,
    StreamManagerClient,
    StreamManagerException,
    UpdateFailedException,
    Util,
    ValidationException,
    Variant,
)
from bridge.model import Limits
from tests.client.conftest import Broker, Line
from tests.greengrass import test_guide
from tests.greengrass.conftest import Sdk

Connect = Callable[..., StreamManagerClient]
NEW = {"strategy_on_full": StrategyOnFull.RejectNewData}


@pytest.mark.parametrize("snippet", ["OPERATIONS", "UPDATE", "TASKS"])
def test_the_guides_snippets_run_with_another_import_line(broker: Broker, snippet: str) -> None:
    """The very programs that tests/greengrass gives to the AWS SDKs."""
    names = {name: getattr(bridge.client, name) for name in bridge.client.__all__}
    names["StreamManagerClient"] = lambda: StreamManagerClient(port=broker.port)
    code = textwrap.dedent(getattr(test_guide, snippet))
    exec("import asyncio, json, time, uuid\n" + code, names)


def test_the_names_are_those_of_the_sdk(broker: Broker, sdk: Sdk) -> None:
    listed = sdk.run(
        """
        import inspect, stream_manager as sm
        for name in dir(sm):
            thing = getattr(sm, name)
            if isinstance(thing, type) and not name.startswith("Util"):
                members = ([m.name for m in thing] if hasattr(thing, "__members__") else
                           list(inspect.signature(thing.__init__).parameters)[1:])
                print(name, *members)
        print("StreamManagerClient.", *(n for n in dir(sm.StreamManagerClient) if n[0] != "_"))
        """,
        broker,
    )
    for line in listed.splitlines():
        name, *members = line.split()
        ours = getattr(bridge.client, name.rstrip("."))
        have = set(
            getattr(ours, "__members__", None) or getattr(ours, "__struct_fields__", None) or dir(ours)
        )
        if name == "StreamManagerClient":
            continue
        if name.endswith("Exception"):
            have = {"message", "status", "request_id"}
        assert set(members) <= have, line


def test_definitions_keep_what_the_sdk_does_not_know(broker: Broker, client: StreamManagerClient) -> None:
    client.create_message_stream(
        MessageStreamDefinition(
            "S",
            **NEW,
            topics=["a/#"],
            export_definition=ExportDefinition(
                kinesis=[KinesisConfig("k", "name", more={"lingerMillis": 7})],
                more={"s3": [{"identifier": "files", "bucket": "bucket"}]},
            ),
        )
    )
    definition = client.describe_message_stream("S").definition
    assert definition is not None
    assert definition.topics == ["a/#"]
    definition.max_size = 1 << 30
    client.update_message_stream(definition)
    stored = broker.manager.definitions["S"]
    assert (stored.max_size, stored.topics) == (1 << 30, ["a/#"])
    assert stored.export_definition["kinesis"][0]["lingerMillis"] == 7
    assert stored.export_definition["s3"][0]["identifier"] == "files"


def test_mistakes_are_found_before_anything_is_sent(client: StreamManagerClient) -> None:
    for definition, text in (
        (MessageStreamDefinition("S"), "strategy_on_full is required"),
        (MessageStreamDefinition("a/b", **NEW), "name"),
        (MessageStreamDefinition("S", 5, **NEW), "max_size"),
        (
            MessageStreamDefinition(
                "S", **NEW, export_definition=ExportDefinition(kinesis=[KinesisConfig("k")])
            ),
            "kinesis_stream_name is required",
        ),
    ):
        with pytest.raises(ValidationException, match=text):
            client.create_message_stream(definition)
    for options in ReadMessagesOptions(min_message_count=2, max_message_count=1), ReadMessagesOptions(-1):
        with pytest.raises(ValidationException):
            client.read_messages("S", options)
    with pytest.raises(ValidationException):
        client.read_messages("S", ReadMessagesOptions(read_timeout_millis=61_000))
    with pytest.raises(ValidationException):
        client.append_message("S", b"")
    with pytest.raises(ValidationException):
        Util.validate_and_serialize_to_json_bytes(Variant(string_value="a\nb"))
    assert client.list_streams() == []


def test_json_bodies_go_there_and_back() -> None:
    raw = b'{"eventType": 0, "status": 2, "statusContext": {"sequenceNumber": 5, "s3ExportTaskDefinition": '
    raw += b'{"inputUrl": "file:/x", "bucket": "bucket", "key": "k"}}, "timestampEpochMs": 1}'
    status = Util.deserialize_json_bytes_to_obj(raw, StatusMessage)
    assert status.status is bridge.client.Status.InProgress
    assert status.status_context is not None
    assert status.status_context.s3_export_task_definition is not None
    assert status.status_context.s3_export_task_definition.input_url == "file:/x"
    assert Quality("GOOD") is Quality.GOOD


def test_an_append_whose_reply_is_lost_is_stored_once(broker: Broker, connect: Connect) -> None:
    broker.stream("s")
    with Line(broker.port) as line:
        client = connect(port=line.port)
        for number in range(5):
            line.lose_replies = True
            assert client.append_message("s", b"%d" % number) == number
        assert line.cuts == 5
        line.lose_replies = True
        assert client.append_messages("s", [b"a", b"b", b"c"]) == [5, 6, 7]
        assert broker.newest() == 7
        assert broker.store.streams["s"].counters["deduplicated"] == 8
        line.lose_replies = True
        assert len(client.read_messages("s", ReadMessagesOptions(0, 8))) == 8


def test_a_retried_append_is_stored_once_across_a_restart_of_the_service(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with Broker(tmp_path, mqtt_port=port) as broker:
        broker.stream("s")
        client = StreamManagerClient(port=port)
        assert client.append_message("s", b"x", message_id=b"first") == 0
    late: list[int] = []
    thread = threading.Thread(target=lambda: late.append(client.append_message("s", b"y")))
    thread.start()  # while there is no broker
    with Broker(tmp_path, mqtt_port=port) as broker, client:
        assert client.append_message("s", b"x", message_id=b"first") == 0
        thread.join()
        assert late == [1]
        assert broker.newest() == 1


def test_a_request_that_cannot_be_repeated_fails_with_an_unknown_outcome(
    broker: Broker, connect: Connect
) -> None:
    with Line(broker.port) as line:
        client = connect(port=line.port)
        line.lose_replies = True
        with pytest.raises(ConnectionError, match="check whether createMessageStream was carried out"):
            client.create_message_stream(MessageStreamDefinition("s", **NEW))
        assert client.list_streams() == ["s"]


def test_a_purge_whose_reply_is_lost_drops_nothing_that_is_appended_after_it(
    broker: Broker, connect: Connect
) -> None:
    broker.stream("s")
    with Line(broker.port) as line:
        client = connect(port=line.port)
        client.append_message("s", b"old")
        line.lose_replies = True
        with pytest.raises(ConnectionError, match="check whether purgeMessageStream was carried out"):
            client.purge_message_stream("s")
        client.append_message("s", b"new")
        assert [message.payload for message in client.read_messages("s")] == [b"new"]


def test_calls_end_at_their_timeout_or_when_the_client_is_closed(broker: Broker, connect: Connect) -> None:
    broker.stream("s")
    with Line(broker.port) as line:
        client, patient = connect(port=line.port, request_timeout=0.3), connect(port=line.port)
        line.__exit__()
        errors: list[BaseException] = []

        def append() -> None:
            try:
                patient.append_message("s", b"y")
            except StreamManagerException as error:
                errors.append(error)

        thread = threading.Thread(target=append)
        thread.start()
        with pytest.raises(ConnectionError):
            client.append_message("s", b"x")
        assert thread.is_alive()  # its timeout is a minute
        patient.close()
        thread.join(60)
        assert "closed" in str(errors[0])


def test_a_broker_that_is_absent_or_refuses_is_an_error_at_once(tmp_path: Path, broker: Broker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(ConnectionError, match="does not answer in MQTT"):
            StreamManagerClient(port=silent.getsockname()[1], connect_timeout=0.2)
        port = silent.getsockname()[1]
    with pytest.raises(ConnectionError, match="cannot connect"):
        StreamManagerClient(port=port)
    users = tmp_path / "users"
    users.write_text("a:$7$101$YWJjZGVmZ2hpams=$YWJj\n")  # a line of mosquitto_passwd, of another password
    users.chmod(0o600)
    with (
        Broker(tmp_path / "closed", users_file=users, allow_anonymous=False) as closed,
        pytest.raises(ConnectFailedException, match="refuses"),
    ):
        StreamManagerClient(port=closed.port, username="a", password="b")


def test_more_messages_than_a_packet_holds_go_in_several(broker: Broker, client: StreamManagerClient) -> None:
    broker.stream("s")
    assert client.append_messages("s", [b"x" * 1000] * 3000) == list(range(3000))
    got = [message.payload for message in client.tail("s", 0, timeout=0.2)]
    assert got == [b"x" * 1000] * 3000
    with pytest.raises(RequestPayloadTooLargeException, match="the broker accepts at most"):
        client.append_message("s", bytes(2 << 20))
    with pytest.raises(ResponsePayloadTooLargeException):
        client.read_messages("s", ReadMessagesOptions(min_message_count=3000))
    assert client.connected


def test_however_large_a_packet_may_be_a_request_has_no_more_messages_than_a_gateway_takes(
    tmp_path: Path,
) -> None:
    with (
        Broker(tmp_path / "wide", max_packet=32 << 20) as wide,
        StreamManagerClient(port=wide.port) as client,
    ):
        wide.stream("s")
        assert client.append_messages("s", [b"x"] * 50_000) == list(range(50_000))


def test_tailing_goes_on_over_a_lost_connection_and_ends_with_the_stream(
    broker: Broker, connect: Connect
) -> None:
    broker.stream("s")
    broker.append(b"before")
    with Line(broker.port) as line:
        client = connect(port=line.port)
        tail = client.tail("s")
        got: list[bytes | None] = []
        enough = threading.Event()

        def follow() -> None:
            with pytest.raises(ResourceNotFoundException):
                for message in tail:
                    got.append(message.payload)
                    if len(got) in (1, 3):
                        enough.set()

        thread = threading.Thread(target=follow)
        thread.start()
        broker.wait_until(lambda: len(broker.manager._reads.waiting), "the tail waits")
        broker.append(b"1")
        assert enough.wait(60)
        enough.clear()
        line.cut()
        broker.append(b"2", b"3")
        assert enough.wait(60)
        broker.call(broker.manager.delete, "s")
        thread.join(60)
        assert got == [b"1", b"2", b"3"]


def test_a_topic_filter_reads_and_purges_by_topic(broker: Broker, client: StreamManagerClient) -> None:
    broker.stream("s", topics=["in/#"])
    stream = broker.store.streams["s"]
    for number in range(6):
        broker.call(stream.append, b"in/%d" % (number % 2), b"%d" % number)
    broker.wait_until(lambda: stream.next_sequence == 6, "all is committed")
    found = client.read_messages("s", ReadMessagesOptions(0, 3, topic="in/1"))
    assert [(m.topic, m.payload) for m in found] == [("in/1", b"1"), ("in/1", b"3"), ("in/1", b"5")]
    found_later: list[int] = []
    options = ReadMessagesOptions(4, 2, 2, 20_000, "in/1")
    thread = threading.Thread(
        target=lambda: found_later.extend(m.sequence_number or 0 for m in client.read_messages("s", options))
    )
    thread.start()
    for number in range(6, 8):
        broker.call(stream.append, b"in/%d" % (number % 2), b"%d" % number)
    thread.join(60)
    assert found_later == [5, 7]
    assert client.purge_message_stream("s", topic="in/0") == 4
    assert client.purge_message_stream("s", upto=3) == 1
    assert [m.payload for m in client.tail("s", 0, timeout=0.1)] == [b"3", b"5", b"7"]
    with pytest.raises(NotEnoughMessagesException):
        client.read_messages("s", ReadMessagesOptions(0, 4))


def test_headers_of_mqtt_5_come_with_the_message(broker: Broker, client: StreamManagerClient) -> None:
    broker.stream("s", topics=["in/#"])
    properties = Properties(PacketTypes.PUBLISH)
    properties.UserProperty = ("unit", "K")
    properties.CorrelationData = b"\x00\xff"
    publisher = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
    publisher.connect("127.0.0.1", broker.port)
    publisher.loop_start()
    publisher.publish("in/a", b"1", 1, properties=properties).wait_for_publish(20)
    publisher.disconnect()
    publisher.loop_stop()
    client.append_message("s", b"2")
    first, second = client.read_messages("s", ReadMessagesOptions(0, 2))
    assert (first.topic, first.payload, second.topic, second.payload) == ("in/a", b"1", "streams/s", b"2")
    assert first.headers is not None
    assert (first.headers["user"], first.headers["token"]) == ([["unit", "K"]], b"\x00\xff")
    assert second.headers is None


def test_a_closed_client_raises_and_fails_its_pending_calls(broker: Broker, connect: Connect) -> None:
    broker.stream("s")
    client = connect()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            client.read_messages("s", ReadMessagesOptions(read_timeout_millis=50_000))
        except StreamManagerException as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    broker.wait_until(lambda: len(broker.manager._reads.waiting), "a read waits")
    client.close()
    thread.join(60)
    assert "closed" in str(errors[0])
    with pytest.raises(StreamManagerException, match="closed"):
        client.list_streams()


def test_message_limits_are_created_described_changed_and_updated(
    broker: Broker, client: StreamManagerClient
) -> None:
    limits = Limits(max_messages=7, max_messages_per_topic=2, discard="new")
    client.create_message_stream(MessageStreamDefinition("S", **NEW, limits=limits))
    definition = client.describe_message_stream("S").definition
    assert definition is not None
    assert definition.limits == limits
    definition.limits = Limits(max_age_millis=5000)
    client.update_message_stream(definition)
    assert broker.manager.definitions["S"].limits == Limits(max_age_millis=5000)


def test_what_an_append_of_many_has_stored_is_never_hidden(
    broker: Broker, client: StreamManagerClient
) -> None:
    limits = Limits(max_messages=3, discard="new")
    client.create_message_stream(MessageStreamDefinition("S", **NEW, limits=limits))
    with pytest.raises(StreamManagerException, match="max_messages") as failed:
        client.append_messages("S", [b"%d" % number for number in range(5)])
    assert failed.value.sequence_numbers == [0, 1, 2]
    found = client.read_messages("S", ReadMessagesOptions(min_message_count=3))
    assert [message.payload for message in found] == [b"0", b"1", b"2"]


def test_concurrent_changes_of_one_definition_do_not_undo_each_other(client: StreamManagerClient) -> None:
    client.create_message_stream(MessageStreamDefinition("S", **NEW))
    mine, theirs = (client.describe_message_stream("S") for _ in range(2))
    assert mine.definition is not None
    assert theirs.definition is not None
    mine.definition.max_size = 1 << 30
    client.update_message_stream(mine.definition, if_version=mine.version)
    theirs.definition.topics = ["a/#"]
    with pytest.raises(UpdateFailedException, match="describe it again"):
        client.update_message_stream(theirs.definition, if_version=theirs.version)
    again = client.describe_message_stream("S")
    assert again.definition is not None
    assert (again.definition.max_size, again.definition.topics) == (1 << 30, [])
    again.definition.topics = ["a/#"]
    client.update_message_stream(again.definition, if_version=again.version)
    client.update_message_stream(again.definition)


def test_workers_share_a_consumer_and_acknowledge_what_they_have_done(
    client: StreamManagerClient, connect: Connect
) -> None:
    workers = ConsumerConfig("workers", topics=["streams/jobs/#"], max_deliveries=3)
    definition = MessageStreamDefinition(
        "jobs", export_definition=ExportDefinition(consumer=[workers]), **NEW
    )
    client.create_message_stream(definition)
    described = client.describe_message_stream("jobs").definition
    assert described.export_definition.consumer[0].max_deliveries == 3
    client.append_messages("jobs", [b"%d" % number for number in range(10)])
    other = connect()
    done = [message.sequence_number for message in other.fetch_messages("jobs", "workers", 3)]
    assert done == [0, 1, 2]
    assert other.ack_messages("jobs", "workers", nack=[1]) == []
    for message in client.consume("jobs", "workers", max_message_count=2, timeout=0.2):
        assert message.deliveries == (2 if message.sequence_number == 1 else 1)
        assert message.payload == b"%d" % message.sequence_number
        assert client.ack_messages("jobs", "workers", [message.sequence_number]) == []
        done.append(message.sequence_number)
    assert sorted(done) == [0, 1, 1, *range(2, 10)]
    assert other.ack_messages("jobs", "workers", in_progress=[0], terminate=[2], reason="no", ack=[9]) == [9]
    (status,) = client.describe_message_stream("jobs").export_statuses
    assert (status.unacknowledged_messages_count, status.rejected_messages_count) == (1, 1)
    with pytest.raises(ResourceNotFoundException, match="its consumers are: workers"):
        client.fetch_messages("jobs", "none")


def test_all_streams_are_described_and_the_last_value_of_each_topic_is_read(
    client: StreamManagerClient,
) -> None:
    for name in ("a", "b", "c"):
        tags, limits = {"site": name}, Limits(max_messages_per_topic=3)
        client.create_message_stream(
            MessageStreamDefinition(name, description="d", tags=tags, limits=limits, **NEW)
        )
    client.append_messages("b", [b"1", b"2"])
    found = list(client.describe_message_streams())
    assert [(one.definition.name, one.definition.tags, one.messages) for one in found] == [
        ("a", {"site": "a"}, 0),
        ("b", {"site": "b"}, 2),
        ("c", {"site": "c"}, 0),
    ]
    assert found[1].topic_count == 1
    assert found[1].oldest_ingest_time <= found[1].newest_ingest_time
    (message,) = client.read_messages("b", ReadMessagesOptions(last_per_topic=True, topic="streams/#"))
    assert (message.sequence_number, message.payload) == (1, b"2")
