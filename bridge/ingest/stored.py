"""The data files of a table: their footers, and how their columns map to those of the table.

Iceberg identifies a column by its field id. When another engine renames one, older files keep the old name,
and a new column may get a name that older files use for another column. Read by name, their values would
become null, or be taken for those of the other column.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from bridge.ingest.errors import IngestError, line
from bridge.ingest.store import ObjectStore, StorageLocation, holding, shared

FOOTER = 64 << 10  # bytes of the first request: most footers are smaller
END = 8  # bytes: the length of the footer, and Parquet's magic
FIELD_ID = b"PARQUET:field_id"


def opened(location: StorageLocation, path: str) -> tuple[ObjectStore, str]:
    """Return the store of a data file of a table at `location`, for a task, and the file's key in it."""
    place, key = holding(location, path)
    return shared(place), key


def footer(store: ObjectStore, path: str) -> pq.FileMetaData:
    """Read the footer of a file, and nothing else."""
    end = store.tail(path, FOOTER)
    length = int.from_bytes(end[-END:-4], "little") + END
    if length > len(end):
        end = store.tail(path, length)
    return pq.read_metadata(pa.BufferReader(end))


class RangedFile(io.RawIOBase):
    """A file of `size` bytes that is read by ranges: columns that nobody asks for are not transferred."""

    def __init__(self, store: ObjectStore, path: str, size: int) -> None:
        self._store, self._path, self._size, self._at = store, path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = self._size - self._at
        wanted = left if size is None or size < 0 else min(size, left)
        found = self._store.part(self._path, self._at, wanted) if wanted > 0 else b""
        self._at += len(found)
        return found


@contextmanager
def undamaged(path: str) -> Iterator[None]:
    """Raise IngestError, which names the file, for what Arrow finds damaged in it."""
    try:
        yield
    except pa.ArrowNotImplementedError:  # this build or version of Arrow, not the file
        raise
    except (OSError, pa.ArrowException) as error:  # a wrong checksum is an OSError
        raise IngestError(
            f"{path}: this data file is damaged ({type(error).__name__}: {line(error)}); restore it from the "
            "versions of its bucket, or remove it from the table with another engine: `streambridge ingest "
            "repair` then lets the next run take its rows again"
        ) from error


def names(file: pa.Schema, table: pa.Schema) -> dict[str, str]:
    """Map the file's columns to the table's names: by field id, or by name if there are no ids."""
    by_id = {_id(field): field for field in table if _id(field)}
    if not by_id or not any(map(_id, file)):
        known = set(table.names)
        return {name: name for name in file.names if name in known}
    pairs = ((field, by_id.get(_id(field))) for field in file)
    return {field.name: known.name for field, known in pairs if known is not None and _alike(field, known)}


def named(path: str, file: pa.Schema, table: pa.Schema, wanted: Sequence[str]) -> list[str]:
    """Return the file's names for these columns of the table; raises IngestError if it lacks one."""
    known = {of_table: of_file for of_file, of_table in names(file, table).items()}
    for name in wanted:
        if name not in known:
            raise IngestError(
                f"{path}: this data file has no values of the table's column {name}: another engine wrote "
                "the file, or dropped the column and created it again; roll the table back to before that"
            )
    return [known[name] for name in wanted]


def _alike(one: pa.Field, other: pa.Field) -> bool:
    """Return whether the fields within two columns have the same ids: Arrow's casts would go by name."""
    inner = [[kind.field(at) for at in range(kind.num_fields)] for kind in (one.type, other.type)]
    return len(inner[0]) == len(inner[1]) and all(
        _id(mine) == _id(its) and _alike(mine, its) for mine, its in zip(*inner, strict=True)
    )


def _id(field: pa.Field) -> bytes | None:
    found: bytes | None = (field.metadata or {}).get(FIELD_ID)
    return found
