"""The declared streams: whether they fit, can be bound, go with what is stored, and can be exported."""

from __future__ import annotations

import difflib
import re
import shutil
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from bridge.config.checks.look import Finding, Look, existing
from bridge.config.settings import keys_to, sentence
from bridge.config.tomlfile import Keys
from bridge.config.tomlstruct import dotted, plainly, snake
from bridge.errors import InvalidDefinition
from bridge.export.cursor import stopped_with
from bridge.model import MessageStreamDefinition, Persistence, StrategyOnFull
from bridge.operations.validate import mistakes
from bridge.plugin import discovery
from bridge.plugin.api import ExportConfig
from bridge.streams.reader import StreamMeta, StreamReader, list_damaged, list_streams
from bridge.units import format_size


def room(look: Look) -> Iterator[Finding]:
    """Whether what the streams may grow to fits where they are."""
    if not look.knows("gateway", "data_dir"):
        return
    stored, _ = _stored(look)
    for key, persistence in (("data_dir", Persistence.File), ("memory_dir", Persistence.Memory)):
        if not look.knows("gateway", key):
            continue
        streams = [stream for stream in look.config.streams.values() if stream.persistence is persistence]
        needed = sum(stream.max_size for stream in streams)
        used = sum(_size(stored[s.name]) for s in streams if s.name in stored and not stored[s.name].memory)
        there = existing(getattr(look.config.gateway, key))
        free = shutil.disk_usage(there).free + used
        if needed > free:
            yield look.warning(
                ("gateway", key),
                f"the streams may grow to {format_size(needed)}, but {there} has room for "
                f"{format_size(free)}; lower their max_size or make room",
            )


def streams(look: Look) -> Iterator[Finding]:
    """Whether every stream can be had, bound and exported."""
    registry = discovery.load(look.config.export.plugin_dirs)
    stored, damaged = _stored(look)
    for stream in look.config.streams.values():
        keys: Keys = ("streams", stream.name)
        for mistake in mistakes(stream):
            inner = keys_to(mistake)
            if look.knows(*keys, *inner):
                inner = inner[:-1] if isinstance(inner[-1], int) else inner  # an entry of a list has no key
                yield look.error((*keys, *inner), sentence(mistake))
        if stream.name in damaged:
            yield look.error(
                keys,
                "both stored copies of its definition are damaged; stop the service and run "
                "`streambridge repair`",
            )
        elif stream.name in stored:
            yield from _compared(look, stream, stored[stream.name])
        yield from _exports(look, stream, registry)


def loaded_plugins(look: Look) -> Iterator[Finding]:
    """Whether every plugin loads, and the directories that are named for them are there."""
    if not look.knows("export", "plugin_dirs"):
        return
    section = look.document.data.get("export")
    if isinstance(section, dict) and "plugin_dirs" in section:  # the default need not be there
        for directory in look.config.export.plugin_dirs:
            if not Path(directory).is_dir():
                yield look.error(
                    ("export", "plugin_dirs"),
                    f"there is no directory {directory}; make it, or correct the name",
                )
    for plugin in discovery.load(look.config.export.plugin_dirs).found:
        if plugin.error is not None:
            yield look.error(
                ("export", "plugin_dirs"),
                f"plugin {plugin.name} ({plugin.origin}) is not loaded: {plugin.error}",
            )


def refused_messages(look: Look) -> Iterator[Finding]:
    """Whether the stream for messages that can never be stored elsewhere is there."""
    name, keys = look.config.mqtt.refused_stream, ("mqtt", "refused_stream")
    if name is None or not look.knows(*keys):
        return
    if look.config.mqtt.mode == "external":
        yield look.warning(
            keys, 'not used, since mode = "external" drops and counts such messages; remove it'
        )
    elif look.knows("streams") and name not in look.config.streams and name not in _stored(look)[0]:
        yield look.warning(
            keys,
            f"there is no stream {name!r}; until it is declared as [streams.{name}] or created, messages "
            "that can never be stored are refused, as without refused_stream",
        )


