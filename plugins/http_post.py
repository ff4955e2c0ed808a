"""Exporter `http`: POST to a URL.

`record` defines what is sent for a message, by default its payload; see `bridge.plugin.records`.
`exportFormat` 0, RAW_NOT_BATCHED: one request per message. 1, JSON_BATCHED: one request per batch, with a
list in JSON or CBOR; without `record`, a JSON list of the SDK's Message objects, with payloads in base64.

Any 2xx is success. 400, 411, 413, 414, 415, 421, 422 and 431 mean that the server will never accept this
content, so it is rejected (a batch is first sent in halves, until the bad message is alone). All other
answers, including redirects and missing rights, are retried.

`compression` sends bodies in gzip, with the header `Content-Encoding`. It helps with lists of messages, but
not with single small ones. No standard tells a client whether a server accepts gzip, so with `compression`
415 is retried too.

`bearerTokenFile` is read before each batch, so that a token can be replaced at any time. A secret does
not belong in a stream's definition, which is stored and shown.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from bridge import (
    Batch,
    BatchedConfig,
    BatchLimits,
    Context,
    Endpoint,
    ExportConfig,
    Exporter,
    Millis,
    Outcome,
    Refused,
    Retry,
    SecretFile,
    hookimpl,
    send_split,
)
from bridge.deflate import gzip
from bridge.plugin.aws import Body, cause, is_cut, is_unsent, remedy, retry_after
from bridge.plugin.records import JSON, TEXT, RecordEncoder

NO_SUCH_ENCODING = 415
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e\xa0-\xff]*")
REFUSED = frozenset({400, 411, 413, 414, NO_SUCH_ENCODING, 421, 422, 431})


class ExportFormat(IntEnum):
    """The SDK's ExportFormat."""

    RAW_NOT_BATCHED = 0
    JSON_BATCHED = 1


class HttpConfig(BatchedConfig, kw_only=True, frozen=True):
    """The SDK's HTTPConfig, with extensions. Its `uri` is the former name of `endpoint_url`."""

    endpoint_url: Endpoint = msgspec.field(name="uri")
    batch_size: Annotated[int, Meta(ge=1, le=500)] | None = None
    export_format: ExportFormat = ExportFormat.RAW_NOT_BATCHED
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    bearer_token_file: SecretFile | None = None
    ca_file: SecretFile | None = None
    cert_file: SecretFile | None = None
    key_file: SecretFile | None = None
    timeout_millis: Annotated[Millis, Meta(ge=100, le=600_000)] = 30_000
    record: str = "payload"
    compression: Literal["gzip"] | None = None


