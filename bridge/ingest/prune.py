"""Retention of the landing prefix: delete objects that are provably in the table.

An object is deleted when all of its numbers are in the table's state, it is older than requested, and the
table holds as many rows as its state says, with all columns. Quarantined objects, foreign objects and gateway
reports always stay.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from bridge.ingest.errors import IngestError
from bridge.ingest.planner import Inventory
from bridge.ingest.sinks.base import Sink, check
from bridge.ingest.state import load_state
from bridge.ingest.store import StorageLocation

DAY_MS = 24 * 3600 * 1000


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
    """Delete objects that are in the table and older than so many days.

    Raises IngestError, and deletes nothing, if the table does not have the rows of its state (not with
    `trust_state`), or lacks a column.
    """
    store = source.open()
    check(sink.name, sink.differences())
    inventory = Inventory(store.list())
    state = load_state(sink)
    if not trust_state:
        promised = state.rows()
        found = sink.rows()
        if found != promised:
            raise IngestError(
                f"{sink.name}: its state says {promised} rows and it has {found}, so nothing is deleted; "
                "if somebody deleted rows from the table on purpose, use --trust-state"
            )
    covered = state.covered()
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
    done.deleted = len(gone)
    if not dry_run:
        store.delete(gone)
    return done
