"""Foreign objects and documents stop no run, and are never taken for those of a gateway."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from rich.console import Console

from bridge.ingest.errors import BadObject, StateMissing
from bridge.ingest.gateway_reports import MAX_REPORT, read_gateway_reports
from bridge.ingest.planner import Inventory, RoundLimits, StreamId, plan
from bridge.ingest.render import show
from bridge.ingest.report import survey
from bridge.ingest.state import StateStore, TableState
from bridge.ingest.store import Entry, LocalStore, StorageLocation, read
from bridge.objectkeys import data_key, parse_key, report_key
from bridge.printable import printable
from bridge.ranges import Ranges
from tests.ingest.gateway import EPOCH, Gateway, reported


def test_below_its_own_folder_no_gateway_writes_for_another_one() -> None:
    key = data_key("gw-a", "s0", EPOCH, 0, 9, EPOCH, "parquet")
    assert parse_key(key) is not None
    assert parse_key(f"site/one/{key}") is not None
    assert parse_key(f"gateway=evil/{key}") is None
    assert parse_key(f"site/gateway=evil/x/{key}") is None
    assert parse_key(f"_gateway/{key}") is None
    assert Inventory([Entry(f"gateway=evil/{key}", 1, "e", 0)]).foreign == [f"gateway=evil/{key}"]


@pytest.mark.parametrize(
    "stream",
    [
        {"stream": "\ud800", "epoch": EPOCH, "newest": 1},  # no text: it could be written nowhere
        {"stream": "s0", "epoch": 10**400, "newest": 1},
        {"stream": "s0", "epoch": -1, "newest": 1},
    ],
)
def test_a_gateway_report_counts_as_a_whole_or_not_at_all(
    landing: StorageLocation, stream: dict[str, Any]
) -> None:
    Gateway(landing).report(reported(9), stream)
    Gateway(landing, "gw-b").report(reported(9))
    found = read_gateway_reports(landing.open())
    assert list(found.streams) == [StreamId("gw-b", "s0", EPOCH)]
    assert list(found.times) == ["gw-b"]
    assert [problem.split(":")[0] for problem in found.problems] == ["_gateway/gw-a.json"]


def test_a_gateway_report_of_many_bytes_is_a_problem_and_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / report_key("gw-a")
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(MAX_REPORT + 1)  # sparse
    (problem,) = read_gateway_reports(LocalStore(tmp_path)).problems
    assert "bytes are more than the" in problem


def test_a_gateway_report_of_very_many_streams_is_a_problem(tmp_path: Path) -> None:
    gateway = Gateway(StorageLocation(str(tmp_path)))
    for count in (50_000, 50_001):
        gateway.report(*[{"stream": str(number), "epoch": EPOCH, "newest": 0} for number in range(count)])
        found = read_gateway_reports(LocalStore(tmp_path))
        assert (len(found.streams), len(found.problems)) in ((50_000, 0), (0, 1))
    (problem,) = found.problems
    assert "it has 50001 streams" in problem


def test_an_object_that_grew_since_it_was_listed_is_refused_before_it_is_in_memory(tmp_path: Path) -> None:
    with (tmp_path / "object").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(BadObject, match="more than the 1000 bytes"):
        read(LocalStore(tmp_path), "object", 10, 1000)


class Archived(LocalStore):
    """S3 with a gateway report that a lifecycle rule archived."""

    def get(self, key: str, most: int | None = None) -> bytes:
        raise ClientError({"Error": {"Code": "InvalidObjectState", "Message": "archived"}}, "GetObject")


def test_a_gateway_report_that_s3_does_not_return_is_a_problem_and_ends_no_run(
    landing: StorageLocation,
) -> None:
    Gateway(landing).report(reported(9))
    assert read_gateway_reports(Archived(Path(landing.url))).problems == [
        "_gateway/gw-a.json: InvalidObjectState: archived"
    ]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b"{}",
        b'{"format":1}',
        b'{"format":1,"streams":[{}],"notes":{},"quarantine":[]}',
    ],
)
def test_a_damaged_state_document_is_named_with_the_remedy(tmp_path: Path, content: bytes) -> None:
    states = StateStore(StorageLocation(str(tmp_path)))
    version = states.save(TableState(), None)
    (tmp_path / f"{version:020d}.json").write_bytes(content)
    with pytest.raises(StateMissing):
        states.load(version)


def test_foreign_documents_beside_the_state_end_no_run_and_cost_no_state(tmp_path: Path) -> None:
    states = StateStore(StorageLocation(str(tmp_path)))
    old = (tmp_path / "00000000000000000007.json", tmp_path / "0000000000000000000x.json")
    version = states.save(TableState(), None)
    for path in (*old, tmp_path / "99999999999999999999.json"):
        path.write_text("no document")
    first_since = version - (1 << 20)  # the oldest one that is not older than a week
    (tmp_path / f"{first_since:020d}.json").write_text("[]")
    states.prune(version)
    assert states.load(version).version == version


def items(*ranges: tuple[int, int]) -> Inventory:
    names = [data_key("gw-a", "s0", EPOCH, first, last, EPOCH, "parquet") for first, last in ranges]
    return Inventory(Entry(name, 10, "e", 0) for name in names)


def test_a_name_that_promises_what_no_object_can_hold_keeps_no_other_object_waiting() -> None:
    inventory = items(*((0, 2**63 - 1 - n) for n in range(100)), (0, 9), (10, 19))
    todo = plan(inventory.pending(), {}, (), RoundLimits())
    assert len(todo.work) == 102
    assert [work.fresh for work in todo.work if work.item.last < 20] == [[(0, 9)], [(10, 19)]]


def test_many_bad_objects_of_the_same_numbers_take_few_rounds() -> None:
    """Each is planned where those before it leave numbers, so bad ones would come one in a round."""
    inventory = items(*((0, 1000 - n) for n in range(500)))
    pending, refused, rounds = inventory.pending(), set(), 0
    doubtful: set[StreamId] = set()
    covered: dict[StreamId, Ranges] = {}
    while (todo := plan(pending, covered, refused, RoundLimits(), doubtful)).work:
        rounds += 1
        for work in todo.work:
            if work.item.last > 501:  # the last one is good
                refused.add((work.item.key, work.item.etag))
                doubtful.add(work.stream)
            else:
                covered.setdefault(work.stream, Ranges()).update(work.fresh)
    assert rounds <= 3
    assert covered == {StreamId("gw-a", "s0", EPOCH): Ranges([(0, 501)])}


def test_names_of_strangers_reach_no_terminal_raw(
    landing: StorageLocation, iceberg: Callable[[], Any]
) -> None:
    evil = "gw\x1b[2J\u202e\x9b"
    Gateway(landing, evil).export(0, 9, stream="s\r0")
    landing.open().put("note\x1b[31m", b"")
    _, report = survey(landing, iceberg())
    out = StringIO()
    show(report, Console(file=out, width=160))
    assert all(line.isprintable() for line in out.getvalue().split("\n"))
    assert r"\x1b[2J" in out.getvalue()
    assert printable("plain text, also \u00e4") == "plain text, also \u00e4"
