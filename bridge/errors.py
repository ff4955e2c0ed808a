"""Every exception of streambridge, on one screen.

`status` is the response status of the Stream Manager protocol that a front end answers with
(AWS IoT Greengrass Stream Manager SDK, class ResponseStatusCode). A message says what happened,
where, and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar


class StreamBridgeError(Exception):
    """The base of all errors that streambridge raises on purpose."""

    status: ClassVar[int] = 1  # UnknownFailure
    status_name: ClassVar[str] = "UnknownFailure"
    result: Mapping[str, Any] = MappingProxyType(
        {}
    )  # what was done all the same; entries of the reply beside the error


class ConfigError(StreamBridgeError):
    """Raised when the configuration is wrong; the message names path, value and remedy."""


class InvalidRequest(StreamBridgeError):
    """Raised when a request or a definition breaks a rule of the data model."""

    status = 3
    status_name = "InvalidRequest"


class InvalidDefinition(InvalidRequest):
    """Raised for a mistake in a stream's definition; the reply of a request has its fields too.

    `path` leads to the value, in the names of the wire: ("topics", 0). `what` is wrong with it, in words that
    `other`, another key, may end; `remedy` is what to do, empty if that is plain.
    """

    def __init__(self, path: tuple[str | int, ...], what: str, remedy: str = "", *, other: str = "") -> None:
        self.path, self.what, self.remedy, self.other = path, what, remedy, other
        where = "" if path[:1] == ("exportDefinition",) else "definition"
        for key in path:
            where += f"[{key}]" if isinstance(key, int) else f".{key}" if where else key
        super().__init__(f"{where}: {self.sentence(other)}")
        self.result = {"path": list(path), "what": what, "remedy": remedy, "other": other}

    def sentence(self, other: str) -> str:
        """What is wrong and what to do, with a name for the other key."""
        return self.what + (f" {other}" if other else "") + (f"; {self.remedy}" if self.remedy else "")


class UpdateNotAllowed(InvalidDefinition):
    """Raised when an update changes what may not change, such as the persistence."""

    status = 17
    status_name = "UpdateNotAllowed"


class UpdateFailed(StreamBridgeError):
    """Raised when a definition is no longer what an update was made for."""

    status = 16
    status_name = "UpdateFailed"


class UnknownOperation(StreamBridgeError):
    """Raised for an operation that there is not."""

    status = 18
    status_name = "UnknownOperation"


class StreamNotFound(StreamBridgeError):
    """Raised when no stream has the given name."""

    status = 5
    status_name = "ResourceNotFound"


class ResponseTooLarge(StreamBridgeError):
    """Raised when what is asked for is more than one reply may hold."""

    status = 7
    status_name = "ResponsePayloadTooLarge"


class NotEnoughMessages(StreamBridgeError):
    """Raised when a read cannot be given its minimum of messages in time."""

    status = 13
    status_name = "NotEnoughMessages"


class Unauthorized(StreamBridgeError):
    """Raised when a client may not do what it asks for."""

    status = 2
    status_name = "Unauthorized"


class RetainedFull(StreamBridgeError):
    """Raised for a retained message beyond `[mqtt.limits] retained_messages` or `retained_bytes`."""


class StreamError(StreamBridgeError):
    """The base of what can go wrong with one stream's storage."""


class NoStream(StreamError):
    """Raised for a message on a topic below `streams/` that no stream is bound to."""

    status = 5
    status_name = "ResourceNotFound"


class StreamFull(StreamError):
    """Raised when an append would pass a limit of a stream that rejects new data."""


class MessageTooLarge(StreamError):
    """Raised when one message is larger than a stream or a segment can ever hold."""

    status = 4
    status_name = "RequestPayloadTooLarge"


class StorageFailed(StreamError):
    """Raised when the disk refused a write or a sync; nothing of that group was acknowledged."""


class CorruptData(StreamError):
    """Raised when stored bytes fail their check; they are never returned as data."""

    status = 14
    status_name = "MessageStoreReadError"

    def __init__(self, message: str, segment: int = -1) -> None:
        """`segment` is the first sequence number of the damaged segment."""
        super().__init__(message)
        self.segment = segment


class DataDirectoryBusy(StreamBridgeError):
    """Raised when another process already writes to the data directory."""


class PluginError(StreamBridgeError):
    """Raised when an exporter plugin breaks the plugin contract."""
