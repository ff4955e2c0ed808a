"""`streambridge exports`: show the progress of exports; pause, resume and retry them.

The progress comes from the running service, or from the exports' cursors if the service is stopped.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from bridge.cli import output
from bridge.cli.lookup import describe_stream, find
from bridge.cli.operate import operate, statuses, target_of
from bridge.cli.options import (
    ConfigOption,
    DataDirOption,
    JsonOption,
    StreamArgument,
    complete_export,
    complete_stream,
    data_directory,
)
from bridge.cli.plain import ListsByDefault
from bridge.config.settings import DEFAULT_CONFIG
from bridge.errors import StreamBridgeError
from bridge.streams.reader import list_streams
from bridge.units import format_duration

app = typer.Typer(
    help="Show the progress of exports; pause, resume and retry them.",
    cls=ListsByDefault,
    rich_markup_mode=None,
)
ExportArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="EXPORT",
        help="The export's identifier; by default, all exports of the stream.",
        autocompletion=complete_export,
        show_default=False,
    ),
]


@app.command(
    "list",
    epilog="""\b
Examples:
  streambridge exports
  streambridge exports sensors --json
""",
)
def list_command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="STREAM", help="Only the exports of this stream.", autocompletion=complete_stream
        ),
    ] = None,
    config: ConfigOption = DEFAULT_CONFIG,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the progress of each export, and its last error. This is the default.

    EXPORTED is the number of the last message that the destination has. PENDING counts the messages after it,
    LOST those that were dropped before they were exported, which no retry brings back.
    """
    output.behave_in_pipes()
    directory = data_directory(config, data_dir)
    streams = list_streams(directory) if name is None else [find(directory, name)]
    rows = [
        row
        for meta in streams
        for row in export_rows(describe_stream(directory, meta, statuses(directory, meta.name)))
    ]
    if as_json:
        output.json(rows)
        return
    if not rows:
        output.echo("no exports")
        return
    output.table(
        ["STREAM", "EXPORT", "KIND", "EXPORTED", "PENDING", "REJECTED", "LOST", "LAST ATTEMPT", "STATE"],
        [
            [
                row["stream"],
                row["identifier"],
                row["kind"],
                row["lastExportedSequenceNumber"] if row["lastExportedSequenceNumber"] >= 0 else "-",
                row["pendingMessages"],
                row["rejectedMessages"],
                row["lostMessages"],
                output.timestamp(row["lastExportTime"]) if row["lastExportTime"] else "-",
                export_state(row),
            ]
            for row in rows
        ],
    )


