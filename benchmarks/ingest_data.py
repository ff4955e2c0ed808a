"""Objects of many gateways in the format of the exporter, made quickly, for the benchmark and slow tests.

Payloads are 200 bytes of JSON with random readings. No payload repeats within an object, so the data
compresses no better than real data.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bridge.ingest.columns import BASE, TIME
from bridge.ingest.store import StorageLocation
from bridge.objectkeys import data_key

EPOCH = 1_795_000_000_000
PAYLOAD = 200


@dataclass(frozen=True)
class Object:
    """One object to be made."""

    gateway: str
    stream: str
    first: int
    last: int
    form: str


def objects(rows: int, gateways: int, per_object: int, form: str, skewed: float = 0.0) -> Iterator[Object]:
    """About so many rows of gateways that have the same share, but for one that has `skewed` of it all."""
    shares = [rows * (1 - skewed) / (gateways - 1) if skewed else rows / gateways] * gateways
    if skewed:
        shares[0] = rows * skewed
    for number, share in enumerate(shares):
        for first in range(0, round(share), per_object):
            last = min(first + per_object, round(share)) - 1
            yield Object(f"gw-{number:04d}", "readings", first, last, form)


@cache
def payloads(count: int) -> pa.Array:
    random = np.random.default_rng(7)
    values = random.normal(20, 5, (count, 4))
    fill = random.integers(0, 256, (count, 64), dtype=np.uint8)
    made = []
    for index in range(count):
        a, b, c, d = values[index]
        text = b'{"id":"dev-%04d","temp":%.3f,"hum":%.3f,"p":%.4f,"v":%.5f,"h":"' % (index % 500, a, b, c, d)
        made.append(text + fill[index].tobytes().hex().encode()[: PAYLOAD - len(text) - 2] + b'"}')
    return pa.array(made, pa.binary())


@cache
def encoded(count: int) -> list[str]:
    return [base64.b64encode(payload).decode() for payload in payloads(count).to_pylist()]


def content(made: Object) -> bytes:
    """The bytes of the object."""
    count = made.last - made.first + 1
    numbers = np.arange(made.first, made.last + 1, dtype=np.int64)
    millis = EPOCH + numbers * 10
    if made.form == "parquet":
        columns: list[Any] = [
            pa.repeat(pa.scalar(made.gateway), count),
            pa.repeat(pa.scalar(made.stream), count),
            pa.repeat(pa.scalar(str(EPOCH)), count),
            pa.array(numbers),
            pa.array(millis * 1000).cast(TIME),
            pa.array([f"plant/{made.gateway}/dev-{n % 500:04d}" for n in range(count)]),
            payloads(count),
        ]
        file = BytesIO()
        pq.write_table(pa.Table.from_arrays(columns, schema=BASE), file, compression="zstd")
        return file.getvalue()
    head = f'{{"gateway":"{made.gateway}","stream":"{made.stream}","epoch":"{EPOCH}","sequence_number":'
    times = np.datetime_as_string(millis.astype("datetime64[ms]"), unit="ms")
    topic = f"plant/{made.gateway}/dev-"
    lines = [
        f'{head}{number},"ingest_time":"{time}Z","topic":"{topic}{at % 500:04d}","payload":"{text}"}}\n'
        for at, (number, time, text) in enumerate(zip(numbers, times, encoded(count), strict=True))
    ]
    return gzip.compress("".join(lines).encode(), 6)


_store = cache(StorageLocation.open)  # opening one costs a client of boto3


def _make(place: StorageLocation, made: Object) -> int:
    data = content(made)
    _store(place).put(
        data_key(made.gateway, made.stream, EPOCH, made.first, made.last, EPOCH + made.first * 10, made.form),
        data,
    )
    return len(data)


def make(place: StorageLocation, wanted: list[Object]) -> int:
    """Upload them all and return their bytes."""
    with ProcessPoolExecutor(2) as pool:
        return sum(pool.map(_make, [place] * len(wanted), wanted, chunksize=8))
