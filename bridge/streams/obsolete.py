"""The files of segments without a live message, until a worker thread has deleted them."""

from __future__ import annotations

from pathlib import Path

from bridge.streams.directory import Directory
from bridge.streams.drops import DropLog


class ObsoleteSegments:
    """The files of one stream to delete, and those being deleted."""

    def __init__(self, directory: Directory, drops: DropLog) -> None:
        self._directory, self._drops = directory, drops
        self.pending: list[Path] = []
        self._deleting: list[Path] | None = None  # by a worker thread

    def any(self) -> bool:
        """Whether there are such files."""
        return bool(self._deleting or self.pending)

    def begin(self, oldest: int) -> list[Path]:
        """Files for a worker thread to `delete`; call `end` afterwards.

        There are none while a thread is deleting, or if `drops.log` cannot record all drops below `oldest`.
        """
        if self._deleting is not None or not self.pending or not self._drops.explains(oldest):
            return []
        self._deleting, self.pending = self.pending, []
        return self._deleting

    def delete(self, paths: list[Path], *, cut: bool = False) -> None:
        """Delete files; raises OSError. May run in a thread. Files that are gone already are no error.

        Syncs `drops.log` first: otherwise an intended drop could look like a loss after a power cut. `cut`:
        free the space at once, also of a file that a reader has open; the reader sees the drop.
        """
        self._drops.sync()
        self._directory.delete(paths, cut=cut)

    def end(self, *, failed: bool) -> None:
        """A worker thread is done; files that it failed to delete are pending again."""
        deleting, self._deleting = self._deleting or [], None
        if failed:
            self.pending = deleting + self.pending

    def delete_now(self, oldest: int) -> bool:
        """Delete all, also those that a worker thread is about to; False as in `begin`. Raises OSError."""
        if not self._drops.explains(oldest):
            return False
        self.delete([*(self._deleting or ()), *self.pending], cut=True)
        self.pending = []
        if self._deleting is not None:
            self._deleting = []
        self._drops.save()  # it preallocates first: without that nothing can be freed next time
        return True
