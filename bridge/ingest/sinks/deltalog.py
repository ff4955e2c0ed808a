"""Which files the versions of a Delta table need, as its log names them.

delta-rs names only the data files of one version. Others, too, may not be deleted: files of deletion vectors
and of the change data feed, and what was removed so recently that a reader or a RESTORE may need it. `named`
reads the newest checkpoint and all commits that are there (see Delta's protocol, "Delta Log Entries").
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bridge.ingest.errors import IngestError
from bridge.ingest.sinks.vectors import LOG, file_of
from bridge.ingest.store import Entry, ObjectStore, StorageLocation, ahead

COMMIT = re.compile(r"_delta_log/(\d{20})\.json")
# in one file, in parts, or of version 2 with a UUID
CHECKPOINT = re.compile(
    r"_delta_log/(\d{20})\.checkpoint(?:\.\d{10}\.(\d{10})|\.[0-9a-f-]{36})?\.(parquet|json)"
)
COLUMNS = [f"{kind}.{name}" for kind in ("add", "remove") for name in ("path", "deletionVector")]
COLUMNS += ["remove.deletionTimestamp", "sidecar.path"]
UNITS = {"week": 7.0, "day": 1.0, "hour": 1 / 24, "minute": 1 / 1440, "second": 1 / 86400}
RETENTION = "delta.deletedFileRetentionDuration"
NOW = float("inf")  # the time of what the current version needs


def named(place: StorageLocation, newest: int) -> dict[str, float]:
    """Return until when (Unix time in ms, or NOW) a version up to the `newest` needed each file of the log.

    Files are locations, as the log spells them. Raises IngestError if the log has gaps, and Vanished if it
    was cleaned up meanwhile.
    """
    store = place.open()
    entries = {entry.key: entry for entry in store.under(LOG)}
    commits = {int(found[1]): entry for key, entry in entries.items() if (found := COMMIT.fullmatch(key))}
    base, checkpoint = _checkpoint(entries, newest)
    if gap := next((at for at in range(base + 1, newest + 1) if at not in commits), None):
        raise IngestError(f"{place.url}: version {gap} is not in its log, so nothing was deleted")
    needed: dict[str, float] = defaultdict(float)
    live: dict[tuple[str, str], list[str]] = {}

    def apply(action: dict[str, Any], at: float, *, newer: bool) -> None:
        add, remove, cdc = (action.get(kind) for kind in ("add", "remove", "cdc"))
        for one in (one for one in (add, remove, cdc) if one):
            vector = one.get("deletionVector") or {}
            name, files = (one["path"], str(vector.get("pathOrInlineDv"))), _files(place, one)
            if one is add:
                if newer:
                    live[name] = files
                continue
            if newer:
                live.pop(name, None)
            until = at if one is cdc else max(at, float(one.get("deletionTimestamp") or at))
            for file in files:
                needed[file] = max(needed[file], until)

    for action in checkpoint(store):
        apply(action, 0 if (action.get("remove") or {}).get("deletionTimestamp") else NOW, newer=True)
    wanted = sorted(at for at in commits if at <= newest)
    texts = ahead((partial(store.get, commits[at].key) for at in wanted), store.ahead)
    for at, text in zip(wanted, texts, strict=True):
        actions = [json.loads(line) for line in text().splitlines() if line.strip()]
        # one commit may remove a file with one deletion vector and add it with another
        for action in sorted(actions, key=lambda action: "add" in action):
            apply(action, commits[at].modified, newer=at > base)
    return {**needed, **dict.fromkeys((file for files in live.values() for file in files), NOW)}


def retention(properties: dict[str, str]) -> float:
    """Return how many days the table keeps the files that it has removed."""
    text = properties.get(RETENTION) or "interval 1 week"
    parts = re.findall(r"(\d+)\s+(week|day|hour|minute|second)s?", text)
    if not parts:
        raise IngestError(f"{RETENTION} = {text}: this is not understood, so nothing was deleted")
    return sum(int(count) * UNITS[unit] for count, unit in parts)


def old(place: StorageLocation, current: int) -> Iterator[str]:
    """Yield the keys of commits and checkpoints before a checkpoint of version `current`."""
    for entry in place.open().under(LOG):
        version = re.match(r"_delta_log/(?:_sidecars/)?\.?(\d{20})\.", entry.key)
        if version and int(version[1]) < current:
            yield entry.key


def _checkpoint(entries: dict[str, Entry], newest: int) -> tuple[int, Any]:
    """Return the version of the newest complete checkpoint, -1 without any, and what yields its actions."""
    found: dict[int, list[str]] = defaultdict(list)
    parts: dict[tuple[int, int], list[str]] = defaultdict(list)
    for key in entries:
        if (match := CHECKPOINT.fullmatch(key)) and int(match[1]) <= newest:
            if match[2]:
                parts[int(match[1]), int(match[2])].append(key)
            else:
                found[int(match[1])] = [key]
    found |= {at: keys for (at, count), keys in parts.items() if len(keys) == count and at not in found}
    base = max(found, default=-1)
    return base, lambda store: (action for key in found.get(base, ()) for action in _actions(store, key))


def _actions(store: ObjectStore, key: str) -> Iterator[dict[str, Any]]:
    data = store.get(key)
    if key.endswith(".json"):
        rows = [json.loads(line) for line in data.splitlines() if line.strip()]
    else:
        rows = pq.ParquetFile(pa.BufferReader(data)).read(COLUMNS, use_threads=False).to_pylist()
    for row in rows:
        if (sidecar := row.get("sidecar")) and sidecar.get("path"):
            yield from _actions(store, f"{LOG}_sidecars/{sidecar['path'].rpartition('/')[2]}")
        yield {kind: row[kind] for kind in ("add", "remove") if row.get(kind) and row[kind].get("path")}


def _files(place: StorageLocation, action: dict[str, Any]) -> list[str]:
    """Return the locations of a data file and of its deletion vector."""
    vector = action.get("deletionVector")
    paths = [action["path"], *filter(None, [file_of(vector) if vector else None])]
    return [path if re.match("/|[A-Za-z][A-Za-z0-9+.-]*:/", path) else place.join(path).url for path in paths]
