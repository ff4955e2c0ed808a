"""Bindings: which streams a message on a topic is appended to.

A stream is bound to the topic filters of its definition and to everything below `streams/NAME`. A stream that
is declared but unavailable is bound too, by a `Refusal` in its place: its messages are refused, since an
acknowledgement would promise that they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bridge.errors import NoStream, StorageFailed, StreamError
from bridge.model import MessageStreamDefinition
from bridge.streams.stream import Stream
from bridge.topics import FilterTree, is_topic_filter

STREAM_TOPICS = "streams/"


class Refusal:
    """Replaces an unavailable stream, and refuses every message."""

    next_sequence = 0
    lasting = True

    def __init__(self, name: str, error: StreamError) -> None:
        self.name, self._error = name, error

    def append(self, topic: bytes, payload: bytes, headers: bytes = b"", message_id: bytes = b"") -> int:
        """Refuse the message: the sender gets an error, not an acknowledgement."""
        raise self._error.with_traceback(None)  # otherwise each message would lengthen the traceback

    ensure_admits = append

    def find(self, message_id: bytes) -> int | None:
        """Return None, because no id is known."""
        return None

    def after_commit(self, done: Callable[[StreamError | None], None], heard: float = 0.0) -> None:
        """Nothing is ever pending."""
        done(None)


class Bindings:
    """The streams by topic, and the unavailable ones.

    `on_changed` is called when a stream becomes unavailable or is so no longer. After `bind` and `unbind` the
    caller calls `changed`, once for both.
    """

    def __init__(self) -> None:
        self.on_changed: list[Callable[[], None]] = []
        self._tree: FilterTree[Stream | Refusal] = FilterTree()
        self._refusals: dict[str, tuple[MessageStreamDefinition, Refusal, str]] = {}

    def match(self, topic: str) -> tuple[Stream | Refusal, ...]:
        """Return the streams to which a message on `topic` is appended. Callers cache it per topic.

        A client that publishes below `streams/` means a stream. If the name is misspelt, the message is
        refused, because an acknowledgement would promise that it is stored.
        """
        found = tuple(dict.fromkeys(self._tree.match(topic)))
        if not found and topic.startswith(STREAM_TOPICS):
            name = topic.split("/", 2)[1]
            error = NoStream(f"there is no stream {name!r} for topic {topic!r}; create it first")
            found = (Refusal(name, error),)
        return found

    def bind(self, stream: Stream, definition: MessageStreamDefinition) -> None:
        """Append messages on its topics to a stream, which is available from now on."""
        self.accept(stream.name)
        for topic_filter in _filters(definition):
            self._tree.add(topic_filter, stream)

    def unbind(self, stream: Stream, definition: MessageStreamDefinition) -> None:
        """Undo `bind`; calls nobody, since `bind` may follow at once."""
        for topic_filter in _filters(definition):
            self._tree.remove(topic_filter, stream)

    @property
    def refused(self) -> dict[str, str]:
        """The unavailable streams, and why they are."""
        return {name: why for name, (_, _, why) in self._refusals.items()}

    def refuse(self, definition: MessageStreamDefinition, why: str) -> None:
        """Refuse messages for an unavailable stream."""
        self.accept(definition.name)
        refusal = Refusal(definition.name, StorageFailed(f"stream {definition.name!r} is unavailable: {why}"))
        self._refusals[definition.name] = definition, refusal, why
        for topic_filter in filter(is_topic_filter, _filters(definition)):
            self._tree.add(topic_filter, refusal)
        self.changed()

    def accept(self, name: str) -> None:
        """Undo `refuse`, if it was called for this name."""
        definition, refusal, _ = self._refusals.pop(name, (None, None, None))
        if definition is not None and refusal is not None:
            for topic_filter in _filters(definition):
                self._tree.remove(topic_filter, refusal)
            self.changed()

    def refuse_only(self, names: Iterable[str]) -> None:
        """Undo `refuse` for all other names."""
        for name in self._refusals.keys() - set(names):
            self.accept(name)

    def changed(self) -> None:
        """Call those who cache what `match` returned."""
        for call in self.on_changed:
            call()


def _filters(definition: MessageStreamDefinition) -> list[str]:
    return [*definition.topics, f"{STREAM_TOPICS}{definition.name}/#"]
