"""Rows deleted as other engines do it: something beside the data says which (merge-on-read)."""

from __future__ import annotations

import base64
import json
import struct
import time
from pathlib import Path
from typing import Any
from uuid import uuid4
from zlib import crc32

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestContent, ManifestWriterV2
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.update.snapshot import _FastAppendFiles

COLUMNS = pa.schema(
    [
        pa.field("file_path", pa.string(), False, {b"PARQUET:field_id": b"2147483546"}),
        pa.field("pos", pa.int64(), False, {b"PARQUET:field_id": b"2147483545"}),
    ]
)
# the digits of Python's base 85, and those of ZeroMQ's
Z85 = str.maketrans(
    "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~",
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#",
)


class _Writer(ManifestWriterV2):
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


class _Deletes(_FastAppendFiles):
    def new_manifest_writer(self, spec: Any) -> Any:
        return _Writer(spec, self.schema(), self.new_manifest_output(), self._snapshot_id, self._compression)


def delete_rows(
    sink: Any,
    file: Any,
    positions: list[int],
    content: DataFileContent = DataFileContent.POSITION_DELETES,
    *,
    apart: bool = False,
) -> None:
    """Delete rows of one of the sink's files, which stays as it is; the table is a local one.

    A deletion vector of Delta is in the log or, with `apart`, in a file.
    """
    table = sink.table()
    if isinstance(table, DeltaTable):
        _by_vector(Path(sink.location.url), file.path, positions, apart=apart)
        return
    of = f"{table.location()}/{file.path}"
    path = f"{table.location()}/data/{uuid4()}-deletes.parquet"
    local = Path(path.removeprefix("file://"))
    pq.write_table(pa.table({"file_path": [of] * len(positions), "pos": positions}, schema=COLUMNS), local)
    bound = {2147483546: of.encode()}
    entry = DataFile.from_args(
        content=content,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=next(iter(table.scan().plan_files())).file.partition,
        record_count=len(positions),
        file_size_in_bytes=local.stat().st_size,
        column_sizes={},
        value_counts={},
        null_value_counts={},
        nan_value_counts={},
        lower_bounds=bound,
        upper_bounds=bound,
        key_metadata=None,
        split_offsets=None,
        equality_ids=[4] if content == DataFileContent.EQUALITY_DELETES else None,
        sort_order_id=None,
        spec_id=table.spec().spec_id,
    )
    with table.transaction() as change, _Deletes(Operation.OVERWRITE, change, table.io) as update:
        update.append_data_file(entry)


def _by_vector(table: Path, path: str, positions: list[int], *, apart: bool) -> None:
    """Add a version to the log in which the file has a deletion vector, as Delta's protocol describes it."""
    versions = sorted((table / "_delta_log").glob("*.json"))
    actions = [json.loads(line) for version in versions for line in version.read_text().splitlines()]
    add = next(action["add"] for action in actions if action.get("add", {}).get("path") == path)
    bitmap = struct.pack("<IIHHI", 12346, 1, 0, len(positions) - 1, 16)  # one container, an array
    bitmap += b"".join(struct.pack("<H", position) for position in positions)
    raw = struct.pack("<IQI", 1681511377, 1, 0) + bitmap
    vector = {
        "storageType": "u" if apart else "i",
        "pathOrInlineDv": _z85(raw + bytes(-len(raw) % 4)),
        "sizeInBytes": len(raw),
        "cardinality": len(positions),
    }
    if apart:
        name = uuid4()
        file = b"\x01" + struct.pack(">I", len(raw)) + raw + struct.pack(">I", crc32(raw))
        (table / f"deletion_vector_{name}.bin").write_bytes(file)
        vector |= {"pathOrInlineDv": _z85(name.bytes), "offset": 1}
    features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors", "appendOnly"]}
    now = time.time_ns() // 1_000_000
    version = [
        {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}},
        {"remove": {"path": path, "deletionTimestamp": now, "dataChange": True}},
        {"add": {**add, "deletionVector": vector}},
        {"commitInfo": {"timestamp": now, "operation": "DELETE"}},
    ]
    log = table / "_delta_log" / f"{len(versions):020d}.json"
    log.write_text("".join(json.dumps(action) + "\n" for action in version))


def _z85(data: bytes) -> str:
    return base64.b85encode(data).decode().translate(Z85)
