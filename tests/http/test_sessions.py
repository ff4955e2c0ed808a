"""Sessions of browsers: what a cookie and its token allow, and what ends them. And documents are bounded."""

from __future__ import annotations

import base64
import http.client
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridge.access.users import hash_password
from bridge.client import StreamManagerClient
from tests.http.conftest import Service, eventually

STREAMS = """
[streams.sensors]
topics = ["sensors/#"]
[[streams.sensors.export.http]]
identifier = "out"
uri = "http://127.0.0.1:1/"
"""
JSON = {"Content-Type": "application/json"}
PAUSE = ("/requests/pauseExports", {"name": "sensors"})


@pytest.fixture
def users(tmp_path: Path) -> Path:
    users = tmp_path / "users"
    users.write_text(f"ann:{hash_password(b'ann')}\n")
    users.chmod(0o600)
    return users


@pytest.fixture
def service(tmp_path: Path, users: Path) -> Iterator[Service]:
    mqtt = f'listen = ["tcp://127.0.0.1:0"]\nusers_file = "{users}"'
    service = Service(tmp_path, STREAMS, mqtt=mqtt)
    yield service
    service.stop()


def post(
    service: Service, path: str, body: object, **headers: str
) -> tuple[int, http.client.HTTPMessage, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=30)
    try:
        connection.request("POST", path, json.dumps(body).encode(), JSON | headers)
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, answer.headers, json.loads(text) if answer.status == 200 else text
    finally:
        connection.close()


def log_in(service: Service, user: str = "ann") -> tuple[dict[str, str], str]:
    """The headers that make a session, and its Set-Cookie."""
    status, headers, found = post(service, "/login", {"user": user, "password": user})
    assert status == 200
    cookie = headers["Set-Cookie"]
    return {"Cookie": cookie.partition(";")[0], "X-Streambridge-Token": found["token"]}, cookie


def test_a_session_needs_its_cookie_and_its_token(service: Service) -> None:
    session, cookie = log_in(service)
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    described = json.loads(service.request("/session.json", Cookie=session["Cookie"])[2])
    assert (described["user"], described["token"]) == ("ann", session["X-Streambridge-Token"])
    token, only_cookie = {"X-Streambridge-Token": described["token"]}, {"Cookie": session["Cookie"]}
    assert post(service, *PAUSE, **token)[0] == 401
    assert post(service, *PAUSE, **only_cookie)[0] == 403
    assert post(service, *PAUSE, **only_cookie, **{"X-Streambridge-Token": "x"})[0] == 403
    assert post(service, *PAUSE, **session, Origin="http://elsewhere.example")[0] == 403
    assert post(service, *PAUSE, **session, Origin="http://127.0.0.1:1")[0] == 403
    assert not service.json("/status.json")["exports"][0]["paused"]
    assert post(service, *PAUSE, **session)[2]["exports"] == ["out"]


def test_a_login_is_refused_for_a_wrong_password_a_form_and_another_site(service: Service) -> None:
    right = {"user": "ann", "password": "ann"}
    assert post(service, "/login", right | {"password": "wrong"})[0] == 401
    assert post(service, "/login", {"user": "", "password": ""})[0] == 401
    assert post(service, "/login", {"user": "ann"})[0] == 400
    assert post(service, "/login", [])[0] == 400
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert post(service, "/login", right, **form)[0] == 415
    assert post(service, "/login", right, Origin="http://elsewhere.example")[0] == 403
    assert service.request("/login")[0] == 405


def test_a_session_ends_with_a_logout_and_with_a_new_password(service: Service, users: Path) -> None:
    session, _ = log_in(service)
    assert post(service, "/logout", {}, Cookie=session["Cookie"])[0] == 403
    assert "Max-Age=0" in post(service, "/logout", {}, **session)[1]["Set-Cookie"]
    assert post(service, *PAUSE, **session)[0] == 401
    session, _ = log_in(service)
    users.write_text(f"ann:{hash_password(b'another')}\n")
    service.process.send_signal(signal.SIGHUP)
    eventually(lambda: service.logged("msg=reloaded"))
    assert post(service, *PAUSE, **session)[0] == 401
    assert json.loads(service.request("/session.json", Cookie=session["Cookie"])[2])["user"] is None


def test_the_newest_messages_are_shown_however_large_they_and_those_before_them_are(service: Service) -> None:
    service.publish(*(("sensors/1", b"%02d" % n + b"\xff" * 50_000) for n in range(60)))
    for wanted in ("", "&topic=sensors/1"):
        found = service.json(f"/tail.json?name=sensors{wanted}")
        assert [one["number"] for one in found["messages"]] == list(range(10, 60)), wanted
        assert (found["newest"], found["left"]) == (59, 10 if wanted else 0)
    found = service.json("/tail.json?name=sensors&after=4")
    assert ([one["number"] for one in found["messages"]][:1], found["left"]) == ([10], 5)


def test_a_stream_that_was_just_deleted_is_not_found(service: Service) -> None:
    assert service.json("/stream.json?name=sensors")["topics"]
    service.json("/status.json")
    with StreamManagerClient("127.0.0.1", service.mqtt_port, username="ann", password="ann") as client:
        client.delete_message_stream("sensors")
    assert service.request("/stream.json?name=sensors")[0] == 404


