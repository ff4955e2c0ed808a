"""Whatever is deleted, every row of every version that is kept can be read afterwards; no Spark."""

from __future__ import annotations

import gzip
import json
import os
import re
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake.exceptions import DeltaError
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.table.update import SetLocationUpdate

import bridge.ingest
from bridge.ingest.ages import Ages
from bridge.ingest.deletes import delete, normal, sweep
from bridge.ingest.errors import BadOption, CommitConflict, IngestError
from bridge.ingest.files import DayFiles
from bridge.ingest.job import ingest
from bridge.ingest.repair import accept_rows, repair
from bridge.ingest.sinks.compact import merge
from bridge.ingest.sinks.delta import DeltaSink
from bridge.ingest.sinks.due import bins
from bridge.ingest.sinks.iceberg import IcebergSink, open_catalog
from bridge.ingest.store import StorageLocation, literal
from bridge.ingest.table import TableOptions, open_sink
from bridge.ingest.upkeep import prune
from tests.ingest.conftest import Intercepted
from tests.ingest.gateway import Gateway, reported
from tests.ingest.test_command import command
from tests.ingest.test_job import numbers
from tests.ingest.test_sinks import written
from tests.ingest.test_verdict import InProcess
from tests.simulation.bucket import Bucket

Sink = Callable[[], Any]
DAYS = 24 * 3600
WHERE = ["local", pytest.param("s3", marks=pytest.mark.slow(seconds=60))]  # each new client takes a second


def set_location(sink: Any, location: str) -> None:
    """As `ALTER TABLE ... SET LOCATION` does."""
    with sink.table().transaction() as change:
        change._apply((SetLocationUpdate(location=location),), ())


def filled(landing: StorageLocation, sink: Any, rounds: int = 3, first: int = 0) -> None:
    """Runs that take an object of ten rows each."""
    for at in range(first, first + rounds):
        Gateway(landing).export(10 * at, 10 * at + 9)
        Gateway(landing).report(reported(10 * at + 9))
        ingest(InProcess, landing, sink(), full_every=0)


def aged(place: StorageLocation, days: float) -> None:
    """Make all local files below a place so old."""
    for path in Path(place.url).rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - days * DAYS,) * 2)


@pytest.mark.spark
@pytest.mark.parametrize("place", ["respelt", "new folder"])
def test_a_table_whose_place_was_set_anew_is_compacted_and_expired_and_keeps_every_row(
    bucket: StorageLocation, tmp_path: Path, place: str
) -> None:
    """Once, live files and manifests were deleted because they were spelt s3: and the place s3a:."""
    landing = bucket.join("landing")
    sql = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db"}
    options = TableOptions(warehouse=bucket.url, catalog=sql, endpoint=bucket.endpoint)

    def sink() -> Any:
        return open_sink(options)

    filled(landing, sink)
    was = sink().table().location()
    set_location(sink(), was.replace("s3:", "s3a:") if place == "respelt" else f"{was}-moved")
    filled(landing, sink, 2, 3)
    where: tuple[str, ...] = ("--warehouse", bucket.url, "--endpoint-url", str(bucket.endpoint))
    where = (*where, *(part for name, value in sql.items() for part in ("--catalog", f"{name}={value}")))
    done = command("compact", *where, "--expire-days", "0", "--orphan-days", "0", "--force")
    assert done.returncode == 0, done.stderr
    assert "5 files merged into 1" in done.stdout
    assert numbers(sink()) == list(range(50))
    report = command("report", "--source", landing.url, *where, "--full-listing")
    assert (report.returncode, "50" in report.stdout) == (0, True), report.stderr
    filled(landing, sink, 1, 5)
    refined = command("refine", *where, "--to", "lake.typed", "--schema", "n LONG")
    assert refined.returncode == 0, refined.stderr
    assert sink().read().num_rows == 60
    assert command("erase", *where).returncode == (0 if place == "respelt" else 1)  # files at the old place
    assert numbers(sink()) == list(range(60))


