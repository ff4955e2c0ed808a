"""`streambridge ingest`: its subcommands. What they share is in `options` and `console`.

Importing this module needs no Spark: the heavy imports are inside the functions.
"""

from __future__ import annotations

import json
import signal
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from bridge.ingest.console import (
    EXIT_DIFFERS,
    EXIT_MISSING,
    EXIT_NOTHING,
    EXIT_QUARANTINED,
    Stopped,
    answer,
    document,
    external_reason,
    log,
    result,
    stop,
)
from bridge.ingest.errors import BadOption, CommitConflict
from bridge.ingest.options import Json, Source, Spark, spark, table, takes
from bridge.ingest.planner import RoundLimits
from bridge.ingest.session import PACKAGES, require, require_java
from bridge.ingest.store import StorageLocation
from bridge.ingest.table import TableOptions, open_existing, open_sink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bridge.ingest.repair import Repaired
    from bridge.ingest.report import Report

_NOTHING = (
    "no object and no gateway report, and the table is empty; "
    "check the prefix, and that a gateway's s3 export writes to it"
)

SHOWN = 20  # ranges printed for one stream; --json has all

app = typer.Typer(
    help="Bring exported objects from S3 into a table, exactly once, and report what is missing.",
    epilog="Exit codes: 0 complete, 1 failed, 2 options or installation, 3 numbers missing, "
    "4 numbers only in quarantined or unreadable objects (refine: rejects), "
    "5 other runs always committed first, 6 nothing found or no such table, "
    "7 others have changed the table, 143 stopped by SIGTERM.",
    no_args_is_help=True,
    rich_markup_mode=None,  # markup would swallow a default in []
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
@takes(where=table, on=spark)
def ingest(
    context: typer.Context,
    *,
    source: Annotated[
        str | None,
        typer.Option("--source", help="Where the gateways export to: s3://bucket/prefix or a directory."),
    ] = None,
    where: TableOptions,
    max_objects: Annotated[
        int, typer.Option(min=1, help="Objects per round at most.")
    ] = RoundLimits().objects,
    max_bytes: Annotated[
        int, typer.Option(min=1, help="Bytes of objects per round at most.")
    ] = RoundLimits().bytes,
    every: Annotated[
        float | None, typer.Option(min=1, help="Keep running: look for new objects every N seconds [once].")
    ] = None,
    retry_quarantined: Annotated[
        bool, typer.Option("--retry-quarantined", help="Read quarantined objects once more.")
    ] = False,
    on: Spark,
    as_json: Json = False,
) -> None:
    """Bring the table up to date with the objects under --source and report on completeness."""
    if context.invoked_subcommand is not None:
        return
    with result() as out:
        signal.signal(signal.SIGTERM, stop)
        if source is None:
            raise BadOption("--source is missing: s3://bucket/prefix or a directory")
        if retry_quarantined and every is not None:
            raise BadOption("--retry-quarantined is for a single run, without --every")
        location = _landing(source, where.endpoint)
        require(*PACKAGES)
        require_java(on.remote)
        sink = open_sink(where)
        from bridge.ingest.job import run
        from bridge.ingest.render import summary_line

        limits, on_round = RoundLimits(max_objects, max_bytes), _progress(as_json)
        with ExitStack() as opened:

            @cache
            def session() -> SparkSession:  # takes seconds to start, so only when there is something new
                return opened.enter_context(on.session("streambridge ingest"))

            def once() -> Report:
                summary = run(session, location, sink, limits, on_round, retry_quarantined=retry_quarantined)
                if as_json:
                    document(summary.to_json(), out)
                elif summary.rounds or (summary.report.streams and every is None):
                    log(summary_line(summary))
                return summary.report

            if every is not None:
                _repeat(once, every, source)
                return
            report = once()
        _finish(report, source, None if as_json else out)


@app.command()
@takes(where=table)
def report(
    *,
    source: Source,
    where: TableOptions,
    as_json: Json = False,
) -> None:
    """Report what the table holds and what is missing. Reads no messages and needs no Spark."""
    with result() as out:
        require("pyarrow")
        store = _landing(source, where.endpoint).open()
        sink = open_existing(where)
        from bridge.ingest.report import survey

        _, found = survey(store, sink)
        if as_json:
            document(found.to_json(), out)
        _finish(found, source, None if as_json else out)


@app.command()
@takes(where=table)
def repair(
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; print what the table has lost.")
    ] = False,
    where: TableOptions,
    as_json: Json = False,
) -> None:
    """Make the state what the table is, after others have changed it; the next run takes again what is lost.

    Reads the statistics of the data files, and the columns that identify a message where these leave a doubt.
    Needs no Spark.
    """
    with result() as out:
        require("pyarrow")
        from bridge.ingest.repair import repair as go

        done = go(open_existing(where), dry_run=dry_run)
        again = (
            "the next run takes them again"
            if done.committed
            else "a repair lets the next run take them again"
        )
        answer(asdict(done), _settled(done, again), out, as_json=as_json)


