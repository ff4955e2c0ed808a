"""The snippets of AWS's guide "Use StreamManagerClient to work with streams", with the real SDKs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.greengrass.conftest import Sdk
from tests.greengrass.harness import Server

OPERATIONS = """
    client = StreamManagerClient()
    client.create_message_stream(MessageStreamDefinition(
        name="StreamName", max_size=268435456, stream_segment_size=16777216, time_to_live_millis=None,
        strategy_on_full=StrategyOnFull.OverwriteOldestData, persistence=Persistence.File,
        flush_on_write=False,
        export_definition=ExportDefinition(kinesis=None, iot_analytics=None),
    ))
    numbers = [
        client.append_message(stream_name="StreamName", data=b"Arbitrary bytes data") for _ in range(120)
    ]
    assert numbers == list(range(120))
    messages = client.read_messages(stream_name="StreamName", options=ReadMessagesOptions(
        desired_start_sequence_number=100, min_message_count=10, max_message_count=100,
        read_timeout_millis=5000,
    ))
    assert [m.sequence_number for m in messages] == list(range(100, 120))
    assert {(m.stream_name, m.payload) for m in messages} == {("StreamName", b"Arbitrary bytes data")}
    assert abs(messages[0].ingest_time / 1000 - time.time()) < 60
    assert [m.sequence_number for m in client.read_messages("StreamName")] == [0]
    assert client.list_streams() == ["StreamName"]
    info = client.describe_message_stream(stream_name="StreamName")
    storage = info.storage_status
    assert (storage.oldest_sequence_number, storage.newest_sequence_number) == (0, 119)
    assert storage.total_bytes > 120 * 20
    assert info.export_statuses == []
    assert info.definition.max_size == 268435456
    client.delete_message_stream(stream_name="StreamName")
    try:
        client.describe_message_stream("StreamName")
    except ResourceNotFoundException as error:
        assert "StreamName" in error.message
    else:
        raise AssertionError("it is still there")
    client.close()
"""

UPDATE = """
    client = StreamManagerClient()
    client.create_message_stream(MessageStreamDefinition(
        name="S", strategy_on_full=StrategyOnFull.OverwriteOldestData,
        export_definition=ExportDefinition(
            http=[HTTPConfig(
                identifier="h", uri="http://127.0.0.1:1", export_format=ExportFormat.JSON_BATCHED)],
            iot_analytics=[IoTAnalyticsConfig(identifier="a", iot_channel="channel", batch_size=1)],
            kinesis=[KinesisConfig(identifier="k", kinesis_stream_name="stream", priority=1)],
            iot_sitewise=[IoTSiteWiseConfig(identifier="w", batch_size=10, batch_interval_millis=60000)],
            s3_task_executor=[S3ExportTaskExecutorConfig(
                identifier="t", disabled=True,
                status_config=StatusConfig(status_level=StatusLevel.TRACE, status_stream_name="status"))],
        )))
    info = client.describe_message_stream("S")
    assert {s.export_config_identifier for s in info.export_statuses} == set("hakwt")
    status = info.export_statuses[0]
    assert not status.error_message
    assert info.storage_status.newest_sequence_number == status.last_exported_sequence_number
    exports = info.definition.export_definition
    assert exports.http[0].export_format is ExportFormat.JSON_BATCHED
    assert exports.s3_task_executor[0].status_config.status_level is StatusLevel.TRACE
    assert exports.iot_sitewise[0].batch_interval_millis == 60000
    definition = info.definition
    definition.max_size = 536870912
    definition.stream_segment_size = 33554432
    definition.time_to_live_millis = 3600000
    definition.strategy_on_full = StrategyOnFull.RejectNewData
    definition.flush_on_write = False
    definition.export_definition.kinesis = [KinesisConfig(identifier="new", kinesis_stream_name="other")]
    client.update_message_stream(definition)
    after = client.describe_message_stream("S").definition
    assert after.as_dict() == definition.as_dict(), (after, definition)
    assert after.time_to_live_millis == 3600000
    definition.persistence = Persistence.Memory
    try:
        client.update_message_stream(definition)
    except UpdateNotAllowedException as error:
        assert "persistence" in error.message
    else:
        raise AssertionError("persistence was changed")
    client.close()
"""

TASKS = """
    import random, uuid
    client = StreamManagerClient()
    client.create_message_stream(
        MessageStreamDefinition(name="S", strategy_on_full=StrategyOnFull.RejectNewData))
    value = AssetPropertyValue(
        value=Variant(double_value=random.random()), quality=Quality.GOOD,
        timestamp=TimeInNanos(time_in_seconds=int(time.time()), offset_in_nanos=random.randint(0, 10000)))
    entry = PutAssetPropertyValueEntry(
        entry_id=str(uuid.uuid4()), property_alias="PropertyAlias", property_values=[value])
    assert client.append_message("S", Util.validate_and_serialize_to_json_bytes(entry)) == 0
    task = S3ExportTaskDefinition(
        input_url="URLToFile", bucket="bucket-name", key="KeyName", user_metadata={"a": "b"})
    assert client.append_message("S", Util.validate_and_serialize_to_json_bytes(task)) == 1
    first, second = client.read_messages("S", ReadMessagesOptions(min_message_count=2))
    read = Util.deserialize_json_bytes_to_obj(first.payload, PutAssetPropertyValueEntry)
    assert read.as_dict() == entry.as_dict()
    assert Util.deserialize_json_bytes_to_obj(second.payload, S3ExportTaskDefinition).key == "KeyName"
    client.close()
