"""Limits that whole segments are dropped for: size and time to live, in the manner of Stream Manager."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.streams.drops import Reason
from bridge.streams.segment import HEADER

if TYPE_CHECKING:
    from bridge.streams.stream import Stream

SEALED_FROM = 8 * 1024  # bytes; smaller segments would take more blocks than they hold


def make_room(stream: Stream, needed: int) -> None:
    """For a group of `needed` bytes, drop as many of the oldest segments as it takes; raises OSError."""
    if stream.log.total_bytes + needed > stream.settings.max_size and stream.settings.free_exported:
        free(stream, needed)
    while stream.log.total_bytes + needed > stream.settings.max_size:
        if not _drop_first(stream, Reason.OVERWRITTEN):
            return


def free(stream: Stream, needed: int) -> None:
    """Drop segments that all exports have passed, until `needed` bytes fit; raises OSError."""
    while (
        stream.log.total_bytes + needed > stream.settings.max_size
        and _is_first_exported(stream)
        and _drop_first(stream, Reason.EXPORTED)
    ):
        continue


def relieve(stream: Stream, needed: int, *, exported_only: bool = False) -> None:
    """On a full disk drop the oldest segments that may go, until they come to `needed` bytes; raises OSError.

    Whatever `max_size` says: segments that all exports have passed where the stream's retention allows it,
    else the oldest where it overwrites, unless `exported_only`.
    """
    goal = stream.log.total_bytes - needed
    while stream.log.total_bytes > goal:
        if stream.settings.free_exported and _is_first_exported(stream):
            reason = Reason.EXPORTED
        elif stream.settings.overwrite and not exported_only:
            reason = Reason.OVERWRITTEN
        else:
            return
        if not _drop_first(stream, reason):
            return


def seal(stream: Stream) -> None:
    """On a full disk where nothing may go yet: let what the active segment holds go once it is exported.

    Otherwise small messages would be added to its last block, and it would never be exported as a whole.
    Raises OSError.
    """
    log = stream.log
    if stream.settings.free_exported and log.active.size > SEALED_FROM and not (stream.busy or log.frozen):
        log.leave_active()


def _is_first_exported(stream: Stream) -> bool:
    return stream.exported_upto is not None and stream.log.following(stream.log.first) <= stream.exported_upto


def expire(stream: Stream, now: int) -> None:
    """Drop segments all of whose messages are older than the time to live; raises OSError.

    `now` is in ms on the age timeline.
    """
    ttl = stream.settings.ttl
    while ttl is not None and stream.log.next > stream.log.first:
        if stream.summary(stream.log.first).last_age + ttl > now or not _drop_first(stream, Reason.EXPIRED):
            return


def _drop_first(stream: Stream, reason: Reason) -> bool:
    """Drop the oldest segment; False if it is the active one, and holds nothing or is being written."""
    log = stream.log
    if log.first == log.active.index.base:
        if log.active.size <= HEADER.size or stream.busy:
            return False
        log.leave_active()
    first = log.first
    stream.drop_upto(log.following(first), reason)
    return log.first > first
