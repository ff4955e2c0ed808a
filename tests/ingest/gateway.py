"""A gateway as the ingest job sees it: objects under a prefix, named and filled by the object contract."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Collection, Iterable
from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bridge.filtered import PARQUET_KEY, declaration, with_extra
from bridge.ingest.store import StorageLocation
from bridge.objectkeys import data_key, report_key

EPOCH = 1_795_000_000_000
START = 1_795_000_000_000  # ingest time of message 0; one message a second
TIME = pa.timestamp("us", tz="UTC")


def rows(
    gateway: str, stream: str, numbers: Iterable[int], epoch: int = EPOCH, step_ms: int = 1000, **extra: Any
) -> list[dict[str, Any]]:
    """The rows of an object, ingest times in ms; an extra column is a value or a function of the number."""
    return [
        {
            "gateway": gateway,
            "stream": stream,
            "epoch": str(epoch),
            "sequence_number": number,
            "ingest_time": START + number * step_ms,
            "topic": f"plant/{gateway}/{stream}",
            "payload": b'{"n":%d,"temp":%.2f}' % (number, 20 + number % 10 / 10),
            **{name: value(number) if callable(value) else value for name, value in extra.items()},
        }
        for number in numbers
    ]


def ndjson(content: list[dict[str, Any]], declared: bytes = b"") -> bytes:
    lines = []
    for row in content:
        when = (
            pa.scalar(row["ingest_time"], pa.timestamp("ms")).as_py().isoformat(timespec="milliseconds") + "Z"
        )
        lines.append(
            json.dumps(row | {"ingest_time": when, "payload": base64.b64encode(row["payload"]).decode()})
            + "\n"
        )
    packed = gzip.compress("".join(lines).encode(), 1)
    return with_extra(packed, declared) if declared else packed


def parquet(content: list[dict[str, Any]], declared: bytes = b"") -> bytes:
    table = pa.Table.from_pylist(content)
    at = table.column_names.index("ingest_time")
    times = table["ingest_time"].cast(pa.timestamp("ms", tz="UTC")).cast(TIME)
    table = table.set_column(at, "ingest_time", times)
    if declared:
        table = table.replace_schema_metadata({PARQUET_KEY: base64.b64encode(declared)})
    file = BytesIO()
    pq.write_table(table, file, compression="zstd", write_page_checksum=True)
    return file.getvalue()


class Gateway:
    """Exports to a place under one gateway id."""

    def __init__(self, place: StorageLocation, name: str = "gw-a") -> None:
        self.store, self.name = place.open(), name

    def export(
        self,
        first: int,
        last: int,
        stream: str = "s0",
        form: str = "ndjson.gz",
        epoch: int = EPOCH,
        step_ms: int = 1000,
        data: bytes | None = None,
        hour_of: int | None = None,
        lacks: Collection[int] = (),
        **extra: Any,
    ) -> str:
        """Upload first..last and return the key; `hour_of` is the message that names the hour.

        The object declares the numbers that it `lacks`.
        """
        at = START + (first if hour_of is None else hour_of) * step_ms
        key = data_key(self.name, stream, epoch, first, last, at, form)
        if data is None:
            numbers = [number for number in range(first, last + 1) if number not in lacks]
            content = rows(self.name, stream, numbers, epoch, step_ms, **extra)
            declared = declaration(first, last, numbers)
            data = parquet(content, declared) if form == "parquet" else ndjson(content, declared)
        self.store.put(key, data)
        return key

    def report(self, *streams: dict[str, Any], updated: int = START) -> None:
        document = {"gateway": self.name, "updated": updated, "streams": list(streams)}
        self.store.put(report_key(self.name), json.dumps(document).encode())


def reported(
    newest: int, exported: int | None = None, stream: str = "s0", epoch: Any = EPOCH, **more: Any
) -> dict[str, Any]:
    entry = {"stream": stream, "epoch": epoch, "oldest": 0, "newest": newest, "dropped": []}
    return entry | {"exported": newest if exported is None else exported} | more
