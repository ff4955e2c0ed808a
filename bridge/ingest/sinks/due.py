"""Which small data files a run merges, so that a table has few files after a year of short rounds.

Each round leaves at least one file for each day that it has rows of. Files of a day are merged once there are
enough of about the same size: a size class goes from a power of eight bytes to the next, and files of smaller
classes are included. The result is in a higher class, so each row is rewritten once per class, at most five
times. Files of `SMALL` and more stay as they are.

* For the newest day, `MANY` files of a class are merged, because more will come.
* For every other day, `FEW` are enough: rows may still arrive late, but most days are over.

So a day ends with a dozen files, or with large ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from bridge.ingest.planner import grouped
from bridge.ingest.sinks.base import LiveFile

FILE_BYTES = 64 << 20
SMALL = FILE_BYTES // 2
MANY, FEW = 30, 8
CLASS_BITS = 3


def due(files: Sequence[LiveFile], newest: str) -> Iterator[list[LiveFile]]:
    """Yield groups of files to be merged; `newest` is the newest day of the table."""
    days = defaultdict(list)
    for file in small(files):
        days[file.day].append(file)
    for day, found in days.items():
        classes = Counter(map(_class, found))
        least = MANY if day == newest else FEW
        if full := [size for size, count in classes.items() if count >= least]:
            yield from bins([file for file in found if _class(file) <= max(full)])


def small(files: Sequence[LiveFile]) -> list[LiveFile]:
    """Return the files that can be merged, regardless of their size."""
    return [file for file in files if file.day and not file.has_deletes and file.size < SMALL]


def bins(files: Sequence[LiveFile]) -> Iterator[list[LiveFile]]:
    """Group small files of each day, up to the size of a large file. A single file stays as it is."""
    days: dict[str, list[LiveFile]] = {}
    for file in small(files):
        days.setdefault(file.day, []).append(file)
    for found in days.values():
        yield from (group for group in grouped(found, lambda file: file.size, FILE_BYTES) if len(group) > 1)


def _class(file: LiveFile) -> int:
    return file.size.bit_length() // CLASS_BITS
