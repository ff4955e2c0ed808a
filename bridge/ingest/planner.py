"""Plan which objects to read, from their keys alone: no data is read, no Spark is needed.

`Inventory` is one listing, sorted by stream. `plan` compares it with the numbers that the table covers:

* no number of first..last is new: a duplicate, never read;
* all are new: the object is read whole; some are new: it is read, and only those are kept.

Within a plan, numbers count as covered once an object with them is planned. So two overlapping objects share
their numbers out, and no join, shuffle or `dropDuplicates` is ever needed. A known bad object (same
key, same ETag) is skipped until it is uploaded again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from bridge.ingest.store import Entry
from bridge.objectkeys import REPORTS, ObjectKey, parse_key
from bridge.ranges import Pair, Ranges

T = TypeVar("T")
MAX_ROWS = 5_000_000  # of an object: 100 bytes of memory each, of the 512 MiB that an object may take


class StreamId(NamedTuple):
    """One stream of one gateway. `epoch` tells a stream from another one that had its name before: the
    Unix time in ms of its creation, with a random part if the clock was not synchronised then."""

    gateway: str
    stream: str
    epoch: int

    @classmethod
    def of(cls, name: ObjectKey) -> StreamId:
        """Return the stream of an object, by what its key says."""
        return cls(name.gateway, name.stream, name.epoch)


class Item(NamedTuple):
    """A data object of one stream. Tuples sort by first number, then longest first, then key."""

    first: int
    minus_last: int
    key: str
    size: int
    etag: str
    modified: int

    @property
    def last(self) -> int:
        return -self.minus_last

    @property
    def acceptable(self) -> bool:
        """Whether it promises at most MAX_ROWS rows; otherwise it is refused, and covers nothing."""
        return self.last - self.first < MAX_ROWS


class Work(NamedTuple):
    """An object to read, and which of its numbers to keep; if none, it is only checked."""

    stream: StreamId
    item: Item
    fresh: list[Pair]


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """The most that one round reads."""

    objects: int = 20_000
    bytes: int = 16 << 30


@dataclass(slots=True)
class Plan:
    """The work of one round, in the order of streams and numbers."""

    work: list[Work] = field(default_factory=list)
    bytes: int = 0


@dataclass(slots=True)
class Tally:
    """The totals of a stream's object keys; numbers that objects lack count as rows here."""

    rows: int = 0
    numbers: Ranges = field(default_factory=Ranges)

    @property
    def duplicates(self) -> int:
        return self.rows - self.numbers.count()


class Inventory:
    """The objects under a prefix, by stream. Other keys, except gateway reports, are `foreign`."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.foreign: list[str] = []
        self.streams: dict[StreamId, list[Item]] = {}
        self.objects = 0
        names: dict[str, StreamId] = {}  # a cache by folder: parsing keys is the most expensive step here
        for key, length, etag, modified in entries:
            folder, _, name = key.rpartition("/")
            stream = names.get(folder)
            if stream is None or not _is_plain(name):
                parsed = parse_key(key) if _is_text(key) else None
                if parsed is None:
                    if not key.startswith(REPORTS):
                        self.foreign.append(key)
                    continue
                stream = names[folder] = StreamId.of(parsed)
                self.streams.setdefault(stream, [])
                first, last = parsed.first, parsed.last
            else:
                first, last = int(name[:20]), int(name[21:41])
            self.streams[stream].append(Item(first, -last, key, length, etag, modified))
            self.objects += 1
        for items in self.streams.values():
            items.sort()

    def pending(self) -> dict[StreamId, list[Item]]:
        """Return a copy that `plan` may shorten, round by round."""
        return dict(self.streams)

    def tally(self, without: Container[tuple[str, str]]) -> dict[StreamId, Tally]:
        """Count the rows per stream, without the objects of these keys and ETags."""
        result: dict[StreamId, Tally] = {}
        for stream, items in self.streams.items():
            total = Tally()
            for item in items:
                if (item.key, item.etag) in without:
                    continue
                total.rows += item.last - item.first + 1
                total.numbers.add(item.first, item.last)
            result[stream] = total
        return result


def _is_text(key: str) -> bool:
    """Return whether a text column can hold the key: names of local folders may hold any bytes."""
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_plain(name: str) -> bool:
    """Return whether a name in a known folder can be read without the full check of `parse_key`."""
    return (
        name[41:] in (".ndjson.gz", ".parquet")
        and name[20:21] == "-"
        and name[:20].isdecimal()
        and name[21:41].isdecimal()
        and name.isascii()
        and name[:20] <= name[21:41] <= "09223372036854775807"
    )


def grouped(items: Iterable[T], size: Callable[[T], int], limit: int) -> list[list[T]]:
    """Cut the items, in order, into groups of at most `limit` in size; a larger item is a group alone."""
    groups: list[list[T]] = []
    filled = limit
    for item in items:
        if not groups or filled + size(item) > limit:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += size(item)
    return groups


def plan(
    pending: dict[StreamId, list[Item]],
    covered: Mapping[StreamId, Ranges],
    quarantined: Container[tuple[str, str]],
    limits: RoundLimits,
    doubtful: Container[StreamId] = (),
) -> Plan:
    """Plan one round. `covered` is not changed; objects that are done are removed from `pending`.

    A `doubtful` stream has quarantined objects. All of its objects that are not in the table are read, and
    those whose numbers are also in others are only checked. So a thousand bad objects do not take a thousand
    rounds.
    """
    result = Plan()
    for stream in sorted(pending):
        done = covered.get(stream, Ranges())
        reach = done.copy()
        rest: list[Item] = []
        full = False
        for index, item in enumerate(pending[stream]):
            if (item.key, item.etag) in quarantined or done.covers(item.first, item.last):
                continue
            full = len(result.work) >= limits.objects or (
                result.bytes > 0 and result.bytes + item.size > limits.bytes
            )
            if full:
                rest += pending[stream][index:]
                break
            # even if a planned object covers it: if that one turns out bad, this one is needed
            rest.append(item)
            fresh = reach.missing(item.first, item.last)
            if fresh or stream in doubtful:
                if item.acceptable:
                    reach.update(fresh)
                result.work.append(Work(stream, item, fresh))
                result.bytes += item.size
        if rest:
            pending[stream] = rest
        else:
            del pending[stream]
        if full:
            break
    return result
