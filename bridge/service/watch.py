"""Notices changed files without a signal: users, access keys, tokens, certificates, revocation lists, rules.

The files are those that the configuration names, and the configuration itself. Of that only the rules, roles
and users apply: taking away a right must not wait. Streams, listeners and all else apply when somebody wants
it (SIGHUP).

Every `interval` a thread looks at the modification time, the size and the inode of each file. A change counts
once two looks in a row agree: a file that is being written is left alone. It is then read as with SIGHUP, all
or nothing. A file that is wrong is reported once, and is read again when it changes again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

INTERVAL = 1.0  # seconds

_Seen = dict[Path, tuple[int, int, int] | None]


class Watch:
    """The files, as they were when they were read."""

    def __init__(
        self,
        files: Callable[[], Iterable[Path]],
        changed: Callable[[list[Path]], None],
        interval: float = INTERVAL,
    ) -> None:
        """`files` names them at each look; `changed` gets those that have changed."""
        self._files, self._changed, self._interval = files, changed, interval
        self._known: _Seen = _look(list(files()))

    def read(self) -> None:
        """All files are being read now: only later changes count."""
        self._known = _look(list(self._files()))

    async def run(self) -> None:
        """Look until it is cancelled."""
        before = self._known
        while True:
            await asyncio.sleep(self._interval)
            found = await asyncio.to_thread(_look, list(self._files()))
            changed = [path for path in found if path in self._known and found[path] != self._known[path]]
            settled, before = found == before, found
            if changed and settled:
                self._known = found
                self._changed(changed)
            elif not changed:
                self._known = found  # the configuration may name other files now


def _look(files: Iterable[Path]) -> _Seen:
    return {path: _state(path) for path in files}


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
