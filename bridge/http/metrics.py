"""The state of a service in the text format of Prometheus.

`METRICS` is the whole list. docs/reference/metrics.md is made from it, and a test compares a running service
with it. Names follow https://prometheus.io/docs/practices/naming/: base units, `_total` for counters.
Counters begin at zero with the process, unless their text says otherwise.
"""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bridge.http.state import ServiceState

_STARTED = time.time()


class Described(NamedTuple):
    """One metric. `kind` is "gauge" or "counter"."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


_TABLE = """
info gauge gateway version
    Always 1; the labels identify the service.
ready gauge
    1 while messages for every stream are accepted and can be stored, as `/readyz` reports.
event_loop_delay_seconds gauge
    The longest delay of the event loop in the last 5 s.
storage_writable gauge
    1 if the data directory could be written when last tried.
storage_free_bytes gauge
    Free space in the file system of the data directory.
storage_size_bytes gauge
    Size of the file system of the data directory.
clock_synchronised gauge
    1 if the wall clock is known to be synchronised (NTP).
clock_steps_total counter
    How often the wall clock was stepped by a second or more; messages do not expire because of that.
part_failing gauge part
    1 for a destination of the audit log that cannot be written, and for a setting whose file is broken.
streams_refused gauge
    Streams that cannot be opened or created, or whose topics an external broker refuses to send.
stream_info gauge stream
    Always 1; a label tag_NAME has the value of each tag of the stream.
stream_appended_messages_total counter stream
    Sequence numbers assigned; continues over restarts.
stream_messages gauge stream
    Messages that can be read.
stream_size_bytes gauge stream
    Size of the segment files.
stream_max_size_bytes gauge stream
    The limit `max_size`.
stream_pending_bytes gauge stream
    Bytes in memory that are not committed yet.
stream_oldest_message_timestamp_seconds gauge stream
    When the oldest message was received; absent for an empty stream.
stream_dropped_messages_total counter stream reason
    Messages dropped by limits, purges or damage.
stream_rejected_messages_total counter stream reason
    Appends that were rejected: full, too_large, failed (a disk error).
stream_deduplicated_messages_total counter stream
    Messages not stored again, because their id was seen before.
stream_file_failures_total counter stream reason
    Other failures with the stream's files: corrupt_reads (damage found), delete_failed (retried).
stream_failing gauge stream
    1 if the last write to the stream failed.
export_lag_messages gauge stream export kind
    Messages that are pending for the export.
export_lag_seconds gauge stream export kind
    Age of the oldest pending message; 0 if none is pending.
export_messages_total counter stream export kind
    Messages that were accepted or rejected; continues over restarts.
export_bytes_total counter stream export kind
    Bytes of accepted messages; continues over restarts.
export_rejected_messages_total counter stream export kind
    Messages that the destination can never accept; continues over restarts.
export_skipped_messages_total counter stream export kind
    Messages that were dropped before they were exported, or left out by topics; continues over restarts.
export_lost_messages_total counter stream export kind
    Messages that limits, overwriting or damage took before they were exported; continues over restarts.
export_unacknowledged_messages gauge stream export kind
    Messages that clients of a consumer have fetched and not acknowledged yet; 0 for other exports.
export_last_attempt_timestamp_seconds gauge stream export kind
    When the export last made an attempt; 0 if never.
export_failing gauge stream export kind
    1 while the export reports an error.
export_stopped gauge stream export kind
    1 while the export has stopped until its configuration changes or it is retried; export_failing is 1 too.
export_failing_since_timestamp_seconds gauge stream export kind
    Since when the export has reported errors; absent while it reports none.
export_failed_attempts gauge stream export kind
    Attempts in a row that have failed; 0 after a success.
export_next_attempt_timestamp_seconds gauge stream export kind
    When a failed export makes its next attempt; absent for all others.
export_paused gauge stream export kind
    1 while the export is paused by hand.
export_disabled gauge stream export kind
    1 if the export is disabled by its definition.
export_worker_up gauge
    1 while the export worker process runs.
export_worker_restarts_total counter
    How often the export worker was restarted.
export_worker_resident_memory_bytes gauge
    Memory of the export worker.
connections gauge front_end
    Open connections of clients.
external_broker_connected gauge front_end
    1 while the external broker or an upstream (`upstream:<name>`) is connected, 0 while it is not.
sessions gauge front_end
    Sessions of connected and disconnected clients.
session_bytes gauge front_end
    Memory of all sessions together, as session_bytes in [mqtt.limits] counts it.