class HttpExporter(Exporter):
    """Exports one stream to one URL."""

    kind: ClassVar[str] = "http"
    Config: ClassVar[type[ExportConfig]] = HttpConfig
    limits: ClassVar[BatchLimits] = BatchLimits(records=500, by_record=True)
    any_order: ClassVar[bool] = True

    config: HttpConfig

    def __init__(self, config: HttpConfig, context: Context) -> None:
        super().__init__(config, context)
        self._encoder = RecordEncoder(config.record)
        is_messages = config.export_format is ExportFormat.JSON_BATCHED and config.record == "payload"
        content_type = JSON if is_messages else self._encoder.content_type
        self._headers = {"Content-Type": content_type, **config.headers}
        if config.compression:
            self._headers["Content-Encoding"] = config.compression
        # botocore's HTTP session: TLS, proxies of the environment and persistent connections without
        # another dependency.
        from botocore.utils import get_environ_proxies

        verify: Any = config.ca_file or True
        timeout: Any = config.timeout_millis / 1000
        # Head and body are two writes. Without this, the second waits 40 ms for the ACK of the first.
        no_delay: Any = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
        certificate = (config.cert_file, config.key_file) if config.cert_file and config.key_file else None
        proxies = get_environ_proxies(config.endpoint_url)
        self._session = context.session(
            verify=verify,
            proxies=proxies,
            timeout=timeout,
            client_cert=certificate or config.cert_file,
            socket_options=no_delay,
        )

    @classmethod
    def check(cls, config: HttpConfig) -> None:
        try:
            parts = urlsplit(config.endpoint_url)
            good = bool(parts.hostname) and parts.port != 0
        except ValueError:
            good = False
        if not good:
            raise ValueError("endpointUrl: it is not like https://host:8443/path")
        encoder = RecordEncoder(config.record)
        if config.export_format is ExportFormat.JSON_BATCHED and encoder.content_type == TEXT:
            raise ValueError("record: the template makes text, and exportFormat 1 needs JSON or CBOR")
        if config.compression and any(name.lower() == "content-encoding" for name in config.headers):
            raise ValueError("headers: compression sets Content-Encoding; remove one of the two")

        for name, value in config.headers.items():
            if not _NAME.fullmatch(name):
                raise ValueError(f"headers: {name!r} is not the name of a header")
            if not _VALUE.fullmatch(value):
                raise ValueError(f"headers: {name} has a line break, or characters that are not Latin-1")

    @classmethod
    def probe(cls, config: HttpConfig, context: Context) -> str:
        exporter = cls(config, context)
        try:
            # No answer to HEAD says whether POST is taken; any says that the server is there.
            status = exporter._send("HEAD", b"", exporter._authorized()).status_code
        finally:
            exporter.close()
        return f"could connect; HEAD was answered {status}"

    def export(self, batch: Batch) -> Outcome:
        headers = self._authorized()
        bodies, rejected = self._encoder.encode(batch)
        sound = [n for n in range(len(bodies)) if n not in rejected]
        if self.config.export_format is ExportFormat.JSON_BATCHED:
            return Outcome(rejected=rejected | self._post_list(batch, bodies, sound, headers))
        for n in sound:
            try:
                self._post(bodies[n], headers)
            except Refused as error:
                rejected[n] = str(error)
            except Retry as error:
                if n == sound[0]:
                    raise
                left = [m for m in sound if m >= n]
                return Outcome(
                    rejected=rejected, retry=left, error=str(error), after=error.after, cut=error.cut
                )
        return Outcome(rejected=rejected)

    def _post_list(
        self, batch: Batch, bodies: Sequence[bytes], sound: Sequence[int], headers: dict[str, str]
    ) -> dict[int, str]:
        """Send these records in one request; return the rejected ones with reasons."""

        def post(part: Sequence[int]) -> None:
            if self.config.record == "payload":
                self._post(_messages(batch, part), headers)
            else:
                self._post(self._encoder.joined([bodies[n] for n in part]), headers)

        return send_split(sound, post) if sound else {}

    def close(self) -> None:
        self._session.close()

    def _authorized(self) -> dict[str, str]:
        """Return the headers, with the token as it is now. Raises Retry."""
        headers = {**self._headers}
        if self.config.bearer_token_file is not None:
            try:
                token = Path(self.config.bearer_token_file).read_text(encoding="utf-8").strip()
            except OSError as error:
                raise Retry(f"cannot read the bearer token: {error}") from error
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _send(self, method: str, body: bytes, headers: dict[str, str]) -> Any:
        """Send a request; return the response, with its content. Raises Retry."""
        from botocore.awsrequest import AWSRequest
        from botocore.exceptions import BotoCoreError

        request = AWSRequest(method, self.config.endpoint_url, headers=headers, data=Body(body, self.context))
        try:
            response = self._session.send(request.prepare())
            response.content  # noqa: B018 - reads it
        except BotoCoreError as error:
            unsent = is_unsent(error)
            text = cause(error) + ("; see endpoint_url" if unsent else "")
            if hint := remedy(error, "caFile of the export", "HTTPS_PROXY of the service's environment"):
                text += f"; {hint}"
            raise Retry(text, unsent=unsent, cut=is_cut(error)) from error
        return response

    def _post(self, body: bytes, headers: dict[str, str]) -> None:
        self.context.working()
        if self.config.compression:
            body = gzip(body)
        response = self._send("POST", body, headers)
        answer = response.content[:200]
        if not 200 <= response.status_code < 300:
            # The client that chose this server may read the reason, so it must not contain the response.
            reason = f"{self.config.endpoint_url} answered {response.status_code}"
            self.context.log.info("%s: %r", reason, answer)
            if response.status_code == NO_SUCH_ENCODING and self.config.compression:
                raise Retry(f"{reason}: it may not take gzip; remove compression from the export")
            if response.status_code in REFUSED:
                raise Refused(reason)
            raise Retry(reason, after=retry_after(response.headers.get("retry-after", "")))


def _messages(batch: Batch, part: Sequence[int]) -> bytes:
    """Encode messages as JSON, as the SDK does."""
    return msgspec.json.encode(
        [
            {
                "streamName": batch.stream,
                "sequenceNumber": record.sequence_number,
                "ingestTime": record.ingest_time,
                "payload": record.payload,
            }
            for record in (batch.records[n] for n in part)
        ]
    )


@hookimpl
def register_exporters(register: Callable[[type[Exporter]], None]) -> None:
    """Register the exporter of this file."""
    register(HttpExporter)