def test_messages_are_read_from_the_newest_and_shortened(service: Service) -> None:
    service.publish(*[(f"sensors/{n % 2}", f"{n} ".encode() * 1000) for n in range(120)])
    found = service.json("/tail.json?name=sensors")
    assert [message["number"] for message in found["messages"]][-1] == found["newest"] == 119
    assert len(found["messages"]) == 50
    assert (found["messages"][-1]["size"], len(found["messages"][-1]["payload"])) == (4000, 500)
    odd = service.json("/tail.json?name=sensors&after=110&topic=sensors/1")
    assert [message["number"] for message in odd["messages"]] == [111, 113, 115, 117, 119]
    assert service.json("/tail.json?name=sensors&after=119")["messages"] == []
    assert service.request("/tail.json?name=nothing")[0] == 404
    assert service.request("/tail.json?name=sensors&after=x")[0] == 400
    assert service.request("/tail.json?name=sensors&topic=a/%23/b")[0] == 400
    assert service.request("/stream.json?name=nothing")[0] == 404
    assert service.request("/clients.json?sort=x")[0] == 400


def test_a_visitor_from_another_machine_needs_a_login_once_there_are_users(
    tmp_path: Path, users: Path
) -> None:
    address = _own_address()
    mqtt = f'listen = ["tcp://127.0.0.1:0"]\nusers_file = "{users}"'
    (tmp_path / "far").mkdir()
    service = Service(tmp_path / "far", STREAMS, listen="0.0.0.0:0", mqtt=mqtt)
    try:

        def look(path: str, **headers: str) -> int:
            connection = http.client.HTTPConnection(address, service.port, timeout=30)
            try:
                connection.request("GET", path, headers=headers)
                return connection.getresponse().status
            finally:
                connection.close()

        session, _ = log_in(service)
        documents = ("status", "history", "stream", "tail", "clients", "events")
        for path in (f"/{name}.json?name=sensors" for name in documents):
            assert look(path) == 401, path
            assert look(path, Cookie=session["Cookie"]) == 200, path
            assert service.request(path)[0] == 200, path
        for path in ("/", "/metrics", "/healthz", "/session.json"):
            assert look(path) == 200, path
    finally:
        service.stop()


def _own_address() -> str:
    """An address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no network")
        return str(probe.getsockname()[0])


def test_the_status_is_filtered_by_stream_and_by_export_and_its_sums_are_not(service: Service) -> None:
    every = service.json("/status.json")
    some = service.json("/status.json?stream=nothing&export=OUT")
    assert (every["streams"][0]["name"], some["streams"]) == ("sensors", [])
    assert [export["identifier"] for export in some["exports"]] == ["out"]
    assert some["totals"]["streams"] == every["totals"]["streams"] == 1


ROLES = """
[[mqtt.role]]
name = "everything"
publish = ["#"]
subscribe = ["#"]
manage = ["streams/#"]
[[mqtt.role]]
name = "look"
page = "look"
[[mqtt.role]]
name = "closed"
page = "none"
[[mqtt.user]]
name = "*"
roles = ["everything"]
[[mqtt.user]]
name = "bob"
roles = ["look"]
[[mqtt.user]]
name = "carl"
roles = ["closed"]
[[mqtt.user]]
name = ""
roles = ["closed"]
"""


def test_who_may_only_look_changes_nothing_and_who_may_not_look_sees_nothing(tmp_path: Path) -> None:
    names = ("ann", "bob", "carl")
    (tmp_path / "users").write_text("".join(f"{name}:{hash_password(name.encode())}\n" for name in names))
    (tmp_path / "users").chmod(0o600)
    mqtt = f'listen = ["tcp://127.0.0.1:0"]\nusers_file = "{tmp_path / "users"}"'
    service = Service(tmp_path, STREAMS + ROLES, mqtt=mqtt)
    try:
        assert post(service, "/login", {"user": "carl", "password": "carl"})[0] == 403
        sessions = {"carl": {"Authorization": "Basic " + base64.b64encode(b"carl:carl").decode()}}
        for name in ("ann", "bob"):
            status, headers, found = post(service, "/login", {"user": name, "password": name})
            assert (status, found["operate"]) == (200, name == "ann")
            cookie = headers["Set-Cookie"].partition(";")[0]
            sessions[name] = {"Cookie": cookie, "X-Streambridge-Token": found["token"]}
        look = {name: service.request("/status.json", **session)[0] for name, session in sessions.items()}
        assert look == {"ann": 200, "bob": 200, "carl": 403}
        assert service.request("/status.json")[0] == 401, "without a login it is closed, on loopback too"
        assert service.request("/metrics")[0] == service.request("/healthz")[0] == 200
        status, _, reply = post(service, *PAUSE, **sessions["bob"])
        assert (status, reply["statusName"]) == (200, "Unauthorized")
        assert "may only look" in reply["errorMessage"]
        append = {"name": "sensors", "payload": "YQ=="}
        assert post(service, "/requests/appendMessage", append, **sessions["bob"])[2]["status"]
        read = post(service, "/requests/listStreams", {}, **sessions["bob"])[2]
        assert read["streams"] == ["sensors"]
        assert post(service, *PAUSE, **sessions["carl"])[0] == 403
        assert post(service, *PAUSE, **sessions["ann"])[2]["exports"] == ["out"]
        described = json.loads(service.request("/session.json", Cookie=sessions["bob"]["Cookie"])[2])
        assert (described["look"], described["operate"]) == (True, False)
        assert json.loads(service.request("/session.json")[2])["look"] is False
        config = service.directory / "bridge.toml"
        text = config.read_text().replace('name = "bob"\nroles = ["look"]', 'name = "bob"\nroles = []')
        config.write_text(text)
        service.process.send_signal(signal.SIGHUP)
        eventually(lambda: post(service, *PAUSE, **sessions["bob"])[2].get("exports") == ["out"])
    finally:
        service.stop()
