"""The exceptions of streambridge.

`status` is the response status of the Stream Manager protocol (AWS IoT Greengrass Stream Manager SDK, class
ResponseStatusCode). A message says what happened, where, and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar


class StreamBridgeError(Exception):
    """The base of all errors that streambridge raises on purpose."""

    status: ClassVar[int] = 1  # UnknownFailure
    status_name: ClassVar[str] = "UnknownFailure"
    result: Mapping[str, Any] = MappingProxyType({})  # further entries of the reply


class ConfigError(StreamBridgeError):
    """Raised when the configuration is wrong; the message has the path, the value and a remedy."""


class InvalidRequest(StreamBridgeError):
    """Raised when a request or a definition breaks a rule of the data model."""

    status = 3
    status_name = "InvalidRequest"


class StreamInUse(InvalidRequest):
    """Raised when a stream to be created exists already, or one to be changed is being deleted."""


class LimitReached(InvalidRequest):
    """Raised when something would be one too many, such as a tag."""


class KeyUnavailable(InvalidRequest):
    """Raised for an encryption key that this gateway cannot use."""


class InvalidDefinition(InvalidRequest):
    """Raised for a mistake in a stream's definition; replies have these fields too.

    `path` leads to the value, by the names on the wire: ("topics", 0). `what` is wrong, a text that the name
    of another key (`other`) may complete. `remedy` is what to do, empty if obvious.
    """

    def __init__(self, path: tuple[str | int, ...], what: str, remedy: str = "", *, other: str = "") -> None:
        self.path, self.what, self.remedy, self.other = path, what, remedy, other
        where = "" if path[:1] == ("exportDefinition",) else "definition"
        for key in path:
            where += f"[{key}]" if isinstance(key, int) else f".{key}" if where else key
        super().__init__(f"{where}: {self.sentence(other)}")
        self.result = {"path": list(path), "what": what, "remedy": remedy, "other": other}

    def sentence(self, other: str) -> str:
        """What is wrong and what to do; `other` names the other key."""
        return self.what + (f" {other}" if other else "") + (f"; {self.remedy}" if self.remedy else "")


class UpdateNotAllowed(InvalidDefinition):
    """Raised when an update changes a fixed property, such as the persistence."""

    status = 17
    status_name = "UpdateNotAllowed"


class UpdateFailed(StreamBridgeError):
    """Raised when a definition has changed since the update was prepared."""

    status = 16
    status_name = "UpdateFailed"


class UnknownOperation(StreamBridgeError):
    """Raised for an operation that does not exist."""

    status = 18
    status_name = "UnknownOperation"


class StreamNotFound(StreamBridgeError):
    """Raised when no stream has the given name."""

    status = 5
    status_name = "ResourceNotFound"


class ConsumerNotFound(StreamBridgeError):
    """Raised when a stream has no consumer of the given name."""

    status = 5
    status_name = "ResourceNotFound"


class ExportNotFound(StreamBridgeError):
    """Raised when a stream has no export of the given name."""

    status = 5
    status_name = "ResourceNotFound"


class ResponseTooLarge(StreamBridgeError):
    """Raised when a reply would be too large."""

    status = 7
    status_name = "ResponsePayloadTooLarge"


class NotEnoughMessages(StreamBridgeError):
    """Raised when a read does not get its minimum of messages in time."""

    status = 13
    status_name = "NotEnoughMessages"


class Unauthorized(StreamBridgeError):
    """Raised when a client has no right to an operation."""

    status = 2
    status_name = "Unauthorized"


class Undecided(Unauthorized):
    """Raised when no plugin has said in time whether a client has a right: it may have it a moment later."""


class RetainedFull(StreamBridgeError):
    """Raised for a retained message beyond `[mqtt.limits] retained_messages` or `retained_bytes`."""


class StreamError(StreamBridgeError):
    """The base of the errors of one stream's storage."""


class NoStream(StreamError):
    """Raised for a message on a topic below `streams/` that no stream is bound to."""

    status = 5
    status_name = "ResourceNotFound"


class StreamFull(StreamError):
    """Raised when an append would pass a limit of a stream that rejects new data."""


class MessageTooLarge(StreamError):
    """Raised when a message is larger than its stream or a limit allows."""

    status = 4
    status_name = "RequestPayloadTooLarge"


class StorageFailed(StreamError):
    """Raised when a write or a sync failed; nothing of that group was acknowledged.

    `public` is what a client may be told: it names no path. Empty: nothing.
    """

    def __init__(self, message: str, public: str = "") -> None:
        super().__init__(message)
        self.public = public


class StreamDeleted(StorageFailed):
    """Raised for a message that was not stored yet when its stream was deleted."""

    status = 5
    status_name = "ResourceNotFound"


class JournalFailed(StorageFailed):
    """Raised when a message is not stored because the journal of sessions cannot be written."""


class CorruptData(StreamError):
    """Raised when stored bytes fail their check; they are never returned as data."""

    status = 14
    status_name = "MessageStoreReadError"

    def __init__(self, message: str, segment: int = -1) -> None:
        """`segment` is the first sequence number of the damaged segment."""
        super().__init__(message)
        self.segment = segment


class EncryptionKeyError(StreamBridgeError):
    """Raised when a key of encryption at rest is missing, cannot be read, or is another one."""


class DataDirectoryBusy(StreamBridgeError):
    """Raised when another process already writes to the data directory."""


class OtherFormat(StreamBridgeError):
    """Raised for a data directory of a newer version, and for files still to be upgraded."""


class PluginError(StreamBridgeError):
    """Raised when an exporter plugin breaks the plugin contract."""
