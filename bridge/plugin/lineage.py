"""Notices that the objects of a stream in S3 come from another copy of its data directory.

Object names hold numbers, so a copy whose batches end at other numbers writes other names, and no conditional
request notices that both hold other messages with the same numbers. So before its first object, and again
every `AGAIN` seconds, an export lists the newest objects of its stream. Before a batch is written whose
numbers another object has, their messages are compared: the same ones come from an export that has started
over, others from another gateway with this id, or from a copy. One that cannot be read proves neither: it is
named in a warning, and stays as it is, because a batch is written beside it.

The list takes two or three requests: the days, and the objects of the newest days, back to a day on which
all numbers are below those of the batch. It needs s3:ListBucket. Without that right the export goes on, warns
once, and notices only objects of the same name.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from bridge.objectkeys import parse_key
from bridge.plugin.api import Batch, Context, Stopped
from bridge.plugin.aws import error_code, failure
from bridge.plugin.awserrors import DENIED
from bridge.plugin.objects import ABSENT

AGAIN = 600.0  # seconds
LARGEST = 512 * 1024 * 1024  # bytes of an object's rows; the exporter makes objects of up to 256 MiB
_UNREADABLE = DENIED | {"InvalidObjectState"}  # archived
OVERLAP = 2  # days that are listed beyond the first one with lower numbers, because clocks are stepped

Row = tuple[int, int, str, bytes]  # number, ingest time in Unix ms, topic, payload


class Other(NamedTuple):
    """An object in the bucket: its numbers, and where it is."""

    first: int
    last: int
    key: str
    etag: str


class Lineage:
    """Compares what one export writes with what is there."""

    def __init__(self, client: Any, bucket: str, context: Context) -> None:
        self._client, self._bucket, self._context = client, bucket, context
        self._others: list[Other] = []
        self._looked: float | None = None
        self._may_list = True

    def check(self, batch: Batch, key: str, folder: str, *, but: str | None, changed: bool) -> None:
        """Compare a batch with the objects that have some of its numbers. Raises Stopped or Retry.

        `key` is its own, `folder` that of all objects of its stream, and `but` the ETag of an object that
        does not count. `changed`: payloads may differ, because messages are reduced.
        """
        now = self._context.monotonic()
        if self._may_list and (self._looked is None or now - self._looked >= AGAIN):
            self._others = list(self._list(folder, batch.first))
            self._looked = now
        for other in self._others:
            apart = other.last < batch.first or other.first > batch.last
            if not apart and other.key != key and (but is None or other.etag != but):
                self._compare(batch, other, changed=changed)

    def _list(self, folder: str, first: int) -> Iterator[Other]:
        """Yield the objects with this number or higher ones, the newest days first."""
        doing = f"listing s3://{self._bucket}/{folder}"
        try:
            days = [day for page in self._pages(folder, "/") for day in page.get("CommonPrefixes", ())]
            below = 0
            for day in sorted((str(day["Prefix"]) for day in days), reverse=True):
                found = list(self._objects(day))
                yield from (other for other in found if other.last >= first)
                below += bool(found) and all(other.last < first for other in found)
                if below > OVERLAP:
                    return
        except Exception as error:
            if error_code(error) not in DENIED:
                raise failure(error, doing) from error
            self._may_list = False
            self._context.log.warning(
                "%s is not allowed (s3:ListBucket), so the export cannot notice that another copy of this "
                "data directory has written objects there that begin or end at other numbers",
                doing,
            )

    def _objects(self, day: str) -> Iterator[Other]:
        for page in self._pages(day, ""):
            for entry in page.get("Contents", ()):
                parsed = parse_key(str(entry["Key"]))
                if parsed is not None:
                    etag = str(entry.get("ETag", "")).strip('"')
                    yield Other(parsed.first, parsed.last, str(entry["Key"]), etag)

    def _pages(self, folder: str, delimiter: str) -> Iterator[dict[str, Any]]:
        options = {"Bucket": self._bucket, "Prefix": folder} | ({"Delimiter": delimiter} if delimiter else {})
        while True:
            page = self._client.list_objects_v2(**options)
            yield page
            if not page.get("IsTruncated"):
                return
            options["ContinuationToken"] = page["NextContinuationToken"]

    def _compare(self, batch: Batch, other: Other, *, changed: bool) -> None:
        url = f"s3://{self._bucket}/{other.key}"
        try:
            number = self._apart(batch, other, changed=changed)
        except Exception as error:
            from botocore.exceptions import BotoCoreError, ClientError

            code = error_code(error)
            if code in ABSENT:  # deleted since it was listed
                return
            if isinstance(error, BotoCoreError | ClientError) and code not in _UNREADABLE:
                raise failure(error, f"comparing with {url}, which has some of these numbers") from error
            self._context.log.warning(
                "%s has some of the numbers %d to %d and cannot be read (%s), so the export cannot notice "
                "whether another copy of this data directory has written it; it stays as it is",
                url,
                batch.first,
                batch.last,
                code or repr(error),
            )
            return
        if number is not None:
            raise Stopped(
                f"there are already other messages with these numbers (number {number}), and nothing was "
                f"written: another gateway has the id {self._context.gateway!r}, or this data directory is a "
                f"copy (see `Recover from a disaster`): {url}, ETag {other.etag}"
            )

    def _apart(self, batch: Batch, other: Other, *, changed: bool) -> int | None:
        """Return the first number of a batch whose message is another one in an object.

        The object is read to its end, where the checksum is that tells whether this is what was written.
        """
        body = self._client.get_object(Bucket=self._bucket, Key=other.key)["Body"]
        rows = _parquet(body.read()) if other.key.endswith(".parquet") else _ndjson(body)
        mine = {record.sequence_number: record for record in batch.records}
        apart, empty = None, True
        for number, time, topic, payload in rows:
            empty = False
            record = mine.get(number)
            if record is None or apart is not None:
                continue
            same = time == record.ingest_time
            if not same or not (changed or (topic, payload) == (record.topic, record.payload)):
                apart = number
        if empty:
            raise ValueError("it has no rows")
        return apart


def _ndjson(body: Any) -> Iterator[Row]:
    """Yield the rows of a gzip of NDJSON, as `bridge.plugin.records` writes it. Raises ValueError."""
    import base64
    from datetime import datetime

    size = 0
    with gzip.GzipFile(fileobj=body) as file:
        while line := file.readline(LARGEST):
            size += len(line)
            if size > LARGEST:
                raise ValueError(f"its rows have more than {LARGEST} bytes")
            row = json.loads(line)
            time = round(datetime.fromisoformat(row["ingest_time"]).timestamp() * 1000)
            yield int(row["sequence_number"]), time, row["topic"], base64.b64decode(row["payload"])


def _parquet(content: bytes) -> Iterator[Row]:
    """Yield the rows of a Parquet object. Raises ValueError, or ImportError without pyarrow."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = ["sequence_number", "ingest_time", "topic", "payload"]
    for some in pq.ParquetFile(pa.BufferReader(content)).iter_batches(columns=names):
        columns = [some.column(name) for name in names]
        columns[1] = columns[1].cast(pa.int64())
        for number, time, topic, payload in zip(*(column.to_pylist() for column in columns), strict=True):
            yield number, time // 1000, topic, payload