# -- the rule


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("s3://b/t/data/x", "s3a://b/t/data/x"),
        ("s3://b/t/data/x", "S3N://b//t/./data/x/"),
        ("s3://b/t/da ta/x", "s3://b/t/da%20ta/x"),
        ("s3://b/t/da ta/x", "s3://b/t/da%2520ta/x"),
        ("s3://b/t/data/x", "s3://b/t/data%2Fx"),
        ("/t/data/x", "file:/t/data/x"),
        ("/t/data/x", "file:///t//data/x"),
        ("//t/data/x", "file://localhost/t/data/x/"),
        ("/t/ü", "file:///t/%C3%BC"),
    ],
)
def test_spellings_of_one_place_have_one_form(one: str, other: str) -> None:
    assert normal(one) == normal(other)
    assert normal(one) is not None


@pytest.mark.parametrize(
    "location",
    ["", "data/x", "s3:/b/x", "s3:///x", "s3://b/a/../x", "/t/%FF", "/t/\0", "s3://b/a%0Ab", "file:x"],
)
def test_what_is_no_clear_place_has_no_form(location: str) -> None:
    assert normal(location) is None


def test_links_are_the_places_that_they_lead_to(tmp_path: Path) -> None:
    (tmp_path / "real" / "t").mkdir(parents=True)
    (tmp_path / "li nk").symlink_to(tmp_path / "real")
    kept = [f"file:{tmp_path}/li%20nk/t/a"]
    place = StorageLocation(str(tmp_path / "real" / "t"))
    for name in "ab":
        place.open().put(name, b"x")
    assert delete(place, ["a", "b"], lambda: kept).count == 1
    assert [entry.key for entry in place.open().list()] == ["a"]
    through = StorageLocation(str(tmp_path / "li nk" / "t"))
    assert delete(through, ["a"], lambda: [str(tmp_path / "real" / "t" / "a")]).count == 0


NAMES = st.text(st.sampled_from("xy z%2+=/ü"), min_size=1, max_size=8).map(
    lambda name: name.strip("/") or "a"
)


@settings(max_examples=200, deadline=None)
@given(kept=st.lists(NAMES, max_size=5), gone=st.lists(NAMES, max_size=5), seed=st.integers(0, 1 << 30))
def test_no_spelling_of_a_reference_loses_its_object_and_all_others_go(
    kept: list[str], gone: list[str], seed: int
) -> None:
    bucket = Bucket(Random(0), time.time)
    place = bucket.place("lake/t t")
    for key in {*kept, *gone}:
        place.open().put(key, b"x")
    spelt = [respelt(f"s3://{bucket.name}/lake/t t/{key}", Random(seed)) for key in kept]
    delete(place, sorted({*kept, *gone}), lambda: spelt)
    left = {entry.key for entry in place.open().list()}
    assert left >= set(kept)
    forms = {normal(f"s3://b/{key}") for key in kept}
    assert all(normal(f"s3://b/{key}") in forms for key in left)


def respelt(location: str, random: Random) -> str:
    """Spell a location otherwise, so that it may mean the same."""
    path = location.removeprefix("s3://")
    bucket, slash, path = path.partition("/")
    parts = [random.choice([part, quote(part), f"./{part}", f"/{part}"]) for part in path.split("/")]
    scheme, end = random.choice(("s3", "s3a", "s3n", "S3")), random.choice(("", "/"))
    return f"{scheme}://{bucket}{slash}{'/'.join(parts)}{end}"


@pytest.mark.parametrize("other", ["s3://elsewhere/t/a", "gs://b/x/a", "https://host/b/t/a", "file:///t/a"])
def test_a_reference_into_another_bucket_or_scheme_with_the_name_of_a_candidate_stops(other: str) -> None:
    bucket = Bucket(Random(0), time.time)
    place = bucket.place("t")
    for name in "ab":
        place.open().put(name, b"x")
    with pytest.raises(IngestError, match="has the same name in another bucket or scheme, so nothing was"):
        delete(place, ["a", "b"], lambda: [other])
    assert len(bucket.objects) == 2
    assert delete(place, ["b"], lambda: [other]).count == 1
    with pytest.raises(IngestError, match="it is not clear where it is, so nothing was deleted"):
        delete(place, ["a"], lambda: ["t/a"])


