"""The rules of a stream's definition that its types cannot say: each stands here once.

The StreamManager raises the first mistake; `streambridge check` reports all of them in the words of the file.
What an export's options may be, its plugin says (`Registry.config`).
"""

from __future__ import annotations

from collections.abc import Iterator

from bridge.errors import InvalidDefinition
from bridge.model import MessageStreamDefinition
from bridge.plugin.api import appends_to
from bridge.topics import REQUEST_LEVEL, is_topic_filter


def mistakes(definition: MessageStreamDefinition) -> Iterator[InvalidDefinition]:
    """What is wrong with a definition, all of it."""
    if (mistake := segment_size(definition)) is not None:
        yield mistake
    for number, topic in enumerate(definition.topics):
        if not _is_bindable(topic):
            yield InvalidDefinition(
                ("topics", number),
                f"{topic!r} cannot be bound to a stream: `#` may be the last level only, and neither '$' nor "
                f"'{REQUEST_LEVEL}/' at the beginning",
            )
    identifiers = set()
    for kind, exports in definition.export_definition.items():
        for number, raw in enumerate(exports):
            path = ("exportDefinition", kind, number)
            # A description reports an export by its identifier alone.
            identifier = repr(raw.get("identifier"))
            if identifier in identifiers:
                yield InvalidDefinition(
                    (*path, "identifier"), f"{identifier} is another export's too", "choose another"
                )
            if "identifier" in raw:
                identifiers.add(identifier)
            # What an export makes of a message must not be exported again by it: one message that is refused
            # would fill the disk.
            for key, name in appends_to(raw).items():
                if name == definition.name:
                    yield InvalidDefinition(
                        (*path, *key),
                        f"{name!r} is the stream itself: each message there would make another",
                        "name another stream",
                    )


def segment_size(definition: MessageStreamDefinition) -> InvalidDefinition | None:
    """A stream must hold at least one segment."""
    if definition.stream_segment_size <= definition.max_size:
        return None
    return InvalidDefinition(
        ("streamSegmentSize",), "is larger than", "make it at most that", other="maxSize"
    )


def _is_bindable(topic_filter: str) -> bool:
    """Whether a stream may have this filter among its topics."""
    first = topic_filter.split("/", 1)[0]
    return is_topic_filter(topic_filter) and not first.startswith("$") and first != REQUEST_LEVEL
