"""The data source `streambridge`, as Spark uses it, without a session."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from bridge.ingest.source import ObjectReader
from bridge.ingest.store import StorageLocation
from tests.ingest.gateway import EPOCH, Gateway

COLUMNS = StructType(
    [
        StructField("stream", StringType()),
        StructField("epoch", StringType()),
        StructField("sequence_number", LongType()),
    ]
)
Number = tuple[str, str, int]


def read(place: StorageLocation) -> list[Number]:
    """The numbers of all messages, in every partition of its own."""
    reader = ObjectReader(place, COLUMNS, skip=False)
    return [
        (row["stream"], row["epoch"], row["sequence_number"])
        for part in reader.partitions()
        for batch in reader.read(part)
        for row in batch.to_pylist()
    ]


def test_an_object_between_two_that_overlap_hides_nothing_of_it(tmp_path: Path) -> None:
    gateway = Gateway(StorageLocation(str(tmp_path)))
    for first, last in ((0, 99), (10, 19), (50, 149)):
        gateway.export(first, last)
    assert [number for _, _, number in read(StorageLocation(str(tmp_path)))] == list(range(150))


@pytest.mark.parametrize("seed", range(20))
def test_every_number_comes_once_however_objects_overlap(tmp_path: Path, seed: int) -> None:
    chance, place = random.Random(seed), StorageLocation(str(tmp_path))
    gateway, expected = Gateway(place), set[Number]()
    for _ in range(chance.randint(2, 12)):
        stream, epoch = chance.choice(["a", "b"]), EPOCH + chance.randint(0, 1)
        first = chance.randint(0, 60)
        last = first + chance.choice([0, 3, 10, 40])
        form = chance.choice(["ndjson.gz", "parquet"])
        gateway.export(first, last, stream, form, epoch)
        expected |= {(stream, str(epoch), number) for number in range(first, last + 1)}
    found = read(place)
    assert len(found) == len(set(found))
    assert set(found) == expected
