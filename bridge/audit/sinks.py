"""Where the lines of the audit log go.

`FileSink` appends JSON lines to a file of mode 0600. It reserves the space first: if lines do not fit on the
disk, none is begun. If a power cut has torn a line, the next start cuts it off. At `max_size` the file is
rotated: FILE.1 becomes FILE.2 and so on, FILE becomes FILE.1, and the directory is synced. A kill in between
leaves every line under one of these names. If the file was moved away (by logrotate), it is created again.
The file is locked, so a second process is refused.

`JournalSink` sends each line to journald by its native protocol
(https://systemd.io/JOURNAL_NATIVE_PROTOCOL): a datagram of `FIELD=value` lines; a value with a newline has
its length before it. A datagram that is too long for the socket goes as a sealed memory file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import logging
import os
import socket
import stat
import struct
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from bridge.durable import sync_directory
from bridge.printable import printable, printable_json, without_credentials

log = logging.getLogger(__name__)

_PRIORITIES = {"ok": 6, "refused": 4, "failed": 4}
FULL = (errno.ENOSPC, errno.EDQUOT)
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE of fallocate(2)
PAGE = 4096  # bytes of a write: a reader sees a longer one in parts
TAIL = 512 * 1024  # bytes at the end of a file; no line is as long
_SEALS = 0x000F  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE


class Sink(Protocol):
    """A destination of lines. All methods raise OSError."""

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        """Write those lines that have not been written yet, by their `seq`."""

    def sync(self) -> None:
        """Wait until they are on the disk."""

    def close(self) -> None:
        """Sync and close."""


class FileSink:
    """A file that is rotated."""

    def __init__(self, path: Path) -> None:
        """Open it. Raises OSError, even if only because another process writes to it."""
        self._path = path
        self._max_size, self._files = 1 << 62, 2
        self._written = 0  # the `seq` of the last line that is in the file
        self.last = 0  # the `seq` of the last line of earlier processes
        self.torn = False  # the last line was incomplete
        self._fd, self._size = self._open()
        if not self._size:
            with contextlib.suppress(OSError), self._numbered(1).open("rb") as before:
                self.last = _last(before.read()[-TAIL:])

    def bound(self, max_size: int, files: int) -> None:
        """Set the maximum size of a file in bytes, and the number of files."""
        self._max_size, self._files = max_size, files

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        """Append lines, and rotate when they do not fit."""
        self._follow()
        piece = bytearray()
        last = self._written
        for line in lines:
            if line["seq"] <= self._written:
                continue
            text = _json(line) + b"\n"
            over = self._size + len(piece) + len(text) > self._max_size and self._size + len(piece)
            if over or len(piece) + len(text) > PAGE:
                self._append(piece, last)
                piece.clear()
            if over:
                self._rotate()
            piece += text
            last = line["seq"]
        self._append(piece, last)

    def sync(self) -> None:
        """Wait until the lines are on the disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Sync and close the file."""
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def _open(self) -> tuple[int, int]:
        """Open or create the file. Returns its descriptor and size."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(self._path, flags, 0o600)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "not a regular file; choose another path", str(self._path))
            if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                what = "users other than its owner can write to it; chmod go-w"
                raise OSError(errno.EPERM, what, str(self._path))
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                what = "another process writes to it; choose another file"
                raise OSError(errno.EBUSY, what, str(self._path)) from None
            size = found.st_size
            tail = os.pread(fd, TAIL, max(size - TAIL, 0))
            if tail and not tail.endswith(b"\n"):
                self.torn = True
                size -= len(tail) - tail.rfind(b"\n") - 1
                os.ftruncate(fd, size)
            self.last = max(self.last, _last(tail[: tail.rfind(b"\n") + 1]))
            sync_directory(self._path.absolute().parent)
        except BaseException:
            os.close(fd)
            raise
        return fd, size

    def _follow(self) -> None:
        """Create the file again if it was moved away."""
        with contextlib.suppress(FileNotFoundError):
            found, mine = self._path.stat(), os.fstat(self._fd)
            if (found.st_ino, found.st_dev) == (mine.st_ino, mine.st_dev):
                return
        self._exchange()

    def _exchange(self) -> None:
        old, (self._fd, self._size) = self._fd, self._open()
        os.close(old)

    def _append(self, piece: bytearray, last: int) -> None:
        """Append complete lines up to number `last`, or leave the file unchanged."""
        view = memoryview(bytes(piece))
        written = 0
        if piece:
            self._reserve(len(piece))
        try:
            while written < len(view):
                written += os.write(self._fd, view[written:])
        except OSError:
            if written:
                os.ftruncate(self._fd, self._size)
            raise
        self._size += written
        self._written = last

    def _reserve(self, size: int) -> None:
        """Raise OSError if there is no room for so many bytes, as far as the file system can tell."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.fallocate(self._fd, _KEEP_SIZE, ctypes.c_longlong(self._size), ctypes.c_longlong(size)):
            number = ctypes.get_errno()
            if number in FULL:
                raise OSError(number, os.strerror(number), str(self._path))

    def _rotate(self) -> None:
        """Begin a new file. If that fails, the old one grows."""
        try:
            os.fsync(self._fd)
            for number in range(self._files - 1, 1, -1):
                with contextlib.suppress(FileNotFoundError):
                    self._numbered(number - 1).replace(self._numbered(number))
            self._path.replace(self._numbered(1))
            self._exchange()
        except OSError as error:
            log.error("the audit log is not rotated: %s", error)

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


class JournalSink:
    """The journal of this machine."""

    def __init__(self, path: Path) -> None:
        """Connect to the socket of journald; raises OSError."""
        self._path = path
        self._sent = 0  # the `seq` of the last line
        self._socket = self._connect()

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        """Send each line as an entry of its own."""
        for line in lines:
            if line["seq"] <= self._sent:
                continue
            entry = _entry(line)
            try:
                self._send(entry)
            except (ConnectionError, FileNotFoundError):  # journald was restarted
                self._socket.close()
                self._socket = self._connect()
                self._send(entry)
            self._sent = line["seq"]

    def sync(self) -> None:
        """Do nothing: journald syncs."""

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _connect(self) -> socket.socket:
        found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        found.settimeout(5.0)
        try:
            found.connect(str(self._path))
        except OSError as error:
            found.close()
            what = f"{error.strerror}; journald does not run here, set audit.file instead"
            raise OSError(error.errno, what, str(self._path)) from None
        return found

    def _send(self, entry: bytes) -> None:
        try:
            self._socket.send(entry)
        except OSError as error:
            if error.errno not in (errno.EMSGSIZE, errno.ENOBUFS):
                raise
            fd = os.memfd_create("audit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                with open(fd, "wb", closefd=False) as file:
                    file.write(entry)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
                socket.send_fds(self._socket, [b""], [fd])
            finally:
                os.close(fd)


def _last(tail: bytes) -> int:
    """Return the `seq` of the last whole line; 0 if there is none."""
    for line in reversed(tail.splitlines()):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return int(json.loads(line)["seq"])
    return 0


def _shown(line: dict[str, Any]) -> dict[str, Any]:
    """Format a line with times as text, without credentials in URLs."""
    found = {key: _clean(value) for key, value in line.items()}
    for key in found.keys() & {"time", "since"}:
        seconds = line[key]
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
        found[key] = f"{stamp}.{int(seconds % 1 * 1000):03}Z"
    return found


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return without_credentials(value)
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return value


def _json(line: dict[str, Any]) -> bytes:
    text = json.dumps(_shown(line), default=str, ensure_ascii=False)
    return printable_json(text).encode(errors="backslashreplace")


def _entry(line: dict[str, Any]) -> bytes:
    """Format a line as journald expects it."""
    shown = _shown(line)
    fields = {
        "MESSAGE": _sentence(shown),
        "PRIORITY": str(_PRIORITIES.get(shown["outcome"], 5)),
        "SYSLOG_IDENTIFIER": "streambridge-audit",
    }
    for key, value in shown.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
        fields[f"STREAMBRIDGE_{key.upper()}"] = text
    return b"".join(_field(name, text) for name, text in fields.items())


def _field(name: str, text: str) -> bytes:
    value = text.encode(errors="backslashreplace")
    if b"\n" in value:
        return name.encode() + b"\n" + struct.pack("<Q", len(value)) + value + b"\n"
    return name.encode() + b"=" + value + b"\n"


def _sentence(shown: dict[str, Any]) -> str:
    """Format a line for people, such as `login refused mqtt 192.0.2.1 user=ann: wrong password`."""
    head: Iterable[str] = (
        str(shown[key]) for key in ("event", "outcome", "front_end", "address") if key in shown
    )
    more = (f"{key}={shown[key]!r}" for key in ("user", "client", "on", "repeated") if key in shown)
    # An error may repeat data from a client, and the journal does not escape it.
    why = f": {printable(shown['why'])}" if "why" in shown else ""
    return " ".join((*head, *more)) + why
