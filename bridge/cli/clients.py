"""`streambridge clients ...`: the MQTT clients of the running service, and their sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bridge.cli.changes import Sure, confirm
from bridge.cli.common import (
    DEFAULT_CONFIG,
    ConfigOption,
    DataDirOption,
    JsonOption,
    behave_in_pipes,
    echo,
    escaped,
    format_time,
    note,
    print_json,
    print_table,
)
from bridge.cli.operate import operate, place
from bridge.errors import StreamBridgeError
from bridge.streams.store import is_running

app = typer.Typer(
    help="List the MQTT clients of the running service, disconnect them, forget their sessions.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Client = Annotated[str, typer.Argument(metavar="CLIENT", help="The client id.")]


@app.command(
    "list",
    epilog="""\b
Examples:
  streambridge clients list
  streambridge clients list --json
""",
)
def list_clients(
    config: ConfigOption = DEFAULT_CONFIG, data_dir: DataDirOption = None, as_json: JsonOption = False
) -> None:
    """List the clients that are connected, and the sessions of those that are away.

    QUEUED counts messages that wait for the client. A session that is away ends at EXPIRES.
    """
    behave_in_pipes()
    clients = _ask(config, data_dir, "listClients")["clients"]
    if as_json:
        print_json(clients)
        return
    if not clients:
        echo("no clients")
        return
    print_table(
        ["CLIENT", "USER", "ADDRESS", "PROTOCOL", "SUBSCRIPTIONS", "QUEUED", "AWAY SINCE", "EXPIRES"],
        [
            [
                _shown(client["client"]),
                _shown(client["user"]),
                client["address"] or "-",
                client["protocol"] or "-",
                client["subscriptions"],
                client["queued"],
                "-" if client["left"] is None else format_time(client["left"]),
                "-" if client["expires"] is None else format_time(client["expires"]),
            ]
            for client in clients
        ],
    )


@app.command(
    epilog="""\b
Examples:
  streambridge clients disconnect pump-7
"""
)
def disconnect(client: Client, config: ConfigOption = DEFAULT_CONFIG, data_dir: DataDirOption = None) -> None:
    """Close a client's connection. It may come back; its session stays, its will is published."""
    connected = _ask(config, data_dir, "disconnectClient", client=client)["connected"]
    note(f"{_shown(client)}: {'disconnected' if connected else 'was not connected'}")


@app.command(
    epilog="""\b
Examples:
  streambridge clients forget pump-7 --yes
"""
)
def forget(
    client: Client, config: ConfigOption = DEFAULT_CONFIG, data_dir: DataDirOption = None, sure: Sure = False
) -> None:
    """Close a client's connection and drop its session: subscriptions, waiting messages, will.

    The client id is free then, for its user as for any other.
    """
    confirm(sure, f"Forget {_shown(client)} with its subscriptions and waiting messages?")
    _ask(config, data_dir, "forgetClient", client=client)
    note(f"{_shown(client)}: forgotten")


def _ask(config: Path, data_dir: Path | None, operation: str, **fields: Any) -> dict[str, Any]:
    where = place(config, data_dir)
    if not is_running(where.data_dir):
        raise StreamBridgeError(f"{where.data_dir}: the service does not run; only it knows its clients")
    return operate(where, operation, **fields)


def _shown(name: str | None) -> str:
    """A name that somebody else has chosen, safe for a terminal."""
    if name is None:
        return "-"
    return escaped(name) or ascii(name)