@app.command()
@takes(where=table)
def accept(
    *,
    streams: Annotated[
        list[str] | None, typer.Argument(metavar="GATEWAY/STREAM", help="As named in the report's note.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--source", help="Where the gateways export to, for streams: s3://bucket/prefix."),
    ] = None,
    rows: Annotated[
        bool, typer.Option("--rows", help="Accept the rows that the table has after changes by others.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --rows: change nothing; print what would be accepted.")
    ] = False,
    where: TableOptions,
    as_json: Json = False,
) -> None:
    """Accept that streams are gone, or, with --rows, the table as others have left it.

    Streams that were deleted on purpose: their pending messages count as trimmed, no longer as missing. Rows
    that were deleted from the table on purpose count as trimmed too, and no run takes them again. Numbers
    that are missing for another reason stay missing. Needs no Spark.
    """
    with result() as out:
        require("pyarrow")
        if rows == bool(streams):
            raise BadOption("accept either streams, as GATEWAY/STREAM, or --rows")
        if dry_run and not rows:
            raise BadOption("--dry-run is for --rows")
        if rows:
            from bridge.ingest.repair import accept_rows

            settled = accept_rows(open_existing(where), dry_run=dry_run)
            verb = "deleted on purpose; no run takes them again"
            answer(asdict(settled), _settled(settled, verb), out, as_json=as_json)
            return
        if source is None:
            raise BadOption("--source is missing: s3://bucket/prefix or a directory")
        from bridge.ingest.upkeep import accept as go

        done = go(_landing(source, where.endpoint), open_existing(where), streams or ())
        lines = [f"{path}: {count:,} pending messages now count as trimmed" for path, count in done.items()]
        answer({"accepted": done}, lines, out, as_json=as_json)


@app.command()
@takes(where=table, on=spark)
def refine(
    *,
    to: Annotated[
        str, typer.Option("--to", help="Typed table, namespace.table; with --delta a directory or URL.")
    ],
    schema: Annotated[
        str,
        typer.Option(
            "--schema", help='Columns as Spark DDL, such as "temp DOUBLE, unit STRING"; or infer; or variant.'
        ),
    ] = "infer",
    form: Annotated[str, typer.Option("--format", help="Format of the payloads: json or cbor.")] = "json",
    stream: Annotated[
        list[str] | None, typer.Option("--stream", help="Only this stream, repeatable [all].")
    ] = None,
    topic: Annotated[
        str,
        typer.Option(
            "--topic",
            metavar="PATTERN",
            help="Only these topics: an MQTT filter, in which {name} is a level that becomes a column [all].",
        ),
    ] = "",
    replay_rejects: Annotated[
        bool, typer.Option("--replay-rejects", help="Also move earlier rejects that fit now.")
    ] = False,
    where: TableOptions,
    on: Spark,
    as_json: Json = False,
) -> None:
    """Decode payloads into typed columns of the table --to; rows that do not fit go to <to>_rejects.

    Incremental and exactly once, like the ingest itself. Exits with 4 as long as <to>_rejects has rows.
    """
    with result() as out:
        if form not in ("json", "cbor"):
            raise BadOption(f"--format {form}: use json or cbor")
        require(*PACKAGES, *(["cbor2"] if form == "cbor" else []))
        messages = open_existing(where)
        from bridge.ingest.refine import Refinement

        def make(kind: str, columns: Any) -> Any:
            name = to if kind == "typed" else f"{to.rstrip('/')}_rejects"
            own = replace(where, state=f"{where.state}/{kind}" if where.state else None)
            return open_sink(replace(own, delta=name) if where.delta else replace(own, name=name), columns)

        with on.session("streambridge ingest refine") as session:
            refinement = Refinement(
                session, messages, make, form, schema, stream or (), topic, replay=replay_rejects
            )
            done = refinement.run()
        from bridge.ingest.render import refined_lines

        answer(asdict(done), refined_lines(done, f"{to.rstrip('/')}_rejects"), out, as_json=as_json)
        if done.rejects:
            raise typer.Exit(EXIT_QUARANTINED)


