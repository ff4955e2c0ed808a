"""Accept that a stream is gone: its pending messages count as trimmed, no longer as missing.

An operator decides this, and the state records it: in the stream's last report, as a range dropped with the
reason `accepted`. Numbers that are missing for any other reason stay missing. If the gateway lists the stream
again, the gateway's own report counts.
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
from bridge.ingest.store import StorageLocation

ACCEPTED = "accepted"


def accept(source: StorageLocation, sink: Sink, wanted: Iterable[str]) -> dict[str, int]:
    """Accept the streams named GATEWAY/STREAM in all epochs that are gone; return the count for each.

    Raises IngestError, and accepts none, if one of them is not known to be gone; CommitConflict if another
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
            known = f"these are: {', '.join(sorted(gone))}" if gone else "neither is any other stream"
            raise IngestError(f"{path}: this stream is not known to be gone; {known}")
        counts[path] = 0
        for name, dropped in gone[path].items():
            reported = state.streams[name].reported
            assert reported is not None, name  # the hole was computed from it
            state.streams[name].reported = replace(
                reported, exported=reported.newest, dropped=(*reported.dropped, *dropped)
            )
            counts[path] += sum(last - first + 1 for first, last, _ in dropped)
    previous = state.version
    sink.commit(previous, StateStore(sink.state()).save(state, previous), [])
    return counts
