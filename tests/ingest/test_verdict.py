"""Whatever others do to the table, the verdict is true, and an operator decides what becomes of it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.expressions.parser import parse
from pyiceberg.expressions.visitors import bind
from pyiceberg.io.pyarrow import expression_to_pyarrow
from pyiceberg.transforms import BucketTransform

from bridge.ingest.columns import TIME
from bridge.ingest.errors import CommitConflict, IngestError
from bridge.ingest.files import DayFiles, Target
from bridge.ingest.job import Summary, ingest
from bridge.ingest.repair import Repaired, accept_rows, repair
from bridge.ingest.report import survey
from bridge.ingest.sinks.iceberg import data_file
from bridge.ingest.store import LocalStore, StorageLocation
from bridge.ingest.upkeep import prune
from bridge.ingest.worker import process, unpack
from tests.ingest.conftest import Intercepted
from tests.ingest.deletes import delete_rows
from tests.ingest.gateway import Gateway, reported, rows
from tests.ingest.test_command import command
from tests.ingest.test_sinks import numbers

Sink = Callable[[], Any]


class InProcess:
    """Tasks in this process: tests that are not about Spark start no JVM."""

    def slots(self) -> int:
        return 1

    def work(
        self, what: str, parts: Sequence[bytes], source: StorageLocation, target: Target
    ) -> dict[str, list[Any]]:
        bodies: dict[str, list[Any]] = defaultdict(list)
        for part in parts:
            for kind, body in process(unpack(part), source, target):
                bodies[kind].append(body)
        return bodies

    def each(self, what: str, count: int, work: Callable[[int], Any]) -> dict[str, list[Any]]:
        bodies: dict[str, list[Any]] = defaultdict(list)
        for part in range(count):
            for kind, body in work(part):
                bodies[kind].append(body)
        return bodies


def run(landing: StorageLocation, sink: Any) -> Summary:
    """Run the job with a full listing: the gateways of these tests do not always report what they upload."""
    return ingest(InProcess, landing, sink, full_every=0)


@pytest.fixture
def table(landing: StorageLocation, sink: Sink) -> Sink:
    """A table of 120 rows of one stream, taken in three rounds."""
    for first in (0, 40, 80):
        Gateway(landing).export(first, first + 39)
        Gateway(landing).report(reported(first + 39))
        assert run(landing, sink()).report.complete
    return sink


def version(sink: Any) -> str:
    found: str = sink.standing(None, 0).at
    return found


def arrow(schema: pa.Schema, content: list[dict[str, Any]]) -> pa.Table:
    """Rows in the columns of a table of another engine."""
    micros = [row["ingest_time"] * 1000 for row in content]
    known = {
        "ingest_time": pa.array(micros).cast(TIME),
        "ingest_date": pa.array([time // 86_400_000_000 for time in micros], pa.int32()).cast(pa.date32()),
    }
    columns = [
        known[name] if name in known else pa.array([row.get(name) for row in content]).cast(kind)
        for name, kind in zip(schema.names, schema.types, strict=True)
    ]
    return pa.Table.from_arrays(columns, names=schema.names)


def change(sink: Any, gone: str, content: list[dict[str, Any]]) -> None:
    """Delete rows and add others, as another engine does that rewrites files."""
    table = sink.table()
    if isinstance(table, DeltaTable):
        rows = arrow(pa.schema(table.schema().to_arrow()), content)
        if gone:
            table.delete(gone)
        if content:
            write_deltalake(table, rows, mode="append")
        return
    with DayFiles(sink.target()) as files:
        if content:
            files.add(arrow(files.schema, content))
        rewritten = list(_without(table, gone, files)) if gone else []
    with table.transaction() as change, change.update_snapshot().overwrite() as update:
        for file in rewritten:
            update.delete_data_file(file)
        for written in files.written:
            update.append_data_file(data_file(table, written))


def _without(table: Any, gone: str, files: DayFiles) -> Iterator[Any]:
    """Yield the files with such rows, and write the others of their rows."""
    condition = expression_to_pyarrow(bind(table.schema(), parse(gone), case_sensitive=True))
    for task in table.scan().plan_files():
        rows = pq.read_table(task.file.file_path.removeprefix("file://"), partitioning=None)
        left = rows.filter(~condition)
        if left.num_rows < rows.num_rows:
            yield task.file
            if left.num_rows:
                files.add(left)


def partition(sink: Any, columns: list[str] | None) -> None:
    """Write a Delta table again with other partitions, as another engine does."""
    table = sink.table()
    actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    log, folder = Path(sink.location.url) / "_delta_log", Path(sink.location.url)
    meta = [json.loads(line) for line in (log / f"{0:020d}.json").read_text().splitlines()]
    changed = next(action for action in meta if "metaData" in action)
    changed["metaData"]["partitionColumns"] = columns or []
    lines: list[dict[str, Any]] = [changed]
    lines += [{"remove": {"path": action["path"], "dataChange": True}} for action in actions]
    rows = table.to_pyarrow_table().drop_columns(columns or [])
    pq.write_table(rows, folder / "again.parquet")
    added = {"path": "again.parquet", "size": (folder / "again.parquet").stat().st_size, "dataChange": True}
    values = dict.fromkeys(columns or [], "gw-a")
    added |= {"modificationTime": 1, "partitionValues": values, "stats": f'{{"numRecords": {rows.num_rows}}}'}
    lines.append({"add": added})
    (log / f"{table.version() + 1:020d}.json").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def append(sink: Any, content: list[dict[str, Any]]) -> None:
    change(sink, "", content)


def delete(sink: Any, gone: str) -> None:
    change(sink, gone, [])


def overwrite(sink: Any, gone: str, content: list[dict[str, Any]]) -> None:
    change(sink, gone, content)


def rewrite(sink: Any) -> None:
    """Compact as another engine does: it says that the rows stay."""
    table = sink.table()
    if isinstance(table, DeltaTable):
        table.optimize.compact()
        return
    with DayFiles(sink.target()) as files:
        files.add(sink.read())
    with table.transaction() as change, change.update_snapshot().overwrite() as update:
        for task in table.scan().plan_files():
            update.delete_data_file(task.file)
        for written in files.written:
            update.append_data_file(data_file(table, written))
    # pyiceberg makes no snapshot of this kind
    path = Path(sink.table().metadata_location.removeprefix("file://"))
    metadata = json.loads(path.read_text())
    metadata["snapshots"][-1]["summary"]["operation"] = "replace"
    path.write_text(json.dumps(metadata))


def of_others(numbers: Sequence[int], gateway: str = "gw-a", stream: str = "s0") -> list[dict[str, Any]]:
    return rows(gateway, stream, numbers)


def differs(landing: StorageLocation, sink: Sink) -> list[str]:
    """What a run says of the table; a report without a run says the same."""
    summary = run(landing, sink())
    _, report = survey(landing, sink())
    assert (report.complete, report.differs) == (summary.report.complete, summary.report.differs)
    return summary.report.problems if summary.report.differs else []


def lost(done: Repaired) -> list[tuple[int, int]]:
    return [pair for change in done.streams for pair in change.lost]


def test_a_run_that_finds_nothing_new_and_nothing_changed_commits_nothing(
    landing: StorageLocation, table: Sink
) -> None:
    before = version(table())
    assert differs(landing, table) == []
    done = repair(table(), dry_run=False)
    assert (done.committed, done.streams, done.files_read) == (False, [], 0)
    assert version(table()) == before


def test_a_delta_table_that_was_restored_is_not_complete_until_it_is_repaired(
    landing: StorageLocation, delta: Sink
) -> None:
    for first in (0, 40, 80):
        Gateway(landing).export(first, first + 39)
        Gateway(landing).report(reported(first + 39))
        run(landing, delta())
        if not first:
            then = delta().table().version()
    delta().table().restore(then)
    where = ("--source", landing.url, "--delta", delta().location.url)
    found = command("report", *where, "--json")
    document = json.loads(found.stdout)
    assert (found.returncode, document["complete"], document["differs"]) == (7, False, True)
    name = delta().name
    assert (
        f"{name} has 40 rows and its state says 120: something else changed the table" in document["problems"]
    )
    assert any("(RESTORE)" in problem for problem in document["problems"])

    Gateway(landing).export(120, 129)
    Gateway(landing).report(reported(129))
    summary = run(landing, delta())
    assert (summary.rows, summary.report.complete) == (10, False)
    assert repair(delta(), dry_run=True).lost == 80
    assert differs(landing, delta)
    done = command("repair", *where[2:])
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        [
            "gw-a/s0 40..119 (80): lost, the next run takes them again",
            "50 rows in 2 files, of which 0 were read: the state is now that of the table",
        ],
    )
    summary = run(landing, delta())
    assert (summary.rows, summary.report.complete) == (80, True)
    assert numbers(delta()) == list(range(130))


@pytest.mark.parametrize("how", ["rolled back", "set"])
def test_an_iceberg_table_that_was_rolled_back_takes_again_what_it_lost(
    landing: StorageLocation, iceberg: Sink, how: str
) -> None:
    for first in (0, 40, 80):
        Gateway(landing).export(first, first + 39)
        run(landing, iceberg())
    table = iceberg().table()
    then = table.history()[0].snapshot_id
    if how == "set":
        table.manage_snapshots().set_current_snapshot(then).commit()
    else:
        table.manage_snapshots().rollback_to_snapshot(then).commit()
    _, report = survey(landing, iceberg())
    assert (report.total("rows"), report.total("waiting"), report.differs) == (40, 80, False)
    summary = run(landing, iceberg())
    assert (summary.rows, summary.report.complete) == (80, True)
    assert numbers(iceberg()) == list(range(120))


def test_deleted_rows_are_taken_again_after_a_repair(landing: StorageLocation, table: Sink) -> None:
    delete(table(), "sequence_number >= 10 and sequence_number < 20")
    assert any("has 110 rows and its state says 120" in problem for problem in differs(landing, table))
    assert numbers(table()) == [*range(10), *range(20, 120)]
    done = repair(table(), dry_run=False)
    assert (lost(done), done.found, done.surplus) == ([(10, 19)], 0, 0)
    assert done.files_read == 1  # the statistics of the two others say what they hold
    summary = run(landing, table())
    assert (summary.rows, summary.report.complete) == (10, True)
    assert numbers(table()) == list(range(120))
    assert differs(landing, table) == []


def test_rows_that_were_deleted_beside_the_data_are_taken_again_after_a_repair(
    landing: StorageLocation, table: Sink
) -> None:
    file = next(file for file in table().files() if file.rows == 40)
    delete_rows(table(), file, [3, 4, 17])
    before = numbers(table()) if hasattr(table(), "catalog") else None
    assert any("has 117 rows and its state says 120" in problem for problem in differs(landing, table))
    done = repair(table(), dry_run=False)
    assert (done.lost, done.surplus, done.files_read) == (3, 0, 1)
    summary = run(landing, table())
    assert (summary.rows, summary.report.complete) == (3, True)
    if before is not None:  # delta-rs reads no table with deletion vectors
        assert len(before) == 117
        assert numbers(table()) == list(range(120))
    assert (lost(repair(table(), dry_run=True)), differs(landing, table)) == ([], [])


def test_rows_that_were_deleted_on_purpose_are_accepted_once_and_stay_so(
    landing: StorageLocation, table: Sink
) -> None:
    delete(table(), "sequence_number < 50")
    assert differs(landing, table)
    done = accept_rows(table(), dry_run=True)
    assert (lost(done), done.committed, bool(differs(landing, table))) == ([(0, 49)], False, True)
    done = accept_rows(table(), dry_run=False)
    assert (lost(done), done.committed) == ([(0, 49)], True)
    document = Path(table().state().url) / f"{table().pointer():020d}.json"
    assert json.loads(document.read_text())["format"] == 2  # earlier versions would take these rows again
    for first in (120, 130):
        assert differs(landing, table) == []
        Gateway(landing).export(first, first + 9)
        Gateway(landing).export(0, first + 9)  # also in other objects
        Gateway(landing).report(reported(first + 9))
        summary = run(landing, table())
        assert (summary.rows, summary.report.complete) == (10, True)
        (stream,) = summary.report.streams
        assert (stream.trimmed, stream.rows) == (50, first + 10 - 50)
        (hole,) = stream.holes
        assert (hole.first, hole.last, hole.kind, hole.reason) == (0, 49, "trimmed", "accepted")
    assert numbers(table()) == list(range(50, 140))
    assert accept_rows(table(), dry_run=False).committed is False
    prune(landing, table(), 0, dry_run=False, trust_state=False)
    assert [entry.key for entry in landing.open().list()] == ["_gateway/gw-a.json"]


def test_rows_that_come_back_after_their_deletion_was_accepted_are_noticed(
    landing: StorageLocation, table: Sink
) -> None:
    delete(table(), "sequence_number < 50")
    accept_rows(table(), dry_run=False)
    append(table(), of_others(range(10, 20)))
    assert differs(landing, table)
    done = repair(table(), dry_run=False)
    assert (done.lost, [change.found for change in done.streams]) == (0, [[(10, 19)]])
    assert differs(landing, table) == []
    assert numbers(table()) == [*range(10, 20), *range(50, 120)]


def test_rows_that_were_replaced_by_as_many_others_are_noticed(landing: StorageLocation, table: Sink) -> None:
    overwrite(table(), "sequence_number < 10", of_others(range(500, 510)))
    assert table().rows() == 120
    assert any("was changed by others" in problem for problem in differs(landing, table))
    done = repair(table(), dry_run=False)
    assert (lost(done), [change.found for change in done.streams]) == ([(0, 9)], [[(500, 509)]])
    summary = run(landing, table())
    assert (summary.rows, summary.report.differs) == (10, False)
    assert numbers(table()) == [*range(120), *range(500, 510)]


def test_values_that_were_changed_are_noticed_until_a_repair_finds_all_rows_there(
    landing: StorageLocation, table: Sink
) -> None:
    overwrite(table(), "sequence_number < 10", of_others(range(10)))
    assert differs(landing, table)
    done = repair(table(), dry_run=False)
    assert (done.streams, done.surplus, done.committed) == ([], 0, True)
    assert differs(landing, table) == []


def test_rows_that_others_have_added_are_accepted_once(landing: StorageLocation, table: Sink) -> None:
    append(table(), [row | {"epoch": "none"} for row in of_others(range(5))])
    append(table(), of_others(range(3)))  # a second time
    append(table(), of_others(range(7), "gw-other"))
    assert any("has 135 rows and its state says 120" in problem for problem in differs(landing, table))
    done = repair(table(), dry_run=False)
    assert (done.surplus, done.found, done.lost) == (8, 7, 0)
    problems = differs(landing, table)  # a repair removes no row
    assert any("has 135 rows and its state says 127" in problem for problem in problems)
    accept_rows(table(), dry_run=False)
    assert differs(landing, table) == []
    Gateway(landing).export(120, 129)
    assert run(landing, table()).rows == 10
    assert differs(landing, table) == []
    delete(table(), "epoch = 'none'")  # what was accepted goes, which is another change
    assert any("has 140 rows and its state says 145" in problem for problem in differs(landing, table))
    assert repair(table(), dry_run=False).surplus == 3
    assert differs(landing, table) == []


def test_compaction_by_another_engine_leaves_a_table_complete(landing: StorageLocation, table: Sink) -> None:
    rewrite(table())
    assert [file.rows for file in table().files()] == [120]
    assert differs(landing, table) == []
    Gateway(landing).export(120, 129)
    Gateway(landing).report(reported(129))
    rewrite(table())
    assert run(landing, table()).report.complete
    assert differs(landing, table) == []
    assert numbers(table()) == list(range(130))


def test_compaction_after_an_accepted_deletion_leaves_a_table_complete(
    landing: StorageLocation, iceberg: Sink
) -> None:
    Gateway(landing).export(0, 39)
    run(landing, iceberg())
    delete_rows(iceberg(), iceberg().files()[0], [0, 1, 2])
    accept_rows(iceberg(), dry_run=False)
    assert differs(landing, iceberg) == []
    rewrite(iceberg())  # the file with the deletes stays, and no longer concerns any row
    assert iceberg().rows() != 37
    assert differs(landing, iceberg) == []


def test_several_streams_in_one_file_are_told_apart_by_their_rows(
    landing: StorageLocation, sink: Sink
) -> None:
    for stream in ("s0", "s1"):
        Gateway(landing).export(0, 9, stream)
    run(landing, sink())
    assert [file.rows for file in sink().files()] == [20]
    delete(sink(), "stream = 's1' and sequence_number = 4")
    done = repair(sink(), dry_run=False)
    assert [(change.stream, change.lost) for change in done.streams] == [("s1", [(4, 4)])]
    assert run(landing, sink()).rows == 1
    assert numbers(sink()) == sorted([*range(10)] * 2)


def test_overlapping_files_are_read_and_what_is_there_twice_is_counted(
    landing: StorageLocation, table: Sink
) -> None:
    append(table(), of_others([30, 31, 32, 33, 33, 35]))  # the count fits the bounds
    done = repair(table(), dry_run=True)
    assert (done.surplus, done.streams, done.files_read) == (6, [], 2)


def test_what_a_run_has_found_is_not_forgotten_when_the_history_expires(
    landing: StorageLocation, table: Sink
) -> None:
    overwrite(table(), "sequence_number < 10", of_others(range(500, 510)))
    assert differs(landing, table)
    Gateway(landing).export(120, 129)
    Gateway(landing).report(reported(129))
    run(landing, table())
    found = table().table()
    if isinstance(found, DeltaTable):
        found.create_checkpoint()
        logs = sorted((Path(table().location.url) / "_delta_log").glob("*.json"))
        for log in logs[:-1]:
            log.unlink()
    else:
        last = found.current_snapshot().snapshot_id
        older = [one.snapshot_id for one in found.snapshots() if one.snapshot_id != last]
        found.maintenance.expire_snapshots().by_ids(older).commit()
    (first, *_) = differs(landing, table)
    assert "was changed by others" in first
    repair(table(), dry_run=False)
    assert run(landing, table()).rows == 10
    assert differs(landing, table) == []


def test_a_state_of_an_earlier_version_is_compared_by_the_number_of_rows(
    landing: StorageLocation, table: Sink
) -> None:
    state = Path(table().state().url) / f"{table().pointer():020d}.json"
    document = json.loads(state.read_text())
    del document["table"]
    state.write_text(json.dumps(document))
    assert differs(landing, table) == []
    delete(table(), "sequence_number = 7")
    assert differs(landing, table)


class Killed(BaseException):
    """Like SIGKILL at this line."""


@pytest.mark.parametrize("go", [repair, accept_rows])
@pytest.mark.parametrize("point", ["before the state", "before the commit", "after the commit"])
def test_a_repair_that_is_killed_anywhere_is_done_or_not_begun(
    landing: StorageLocation, table: Sink, point: str, go: Callable[..., Repaired]
) -> None:
    delete(table(), "sequence_number < 10")
    mine = table()

    class States(LocalStore):
        def put(self, key: str, data: bytes) -> None:
            if point == "before the state":
                raise Killed
            super().put(key, data)

    class Location(StorageLocation):
        def open(self) -> LocalStore:
            return States(Path(self.url))

    def commit(*arguments: Any) -> None:
        if point == "after the commit":
            mine.commit(*arguments)
        raise Killed

    dying = Intercepted(mine, commit=commit, state=lambda: Location(mine.state().url))
    with pytest.raises(Killed):
        go(dying, dry_run=False)
    assert bool(differs(landing, table)) is (point != "after the commit")
    with suppress(IngestError):
        go(table(), dry_run=False)
    assert run(landing, table()).report.complete
    assert len(numbers(table())) == (110 if go is accept_rows else 120)


def test_a_run_that_commits_during_a_repair_wins(landing: StorageLocation, table: Sink) -> None:
    delete(table(), "sequence_number < 10")
    mine = table()

    def late(*arguments: Any) -> None:
        Gateway(landing).export(120, 129)
        assert run(landing, table()).rows == 10
        mine.commit(*arguments)

    with pytest.raises(CommitConflict):
        repair(Intercepted(mine, commit=late), dry_run=False)
    assert numbers(table()) == list(range(10, 130))
    assert lost(repair(table(), dry_run=False)) == [(0, 9)]
    assert run(landing, table()).rows == 10
    assert numbers(table()) == list(range(130))


def test_a_change_by_others_during_a_repair_or_a_round_is_noticed_by_the_next_run(
    landing: StorageLocation, table: Sink
) -> None:
    delete(table(), "sequence_number < 10")
    mine = table()

    def late(*arguments: Any) -> None:
        overwrite(table(), "sequence_number = 50", of_others([700]))
        mine.commit(*arguments)

    repair(Intercepted(mine, commit=late), dry_run=False)
    assert any("was changed by others" in problem for problem in differs(landing, table))
    repair(table(), dry_run=False)
    Gateway(landing).export(120, 129)
    mine = table()
    summary = run(landing, Intercepted(mine, commit=late))
    assert any("was changed by others" in problem for problem in summary.report.problems)


def test_a_table_with_rows_that_no_run_has_added_is_refused_until_a_repair_has_counted_them(
    landing: StorageLocation, sink: Sink
) -> None:
    """As after a copy of a table; a new table without rows is taken."""
    gateway = Gateway(landing)
    gateway.export(0, 9)
    sink().target()
    append(sink(), of_others(range(10)))
    for _ in range(2):
        with pytest.raises(IngestError, match=r"it has 10 rows, and no run .*`streambridge ingest repair`"):
            run(landing, sink())
    assert repair(sink(), dry_run=False).committed
    gateway.export(10, 19)
    assert run(landing, sink()).report.complete
    assert numbers(sink()) == list(range(20))


@pytest.mark.parametrize("partitions", [["gateway"], None], ids=["gateway", "none"])
def test_a_delta_table_with_other_partitions_is_refused_before_anything_is_written(
    landing: StorageLocation, delta: Sink, partitions: list[str] | None
) -> None:
    Gateway(landing).export(0, 9)
    run(landing, delta())
    partition(delta(), partitions)
    assert not run(landing, delta()).report.complete
    Gateway(landing).export(10, 19)
    before = delta().table().version()
    for attempt in (run, lambda landing, sink: repair(sink, dry_run=False)):
        with pytest.raises(
            IngestError, match=f"partitioned by {(partitions or ['nothing'])[0]}, not by ingest_date"
        ):
            attempt(landing, delta())
    assert (delta().table().version(), numbers(delta())) == (before, list(range(10)))
    delta().table().restore(before - 1)
    repair(delta(), dry_run=False)
    assert run(landing, delta()).report.complete
    assert numbers(delta()) == list(range(20))


def test_an_object_with_a_column_that_has_the_name_of_a_partition_is_quarantined(
    landing: StorageLocation, iceberg: Sink
) -> None:
    Gateway(landing).export(0, 9)
    run(landing, iceberg())
    with iceberg().table().update_spec() as update:
        update.add_field("gateway", BucketTransform(4), "Site")
    Gateway(landing).export(10, 19)
    bad = Gateway(landing, "gw-b").export(0, 9, site="x")
    refused = run(landing, iceberg()).report.refused
    reason = "column 'site' cannot be added to the table: one of its partitions has this name"
    assert [(one["key"], one["reason"]) for one in refused] == [(bad, reason)]
    assert numbers(iceberg()) == list(range(20))


def test_objects_are_not_pruned_while_the_table_differs(landing: StorageLocation, table: Sink) -> None:
    overwrite(table(), "sequence_number < 10", of_others(range(500, 510)))
    with pytest.raises(IngestError, match=r"was changed by others.*so nothing is deleted"):
        prune(landing, table(), 0, dry_run=False, trust_state=False)
    assert len(list(landing.open().list())) == 4


def test_accept_asks_for_streams_or_rows(landing: StorageLocation, table: Sink, tmp_path: Path) -> None:
    where = ("--warehouse", str(tmp_path / "warehouse"))
    for arguments in ((), ("gw-a/s0", "--rows")):
        done = command("accept", *arguments, *where)
        assert (done.returncode, "either streams, as GATEWAY/STREAM, or --rows" in done.stderr) == (2, True)
