"""Where AWS credentials come from, that they are renewed, and that a failure of them loses nothing."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest
from botocore.exceptions import EndpointConnectionError, NoRegionError, ProfileNotFound

from benchmarks.testbed.aws import FakeAws, error
from benchmarks.testbed.web import Web
from bridge import Context, Exporter, Retry
from bridge.plugin import aws, discovery
from bridge.plugin.api import convert_config
from bridge.plugin.aws import AwsCredentials, AwsSettings, IotCredentials
from bridge.plugin.testing import deliver, make_batch
from tests.export.harness import certificate, drop_in, running, until
from tests.fakes.proxy import Proxy

EXPORTERS = discovery.load().exporters


@pytest.fixture
def fake() -> Iterator[FakeAws]:
    server = FakeAws()
    yield server
    server.close()


class Configured(Context):
    """A context with settings of its own."""

    def __init__(self, settings: AwsSettings) -> None:
        super().__init__()
        self.settings = settings

    def client(self, service: str, config: Any, **options: Any) -> Any:
        return aws.client(self.settings, service, config.region, config.endpoint_url, **options)


def kinesis(settings: AwsSettings, **config: Any) -> Exporter:
    cls = EXPORTERS["kinesis"]
    wire = {"identifier": "k", "kinesisStreamName": "s", **config}
    return cls(convert_config(cls, wire), Configured(settings))


def iot(fake: FakeAws, tmp_path: Path) -> AwsSettings:
    """Settings for the fake's credentials provider, behind TLS that asks for the device's certificate."""
    server_key, server_cert = certificate(tmp_path, "server")
    device_key, device_cert = certificate(tmp_path, "device")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server_cert, server_key)
    context.load_verify_locations(device_cert)
    context.verify_mode = ssl.CERT_REQUIRED
    provider = FakeAws()
    provider.server.socket = context.wrap_socket(provider.server.socket, server_side=True)
    fake.provider = provider
    return AwsSettings(
        endpoint_url=fake.url,
        credentials=AwsCredentials(
            iot=IotCredentials(
                endpoint=provider.url.replace("http:", "https:"),
                role_alias="gateway",
                cert=device_cert,
                key=device_key,
                ca=server_cert,
                thing="gw-1",
            )
        ),
    )


@pytest.fixture
def settings(fake: FakeAws, tmp_path: Path) -> Iterator[AwsSettings]:
    yield iot(fake, tmp_path)
    fake.provider.close()


def test_a_device_certificate_and_a_role_alias_give_credentials(fake: FakeAws, settings: AwsSettings) -> None:
    deliver(kinesis(settings), make_batch([b"x"]))
    assert fake.keys == ["ASIAGATEWAY1"]


def test_credentials_near_their_end_are_renewed_while_running(fake: FakeAws, settings: AwsSettings) -> None:
    fake.provider.lifetime = 60
    exporter = kinesis(settings)
    for _ in range(2):
        deliver(exporter, make_batch([b"x"]))
    assert len(set(fake.keys)) == 2


def test_without_the_provider_records_wait(fake: FakeAws, settings: AwsSettings) -> None:
    fake.provider.faults = [error(403, "AccessDenied"), error(500, "x")]
    exporter = kinesis(settings)
    for answer in ("403", "500"):
        with pytest.raises(Retry, match=answer):
            exporter.export(make_batch([b"x"]))
    deliver(exporter, make_batch([b"x"]))
    assert len(fake.taken) == 1


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The shared credentials file, which is not there yet; there are no other credentials."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return tmp_path / "credentials"


def keys(name: str) -> str:
    return f"aws_access_key_id = {name}\naws_secret_access_key = s\n"


def test_credentials_that_come_later_are_taken_up_without_a_restart(fake: FakeAws, shared: Path) -> None:
    settings = AwsSettings(endpoint_url=fake.url, region="eu-west-3")  # a session of its own
    exporter = kinesis(settings)
    with pytest.raises(Retry, match="credentials"):
        exporter.export(make_batch([b"x"]))
    shared.write_text("[default]\n" + keys("LATER"), encoding="utf-8")
    deliver(exporter, make_batch([b"x"]), attempts=1)
    assert fake.keys == ["LATER"]


@pytest.mark.parametrize(
    "code", ["ExpiredTokenException", "UnrecognizedClientException", "AccessDeniedException"]
)
def test_rejected_credentials_that_are_replaced_apply_without_a_restart(
    fake: FakeAws, shared: Path, code: str
) -> None:
    settings = AwsSettings(endpoint_url=fake.url, region=f"eu-{code.lower()}")  # a session of its own
    shared.write_text("[default]\n" + keys("OLD"), encoding="utf-8")
    exporter = kinesis(settings)
    deliver(exporter, make_batch([b"x"]))
    shared.write_text("[default]\n" + keys("NEW"), encoding="utf-8")
    fake.faults = [error(400, code)]
    deliver(exporter, make_batch([b"x"]), attempts=2)
    assert fake.keys == ["OLD", "OLD", "NEW"]


class EmptyStore:
    """A server of S3 without objects; it rejects a token as expired, with the status of S3."""

    def __init__(self, status: int, expired: str) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                """Nothing."""

            def answer(self) -> None:
                is_expired = f"Credential={expired}/" in self.headers["Authorization"]
                code = "ExpiredToken" if is_expired else "NoSuchKey"
                body = f"<Error><Code>{code}</Code></Error>".encode()
                self.send_response(status if is_expired else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_HEAD = answer  # noqa: N815

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.mark.parametrize("status", [400, 403])
def test_a_token_that_expires_while_an_object_is_looked_for_is_replaced(shared: Path, status: int) -> None:
    with closing(EmptyStore(status, expired="OLD")) as store:
        settings = AwsSettings(endpoint_url=store.url, region="eu-west-3")
        shared.write_text("[default]\n" + keys("OLD"), encoding="utf-8")
        cls = EXPORTERS["s3"]
        exporter = cls(convert_config(cls, {"identifier": "o", "bucket": "lake"}), Configured(settings))
        with pytest.raises(Retry, match="ExpiredToken"):
            exporter.landed(make_batch([b"x"]))
        shared.write_text("[default]\n" + keys("NEW"), encoding="utf-8")
        assert exporter.landed(make_batch([b"x"])) is False


def test_rejected_credentials_of_the_provider_are_fetched_again(fake: FakeAws, settings: AwsSettings) -> None:
    exporter = kinesis(settings)
    fake.faults = [error(400, "ExpiredTokenException")]
    deliver(exporter, make_batch([b"x"]), attempts=2)
    assert fake.keys == ["ASIAGATEWAY1", "ASIAGATEWAY2"]


def test_a_profile_that_comes_later_is_taken_up_without_a_restart(fake: FakeAws, shared: Path) -> None:
    settings = AwsSettings(profile="plant")
    with pytest.raises(ProfileNotFound):
        kinesis(settings)  # for which the worker waits
    shared.write_text("[plant]\n" + keys("PLANT"), encoding="utf-8")
    with pytest.raises(NoRegionError):
        kinesis(settings)
    (shared.parent / "config").write_text("[profile plant]\nregion = eu-north-1\n", encoding="utf-8")
    exporter = kinesis(settings, endpointUrl=fake.url)
    assert exporter._client.meta.region_name == "eu-north-1"
    deliver(exporter, make_batch([b"x"]), attempts=1)
    assert fake.keys == ["PLANT"]


def test_requests_go_through_the_configured_proxy(fake: FakeAws) -> None:
    settings = AwsSettings(proxies={"http": fake.url})
    deliver(kinesis(settings, endpointUrl="http://kinesis.example.invalid"), make_batch([b"x"]))
    assert len(fake.taken) == 1


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    server = Proxy()
    yield server
    server.close()


@pytest.mark.parametrize("configured", [True, False])
def test_the_credentials_provider_is_asked_through_the_proxy(
    fake: FakeAws, settings: AwsSettings, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, configured: bool
) -> None:
    if configured:
        settings = msgspec.structs.replace(settings, proxies={"https": proxy.url})
    else:
        monkeypatch.setenv("https_proxy", proxy.url)
    deliver(kinesis(settings), make_batch([b"x"]))
    assert fake.keys == ["ASIAGATEWAY1"]
    assert proxy.asked == [fake.provider.server.server_port]


def test_the_http_exporter_goes_through_the_proxy_of_the_environment(
    tmp_path: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, cert = certificate(tmp_path, "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    web = Web()
    web.server.socket = context.wrap_socket(web.server.socket, server_side=True)
    monkeypatch.setenv("https_proxy", proxy.url)
    config = {"identifier": "h", "uri": web.url.replace("http:", "https:"), "caFile": str(cert)}
    try:
        exporter = EXPORTERS["http"](convert_config(EXPORTERS["http"], config), Context())
        deliver(exporter, make_batch([b"x"]))
        exporter.close()
    finally:
        web.close()
    assert web.bodies == [b"x"]
    assert proxy.asked == [web.server.server_port]


def test_an_export_may_have_its_own_endpoint_and_region(fake: FakeAws) -> None:
    settings = AwsSettings(endpoint_url="http://127.0.0.1:1", region="eu-west-1")
    exporter = kinesis(settings, endpointUrl=fake.url, region="ap-south-1")
    deliver(exporter, make_batch([b"x"]))
    assert exporter._client.meta.region_name == "ap-south-1"


@pytest.mark.parametrize(
    ("kind", "config", "url"),
    [
        ("s3", {"bucket": "landing"}, "http://localhost:1/landing?list-type=2&"),
        ("s3TaskExecutor", {}, "http://localhost:1/landing/k"),
        ("IotSitewise", {}, "http://localhost:1/properties"),
    ],
)
def test_the_endpoint_of_the_aws_table_is_used_as_it_is(kind: str, config: dict[str, Any], url: str) -> None:
    messages = {
        "s3TaskExecutor": {"inputUrl": f"file:{__file__}", "bucket": "landing", "key": "k"},
        "IotSitewise": {
            "entryId": "1",
            "propertyAlias": "/a",
            "propertyValues": [{"value": {"doubleValue": 1.0}, "timestamp": {"timeInSeconds": 1}}],
        },
    }
    cls, context = EXPORTERS[kind], Configured(AwsSettings(endpoint_url="http://localhost:1"))
    exporter = cls(convert_config(cls, {"identifier": "x", **config}), context)
    with pytest.raises(Retry, match=r"^cannot connect to localhost:1: [^:]*; see endpoint_url$") as failed:
        exporter.export(make_batch([json.dumps(messages.get(kind)).encode()]))
    cause = failed.value.__cause__
    assert isinstance(cause, EndpointConnectionError)
    assert cause.kwargs["endpoint_url"].startswith(url)


def test_an_error_for_want_of_a_region_says_where_to_set_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    with pytest.raises(NoRegionError) as missing:
        aws.client(AwsSettings(), "kinesis")
    reason = str(aws.failure(missing.value, "making the kinesis client"))
    assert reason == "making the kinesis client: there is no region; set `region` of the export, or of [aws]"


def test_the_region_that_greengrass_gives_its_components_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setenv("AWS_REGION", "eu-south-2")
    assert aws.client(AwsSettings(profile=None), "kinesis").meta.region_name == "eu-south-2"


def test_a_plugin_may_provide_credentials(fake: FakeAws, tmp_path: Path) -> None:
    source = """
        import time
        from bridge import hookimpl
        from bridge.plugin.aws import Credentials

        @hookimpl
        def aws_credentials(settings):
            return lambda: Credentials(
                access_key="FROMPLUGIN", secret_key="s", token="t", expiry=time.time() + 3600
            )
    """
    drop_in(tmp_path, "vault", source)

    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            config = {"identifier": "k", "kinesisStreamName": "s", "endpointUrl": fake.url}
            gateway.create("a", {"kinesis": [config]})
            await gateway.append("a", b"x")
            await gateway.exported("a", 0)

    asyncio.run(scenario())
    assert fake.keys == ["FROMPLUGIN"]


def listed(root: Path) -> dict[str, Any]:
    """The export as `streambridge exports` shows it, from the files."""
    command = [sys.executable, "-m", "bridge", "exports", "--data-dir", str(root / "data"), "--json"]
    (export,) = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return export  # type: ignore[no-any-return]


def test_rejected_credentials_are_retried_and_reported(fake: FakeAws, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            config = {"identifier": "k", "kinesisStreamName": "s", "endpointUrl": fake.url}
            gateway.create("a", {"kinesis": [config]})
            with fake.broken(error(400, "ExpiredTokenException")):
                await gateway.append("a", b"1", b"2")
                await until(lambda: "ExpiredToken" in (gateway.status("a").error_message or ""))
                assert gateway.status("a").last_exported_sequence_number == -1
                await until(lambda: "ExpiredToken" in (listed(tmp_path)["errorMessage"] or ""))
                assert abs(gateway.status("a").last_export_time / 1000 - time.time()) < 30
            await gateway.exported("a", 1)
            await until(lambda: gateway.status("a").error_message is None)
            assert gateway.status("a").exported_messages_count == 2
            assert gateway.status("a").exported_bytes_from_stream == 2
            await until(lambda: listed(tmp_path)["errorMessage"] is None)

    asyncio.run(scenario())
