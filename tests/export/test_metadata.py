"""The worker blocks exports to metadata addresses, and still gets the credentials of an instance."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import textwrap
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from bridge.plugin.metadata import ADDRESSES
from tests.export.harness import FAST, drop_in, running, until

ROLE = {
    "Code": "Success",
    "AccessKeyId": "of-the-role",
    "SecretAccessKey": "s",
    "Token": "t",
    "Expiration": "2999-01-01T00:00:00Z",
}
# With this address instead of the real ones, so that a server would answer.
PROGRAM = """
    import os, socket, sys
    from bridge.plugin import aws
    from bridge.plugin import metadata
    metadata.deny({"127.0.0.1"})
    address = ("127.0.0.1", int(sys.argv[1]))
    for where in (address, (f"::ffff:127.0.0.1", address[1], 0, 0)):
        family = socket.AF_INET6 if len(where) == 4 else socket.AF_INET
        try:
            socket.socket(family).connect(where)
        except PermissionError as error:
            print("refused", error.strerror)
    client = aws.client(aws.AwsSettings(region="eu-west-1"), "s3", endpoint_url="http://%s:%d" % address)
    try:
        client.list_buckets()
    except Exception as error:
        print(type(error).__name__)
    print(client._request_signer._credentials.get_frozen_credentials().access_key)
"""


def test_only_credentials_are_asked_for_at_a_metadata_address() -> None:
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.answer(b"token")

        def do_GET(self) -> None:
            named = self.path.endswith("/security-credentials/")
            self.answer(b"role" if named else json.dumps(ROLE).encode())

        def answer(self, body: bytes) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        port = server.server_port
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        environment |= {
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://127.0.0.1:{port}",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(port)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    why = "is a cloud's metadata address, which exports may not reach"
    assert done.stdout.splitlines() == [
        f"refused 127.0.0.1 {why}",
        f"refused ::ffff:127.0.0.1 {why}",
        "EndpointConnectionError",
        "of-the-role",
    ], done.stderr
    assert all("/latest/" in path for path in asked)


@pytest.mark.parametrize(
    "host", ["169.254.169.254", "2852039166", "[::ffff:169.254.169.254]", "[fd00:ec2::254]"]
)
def test_an_export_to_a_metadata_address_is_blocked_and_logged(
    tmp_path: Path, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with running(tmp_path, tuning=FAST) as gateway:
            gateway.create("a", {"http": [{"identifier": "up", "uri": f"http://{host}/latest/"}]})
            await gateway.append("a", b"x")
            await until(lambda: "metadata address" in caplog.text)

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())


def test_secrets_of_the_configuration_are_not_in_the_workers_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
        import os
        from pathlib import Path
        from bridge import Batch, ExportConfig, Exporter, Outcome, hookimpl

        class Config(ExportConfig, kw_only=True, frozen=True):
            path: str

        class Environment(Exporter):
            kind = "environment"
            Config = Config

            def export(self, batch: Batch) -> Outcome:
                Path(self.config.path).write_text("\\n".join(f"{k}={v}" for k, v in os.environ.items()))
                return Outcome()

        @hookimpl
        def register_exporters(register):
            register(Environment)
    """
    drop_in(tmp_path, "environment", textwrap.dedent(source))
    monkeypatch.setenv("STREAMBRIDGE_MQTT_PASSWORD", "hunter2")
    monkeypatch.setenv("HTTPS_PROXY_OF_MINE", "kept")

    async def scenario() -> None:
        async with running(tmp_path, tuning=FAST) as gateway:
            gateway.create("a", {"environment": [{"identifier": "e", "path": str(tmp_path / "seen")}]})
            await gateway.append("a", b"x")
            await gateway.exported("a", 0)

    asyncio.run(scenario())
    seen = (tmp_path / "seen").read_text()
    assert "HTTPS_PROXY_OF_MINE=kept" in seen
    assert "hunter2" not in seen
    assert "STREAMBRIDGE_" not in seen


def test_the_drop_in_of_the_documentation_denies_the_same_addresses() -> None:
    page = (Path(__file__).parents[2] / "docs/howto/service.md").read_text()
    _, _, rest = page.partition("IPAddressDeny=")
    assert set(rest.splitlines()[0].split()) == set(ADDRESSES)
