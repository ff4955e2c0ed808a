"""Data files that a table has: what their footers say, and which of their columns is which of the table's.

Iceberg knows a column by its field id: when another engine renames it, older files keep the old name, and
a new column may get a name that files have for another one. Read by name, their values would become null, or
those of another column.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from bridge.ingest.errors import IngestError
from bridge.ingest.store import Store

FOOTER = 64 << 10  # bytes asked for at first: most footers are smaller
END = 8  # bytes: the length of the footer, and Parquet's magic
FIELD_ID = b"PARQUET:field_id"


def footer(store: Store, path: str) -> pq.FileMetaData:
    """Read only the footer of a file."""
    end = store.tail(path, FOOTER)
    length = int.from_bytes(end[-END:-4], "little") + END
    if length > len(end):
        end = store.tail(path, length)
    return pq.read_metadata(pa.BufferReader(end))


def names(file: pa.Schema, table: pa.Schema) -> dict[str, str]:
    """What the table calls the columns of the file that it has: by field id, by name where there is none."""
    by_id = {_id(field): field for field in table if _id(field)}
    if not by_id or not any(map(_id, file)):
        known = set(table.names)
        return {name: name for name in file.names if name in known}
    pairs = ((field, by_id.get(_id(field))) for field in file)
    return {field.name: known.name for field, known in pairs if known is not None and _alike(field, known)}


def named(path: str, file: pa.Schema, table: pa.Schema, wanted: Sequence[str]) -> list[str]:
    """What the file calls these columns of the table; raises IngestError if it lacks one."""
    known = {of_table: of_file for of_file, of_table in names(file, table).items()}
    for name in wanted:
        if name not in known:
            raise IngestError(
                f"{path}: this data file has no values of the table's column {name}, for another engine "
                "wrote the file, or dropped the column and made it anew; roll the table back to before that"
            )
    return [known[name] for name in wanted]


def _alike(one: pa.Field, other: pa.Field) -> bool:
    """Whether what is within two columns is the same: Arrow's casts would go by name there."""
    inner = [[kind.field(at) for at in range(kind.num_fields)] for kind in (one.type, other.type)]
    return len(inner[0]) == len(inner[1]) and all(
        _id(mine) == _id(its) and _alike(mine, its) for mine, its in zip(*inner, strict=True)
    )


def _id(field: pa.Field) -> bytes | None:
    found: bytes | None = (field.metadata or {}).get(FIELD_ID)
    return found
