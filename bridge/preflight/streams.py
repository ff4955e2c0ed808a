"""The declared streams: whether they fit, can be bound, go with what is stored, and can be exported."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import msgspec

from bridge import plugins
from bridge.errors import InvalidRequest
from bridge.export.api import OWN_STREAM, ExportConfig, appends_to_itself
from bridge.model import MessageStreamDefinition, Persistence
from bridge.operations.manager import is_bindable
from bridge.preflight.look import Finding, Look, existing
from bridge.streams.reader import StreamMeta, StreamReader, list_damaged, list_streams
from bridge.tomlfile import Keys
from bridge.tomlstruct import dotted, plainly, snake
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
    registry = plugins.load(look.config.export.plugin_dirs)
    for plugin in registry.found:
        if plugin.error is not None:
            yield look.warning(
                ("export", "plugin_dirs"),
                f"plugin {plugin.name} ({plugin.origin}) is not loaded: {plugin.error}",
            )
    stored, damaged = _stored(look)
    for stream in look.config.streams.values():
        keys: Keys = ("streams", stream.name)
        for topic in stream.topics:
            if not is_bindable(topic):
                yield look.error(
                    (*keys, "topics"),
                    f"{topic!r} cannot be bound: `#` may only be the last level, and neither `$` nor "
                    "`streambridge/` may begin it",
                )
        if stream.name in damaged:
            yield look.error(
                keys,
                "both stored copies of its definition are damaged; stop the service and run "
                "`streambridge repair`",
            )
        elif stream.name in stored:
            yield from _compared(look, stream, stored[stream.name])
        yield from _exports(look, stream, registry)


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
        yield look.error(
            (*keys, "max_size"),
            f"the stream holds {format_size(held)} now; make it at least that, or purge the stream first",
        )


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
def _exports(look: Look, stream: MessageStreamDefinition, registry: plugins.Registry) -> Iterator[Finding]:
    """Whether each export's configuration satisfies its plugin."""
    owners: set[str] = set()
    for kind, items in stream.export_definition.items():
        for number, raw in enumerate(items):
            keys: Keys = ("streams", stream.name, "export", kind, number)
            found: list[tuple[list[str], str]] = []
            export = _read(registry, kind, raw, found)
            for inner, what in found:
                if look.knows(*keys, *inner):
                    yield look.error((*keys, *inner), what)
            if export is None:
                continue
            if export.identifier in owners:
                yield look.error(
                    (*keys, "identifier"), f"{export.identifier!r} is another export's too; choose another"
                )
            owners.add(export.identifier)
            if own := appends_to_itself(raw, stream.name):
                yield look.error((*keys, *map(snake, own)), f"{stream.name!r} {OWN_STREAM}")
            letters = export.dead_letter_stream
            if letters is not None and letters not in look.config.streams:
                yield look.warning(
                    (*keys, "dead_letter_stream"), f"there is no [streams.{dotted((letters,))}]; add it"
                )


def _read(
    registry: plugins.Registry, kind: str, raw: dict[str, Any], found: list[tuple[list[str], str]]
) -> ExportConfig | None:
    """Read an export's configuration, going on without each key that is wrong; None if that ends nowhere."""
    raw, wrong = dict(raw), set()
    while True:
        try:
            return registry.config(kind, raw, "export")
        except InvalidRequest as error:
            where, _, what = str(error).removeprefix("export").partition(": ")
            parts = [part for part in where.split(".") if part] or re.findall(r"field `(\w+)`", what)[:1]
            key = parts[0] if parts else ""
            if key in wrong:  # it is said to be missing now
                return None
            inner = [snake(part) for part in parts]
            missing = "missing required" in what
            found.append((inner[:-1] if missing else inner, _in_words_of_the_file(what)))
            if raw.pop(key.partition("[")[0], None) is None:
                return None
            wrong.add(key)


def _in_words_of_the_file(what: str) -> str:
    what = re.sub(r"`(\w+)`", lambda found: f"`{snake(found[1])}`", what)
    what = re.sub(r"^Object contains unknown field `\w+`", "unknown key", what)
    what = re.sub(r"^Object missing required field `(\w+)`", r"`\1` is missing; add \1 = ...", what)
    return plainly(what)


def credentials(look: Look) -> Iterator[Finding]:
    """Whether AWS credentials and regions can be found, if something goes to AWS."""
    registry = plugins.load(look.config.export.plugin_dirs)
    exports = [
        export
        for stream in look.config.streams.values()
        for kind, items in stream.export_definition.items()
        for raw in items
        if (export := _read(registry, kind, raw, [])) is not None and hasattr(export, "region")
    ]
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
