"""The declared streams: disk space, topics, stored definitions, and exports."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import msgspec

from bridge.access.accounts import Accounts
from bridge.config.checks.context import CheckContext, DeclaredExport, Finding, existing, finding
from bridge.config.settings import keys_to, sentence
from bridge.config.tomlfile import Keys
from bridge.config.tomlstruct import dotted, snake
from bridge.errors import InvalidDefinition
from bridge.export.cursor import stopped_with
from bridge.model import MessageStreamDefinition, Persistence, StrategyOnFull, changed_defaults
from bridge.operations.validate import circles, mistakes
from bridge.plugin.api import ExportConfig, appends_to
from bridge.readable import is_directory
from bridge.streams.reader import StreamMeta, StreamReader, list_damaged, list_streams
from bridge.topics import overlap
from bridge.units import format_size


def room(context: CheckContext) -> Iterator[Finding]:
    """Check that the streams, at their largest, fit on their file systems."""
    if not context.knows("gateway", "data_dir"):
        return
    stored, _ = _stored(context)
    for key, persistence in (("data_dir", Persistence.File), ("memory_dir", Persistence.Memory)):
        if not context.knows("gateway", key):
            continue
        streams = [stream for stream in context.config.streams.values() if stream.persistence is persistence]
        needed = sum(stream.max_size for stream in streams)
        used = sum(_size(stored[s.name]) for s in streams if s.name in stored and not stored[s.name].memory)
        directory = existing(getattr(context.config.gateway, key))
        free = shutil.disk_usage(directory).free + used
        if needed > free:
            yield context.warning(
                ("gateway", key),
                f"the streams may grow to {format_size(needed)}, but {directory} has room for "
                f"{format_size(free)}; lower their max_size or free space",
            )


def streams(context: CheckContext) -> Iterator[Finding]:
    """Check that every declared stream can be created or updated, and exported."""
    stored, damaged = _stored(context)
    definitions = {name: _definition(meta) for name, meta in stored.items()} | dict(context.config.streams)
    for stream in context.config.streams.values():
        keys: Keys = ("streams", stream.name)
        for mistake in (*mistakes(stream), *circles(stream, definitions)):
            inner = keys_to(mistake)
            if context.knows(*keys, *inner):
                inner = inner[:-1] if isinstance(inner[-1], int) else inner  # an entry of a list has no key
                yield context.error((*keys, *inner), sentence(mistake))
        if stream.name in damaged:
            yield context.error(
                keys,
                "both stored copies of its definition are damaged; stop the service and run "
                "`streambridge repair`",
            )
        elif stream.name in stored:
            yield from _compared(context, stream, stored[stream.name])
        for export in context.exports:
            if export.stream is stream:
                yield from _export(context, export)


def loaded_plugins(context: CheckContext) -> Iterator[Finding]:
    """Check that every plugin loads, and that the configured plugin directories exist."""
    if not context.knows("export", "plugin_dirs"):
        return
    section = context.document.data.get("export")
    if isinstance(section, dict) and "plugin_dirs" in section:  # the default need not exist
        for directory in context.config.export.plugin_dirs:
            if not is_directory(directory):
                yield context.error(
                    ("export", "plugin_dirs"),
                    f"there is no directory {directory}; create it, or correct the name",
                )
    for plugin in context.registry.found:
        if plugin.error is not None:
            yield context.error(
                ("export", "plugin_dirs"),
                f"plugin {plugin.name} ({plugin.origin}) is not loaded: {plugin.error}",
            )


def refused_messages(context: CheckContext) -> Iterator[Finding]:
    """Check that the stream for messages that no other stream can ever store exists."""
    name, keys = context.config.mqtt.refused_stream, ("mqtt", "refused_stream")
    if name is None or not context.knows(*keys):
        return
    if context.config.mqtt.mode == "external":
        yield context.warning(
            keys, 'not used: mode = "external" drops and counts such messages; remove this line'
        )
    elif context.knows("streams") and name not in context.config.streams and name not in _stored(context)[0]:
        yield context.warning(
            keys,
            f"there is no stream {name!r}; until it is declared as [streams.{name}] or created, messages "
            "that can never be stored are refused, as without refused_stream",
        )


def publishers(context: CheckContext) -> Iterator[Finding]:
    """Report rules that let no client publish on a topic of any stream: what none of them lists is forbidden.

    Messages of an upstream may go wherever its mappings lead.
    """
    mqtt = context.config.mqtt
    known = all(context.knows_all("mqtt", key) for key in ("mode", "acl", "role", "user", "listener"))
    topics = [topic for stream in context.config.streams.values() for topic in stream.topics]
    if not known or not topics or mqtt.mode != "embedded" or context.config.upstream:
        return
    for listener in mqtt.listeners():
        if not listener.listen:
            continue
        rules = [*listener.acl, *Accounts(listener.user, listener.role).rules]
        if not (listener.acl or listener.role):
            return
        allowed = [re.sub("[^/]*%[cu][^/]*", "+", one) for rule in rules for one in rule.publish]
        if any(overlap(one, topic) for one in allowed for topic in topics):
            return
    keys: Keys = (
        ("mqtt", "acl", 0) if mqtt.acl else ("mqtt", "role", 0) if mqtt.role else ("mqtt", "listener")
    )
    yield context.warning(
        keys,
        f"no rule or role lets a client publish on a topic of a declared stream, such as {topics[0]!r}; what "
        f"none of them lists is forbidden: add publish = [{json.dumps(topics[0])}] to a rule",
    )


def encrypted(context: CheckContext) -> Iterator[Finding]:
    """Check that there is a key for encrypted streams, and that nothing of them is stored unencrypted."""
    wanted = [stream for stream in context.config.streams.values() if stream.encryption]
    if not context.knows("streams"):
        return
    if context.knows("encryption", "key_file") and context.config.encryption.key_file is None:
        for stream in wanted:
            yield context.error(
                ("streams", stream.name, "encryption"),
                "there is no key; set key_file in [encryption]: `streambridge keys new FILE` creates one",
            )
    stored = _stored(context)[0]
    plain = {name for name in stored if not _definition(stored[name]).encryption}
    plain -= context.config.streams.keys()
    plain |= {stream.name for stream in context.config.streams.values() if not stream.encryption}
    for stream in wanted:
        for kind, exports in stream.export_definition.items():
            for number, raw in enumerate(exports):
                for path, name in appends_to(raw).items():
                    if name in plain:
                        keys = map(snake, path)
                        yield context.warning(
                            ("streams", stream.name, "export", kind, number, *keys),
                            f"messages of this encrypted stream are stored in {name!r}, which is not "
                            "encrypted; set `encryption = true` there too",
                        )
    refused = context.config.mqtt.refused_stream
    if wanted and refused in plain and context.knows("mqtt", "refused_stream"):
        yield context.warning(
            ("mqtt", "refused_stream"),
            f"messages for encrypted streams that can never be stored there are stored in {refused!r}, which "
            "is not encrypted; set `encryption = true` there too",
        )


def _definition(stored: StreamMeta) -> MessageStreamDefinition:
    return msgspec.json.decode(stored.definition, type=MessageStreamDefinition)


def _compared(
    context: CheckContext, stream: MessageStreamDefinition, stored: StreamMeta
) -> Iterator[Finding]:
    """Compare a definition with the stored one."""
    before = _definition(stored)
    keys: Keys = ("streams", stream.name)
    if context.knows(*keys, "persistence") and stream.persistence is not before.persistence:
        yield context.error(
            (*keys, "persistence"),
            f"the stream exists with persistence {before.persistence.name}, which cannot be changed; write "
            f'"{before.persistence.name}", or delete the stream',
        )
    for key, was, now, meaning in changed_defaults(before, stream):
        if not context.document.states((*keys, key)):
            yield context.warning(
                keys,
                f"the stream exists with {key} = {was}; the next start or reload makes it {now}, the "
                f"default: {meaning}; {key} = {was} keeps it as it is",
            )
    size = 0 if stored.memory else _size(stored)
    if context.knows(*keys, "max_size") and stream.max_size < min(size, before.max_size):
        if stream.strategy_on_full is StrategyOnFull.OverwriteOldestData:
            what = "its oldest messages are dropped at once"
        elif stream.retention == "exported":
            what = "exported messages are dropped, and new ones are refused until that is enough"
        else:
            what = "new messages are refused until enough of them have expired or were purged"
        yield context.warning((*keys, "max_size"), f"the stream holds {format_size(size)} now: {what}")


def _stored(context: CheckContext) -> tuple[dict[str, StreamMeta], list[str]]:
    """The stored streams by name, and the names of those whose definition is damaged."""
    if not context.knows("gateway", "data_dir"):
        return {}, []
    data_dir = context.config.gateway.data_dir
    stored, damaged = {}, []
    with suppress(OSError):  # reported by the checks of the directories
        stored = {meta.name: meta for meta in list_streams(data_dir)}
        damaged = list_damaged(data_dir)
    return stored, damaged


def _size(stored: StreamMeta) -> int:
    with closing(StreamReader(stored.directory)) as reader:
        return reader.total_bytes()


# -- exports -----------------------------------------------------------------------------------------
def _export(context: CheckContext, export: DeclaredExport) -> Iterator[Finding]:
    """Check one export's options."""
    yield from (finding("error", mistake) for mistake in export.mistakes)
    stream, keys, config = export.stream, export.keys, export.config
    if config is None:
        return
    if missing := context.registry.exporters[export.kind].lacks(config):
        yield context.error(keys, missing)
    if config.disabled and stream.retention == "exported":
        yield context.warning(
            (*keys, "disabled"),
            'a disabled export does not hold data back: with retention = "exported", messages that the '
            "enabled exports have passed are deleted, and this one skips them",
        )
    omits = any(rule.sample > 1 or rule.deadband for rule in config.reduce)
    limits = context.registry.exporters[export.kind].limits
    if omits and limits.contiguous and not limits.declares_filtered:
        yield context.warning(
            (*keys, "reduce"),
            "a batch of this kind holds consecutive numbers: each message that a sample or a dead band "
            "leaves out begins another batch, which may cost more bytes than it saves; use keep or drop, or "
            "another kind of export",
        )
    letters = config.dead_letter_stream
    if letters == "" and stream.retention == "exported":
        yield context.warning(
            (*keys, "dead_letter_stream"),
            "a message that the destination rejects is kept nowhere; without this line it is kept in "
            f"{stream.keeps_rejected_in!r}",
        )
    if letters and letters not in context.config.streams:
        yield context.warning(
            (*keys, "dead_letter_stream"), f"there is no [streams.{dotted((letters,))}]; add it"
        )


