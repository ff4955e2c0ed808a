"""The contract of a table, over every kind of table and catalog; no Spark."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from bridge.ingest.columns import IDENTITY
from bridge.ingest.decode import decode
from bridge.ingest.errors import BadOption, CommitConflict, StateMissing, Vanished
from bridge.ingest.files import DataFile, DayFiles, Target, labelled, sweep
from bridge.ingest.job import ingest, run
from bridge.ingest.sinks.base import discard
from bridge.ingest.state import StateStore, TableState, load_state
from bridge.ingest.store import StorageLocation
from bridge.ingest.table import TableOptions, open_sink
from bridge.ingest.worker import process, unpack
from bridge.objectkeys import parse_key
from tests.ingest.gateway import Gateway
from tests.ingest.rest_catalog import serving
from tests.simulation.bucket import Bucket
from tests.simulation.table import Table

Open = Callable[[], Any]
KINDS = [
    "iceberg",
    "iceberg in s3",
    "iceberg by rest",
    pytest.param("iceberg in glue", marks=pytest.mark.slow(seconds=15)),  # each new client takes a second
    "delta",
    "delta in s3",
    "in memory",  # of the simulation, which stands in for the others
]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture(params=KINDS)
def table(request: pytest.FixtureRequest, tmp_path: Path, stack: ExitStack) -> Open:
    """Open the same table anew, as another run would."""
    kind = request.param
    if kind == "in memory":
        return Table(Bucket(Random(0), time.time)).sink
    if kind.startswith("delta"):
        request.getfixturevalue("delta")
    place: StorageLocation = request.getfixturevalue("bucket") if " in " in kind else StorageLocation("")
    rest = {"type": "rest"}
    if kind.endswith("rest"):
        rest["uri"] = stack.enter_context(serving(tmp_path))
    sql = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db"}
    glue = {"type": "glue", "glue.endpoint": place.endpoint or "", "glue.region": "us-east-1"}
    # Glue knows one namespace of a name; its tests must not meet
    name = f"lake_{tmp_path.name[-8:].lower().strip('_')}.messages"
    options = {
        "iceberg": TableOptions(warehouse=str(tmp_path)),
        "iceberg in s3": TableOptions(warehouse=place.url, catalog=sql, endpoint=place.endpoint),
        "iceberg by rest": TableOptions(catalog=rest, state=str(tmp_path / "state")),
        "iceberg in glue": TableOptions(name, place.url, glue, endpoint=place.endpoint),
        "delta": TableOptions(delta=str(tmp_path / "messages")),
        "delta in s3": TableOptions(delta=f"{place.url}/messages", endpoint=place.endpoint),
    }[kind]
    return lambda: open_sink(options)


def written(
    sink: Any, landing: StorageLocation, first: int, last: int, target: Target | None = None, **extra: Any
) -> list[DataFile]:
    """Data files with these rows, as a task would have written them."""
    gateway = Gateway(landing)
    key = gateway.export(first, last, **extra)
    name = parse_key(key)
    assert name is not None
    target = target or sink.target()
    schema = target.arrow()
    rows = decode(gateway.store.get(key), name, {extra: schema.field(extra).type for extra in target.extras})
    with DayFiles(target) as files:
        files.add(rows.append_column("object_key", pa.repeat(pa.scalar(key), rows.num_rows)))
    return files.written


def numbers(sink: Any) -> list[int]:
    return sorted(sink.read(["sequence_number"])["sequence_number"].to_pylist())


def test_a_table_that_is_not_there_is_empty_and_points_nowhere(table: Open) -> None:
    assert (table().pointer(), table().files(), table().rows(), table().read().num_rows) == (None, [], 0, 0)


def test_files_and_pointer_become_visible_together(table: Open, landing: StorageLocation) -> None:
    files = written(table(), landing, 0, 9)
    assert table().pointer() is None
    assert numbers(table()) == []
    table().commit(None, 7, files)
    assert table().pointer() == 7
    assert numbers(table()) == list(range(10))
    assert table().rows() == 10
    table().commit(7, 8, [])  # a round that only quarantined
    table().commit(8, 9, written(table(), landing, 10, 19))
    assert (table().pointer(), numbers(table())) == (9, list(range(20)))
    assert [file.rows for file in table().files()] == [10, 10]
    assert table().read(limit=3).num_rows == 3


def test_a_version_says_how_many_rows_it_has_and_its_files_say_which(
    table: Open, landing: StorageLocation
) -> None:
    empty = table().standing(None, 0)
    assert (empty.pointer, empty.rows, table().content().files) == (None, 0, [])
    table().commit(None, 7, written(table(), landing, 0, 9))
    first = table().standing(empty.at, 0)
    table().commit(7, 8, written(table(), landing, 10, 14))
    now = table().standing(first.at, 15)
    assert (first[0], first[2:], now[0], now[2:]) == (7, (10, []), 8, (15, []))  # those commits are of runs
    content = table().content()
    assert (content.pointer, content.at) == (8, now.at)
    assert now.at != first.at
    assert sorted(file.rows for file in content.files) == [5, 10]
    for file in content.files:
        rows = pa.concat_tables(content.read([file.path]))
        assert (rows.num_rows, set(rows.column_names) >= set(IDENTITY.names)) == (file.rows, True)
        for name, bounds in (file.bounds or {}).items():
            values = rows[name].cast(pa.int64()) if name == "ingest_time" else rows[name]
            assert bounds == tuple(pc.min_max(values).as_py().values())


def test_a_commit_on_top_of_another_runs_is_refused_and_adds_nothing(
    table: Open, landing: StorageLocation
) -> None:
    files = written(table(), landing, 0, 9)
    table().commit(None, 7, files)
    for previous in (None, 6):
        with pytest.raises(CommitConflict):
            table().commit(previous, 8, written(table(), landing, 0, 9))
    assert (table().pointer(), numbers(table())) == (7, list(range(10)))


def test_of_two_commits_at_the_same_moment_one_is_refused(table: Open, landing: StorageLocation) -> None:
    table().commit(None, 7, written(table(), landing, 0, 9))
    mine, files = table(), written(table(), landing, 10, 19)
    # After it has looked at the pointer; the table in memory looks when it commits.
    step = next(name for name in ("_check", "_ready", "at") if hasattr(mine, name))
    looked = getattr(mine, step)

    def and_another(found: Any) -> Any:
        if table().pointer() == 7:
            table().commit(7, 8, written(table(), landing, 10, 19))
        return looked(found)

    setattr(mine, step, and_another)
    with pytest.raises(CommitConflict):
        mine.commit(7, 9, files)
    assert (table().pointer(), numbers(table())) == (8, list(range(20)))


def test_a_commit_whose_answer_was_lost_is_not_made_twice(table: Open, landing: StorageLocation) -> None:
    files = written(table(), landing, 0, 9)
    table().commit(None, 7, files)
    table().commit(None, 7, files)  # the same again
    assert numbers(table()) == list(range(10))


def test_files_are_taken_out_with_the_pointer_and_only_of_the_version_that_was_looked_at(
    table: Open, landing: StorageLocation
) -> None:
    first, second = written(table(), landing, 0, 9), written(table(), landing, 10, 19)
    table().commit(None, 7, first)
    table().commit(7, 8, second)
    parts = table().parts()
    known = list(parts.files)
    data = [part.path for part in known if part.kind == "data file"]
    assert (parts.at, parts.total, len(data)) == (table().standing(None, 20).at, 2, 2)
    assert [part.order() for part in known] == sorted(part.order() for part in known)
    rest = list(table().parts(known[0].order()).files)
    assert rest == known[1:]
    gone = [path for path in data if path.endswith(first[0].path)]
    table().take_out(8, 9, gone, parts.at)
    table().take_out(8, 9, gone, parts.at)  # only the answer of the first was lost
    assert (table().pointer(), table().rows(), numbers(table())) == (9, 10, list(range(10, 20)))
    with pytest.raises(CommitConflict):
        table().take_out(9, 10, data, parts.at)
    assert (table().pointer(), numbers(table())) == (9, list(range(10, 20)))


def test_refused_files_are_deleted_and_those_of_the_table_are_kept(
    table: Open, landing: StorageLocation
) -> None:
    kept, refused = written(table(), landing, 0, 9), written(table(), landing, 10, 19)
    table().commit(None, 7, kept)
    discard(table(), [*kept, *refused])  # of the first, only the answer was lost
    assert numbers(table()) == list(range(10))
    store = table().target().location.open()
    with pytest.raises(Vanished):
        store.get(refused[0].path)


def test_what_a_killed_task_has_written_is_swept_and_nothing_else(
    table: Open, landing: StorageLocation
) -> None:
    table().commit(None, 7, written(table(), landing, 0, 9))
    mine = labelled(table().target())
    dead, alive = (written(table(), landing, 10, 19, mine) for _ in range(2))
    sweep(mine, keep=alive)
    table().commit(7, 8, alive)
    assert numbers(table()) == list(range(20))
    with pytest.raises(Vanished):
        mine.location.open().get(dead[0].path)


class Here:
    """The tasks of a run in this process; `meanwhile` is called once, between plan and work."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self._meanwhile = [meanwhile]

    def slots(self) -> int:
        return 1

    def work(self, what: str, parts: Any, source: StorageLocation, target: Target) -> dict[str, list[Any]]:
        while self._meanwhile:
            self._meanwhile.pop()()
        bodies: dict[str, list[Any]] = defaultdict(list)
        for part in parts:
            for kind, body in process(unpack(part), source, target):
                bodies[kind].append(json.loads(json.dumps(body)))
        return bodies


