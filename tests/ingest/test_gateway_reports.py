"""The reports of many gateways."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier

from bridge.ingest.gateway_reports import read_gateway_reports
from bridge.ingest.store import LocalStore, StorageLocation
from tests.ingest.gateway import Gateway, reported


class Distant(LocalStore):
    """A store that answers when so many requests are under way at the same time."""

    def __init__(self, root: Path, together: int) -> None:
        super().__init__(root)
        self.barrier = Barrier(together)

    def get(self, key: str, most: int | None = None) -> bytes:
        self.barrier.wait(60)
        return super().get(key)


def test_gateway_reports_are_read_in_parallel_since_each_costs_a_round_trip(tmp_path: Path) -> None:
    for number in range(24):
        Gateway(StorageLocation(str(tmp_path)), f"gw-{number}").report(reported(number))
    reports = read_gateway_reports(Distant(tmp_path, 8))
    assert reports.problems == []
    assert {name.gateway: reported.newest for name, reported in reports.streams.items()} == {
        f"gw-{number}": number for number in range(24)
    }
