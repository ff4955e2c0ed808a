"""The head objects of many gateways."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier

from bridge.ingest.heads import read_heads
from bridge.ingest.store import LocalStore, Place
from tests.ingest.gateway import Gateway, head_of


class Distant(LocalStore):
    """A store that answers when so many requests are under way at the same time."""

    def __init__(self, root: Path, together: int) -> None:
        super().__init__(root)
        self.barrier = Barrier(together)

    def get(self, key: str, most: int | None = None) -> bytes:
        self.barrier.wait(10)
        return super().get(key)


def test_heads_are_read_many_at_a_time_since_each_is_a_round_trip(tmp_path: Path) -> None:
    for number in range(24):
        Gateway(Place(str(tmp_path)), f"gw-{number}").head(head_of(number))
    heads = read_heads(Distant(tmp_path, 8))
    assert heads.problems == []
    assert {name.gateway: head.newest for name, head in heads.streams.items()} == {
        f"gw-{number}": number for number in range(24)
    }
