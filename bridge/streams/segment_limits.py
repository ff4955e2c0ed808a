"""Segment limits: size and time to live, which drop whole segments as Stream Manager does.

Each policy yields (number, reason), oldest segment first. The stream drops the messages below the number, and
the policy continues. All raise OSError.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

from bridge.streams.contents import Contents
from bridge.streams.drops import DropReason
from bridge.streams.segment import HEADER

SEALED_FROM = 8 * 1024  # bytes; smaller segments would take more blocks than they hold

Removal = tuple[int, DropReason]


def make_room(stream: Contents, needed: int) -> Iterator[Removal]:
    """Yield the oldest segments, until a group of `needed` bytes fits."""
    if stream.settings.free_exported:
        yield from exported(stream, needed)
    while _is_over(stream, needed):
        if not (yield from _first(stream, DropReason.OVERWRITTEN)):
            return


def exported(stream: Contents, needed: int) -> Iterator[Removal]:
    """Yield segments that all exports have passed, until `needed` bytes fit."""
    while _is_over(stream, needed) and _is_first_exported(stream):
        if not (yield from _first(stream, DropReason.EXPORTED)):
            return


def oldest_exported(stream: Contents) -> Iterator[Removal]:
    """Yield the oldest segment if all exports have passed it."""
    if _is_first_exported(stream):
        yield from _first(stream, DropReason.EXPORTED)


def free_space(stream: Contents, needed: int, *, exported_only: bool = False) -> Iterator[Removal]:
    """On a full disk, yield the oldest segments that may be dropped, until they have `needed` bytes.

    `max_size` does not matter. Segments that all exports have passed may be dropped if the stream's retention
    allows it; otherwise the oldest ones if it overwrites, unless `exported_only`.
    """
    goal = stream.log.total_bytes - needed
    while stream.log.total_bytes > goal:
        if stream.settings.free_exported and _is_first_exported(stream):
            reason = DropReason.EXPORTED
        elif stream.settings.overwrite and not exported_only:
            reason = DropReason.OVERWRITTEN
        else:
            return
        if not (yield from _first(stream, reason)):
            return


def expired(stream: Contents, now: int) -> Iterator[Removal]:
    """Yield segments whose messages are all older than the time to live. `now`: ms on the age timeline."""
    ttl, log = stream.settings.ttl, stream.log
    while ttl is not None and log.next > log.first:
        if stream.summary(log.first).last_age + ttl > now:
            return
        if not (yield from _first(stream, DropReason.EXPIRED)):
            return


def wants_new_segment(stream: Contents) -> bool:
    """Return whether to begin a new segment on a full disk when nothing can be dropped yet.

    The active segment can then be dropped once it is exported. Otherwise small messages would fill its last
    block, and it would never be completely exported.
    """
    *_, active = stream.log.sizes.values()
    return stream.settings.free_exported and active > SEALED_FROM and not stream.busy


def _is_over(stream: Contents, needed: int) -> bool:
    return stream.log.total_bytes + needed > stream.settings.max_size


def _is_first_exported(stream: Contents) -> bool:
    log = stream.log
    return stream.exported_upto is not None and log.following(log.first) <= stream.exported_upto


def _first(stream: Contents, reason: DropReason) -> Generator[Removal, None, bool]:
    """Yield the oldest segment. Returns False if it must stay: it is active, and empty or being written."""
    log = stream.log
    first = log.first
    if len(log.sizes) == 1 and (log.sizes[first] <= HEADER.size or stream.busy):
        return False
    yield log.following(first), reason
    return log.first > first
