"""Rules for a stream's definition that its types cannot express.

The StreamManager raises the first mistake. `streambridge check` reports all of them, with the keys of the
file. The plugin of an export checks its options (`Registry.config`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bridge.errors import InvalidDefinition
from bridge.model import MessageStreamDefinition
from bridge.plugin.api import appends_to
from bridge.topics import REQUEST_LEVEL, filter_mistake


def mistakes(definition: MessageStreamDefinition) -> Iterator[InvalidDefinition]:
    """Yield all mistakes in a definition."""
    if (mistake := segment_size(definition)) is not None:
        yield mistake
    for number, topic in enumerate(definition.topics):
        if (wrong := _unbindable(topic)) is not None:
            yield InvalidDefinition(("topics", number), wrong)
    identifiers = set()
    for kind, exports in definition.export_definition.items():
        for number, raw in enumerate(exports):
            path = ("exportDefinition", kind, number)
            # In a description, only the identifier distinguishes exports.
            identifier = repr(raw.get("identifier"))
            if identifier in identifiers:
                yield InvalidDefinition(
                    (*path, "identifier"),
                    f"another export has the identifier {identifier} too",
                    "choose another",
                )
            if "identifier" in raw:
                identifiers.add(identifier)
            # An export must not append to its own stream: one rejected message would fill the disk.
            for key, name in appends_to(raw).items():
                if name == definition.name:
                    yield InvalidDefinition(
                        (*path, *key),
                        f"{name!r} is the exported stream itself: each message in it would append another",
                        "name another stream",
                    )


def circles(
    definition: MessageStreamDefinition, others: Mapping[str, MessageStreamDefinition]
) -> Iterator[InvalidDefinition]:
    """Yield exports that append to another stream, from which exports lead back to this one.

    A message that each of them rejects would go round without end, and grow with each round. `others` are the
    definitions of all streams; the one of this stream does not count.
    """
    for kind, exports in definition.export_definition.items():
        for number, raw in enumerate(exports):
            for key, name in appends_to(raw).items():
                if name != definition.name and (way := _way(name, definition.name, others)):
                    yield InvalidDefinition(
                        ("exportDefinition", kind, number, *key),
                        f"exports lead from {name!r} back to this stream ({' -> '.join(way)}): a rejected "
                        "message could go round without end",
                        "name a stream that leads nowhere",
                    )


def _way(start: str, end: str, definitions: Mapping[str, MessageStreamDefinition]) -> list[str] | None:
    """Return the streams from one to another, as their exports append to them; None if there is no way."""
    ways = [[start]]
    seen = {start}
    for way in ways:  # it grows
        if (definition := definitions.get(way[-1])) is None:
            continue
        for raw in (raw for exports in definition.export_definition.values() for raw in exports):
            for name in appends_to(raw).values():
                if name == end:
                    return [*way, end]
                if name not in seen:
                    seen.add(name)
                    ways.append([*way, name])
    return None


def segment_size(definition: MessageStreamDefinition) -> InvalidDefinition | None:
    """Check that a stream has room for at least one segment."""
    if definition.stream_segment_size <= definition.max_size:
        return None
    return InvalidDefinition(
        ("streamSegmentSize",), "is larger than", "make it at most that", other="maxSize"
    )


def _unbindable(topic_filter: str) -> str | None:
    """Why a stream cannot have this filter among its topics; None if it can."""
    first = topic_filter.partition("/")[0]
    if (mistake := filter_mistake(topic_filter)) is None and first in ("$SYS", REQUEST_LEVEL):
        return f"{topic_filter!r}: topics below {first}/ belong to the broker, and no stream stores them"
    return mistake
