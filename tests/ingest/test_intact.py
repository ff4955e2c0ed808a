"""A table whose files are gone is not complete: what is lost is named, and brought back."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table.update import SetLocationUpdate

from bridge.ingest import intact
from bridge.ingest.errors import IngestError, WrongSource
from bridge.ingest.job import ingest
from bridge.ingest.repair import Repaired, accept_rows, repair
from bridge.ingest.report import survey
from bridge.ingest.sinks.base import Part, Parts
from bridge.ingest.state import load_state
from bridge.ingest.store import StorageLocation
from bridge.ingest.table import TableOptions, open_sink
from bridge.objectkeys import parse_key
from tests.ingest.conftest import Intercepted
from tests.ingest.deletes import delete_rows
from tests.ingest.gateway import EPOCH, Gateway, reported
from tests.ingest.test_command import command
from tests.ingest.test_sinks import numbers
from tests.ingest.test_verdict import InProcess, delete, run

Sink = Callable[[], Any]


def filled(landing: StorageLocation, sink: Sink, files: int = 3) -> Sink:
    """A table of 40 rows of one stream in each of some files."""
    for first in range(0, 40 * files, 40):
        Gateway(landing).export(first, first + 39)
        Gateway(landing).report(reported(first + 39))
        assert run(landing, sink()).report.complete
    return sink


@pytest.fixture
def table(landing: StorageLocation, sink: Sink) -> Sink:
    return filled(landing, sink)


def files(sink: Any, kind: str = "data file") -> list[Path]:
    """The files of a local table, those of the oldest rows first."""
    found = [part for part in sink.parts().files if part.kind == kind]
    found.sort(key=lambda part: part.bounds["sequence_number"] if part.bounds else (0, 0))
    return [Path(intact.spellings(part.path)[0][1]) for part in found]


def look(sink: Any) -> intact.Look:
    return intact.look(sink, load_state(sink))


def damages(sink: Any) -> list[tuple[str, str, list[Any], bool]]:
    return [(one.kind, one.why, one.numbers, one.exact) for one in look(sink).damages]


def of(first: int, last: int) -> list[list[Any]]:
    return [["gw-a", "s0", EPOCH, first, last]]


def test_a_look_at_a_whole_table_finds_nothing(table: Sink) -> None:
    found = look(table())
    assert (found.whole, found.compared) == (True, 7 if hasattr(table(), "catalog") else 3)


def test_data_files_that_are_gone_or_have_another_size_are_named_with_their_numbers(table: Sink) -> None:
    first, second, _ = files(table())
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    size = second.stat().st_size
    assert sorted(damages(table()), key=lambda one: one[2]) == [
        ("data file", "is gone", of(0, 39), True),
        ("data file", f"has {size} bytes instead of {size + 1}", of(40, 79), True),
    ]


def test_a_manifest_that_is_gone_or_cut_is_named_with_the_numbers_of_its_files(
    landing: StorageLocation, iceberg: Sink
) -> None:
    filled(landing, iceberg)
    gone, cut, _ = files(iceberg(), "manifest")
    gone.unlink()
    (found,) = look(iceberg()).damages
    assert (found.kind, found.why, found.rows, found.exact) == ("manifest", "is gone", 40, True)
    assert found.numbers[0][4] - found.numbers[0][3] == 39
    cut.write_bytes(cut.read_bytes()[:-20])
    assert {one.kind for one in look(iceberg()).damages} == {"manifest"}
    assert sum(size for one in look(iceberg()).damages for size in [one.rows]) == 80


def test_a_manifest_list_that_is_gone_is_named_with_all_numbers(
    landing: StorageLocation, iceberg: Sink
) -> None:
    filled(landing, iceberg)
    (path,) = files(iceberg(), "manifest list")
    path.unlink()
    assert damages(iceberg()) == [("manifest list", "is gone", of(0, 119), False)]


def test_a_delete_file_that_is_gone_is_named_with_the_numbers_that_nobody_can_read(table: Sink) -> None:
    file = next(file for file in table().files() if file.path.endswith(files(table())[1].name))
    delete_rows(table(), file, [3, 4], apart=True)
    assert look(table()).whole
    (path,) = files(table(), "delete file")
    path.unlink()
    assert damages(table()) == [("delete file", "is gone", of(40, 79), True)]


def in_s3(bucket: StorageLocation, kind: str, folder: Path) -> Sink:
    """A table in the bucket, spelt s3a:// if it is Iceberg's."""
    place = f"{bucket.url.split('/')[2]}/lake"
    if kind == "delta":
        return lambda: open_sink(TableOptions(delta=f"s3://{place}/t", endpoint=bucket.endpoint))
    catalog = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"s3a://{place}"}
    state = str(folder / "state")
    return lambda: open_sink(TableOptions(catalog=catalog, state=state, endpoint=bucket.endpoint))


