"""`streambridge clients ...`: the MQTT clients of the running service, and their sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bridge.cli import output
from bridge.cli.changes import Sure, confirm
from bridge.cli.operate import operate, target_of
from bridge.cli.options import ConfigOption, DataDirOption, JsonOption
from bridge.config.settings import DEFAULT_CONFIG
from bridge.errors import StreamBridgeError
from bridge.streams.store import is_running

app = typer.Typer(
    help="List, disconnect and forget MQTT clients of the running service.",
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
    """List connected clients, and the sessions of disconnected ones.

    QUEUED counts the messages that are queued for the client. A disconnected client's session ends at
    EXPIRES. Below them are the topics that no stream takes: see `streambridge clients topics`.
    """
    output.behave_in_pipes()
    found = _ask(config, data_dir, "listClients")
    clients = found["clients"]
    if as_json:
        output.json(clients)
        return
    if not clients:
        output.echo("no clients")
        _show_topics(found["unmatched"])
        return
    output.table(
        ["CLIENT", "USER", "ADDRESS", "PROTOCOL", "SUBSCRIPTIONS", "QUEUED", "DISCONNECTED", "EXPIRES"],
        [
            [
                _shown(client["client"]),
                _shown(client["user"]),
                client["address"] or "-",
                client["protocol"] or "-",
                client["subscriptions"],
                client["queued"],
                "-" if client["left"] is None else output.timestamp(client["left"]),
                "-" if client["expires"] is None else output.timestamp(client["expires"]),
            ]
            for client in clients
        ],
    )
    _show_topics(found["unmatched"])


@app.command(
    epilog="""\b
Examples:
  streambridge clients topics
  streambridge clients topics --json
"""
)
def topics(
    config: ConfigOption = DEFAULT_CONFIG, data_dir: DataDirOption = None, as_json: JsonOption = False
) -> None:
    """List the topics on which clients publish and that no stream takes.

    CLIENT has sent the last message. The line of the last column, in a stream of the configuration, stores
    them. The numbers count since the start of the service.
    """
    output.behave_in_pipes()
    found = _ask(config, data_dir, "listClients")["unmatched"]
    if as_json:
        output.json(found)
    elif found:
        _show_topics(found)
    else:
        output.echo("none: a stream takes each message")


def _show_topics(unmatched: list[dict[str, Any]]) -> None:
    if unmatched:
        output.table(
            ["TOPICS WITHOUT A STREAM", "CLIENT", "MESSAGES", "LAST", "DELIVERED", "STORED BY"],
            [
                [
                    _shown(one["topics"]),
                    _shown(one["client"]),
                    one["messages"],
                    output.timestamp(one["last"]),
                    "yes" if one["delivered"] else "no",
                    _shown(one["line"]),
                ]
                for one in unmatched
            ],
        )


@app.command(
    epilog="""\b
Examples:
  streambridge clients disconnect pump-7
  streambridge clients disconnect --user ann --address 192.0.2.0/24
  streambridge clients disconnect --certificate 5E:0D:9A
"""
)
def disconnect(
    client: Annotated[str | None, typer.Argument(metavar="[CLIENT]", help="The client id.")] = None,
    user: Annotated[str | None, typer.Option(help="All clients of a user.", show_default=False)] = None,
    certificate: Annotated[
        str | None,
        typer.Option(
            metavar="DIGITS",
            help="Clients with a certificate: its SHA-256 fingerprint or serial number.",
            show_default=False,
        ),
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Clients at an address or in a network.", show_default=False)
    ] = None,
    config: ConfigOption = DEFAULT_CONFIG,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Close the connections of a client, or of all clients that match the options.

    Sessions stay, and wills are published. Clients may connect again: to keep them out, first change the
    users file, or the list in crl_file.
    """
    given = {"client": client, "user": user, "certificate": certificate, "address": address}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        raise typer.BadParameter("give a client id, --user, --certificate or --address")
    gone = _ask(config, data_dir, "disconnectClients", **given)["clients"]
    if as_json:
        output.json({"disconnected": gone})
    elif client is not None and not gone:
        output.note(f"{_shown(client)}: was not connected")
    else:
        for one in gone:
            output.note(f"{_shown(one)}: disconnected")
        if not gone:
            output.note("no such client is connected")


@app.command(
    epilog="""\b
Examples:
  streambridge clients forget pump-7 --yes
"""
)
def forget(
    client: Client,
    config: ConfigOption = DEFAULT_CONFIG,
    data_dir: DataDirOption = None,
    sure: Sure = False,
    as_json: JsonOption = False,
) -> None:
    """Delete a client's session, and close its connection.

    Subscriptions, queued messages and the will are deleted. Then any user may use the client id.
    """
    confirm(sure, f"Forget {_shown(client)} with its subscriptions and queued messages?")
    _ask(config, data_dir, "forgetClient", client=client)
    if as_json:
        output.json({"forgotten": client})
    else:
        output.note(f"{_shown(client)}: forgotten")


def _ask(config: Path, data_dir: Path | None, operation: str, **fields: Any) -> dict[str, Any]:
    target = target_of(config, data_dir)
    if not is_running(target.data_dir):
        raise StreamBridgeError(
            f"{target.data_dir}: the service is not running; start it to list or change its clients"
        )
    return operate(target, operation, **fields)


def _shown(name: str | None) -> str:
    """Escape a name that a client has chosen for a terminal."""
    if name is None:
        return "-"
    return output.escaped(name) or ascii(name)
