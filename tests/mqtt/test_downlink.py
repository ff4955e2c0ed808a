"""[[upstream]] between real processes: kills of both sides, a link that breaks, both directions at once."""

from __future__ import annotations

import http.client
import json
import random
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import paho.mqtt.client as paho
import pytest

from benchmarks.testbed.certificates import Authority
from benchmarks.testbed.forwarder import Forwarder
from benchmarks.testbed.local import free_port
from benchmarks.testbed.mosquitto import Mosquitto
from bridge.access.users import hash_password
from tests.export.process import ROOT, Running
from tests.export.test_uplink import check_order
from tests.http import conftest

DEADLINE = 120.0
eventually = partial(conftest.eventually, seconds=DEADLINE, pause=0.05)
BREAKS = 8
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "commands.md"

BROKER = """
[gateway]
id = "{name}"
data_dir = "data"
[mqtt]
listen = ["tcp://127.0.0.1:{port}"]
limits = {{ queued_messages = 1000000 }}
[greengrass]
listen = ""
[http]
listen = "{http}"
"""
COMMANDS = """
[streams.commands]
topics = ["cmd/#"]
[[upstream]]
name = "cloud"
url = "{url}"
protocol = "{protocol}"
keep_alive = 10
[[upstream.mapping]]
filter = "cmd/#"
"""
BOTH_WAYS = """
[streams.plant]
topics = ["plant/#"]
[[streams.plant.export.mqtt]]
identifier = "up"
url = "{url}"
[[upstream]]
name = "hub"
url = "{url}"
[[upstream.mapping]]
filter = "plant/#"
"""


def broker(directory: Path, name: str, rest: str = "", http_port: int = 0) -> Running:
    port = free_port()
    listen = f"127.0.0.1:{http_port}" if http_port else ""
    return Running(directory / name, BROKER.format(name=name, port=port, http=listen) + rest, port)


class Publisher(threading.Thread):
    """Publishes numbers in order at QoS 1, one at a time; `acknowledged` are those that had a PUBACK."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port
        self.acknowledged = 0
        self.enough = threading.Event()

    def run(self) -> None:
        while not self.enough.is_set():
            client = paho.Client(paho.CallbackAPIVersion.VERSION2, "publisher", clean_session=True)
            try:
                client.connect("127.0.0.1", self._port)
                client.loop_start()
                while not self.enough.is_set():
                    sent = client.publish("cmd/a", b"%d" % self.acknowledged, 1)
                    deadline = time.monotonic() + DEADLINE
                    while not sent.is_published():
                        if not client.is_connected() and sent.rc:
                            raise ConnectionError
                        assert time.monotonic() < deadline
                        sent.wait_for_publish(0.2)
                        if not client.is_connected():
                            raise ConnectionError
                    self.acknowledged += 1
                    self.enough.wait(0.005)  # a start of the gateway is not to mean ten thousand messages
            except (OSError, RuntimeError, ValueError):
                self.enough.wait(0.05)
            finally:
                client.disconnect()
                client.loop_stop()


def publish(port: int, topic: str, *payloads: bytes) -> None:
    client = paho.Client(paho.CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
    client.connect("127.0.0.1", port)
    client.loop_start()
    try:
        for sent in [client.publish(topic, payload, 1) for payload in payloads]:
            sent.wait_for_publish(30)
    finally:
        client.disconnect()
        client.loop_stop()


def subscribed(gateway: Running, port: int) -> None:
    """Wait until what is published at the broker comes: before the first subscription it is nobody's."""

    def came() -> bool:
        publish(port, "cmd/a", b"probe")
        return bool(gateway.read("commands"))

    eventually(came)


@contextmanager
def upstream_broker(kind: str, root: Path) -> Iterator[tuple[int, Callable[[], None] | None]]:
    """A broker's port, and how to kill it and start it again, if it stores what it acknowledges."""
    if kind == "mosquitto":
        with Mosquitto(root / "broker") as mosquitto:
            yield mosquitto.port, None
        return
    with broker(root, "cloud") as cloud:

        def kill() -> None:
            cloud.kill()
            cloud.start()

        yield cloud.port, kill