def places(context: CheckContext) -> Iterator[Finding]:
    """Report exports that write objects of one stream to one place, and leave out different messages.

    The ingest job takes each number from the first object that covers it. If that one has left it out, the
    table never gets it from the other.
    """
    known: dict[tuple[Any, ...], DeclaredExport] = {}
    for export in context.exports:
        config: Any = export.config
        if config is None or not context.registry.exporters[export.kind].limits.declares_filtered:
            continue
        place = export.stream.name, config.endpoint_url, config.bucket, config.prefix.strip("/")
        other = known.setdefault(place, export)
        if other.config is None or (other.config.topics, other.config.reduce) == (
            config.topics,
            config.reduce,
        ):
            continue
        yield context.error(
            (*export.keys, "prefix"),
            f"the export {other.config.identifier} of this stream writes to the same place, and its topics "
            "or reduce leave out other messages: the table would lack what only one of the two leaves "
            "out; give each a prefix of its own",
        )


def stopped(context: CheckContext) -> Iterator[Finding]:
    """Report exports that have stopped until their configuration changes, and whose has not changed."""
    for name, stored in _stored(context)[0].items():
        found: list[tuple[ExportConfig | None, Keys]] = []
        if name in context.config.streams:
            found += [
                (export.config, export.keys) for export in context.exports if export.stream.name == name
            ]
        else:
            definition = msgspec.json.decode(stored.definition, type=MessageStreamDefinition)
            for kind, items in definition.export_definition.items():
                for raw in items:
                    with suppress(InvalidDefinition):
                        found.append((context.registry.config(kind, raw), ()))
        for config, keys in found:
            why = None
            if config is not None and not config.disabled:
                with suppress(OSError):  # reported by the checks of the directories
                    why = stopped_with(context.config.gateway.data_dir, name, stored.epoch, config)
            if config is not None and why is not None:
                what = f"export {config.identifier} of stream {name} has stopped: {why}"
                yield context.error(keys, what) if keys else Finding("error", what)


