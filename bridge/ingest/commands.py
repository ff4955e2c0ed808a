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
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

from bridge.ingest.ages import ORPHAN_DAYS, Ages
from bridge.ingest.console import (
    EXIT_DAMAGED,
    EXIT_DIFFERS,
    EXIT_ELSEWHERE,
    EXIT_LATE,
    EXIT_MISSING,
    EXIT_NOTHING,
    EXIT_QUARANTINED,
    answer,
    document,
    external_reason,
    log,
    result,
)
from bridge.ingest.errors import BadOption, CommitConflict, Stopped, stop
from bridge.ingest.listing import DAY
from bridge.ingest.options import Json, Source, Spark, Typed, spark, table, takes, typed
from bridge.ingest.planner import RoundLimits
from bridge.ingest.session import PACKAGES, require, require_java
from bridge.ingest.store import StorageLocation
from bridge.ingest.table import TableOptions, open_existing, open_sink
from bridge.printable import printable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bridge.ingest.deletes import Deleted
    from bridge.ingest.refine import Refined
    from bridge.ingest.repair import Repaired
    from bridge.ingest.report import Report
    from bridge.ingest.sinks.base import Sink

_NOTHING = (
    "no object and no gateway report, and the table is empty; "
    "check the prefix, and that a gateway's s3 export writes to it"
)

SHOWN = 20  # ranges printed for one stream; --json has all

app = typer.Typer(
    help="Load exported objects from S3 into a table exactly once, and report missing numbers.",
    epilog="Exit codes: 0 complete, 1 failed, 2 options or installation, 3 numbers missing, "
    "4 numbers only in quarantined or unreadable objects (refine: rejects), "
    "5 other runs always committed first, 6 nothing found or no such table, "
    "7 others have changed the table, 8 the newest row is too old (alarm), "
    "9 files of the table are gone or damaged, 10 the source has nothing of what the table has, "
    "143 stopped by SIGTERM.",
    no_args_is_help=True,
    rich_markup_mode=None,  # markup would swallow a default in []
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
@takes(where=table, on=spark, how=typed)
def ingest(
    context: typer.Context,
    *,
    source: Annotated[
        str | None,
        typer.Option("--source", help="Where the gateways export to: s3://bucket/prefix or a directory."),
    ] = None,
    where: TableOptions,
    max_objects: Annotated[
        int, typer.Option(min=1, help="The most objects per round.")
    ] = RoundLimits().objects,
    max_bytes: Annotated[
        int, typer.Option(min=1, help="The most bytes of objects per round.")
    ] = RoundLimits().bytes,
    every: Annotated[
        float | None, typer.Option(min=1, help="Keep running: look for new objects every N seconds [once].")
    ] = None,
    retry_quarantined: Annotated[
        bool, typer.Option("--retry-quarantined", help="Read quarantined objects again; forget deleted ones.")
    ] = False,
    full_listing_every: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="HOURS",
            help="List all objects if the last full listing is this long ago; 0: in every run.",
        ),
    ] = DAY / 3600,
    new_source: Annotated[
        bool, typer.Option("--new-source", help="Begin with a source that has none of the table's gateways.")
    ] = False,
    notifications: Annotated[
        str | None,
        typer.Option("--notifications", metavar="URL", help="SQS queue with the bucket's notifications."),
    ] = None,
    metrics_file: Annotated[
        Path | None,
        typer.Option("--metrics-file", metavar="FILE", help="Write metrics for node_exporter's textfiles."),
    ] = None,
    refine_to: Annotated[
        str | None,
        typer.Option(
            "--refine-to", metavar="TABLE", help="After each run, refine into this table, as `refine --to`."
        ),
    ] = None,
    how: Typed,
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
        from bridge.ingest.metrics import MetricsFile
        from bridge.ingest.notifications import Notifications

        queue = Notifications(notifications, location) if notifications else None
        metrics = MetricsFile(metrics_file) if metrics_file else None
        sink = open_sink(where)
        from bridge.ingest.job import run
        from bridge.ingest.render import refined_lines, summary_line

        if refine_to is None and how != typed():
            raise BadOption("--schema, --format, --stream and --topic need --refine-to")
        limits, on_round, rejects = RoundLimits(max_objects, max_bytes), _progress(as_json), 0
        with ExitStack() as opened:

            @cache
            def session() -> SparkSession:  # takes seconds to start, so only when there is something new
                return opened.enter_context(on.session("streambridge ingest"))

            def once() -> Report:
                nonlocal rejects
                summary = run(
                    session,
                    location,
                    sink,
                    limits,
                    on_round,
                    retry_quarantined=retry_quarantined,
                    full_every=full_listing_every * 3600,
                    notifications=queue,
                    new_source=new_source,
                )
                if metrics:
                    metrics.succeeded(summary)
                content = summary.to_json()
                if not as_json and (summary.rounds or (summary.report.streams and every is None)):
                    log(summary_line(summary))
                if refine_to is not None:
                    found = _refined(session, sink, where, refine_to, how)
                    rejects = found.rejects
                    content["refined"] = found.to_json()
                    if found.rounds and not as_json:
                        log("\n".join(map(printable, refined_lines(found, _rejects(refine_to)))))
                if as_json:
                    document(content, out)
                return summary.report

            if every is not None:
                _repeat(once, every, source, metrics.failed if metrics else lambda: None)
                return
            try:
                report = once()
            except Exception:
                if metrics:
                    metrics.failed()
                raise
        _finish(report, source, None if as_json else out)
        if rejects:
            raise typer.Exit(EXIT_QUARANTINED)


