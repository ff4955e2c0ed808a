"""Accept that a stream is gone: what waited there is counted as trimmed, not as missing.

It is the word of an operator, so it is recorded as one: in the state, in the head that was last known of
the stream, as a range dropped with the reason `accepted`. Numbers that are missing for any other reason stay
missing. If the gateway lists the stream again, its own head counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from bridge.ingest.errors import IngestError
from bridge.ingest.planner import StreamId
from bridge.ingest.report import GONE, survey
from bridge.ingest.sinks.base import Sink
from bridge.ingest.state import StateStore
from bridge.ingest.store import Place

ACCEPTED = "accepted"


def accept(source: Place, sink: Sink, wanted: Iterable[str]) -> dict[str, int]:
    """Accept the streams named GATEWAY/STREAM, in all epochs that are gone; returns how many numbers of each.

    Raises IngestError, and accepts none, if nothing of one of them is known to be gone; Moved if another
    run commits at the same time.
    """
    state, report = survey(source.open(), sink)
    gone: dict[str, dict[StreamId, list[tuple[int, int, str]]]] = defaultdict(dict)
    for stream in report.streams:
        if holes := [(hole.first, hole.last, ACCEPTED) for hole in stream.holes if hole.reason == GONE]:
            gone[stream.path][StreamId(stream.gateway, stream.stream, stream.epoch)] = holes
    counts: dict[str, int] = {}
    for path in wanted:
        if path not in gone:
            there = f"there is {', '.join(sorted(gone))}" if gone else "nor is any other stream"
            raise IngestError(f"{path}: nothing of it is known to be gone; {there}")
        counts[path] = 0
        for name, dropped in gone[path].items():
            head = state.streams[name].head
            assert head is not None, name  # what waited is known from it
            state.streams[name].head = replace(head, exported=head.newest, dropped=(*head.dropped, *dropped))
            counts[path] += sum(last - first + 1 for first, last, _ in dropped)
    previous = state.version
    sink.commit(previous, StateStore(sink.state()).save(state, previous), [])
    return counts
