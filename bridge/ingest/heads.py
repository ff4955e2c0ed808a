"""What gateways say about their own streams: the head objects `<prefix>/_gateway/<id>.json`.

    {"gateway": "gw-1", "updated": <ms>, "streams": [{"stream": "readings", "epoch": <ms>, "oldest": 0,
     "newest": 99, "exported": 89, "dropped": [[first, last, reason], ...]}, ...]}

`newest` is the newest number that the gateway has committed, `exported` the highest that it has
uploaded (-1: none), `dropped` are the numbers that it legally dropped before they were uploaded. From
the names of data objects alone a lost tail could not be seen, and a legal drop would look like loss.
What else lies there, such as a copy of a head, is a problem to be told of and never taken for a head.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

from bridge.ingest.errors import BadObject, Unreadable, Vanished, line
from bridge.ingest.planner import StreamId
from bridge.ingest.store import Entry, Store, read
from bridge.objectkeys import MAX_SEQUENCE, REPORTS, report_key

YEAR_10000 = 253_402_300_800_000  # in ms

EPOCH_DIGITS = 19  # of an epoch in the name of a data object
MAX_HEAD = 32 << 20  # bytes: 600 streams of a gateway, each with the thousand ranges that it lists at most
READERS = 16  # heads read at the same time: each is a round trip, and there is one for every gateway


@dataclass(frozen=True, slots=True)
class Head:
    """One stream as its gateway saw it at `updated` (Unix time in ms)."""

    updated: int
    oldest: int
    newest: int
    exported: int
    dropped: tuple[tuple[int, int, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "updated": self.updated,
            "oldest": self.oldest,
            "newest": self.newest,
            "exported": self.exported,
            "dropped": [list(drop) for drop in self.dropped],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any], updated: int) -> Head:
        dropped = tuple((int(low), int(high), line(why)) for low, high, why in data.get("dropped") or ())
        oldest, newest, exported = (
            int(data.get("oldest", 0)),
            int(data["newest"]),
            int(data.get("exported", -1)),
        )
        numbers = (oldest, newest, exported, *(number for drop in dropped for number in drop[:2]))
        if not (0 <= updated < YEAR_10000 and -1 <= min(numbers) <= max(numbers) <= MAX_SEQUENCE):
            raise ValueError("its numbers or its time cannot be")
        return cls(updated, oldest, newest, exported, dropped)


@dataclass(slots=True)
class Heads:
    """All that could be read, and one line for each head object that could not.

    `gateways` says when (Unix time in ms) each gateway whose head object is good wrote it: a stream of such
    a gateway that is not in `streams` is no longer there, or no longer exported.
    """

    streams: dict[StreamId, Head] = field(default_factory=dict)
    gateways: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_heads(store: Store) -> Heads:
    """Read the head objects; call it before the listing, so that a head never knows more than that."""
    found = Heads()
    with ThreadPoolExecutor(READERS) as pool:
        for one in pool.map(partial(_read, store, Lock()), list(store.under(REPORTS))):
            found.streams |= one.streams
            found.gateways |= one.gateways
            found.problems += one.problems
    return found


def _read(store: Store, parsing: Lock, entry: Entry) -> Heads:
    """One head object: all of it is good, or none of it counts."""
    try:
        content = read(store, entry.key, entry.size, MAX_HEAD)
        with parsing:  # what is parsed takes several times as much
            return _parsed(entry.key, content)
    except Vanished:
        return Heads()
    except (BadObject, Unreadable) as error:
        return Heads(problems=[f"{entry.key}: {error}"])


def _parsed(key: str, content: bytes) -> Heads:
    found = Heads()
    try:
        document = json.loads(content)
        gateway, updated = str(document["gateway"]), int(document["updated"])
        if key != report_key(gateway):  # a copy, perhaps of an older one
            raise ValueError(f"it is of {gateway}, whose head has another name")
        for stream in document["streams"]:
            name = StreamId(gateway, str(stream["stream"]), int(stream["epoch"]))
            name.stream.encode()  # half a surrogate pair can be written nowhere
            if not 0 <= name.epoch < 10**EPOCH_DIGITS:
                raise ValueError("no data object can have its epoch")
            found.streams[name] = Head.from_json(stream, updated)
        found.gateways[gateway] = updated
    # what others can write must stop nothing, and a hostile document can raise nearly anything
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
        said = f"{key}: not a head object ({type(error).__name__}: {line(error)})"
        return Heads(problems=[said])
    return found