@app.command()
@takes(where=table, on=spark)
def compact(
    *,
    expire_days: Annotated[
        float | None,
        typer.Option(
            min=0, help="Also delete files that no table version of the last N days uses [keep all]."
        ),
    ] = None,
    where: TableOptions,
    on: Spark,
    as_json: Json = False,
) -> None:
    """Merge the table's small files; with --expire-days also delete files that are no longer used.

    No run may take longer than --expire-days: its uncommitted files would be deleted.
    """
    with result() as out:
        require(*PACKAGES)
        sink = open_existing(where)
        with on.session("streambridge ingest compact") as session:
            done = sink.compact(session)
        deleted = sink.expire(expire_days) if expire_days is not None else 0
        line = f"{done.before:,} files merged into {done.after:,}; {deleted:,} unused files deleted"
        if done.left:
            line += (
                f"; {done.left:,} files left as they are: another engine has deleted rows or a column in "
                "them, or partitioned them differently; rewrite them with that engine "
                "(Athena: OPTIMIZE, Spark: rewrite_data_files)"
            )
        answer({**asdict(done), "deleted": deleted}, [line], out, as_json=as_json)


@app.command()
@takes(where=table)
def prune(
    *,
    source: Source,
    older_than_days: Annotated[float, typer.Option(min=0, help="Keep younger objects.")] = 7,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Delete nothing; print what would be deleted.")
    ] = False,
    trust_state: Annotated[
        bool, typer.Option("--trust-state", help="Proceed although the table differs from its state.")
    ] = False,
    where: TableOptions,
    as_json: Json = False,
) -> None:
    """Delete exported objects that are provably in the table. Quarantined ones stay. Needs no Spark."""
    with result() as out:
        require("pyarrow")
        from bridge.ingest.upkeep import prune as go

        location = _landing(source, where.endpoint)
        sink = open_existing(where)
        done = go(location, sink, older_than_days, dry_run=dry_run, trust_state=trust_state)
        verb = "would be deleted" if dry_run else "deleted"
        line = (
            f"{done.deleted:,} objects {verb} ({done.deleted_bytes / 1e6:,.1f} MB), "
            f"{done.kept_because_young:,} are younger than {older_than_days:g} days, "
            f"{done.kept:,} are not in the table"
        )
        answer(asdict(done), [line], out, as_json=as_json)


@app.command()
def package(
    folder: Annotated[Path, typer.Argument(help="Where to write the files.")] = Path(),
) -> None:
    """Write the two files that spark-submit needs: a zip with the modules, and the start script."""
    for path in write_package(folder):
        typer.echo(path)


