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
from bridge.streams.meta import MessageLimits, StorageSettings

log = logging.getLogger(__name__)


def checked(raw: Mapping[str, Any] | MessageStreamDefinition, registry: Registry) -> MessageStreamDefinition:
    """Read and validate a definition from the wire; raises InvalidDefinition.

    Enums may be given by name; the definition that is returned, and stored, has their numbers.
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
    return msgspec.structs.replace(definition, export_definition=registry.numbered(exports))


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


def _message_limits(limits: Limits) -> MessageLimits:
    """Return the limits by the store's names. A limit that the store lacks is a TypeError, never ignored."""
    values = msgspec.structs.asdict(limits)
    values["max_age"] = values.pop("max_age_millis")
    values["discard_new"] = values.pop("discard") == "new"
    return MessageLimits(**values)