def test_what_has_no_form_stays_and_is_named(tmp_path: Path) -> None:
    for name in ("a%FF", "b\nb", "c"):
        (tmp_path / name).write_bytes(b"x")
    done = delete(StorageLocation(str(tmp_path)), ["a%FF", "b\nb", "c", "../d"], list)
    assert (done.count, done.unclear) == (1, ["a%FF", "b\nb", "../d"])


def test_only_one_module_deletes() -> None:
    """A file of a table that is deleted anywhere else would be deleted without a look at the references."""
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted(Path(bridge.ingest.__file__).parent.rglob("*.py"))
        for line in path.read_text().splitlines()
        if path.name != "store.py" and re.search(r"(?<!deletes)\.delete\(|unlink\(|rmtree\(|\.vacuum\(", line)
    ]
    assert found == ["deletes.py: store.delete(batch)"]


# -- every command, on tables with names in all spellings


def versions(sink: Any) -> int:
    """Read every version that the table has, and return how many there are."""
    table = sink.table()
    if not hasattr(table, "snapshots"):
        return 1
    found = table.snapshots()
    for snapshot in found:
        assert table.scan(snapshot_id=snapshot.snapshot_id).to_arrow().num_rows <= 1000
    return len(found)


def compacted(sink: Any) -> None:
    if hasattr(sink, "layout"):
        merge(InProcess(), sink, list(bins(sink.files())))
    else:
        with suppress(DeltaError):  # delta-rs finds no file whose name it has encoded twice
            sink.compact(None)


def tended(sink: Any, landing: StorageLocation, random: Random) -> None:
    """One of the commands that may delete something."""
    what = random.randrange(6)
    if what == 0:
        sink.expire(random.choice((0, 0, 1)))
    elif what in (1, 2):
        sink.orphans(random.choice((0, 0, 1)))
    elif what == 3:
        compacted(sink)
    elif what == 4:
        prune(landing, sink, 0, dry_run=False, trust_state=False)
    else:
        repair(sink, dry_run=False)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("where", WHERE)
def test_whatever_the_spelling_of_a_tables_place_no_command_loses_a_row(
    request: pytest.FixtureRequest, tmp_path: Path, where: str, seed: int
) -> None:
    random = Random(seed)
    place = StorageLocation(str(tmp_path / "lake")) if where == "local" else request.getfixturevalue("bucket")
    sql = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db"}
    options = TableOptions(warehouse=place.url, catalog=sql, endpoint=place.endpoint)

    def sink() -> Any:
        return open_sink(options)

    landing, path = StorageLocation(str(tmp_path / "landing")), f"{place.url.removeprefix('s3://')}/lake/t"
    schemes = ("file://", "file:", "") if where == "local" else ("s3://", "s3a://", "s3n://")
    for taken in range(1, 6):
        filled(landing, sink, 1, taken - 1)
        if random.random() < 0.7:
            folder = f"{path}{random.choice(('', ' t', '%20t', '-x'))}"
            set_location(sink(), f"{random.choice(schemes)}{folder}{random.choice(('', '/'))}")
        sink().target().location.open().put(f"data/orphan-{taken}.parquet", b"of a killed run")
        for _ in range(2):
            tended(sink(), landing, random)
            assert numbers(sink()) == list(range(10 * taken))
            versions(sink())
    sink().orphans(0)
    names = [entry.key for entry in sink().target().location.open().under("data/")]
    assert not [name for name in names if "orphan" in name]
    report = ingest(InProcess, landing, sink(), full_every=0).report
    assert (report.complete, report.differs) == (True, False)


