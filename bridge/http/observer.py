"""Collects what is shown: a `ServiceState` on request, and steps of the last hour (`history`).

* A state is reused for a second, or longer if it took long to make. So this takes at most 5 % of the event
  loop's time, whatever the number of streams and requests. (Measured on a desktop: 12 ms for 1,000 streams
  with an export each.)
* A separate thread reads the times of messages (the oldest of a stream, the first pending of an export) from
  the files, at every step and only when the number in question has changed.
* To test whether the data directory is writable, a nameless file is written there: only that detects a
  failing or hanging disk. This is done at the start, while messages arrive, and while it fails. An idle
  gateway writes nothing, to spare flash memory. It only checks whether the file system is full, read-only or
  missing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from bridge import audit
from bridge.errors import CorruptData
from bridge.http import history
from bridge.http.clients import DeviceFrontEnd, Directory
from bridge.http.events import Events
from bridge.http.state import (
    DROPS,
    FAILURES,
    REFUSALS,
    ExportState,
    Readiness,
    ServiceState,
    StreamState,
    UpstreamState,
    limits_of,
    lost,
    readiness,
)
from bridge.model import MessageStreamDefinition
from bridge.operations.manager import StreamManager
from bridge.readable import Kept
from bridge.runtime import tick
from bridge.streams.reader import StreamReader
from bridge.streams.stream import Stream

if TYPE_CHECKING:
    from bridge.export.supervisor import ExportSupervisor

STEP = 5.0
BEAT = 1.0
PROBE_AGE = 1.0  # seconds for which the result of a test of the disk is reused
PROBE_TIMEOUT = 5.0
SPARE = 1024 * 1024  # bytes free; with less, an idle gateway's disk is tested too
SHARE = 20  # an answer is reused for this many times the time that it took

log = logging.getLogger("bridge.http")


Key = tuple[str, int, str]  # a stream's name and epoch, and an export's identifier or ""
Number = tuple[Path, int, int]  # a stream's directory, a sequence number in it, and the stream's next one


class FrontEnd(Protocol):
    """A front end, as the observer uses it."""

    def stats(self) -> dict[str, int]:
        """Return its counters since the start; `connections` and `sessions` are current numbers."""


class StreamTimes(NamedTuple):
    """When the first and the last message of a stream were received, Unix time in ms; None: unknown."""

    first: int | None
    last: int | None


@runtime_checkable
class BridgingFrontEnd(Protocol):
    """A front end that gets messages of other brokers, as the observer uses it."""

    def upstreams(self) -> Sequence[tuple[str, str, bool, int, int, str | None]]:
        """Return name, URL, whether connected, waiting and received messages, and problem of each."""

    def upstream_stats(self) -> dict[str, dict[str, int]]:
        """The counters of each, as those of a front end."""


class Observer:
    """Observes a service. `phase` is "starting", "running" or "stopping"; the service sets it."""

    def __init__(
        self,
        gateway: str,
        data_dir: Path,
        manager: StreamManager,
        exports: ExportSupervisor,
        front_ends: Mapping[str, FrontEnd],
        sync_interval: int = 1000,
        probe_timeout: float = PROBE_TIMEOUT,
        history_step: float = history.STEP,
        kept: Kept | None = None,
    ) -> None:
        """`sync_interval` is the gateway's, in ms.

        `probe_timeout` is the number of seconds after which a write to the disk counts as hung.
        `history_step` is the least number of seconds between two steps of the history. `kept` has the files
        that the service reads.
        """
        self._kept = kept or Kept()
        self._probe_timeout, self._history_step = probe_timeout, history_step
        self._sync_interval = sync_interval
        self._gateway, self._data_dir, self._manager, self._exports = gateway, data_dir, manager, exports
        self._front_ends = front_ends
        self._devices = {name: one for name, one in front_ends.items() if isinstance(one, DeviceFrontEnd)}
        self._bridging = [one for one in front_ends.values() if isinstance(one, BridgingFrontEnd)]
        self.phase = "starting"
        self.history = history.History()
        self.events = Events()
        self.directory = Directory(self._devices)
        self._next_step = 0.0
        self._troubles: dict[tuple[str, str], str] = {}  # of streams and exports, as noted in the events
        self._failed = set[str]()  # streams whose disk failed at that time
        self._numbers: deque[tuple[int, dict[str, int]]] = deque(maxlen=3)  # when, each stream's next number
        self._ends: dict[str, int] | None = None  # each stream's next number at the last step of the history
        self._stored = 0  # messages since the first step
        self._version = _version()
        self._started = _now()
        self._state: ServiceState | None = None
        self._good_until = 0.0
        self._delay = 0.0
        self._times: dict[Key, tuple[int, int]] = {}  # a sequence number, and when that message was received
        self._reading = ThreadPoolExecutor(1, "status")
        self._probing = ThreadPoolExecutor(1, "probe")
        self._lookup: asyncio.Task[None] | None = None
        self._probe: asyncio.Future[str | None] | None = None
        self._probed = 0.0
        self._written: tuple[int, int] | None = None  # the stored messages at the last test of the disk
        self._storage_error: str | None = None
        self._space = (0, 0)
        self._limits: dict[str, tuple[MessageStreamDefinition, list[str]]] = {}  # by stream

    # -- the history -----------------------------------------------------------------------------
    async def run(self) -> None:
        """Measure the loop's delay and record the history and the events, until cancelled."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        delay = 0.0
        while True:
            if loop.time() >= due:
                due = loop.time() + STEP
                self._delay, delay = delay, 0.0
                try:
                    self._record()
                    if self._lookup is None or self._lookup.done():
                        self._lookup = asyncio.create_task(self._read_times())
                    await asyncio.gather(asyncio.wait([self._lookup], timeout=STEP), self.storage_error())
                    if self._lookup.done():  # otherwise the disk hangs, so continue without
                        self._lookup.result()
                except Exception:
                    log.exception("the status cannot be collected")
            delay = max(delay, await tick(BEAT))

    def close(self) -> None:
        """Stop the threads."""
        if self._lookup is not None:
            self._lookup.cancel()
        self.events.close()
        self._reading.shutdown(wait=False, cancel_futures=True)
        self._probing.shutdown(wait=False, cancel_futures=True)

    def _record(self) -> None:
        state = self.state(fresh=True)
        ends = {stream.name: stream.newest + 1 for stream in state.streams}
        self._numbers.append((state.time, ends))
        self._note_troubles(state)
        if time.monotonic() >= self._next_step:
            self._next_step = time.monotonic() + self._history_step
            if self._ends is not None:
                self._stored += _growth(self._ends, ends)
            self._ends = ends
            self.history.add(state.time, {("stored",): self._stored, **dict(_values(state))})

    def _note_troubles(self, state: ServiceState) -> None:
        """Add events for everything that has failed or recovered since the last time."""
        found = {
            (stream, ""): why for stream, why in (state.readiness.refused | state.readiness.failing).items()
        }
        found |= {(e.stream, e.identifier): e.error for e in state.exports if e.error}
        for (stream, export), why in found.items():
            if (stream, export) not in self._troubles:
                fields = {"stream": stream, "export": export} if export else {"stream": stream}
                what = "an export fails" if export else "messages are not stored"
                self.events.note(logging.WARNING, f"{what}: %s", why, **fields)
        for stream, export in self._troubles.keys() - found.keys():
            # When the disk works again, the stream itself has logged it.
            if stream in self._manager.definitions and (export or stream not in self._failed):
                fields = {"stream": stream, "export": export} if export else {"stream": stream}
                what = "an export works again" if export else "messages are stored again"
                self.events.note(logging.INFO, what, **fields)
        self._troubles = found
        self._failed = {stream.name for stream in state.streams if stream.error is not None}

    # -- the disk --------------------------------------------------------------------------------
    async def storage_error(self) -> str | None:
        """Return why the data directory cannot be written; None if it can. Waits at most 5 s."""
        loop = asyncio.get_running_loop()
        if self._probe is None:
            if loop.time() - self._probed < PROBE_AGE and self._probed:
                return self._storage_error
            streams = self._manager.store.streams.values()
            written = sum(s.next_sequence for s in streams), sum(s.pending_bytes for s in streams)
            idle = written == self._written and not written[1] and self._storage_error is None
            self._written = written
            self._probe = loop.run_in_executor(self._probing, self._try_disk, idle)
        try:
            self._storage_error = await asyncio.wait_for(asyncio.shield(self._probe), self._probe_timeout)
            self._probe = None
            self._probed = loop.time()
        except TimeoutError:
            self._storage_error = f"{self._data_dir} does not answer"
        return self._storage_error

    def _try_disk(self, idle: bool) -> str | None:
        try:
            space = os.statvfs(self._data_dir)
            self._space = (space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize)
            good = self._space[0] >= SPARE and not space.f_flag & os.ST_RDONLY
            if idle and good and self._data_dir.is_dir() and os.access(self._data_dir, os.W_OK | os.X_OK):
                return None
            with tempfile.TemporaryFile(dir=self._data_dir, buffering=0) as file:
                file.write(bytes(4096))
                os.fdatasync(file.fileno())
        except OSError as error:
            return f"{self._data_dir} cannot be written: {error.strerror or error}"
        return None

    @property
    def refused(self) -> dict[str, str]:
        """The streams that are unavailable or whose messages do not reach us, and why."""
        found: dict[str, str] = {}
        for front_end in self._devices.values():
            found |= front_end.refused
        return found | self._manager.bindings.refused

    def readiness(self) -> Readiness:
        """Whether messages for all streams are received and can be stored; the disk as last tested."""
        streams = self._manager.store.streams.values()
        unread = dict(self._kept.missing)
        return readiness(self.phase, self._storage_error, streams, self.refused, self.unreachable, unread)

    @property
    def unreachable(self) -> str | None:
        """Why the external broker is not connected; None if it is, or there is none."""
        return next((one.unreachable for one in self._devices.values() if one.unreachable), None)

    # -- times of messages -----------------------------------------------------------------------
    async def _read_times(self) -> None:
        """Read the unknown times of the messages in question, and forget the others."""
        state = self.state()
        numbers = {(s.name, ""): s.oldest for s in state.streams if s.oldest <= s.newest}
        ends = {s.name: s.newest + 1 for s in state.streams}
        numbers |= {(e.stream, e.identifier): e.first_pending for e in state.exports if e.lag}
        wanted: dict[Key, Number] = {}
        for (name, export), number in numbers.items():
            if (stream := self._manager.store.streams.get(name)) is not None:
                wanted[name, stream.epoch, export] = (stream.directory, number, ends[name])
        known = {key: self._times[key] for key in wanted.keys() & self._times.keys()}
        unknown = {key: at for key, at in wanted.items() if key not in known or known[key][0] != at[1]}
        found = await asyncio.get_running_loop().run_in_executor(self._reading, _times_of, unknown)
        self._times = known | found
        self._good_until = 0.0

    async def times_of(self, name: str) -> StreamTimes:
        """When the first and the last message of a stream were received. A thread reads the files."""
        stream = self._manager.store.streams[name]
        first, end = stream.oldest, stream.next_sequence
        wanted = {
            (name, 0, ""): (stream.directory, first, end),
            (name, 1, ""): (stream.directory, end - 1, end),
        }
        found: dict[Key, tuple[int, int]] = {}
        if first < end:
            found = await asyncio.get_running_loop().run_in_executor(self._reading, _times_of, wanted)
        first_time, last_time = found.get((name, 0, "")), found.get((name, 1, ""))
        return StreamTimes(first_time and first_time[1], last_time and last_time[1])

    def _time_of(self, stream: Stream, export: str = "") -> int | None:
        """When the oldest message was received, or the first pending one of an export, as last read."""
        return self._times.get((stream.name, stream.epoch, export), (0, None))[1]

    # -- the current state -----------------------------------------------------------------------
    def state(self, *, fresh: bool = False) -> ServiceState:
        """The current state, or unless `fresh`, a recent one."""
        began = time.monotonic()
        if self._state is None or fresh or began >= self._good_until:
            self._state = self._collect()
            self._good_until = began + max(1.0, (time.monotonic() - began) * SHARE)
        return self._state

    def _collect(self) -> ServiceState:
        now = _now()
        before = self._earlier(now)
        counts = {name: front_end.stats() for name, front_end in self._front_ends.items()}
        for front_end in self._bridging:
            counts |= front_end.upstream_stats()
        clock = self._manager.store.clock
        exports = {name: self._exports_of(name) for name in self._manager.names()}
        return ServiceState(
            gateway=self._gateway,
            version=self._version,
            started=self._started,
            time=now,
            readiness=self.readiness(),
            streams=[self._stream(name, now, before, exports[name]) for name in exports],
            exports=[export for found in exports.values() for export in found],
            connections=sum(counts[name].get("connections", 0) for name in self._devices),
            counts=counts,
            upstreams=[
                UpstreamState(
                    name=name, url=url, connected=connected, waiting=waiting, received=received, error=error
                )
                for front_end in self._bridging
                for name, url, connected, waiting, received, error in front_end.upstreams()
            ],
            worker_running=self._exports.pid is not None,
            worker_restarts=self._exports.restarts,
            worker_memory=self._exports.memory,
            disk_free=self._space[0],
            disk_size=self._space[1],
            storage_error=self._storage_error,
            loop_delay=round(self._delay, 3),
            clock_synchronised=clock.synchronised,
            clock_steps=clock.steps,
            clock_step=clock.last_step,
            failing_parts=audit.troubles() | self._kept.broken | self._kept.missing,
        )

    def _earlier(self, now: int) -> tuple[int, dict[str, int]]:
        """The newest numbers that are old enough to compute a rate."""
        return next((kept for kept in reversed(self._numbers) if kept[0] <= now - STEP * 900), (now, {}))

    def _stream(
        self, name: str, now: int, before: tuple[int, dict[str, int]], exports: Sequence[ExportState]
    ) -> StreamState:
        stream, definition = self._manager.store.streams[name], self._manager.definitions[name]
        counters = stream.counters
        rate = None
        then, numbers = before
        if name in numbers:
            rate = round(max(0, stream.next_sequence - numbers[name]) * 1000 / (now - then), 2)
        return StreamState(
            name=name,
            description=definition.description,
            tags=definition.tags,
            persistence=definition.persistence.name,
            deleting=definition.delivery is not None and definition.delivery.deleting,
            messages=stream.live_messages(),
            size=stream.total_bytes,
            max_size=stream.settings.max_size,
            overwrites=stream.settings.overwrite or (stream.exported_upto or 0) > stream.oldest,
            pending=stream.pending_bytes,
            oldest=stream.oldest,
            newest=stream.next_sequence - 1,
            oldest_time=self._time_of(stream) if stream.oldest < stream.next_sequence else None,
            rate=rate,
            limits=self._limits_of(definition),
            encryption=stream.encryption().text,
            dropped={reason: number for reason, number in counters.items() if reason in DROPS},
            lost=max((export.lost_messages for export in exports), default=0),
            rejected={reason: number for reason, number in counters.items() if reason in REFUSALS},
            deduplicated=counters.get("deduplicated", 0),
            failures={what: number for what, number in counters.items() if what in FAILURES},
            error=None if stream.error is None else str(stream.error),
        )

    def _limits_of(self, definition: MessageStreamDefinition) -> list[str]:
        """Return the text for a definition; cached, because it takes a third of the time of a state."""
        known = self._limits.get(definition.name)
        if known is None or known[0] is not definition:
            texts = limits_of(definition, self._sync_interval)
            known = self._limits[definition.name] = definition, texts
        return known[1]

    def _exports_of(self, name: str) -> list[ExportState]:
        statuses = self._manager.export_statuses(name)
        if not statuses:
            return []
        stream = self._manager.store.streams[name]
        configs = {
            str(config.get("identifier")): (kind, bool(config.get("disabled")))
            for kind, items in self._manager.definitions[name].export_definition.items()
            for config in items
        }
        found = []
        for status in statuses:
            kind, disabled = configs[status.export_config_identifier]
            lag = status.pending(stream.oldest, stream.next_sequence)
            found.append(
                ExportState(
                    stream=name,
                    identifier=status.export_config_identifier,
                    kind=kind,
                    disabled=disabled,
                    paused=status.paused,
                    stopped=status.stopped,
                    lag=lag,
                    first_pending=status.first_pending(stream.oldest),
                    waiting_since=self._time_of(stream, status.export_config_identifier) if lag else None,
                    exported_messages=status.exported_messages_count,
                    exported_bytes=status.exported_bytes_from_stream,
                    rejected_messages=status.rejected_messages_count,
                    skipped_messages=status.skipped_messages_count,
                    lost_messages=status.lost_messages_count,
                    last_lost=status.last_lost,
                    last_lost_time=status.last_lost_time,
                    unacknowledged_messages=status.unacknowledged_messages_count,
                    last_export_time=status.last_export_time,
                    error=status.error_message or None,
                    error_since=status.error_since or None,
                    failed_attempts=status.failed_attempts,
                    next_attempt=status.next_attempt_time or None,
                )
            )
        return found


