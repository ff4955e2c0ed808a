"""`streambridge streams create|update|delete|append|purge`: the operations that change something.

A definition is given as in a table [streams.NAME] of the configuration: KEY=VALUE, the value in TOML, or
as plain text where a text is meant.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from bridge.cli.common import (
    DEFAULT_CONFIG,
    ConfigOption,
    DataDirOption,
    JsonOption,
    count,
    echo,
    known_config,
    note,
    print_json,
)
from bridge.cli.operate import Place, operate, place
from bridge.config.settings import RENAMED, explained, stream_definition
from bridge.config.tomlstruct import keys_of
from bridge.errors import InvalidDefinition, InvalidRequest, StreamBridgeError
from bridge.model import MessageStreamDefinition

TOGETHER = 1000  # messages that `append` sends in one request
AT_MOST = 8 * 1024 * 1024  # bytes of them, unless one alone has more; a request may have 64 MiB

Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Settings as in [streams.NAME], for instance max_size=1GiB or topics='[\"a/#\"]'.",
    ),
]
Sure = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def create(
    name: Annotated[str, typer.Argument(metavar="STREAM", help="The new stream's name.")],
    settings: Settings = None,
    config: ConfigOption = DEFAULT_CONFIG,
    data_dir: DataDirOption = None,
) -> None:
    """Create a stream."""
    table, where = _table(settings or []), place(config, data_dir)
    definition = stream_definition(name, table, where.plugin_dirs)
    _define(where, "createMessageStream", definition)
    echo(f"created {name}")


def update(
    name: Annotated[str, typer.Argument(metavar="STREAM", help="The stream's name.")],
    settings: Settings = None,
    reset: Annotated[
        list[str] | None,
        typer.Option("--reset", metavar="KEY", help="Give this setting its default again."),
    ] = None,
    config: ConfigOption = DEFAULT_CONFIG,
    data_dir: DataDirOption = None,
) -> None:
    """Change settings of a stream; what is not named stays as it is.

    A table (limits, export.KIND) is replaced as a whole.
    """
    table, where = _table(settings or []), place(config, data_dir)
    keys = keys_of(MessageStreamDefinition, RENAMED)
    fields = {key: field.name for key, field in keys.items() if key != "name"}
    unknown = [key for key in reset or [] if key not in fields]
    if unknown:
        raise typer.BadParameter(f"--reset {unknown[0]}: no such setting; there are: {', '.join(fields)}")
    if not table and not reset:
        raise typer.BadParameter("name at least one setting, as KEY=VALUE or with --reset KEY")
    declared = _declared(config, data_dir, name)
    old, version = _definition(where, name)
    # The stream's size, which a segment may have at most, is the one that it has afterwards.
    kept = {} if "max_size" in (reset or []) else {"max_size": old.max_size}
    given = stream_definition(name, kept | table, where.plugin_dirs)
    default = stream_definition(name, {"max_size": given.max_size}, [])
    changes: dict[str, Any] = {fields[key]: getattr(given, fields[key]) for key in table}
    if "export_definition" in changes:
        changes["export_definition"] = old.export_definition | changes["export_definition"]
    changes |= {fields[key]: getattr(default, fields[key]) for key in reset or []}
    definition = msgspec.structs.replace(old, **changes)
    _define(where, "updateMessageStream", definition, ifVersion=version)
    echo(f"updated {name}")
    if declared:
        note(f"note: {config} declares {name}; its next start or reload sets that again")


def delete(
    name: Annotated[str, typer.Argument(metavar="STREAM", help="The stream's name.")],
    sure: Sure = False,
    config: ConfigOption = DEFAULT_CONFIG,
    data_dir: DataDirOption = None,
) -> None:
    """Delete a stream with all its messages and the positions of its exports."""
    where = place(config, data_dir)
    storage = operate(where, "describeMessageStream", name=name)["messageStreamInfo"]["storageStatus"]
    number = storage["newestSequenceNumber"] - storage["oldestSequenceNumber"] + 1
    confirm(sure, f"Delete {name} with up to {count(number, 'message')}?")
    declared = _declared(config, data_dir, name)
    operate(where, "deleteMessageStream", name=name)
    echo(f"deleted {name}")
    if declared:
        note(
            f"note: {config} declares {name}; its next start or reload creates it again. Until then its "
            "topics are ordinary MQTT, and what is published there is not stored"
        )


def append(
    name: Annotated[str, typer.Argument(metavar="STREAM", help="The stream's name.")],
    payloads: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PAYLOAD]...", help="Messages; without any, each line of standard input."),
    ] = None,
    config: ConfigOption = DEFAULT_CONFIG,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Append messages, and print the numbers that they are stored under.

    They are on the topic streams/STREAM. An empty line of standard input is no message.
    """
    where = place(config, data_dir)
    lines = (line.rstrip(b"\r\n") for line in sys.stdin.buffer)
    messages = (payload.encode() for payload in payloads) if payloads else (line for line in lines if line)
    for group in _groups(messages):
        numbers = operate(where, "appendMessages", name=name, payloads=group)["sequenceNumbers"]
        if as_json:
            print_json({"sequenceNumbers": numbers})
        else:
            echo(f"stored as {numbers[0]}" + (f" to {numbers[-1]}" if len(numbers) > 1 else ""))


