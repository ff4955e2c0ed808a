"""Shared by the commands: options, and printing for people and for programs."""

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
        help="Use this data directory instead of the configured one.",
        metavar="DIRECTORY",
        show_default="gateway.data_dir of the configuration",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


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


def load_config(path: Path) -> Config:
    """Load the configuration; raises ConfigError, which says how to begin if there is none yet."""
    if path == DEFAULT_CONFIG and not path.exists():
        begin = f"cp {shipped('config') / 'streambridge.toml'} ."
        raise ConfigError(
            f"{path}: there is no such file; begin with the sample: `{begin}`, then use it with --config"
        )
    return load(path)


def known_config(path: Path, *needed: Keys) -> Config:
    """Load a configuration of which only some keys must be right.

    Reading the streams needs neither the service's secrets nor a configuration without mistakes.
    """
    if path == DEFAULT_CONFIG and not path.exists():
        return load_config(path)  # says how to begin
    settings, reader = understand(tomlfile.read(path), dict)
    wrong = {keys[:depth] for keys in needed for depth in range(1, len(keys) + 1)} & reader.broken
    if reader.document.problems or wrong:
        raise ConfigError("\n".join(reader.problems))
    return settings


def data_directory(config: Path, data_dir: Path | None, option: str = "--data-dir") -> Path:
    """The data directory of a command; errors mention `option`, which sets it directly."""
    directory = (
        known_config(config, ("gateway", "data_dir")).gateway.data_dir if data_dir is None else data_dir
    )
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory}: this is not a directory; use the one in gateway.data_dir")
    if not directory.is_dir():
        raise ConfigError(
            f"{directory}: there is no such data directory; start the service once, or give another one "
            f"with --config or {option}"
        )
    if not (directory / STREAMS).is_dir() and any(directory.iterdir()):
        raise ConfigError(
            f"{directory}: this is not a data directory of streambridge, since it has no {STREAMS}/; use the "
            "one in gateway.data_dir"
        )
    return directory


def act_as_owner(data_dir: Path) -> None:
    """If root runs this command, continue as the service's user, who cannot read files that root creates.

    The owner of the lock file is that user; before the first start, the owner of the directory. Raises
    StreamBridgeError if root may not change its user.
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
    except OSError as error:  # in a container without that capability
        raise StreamBridgeError(
            f"{data_dir}: it belongs to user {name}, and root cannot become that user here: "
            f"{error.strerror}; run this as {name}"
        ) from None


def denied(path: Path) -> str:
    """For an error about a path: which user has no access, and which user has."""
    found = next(parent for parent in (path.absolute(), *path.absolute().parents) if os.path.lexists(parent))
    user, owner = user_name(os.geteuid()), user_name(found.lstat().st_uid)
    return f" for user {user}" + (f"; run this as user {owner}" if owner != user else "")


def behave_in_pipes() -> None:
    """Let `| head` end a query silently, as with cat."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def echo(line: str, *, title: str = "") -> None:
    """Print one line after a bold title; unprintable characters are escaped.

    It does not flush, as print and typer.echo do: a query may print a million lines.
    """
    sys.stdout.write(_strong(printable(title)) + printable(line) + "\n")


def escaped(text: str) -> str | None:
    """Text that is safe for a terminal and takes one line; None if it has other control characters."""
    line = text.replace("\\", "\\\\") if set(text) & set("\n\r\t") else text
    line = line.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    return line if line.isprintable() else None


def print_json(value: Any) -> None:
    """Print one JSON document on one line."""
    echo(printable_json(msgspec.json.encode(value, enc_hook=str).decode()))


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
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


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Print names and values in two columns."""
    facts = list(facts)
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        echo(f"  {value}", title=name.ljust(width))


def _strong(text: str) -> str:
    """Bold text on a terminal, unless NO_COLOR is set."""
    if not text:
        return text
    return f"\x1b[1m{text}\x1b[0m" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else text


def note(text: str) -> None:
    """Print a note for people on stderr; unprintable characters are escaped."""
    typer.echo(printable(text), err=True)


def count(number: int, noun: str) -> str:
    """A number with a noun, as `1 stream` or `2 streams`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def show_ranges(ranges: Iterable[tuple[int, int]]) -> str:
    """Ranges of numbers, as `3-7, 9`."""
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)


def lost_to_damage(ranges: Sequence[tuple[int, int]]) -> str:
    """Describe messages lost to damage, as `1 message lost to damage: number 0`."""
    number = sum(last - first + 1 for first, last in ranges)
    numbers = "number" if number == 1 else "numbers"
    return f"{count(number, 'message')} lost to damage: {numbers} {show_ranges(ranges)}"


def format_time(millis: int) -> str:
    """Unix time in ms as ISO 8601 in UTC."""
    return (
        datetime.fromtimestamp(millis / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )
