"""The whole way with the real command and real clients: what is acknowledged reaches the table."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import paho.mqtt.client as mqtt
import pytest

from benchmarks.testbed.local import free_port

ROOT = Path(__file__).parent.parent

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
[streams.readings]
topics = ["readings/#"]
segment_size = 65536
flush_on_write = {flush}
"""


def wait_for(done: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Service:
    """`streambridge run` as a process that a test kills and starts again."""

    def __init__(self, directory: Path, flush: bool) -> None:
        self.port = free_port()
        self.config = directory / "streambridge.toml"
        self.config.write_text(CONFIG.format(port=self.port, flush=str(flush).lower()))
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, descriptors: int | None = None) -> None:
        command = [sys.executable, "-m", "bridge", "run", "-c", str(self.config)]
        if descriptors is not None:
            command = ["sh", "-c", f'ulimit -Sn {descriptors}; exec "$@"', "sh", *command]
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
        )
        wait_for(self._listens)

    def _listens(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def signal(self, number: int) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

    def command(self, *arguments: str) -> Any:
        out = subprocess.run(
            [sys.executable, "-m", "bridge", *arguments, "--json", "-c", str(self.config)],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        ).stdout
        return [json.loads(line) for line in out.splitlines()]

    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.command("streams", "read", "readings", "--count", "1000000")
        return rows

    def payloads(self) -> list[str]:
        return [row["payload"] for row in self.rows()]


@pytest.fixture
def service(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Service]:
    service = Service(tmp_path, getattr(request, "param", False))
    yield service
    if service.process is not None and service.process.poll() is None:
        service.process.kill()
        service.process.wait()


class Publisher:
    """A paho client that publishes numbers and remembers which were acknowledged."""

    def __init__(self, name: str, port: int) -> None:
        self.name, self.sent, self.acknowledged = name, 0, set[str]()
        self._waiting: dict[int, str] = {}
        self._room = threading.Semaphore(50)
        self.client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, client_id=name)
        self.client.max_inflight_messages_set(50)
        self.client.on_publish = self._on_publish
        self.client.connect("127.0.0.1", port)
        self.client.loop_start()

    def _on_publish(self, _client: object, _data: object, mid: int, *_: object) -> None:
        wait_for(lambda: mid in self._waiting)
        self.acknowledged.add(self._waiting[mid])
        self._room.release()

    def publish(self, number: int) -> None:
        for _ in range(number):
            while not self._room.acquire(timeout=1):
                if not self.client.is_connected():
                    return  # the bridge is gone
            body = f"{self.name}-{self.sent}"
            self.sent += 1
            self._waiting[self.client.publish(f"readings/{self.name}", body, qos=1).mid] = body

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


def have_acknowledged(publishers: list[Publisher], number: int) -> bool:
    return sum(len(publisher.acknowledged) for publisher in publishers) > number


@pytest.mark.parametrize("service", [False, True], indirect=True, ids=["written", "synced"])
def test_nothing_acknowledged_is_missing_and_nothing_is_invented_after_sigkill_under_load(
    service: Service,
) -> None:
    acknowledged: set[str] = set()
    sent: set[str] = set()
    for round_number in range(4):
        service.start()
        publishers = [Publisher(f"r{round_number}p{n}", service.port) for n in range(3)]
        threads = [threading.Thread(target=p.publish, args=(100_000,)) for p in publishers]
        for thread in threads:
            thread.start()
        enough = random.randrange(200, 2000)
        wait_for(partial(have_acknowledged, publishers, enough))
        assert service.signal(signal.SIGKILL) == -signal.SIGKILL
        for publisher, thread in zip(publishers, threads, strict=True):
            publisher.close()
            thread.join(60)
            acknowledged |= publisher.acknowledged
            sent |= {f"{publisher.name}-{n}" for n in range(publisher.sent)}
        stored = service.payloads()
        assert acknowledged <= set(stored)
        assert set(stored) <= sent
    service.start()
    assert service.signal(signal.SIGTERM) == 0
    stored = service.payloads()
    assert acknowledged <= set(stored)
    (described,) = service.command("streams", "describe", "readings")
    status = described["storageStatus"]
    assert (status["oldestSequenceNumber"], status["newestSequenceNumber"]) == (0, len(stored) - 1)


def test_a_declared_stream_that_cannot_be_had_has_its_messages_refused_and_not_acknowledged(
    service: Service,
) -> None:
    with service.config.open("a") as config:
        config.write("[streams.typo]\ntopics = ['typo/#']\n")
        config.write("[[streams.typo.export.nosuch]]\nidentifier = 'x'\n")
    service.start()
    reasons: list[int] = []
    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
    client.on_publish = lambda _c, _d, _m, reason, _p: reasons.append(reason.value)
    client.connect("127.0.0.1", service.port)
    client.loop_start()
    client.publish("typo/a", b"x", qos=1)
    wait_for(lambda: len(reasons) == 1)
    client.publish("readings/a", b"x", qos=1)
    wait_for(lambda: len(reasons) == 2)
    client.disconnect()
    client.loop_stop()
    assert reasons[0] >= 0x80
    assert reasons[1] == 0
    assert service.payloads() == ["x"]


def test_more_devices_than_a_shell_allows_descriptors_are_served(service: Service) -> None:
    service.start(descriptors=400)
    with contextlib.ExitStack() as stack:
        devices = [socket.create_connection(("127.0.0.1", service.port)) for _ in range(500)]
        for number, device in enumerate(devices):
            stack.enter_context(device)
            device.settimeout(30)
            device.sendall(b"\x10\x10\0\x04MQTT\x04\x02\0\0\0\x04%04d" % number)
        assert {device.recv(4) for device in devices} == {b"\x20\2\0\0"}


