"""Open the table that the job writes, with the same options as the command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bridge.ingest.errors import BadOption, NoTable
from bridge.ingest.session import require
from bridge.ingest.store import StorageLocation

if TYPE_CHECKING:
    import pyarrow as pa

    from bridge.ingest.sinks.base import Sink


@dataclass(frozen=True, slots=True)
class TableOptions:
    """Which table, and where.

    `name` is `namespace.table` in an Iceberg catalog: that of `catalog` (pyiceberg's properties), or else an
    SQLite file in the directory `warehouse`. With `delta`, the table is the Delta table at that URL. `state`
    is the location of the state documents, by default beside the table.
    """

    name: str = "lake.messages"
    warehouse: str | None = None
    catalog: Mapping[str, str] = field(default_factory=dict)
    delta: str | None = None
    state: str | None = None
    endpoint: str | None = None


def open_existing(options: TableOptions) -> Sink:
    """Open an existing table as a sink. Raises NoTable if it does not exist, and creates nothing."""
    sink = open_sink(options, make=False)
    if sink.table() is None:
        raise NoTable(options.delta or f"{options.name} in {options.warehouse or 'the catalog'}")
    return sink


def open_sink(options: TableOptions, schema: pa.Schema | None = None, *, make: bool = True) -> Sink:
    """Open a table as a sink. The first round creates the table, with the columns of `schema`.

    An SQLite catalog is created here; without `make`, NoTable is raised if there is none.
    """
    require("pyarrow")
    from bridge.ingest.columns import MESSAGES

    schema = MESSAGES if schema is None else schema
    StorageLocation(options.state or "")  # a wrong URL is refused before anything is created
    if options.delta:
        require("deltalake")
        from bridge.ingest.sinks.delta import DeltaSink

        return DeltaSink(options.delta, options.state, options.endpoint, schema)
    require("pyiceberg")
    from bridge.ingest.sinks.iceberg import IcebergSink, open_catalog

    if "." not in options.name:
        raise BadOption(f"--table {options.name}: write it as namespace.table, such as lake.messages")
    catalog = open_catalog(options.warehouse, options.catalog, options.endpoint, make=make)
    state = options.state
    if state is None and options.warehouse:
        # not below the table: engines that remove orphan files there would remove it
        state = f"{options.warehouse.rstrip('/')}/_streambridge/{options.name}"
    return IcebergSink(catalog, options.name, state, options.endpoint, schema)


def read(options: TableOptions, columns: Sequence[str] | None = None, limit: int | None = None) -> Any:
    """Return rows of the table as an Arrow table; with `limit`, only the first ones are read."""
    return open_sink(options).read(columns, limit)
