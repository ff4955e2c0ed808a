"""The audit log of a running service: logins, refusals and changes, over kills and reloads."""

from __future__ import annotations

import base64
import http.client
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import pytest

from bridge.access.users import hash_password
from tests.cli.conftest import streambridge
from tests.http.conftest import Service, eventually
from tests.mqtt.harness import connect

RULES = """
[audit]
file = "audit.jsonl"
[streams.s]
topics = ["in/#"]
"""
MQTT = """listen = ["tcp://127.0.0.1:0"]
users_file = "users"
[[mqtt.acl]]
user = "ann"
publish = ["#"]
subscribe = ["#"]
manage = ["#"]
[[mqtt.acl]]
user = "bob"
publish = ["in/#", "streambridge/%c/+"]
"""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    path = tmp_path / "users"
    path.write_text(f"ann:{hash_password(b'a')}\nbob:{hash_password(b'b')}\n")
    path.chmod(0o600)
    found = Service(tmp_path, RULES, mqtt=MQTT)
    yield found
    if found.process.poll() is None:
        found.process.kill()
    found.process.wait()


def lines(service: Service, event: str, **wanted: Any) -> list[dict[str, Any]]:
    """The lines of an event with these values."""
    text = (service.directory / "audit.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    return [
        line
        for line in found
        if line["event"] == event and all(line.get(key) == value for key, value in wanted.items())
    ]


def wait_for(service: Service, event: str, **wanted: Any) -> dict[str, Any]:
    """The first line of an event with these values, once it is there."""
    return eventually(lambda: lines(service, event, **wanted))[0]


def device(service: Service, client_id: str, user: str | None, password: str) -> paho.Client:
    client = paho.Client(paho.CallbackAPIVersion.VERSION2, client_id)
    if user is not None:
        client.username_pw_set(user, password)
    client.connect("127.0.0.1", service.mqtt_port)
    client.loop_start()
    return client


def ask(service: Service, operation: str, body: dict[str, Any], user: str, password: str) -> dict[str, Any]:
    """`POST /requests/<operation>`."""
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=30)
    login = base64.b64encode(f"{user}:{password}".encode()).decode()
    headers = {"Content-Type": "application/json", "Authorization": f"Basic {login}"}
    connection.request("POST", f"/requests/{operation}", json.dumps(body), headers)
    answer = connection.getresponse().read()
    connection.close()
    return json.loads(answer) if answer.startswith(b"{") else {}


def test_logins_and_refusals_of_devices_are_noted_with_who_and_why(service: Service) -> None:
    bob = device(service, "pump-7", "bob", "b")
    login = wait_for(service, "login", outcome="ok", user="bob")
    assert (login["client"], login["address"], login["front_end"], login["why"]) == (
        "pump-7",
        "127.0.0.1",
        "mqtt",
        "password",
    )
    bad = device(service, "evil", "bob", "guess")
    refused = wait_for(service, "login", outcome="refused")
    assert (refused["user"], refused["client"]) == ("bob", "evil")
    assert "wrong user name or password" in refused["why"]
    bob.subscribe("secret/#")
    assert wait_for(service, "subscribe", outcome="refused", on="secret/#")["user"] == "bob"
    bob.publish("streams/s", b"x", qos=0)
    assert wait_for(service, "publish", outcome="refused", on="streams/s")["client"] == "pump-7"
    for client in (bob, bad):
        client.disconnect()
        client.loop_stop()


def test_operations_of_every_front_end_are_noted_with_what_they_changed(service: Service) -> None:
    definition = {"name": "made", "maxSize": 1048576, "streamSegmentSize": 1048576, "strategyOnFull": 0}
    ask(service, "createMessageStream", {"definition": definition}, "ann", "a")
    created = wait_for(service, "createMessageStream", on="made", outcome="ok")
    assert (created["user"], created["front_end"], created["outcome"]) == ("ann", "http", "ok")
    assert created["after"]["maxSize"] == 1048576
    assert "before" not in created
    ask(service, "updateMessageStream", {"definition": definition | {"maxSize": 2097152}}, "ann", "a")
    updated = wait_for(service, "updateMessageStream")
    assert (updated["before"], updated["after"]) == ({"maxSize": 1048576}, {"maxSize": 2097152})
    ask(service, "deleteMessageStream", {"name": "made"}, "bob", "b")
    refused = wait_for(service, "deleteMessageStream", outcome="refused")
    assert (refused["user"], refused["on"]) == ("bob", "made")
    ask(service, "deleteMessageStream", {"name": "none"}, "ann", "a")
    assert wait_for(service, "deleteMessageStream", outcome="failed")["on"] == "none"
    done = streambridge("streams", "delete", "made", "--yes", "-c", service.directory / "bridge.toml")
    assert done.returncode == 0, done.stderr
    deleted = wait_for(service, "deleteMessageStream", outcome="ok")
    assert deleted["front_end"] == "control"
    assert deleted["address"].startswith("uid ")
    assert deleted["before"]["maxSize"] == 2097152


