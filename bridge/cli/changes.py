"""`streambridge streams create|update|delete|append|purge|fetch|ack`: the commands that change streams.

A definition has the keys of a table [streams.NAME] of the configuration, given as KEY=VALUE with the value in
TOML or as plain text.
"""

from __future__ import annotations

import sys
import time
import tomllib
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from bridge.cli import output
from bridge.cli.operate import Target, operate, target_of
from bridge.cli.options import (
    ConfigOption,
    DataDirOption,
    JsonOption,
    StreamArgument,
    complete_export,
    known_config,
)
from bridge.config.settings import DEFAULT_CONFIG, RENAMED, explained, stream_definition
from bridge.config.tomlstruct import keys_of, snake
from bridge.errors import InvalidDefinition, InvalidRequest, StreamBridgeError
from bridge.model import MessageStreamDefinition, identifiers
from bridge.plugin import discovery
from bridge.settingtypes import second_names, wire_name
from bridge.streams.segment import StreamMessage
from bridge.units import parse_duration

WAIT = 2.0  # seconds that a request of `fetch` waits; the service does not notice when the command ends
MAX_MESSAGES = 1000  # per request of `append`
MAX_BYTES = 8 * 1024 * 1024  # per request, unless one message alone has more; the limit is 64 MiB

Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings as in [streams.NAME], such as max_size=1GiB or topics='[\"a/#\"]'.",
    ),
]
Sure = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
app = typer.Typer()


