"""The files of segments without a live message: on the disk until a worker thread has removed them."""

from __future__ import annotations

from pathlib import Path

from bridge.streams.directory import Directory
from bridge.streams.drops import DropLog


class ObsoleteSegments:
    """What is to be removed of one stream, and what is being removed."""

    def __init__(self, directory: Directory, drops: DropLog) -> None:
        self._directory, self._drops = directory, drops
        self.pending: list[Path] = []
        self._deleting: list[Path] | None = None  # what a worker thread has

    def any(self) -> bool:
        """Whether there are files that take room."""
        return bool(self._deleting or self.pending)

    def begin(self, oldest: int) -> list[Path]:
        """Files for a worker thread to `delete`, before `end` is called; none if one has some already.

        None either if `drops.log` cannot tell of all that is gone below `oldest`.
        """
        if self._deleting is not None or not self.pending or not self._drops.explains(oldest):
            return []
        self._deleting, self.pending = self.pending, []
        return self._deleting

    def delete(self, paths: list[Path], *, cut: bool = False) -> None:
        """Remove files from the disk; raises OSError. May run in a thread. What is gone already is fine.

        Only when the disk knows why: otherwise a power cut could leave a legal drop that looks like loss.
        `cut`: free their room at once, also of a file that a reader has open; it sees that its messages
        were dropped.
        """
        self._drops.sync()
        self._directory.delete(paths, cut=cut)

    def end(self, *, failed: bool) -> None:
        """A worker thread is done; what it failed to remove waits again."""
        deleting, self._deleting = self._deleting or [], None
        if failed:
            self.pending = deleting + self.pending

    def delete_now(self, oldest: int) -> bool:
        """Remove all, also what a worker thread is about to; False as in `begin`. Raises OSError."""
        if not self._drops.explains(oldest):
            return False
        self.delete([*(self._deleting or ()), *self.pending], cut=True)
        self.pending = []
        if self._deleting is not None:
            self._deleting = []
        self._drops.save()  # its room comes first: it is what makes room the next time
        return True
