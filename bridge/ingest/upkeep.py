"""The commands of an operator that need no Spark: accept that a stream is gone, prune the landing prefix."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from bridge.ingest import intact
from bridge.ingest.deletes import delete
from bridge.ingest.errors import IngestError
from bridge.ingest.planner import Inventory, StreamId
from bridge.ingest.report import ACCEPTED, GONE, survey
from bridge.ingest.sinks.base import Sink, check
from bridge.ingest.state import StateStore
from bridge.ingest.store import StorageLocation
from bridge.ingest.verdict import REMEDY, look, reasons

DAY_MS = 24 * 3600 * 1000


def accept(source: StorageLocation, sink: Sink, wanted: Iterable[str]) -> dict[str, int]:
    """Accept that streams named GATEWAY/STREAM are gone, in all epochs; return the count for each.

    Their pending messages count as trimmed then, no longer as missing. An operator decides this, and the
    state records it: in the stream's last report, as a range dropped with the reason `accepted`. Numbers that
    are missing for any other reason stay missing. If the gateway lists the stream again, its own report
    counts. Raises IngestError, and accepts none, if one of them is not known to be gone; CommitConflict if
    another run commits at the same time.
    """
    state, report = survey(source, sink)
    gone: dict[str, dict[StreamId, list[tuple[int, int, str]]]] = defaultdict(dict)
    for stream in report.streams:
        if holes := [(hole.first, hole.last, ACCEPTED) for hole in stream.holes if hole.reason == GONE]:
            gone[stream.path][StreamId(stream.gateway, stream.stream, stream.epoch)] = holes
    counts: dict[str, int] = {}
    for path in wanted:
        if path not in gone:
            known = f"these are: {', '.join(sorted(gone))}" if gone else "neither is any other stream"
            raise IngestError(f"{path}: this stream is not known to be gone; {known}")
        counts[path] = 0
        for name, dropped in gone[path].items():
            reported = state.streams[name].reported
            assert reported is not None, name  # the hole was computed from it
            state.streams[name].reported = replace(
                reported, exported=reported.newest, dropped=(*reported.dropped, *dropped)
            )
            counts[path] += sum(last - first + 1 for first, last, _ in dropped)
    previous = state.version
    sink.commit(previous, StateStore(sink.state()).save(state, previous), [])
    return counts


@dataclass(slots=True)
class Pruned:
    """What was deleted, or would be in a dry run, and what stays."""

    deleted: int = 0
    deleted_bytes: int = 0
    kept: int = 0
    kept_because_young: int = 0
    dry_run: bool = False


def prune(
    source: StorageLocation, sink: Sink, older_than_days: float, *, dry_run: bool, trust_state: bool
) -> Pruned:
    """Delete objects that are provably in the table and older than so many days.

    All numbers of an object must be in the table's state, or have been deleted from the table on purpose.
    Quarantined objects, foreign objects and gateway reports always stay. Raises IngestError, and deletes
    nothing, if the table does not have the rows of its state (not with `trust_state`), lacks a column, or
    needs a file that is gone or has another size: the objects may be all that is left of its rows.
    """
    store = source.open()
    check(sink.name, sink.differences())
    inventory = Inventory(store.list())
    state, standing = look(sink)
    if not trust_state:
        promised, found = state.rows(), standing.rows
        if found != promised:
            raise IngestError(
                f"{sink.name}: its state says {promised} rows and it has {found}, so nothing is deleted; "
                f"{REMEDY}; or use --trust-state"
            )
        if differs := reasons(sink.name, state, found, standing.changes):
            raise IngestError(f"{differs[0]}, so nothing is deleted; {REMEDY}; or use --trust-state")
    covered = state.settled()
    limit = time.time_ns() // 1_000_000 - older_than_days * DAY_MS
    done = Pruned(dry_run=dry_run, kept=len(inventory.foreign))
    gone: list[str] = []
    for stream, items in inventory.streams.items():
        for item in items:
            taken = stream in covered and covered[stream].covers(item.first, item.last)
            if not taken or (item.key, item.etag) in state.quarantine:
                done.kept += 1
            elif item.modified > limit:
                done.kept_because_young += 1
            else:
                gone.append(item.key)
                done.deleted_bytes += item.size
    if gone and not (files := intact.look(sink, state)).whole:
        bad = [f"{damage.path} {damage.why}" for damage in files.damages] or files.unseen
        raise IngestError(
            f"{sink.name}: {len(bad)} of its files cannot be read, so nothing is deleted, because the "
            f"objects may be all that is left of their rows: {bad[0]}; bring them back with "
            "`streambridge ingest repair` first"
        )
    done.deleted = len(gone)
    if not dry_run:
        refused = [source.join(key).url for key, _ in state.quarantine]
        delete(source, gone, lambda: refused)
    return done