def _values(state: ServiceState) -> Iterator[tuple[history.Key, float]]:
    """Return the values of a state that are kept for an hour."""
    yield ("size",), sum(stream.size for stream in state.streams)
    yield ("pending",), sum(export.lag for export in state.exports if not export.disabled)
    yield ("lost",), lost(state)
    for stream in state.streams:
        yield ("stream", stream.name, "stored"), stream.newest + 1
        for reason, number in stream.dropped.items():
            yield ("stream", stream.name, "dropped", reason), number
        for reason, number in stream.rejected.items():
            yield ("stream", stream.name, "rejected", reason), number
    for export in state.exports:
        yield ("stream", export.stream, "pending", export.identifier), export.lag


def _growth(before: Mapping[str, int], after: Mapping[str, int]) -> int:
    """Return how many messages were stored in between: the numbers of a new stream begin at 0."""
    counts = ((before.get(name, 0), end) for name, end in after.items())
    return sum(end - start if end >= start else end for start, end in counts)


def _times_of(wanted: Mapping[Key, Number]) -> dict[Key, tuple[int, int]]:
    found = {}
    for key, (directory, number, end) in wanted.items():
        try:
            with closing(StreamReader(directory)) as reader:
                first = reader.moment_of(number, end)
        except (OSError, CorruptData):
            continue
        if first is not None:
            found[key] = (number, first.time)
    return found


def _now() -> int:
    return time.time_ns() // 1_000_000


def _version() -> str:
    try:
        return version("streambridge")
    except PackageNotFoundError:
        return "checkout"
