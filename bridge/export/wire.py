"""The messages between supervisor and worker over their socketpair.

Each message is a frame of `bridge.frames`. Both sides have the same version, because one starts the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from bridge.export.settings import ExportSettings
from bridge.model import ExportStatus
from bridge.plugin.api import Record
from bridge.plugin.aws import AwsSettings


class Tuning(Struct, frozen=True, kw_only=True):
    """The times and sizes of supervision; tests shorten them."""

    beat: float = (
        1.0  # seconds between two heartbeats of a worker that exports; idle, it beats a fifth as often
    )
    silence: float = 30.0  # seconds without a message after which the worker is killed
    first_backoff: float = 0.5
    max_backoff: float = 300.0
    hang: float | None = None  # overrides Exporter.timeout
    drain: float = 10.0  # seconds for batches in flight before the worker is replaced
    behind: float = 5.0  # seconds by which new messages may be late before they become a backlog (`order`)
    max_memory: int | None = None  # bytes of RSS; None: a quarter of the machine's, at least 256 MiB


class Crash(Struct, frozen=True, array_like=True):
    """Why an export is suspected: it was in flight when a worker died."""

    stream: str
    identifier: str
    reason: str
    wait: float
    alone: bool  # one of several suspects, which run one at a time so that the next crash identifies one


class WorkerMessage(Struct, frozen=True, array_like=True, tag=True):
    """The base of all messages."""


class Hello(WorkerMessage, frozen=True, array_like=True, tag=True):
    """To the worker, first: everything that never changes."""

    data_dir: Path
    gateway: str
    export: ExportSettings
    aws: AwsSettings
    tuning: Tuning
    crashes: list[Crash]
    key_file: Path | None = None  # of encryption at rest


class Define(WorkerMessage, frozen=True, array_like=True, tag=True):
    """To the worker: a stream and its exports from now on. `revision` increases with each message.

    `paused` has the identifiers of exports that an operator has paused. `flush`: messages are synced before
    they are committed. `encrypted` is `encryption` of its definition. `begun` is that of `streams.meta`.
    `keeps_rejected_in` is that of the definition.
    """

    name: str
    revision: int
    directory: Path
    epoch: int
    flush: bool
    exports: dict[str, list[dict[str, Any]]]
    paused: list[str] = []
    encrypted: bool = False
    begun: dict[str, int] = {}
    keeps_rejected_in: str = ""


class Try(WorkerMessage, frozen=True, array_like=True, tag=True):
    """To the worker: these exports must send messages below `upto` now, whatever they wait for."""

    name: str
    identifiers: list[str]
    upto: int


class Forget(WorkerMessage, frozen=True, array_like=True, tag=True):
    """To the worker: the stream was deleted. `pending` are the first pending records by export."""

    name: str
    pending: dict[str, list[Record]] = {}


class Committed(WorkerMessage, frozen=True, array_like=True, tag=True):
    """To the worker: messages below `next_sequence` may be exported.

    `age_offset` is that of the age timeline (`bridge.clock.Timeline`).
    """

    name: str
    oldest: int
    next_sequence: int
    age_offset: int


class Appended(WorkerMessage, frozen=True, array_like=True, tag=True):
    """To the worker: the stream has stored an `Append`, or rejected it (`error`).

    `too_large`: it can never store it, but would store a smaller message.
    """

    number: int
    error: str = ""
    too_large: bool = False


class Notice(WorkerMessage, frozen=True, array_like=True, tag=True):
    """To the worker: an event of the service for the hooks."""

    name: str
    stream: str
    detail: str


class Stop(WorkerMessage, frozen=True, array_like=True, tag=True):
    """To the worker: finish what is in flight within `timeout` seconds and end."""

    timeout: float


class Beat(WorkerMessage, frozen=True, array_like=True, tag=True):
    """From the worker: a heartbeat; it uses `rss` bytes of memory."""

    rss: int


class Began(WorkerMessage, frozen=True, array_like=True, tag=True):
    """From the worker, before any code of a plugin runs for an export."""

    stream: str
    identifier: str
    thread: int
    doing: str


class Ended(WorkerMessage, frozen=True, array_like=True, tag=True):
    """From the worker: the plugin has returned or raised."""

    stream: str
    identifier: str


class Statuses(WorkerMessage, frozen=True, array_like=True, tag=True):
    """From the worker: a stream's exports; `positions` maps identifiers to the next number to send.

    `revision` is that of the worker's definition.
    """

    stream: str
    revision: int
    statuses: list[ExportStatus]
    positions: dict[str, int]


class Append(WorkerMessage, frozen=True, array_like=True, tag=True):
    """From the worker: append a message to a stream, and answer with `Appended`."""

    number: int
    stream: str
    payload: bytes


class Log(WorkerMessage, frozen=True, array_like=True, tag=True):
    """From the worker: a log record. Lines with the same `template` differ only in their values."""

    level: int
    name: str
    text: str
    template: str


class Damaged(WorkerMessage, frozen=True, array_like=True, tag=True):
    """From the worker: stored data of a stream failed its check."""

    stream: str
    detail: str


class Culprit(WorkerMessage, frozen=True, array_like=True, tag=True):
    """From the worker: it ends because of this export, and asks to be replaced.

    `alone`: the export is one of several suspects.
    """

    stream: str
    identifier: str
    reason: str
    alone: bool = False


_ToWorker = Hello | Define | Try | Forget | Committed | Appended | Notice | Stop
_FromWorker = Beat | Began | Ended | Statuses | Append | Log | Damaged | Culprit


def _path(kind: type, value: Any) -> Any:
    return kind(value)


TO_WORKER = msgspec.msgpack.Decoder(_ToWorker, dec_hook=_path)
FROM_WORKER = msgspec.msgpack.Decoder(_FromWorker, dec_hook=_path)
