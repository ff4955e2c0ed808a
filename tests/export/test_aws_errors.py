"""What an error of AWS says: its code and sentence, the call, the identity and region, and what to do."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from botocore.exceptions import ClientError, PartialCredentialsError

from bridge import Context, Exporter, Retry
from bridge.plugin import aws, discovery
from bridge.plugin.api import convert_config
from bridge.plugin.aws import AwsSettings
from bridge.plugin.testing import make_batch
from tests.cli.conftest import streambridge
from tests.export.harness import Bucket, certificate

EXPORTERS = discovery.load().exporters


class Service:
    """A server that answers every request in the form of S3, or of a JSON service."""

    def __init__(self) -> None:
        self.status, self.code, self.message, self.more, self.date = 400, "", "", "", datetime.now(UTC)
        self.region = ""
        service = self

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                self.rfile.read(int(self.headers.get("content-length") or 0))
                if "x-amz-target" in self.headers:
                    body = json.dumps({"__type": service.code, "message": service.message})
                else:
                    body = f"<Error><Code>{service.code}</Code><Message>{service.message}</Message>"
                    body += f"{service.more}</Error>"
                self.send_response_only(service.status)
                self.send_header("Date", format_datetime(service.date.astimezone(UTC), usegmt=True))
                if service.region:
                    self.send_header("x-amz-bucket-region", service.region)
                content = b"" if self.command == "HEAD" else body.encode()
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_PUT = do_POST = do_GET = do_HEAD = handle_any  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.close()


class Configured(Context):
    def client(self, service: str, config: Any, **options: Any) -> Any:
        return aws.client(AwsSettings(), service, config.region, config.endpoint_url, **options)


def exporter(kind: str, **config: Any) -> Exporter:
    cls = EXPORTERS[kind]
    return cls(convert_config(cls, {"identifier": "x", **config}), Configured())


def reason(made: Exporter) -> str:
    with pytest.raises(Retry) as failed:
        made.export(make_batch([b"x"]))
    return str(failed.value)


def kinesis(service: Service) -> Exporter:
    return exporter("kinesis", kinesisStreamName="line", endpointUrl=service.url)


def s3(service: Service) -> Exporter:
    return exporter("s3", bucket="plant", endpointUrl=service.url)


CASES = [
    (kinesis, 400, "ExpiredTokenException", "The security token is expired", "renew the credentials"),
    (s3, 400, "ExpiredToken", "The provided token has expired.", "renew the credentials"),
    (s3, 403, "InvalidAccessKeyId", "The key does not exist in our records.", "correct the credentials"),
    (kinesis, 400, "UnrecognizedClientException", "The token is invalid.", "correct the credentials"),
    (kinesis, 403, "InvalidClientTokenId", "The token is invalid", "correct the credentials"),
    (s3, 403, "SignatureDoesNotMatch", "It does not match.", "the secret key is not that of this access key"),
    (s3, 404, "NoSuchBucket", "The specified bucket does not exist", "create it, or correct its name"),
    (kinesis, 400, "ResourceNotFoundException", "Stream line not found", "create it, or correct its name"),
    (s3, 403, "AccessDenied", "Access Denied", "allow s3:PutObject for this identity"),
    (
        kinesis,
        400,
        "AccessDeniedException",
        "User: arn:aws:iam::1:user/gw is not authorized to perform: kinesis:PutRecords on resource: x",
        "allow kinesis:PutRecords for this identity",
    ),
]


@pytest.mark.parametrize(("kind", "status", "code", "message", "remedy"), CASES)
def test_an_error_of_aws_says_code_sentence_call_identity_region_and_remedy(
    service: Service,
    kind: Callable[[Service], Exporter],
    status: int,
    code: str,
    message: str,
    remedy: str,
) -> None:
    service.status, service.code, service.message = status, code, message
    text = reason(kind(service))
    assert f"with the access key testing (env) in eu-central-1 was answered {status} {code}" in text
    assert message.rstrip(".") in text
    assert remedy in text


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (301, "PermanentRedirect"),
        (400, "AuthorizationHeaderMalformed"),
        (400, "IllegalLocationConstraintException"),
    ],
)
def test_an_error_for_the_wrong_region_names_the_right_one(service: Service, status: int, code: str) -> None:
    service.status, service.code, service.message = status, code, "elsewhere"
    service.more = "<Region>eu-west-3</Region>"
    text = reason(s3(service))
    assert code in text
    assert 'set region = "eu-west-3" in the export, or in [aws]' in text


@pytest.mark.parametrize(
    ("make", "code"),
    [(s3, "RequestTimeTooSkewed"), (kinesis, "InvalidSignatureException"), (s3, "SignatureDoesNotMatch")],
)
def test_a_clock_that_is_wrong_is_named_with_how_far_it_is_off(
    service: Service, make: Callable[[Service], Exporter], code: str
) -> None:
    service.status, service.code, service.message = 403, code, "the times differ"
    service.date = datetime.now(UTC) + timedelta(hours=1)
    text = reason(make(service))
    behind = int(text.partition("this machine's clock is ")[2].partition(" s behind")[0])
    assert 3590 < behind <= 3601


def test_a_sentence_is_not_shown_for_a_code_that_aws_does_not_have(service: Service) -> None:
    service.status, service.code, service.message = 403, "Inner", "the secret of another server"
    assert "secret" not in reason(kinesis(service))


def test_the_signed_headers_in_a_sentence_are_not_shown(service: Service) -> None:
    service.status, service.code = 403, "InvalidSignatureException"
    service.message = "It does not match.\n\nThe Canonical String was\nx-amz-security-token:TOKEN"
    assert "TOKEN" not in reason(kinesis(service))


def test_missing_and_partial_credentials_say_where_to_set_them(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    made = exporter("kinesis", kinesisStreamName="line", endpointUrl=service.url, region="eu-north-1")
    assert "set [aws.credentials.iot], `profile` of [aws], or AWS_... variables" in reason(made)
    partial = PartialCredentialsError(provider="env", cred_var="AWS_SECRET_ACCESS_KEY")
    assert "complete the credentials" in str(aws.failure(partial, "putting records"))


def test_a_certificate_of_an_own_ca_names_its_option(service: Service, tmp_path: Path) -> None:
    key, cert = certificate(tmp_path, "server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    service.server.socket = context.wrap_socket(service.server.socket, server_side=True)
    url = service.url.replace("http:", "https:")
    text = reason(exporter("kinesis", kinesisStreamName="line", endpointUrl=url))
    assert text.startswith("no TLS with 127.0.0.1:")
    assert "name the CA in AWS_CA_BUNDLE" in text
    assert "name the CA in caFile of the export" in reason(exporter("http", uri=url))


def test_a_proxy_that_cannot_be_reached_names_its_option() -> None:
    settings = AwsSettings(proxies={"https": "http://user:secret@localhost:1"})
    client = aws.client(settings, "kinesis", endpoint_url="https://localhost:2")
    with pytest.raises(Exception, match="proxy") as failed:
        client.list_streams()
    text = str(aws.failure(failed.value, "listing"))
    assert "the proxy localhost:1" in text
    assert "correct `proxies` of [aws], or HTTPS_PROXY" in text
    assert "secret" not in text


# --- streambridge check --connect


def connected(path: Path, exports: str) -> tuple[int, dict[str, tuple[bool | None, str]]]:
    path.write_text(
        '[gateway]\ndata_dir = "data"\nmemory_dir = "memory"\n[mqtt]\nlisten = ["tcp://127.0.0.1:0"]\n'
        '[greengrass]\nlisten = ""\n[http]\nlisten = ""\n[streams.a]\n' + exports
    )
    env = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_REGION": "eu-central-1"}
    done = streambridge("check", "-c", path, "--connect", "--json", env=env)
    found = json.loads(done.stdout)["destinations"]
    return done.returncode, {one["export"]: (one["ok"], one["what"]) for one in found}


@pytest.mark.parametrize(
    ("header", "after"), [("7", 7), ("120", 120), ("9999", 300), ("soon", None), ("", None), (None, None)]
)
@pytest.mark.parametrize(("code", "usual"), [("InternalFailure", None), ("ThrottlingException", 1)])
def test_an_error_of_aws_is_waited_out_for_as_many_seconds_as_it_asks_for(
    header: str | None, after: float | None, code: str, usual: float | None
) -> None:
    headers = {} if header is None else {"retry-after": header}
    answer: Any = {"Error": {"Code": code, "Message": "x"}, "ResponseMetadata": {"HTTPHeaders": headers}}
    found = aws.failure(ClientError(answer, "PutRecords"), "kinesis:PutRecords")
    assert found.after == (usual if after is None else after)


def test_check_connect_says_for_each_destination_what_it_could_do(
    tmp_path: Path, bucket: Bucket, service: Service
) -> None:
    service.status, service.code, service.message = 400, "AccessDeniedException", "no"
    code, found = connected(
        tmp_path / "x.toml",
        f"""
[[streams.a.export.s3]]
identifier = "lake"
bucket = "{bucket.name}"
prefix = "raw"
endpoint_url = "{bucket.url}"
[[streams.a.export.s3]]
identifier = "gone"
bucket = "no-such-bucket-anywhere"
endpoint_url = "{bucket.url}"
[[streams.a.export.kinesis]]
identifier = "line"
kinesis_stream_name = "line"
endpoint_url = "{service.url}"
[[streams.a.export.http]]
identifier = "web"
uri = "{service.url}/in"
[[streams.a.export.mqtt]]
identifier = "hub"
url = "mqtt://localhost:1"
topic = "t"
""",
    )
    assert code == 1
    assert found["lake"] == (True, f"could list s3://{bucket.name}/raw")
    assert found["gone"][0] is False
    assert "NoSuchBucket" in found["gone"][1]
    assert found["line"][0] is None
    assert "kinesis:DescribeStreamSummary" in found["line"][1]
    assert found["web"] == (True, "could connect; HEAD was answered 400")
    assert found["hub"][0] is False
    assert "connection refused" in found["hub"][1].lower()
