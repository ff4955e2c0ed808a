"""What commands print, for people and for programs, and their exit codes."""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
from base64 import b64encode
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from enum import IntEnum
from typing import Any

import msgspec
import typer

from bridge.printable import printable, printable_json
from bridge.streams.segment import StreamMessage

SHORTEST = 20  # characters of a payload that are always shown


class ExitCode(IntEnum):
    """The exit codes of the command."""

    OK = 0
    FAILED = 1  # any other error
    USAGE = 2  # unknown command or option
    DAMAGED = 65  # stored data fails its check
    NOT_FOUND = 66  # no such stream
    BUSY = 75  # another process writes to the data directory; try again later
    CONFIG = 78  # the configuration is wrong; a restart would not help
    INTERRUPTED = 130  # Ctrl-C


def make_usable() -> None:
    """Let the standard streams stand for /dev/null if they are closed, and take every character."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            try:
                os.fstat(number)
            except OSError:  # free: what is opened next must not take this number, and be written to
                os.dup2(null, number)
            setattr(sys, name, open(null, mode, encoding="utf-8"))  # noqa: SIM115 - as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def behave_in_pipes() -> None:
    """Let `| head` end a query silently, as with cat."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def echo(line: str, *, title: str = "") -> None:
    """Print one line after a bold title; unprintable characters are escaped.

    Unlike print and typer.echo it does not flush, because a query may print a million lines.
    """
    sys.stdout.write(_strong(printable(title)) + printable(line) + "\n")


def escaped(text: str) -> str | None:
    """Escape text for one line of a terminal; None if it has other control characters."""
    line = text.replace("\\", "\\\\") if set(text) & set("\n\r\t") else text
    line = line.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    return line if line.isprintable() else None


def json(value: Any) -> None:
    """Print one JSON document on one line."""
    echo(printable_json(msgspec.json.encode(value, enc_hook=str).decode()))


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print columns as wide as their content; numbers are right-aligned."""
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    rights = [
        bool(cells) and all(row[n][:1].isdigit() or row[n] == "-" for row in cells)
        for n in range(len(header))
    ]
    widths = [max(len(row[n]) for row in [header, *cells]) for n in range(len(header))]
    for number, row in enumerate([header, *cells]):
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, rights, strict=True)
        ]
        line = "  ".join(padded).rstrip()
        echo("" if number == 0 else line, title=line if number == 0 else "")


def facts(rows: Iterable[tuple[str, object]]) -> None:
    """Print names and values in two columns."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        echo(f"  {value}", title=name.ljust(width))


def _strong(text: str) -> str:
    """Make text bold on a terminal, unless NO_COLOR is set."""
    if not text:
        return text
    return f"\x1b[1m{text}\x1b[0m" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else text


def note(text: str) -> None:
    """Print a note for people on stderr; unprintable characters are escaped."""
    typer.echo(printable(text), err=True)


def count(number: int, noun: str) -> str:
    """Return a number with a noun, such as `1 stream` or `2 streams`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def number_ranges(ranges: Iterable[tuple[int, int]]) -> str:
    """Format ranges of numbers, such as `3-7, 9`."""
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)


def lost_to_damage(ranges: Sequence[tuple[int, int]]) -> str:
    """Describe messages lost to damage, such as `1 message lost to damage: number 0`."""
    number = sum(last - first + 1 for first, last in ranges)
    numbers = "number" if number == 1 else "numbers"
    return f"{count(number, 'message')} lost to damage: {numbers} {number_ranges(ranges)}"


def timestamp(millis: int) -> str:
    """Format Unix time in ms as ISO 8601 in UTC."""
    return (
        datetime.fromtimestamp(millis / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


def message(message: StreamMessage, *, as_json: bool, deliveries: int | None = None) -> None:
    """Print a message: number, time, topic and payload; for a consumer, also its `deliveries`.

    On a terminal, a long payload is shortened, so that each message takes one line.
    """
    try:
        text: str | None = message.payload.decode()
    except UnicodeDecodeError:
        text = None
    topic = message.topic.decode(errors="replace")
    if as_json:
        document: dict[str, Any] = {
            "sequenceNumber": message.sequence_number,
            "ingestTime": message.ingest_time,
            "topic": topic,
        }
        if text is None:
            document["payloadBase64"] = message.payload
        else:
            document["payload"] = text
        if message.headers:
            document["headers"] = msgspec.msgpack.decode(message.headers)
        if deliveries is not None:
            document["deliveries"] = deliveries
        json(document)
        return
    plain = None if text is None else escaped(text)
    payload = f"base64:{b64encode(message.payload).decode()}" if plain is None else plain
    again = f"  delivered {deliveries} times" if deliveries is not None and deliveries > 1 else ""
    shown = escaped(topic) or repr(topic)
    head = f"{message.sequence_number}  {timestamp(message.ingest_time)}  {shown}  "
    if sys.stdout.isatty():
        note = f"... ({len(message.payload)} bytes){again}"
        room = shutil.get_terminal_size().columns - len(head)
        if len(payload) + len(again) > room:
            payload, again = payload[: max(room - len(note), SHORTEST)], note
    echo(f"{head}{payload}{again}")