def _aws_exports(context: CheckContext) -> list[tuple[Keys, Any]]:
    """The exports to AWS, with their keys."""
    return [(export.keys, export.config) for export in context.exports if hasattr(export.config, "region")]


def aws_names(context: CheckContext) -> Iterator[Finding]:
    """Check the names of regions and buckets."""
    aws = context.config.aws
    if aws.region and context.knows("aws", "region"):
        yield from _region(context, ("aws", "region"), aws.region, elsewhere=bool(aws.endpoint_url))
    for keys, export in _aws_exports(context):
        elsewhere = bool(export.endpoint_url or aws.endpoint_url)
        if export.region:
            yield from _region(context, (*keys, "region"), export.region, elsewhere=elsewhere)
        bucket = getattr(export, "bucket", None)
        if bucket is None or bucket.startswith("arn:") or (elsewhere and _ANY_BUCKET.fullmatch(bucket)):
            continue
        if not _BUCKET.fullmatch(bucket) or ".." in bucket or _IPV4.fullmatch(bucket):
            yield context.error(
                (*keys, "bucket"),
                f"{bucket!r} is not a valid bucket name: it needs 3 to 63 lower-case letters, digits, dots "
                "and hyphens, with a letter or digit at both ends; correct the name",
            )


# https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html; botocore's pattern elsewhere
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_ANY_BUCKET = re.compile(r"[A-Za-z0-9._-]{3,255}")
_IPV4 = re.compile(r"\d+(\.\d+){3}")


