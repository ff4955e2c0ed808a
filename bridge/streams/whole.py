"""Limits that whole segments are dropped for: size and time to live, in the manner of Stream Manager."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.streams.drops import Reason
from bridge.streams.segment import HEADER

if TYPE_CHECKING:
    from bridge.streams.stream import Stream


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
        stream.exported_upto is not None
        and stream.log.total_bytes + needed > stream.settings.max_size
        and stream.log.following(stream.log.first) <= stream.exported_upto
        and _drop_first(stream, Reason.EXPORTED)
    ):
        continue


def expire(stream: Stream, now: int) -> None:
    """Drop segments all of whose messages are older than the time to live; raises OSError.

    `now` is in ms on the age timeline.
    """
    ttl = stream.settings.ttl
    while ttl is not None and stream.log.next > stream.log.first:
        if stream.summary(stream.log.first).last_age + ttl > now or not _drop_first(stream, Reason.EXPIRED):
            return


def _drop_first(stream: Stream, reason: Reason) -> bool:
    """Drop the oldest segment; False if it is the active one, which holds nothing to drop."""
    log = stream.log
    if log.first == log.active.index.base:
        if log.active.size <= HEADER.size or stream.busy:
            return False
        log.replace_active()
    first = log.first
    stream.drop_upto(log.following(first), reason)
    return log.first > first
