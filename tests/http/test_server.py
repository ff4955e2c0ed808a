"""The HTTP listener's guards and health checks, by plain requests."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import signal
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import streambridge
from tests.http.conftest import CONFIG, Service, eventually

PATHS = ["/", "/status.json", "/history.json", "/metrics", "/healthz", "/readyz"]


@pytest.fixture(scope="module")
def service(start: Callable[..., Service]) -> Service:
    return start("[streams.sensors]")


def raw(service: Service, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize("path", PATHS)
def test_answers_set_no_cookie_and_forbid_what_a_reader_does_not_need(service: Service, path: str) -> None:
    status, headers, body = service.request(path)
    assert status == 200
    assert body
    assert "Set-Cookie" not in headers
    assert "Access-Control-Allow-Origin" not in headers
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"


@pytest.mark.parametrize("path", PATHS)
def test_a_request_under_a_strangers_name_is_refused(service: Service, path: str) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost.evil.example"):
        status, _, body = service.request(path, Host=host)
        assert (status, body) == (421, b"421 Misdirected Request\n"), host


def test_addresses_and_names_of_this_machine_are_answered(service: Service) -> None:
    name = socket.gethostname()
    for host in ("127.0.0.1", "localhost", "LOCALHOST:9464", "[::1]:9464", "192.0.2.1:80", name, f"{name}."):
        assert service.request("/healthz", Host=host)[0] == 200, host


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_can_be_changed(service: Service, method: str) -> None:
    status, headers, _ = service.request("/status.json", method)
    assert (status, headers["Allow"].startswith("GET, HEAD")) == (405, True)


def test_head_answers_without_a_body(service: Service) -> None:
    status, headers, body = service.request("/", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 1000


def test_a_connection_serves_one_request_after_the_other(service: Service) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=30)
    connection.connect()
    used = connection.sock
    for path in PATHS:
        connection.request("GET", path)
        assert connection.getresponse().read()
    assert connection.sock is used
    connection.close()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\n\r\n", 200),
        (b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n", 400),
        (b"GET http://localhost/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nContent-Length: 0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\ncontent-length: 0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
        (b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 404),
        (b"GET /../etc/passwd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 404),
        (b"GET /events.json?after=x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 400),
    ],
)
def test_a_bad_request_is_answered_and_affects_no_other_client(
    service: Service, request_: bytes, status: int
) -> None:
    assert raw(service, request_).startswith(b"HTTP/1.1 %d " % status)
    assert service.request("/healthz")[0] == 200


def test_random_bytes_are_answered_or_end_the_connection_and_nothing_else(service: Service) -> None:
    dice = random.Random(1)
    valid = b"GET /status.json?since=1 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    for _ in range(200):
        request = bytearray(valid)
        for _ in range(dice.randint(1, 8)):
            at = dice.randrange(len(request))
            request[at : at + dice.randint(0, 3)] = dice.randbytes(dice.randint(0, 3))
        with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                answer = b"".join(iter(lambda: connection.recv(65536), b""))
                assert answer == b"" or answer.startswith(b"HTTP/1.1 "), bytes(request)
    assert service.request("/healthz")[0] == 200
    assert " error bridge" not in service.log.read_text()


def test_many_idle_connections_do_not_block_the_clients_of_streams(service: Service) -> None:
    idle = [socket.create_connection(("127.0.0.1", service.port), timeout=30) for _ in range(80)]
    service.publish(("streams/sensors", b"1"))
    for connection in idle:
        connection.close()
    eventually(lambda: _answers(service))


def test_one_address_cannot_take_all_connections(service: Service) -> None:
    idle = [socket.create_connection(("127.0.0.1", service.port), timeout=30) for _ in range(70)]
    other = socket.create_connection(("127.0.0.1", service.port), 30, source_address=("127.0.0.9", 0))
    other.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert other.recv(65536).startswith(b"HTTP/1.1 200 ")
    for connection in (*idle, other):
        connection.close()
    eventually(lambda: _answers(service))


def _answers(service: Service) -> bool:
    try:
        return service.request("/healthz")[0] == 200
    except OSError:
        return False


def test_a_data_directory_that_cannot_be_written_is_unhealthy_until_it_can(service: Service) -> None:
    service.mount("/dev/null")
    try:
        eventually(lambda: service.request("/healthz")[0] == 503)
        assert "cannot be written" in service.json("/healthz")["storage"]
        assert service.request("/readyz")[0] == 503
        eventually(lambda: b"streambridge_storage_writable 0.0" in service.request("/metrics")[2])
    finally:
        service.mount("disk")
    eventually(lambda: service.request("/healthz")[0] == 200)
    assert service.json("/readyz") == {
        "ok": True,
        "phase": "running",
        "storage": "writable",
        "refused": {},
        "failing": {},
        "unread": {},
        "unreachable": None,
    }


def test_a_service_that_refuses_messages_for_want_of_room_is_not_ready_until_it_stores_again(
    start: Callable[..., Service], mounted: Path
) -> None:
    service = start('[streams.sensors]\ntopics = ["sensors/#"]\n', disk=str(mounted))
    filler, space = mounted / "filler", os.statvfs(mounted)
    filler.write_bytes(bytes(space.f_bavail * space.f_frsize - 20_000))
    with service.device("camera") as device:
        device.publish("sensors/picture", bytes(30_000), qos=1)
        eventually(lambda: service.request("/readyz")[0] == 503)
        assert "No space left on device" in service.json("/readyz")["failing"]["sensors"]
        assert service.request("/healthz")[0] == 200, "small files have room"
        eventually(lambda: b"streambridge_ready 0.0" in service.request("/metrics")[2])
        filler.unlink()
        eventually(lambda: service.request("/readyz")[0] == 200)  # the device sends it again


def test_a_full_stream_is_shown_alike_by_the_health_check_the_metric_and_the_page(
    start: Callable[..., Service],
) -> None:
    service = start('[streams.brim]\nmax_size = "4KiB"\nsegment_size = "2KiB"\n')
    with service.device("filler") as client:
        for _ in range(20):
            client.publish("streams/brim", bytes(500)).wait_for_publish(10)
        eventually(lambda: service.request("/readyz")[0] == 503)
        found = service.json("/readyz")
        assert found["failing"]["brim"].startswith("stream 'brim' is full")
        eventually(lambda: b"streambridge_ready 0.0" in service.request("/metrics")[2])
        eventually(lambda: service.json("/status.json")["readiness"] == found)
        assert service.request("/healthz")[0] == 200
        bridge = service.directory / "bridge.toml"
        bridge.write_text(bridge.read_text().replace("4KiB", "1MiB"))
        service.process.send_signal(signal.SIGHUP)
        eventually(lambda: "reloaded" in service.log.read_text())
        client.publish("streams/brim", b"x", qos=1).wait_for_publish(10)
        assert service.request("/readyz")[0] == 200
        eventually(lambda: b"streambridge_ready 1.0" in service.request("/metrics")[2])
        assert service.json("/status.json")["readiness"]["ok"]


def test_trying_the_disk_leaves_nothing_there(service: Service) -> None:
    before = sorted(path.name for path in (service.directory / "disk").iterdir())
    assert service.request("/healthz")[0] == 200
    assert sorted(path.name for path in (service.directory / "disk").iterdir()) == before


def test_a_port_that_is_taken_is_named_at_the_start(service: Service, tmp_path: Path) -> None:
    config = tmp_path / "bridge.toml"
    config.write_text(CONFIG.replace('"127.0.0.1:0"', f'"127.0.0.1:{service.port}"'))
    done = streambridge("run", "-c", config)
    assert done.returncode != 0
    assert f"http.listen: cannot listen at 127.0.0.1:{service.port}: another program" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_listener_on_the_network_logs_a_warning(start: Callable[..., Service]) -> None:
    service = start("", listen="0.0.0.0:0")
    assert service.logged("can see the streams and clients")


def test_turned_off_nothing_listens(start: Callable[..., Service]) -> None:
    service = start("", listen="")
    assert service.port == 0
    service.publish(("room/1", b"1"))


class Silent(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.server.reached.set()  # type: ignore[attr-defined]
        self.server.released.wait(30)  # type: ignore[attr-defined]


@pytest.fixture
def silent() -> Iterator[socketserver.ThreadingTCPServer]:
    """A destination that takes a batch and does not answer until `released`."""
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Silent)
    server.reached, server.released = threading.Event(), threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.released.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_service_that_must_refuse_a_stream_is_not_ready_until_the_stream_is_declared_no_longer(
    start: Callable[..., Service],
) -> None:
    service = start('[streams.wrong]\ntopics = ["a/#", "b/#/c"]\n')
    assert service.request("/readyz")[0] == 503
    assert "b/#/c" in service.json("/readyz")["refused"]["wrong"]
    assert b"streambridge_streams_refused 1.0" in service.request("/metrics")[2]
    config = service.directory / "bridge.toml"
    config.write_text(config.read_text().partition("[streams.wrong]")[0])
    service.process.send_signal(signal.SIGHUP)
    eventually(lambda: service.request("/readyz")[0] == 200)
    service.publish(("a/1", b"ordinary again"))


def test_a_service_that_stops_is_healthy_but_not_ready(
    start: Callable[..., Service], silent: socketserver.ThreadingTCPServer
) -> None:
    service = start(
        f"""
[streams.sensors]
[[streams.sensors.export.http]]
identifier = "slow"
uri = "http://127.0.0.1:{silent.server_address[1]}/"
"""
    )
    assert service.request("/readyz")[0] == 200
    service.publish(("streams/sensors", b"1"))
    assert silent.reached.wait(30)  # type: ignore[attr-defined]
    service.process.terminate()
    eventually(lambda: service.request("/readyz")[0] == 503)
    assert service.json("/readyz")["phase"] == "stopping"
    assert service.request("/healthz")[0] == 200
    silent.released.set()  # type: ignore[attr-defined]
    assert service.process.wait(timeout=60) == 0
