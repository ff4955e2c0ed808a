"""A streaming query over the landing prefix, without Spark, and what it is promised.

Each message comes once, whatever is killed, if the sink takes a batch once, as here. A checkpoint has the
offset of each batch before the batch begins. A batch that has not ended is repeated from it. An object that
cannot be read is passed over, and taken once it can be: after a new start of the query, or when it was
uploaded again.
"""

from __future__ import annotations

import json
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError
from pyspark.sql.types import StructType

from bridge.ingest.offsets import BAD
from bridge.ingest.planner import RoundLimits
from bridge.ingest.stream_reader import ObjectStreamReader, StreamOptions
from bridge.objectkeys import parse_key

from .cloud import Killed, RunFaults, absent, driver

if TYPE_CHECKING:
    from .checks import Checks
    from .world import World

READ = StructType().add("stream", "string").add("epoch", "string").add("sequence_number", "long")
READ = READ.add("payload", "binary")
FAULTS = RunFaults(killed=0.01, failed=0.01, unreadable=0.1)
LIMITS = RoundLimits(objects=20, bytes=1 << 30)  # of a batch
Row = tuple[str, str, int]  # stream, epoch, number


class Query:
    """The query of one world."""

    def __init__(self, world: World, checks: Checks) -> None:
        self.world, self._checks, self._random = world, checks, Random(f"query {world.plan.seed}")
        self._offsets: list[dict[str, Any]] = []  # the checkpoint: what was planned
        self._ended = 0  # batches
        self._reader: ObjectStreamReader | None = None
        self._got: set[Row] = set()

    @property
    def used(self) -> bool:
        """Whether it has ever begun a batch."""
        return bool(self._offsets)

    def trigger(self) -> None:
        """Take what is new in one batch, if nothing fails. Spark may have started the query again before."""
        if not self._checks.lied:
            self._batch(FAULTS)

    def at_rest(self) -> None:
        """Nothing fails any more: the query has all that is there."""
        if not self.used:
            return
        self._reader = None
        while self._batch(RunFaults()):
            pass
        bucket, refused = self.world.bucket, self._refused()
        for key in bucket.keys:
            name = parse_key(key)
            if name is None or (key, bucket.objects[key].etag) in refused:
                continue
            wanted = set(range(name.first, name.last + 1)) - absent(name, bucket.objects[key].body)
            for number in sorted(wanted):
                if (name.stream, str(name.epoch), number) not in self._got:
                    self._checks.broken(f"a streaming query has not got number {number} of {key}")

    def _refused(self) -> set[tuple[str, str]]:
        """Objects that were called bad, by key and ETag.

        One that was damaged after it had been listed is known by the ETag of its listing, which it has again
        when it is put back as it was: it is not read then.
        """
        lake = self.world.lake.objects
        records = [json.loads(lake[key].body) for key in lake if key.startswith("query/")]
        harmed = {each.key for each in self.world.bucket.log if each.what.endswith("by somebody")}
        return {(one["key"], one["etag"]) for one in records if one["kind"] == BAD and one["key"] in harmed}

    def _batch(self, faults: RunFaults) -> bool:
        """Make a batch; returns whether there was one."""
        at = driver(self.world.bucket, self._random, faults).at
        bucket = self.world.bucket
        if self._reader is None or self._random.random() < 0.3:
            options = StreamOptions(bucket.place("", at), self.world.lake.place("query"), None, LIMITS)
            self._reader = ObjectStreamReader(options, READ)
        try:
            return self._took(self._reader)
        except (Killed, BotoCoreError, ClientError):
            self._reader = None
            return True

    def _took(self, reader: ObjectStreamReader) -> bool:
        start = self._offsets[self._ended - 1] if self._ended else reader.initialOffset()
        if len(self._offsets) == self._ended:
            end = reader.latestOffset(start)
            if end == start:
                return False
            self._offsets.append(end)
        end = self._offsets[self._ended]
        rows: dict[Row, bytes] = {}
        for part in reader.partitions(start, end):
            for batch in reader.read(part):
                columns = batch.to_pydict()
                for stream, epoch, number, payload in zip(*(columns[one] for one in READ.names), strict=True):
                    if (stream, epoch, number) in self._got or (stream, epoch, number) in rows:
                        self._checks.broken(f"a streaming query has got number {number} of {stream} twice")
                    rows[stream, epoch, number] = payload
        for (stream, epoch, number), payload in rows.items():
            if self._checks.appended.get(("g", stream, int(epoch), number)) != payload:
                self._checks.broken(f"a streaming query has got {payload!r} as number {number} of {stream}")
        self._got.update(rows)
        self._ended += 1
        with suppress(BotoCoreError, ClientError):
            reader.commit(end)
        return True
