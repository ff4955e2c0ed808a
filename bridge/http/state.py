"""A snapshot of the service as plain values. The page gets it as JSON in camelCase.

Sizes are in bytes, times are Unix time in ms, ages are in seconds, rates are per second. None means: not
known yet.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from bridge.model import MessageStreamDefinition, StrategyOnFull
from bridge.operations.definitions import NOTHING, power_cut
from bridge.streams import drops
from bridge.streams.drops import DropReason
from bridge.streams.stream import Stream
from bridge.units import format_duration, format_size

DROPS = {reason.name.lower() for reason in DropReason}
REFUSALS = {"full", "too_large", "failed"}
FAILURES = {"corrupt_reads", "delete_failed"}
LOSSES = {reason.name.lower() for reason in drops.LOSSES}
UNSTORED = ("dropped_", "rejected_")  # counters of front ends: messages that they could not store


class StreamState(Struct, rename="camel", kw_only=True):
    """One stream. `dropped` and `rejected` count messages by reason since the start.

    `lost` of the dropped ones were lost to an export, in all. `failures` counts other failures of its files,
    by kind. `encryption` is a text such as "on, 2 older segments are not encrypted". `deleting`: it is
    deleted once all of it is exported. `overwrites`: to be full is no trouble, the oldest messages go.
    """

    name: str
    description: str
    tags: dict[str, str]
    persistence: str
    deleting: bool
    messages: int
    size: int
    max_size: int
    overwrites: bool
    pending: int
    oldest: int
    newest: int
    oldest_time: int | None
    rate: float | None
    limits: list[str]
    encryption: str
    dropped: dict[str, int]
    lost: int
    rejected: dict[str, int]
    deduplicated: int
    failures: dict[str, int]
    error: str | None


class ExportState(Struct, rename="camel", kw_only=True):
    """One export of a stream: `lag` messages are pending from `first_pending` on, since `waiting_since`.

    An operator has `paused` it, or the definition has `disabled` it. While it fails, `failed_attempts` counts
    the attempts in a row, `next_attempt` is the time of the next one, and `error_since` when the errors
    began. Without an error, `next_attempt` is when the batch that collects messages is sent at the latest.
    `lost_messages` were dropped before they were exported, the numbers `last_lost` at `last_lost_time`.
    """

    stream: str
    identifier: str
    kind: str
    disabled: bool
    paused: bool
    stopped: bool
    lag: int
    first_pending: int
    waiting_since: int | None
    exported_messages: int
    exported_bytes: int
    rejected_messages: int
    skipped_messages: int
    lost_messages: int
    last_lost: tuple[int, int] | None
    last_lost_time: int
    unacknowledged_messages: int
    last_export_time: int
    error: str | None
    error_since: int | None
    failed_attempts: int
    next_attempt: int | None


class UpstreamState(Struct, rename="camel", kw_only=True):
    """Another broker whose messages come here. `waiting` messages are not stored yet; `error` says why."""

    name: str
    url: str
    connected: bool
    waiting: int
    received: int
    error: str | None


class Readiness(Struct, rename="camel", kw_only=True):
    """Whether messages for all streams are received and can be stored, and what prevents it.

    `/readyz`, the metric `streambridge_ready` and the status page all show this.

    `refused` are the streams that are unavailable or whose messages do not reach us, `failing` those that
    could not store their last message, because of the disk or because they are full, each with the reason.
    `unreachable` says why the external broker is not connected, `unread` what is wrong with files of users,
    keys or certificates that never were in order since the start.
    """

    ok: bool
    phase: str
    storage: str
    refused: dict[str, str]
    failing: dict[str, str]
    unreachable: str | None
    unread: dict[str, str] = {}


def readiness(
    phase: str,
    storage_error: str | None,
    streams: Iterable[Stream],
    refused: dict[str, str],
    unreachable: str | None,
    unread: dict[str, str],
) -> Readiness:
    """Determine whether the service is ready."""
    failing = {stream.name: why for stream in streams if (why := stream.cannot_store) is not None}
    return Readiness(
        ok=phase == "running" and not (storage_error or refused or failing or unreachable or unread),
        phase=phase,
        storage=storage_error or "writable",
        refused=refused,
        failing=failing,
        unreachable=unreachable,
        unread=unread,
    )


class ServiceState(Struct, rename="camel", kw_only=True):
    """The service at one moment. `counts` are the front ends' counters.

    `clock_steps` is how often the wall clock was stepped since the start, the last time by `clock_step` ms.
    `failing_parts` says why a destination of the audit log cannot be written, or a file not be used.
    """

    gateway: str
    version: str
    started: int
    time: int
    readiness: Readiness
    streams: list[StreamState]
    exports: list[ExportState]
    connections: int
    counts: dict[str, dict[str, int]]
    upstreams: list[UpstreamState]
    worker_running: bool
    worker_restarts: int
    worker_memory: int
    disk_free: int
    disk_size: int
    storage_error: str | None
    loop_delay: float
    clock_synchronised: bool
    clock_steps: int
    clock_step: int
    failing_parts: dict[str, str] = {}


def lost(state: ServiceState) -> int:
    """The messages that were lost or rejected since the start, without those that streams drop as configured.

    What was dropped before it was exported is lost, once for all exports of a stream; that continues over
    restarts. Front ends count what they reject, and what they drop for subscribers: that is lost to them.
    """
    damaged = ((sum(n for why, n in one.dropped.items() if why in LOSSES), one.lost) for one in state.streams)
    rejected = sum(n for stream in state.streams for n in stream.rejected.values())
    unstored = sum(
        n for counts in state.counts.values() for what, n in counts.items() if what.startswith(UNSTORED)
    )
    return sum(map(max, damaged)) + max(rejected, unstored)


def limits_of(definition: MessageStreamDefinition, sync_interval: int) -> list[str]:
    """A stream's limits for people, and what a power cut may cost."""
    full = "rejects" if definition.strategy_on_full is StrategyOnFull.RejectNewData else "overwrites"
    found = [f"{format_size(definition.max_size)}, then {full}"]
    if definition.time_to_live_millis is not None:
        found.append(f"segments {format_duration(definition.time_to_live_millis)}")
    limits = definition.limits
    if limits is not None:
        if limits.max_messages is not None:
            found.append(f"{limits.max_messages:,} messages")
        if limits.max_bytes is not None:
            found.append(f"{format_size(limits.max_bytes)} of data")
        if limits.max_age_millis is not None:
            found.append(f"age {format_duration(limits.max_age_millis)}")
        if limits.max_messages_per_topic is not None:
            found.append(f"{limits.max_messages_per_topic:,} per topic")
        if limits.max_message_size is not None:
            found.append(f"{format_size(limits.max_message_size)} a message")
    if (cost := power_cut(definition, sync_interval)) != NOTHING:
        found.append(f"a power cut costs {cost}")
    return found