def purge(
    name: Annotated[str, typer.Argument(metavar="STREAM", help="The stream's name.")],
    upto: Annotated[
        int | None, typer.Option("--upto", min=0, metavar="NUMBER", help="Only messages below this number.")
    ] = None,
    topic: Annotated[
        str | None, typer.Option("--topic", metavar="FILTER", help="Only messages whose topic matches this.")
    ] = None,
    sure: Sure = False,
    config: ConfigOption = DEFAULT_CONFIG,
    data_dir: DataDirOption = None,
) -> None:
    """Drop messages of a stream, exported or not; the numbers go on."""
    which = "all messages" if upto is None else f"the messages below {upto}"
    on = f" on {topic}" if topic is not None else ""
    confirm(sure, f"Drop {which} of {name}{on}?")
    given = {key: value for key, value in (("upto", upto), ("topic", topic)) if value is not None}
    reply = operate(place(config, data_dir), "purgeMessageStream", name=name, **given)
    echo(f"messages dropped: {reply['purgedMessages']}")


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command(
        epilog="""\b
Examples:
  streambridge streams create pumps topics='["pumps/#"]' max_size=1GiB flush_on_write=true
  streambridge streams create ring strategy_on_full=OverwriteOldestData limits='{max_messages = 1000}'
"""
    )(create)
    app.command(
        epilog="""\b
Examples:
  streambridge streams update pumps max_size=2GiB
  streambridge streams update pumps --reset time_to_live
  streambridge streams update pumps export.s3='[{identifier = "lake", bucket = "my-bucket"}]'
"""
    )(update)
    app.command()(delete)
    app.command(
        epilog="""\b
Examples:
  streambridge streams append pumps '{"rpm": 1450}'
  jq -c .[] readings.json | streambridge streams append pumps
"""
    )(append)
    app.command(
        epilog="""\b
Examples:
  streambridge streams purge pumps --upto 5000
  streambridge streams purge pumps --topic 'pumps/7/#' --yes
"""
    )(purge)


def _groups(messages: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Messages as they are sent together."""
    group: list[bytes] = []
    size = 0
    for message in messages:
        if group and (len(group) == TOGETHER or size + len(message) > AT_MOST):
            yield group
            group, size = [], 0
        group.append(message)
        size += len(message)
    if group:
        yield group


def confirm(sure: bool, question: str) -> None:
    """Ask before what cannot be undone, unless `--yes` was said."""
    if sure:
        return
    if not sys.stdin.isatty():
        raise typer.BadParameter("this cannot be undone; say --yes where nobody can be asked")
    typer.confirm(question, abort=True)


def _table(settings: list[str]) -> dict[str, Any]:
    """KEY=VALUE words as the table that they would be in the configuration."""
    table: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"{setting!r} is not KEY=VALUE")
        try:
            parsed = tomllib.loads(f"value = {value}\n")["value"]
        except tomllib.TOMLDecodeError:
            parsed = value
        at = table
        *outer, last = key.split(".")
        for word in outer:
            at = at.setdefault(word, {})
            if not isinstance(at, dict):
                raise typer.BadParameter(f"{setting!r}: {word} has a value already")
        if last in at:
            raise typer.BadParameter(f"{setting!r}: {key} is given twice; which is it to be?")
        at[last] = parsed
    return table


def _declared(config: Path, data_dir: Path | None, name: str) -> bool:
    """Whether the configuration, if that is where we look, declares a stream."""
    return data_dir is None and name in known_config(config).streams


def _define(where: Place, operation: str, definition: MessageStreamDefinition, **more: Any) -> None:
    try:
        operate(where, operation, definition=msgspec.to_builtins(definition), **more)
    except InvalidDefinition as error:
        raise InvalidRequest(explained(error, definition.name)) from None


def _definition(where: Place, name: str) -> tuple[MessageStreamDefinition, str]:
    """A stream's definition, and its version."""
    info = operate(where, "describeMessageStream", name=name)["messageStreamInfo"]
    try:
        return msgspec.convert(info["definition"], MessageStreamDefinition), info["version"]
    except msgspec.ValidationError as error:
        raise StreamBridgeError(
            f"{name}: the service described it in a way of another version: {error}"
        ) from None