@app.command(
    epilog="""\b
Examples:
  streambridge exports pause sensors lake
  streambridge exports pause sensors
"""
)
def pause(
    name: StreamArgument,
    export: ExportArgument = None,
    config: ConfigOption = DEFAULT_CONFIG,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Pause an export of a stream, or all of them, until you resume it.

    The batch in flight ends first. A paused export keeps its position and stays paused across restarts and
    reloads. `retention = "exported"` keeps the messages that it has not sent.
    """
    _apply("pauseExports", "paused", "it has no exports", name, export, config, data_dir, as_json=as_json)


@app.command(
    epilog="""\b
Examples:
  streambridge exports resume sensors lake
"""
)
def resume(
    name: StreamArgument,
    export: ExportArgument = None,
    config: ConfigOption = DEFAULT_CONFIG,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Resume a paused export of a stream, or all of them."""
    _apply("resumeExports", "resumed", "nothing was paused", name, export, config, data_dir, as_json=as_json)


@app.command(
    epilog="""\b
Examples:
  streambridge exports retry sensors lake
"""
)
def retry(
    name: StreamArgument,
    export: ExportArgument = None,
    config: ConfigOption = DEFAULT_CONFIG,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send the pending messages of an export, or of all exports of a stream, now.

    The export waits neither after a failure nor for a full batch. Also restarts an export that has stopped.
    Without EXPORT, paused and disabled exports and consumers are left out.
    """
    _apply("retryExports", "retried", "", name, export, config, data_dir, as_json=as_json)


def _apply(
    operation: str, done: str, nothing: str, name: str, export: str | None, *where: Any, as_json: bool
) -> None:
    """Carry out an operation and print for which exports; without one, print `nothing` or fail."""
    given = {} if export is None else {"export": export}
    names = operate(target_of(*where), operation, name=name, **given)["exports"]
    if not names and not nothing:
        raise StreamBridgeError(
            f"{name}: nothing to retry: each export is paused, disabled or a consumer; see "
            f"`streambridge exports {name}`, and resume one with `streambridge exports resume {name}`"
        )
    if as_json:
        output.json({"exports": names})
    elif names:
        output.echo(f"{done} {', '.join(names)}")
    else:
        output.note(f"{name}: {nothing}")


def export_rows(described: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each export of a described stream, as --json prints it."""
    definition, storage = described["definition"], described["storageStatus"]
    configs = {
        item["identifier"]: (kind, bool(item.get("disabled")))
        for kind, items in definition["exportDefinition"].items()
        for item in items
    }
    rows = []
    for status in described["exportStatuses"]:
        kind, disabled = configs.get(status.export_config_identifier, ("-", False))
        rows.append(
            {
                "stream": described["name"],
                "identifier": status.export_config_identifier,
                "kind": kind,
                "disabled": disabled,
                "paused": status.paused,
                "lastExportedSequenceNumber": status.last_exported_sequence_number,
                "exportedAhead": status.exported_ahead,
                "pendingMessages": status.pending(
                    storage["oldestSequenceNumber"], storage["newestSequenceNumber"] + 1
                ),
                "lastExportTime": status.last_export_time,
                "exportedMessages": status.exported_messages_count,
                "exportedBytes": status.exported_bytes_from_stream,
                "rejectedMessages": status.rejected_messages_count,
                "skippedMessages": status.skipped_messages_count,
                "lostMessages": status.lost_messages_count,
                "lastLost": status.last_lost,
                "lastLostTime": status.last_lost_time,
                "errorMessage": status.error_message,
                "errorSince": status.error_since,
                "failedAttempts": status.failed_attempts,
                "nextAttemptTime": status.next_attempt_time,
                "stopped": status.stopped,
            }
        )
    return rows


def lost_text(row: dict[str, Any]) -> str:
    """Return what was dropped before it was exported, such as `, 12 LOST, the last 3 to 14 at ...`."""
    if not row["lostMessages"]:
        return ""
    first, last = row["lastLost"]
    when = f" at {output.timestamp(row['lastLostTime'])}" if row["lastLostTime"] else ""
    return (
        f", {row['lostMessages']} LOST: dropped before they were exported, the last {first} to {last}{when}"
    )


def export_state(row: dict[str, Any]) -> str:
    """Return the state of an export, such as `retrying in 12s, 4 attempts failed, for 3m: <error>`."""
    now = time.time() * 1000
    error = f": {row['errorMessage']}" if row["errorMessage"] else ""
    if row["disabled"]:
        return "disabled"
    if row["paused"]:
        return f"paused; before{error}" if error else "paused"
    if row["stopped"]:
        return str(row["errorMessage"])
    if not error:
        wait = _span(row["nextAttemptTime"] - now) if row["pendingMessages"] else ""
        return f"ok, collects a batch, which is sent in {wait} at the latest" if wait else "ok"
    parts = ["failing"]
    if row["nextAttemptTime"]:
        wait = _span(row["nextAttemptTime"] - now)
        parts = [f"retrying in {wait}" if wait else "retrying now"]
    if row["failedAttempts"]:
        parts.append(f"{output.count(row['failedAttempts'], 'attempt')} failed")
    if row["errorSince"] and (age := _span(now - row["errorSince"])):
        parts.append(f"for {age}")
    return ", ".join(parts) + error


def _span(millis: float) -> str:
    """Return a duration in whole seconds; empty if it rounds to 0."""
    seconds = round(millis / 1000)
    return format_duration(1000 * seconds) if seconds > 0 else ""