@pytest.mark.parametrize("seed", range(2))
def test_whatever_the_spelling_of_the_files_of_a_delta_table_no_command_loses_a_row(
    landing: StorageLocation, delta: Sink, seed: int
) -> None:
    random = Random(seed)
    for taken in range(1, 7):
        filled(landing, delta, 1, taken - 1)
        if random.random() < 0.7:
            renamed(delta(), random)
        if random.random() < 0.3:
            delta().table().create_checkpoint()
        delta().target().location.open().put(
            f"ingest_date=2026-11-20/orphan-{taken}.parquet", b"of a killed run"
        )
        for _ in range(2):
            tended(delta(), landing, random)
            assert numbers(delta()) == list(range(10 * taken))
    delta().orphans(0)
    assert not [entry.key for entry in delta().location.open().list() if "orphan" in entry.key]


def renamed(sink: Any, random: Random, *, in_full: bool = False) -> None:
    """Another engine writes a file again, under a name with odd characters, spelt in its own way."""
    table = Path(sink.location.url)
    log = sorted((table / "_delta_log").glob("*.json"))
    live = random.choice(sink.files())
    name = f"{Path(live.path).parent}/part {random.random()} 50%=ü.c000.snappy.parquet"
    (table / name).write_bytes((table / live.path).read_bytes())
    path = f"{table.as_uri()}/{quote(name)}" if in_full else quote(name)
    now = time.time_ns() // 1_000_000
    actions = [json.loads(line) for version in log for line in version.read_text().splitlines()]
    known = [
        action["add"] for action in actions if unquote(action.get("add", {}).get("path", "")) == live.path
    ]
    if not known:  # named in full, or in a checkpoint alone
        return
    removed = {"path": known[-1]["path"], "deletionTimestamp": now, "dataChange": False}
    version = [{"remove": removed}, {"add": {**known[-1], "path": path, "dataChange": False}}]
    text = "".join(json.dumps(action) + "\n" for action in [*version, {"commitInfo": {"timestamp": now}}])
    (table / "_delta_log" / f"{len(log):020d}.json").write_text(text)


def test_a_file_that_a_delta_table_names_in_full_stays(landing: StorageLocation, delta: Sink) -> None:
    """As in a clone; delta-rs cannot read it."""
    filled(landing, delta, 1)
    renamed(delta(), Random(0), in_full=True)
    delta().location.open().put("ingest_date=2026-11-20/part 1.parquet", b"of a killed run")
    was = [file.path for file in delta().files()]
    assert [delta().expire(0).count, delta().orphans(0).count] == [1, 1]
    (left,) = Path(delta().location.url).glob("ingest_date=*/*")
    assert [path.removeprefix("file://") for path in was] == [str(left)]


# -- kills, and answers that are lost


class Killed(BaseException):
    """The process ends here."""


