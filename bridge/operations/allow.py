"""What exports in a client's definition may reach: the configuration's `[export.allow]`.

The type of an exporter's setting declares what it reaches: an `Endpoint`, a `Bucket`, or a `SecretFile`,
which only the configuration may name. A client's export must be of an allowed kind, with allowed values in
each of these settings.

An export that the stream already has may stay, because a client must be able to describe a stream, change
something else and send all of it back. All of these settings must then be unchanged. Otherwise a secret of
the configuration could be sent to another endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from msgspec.structs import fields

from bridge.errors import Unauthorized
from bridge.plugin.api import ExportConfig
from bridge.settingtypes import Means, meanings

if TYPE_CHECKING:
    from bridge.model import MessageStreamDefinition
    from bridge.plugin.allow import Allow
    from bridge.plugin.discovery import Registry

Exports = Mapping[str, list[dict[str, Any]]]


def check_allowed(
    allow: Allow, registry: Registry, new: MessageStreamDefinition, old: MessageStreamDefinition | None
) -> None:
    """Raise Unauthorized for the first export of a client's definition that is not allowed.

    `new` is a valid definition, `old` the current one.
    """
    known = {} if old is None else _reaches(registry, old.export_definition)
    for key, reach in _reaches(registry, new.export_definition).items():
        if known.get(key) != reach:
            _check(allow, key[0], key[1], reach)


def _check(allow: Allow, kind: str, identifier: str, reach: Mapping[str, tuple[Means, str]]) -> None:
    where = f"exportDefinition.{kind} {identifier!r}"
    if kind not in allow.kinds:
        raise Unauthorized(
            f"{where}: a client may not define exports of kind {kind!r}; declare the stream in the "
            "configuration, or add the kind to [export.allow] kinds"
        )
    for key, (guard, value) in reach.items():
        if guard is Means.SECRET_FILE:
            raise Unauthorized(
                f"{where}: `{key}` names a file of this gateway; only the configuration may do that"
            )
        if guard is Means.ENDPOINT and not allow.endpoint(value):
            raise Unauthorized(
                f"{where}: the host of `{key}` is not in [export.allow] endpoints; add it there"
            )
        if guard is Means.BUCKET and not allow.bucket(value):
            raise Unauthorized(f"{where}: `{key}` is not in [export.allow] buckets; add it there")


def _reaches(registry: Registry, exports: Exports) -> dict[tuple[str, str], dict[str, tuple[Means, str]]]:
    """Return, by kind and identifier of each export, the guards and values of its guarded keys."""
    found = {}
    for kind, configs in exports.items():
        exporter = registry.exporters.get(kind)
        for raw in configs:
            guards = guards_of(exporter.Config) if exporter is not None else {}
            found[kind, str(raw.get("identifier"))] = {
                key: (guard, str(raw[key])) for key, guard in guards.items() if raw.get(key) is not None
            }
    return found


@cache
def guards_of(config: type[ExportConfig]) -> dict[str, Means]:
    """Return the guarded keys of an exporter's Config, as on the wire."""
    return {
        field.encode_name: guard
        for field in fields(config)
        for guard in meanings(field.type) & {Means.ENDPOINT, Means.BUCKET, Means.SECRET_FILE}
    }
