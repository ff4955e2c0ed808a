"""Log lines: one line each, key=value or JSON, on stderr.

    2026-01-31T12:00:00.123Z info bridge.streams msg="stream created" stream=sensors

* The entries of `extra=` become keys of the line, usually `client` and `stream`.
* A line that repeats within `WINDOW` seconds is only counted, and written again at the end of the window,
  with the time of its end and, after more than one repetition, `repeated=<count>`. So a fault in a loop
  cannot fill the disk. Lines that answer an operator (`extra=ANSWER`: the result of a reload) are always
  written at once.
* Of lines that differ only in their values (in the client, for example), `MOST_ALIKE` are written in a
  window; the last of the others is written at its end, with `alike=<count>`. This does not apply at level
  debug.
* What fails again and again, such as an export without a link, is logged once per cause and ten minutes
  (`Outage`).
* Under systemd (JOURNAL_STREAM names our stderr) each line begins with its priority, `<4>`, and has no time
  stamp, since the journal has both.
* Characters that are not printable are escaped as in JSON, in both formats, and URLs have no user, password,
  query or fragment (`printable`).
* Tracebacks are for level debug; otherwise an exception is one `error=` key.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
from typing import Any, Literal, TextIO

from bridge.printable import printable_json, without_credentials

WINDOW = 10.0
REPEAT = 600.0  # seconds between two lines about an outage
CAUSES = 32  # of one outage that are distinguished
_VARIES = re.compile(r"[\w+/=-]{24,}|\b[0-9A-Fa-f-]{8,}\b|\d+(?:\.\d+)?")
MOST_KEPT = 1000  # different lines remembered; others are written uncounted
MOST_ALIKE = 20
TEMPLATE = "template"  # in `extra=`, no key of the line: the common text of lines that differ in values
ANSWER = {"answer": True}  # `extra=` of lines that are never counted instead

# Libraries that would log each AWS call.
_QUIET = ("boto", "boto3", "botocore", "s3transfer", "urllib3", "asyncio")

_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", TEMPLATE, *ANSWER}


class LineFormatter(logging.Formatter):
    """One record, one line."""

    def __init__(self, style: Literal["text", "json"] = "text", *, journal: bool = False) -> None:
        super().__init__()
        self.json = style == "json"
        self.journal = journal

    def format(self, record: logging.LogRecord) -> str:
        """Write the record as key=value or JSON."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head = {"time": f"{stamp}.{int(record.msecs):03}Z"} if not self.journal else {}
        head |= {"level": record.levelname.lower(), "logger": record.name}
        fields = self.fields(record)
        if self.json:
            line = printable_json(json.dumps(head | fields, default=str, ensure_ascii=False))
        else:
            line = " ".join([*head.values(), *(f"{key}={_quoted(value)}" for key, value in fields.items())])
        return f"<{_PRIORITIES.get(record.levelno, 5)}>{line}" if self.journal else line

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """The keys of a line that do not change when the line repeats."""
        fields: dict[str, Any] = {"msg": record.getMessage()}
        fields |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            fields["error"] = f"{type(error).__name__}: {error}"
            if logging.getLogger().isEnabledFor(logging.DEBUG):
                fields["traceback"] = self.formatException(record.exc_info)
        return {
            key: without_credentials(value) if isinstance(value, str) else value
            for key, value in fields.items()
        }


