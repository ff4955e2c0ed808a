"""A broker that is to send the messages and cannot be reached: in the log, in /readyz and in the metrics."""

from __future__ import annotations

import json
import re
import socketserver
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.testbed.certificates import Authority
from benchmarks.testbed.local import tool
from benchmarks.testbed.mosquitto import Mosquitto
from tests.http.conftest import Service, eventually

Start = Callable[..., Service]
WARNING = r"warning bridge\.\S+ msg=\"no connection to {}: {}"
STREAM = '[streams.sensors]\ntopics = ["sensors/#"]\n'


def at(start: Start, url: str, settings: str = "") -> Service:
    """A service that subscribes at a broker."""
    return start(f'[mqtt.external]\nurl = "{url}"\n{settings}{STREAM}', mqtt='mode = "external"')


def told(service: Service, url: str, cause: str) -> str:
    """Wait until it is known why there is no connection; returns the reason in /readyz."""
    eventually(lambda: service.logged(WARNING.format(url, cause)))
    status, _, body = service.request("/readyz")
    assert status == 503
    assert service.request("/healthz")[0] == 200, "a restart would not help"
    gauge = b'streambridge_external_broker_connected{front_end="mqtt"} 0.0'
    eventually(lambda: gauge in service.request("/metrics")[2])
    assert b"streambridge_ready 0.0" in service.request("/metrics")[2]
    return str(json.loads(body)["unreachable"])


def test_a_missing_broker_is_logged_once_and_the_service_is_ready_when_it_appears(
    start: Start, tmp_path: Path
) -> None:
    broker = Mosquitto(tmp_path / "broker")
    url = f"mqtt://127.0.0.1:{broker.port}"
    service = at(start, url)
    assert "connection refused" in told(service, url, "connection refused")
    ready = service.logged(r"msg=ready listen=(\S+) broker=(\S+) ")
    assert ready is not None
    assert url not in ready[1]
    assert ready[2] == url
    with broker:
        eventually(lambda: service.request("/readyz")[0] == 200)
        connected = b'streambridge_external_broker_connected{front_end="mqtt"} 1.0'
        eventually(lambda: connected in service.request("/metrics")[2])
        assert service.log.read_text().count("connection refused") == 1, "there were several attempts"
    eventually(lambda: service.request("/readyz")[0] == 503)
    eventually(lambda: service.log.read_text().count("connection refused") == 2)


def test_a_broker_with_an_unknown_name_is_logged(start: Start) -> None:
    url = "mqtt://broker.invalid:1883"
    assert "DNS" in told(at(start, url), url, "its name cannot be resolved")


@pytest.mark.parametrize("trusted", [True, False])
def test_a_broker_whose_certificate_is_not_trusted_is_logged(
    start: Start, tmp_path: Path, trusted: bool
) -> None:
    authority = Authority(tmp_path / "ca")
    pair = authority.issue("server")
    ca = authority.cert if trusted else Authority(tmp_path / "other").cert
    with Mosquitto(tmp_path / "broker", f"certfile {pair.cert}\nkeyfile {pair.key}") as broker:
        url = f"mqtts://127.0.0.1:{broker.port}"
        service = at(start, url, f'ca = "{ca}"\n')
        if trusted:
            eventually(lambda: service.request("/readyz")[0] == 200)
        else:
            assert "mqtt.external.ca" in told(service, url, "its certificate is not trusted")


def test_a_broker_that_does_not_speak_tls_is_logged(start: Start, tmp_path: Path) -> None:
    with Mosquitto(tmp_path / "broker") as broker:
        url = f"mqtts://127.0.0.1:{broker.port}"
        assert told(at(start, url), url, "")


@pytest.mark.parametrize("protocol", ["3.1.1", "5"])
def test_a_password_that_the_broker_refuses_is_logged_once(
    start: Start, tmp_path: Path, protocol: str
) -> None:
    users, secret = tmp_path / "users", tmp_path / "secret"
    program = tool("mosquitto_passwd")
    subprocess.run([program, "-c", "-b", users, "bridge", "right"], check=True, capture_output=True)
    users.chmod(0o644)
    secret.write_text("wrong\n")
    with Mosquitto(tmp_path / "broker", f"allow_anonymous false\npassword_file {users}") as broker:
        url = f"mqtt://127.0.0.1:{broker.port}"
        login = f'username = "bridge"\npassword_file = "{secret}"\nprotocol = "{protocol}"\n'
        service = at(start, url, login)
        assert "password_file" in told(service, url, "it refuses user 'bridge'")
        refused = r'refused_total{front_end="mqtt",reason="connects"} [2-9]'
        eventually(lambda: re.search(refused.encode(), service.request("/metrics")[2]))
        assert service.log.read_text().count("no connection") == 1


def test_a_broker_that_disconnects_without_an_answer_is_logged(start: Start) -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        url = f"mqtt://127.0.0.1:{server.server_address[1]}"
        assert told(at(start, url), url, "it ended before")
        server.shutdown()
