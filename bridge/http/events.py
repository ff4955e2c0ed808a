"""Recent events: the lines of this process's log, and changes that the observer notices.

What it promises: at most `KEPT` events of `LONGEST` characters each, only in memory. A line that differs from
an earlier one only in numbers replaces it and counts it, so an export that retries all night is one event.
The limits of the log on repeated and similar lines apply too (`bridge.logs`), so a client with many names
cannot push out the other events at once.
"""

from __future__ import annotations

import json
import logging
import re
from typing import Any, NamedTuple

import msgspec

from bridge.logs import CountingHandler, LineFormatter

KEPT = 500
AT_A_TIME = 200  # events in one document
LONGEST = 2048  # characters of a line
VALUE = 300  # characters kept of each value in a longer line
FIELDS = 8  # fields kept in a longer line
_NUMBER = re.compile(r"\d+")


class _Event(NamedTuple):
    """The newest of similar lines. `first` is the number of the first one, `times` their number."""

    number: int
    first: int
    times: int
    line: str


class _Ring:
    """The newest lines, as a stream for the handler."""

    def __init__(self) -> None:
        self.events: dict[str, _Event] = {}  # the oldest first
        self.number = 0

    def write(self, line: str) -> None:
        self.number += 1
        fields = json.loads(line)
        times = int(fields.get("repeated", 0)) or 1
        key = _NUMBER.sub("0", " ".join(str(value) for name, value in fields.items() if name not in _VARYING))
        before = self.events.pop(key, None)
        if len(line) > LONGEST:
            short = list(fields.items())[:FIELDS]
            line = json.dumps({name: v[:VALUE] if isinstance(v, str) else v for name, v in short})
        if before is not None:
            self.events[key] = _Event(self.number, before.first, before.times + times, line)
        else:
            self.events[key] = _Event(self.number, self.number, times, line)
        if len(self.events) > KEPT:
            del self.events[next(iter(self.events))]

    def flush(self) -> None:
        """Do nothing, because nothing is buffered."""


_VARYING = ("time", "repeated", "alike")


class Events(CountingHandler):
    """A handler of the log that keeps the newest lines."""

    def __init__(self) -> None:
        self._ring = _Ring()
        super().__init__(self._ring, LineFormatter("json"))  # type: ignore[arg-type]
        self.terminator = ""

    def note(self, level: int, text: str, *values: object, **fields: str) -> None:
        """Keep an event that is not in the log."""
        event: dict[str, Any] = {"name": "bridge.http", "levelno": level, "msg": text, "args": values}
        event |= {"levelname": logging.getLevelName(level), **fields}
        self.handle(logging.makeLogRecord(event))

    def document(self, after: int) -> bytes:
        """The events after a number, at most `AT_A_TIME` of the newest, as JSON; each is a log line.

        `first` identifies an event: one that has happened again has a new `number` and the same `first`.
        """
        newest = [event for event in list(self._ring.events.values()) if event.number > after]
        found = [
            {
                "number": event.number,
                "first": event.first,
                "times": event.times,
                "line": msgspec.Raw(event.line.encode()),
            }
            for event in newest[-AT_A_TIME:]
        ]
        return msgspec.json.encode({"events": found, "newest": self._ring.number})
