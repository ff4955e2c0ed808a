"""The progress of a streaming query: its offsets, and the plan of the batch that follows an offset.

Spark stores the offset of each batch in the checkpoint of the query before it starts the batch. An offset is
the entire memory of the source, a JSON object:

    {"source": "s3://bucket/prefix", "query": "5f0c...", "batch": 17,
     "streams": {"gw-a": {"s0": {"1795000000000": [[0, 199]]}}}, "plan": "eJz..."}

* `streams`: the numbers that this batch and all before it have taken, as ranges by gateway, stream and epoch;
* `plan`: which objects this batch reads, and which numbers it takes from each; and the quarantine. JSON,
  compressed by zlib, in base64;
* `batch`: how many batches were planned; `query`: a random id that marks the records of this query.

So a batch that Spark repeats after a crash reads the same objects again, whatever was uploaded since.

The plan is made by `planner.plan`, from names, so the numbers of an object that turns out to be bad count as
taken at first. The task that finds it writes a record, `QUERY/BATCH/HASH.KIND`, into the quarantine folder,
and takes nothing from it. Whoever plans the next batch reads the records of this one (`Position.settle`):

    bad         its numbers are open again: for another object, or for this one when it is uploaded again
    unreadable  the same; it is also tried again when the query is started again
    gone        the same; it is not listed any more

A record is written before the batch can end, and a repeated task looks for it first. So an object that was
once passed over in a batch is passed over in every repetition of that batch.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from uuid import uuid4

from bridge.ingest.errors import IngestError
from bridge.ingest.planner import Inventory, Item, RoundLimits, StreamId, plan
from bridge.objectkeys import parse_key
from bridge.ranges import Pair, Ranges

BAD, UNREADABLE, GONE = "bad", "unreadable", "gone"


class Planned(NamedTuple):
    """An object of a batch, as it was listed, and the numbers that the batch takes from it."""

    key: str
    etag: str
    size: int
    fresh: list[Pair]


class Held(NamedTuple):
    """A quarantined object, by its key: which upload of it, of what kind, and the batch with its record."""

    etag: str
    kind: str
    batch: int


def record_name(batch: int, key: str, etag: str) -> str:
    """Return the name of an object's record in the folder of its query, without the kind."""
    digest = hashlib.sha256(f"{key}\n{etag}".encode()).hexdigest()
    return f"{batch}/{digest[:32]}"


@dataclass(frozen=True, slots=True)
class Position:
    """An offset."""

    source: str
    query: str = ""
    batch: int = 0
    covered: Mapping[StreamId, Ranges] = field(default_factory=dict)
    work: list[Planned] = field(default_factory=list)
    quarantine: Mapping[str, Held] = field(default_factory=dict)

    @classmethod
    def parse(cls, offset: Mapping[str, Any], source: str) -> Position:
        """Return the position of an offset of this source; raises IngestError if it is another's."""
        if offset.get("source") != source:
            raise IngestError(
                f"the checkpoint is that of {offset.get('source', 'another source')}, and the query reads "
                f"{source}: use a checkpoint of its own for each source"
            )
        content = json.loads(zlib.decompress(base64.b64decode(offset["plan"]))) if offset["plan"] else {}
        return cls(
            source,
            offset["query"],
            offset["batch"],
            {
                StreamId(gateway, stream, int(epoch)): Ranges(pairs)
                for gateway, streams in offset["streams"].items()
                for stream, epochs in streams.items()
                for epoch, pairs in epochs.items()
            },
            [
                Planned(key, etag, size, [(first, last) for first, last in fresh])
                for key, etag, size, fresh in content.get("work", ())
            ],
            {key: Held(*held) for key, held in content.get("quarantine", {}).items()},
        )

    def offset(self) -> dict[str, Any]:
        """Return what `parse` takes; equal positions give equal JSON."""
        streams: dict[str, dict[str, dict[str, list[Pair]]]] = {}
        for stream in sorted(self.covered):
            epochs = streams.setdefault(stream.gateway, {}).setdefault(stream.stream, {})
            epochs[str(stream.epoch)] = list(self.covered[stream])
        content = {"work": self.work, "quarantine": dict(sorted(self.quarantine.items()))}
        packed = zlib.compress(json.dumps(content).encode()) if self.work or self.quarantine else b""
        return {
            "source": self.source,
            "query": self.query,
            "batch": self.batch,
            "streams": streams,
            "plan": base64.b64encode(packed).decode(),
        }

    def settle(self, records: Iterable[str]) -> Position:
        """Return the position with the outcome of its batch: `records` are the names of its records."""
        kinds = dict(name.rsplit(".", 1) for name in records)
        if not kinds:
            return self
        covered = dict(self.covered)
        quarantine = dict(self.quarantine)
        for key, etag, _, fresh in self.work:
            kind = kinds.get(record_name(self.batch, key, etag))
            if kind is None:
                continue
            stream, item = _described(key)
            if item.acceptable:
                covered[stream] = covered[stream].copy()
                for first, last in fresh:
                    covered[stream].take(first, last)
            if kind != GONE:
                quarantine[key] = Held(etag, kind, self.batch)
        return replace(self, covered=covered, quarantine=quarantine)

    def next(self, inventory: Inventory, limits: RoundLimits, *, retry: bool = False) -> Position | None:
        """Return the position after the next batch of this one, which is settled; None if nothing is new.

        With `retry`, objects that were unreadable are tried again.
        """
        held = {key: one for key, one in self.quarantine.items() if not (retry and one.kind == UNREADABLE)}
        if held:
            listed = {
                item.key: item.etag
                for items in inventory.streams.values()
                for item in items
                if item.key in held
            }
            held = {key: one for key, one in held.items() if listed.get(key) == one.etag}
        refused = {(key, one.etag) for key, one in held.items()}
        todo = plan(inventory.pending(), self.covered, refused, limits)
        if not todo.work:
            return None
        covered = dict(self.covered)
        for stream in {work.stream for work in todo.work}:
            covered[stream] = covered[stream].copy() if stream in covered else Ranges()
        for work in todo.work:
            if work.item.acceptable:
                covered[work.stream].update(work.fresh)
        return Position(
            self.source,
            self.query or uuid4().hex[:16],
            self.batch + 1,
            covered,
            [Planned(work.item.key, work.item.etag, work.item.size, work.fresh) for work in todo.work],
            held,
        )


def _described(key: str) -> tuple[StreamId, Item]:
    name = parse_key(key)
    assert name is not None, key  # the planner plans no other key
    item = Item(name.first, -name.last, key, 0, "", 0)
    return StreamId.of(name), item