def test_two_runs_at_once_add_every_row_once_and_the_later_one_finds_its_state(
    table: Open, landing: StorageLocation
) -> None:
    gateway = Gateway(landing)
    gateway.export(0, 9)

    def other_run() -> None:
        gateway.export(10, 19)
        assert ingest(lambda: Here(int), landing, table()).rows == 20

    tasks = Here(other_run)
    summary = ingest(lambda: tasks, landing, table())
    assert (summary.rows, numbers(table())) == (0, list(range(20)))
    assert load_state(table()).rows() == 20


def test_a_commit_that_was_made_and_then_refused_keeps_its_files_for_readers_of_older_versions(
    table: Open, landing: StorageLocation
) -> None:
    """The answer is lost; another run commits, and files are merged, before the commit is sent again."""
    Gateway(landing).export(0, 9)
    mine, first = table(), []
    made = mine.commit

    def unlucky(previous: int | None, version: int, files: list[DataFile]) -> None:
        made(previous, version, files)
        mine.commit = made
        first.extend(files)
        Gateway(landing).export(10, 19)
        assert ingest(lambda: Here(int), landing, table()).rows == 10
        if hasattr(mine, "replace"):
            table().replace(table().files(), written(table(), landing, 0, 19))
        else:
            table().compact(None)
        raise CommitConflict("another run committed first")

    mine.commit = unlucky
    assert ingest(lambda: Here(int), landing, mine).rows == 0
    assert numbers(table()) == list(range(20))
    assert not {file.path for file in first} & {file.path for file in table().files()}
    for file in first:
        assert mine.target().location.open().get(file.path)


