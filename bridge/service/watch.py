"""Notices changed files without a signal: users, access keys, tokens, certificates, revocation lists, rules.

The files are those that the configuration names, and the configuration itself. From the configuration, only
the rules, roles and users apply, because revoking a right must not wait. That the last rule or role is gone
applies only on SIGHUP, because without rules everything is allowed. Streams, listeners and everything else
apply on SIGHUP.

Every `interval`, a thread checks the modification time, size, inode, mode and owners of each file. It is a
thread because a disk that hangs must not block the event loop, and an idle loop need not wake for this. A
change, also one by `chmod` or `chown`, which may let it be read or refused, counts once a
second check, soon after, finds the same, so a file that is being written is left alone. It is then read as
with SIGHUP, each file for itself. An invalid one is reported once, and is read again when it changes again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

INTERVAL = 2.0  # seconds between two checks
SETTLED = 0.2  # seconds until the next check after a change

_Seen = dict[Path, tuple[int, ...] | None]


class Watch:
    """The files, as they were when they were read."""

    def __init__(
        self,
        files: Callable[[], Iterable[Path]],
        changed: Callable[[list[Path]], Awaitable[None]],
        interval: float = INTERVAL,
    ) -> None:
        """`files`, called in the thread, names them at each look; `changed` gets those that have changed."""
        self._files, self._changed, self._interval = files, changed, interval
        self._ends = threading.Event()
        self._known: _Seen = _look(files)

    def read(self) -> None:
        """All files are being read now: only later changes count."""
        self._known = _look(self._files)

    async def run(self) -> None:
        """Look until it is cancelled."""
        try:
            while True:
                await self._changed(await asyncio.to_thread(self._next))
        finally:
            self._ends.set()

    def _next(self) -> list[Path]:
        """Wait until files have changed; return them."""
        before = self._known
        wait = self._interval
        while not self._ends.wait(wait):
            found = _look(self._files)
            changed = [path for path in found if path in self._known and found[path] != self._known[path]]
            settled, before = found == before, found
            if settled or not changed:  # the configuration may name other files now
                self._known = found
            if changed and settled:
                return changed
            wait = min(SETTLED, self._interval) if changed else self._interval
        return []


def _look(files: Callable[[], Iterable[Path]]) -> _Seen:
    return {path: _state(path) for path in files()}


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode, found.st_uid, found.st_gid