@pytest.mark.slow(seconds=40)
@pytest.mark.parametrize("protocol", ["3.1.1", "5"])
@pytest.mark.parametrize("kind", ["mosquitto", "streambridge"])
def test_nothing_is_lost_and_the_order_holds_over_cuts_and_kills(
    tmp_path: Path, kind: str, protocol: str
) -> None:
    chance = random.Random(20261123)
    with ExitStack() as stack:
        port, kill_broker = stack.enter_context(upstream_broker(kind, tmp_path))
        link = Forwarder(f"mqtt://127.0.0.1:{port}")
        stack.callback(link.close)
        url = link.url.replace("http", "mqtt")
        gateway = stack.enter_context(broker(tmp_path, "gw", COMMANDS.format(url=url, protocol=protocol)))
        subscribed(gateway, port)
        publisher = Publisher(port)
        publisher.start()
        stack.callback(publisher.join)
        stack.callback(publisher.enough.set)

        def kill_gateway() -> None:
            gateway.kill()
            gateway.start()

        def cut() -> None:
            with link.shut():
                time.sleep(chance.uniform(0, 0.3))

        faults = [kill_gateway, cut] + ([kill_broker] if kill_broker is not None else [])
        for number in range(BREAKS):
            before = publisher.acknowledged
            faults[number % len(faults)]()
            eventually(lambda before=before: publisher.acknowledged > before + 30)
        publisher.enough.set()
        publisher.join()
        total = publisher.acknowledged

        def numbers() -> list[int]:
            rows = [row["payload"] for row in gateway.read("commands")]
            return [int(payload) for payload in rows if payload != "probe"]

        eventually(lambda: set(numbers()) >= set(range(total)), pause=0.5)
        found = numbers()
    # One more may have been stored at the broker without a PUBACK.
    check_order(found, max(found) + 1, 2 * BREAKS)
    assert max(found) <= total


def metric(port: int, pattern: str) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/metrics")
        found = re.search(rf"{pattern} (\S+)", connection.getresponse().read().decode())
        return float(found[1]) if found else 0.0
    finally:
        connection.close()


@pytest.mark.slow(seconds=20)
def test_uplink_and_downlink_on_the_same_topics_of_one_broker_do_not_loop(tmp_path: Path) -> None:
    with ExitStack() as stack:
        kept = '[streams.all]\ntopics = ["plant/#"]\n'
        hub = stack.enter_context(broker(tmp_path, "hub", kept))
        port = free_port()
        both = BOTH_WAYS.format(url=f"mqtt://127.0.0.1:{hub.port}")
        gateway = stack.enter_context(broker(tmp_path, "gw", both, port))
        connected = r'external_broker_connected\{front_end="upstream:hub"\}'
        eventually(lambda: metric(port, connected) == 1)
        publish(gateway.port, "plant/here", *(b"%d" % number for number in range(50)))
        publish(hub.port, "plant/there", *(b"%d" % number for number in range(50)))
        # What went up comes back, and so does what came down and was exported: each of them once.
        looped = r'events_total\{event="looped",front_end="upstream:hub"\}'
        eventually(lambda: metric(port, looped) >= 100)
        eventually(lambda: metric(port, r"export_lag_messages\{[^}]*\}") == 0)
        here = [(row["topic"], row["payload"]) for row in gateway.read("plant")]
        there = [(row["topic"], row["payload"]) for row in hub.read("all")]
        assert metric(port, looped) == 100
        stack.close()
    numbers = [f"{number}" for number in range(50)]
    assert [payload for topic, payload in here if topic == "plant/here"] == numbers
    assert [payload for topic, payload in here if topic == "plant/there"] == numbers
    assert [payload for topic, payload in there if topic == "plant/here"] == numbers
    assert sorted(payload for topic, payload in there if topic == "plant/there") == sorted(2 * numbers)


