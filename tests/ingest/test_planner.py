"""Plans from names alone."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.ingest.planner import Inventory, RoundLimits, StreamId, plan
from bridge.ingest.store import Entry
from bridge.objectkeys import data_key
from bridge.ranges import Ranges

STREAM = StreamId("gw", "s", 1)


def entry(
    first: int, last: int, hour: int = 0, size: int = 10, form: str = "parquet", stream: str = "s"
) -> Entry:
    return Entry(data_key("gw", stream, 1, first, last, hour * 3_600_000, form), size, f"e{first}", 0)


objects = st.lists(
    st.builds(
        lambda first, length, hour: entry(first, first + length, hour),
        st.integers(0, 60),
        st.integers(0, 20),
        st.integers(0, 3),
    ),
    max_size=15,
    unique=True,
)


@settings(max_examples=200)
@given(objects, st.integers(1, 4), st.sets(st.integers(0, 14), max_size=3))
def test_whatever_is_exported_every_number_is_taken_exactly_once(
    entries: list[Entry], limit: int, bad_ones: set[int]
) -> None:
    """In rounds of any size, with overlapping and with bad objects."""
    bad = {(entries[index].key, entries[index].etag) for index in bad_ones if index < len(entries)}
    inventory = Inventory(entries)
    pending, covered = inventory.pending(), {STREAM: Ranges()}
    quarantined: set[tuple[str, str]] = set()
    taken: Counter[int] = Counter()
    while todo := plan(pending, covered, quarantined, RoundLimits(objects=limit)).work:
        assert len(todo) <= limit
        for work in todo:
            name = (work.item.key, work.item.etag)
            if name in bad:
                quarantined.add(name)
                continue
            for first, last in work.fresh:
                taken.update(range(first, last + 1))
                covered[STREAM].add(first, last)
    items = [item for items in inventory.streams.values() for item in items]
    good = {
        number
        for item in items
        if (item.key, item.etag) not in bad
        for number in range(item.first, item.last + 1)
    }
    assert taken == Counter(dict.fromkeys(good, 1))


def test_an_object_without_fresh_numbers_is_never_planned() -> None:
    inventory = Inventory([entry(0, 9), entry(2, 5), entry(10, 19)])
    todo = plan(inventory.pending(), {STREAM: Ranges([(0, 9)])}, (), RoundLimits())
    assert [(work.item.first, work.fresh) for work in todo.work] == [(10, [(10, 19)])]


def test_rounds_are_bounded_by_bytes_but_always_take_one_object() -> None:
    inventory = Inventory([entry(n * 10, n * 10 + 9, size=100) for n in range(5)])
    assert len(plan(inventory.pending(), {}, (), RoundLimits(bytes=250)).work) == 2
    assert len(plan(inventory.pending(), {}, (), RoundLimits(bytes=1)).work) == 1


def test_keys_that_are_not_data_are_foreign_and_gateway_reports_are_not() -> None:
    good = entry(0, 9).key
    folder = good.rpartition("/")[0]
    strange = [
        "notes.txt",
        f"{folder}/x.parquet",
        f"{folder}/00000000000000000009-00000000000000000000.parquet",
        f"{folder}/{'9' * 20}-{'9' * 20}.parquet",
        good.replace("hour=00", "hour=24"),
        good.replace("epoch=1", "epoch=\u0661"),  # a digit, but not one that gateways write
        folder + "/" + "\u0660" * 20 + f"-{9:020}.parquet",
        f"{good}\n",
    ]
    names = [good, *strange, "_gateway/gw.json"]
    inventory = Inventory(Entry(name, 1, "", 0) for name in names)
    assert inventory.foreign == strange
    assert inventory.objects == 1


def test_the_tally_counts_every_row_that_is_there_more_than_once() -> None:
    inventory = Inventory([entry(0, 9), entry(0, 9, hour=1), entry(5, 14)])
    tally = inventory.tally(())[STREAM]
    assert (tally.rows, tally.numbers.count()) == (30, 15)
