"""The how-to of the hub as it is written: three gateways, one hub, one bucket, and kills of all of them."""

from __future__ import annotations

import base64
import random
import re
import textwrap
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import paho.mqtt.client as paho
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from benchmarks.testbed.certificates import Authority
from benchmarks.testbed.local import free_port
from bridge.access.users import hash_password
from tests.export.harness import Bucket
from tests.export.process import Running

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "hub.md"
SITES = ("north", "south", "west")
MESSAGES = 400  # of each device
AT_A_TIME = 20
KILLS = 10
DEADLINE = 240.0


def toml_of(title: str, names: dict[str, str]) -> str:
    """A block of the page, with other names in it."""
    found = re.search(rf'```toml title="{title}"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    assert found is not None
    text = textwrap.dedent(found[1])
    for old, new in names.items():
        assert old in text, old
        text = text.replace(old, new)
    return text + '\n[greengrass]\nlisten = ""\n[http]\nlisten = ""\n'


class Device(threading.Thread):
    """Publishes its messages in order, each with an id, and sends again what is not acknowledged."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port
        self.done = 0
        self.given_up = threading.Event()

    def run(self) -> None:
        while self.done < MESSAGES and not self.given_up.is_set():
            client = paho.Client(paho.CallbackAPIVersion.VERSION2, "device", protocol=paho.MQTTv5)
            try:
                client.connect("127.0.0.1", self._port)
                client.loop_start()
                while self.done < MESSAGES and not self.given_up.is_set():
                    sent = [self._publish(client, n) for n in range(self.done, self.done + AT_A_TIME)]
                    for info in sent:
                        info.wait_for_publish(3)
                        if not info.is_published():
                            raise ConnectionError
                    self.done += AT_A_TIME
            except (OSError, RuntimeError):
                self.given_up.wait(0.05)
            finally:
                client.disconnect()
                client.loop_stop()

    def _publish(self, client: paho.Client, number: int) -> paho.MQTTMessageInfo:
        properties = Properties(PacketTypes.PUBLISH)
        properties.UserProperty = [("message-id", f"{number}")]
        return client.publish("readings/device", b"%d" % number, 1, properties=properties)


@pytest.mark.slow(seconds=60)
def test_three_gateways_to_a_hub_to_s3_are_exactly_once_over_kills_of_all(
    tmp_path: Path, bucket: Bucket
) -> None:
    chance = random.Random(23)
    authority = Authority(tmp_path / "ca")
    certificate = authority.issue("hub")
    users = tmp_path / "users"
    users.write_text("".join(f"{site}:{hash_password(f'of {site}'.encode())}\n" for site in SITES))
    users.chmod(0o600)
    port = free_port()
    hub_toml = toml_of(
        "hub",
        {
            'id = "hub"': 'id = "hub"\ndata_dir = "data"',
            "tls://0.0.0.0:8883": f"tls://127.0.0.1:{port}",
            "/etc/streambridge/users": str(users),
            "/etc/streambridge/tls/server.pem": str(certificate.cert),
            "/etc/streambridge/tls/server.key": str(certificate.key),
            'bucket = "plant-data"': f'bucket = "{bucket.name}"\ntime_hint_millis = 300\n'
            f'endpoint_url = "{bucket.url}"',
        },
    )
    with ExitStack() as stack:
        hub = stack.enter_context(Running(tmp_path / "hub", hub_toml, port))
        gateways = [stack.enter_context(_gateway(tmp_path, site, port, authority)) for site in SITES]
        devices = [Device(gateway.port) for gateway in gateways]
        for device in devices:
            device.start()
            stack.callback(device.join)
            stack.callback(device.given_up.set)
        for _ in range(KILLS):
            time.sleep(chance.uniform(0, 1))
            one = chance.choice([hub, hub, *gateways])
            one.kill()
            time.sleep(chance.uniform(0, 0.5))
            one.start()
        deadline = time.monotonic() + DEADLINE
        while len(set(_rows(bucket))) < len(SITES) * MESSAGES:
            assert time.monotonic() < deadline, (len(set(_rows(bucket))), [d.done for d in devices])
            time.sleep(0.5)
        assert all(one.stop() == 0 for one in (*gateways, hub))
    rows = _rows(bucket)
    for site in SITES:
        mine = [int(payload) for topic, payload in rows if topic == f"sites/{site}/readings/device"]
        assert mine == list(range(MESSAGES)), site
    assert len(rows) == len(SITES) * MESSAGES


def _gateway(root: Path, site: str, hub_port: int, authority: Authority) -> Running:
    secret, port = root / f"password-{site}", free_port()
    secret.write_text(f"of {site}\n")
    names = {
        'id = "north"': f'id = "{site}"\ndata_dir = "data"',
        "mqtts://hub.example": f"mqtts://localhost:{hub_port}",
        'username = "north"': f'username = "{site}"',
        "/etc/streambridge/hub-password": str(secret),
        "/etc/streambridge/hub-ca.pem": str(authority.cert),
    }
    listen = f'[mqtt]\nlisten = ["tcp://127.0.0.1:{port}"]\n'
    return Running(root / site, toml_of("gateway", names) + listen, port)


def _rows(bucket: Bucket) -> list[tuple[str, bytes]]:
    """Topic and payload of all rows, in the order of the stream."""
    found = [row for key in sorted(bucket.data_keys()) for row in bucket.rows(key)]
    return [
        (row["topic"], base64.b64decode(row["payload"]))
        for row in sorted(found, key=lambda row: row["sequence_number"])
    ]