def _quoted(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and text and not any(char in text for char in ' "=\\')
    return text if plain else printable_json(json.dumps(text, ensure_ascii=False))


class CountingHandler(logging.StreamHandler[TextIO]):
    """Writes lines to a stream; a line that repeats within the window is counted instead."""

    def __init__(self, stream: TextIO, formatter: LineFormatter, window: float = WINDOW) -> None:
        super().__init__(stream)
        self.lines = formatter
        self.setFormatter(formatter)
        self.window = window
        self._seen: dict[str, tuple[float, int, logging.LogRecord]] = {}
        self._alike: dict[tuple[int, str, str], tuple[float, int, logging.LogRecord]] = {}
        self.timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, or count it. Runs under the handler's lock."""
        try:
            fields = self.lines.fields(record)
            key = f"{record.levelno} {record.name} {fields}"
        except Exception:
            self.handleError(record)  # a bad format string must not end the process
            return
        if hasattr(record, "answer"):
            super().emit(record)
            return
        now = time.monotonic()
        started, count, _ = self._seen.get(key, (now, 0, record))
        if key in self._seen and now < started + self.window:
            self._seen[key] = (started, count + 1, record)
            self._start_timer()
            return
        self._flush(now)
        if record.levelno > logging.DEBUG:
            kind = (record.levelno, record.name, str(getattr(record, TEMPLATE, record.msg)))
            started, count, _ = self._alike.get(kind, (now, 0, record))
            self._alike[kind] = (started, count + 1, record)
            if count >= MOST_ALIKE:
                self._start_timer()
                return
        if len(self._seen) < MOST_KEPT:
            self._seen[key] = (now, 0, record)
        super().emit(record)

    def _start_timer(self) -> None:
        if self.timer is None:
            self.timer = threading.Timer(self.window, self._end_window)
            self.timer.daemon = True
            self.timer.start()

    def _end_window(self) -> None:
        with self.lock or threading.Lock():
            self.timer = None
            self._flush(time.monotonic())
            pending = any(count for _, count, _ in self._seen.values())
            if pending or any(count > MOST_ALIKE for _, count, _ in self._alike.values()):
                self._start_timer()

    def _flush(self, now: float) -> None:
        """Close the windows that are over, and write the counts of their lines."""
        for key, (started, count, record) in list(self._seen.items()):
            if now >= started + self.window:
                del self._seen[key]
                if count:
                    self._summarise(record, {"repeated": count} if count > 1 else {})
        for kind, (started, count, record) in list(self._alike.items()):
            if now >= started + self.window:
                del self._alike[kind]
                if count > MOST_ALIKE:
                    self._summarise(record, {"alike": count - MOST_ALIKE})

    def _summarise(self, record: logging.LogRecord, counted: dict[str, int]) -> None:
        """Write the last of the lines that were not written, with the present time and their number."""
        written = time.time()
        super().emit(
            logging.makeLogRecord(vars(record) | counted | {"created": written, "msecs": written % 1 * 1000})
        )

    def close(self) -> None:
        """Write the counts that are still open; logging calls this at the end of the process."""
        with self.lock or threading.Lock():
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None
            self._flush(float("inf"))
        super().close()


class Outage:
    """Which failures of one thing are logged: a cause when it is new, and then once per `repeat` seconds.

    Causes that differ only in numbers and ids, as of requests, are the same one.
    """

    def __init__(self, repeat: float = REPEAT) -> None:
        self._repeat = repeat
        self._told: dict[str, float] = {}  # when, by cause

    def is_news(self, cause: str) -> bool:
        """Return whether to log a failure with this cause now."""
        cause, now = _VARIES.sub("#", cause), time.monotonic()
        if (told := self._told.get(cause)) is not None and now < told + self._repeat:
            return False
        if len(self._told) >= CAUSES:
            self._told.clear()
        self._told[cause] = now
        return True

    def ended(self) -> None:
        """The thing works again; its next failure is news."""
        self._told.clear()


def setup(level: str = "info", style: Literal["text", "json"] = "text") -> None:
    """Send this process's log to stderr. Call it once per process, before anything is logged."""
    handler = CountingHandler(sys.stderr, LineFormatter(style, journal=_stderr_is_journal()))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    set_level(level)


def set_level(level: str) -> None:
    """Change the level of the log; also of a running service."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def _stderr_is_journal() -> bool:
    """Whether stderr is the stream that systemd connected to the journal."""
    try:
        stat = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{stat.st_dev}:{stat.st_ino}"
