// The operations of AWS's guide "Use StreamManagerClient to work with streams", with the SDK for Java.
// java -cp "JARS/*" Operations.java

import com.amazonaws.greengrass.streammanager.client.StreamManagerClient;
import com.amazonaws.greengrass.streammanager.client.StreamManagerClientFactory;
import com.amazonaws.greengrass.streammanager.client.exception.InvalidRequestException;
import com.amazonaws.greengrass.streammanager.client.exception.NotEnoughMessagesException;
import com.amazonaws.greengrass.streammanager.client.exception.ResourceNotFoundException;
import com.amazonaws.greengrass.streammanager.client.exception.StreamManagerException;
import com.amazonaws.greengrass.streammanager.client.exception.UpdateNotAllowedException;
import com.amazonaws.greengrass.streammanager.client.utils.ValidateAndSerialize;
import com.amazonaws.greengrass.streammanager.model.ExportFormat;
import com.amazonaws.greengrass.streammanager.model.Message;
import com.amazonaws.greengrass.streammanager.model.MessageStreamDefinition;
import com.amazonaws.greengrass.streammanager.model.MessageStreamInfo;
import com.amazonaws.greengrass.streammanager.model.Persistence;
import com.amazonaws.greengrass.streammanager.model.ReadMessagesOptions;
import com.amazonaws.greengrass.streammanager.model.S3ExportTaskDefinition;
import com.amazonaws.greengrass.streammanager.model.StatusConfig;
import com.amazonaws.greengrass.streammanager.model.StatusLevel;
import com.amazonaws.greengrass.streammanager.model.StrategyOnFull;
import com.amazonaws.greengrass.streammanager.model.export.ExportDefinition;
import com.amazonaws.greengrass.streammanager.model.export.ExportStatus;
import com.amazonaws.greengrass.streammanager.model.export.HTTPConfig;
import com.amazonaws.greengrass.streammanager.model.export.IoTAnalyticsConfig;
import com.amazonaws.greengrass.streammanager.model.export.IoTSiteWiseConfig;
import com.amazonaws.greengrass.streammanager.model.export.KinesisConfig;
import com.amazonaws.greengrass.streammanager.model.export.S3ExportTaskExecutorConfig;

import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Objects;
import java.util.stream.Collectors;

public class Operations {
    interface Call {
        void run() throws StreamManagerException;
    }

    static void same(Object found, Object wanted) {
        if (!Objects.equals(found, wanted)) {
            throw new AssertionError(found + " instead of " + wanted);
        }
    }

    static void raises(Class<? extends StreamManagerException> wanted, Call call) throws StreamManagerException {
        try {
            call.run();
        } catch (StreamManagerException error) {
            if (wanted.isInstance(error)) {
                return;
            }
            throw error;
        }
        throw new AssertionError("no " + wanted.getSimpleName());
    }

    public static void main(String[] arguments) throws Exception {
        try (StreamManagerClient client = StreamManagerClientFactory.standard().build()) {
            appendsAndReads(client);
            updatesAndDescribes(client);
        }
        System.out.println("done");
    }