retained_messages gauge front_end
    Retained messages that are stored.
retained_bytes gauge front_end
    Memory of the retained messages, as retained_bytes in [mqtt.limits] counts it.
shared_subscriptions gauge front_end
    Shared subscriptions (`$share/...`) that have members.
waiting_messages gauge front_end
    Messages from an external broker or an upstream that are not stored yet.
accepted_connections_total counter front_end
    Connections that were accepted.
received_messages_total counter front_end
    Messages received from clients.
received_messages_without_stream_total counter front_end
    Messages on topics that no stream is bound to: delivered to subscribers, but not stored.
delivered_messages_total counter front_end
    Messages sent to subscribers.
delivered_bytes_total counter front_end
    Bytes of messages sent to subscribers, as PUBLISH packets.
received_bytes_total counter front_end
    Bytes of all MQTT packets from clients.
sent_bytes_total counter front_end
    Bytes of all MQTT packets to clients.
requests_total counter front_end
    Requests for operations on streams.
dropped_messages_total counter front_end reason
    Messages dropped: at QoS 0 because they could not be stored, and for subscribers that are slow or away.
rejected_messages_total counter front_end reason
    Messages at QoS 1 and 2 that were rejected: not stored and not acknowledged.
refused_total counter front_end reason
    Connections (tls: their handshakes), subscriptions and requests that were refused.
slowed_total counter front_end budget
    How often a read was paused because a user, an address or a network was over a budget.
over_budget gauge front_end budget
    Users, addresses or networks that are over a budget now.
events_total counter front_end event
    Other events that a front end counts.
