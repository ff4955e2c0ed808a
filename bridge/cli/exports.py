"""`streambridge exports`: the progress of all exports.

It comes from the running service, or from the exports' cursors if the service is stopped.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bridge.cli import output
from bridge.cli.lookup import describe_stream, find
from bridge.cli.operate import statuses
from bridge.cli.options import DEFAULT_CONFIG, ConfigOption, DataDirOption, JsonOption, data_directory
from bridge.streams.reader import list_streams

app = typer.Typer()


@app.command(
    epilog="""\b
Examples:
  streambridge exports
  streambridge exports sensors --json
"""
)
def exports(
    name: Annotated[
        str | None, typer.Argument(metavar="STREAM", help="Only the exports of this stream.")
    ] = None,
    config: ConfigOption = DEFAULT_CONFIG,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the progress of each export, and its last error.

    EXPORTED is the number of the last message that the destination has. PENDING counts the messages after it.
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
        ["STREAM", "EXPORT", "KIND", "EXPORTED", "PENDING", "REJECTED", "LAST ATTEMPT", "STATE"],
        [
            [
                row["stream"],
                row["identifier"],
                row["kind"],
                row["lastExportedSequenceNumber"] if row["lastExportedSequenceNumber"] >= 0 else "-",
                row["pendingMessages"],
                row["rejectedMessages"],
                output.timestamp(row["lastExportTime"]) if row["lastExportTime"] else "-",
                "paused" if row["disabled"] else row["errorMessage"] or "ok",
            ]
            for row in rows
        ],
    )


def export_rows(described: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each export of a described stream, as --json prints it."""
    definition, storage = described["definition"], described["storageStatus"]
    configs = {
        item["identifier"]: (kind, bool(item.get("disabled")))
        for kind, items in definition["exportDefinition"].items()
        for item in items
    }
    rows = []
    for status in described["exportStatuses"]:
        kind, disabled = configs.get(status.export_config_identifier, ("-", False))
        done = max(status.last_exported_sequence_number, storage["oldestSequenceNumber"] - 1)
        rows.append(
            {
                "stream": described["name"],
                "identifier": status.export_config_identifier,
                "kind": kind,
                "disabled": disabled,
                "lastExportedSequenceNumber": status.last_exported_sequence_number,
                "pendingMessages": storage["newestSequenceNumber"] - done,
                "lastExportTime": status.last_export_time,
                "exportedMessages": status.exported_messages_count,
                "exportedBytes": status.exported_bytes_from_stream,
                "rejectedMessages": status.rejected_messages_count,
                "skippedMessages": status.skipped_messages_count,
                "errorMessage": status.error_message,
                "stopped": status.stopped,
            }
        )
    return rows
