"""Faults planted into a recording, as a mistake in the product would have made it."""

from __future__ import annotations

import re

from .record import Recording
from .trace import Call

SYNCS = ("fsync", "fdatasync")


def without(recording: Recording, name: str, pattern: str, *, after: str = "", kept: int = 0) -> Recording:
    """No call of this name about such a path; the pattern is searched for.

    `after`: only those of which one of the three calls before is about such a path. `kept`: so many stay.
    """
    left: list[Call] = []
    found = 0
    for at, call in enumerate(recording.calls):
        before = " ".join(f"{one.path} {one.other}" for one in recording.calls[max(0, at - 3) : at])
        if call.name == name and re.search(pattern, call.path) and re.search(after, before):
            found += 1
            if found > kept:
                continue
        left.append(call)
    assert found > kept, "the fault is nowhere"
    return recording._replace(calls=left)


def renamed_first(recording: Recording, pattern: str) -> Recording:
    """Files of such names are renamed before they are synced, not after."""
    calls = list(recording.calls)
    swapped = 0
    for at, call in enumerate(calls):
        if call.name != "rename" or re.search(pattern, call.path) is None:
            continue
        synced = next(
            n for n in range(at - 1, -1, -1) if calls[n].name in SYNCS and calls[n].path == call.path
        )
        sync = calls[synced]
        calls[synced] = call._replace(begin=sync.begin, end=sync.begin)
        calls[at] = sync._replace(begin=call.begin, end=call.end, path=call.other)
        swapped += 1
    assert swapped, "the fault is nowhere"
    return recording._replace(calls=sorted(calls))


def acknowledged_first(recording: Recording, pattern: str) -> Recording:
    """What is sent right after a sync of such a file is sent right before it."""
    calls = list(recording.calls)
    swapped = 0
    for call in list(calls):
        if call.name != "fdatasync" or re.search(pattern, call.path) is None:
            continue
        after = next((one for one in calls if one.begin > call.end), None)
        if after is not None and after.name == "send":
            calls.remove(after)
            calls.append(after._replace(begin=call.begin, end=call.begin))
            swapped += 1
    assert swapped, "the fault is nowhere"
    return recording._replace(calls=sorted(calls))
