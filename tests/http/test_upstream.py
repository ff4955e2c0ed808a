"""An upstream in a running service: the status page, the metrics, /readyz, and a reload by SIGHUP."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from benchmarks.testbed.local import free_port
from benchmarks.testbed.mosquitto import Mosquitto
from tests.http.conftest import Service, eventually

Start = Callable[..., Service]
STREAM = '[streams.commands]\ntopics = ["cmd/#"]\n'
UPSTREAM = """
[[upstream]]
name = "cloud"
url = "mqtt://127.0.0.1:{port}"
[[upstream.mapping]]
filter = "cmd/#"
"""


def reload(service: Service, old: str, new: str, answer: str) -> None:
    path = service.directory / "bridge.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    before = service.log.read_text().count(answer)
    service.process.send_signal(signal.SIGHUP)
    eventually(lambda: service.log.read_text().count(answer) > before)


def test_an_upstream_is_shown_and_does_not_make_the_gateway_unready(start: Start, tmp_path: Path) -> None:
    broker = Mosquitto(tmp_path / "broker")
    service = start(STREAM + UPSTREAM.format(port=broker.port))
    (shown,) = service.json("/status.json")["upstreams"]
    assert (shown["name"], shown["connected"]) == ("cloud", False)
    eventually(lambda: "connection refused" in service.json("/status.json")["upstreams"][0]["error"])
    assert service.request("/readyz")[0] == 200, "devices are served"
    gauge = 'streambridge_external_broker_connected{front_end="upstream:cloud"}'
    eventually(lambda: f"{gauge} 0.0" in service.request("/metrics")[2].decode())
    with broker:
        eventually(lambda: service.json("/status.json")["upstreams"][0]["connected"])
        eventually(lambda: f"{gauge} 1.0" in service.request("/metrics")[2].decode())
        assert service.json("/status.json")["upstreams"][0]["error"] is None
    assert service.stop() == 0


def test_sighup_applies_upstreams_all_or_nothing(start: Start, tmp_path: Path) -> None:
    with Mosquitto(tmp_path / "broker") as broker:
        service = start(STREAM)
        assert service.json("/status.json")["upstreams"] == []
        reload(service, STREAM, STREAM + UPSTREAM.format(port=broker.port), "msg=reloaded")

        def names() -> list[str]:
            return [one["name"] for one in service.json("/status.json")["upstreams"] if one["connected"]]

        eventually(lambda: names() == ["cloud"])
        missing = 'name = "other"\nusername = "u"\npassword_file = "none"'
        reload(service, 'name = "cloud"', missing, "reload of [mqtt] failed")
        assert "password_file of upstream 'other'" in service.log.read_text()
        assert names() == ["cloud"], "the old one stays"
        reload(service, missing, 'name = "other"', "msg=reloaded")
        eventually(lambda: names() == ["other"])
        reload(service, f":{broker.port}", f":{free_port()}", "msg=reloaded")
        eventually(lambda: "refused" in (service.json("/status.json")["upstreams"][0]["error"] or ""))
        assert service.stop() == 0