def lose(sink: Any) -> None:
    """Delete the data file of the oldest rows."""
    oldest = min(
        (part for part in sink.parts().files if part.bounds), key=lambda part: part.bounds["sequence_number"]
    )
    ((name, key), *_) = intact.spellings(oldest.path)
    place = sink.parts().place
    (StorageLocation(f"s3://{name}" if name else "/", place.endpoint)).open().delete([key])


@pytest.mark.parametrize("kind", ["iceberg", "delta"])
def test_a_table_in_s3_is_compared_by_a_listing_and_its_rows_come_back(
    bucket: StorageLocation, kind: str, tmp_path: Path
) -> None:
    table = filled(bucket, in_s3(bucket, kind, tmp_path))
    assert look(table()).whole
    lose(table())
    assert damages(table()) == [("data file", "is gone", of(0, 39), True)]
    assert ranges(repaired(table())) == [(0, 39)]
    assert run(bucket, table()).rows == 40
    assert numbers(table()) == list(range(120))


@pytest.mark.parametrize(
    ("path", "places"),
    [
        ("s3a://b/t//x%20y", [("b", "t//x%20y"), ("b", "t/x%20y"), ("b", "t//x y"), ("b", "t/x y")]),
        ("S3N://b/k", [("b", "k")]),
        ("file:/t/x", [("", "/t/x")]),
        ("file:///t/x", [("", "/t/x")]),
        ("/t/x:y", [("", "/t/x:y")]),
        ("gs://b/k", []),
    ],
)
def test_a_place_is_found_however_it_is_spelt(path: str, places: list[tuple[str, str]]) -> None:
    assert intact.spellings(path) == places


def repaired(sink: Any, **options: Any) -> Repaired:
    done = repair(sink, dry_run=False, **options)
    assert done.committed
    return done


def ranges(done: Repaired) -> list[tuple[int, int]]:
    return [pair for change in done.streams for pair in change.lost]


def test_rows_of_files_that_are_gone_or_cut_come_back_once(landing: StorageLocation, table: Sink) -> None:
    first, second, _ = files(table())
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    done = repaired(table())
    assert (ranges(done), done.hopeless, len(done.damaged)) == ([(0, 79)], [], 2)
    assert look(table()).whole
    summary = run(landing, table())
    assert (summary.rows, summary.report.complete) == (80, True)
    assert numbers(table()) == list(range(120))
    assert not repair(table(), dry_run=False).committed


def test_rows_of_a_manifest_that_is_gone_come_back_once(landing: StorageLocation, iceberg: Sink) -> None:
    filled(landing, iceberg)
    gone, cut, _ = files(iceberg(), "manifest")
    gone.unlink()
    cut.write_bytes(cut.read_bytes()[:-20])
    assert len(ranges(repaired(iceberg()))) > 0
    summary = run(landing, iceberg())
    assert (summary.rows, summary.report.complete) == (80, True)
    assert numbers(iceberg()) == list(range(120))
    assert look(iceberg()).whole


def file_of(sink: Any, at: int) -> Any:
    path = files(sink)[at].name
    return next(file for file in sink.files() if file.path.endswith(path))


def rows_of(sink: Any) -> list[int]:
    """The numbers of the table, without deleted rows; delta-rs reads no table with deletion vectors."""
    found = [
        rows["sequence_number"].to_pylist()
        for rows in sink.content().read([f.path for f in sink.content().files])
    ]
    return sorted(number for part in found for number in part)


@pytest.mark.parametrize("lost", ["data file", "delete file"])
def test_rows_whose_deletion_was_accepted_never_come_back(
    landing: StorageLocation, table: Sink, lost: str
) -> None:
    delete_rows(table(), file_of(table(), 1), [3, 4], apart=True)
    accept_rows(table(), dry_run=False)
    kept = [number for number in range(120) if number not in (43, 44)]
    assert rows_of(table()) == kept
    files(table(), lost)[1 if lost == "data file" else 0].unlink()
    assert ranges(repaired(table())) == [(40, 42), (45, 79)]
    summary = run(landing, table())
    assert (summary.rows, summary.report.complete) == (38, True)
    assert rows_of(table()) == kept
    assert look(table()).whole


