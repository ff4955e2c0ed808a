"""Names that survive a power cut: a new name is durable once its directory is synced."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Wait until the names in a directory are on the disk; raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path, sync: Callable[[Path], None] = sync_directory) -> None:
    """Make a directory, and its parents, if they do not exist; raises OSError.

    What is made has mode 0700 whatever the umask is: who can write to a parent can replace what is in it.
    Each new directory is synced into its parent. `path` always is: the process that made it may have been
    killed before its sync.
    """
    missing = []
    for one in (path, *path.parents):
        if one.exists():
            break
        missing.append(one)
    for one in reversed(missing):
        if one != path:
            one.mkdir(mode=0o700, exist_ok=True)
            sync(one.parent)
    path.mkdir(mode=0o700, exist_ok=True)  # raises if it is something else
    sync(path.parent)
