"""A worker that dies of an object: that one is quarantined, the others are taken, no file is left behind."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bridge.ingest.columns import MESSAGES
from bridge.ingest.files import Target, labelled
from bridge.ingest.isolated import one_by_one
from bridge.ingest.job import run
from bridge.ingest.planner import Inventory, RoundLimits, plan
from bridge.ingest.store import StorageLocation
from bridge.ingest.worker import pack
from tests.ingest.gateway import Gateway
from tests.ingest.test_job import numbers

# Loaded by every Python that has its folder on its path: decoding an object whose topic is `deadly` ends the
# process by a segmentation fault, as a parser does that recurses without a bound.
DEADLY = """
import ctypes, importlib.abc, importlib.machinery, sys

class Deadly(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "bridge.ingest.decode":
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path)
        load = found.loader.exec_module
        def patched(module):
            load(module)
            check = module._check
            def fatal(columns, *more):
                if columns["topic"][0].as_py() == "deadly":
                    ctypes.string_at(0)
                check(columns, *more)
            module._check = fatal
        found.loader.exec_module = patched
        return found

sys.meta_path.insert(0, Deadly())
"""


@pytest.fixture
def deadly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder for the path of a process that is to die of such objects."""
    folder = tmp_path / "deadly"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(DEADLY)
    monkeypatch.syspath_prepend(str(folder))  # the children get it with the path of this process
    return str(folder)


def export(place: StorageLocation, count: int, guilty: int) -> str:
    """Objects of ten messages; returns the key of the one that kills its reader."""
    gateway = Gateway(place)
    keys = [
        gateway.export(at * 10, at * 10 + 9, **({"topic": "deadly"} if at == guilty else {}))
        for at in range(count)
    ]
    return keys[guilty]


def test_an_object_that_ends_its_process_is_a_row_and_the_others_are_taken(
    landing: StorageLocation, tmp_path: Path, deadly: str
) -> None:
    guilty = export(landing, 4, 1)
    todo = plan(Inventory(landing.open().list()).pending(), {}, (), RoundLimits()).work
    target = labelled(
        Target(StorageLocation(str(tmp_path / "lake")), "data/d", MESSAGES.serialize().to_pybytes(), ())
    )
    rows = list(one_by_one(json.loads(zlib.decompress(pack(todo))), landing, target))
    outcomes = {body["key"]: body for kind, body in rows if kind == "object"}
    assert [outcomes[work.item.key]["status"] for work in todo] == ["taken", "bad", "taken", "taken"]
    assert outcomes[guilty]["reason"] == "the process that read it alone was ended by SIGSEGV"
    written = {body["path"] for kind, body in rows if kind == "file"}
    assert sum(body["rows"] for kind, body in rows if kind == "file") == 30
    there = {str(path.relative_to(tmp_path / "lake")) for path in (tmp_path / "lake").rglob("*.parquet")}
    assert there == written
    assert all(Path(path).name.startswith(target.label) for path in written)


def test_a_failure_that_is_not_about_the_object_is_raised(landing: StorageLocation, tmp_path: Path) -> None:
    export(landing, 1, 0)
    todo = plan(Inventory(landing.open().list()).pending(), {}, (), RoundLimits()).work
    (tmp_path / "lake").write_text("a file where the table's folder should be")
    target = Target(StorageLocation(str(tmp_path / "lake")), "data/d", MESSAGES.serialize().to_pybytes(), ())
    with pytest.raises(Exception, match="NotADirectoryError"):
        list(one_by_one(json.loads(zlib.decompress(pack(todo))), landing, target))


@pytest.fixture
def deadly_spark(deadly: str, spark: Any) -> Iterator[Any]:
    """The session; its Python workers and what these start die of such objects."""
    environment = spark.sparkContext.environment
    before = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = deadly
    yield spark
    if before is None:
        del environment["PYTHONPATH"]
    else:
        environment["PYTHONPATH"] = before


@pytest.mark.spark
def test_a_run_whose_worker_dies_of_an_object_takes_all_others_and_leaves_no_file(
    deadly_spark: Any, landing: StorageLocation, sink: Callable[[], Any]
) -> None:
    guilty = export(landing, 6, 2)
    summary = run(deadly_spark, landing, sink())
    assert numbers(sink()) == [*range(20), *range(30, 60)]
    assert [document["key"] for document in summary.report.refused] == [guilty]
    assert summary.report.refused[0]["reason"] == "the process that read it alone was ended by SIGSEGV"
    folder = Path(sink().target().location.url.removeprefix("file://"))
    files = {path for day in folder.rglob("ingest_*=*") for path in day.iterdir()}
    assert files == {folder / file.path for file in sink().files()}
    assert run(deadly_spark, landing, sink()).rounds == []
