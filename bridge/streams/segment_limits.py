"""Limits that whole segments are dropped for: size and time to live, in the manner of Stream Manager.

Each policy yields what is to go, (below this number, why), oldest segment first; the stream drops it, and
the policy looks again. All raise OSError.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

from bridge.streams.drops import DropReason
from bridge.streams.segment import HEADER
from bridge.streams.view import View

SEALED_FROM = 8 * 1024  # bytes; smaller segments would take more blocks than they hold

Removal = tuple[int, DropReason]


def make_room(view: View, needed: int) -> Iterator[Removal]:
    """For a group of `needed` bytes, as many of the oldest segments as it takes."""
    if view.settings.free_exported:
        yield from exported(view, needed)
    while _is_over(view, needed):
        if not (yield from _first(view, DropReason.OVERWRITTEN)):
            return


def exported(view: View, needed: int) -> Iterator[Removal]:
    """Segments that all exports have passed, until `needed` bytes fit."""
    while _is_over(view, needed) and _is_first_exported(view):
        if not (yield from _first(view, DropReason.EXPORTED)):
            return


def free_space(view: View, needed: int, *, exported_only: bool = False) -> Iterator[Removal]:
    """On a full disk the oldest segments that may go, until they come to `needed` bytes.

    Whatever `max_size` says: segments that all exports have passed where the stream's retention allows it,
    else the oldest where it overwrites, unless `exported_only`.
    """
    goal = view.segments.total_bytes - needed
    while view.segments.total_bytes > goal:
        if view.settings.free_exported and _is_first_exported(view):
            reason = DropReason.EXPORTED
        elif view.settings.overwrite and not exported_only:
            reason = DropReason.OVERWRITTEN
        else:
            return
        if not (yield from _first(view, reason)):
            return


def expired(view: View, now: int) -> Iterator[Removal]:
    """Segments all of whose messages are older than the time to live.

    `now` is in ms on the age timeline.
    """
    ttl, segments = view.settings.ttl, view.segments
    while ttl is not None and segments.next > segments.first:
        if view.summary(segments.first).last_age + ttl > now:
            return
        if not (yield from _first(view, DropReason.EXPIRED)):
            return


def wants_new_segment(view: View) -> bool:
    """On a full disk where nothing may go yet: whether to go on in a new segment.

    What the active one holds can then go once it is exported. Otherwise small messages would be added to
    its last block, and it would never be exported as a whole.
    """
    *_, active = view.segments.sizes.values()
    return view.settings.free_exported and active > SEALED_FROM and not view.busy


def _is_over(view: View, needed: int) -> bool:
    return view.segments.total_bytes + needed > view.settings.max_size


def _is_first_exported(view: View) -> bool:
    segments = view.segments
    return view.exported_upto is not None and segments.following(segments.first) <= view.exported_upto


def _first(view: View, reason: DropReason) -> Generator[Removal, None, bool]:
    """The oldest segment; False if it must stay: the active one, if it holds nothing or is being written."""
    segments = view.segments
    first = segments.first
    if len(segments.sizes) == 1 and (segments.sizes[first] <= HEADER.size or view.busy):
        return False
    yield segments.following(first), reason
    return segments.first > first
