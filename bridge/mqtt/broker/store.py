"""The streams as the broker uses them, as protocols that `bridge.operations.manager` implements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from bridge.errors import StreamError
    from bridge.operations.reading import ReadMessagesOptions
    from bridge.streams.segment import StreamMessage


class Committer(Protocol):
    """A stream or the journal, which commits what it is given."""

    def after_commit(self, done: Callable[[StreamError | None], None], heard: float = ...) -> None:
        """Call `done` once everything given so far is committed (None) or has failed (the error).

        `heard` is when the client that waits was heard before this. A stream may use it to delay its commit;
        without it, it does not.
        """


class Stream(Committer, Protocol):
    """One stream, as a PUBLISH uses it."""

    @property
    def name(self) -> str:
        """The stream's name."""

    @property
    def next_sequence(self) -> int:
        """The number after the newest committed message."""

    @property
    def lasting(self) -> bool:
        """Return whether committed messages survive the end of this process."""

    def append(self, topic: bytes, payload: bytes, headers: bytes = b"", message_id: bytes = b"") -> int:
        """Add a message to the pending group, or raise a StreamError at once.

        A message with a known id adds nothing. Returns the number of the message, or of the first one.
        """

    def ensure_admits(
        self, topic: bytes, payload: bytes, headers: bytes = b"", message_id: bytes = b""
    ) -> object:
        """Raise the StreamError that `append` would raise."""

    def find(self, message_id: bytes) -> int | None:
        """Return the number of the message with an id in the deduplication window. Raises StreamError."""


class Store(Protocol):
    """All streams, as MQTT uses them."""

    on_bindings_changed: list[Callable[[], None]]
    on_pressure: list[Callable[[bool], None]]

    @property
    def definitions(self) -> Mapping[str, object]:
        """Every stream by name."""

    def stream(self, name: str) -> Stream:
        """Return an existing stream."""

    async def read(self, name: str, options: ReadMessagesOptions) -> Sequence[StreamMessage]:
        """Read messages of a stream. Raises NotEnoughMessages, CorruptData or OSError."""

    async def sync(self, names: Iterable[str]) -> set[str]:
        """Sync the committed messages of these streams. Returns those that cannot be synced."""

    @property
    def under_pressure(self) -> bool:
        """Return whether too much waits for the disk, so publishers must be held."""

    def gather(self, do: Callable[[], None]) -> None:
        """Call `do`, which appends everything that has arrived, and commit that at once."""

    def wants_client(self, name: str) -> bool:
        """Return whether a stream keeps the client id of a message's publisher."""

    def bound(self, topic: str) -> tuple[Stream, ...]:
        """Return the streams to which messages on a topic go."""