def _compared(look: Look, stream: MessageStreamDefinition, stored: StreamMeta) -> Iterator[Finding]:
    """What of a definition cannot take the place of the stored one."""
    before = msgspec.json.decode(stored.definition, type=MessageStreamDefinition)
    keys: Keys = ("streams", stream.name)
    if look.knows(*keys, "persistence") and stream.persistence is not before.persistence:
        yield look.error(
            (*keys, "persistence"),
            f"the stream exists as {before.persistence.name} and stays so; write that, or delete the stream",
        )
    held = 0 if stored.memory else _size(stored)
    if look.knows(*keys, "max_size") and stream.max_size < min(held, before.max_size):
        if stream.strategy_on_full is StrategyOnFull.OverwriteOldestData:
            what = "its oldest messages are dropped at once"
        elif stream.retention == "exported":
            what = "what is exported is dropped, and new messages are refused until that is enough"
        else:
            what = "new messages are refused until enough of it has expired or was purged"
        yield look.warning((*keys, "max_size"), f"the stream holds {format_size(held)} now: {what}")


def _stored(look: Look) -> tuple[dict[str, StreamMeta], list[str]]:
    """The streams that are there by name, and the names of those whose definition is damaged."""
    if not look.knows("gateway", "data_dir"):
        return {}, []
    data_dir = look.config.gateway.data_dir
    stored, damaged = {}, []
    with suppress(OSError):  # said where the directories are looked at
        stored = {meta.name: meta for meta in list_streams(data_dir)}
        damaged = list_damaged(data_dir)
    return stored, damaged


def _size(stored: StreamMeta) -> int:
    with closing(StreamReader(stored.directory)) as reader:
        return reader.total_bytes()


# -- exports -----------------------------------------------------------------------------------------
def _exports(look: Look, stream: MessageStreamDefinition, registry: discovery.Registry) -> Iterator[Finding]:
    """Whether each export's configuration satisfies its plugin."""
    for kind, items in stream.export_definition.items():
        for number, raw in enumerate(items):
            keys: Keys = ("streams", stream.name, "export", kind, number)
            found: list[tuple[Keys, str]] = []
            export = _read(registry, kind, raw, found)
            for inner, what in found:
                if look.knows(*keys, *inner):
                    yield look.error((*keys, *inner), what)
            if export is None:
                continue
            if lacking := registry.exporters[kind].lacks(export):
                yield look.error(keys, lacking)
            if export.disabled and stream.retention == "exported":
                yield look.warning(
                    (*keys, "disabled"),
                    'a disabled export does not hold data back: with retention = "exported" what the enabled '
                    "ones have passed is freed, and this one will have skipped it",
                )
            letters = export.dead_letter_stream
            if letters is not None and letters not in look.config.streams:
                yield look.warning(
                    (*keys, "dead_letter_stream"), f"there is no [streams.{dotted((letters,))}]; add it"
                )


def stopped(look: Look) -> Iterator[Finding]:
    """Exports that have stopped until their configuration changes, and whose configuration has not."""
    registry = discovery.load(look.config.export.plugin_dirs)
    data_dir = look.config.gateway.data_dir
    for name, stored in _stored(look)[0].items():
        declared = look.config.streams.get(name)
        definition = declared or msgspec.json.decode(stored.definition, type=MessageStreamDefinition)
        for kind, items in definition.export_definition.items():
            for number, raw in enumerate(items):
                export, why = _read(registry, kind, raw, []), None
                if export is not None and not export.disabled:
                    with suppress(OSError):  # reported where the directories are looked at
                        why = stopped_with(data_dir, name, stored.epoch, export)
                if export is not None and why is not None:
                    what = f"export {export.identifier} of stream {name} makes no attempt: {why}"
                    keys: Keys = ("streams", name, "export", kind, number)
                    yield look.error(keys, what) if declared else Finding("error", what)


def _read(
    registry: discovery.Registry, kind: str, raw: dict[str, Any], found: list[tuple[Keys, str]]
) -> ExportConfig | None:
    """Read an export's configuration, going on without each key that is wrong; None if that ends nowhere."""
    raw, wrong = dict(raw), set()
    while True:
        try:
            return registry.config(kind, raw, ())
        except InvalidDefinition as error:
            inner = error.path or tuple(re.findall(r"field `(\w+)`", error.what)[:1])
            key = str(inner[0]) if inner else ""
            if key in wrong:  # it is said to be missing now
                return None
            keys = tuple(part if isinstance(part, int) else snake(part) for part in inner)
            missing = "missing required" in error.what
            found.append((keys[:-1] if missing else keys, _in_words_of_the_file(error.sentence(""))))
            if raw.pop(key, None) is None:
                return None
            wrong.add(key)