def toml_of(title: str, names: dict[str, str]) -> str:
    """A block of the how-to, with other names in it."""
    found = re.search(rf'```toml title="{title}"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    assert found is not None
    text = textwrap.dedent(found[1])
    for old, new in names.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


class Login:
    """A client of the cloud broker with a name and a password."""

    def __init__(self, port: int, user: str, authority: Authority) -> None:
        self.got: list[tuple[str, bytes]] = []
        self.client = paho.Client(paho.CallbackAPIVersion.VERSION2, user, protocol=paho.MQTTv5)
        self.client.username_pw_set(user, f"of {user}")
        self.client.tls_set(str(authority.cert))
        self.client.on_message = lambda _client, _data, message: self.got.append(
            (message.topic, message.payload)
        )
        self.client.connect("127.0.0.1", port)
        self.client.loop_start()

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


def queued(service: Running, client: str) -> int:
    """How many messages a broker keeps for a client."""
    command = [sys.executable, "-m", "bridge", "clients", "list", "--json", "-c", str(service.config)]
    done = subprocess.run(command, capture_output=True, check=True, cwd=ROOT)
    return int(next(one["queued"] for one in json.loads(done.stdout) if one["client"] == client))


@pytest.mark.slow(seconds=30)
def test_the_how_to_brings_commands_down_and_answers_up(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    certificate, users, secret = authority.issue("cloud"), tmp_path / "users", tmp_path / "secret"
    names = ("application", "north")
    users.write_text("".join(f"{name}:{hash_password(f'of {name}'.encode())}\n" for name in names))
    users.chmod(0o600)
    secret.write_text("of north\n")
    secret.chmod(0o600)
    quiet = '\n[greengrass]\nlisten = ""\n[http]\nlisten = ""\n'
    port, own = free_port(), free_port()
    cloud_toml = toml_of(
        "cloud",
        {
            'id = "cloud"': 'id = "cloud"\ndata_dir = "data"',
            "0.0.0.0:8883": f"127.0.0.1:{port}",
            "/etc/streambridge/users": str(users),
            "/etc/streambridge/tls/server.pem": str(certificate.cert),
            "/etc/streambridge/tls/server.key": str(certificate.key),
            'publish = ["plants/#"]': 'publish = ["plants/#"]\nsubscribe = ["plants/#"]',
            'subscribe = ["plants/north/#"]': 'subscribe = ["plants/north/#"]\n'
            'publish = ["plants/north/answers/#"]',
        },
    )
    there = {
        "mqtts://cloud.example": f"mqtts://127.0.0.1:{port}",
        "/etc/streambridge/cloud-password": str(secret),
        "/etc/streambridge/cloud-ca.pem": str(authority.cert),
    }
    listen = f'[mqtt]\nlisten = ["tcp://127.0.0.1:{own}"]\n'
    gateway_toml = toml_of("gateway", {'id = "north"': 'id = "north"\ndata_dir = "data"', **there})
    gateway_toml += toml_of("answers", there) + listen
    with ExitStack() as stack:
        cloud = stack.enter_context(Running(tmp_path / "cloud", cloud_toml + quiet, port))
        gateway = stack.enter_context(Running(tmp_path / "gateway", gateway_toml + quiet, own))
        application = Login(port, "application", authority)
        stack.callback(application.close)
        application.client.subscribe("plants/north/answers/#", 1)
        press = paho.Client(paho.CallbackAPIVersion.VERSION2, "press-7", clean_session=False)
        got: list[tuple[str, bytes]] = []
        press.on_message = lambda _client, _data, message: got.append((message.topic, message.payload))
        press.on_connect = lambda client, *_: client.subscribe("commands/press-7/#", 1)

        def press_gets(*payloads: bytes) -> None:
            """What waits for the press comes when it is switched on; then it is switched off again."""
            got.clear()
            expected = [("commands/press-7/stop", payload) for payload in payloads]
            press.connect("127.0.0.1", own)
            press.loop_start()
            # Around a kill, a command may come twice: also one of an earlier turn.
            eventually(lambda: [one for one in dict.fromkeys(got) if one[1] in payloads] == expected)
            press.disconnect()
            press.loop_stop()

        press.connect("127.0.0.1", own)
        press.loop_start()
        stack.callback(press.loop_stop)

        def came() -> bool:
            application.client.publish("plants/north/commands/press-7/start", b"now", 1)
            return bool(got)

        eventually(came, pause=0.2)
        assert got[0] == ("commands/press-7/start", b"now")
        # All that was sent so far has come when this has: the order holds.
        application.client.publish("plants/north/commands/press-7/start", b"last", 1)
        eventually(lambda: got[-1] == ("commands/press-7/start", b"last"))
        press.disconnect()
        press.loop_stop()

        def send(payload: bytes) -> None:
            topic = "plants/north/commands/press-7/stop"
            application.client.publish(topic, payload, 1).wait_for_publish(30)

        def at_the_gateway(payload: str) -> bool:
            return any(row["payload"] == payload for row in gateway.read("commands"))

        # The press is away. The cloud has the acknowledgement of its commands when the gateway ends.
        for end, payloads in ((gateway.kill, (b"A1", b"A2")), (gateway.stop, (b"B1", b"B2"))):
            for payload in payloads:
                send(payload)
            last = payloads[-1].decode()
            eventually(lambda last=last: at_the_gateway(last), pause=0.3)
            eventually(lambda: queued(cloud, "north-cloud") == 0, pause=0.3)
            assert queued(gateway, "press-7") >= 2
            end()
            gateway.start()
            press_gets(*payloads)
        # The gateway is away.
        gateway.kill()
        send(b"later")
        gateway.start()
        eventually(lambda: at_the_gateway("later"), pause=0.3)
        press_gets(b"later")
        press.connect("127.0.0.1", own)
        press.loop_start()
        press.publish("answers/press-7", b"done", 1).wait_for_publish(30)
        eventually(lambda: application.got == [("plants/north/answers/press-7", b"done")])
        press.disconnect()