@app.command(
    epilog="""\b
Examples:
  streambridge streams create pumps topics='["pumps/#"]' max_size=1GiB flush_on_write=false
  streambridge streams create ring strategy_on_full=OverwriteOldestData limits='{max_messages = 1000}'
"""
)
def create(
    name: Annotated[str, typer.Argument(metavar="STREAM", help="The new stream's name.")],
    settings: Settings = None,
    config: ConfigOption = DEFAULT_CONFIG,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a stream."""
    table, target = _table(settings or []), target_of(config, data_dir)
    definition = stream_definition(name, table, target.plugin_dirs)
    _define(target, "createMessageStream", definition)
    _report("created", name, as_json=as_json)


@app.command(
    epilog="""\b
Examples:
  streambridge streams update pumps max_size=2GiB
  streambridge streams update pumps --reset time_to_live
  streambridge streams update pumps export.s3='[{identifier = "lake", bucket = "my-bucket"}]'
  streambridge streams update pumps --export lake linger_millis=5s
"""
)
def update(
    name: StreamArgument,
    settings: Settings = None,
    reset: Annotated[
        list[str] | None,
        typer.Option("--reset", metavar="KEY", help="Reset this setting to its default."),
    ] = None,
    export: Annotated[
        str | None,
        typer.Option(
            "--export",
            metavar="EXPORT",
            help="Change settings of this export instead; its other settings stay.",
            autocompletion=complete_export,
        ),
    ] = None,
    config: ConfigOption = DEFAULT_CONFIG,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change settings of a stream or of one of its exports; other settings stay.

    A table (limits, export.KIND) is replaced as a whole. A key with a dot, such as limits.max_age=1d, or
    a.b=1 with --export, changes only that entry of a table.
    """
    table, target = _table(settings or []), target_of(config, data_dir)
    if not table and not reset:
        raise typer.BadParameter("give at least one setting, as KEY=VALUE or with --reset KEY")
    if both := [key for key in reset or [] if key in table]:
        raise typer.BadParameter(f"{both[0]} is both set and reset; choose one")
    declared = _declared(config, data_dir, name)
    old, version = _definition(target, name)
    whole = {setting.partition("=")[0] for setting in settings or []}
    if export is None:
        definition = _updated(old, table, whole, reset or [], target)
    else:
        definition = _with_export(old, export, table, whole, reset or [], target)
    _define(target, "updateMessageStream", definition, ifVersion=version)
    _report("updated", name, as_json=as_json)
    if declared:
        output.note(f"note: {config} declares {name}; the next start or reload applies that definition again")


def _updated(
    old: MessageStreamDefinition, table: dict[str, Any], whole: set[str], reset: list[str], target: Target
) -> MessageStreamDefinition:
    """Return a definition with some settings changed, and others reset; keys in `whole` replace tables."""
    name = old.name
    keys = keys_of(MessageStreamDefinition, RENAMED)
    fields = {key: field.name for key, field in keys.items() if key != "name"}
    unknown = [key for key in reset if key not in fields]
    if unknown:
        raise typer.BadParameter(f"--reset {unknown[0]}: no such setting; valid are: {', '.join(fields)}")
    # A segment may be as large as the stream is after the update.
    kept = {} if "max_size" in reset else {"max_size": old.max_size}
    given = stream_definition(name, kept | table, target.plugin_dirs)
    default = stream_definition(name, {"max_size": given.max_size}, [])
    changes: dict[str, Any] = {fields[key]: getattr(given, fields[key]) for key in table}
    for key in table.keys() - whole - {"export"}:
        changes[fields[key]] = _with_entries(getattr(old, fields[key]), changes[fields[key]], table[key])
    if "export_definition" in changes:
        changes["export_definition"] = old.export_definition | changes["export_definition"]
    changes |= {fields[key]: getattr(default, fields[key]) for key in reset}
    return msgspec.structs.replace(old, **changes)


def _with_entries(old: Any, given: Any, named: dict[str, Any]) -> Any:
    """Return the table `old` with the entries of `given` that are named."""
    if not old:
        return given
    if isinstance(old, dict):
        return old | given
    fields = keys_of(type(old))
    return msgspec.structs.replace(
        old, **{fields[key].name: getattr(given, fields[key].name) for key in named}
    )


def _with_export(
    old: MessageStreamDefinition,
    export: str,
    table: dict[str, Any],
    whole: set[str],
    reset: list[str],
    target: Target,
) -> MessageStreamDefinition:
    """Return a definition with settings of one export changed; keys in `whole` replace tables."""
    known = identifiers(old)
    if export not in known:
        near = get_close_matches(export, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"its exports are: {', '.join(known) or 'none'}"
        raise typer.BadParameter(f"--export {export}: {old.name} has no such export; {hint}")
    definition = {kind: list(configs) for kind, configs in old.export_definition.items()}
    kind, number = next(
        (kind, number)
        for kind, configs in definition.items()
        for number, config in enumerate(configs)
        if config.get("identifier") == export
    )
    read = stream_definition(old.name, {"export": {kind: [table]}}, target.plugin_dirs)
    (given,) = read.export_definition[kind]
    config = definition[kind][number]
    exporter = discovery.load(target.plugin_dirs).exporters.get(kind)
    second = second_names(exporter.Config) if exporter is not None else {}
    without = {second.get(wire_name(key), wire_name(key)): key for key in reset}
    unset = [key for stored, key in without.items() if stored not in config]
    if unset:
        first = {stored: name for name, stored in second.items()}
        set_ = ", ".join(snake(first.get(key, key)) for key in config if key != "identifier")
        raise typer.BadParameter(
            f"--reset {unset[0]}: {export} does not set it; it sets: {set_ or 'nothing'}"
        )
    without |= {second[key]: key for key in given if key in second}  # which is given by its other name
    kept = {key: value for key, value in config.items() if key not in without}
    for key, value in given.items():
        inside = isinstance(value, dict) and key not in {wire_name(one) for one in whole}
        kept[key] = _merged(kept.get(key), value) if inside else value
    definition[kind][number] = kept
    return msgspec.structs.replace(old, export_definition=definition)


def _merged(old: Any, new: dict[str, Any]) -> dict[str, Any]:
    """Return a table with entries added or changed, also in nested tables."""
    merged = dict(old) if isinstance(old, dict) else {}
    for key, value in new.items():
        merged[key] = _merged(merged.get(key), value) if isinstance(value, dict) else value
    return merged


@app.command()
def delete(
    name: StreamArgument,
    sure: Sure = False,
    config: ConfigOption = DEFAULT_CONFIG,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a stream with all its messages and the positions of its exports."""
    target = target_of(config, data_dir)
    storage = operate(target, "describeMessageStream", name=name)["messageStreamInfo"]["storageStatus"]
    number = storage["newestSequenceNumber"] - storage["oldestSequenceNumber"] + 1
    confirm(sure, f"Delete {name} with up to {output.count(number, 'message')}?")
    declared = _declared(config, data_dir, name)
    operate(target, "deleteMessageStream", name=name)
    _report("deleted", name, as_json=as_json)
    if declared:
        output.note(
            f"note: {config} declares {name}; the next start or reload creates it again. Until then, "
            "messages on its topics are not stored"
        )


@app.command(
    epilog="""\b
Examples:
  streambridge streams append pumps '{"rpm": 1450}'
  jq -c .[] readings.json | streambridge streams append pumps
"""
)
def append(
    name: StreamArgument,
    payloads: Annotated[
        list[str] | None,
        typer.Argument(metavar="PAYLOAD", help="The messages; by default, the lines of standard input."),
    ] = None,
    config: ConfigOption = DEFAULT_CONFIG,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Append messages, and print their sequence numbers.

    Their topic is streams/STREAM. Empty lines of standard input are skipped.
    """
    target = target_of(config, data_dir)
    lines = (line.rstrip(b"\r\n") for line in sys.stdin.buffer)
    messages = (payload.encode() for payload in payloads) if payloads else (line for line in lines if line)
    for group in _groups(messages):
        numbers = operate(target, "appendMessages", name=name, payloads=group)["sequenceNumbers"]
        if as_json:
            output.json({"sequenceNumbers": numbers})
        else:
            output.echo(f"stored as {numbers[0]}" + (f" to {numbers[-1]}" if len(numbers) > 1 else ""))


@app.command(
    epilog="""\b
Examples:
  streambridge streams purge pumps --upto 5000
  streambridge streams purge pumps --topic 'pumps/7/#' --yes
"""
)
def purge(
    name: StreamArgument,
    upto: Annotated[
        int | None, typer.Option("--upto", min=0, metavar="NUMBER", help="Only messages below this number.")
    ] = None,
    topic: Annotated[
        str | None,
        typer.Option("--topic", metavar="FILTER", help="Only messages that match this topic filter."),
    ] = None,
    sure: Sure = False,
    config: ConfigOption = DEFAULT_CONFIG,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Drop messages of a stream, exported or not; numbering continues."""
    which = "all messages" if upto is None else f"the messages below {upto}"
    on = f" on {topic}" if topic is not None else ""
    confirm(sure, f"Drop {which} of {name}{on}?")
    given = {key: value for key, value in (("upto", upto), ("topic", topic)) if value is not None}
    reply = operate(target_of(config, data_dir), "purgeMessageStream", name=name, **given)
    if as_json:
        output.json({"purgedMessages": reply["purgedMessages"]})
    else:
        output.echo(f"messages dropped: {reply['purgedMessages']}")


Consumer = Annotated[
    str,
    typer.Argument(metavar="CONSUMER", help="The consumer's identifier.", autocompletion=complete_export),
]
Numbers = list[int] | None


@app.command(
    epilog="""\b
Examples:
  streambridge streams fetch prints printers --wait 10s
  streambridge streams fetch prints printers --count 10 --json | jq .payload
"""
)
def fetch(
    name: StreamArgument,
    consumer: Consumer,
    count: Annotated[
        int, typer.Option("--count", "-n", min=1, metavar="NUMBER", help="Fetch at most this many messages.")
    ] = 1,
    wait: Annotated[
        str, typer.Option("--wait", metavar="DURATION", help="Wait this long for the first one, such as 10s.")
    ] = "0s",
    config: ConfigOption = DEFAULT_CONFIG,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch messages from a consumer; report the results with `ack`.

    No other client gets them before the consumer's deadline. Exits with 1 if there is none.
    """
    target, until = target_of(config, data_dir), time.monotonic() + _millis("--wait", wait) / 1000
    found: list[dict[str, Any]] = []
    while not found:
        left = until - time.monotonic()
        found = operate(
            target,
            "fetchMessages",
            name=name,
            consumer=consumer,
            maxMessageCount=count,
            timeoutMillis=int(1000 * max(0.0, min(left, WAIT))),
        )["messages"]
        if left <= 0:
            break
    for raw in found:
        message = StreamMessage(
            raw["sequenceNumber"], raw["ingestTime"], raw["topic"].encode(), raw["payload"], b""
        )
        output.message(message, as_json=as_json, deliveries=raw["deliveries"])
    if not found:
        output.note(f"{name}: no message for {consumer} now")
        raise typer.Exit(output.ExitCode.FAILED)


@app.command(
    epilog="""\b
Examples:
  streambridge streams ack prints printers 17 18
  streambridge streams ack prints printers --nack 19 --delay 1m
  streambridge streams ack prints printers --terminate 20 --reason 'no such printer'
"""
)
def ack(
    name: StreamArgument,
    consumer: Consumer,
    numbers: Annotated[Numbers, typer.Argument(metavar="NUMBER", help="Done: never deliver again.")] = None,
    nack: Annotated[
        Numbers, typer.Option("--nack", metavar="NUMBER", help="Not done: deliver it again, after --delay.")
    ] = None,
    delay: Annotated[
        str, typer.Option("--delay", metavar="DURATION", help="The delay of --nack, such as 1m.")
    ] = "0s",
    in_progress: Annotated[
        Numbers, typer.Option("--in-progress", metavar="NUMBER", help="Start the deadline again.")
    ] = None,
    terminate: Annotated[
        Numbers,
        typer.Option("--terminate", metavar="NUMBER", help="Reject it, into the dead-letter stream if any."),
    ] = None,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="The reason of --terminate.")
    ] = "terminated on the command line",
    config: ConfigOption = DEFAULT_CONFIG,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Report the results of a consumer's messages, no matter which client fetched them."""
    if not (numbers or nack or in_progress or terminate):
        raise typer.BadParameter("give at least one number")
    reply = operate(
        target_of(config, data_dir),
        "ackMessages",
        name=name,
        consumer=consumer,
        ack=numbers or [],
        nack=nack or [],
        delayMillis=_millis("--delay", delay),
        inProgress=in_progress or [],
        terminate=terminate or [],
        reason=reason,
    )
    if as_json:
        output.json({"notPending": reply["notPending"]})
    elif reply["notPending"]:
        output.note(f"{name}: not pending: {', '.join(map(str, reply['notPending']))}")
    else:
        output.echo("results stored")


def _millis(option: str, text: str) -> int:
    """Return a duration option in milliseconds."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option} {text!r}: {error}") from None


def _groups(messages: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Split messages into groups, one for each request."""
    group: list[bytes] = []
    size = 0
    for message in messages:
        if group and (len(group) == MAX_MESSAGES or size + len(message) > MAX_BYTES):
            yield group
            group, size = [], 0
        group.append(message)
        size += len(message)
    if group:
        yield group


def _report(done: str, name: str, *, as_json: bool) -> None:
    """Print that a change was made."""
    if as_json:
        output.json({done: name})
    else:
        output.echo(f"{done} {name}")


def confirm(sure: bool, question: str) -> None:
    """Ask for confirmation of a change that cannot be undone, unless --yes was given."""
    if sure:
        return
    if not sys.stdin.isatty():
        raise typer.BadParameter("this cannot be undone; without a terminal, confirm it with --yes")
    typer.confirm(question, abort=True)


def _table(settings: list[str]) -> dict[str, Any]:
    """Parse KEY=VALUE settings into a table of the configuration."""
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
                raise typer.BadParameter(f"{setting!r}: {word} already has a value")
        if last in at:
            raise typer.BadParameter(f"{setting!r}: {key} is given twice; remove one")
        at[last] = parsed
    return table


def _declared(config: Path, data_dir: Path | None, name: str) -> bool:
    """Return whether the configuration declares a stream; with --data-dir it is not read."""
    return data_dir is None and name in known_config(config).streams


def _define(target: Target, operation: str, definition: MessageStreamDefinition, **more: Any) -> None:
    try:
        operate(target, operation, definition=msgspec.to_builtins(definition), **more)
    except InvalidDefinition as error:
        raise InvalidRequest(explained(error, definition.name)) from None


def _definition(target: Target, name: str) -> tuple[MessageStreamDefinition, str]:
    """Return a stream's definition and its version."""
    info = operate(target, "describeMessageStream", name=name)["messageStreamInfo"]
    try:
        return msgspec.convert(info["definition"], MessageStreamDefinition), info["version"]
    except msgspec.ValidationError as error:
        raise StreamBridgeError(
            f"{name}: its definition is from another version of the service: {error}; restart the service"
        ) from None
