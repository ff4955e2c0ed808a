"""`streambridge ingest`: nothing but options, printing and exit codes.

Exit codes:
  0  the table is up to date and complete
  1  the run failed; nothing of the failed round is in the table
  2  the options are wrong, or Java or a package is missing
  3  numbers are missing (what is there was committed)
  4  nothing is missing, but quarantined objects hold numbers that are not in the table
  5  other runs were always first; nothing was added twice

Importing this module needs no Spark; the heavy imports are inside the functions.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from bridge.ingest.errors import BadOption, IngestError, Moved, NotInstalled
from bridge.ingest.planner import Limits
from bridge.ingest.session import PACKAGES, open_session, require, require_java
from bridge.ingest.store import Place
from bridge.ingest.table import TableOptions, open_sink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bridge.ingest.report import Report

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_MISSING = 3
EXIT_QUARANTINED = 4
EXIT_MOVED = 5

app = typer.Typer(
    help="Bring exported objects from S3 into a table, exactly once, and report what is missing.",
    epilog="Exit codes: 0 complete, 1 failed, 2 options or installation, 3 numbers missing, "
    "4 numbers only in quarantined objects, 5 other runs were always first.",
    no_args_is_help=True,
)

Source = Annotated[
    str, typer.Option("--source", help="Where the gateways export to: s3://bucket/prefix or a directory.")
]
TableName = Annotated[str, typer.Option("--table", help="Iceberg table, namespace.table.")]
Warehouse = Annotated[
    str | None,
    typer.Option("--warehouse", help="Directory or URL of the tables; a directory gets an SQLite catalog."),
]
Catalog = Annotated[
    list[str] | None,
    typer.Option("--catalog", metavar="KEY=VALUE", help="pyiceberg catalog property, repeatable: type=glue"),
]
Delta = Annotated[
    str | None, typer.Option("--delta", help="Use the Delta table at this directory or URL instead.")
]
StateUrl = Annotated[
    str | None,
    typer.Option("--state", help="Where state documents are kept [WAREHOUSE/_streambridge/TABLE]."),
]
Endpoint = Annotated[
    str | None, typer.Option("--endpoint-url", help="Endpoint of an S3 service that is not AWS.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Master = Annotated[str | None, typer.Option("--master", help="Master of a local session [local[*,4]].")]
Remote = Annotated[str | None, typer.Option("--remote", help="Spark Connect server, sc://host:port.")]


@app.callback(invoke_without_command=True)
def ingest(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Option("--source", help="Where the gateways export to: s3://bucket/prefix or a directory."),
    ] = None,
    table: TableName = "lake.messages",
    warehouse: Warehouse = None,
    catalog: Catalog = None,
    delta: Delta = None,
    state: StateUrl = None,
    endpoint_url: Endpoint = None,
    max_objects: Annotated[int, typer.Option(min=1, help="Objects per round at most.")] = Limits().objects,
    max_bytes: Annotated[
        int, typer.Option(min=1, help="Bytes of objects per round at most.")
    ] = Limits().bytes,
    every: Annotated[
        float | None, typer.Option(min=1, help="Go on: look for new objects every so many seconds [once].")
    ] = None,
    master: Master = None,
    remote: Remote = None,
    as_json: Json = False,
) -> None:
    """Bring the table up to date with the objects under --source and report on completeness."""
    if context.invoked_subcommand is not None:
        return
    with _result() as out:
        signal.signal(signal.SIGTERM, _stop)
        if source is None:
            raise _usage("--source is missing: s3://bucket/prefix or a directory")
        place = _landing(source, endpoint_url)
        options = _table(table, warehouse, catalog, delta, state, endpoint_url)
        require(*PACKAGES)
        require_java(remote)
        sink = open_sink(options)
        from bridge.ingest.job import run
        from bridge.ingest.render import summary_line

        limits, tell = Limits(max_objects, max_bytes), _teller(as_json)
        with ExitStack() as opened:

            @cache
            def session() -> SparkSession:  # seconds to start, so only when there is something new
                spark = open_session(master, remote)
                opened.callback(spark.stop)
                return spark

            while True:
                began = time.monotonic()
                summary = run(session, place, sink, limits, tell)
                if as_json:
                    _document(summary.to_json(), out)
                elif every is None or summary.rounds:
                    _say(summary_line(summary))
                if every is None:
                    break
                time.sleep(max(0.0, every - (time.monotonic() - began)))
        _finish(summary.report, None if as_json else out)


@app.command()
def report(
    source: Source,
    table: TableName = "lake.messages",
    warehouse: Warehouse = None,
    catalog: Catalog = None,
    delta: Delta = None,
    state: StateUrl = None,
    endpoint_url: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Report what the table holds and what is missing; reads no messages and needs no Spark."""
    with _result() as out:
        require("pyarrow")
        store = _landing(source, endpoint_url).open()
        sink = open_sink(_table(table, warehouse, catalog, delta, state, endpoint_url))
        from bridge.ingest.heads import read_heads
        from bridge.ingest.planner import Inventory
        from bridge.ingest.report import build
        from bridge.ingest.state import StateStore

        heads = read_heads(store)
        inventory = Inventory(store.list())
        known = StateStore(sink.state()).load(sink.pointer())
        result = build(known, inventory, heads, sink.name, sink.rows())
        if as_json:
            _document(result.to_json(), out)
        _finish(result, None if as_json else out)


