"""`streambridge streams ...` on the files of a data directory."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest

from bridge.export.cursor import Cursor, CursorFile, stream_directory
from bridge.model import Delivery, Limits, Persistence
from bridge.streams.reader import list_streams
from tests.cli.conftest import CHECKOUT, COMMAND, Fill, environment, streambridge
from tests.cli.terminal import Terminal

READINGS = [(f"sensors/{'ab'[n % 2]}/temperature", b'{"value":%d}' % n) for n in range(6)]


def lines(*arguments: str | Path) -> list[str]:
    done = streambridge(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_list_shows_each_stream_with_what_it_holds(fill: Fill) -> None:
    fill(READINGS)
    data = fill([], name="an empty one", topics=[])
    header, empty, sensors = lines("streams", "list", "--data-dir", data)
    assert header.split() == ["STREAM", "MESSAGES", "SIZE", "OLDEST", "NEWEST", "POWER", "CUT", "TOPICS"]
    assert empty.startswith("an empty one")
    assert empty.split("  ")[-1].strip() == "the last sync_interval", empty
    assert sensors.split()[:2] == ["sensors", "6"]
    assert sensors.split()[-6:] == ["0", "5", "the", "last", "sync_interval", "sensors/#"]


def test_list_and_describe_as_json_agree(fill: Fill) -> None:
    data = fill(READINGS)
    (listed,) = json.loads(streambridge("streams", "list", "--data-dir", data, "--json").stdout)
    described = json.loads(
        streambridge("streams", "describe", "sensors", "--data-dir", data, "--json").stdout
    )
    assert listed == described
    assert described["storageStatus"]["newestSequenceNumber"] == 5
    assert described["definition"]["strategyOnFull"] == "RejectNewData"
    assert described["newestIngestTime"] - described["oldestIngestTime"] == 5000


def test_describe_is_readable_and_shows_the_progress_of_each_export(fill: Fill) -> None:
    exports = {"s3": [{"identifier": "lake", "bucket": "b"}, {"identifier": "new", "bucket": "c"}]}
    data = fill(READINGS, export_definition=exports)
    (stream,) = list_streams(data)
    cursor = CursorFile(stream_directory(data, "sensors") / "lake.cursor")
    cursor.write(Cursor(epoch=stream.epoch, kind="s3", position=4, messages=4, error="no route to host"))
    cursor.close()
    rows = [line.split(maxsplit=1) for line in lines("streams", "describe", "sensors", "--data-dir", data)]
    facts = dict(rows)
    assert facts["numbers"] == "0 to 5"
    assert facts["oldest"].startswith("2026-01-01T12:00:00.000Z (")
    assert facts["directory"] == str(data / "streams" / "sensors")
    assert [value for key, value in rows if key == "export"] == [
        "lake: exported up to 3, 2 pending; failing: no route to host",
        "new: nothing exported yet, 6 pending",
    ]
    described = json.loads(
        streambridge("streams", "describe", "sensors", "--data-dir", data, "--json").stdout
    )
    assert described["exportStatuses"][0]["lastExportedSequenceNumber"] == 3


def test_a_stream_that_is_being_deleted_is_shown_as_such(fill: Fill) -> None:
    data = fill(READINGS, delivery=Delivery(deleting=True))
    facts = dict(
        line.split("  ", maxsplit=1) for line in lines("streams", "describe", "sensors", "--data-dir", data)
    )
    assert facts["state"].strip().startswith("being deleted, once its exports")
    listed = streambridge("streams", "list", "--data-dir", data)
    assert "sensors: being deleted" in listed.stderr
    fill(name="other", delivery=Delivery())
    assert "other" not in streambridge("streams", "list", "--data-dir", data).stderr
    assert not any(
        line.startswith("state") for line in lines("streams", "describe", "other", "--data-dir", data)
    )


def test_describe_shows_the_limits_that_are_set(fill: Fill) -> None:
    limits = Limits(max_messages=10, max_bytes=120_000, max_age_millis=1500, discard="new")
    data = fill(READINGS, limits=limits, retention="exported", deduplication_window_millis=120_000)
    facts = dict(
        line.split("  ", maxsplit=1) for line in lines("streams", "describe", "sensors", "--data-dir", data)
    )
    shown = {label: value.strip() for label, value in facts.items()}
    assert shown["max messages"] == "10"
    assert shown["max bytes"] == "117.2 KiB"
    assert shown["max age"] == "1.5s"
    assert shown["discard"] == "new"
    assert shown["retention"] == "exported"
    assert shown["deduplication"] == "2m"
    assert "max per topic" not in shown


# Clears the screen, in C0 and in C1; deletes; ends lines; turns the direction of reading.
STEERING = "\x1b[2J\x9b2J\x7f\r\n\x85\u2028\u202egnp.exe\u2066\u200f"


def test_what_a_destination_answers_steers_no_terminal(fill: Fill) -> None:
    data = fill([(f"a{STEERING}", b"x")], export_definition={"s3": [{"identifier": "lake", "bucket": "b"}]})
    (stream,) = list_streams(data)
    cursor = CursorFile(stream_directory(data, "sensors") / "lake.cursor")
    cursor.write(Cursor(epoch=stream.epoch, kind="s3", error=f"said {STEERING}"))
    cursor.close()
    for command in (["exports"], ["streams", "describe", "sensors"], ["streams", "read", "sensors"]):
        for options in ([], ["--json"]):
            shown = streambridge(*command, "--data-dir", data, *options)
            assert shown.returncode == 0
            assert all(line.isprintable() for line in shown.stdout.split("\n"))
            assert "gnp.exe" in shown.stdout
            if options:
                assert json.dumps(STEERING)[1:-1].replace("\x7f", r"\u007f") in shown.stdout
    failed = streambridge("streams", "describe", f"no{STEERING}", "--data-dir", data)
    assert failed.returncode == 66
    assert all(line.isprintable() for line in failed.stderr.split("\n"))


def test_read_prints_number_time_topic_and_payload(fill: Fill) -> None:
    data = fill(READINGS)
    assert lines("streams", "read", "sensors", "--data-dir", data, "--start", "2", "--count", "2") == [
        '2  2026-01-01T12:00:02.000Z  sensors/a/temperature  {"value":2}',
        '3  2026-01-01T12:00:03.000Z  sensors/b/temperature  {"value":3}',
    ]


def test_read_notes_where_to_continue_when_there_is_more(fill: Fill) -> None:
    data = fill(READINGS)
    done = streambridge("streams", "read", "sensors", "--data-dir", data, "--count", "4")
    assert len(done.stdout.splitlines()) == 4
    assert done.stderr == "sensors: there are more messages; continue with --start 4\n"


def test_the_recovery_of_the_documentation_reads_every_message_of_an_old_disk(fill: Fill) -> None:
    data = fill([("sensors/a", b"%d" % number) for number in range(250)])
    page = (CHECKOUT / "docs/howto/disaster-recovery.md").read_text()
    (command,) = re.findall(r"^sudo streambridge (streams read .*) >sensors\.jsonl$", page, re.MULTILINE)
    shown = lines(*command.replace("/mnt/old/streambridge", str(data)).split())
    assert [json.loads(line)["payload"] for line in shown] == [str(number) for number in range(250)]


def test_read_filters_by_topic_and_time(fill: Fill) -> None:
    data = fill(READINGS)
    shown = lines(
        "streams", "read", "sensors", "--data-dir", data,
        "--from-time", "2026-01-01T12:00:01.500Z", "--topic", "sensors/a/+", "--json",
    )  # fmt: skip
    assert [json.loads(line)["sequenceNumber"] for line in shown] == [2, 4]


def test_read_from_so_long_ago_as_given(fill: Fill) -> None:
    data = fill(READINGS)
    assert lines("streams", "read", "sensors", "--data-dir", data, "--from-time", "1s") == []
    assert len(lines("streams", "read", "sensors", "--data-dir", data, "--from-time", "36500d")) == 6
    assert lines("streams", "read", "sensors", "--data-dir", data, "--from-time", "10m ago") == []
    assert len(lines("streams", "read", "sensors", "--data-dir", data, "--from-time", "36500d ago")) == 6


def test_a_binary_payload_is_printed_in_base64_and_never_reaches_the_terminal(fill: Fill) -> None:
    data = fill([("a", b"\xff\x00"), ("a\x1b[2J", b"\x1b[2J"), ("a", b"two\nlines"), ("a", "grün".encode())])
    shown = [line.split("  ", 2)[2] for line in lines("streams", "read", "sensors", "--data-dir", data)]
    assert shown == ["a  base64:/wA=", r"'a\x1b[2J'  base64:G1sySg==", r"a  two\nlines", "a  grün"]


def test_messages_as_json_carry_every_byte(fill: Fill) -> None:
    fill([("a", b"\xff\x00")])
    data = fill([("b", b"text")], headers=msgspec.msgpack.encode({"retain": True, "type": "text/plain"}))
    first, second = map(json.loads, lines("streams", "read", "sensors", "--data-dir", data, "--json"))
    assert first == {"sequenceNumber": 0, "ingestTime": 1767268800000, "topic": "a", "payloadBase64": "/wA="}
    assert second["payload"] == "text"
    assert second["headers"] == {"retain": True, "type": "text/plain"}


def test_a_stream_that_does_not_exist_is_answered_with_one_that_does(fill: Fill) -> None:
    data = fill(READINGS)
    done = streambridge("streams", "read", "sensor", "--data-dir", data)
    assert (done.returncode, done.stdout) == (66, "")
    assert done.stderr == f"streambridge: {data}: there is no stream sensor; did you mean sensors?\n"


def test_damaged_data_is_never_printed(fill: Fill) -> None:
    data = fill(READINGS)
    (segment,) = (data / "streams" / "sensors").glob("*.seg")
    content = bytearray(segment.read_bytes())
    at = content.index(b'{"value":2}') + 9
    content[at] ^= 1
    segment.write_bytes(content)
    done = streambridge("streams", "read", "sensors", "--data-dir", data)
    assert len(done.stdout.splitlines()) == 2
    assert done.returncode == 65
    assert "sensors: later messages cannot be read: " in done.stderr
    assert "`streambridge repair`" in done.stderr
    assert streambridge("repair", data).returncode == 65
    done = streambridge("streams", "read", "sensors", "--data-dir", data)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["0", "1", "3", "4", "5"]
    assert (done.returncode, done.stderr) == (0, "sensors: 1 message lost to damage: number 2\n")
    assert "damage          1 message lost to damage: number 2" in lines(
        "streams", "describe", "sensors", "--data-dir", data
    )
    listed = streambridge("streams", "list", "--data-dir", data)
    assert listed.stdout.splitlines()[1].split()[:2] == ["sensors", "5"]
    assert listed.stderr == "sensors: 1 message lost to damage: number 2\n"


def test_a_stream_whose_definition_is_lost_is_not_denied(fill: Fill) -> None:
    fill(READINGS, name="broken one")
    data = fill(READINGS)
    for path in (data / "streams" / "broken%20one").glob("*"):
        if path.suffix not in (".seg", ".idx"):
            path.write_bytes(b"?")
    told = "both copies of its definition are damaged; stop the service and run `streambridge repair`"
    for command in ("read", "describe", "tail"):
        done = streambridge("streams", command, "broken one", "--data-dir", data)
        assert done.returncode == 65
        assert told in done.stderr
    listed = streambridge("streams", "list", "--data-dir", data)
    assert (listed.returncode, len(listed.stdout.splitlines())) == (65, 2)
    assert told in listed.stderr
    assert streambridge("repair", data).returncode == 65
    assert len(lines("streams", "read", "broken one", "--data-dir", data)) == 6


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--topic", "a/#/b"], "--topic 'a/#/b' is not a topic filter"),
        (["--from-time", "yesterday"], "--from-time 'yesterday' is not a time such as"),
        (["--from-time", "1d", "--start", "1"], "give either --start or --from-time"),
    ],
)
def test_wrong_options_are_wrong_usage(fill: Fill, arguments: list[str], told: str) -> None:
    done = streambridge("streams", "read", "sensors", "--data-dir", fill(), *arguments)
    assert done.returncode == 2
    assert told in done.stderr


def test_tail_shows_the_newest_and_then_what_arrives_until_ctrl_c(fill: Fill) -> None:
    data = fill(READINGS)
    command = [*COMMAND, "streams", "tail", "sensors", "-n", "2", "--data-dir", str(data), "--json"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as tail:
        assert tail.stdout is not None
        assert [json.loads(tail.stdout.readline())["sequenceNumber"] for _ in range(2)] == [4, 5]
        fill([("sensors/new", b"6")])
        assert json.loads(tail.stdout.readline())["payload"] == "6"
        tail.send_signal(signal.SIGINT)
        assert tail.wait(timeout=60) == 130


def test_a_reader_that_goes_away_ends_a_query_quietly(fill: Fill) -> None:
    data = fill([("sensors/a", b"x" * 1000)] * 200)
    command = [*COMMAND, "streams", "read", "sensors", "--data-dir", str(data)]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as read:
        assert read.stdout is not None
        assert read.stderr is not None
        read.stdout.readline()
        read.stdout.close()
        assert read.wait(timeout=60) == -signal.SIGPIPE
        assert read.stderr.read() == ""


def test_a_memory_stream_is_read_where_its_messages_are(fill: Fill) -> None:
    data = fill(READINGS, name="fast", persistence=Persistence.Memory)
    assert len(lines("streams", "read", "fast", "--data-dir", data)) == 6


def test_a_start_beyond_the_newest_message_is_said(fill: Fill) -> None:
    data = fill([("sensors/a", b"x")] * 3)
    done = streambridge("streams", "read", "sensors", "--start", "3", "--data-dir", data)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "sensors: there is no message from 3 on; the newest message is 2\n"
    fill([], name="quiet")
    done = streambridge("streams", "read", "quiet", "--start", "9", "--data-dir", data)
    assert done.stderr == "quiet: there is no message from 9 on; it is empty; 0 comes next\n"


def test_on_a_terminal_a_message_takes_one_line_and_in_a_pipe_it_is_whole(fill: Fill) -> None:
    data = fill([("sensors/a", b"x" * 5000), ("sensors/a", b"short")])
    with Terminal([*COMMAND, "streams", "read", "sensors", "--data-dir", data], columns=90) as terminal:
        assert terminal.end() == 0
    long, short = terminal.seen.splitlines()
    assert (len(long), long.endswith("xxx... (5000 bytes)")) == (90, True)
    assert short.endswith("  sensors/a  short")
    assert "x" * 5000 in streambridge("streams", "read", "sensors", "--data-dir", data).stdout
