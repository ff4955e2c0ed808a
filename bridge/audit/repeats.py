"""Limits the lines of the audit log: repeated events are counted, and summarized once per window.

Events are alike if they have the same kind (event, outcome, front end), network and user; an unauthenticated
user name does not count. In a window, at most `alike` such events are written, and at most `unproven` events
of one kind by all unauthenticated clients together. So claiming many names, or having many addresses, gets
nobody more lines. At the end of a window, a summary has the number of the others, and some of their subjects.

A logged-in client could repeat one operation on many streams to hide one of them. Therefore the summary lists
up to `listed` different streams.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bridge.net.addresses import network_of


class Bounds(NamedTuple):
    """The limits: lines per window, and its length in seconds."""

    window: float = 60.0
    alike: int = 20
    unproven: int = 200
    listed: int = 50
    groups: int = 20_000  # groups of alike events that are distinguished


class Event(NamedTuple):
    """An event; `time` in seconds. See `bridge.audit`."""

    time: float
    event: str
    outcome: str
    front_end: str
    address: str
    user: str | None
    client: str
    proven: bool
    on: str
    why: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None

    def line(self) -> dict[str, Any]:
        """Return the keys of the line, without those that do not apply."""
        found: dict[str, Any] = {"time": self.time, "event": self.event, "outcome": self.outcome}
        texts = {
            "front_end": self.front_end,
            "address": self.address,
            "user": self.user,
            "client": self.client,
            "on": self.on,
            "why": self.why,
        }
        found |= {key: text for key, text in texts.items() if text}
        found |= {k: v for k, v in (("before", self.before), ("after", self.after)) if v is not None}
        return found


class _Key(NamedTuple):
    """The common values of alike events; without a network, events of several networks."""

    kind: tuple[str, str, str]
    network: str | None
    user: str | None


@dataclass
class _Group:
    written: int = 0
    counted: int = 0  # events that were not written
    first: float = 0.0  # the time of the first of these
    last: Event | None = None
    on: set[str] = field(default_factory=set)


class Repeats:
    """The windows of all groups. They begin with an event and end together."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._groups: dict[_Key, _Group] = {}
        self._unproven: dict[tuple[str, str, str], int] = {}
        self.ends = float("inf")  # when the window ends, by time.monotonic

    def take(self, event: Event) -> list[dict[str, Any]]:
        """Return the lines to write for an event."""
        lines = self.due()
        if not self._groups:
            self.ends = time.monotonic() + self._bounds.window
        key = self._key(event)
        group = self._groups.setdefault(key, _Group())
        if group.written < self._bounds.alike and key.network is not None:
            group.written += 1
            if not event.proven:
                self._unproven[key.kind] = self._unproven.get(key.kind, 0) + 1
            return [*lines, event.line()]
        group.counted += 1
        group.first = group.first or event.time
        group.last = event
        if event.on and len(group.on) < self._bounds.listed:
            group.on.add(event.on)
        return lines

    def _key(self, event: Event) -> _Key:
        kind = (event.event, event.outcome, event.front_end)
        key = _Key(kind, network_of(event.address), event.user if event.proven else None)
        full = not event.proven and self._unproven.get(kind, 0) >= self._bounds.unproven
        if full or (key not in self._groups and len(self._groups) >= self._bounds.groups):
            return _Key(kind, None, None)
        return key

    def due(self) -> list[dict[str, Any]]:
        """Return the summaries, if the window is over."""
        return self.end() if time.monotonic() >= self.ends else []

    def end(self) -> list[dict[str, Any]]:
        """End the window and return the summaries."""
        groups, self._groups, self._unproven = self._groups, {}, {}
        self.ends = float("inf")
        return [_summary(key, group) for key, group in groups.items() if group.last is not None]


def _summary(key: _Key, group: _Group) -> dict[str, Any]:
    last = group.last
    assert last is not None
    line = last.line()
    gone = ["client", "why", "before", "after", "on"]
    if key.network is None:
        gone.append("address")
    if key.user is None:
        gone.append("user")
    line = {name: value for name, value in line.items() if name not in gone}
    line |= {"repeated": group.counted, "since": group.first}
    if group.on:
        line["on"] = sorted(group.on)
    return line
