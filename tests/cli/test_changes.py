"""The commands that change streams, and `exports`: on a running service and on a stopped one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import pytest

from bridge.access.users import hash_password
from bridge.export.cursor import Cursor, CursorFile, stream_directory
from bridge.greengrass.wire import Op
from bridge.streams.reader import list_streams
from bridge.streams.store import StreamStore
from tests.cli.conftest import Fill, streambridge
from tests.cli.test_run import Service
from tests.greengrass.harness import CONNECT, frame

CONFIG = """
[gateway]
data_dir = "data"
memory_dir = "memory"
[mqtt]
listen = ["tcp://127.0.0.1:0"]
[greengrass]
listen = ""
[http]
listen = ""
[streams.declared]
"""

Command = Callable[..., str]


@pytest.fixture(params=["running", "stopped"])
def on(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Command]:
    """Runs a command on a data directory whose service runs, or is stopped; returns what it prints."""
    config = tmp_path / "streambridge.toml"
    config.write_text(CONFIG)
    service = Service(config)
    service.wait_for("ready")
    if request.param == "stopped":
        assert service.stop() == 0

    def run_it(*arguments: str, code: int = 0, given: str | None = None) -> str:
        done = streambridge(*arguments, "-c", config, given=given)
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout

    yield run_it
    if request.param == "running":
        assert service.stop() == 0


def described(on: Command, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(on("streams", "describe", name, "--json"))
    return found


def test_a_stream_lives_its_whole_life_by_command(on: Command) -> None:
    settings = ("topics=['pumps/#']", "max_size=1MiB", "flush_on_write=true", "limits={max_messages = 4}")
    assert on("streams", "create", "pumps", *settings) == "created pumps\n"
    definition = described(on, "pumps")["definition"]
    assert definition["topics"] == ["pumps/#"]
    assert (definition["maxSize"], definition["streamSegmentSize"]) == (1 << 20, 1 << 17)
    assert definition["limits"]["maxMessages"] == 4
    assert on("streams", "append", "pumps", "one", "two") == "stored as 0 to 1\n"
    assert on("streams", "append", "pumps", given="three\n\nfour\nfive\n") == "stored as 2 to 4\n"
    shown = [json.loads(line) for line in on("streams", "read", "pumps", "--json").splitlines()]
    assert [row["payload"] for row in shown] == ["two", "three", "four", "five"]
    assert {row["topic"] for row in shown} == {"streams/pumps"}
    assert on("streams", "purge", "pumps", "--upto", "3", "--yes") == "messages dropped: 2\n"
    assert on("streams", "purge", "pumps", "--topic", "elsewhere/#", "--yes") == "messages dropped: 0\n"
    assert on(
        "streams",
        "update",
        "pumps",
        "max_size=2MiB",
        "export.s3=[{identifier='lake', bucket='bucket', disabled=true}]",
    )
    assert on("streams", "update", "pumps", "--reset", "limits", "time_to_live=10m")
    definition = described(on, "pumps")["definition"]
    assert (definition["maxSize"], definition["streamSegmentSize"]) == (2 << 20, 1 << 17)
    assert definition["topics"] == ["pumps/#"]
    assert definition["limits"] is None
    assert definition["timeToLiveMillis"] == 600_000
    assert definition["exportDefinition"]["s3"] == [
        {"identifier": "lake", "bucket": "bucket", "disabled": True}
    ]
    (export,) = json.loads(on("exports", "pumps", "--json"))
    assert (export["kind"], export["pendingMessages"], export["lastExportedSequenceNumber"]) == ("s3", 2, -1)
    assert on("streams", "delete", "pumps", "--yes") == "deleted pumps\n"
    assert on("streams", "list").splitlines()[1].split()[0] == "declared"


def test_what_is_both_set_and_reset_is_refused(on: Command) -> None:
    on("streams", "create", "pumps", "topics=['a/#']")
    for both in ("topics=['b/#']", "topics"), ("limits.max_messages=4", "limits"):
        setting, key = both
        assert f"{key} is both set and reset" in on(
            "streams", "update", "pumps", setting, "--reset", key, code=2
        )
    assert described(on, "pumps")["definition"]["topics"] == ["a/#"]


def test_a_key_with_a_dot_changes_one_entry_of_the_limits_or_tags(on: Command) -> None:
    limits = 'limits={max_messages = 4, max_age = "7d", discard = "new"}'
    on("streams", "create", "pumps", limits, 'tags={site = "north", line = "3"}')
    on("streams", "update", "pumps", "limits.max_age=1d", "limits.max_bytes=1MiB", "tags.line=four")
    definition = described(on, "pumps")["definition"]
    assert definition["tags"] == {"site": "north", "line": "four"}
    assert definition["limits"] == {
        "maxMessages": 4,
        "maxBytes": 1 << 20,
        "maxAgeMillis": 86_400_000,
        "maxMessagesPerTopic": None,
        "maxMessageSize": None,
        "discard": "new",
    }


def test_one_setting_of_one_export_is_changed_and_all_others_stay(on: Command) -> None:
    exports = (
        "export.http=[{identifier = 'a', uri = 'http://h/', headers = {x = '1', y = '2'}}]",
        "export.kinesis=[{identifier = 'b', kinesis_stream_name = 'k', disabled = true}]",
    )
    on("streams", "create", "pumps", *exports)
    on("streams", "update", "pumps", "--export", "a", "linger_millis=5s", "disabled=true")
    on("streams", "update", "pumps", "--export", "a", "headers.x=three", "export_format=JSON_BATCHED")
    http = {"identifier": "a", "uri": "http://h/", "headers": {"x": "three", "y": "2"}, "lingerMillis": 5000}
    assert described(on, "pumps")["definition"]["exportDefinition"] == {
        "http": [http | {"disabled": True, "exportFormat": "JSON_BATCHED"}],
        "kinesis": [{"identifier": "b", "kinesisStreamName": "k", "disabled": True}],
    }
    told = on(
        "streams", "update", "pumps", "--export", "a", "--reset", "linger_millis", "headers={}", "--json"
    )
    assert json.loads(told) == {"updated": "pumps"}
    (stored,) = described(on, "pumps")["definition"]["exportDefinition"]["http"]
    assert (stored["headers"], "lingerMillis" in stored) == ({}, False)
    assert "did you mean a" in on("streams", "update", "pumps", "--export", "aa", "disabled=true", code=2)
    assert "does not set it" in on("streams", "update", "pumps", "--export", "a", "--reset", "topics", code=2)
    assert "linger_millis" in on("streams", "update", "pumps", "--export", "a", "linger=5s", code=1)


def test_exports_are_paused_and_resumed_by_command_and_shown_so(on: Command) -> None:
    consumers = "export.consumer=[{identifier = 'one'}, {identifier = 'two'}]"
    on("streams", "create", "jobs", consumers)
    assert on("exports", "pause", "jobs", "two") == "paused two\n"
    states = {row["identifier"]: row["paused"] for row in json.loads(on("exports", "jobs", "--json"))}
    assert states == {"one": False, "two": True}
    assert [line.split()[-1] for line in on("exports", "list", "jobs").splitlines()[1:]] == ["ok", "paused"]
    assert "two: nothing exported yet, 0 pending; paused" in on("streams", "describe", "jobs")
    assert json.loads(on("exports", "resume", "jobs", "--json")) == {"exports": ["two"]}
    assert on("exports", "resume", "jobs") == ""
    assert not any(row["paused"] for row in json.loads(on("exports", "jobs", "--json")))
    assert "no export 'three'" in on("exports", "pause", "jobs", "three", code=66)
    assert "is a consumer" in on("exports", "retry", "jobs", "one", code=1)
    on("exports", "pause", "jobs", "two")
    assert "nothing to retry: each export is paused" in on("exports", "retry", "jobs", code=1)
    assert "no stream nothing" in on("exports", "pause", "nothing", code=66)


@pytest.mark.parametrize("on", ["stopped"], indirect=True)
def test_a_segment_size_is_measured_by_the_size_that_the_stream_has(on: Command) -> None:
    on("streams", "create", "pumps", "max_size=1GiB")
    on("streams", "update", "pumps", "segment_size=512MiB")
    assert described(on, "pumps")["definition"]["streamSegmentSize"] == 512 << 20
    too_large = on("streams", "update", "pumps", "segment_size=1536MiB", code=78)
    assert "is larger than max_size; make it at most that" in too_large
    too_large = on("streams", "update", "pumps", "segment_size=512MiB", "--reset", "max_size", code=78)
    assert "is larger than max_size; make it at most that" in too_large
    assert "segment_size" in on("streams", "update", "pumps", "--reset", "max_size", code=1)
    on("streams", "update", "pumps", "max_size=1MiB", "--reset", "segment_size")
    definition = described(on, "pumps")["definition"]
    assert (definition["maxSize"], definition["streamSegmentSize"]) == (1 << 20, 1 << 17)
    on("streams", "update", "pumps", "--reset", "max_size", "--reset", "segment_size")
    definition = described(on, "pumps")["definition"]
    assert (definition["maxSize"], definition["streamSegmentSize"]) == (256 << 20, 16 << 20)


def test_many_large_messages_are_appended_in_requests_that_the_service_takes(on: Command) -> None:
    line = "x" * 70_000
    told = on("streams", "append", "declared", given=f"{line}\n" * 1000)
    numbers = [re.fullmatch(r"stored as (\d+) to (\d+)", group) for group in told.splitlines()]
    assert [int(group[1]) for group in numbers if group] == [0, *(int(g[2]) + 1 for g in numbers[:-1] if g)]
    assert numbers[-1] is not None
    assert numbers[-1][2] == "999"
    assert described(on, "declared")["messages"] == 1000


@pytest.mark.parametrize("on", ["running"], indirect=True)
def test_a_message_that_is_too_large_for_a_request_is_refused_as_that(on: Command) -> None:
    on("streams", "append", "declared", given="one\n")
    told = on("streams", "append", "declared", given="x" * (65 << 20), code=1)
    assert "a request may have at most 67108864 bytes; send smaller messages" in told
    assert described(on, "declared")["messages"] == 1


@pytest.mark.parametrize("on", ["stopped"], indirect=True)
def test_mistakes_are_named_with_a_remedy_and_change_nothing(on: Command) -> None:
    assert "exists already" in on("streams", "create", "declared", code=1)
    assert "did you mean `max_size`?" in on("streams", "create", "x", "max_siz=1GiB", code=78)
    assert "streams.x.topics[0]: 'a/#/b' is not a topic filter" in on(
        "streams", "create", "x", "topics=['a/#/b']", code=1
    )
    assert "is not KEY=VALUE" in on("streams", "create", "x", "max_size", code=2)
    assert "there is no exporter of kind 'kinesi'; did you mean 'kinesis'?" in on(
        "streams", "create", "x", "export.kinesi=[{identifier = 'k'}]", code=1
    )
    for command in (
        ("append", "x", "p"),
        ("delete", "x", "--yes"),
        ("purge", "x", "-y"),
        ("update", "x", "topics=[]"),
    ):
        assert "there is no stream x; the streams are: declared" in on("streams", *command, code=66)
    assert "give at least one setting" in on("streams", "update", "declared", code=2)
    assert "no such setting" in on("streams", "update", "declared", "--reset", "colour", code=2)
    assert "confirm it with --yes" in on("streams", "purge", "declared", code=2)
    assert "confirm it with --yes" in on("streams", "delete", "declared", code=2)
    assert "is not a topic filter" in on("streams", "purge", "declared", "--topic", "a/#/b", "-y", code=1)
    assert on("streams", "list").splitlines()[1].split()[0] == "declared"


def test_a_change_of_a_declared_stream_notes_that_the_declaration_wins(tmp_path: Path) -> None:
    config = tmp_path / "streambridge.toml"
    config.write_text(CONFIG)
    (tmp_path / "data").mkdir()
    assert streambridge("streams", "create", "declared", "-c", config).returncode == 0
    done = streambridge("streams", "update", "declared", "flush_on_write=true", "-c", config)
    assert done.stdout == "updated declared\n"
    assert "declares declared; the next start or reload applies that definition again" in done.stderr


def test_a_directory_that_another_process_has_open_is_left_alone(fill: Fill, tmp_path: Path) -> None:
    data = fill([])

    async def beside_another() -> subprocess.CompletedProcess[str]:
        store = StreamStore(data, tmp_path / "memory", on_event=lambda *_: None)
        try:
            return streambridge("streams", "append", "sensors", "x", "--data-dir", data)
        finally:
            await store.close()

    done = asyncio.run(beside_another())
    assert done.returncode == 75
    assert streambridge("streams", "append", "sensors", "x", "--data-dir", data).returncode == 0


def test_exports_shows_the_progress_and_the_error_of_each_export(fill: Fill) -> None:
    exports = {
        "s3": [{"identifier": "lake", "bucket": "b"}],
        "kinesis": [{"identifier": "live", "kinesisStreamName": "k", "disabled": True}],
    }
    data = fill([("sensors/a", b"x")] * 6, export_definition=exports)
    assert fill([], name="quiet") == data
    (stream,) = (meta for meta in list_streams(data) if meta.name == "sensors")
    cursor = CursorFile(stream_directory(data, "sensors") / "lake.cursor")
    stuck = Cursor(
        epoch=stream.epoch, kind="s3", position=4, messages=4, rejected=1, error="no route to host"
    )
    cursor.write(stuck)
    cursor.close()
    header, lake, live = streambridge("exports", "--data-dir", data).stdout.splitlines()
    assert header.split() == [
        "STREAM", "EXPORT", "KIND", "EXPORTED", "PENDING", "REJECTED", "LOST", "LAST", "ATTEMPT", "STATE"
    ]  # fmt: skip
    assert lake.split()[:7] == ["sensors", "lake", "s3", "3", "2", "1", "0"]
    assert lake.endswith("no route to host")
    assert live.split() == ["sensors", "live", "kinesis", "-", "6", "0", "0", "-", "disabled"]
    assert streambridge("exports", "quiet", "--data-dir", data).stdout == "no exports\n"
    assert streambridge("exports", "nowhere", "--data-dir", data).returncode == 66


def test_the_service_logs_which_client_changed_which_stream(tmp_path: Path) -> None:
    config, users = tmp_path / "streambridge.toml", tmp_path / "users"
    users.write_text("ann:" + hash_password(b"secret") + "\n")
    users.chmod(0o600)
    text = CONFIG.replace("[mqtt]", f'[mqtt]\nusers_file = "{users}"')
    config.write_text(text.replace('[greengrass]\nlisten = ""', '[greengrass]\nlisten = "127.0.0.1:0"'))
    service = Service(config)
    greengrass, mqtt = service.wait_for(r"ready.*tcp://127.0.0.1:(\d+).*mqtt://127.0.0.1:(\d+)").groups()
    here = ("-c", config)

    for arguments, what in (
        (("create", "pumps"), "created"),
        (("update", "pumps", "max_size=2GiB"), "updated"),
        (("append", "pumps", "1", "2", "3"), None),
        (("purge", "pumps", "--yes"), "purged, messages dropped: 3"),
        (("delete", "pumps", "--yes"), "deleted"),
    ):
        assert streambridge("streams", *arguments, *here).returncode == 0
        if what:
            service.wait_for(rf'info bridge\.\S+ msg="stream {what}" stream=pumps by="a command"')

    for user, who in (("ann", "user 'ann'"), (None, "anonymous")):
        client = paho.Client(paho.CallbackAPIVersion.VERSION2, "panel")
        if user:
            client.username_pw_set(user, "secret")
        client.connect("127.0.0.1", int(mqtt))
        client.loop_start()
        name = f"by-{user}"
        request = {"definition": {"name": name, "strategyOnFull": 1}}
        client.publish("streambridge/panel/createMessageStream", json.dumps(request), 1)
        service.wait_for(rf"stream created\" stream={name} by=\"client 'panel' \({who}\)\"")
        client.disconnect()
        client.loop_stop()

    with socket.create_connection(("127.0.0.1", int(greengrass)), timeout=30) as sdk:
        request = {"requestId": "d", "name": "by-ann"}
        sdk.sendall(b"\x01" + frame(Op.CONNECT, CONNECT) + frame(Op.DELETE, request))
        service.wait_for(r"stream deleted\" stream=by-ann by=\"127\.0\.0\.1:\d+ \(user 'greengrass'\)\"")
    assert service.stop() == 0


def test_deleting_a_declared_stream_notes_that_it_is_created_again(on: Command, tmp_path: Path) -> None:
    done = streambridge("streams", "delete", "declared", "--yes", "-c", tmp_path / "streambridge.toml")
    assert done.stdout == "deleted declared\n"
    assert "declares declared; the next start or reload creates it again" in done.stderr
    assert "not stored" in done.stderr
    on("streams", "create", "other")
    done = streambridge("streams", "delete", "other", "--yes", "-c", tmp_path / "streambridge.toml")
    assert "declares" not in done.stderr


@pytest.mark.parametrize("running", [True, False])
def test_what_a_full_disk_refuses_names_the_place_and_the_remedy(
    tmp_path: Path, mounted: Path, running: bool
) -> None:
    config = tmp_path / "streambridge.toml"
    config.write_text(CONFIG.replace('"data"', f'"{mounted}/data"'))
    service = Service(config)
    service.wait_for("ready")
    if not running:
        assert service.stop() == 0
    with (mounted / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(512))
    for arguments, what in (
        (("create", "new"), "stream 'new' cannot be created in"),
        (("update", "declared", "max_size=2GiB"), "stream 'declared' cannot be updated in"),
    ):
        done = streambridge("streams", *arguments, "-c", config)
        assert done.returncode == 1
        assert f"{what} {mounted}/data" in done.stderr
        assert ": No space left on device; nothing was changed. Free space there" in done.stderr
        assert "Errno" not in done.stderr
    if running:
        assert service.stop() == 0


def test_a_setting_that_is_given_twice_is_refused(on: Command) -> None:
    for settings in (("max_size=1GiB", "max_size=2GiB"), ("limits.max_messages=1", "limits.max_messages=2")):
        key = settings[0].partition("=")[0]
        assert f"{key} is given twice" in on("streams", "create", "y", *settings, code=2)
    on("streams", "create", "y", "limits.max_messages=1", "limits.max_bytes=2048")


def test_messages_of_a_consumer_are_fetched_and_acknowledged(on: Command) -> None:
    on("streams", "create", "prints", """export.consumer=[{identifier = "printers", max_deliveries = 9}]""")
    on("streams", "append", "prints", "a", "b", "c")
    first = on("streams", "fetch", "prints", "printers", "--wait", "1s")
    assert first.startswith("0  ")
    assert first.endswith("  streams/prints  a\n")
    found = [
        json.loads(line)
        for line in on("streams", "fetch", "prints", "printers", "-n", "9", "--json").splitlines()
    ]
    assert [(one["sequenceNumber"], one["payload"], one["deliveries"]) for one in found] == [
        (1, "b", 1),
        (2, "c", 1),
    ]
    assert "no message for printers now" in on("streams", "fetch", "prints", "printers", code=1)
    on("streams", "ack", "prints", "printers", "0", "--nack", "2")
    assert "delivered 2 times" in on("streams", "fetch", "prints", "printers")
    on(
        "streams",
        "ack",
        "prints",
        "printers",
        "--terminate",
        "1",
        "--reason",
        "no printer",
        "--in-progress",
        "2",
    )
    (row,) = (json.loads(line) for line in on("exports", "prints", "--json").splitlines()[:1])
    (row,) = row
    assert (row["kind"], row["lastExportedSequenceNumber"], row["rejectedMessages"]) == ("consumer", 1, 1)
    assert "was not delivered" in on("streams", "ack", "prints", "printers", "7", code=1)
    assert "has no consumer 'x'; its consumers are: printers" in on(
        "streams", "fetch", "prints", "x", code=66
    )
    assert "give at least one number" in on("streams", "ack", "prints", "printers", code=2)