@pytest.mark.parametrize(("deleted", "left"), [("out", 80), ("back", 120)])
def test_what_others_have_deleted_and_nobody_accepted_is_decided_by_an_operator(
    landing: StorageLocation, table: Sink, deleted: str, left: int
) -> None:
    delete_rows(table(), file_of(table(), 1), [3, 4], apart=True)
    files(table(), "delete file")[0].unlink()
    with pytest.raises(IngestError, match="--deleted out"):
        repair(table(), dry_run=False)
    with pytest.raises(IngestError, match="comes first"):
        accept_rows(table(), dry_run=False)
    repaired(table(), deleted=deleted)
    run(landing, table())
    assert rows_of(table()) == [n for n in range(120) if left == 120 or not 40 <= n < 80]


def test_deletes_of_other_files_that_nobody_accepted_stay_as_they_are(
    landing: StorageLocation, table: Sink
) -> None:
    delete(table(), "sequence_number = 100")
    next(path for path in files(table()) if path.name == files(table())[0].name).unlink()
    assert ranges(repaired(table())) == [(0, 39)]
    summary = run(landing, table())
    assert (summary.rows, summary.report.differs) == (40, True)
    assert numbers(table()) == [n for n in range(120) if n != 100]


def test_rows_that_others_have_deleted_beside_other_files_do_not_come_back(
    landing: StorageLocation, table: Sink
) -> None:
    delete_rows(table(), file_of(table(), 2), [3, 4], apart=True)
    files(table())[0].unlink()
    assert ranges(repaired(table())) == [(0, 39)]
    assert run(landing, table()).rows == 40
    assert rows_of(table()) == [n for n in range(120) if n not in (83, 84)]


def test_what_no_object_has_any_more_is_named_and_missing(landing: StorageLocation, table: Sink) -> None:
    landing.open().delete([next(entry.key for entry in landing.open().list() if "00040-" in entry.key)])
    for path in files(table())[:2]:
        path.unlink()
    assert repaired(table()).hopeless == of(40, 79)
    report = run(landing, table()).report
    assert (report.total("missing"), report.total("rows")) == (40, 80)


def test_a_file_that_is_there_is_not_taken_out_when_no_object_has_its_rows(
    landing: StorageLocation, iceberg: Sink
) -> None:
    filled(landing, iceberg)
    landing.open().delete([entry.key for entry in landing.open().list()])
    files(iceberg(), "manifest")[0].unlink()
    with pytest.raises(IngestError, match="--give-up"):
        repair(iceberg(), dry_run=False)
    repaired(iceberg(), give_up=True)
    assert len(numbers(iceberg())) == 80


class Killed(BaseException):
    """Like SIGKILL at this line."""


class Dying:
    """What dies at a point, or has its answer lost, and is otherwise what it stands for."""

    def __init__(self, inner: Any, point: str) -> None:
        self.inner, self.point = inner, point

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _at(self, do: Callable[..., Any], lost: Exception, *arguments: Any, **options: Any) -> Any:
        if self.point == "before the commit":
            raise Killed
        done = do(*arguments, **options)
        if self.point == "after the commit":
            raise Killed
        if self.point == "the answer is lost":
            raise lost
        return done


class DyingCatalog(Dying):
    def load_table(self, identifier: Any) -> Any:
        table = self.inner.load_table(identifier)
        table.catalog = self
        return table

    def commit_table(self, *arguments: Any, **options: Any) -> Any:
        # its client asks again, and is refused
        return self._at(
            self.inner.commit_table, CommitFailedException("other metadata"), *arguments, **options
        )


class DyingStore(Dying):
    def create(self, key: str, data: bytes) -> bool:
        # as botocore, which asks again
        made: bool = self._at(self.inner.create, LostAnswer(), key, data)
        return made


class LostAnswer(Exception):  # noqa: N818
    """What a store without retries raises."""


class DyingStates(Dying):
    def put(self, key: str, data: bytes) -> None:
        if self.point == "before the state":
            raise Killed
        self.inner.put(key, data)
        if self.point == "after the state":
            raise Killed
        if self.point == "after the record" and key == intact.RECORD:
            raise LostAnswer


@dataclass(frozen=True, slots=True)
class DyingPlace(StorageLocation):
    """A location whose store dies."""

    point: str = ""
    kind: type[Dying] = DyingStates

    def open(self) -> Any:
        return self.kind(StorageLocation.open(self), self.point)


