"""Definitions of streams: read from the wire, checked, and translated into what the store needs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from bridge import enums
from bridge.errors import InvalidDefinition
from bridge.model import (
    Limits,
    MessageStreamDefinition,
    Persistence,
    StrategyOnFull,
    known_keys,
    mistake,
    plain_definition,
)
from bridge.operations.validate import mistakes
from bridge.plugin.discovery import Registry
from bridge.printable import MASK, is_masked, masked
from bridge.streams.meta import MessageLimits, StorageSettings
from bridge.units import format_duration

log = logging.getLogger(__name__)


def checked(raw: Mapping[str, Any] | MessageStreamDefinition, registry: Registry) -> MessageStreamDefinition:
    """Read and validate a definition from the wire; raises InvalidDefinition.

    Enums may be given by name, and options by either name; what is returned is as it is stored.
    """
    if isinstance(raw, MessageStreamDefinition):
        definition = raw
    else:
        try:
            definition = msgspec.convert(
                enums.numbered(MessageStreamDefinition, raw), MessageStreamDefinition
            )
        except msgspec.ValidationError as error:
            path, what = mistake(error)
            raise InvalidDefinition(path, what, enums.choices(MessageStreamDefinition, path)) from None
    for found in mistakes(definition):
        raise found
    exports = definition.export_definition
    registry.check(exports)
    return msgspec.structs.replace(definition, export_definition=registry.stored(exports))


def without_secrets(definition: MessageStreamDefinition) -> MessageStreamDefinition:
    """The definition as it is shown: the URLs of its exports are `masked`."""

    def shown(raw: Mapping[str, Any]) -> dict[str, Any]:
        return {key: masked(value) if isinstance(value, str) else value for key, value in raw.items()}

    exports = {kind: [shown(raw) for raw in raws] for kind, raws in definition.export_definition.items()}
    return msgspec.structs.replace(definition, export_definition=exports)


def with_secrets(
    new: MessageStreamDefinition, old: MessageStreamDefinition | None
) -> MessageStreamDefinition:
    """A client's definition, with the stored URL wherever the client sends back its mask.

    Raises InvalidDefinition for a mask of another URL: it would be stored, and the secret be lost.
    """
    known = {
        (kind, raw.get("identifier"), key): value
        for kind, raws in (old.export_definition if old is not None else {}).items()
        for raw in raws
        for key, value in raw.items()
    }

    def secret(kind: str, number: int, raw: Mapping[str, Any], key: str) -> Any:
        value = raw[key]
        if not isinstance(value, str) or not is_masked(value):
            return value
        before = known.get((kind, raw.get("identifier"), key))
        if isinstance(before, str) and masked(before) == value:
            return before
        raise InvalidDefinition(
            ("exportDefinition", kind, number, key),
            f"`{MASK}` stands for a secret that is not stored under this identifier and URL",
            "write the secret itself",
        )

    exports = {
        kind: [{key: secret(kind, number, raw, key) for key in raw} for number, raw in enumerate(raws)]
        for kind, raws in new.export_definition.items()
    }
    return msgspec.structs.replace(new, export_definition=exports)


def stored(name: str, definition: bytes | None) -> MessageStreamDefinition:
    """Decode a stored definition; return the default one if it is lost or cannot be read.

    Unknown keys were written by another version, and are ignored.
    """
    try:
        raw = msgspec.json.decode(definition or b"", type=dict[str, Any])
        return msgspec.convert(known_keys(raw), MessageStreamDefinition)
    except (msgspec.DecodeError, ValueError, RecursionError, TypeError, AttributeError) as error:
        if definition is not None:
            log.error("its definition cannot be read (%s); update it", error, extra={"stream": name})
        return plain_definition(name)


def settings_of(definition: MessageStreamDefinition) -> StorageSettings:
    """Return the settings of a definition that the store needs."""
    limits = definition.limits
    return StorageSettings(
        max_size=definition.max_size,
        segment_size=definition.stream_segment_size,
        ttl=definition.time_to_live_millis,
        overwrite=definition.strategy_on_full is StrategyOnFull.OverwriteOldestData,
        memory=definition.persistence is Persistence.Memory,
        flush=definition.flush_on_write and definition.persistence is Persistence.File,
        free_exported=definition.retention == "exported",
        dedup_window=definition.deduplication_window_millis,
        limits=MessageLimits() if limits is None else _message_limits(limits),
        encryption=definition.encryption,
    )


NOTHING = "nothing"


def power_cut(definition: MessageStreamDefinition, sync_interval: int | None) -> str:
    """What a power cut may cost of a stream, for people: "nothing", "the last 1s", "all messages".

    `sync_interval` is the gateway's, in ms, if it is known.
    """
    if definition.persistence is Persistence.Memory:
        return "all messages"
    if definition.flush_on_write:
        return NOTHING
    return "the last sync_interval" if sync_interval is None else f"the last {format_duration(sync_interval)}"


def _message_limits(limits: Limits) -> MessageLimits:
    """Return the limits by the store's names. A limit that the store lacks is a TypeError, never ignored."""
    values = msgspec.structs.asdict(limits)
    values["max_age"] = values.pop("max_age_millis")
    values["discard_new"] = values.pop("discard") == "new"
    return MessageLimits(**values)