@app.command()
@takes(where=table)
def report(
    *,
    source: Source,
    full_listing: Annotated[
        bool, typer.Option("--full-listing", help="List all objects, not only possibly new ones.")
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Compare all files of the table with what is there, by listing.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page about the fleet, for a browser."),
    ] = None,
    where: TableOptions,
    as_json: Json = False,
) -> None:
    """Report what the table holds and what is missing. Reads no messages and needs no Spark."""
    with result() as out:
        require("pyarrow")
        location = _landing(source, where.endpoint)
        sink = open_existing(where)
        from bridge.ingest.report import survey

        _, found = survey(location, sink, 0 if full_listing else DAY, deep=deep)
        if html is not None:
            from bridge.ingest.fleet import write_page

            write_page(found, html)
        if as_json:
            document(found.to_json(), out)
        _finish(found, source, None if as_json else out, streams=html is None)


@app.command()
@takes(where=table)
def alarm(
    *,
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="AGE", help="The limit: 90s, 15min, 2h, 1d.")
    ],
    each_gateway: Annotated[
        bool, typer.Option("--each-gateway", help="Check the newest row of each gateway.")
    ] = False,
    where: TableOptions,
    as_json: Json = False,
) -> None:
    """Exit with 8 if the newest row of the table is older than a limit. Lists no objects, needs no Spark."""
    with result() as out:
        require("pyarrow")
        from bridge.ingest.alarm import newest_row, seconds
        from bridge.ingest.render import age

        limit = seconds(older_than)
        found = newest_row(open_existing(where), limit)
        of = f"; {len(found.late):,} of {found.gateways:,} gateways are late" if each_gateway else ""
        lines = [f"the newest row is {age(found.age_seconds)} old{of}"]
        if each_gateway:
            late = list(found.late.items())
            lines += [f"{gateway}: {age(old)}" for gateway, old in late[:SHOWN]]
            lines += [f"... and {len(late) - SHOWN:,} more (--json lists them)"] if len(late) > SHOWN else []
        answer({**asdict(found), "too_old": found.too_old}, lines, out, as_json=as_json)
        if found.too_old or (each_gateway and found.late):
            raise typer.Exit(EXIT_LATE)