def test_starts_stops_and_reloads_are_noted_and_a_kill_keeps_what_was_noted(service: Service) -> None:
    wait_for(service, "start")
    config = service.directory / "bridge.toml"
    good = config.read_text()
    config.write_text(good + "\n[log]\nlevel = 7\n")
    service.process.send_signal(signal.SIGHUP)
    assert "level" in wait_for(service, "reload", outcome="failed")["why"]
    config.write_text(good.replace('file = "audit.jsonl"', 'file = "audit.jsonl"\nmax_size = "64KiB"'))
    service.process.send_signal(signal.SIGHUP)
    wait_for(service, "reload", outcome="ok")
    config.write_text(good.replace('file = "audit.jsonl"', 'file = "missing/audit.jsonl"'))
    service.process.send_signal(signal.SIGHUP)
    reloads = eventually(lambda: len(found := lines(service, "reload", outcome="failed")) == 2 and found)
    assert "missing is not" in reloads[1]["why"] or "missing/audit" in reloads[1]["why"], reloads[1]
    config.write_text(good)
    service.process.kill()
    service.process.wait()
    assert len(lines(service, "start")) == 1
    made = streambridge("streams", "create", "offline", "-c", config)
    assert made.returncode == 0, made.stderr
    assert lines(service, "createMessageStream", on="offline", front_end="control"), "without the service too"
    service.start()
    eventually(lambda: len(lines(service, "start")) == 2)
    assert service.stop() == 0
    assert lines(service, "stop")[0]["why"] == "signal"


def test_what_a_kill_costs_is_seen_at_the_next_start(service: Service) -> None:
    wait_for(service, "start")
    for number in range(30):  # the last ten of them wait for the end of their minute
        ask(service, "deleteMessageStream", {"name": f"none-{number}"}, "ann", "a")
    wait_for(service, "deleteMessageStream", on="none-19")
    before = lines_of_all(service)
    service.process.kill()
    service.process.wait()
    path = service.directory / "audit.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole[:-3]) + whole[-3][:30])  # as if the disk had been late
    service.start()
    eventually(lambda: lines(service, "lost"))
    found = lines_of_all(service)[len(whole) - 3 :]
    assert lines(service, "lost")[0]["repeated"] == 21, "ten logins, ten deletions, and the torn line"
    assert [line["seq"] for line in found] == list(range(len(before) + 1, len(before) + 1 + len(found)))


def lines_of_all(service: Service) -> list[dict[str, Any]]:
    text = (service.directory / "audit.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_flood_of_wrong_logins_is_summed_up_and_leaves_the_files_small(service: Service) -> None:
    for number in range(500):
        with socket.create_connection(("127.0.0.1", service.mqtt_port)) as sock:
            sock.sendall(connect(f"c{number}", level=9))  # no such version of MQTT
            while sock.recv(100):
                pass
    ask(service, "listStreams", {}, "ann", "a")
    wait_for(service, "login", user="ann")
    assert service.stop() == 0
    refused = lines(service, "login", outcome="refused")
    assert sum(line.get("repeated", 1) for line in refused) == 500
    assert len(refused) == 21


def test_a_mistake_in_the_section_is_reported_with_line_and_remedy(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        '[gateway]\ndata_dir = "d"\n[audit]\nfile = "no/audit.jsonl"\njournald_socket = "none"\n'
    )
    result = streambridge("check", "-c", config)
    assert "c.toml:4" in result.stdout + result.stderr
    assert "create it for the service's user" in result.stdout + result.stderr
    config.write_text('[audit]\nfiles = 1\nmax_size = "1KiB"\nsync = true\n')
    result = streambridge("check", "-c", config)
    text = result.stdout + result.stderr
    assert "audit.files" in text
    assert "audit.max_size" in text
    assert "audit.sync" in text
