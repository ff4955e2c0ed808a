"""Checks whether the table still has the rows of its state, whatever others did to it.

The state lists the numbers that runs have committed. Another engine can remove rows (a Delta RESTORE, a
DELETE, an overwrite) or add some, which does not change the state. So every run and every report compare
both, from metadata alone; no row is read. The table has the rows of its state if

* the number of its rows is that of the state, and
* since the version on which the last round was planned (`checked`), only runs have made commits that may
  change rows. The commits of runs have the pointer to the state. The format tells whether a commit changes
  rows: compaction does not (Iceberg: operation `replace`; Delta: `dataChange` false).

The number alone would miss rows that were replaced by as many others, and the commits alone would miss
expired ones. If the commits since `checked` have expired (Iceberg: snapshots, Delta: the log), the number
alone decides.

A run that finds a difference reports it, and writes the reason into the state (`differs`). It stays there
until an operator decides. `repair` adapts the state to the table, so the next run ingests lost rows again.
`accept` does the same, but records the lost numbers as deleted on purpose (`removed`), and rows that are not
messages or that occur twice as accepted (`others`). Both are in `bridge.ingest.repair`.

This costs one more read of the table's metadata, and for Delta one small file for each commit since
`checked`, usually one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bridge.ingest.errors import CommitConflict
from bridge.ingest.state import StateStore, TableState

if TYPE_CHECKING:
    from bridge.ingest.sinks.base import Sink, Standing

SHOWN = 3  # commits named in one line
LOOKS = 5  # at a table to which other runs keep committing

REMEDY = (
    "to take again what is lost: streambridge ingest repair; if the table is as it should be: "
    "streambridge ingest accept --rows; both with the options of this table"
)


def reasons(name: str, state: TableState, rows: int, changes: Sequence[str] = ()) -> list[str]:
    """Return why the table may not have the rows of its state; none: it has them.

    `rows` is the number of its rows, and `changes` are the commits of others that may have changed rows.
    """
    found = []
    if rows != state.rows():
        found.append(
            f"{name} has {rows} rows and its state says {state.rows()}: something else changed the table"
        )
    if changes:
        more = f" and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
        found.append(f"{name} was changed by others: {', '.join(changes[:SHOWN])}{more}")
    if state.differs and not found:
        found.append(f"{state.differs} (found by an earlier run)")
    return found


def weigh(name: str, state: TableState, standing: Standing) -> list[str]:
    """Return the reasons, and note the result in the state, for the next commit to record it."""
    found = reasons(name, state, standing.rows, standing.changes)
    if found:
        state.differs = state.differs or found[0]
    else:
        state.checked = standing.at
    return found


def look(sink: Sink) -> tuple[TableState, Standing]:
    """Return the state that the table points to, and what the same version of the table says about its rows.

    Raises StateMissing, and CommitConflict if other runs keep committing.
    """
    for _ in range(LOOKS):
        version = sink.pointer()  # before the location, which changes when another run creates the table
        state = StateStore(sink.state()).load(version)
        standing = sink.standing(state.checked, state.rows())
        if standing.pointer == version:
            return state, standing
    raise CommitConflict(f"{sink.name}: other runs kept committing")