def test_columns_are_added_once_and_older_rows_have_none(table: Open, landing: StorageLocation) -> None:
    table().commit(None, 7, written(table(), landing, 0, 9))
    for _ in range(2):
        table().add_columns({"qos": pa.int64(), "note": pa.string()})
    assert table().target().extras == ("qos", "note")
    table().commit(7, 8, written(table(), landing, 10, 19, qos=1))
    rows = table().read(["sequence_number", "qos"]).sort_by("sequence_number")
    assert rows["qos"].to_pylist() == [None] * 10 + [1] * 10


def test_state_documents_are_found_by_whoever_opens_the_table(table: Open) -> None:
    table().target()
    version = StateStore(table().state()).save(TableState(notes={"note": "mine"}), None)
    table().commit(None, version, [])
    assert StateStore(table().state()).load(table().pointer()).notes == {"note": "mine"}


def committed(sink: Any, note: str, age: int = 0) -> int:
    """Commit a round without files, as a run does that many days ago."""
    sink.target()
    states = StateStore(sink.state(), days_ago(age))
    known = states.load(sink.pointer())
    version = states.save(TableState(notes={"note": note}), known.version)
    sink.commit(known.version, version, [])
    states.prune(version)
    return version


def days_ago(days: int) -> Callable[[], int]:
    """A clock that is so many days slow."""
    return lambda: time.time_ns() - days * 24 * 3600 * 10**9


