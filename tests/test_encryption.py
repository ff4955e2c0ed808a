"""Encryption at rest with the real command and real clients: what a thief of the disk finds, and keys."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from benchmarks.testbed.local import free_port
from bridge.encryption import new_master

ROOT = Path(__file__).parent.parent
MARKER = "a-secret-that-nobody-may-read"
NUMBERS = [77_123_451, 77_123_999]  # values that a dead band remembers: as texts, and packed

CONFIG = """
[gateway]
id = "test"
data_dir = "data"
[mqtt]
listen = ["tcp://127.0.0.1:{port}"]
[greengrass]
listen = ""
[http]
listen = ""
[encryption]
key_file = "key"
[streams.secret]
topics = ["secret/#"]
encryption = true
segment_size = 16384
deduplication_window = "10m"
[[streams.secret.export.http]]
identifier = "office"
uri = "http://127.0.0.1:{sink}/"
record = "payload"
[[streams.secret.export.http.reduce]]
topics = ["secret/+/band"]
deadband = {{ "/value" = 10 }}
"""


def wait_for(done: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Sink(ThreadingHTTPServer):
    """Where an export sends to: takes everything."""

    def __init__(self) -> None:
        received = self.received = []  # type: list[bytes]

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                received.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Service:
    """`streambridge run` as a process that a test kills and starts again."""

    def __init__(self, directory: Path, sink: int) -> None:
        self.port = free_port()
        self.data, self.key = directory / "data", directory / "key"
        self.config = directory / "streambridge.toml"
        self.text = CONFIG.format(port=self.port, sink=sink)
        self.config.write_text(self.text)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "bridge", "run", "-c", str(self.config)]
        self.process = subprocess.Popen(command, cwd=ROOT)
        wait_for(self._listens)

    def _listens(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def end(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(60)

    def command(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "bridge", *arguments],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "STREAMBRIDGE_CONFIG": str(self.config), **environment},
            check=False,
        )

    def payloads(self) -> list[str]:
        done = self.command("streams", "read", "secret", "--all", "--json")
        assert done.returncode == 0, done.stderr
        return [json.loads(line)["payload"] for line in done.stdout.splitlines()]


@pytest.fixture
def sink() -> Iterator[Sink]:
    with Sink() as sink:
        yield sink
        sink.shutdown()


@pytest.fixture
def service(tmp_path: Path, sink: Sink) -> Iterator[Service]:
    service = Service(tmp_path, sink.server_address[1])
    made = service.command("keys", "new", str(service.key))
    assert made.returncode == 0, made.stderr
    yield service
    if service.process is not None and service.process.poll() is None:
        service.process.kill()
        service.process.wait()


def client(service: Service, name: str, *, will: bool = False) -> mqtt.Client:
    found = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, client_id=name, protocol=mqtt.MQTTv5)
    properties = Properties(PacketTypes.CONNECT)
    properties.SessionExpiryInterval = 3600
    if will:
        late = Properties(PacketTypes.WILLMESSAGE)
        late.WillDelayInterval = 3000
        found.will_set(f"plain/{MARKER}", MARKER, qos=1, properties=late)
    found.connect("127.0.0.1", service.port, clean_start=False, properties=properties)
    found.loop_start()
    wait_for(found.is_connected)
    return found


def publish(found: mqtt.Client, topic: str, payload: str, *, retain: bool = False, qos: int = 1) -> None:
    properties = Properties(PacketTypes.PUBLISH)
    properties.UserProperty = [("message-id", f"{MARKER}{time.monotonic_ns()}"), (MARKER, MARKER)]
    properties.ContentType = MARKER
    found.publish(topic, payload, qos, retain, properties).wait_for_publish(60)


def with_secrets(data: Path) -> list[Path]:
    texts = [MARKER.encode(), *(str(number).encode() for number in NUMBERS)]
    texts += [struct.pack(order + form, number) for number in NUMBERS for order in "<>" for form in "Iqd"]
    found = []
    for path in data.rglob("*"):
        with contextlib.suppress(OSError):  # a socket; a file that was just replaced
            content = path.read_bytes() if path.is_file() else b""
            if any(text in content for text in texts):
                found.append(path)
    return found


def has_received(sink: Sink, text: bytes) -> bool:
    return any(text in body.replace(b" ", b"") for body in sink.received)


def test_no_marker_is_on_the_disk_after_traffic_and_kills(service: Service, sink: Sink) -> None:
    expected = []
    for number in range(3):
        service.start()
        subscriber = client(service, "waits", will=True)
        granted = threading.Event()
        subscriber.on_subscribe = lambda *_, granted=granted: granted.set()
        subscriber.subscribe("plain/#", 1)
        assert granted.wait(60)
        publisher = client(service, "device")
        subscriber.disconnect()
        subscriber.loop_stop()
        for n in range(40):
            expected.append(f"{MARKER}-{number}-{n}")
            publish(publisher, f"secret/{MARKER}", expected[-1], qos=1 + n % 2)
        publish(publisher, f"plain/{MARKER}", MARKER)  # waits for the subscriber
        publish(publisher, f"plain/{MARKER}/kept", MARKER, retain=True)
        for value in NUMBERS:
            body = json.dumps({"value": value + number * 1000, MARKER: MARKER})
            expected.append(body)
            publish(publisher, f"secret/{MARKER}/band", body)
        wait_for(partial(has_received, sink, f'"value":{NUMBERS[1] + number * 1000}'.encode()))
        assert with_secrets(service.data) == []
        service.end(signal.SIGKILL)
        publisher.loop_stop()
        assert with_secrets(service.data) == []
    assert (service.data / "mqtt" / "sessions.journal").stat().st_size > 500
    assert any(b"sealed" in path.read_bytes() for path in (service.data / "exports").rglob("*.cursor"))
    service.start()
    subscriber, received = (
        mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, client_id="waits", protocol=mqtt.MQTTv5),
        list[str](),
    )
    subscriber.on_message = lambda _client, _data, message: received.append(message.payload.decode())
    properties = Properties(PacketTypes.CONNECT)
    properties.SessionExpiryInterval = 3600
    subscriber.connect("127.0.0.1", service.port, clean_start=False, properties=properties)
    subscriber.loop_start()
    wait_for(lambda: len(received) >= 2)  # what has waited since the last round survived the kill
    subscriber.disconnect()
    subscriber.loop_stop()
    assert set(received) == {MARKER}
    service.end(signal.SIGTERM)
    assert service.payloads() == expected
    assert with_secrets(service.data) == []
    verified = service.command("verify", "--json")
    assert verified.returncode == 0
    assert json.loads(verified.stdout)[0]["unopened"] == 0
    assert "encryption      on\n" in service.command("streams", "describe", "secret").stdout


@pytest.mark.slow(seconds=20)
def test_a_service_without_its_key_says_what_to_do_and_changes_nothing(service: Service) -> None:
    service.start()
    publisher = client(service, "device")
    publish(publisher, "secret/a", MARKER)
    publisher.loop_stop()
    service.end(signal.SIGKILL)
    state = {path: path.read_bytes() for path in service.data.rglob("*") if path.is_file()}
    good = service.key.read_text()
    for key, text in (
        (None, "restore it, since encrypted data is stored here"),
        (new_master(), "this is another key than the one that"),
        ("abc\n", "line 1: this is not a key"),
    ):
        if key is None:
            service.key.unlink()
        else:
            service.key.write_text(key)
        refused = service.command("run")
        assert refused.returncode == 78
        assert text in refused.stderr
        assert "Traceback" not in refused.stderr
        checked = service.command("check")
        assert checked.returncode == 78
        assert text in checked.stdout or "cannot be read" in checked.stdout
        read = service.command("streams", "read", "secret")
        assert read.returncode == 78
        assert MARKER not in read.stdout
        verified = service.command("verify")
        assert verified.returncode == 78
        assert text in verified.stderr
        assert "secret: ok; 1 message" in verified.stdout
        assert "1 frame could not be decrypted without the key" in verified.stdout
    segment = next((service.data / "streams" / "secret").glob("*.seg"))
    content = segment.read_bytes()
    segment.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    verified = service.command("verify")  # damage is found without the key, and is not taken for a wrong key
    assert verified.returncode == 65
    assert "is damaged" in verified.stdout
    assert "key" not in verified.stderr
    segment.write_bytes(content)
    service.config.write_text(service.text.replace('key_file = "key"', ""))
    refused = service.command("run")
    assert refused.returncode == 78
    assert "set key_file in [encryption]" in refused.stderr
    verified = service.command("verify")
    assert verified.returncode == 0
    assert "1 frame could not be decrypted without the key" in verified.stdout
    assert {path: path.read_bytes() for path in service.data.rglob("*") if path.is_file()} == state
    service.key.write_text(good)
    done = service.command("streams", "read", "secret", "--json", STREAMBRIDGE_KEY_FILE=str(service.key))
    assert MARKER in done.stdout
    service.config.write_text(service.text)
    service.start()
    service.end(signal.SIGTERM)
    assert service.payloads() == [MARKER]


@pytest.mark.slow(seconds=20)
def test_encryption_is_switched_on_and_off_by_a_running_service(service: Service, sink: Sink) -> None:
    service.config.write_text(service.text.replace("encryption = true", ""))
    service.start()
    publisher = client(service, "device")
    publish(publisher, "secret/a", MARKER)
    publish(publisher, "plain/kept", MARKER, retain=True)
    publish(publisher, "secret/a/band", json.dumps({"value": NUMBERS[0]}))
    wait_for(lambda: has_received(sink, str(NUMBERS[0]).encode()))
    wait_for(lambda: len(with_secrets(service.data)) >= 3)  # stream, sessions, and the state of the export
    done = service.command("streams", "update", "secret", "encryption=true")
    assert done.returncode == 0, done.stderr
    journal = service.data / "mqtt" / "sessions.journal"
    wait_for(lambda: MARKER.encode() not in journal.read_bytes())
    publish(publisher, "secret/a", MARKER + "2")
    shown = service.command("streams", "describe", "secret").stdout
    assert "on, 1 older segment is not encrypted" in shown
    done = service.command("streams", "purge", "secret", "--upto", "2", "--yes")
    assert done.returncode == 0, done.stderr
    wait_for(lambda: with_secrets(service.data) == [])
    done = service.command("streams", "update", "secret", "encryption=false")
    publish(publisher, "secret/a", "plain")
    shown = service.command("streams", "describe", "secret").stdout
    assert "off, 1 older segment is encrypted" in shown
    publisher.loop_stop()
    service.end(signal.SIGTERM)
    assert service.payloads() == [MARKER + "2", "plain"]
    done = service.command("streams", "purge", "secret", "--yes")
    assert done.returncode == 0, done.stderr
    for _ in range(2):
        service.start()
        service.end(signal.SIGTERM)
    assert list((service.data / "keys").glob("*.key")) == []
    text = service.config.read_text()
    service.config.write_text(text.replace('key_file = "key"', ""))  # as the guide says
    service.start()
    service.end(signal.SIGTERM)


@pytest.mark.slow(seconds=12)
def test_the_key_is_rotated_while_the_service_runs_and_after_kills(service: Service) -> None:
    service.start()
    publisher = client(service, "device")
    publish(publisher, "secret/a", "one")
    first = service.key.read_text()
    rotated = service.command("keys", "rotate")
    assert rotated.returncode == 0, rotated.stderr
    assert service.key.read_text() != first
    assert len(service.key.read_text().split()) == 1
    publish(publisher, "secret/a", "two")
    publisher.loop_stop()
    service.end(signal.SIGKILL)
    assert service.payloads() == ["one", "two"]
    old = service.key.with_name("old")
    old.write_text(first)
    refused = service.command("streams", "read", "secret", STREAMBRIDGE_KEY_FILE=str(old))
    assert refused.returncode == 78
    service.start()
    service.end(signal.SIGTERM)
    assert service.payloads() == ["one", "two"]
    path = next((service.data / "keys").glob("*.key"))
    good = path.read_bytes()
    path.write_bytes(good[:4096] + bytes(4096))
    verified = service.command("verify")
    assert verified.returncode == 65
    assert f"keys/: 1 problem\n  {path}: one of its two copies is damaged\n" in verified.stdout
    assert verified.stdout.endswith("1 stream, 2 messages: keys damaged\n")
    assert json.loads(service.command("verify", "--json").stdout)[1]["name"] == "keys/"
    repaired = service.command("repair")
    assert repaired.returncode == 65
    assert repaired.stdout.endswith("1 stream, 2 messages: keys damaged, now repaired\n")
    assert path.read_bytes() == 2 * good[:4096]
    assert service.command("verify").stdout.endswith("1 stream, 2 messages: no damage\n")
