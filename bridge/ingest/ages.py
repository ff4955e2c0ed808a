"""How old files must be before `compact` deletes them.

There are two ages. A version of the table expires some time after it was replaced: its files are known, and
only its readers can miss them. A file that no version has (an orphan) may be of a writer that has not
committed yet: its commit would name a file that is gone. So orphans have a least age.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridge.ingest.deletes import Deleted
from bridge.ingest.errors import BadOption

if TYPE_CHECKING:
    from bridge.ingest.sinks.base import Sink

ORPHAN_DAYS = 3.0
LEAST_ORPHAN_DAYS = 1.0


@dataclass(frozen=True, slots=True)
class Ages:
    """The ages in days; None: nothing of the kind is deleted."""

    expire: float | None
    orphans: float | None
    risks: tuple[str, ...] = ()  # of ages below the least ones

    @classmethod
    def of(cls, sink: Sink, expire: float | None, orphans: float | None, *, force: bool) -> Ages:
        """Return the ages for a table. With `expire`, orphans are deleted too.

        Raises BadOption for ages below the least ones, unless they are forced. A Delta table has its own.
        """
        if expire is None and orphans is None:
            return cls(None, None)
        kept, risks = sink.retention(), []
        least = max(LEAST_ORPHAN_DAYS, kept)
        if orphans is None:
            orphans = max(ORPHAN_DAYS, kept)
        if expire is not None and expire < kept:
            risks.append(
                f"--expire-days {expire:g}: {sink.name} keeps replaced files for {kept:g} days "
                "(delta.deletedFileRetentionDuration): a query that still reads an older version, or a "
                "RESTORE, finds them gone"
            )
        if orphans < least:
            risks.append(
                f"--orphan-days {orphans:g}: a run or another engine that has been writing for longer may "
                f"commit files that are gone by then, and their rows are lost; the least is {least:g}"
            )
        if risks and not force:
            raise BadOption(
                f"{risks[0]}. To do so all the same: --force. To remove a person's rows for good: erase"
            )
        return cls(expire, orphans, tuple(risks))

    def apply(self, sink: Sink) -> Deleted:
        """Delete what is old enough; raises IngestError."""
        done = Deleted()
        if self.expire is not None:
            done.add(sink.expire(self.expire))
        if self.orphans is not None:
            done.add(sink.orphans(self.orphans))
        return done