def test_sigterm_under_load_loses_nothing_that_was_acknowledged(service: Service) -> None:
    service.start()
    publisher = Publisher("p", service.port)
    thread = threading.Thread(target=publisher.publish, args=(100_000,))
    thread.start()
    wait_for(lambda: len(publisher.acknowledged) > 500)
    assert service.signal(signal.SIGTERM) == 0
    publisher.close()
    thread.join(60)
    assert publisher.acknowledged <= set(service.payloads())


def test_mosquitto_pub_is_served_at_every_qos(service: Service) -> None:
    if shutil.which("mosquitto_pub") is None:
        pytest.skip("mosquitto_pub is missing: apt-get install mosquitto-clients")
    service.start()
    for qos in "012":
        subprocess.run(
            ["mosquitto_pub", "-p", str(service.port), "-q", qos, "-t", "readings/x", "-l"],
            input="".join(f"{qos}-{n}\n" for n in range(100)).encode(),
            check=True,
            timeout=60,
        )
    wait_for(lambda: len(service.payloads()) == 300)
    assert service.payloads() == [f"{qos}-{n}" for qos in "012" for n in range(100)]


def test_a_segment_damaged_under_the_running_service_is_set_aside_and_the_rest_is_exported(
    service: Service, tmp_path: Path
) -> None:
    """The worker meets the damage, the service sets it aside, and the export goes on behind it."""
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    seen = tmp_path / "exported"
    (plugins / "lines.py").write_text(
        "from bridge import ACCEPTED, BatchedConfig, Exporter, hookimpl\n"
        "class Lines(Exporter):\n"
        "    kind, Config = 'lines', BatchedConfig\n"
        "    def export(self, batch):\n"
        f"        with open({str(seen)!r}, 'a') as out:\n"
        "            out.writelines(f'{r.sequence_number}\\n' for r in batch.records)\n"
        "        return ACCEPTED\n"
        "@hookimpl\n"
        "def register_exporters(register):\n"
        "    register(Lines)\n"
    )
    service.start()
    publisher = Publisher("p", service.port)
    publisher.publish(4000)
    wait_for(lambda: len(publisher.acknowledged) == 4000)
    publisher.close()
    assert service.signal(signal.SIGTERM) == 0
    path = sorted((tmp_path / "data" / "streams" / "readings").glob("*.seg"))[1]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with service.config.open("a") as config:
        config.write("[[streams.readings.export.lines]]\nidentifier = 'all'\n")
        config.write(f"[export]\nplugin_dirs = ['{plugins}']\n")
    service.start()
    wait_for(lambda: seen.exists() and "3999" in seen.read_text().split(), 60)
    exported = {int(line) for line in seen.read_text().split()}
    missing = sorted(set(range(4000)) - exported)
    assert 0 < len(missing) < 500
    assert missing == list(range(missing[0], missing[-1] + 1))
    assert sorted({row["sequenceNumber"] for row in service.rows()}) == sorted(exported)


def test_a_flipped_bit_in_any_other_file_of_the_data_directory_never_keeps_the_service_down(
    service: Service, tmp_path: Path
) -> None:
    """Sessions, cursors, definitions, records of drops: all that the store's own tests do not cover."""
    with service.config.open("a") as config:
        config.write(
            "[[streams.readings.export.http]]\nidentifier = 'nowhere'\nuri = 'http://127.0.0.1:9/'\n"
        )
    service.start()
    keeper = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, client_id="keeper", clean_session=False)
    subscribed = threading.Event()
    keeper.on_subscribe = lambda *_: subscribed.set()
    keeper.connect("127.0.0.1", service.port)
    keeper.loop_start()
    keeper.subscribe("other/#", qos=1)
    assert subscribed.wait(60)
    keeper.disconnect()
    keeper.loop_stop()
    publisher = Publisher("p", service.port)
    publisher.publish(100)
    wait_for(lambda: len(publisher.acknowledged) == 100)
    publisher.close()
    sender = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, client_id="sender")
    sender.connect("127.0.0.1", service.port)
    sender.loop_start()
    for number in range(20):
        sender.publish(f"other/{number}", b"for one who is away", qos=1, retain=True).wait_for_publish(60)
    sender.disconnect()
    sender.loop_stop()
    exports = tmp_path / "data" / "exports"
    wait_for(lambda: any(path.is_file() and path.stat().st_size for path in exports.rglob("*")))
    assert service.signal(signal.SIGTERM) == 0
    data, copy = tmp_path / "data", tmp_path / "copy"
    shutil.copytree(data, copy, symlinks=True)
    draw = random.Random(7)
    files = [
        path.relative_to(copy)
        for path in sorted(copy.rglob("*"))
        if path.is_file() and not path.is_symlink() and path.suffix != ".seg" and path.stat().st_size
    ]
    assert len(files) >= 4
    for path in draw.choices(files, k=4) + files:
        shutil.rmtree(data)
        shutil.copytree(copy, data, symlinks=True)
        content = bytearray((data / path).read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        (data / path).write_bytes(content)
        service.start()
        assert service.signal(signal.SIGTERM) == 0, path
        assert len(service.payloads()) == 100, path


@pytest.mark.spark
def test_the_demo_brings_every_acknowledged_reading_into_the_table(tmp_path: Path) -> None:
    if shutil.which("java") is None:
        pytest.skip("java is missing: apt-get install openjdk-17-jre-headless")
    done = subprocess.run(
        [sys.executable, "examples/demo/run.py", "--seconds", "6", "--output", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"},
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "missing 0" in done.stdout
    assert "every acknowledged reading is in the table, none twice" in done.stdout
    assert (tmp_path / "out" / "counts.png").stat().st_size > 10_000