class Dying(StorageLocation):
    """A place where the `left`th deletion fails: before it, in its middle, or afterwards."""

    left, how = 0, ""

    def open(self) -> Any:
        inner = super().open()

        def dying(keys: list[str]) -> None:
            Dying.left -= 1
            done = {"before": 0, "middle": len(keys) // 2, "after": len(keys)}[Dying.how]
            inner.delete(keys if Dying.left else keys[:done])
            if not Dying.left:
                raise Killed

        return Intercepted(inner, delete=dying)


class DyingIceberg(IcebergSink):
    def place(self, table: Any) -> StorageLocation:
        place = super().place(table)
        return Dying(place.url, place.endpoint)


class DyingDelta(DeltaSink):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.location = Dying(self.location.url, self.location.endpoint)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("kind", ["iceberg", "delta"])
def test_a_deletion_that_is_killed_at_any_step_loses_no_row_and_is_finished_by_the_next(
    request: pytest.FixtureRequest, tmp_path: Path, where: str, kind: str
) -> None:
    place = StorageLocation(str(tmp_path / "lake")) if where == "local" else request.getfixturevalue("bucket")
    sql = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db"}

    def sink(*, dying: bool = False) -> Any:
        if kind == "delta":
            return (DyingDelta if dying else DeltaSink)(f"{place.url}/t", None, place.endpoint)
        (tmp_path / "lake").mkdir(exist_ok=True)
        catalog = open_catalog(place.url, sql, place.endpoint)
        return (DyingIceberg if dying else IcebergSink)(
            catalog, "lake.t", f"{place.url}/state", place.endpoint
        )

    landing, taken = StorageLocation(str(tmp_path / "landing")), 0
    for step in (1, 2) if kind == "iceberg" else (1, 2, 3):
        for how in ("before", "middle", "after"):
            filled(landing, sink, 2, taken)
            taken += 2
            compacted(sink())
            folder = sink().files()[0].path.rpartition("/")[0]
            for name in ("orphan-1.parquet", "orphan-2.parquet"):
                sink().target().location.open().put(f"{folder}/{name}", b"of a killed run")
            Dying.left, Dying.how = step, how
            with suppress(Killed):
                mine = sink(dying=True)
                mine.expire(0)
                mine.orphans(0)
                mine.erase()
            assert Dying.left <= 0
            assert numbers(sink()) == list(range(10 * taken))
            versions(sink())
    sink().erase()
    names = {entry.key for entry in sink().target().location.open().list() if entry.key.endswith(".parquet")}
    assert {name for name in names if "_delta_log" not in name} == {file.path for file in sink().files()}
    assert numbers(sink()) == list(range(10 * taken))
    assert ingest(InProcess, landing, sink(), full_every=0).report.complete


# -- who else is at work


def leftover(landing: StorageLocation, sink: Any, first: int, days: float = 5) -> list[Any]:
    """Data files that were written so many days ago, and not committed."""
    files = written(sink, landing, first, first + 9)
    for file in files:
        path = Path(literal(sink.target().location.url)) / file.path
        os.utime(path, (time.time() - days * DAYS,) * 2)
    return files


class Late(StorageLocation):
    """A place in which something happens after it was listed."""

    then: Callable[[], None] | None = None

    def open(self) -> Any:
        inner = super().open()

        def under(prefix: str, after: str = "") -> Any:
            found = list(inner.under(prefix, after))
            then, Late.then = Late.then, None
            if then:
                then()
            return iter(found)

        return Intercepted(inner, under=under)


def test_what_is_committed_while_orphans_are_listed_stays(landing: StorageLocation, sink: Sink) -> None:
    filled(landing, sink, 1)
    late = leftover(landing, sink(), 10)
    place, before = sink().target().location, sink().pointer()
    Late.then = lambda: sink().commit(before, before + 1, late)
    done = sweep(Late(place.url), "", sink().references(), wanted=lambda key: key.endswith(".parquet"))
    assert (done.count, numbers(sink())) == (0, list(range(20)))


def test_a_commit_whose_files_are_gone_or_cut_off_is_refused(landing: StorageLocation, sink: Sink) -> None:
    """They were deleted as orphans, because the run took longer than these may be old."""
    filled(landing, sink, 1)
    files, before = leftover(landing, sink(), 10), sink().pointer()
    assert sink().orphans(6).count == 0
    assert sink().orphans(4).count == 1
    with pytest.raises(CommitConflict, match="was to be committed and is gone, so nothing was committed"):
        sink().commit(before, before + 1, files)
    sink().target().location.open().put(files[0].path, b"cut off")
    with pytest.raises(CommitConflict, match="was to be committed and has 7 bytes, not"):
        sink().replace(sink().files(), files)
    assert (numbers(sink()), sink().pointer()) == (list(range(10)), before)


def test_a_round_whose_files_something_deletes_is_repeated(landing: StorageLocation, sink: Sink) -> None:
    Gateway(landing).export(0, 9)
    mine = sink()
    made: list[int] = []

    def commit(previous: int | None, version: int, files: list[Any]) -> None:
        if not made:
            delete(mine.target().location, [file.path for file in files], list)
        made.append(version)
        sink().commit(previous, version, files)

    assert ingest(InProcess, landing, Intercepted(mine, commit=commit), full_every=0).rows == 10
    assert (len(made), numbers(sink())) == (2, list(range(10)))


def test_the_folder_of_another_table_is_left_alone(
    landing: StorageLocation, tmp_path: Path, sink: Sink
) -> None:
    filled(landing, sink, 1)
    place = sink().target().location
    folder = f"{sink().files()[0].path.partition('/')[0]}/others"
    place.open().put(f"{folder}/_delta_log/{0:020d}.json", b"{}")
    place.open().put(f"{folder}/x.parquet", b"its rows")
    done = sink().orphans(0)
    assert (done.count, done.unclear) == (0, [f"{folder}/ (another table)"])
    assert place.open().get(f"{folder}/x.parquet")


def test_a_folder_with_the_metadata_of_another_table_is_left_alone(
    landing: StorageLocation, iceberg: Sink
) -> None:
    filled(landing, iceberg, 1)
    mine = iceberg().table()
    other = iceberg().catalog.create_table("lake.other", mine.schema(), location=mine.location())
    with pytest.raises(IngestError, match="in its folder is of another table, so nothing was deleted"):
        iceberg().orphans(0)
    assert other.refresh().metadata_location


def test_prune_deletes_nothing_when_rows_cannot_be_read(
    landing: StorageLocation, tmp_path: Path, sink: Sink
) -> None:
    filled(landing, sink, 2)
    gone = sink().files()[0].path
    delete(sink().target().location, [gone], list)
    kind = "--delta" if hasattr(sink(), "_vectors") else "--warehouse"
    place = {"--delta": "delta/messages", "--warehouse": "warehouse"}[kind]
    where = ("--source", landing.url, kind, str(tmp_path / place))
    done = command("prune", *where, "--older-than-days", "0")
    assert done.returncode == 1
    assert "1 of its files cannot be read, so nothing is deleted" in done.stderr
    assert gone.rpartition("/")[2] in done.stderr
    assert len([entry for entry in landing.open().list() if "_gateway" not in entry.key]) == 2


# -- ages


def test_orphans_and_versions_of_a_delta_table_have_least_ages(
    landing: StorageLocation, tmp_path: Path, sink: Sink
) -> None:
    filled(landing, sink, 1)
    least = 7 if hasattr(sink(), "_vectors") else 1
    assert Ages.of(sink(), None, None, force=False) == Ages(None, None)
    assert Ages.of(sink(), 30, None, force=False) == Ages(30, max(3, least))
    assert Ages.of(sink(), None, least, force=False) == Ages(None, least)
    for young in (0, least - 0.1):
        with pytest.raises(
            BadOption, match=f"their rows are lost; the least is {least}. To do so all the same"
        ):
            Ages.of(sink(), None, young, force=False)
        assert Ages.of(sink(), None, young, force=True).orphans == young
    if least == 7:
        with pytest.raises(BadOption, match="keeps replaced files for 7 days"):
            Ages.of(sink(), 6, None, force=False)
        set_retention(sink(), "interval 36 hours")
        assert Ages.of(sink(), 1.5, None, force=False) == Ages(1.5, 3)
        set_retention(sink(), "interval 1 hour")
        with pytest.raises(BadOption, match="the least is 1"):
            Ages.of(sink(), 1, 0.5, force=False)
    else:
        assert Ages.of(sink(), 0, None, force=False) == Ages(0, 3)


def set_retention(sink: Any, interval: str) -> None:
    sink.table().alter.set_table_properties({"delta.deletedFileRetentionDuration": interval})


def test_compact_says_what_may_be_lost(landing: StorageLocation, tmp_path: Path, iceberg: Sink) -> None:
    filled(landing, iceberg, 1)
    refused = command("compact", "--warehouse", str(tmp_path / "warehouse"), "--orphan-days", "0")
    assert refused.returncode == 2
    assert "may commit files that are gone by then, and their rows are lost" in refused.stderr


# -- a person is erased


@pytest.mark.parametrize("where", ["local", "s3"])
@pytest.mark.parametrize("kind", ["iceberg", "delta"])
def test_after_an_erasure_no_byte_of_a_person_is_left(
    request: pytest.FixtureRequest, tmp_path: Path, where: str, kind: str
) -> None:
    """The steps of docs/howto/erasure.md; the other engines are pyiceberg and delta-rs."""
    place = StorageLocation(str(tmp_path)) if where == "local" else request.getfixturevalue("bucket")
    landing, lake = place.join("landing"), place.join("lake")
    sql = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db"}
    options = TableOptions(
        **({"delta": f"{lake.url}/t"} if kind == "delta" else {"warehouse": lake.url, "catalog": sql}),
        endpoint=place.endpoint,
    )

    def sink() -> Any:
        return open_sink(options)

    person = b"Ada-Lovelace-1815"
    filled(landing, sink, 2)
    with_person: dict[str, Any] = {"topic": f"homes/{person.decode()}", "payload": b'{"name": "%s"}' % person}
    Gateway(landing).export(20, 29, **with_person)
    ingest(InProcess, landing, sink(), full_every=0)
    compacted(sink())
    files = written(sink(), landing, 30, 39, **with_person)  # of a killed run
    uploaded = [entry.key for entry in landing.open().list() if "000000030" in entry.key]
    landing.open().delete(uploaded)
    filled(landing, sink, 1, 4)
    table = sink().table()
    if kind == "delta":
        table.delete("sequence_number between 20 and 29")
    else:  # pyiceberg itself cannot rewrite files of days
        rows = sink().read()
        with DayFiles(sink().target()) as rest:
            rows = rows.filter(pc.invert(pc.is_in(rows["sequence_number"], pa.array(range(20, 30)))))
            rest.add(rows.cast(sink().target().arrow()))
        sink().replace(sink().files(), rest.written)
    assert found(place, person)
    accept_rows(sink(), dry_run=False)
    prune(landing, sink(), 0, dry_run=False, trust_state=False)
    assert files
    assert sink().erase().unclear == []
    assert found(place, person) == []
    assert numbers(sink()) == [*range(20), *range(40, 50)]
    Gateway(landing).export(50, 59)
    after = ingest(InProcess, landing, sink(), full_every=0)
    assert (after.rows, after.report.differs) == (10, False)
    sink().erase()
    assert numbers(sink()) == [*range(20), *range(40, 60)]


def found(place: StorageLocation, text: bytes) -> list[str]:
    """Return the objects below a place that have these bytes, also compressed."""
    store = place.open()
    return [entry.key for entry in store.list() if text in _plain(store.get(entry.key))]


def _plain(data: bytes) -> bytes:
    if data[:2] == b"\x1f\x8b":
        return gzip.decompress(data)
    if data[:4] == b"PAR1":
        return data + str(pq.read_table(pa.BufferReader(data)).to_pydict()).encode()
    if data[:3] == b"Obj":  # Avro: blocks of deflated rows, each after two numbers
        for block in data.split(data[-16:])[1:-1]:
            for at in range(2, 8):
                with suppress(zlib.error):
                    data += zlib.decompressobj(-15).decompress(block[at:])
    return data


@pytest.mark.spark
def test_files_that_spark_has_written_stay_however_a_table_spells_them(spark: Any, tmp_path: Path) -> None:
    """Spark's folders have percent signs in their names; what it leaves beside its files is no one's."""
    folder = tmp_path / "lake" / "by spark" / "data"
    names = ["a/b", "50%", "ü x"]
    rows = spark.createDataFrame([(name, number) for number, name in enumerate(names)], "name string, n long")
    rows.selectExpr("name as folder", "name", "n").write.partitionBy("folder").parquet(str(folder))
    files = sorted(folder.rglob("*.parquet"))
    assert len([path for path in files if "%" in path.parent.name]) == 2
    catalog = open_catalog(str(tmp_path / "lake"), {}, None)
    catalog.create_namespace("lake")
    schema = pa.schema([pa.field("name", pa.string()), pa.field("n", pa.int64())])
    table = catalog.create_table("lake.others", schema, location=f"file:{folder.parent}/")
    spelt = [f"{start}{path}" for start, path in zip(("file://", "file:", ""), files, strict=True)]
    table.add_files(spelt)
    sink = IcebergSink(catalog, "lake.others", str(tmp_path / "state"))
    assert sink.expire(0).count == 0
    assert sink.orphans(0).count == len(files) + 2  # sums, and _SUCCESS with its own
    assert sorted(folder.rglob("*.*")) == files
    assert sorted(sink.read()["name"].to_pylist()) == sorted(names)
