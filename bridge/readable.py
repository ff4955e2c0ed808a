"""Reads files that the configuration names, and says why a file cannot be read and what to do.

Somebody may have put anything in the place of such a file. Opening a FIFO blocks until somebody writes to it,
a device may have no end, and a file may be larger than the memory. The service would hang at a reload, or be
killed. So these count as files that cannot be read. What is checked is the file that was opened, not what its
path named a moment before.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from pathlib import Path

MOST = 64 * 1024 * 1024  # bytes
PIECE = 1024 * 1024  # bytes of a read


def is_directory(path: Path | str) -> bool:
    """Return whether a path names a directory. Never raises, unlike `Path.is_dir` where one may not look."""
    return os.path.isdir(path)  # noqa: PTH112


def read_regular(path: Path) -> tuple[bytes, int]:
    """Return the content and the mode of a regular file of at most `MOST` bytes. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        found, pieces, size = os.fstat(fd), list[bytes](), 0
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        while size <= MOST and (piece := os.read(fd, PIECE)):
            pieces.append(piece)
            size += len(piece)
    finally:
        os.close(fd)
    if size > MOST:
        raise OSError(errno.EFBIG, f"it is larger than {MOST >> 20} MiB", str(path))
    return b"".join(pieces), found.st_mode


def ensure_regular(*paths: Path | str | None) -> None:
    """Raise OSError unless `read_regular` would read these files; None is skipped."""
    for path in paths:
        if path is not None:
            read_regular(Path(path))


def user_name(user: int) -> str:
    """The name of a user id, or the number if it has none."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def unreadable(path: Path, create: str = "", service: int | None = None) -> str:
    """Return why a file cannot be read and what to do; an empty text if it can.

    `create` is what to do if there is no such file. `service` is the user id of the service, if known.
    """
    try:
        read_regular(path)
    except FileNotFoundError as error:
        return f"{error.strerror}; {create}" if create else str(error.strerror)
    except IsADirectoryError:
        return "it is a directory; name a file"
    except PermissionError as error:
        user = os.geteuid()
        remedy = (
            _remedy(path.absolute(), user)
            if service in (None, user)
            else f"run this as user {user_name(service)}, as the service does"
        )
        return f"{error.strerror} for user {user_name(user)}; {remedy}"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _remedy(path: Path, user: int) -> str:
    """What root does to let this process's user read a file."""
    for directory in reversed(path.parents):
        if not os.access(directory, os.X_OK):
            return f"chmod a+x {directory}"
    found = path.stat()
    remedies = [] if found.st_uid == user else [f"chown {user_name(user)} {path}"]
    if not found.st_mode & 0o400:
        remedies.append(f"chmod u+r {path}")
    return " && ".join(remedies) or f"see `getfacl {path}`"