def test_two_runs_whose_clocks_are_behind_never_take_each_others_commit_for_their_own(
    table: Open, landing: StorageLocation
) -> None:
    before = committed(table(), "by a host whose clock is right")
    one, other = (
        StateStore(table().state(), days_ago(1)).save(TableState(notes={"note": note}), before)
        for note in ("one", "other")
    )
    table().commit(before, one, written(table(), landing, 0, 9))
    with pytest.raises(CommitConflict):
        table().commit(before, other, written(table(), landing, 10, 19))
    assert (numbers(table()), load_state(table()).notes) == (list(range(10)), {"note": "one"})


def test_a_table_can_be_rolled_back_by_a_week_though_its_state_then_was_older(
    table: Open,
) -> None:
    older = committed(table(), "not needed any more", age=10)
    then = committed(table(), "what the table had for the last week", age=9)
    StateStore(table().state(), days_ago(8)).save(
        TableState(), then
    )  # of a run that was killed before its commit
    now = committed(table(), "now")
    states = StateStore(table().state())
    assert states.load(then).notes == {"note": "what the table had for the last week"}
    assert states.load(now).notes == {"note": "now"}
    assert len(list(states.location.open().list())) == 2
    with pytest.raises(StateMissing):
        states.load(older)


@pytest.mark.parametrize("kind", ["iceberg", "delta"])
def test_tables_with_one_place_for_their_state_leave_each_others_alone(tmp_path: Path, kind: str) -> None:
    def opened(name: str) -> Any:
        if kind == "delta":
            return open_sink(
                TableOptions(delta=str(tmp_path / name / "messages"), state=str(tmp_path / "state"))
            )
        return open_sink(TableOptions(f"lake.{name}", str(tmp_path), state=str(tmp_path / "state")))

    committed(opened("one"), "one", age=8)
    committed(opened("one"), "one again", age=8)
    committed(opened("other"), "other")
    committed(opened("other"), "other again")
    found = [StateStore(sink.state()).load(sink.pointer()) for sink in map(opened, ("one", "other"))]
    assert [known.notes["note"] for known in found] == ["one again", "other again"]


@pytest.mark.parametrize("kind", ["iceberg of two catalogs", "delta", "delta of two hosts"])
def test_tables_whose_names_are_alike_never_lose_their_state_to_each_other(tmp_path: Path, kind: str) -> None:
    options = {
        "iceberg of two catalogs": [TableOptions(warehouse=str(tmp_path / name)) for name in ("a", "b")],
        "delta": [TableOptions(delta=str(tmp_path / name)) for name in ("site_a/m", "site/a_m")],
        "delta of two hosts": [TableOptions(delta=str(tmp_path / "m"))] * 2,
    }[kind]
    one, other = (open_sink(replace(each, state=str(tmp_path / "state"))) for each in options)
    committed(one, "one", age=8)
    if kind == "delta of two hosts":
        (tmp_path / "m").rename(tmp_path / "of one host")
    committed(other, "other", age=8)
    committed(other, "other again")
    committed(other, "and again")
    if kind == "delta of two hosts":
        (tmp_path / "m").rename(tmp_path / "of the other host")
        (tmp_path / "of one host").rename(tmp_path / "m")
    assert StateStore(one.state()).load(one.pointer()).notes == {"note": "one"}