@app.command()
def refine(
    to: Annotated[
        str, typer.Option("--to", help="Typed table, namespace.table; with --delta a directory or URL.")
    ],
    schema: Annotated[
        str,
        typer.Option("--schema", help='Columns as Spark DDL, such as "temp DOUBLE, unit STRING", or infer.'),
    ] = "infer",
    form: Annotated[str, typer.Option("--format", help="Payloads are json or cbor.")] = "json",
    stream: Annotated[
        list[str] | None, typer.Option("--stream", help="Only this stream, repeatable [all].")
    ] = None,
    table: TableName = "lake.messages",
    warehouse: Warehouse = None,
    catalog: Catalog = None,
    delta: Delta = None,
    state: StateUrl = None,
    endpoint_url: Endpoint = None,
    master: Master = None,
    remote: Remote = None,
    as_json: Json = False,
) -> None:
    """Decode payloads into typed columns of the table --to; what does not fit goes to <to>_rejects.

    Incremental and exactly once, like the first step.
    """
    with _result() as out:
        if form not in ("json", "cbor"):
            raise _usage(f"--format {form}: it is json or cbor")
        options = _table(table, warehouse, catalog, delta, state, endpoint_url)
        require(*PACKAGES, *(["cbor2"] if form == "cbor" else []))
        messages = open_sink(options)
        spark = open_session(master, remote, "streambridge ingest refine")
        from bridge.ingest.refine import Step

        def make(kind: str, columns: Any) -> Any:
            name = to if kind == "typed" else f"{to.rstrip('/')}_rejects"
            own = replace(options, state=f"{state}/{kind}" if state else None)
            return open_sink(replace(own, delta=name) if delta else replace(own, name=name), columns)

        try:
            done = Step(messages, make, form, schema, stream or ()).run(spark)
        finally:
            spark.stop()
        if as_json:
            _document(asdict(done), out)
        else:
            print(
                f"{done.rows:,} rows typed, {done.rejected:,} rejected; schema {done.schema or '-'}", file=out
            )


@app.command()
def compact(
    expire_days: Annotated[
        float | None,
        typer.Option(
            min=0, help="Also delete files that no version of the last so many days uses [keep all]."
        ),
    ] = None,
    table: TableName = "lake.messages",
    warehouse: Warehouse = None,
    catalog: Catalog = None,
    delta: Delta = None,
    state: StateUrl = None,
    endpoint_url: Endpoint = None,
    master: Master = None,
    remote: Remote = None,
    as_json: Json = False,
) -> None:
    """Put the table's small files together; with --expire-days delete what is no longer used.

    No run may be longer than --expire-days: files that it has not committed yet would be deleted.
    """
    with _result() as out:
        require(*PACKAGES)
        sink = open_sink(_table(table, warehouse, catalog, delta, state, endpoint_url))
        spark = open_session(master, remote, "streambridge ingest compact")
        try:
            done = sink.compact(spark)
        finally:
            spark.stop()
        deleted = sink.expire(expire_days) if expire_days is not None else 0
        if as_json:
            _document({**asdict(done), "deleted": deleted}, out)
        else:
            print(f"{done.before:,} files became {done.after:,}; {deleted:,} unused files deleted", file=out)


