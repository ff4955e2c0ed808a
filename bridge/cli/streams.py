"""`streambridge streams ...`: show and change the streams of a data directory.

These commands only read files, whether the service runs or not. Those that change something are in `changes`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from bridge import topics
from bridge.cli import changes, output
from bridge.cli.exports import export_rows, export_state, lost_text
from bridge.cli.lookup import (
    damaged,
    describe_stream,
    find,
    messages_of,
    read_messages,
    unreadable_end,
)
from bridge.cli.operate import plugins, statuses
from bridge.cli.options import (
    ConfigOption,
    DataDirOption,
    JsonOption,
    KeyFileOption,
    StreamArgument,
    data_directory,
    keys_of,
    known_config,
)
from bridge.config.render import stream_table
from bridge.config.settings import DEFAULT_CONFIG
from bridge.errors import StreamNotFound
from bridge.model import MAX_INT64, MessageStreamDefinition
from bridge.operations.definitions import power_cut, without_secrets
from bridge.streams.reader import StreamMeta, StreamReader, first_since, list_damaged, list_streams
from bridge.streams.segment import StreamMessage
from bridge.units import format_duration, format_size, parse_time

_EARLIEST = 1_735_689_600_000  # ms; an epoch before 2025 comes from a clock that was not set
DELETING = "being deleted, once its exports and consumers have passed all of its messages"
POLL = 0.2  # seconds between two reads of `tail`; each costs one stat and one read

app = typer.Typer(
    help="Show and change streams, whether the service runs or not.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


TopicOption = Annotated[
    str | None,
    typer.Option("--topic", help="Only messages whose topic matches this filter.", metavar="FILTER"),
]


@app.callback()
def _queries(context: typer.Context) -> None:
    # The others also write to the service, and must say so if it ends meanwhile.
    if context.invoked_subcommand in ("list", "describe", "read", "tail"):
        output.behave_in_pipes()


@app.command("list")
def list_command(
    config: ConfigOption = DEFAULT_CONFIG, data_dir: DataDirOption = None, as_json: JsonOption = False
) -> None:
    """List the streams."""
    directory = data_directory(config, data_dir)
    stored = list_streams(directory)
    described = [describe_stream(directory, meta) for meta in stored]
    synced = _sync_interval(config, data_dir)
    if as_json:
        output.json(described)
    else:
        output.table(
            ["STREAM", "MESSAGES", "SIZE", "OLDEST", "NEWEST", "POWER CUT", "TOPICS"],
            [
                [
                    info["name"],
                    info["messages"],
                    format_size(info["storageStatus"]["totalBytes"]),
                    info["storageStatus"]["oldestSequenceNumber"] if info["messages"] else "-",
                    info["storageStatus"]["newestSequenceNumber"] if info["messages"] else "-",
                    power_cut(_definition(meta), synced),
                    " ".join(info["definition"]["topics"]),
                ]
                for meta, info in zip(stored, described, strict=True)
            ],
        )
        for info in described:
            _note_lost(info["name"], info["lost"])
            if _is_deleting(info["definition"]):
                output.note(f"{info['name']}: {DELETING}")
    broken = list_damaged(directory)
    for name in broken:
        output.note(damaged(name))
    if broken:
        raise typer.Exit(output.ExitCode.DAMAGED)


def _definition(meta: StreamMeta) -> MessageStreamDefinition:
    return msgspec.json.decode(meta.definition, type=MessageStreamDefinition)


def _sync_interval(config: Path, data_dir: Path | None) -> int | None:
    """The interval in ms, unless the command was given a data directory instead of a configuration."""
    return None if data_dir is not None else known_config(config).gateway.sync_interval


def _is_deleting(definition: Mapping[str, Any]) -> bool:
    return bool((definition.get("delivery") or {}).get("deleting"))


def _created(epoch: int) -> str:
    """Format the time of creation, from the epoch; unknown if the clock was not set then."""
    if _EARLIEST <= epoch <= time.time() * 1000:
        return output.timestamp(epoch)
    return f"unknown: the clock was not synchronised (epoch {epoch})"


@app.command()
def describe(
    name: StreamArgument,
    config: ConfigOption = DEFAULT_CONFIG,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
    as_toml: Annotated[
        bool, typer.Option("--toml", help="Print the definition as tables for the configuration.")
    ] = False,
) -> None:
    """Show a stream's definition and contents.

    The `definition` of --json may be sent in a request as it is.
    """
    directory = data_directory(config, data_dir)
    meta = find(directory, name)
    if as_toml:
        shown = without_secrets(_definition(meta))
        for line in stream_table(shown, plugins(config, data_dir).exporters).splitlines():
            output.echo(line)
        return
    info = describe_stream(directory, meta, statuses(directory, name))
    if as_json:
        if exports := info["definition"]["exportDefinition"]:
            info["definition"]["exportDefinition"] = plugins(config, data_dir).named(exports)
        output.json(info)
        return
    storage, definition = info["storageStatus"], info["definition"]
    newest = storage["newestSequenceNumber"]
    exports = [
        f"{row['identifier']}: "
        + (
            f"exported up to {row['lastExportedSequenceNumber']}"
            if row["lastExportedSequenceNumber"] >= 0
            else "nothing exported yet"
        )
        + "".join(f", and {first} to {last}" for first, last in row["exportedAhead"][-3:])
        + f", {row['pendingMessages']} pending"
        + (f", {row['rejectedMessages']} rejected" if row["rejectedMessages"] else "")
        + (f", {row['skippedMessages']} skipped" if row["skippedMessages"] else "")
        + lost_text(row)
        + (f"; {state}" if (state := export_state(row)) not in ("ok", "disabled") else "")
        + ("; disabled: does not hold data back" if row["disabled"] else "")
        for row in export_rows(info)
    ]
    now = time.time() * 1000
    output.facts(
        [
            ("name", info["name"]),
            *((("description", definition["description"]),) if definition["description"] else ()),
            *(((f"tag {tag}", value)) for tag, value in definition["tags"].items()),
            *((("state", DELETING),) if _is_deleting(definition) else ()),
            ("created", _created(info["epoch"])),
            ("messages", info["messages"]),
            (
                "numbers",
                f"{storage['oldestSequenceNumber']} to {newest}"
                if info["messages"]
                else f"none; the next one is {newest + 1}",
            ),
            *(
                (label, f"{output.timestamp(info[key])} ({format_duration(int(now - info[key]))} ago)")
                for label, key in (("oldest", "oldestIngestTime"), ("newest", "newestIngestTime"))
                if info[key] is not None
            ),
            ("size", f"{format_size(storage['totalBytes'])} of {format_size(definition['maxSize'])}"),
            ("when full", definition["strategyOnFull"]),
            *_limits(definition),
            ("persistence", definition["persistence"]),
            ("at a power cut", "costs " + power_cut(_definition(meta), _sync_interval(config, data_dir))),
            ("encryption", info["encryption"].text),
            ("topics", " ".join(definition["topics"]) or "-"),
            *((("damage", output.lost_to_damage(info["lost"])),) if info["lost"] else ()),
            *(("export", export) for export in exports),
            ("directory", info["directory"]),
        ]
    )


def _limits(definition: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the retention, the deduplication window, and the limits other than the size, if they are set."""
    limits = definition["limits"] or {}
    facts = [("retention", definition["retention"])] if definition["retention"] != "limits" else []
    facts += [
        (label, format_duration(values[key]))
        for label, values, key in (
            ("time to live", definition, "timeToLiveMillis"),
            ("deduplication", definition, "deduplicationWindowMillis"),
            ("max age", limits, "maxAgeMillis"),
        )
        if values.get(key) is not None
    ]
    facts += [
        (label, shown(limits[key]))
        for label, key, shown in (
            ("max messages", "maxMessages", str),
            ("max bytes", "maxBytes", format_size),
            ("max per topic", "maxMessagesPerTopic", str),
            ("max message size", "maxMessageSize", format_size),
        )
        if limits.get(key) is not None
    ]
    return facts + ([("discard", "new")] if limits.get("discard") == "new" else [])