def test_a_table_that_is_not_made_yet_deletes_no_state_of_its_namesake(
    tmp_path: Path, landing: StorageLocation
) -> None:
    Gateway(landing).report()
    options = TableOptions(warehouse=str(tmp_path / "old"), state=str(tmp_path / "state"))
    open_sink(options).target()
    at = StorageLocation(str(tmp_path / "state" / "lake.messages"))  # where earlier versions had it
    version = StateStore(at, days_ago(8)).save(TableState(notes={"note": "old"}), None)
    open_sink(options).commit(None, version, [])
    run(pytest.fail, landing, open_sink(replace(options, warehouse=str(tmp_path / "new"))))
    assert load_state(open_sink(options)).notes == {"note": "old"}


@pytest.mark.parametrize("folder", ["", "of its name"])
@pytest.mark.parametrize("kind", ["iceberg", "delta"])
def test_a_state_that_an_earlier_version_wrote_is_found(tmp_path: Path, kind: str, folder: str) -> None:
    where = {"delta": str(tmp_path / "messages")} if kind == "delta" else {"warehouse": str(tmp_path)}
    name = f"{tmp_path}/messages".strip("/").replace("/", "_") if kind == "delta" else "lake.messages"

    def opened() -> Any:
        return open_sink(TableOptions(**where, state=str(tmp_path / "state")))

    opened().target()
    older = tmp_path / "state" / (name if folder else "")
    before = StateStore(StorageLocation(str(older))).save(TableState(notes={"note": "before"}), None)
    opened().commit(None, before, [])
    assert StateStore(opened().state()).load(opened().pointer()).notes == {"note": "before"}
    committed(opened(), "after")
    assert StateStore(opened().state()).load(opened().pointer()).notes == {"note": "after"}
    assert StateStore(opened().state()).load(before).notes == {"note": "before"}  # it may be rolled back
    if kind == "iceberg":
        sql = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db"}
        known = open_sink(TableOptions(catalog=sql))  # the table says where its state is
        assert StateStore(known.state()).load(known.pointer()).notes == {"note": "after"}


def test_the_state_of_a_table_in_a_catalog_is_found_without_naming_the_warehouse(tmp_path: Path) -> None:
    sql = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db"}
    open_sink(TableOptions(warehouse=str(tmp_path), catalog=sql)).target()
    known = open_sink(TableOptions(catalog=sql)).state()
    assert known.url.rpartition("/")[0] == f"{tmp_path}/_streambridge/lake.messages"
    with pytest.raises(BadOption, match="the location of its state is unknown"):
        open_sink(TableOptions("lake.other", catalog=sql)).state()


@pytest.mark.parametrize("kind", ["warehouse", "delta"])
@pytest.mark.parametrize("name", ["my lake", "Zähler", "day=1+2"])
def test_a_table_in_a_directory_with_any_usual_name_can_be_read(
    tmp_path: Path, landing: StorageLocation, kind: str, name: str
) -> None:
    options = TableOptions(**{kind: str(tmp_path / name)})  # type: ignore[arg-type]
    open_sink(options).commit(None, 7, written(open_sink(options), landing, 0, 9))
    assert numbers(open_sink(options)) == list(range(10))
    assert {path.name for path in tmp_path.iterdir()} == {"landing", name}
    assert [file.rows for file in open_sink(options).files()] == [10]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("warehouse", "50%"), ("warehouse", "a#b"), ("warehouse", "a?b"), ("delta", "my%20lake")],
)
def test_a_directory_whose_name_libraries_take_for_something_else_is_refused(
    tmp_path: Path, kind: str, name: str
) -> None:
    message = f"--{kind} {tmp_path / name}: the path of a local table must not contain '"
    with pytest.raises(BadOption, match=re.escape(message)):
        open_sink(TableOptions(**{kind: str(tmp_path / name)}))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