def dying(sink: Any, point: str) -> Any:
    state = sink.state()
    if hasattr(sink, "catalog"):
        sink.catalog = DyingCatalog(sink.catalog, point)
    else:
        sink.location = DyingPlace(sink.location.url, sink.location.endpoint, point, DyingStore)
    return Intercepted(sink, state=lambda: DyingPlace(state.url, state.endpoint, point))


POINTS = (
    *("before the state", "after the state", "before the commit", "after the commit"),
    *("the answer is lost", "after the record"),
)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("place", ["local", "s3"])
@pytest.mark.parametrize("kind", ["iceberg", "delta"])
def test_a_repair_that_is_killed_or_gets_no_answer_loses_and_doubles_nothing(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, place: str, point: str
) -> None:
    if place == "s3":
        landing = request.getfixturevalue("bucket")
        table = in_s3(landing, kind, tmp_path)
    else:
        landing, table = request.getfixturevalue("landing"), request.getfixturevalue(kind)
    filled(landing, table, 1)
    lose(table())
    with suppress(Killed, LostAnswer):
        repair(dying(table(), point), dry_run=False)
    repair(table(), dry_run=False)
    assert look(table()).whole
    summary = run(landing, table())
    assert (summary.rows, summary.report.complete) == (40, True)
    assert numbers(table()) == list(range(40))


def test_each_run_says_what_is_damaged_until_it_is_repaired_and_ends_with_a_code_of_its_own(
    landing: StorageLocation, iceberg: Sink, tmp_path: Path
) -> None:
    filled(landing, iceberg)
    where = ("--source", landing.url, "--warehouse", str(tmp_path / "warehouse"))
    files(iceberg())[1].unlink()
    assert command("report", *where).returncode == 0  # nobody has looked since
    deep = command("report", *where, "--deep")
    assert deep.returncode == 9
    assert "is gone: gw-a/s0 40..79 cannot be read" in " ".join(deep.stdout.split())
    assert "NOT complete" in deep.stdout
    ordinary = command(*where, "--json")
    assert ordinary.returncode == 9, ordinary.stderr
    found = json.loads(ordinary.stdout)["report"]
    assert (found["complete"], [one["numbers"] for one in found["files"]["damaged"]]) == (False, [of(40, 79)])
    after = command("report", *where)
    assert after.returncode == 9
    assert "files: all compared with what is there since" in after.stdout
    page = tmp_path / "page.html"
    assert command("report", *where, "--html", str(page)).returncode == 9
    assert "1 files damaged" in page.read_text()
    done = command("repair", *where[2:])
    assert done.returncode == 0
    assert "gw-a/s0 40..79 (40): lost, the next run takes them again" in done.stdout
    assert run(landing, iceberg()).report.complete
    assert command("report", *where, "--deep").returncode == 0


HOUR_MS = 3_600_000


