"""Reads files that the configuration names, and says why a file cannot be read and what to do.

Somebody may have put anything in the place of such a file. Opening a FIFO blocks until somebody writes to it,
a device may have no end, and a file may be larger than the memory. The service would hang at a reload, or be
killed. So these count as files that cannot be read. What is checked is the file that was opened, not what its
path named a moment before.

What is obeyed or executed, the configuration and plugins, has one rule of ownership more: `foreign`.
"""

from __future__ import annotations

import errno
import grp
import hashlib
import logging
import os
import pwd
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from bridge.errors import ConfigError

log = logging.getLogger(__name__)
T = TypeVar("T")

MOST = 64 * 1024 * 1024  # bytes
PIECE = 1024 * 1024  # bytes of a read
LINKS = 40  # from one to the next, as for the kernel


def is_directory(path: Path | str) -> bool:
    """Return whether a path names a directory. Never raises, unlike `Path.is_dir` where one may not look."""
    return os.path.isdir(path)  # noqa: PTH112


def read_regular(path: Path, most: int = MOST) -> tuple[bytes, int]:
    """Return the content and the mode of a regular file of at most `most` bytes. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        found, pieces, size = os.fstat(fd), list[bytes](), 0
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        while size <= most and (piece := os.read(fd, PIECE)):
            pieces.append(piece)
            size += len(piece)
    finally:
        os.close(fd)
    if size > most:
        raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB", str(path))
    return b"".join(pieces), found.st_mode


class Kept:
    """What was made of files, so that only what has changed is made again, and a broken file changes nothing.

    `broken` says of each option what is wrong with its file, whose last good content holds, and `missing` the
    same where there is none since the start. Any thread may use this.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], tuple[object, Any]] = {}
        self.broken: dict[str, str] = {}
        self.missing: dict[str, str] = {}

    def read(
        self,
        key: tuple[Any, ...],
        option: str,
        paths: Sequence[Path | None],
        make: Callable[[], T],
        *also: object,
    ) -> T:
        """Return what `make` makes of some files, or has made: `key` names it, `also` is what else counts.

        Raises ConfigError or OSError if the files are broken, and nothing good has been made yet.
        """
        known = self._made.get(key)
        seen = [*also, *(None if path is None else _content(path) for path in paths)]
        try:
            if known is None or known[0] != seen:
                self._made[key] = known = seen, make()
        except (ConfigError, OSError) as error:
            if known is None:
                self.missing[option] = str(error)
                raise
            if str(error) not in self.broken.values():
                log.error("%s; its last good content stays", error)
                self.broken[option] = str(error)
        else:
            self.broken.pop(option, None)
            self.missing.pop(option, None)
        made: T = known[1]
        return made

    def forget(self, gone: Callable[[tuple[Any, ...]], bool]) -> None:
        """Forget what was made of files that the configuration does not name any more."""
        for key in filter(gone, [*self._made]):
            del self._made[key]


def _content(path: Path) -> object:
    try:
        content, mode = read_regular(path)
    except OSError as error:
        return error.errno
    return hashlib.sha256(content).digest(), mode


def ensure_regular(*paths: Path | str | None) -> None:
    """Raise OSError unless `read_regular` would read these files; None is skipped."""
    for path in paths:
        if path is not None:
            read_regular(Path(path))


def foreign(path: Path, user: int | None = None) -> str:
    """Return why others than root and a user could change what a path names, and the remedy; else nothing.

    The user is by default that of this process. Asked are the path, what it leads to by links, and all
    directories on the way: they belong to these users, and nobody else may write to them. A directory like
    /tmp, where only owners replace their files, is good; so is a group that has no other member. In the
    container image, where users are not those of the machine, so is what is mounted read-only.
    """
    owner = os.geteuid() if user is None else user
    with suppress(OSError):  # what cannot be found cannot be read either
        for place in _way(path.absolute()):
            found = place.lstat()
            if "STREAMBRIDGE_IMAGE" in os.environ and os.statvfs(place).f_flag & os.ST_RDONLY:
                continue
            if found.st_uid not in (0, owner):
                only = "root" if owner == 0 else f"root and user {user_name(owner)}"
                whose = f"{place} belongs to user {user_name(found.st_uid)}"
                return f"{whose}; only {only} may own it, because the service obeys it; chown root {place}"
            if stat.S_ISLNK(found.st_mode) or (found.st_mode & stat.S_ISVTX and stat.S_ISDIR(found.st_mode)):
                continue
            if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _is_private(found)):
                return f"{place} is writable by group or others; chmod go-w {place}"
    return ""


def _way(path: Path) -> Iterator[Path]:
    """A path, what it leads to by links, and all directories on the way, those before what is in them."""
    for _ in range(LINKS):
        *parents, name = [*reversed(path.parents), path]
        for place in parents:
            yield place
            if place.is_symlink():  # begin again with the directory that it leads to
                path = place.parent / place.readlink() / path.relative_to(place)
                break
        else:
            yield name
            if not name.is_symlink():
                return
            path = name.parent / name.readlink()


def _is_private(found: os.stat_result) -> bool:
    """Whether the group of a file has no member but its owner, who is not root."""
    with suppress(KeyError):
        user, group = pwd.getpwuid(found.st_uid), grp.getgrgid(found.st_gid)
        return bool(found.st_uid) and user.pw_gid == group.gr_gid and {*group.gr_mem} <= {user.pw_name}
    return False


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
