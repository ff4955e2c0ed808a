"""The deletion vectors of a Delta table, from its log: delta-rs says only what they have, from their files.

A vector that is in a file of its own has the id of this file in the log, in the digits of ZeroMQ's base 85,
behind a folder if there is one. The log is read from the newest version back to a checkpoint.
"""

from __future__ import annotations

import json
import re
from base64 import b85decode
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq

from bridge.ingest.errors import Vanished
from bridge.ingest.store import ObjectStore

LOG = "_delta_log/"
ID = 20  # digits of an id
FRAME = 8  # bytes around a vector in a file: its length, and its checksum
DIGITS = str.maketrans(  # of ZeroMQ to Python's
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#",
    "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~",
)


def read_vectors(store: ObjectStore, version: int) -> dict[str, dict[str, Any]]:
    """Return the vectors of a version of the table at `store`, by the path of the data file."""
    found: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    for kind, file in _actions(store, version):
        if (path := unquote(file["path"])) not in seen:
            seen.add(path)
            if kind == "add" and file.get("deletionVector"):
                found[path] = file["deletionVector"]
    return found


def file_of(vector: dict[str, Any]) -> str | None:
    """Return the path of the file of a vector, relative to the table or in full; None: it is in the log."""
    text = str(vector["pathOrInlineDv"])
    if vector["storageType"] != "u":
        return text if vector["storageType"] == "p" else None
    name = UUID(bytes=b85decode(text[-ID:].translate(DIGITS)))
    return "/".join([*filter(None, [text[:-ID]]), f"deletion_vector_{name}.bin"])


def _actions(store: ObjectStore, version: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what the log says of files, the newest first; of one version, what is added comes first."""
    for number in range(version, -1, -1):
        try:
            actions = [
                json.loads(text) for text in store.get(f"{LOG}{number:020d}.json").splitlines() if text
            ]
        except Vanished:  # it has expired: there is a checkpoint at this version or a later one
            break
        for kind in ("add", "remove"):
            yield from ((kind, action[kind]) for action in actions if kind in action)
    else:
        return
    names = [
        entry.key for entry in store.under(LOG) if re.search(r"/\d{20}\.checkpoint\b.*parquet$", entry.key)
    ]
    newest = max((name[:30] for name in names if int(name[len(LOG) :][:20]) <= version), default="?")
    for name in names:
        if name.startswith(newest):
            rows = pq.read_table(pa.BufferReader(store.get(name)), columns=["add"])["add"]
            yield from (("add", file) for file in rows.to_pylist() if file)