@pytest.mark.parametrize("every_ms", [60_000, HOUR_MS, 24 * HOUR_MS])
def test_ordinary_runs_compare_all_files_within_a_day_and_each_a_bounded_share(
    landing: StorageLocation, delta: Sink, tmp_path: Path, every_ms: int
) -> None:
    filled(landing, delta)
    count = 30_000
    paths = [f"{tmp_path}/{number:05d}" for number in range(count)]
    Path(paths[0]).write_bytes(b"x")
    for path in paths[1:]:
        os.link(paths[0], path)
    known = [Part(path, "data file", 1, 1, f"2026-11-{int(path[-5:]) // 1000 + 1:02d}") for path in paths]
    orders = [part.order() for part in known]
    asked: list[int] = []

    def parts(after: tuple[str, str] = intact.START) -> Parts:
        start = bisect_right(orders, after)
        return Parts("1", count, StorageLocation(str(tmp_path)), watched(start))

    def watched(start: int) -> Iterator[Part]:
        for at in range(start, count):
            asked.append(at)
            yield known[at]

    sink = Intercepted(delta(), parts=parts)
    state = load_state(delta())
    began = 1_795_000_000_000
    sink.state().open().delete([intact.RECORD])
    first = intact.share(sink, state, began)
    assert (first.whole, first.full) == (True, began)  # all, for nothing was known
    asked.clear()
    now = began
    while len(set(asked)) < count:
        before = len(asked)
        now += every_ms
        found = intact.share(sink, state, now)
        assert found.whole
        assert len(asked) - before <= max(1001, count * every_ms // (12 * HOUR_MS) + 2)
        assert found.full is not None
        assert now - found.full <= 24 * HOUR_MS
    assert now - began <= max(12 * HOUR_MS, every_ms)
    lost = Path(paths[17_000])
    lost.unlink()
    while intact.share(sink, state, now).whole:
        now += every_ms
    assert now - began <= 48 * HOUR_MS
    lost.write_bytes(b"x")
    assert intact.share(sink, state, now).whole  # what is damaged is looked at in each run
    sink.state().open().put(intact.RECORD, b"{}")
    assert intact.share(sink, state, now).full == now


def test_a_place_that_cannot_be_looked_at_is_named_and_nothing_is_complete(
    landing: StorageLocation, table: Sink
) -> None:
    strange = Part("gs://other/t/data/x.parquet", "data file", 7, 1)
    whole = table().parts()
    sink = Intercepted(table(), parts=lambda after=("", ""): whole._replace(files=iter([*known, strange])))
    known = list(whole.files)
    found = intact.look(sink, load_state(table()))
    assert (found.damages, found.unseen) == (
        [], ["gs://other/t/data/x.parquet: no place that can be looked at"],
    )  # fmt: skip
    summary = ingest(InProcess, landing, sink)
    assert (summary.report.complete, len(summary.report.files.unseen)) == (False, 1)
    with pytest.raises(IngestError, match="gs://other"):
        repair(sink, dry_run=False)


def test_files_at_an_earlier_place_of_the_table_are_compared_too(
    landing: StorageLocation, iceberg: Sink, tmp_path: Path
) -> None:
    filled(landing, iceberg)
    place = tmp_path / "moved to" / "here"
    with iceberg().table().transaction() as change:
        change._apply((SetLocationUpdate(location=f"file:{place}"),))
    assert look(iceberg()).whole
    Gateway(landing).export(120, 139)
    Gateway(landing).report(reported(139))
    assert run(landing, iceberg()).report.complete
    assert files(iceberg())[-1].is_relative_to(place)
    files(iceberg())[0].unlink()
    assert damages(iceberg()) == [("data file", "is gone", of(0, 39), True)]
    assert ranges(repaired(iceberg())) == [(0, 39)]
    run(landing, iceberg())
    assert numbers(iceberg()) == list(range(140))


def test_a_source_that_has_nothing_of_the_table_is_an_error_of_its_own_and_changes_nothing(
    landing: StorageLocation, table: Sink, tmp_path: Path
) -> None:
    wrong, others = (StorageLocation(str(tmp_path / name)) for name in ("wrong", "others"))
    Path(wrong.url).mkdir()
    Gateway(others, "gw-of-others").export(0, 9)
    before = table().pointer()
    for source in (wrong, others):
        for _ in range(2):  # the first leaves nothing that would excuse the second
            with pytest.raises(WrongSource, match="nothing of what the table has, which is of gw-a"):
                ingest(InProcess, source, table())
            report = survey(source, table())[1]
            assert (report.complete, report.elsewhere) == (False, True)
    assert table().pointer() == before
    kind = ("--warehouse", str(tmp_path / "warehouse"))
    kind = kind if hasattr(table(), "catalog") else ("--delta", table().location.url)
    found = command("report", "--source", wrong.url, *kind)
    assert (found.returncode, "NOT complete" in found.stdout) == (10, True)
    assert ingest(InProcess, others, table(), new_source=True).rows == 10
    assert ingest(InProcess, others, table()).report.complete


@pytest.mark.parametrize("left", ["nothing", "newer objects", "a gateway without a stream", "reports"])
def test_a_source_whose_objects_were_deleted_is_still_that_of_the_table(
    landing: StorageLocation, table: Sink, tmp_path: Path, left: str
) -> None:
    store = landing.open()
    store.delete([entry.key for entry in store.list() if left != "reports" or parse_key(entry.key)])
    if left == "newer objects":
        Gateway(landing).export(120, 139)
    if left == "a gateway without a stream":
        Gateway(landing).report()
    again = [landing.url, f"{landing.url}/", f"file://{landing.url}"] if left == "nothing" else [landing.url]
    for url in again:
        report = survey(StorageLocation(url), table())[1]
        assert not report.elsewhere
        assert not run(StorageLocation(url), table()).report.elsewhere
    if left in ("newer objects", "a gateway without a stream", "reports"):  # it has moved to another bucket
        moved = tmp_path / "moved"
        Path(landing.url).rename(moved)
        assert not run(StorageLocation(str(moved)), table()).report.elsewhere
