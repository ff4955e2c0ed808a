"""TOML files, with the file and line of every key.

`read` reads one file and the fragments `conf.d/*.toml` beside it, in the order of their names. Tables are
merged; any other value, a list included, replaces the value of an earlier file.

The standard library's parser keeps no positions. A second, small pass over a text that it has accepted finds
them. Keys inside an inline table or an array have the line of the key that contains them.
"""

from __future__ import annotations

import errno
import os
import re
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from bridge.plugin import discovery
from bridge.readable import foreign, read_regular, unreadable

FRAGMENTS = "conf.d"
LARGEST = 2 * 1024 * 1024  # bytes of all files together; a stream takes some hundred
DEEPEST = 100  # levels of tables and lists; far more than any setting has, and far less than Python's stack
Keys = tuple[str | int, ...]

_PART = r"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')"""
_DOTTED = re.compile(rf"{_PART}(?:[ \t]*\.[ \t]*{_PART})*")
_PARTS = re.compile(_PART)
_DEEP = re.compile(rf"(?<![A-Za-z0-9_.\"'-])(?:{_PART}[ \t]*+\.[ \t]*+){{{DEEPEST}}}")
_TOKEN = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#[^\n]*|[\[\]{}\n]|[^\[\]{}\n"\'#]+',
    re.DOTALL,
)
_NAMES = re.compile(r"\(('[^']*',? ?)+\)")  # the parser shows keys as a tuple
_SYNTAX_ERROR = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


class Position(NamedTuple):
    """A line of a file; 0 is the file as a whole."""

    file: Path
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else str(self.file)


class Problem(NamedTuple):
    """A mistake, where it is, and what to do."""

    position: Position
    what: str

    def __str__(self) -> str:
        return f"{self.position}: {self.what}"


class Document:
    """The merged content of a file and its fragments."""

    def __init__(self, path: Path, *, obeyed: bool = False) -> None:
        """`obeyed`: by a service of this user, so that others must not be able to change it."""
        self.path, self._obeyed = path, obeyed
        self.files: list[Path] = []
        self._left = LARGEST
        self.problems: list[Problem] = []  # of files that could not be read
        self.data: dict[str, Any] = {}
        self._positions: dict[Keys, Position] = {(): Position(path, 1)}

    def states(self, keys: Keys) -> bool:
        """Return whether there is a value at these keys."""
        value: Any = self.data
        try:
            for key in keys:
                value = value[key]
        except (KeyError, IndexError, TypeError):
            return False
        return True

    def position(self, keys: Keys) -> Position:
        """The position of the value at `keys`, or of the innermost table around it."""
        while keys not in self._positions:
            keys = keys[:-1]
        return self._positions[keys]

    def order(self, position: Position) -> tuple[bool, Path, int]:
        """A key to sort positions in the order in which the files are read."""
        return position.file != self.path, position.file, position.line

    def add(self, path: Path) -> None:
        """Merge one file into the document; if it cannot be read, `problems` says so."""
        if self._obeyed and (why := foreign(path)):
            self.problems.append(Problem(Position(path, 0), f"not obeyed: {why}"))
        try:
            text = _text(path, self._left)
            self._left -= len(text)
            data, lines = _parse(text)
        except _UnreadableError as error:
            self.problems.append(Problem(Position(path, error.line), str(error)))
            return
        self.files.append(path)
        _merge(self.data, data, (), self._forget)
        for keys, line in lines.items():
            self._positions[keys] = Position(path, line)

    def _forget(self, keys: Keys) -> None:
        for known in [known for known in self._positions if known[: len(keys)] == keys]:
            del self._positions[known]


def files_at(path: Path) -> list[Path]:
    """The file at `path`, the directory of its fragments, and the fragments, as far as they are there."""
    with suppress(OSError):
        return [path, path.parent / FRAGMENTS, *_fragments(path)]
    return [path, path.parent / FRAGMENTS]


def read(path: Path, *, obeyed: bool = False) -> Document:
    """Read the file at `path` and the fragments in `conf.d` beside it. `obeyed` is as in `Document`."""
    document = Document(path, obeyed=obeyed)
    document.add(path)
    try:
        for fragment in _fragments(path):
            document.add(fragment)
    except OSError as error:  # without them, rights and limits might be missing
        if document.files:  # else it has the same reason
            directory = path.parent / FRAGMENTS
            what = f"cannot be read: {unreadable(directory) or error}"
            document.problems.append(Problem(Position(directory, 0), what))
    return document


def _fragments(path: Path) -> list[Path]:
    """The fragments beside a file; raises OSError, other than `Path.glob`, if they cannot be listed."""
    directory = path.parent / FRAGMENTS
    try:
        names = os.listdir(directory)  # noqa: PTH208 - sorted below
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [directory / name for name in sorted(names) if name.endswith(".toml")]


