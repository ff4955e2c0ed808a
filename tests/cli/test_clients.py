"""`streambridge clients ...` beside a running service."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import paho.mqtt.client as paho

from tests.cli.conftest import streambridge
from tests.http.conftest import Service, eventually, start

__all__ = ["start"]


def test_clients_are_listed_disconnected_and_forgotten(start: Callable[..., Service]) -> None:
    service = start("")

    def clients(*arguments: str) -> str:
        done = streambridge("clients", *arguments, "-c", service.directory / "bridge.toml")
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert clients("list") == "no clients\n"
    name = "evil\x1b]0;title\x07\u202e"
    client = paho.Client(paho.CallbackAPIVersion.VERSION2, name, clean_session=False)
    client.connect("127.0.0.1", service.mqtt_port)
    client.loop_start()
    try:
        eventually(lambda: json.loads(clients("list", "--json")))
        (listed,) = json.loads(clients("list", "--json"))
        assert (listed["client"], listed["address"], listed["user"]) == (name, "127.0.0.1", None)
        header, row = clients("list").splitlines()
        assert header.split()[:2] == ["CLIENT", "USER"]
        assert row.isprintable(), "names of strangers do not reach a terminal raw"
    finally:
        client.loop_stop()
    clients("disconnect", name)
    (away,) = json.loads(clients("list", "--json"))
    assert away["address"] is None
    assert away["expires"] - away["left"] == 7 * 24 * 3_600_000
    assert streambridge("clients", "forget", name, "-c", service.directory / "bridge.toml").returncode == 2
    clients("forget", name, "--yes")
    assert clients("list") == "no clients\n"
    done = streambridge("clients", "forget", "nobody", "--yes", "-c", service.directory / "bridge.toml")
    assert done.returncode == 1
    assert "no client 'nobody' is connected or has a session" in done.stderr


def test_topics_that_no_stream_takes_are_listed_with_the_line_that_stores_them(
    start: Callable[..., Service],
) -> None:
    service = start('[streams.readings]\ntopics = ["readings/#"]\n')

    def clients(*arguments: str) -> str:
        done = streambridge("clients", *arguments, "-c", service.directory / "bridge.toml")
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert clients("topics") == "none: a stream takes each message\n"
    client = paho.Client(paho.CallbackAPIVersion.VERSION2, "pump-7")
    client.connect("127.0.0.1", service.mqtt_port)
    client.loop_start()
    for number in range(3):
        client.publish(f"reading/pump-{number}", b"x", 1).wait_for_publish(60)
    try:
        (one,) = json.loads(clients("topics", "--json"))
        assert (one["topics"], one["client"], one["messages"]) == ("reading/+", "pump-7", 3)
        assert one["line"] == 'topics = ["reading/+"]'
        for command in ("topics", "list"):
            header, row = clients(command).splitlines()[-2:]
            assert header.split()[:4] == ["TOPICS", "WITHOUT", "A", "STREAM"]
            assert row.startswith("reading/+")
            assert row.endswith('topics = ["reading/+"]')
        assert service.json("/clients.json")["unmatched"] == [one]
    finally:
        client.loop_stop()


def test_without_a_running_service_clients_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "data" / "streams").mkdir(parents=True)
    done = streambridge("clients", "list", "--data-dir", tmp_path / "data")
    assert done.returncode == 1
    assert "the service is not running" in done.stderr