@app.command()
def prune(
    source: Source,
    older_than_days: Annotated[float, typer.Option(min=0, help="Keep objects that are younger.")] = 7,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing, say what would go.")] = False,
    trust_state: Annotated[
        bool, typer.Option("--trust-state", help="Also when rows were deleted from the table on purpose.")
    ] = False,
    table: TableName = "lake.messages",
    warehouse: Warehouse = None,
    catalog: Catalog = None,
    delta: Delta = None,
    state: StateUrl = None,
    endpoint_url: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Delete exported objects that are provably in the table; quarantined ones stay. Needs no Spark."""
    with _result() as out:
        require("pyarrow")
        from bridge.ingest.prune import prune as go

        place = _landing(source, endpoint_url)
        sink = open_sink(_table(table, warehouse, catalog, delta, state, endpoint_url))
        done = go(place, sink, older_than_days, dry_run=dry_run, trust_state=trust_state)
        if as_json:
            _document(asdict(done), out)
        else:
            verb = "would be deleted" if dry_run else "deleted"
            print(
                f"{done.deleted:,} objects {verb} ({done.deleted_bytes / 1e6:,.1f} MB), "
                f"{done.kept_because_young:,} are younger than {older_than_days:g} days, "
                f"{done.kept:,} are not in the table",
                file=out,
            )


@app.command()
def package(
    folder: Annotated[Path, typer.Argument(help="Where the files are written.")] = Path(),
) -> None:
    """Write the two files that spark-submit needs: the modules as a zip, and the script to start."""
    from bridge.ingest.package import write_package

    for path in write_package(folder):
        typer.echo(path)


class Stopped(BaseException):
    """Raised by SIGTERM: an ordinary end, for a round that is not committed leaves nothing."""


def _stop(number: int, frame: object) -> None:
    raise Stopped


def _landing(source: str, endpoint: str | None) -> Place:
    """Where the objects are; a directory that is not there is a mistake, not an empty one."""
    place = Place(source, endpoint)
    if "://" not in source and not Path(source).is_dir():
        raise _usage(f"--source {source}: there is no such directory")
    return place


def _finish(result: Report, out: TextIO | None) -> None:
    """Print the report where people read it, and leave with what it says."""
    if out is not None:
        from rich.console import Console

        from bridge.ingest.render import show

        show(result, Console(file=out, width=None if out.isatty() else 160))
    if result.total("missing"):
        raise typer.Exit(EXIT_MISSING)
    if not result.complete:
        raise typer.Exit(EXIT_QUARANTINED)


def _table(
    name: str,
    warehouse: str | None,
    catalog: list[str] | None,
    delta: str | None,
    state: str | None,
    endpoint: str | None,
) -> TableOptions:
    properties: dict[str, str] = {}
    for text in catalog or ():
        key, equals, value = text.partition("=")
        if not equals:
            raise _usage(f"--catalog {text}: write it as key=value, such as type=glue")
        properties[key] = value
    return TableOptions(name, warehouse, properties, delta, state, endpoint)


def _teller(as_json: bool) -> Any:
    """Print every round: a line for people, or one JSON object a line; never on standard output."""
    if as_json:
        return lambda done: _say(json.dumps(asdict(done), separators=(",", ":")))
    from bridge.ingest.render import round_line

    return lambda done: _say(round_line(done))


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _document(content: dict[str, Any], out: TextIO) -> None:
    print(json.dumps(content, separators=(",", ":")), file=out, flush=True)


def _usage(message: str) -> typer.Exit:
    _say(f"streambridge ingest: {message}")
    return typer.Exit(EXIT_USAGE)


@contextmanager
def _result() -> Iterator[TextIO]:
    """Standard output for the result alone; errors become one line and an exit code.

    The JVM and the libraries write to file descriptor 1 as well, so for the run it is standard error.
    """
    sys.stdout.flush()
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # standard output is not a file, as in a test or a notebook
        descriptor = -1
    if descriptor < 0:
        with _errors():
            yield sys.stdout
        return
    kept = os.dup(descriptor)
    out = os.fdopen(kept, "w", encoding=sys.stdout.encoding or "utf-8")
    os.dup2(2, descriptor)
    try:
        with _errors():
            yield out
    finally:
        out.flush()
        os.dup2(kept, descriptor)
        out.close()


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (BadOption, NotInstalled) as error:
        raise _usage(str(error)) from None
    except Moved as error:
        _say(f"streambridge ingest: {error}; nothing was added")
        raise typer.Exit(EXIT_MOVED) from None
    except IngestError as error:
        _say(f"streambridge ingest: {error}")
        raise typer.Exit(EXIT_FAILED) from None
    except Stopped:
        raise typer.Exit(EXIT_OK) from None
    except Exception as error:
        # an S3 that cannot be reached or refuses needs no stack trace; anything else does
        if not type(error).__module__.startswith("botocore"):
            raise
        _say(f"streambridge ingest: {type(error).__name__}: {error}")
        raise typer.Exit(EXIT_FAILED) from None
