"""Operations by HTTP: for users with a password, with their rights, and not for pages of other sites."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cbor2
import psutil
import pytest

from bridge.access.users import hash_password
from tests.http.conftest import Service, eventually

STREAMS = """
[streams.sensors]
[[streams.sensors.export.http]]
identifier = "out"
uri = "http://127.0.0.1:1/"
"""
RULES = """
[[mqtt.acl]]
user = "ann"
manage = ["streams/#"]
publish = ["streams/#"]
subscribe = ["streams/#"]
[[mqtt.acl]]
user = "bob"
subscribe = ["streams/#"]
"""
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    users = tmp_path / "users"
    users.write_text("".join(f"{name}:{hash_password(name.encode())}\n" for name in ("ann", "bob")))
    users.chmod(0o600)
    mqtt = f'listen = ["tcp://127.0.0.1:0"]\nusers_file = "{users}"'
    service = Service(tmp_path, STREAMS + RULES, mqtt=mqtt)
    yield service
    service.stop()


def login(user: str, password: str | None = None) -> dict[str, str]:
    pair = f"{user}:{user if password is None else password}".encode()
    return {"Authorization": f"Basic {base64.b64encode(pair).decode()}"}


def post(service: Service, path: str, body: bytes = b"{}", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=30)
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def ask(service: Service, operation: str, user: str = "ann", **fields: Any) -> dict[str, Any]:
    status, body = post(service, f"/requests/{operation}", json.dumps(fields).encode(), **JSON, **login(user))
    assert status == 200
    reply: dict[str, Any] = json.loads(body)
    return reply


def test_an_export_is_paused_and_resumed_and_the_page_and_the_metrics_show_it(service: Service) -> None:
    paused = ask(service, "pauseExports", name="sensors", export="out", requestId="7")
    assert paused == {"requestId": "7", "status": 0, "statusName": "Success", "exports": ["out"]}
    (export,) = json.loads(service.request("/status.json")[2])["exports"]
    assert (export["paused"], export["disabled"]) == (True, False)
    assert {"errorSince", "failedAttempts", "nextAttempt"} <= export.keys()
    metric = b'streambridge_export_paused{export="out",kind="http",stream="sensors"} 1.0'
    assert metric in service.request("/metrics")[2]
    assert service.logged(r"exports paused: out.*by=\"?user 'ann' over HTTP from 127.0.0.1")
    body = cbor2.dumps({"name": "sensors"})
    status, raw = post(
        service, "/requests/resumeExports", body, **{"Content-Type": "application/cbor"}, **login("ann")
    )
    assert (status, cbor2.loads(raw)["exports"]) == (200, ["out"])


@contextlib.contextmanager
def waiting_fetch(service: Service, user: str) -> Iterator[socket.socket]:
    """A connection whose fetch from the stream `jobs` has been let in, and waits."""
    body = json.dumps({"name": "jobs", "consumer": "work", "timeoutMillis": 3_600_000}).encode()
    head = "POST /requests/fetchMessages HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
    fields = JSON | login(user) | {"Content-Length": str(len(body))}
    head += "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as client:
        client.sendall(f"{head}\r\n".encode())
        assert client.recv(100).startswith(b"HTTP/1.1 100 ")
        client.sendall(body)
        yield client


def test_a_request_that_waits_ends_when_its_client_closes_the_connection(service: Service) -> None:
    exports = {"consumer": [{"identifier": "work"}]}
    definition = {"name": "jobs", "strategyOnFull": 0, "exportDefinition": exports}
    assert ask(service, "createMessageStream", definition=definition)["status"] == 0
    with waiting_fetch(service, "ann"):
        pass
    process = psutil.Process(service.process.pid)
    eventually(
        lambda: (
            not any(
                connection.raddr and connection.laddr.port == service.port
                for connection in process.net_connections()
            )
        )
    )
    ask(service, "appendMessage", name="jobs", payload="eA==")
    fetched = ask(service, "fetchMessages", name="jobs", consumer="work")
    assert [message["sequenceNumber"] for message in fetched["messages"]] == [0]


@pytest.mark.parametrize("change", ["rules", "password", "user"])
def test_a_request_that_waits_ends_with_the_rights_of_its_user(
    service: Service, tmp_path: Path, change: str
) -> None:
    exports = {"consumer": [{"identifier": "work"}]}
    definition = {"name": "jobs", "strategyOnFull": 0, "exportDefinition": exports}
    assert ask(service, "createMessageStream", definition=definition)["status"] == 0
    with waiting_fetch(service, "bob") as client:
        if change == "rules":
            config = tmp_path / "bridge.toml"
            config.write_text(config.read_text().replace('user = "bob"\nsubscribe', 'user = "bob"\npublish'))
        else:
            names = {"password": {"ann": b"ann", "bob": b"x"}, "user": {"ann": b"ann"}}[change]
            lines = [f"{name}:{hash_password(word)}\n" for name, word in names.items()]
            (tmp_path / "users").write_text("".join(lines))
        eventually(lambda: service.logged("msg=reloaded"))
        ask(service, "appendMessage", name="jobs", payload="eA==")
        answer = http.client.HTTPResponse(client)
        answer.begin()
        assert (answer.status, json.loads(answer.read())["statusName"]) == (200, "Unauthorized")


def test_the_rights_are_those_of_the_user(service: Service) -> None:
    assert ask(service, "describeMessageStream", "bob", name="sensors")["status"] == 0
    refused = ask(service, "pauseExports", "bob", name="sensors")
    assert (refused["statusName"], "user 'bob'" in refused["errorMessage"]) == ("Unauthorized", True)


def test_nothing_is_carried_out_without_a_password_or_for_another_site(service: Service) -> None:
    path = "/requests/pauseExports"
    body = b'{"name": "sensors"}'
    wrong: list[tuple[int, dict[str, str]]] = [
        (401, JSON),
        (401, JSON | login("ann", "wrong")),
        (401, JSON | login("nobody")),
        (401, JSON | {"Authorization": "Bearer x"}),
        (400, JSON | {"Authorization": "Basic ???"}),
        (415, login("ann")),
        (415, login("ann") | {"Content-Type": "text/plain"}),
        (415, login("ann") | {"Content-Type": "application/x-www-form-urlencoded"}),
        (403, JSON | login("ann") | {"Origin": "http://elsewhere.example"}),
        (403, JSON | login("ann") | {"Origin": "null"}),
        (421, JSON | login("ann") | {"Host": "elsewhere.example"}),
    ]
    for status, headers in wrong:
        assert post(service, path, body, **headers)[0] == status, headers
    assert service.request(path)[0] == 405
    assert post(service, "/status.json", body, **JSON, **login("ann"))[0] == 405
    assert post(service, "/requests/nothing", body, **JSON, **login("ann"))[0] == 404
    (export,) = json.loads(service.request("/status.json")[2])["exports"]
    assert not export["paused"]
    same = {"Origin": f"http://127.0.0.1:{service.port}"}
    assert post(service, path, body, **JSON, **login("ann"), **same)[0] == 200
