"""What the commands share: options, and printing for people and for programs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from bridge.config import tomlfile
from bridge.config.settings import Config, load, understand
from bridge.config.tomlfile import Keys
from bridge.errors import ConfigError, StreamBridgeError
from bridge.plugin.discovery import shipped
from bridge.printable import printable, printable_json
from bridge.streams.layout import STREAMS
from bridge.streams.store import LOCK, user_name

DEFAULT_CONFIG = Path("/etc/streambridge/streambridge.toml")

ConfigOption = Annotated[
    Path,
    typer.Option(
        "--config", "-c", envvar="STREAMBRIDGE_CONFIG", help="The configuration file.", metavar="FILE"
    ),
]
DataDirOption = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        help="Read this data directory, whatever a configuration says.",
        metavar="DIRECTORY",
        show_default="gateway.data_dir of the configuration",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


class ExitCode(IntEnum):
    """What the command ends with."""

    OK = 0
    FAILED = 1  # anything without a code of its own
    USAGE = 2  # unknown command or option
    DAMAGED = 65  # stored data fails its check
    NOT_FOUND = 66  # no such stream
    BUSY = 75  # another process writes to the data directory; try again later
    CONFIG = 78  # the configuration is wrong; a restart would not help
    INTERRUPTED = 130  # Ctrl-C


def load_config(path: Path) -> Config:
    """The configuration; raises ConfigError, with a way to begin if nobody has made one yet."""
    if path == DEFAULT_CONFIG and not path.exists():
        begin = f"cp {shipped('config') / 'streambridge.toml'} ."
        raise ConfigError(
            f"{path}: there is no such file; begin with the sample: `{begin}`, then name it with --config"
        )
    return load(path)


def known_config(path: Path, *needed: Keys) -> Config:
    """A configuration of which only some keys must be right.

    To look into the streams, nobody needs the service's secrets, nor to have mended the rest.
    """
    if path == DEFAULT_CONFIG and not path.exists():
        return load_config(path)  # says how to begin
    settings, reader = understand(tomlfile.read(path), dict)
    wrong = {keys[:depth] for keys in needed for depth in range(1, len(keys) + 1)} & reader.broken
    if reader.document.problems or wrong:
        raise ConfigError("\n".join(reader.problems))
    return settings


def data_directory(config: Path, data_dir: Path | None, way: str = "--data-dir") -> Path:
    """The data directory that a command works on; `way` is how it is named beside by --config."""
    directory = (
        known_config(config, ("gateway", "data_dir")).gateway.data_dir if data_dir is None else data_dir
    )
    if directory.exists() and not directory.is_dir():
        raise ConfigError(
            f"{directory}: this is not a directory; name the one that gateway.data_dir stands for"
        )
    if not directory.is_dir():
        raise ConfigError(
            f"{directory}: there is no such data directory; start the service once, or name another one "
            f"with --config or {way}"
        )
    if not (directory / STREAMS).is_dir() and any(directory.iterdir()):
        raise ConfigError(
            f"{directory}: this is no data directory of streambridge: {STREAMS}/ is not in it; name the "
            "directory that gateway.data_dir stands for"
        )
    return directory


def act_as_owner(data_dir: Path) -> None:
    """Go on with the rights of the service's user, if root has started this; there is no way back.

    What root makes in a data directory is closed to that user. Whoever made the lock runs the service; a
    directory in which it never ran has none. Raises StreamBridgeError where root has not the right to.
    """
    if os.geteuid() != 0:
        return
    lock = data_dir / LOCK
    owner = (lock if lock.exists() else data_dir).stat()
    if owner.st_uid == 0:
        return
    name = user_name(owner.st_uid)
    try:
        os.initgroups(name, owner.st_gid)
        os.setgid(owner.st_gid)
        os.setuid(owner.st_uid)
    except OSError as error:  # in a container without the right to
        raise StreamBridgeError(
            f"{data_dir}: belongs to user {name}, and root cannot act as that user here: {error.strerror}; "
            f"run this as {name}"
        ) from None


def denied(path: Path) -> str:
    """To whom a path is closed, and who gets there: the owner of what is in the way."""
    way = next(place for place in (path.absolute(), *path.absolute().parents) if os.path.lexists(place))
    user, owner = user_name(os.geteuid()), user_name(way.lstat().st_uid)
    return f" to user {user}" + (f"; run this as user {owner}" if owner != user else "")


def behave_in_pipes() -> None:
    """Let `| head` end a query quietly, as it ends cat."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def echo(line: str, *, title: str = "") -> None:
    """Print one line, with a title in bold before it; what is not printable is escaped.

    Without the flush of print and typer.echo: a query may have a million lines.
    """
    sys.stdout.write(_strong(printable(title)) + printable(line) + "\n")


def escaped(text: str) -> str | None:
    """Text that is safe for a terminal and stays on its line; None if it is not meant as text."""
    line = text.replace("\\", "\\\\") if set(text) & set("\n\r\t") else text
    line = line.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    return line if line.isprintable() else None


def print_json(value: Any) -> None:
    """Print one JSON document on one line."""
    echo(printable_json(msgspec.json.encode(value, enc_hook=str).decode()))


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print columns as wide as their content; numbers to the right."""
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


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Print names and values in two columns."""
    facts = list(facts)
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        echo(f"  {value}", title=name.ljust(width))


def _strong(text: str) -> str:
    """Bold on a terminal that wants it."""
    if not text:
        return text
    return f"\x1b[1m{text}\x1b[0m" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else text


def note(text: str) -> None:
    """Tell people something beside the result; what is not printable is escaped."""
    typer.echo(printable(text), err=True)


def count(number: int, noun: str) -> str:
    """A number of things, as `1 stream` or `2 streams`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def show_ranges(ranges: Iterable[tuple[int, int]]) -> str:
    """Ranges of numbers, as `3-7, 9`."""
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)


def lost_to_damage(ranges: Sequence[tuple[int, int]]) -> str:
    """Say which messages damage has cost, as `1 message lost to damage: number 0`."""
    number = sum(last - first + 1 for first, last in ranges)
    numbers = "number" if number == 1 else "numbers"
    return f"{count(number, 'message')} lost to damage: {numbers} {show_ranges(ranges)}"


def format_time(millis: int) -> str:
    """Unix time in ms as ISO 8601 in UTC."""
    return (
        datetime.fromtimestamp(millis / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )
