"""An Iceberg table stays as small as it is needed, however many rounds are committed; no Spark."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.exceptions import CommitFailedException

from bridge.ingest.files import DataFile
from bridge.ingest.sinks.history import LEAST, obsolete
from bridge.ingest.sinks.iceberg import IcebergSink, open_catalog
from bridge.ingest.store import LocalStore, StorageLocation
from tests.ingest.test_sinks import numbers, written

NONE = timedelta(0)


class Killed(BaseException):
    """The process ends here."""


class DyingSink(IcebergSink):
    """A table in a process that is killed when it has deleted a metadata file."""

    def place(self, table: Any) -> Any:
        return DyingPlace(super().place(table).url)


class DyingPlace(StorageLocation):
    def open(self) -> Any:
        return DyingStore(Path(self.url))


class DyingStore(LocalStore):
    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            super().delete([key])
            if key.endswith(".avro"):
                raise Killed


def opened(
    tmp_path: Path, keep: timedelta | None = NONE, kind: type[IcebergSink] = IcebergSink, **options: str
) -> Any:
    """Open the table; its runs keep what was current within that time. None: as in production."""
    catalog = open_catalog(str(tmp_path / "lake"), options, None)
    kept = {} if keep is None else {"keep": keep}
    return kind(catalog, "lake.messages", str(tmp_path / "state"), **kept)


def rounds(sink: Any, count: int) -> None:
    """Commit that many rounds of one small file, which has no rows."""
    folder, store = f"{sink.target().folder}=2026-11-20", sink.target().location.open()
    for _ in range(count):
        version = sink.pointer() or 0
        name = f"{folder}/{version}.parquet"
        bounds = {"sequence_number": (version, version)}
        store.put(name, bytes(1000))
        sink.commit(version or None, version + 1, [DataFile(name, "2026-11-20", 1000, 1, bounds)])


def metadata_files(sink: Any, ends: str = "") -> set[str]:
    folder = Path(sink.table().location().removeprefix("file://")) / "metadata"
    return {path.name for path in folder.iterdir() if path.name.endswith(ends)}


def needed(sink: Any) -> set[str]:
    """The manifest lists of the table's snapshots, and their manifests."""
    table = sink.table()
    paths = {snapshot.manifest_list for snapshot in table.snapshots()}
    for snapshot in table.snapshots():
        paths |= {manifest.manifest_path for manifest in snapshot.manifests(table.io)}
    return {path.rpartition("/")[2] for path in paths}