"""

SHRINK = """
    client = StreamManagerClient()
    client.create_message_stream(MessageStreamDefinition(
        name="S", max_size=65536, stream_segment_size=16384, strategy_on_full=StrategyOnFull.RejectNewData))
    for _ in range(20):
        client.append_message("S", bytes(1000))
    definition = client.describe_message_stream("S").definition
    definition.max_size, definition.stream_segment_size = 4096, 4096
    try:
        client.update_message_stream(definition)
    except UpdateNotAllowedException as error:
        assert "holds" in error.message
    else:
        raise AssertionError("the stream is smaller than what it holds")
    info = client.describe_message_stream("S")
    assert info.definition.max_size == 65536
    assert info.storage_status.oldest_sequence_number == 0
    definition.max_size, definition.stream_segment_size = 32768, 16384
    client.update_message_stream(definition)
    began = time.monotonic()
    try:
        client.read_messages(
            "S", ReadMessagesOptions(desired_start_sequence_number=100, read_timeout_millis=100))
    except NotEnoughMessagesException:
        assert time.monotonic() - began >= 0.1
    else:
        raise AssertionError("there is no such message")
    client.close()
"""


def test_an_sdk_client_may_not_shrink_a_stream_below_what_it_holds_and_a_wait_lasts_its_time(
    any_sdk: Sdk, server: Server
) -> None:
    """AWS, Work with message streams, "Update message stream": maxSize is at least the current size."""
    if any_sdk.name != "greengrasssdk-1.5.0":
        any_sdk.run(SHRINK, server)


def test_the_guides_operations_run_with_every_python_sdk(any_sdk: Sdk, server: Server) -> None:
    any_sdk.run(OPERATIONS, server)


@pytest.mark.parametrize("snippet", [UPDATE, TASKS], ids=["update", "tasks"])
def test_the_guides_updates_and_export_types_run_with_the_sdks_that_have_them(
    any_sdk: Sdk, server: Server, snippet: str
) -> None:
    if any_sdk.name != "greengrasssdk-1.5.0":  # protocol 1.0.0 has neither
        any_sdk.run(snippet, server)


def test_the_oldest_sdk_gets_only_what_its_protocol_knows(server: Server) -> None:
    server.stream(
        "S",
        export_definition={
            "kinesis": [{"identifier": "k", "kinesisStreamName": "x"}],
            "IotSitewise": [{"identifier": "w"}],
        },
    )
    Sdk("greengrasssdk-1.5.0").run(
        """
        client = StreamManagerClient()
        info = client.describe_message_stream("S")
        assert [k.identifier for k in info.definition.export_definition.kinesis] == ["k"]
        assert [s.export_config_identifier for s in info.export_statuses] == ["k"]
        """,
        server,
    )


def test_the_guides_operations_run_with_the_node_sdk(node: Callable[..., str], server: Server) -> None:
    node(
        """
        await client.createMessageStream(new MessageStreamDefinition()
            .withName("StreamName").withMaxSize(268435456).withStreamSegmentSize(16777216)
            .withTimeToLiveMillis(null).withStrategyOnFull(StrategyOnFull.OverwriteOldestData)
            .withPersistence(Persistence.File).withFlushOnWrite(false)
            .withExportDefinition(new ExportDefinition()
                .withKinesis(null).withIotAnalytics(null).withIotSitewise(null).withS3TaskExecutor(null)));
        for (let i = 0; i < 20; i++) {
            const number = await client.appendMessage("StreamName", Buffer.from("Arbitrary byte array"));
            assert.strictEqual(number, i);
        }
        const together = await Promise.all(
            Array.from({length: 100}, (_, i) => client.appendMessage("StreamName", Buffer.from(`${i}`))));
        assert.deepStrictEqual(together, Array.from({length: 100}, (_, i) => 20 + i));
        const messages = await client.readMessages("StreamName", new ReadMessagesOptions()
            .withDesiredStartSequenceNumber(100).withMinMessageCount(10).withMaxMessageCount(100)
            .withReadTimeoutMillis(5 * 1000));
        assert.strictEqual(messages.length, 20);
        assert.strictEqual(messages[19].sequenceNumber, 119);
        assert.strictEqual(messages[19].payload.toString(), "99");
        const entry = new PutAssetPropertyValueEntry().withEntryId("e").withPropertyAlias("PropertyAlias")
            .withPropertyValues([new AssetPropertyValue().withQuality(Quality.GOOD)
                .withValue(new Variant().withDoubleValue(0.5))
                .withTimestamp(new TimeInNanos().withTimeInSeconds(1700000000).withOffsetInNanos(1))]);
        await client.appendMessage("StreamName", util.validateAndSerializeToJsonBytes(entry));
        const task = new S3ExportTaskDefinition()
            .withBucket("bucket-name").withKey("KeyName").withInputUrl("URLToFile");
        await client.appendMessage("StreamName", util.validateAndSerializeToJsonBytes(task));
        assert.deepStrictEqual(await client.listStreams(), ["StreamName"]);
        const info = await client.describeMessageStream("StreamName");
        assert.strictEqual(info.storageStatus.newestSequenceNumber, 121);
        await client.updateMessageStream(info.definition
            .withMaxSize(536870912).withStreamSegmentSize(33554432).withTimeToLiveMillis(3600000)
            .withStrategyOnFull(StrategyOnFull.RejectNewData).withFlushOnWrite(true)
            .withExportDefinition(info.definition.exportDefinition.withKinesis(
                [new KinesisConfig().withIdentifier(uuidv4()).withKinesisStreamName(uuidv4())])));
        const after = await client.describeMessageStream("StreamName");
        assert.strictEqual(after.exportStatuses.length, 1);
        assert.ok(!after.exportStatuses[0].errorMessage);
        const { newestSequenceNumber } = after.storageStatus;
        assert.ok(newestSequenceNumber > after.exportStatuses[0].lastExportedSequenceNumber);
        assert.strictEqual(after.definition.timeToLiveMillis, 3600000);
        await assert.rejects(client.updateMessageStream(after.definition.withPersistence(Persistence.Memory)),
            UpdateNotAllowedException);
        await client.deleteMessageStream("StreamName");
        await assert.rejects(client.deleteMessageStream("StreamName"), ResourceNotFoundException);
        """,
        server,
    )


def test_the_guides_export_types_and_status_messages_run_with_the_node_sdk(
    node: Callable[..., str], server: Server
) -> None:
    node(
        """
        await client.createMessageStream(new MessageStreamDefinition()
            .withName("status").withStrategyOnFull(StrategyOnFull.OverwriteOldestData));
        const exports = new ExportDefinition()
            .withHttp([new HTTPConfig().withIdentifier("h").withUri("http://127.0.0.1:1")
                .withBatchSize(1).withPriority(10).withExportFormat(ExportFormat.JSON_BATCHED)])
            .withIotAnalytics([new IoTAnalyticsConfig().withIdentifier("a").withIotChannel("channel")])
            .withKinesis([new KinesisConfig().withIdentifier("k").withKinesisStreamName("stream")
                .withBatchSize(500).withBatchIntervalMillis(60000).withStartSequenceNumber(0)])
            .withIotSitewise([new IoTSiteWiseConfig().withIdentifier("w").withBatchSize(10)])
            .withS3TaskExecutor([new S3ExportTaskExecutorConfig().withIdentifier("t").withDisabled(true)
                .withStatusConfig(new StatusConfig()
                    .withStatusLevel(StatusLevel.INFO).withStatusStreamName("status"))]);
        await client.createMessageStream(new MessageStreamDefinition()
            .withName("S").withStrategyOnFull(StrategyOnFull.RejectNewData).withExportDefinition(exports));
        const info = await client.describeMessageStream("S");
        const names = info.exportStatuses.map((status) => status.exportConfigIdentifier).sort();
        assert.deepStrictEqual(names, ["a", "h", "k", "t", "w"]);
        const found = info.definition.exportDefinition;
        assert.strictEqual(found.http[0].exportFormat, ExportFormat.JSON_BATCHED);
        assert.strictEqual(found.kinesis[0].batchIntervalMillis, 60000);
        assert.strictEqual(found.s3TaskExecutor[0].statusConfig.statusLevel, StatusLevel.INFO);
        assert.strictEqual(found.IotSitewise[0].identifier, "w");
        const task = new S3ExportTaskDefinition().withBucket("bucket-name")
            .withKey("KeyName").withInputUrl("URLToFile").withUserMetadata({a: "b"});
        const number = await client.appendMessage("S", util.validateAndSerializeToJsonBytes(task));
        const message = new StatusMessage().withEventType(EventType.S3Task).withStatus(Status.Success)
            .withStatusLevel(StatusLevel.INFO).withStatusContext(new StatusContext()
                .withS3ExportTaskDefinition(task).withStreamName("S").withSequenceNumber(number));
        await client.appendMessage("status", util.validateAndSerializeToJsonBytes(message));
        const [stored] = await client.readMessages("status", new ReadMessagesOptions()
            .withMinMessageCount(1).withReadTimeoutMillis(1000));
        const read = util.deserializeJsonBytesToObj(stored.payload, StatusMessage);
        assert.strictEqual(read.status, Status.Success);
        assert.strictEqual(read.statusContext.s3ExportTaskDefinition.inputUrl, "URLToFile");
        """,
        server,
    )