def write_package(folder: Path) -> list[Path]:
    """Write both files into the folder and return their paths.

    The zip has the ingest package and the few modules that it uses, without the gateway's packages.
    """
    bridge = Path(__file__).resolve().parents[1]
    folder.mkdir(parents=True, exist_ok=True)
    shared = ("__init__.py", "deflate.py", "errors.py", "objectkeys.py", "printable.py")
    modules = [*(bridge / name for name in shared), *sorted((bridge / "ingest").rglob("*.py"))]
    zipped, script = folder / "streambridge-ingest.zip", folder / "streambridge_ingest.py"
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as archive:
        for module in modules:  # the same sources give the same archive, byte for byte
            name = zipfile.ZipInfo(f"bridge/{module.relative_to(bridge).as_posix()}", (2020, 1, 1, 0, 0, 0))
            archive.writestr(name, module.read_bytes(), zipfile.ZIP_DEFLATED)
    script.write_bytes((bridge / "ingest" / "main.py").read_bytes())
    return [zipped, script]


def _settled(done: Repaired, fate: str) -> Iterator[str]:
    """Describe what repair or accept has found; `fate` is what becomes of lost numbers."""
    for change in done.streams:
        for what, pairs in ((f"lost, {fate}", change.lost), ("only in the table so far", change.found)):
            for first, last in pairs[:SHOWN]:
                yield f"{change.gateway}/{change.stream} {first}..{last} ({last - first + 1:,}): {what}"
            if len(pairs) > SHOWN:
                yield f"... and {len(pairs) - SHOWN:,} more ranges of it (--json lists them)"
    if done.surplus:
        more = "are in the table more than once, or are no messages; no repair removes them"
        yield f"{done.surplus:,} rows {more}"
    verb = "the state is now that of the table" if done.committed else "nothing was changed"
    if not done.differs and not done.streams:
        verb = "the table has the rows of its state; nothing to do"
    yield f"{done.rows:,} rows in {done.files:,} files, of which {done.files_read:,} were read: {verb}"


def _repeat(once: Callable[[], Report], every: float, source: str) -> None:
    """Run until SIGTERM. Failures of S3 or of the catalog are logged, and the next run tries again."""
    reported = differed = False
    with suppress(Stopped):
        while True:
            began = time.monotonic()
            try:
                report = once()
                if not report.streams and not reported:
                    log(f"streambridge ingest: nothing found under {source} yet: {_NOTHING}")
                    reported = True
                if report.differs and not differed:
                    log("\n".join(f"streambridge ingest: {problem}" for problem in report.problems))
                differed = report.differs
            except Exception as error:
                reason = str(error) if isinstance(error, CommitConflict) else external_reason(error)
                if reason is None:
                    raise
                log(f"streambridge ingest: {reason}; retrying in {every:g} s")
            time.sleep(max(0.0, every - (time.monotonic() - began)))


def _landing(source: str, endpoint: str | None) -> StorageLocation:
    """Return the location of the objects. A directory that does not exist is a mistake, not an empty one."""
    location = StorageLocation(source, endpoint)
    if "://" not in source and not Path(source).is_dir():
        raise BadOption(f"--source {source}: there is no such directory")
    return location


def _finish(report: Report, source: str, out: TextIO | None) -> None:
    """Print the report to `out`, if any, and exit with the code for its content."""
    if not report.streams:
        log(f"streambridge ingest: nothing found under {source}: {_NOTHING}")
        raise typer.Exit(EXIT_NOTHING)
    if out is not None:
        from rich.console import Console

        from bridge.ingest.render import show

        show(report, Console(file=out, width=None if out.isatty() else 160))
    if report.differs:
        raise typer.Exit(EXIT_DIFFERS)
    if report.total("missing"):
        raise typer.Exit(EXIT_MISSING)
    if not report.complete:
        raise typer.Exit(EXIT_QUARANTINED)


def _progress(as_json: bool) -> Any:
    """Return a function that logs a round to standard error, as text or as one line of JSON."""
    if as_json:
        return lambda done: log(json.dumps(asdict(done), separators=(",", ":")))
    from bridge.ingest.render import round_line

    return lambda done: log(round_line(done))