def _region(context: CheckContext, keys: Keys, region: str, *, elsewhere: bool) -> Iterator[Finding]:
    """Report an error for a name that no region can have, and a warning for an unknown one."""
    if not re.fullmatch(r"(?!\d+$)[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?", region):
        yield context.error(keys, f"{region!r} is not a valid region name; write it like eu-west-1")
        return
    if elsewhere:  # other stores name their regions freely
        return
    from botocore.loaders import Loader

    partitions = Loader().load_data("partitions")["partitions"]
    known = {name for partition in partitions for name in partition["regions"]}
    if region in known:
        return
    near = difflib.get_close_matches(region, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "write it like eu-west-1"
    if any(re.fullmatch(partition["regionRegex"].strip("^$"), region) for partition in partitions):
        yield context.warning(keys, f"the installed AWS library does not know region {region!r}; {hint}")
    else:
        yield context.error(keys, f"AWS has no region {region!r}; {hint}")


def credentials(context: CheckContext) -> Iterator[Finding]:
    """Check that AWS credentials and regions can be found, if anything is exported to AWS."""
    exports = [export for _, export in _aws_exports(context)]
    if not exports or not context.knows("aws"):
        return
    aws = context.config.aws
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session

    try:
        session = Session(profile=aws.profile)
        if aws.credentials is None and session.get_credentials() is None:
            yield context.warning(
                ("aws",),
                "no AWS credentials were found; set [aws.credentials.iot], profile or AWS_... variables",
            )
        default = aws.region or aws.endpoint_url or session.get_config_variable("region")
        default = default or os.environ.get("AWS_REGION")
        if not default and not all(e.region or getattr(e, "endpoint_url", None) for e in exports):
            yield context.warning(
                ("aws", "region"), "no region is set; set it here, in the export, or in AWS_REGION"
            )
    except BotoCoreError as error:
        yield context.error(("aws", "profile"), str(error))
