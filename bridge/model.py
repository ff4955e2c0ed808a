"""The data model of AWS IoT Greengrass Stream Manager, and our extensions to it.

Names on the wire are the SDK's (camelCase), with its defaults and ranges (package `stream-manager` 1.1.2,
module `stream_manager.data`). Enumerations are sent as numbers. The SDK does not know the extensions
(`topics`, `limits`, `retention`, `deduplicationWindowMillis`, `description`, `tags`, `delivery`,
`encryption`), which are never sent to it.

The keys of `exportDefinition` are the kinds of the loaded exporter plugins; each kind checks its own list of
configurations.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from enum import IntEnum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from bridge.settingtypes import Bytes, Millis

KIB = 1024
MIB = 1024 * KIB
DEFAULT_MAX_SIZE = 256 * MIB
DEFAULT_SEGMENT_SIZE = 16 * MIB
REJECTED = "-rejected"  # at the end of the name of a stream's own dead-letter stream
MAX_INT64 = 2**63 - 1
MAX_INT32 = 2**31 - 1
MAX_MILLIS = 9_223_372_036_854

Name = Annotated[str, Meta(min_length=1, max_length=255, pattern=r"^[\w ,.\-]+\Z")]


TagName = Annotated[str, Meta(max_length=64, pattern=r"^[a-z][a-z0-9_]*\Z")]
TagValue = Annotated[str, Meta(max_length=255)]


# The Firehose API's: AWS allows \p{L}, \p{Z}, \p{N} and these characters, and reserves `aws:`.
LabelName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^(?!aws:)[\w .:/=+\-@%]+\Z")]
LabelValue = Annotated[str, Meta(max_length=256, pattern=r"^[\w .:/=+\-@%]*\Z")]


class StrategyOnFull(IntEnum):
    """What an append to a full stream does."""

    RejectNewData = 0
    OverwriteOldestData = 1


class Persistence(IntEnum):
    """Where a stream keeps its messages; Memory does not survive a restart."""

    File = 0
    Memory = 1


class Limits(Struct, rename="camel", kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Message limits, as in NATS JetStream; None is no limit.

    max_bytes counts topic and payload; max_age_millis is counted from the ingest time.
    """

    max_messages: Annotated[int, Meta(ge=1, le=MAX_INT64)] | None = None
    max_bytes: Annotated[Bytes, Meta(ge=1, le=MAX_INT64)] | None = None
    max_age_millis: Annotated[Millis, Meta(ge=1, le=MAX_MILLIS)] | None = None
    max_messages_per_topic: Annotated[int, Meta(ge=1, le=MAX_INT64)] | None = None
    max_message_size: Annotated[Bytes, Meta(ge=1, le=MAX_INT32)] | None = None
    discard: Literal["old", "new"] = "old"


class Delivery(Struct, rename="camel", kw_only=True, forbid_unknown_fields=True, frozen=True):
    """What the Firehose API stores of a delivery stream besides its export.

    `tags`, `role_arn` and `error_output_prefix` are returned as given. `created` and `updated`, when the
    destination was last changed, are Unix times in ms. A stream that is `deleting` takes no more records
    from that API, and is deleted once its exports have passed all that it holds.
    """

    tags: Annotated[dict[LabelName, LabelValue], Meta(max_length=50)] = {}
    role_arn: Annotated[str, Meta(max_length=512)] = ""
    error_output_prefix: Annotated[str, Meta(max_length=1024)] = ""
    created: Annotated[int, Meta(ge=0, le=MAX_MILLIS)] | None = None
    updated: Annotated[int, Meta(ge=0, le=MAX_MILLIS)] | None = None
    deleting: bool = False


