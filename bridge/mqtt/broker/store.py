"""What the MQTT front end needs of the streams, as protocols: `bridge.operations.manager` implements them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.errors import StreamError


class Committer(Protocol):
    """Something that can tell when what it was given is safe: a stream, or the journal."""

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

    def append(self, topic: bytes, payload: bytes, headers: bytes = b"") -> int:
        """Add a message to the group that is being gathered, or raise a StreamError at once."""

    def ensure_admits(self, topic: bytes, payload: bytes, headers: bytes = b"") -> object:
        """Raise the StreamError that `append` would raise."""


class Store(Protocol):
    """All streams, as far as MQTT is concerned."""

    on_bindings_changed: list[Callable[[], None]]
    on_pressure: list[Callable[[bool], None]]

    @property
    def under_pressure(self) -> bool:
        """Whether too much waits for the disk: whoever publishes is to be held."""

    def wants_client(self, name: str) -> bool:
        """Whether messages of a stream are to be kept with the client id of who published them."""

    def bound(self, topic: str) -> tuple[Stream, ...]:
        """The streams that messages on a topic go to."""