"""

_HEADS = re.findall(r"^(\w+) (gauge|counter) ?(.*)\n    (.*)$", _TABLE, re.MULTILINE)
METRICS = {name: Described(name, kind, tuple(labels.split()), text) for name, kind, labels, text in _HEADS}

_GAUGES = {
    "connections": "connections",
    "connected": "external_broker_connected",
    "sessions": "sessions",
    "session_bytes": "session_bytes",
    "retained": "retained_messages",
    "retained_bytes": "retained_bytes",
    "shared_subscriptions": "shared_subscriptions",
    "waiting": "waiting_messages",
}
_COUNTERS = {
    "accepted": "accepted_connections_total",
    "received": "received_messages_total",
    "without_stream": "received_messages_without_stream_total",
    "delivered": "delivered_messages_total",
    "delivered_bytes": "delivered_bytes_total",
    "received_bytes": "received_bytes_total",
    "sent_bytes": "sent_bytes_total",
    "requests": "requests_total",
}
_BY_REASON = {
    "dropped": "dropped_messages_total",
    "rejected": "rejected_messages_total",
    "refused": "refused_total",
    "slowed": "slowed_total",
    "over": "over_budget",
}

_ESCAPED = {ord("\\"): r"\\", ord('"'): r"\"", ord("\n"): r"\n"}

Value = tuple[str, tuple[str, ...], float]  # metric, labels, value


def render(state: ServiceState) -> bytes:
    """The page for Prometheus. It takes no locks of ours, so it may run in a thread.

    Format: https://prometheus.io/docs/instrumenting/exposition_formats/, text.
    """
    samples: dict[str, list[str]] = {name: [] for name in METRICS}
    names = {name: metric.labels for name, metric in METRICS.items()}
    names["stream_info"] += tuple(_tags(state))
    for name, labels, value in _values(state):
        samples[name].append(_sample(f"streambridge_{name}", names[name], labels, value))
    lines = []
    for metric in METRICS.values():
        lines += [*_head(f"streambridge_{metric.name}", metric.kind, metric.help), *samples[metric.name]]
    for name, kind, text, value in _process():
        lines += [*_head(name, kind, text), _sample(name, (), (), value)]
    return "".join(lines).encode()


def _head(name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP {name} {text}\n", f"# TYPE {name} {kind}\n"


def _sample(name: str, labels: Sequence[str], values: Sequence[str], value: float) -> str:
    pairs = [f'{label}="{text.translate(_ESCAPED)}"' for label, text in zip(labels, values, strict=True)]
    return f"{name}{{{','.join(sorted(pairs))}}} {float(value)}\n" if pairs else f"{name} {float(value)}\n"


def _process() -> Iterator[tuple[str, str, str, float]]:
    """The standard metrics of a process: name, kind, help, value."""
    virtual, resident = Path("/proc/self/statm").read_text().split()[:2]
    page = resource.getpagesize()
    yield "process_cpu_seconds_total", "counter", "User and system CPU time.", time.process_time()
    yield "process_resident_memory_bytes", "gauge", "Resident memory.", int(resident) * page
    yield "process_virtual_memory_bytes", "gauge", "Virtual memory.", int(virtual) * page
    yield "process_start_time_seconds", "gauge", "When the process started.", _STARTED
    descriptors = sum(1 for _ in Path("/proc/self/fd").iterdir())
    yield "process_open_fds", "gauge", "Open file descriptors.", descriptors
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield "process_max_fds", "gauge", "Maximum number of open file descriptors.", most


def _values(state: ServiceState) -> Iterator[Value]:
    yield "info", (state.gateway, state.version), 1
    yield "ready", (), state.readiness.ok
    yield "event_loop_delay_seconds", (), state.loop_delay
    yield "storage_writable", (), state.storage_error is None
    yield "storage_free_bytes", (), state.disk_free
    yield "storage_size_bytes", (), state.disk_size
    yield "clock_synchronised", (), state.clock_synchronised
    yield "clock_steps_total", (), state.clock_steps
    yield from (("part_failing", (part,), 1) for part in state.failing_parts)
    yield "streams_refused", (), len(state.readiness.refused)
    yield "export_worker_up", (), state.worker_running
    yield "export_worker_restarts_total", (), state.worker_restarts
    yield "export_worker_resident_memory_bytes", (), state.worker_memory
    yield from _streams(state)
    yield from _exports(state)
    for front_end, counts in state.counts.items():
        for what, number in counts.items():
            yield _counted(front_end, what, number)


def _tags(state: ServiceState) -> list[str]:
    """The labels for the tags of any stream; an empty value is as if there was none."""
    return sorted({f"tag_{tag}" for stream in state.streams for tag in stream.tags})


def _streams(state: ServiceState) -> Iterator[Value]:
    tags = _tags(state)
    for stream in state.streams:
        name = (stream.name,)
        yield "stream_info", (*name, *(stream.tags.get(tag.removeprefix("tag_"), "") for tag in tags)), 1
        yield "stream_appended_messages_total", name, stream.newest + 1
        yield "stream_messages", name, stream.messages
        yield "stream_size_bytes", name, stream.size
        yield "stream_max_size_bytes", name, stream.max_size
        yield "stream_pending_bytes", name, stream.pending
        if stream.oldest_time is not None:
            yield "stream_oldest_message_timestamp_seconds", name, stream.oldest_time / 1000
        for reason, number in stream.dropped.items():
            yield "stream_dropped_messages_total", (stream.name, reason), number
        for reason, number in stream.rejected.items():
            yield "stream_rejected_messages_total", (stream.name, reason), number
        yield "stream_deduplicated_messages_total", name, stream.deduplicated
        for reason, number in stream.failures.items():
            yield "stream_file_failures_total", (stream.name, reason), number
        yield "stream_failing", name, stream.error is not None


def _exports(state: ServiceState) -> Iterator[Value]:
    for export in state.exports:
        labels = (export.stream, export.identifier, export.kind)
        since = export.waiting_since
        yield "export_lag_messages", labels, export.lag
        yield "export_lag_seconds", labels, 0.0 if since is None else max(0, state.time - since) / 1000
        yield "export_messages_total", labels, export.exported_messages
        yield "export_bytes_total", labels, export.exported_bytes
        yield "export_rejected_messages_total", labels, export.rejected_messages
        yield "export_skipped_messages_total", labels, export.skipped_messages
        yield "export_lost_messages_total", labels, export.lost_messages
        yield "export_unacknowledged_messages", labels, export.unacknowledged_messages
        yield "export_last_attempt_timestamp_seconds", labels, export.last_export_time / 1000
        yield "export_failing", labels, export.error is not None
        yield "export_stopped", labels, export.stopped
        if export.error_since is not None:
            yield "export_failing_since_timestamp_seconds", labels, export.error_since / 1000
        yield "export_failed_attempts", labels, export.failed_attempts
        if export.error is not None and export.next_attempt is not None:
            yield "export_next_attempt_timestamp_seconds", labels, export.next_attempt / 1000
        yield "export_paused", labels, export.paused
        yield "export_disabled", labels, export.disabled


def _counted(front_end: str, what: str, number: int) -> Value:
    known = _GAUGES.get(what) or _COUNTERS.get(what)
    if known is not None:
        return known, (front_end,), number
    prefix, _, reason = what.partition("_")
    if reason and prefix in _BY_REASON:
        return _BY_REASON[prefix], (front_end, reason), number
    return "events_total", (front_end, what), number