    static void appendsAndReads(StreamManagerClient client) throws Exception {
        MessageStreamDefinition definition = new MessageStreamDefinition()
                .withName("StreamName").withMaxSize(268435456L).withStreamSegmentSize(16777216L)
                .withTimeToLiveMillis(null).withStrategyOnFull(StrategyOnFull.OverwriteOldestData)
                .withPersistence(Persistence.File).withFlushOnWrite(false)
                .withExportDefinition(new ExportDefinition());
        client.createMessageStream(definition);
        raises(InvalidRequestException.class, () -> client.createMessageStream(definition));
        for (long number = 0; number < 120; number++) {
            byte[] payload = ("message " + number).getBytes(StandardCharsets.UTF_8);
            same(client.appendMessage("StreamName", payload), number);
        }
        List<Message> messages = client.readMessages("StreamName", new ReadMessagesOptions()
                .withDesiredStartSequenceNumber(100L).withMinMessageCount(10L).withMaxMessageCount(100L)
                .withReadTimeoutMillis(5000L));
        same(messages.size(), 20);
        same(messages.get(19).getSequenceNumber(), 119L);
        same(new String(messages.get(19).getPayload(), StandardCharsets.UTF_8), "message 119");
        same(messages.get(0).getStreamName(), "StreamName");
        raises(NotEnoughMessagesException.class, () -> client.readMessages("StreamName",
                new ReadMessagesOptions().withDesiredStartSequenceNumber(120L).withReadTimeoutMillis(10L)));
        S3ExportTaskDefinition task = new S3ExportTaskDefinition()
                .withBucket("bucket-name").withKey("KeyName").withInputUrl("URLToFile");
        client.appendMessage("StreamName", ValidateAndSerialize.validateAndSerializeToJsonBytes(task));
        List<Message> stored = client.readMessages("StreamName",
                new ReadMessagesOptions().withDesiredStartSequenceNumber(120L).withMinMessageCount(1L));
        same(ValidateAndSerialize.deserializeJsonBytesToObj(
                stored.get(0).getPayload(), S3ExportTaskDefinition.class).getInputUrl(), "URLToFile");
        same(client.listStreams(), List.of("StreamName"));
        MessageStreamInfo info = client.describeMessageStream("StreamName");
        same(info.getStorageStatus().getOldestSequenceNumber(), 0L);
        same(info.getStorageStatus().getNewestSequenceNumber(), 120L);
        same(info.getDefinition().getMaxSize(), 268435456L);
        same(info.getExportStatuses(), List.of());
        client.deleteMessageStream("StreamName");
        raises(ResourceNotFoundException.class, () -> client.describeMessageStream("StreamName"));
        raises(ResourceNotFoundException.class, () -> client.deleteMessageStream("StreamName"));
    }

    static void updatesAndDescribes(StreamManagerClient client) throws Exception {
        ExportDefinition exports = new ExportDefinition()
                .withHttp(List.of(new HTTPConfig().withIdentifier("h").withUri("http://127.0.0.1:1")
                        .withExportFormat(ExportFormat.JSON_BATCHED)))
                .withIotAnalytics(List.of(new IoTAnalyticsConfig().withIdentifier("a").withIotChannel("channel")))
                .withKinesis(List.of(new KinesisConfig().withIdentifier("k").withKinesisStreamName("stream")))
                .withIotSitewise(List.of(new IoTSiteWiseConfig().withIdentifier("w").withBatchSize(10L)))
                .withS3TaskExecutor(List.of(new S3ExportTaskExecutorConfig().withIdentifier("t")
                        .withStatusConfig(new StatusConfig()
                                .withStatusLevel(StatusLevel.TRACE).withStatusStreamName("status"))));
        client.createMessageStream(new MessageStreamDefinition()
                .withName("S").withStrategyOnFull(StrategyOnFull.RejectNewData).withExportDefinition(exports));
        MessageStreamInfo info = client.describeMessageStream("S");
        same(info.getExportStatuses().stream().map(ExportStatus::getExportConfigIdentifier).sorted()
                .collect(Collectors.joining()), "ahktw");
        MessageStreamDefinition definition = info.getDefinition();
        same(definition.getExportDefinition().getHttp().get(0).getExportFormat(), ExportFormat.JSON_BATCHED);
        same(definition.getExportDefinition().getS3TaskExecutor().get(0).getStatusConfig().getStatusLevel(),
                StatusLevel.TRACE);
        definition.setMaxSize(536870912L);
        definition.setTimeToLiveMillis(3600000L);
        definition.setStrategyOnFull(StrategyOnFull.OverwriteOldestData);
        client.updateMessageStream(definition);
        MessageStreamDefinition after = client.describeMessageStream("S").getDefinition();
        same(after, definition);
        raises(UpdateNotAllowedException.class,
                () -> client.updateMessageStream(after.withPersistence(Persistence.Memory)));
        client.deleteMessageStream("S");
    }
}
