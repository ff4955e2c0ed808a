"""What a run lists of the bucket: everything once a day, and only possibly new objects in between.

A full listing lists every key. In between, a run relies on the gateway reports, which say up to which number
everything is uploaded (`exported`) or dropped, and which numbers above it are (`ahead`). It lists

* the gateway reports, and reads those whose ETag is not the one in the state;
* of the gateways whose report has changed, the streams with numbers that the report promises and the state
  does not have, from the key of the last number on up to which the state has all (`StartAfter`). If promised
  numbers are not found there, the whole stream is listed: a clock may have been set back, or an upload cut
  differently. The same applies to streams that the report no longer has;
* the streams with quarantined or unreadable objects, in every run, whole; those with promised numbers that
  no object has (`absent`), from there on;
* everything in folders without a valid gateway report, because their content is unknown.

With notifications (`bridge.ingest.notifications`), the names of new objects and reports come from a queue,
and neither the reports nor the folders are listed.

So an object is found at the latest by the full listing, whatever else fails. Only that finds objects that no
report promises (of a stream that was created and deleted in between, or of a gateway that cannot write its
report), foreign keys, and duplicates.

What the next run needs is in the state: `Listed` for all, and `absent`, `open` and `duplicates` of a stream.
A commit writes it when everything that was listed is settled; one that leaves objects to a later round keeps
the older record, and the next run finds the same new objects again. After `repair`, and with another
`--source`, the next listing is full.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from bridge.ingest.gateway_reports import (
    YEAR_10000,
    GatewayReports,
    ReportedStream,
    read_gateway_reports,
)
from bridge.ingest.planner import Inventory, Item, StreamId
from bridge.ingest.state import KnownReport, Listed, StreamState, TableState
from bridge.ingest.store import Entry, ObjectStore, ahead
from bridge.objectkeys import (
    JOINED,
    MAX_SEQUENCE,
    REPORTS,
    epoch_prefix,
    folder_prefix,
    hour_prefix,
    parse_key,
    report_key,
)
from bridge.ranges import Ranges, size

if TYPE_CHECKING:
    from bridge.ingest.notifications import Notifications

DAY = 24 * 3600.0  # seconds between full listings
FOREIGN = 20  # keys that the state names


@dataclass(slots=True)
class Listing:
    """What was found: objects, gateway reports, and which streams are known as a whole.

    `began` is when it began (Unix time in ms), `full_at` when the last full listing did, perhaps this one.
    """

    source: str
    began: int
    full_at: int
    inventory: Inventory
    reports: GatewayReports
    base: Listed | None
    whole: set[StreamId] = field(default_factory=set)
    foreign: list[str] = field(default_factory=list)  # this time, and the first of the last full listing
    foreign_count: int = 0
    absent: dict[StreamId, Ranges] = field(default_factory=dict)
    written: Listed | None = None  # into a state, which may not be committed

    @property
    def full(self) -> bool:
        return self.full_at == self.began

    def save_reports(self, state: TableState) -> None:
        """Put the reports into the state, even for streams without an object, which may never get one.

        What another run has saved since may be newer, and stays. A stream without any number is forgotten
        when its gateway no longer lists it: a gateway could name new ones in each report.
        """
        for name, reported in self.reports.streams.items():
            stream = state.of(name)
            if stream.reported is None or stream.reported.time <= reported.time:
                stream.reported = reported
        gone = [
            name
            for name, stream in state.streams.items()
            if stream.is_empty
            and name not in self.reports.streams
            and stream.reported is not None
            and name.gateway in self.reports.times
            and stream.reported.time <= self.reports.times[name.gateway]
        ]
        for name in gone:
            del state.streams[name]

    def forget_deleted(self, state: TableState) -> bool:
        """Drop quarantined objects that no longer exist from the state; returns whether there were any.

        Only those of streams that were listed whole, and not if the table was last filled from elsewhere.
        """
        if self.base is None or self.base.source != self.source:
            return False
        there = {item.key for items in self.inventory.streams.values() for item in items}
        gone = [
            name
            for name in state.quarantine
            if name[0] not in there and (self.full or _stream_of(name[0]) in self.whole)
        ]
        for name in gone:
            del state.quarantine[name]
        return bool(gone)

    def is_news(self, state: TableState) -> bool:
        """Return whether the state knows of no full listing that is as new as this one."""
        listed = state.listed
        return listed is None or listed.source != self.source or listed.full != self.full_at

    def record(self, state: TableState, unreadable: Iterable[tuple[str, str]]) -> None:
        """Record in the state what the next run need not list, once every object found here is settled.

        `unreadable` are the objects, by key and ETag, that are neither taken nor quarantined. If another run
        has written its own record since, that one stays, unless this listing is full. Call `save_reports`
        before.
        """
        if not self.full and state.listed != self.base:
            return
        gateways = {
            name: KnownReport(etag, self.reports.times[name], self.reports.versions.get(name, ""))
            for name, etag in self.reports.etags.items()
        }
        state.listed = Listed(self.source, self.full_at, gateways, self.foreign_count, self.foreign[:FOREIGN])
        self.written = state.listed
        totals = self.inventory.tally(state.quarantine)
        unread = {_stream_of(key) for key, _ in unreadable}
        for name, stream in state.streams.items():
            stream.open = name in unread
            if name in self.whole:
                stream.absent = self.absent.get(name, Ranges())
                stream.duplicates = totals[name].duplicates if name in totals else 0


def look_around(
    store: ObjectStore,
    source: str,
    state: TableState,
    now: int,
    full_every: float = DAY,
    notifications: Notifications | None = None,
) -> Listing:
    """List possibly new objects; all objects if the last full listing is `full_every` seconds old or unknown.

    `now` is Unix time in ms. The reports are read before the listing, so that none is newer than it.
    """
    source = source.rstrip("/")
    known = state.listed
    events = list(notifications.receive()) if notifications else []
    full = known is None or known.source != source or not 0 <= now - known.full < full_every * 1000
    unchanged = {} if known is None or known.source != source else _unchanged(known, state)
    if full or notifications is None:
        listed = store.under(REPORTS)
    else:
        named = sorted(events, key=lambda entry: entry.modified)  # a queue keeps no order
        listed = iter({entry.key: entry for entry in named if entry.key.startswith(REPORTS)}.values())
    reports = read_gateway_reports(
        store, listed, unchanged, others_stay=not full and notifications is not None
    )
    if full or known is None:
        inventory = Inventory(store.list())
        found = Listing(source, now, now, inventory, reports, known, set(inventory.streams))
        found.whole |= reports.streams.keys() | state.streams.keys()
        found.foreign, found.foreign_count = sorted(inventory.foreign), len(inventory.foreign)
    else:
        entries = [entry for entry in events if not entry.key.startswith(REPORTS)]
        whole: set[StreamId] = set()
        if notifications is None:
            entries += _unreported(store, reports, whole)
        entries += _promised(store, state, reports, known, entries, whole)
        inventory = Inventory({entry.key: entry for entry in entries}.values())
        found = Listing(source, now, known.full, inventory, reports, known, whole)
        found.foreign = sorted({*inventory.foreign, *known.foreign})
        found.foreign_count = max(known.foreign_count, len(found.foreign))
    _take_announcements(store, state, reports, inventory)
    if notifications and notifications.strange:
        reports.problems.append(
            f"{notifications.strange} messages of {notifications.url} concern no object under {source}; "
            "they were ignored"
        )
    for name in found.whole & reports.streams.keys():
        rest = Ranges(outstanding(reports.streams[name], _settled(state, name)))
        for item in inventory.streams.get(name, ()):
            rest.take(item.first, item.last)
        if rest:
            found.absent[name] = rest
    return found


def _take_announcements(
    store: ObjectStore, state: TableState, reports: GatewayReports, inventory: Inventory
) -> None:
    """Look again whether a gateway uploads the newest messages first, where objects leave gaps.

    It says so before it uploads any object, but perhaps after the reports were read and before the objects
    were listed. Nothing else of the newer report counts: it may promise objects that were not listed.
    """
    gaps: dict[str, list[StreamId]] = {}
    for name, items in inventory.streams.items():
        reported = reports.streams.get(name)
        known = _settled(state, name)
        for item in items:
            known.add(item.first, item.last)
        newest = reported.newest if reported else -1
        if not (reported and reported.ahead is not None) and known.missing(newest + 1, known.last):
            gaps.setdefault(name.gateway, []).append(name)
    for gateway, names in gaps.items():
        again = read_gateway_reports(store, store.under(report_key(gateway)))
        for name in names:
            if (later := again.streams.get(name)) is not None and later.ahead is not None:
                first = reports.streams.get(
                    name, ReportedStream(later.updated, 0, -1, -1, stored=later.stored)
                )
                reports.streams[name] = replace(first, ahead=first.ahead or ())


def outstanding(reported: ReportedStream, known: Ranges) -> list[tuple[int, int]]:
    """Return the numbers that the report promises in objects and that are not known."""
    rest = Ranges(known.missing(0, reported.exported))
    for first, last in reported.ahead or ():
        rest.update(known.missing(first, last))
    joined = []
    for first, last, reason in reported.dropped:
        if reason.startswith(JOINED):
            joined.append((first, last, reason.removeprefix(JOINED)))
        else:
            rest.take(first, last)
    for first, last, count in joined:  # `count` numbers of the range were dropped, nobody knows which
        dropped = int(count) if re.fullmatch("[0-9]{1,20}", count) else 0
        if size(rest.common(first, last)) <= dropped:
            rest.take(first, last)
    return list(rest)


def start_after(name: StreamId, state: StreamState, reported: ReportedStream | None) -> str:
    """Return the key after which to list a stream; empty: list it whole.

    Objects that begin with a higher number than the state has without a gap have greater keys, because keys
    sort by the hour of the first message, then by number. That fails where a clock was set back.
    """
    known = _numbers(state)
    for first, last, reason in reported.dropped if reported else ():
        if first <= last and not reason.startswith(JOINED):
            known.add(first, last)
    holes = known.missing(0, MAX_SEQUENCE)
    reach = holes[0][0] if holes else MAX_SEQUENCE
    below = state.covered.common(0, reach - 1) if reach else []
    ms = state.times.get(below[-1][1], -1) if below else -1
    if not 0 <= ms < YEAR_10000:  # rows of other engines may have any time
        return ""
    return f"{hour_prefix(*name, ms)}{below[-1][1]:020d}"


def _numbers(state: StreamState) -> Ranges:
    known = state.covered.copy()
    known.update(state.removed)
    return known


def _settled(state: TableState, name: StreamId) -> Ranges:
    """Return the numbers of the stream that no object is needed for."""
    return _numbers(state.streams.get(name, StreamState()))


def _unchanged(known: Listed, state: TableState) -> dict[str, tuple[str, GatewayReports]]:
    """Return the reports that the state has, by gateway, with the ETag of each."""
    found = {}
    for gateway, (etag, time, version) in known.gateways.items():
        found[gateway] = (etag, GatewayReports(times={gateway: time}, etags={gateway: etag}))
        if version:
            found[gateway][1].versions[gateway] = version
    for name, stream in state.streams.items():
        if name.gateway in found and _was_listed(name, stream, known):
            assert stream.reported is not None
            found[name.gateway][1].streams[name] = stream.reported
    return found


def _was_listed(name: StreamId, stream: StreamState, known: Listed) -> bool:
    """Return whether the report that the state has recorded for the gateway lists the stream.

    Or a newer one: a commit that leaves objects to later puts that into the stream, and not yet into `known`.
    """
    return stream.reported is not None and known.gateways[name.gateway].time <= stream.reported.time


def _unreported(store: ObjectStore, reports: GatewayReports, whole: set[StreamId]) -> list[Entry]:
    """List the folders that no gateway report describes."""
    entries, folders = store.top()
    reported = {folder_prefix(gateway) for gateway in reports.times} | {REPORTS}
    requests = [partial(_under, store, folder, "") for folder in folders if folder not in reported]
    for answer in ahead(requests, store.ahead):
        entries += answer()
    named = map(_stream_of, (entry.key for entry in entries))
    whole |= {name for name in named if name and name.gateway not in reports.times}
    return entries


def _promised(
    store: ObjectStore,
    state: TableState,
    reports: GatewayReports,
    known: Listed,
    entries: Iterable[Entry],
    whole: set[StreamId],
) -> list[Entry]:
    """List the streams that may have objects which are not among the entries and not in the table."""
    given = Inventory(entries).streams
    doubtful = {name for key, _ in state.quarantine if (name := _stream_of(key))}
    doubtful |= {name for name, stream in state.streams.items() if stream.open}
    doubtful -= whole
    after = dict.fromkeys(doubtful, "")
    same = {(gateway, report.etag) for gateway, report in known.gateways.items()}
    changed = {gateway for gateway, etag in reports.etags.items() if (gateway, etag) not in same}
    for name, reported in reports.streams.items():
        if name.gateway not in changed or name in doubtful:
            continue
        if _lacks(_settled(state, name), reported, given.get(name, ())):
            after[name] = start_after(name, state.streams.get(name, StreamState()), reported)
    changed &= known.gateways.keys()
    for name, stream in state.streams.items():
        gone = name.gateway in changed and name not in reports.streams
        if gone and name not in after and _was_listed(name, stream, known):
            after[name] = start_after(name, stream, stream.reported)
    for name, stream in state.streams.items():  # missing numbers may have been uploaded again
        if not stream.absent or name in after or name in whole:
            continue
        settled = _numbers(stream)
        if not all(settled.covers(first, last) for first, last in stream.absent):
            after[name] = start_after(name, stream, reports.streams.get(name))
    found: list[Entry] = []
    while after:
        asked = list(after.items())
        requests = [partial(_under, store, epoch_prefix(*name), start) for name, start in asked]
        again: dict[StreamId, str] = {}
        for (name, start), answer in zip(asked, ahead(requests, store.ahead), strict=True):
            listed = answer()
            found += listed
            if not start:
                whole.add(name)
            elif name in reports.streams:
                items = [*given.get(name, ()), *Inventory(listed).streams.get(name, ())]
                promised = _settled(state, name)
                promised.update(state.streams[name].absent)
                if _lacks(promised, reports.streams[name], items):
                    again[name] = ""
        after = again
    return found


def _lacks(known: Ranges, reported: ReportedStream, items: Iterable[Item]) -> bool:
    """Return whether the report promises numbers that are neither known nor in these objects."""
    for item in items:
        known.add(item.first, item.last)
    return bool(outstanding(reported, known))


def _under(store: ObjectStore, prefix: str, after: str) -> list[Entry]:
    return list(store.under(prefix, after))


def _stream_of(key: str) -> StreamId | None:
    name = parse_key(key)
    return StreamId.of(name) if name else None
