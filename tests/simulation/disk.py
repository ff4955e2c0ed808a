"""The simulated disk: real files on a tmpfs, and a note of what of them is on the disk for sure.

A sync makes what a file held when it began durable; a directory's sync, its names. A power cut (`cut`) leaves

* of the names: a prefix of their changes, as a journal does, with all that were synced;
* of a file's data: everything synced, and of the later writes none, all, the first few, or any of them,
  each in whole sectors of 512 bytes. Where a write is missing below the size, there are zeros.

`strict`: the sync of a file does not make its name durable (POSIX promises no more); otherwise it does,
as on ext4. `failing`: so many syncs fail, of files whose path has `failing_at` in it; what such a file held
then can be read until it leaves the page cache, and is never on the disk unless it is written again, however
the next sync ends. `refusing`: so many writes fail for want of room, to files with `refusing_at`. `lying`:
syncs return and do nothing. `full`: no file grows. `slow`: a sync takes up to so many seconds, of files with
`slow_at`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import NoReturn

SECTOR = 512
REAL = {
    name: getattr(os, name)
    for name in (
        "open", "close", "dup", "pread", "read", "pwrite", "pwritev", "write", "fsync", "fdatasync",
        "ftruncate", "rename", "replace", "unlink", "remove", "mkdir", "rmdir", "symlink", "statvfs",
        "scandir", "fstat", "lseek", "readlink", "link",
    )
}  # fmt: skip


def remove_tree(path: str) -> None:
    """Remove a real directory."""
    with REAL["scandir"](path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                remove_tree(entry.path)
            else:
                REAL["unlink"](entry.path)
    REAL["rmdir"](path)


class Node:
    """A file."""

    def __init__(self, data: bytes = b"") -> None:
        self.durable = bytearray(data)
        self.pending: list[tuple[int, bytes | None]] = []  # offset and data; None: truncated there
        self.written = 0  # how many writes there ever were; the last of them are pending
        self.forgotten = False  # the page cache has what a failed sync has not written

    def add(self, offset: int, data: bytes | None) -> None:
        self.pending.append((offset, data))
        self.written += 1

    def sync(self, upto: int) -> None:
        """Bring the first `upto` writes to the disk."""
        number = max(upto - (self.written - len(self.pending)), 0)
        for offset, data in self.pending[:number]:
            _apply(self.durable, offset, data)
        del self.pending[:number]

    def lost(self) -> None:
        """A sync has failed: the writes are forgotten, the sizes are not."""
        size = len(self.durable)
        for offset, data in self.pending:
            size = offset if data is None else max(size, offset + len(data))
        self.pending = [(size, None)] if size != len(self.durable) else []
        self.forgotten = True

    def after_cut(self, random: Random) -> bytes:
        content = bytearray(self.durable)
        how = random.choice(("nothing", "everything", "some first", "any"))
        if how == "nothing" or not self.pending:
            return bytes(content)
        first = random.randrange(len(self.pending) + 1)
        left: set[int] = set()  # sectors that are not written any more: of each, the disk has one state
        for number, (offset, data) in enumerate(self.pending):
            if how == "some first" and number > first:
                break
            torn = how == "some first" and number == first
            if how == "any" and random.random() < 0.4:
                torn = True
            if data is not None:
                stop = offset + len(data)
                if torn and how == "some first":
                    stop = random.randrange(offset, stop + 1)
                for at, part in _sectors(offset, data):
                    lost = at + len(part) > stop or (torn and how == "any" and random.random() < 0.5)
                    if lost:
                        left.add(at // SECTOR)
                    if at // SECTOR not in left:
                        _apply(content, at, part)
            elif not torn:
                _apply(content, offset, data)
        return bytes(content)


def _sectors(offset: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    """The parts of a write in each sector."""
    at, end = offset, offset + len(data)
    while at < end:
        following = min((at // SECTOR + 1) * SECTOR, end)
        yield at, data[at - offset : following - offset]
        at = following


def _apply(content: bytearray, offset: int, data: bytes | None) -> None:
    if data is None:
        del content[offset:]
        content.extend(bytes(offset - len(content)))
    else:
        if offset > len(content):
            content.extend(bytes(offset - len(content)))
        content[offset : offset + len(data)] = data


class Link(str):
    """A symbolic link."""


class Dir:
    """A directory: its names now, and those that are on the disk."""

    def __init__(self) -> None:
        self.names: dict[str, Node | Dir | Link] = {}
        self.durable: dict[str, Node | Dir | Link] = {}


Change = list[tuple[Dir, str, "Node | Dir | Link | None"]]


class Disk:
    """Everything below `root`."""

    def __init__(self, root: Path, random: Random) -> None:
        self.root, self._random = str(root), random
        self._skip = len(self.root) + 1
        self.top = Dir()
        self.journal: list[Change] = []  # changes of names that may be lost
        self.strict, self.lying, self.full = True, False, False
        self.slow, self.slow_at = 0.0, ""  # s that a sync may take
        self._slowed: list[list[float]] = []  # when each sync began and ended
        self.failing = self.refusing = 0
        self.failing_at = self.refusing_at = ""
        self.open: dict[int, tuple[Node | Dir, str]] = {}
        self.on_failure: Callable[[], object] = lambda: None  # a sync has failed
        self.on_trouble: Callable[[str], object] = lambda path: None  # a call has failed
        self.failed_at: set[str] = set()  # paths where anything has failed
        REAL["mkdir"](root, 0o700)

    # -- where a path leads to

    def _parent(self, path: str) -> tuple[Dir, str]:
        parts = path[self._skip :].rstrip("/").split("/")
        found = self.top
        for part in parts[:-1]:
            step = found.names[part]
            assert isinstance(step, Dir), path
            found = step
        return found, parts[-1]

    def _find(self, path: str) -> Node | Dir | Link | None:
        if len(path.rstrip("/")) < self._skip:
            return self.top
        parent, name = self._parent(path)
        return parent.names.get(name)

    def _change(self, *changes: tuple[Dir, str, Node | Dir | Link | None]) -> None:
        for directory, name, node in changes:
            if node is None:
                directory.names.pop(name, None)
            else:
                directory.names[name] = node
        self.journal.append(list(changes))

    # -- calls; each makes the real one first

    def _fail(self, number: int, path: str) -> NoReturn:
        self.failed_at.add(path)
        self.on_trouble(path)
        raise OSError(number, os.strerror(number), path)

    def do_open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if self.full and flags & os.O_CREAT and not os.path.lexists(path):
            self._fail(errno.ENOSPC, path)
        fd: int = REAL["open"](path, flags, mode)
        node = self._find(path)
        if node is None:
            node = Node()
            parent, name = self._parent(path)
            self._change((parent, name, node))
        assert not isinstance(node, Link)
        if flags & os.O_TRUNC and isinstance(node, Node):
            node.add(0, None)
        self.open[fd] = node, path
        return fd

    def do_write(self, fd: int, data: bytes, offset: int) -> int:
        node, path = self.open[fd]
        assert isinstance(node, Node)
        if self.refusing > 0 and self.refusing_at in path:
            self.refusing -= 1
            self._fail(errno.ENOSPC, path)
        if self.full:
            room = REAL["fstat"](fd).st_size - offset
            if room <= 0:
                self._fail(errno.ENOSPC, path)
            if room < len(data):
                self.failed_at.add(path)
            data = data[:room]
        done: int = REAL["pwrite"](fd, data, offset)
        node.add(offset, bytes(data))
        return done

    def begin_sync(self, fd: int) -> int:
        """A sync begins: it covers what was written by now."""
        node = self.open[fd][0]
        return node.written if isinstance(node, Node) else 0

    def is_slow(self, fd: int) -> bool:
        """Whether a sync of this file takes long."""
        return self.slow > 0 and self.slow_at in self.open[fd][1]

    def do_sync(self, fd: int, upto: int) -> None:
        """A sync that has begun ends."""
        node, path = self.open[fd]
        if self.lying:
            return
        fails = self.failing > 0 and self.failing_at in path
        if isinstance(node, Node):
            if fails:
                self.failing -= 1
                self.on_failure()
                node.lost()
                self._fail(errno.EIO, path)
            node.sync(upto)
            if not self.strict:
                self._commit(len(self.journal))
        else:
            if fails:
                self.failing -= 1
                self.on_failure()
                self._fail(errno.EIO, path)
            mine = [number for number, change in enumerate(self.journal) if any(c[0] is node for c in change)]
            if mine:
                self._commit(mine[-1] + 1)

    @contextmanager
    def syncs_slowly(self, now: Callable[[], float]) -> Iterator[None]:
        """A sync takes long."""
        note = [now(), float("inf")]
        self._slowed.append(note)
        try:
            yield
        finally:
            note[1] = now()

    def syncing(self, begin: float, end: float) -> float:
        """How many s of a time a slow sync was under way: a turn syncs all streams."""
        total, done = 0.0, begin
        for first, last in sorted(self._slowed):
            first, last = max(first, done), min(last, end)
            if last > first:
                total, done = total + last - first, last
        return total

    def _commit(self, number: int) -> None:
        for change in self.journal[:number]:
            for directory, name, node in change:
                if node is None:
                    directory.durable.pop(name, None)
                else:
                    directory.durable[name] = node
        del self.journal[:number]

    def do_drop_cache(self, fd: int) -> None:
        """Clean pages leave the page cache, and are read from the disk again."""
        node, path = self.open[fd]
        if isinstance(node, Node) and node.forgotten:
            node.forgotten = False
            content = bytearray(node.durable)
            for offset, data in node.pending:
                _apply(content, offset, data)
            other = REAL["open"](path, os.O_WRONLY)
            REAL["ftruncate"](other, 0)
            REAL["pwrite"](other, content, 0)
            REAL["close"](other)

    def do_truncate(self, fd: int, size: int) -> None:
        REAL["ftruncate"](fd, size)
        node = self.open[fd][0]
        assert isinstance(node, Node)
        node.add(size, None)

    def do_rename(self, source: str, target: str) -> None:
        REAL["rename"](source, target)
        (old, name), (new, fresh) = self._parent(source), self._parent(target)
        self._change((old, name, None), (new, fresh, old.names[name]))

    def do_unlink(self, path: str) -> None:
        REAL["unlink"](path)
        parent, name = self._parent(path)
        self._change((parent, name, None))

    def do_mkdir(self, path: str, mode: int = 0o777) -> None:
        if self.full:
            self._fail(errno.ENOSPC, path)
        REAL["mkdir"](path, mode)
        parent, name = self._parent(path)
        self._change((parent, name, Dir()))

    def do_rmdir(self, path: str) -> None:
        REAL["rmdir"](path)
        parent, name = self._parent(path)
        self._change((parent, name, None))

    def do_symlink(self, target: str, path: str) -> None:
        REAL["symlink"](target, path)
        parent, name = self._parent(path)
        self._change((parent, name, Link(target)))

    # -- power

    def cut(self) -> str:
        """The power goes: what is left is on the disk. Returns in words what was lost."""
        kept = self._random.choice((0, len(self.journal), self._random.randrange(len(self.journal) + 1)))
        lost_names = len(self.journal) - kept
        self._commit(kept)
        self.journal.clear()
        unsynced = sum(1 for node in self._files(self.top) if node.pending)
        self._settle(self.top)
        self.write_out()
        return f"{unsynced} files were not synced; {lost_names} changes of names were lost"

    def _files(self, directory: Dir) -> Iterator[Node]:
        for entry in directory.durable.values():
            if isinstance(entry, Node):
                yield entry
            elif isinstance(entry, Dir):
                yield from self._files(entry)

    def _settle(self, directory: Dir) -> None:
        directory.names = dict(directory.durable)
        for entry in directory.names.values():
            if isinstance(entry, Node):
                if entry.pending:
                    entry.durable = bytearray(entry.after_cut(self._random))
                    entry.pending = []
            elif isinstance(entry, Dir):
                self._settle(entry)

    def write_out(self) -> None:
        """Make the real files what is noted."""
        remove_tree(self.root)
        REAL["mkdir"](self.root, 0o700)
        self._write_out(self.top, self.root)

    def _write_out(self, directory: Dir, path: str) -> None:
        for name, entry in directory.names.items():
            place = f"{path}/{name}"
            if isinstance(entry, Dir):
                REAL["mkdir"](place, 0o700)
                self._write_out(entry, place)
            elif isinstance(entry, Link):
                REAL["symlink"](entry, place)
            else:
                fd = REAL["open"](place, os.O_WRONLY | os.O_CREAT, 0o600)
                REAL["write"](fd, bytes(entry.durable))
                REAL["close"](fd)

    def clear(self) -> None:
        """A new disk."""
        self.journal.clear()
        self.top = Dir()
        self.write_out()

    def copy(self) -> Dir:
        """All files as they are now: a backup."""
        return _copied(self.top, self.root)

    def restore(self, backup: Dir) -> None:
        """Put a backup in place of everything."""
        self.journal.clear()
        self.top = _duplicate(backup)
        self.write_out()


def _copied(directory: Dir, path: str) -> Dir:
    made = Dir()
    for name, entry in directory.names.items():
        if isinstance(entry, Dir):
            made.names[name] = _copied(entry, f"{path}/{name}")
        elif isinstance(entry, Link):
            made.names[name] = entry
        else:
            made.names[name] = Node(Path(path, name).read_bytes())
    made.durable = dict(made.names)
    return made


def _duplicate(directory: Dir) -> Dir:
    made = Dir()
    for name, entry in directory.names.items():
        if isinstance(entry, Dir):
            made.names[name] = _duplicate(entry)
        elif isinstance(entry, Node):
            made.names[name] = Node(bytes(entry.durable))
        else:
            made.names[name] = entry
    made.durable = dict(made.names)
    return made