class _UnreadableError(Exception):
    """Why a file cannot be read, and from which line on; 0: all of it."""

    def __init__(self, what: str, line: int = 0) -> None:
        super().__init__(what)
        self.line = line


def _text(path: Path, most: int) -> str:
    try:
        return read_regular(path, most)[0].decode()
    except FileNotFoundError:
        sample = discovery.shipped("config") / "streambridge.toml"
        raise _UnreadableError(
            "there is no such file; give another one with --config, or begin with the sample: "
            f"`cp {sample} .`"
        ) from None
    except OSError as error:
        why = f"the files are larger than {LARGEST >> 20} MiB together" if error.errno == errno.EFBIG else ""
        raise _UnreadableError(f"cannot be read: {why or unreadable(path) or error}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise _UnreadableError("not valid UTF-8; save the file as UTF-8", line) from error


def _parse(text: str) -> tuple[dict[str, Any], dict[Keys, int]]:
    # Before the parser, whose time for a dotted key grows with the square of its parts.
    if any(line.count(".") >= DEEPEST and _DEEP.search(line) for line in text.split("\n")):
        raise _UnreadableError("not valid TOML: nested too deeply")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = _SYNTAX_ERROR.search(str(error))
        line = int(found[1]) if found and found[1] else text.count("\n") + 1
        what = _SYNTAX_ERROR.sub("", str(error)).replace("Cannot overwrite a value", "a key is set twice")
        what = _NAMES.sub(lambda found: f"`{'.'.join(re.findall(_PART, found[0]))}`".replace("'", ""), what)
        raise _UnreadableError(f"not valid TOML: {what}", line) from error
    except RecursionError:
        raise _UnreadableError("not valid TOML: nested too deeply") from None
    if _nested_deeper(data, DEEPEST):
        raise _UnreadableError("not valid TOML: nested too deeply")
    return data, _lines(text.replace("\r\n", "\n"))


def _nested_deeper(data: dict[str, Any], levels: int) -> bool:
    """Return whether tables and lists are nested in more than so many levels."""
    level: list[Any] = [data]
    for _ in range(levels):
        level = [
            part
            for whole in level
            for part in (whole.values() if isinstance(whole, dict) else whole)
            if isinstance(part, (dict, list))
        ]
        if not level:
            return False
    return True


def _merge(into: dict[str, Any], data: dict[str, Any], keys: Keys, forget: Callable[[Keys], None]) -> None:
    for key, value in data.items():
        here = (*keys, key)
        known = into.get(key)
        if isinstance(known, dict) and isinstance(value, dict):
            _merge(known, value, here, forget)
        else:
            if key in into:  # else no position is known, and looking for it takes as long as all are many
                forget(here)
            into[key] = value


def _lines(text: str) -> dict[Keys, int]:
    """The line of every table and key of a valid TOML text."""
    lines: dict[Keys, int] = {}
    tables: dict[Keys, int] = {}  # arrays of tables and their last index
    table: Keys = ()
    at = 0
    line = 1
    while at < len(text):
        start = at
        if text[at] in " \t\n":
            at += 1
        elif text[at] == "#":
            at = _end_of_line(text, at)
        elif text[at] == "[":
            double = text.startswith("[[", at)
            found = _DOTTED.search(text, at)
            assert found is not None
            table = _inside(tables, _unquote(found[0]), last=not double)
            if double:
                tables[table] = tables.get(table, -1) + 1
                table = (*table, tables[table])
            for depth in range(1, len(table) + 1):
                lines.setdefault(table[:depth], line)
            at = _end_of_line(text, found.end())
        else:
            found = _DOTTED.match(text, at)
            assert found is not None
            parts = _unquote(found[0])
            for depth in range(1, len(parts) + 1):
                lines.setdefault((*table, *parts[:depth]), line)
            at = _end_of_value(text, found.end())
        line += text.count("\n", start, at)
    return lines


def _unquote(dotted: str) -> list[str]:
    parts = _PARTS.findall(dotted)
    return [str(tomllib.loads(f"x = {part}")["x"]) if part[0] in "\"'" else part for part in parts]


def _inside(tables: dict[Keys, int], parts: list[str], *, last: bool) -> Keys:
    """The keys of a header: below an array of tables it means the last element."""
    keys: Keys = ()
    for number, part in enumerate(parts, 1):
        keys = (*keys, part)
        if keys in tables and (last or number < len(parts)):
            keys = (*keys, tables[keys])
    return keys


def _end_of_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _end_of_value(text: str, at: int) -> int:
    depth = 0
    for token in _TOKEN.finditer(text, at):
        if token[0] == "\n" and depth == 0:
            return token.start()
        if token[0] in "[{":
            depth += 1
        elif token[0] in "]}":
            depth -= 1
    return len(text)
