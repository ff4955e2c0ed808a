"""The stream of the data source `streambridge`, as Spark drives it, without a session."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from bridge.ingest.errors import BadOption, IngestError
from bridge.ingest.store import LocalStore, StorageLocation
from bridge.ingest.stream_reader import ObjectStreamReader, StreamOptions
from bridge.objectkeys import data_key
from tests.ingest.gateway import EPOCH, START, Gateway

COLUMNS = StructType(
    [
        StructField("stream", StringType()),
        StructField("epoch", StringType()),
        StructField("sequence_number", LongType()),
        StructField("object_key", StringType()),
    ]
)
Row = tuple[str, str, int, str]


class Crash(BaseException):
    """The query dies here."""


class Query:
    """A streaming query as Spark runs it: an offset log, a commit log, and a sink that takes a batch once.

    `before` (Spark 4.0 and 4.1) asks for offsets without saying where the query stands.
    """

    def __init__(self, landing: Path, checkpoint: Path, *, before: bool = False, **options: str) -> None:
        given = {name.lower(): value for name, value in options.items()}
        self.before, self.checkpoint = before, checkpoint
        self.options = StreamOptions.of(
            StorageLocation(str(landing)), given | {"checkpoint": str(checkpoint)}
        )
        self.sink: dict[int, list[Row]] = {}
        self.offered: dict[int, list[Row]] = {}  # what each batch gave at first
        self.start()

    def start(self) -> None:
        """Start with what the checkpoint has: a batch that was planned and has not ended is repeated."""
        self.reader = ObjectStreamReader(self.options, COLUMNS)
        self.offsets, self.commits = self._log("offsets"), self._log("commits")
        if len(self.offsets) > len(self.commits):
            self._run(len(self.offsets) - 1)

    def _log(self, name: str) -> list[str]:
        folder = self.checkpoint / name
        numbers = sorted(int(path.name) for path in folder.glob("[0-9]*"))
        return [(folder / str(number)).read_text().splitlines()[-1] for number in numbers]

    def _append(self, name: str, number: int, line: str) -> None:
        folder = self.checkpoint / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / str(number)).write_text(f'v1\n{{"batchWatermarkMs":0}}\n{line}')
        vars(self)[name].append(line)

    def trigger(self, crash: str = "") -> bool:
        """Run one batch, if there is something new; `crash` is where it dies."""
        start = json.loads(self.offsets[-1]) if self.offsets else self.reader.initialOffset()
        if self.before:
            end = self.reader.latestOffset()
        else:
            end = self.reader.latestOffset(start, self.reader.getDefaultReadLimit())
        if crash == "planned":
            raise Crash
        if end == start:
            return False
        self._append("offsets", len(self.offsets), json.dumps(end))
        if len(self.offsets) > 1:
            self.reader.commit(start)
        self._run(len(self.offsets) - 1, crash)
        return True

    def _run(self, number: int, crash: str = "") -> None:
        if crash == "logged":
            raise Crash
        end = json.loads(self.offsets[number])
        start = json.loads(self.offsets[number - 1]) if number else self.reader.initialOffset()
        task = ObjectStreamReader(self.options, COLUMNS)  # another process
        found: list[Row] = []
        for part in self.reader.partitions(start, end):
            for batch in task.read(part):
                found += [tuple(row.values()) for row in batch.to_pylist()]
            if crash == "reading":
                raise Crash
        assert sorted(self.offered.setdefault(number, found)) == sorted(found)
        self.sink.setdefault(number, found)
        if crash == "written":
            raise Crash
        self._append("commits", number, "{}")

    def rows(self) -> list[tuple[str, str, int]]:
        return sorted(row[:3] for batch in self.sink.values() for row in batch)


@pytest.fixture
def place(tmp_path: Path) -> dict[str, Any]:
    return {"landing": tmp_path / "landing", "checkpoint": tmp_path / "checkpoint"}


@pytest.mark.parametrize("before", [False, True], ids=["4.2", "4.0"])
@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_uploaded_and_wherever_it_dies_every_number_comes_once(
    tmp_path: Path, place: dict[str, Any], seed: int, *, before: bool
) -> None:
    chance = random.Random(seed)
    gateway = Gateway(StorageLocation(str(place["landing"])))
    quarantine = str(tmp_path / "quarantine")
    query = Query(**place, before=before, quarantine=quarantine, maxObjectsPerTrigger="3")
    good: dict[str, set[tuple[str, str, int]]] = {}  # by key
    bad: dict[str, tuple[Any, ...]] = {}
    for _ in range(20):
        for _ in range(chance.randint(0, 3)):
            stream, epoch = chance.choice(["a", "b"]), EPOCH + chance.randint(0, 1)
            first = chance.randint(0, 60)
            last = first + chance.choice([0, 3, 10, 40])
            given = (first, last, stream, chance.choice(["ndjson.gz", "parquet"]), epoch)
            if bad and chance.random() < 0.3:
                given = bad[chance.choice(sorted(bad))]  # uploaded again
            broken = chance.random() < 0.3
            first, last, stream, form, epoch = given
            key = data_key("gw-a", stream, epoch, first, last, START + first * 1000, form)
            if key in good:  # an object is never rewritten with other content
                continue
            gateway.export(*given, data=chance.choice([b"", b"broken"]) if broken else None)
            if broken:
                bad[key] = given
            else:
                bad.pop(key, None)
                good[key] = {(stream, str(epoch), number) for number in range(first, last + 1)}
        try:
            query.trigger(chance.choice(["", "", "planned", "logged", "reading", "written"]))
        except Crash:
            query.start()
    while query.trigger():
        pass
    assert query.rows() == sorted(set[tuple[str, str, int]]().union(*good.values()))


def test_a_batch_is_repeated_as_it_was_planned_whatever_was_uploaded_since(place: dict[str, Any]) -> None:
    gateway = Gateway(StorageLocation(str(place["landing"])))
    first = gateway.export(50, 149)
    query = Query(**place)
    with pytest.raises(Crash):
        query.trigger("logged")
    second = gateway.export(0, 99)  # it would come first, and divide the numbers otherwise
    query.start()
    assert {row[3] for row in query.sink[0]} == {first}
    assert query.trigger()
    assert {row[3] for row in query.sink[1]} == {second}
    assert [row[2] for row in query.rows()] == list(range(150))


def test_a_bad_object_stops_the_query_until_it_is_uploaded_again(place: dict[str, Any]) -> None:
    gateway = Gateway(StorageLocation(str(place["landing"])))
    gateway.export(0, 9)
    key = gateway.export(10, 19, data=b"broken")
    query = Query(**place)
    with pytest.raises(IngestError, match=f"{key}.*quarantine"):
        query.trigger()
    with pytest.raises(IngestError, match=key):
        query.start()
    gateway.export(10, 19)
    query.start()
    assert not query.trigger()
    assert [row[2] for row in query.rows()] == list(range(20))


def test_a_quarantined_object_counts_again_when_it_is_uploaded_again(
    tmp_path: Path, place: dict[str, Any]
) -> None:
    folder = tmp_path / "quarantine"
    gateway = Gateway(StorageLocation(str(place["landing"])))
    gateway.export(0, 9)
    key = gateway.export(10, 19, data=b"broken")
    query = Query(**place, quarantine=str(folder))
    assert query.trigger()
    assert not query.trigger()
    (record,) = folder.rglob("*.bad")
    assert json.loads(record.read_text())["key"] == key
    assert json.loads(record.read_text())["reason"]
    gateway.export(20, 29)
    assert query.trigger()
    assert record.exists()
    gateway.export(10, 19)
    assert query.trigger()
    gateway.export(30, 39)
    assert query.trigger()  # Spark reports the end of a batch at the start of the next one
    assert not record.exists()
    assert [row[2] for row in query.rows()] == list(range(40))


def test_a_batch_that_passed_over_an_object_does_so_again_when_it_is_repeated(
    tmp_path: Path, place: dict[str, Any]
) -> None:
    """The sink may have the batch already, so a good upload in between must wait for the next one."""
    gateway = Gateway(StorageLocation(str(place["landing"])))
    gateway.export(0, 9)
    gateway.export(10, 19, data=b"broken")
    query = Query(**place, quarantine=str(tmp_path / "quarantine"))
    with pytest.raises(Crash):
        query.trigger("written")
    gateway.export(10, 19)
    query.start()
    assert [row[2] for row in query.rows()] == list(range(10))
    assert query.trigger()
    assert [row[2] for row in query.rows()] == list(range(20))


def test_numbers_of_a_bad_object_are_taken_from_others_in_the_next_batch(
    tmp_path: Path, place: dict[str, Any]
) -> None:
    gateway = Gateway(StorageLocation(str(place["landing"])))
    gateway.export(0, 19, data=b"")
    gateway.export(5, 14)
    gateway.export(20, 29)
    query = Query(**place, quarantine=str(tmp_path / "quarantine"))
    assert query.trigger()
    assert [row[2] for row in query.rows()] == list(range(20, 30))
    assert query.trigger()
    assert [row[2] for row in query.rows()] == [*range(5, 15), *range(20, 30)]
    assert not query.trigger()


def test_an_object_that_vanished_is_open_again_and_no_batch_fails(
    tmp_path: Path, place: dict[str, Any]
) -> None:
    gateway = Gateway(StorageLocation(str(place["landing"])))
    gateway.export(0, 9)
    key = gateway.export(10, 19)
    query = Query(**place, quarantine=str(tmp_path / "quarantine"))
    with pytest.raises(Crash):
        query.trigger("logged")
    (place["landing"] / key).unlink()
    query.start()
    assert [row[2] for row in query.rows()] == list(range(10))
    gateway.export(10, 14)
    assert query.trigger()
    assert [row[2] for row in query.rows()] == list(range(15))


def test_an_unreadable_object_is_tried_again_when_the_query_starts_again(
    tmp_path: Path, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = Gateway(StorageLocation(str(place["landing"])))
    path = place["landing"] / gateway.export(0, 9)
    query = Query(**place, quarantine=str(tmp_path / "quarantine"))
    get = LocalStore.get

    def denied(store: LocalStore, key: str, most: int | None = None) -> bytes:
        if path == store.root / key:
            raise PermissionError(13, "Permission denied")
        return get(store, key, most)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "get", denied)
        assert query.trigger()
        assert not query.trigger()
    assert not query.trigger()
    query.start()
    assert query.trigger()
    assert [row[2] for row in query.rows()] == list(range(10))


def test_available_now_takes_what_there_is_at_the_start(place: dict[str, Any]) -> None:
    gateway = Gateway(StorageLocation(str(place["landing"])))
    for first in range(0, 50, 10):
        gateway.export(first, first + 9)
    query = Query(**place, maxObjectsPerTrigger="2")
    query.reader.prepareForTriggerAvailableNow()
    gateway.export(50, 59)
    while query.trigger():
        pass
    assert [row[2] for row in query.rows()] == list(range(50))
    assert len(query.commits) == 3


def test_before_spark_4_2_an_interrupted_batch_is_repeated_before_others_are_planned(
    tmp_path: Path, place: dict[str, Any]
) -> None:
    """Available-now asks for the offset to stop at before it repeats the batch."""
    gateway = Gateway(StorageLocation(str(place["landing"])))
    gateway.export(0, 9, data=b"broken")
    query = Query(**place, before=True, quarantine=str(tmp_path / "quarantine"))
    with pytest.raises(Crash):
        query.trigger("logged")
    gateway.export(10, 19)
    end = ObjectStreamReader(query.options, COLUMNS).latestOffset()
    assert end == json.loads(query.offsets[-1])
    query.start()
    gateway.export(0, 9)
    assert query.trigger()
    assert [row[2] for row in query.rows()] == list(range(20))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"maxObjectsPerTrigger": "0"}, "maxObjectsPerTrigger is '0'"),
        ({"maxBytesPerTrigger": "1g"}, "maxBytesPerTrigger is '1g'"),
        ({"badObjects": "skip"}, "option quarantine"),
        ({"quarantine": "hdfs://x/y"}, "hdfs: is not supported"),
    ],
)
def test_a_wrong_option_is_named(place: dict[str, Any], options: dict[str, str], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        Query(**place, **options)


def test_a_checkpoint_of_another_prefix_is_refused(tmp_path: Path, place: dict[str, Any]) -> None:
    Gateway(StorageLocation(str(place["landing"]))).export(0, 9)
    assert Query(**place).trigger()
    other = Query(tmp_path / "other", place["checkpoint"])
    with pytest.raises(IngestError, match="a checkpoint of its own"):
        other.trigger()


def test_one_place_has_one_name_however_it_is_written() -> None:
    names = {
        StreamOptions(StorageLocation(url)).source
        for url in ("s3://bucket/prefix", "s3a://bucket/prefix/", "s3n://bucket/prefix")
    }
    assert names == {"s3://bucket/prefix"}
    for url in ("/landing/a b/", "file:///landing/a%20b"):
        assert StreamOptions(StorageLocation(url)).source == "/landing/a b"


def test_an_offset_stays_small_when_a_batch_has_many_objects(place: dict[str, Any]) -> None:
    gateway = Gateway(StorageLocation(str(place["landing"])))
    for number in range(1000):
        gateway.export(number, number, data=b"-")
    query = Query(**place)
    end = query.reader.latestOffset(query.reader.initialOffset(), query.reader.getDefaultReadLimit())
    assert end["streams"] == {"gw-a": {"s0": {str(EPOCH): [(0, 999)]}}}
    assert len(json.dumps(end)) < 50_000