@app.command(
    epilog="""\b
Examples:
  streambridge streams read sensors --count 5
  streambridge streams read sensors --from-time 10m --topic 'sensors/+/temperature'
  streambridge streams read sensors --start 1000 --json | jq .payload
  streambridge streams read sensors --all --json >sensors.jsonl
"""
)
def read(
    name: StreamArgument,
    start: Annotated[
        int | None,
        typer.Option(
            "--start", min=0, metavar="NUMBER", help="The first sequence number.", show_default="the oldest"
        ),
    ] = None,
    count: Annotated[
        int, typer.Option("--count", "-n", min=1, metavar="NUMBER", help="Print at most this many messages.")
    ] = 100,
    everything: Annotated[bool, typer.Option("--all", help="Print all messages; ignore --count.")] = False,
    from_time: Annotated[
        str | None,
        typer.Option(
            "--from-time",
            metavar="TIME",
            help="Start at a time: ISO 8601 (local time without a zone), or relative, such as 10m.",
        ),
    ] = None,
    topic: TopicOption = None,
    config: ConfigOption = DEFAULT_CONFIG,
    data_dir: DataDirOption = None,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print messages: number, time, topic and payload; with --json one object per line.

    A payload that is not printable text is printed in base64. On a terminal, long payloads are shortened,
    but not in a pipe or with --json.
    """
    if start is not None and from_time is not None:
        raise typer.BadParameter("give either --start or --from-time, not both")
    _check_filter(topic)
    since = None if from_time is None else _parse_time(from_time)
    directory = data_directory(config, data_dir)
    keys = keys_of(config, directory, key_file)
    with closing(StreamReader(messages_of(directory, name), keys=keys)) as reader:
        oldest, end = reader.bounds()
        if since is not None:
            start = first_since(reader, oldest, end, since)
        elif start is None:
            start = oldest
        elif start < oldest:
            output.note(f"{name}: messages before {oldest} are no longer stored")
        elif start >= end:
            newest = f"the newest message is {end - 1}" if oldest < end else f"it is empty; {end} comes next"
            output.note(f"{name}: there is no message from {start} on; {newest}")
        shown, more = 0, None
        for message in read_messages(reader, start, end):
            if topic is None or topics.matches(topic, _topic(message)):
                if shown == count and not everything:
                    more = message.sequence_number
                    break
                output.message(message, as_json=as_json)
                shown += 1
        _note_lost(name, reader.lost(), start, end if more is None else more)
    if more is not None:
        output.note(f"{name}: there are more messages; continue with --start {more}")
    elif problems := unreadable_end(directory, name):
        for problem in problems:
            output.note(f"{name}: later messages cannot be read: {problem}; run `streambridge repair`")
        raise typer.Exit(output.ExitCode.DAMAGED)


def _note_lost(name: str, lost: Sequence[tuple[int, int]], start: int = 0, end: int = MAX_INT64) -> None:
    """Print which of the numbers start..end-1 were lost to damage."""
    parts = [(max(first, start), min(last, end - 1)) for first, last in lost if first < end and last >= start]
    if parts:
        output.note(f"{name}: {output.lost_to_damage(parts)}")


@app.command(
    epilog="""\b
Examples:
  streambridge streams tail sensors
  streambridge streams tail sensors --count 0 --topic 'sensors/+/temperature' --json
"""
)
def tail(
    name: StreamArgument,
    count: Annotated[
        int,
        typer.Option("--count", "-n", min=0, metavar="NUMBER", help="Begin with this many old messages."),
    ] = 10,
    topic: TopicOption = None,
    config: ConfigOption = DEFAULT_CONFIG,
    data_dir: DataDirOption = None,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the newest messages, then new ones as they arrive, until Ctrl-C."""
    _check_filter(topic)
    found = data_directory(config, data_dir)
    directory, keys = messages_of(found, name), keys_of(config, found, key_file)
    with closing(StreamReader(directory, keys=keys)) as reader:
        oldest, end = reader.bounds()
        position = max(oldest, end - count)
        while directory.is_dir():
            for message in read_messages(reader, position, end):
                if topic is None or topics.matches(topic, _topic(message)):
                    output.message(message, as_json=as_json)
            sys.stdout.flush()
            position = end
            time.sleep(POLL)
            end = max(reader.bounds()[1], position)
    raise StreamNotFound(f"{name}: the stream was deleted")


def _parse_time(text: str) -> int:
    try:
        return parse_time(text)
    except ValueError as error:
        raise typer.BadParameter(f"--from-time {text!r} {error}") from None


def _check_filter(topic: str | None) -> None:
    if topic is not None and (mistake := topics.filter_mistake(topic)) is not None:
        raise typer.BadParameter(f"--topic {mistake}")


def _topic(message: StreamMessage) -> str:
    return message.topic.decode(errors="replace")


app.add_typer(changes.app)