@app.command()
@takes(where=table)
def repair(
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; print what the table has lost.")
    ] = False,
    source: Annotated[
        str | None,
        typer.Option("--source", help="Where the gateways export to, for lost files [that of the last run]."),
    ] = None,
    deleted: Annotated[
        Literal["out", "back"] | None,
        typer.Option("--deleted", help="The rows of lost files of which others had deleted unknown ones."),
    ] = None,
    give_up: Annotated[
        bool, typer.Option("--give-up", help="Take files out although no object has the rows of all.")
    ] = False,
    where: TableOptions,
    as_json: Json = False,
) -> None:
    """Adapt the state to a table that others have changed; the next run ingests lost rows.

    Compares all files of the table with what is there, takes out those that are gone or have another size,
    and says which of their rows no object has.
    Reads the statistics of the data files and, where these are not conclusive, the columns that identify a
    message.
    Needs no Spark.
    """
    with result() as out:
        require("pyarrow")
        from bridge.ingest.repair import repair as go

        place = _landing(source, where.endpoint) if source else None
        done = go(open_existing(where), place, dry_run=dry_run, deleted=deleted, give_up=give_up)
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
    """Accept that streams are gone, or, with --rows, that others have changed the table.

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
@takes(where=table, on=spark, how=typed)
def refine(
    *,
    to: Annotated[
        str, typer.Option("--to", help="Typed table, namespace.table; with --delta a directory or URL.")
    ],
    how: Typed,
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
        require(*PACKAGES)
        messages = open_existing(where)
        with on.session("streambridge ingest refine") as session:
            done = _refined(lambda: session, messages, where, to, how, replay=replay_rejects, always=True)
        from bridge.ingest.render import refined_lines

        answer(done.to_json(), refined_lines(done, _rejects(to)), out, as_json=as_json)
        if done.rejects:
            raise typer.Exit(EXIT_QUARANTINED)


def _rejects(to: str) -> str:
    return f"{to.rstrip('/')}_rejects"


def _refined(
    session: Callable[[], SparkSession],
    messages: Sink,
    where: TableOptions,
    to: str,
    how: Typed,
    *,
    replay: bool = False,
    always: bool = False,
) -> Refined:
    """Refine into the table `to`. If it has all messages already, Spark is needed only with `always`."""
    require(*(["cbor2"] if how.form == "cbor" else []))
    from bridge.ingest.refine import Refined, Refinement, behind
    from bridge.ingest.refine_worker import REJECTS

    def make(kind: str, columns: Any) -> Sink:
        name = to if kind == "typed" else _rejects(to)
        own = replace(where, state=f"{where.state}/{kind}" if where.state else None)
        return open_sink(replace(own, delta=name) if where.delta else replace(own, name=name), columns)

    if not always and not behind(messages, make, how.streams):
        return Refined(rejects=make("rejects", REJECTS).rows())
    return Refinement(
        session(), messages, make, how.form, how.schema, how.streams, how.topic, replay=replay
    ).run()


@app.command()
@takes(where=table, on=spark)
def compact(
    *,
    expire_days: Annotated[
        float | None,
        typer.Option(
            min=0, help="Also drop table versions that were replaced N days ago, with their files [keep all]."
        ),
    ] = None,
    orphan_days: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Also delete files that no version has and that are older than N days; at least 1 "
            f"[{ORPHAN_DAYS:g} with --expire-days].",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Accept fewer days: files that others are writing or reading are lost."),
    ] = False,
    where: TableOptions,
    on: Spark,
    as_json: Json = False,
) -> None:
    """Merge the table's small files; with --expire-days and --orphan-days also delete unused files.

    No run and no other writer may take longer than --orphan-days: its uncommitted files would be deleted.
    Only files below the table's own place are deleted.
    """
    with result() as out:
        require(*PACKAGES)
        sink = open_existing(where)
        ages = Ages.of(sink, expire_days, orphan_days, force=force)
        for risk in ages.risks:
            log(f"streambridge ingest: {risk}")
        with on.session("streambridge ingest compact") as session:
            done = sink.compact(session)
        deleted = ages.apply(sink)
        line = f"{done.before:,} files merged into {done.after:,}; {deleted.count:,} unused files deleted"
        if done.left:
            line += (
                f"; {done.left:,} files left as they are: another engine has deleted rows or a column in "
                "them, or partitioned them differently; rewrite them with that engine "
                "(Athena: OPTIMIZE, Spark: rewrite_data_files)"
            )
        figures = {"deleted": deleted.count, "not_deleted": deleted.unclear}
        answer({**asdict(done), **figures}, [line, *_unclear(deleted)], out, as_json=as_json)


@app.command()
@takes(where=table)
def erase(*, where: TableOptions, as_json: Json = False) -> None:
    """Remove rows that another engine has deleted, now and for good: all that older versions hold of them.

    Deletes all versions but the current one, and all files that it does not need, whatever their age. Nobody
    else may write to the table meanwhile: uncommitted files are deleted. Needs no Spark.
    """
    with result() as out:
        require("pyarrow")
        done = open_existing(where).erase()
        line = f"{done.count:,} files deleted; the table holds its current rows, and nothing else"
        if done.unclear:
            line = f"{done.count:,} files deleted, but not all"
        content = {"deleted": done.count, "not_deleted": done.unclear}
        answer(content, [line, *_unclear(done)], out, as_json=as_json)
        if done.unclear:
            raise typer.Exit(1)


def _unclear(done: Deleted) -> list[str]:
    """Describe what was not deleted, because it is not clear what it is, or not below the table's place."""
    lines = [f"not deleted: {name}" for name in done.unclear[:SHOWN]]
    if len(done.unclear) > SHOWN:
        lines.append(f"... and {len(done.unclear) - SHOWN:,} more (--json lists them)")
    return lines


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
    names = ("__init__", "deflate", "errors", "extras", "filtered", "objectkeys", "printable", "ranges")
    shared = [f"{name}.py" for name in names]
    own = (bridge / "ingest").rglob("*")
    modules = [
        *(bridge / name for name in shared),
        *sorted(path for path in own if path.suffix in (".py", ".html", ".css", ".js")),
    ]
    zipped, script = folder / "streambridge-ingest.zip", folder / "streambridge_ingest.py"
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as archive:
        for module in modules:  # the same sources give the same archive, byte for byte
            name = zipfile.ZipInfo(f"bridge/{module.relative_to(bridge).as_posix()}", (2020, 1, 1, 0, 0, 0))
            archive.writestr(name, module.read_bytes(), zipfile.ZIP_DEFLATED)
    script.write_bytes((bridge / "ingest" / "main.py").read_bytes())
    return [zipped, script]