class MessageStreamDefinition(Struct, rename="camel", kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What a stream is: storage, limits, exports, and (our extensions) topics and message limits.

    Sizes are bytes, times are milliseconds. `retention` "exported": when space is needed, the oldest segments
    go that all exports have delivered. "limits" is the default of the wire only; see `config.settings`.
    """

    name: Name
    strategy_on_full: StrategyOnFull
    max_size: Annotated[Bytes, Meta(ge=1024, le=MAX_INT64)] = DEFAULT_MAX_SIZE
    stream_segment_size: Annotated[Bytes, Meta(ge=1024, le=MAX_INT32)] = DEFAULT_SEGMENT_SIZE
    time_to_live_millis: Annotated[Millis, Meta(ge=60_000, le=MAX_MILLIS)] | None = None
    persistence: Persistence = Persistence.File
    flush_on_write: bool = False
    export_definition: dict[str, list[dict[str, Any]]] = {}
    topics: list[str] = []
    limits: Limits | None = None
    retention: Literal["limits", "exported"] = "limits"
    deduplication_window_millis: Annotated[Millis, Meta(ge=1, le=MAX_MILLIS)] | None = None
    description: Annotated[str, Meta(max_length=1000)] = ""
    tags: Annotated[dict[TagName, TagValue], Meta(max_length=16)] = {}
    delivery: Delivery | None = None
    encryption: bool = False

    @property
    def keeps_rejected_in(self) -> str:
        """The stream for messages that a destination rejects, if an export names none; empty: they go.

        With retention "exported", the copy in this stream goes as soon as space is needed.
        """
        return f"{self.name[:246]}{REJECTED}" if self.retention == "exported" else ""

    def for_rejected(self) -> MessageStreamDefinition:
        """The definition of `keeps_rejected_in`: it is never full silently, and a power cut takes nothing."""
        return MessageStreamDefinition(
            name=self.keeps_rejected_in,
            strategy_on_full=StrategyOnFull.RejectNewData,
            max_size=64 * MIB,
            stream_segment_size=segment_for(64 * MIB),
            flush_on_write=True,
            retention="exported",
            description=f"messages that destinations of {self.name} have rejected",
            encryption=self.encryption,
        )


def segment_for(max_size: int) -> int:
    """The segment size of a stream for which none is given: an eighth can be freed at a time.

    If a stream had one segment, it would be full until its exports have passed all of it.
    """
    return min(DEFAULT_SEGMENT_SIZE, max(max_size // 8, 8 * KIB), max_size)


def changed_defaults(
    before: MessageStreamDefinition, now: MessageStreamDefinition
) -> list[tuple[str, str, str, str]]:
    """What an earlier version's default for declared streams was: key, old and new value, what it means.

    Only settings that have the old default in `before` and the new one in `now`.
    """
    found = []
    if (before.retention, now.retention) == ("limits", "exported"):
        meaning = "when it is full, the oldest segments go that its declared exports have delivered"
        found.append(("retention", '"limits"', '"exported"', meaning))
    if now.flush_on_write > before.flush_on_write and now.persistence is Persistence.File:
        meaning = "a message is acknowledged when it is on the disk, and a power cut takes none"
        found.append(("flush_on_write", "false", "true", meaning))
    return found


class EncryptionStatus(Struct, rename="camel", kw_only=True, frozen=True):
    """Whether what a stream stores is encrypted.

    `state` is in the words of the Firehose API: "ENABLING" and "DISABLING" until the change has reached the
    newest segment. Of all segments with messages, `unencrypted_segments` are not encrypted: they are from a
    time without encryption, and go as retention removes them.
    """

    state: Literal["ENABLED", "ENABLING", "DISABLED", "DISABLING"]
    encrypted_segments: int
    unencrypted_segments: int

    @property
    def text(self) -> str:
        """For people: "on, 2 older segments are not encrypted"."""
        on = self.state in ("ENABLED", "ENABLING")
        other = self.unencrypted_segments if on else self.encrypted_segments
        if not other:
            return "on" if on else "off"
        what = "not encrypted" if on else "encrypted"
        return f"{'on' if on else 'off'}, {other} older segment{'s are' if other > 1 else ' is'} {what}"


def encryption_status(*, wanted: bool, active: bool, encrypted: int, unencrypted: int) -> EncryptionStatus:
    """The status of a stream that is to be encrypted (`wanted`), and whose newest segment is (`active`)."""
    if wanted:
        state: Literal["ENABLED", "ENABLING", "DISABLED", "DISABLING"] = "ENABLED" if active else "ENABLING"
    else:
        state = "DISABLING" if active else "DISABLED"
    return EncryptionStatus(state=state, encrypted_segments=encrypted, unencrypted_segments=unencrypted)


class StorageStatus(Struct, rename="camel", kw_only=True, frozen=True):
    """What a stream holds now. If it is empty, oldest = newest + 1 (0 and -1 for a new one)."""

    oldest_sequence_number: int
    newest_sequence_number: int
    total_bytes: int


class ExportStatus(Struct, rename="camel", kw_only=True, frozen=True):
    """How far one export of a stream is. Times are Unix time in ms; 0 is never, or not known.

    Exported messages were accepted or rejected. Skipped ones were left out, or dropped from the stream before
    that; `lost` ones were dropped although nobody wanted that (`streams.drops.LOST_TO_EXPORTS`), also those
    that the export has yet to notice. With `topics`, nobody knows which of them it would have sent. All up to
    the passed number are exported or skipped; so are the ranges `exported_ahead` above it.
    """

    export_config_identifier: str
    last_exported_sequence_number: int = -1
    last_export_time: int = 0
    error_message: str | None = None
    exported_bytes_from_stream: int = 0
    exported_messages_count: int = 0
    # extensions
    rejected_messages_count: int = 0
    skipped_messages_count: int = 0
    stopped: bool = False  # until its configuration changes or it is retried; error_message says why
    unacknowledged_messages_count: int = 0  # of a consumer: delivered, and not settled yet
    paused: bool = False  # by hand, until it is resumed
    failed_attempts: int = 0  # in a row, since the worker started
    next_attempt_time: int = 0  # after a failure; of a batch that collects messages, at the latest
    error_since: int = 0  # when error_message first was not None
    exported_ahead: list[tuple[int, int]] = []  # with the newest first
    passed_sequence_number: int = -1  # more than the last exported one if messages were dropped
    lost_messages_count: int = 0
    last_lost: tuple[int, int] | None = None  # the numbers that were lost last
    last_lost_time: int = 0

    def first_pending(self, oldest: int) -> int:
        """The first number from the stream's oldest on that is pending, or that of the next message."""
        position = max(self.last_exported_sequence_number + 1, self.passed_sequence_number + 1, oldest)
        for first, last in self.exported_ahead:
            if first <= position <= last:
                return last + 1
        return position

    def pending(self, oldest: int, following: int) -> int:
        """How many messages are pending, if the stream has the numbers from `oldest` to below `following`."""
        position = self.first_pending(oldest)
        ahead = sum(last - first + 1 for first, last in self.exported_ahead if first > position)
        return max(0, following - position - ahead)


class MessageStreamInfo(Struct, rename="camel", kw_only=True, frozen=True):
    """The reply to describeMessageStream; what follows after the statuses of the exports are extensions.

    `version` protects an update against a concurrent one. `messages` can be read. The times are those of the
    oldest and the newest message, Unix time in ms; None if there is none, or it cannot be read. `topic_count`
    is the number of different topics; None if it is not known: only a limit per topic counts them.
    """

    definition: MessageStreamDefinition
    storage_status: StorageStatus
    export_statuses: list[ExportStatus] = []
    version: str = ""
    messages: int = 0
    oldest_ingest_time: int | None = None
    newest_ingest_time: int | None = None
    topic_count: int | None = None
    encryption: EncryptionStatus | None = None


def identifiers(definition: MessageStreamDefinition) -> list[str]:
    """The identifiers of all exports of a stream."""
    return [str(raw.get("identifier")) for raws in definition.export_definition.values() for raw in raws]


def with_pauses(statuses: Iterable[ExportStatus], paused: Collection[str]) -> list[ExportStatus]:
    """The statuses of a stream's exports; `paused` are the identifiers of those that are paused."""
    return [
        msgspec.structs.replace(status, paused=True, next_attempt_time=0)
        if status.export_config_identifier in paused
        else status
        for status in statuses
    ]


def known_keys(raw: dict[str, Any]) -> dict[str, Any]:
    """A definition (camelCase) without unknown keys."""
    known = {key: value for key, value in raw.items() if key in _DEFINITION}
    if isinstance(known.get("limits"), dict):
        known["limits"] = {key: value for key, value in known["limits"].items() if key in _LIMITS}
    return known


_DEFINITION = frozenset(MessageStreamDefinition.__struct_encode_fields__)
_LIMITS = frozenset(Limits.__struct_encode_fields__)


def plain_definition(name: str) -> MessageStreamDefinition:
    """The definition of a stream of which only the name is known."""
    return MessageStreamDefinition(name=name, strategy_on_full=StrategyOnFull.RejectNewData)


def mistake(error: msgspec.ValidationError) -> tuple[tuple[str | int, ...], str]:
    """The path in msgspec's error, and what is wrong there."""
    what, _, path = str(error).partition(" - at `$")
    steps = re.findall(r"\.(\w+)|\[(\d+)\]", path)
    return tuple(key or int(number) for key, number in steps), what


def problem(error: msgspec.ValidationError, subject: str) -> str:
    """What is wrong with `subject` according to msgspec's error, in one line."""
    what, _, path = str(error).partition(" - at `$")
    return f"{subject}{path.rstrip('`')}: {what}"
