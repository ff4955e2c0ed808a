"""What the broker needs of the streams, as protocols: `bridge.operations.manager` implements them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from bridge.errors import StreamError
    from bridge.operations.reading import ReadMessagesOptions
    from bridge.streams.segment import StreamMessage


class Committer(Protocol):
    """Something that commits what it is given: a stream, or the journal."""

    def after_commit(self, done: Callable[[StreamError | None], None]) -> None:
        """Call `done` once all that was given so far is committed (None) or has failed (why)."""


class Stream(Committer, Protocol):
    """One stream, as far as a PUBLISH is concerned."""

    @property
    def name(self) -> str:
        """The stream's name."""

    @property
    def next_sequence(self) -> int:
        """The number after the newest committed message."""

    @property
    def lasting(self) -> bool:
        """Whether what is committed survives the end of this process."""

    def append(self, topic: bytes, payload: bytes, headers: bytes = b"", message_id: bytes = b"") -> int:
        """Add a message to the group that is being gathered, or raise a StreamError at once.

        One whose id is known adds nothing. Returns the number of the message, or that of the first one.
        """

    def ensure_admits(
        self, topic: bytes, payload: bytes, headers: bytes = b"", message_id: bytes = b""
    ) -> object:
        """Raise the StreamError that `append` would raise."""

    def find(self, message_id: bytes) -> int | None:
        """The number of the message with an id, if that is in the deduplication window, or a StreamError."""


class Store(Protocol):
    """All streams, as far as MQTT is concerned."""

    on_bindings_changed: list[Callable[[], None]]
    on_pressure: list[Callable[[bool], None]]

    @property
    def definitions(self) -> Mapping[str, object]:
        """Every stream by name."""

    def stream(self, name: str) -> Stream:
        """A stream that exists."""

    async def read(self, name: str, options: ReadMessagesOptions) -> Sequence[StreamMessage]:
        """Messages of a stream; raises NotEnoughMessages, CorruptData or OSError."""

    async def sync(self, names: Iterable[str]) -> set[str]:
        """Bring what these streams have committed to the disk; returns those that cannot be synced."""

    @property
    def under_pressure(self) -> bool:
        """Whether too much waits for the disk: publishers are to be held."""

    def gather(self, do: Callable[[], None]) -> None:
        """Call `do`, and commit at once what it appends: it has all that there is for now."""

    def wants_client(self, name: str) -> bool:
        """Whether a stream keeps the client id of a message's publisher."""

    def bound(self, topic: str) -> tuple[Stream, ...]:
        """The streams that messages on a topic go to."""
