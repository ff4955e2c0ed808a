"""A gateway with the Firehose API in this process, and clients of it: boto3, and one made of bytes.

Every answer is checked against botocore's model of the service.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials

from bridge.access.logins import Access
from bridge.firehose.frontend import LIMITS, FirehoseFrontEnd
from bridge.firehose.settings import FirehoseConfig, FirehoseTls
from bridge.mqtt.settings import MqttConfig
from bridge.net.httpserver import HttpLimits
from bridge.operations.catalog import NewDeliveries, Operations
from bridge.plugin.allow import Allow
from tests.firehose.model import SERVICE, check_answer
from tests.greengrass import harness

KEY, SECRET, USER = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "plant"
OTHER = "AKIDOTHER", "anothersecretanothersecret", "other"
ROLE = "arn:aws:iam::123456789012:role/delivery"
TARGET = "Firehose_20150804."
S3: dict[str, Any] = {"RoleARN": ROLE, "BucketARN": "arn:aws:s3:::plant-archive"}


def keys_file(directory: Path) -> Path:
    path = directory / "keys"
    path.write_text(f"# id secret user\n{KEY} {SECRET} {USER}\n\n{' '.join(OTHER)}\n")
    path.chmod(0o600)
    return path


class Exports(harness.Exports):
    """The export side; a test says how far the exports of each stream are."""

    def __init__(self) -> None:
        super().__init__()
        self.passed: dict[str, int] = {}

    def exported_upto(self, name: str, holding: object = None) -> int | None:
        return self.passed.get(name, 0)


class Gateway(harness.Server):
    """Store, manager and the Firehose API, on an event loop in a thread."""

    def __init__(
        self,
        root: Path,
        *,
        tls: FirehoseTls | None = None,
        limits: HttpLimits = LIMITS,
        access: MqttConfig | None = None,
        allow: Allow | None = None,
        max_size: int = 256 * 1024 * 1024,
        **settings: Any,
    ) -> None:
        super().__init__(root, access=access, allow=allow or Allow())
        self.exports = Exports()
        self.max_size, self.limits = max_size, limits
        self.settings = FirehoseConfig(
            listen="127.0.0.1:0", access_keys_file=keys_file(root), tls=tls, **settings
        )

    def front_end(self) -> FirehoseFrontEnd:
        operations = Operations(
            self.manager,
            self.allow,
            new_deliveries=NewDeliveries(self.max_size, self.settings.flush_on_write),
        )
        self.rights = Access(self.access)  # a test reloads them
        return FirehoseFrontEnd(self.settings, operations, self.rights, self.limits)

    @property
    def url(self) -> str:
        return self.urls[0].rstrip("/")

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def client(self, key: str = KEY, secret: str = SECRET, **options: Any) -> Any:
        return client(self.url, key, secret, **options)

    def create(self, name: str = "plant", **destination: Any) -> None:
        """A delivery stream to S3."""
        destination = S3 | destination
        self.client().create_delivery_stream(
            DeliveryStreamName=name, ExtendedS3DestinationConfiguration=destination
        )

    def stored(self, name: str = "plant") -> list[bytes]:
        stream = self.manager.store.streams[name]

        def read() -> list[bytes]:
            with closing(stream.reader()) as reader:
                rows = reader.read(
                    stream.oldest, end=stream.next_sequence, max_messages=10**6, max_bytes=2**30
                )
            return [row.payload for row in rows]

        return self.call(read) if stream.next_sequence > stream.oldest else []

    def call_raw(self, operation: str, body: bytes | dict[str, Any], **headers: str) -> tuple[int, Any]:
        """One signed request on a connection of its own; returns the status and the decoded answer."""
        connection = self.connection()
        try:
            return call_on(connection, operation, body, **headers)
        finally:
            connection.close()

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=harness.DEADLINE)

    def send(self, *pieces: bytes) -> bytes:
        """Send bytes on a connection of their own; returns all that comes back until it is closed."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=harness.DEADLINE) as connection:
            for piece in pieces:
                connection.sendall(piece)
            received = b""
            while more := connection.recv(65536):
                received += more
        return received


def client(url: str, key: str = KEY, secret: str = SECRET, **options: Any) -> Any:
    """boto3's client, whose answers are checked against the model."""
    options.setdefault("retries", {"total_max_attempts": 1})
    validate = options.pop("parameter_validation", True)
    verify = options.pop("verify", None)
    made = boto3.client(
        "firehose",
        endpoint_url=url,
        region_name="eu-central-1",
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        config=Config(parameter_validation=validate, **options),
        verify=verify,
    )
    made.meta.events.register("before-parse.firehose", _check)
    return made


def _check(operation_model: Any, response_dict: dict[str, Any], **_: Any) -> None:
    answer = response_dict
    check_answer(operation_model, answer["status_code"], answer["headers"], answer["body"])


def signed(operation: str, body: bytes, host: str = "127.0.0.1", **headers: str) -> dict[str, str]:
    """The fields of a request, signed by botocore."""
    request = AWSRequest(
        "POST",
        f"http://{host}/",
        {"Content-Type": "application/x-amz-json-1.1", "X-Amz-Target": TARGET + operation, "Host": host},
        body,
    )
    for name, value in headers.items():
        request.headers[name.replace("_", "-")] = value
    SigV4Auth(Credentials(KEY, SECRET), "firehose", "eu-central-1").add_auth(request)
    return dict(request.headers.items())


def call_on(
    connection: http.client.HTTPConnection, operation: str, body: bytes | dict[str, Any], **headers: str
) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", "/", data, signed(operation, data, **headers))
    answer = connection.getresponse()
    found = answer.read()
    if operation in SERVICE.operation_names:
        check_answer(SERVICE.operation_model(operation), answer.status, answer.headers, found)
    return answer.status, json.loads(found)


def request(operation: str, body: bytes, fields: dict[str, str] | None = None) -> bytes:
    """The bytes of a signed request."""
    fields = {**signed(operation, body), "Content-Length": str(len(body)), **(fields or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST / HTTP/1.1\r\n{head}\r\n".encode() + body


def amz_date(seconds: float = 0) -> str:
    return datetime.fromtimestamp(time.time() + seconds, UTC).strftime("%Y%m%dT%H%M%SZ")


def records(*data: bytes) -> Sequence[dict[str, bytes]]:
    return [{"Data": one} for one in data]


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))
