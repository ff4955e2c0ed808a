"""Exporter `mqtt`: publishes the messages to another MQTT broker, such as a hub or AWS IoT Core.

A message is accepted when the broker has acknowledged it: at QoS 1 with PUBACK. At QoS 0 the exporter asks
the broker after each batch whether it has received the batch. Up to `maxInFlight` messages wait for their
PUBACK, fewer if the Receive Maximum of the broker is lower. When the connection breaks, the messages without
a PUBACK are sent again, in order and before any other. So a message may arrive twice around a break or a
kill, and at no other time.

An MQTT 3.1.1 broker ends the connection if it does not want a message, for example because it is too large.
The export then sends one message at a time. If the broker ends `DROPS` connections in a row at the same
message, that message is rejected.

In MQTT 5 each message has the user property `message-id`: `<gateway>/<stream>/<epoch>/<number>`. A
streambridge at the other end stores a message once, however often it arrives within its deduplication
window. The user property `bridged-by` is the id of the gateway, after those of the gateways that the message
has passed before: the upstream of a gateway leaves out messages that have passed it. The publisher's
properties are passed on: user properties, content type, payload format, response topic, correlation data and
expiry. The publisher's own `message-id` is not passed on, because such an id belongs to the user who sends
it.

The topic is a template. A message is rejected if it lacks one of the values, or if its topic would contain a
wildcard. `record` defines the payload; see `bridge.plugin.records`.

Limits of AWS IoT Core, if the host is one of its endpoints or with `awsIotCore`: 100 messages and 512 KiB a
second, payloads of 128 KiB, topics of 256 bytes with 7 slashes (after the prefix of Basic Ingest).
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from bridge import (
    Batch,
    BatchedConfig,
    Batching,
    BatchLimits,
    BrokerUrl,
    Context,
    ExportConfig,
    Exporter,
    Millis,
    Outcome,
    Record,
    Retry,
    SecretFile,
    Unproven,
    hookimpl,
)
from bridge.model import KIB, MAX_MILLIS
from bridge.net.brokers import (
    AWS_HOST,
    BRIDGED_BY,
    host_and_port,
    is_secure,
    read_password,
    tls_context,
    url_mistake,
)
from bridge.plugin.keys import NoValue, Template
from bridge.plugin.mqtt import (
    LONGEST,
    Connection,
    Ended,
    Target,
    named,
    pack_properties,
    packet_size,
)
from bridge.plugin.records import JSON, RecordEncoder

RECORDS = 1000  # records per batch, and the most that a kill repeats
PINGS = 4  # checks of an idle connection per keep-alive interval
REJECTED = {  # reason codes (MQTT 5 section 2.4) that another attempt cannot change
    0x90: "topic name invalid",
    0x95: "packet too large",
    0x99: "payload format invalid",
}
QUOTA = 0x97
RETRIED = {
    0x80: "unspecified error",
    0x83: "implementation specific error",
    0x87: "not authorized; allow this client to publish there",
    0x91: "packet identifier in use",
    QUOTA: "quota exceeded",
}
WAIT = 1.0  # seconds to wait when a quota is exceeded
# How often in a row the broker ends the connection at the same message, without a reason. After SUSPECT
# times, messages are sent one at a time; after DROPS times, the message is rejected.
SUSPECT, DROPS = 2, 10

# https://docs.aws.amazon.com/general/latest/gr/iot-core.html, "message broker and protocol limits"
AWS_PAYLOAD = 128 * KIB
AWS_TOPIC, AWS_SLASHES = 256, 7
AWS_BASIC_INGEST = re.compile(r"\$aws/rules/[^/]+/")  # does not count towards the limits on a topic
AWS_IN_FLIGHT = 100
AWS_CLIENT_ID = 128
# Per second and connection. A little lower, because one of our seconds overlaps two of theirs.
AWS_MESSAGES, AWS_BYTES = 95, 512 * KIB * 95 // 100
AWS_BURST = 0.05  # seconds of both


class MqttConfig(BatchedConfig, kw_only=True, frozen=True):
    """The broker, and how to publish there. `url` is the former name of `endpoint_url`."""

    endpoint_url: BrokerUrl = msgspec.field(name="url")
    batch_size: Annotated[int, Meta(ge=1, le=RECORDS)] | None = None
    protocol: Literal["3.1.1", "5"] = "5"
    client_id: Annotated[str, Meta(min_length=1, max_length=LONGEST)] | None = None
    username: str | None = None
    password_file: SecretFile | None = None
    ca_file: SecretFile | None = None
    cert_file: SecretFile | None = None
    key_file: SecretFile | None = None
    alpn: str | None = None
    topic: Annotated[str, Meta(min_length=1)] = "{topic}"
    record: str = "payload"
    qos: Annotated[int, Meta(ge=0, le=1)] = 1
    retain: Literal["never", "always", "as published"] = "never"
    message_expiry_millis: Annotated[Millis, Meta(ge=1000, le=MAX_MILLIS)] | None = None
    user_properties: dict[str, str] = msgspec.field(default_factory=dict)
    message_id: bool = True
    max_in_flight: Annotated[int, Meta(ge=1, le=LONGEST)] = 100
    keep_alive_millis: Annotated[Millis, Meta(ge=1000, le=LONGEST * 1000)] = 20_000
    timeout_millis: Annotated[Millis, Meta(ge=100, le=600_000)] = 30_000
    aws_iot_core: bool | None = None

    @property
    def aws(self) -> bool:
        """Whether the limits of AWS IoT Core apply."""
        found = AWS_HOST.search(host_and_port(self.endpoint_url)[0]) is not None
        return found if self.aws_iot_core is None else self.aws_iot_core


class _Headers(Struct):
    """The properties of a PUBLISH that are passed on. `expires` is Unix time in ms."""

    retain: bool = False
    user: list[tuple[str, str]] = []
    type: str = ""
    utf8: bool = False
    reply: str = ""
    token: bytes = b""
    expires: int = 0


_NO_HEADERS = _Headers()
_headers = msgspec.msgpack.Decoder(_Headers)


class _Message(NamedTuple):
    topic: str
    retain: bool
    properties: bytes
    size: int  # of its packet


class MqttExporter(Exporter):
    """Exports one stream to one broker, over one connection."""

    kind: ClassVar[str] = "mqtt"
    Config: ClassVar[type[ExportConfig]] = MqttConfig
    limits: ClassVar[BatchLimits] = BatchLimits(records=RECORDS, by_record=True)
    any_order: ClassVar[bool] = True

    config: MqttConfig

    def __init__(self, config: MqttConfig, context: Context) -> None:
        super().__init__(config, context)
        self._topic = Template(config.topic)
        self._encoder = RecordEncoder(config.record)
        self._type = "" if config.record == "payload" else self._encoder.content_type  # else the publisher's
        self._user = {name: Template(value) for name, value in config.user_properties.items()}
        self._own = {*config.user_properties, "message-id"}  # names not taken from a publisher
        self._v5 = config.protocol == "5"
        self._aws = config.aws
        self._pace = _Pace(AWS_MESSAGES, AWS_BYTES, AWS_BURST) if self._aws else None
        self._connection: Connection | None = None
        self._singly = False  # send one message at a time, to find the one that ends the connection
        self._suspect, self._drops = -1, 0  # the number of the first unanswered message, and drops in a row

    @classmethod
    def check(cls, config: MqttConfig) -> None:
        for key, mistake in _mistakes(config):
            raise msgspec.ValidationError(f"{mistake} - at `$.{key}`")

    @classmethod
    def lacks(cls, config: MqttConfig) -> str | None:
        try:
            read_password(config.password_file, named)
            _tls(config)
        except ValueError as error:
            return str(error)
        return None

    @classmethod
    def batching(cls, config: MqttConfig) -> Batching:
        batching = super().batching(config)
        # A batch that takes a second, so that the end of the service interrupts fewer.
        return (
            msgspec.structs.replace(batching, records=batching.records or AWS_MESSAGES)
            if config.aws
            else batching
        )

    @classmethod
    def probe(cls, config: MqttConfig, context: Context) -> str:
        # Another client id than that of the export: the broker would end its connection.
        mine = msgspec.structs.replace(config, client_id=f"check-{secrets.token_hex(6)}")
        exporter = cls(mine, context)
        try:
            exporter._connected()
        except Retry as error:
            if config.client_id or config.aws:
                raise Unproven(f"with another client id than the export's: {error}") from error
            raise
        finally:
            exporter.close()
        return "could connect"

    def export(self, batch: Batch) -> Outcome:
        connection = self._connected()
        connection.forget()
        rejected: dict[int, str] = {}
        ended: Ended | None = None
        try:
            self._publish(batch, connection, rejected)
            self._singly, self._drops = False, 0
        except Ended as error:
            ended, self._connection = error, None
            if why := self._blame(batch, connection.unanswered, error):
                rejected[connection.unanswered[0]] = why
                self._singly, self._drops = False, 0
        except BaseException:
            self.close()  # its state is unknown
            raise
        return _outcome(batch, connection, rejected, ended)

    def _blame(self, batch: Batch, unanswered: list[int], ended: Ended) -> str:
        """Return why the first unanswered message is rejected, if it ended the connection; else empty."""
        alone = self._singly and len(unanswered) == 1
        if ended.code in REJECTED:
            self._singly = True
            return f"the broker rejects it: {REJECTED[ended.code]}" if alone else ""
        if not ended.dropped or not unanswered:
            return ""
        number = batch.records[unanswered[0]].sequence_number
        self._drops = self._drops + 1 if number == self._suspect else 1
        self._suspect = number
        self._singly = self._singly or self._drops >= SUSPECT
        if alone and self._drops >= DROPS:
            return f"the broker ended {self._drops} connections in a row at this message, without a reason"
        return ""

    def idle(self) -> float | None:
        if self._connection is None:
            return None
        try:
            self._connection.idle()
        except Ended as error:
            self.context.log.info("%s; the next message makes a new one", error)
            self._connection = None
            return None
        return self.config.keep_alive_millis / 1000 / PINGS

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # --- the connection

    def _connected(self) -> Connection:
        """Return the connection, or a new one if it has ended. Raises Retry."""
        if self._connection is not None and not self._connection.stale:
            try:
                self._connection.turn(0)
            except Ended:
                self._connection = None
            else:
                return self._connection
        self.close()
        target = self._target()
        connection = Connection(target, self.context.monotonic, self.context.working, self.context.link)
        if missing := self._missing(connection):
            connection.close()
            raise Retry(f"{target.url} {missing}", unsent=True)
        self._connection = connection
        return connection

    def _missing(self, connection: Connection) -> str | None:
        if connection.max_qos < self.config.qos:
            return "takes no QoS 1; set qos = 0"
        if self.config.retain != "never" and not connection.takes_retained:
            return 'takes no retained messages; set retain = "never"'
        return None

    def _target(self) -> Target:
        config = self.config
        host, port = host_and_port(config.endpoint_url)
        try:
            password, tls = read_password(config.password_file, named), _tls(config)
        except ValueError as error:
            raise Retry(str(error), unsent=True) from error
        return Target(
            url=config.endpoint_url,
            host=host,
            port=port,
            v5=self._v5,
            qos=config.qos,
            client_id=config.client_id or self._client_id(),
            keep_alive=max(config.keep_alive_millis // 1000, 1),
            timeout=config.timeout_millis / 1000,
            username=config.username,
            password=password,
            tls=tls,
        )

    def _client_id(self) -> str:
        name = f"{self.context.gateway}-{self.context.stream}-{self.config.identifier}"
        return name if len(name.encode()) <= AWS_CLIENT_ID else hashlib.sha256(name.encode()).hexdigest()

    # --- the messages

    def _publish(self, batch: Batch, connection: Connection, rejected: dict[int, str]) -> None:
        """Publish the batch and wait for the answers; fill `rejected`, by index. Raises Ended."""
        window = 1 if self._singly else min(self.config.max_in_flight, connection.receive_maximum)
        if self._aws:
            window = min(window, AWS_IN_FLIGHT)
        payloads, wrong = self._encoder.encode(batch)
        rejected |= wrong
        number, repeated = -1, 0
        for n, record in enumerate(batch.records):
            if n in wrong:
                continue
            # A transform may have made two records of one; they are two messages.
            repeated = repeated + 1 if record.sequence_number == number else 0
            number = record.sequence_number
            message = self._message(batch, record, payloads[n], repeated, connection.max_packet)
            if isinstance(message, str):
                rejected[n] = message
                continue
            while self._pace is not None and (wait := self._pace.wait(self.context.monotonic())) > 0:
                connection.turn(wait)
            connection.wait_below(window)
            if any(code not in REJECTED for code in connection.refused.values()):
                break  # a refused message must be sent again before later ones
            connection.publish(n, message.topic, payloads[n], message.retain, message.properties)
            if self._pace is not None:
                self._pace.sent(self.context.monotonic(), message.size)
            if self._singly:
                connection.finish()
        connection.finish()

    def _message(
        self, batch: Batch, record: Record, payload: bytes, repeated: int, max_packet: int
    ) -> _Message | str:
        """Return the message for a record, or why it can never be published."""
        headers = _headers.decode(record.headers) if record.headers else _NO_HEADERS
        try:
            topic = self._topic.render(batch, record)
            encoded = topic.encode()
            properties = self._properties(batch, record, headers, repeated) if self._v5 else b""
        except NoValue as error:
            return f"topic: {error}"
        except ValueError as error:  # a lone surrogate, or a string that is too long
            return str(error)
        if wrong := self._wrong(topic, encoded, payload):
            return wrong
        size = packet_size(encoded, payload, self.config.qos, properties)
        if size > max_packet:
            return f"the packet of {size} bytes is larger than {max_packet} bytes, which the broker takes"
        retain = self.config.retain
        return _Message(topic, retain == "always" or (retain != "never" and headers.retain), properties, size)

    def _wrong(self, topic: str, encoded: bytes, payload: bytes) -> str | None:
        if not topic or len(encoded) > LONGEST or any(one in topic for one in "+#\0"):
            return f"{topic[:200]!r} is not a topic that can be published to"
        if self._aws:
            counted = AWS_BASIC_INGEST.sub("", topic, count=1) if topic.startswith("$aws/rules/") else topic
            if len(counted.encode()) > AWS_TOPIC or counted.count("/") > AWS_SLASHES:
                most = f"{AWS_TOPIC} bytes and {AWS_SLASHES} slashes"
                return f"a topic of AWS IoT Core has at most {most}, unlike {topic[:200]!r}"
            if len(payload) > AWS_PAYLOAD:
                return f"AWS IoT Core takes {AWS_PAYLOAD} bytes; the message has {len(payload)}"
        return None

    def _properties(self, batch: Batch, record: Record, headers: _Headers, repeated: int) -> bytes:
        user = (
            [(name, value) for name, value in headers.user if name not in self._own] if headers.user else []
        )
        for name, template in self._user.items():
            with suppress(NoValue):
                user.append((name, template.render(batch, record)))
        if (mark := (BRIDGED_BY, batch.gateway)) not in user:
            user.append(mark)
        if self.config.message_id:
            user.append(("message-id", _message_id(batch, record, repeated)))
        expires = headers.expires
        if not expires and self.config.message_expiry_millis is not None:
            expires = record.ingest_time + self.config.message_expiry_millis
        return pack_properties(
            user,
            # At least a second, so that it reaches current subscribers.
            expiry=max(math.ceil(expires / 1000 - self.context.now()), 1) if expires else None,
            utf8=self._type == JSON or (not self._type and headers.utf8),
            content_type=self._type or headers.type,
            reply=headers.reply,
            token=headers.token,
        )


class _Pace:
    """Spreads messages over time; times in seconds."""

    def __init__(self, messages: float, size: float, burst: float) -> None:
        """`messages` and `size` (bytes) are limits per second; `burst` is in seconds."""
        self._messages, self._size, self._burst = messages, size, burst
        self._free_at = 0.0

    def wait(self, now: float) -> float:
        """Return how long the next message must wait; 0 or less if it may be sent."""
        return self._free_at - self._burst - now

    def sent(self, now: float, size: int) -> None:
        self._free_at = max(self._free_at, now) + max(1 / self._messages, size / self._size)


def _outcome(batch: Batch, connection: Connection, rejected: dict[int, str], ended: Ended | None) -> Outcome:
    answers, refused = connection.answers, connection.refused
    rejected |= {
        n: f"the broker rejects it: {REJECTED[code]}" for n, code in refused.items() if code in REJECTED
    }
    retry = [n for n in range(len(batch.records)) if n not in rejected and (n not in answers or n in refused)]
    first = next((n for n in retry if n in refused), None)
    waiting = None if first is None else refused[first]
    error = str(ended or "")
    if first is not None and waiting is not None:
        number = batch.records[first].sequence_number
        error = f"the broker refuses message {number}: {RETRIED.get(waiting, f'reason code 0x{waiting:02x}')}"
    elif retry:
        error += f"; message {batch.records[retry[0]].sequence_number} is the first without an answer"
    quota = waiting == QUOTA or (ended is not None and ended.code == QUOTA)
    return Outcome(
        retry=retry,
        rejected=rejected,
        error=error if retry else "",
        after=WAIT if quota and retry else None,
        cut=ended is not None and ended.code is None and waiting is None,
    )


def _message_id(batch: Batch, record: Record, repeated: int) -> str:
    name = f"{batch.gateway}/{batch.stream}/{batch.epoch}/{record.sequence_number}"
    name += f".{repeated}" if repeated else ""
    # A hub takes ids of up to 255 bytes.
    return name if len(name.encode()) <= 255 else hashlib.sha256(name.encode()).hexdigest()


def _tls(config: MqttConfig) -> ssl.SSLContext | None:
    """Raises ValueError."""
    return tls_context(
        config.endpoint_url,
        named,
        ca=config.ca_file,
        cert=config.cert_file,
        key=config.key_file,
        alpn=config.alpn,
        aws=config.aws,
    )


def _mistakes(config: MqttConfig) -> list[tuple[str, str]]:
    """Return the keys with mistakes, each with a description."""
    found = []
    if mistake := url_mistake(config.endpoint_url):
        found.append(("endpointUrl", mistake))
    elif not is_secure(config.endpoint_url):
        given = {
            "caFile": config.ca_file,
            "certFile": config.cert_file,
            "keyFile": config.key_file,
            "alpn": config.alpn,
        }
        found += [
            (key, "it needs TLS: write endpointUrl as mqtts://host") for key, value in given.items() if value
        ]
    if config.key_file is not None and config.cert_file is None:
        found.append(("keyFile", "it needs certFile"))
    if config.password_file is not None and config.username is None:
        found.append(("passwordFile", "it needs username"))
    if config.newest_first and (config.retain != "never" or config.record == "payload"):
        what = "the retained message" if config.retain != "never" else "a payload alone"
        found.append(
            (
                "order",
                f'subscribers cannot tell {what} from an older one that comes later; with "newest first", '
                'use retain = "never", and a record with the number or the time',
            )
        )
    if config.protocol != "5":
        needs = {
            "messageExpiryMillis": config.message_expiry_millis,
            "userProperties": config.user_properties,
        }
        found += [(key, 'it needs protocol = "5"') for key, value in needs.items() if value]
    if config.message_id and "message-id" in config.user_properties:
        found.append(
            ("userProperties", "message-id has the id of the message; set messageId = false to choose it")
        )
    try:
        RecordEncoder(config.record)
    except ValueError as error:
        found.append(("record", str(error).removeprefix("record: ")))
    for key, text in [
        ("topic", config.topic),
        *(("userProperties", value) for value in config.user_properties.values()),
    ]:
        try:
            Template(text)
        except ValueError as error:
            found.append((key, str(error)))
            continue
        if key == "topic" and any(one in re.sub(r"\{[^{}]*\}", "", text) for one in "+#\0"):
            found.append((key, f"{text!r} has a wildcard; a message goes to one topic"))
    return found


@hookimpl
def register_exporters(register: Callable[[type[Exporter]], None]) -> None:
    """Register the exporter of this file."""
    register(MqttExporter)