def _settled(done: Repaired, fate: str) -> Iterator[str]:
    """Describe what repair or accept has found; `fate` is what becomes of lost numbers."""
    verb = "taken out of the table" if done.committed else "would be taken out of the table"
    yield from (f"{one}: {verb}" for one in done.damaged)
    for gateway, stream, _, first, last in done.hopeless:
        count = last - first + 1
        yield f"{gateway}/{stream} {first}..{last} ({count:,}): no object has it: it cannot be brought back"
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
    if not done.differs and not done.streams and not done.damaged:
        verb = "the table has the rows of its state; nothing to do"
    yield f"{done.rows:,} rows in {done.files:,} files, of which {done.files_read:,} were read: {verb}"


def _repeat(once: Callable[[], Report], every: float, source: str, failed: Callable[[], None]) -> None:
    """Run until SIGTERM. Failures of S3 or of the catalog are logged, and the next run tries again.

    `failed` is called for each.
    """
    reported = differed = False
    with suppress(Stopped):
        while True:
            began = time.monotonic()
            try:
                report = once()
                if not report.streams and not reported:
                    log(f"streambridge ingest: nothing found under {source} yet: {_NOTHING}")
                    reported = True
                wrong = report.differs or not report.files.whole
                if wrong and not differed:
                    log("\n".join(f"streambridge ingest: {problem}" for problem in report.problems))
                differed = wrong
            except Exception as error:
                reason = str(error) if isinstance(error, CommitConflict) else external_reason(error)
                if reason is None:
                    raise
                log(f"streambridge ingest: {reason}; retrying in {every:g} s")
                failed()
            time.sleep(max(0.0, every - (time.monotonic() - began)))


def _landing(source: str, endpoint: str | None) -> StorageLocation:
    """Return the location of the objects. A directory that does not exist is a mistake, not an empty one."""
    location = StorageLocation(source, endpoint)
    if "://" not in source and not Path(source).is_dir():
        raise BadOption(f"--source {source}: there is no such directory")
    return location


def _finish(report: Report, source: str, out: TextIO | None, *, streams: bool = True) -> None:
    """Print the report to `out`, if any, and exit with the code for its content.

    Without `streams`, leave the table of all streams out.
    """
    if not report.streams:
        log(f"streambridge ingest: nothing found under {source}: {_NOTHING}")
        raise typer.Exit(EXIT_NOTHING)
    if out is not None:
        from rich.console import Console

        from bridge.ingest.render import show

        show(report, Console(file=out, width=None if out.isatty() else 160), streams=streams)
    if report.elsewhere:
        raise typer.Exit(EXIT_ELSEWHERE)
    if not report.files.whole:
        raise typer.Exit(EXIT_DAMAGED)
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