def test_many_rounds_leave_only_the_files_that_the_kept_snapshots_need(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    rounds(sink, 2 * LEAST + 5)
    assert len(sink.table().snapshots()) < LEAST + 5
    assert metadata_files(sink, ".avro") == needed(sink)
    assert len(sink.table().current_snapshot().manifests(sink.table().io)) <= LEAST + 1
    assert len(sink.files()) == sink.rows() == sink.pointer() == 2 * LEAST + 5


def test_what_a_reader_of_the_last_hour_uses_stays(tmp_path: Path) -> None:
    sink = opened(tmp_path, keep=None)
    rounds(sink, 1)
    reader = sink.table()
    rounds(sink, LEAST + 9)
    assert len(sink.table().snapshots()) == LEAST + 10
    assert reader.metadata_location.rpartition("/")[2] in metadata_files(sink)
    assert len(list(reader.scan().plan_files())) == 1


def test_a_version_stays_for_that_time_after_it_was_replaced_however_old_it_is(tmp_path: Path) -> None:
    sink = opened(tmp_path, keep=None)
    rounds(sink, LEAST + 4)
    table = sink.table()
    line = [entry.snapshot_id for entry in table.history()]
    replaced = table.history()[LEAST + 2].timestamp_ms  # the version before it
    gone = obsolete(table, sink.pointer(), NONE, replaced + 1)
    assert [snapshot.snapshot_id for snapshot in gone] == line[1 : LEAST + 2]
    gone = obsolete(table, sink.pointer(), NONE, replaced)
    assert [snapshot.snapshot_id for snapshot in gone] == line[1 : LEAST + 1]


def test_branches_tags_and_what_others_have_staged_stay(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    rounds(sink, 3)
    table = sink.table()
    line = [entry.snapshot_id for entry in table.history()]
    table.manage_snapshots().create_tag(line[1], "audit").create_branch(line[2], "trial").commit()
    with table.transaction() as change, change.update_snapshot(branch=None).fast_append():
        pass
    (staged,) = {snapshot.snapshot_id for snapshot in sink.table().snapshots()} - set(line)
    rounds(sink, LEAST + 9)
    table = sink.table()
    kept = {snapshot.snapshot_id for snapshot in table.snapshots()}
    assert {line[1], line[2], staged} <= kept
    assert set(table.refs()) == {"main", "audit", "trial"}
    assert [len(list(table.scan(snapshot_id=one).plan_files())) for one in line[1:]] == [2, 3]


def test_a_table_can_be_set_back_to_the_first_version_of_a_day_of_the_last_week(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    rounds(sink, 1)
    first = sink.table().current_snapshot().snapshot_id
    rounds(sink, LEAST + 5)
    sink.table().manage_snapshots().set_current_snapshot(first).commit()
    assert (sink.pointer(), sink.rows()) == (1, 1)
    assert sink.standing(str(first), 1).changes == []
    rounds(sink, 1)
    assert (sink.pointer(), len(sink.files())) == (2, 2)


def test_what_a_run_that_was_killed_has_not_deleted_the_next_one_deletes(tmp_path: Path) -> None:
    sink = opened(tmp_path, kind=DyingSink)
    with pytest.raises(Killed):
        rounds(sink, 2 * LEAST)
    sink = opened(tmp_path)
    reached = sink.pointer()
    assert len(sink.files()) == sink.rows() == reached < 2 * LEAST
    assert len(metadata_files(sink, ".avro") - needed(sink)) > LEAST
    orphan = Path(sink.table().metadata_location.removeprefix("file://")).with_name("of-no-commit.avro")
    orphan.write_bytes(b"of a commit that was never made")
    rounds(sink, 2 * LEAST - reached + 10)
    assert metadata_files(sink, ".avro") - needed(sink) == {orphan.name}
    assert (sink.expire(1).count, sink.orphans(1).count) == (0, 0)
    assert orphan.exists()
    sink.expire(0)
    assert orphan.exists()
    sink.orphans(0)
    assert metadata_files(sink, ".avro") == needed(sink)
    log = len(sink.table().metadata.metadata_log)
    assert len(metadata_files(sink, ".metadata.json")) == log + 1


def test_commits_of_others_since_the_last_round_are_never_dropped(
    tmp_path: Path, landing: StorageLocation
) -> None:
    sink = opened(tmp_path)
    rounds(sink, LEAST + 1)
    before = sink.standing(None, 0).at
    other = sink.table()
    for _ in range(2):
        with other.transaction() as change, change.update_snapshot().overwrite() as update:
            update.delete_data_file(next(iter(other.scan().plan_files())).file)
    sink.commit(sink.pointer(), sink.pointer() + 1, written(sink, landing, 0, 9))
    assert len(sink.standing(before, 0).changes) == 2


@pytest.mark.parametrize("shared", [False, True], ids=["", "with files of other tables"])
def test_data_files_that_were_replaced_go_with_the_last_snapshot_that_has_them(
    tmp_path: Path, shared: bool
) -> None:
    sink = opened(tmp_path)
    sink.target()
    with sink.table().transaction() as change:
        change.set_properties({"gc.enabled": str(not shared).lower()})
    rounds(sink, 4)
    place = StorageLocation(sink.table().location()).open()
    names = [file.path for file in sink.files()]
    tagged = sink.table().history()[1].snapshot_id  # with two files
    sink.table().manage_snapshots().create_tag(tagged, "audit").commit()
    day = "2026-11-20"
    whole = DataFile(names[0].replace("/0.", "/whole."), day, 4000, 4, {"sequence_number": (0, 3)})
    place.put(whole.path, bytes(4000))
    sink.replace(sink.files(), [whole])
    kept = {*names, whole.path}
    assert {entry.key for entry in place.under("data/")} == kept
    rounds(sink, LEAST + 3)
    left = kept & {entry.key for entry in place.under("data/")}
    assert left == (kept if shared else kept - set(names[2:]))


def test_metadata_files_are_kept_where_somebody_has_turned_their_deletion_off(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    sink.target()
    off = {"write.metadata.delete-after-commit.enabled": "false", "write.metadata.previous-versions-max": "2"}
    with sink.table().transaction() as change:
        change.set_properties(off)
    rounds(sink, 5)
    assert off.items() <= sink.table().properties.items()
    assert len(metadata_files(sink, ".metadata.json")) == 7


def size(sink: Any) -> int:
    """The bytes of the table's metadata."""
    folder = Path(sink.table().location().removeprefix("file://")) / "metadata"
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_five_thousandth_round_costs_what_the_first_hundred_did(tmp_path: Path) -> None:
    sink, sizes = opened(tmp_path / "old"), []
    for _ in range(50):
        rounds(sink, 100)
        sizes.append(size(sink))
    assert max(sizes) <= 2 * max(sizes[:10])
    # in turn with those of a new table, because other programs slow this one down; both keep all of these
    seconds = dict.fromkeys(("old", "new"), 0.0)
    for _ in range(20):
        for name in seconds:
            sink = opened(tmp_path / name, keep=None)
            sink.target()
            began = time.process_time()
            rounds(sink, 5)
            seconds[name] += time.process_time() - began
    assert seconds["old"] <= 1.5 * seconds["new"], seconds


@pytest.mark.parametrize("another", [False, True])
def test_a_commit_that_was_made_and_then_refused_when_it_was_sent_again_keeps_its_manifests(
    tmp_path: Path, landing: StorageLocation, *, another: bool
) -> None:
    """As by the clients of AWS, which send a request again if its answer is lost: Glue refuses the second."""
    mine, other = opened(tmp_path), opened(tmp_path)
    commit, refused = mine.catalog.commit_table, 0

    def unlucky(*request: Any) -> None:
        nonlocal refused
        commit(*request)
        refused += 1
        if another:
            version = other.pointer()
            other.commit(version, version + 100, written(other, landing, version * 10, version * 10 + 9))
        raise CommitFailedException("the table has another version")

    mine.catalog.commit_table = unlucky
    mine.commit(None, 1, written(mine, landing, 0, 9))
    there = [*range(10), *range(10, 20)] if another else [*range(10)]
    assert (refused, mine.pointer(), numbers(mine)) == (1, 101 if another else 1, there)
    old = mine.files()
    mine.replace(old[:1], written(mine, landing, 0, 9))
    more = range(101 * 10, 101 * 10 + 10) if another else ()
    assert (refused, numbers(mine)) == (2, sorted([*there, *more]))