def _in_words_of_the_file(what: str) -> str:
    what = re.sub(r"`(\w+)`", lambda found: f"`{snake(found[1])}`", what)
    what = re.sub(r"^Object contains unknown field `\w+`", "unknown key", what)
    what = re.sub(r"^Object missing required field `(\w+)`", r"`\1` is missing; add \1 = ...", what)
    return plainly(what)


def _aws_exports(look: Look) -> list[tuple[Keys, Any]]:
    """The exports to AWS that can be read, with where they stand."""
    registry = discovery.load(look.config.export.plugin_dirs)
    return [
        (("streams", stream.name, "export", kind, number), export)
        for stream in look.config.streams.values()
        for kind, items in stream.export_definition.items()
        for number, raw in enumerate(items)
        if (export := _read(registry, kind, raw, [])) is not None and hasattr(export, "region")
    ]


def aws_names(look: Look) -> Iterator[Finding]:
    """Regions and buckets whose names cannot be, or are nobody's."""
    aws = look.config.aws
    if aws.region and look.knows("aws", "region"):
        yield from _region(look, ("aws", "region"), aws.region, elsewhere=bool(aws.endpoint_url))
    for keys, export in _aws_exports(look):
        elsewhere = bool(export.endpoint_url or aws.endpoint_url)
        if export.region:
            yield from _region(look, (*keys, "region"), export.region, elsewhere=elsewhere)
        bucket = getattr(export, "bucket", None)
        if bucket is None or bucket.startswith("arn:") or (elsewhere and _ANY_BUCKET.fullmatch(bucket)):
            continue
        if not _BUCKET.fullmatch(bucket) or ".." in bucket or _IPV4.fullmatch(bucket):
            yield look.error(
                (*keys, "bucket"),
                f"no bucket can be named {bucket!r}: 3 to 63 lower-case letters, digits, dots and hyphens, "
                "with a letter or digit at both ends; correct the name",
            )


# https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html; what botocore takes elsewhere
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_ANY_BUCKET = re.compile(r"[A-Za-z0-9._-]{3,255}")
_IPV4 = re.compile(r"\d+(\.\d+){3}")


def _region(look: Look, keys: Keys, region: str, *, elsewhere: bool) -> Iterator[Finding]:
    """An error if no region can be named so; a warning if the AWS library knows no such one."""
    if not re.fullmatch(r"(?!\d+$)[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?", region):
        yield look.error(keys, f"no region can be named {region!r}; write it like eu-west-1")
        return
    if elsewhere:  # another store calls its regions as it likes
        return
    from botocore.loaders import Loader

    partitions = Loader().load_data("partitions")["partitions"]
    known = {name for partition in partitions for name in partition["regions"]}
    if region in known:
        return
    near = difflib.get_close_matches(region, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "write it like eu-west-1"
    if any(re.fullmatch(partition["regionRegex"].strip("^$"), region) for partition in partitions):
        yield look.warning(keys, f"the AWS library that is installed knows no region {region!r}; {hint}")
    else:
        yield look.error(keys, f"AWS has no region {region!r}; {hint}")


def credentials(look: Look) -> Iterator[Finding]:
    """Whether AWS credentials and regions can be found, if something goes to AWS."""
    exports = [export for _, export in _aws_exports(look)]
    if not exports or not look.knows("aws"):
        return
    aws = look.config.aws
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session

    try:
        session = Session(profile=aws.profile)
        if aws.credentials is None and session.get_credentials() is None:
            yield look.warning(
                ("aws",),
                "no AWS credentials are found; set [aws.credentials.iot], profile or AWS_... variables",
            )
        settled = aws.region or aws.endpoint_url or session.get_config_variable("region")
        if not settled and not all(e.region or getattr(e, "endpoint_url", None) for e in exports):
            yield look.warning(
                ("aws", "region"), "no region is set; set it, or the export's own, or AWS_DEFAULT_REGION"
            )
    except BotoCoreError as error:
        yield look.error(("aws", "profile"), str(error))
