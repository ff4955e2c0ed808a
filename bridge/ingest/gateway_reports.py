"""Gateway reports: what each gateway has committed and dropped, from `<prefix>/_gateway/<id>.json`.

    {"gateway": "gw-1", "updated": <ms>, "version": "0.2.1", "streams": [{"stream": "readings",
     "epoch": <ms>, "oldest": 0, "newest": 99, "exported": 89, "ahead": [[first, last], ...],
     "dropped": [[first, last, reason], ...]}, ...]}

`newest` is the newest number that the gateway has committed. It has uploaded all up to `exported` (-1:
none) and the ranges `ahead`, and `dropped` lists the numbers that it dropped, by a rule, before they were
uploaded. Object keys alone cannot show a lost tail, and would make such a drop look like a loss. Anything
else below `_gateway/`, such as a copy of a report, is reported as a problem and never used.

Which of two reports is newer is decided by the time at which S3 got them, for the clock of a gateway may be
set back. S3 gives whole seconds; within one, `updated` decides.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

from bridge.ingest.errors import BadObject, Unreadable, Vanished, line
from bridge.ingest.planner import StreamId
from bridge.ingest.store import Entry, ObjectStore, ahead, read
from bridge.objectkeys import MAX_SEQUENCE, REPORTS, report_key
from bridge.ranges import Ranges

YEAR_10000 = 253_402_300_800_000  # ms
VERSION = 40  # characters of a version that are kept
EPOCH_DIGITS = 19  # of the epoch in an object key
MAX_STREAMS = 50_000  # of a report: those that a gateway can open, see docs/scale.md
MAX_REPORT = 32 << 20  # bytes: 600 streams, each with the thousand ranges that a gateway lists at most


class ReportTime(NamedTuple):
    """When a report was made; of two reports of a gateway, the newer one has the greater time.

    `stored` is by S3's clock, in whole seconds, `updated` by that of the gateway; both are Unix time in ms.
    """

    stored: int
    updated: int


@dataclass(frozen=True, slots=True)
class ReportedStream:
    """One stream as its gateway saw it at `updated`; see `ReportTime`. `stored` is 0 if it is unknown."""

    updated: int
    oldest: int
    newest: int
    exported: int
    dropped: tuple[tuple[int, int, str], ...] = ()
    ahead: tuple[tuple[int, int], ...] | None = None  # None: objects come in the order of their numbers
    stored: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether the gateway has never had a message of the stream."""
        return max(self.newest, self.exported) < 0 and not self.ahead and not self.dropped

    @property
    def time(self) -> ReportTime:
        return ReportTime(self.stored, self.updated)

    @classmethod
    def from_json(cls, data: dict[str, Any], time: ReportTime) -> ReportedStream:
        dropped = tuple((int(low), int(high), line(why)) for low, high, why in data.get("dropped") or ())
        ahead = data.get("ahead")
        if ahead is not None:
            ahead = tuple((int(low), int(high)) for low, high in ahead)
        oldest, newest, exported = (
            int(data.get("oldest", 0)),
            int(data["newest"]),
            int(data.get("exported", -1)),
        )
        ranges = (*dropped, *(ahead or ()))
        numbers = (oldest, newest, exported, *(number for pair in ranges for number in pair[:2]))
        if not (0 <= time.updated < YEAR_10000 and -1 <= min(numbers) <= max(numbers) <= MAX_SEQUENCE):
            raise ValueError("a sequence number or the time is out of range")
        return cls(time.updated, oldest, newest, exported, dropped, ahead, time.stored)

    def pending(self) -> Ranges:
        """The numbers that the gateway has, or may have by now, and has not uploaded."""
        newest = self.newest if self.ahead is None else MAX_SEQUENCE
        found = Ranges([(self.exported + 1, newest)] if newest > self.exported else [])
        for first, last in self.ahead or ():
            found.take(first, last)
        return found


@dataclass(slots=True)
class GatewayReports:
    """The streams of all valid reports, and one line for each report that could not be used.

    `times` maps each gateway with a valid report to the time of that report. A stream of such a gateway that
    is missing in `streams` was deleted, or is no longer exported. `etags` has the ETags of the same reports,
    `versions` the versions of the gateways, as far as they are known.
    """

    streams: dict[StreamId, ReportedStream] = field(default_factory=dict)
    times: dict[str, ReportTime] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    etags: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def add(self, others: GatewayReports) -> None:
        self.streams |= others.streams
        self.times |= others.times
        self.problems += others.problems
        self.etags |= others.etags
        self.versions |= others.versions


def read_gateway_reports(
    store: ObjectStore,
    listed: Iterable[Entry] | None = None,
    known: Mapping[str, tuple[str, GatewayReports]] | None = None,
    *,
    others_stay: bool = False,
) -> GatewayReports:
    """Read the listed gateway reports, by default all of them.

    `known` are reports that were read before, by gateway, with their ETags: those are not read again if they
    still have that ETag or, with `others_stay`, are not listed. Call it before the listing of the data, so
    that no report is newer than that.
    """
    found = GatewayReports()
    parsing = Lock()
    keys = {report_key(gateway): read_before for gateway, read_before in (known or {}).items()}
    reads = []
    for entry in store.under(REPORTS) if listed is None else listed:
        etag, same = keys.pop(entry.key, ("", None))
        if same is not None and etag == entry.etag:
            found.add(same)
        else:
            # what is read now is no older than what was read before, though a late notification may be
            since = max((time.stored for time in same.times.values()), default=0) if same else 0
            reads.append(partial(_read, store, parsing, entry._replace(modified=max(entry.modified, since))))
    for answer in ahead(reads, store.ahead):
        found.add(answer())
    for _, same in keys.values() if others_stay else ():
        found.add(same)
    return found


def _read(store: ObjectStore, parsing: Lock, entry: Entry) -> GatewayReports:
    """Read one report. It counts as a whole or not at all."""
    try:
        content = read(store, entry.key, entry.size, MAX_REPORT)
        with parsing:  # a parsed report takes several times its size in memory
            found = _parsed(entry, content)
        found.etags = dict.fromkeys(found.times, entry.etag)
        return found
    except Vanished:
        return GatewayReports()
    except (BadObject, Unreadable) as error:
        return GatewayReports(problems=[f"{entry.key}: {error}"])


def _parsed(entry: Entry, content: bytes) -> GatewayReports:
    found = GatewayReports()
    key = entry.key
    try:
        document = json.loads(content)
        gateway = str(document["gateway"])
        time = ReportTime(entry.modified // 1000 * 1000, int(document["updated"]))
        if key != report_key(gateway):  # a copy, perhaps of an older report
            raise ValueError(f"it belongs to {gateway}, whose report has another key")
        if (count := len(document["streams"])) > MAX_STREAMS:
            raise ValueError(f"it has {count} streams, a report may have {MAX_STREAMS}")
        for stream in document["streams"]:
            name = StreamId(gateway, str(stream["stream"]), int(stream["epoch"]))
            name.stream.encode()  # raises for half a surrogate pair, which nothing can store
            if not 0 <= name.epoch < 10**EPOCH_DIGITS:
                raise ValueError("no object key can have its epoch")
            found.streams[name] = ReportedStream.from_json(stream, time)
        found.times[gateway] = time
        if document.get("version"):
            found.versions[gateway] = line(document["version"])[:VERSION]
    # a document that others can write must not stop the run, and may raise nearly anything
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
        problem = f"{key}: not a gateway report ({type(error).__name__}: {line(error)})"
        return GatewayReports(problems=[problem])
    return found
