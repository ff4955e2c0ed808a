"""The report and the figures of a round, as text."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bridge.ingest.job import Round, Summary
from bridge.ingest.refine import Refined
from bridge.ingest.report import Report, iso
from bridge.ingest.verdict import REMEDY
from bridge.printable import printable

HOLES = 20  # printed at most; --json has all
REMARKS = ("missing", "quarantined", "unreadable", "trimmed", "waiting", "duplicates", "late_rows")
BAD = REMARKS[:3]


def round_line(done: Round) -> str:
    """Return the figures of a round as one line."""
    seconds = done.plan_seconds + done.work_seconds + done.commit_seconds
    parts = [f"round {done.number}: {done.objects:,} objects, {done.rows:,} rows, {done.bytes / 1e6:,.1f} MB"]
    parts += [f"in {done.tasks} tasks, {seconds:.1f} s ({done.rows / seconds:,.0f} rows/s)"]
    if done.quarantined:
        parts.append(f"{done.quarantined} quarantined")
    if done.unreadable:
        parts.append(f"{done.unreadable} unreadable")
    if done.vanished:
        parts.append(f"{done.vanished} vanished")
    if done.new_columns:
        parts.append(f"new columns {', '.join(done.new_columns)}: their objects follow in the next round")
    return ", ".join(parts)


def summary_line(summary: Summary) -> str:
    if not summary.rounds:
        return f"nothing new in {summary.listed:,} objects ({summary.seconds:.1f} s)"
    many = f"{len(summary.rounds)} round{'s' if len(summary.rounds) > 1 else ''}"
    compacted = summary.compacted
    merged = f", {compacted.before:,} files merged into {compacted.after:,}" if compacted.before else ""
    problem = f"\n{compacted.problem}" if compacted.problem else ""
    return (
        f"{summary.rows:,} rows of {summary.objects:,} objects added in {many} "
        f"({summary.seconds:.1f} s, {summary.listed:,} objects listed{merged}){problem}"
    )


def refined_lines(done: Refined, rejects: str) -> Iterator[str]:
    """Yield what a run of `refine` did; `rejects` is the name of the table of rejects."""
    replayed = f", {done.replayed:,} rejects replayed" if done.replayed else ""
    yield f"{done.rows:,} rows typed, {done.rejected:,} rejected{replayed}; schema {done.schema or '-'}"
    if done.added_columns:
        yield f"columns added for values that their column cannot hold: {', '.join(done.added_columns)}"
    if done.extra_rows:
        keys = ", ".join(f"{key} ({rows:,})" for key, rows in done.extra.most_common(HOLES))
        more = f" and {len(done.extra) - HOLES} or more others" if len(done.extra) > HOLES else ""
        yield f"{done.extra_rows:,} rows have keys without a column, kept in extra: {keys}{more}"
    yield from done.problems
    for reason, rows in done.reasons.most_common(HOLES):
        yield f"rejected: {reason} ({rows:,})"
    if done.rejects:
        yield f"{rejects} has {done.rejects:,} rows; refine --replay-rejects moves those that fit by now"


def show(report: Report, console: Console, *, streams: bool = True) -> None:
    """Print the report: one row per stream, if wanted, then everything that needs attention."""
    if streams:
        console.print(_table(report, console))
        console.print()
    for line in _details(report):
        console.print(Text(printable(line)))


def _table(report: Report, console: Console) -> Table:
    several = len({(s.gateway, s.stream) for s in report.streams}) < len(report.streams)
    table = Table(
        title=f"Completeness of {printable(report.table)}",
        title_justify="left",
        box=SIMPLE,
        show_edge=False,
        pad_edge=False,
    )
    for name in ("gateway", "stream", *(["epoch"] if several else [])):
        table.add_column(name, overflow="fold")
    for name in ("numbers", "rows", "lag"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("remarks")
    between = ", " if console.width > 100 else "\n"
    for stream in report.streams:
        names = [printable(stream.gateway), printable(stream.stream)]
        names += [str(stream.epoch)] if several else []
        numbers = "-" if stream.first is None else f"{stream.first}..{stream.last}"
        figures = {name: getattr(stream, name) for name in REMARKS}
        table.add_row(
            *(Text(printable(name)) for name in names),
            numbers,
            f"{stream.rows:,}",
            age(stream.lag_seconds),
            _remarks(figures, between),
        )
    if len(report.streams) > 1:
        table.add_section()
        blank = [""] * (3 if several else 2)
        figures = {name: report.total(name) for name in REMARKS}
        table.add_row("total", *blank, f"{report.total('rows'):,}", "", _remarks(figures, between))
    return table


def _remarks(figures: dict[str, int], between: str) -> Text:
    """Return the figures that are not zero."""
    parts = [
        Text(f"{count:,} {name.removesuffix('_rows')}", style="bold red" if name in BAD else "")
        for name, count in figures.items()
        if count
    ]
    return Text(between).join(parts)


def age(seconds: float | None) -> str:
    """Return an age in one unit."""
    if seconds is None:
        return "-"
    for length, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:,.0f} {unit}"
    return f"{seconds:.0f} s"


def _details(report: Report) -> Iterator[str]:
    holes = [(stream, hole) for stream in report.streams for hole in stream.holes]
    for stream, hole in holes[:HOLES]:
        is_whole = hole.number is None
        span = f", between {hole.after or 'the start'} and {hole.before or 'now'}" if is_whole else ""
        why = f" ({hole.reason})" if hole.reason else ""
        numbers = (
            f"{hole.first}..{hole.last} ({hole.count:,})"
            if hole.last > hole.first
            else f"number {hole.first}"
        )
        if not is_whole:
            numbers = f"{hole.count:,} of {hole.first}..{hole.last}"
        where = f"{stream.gateway} {stream.stream} {numbers}"
        yield f"{hole.kind}{why}: {where}{span}"
    if len(holes) > HOLES:
        yield f"... and {len(holes) - HOLES} more ranges (--json lists them)"
    for kind, objects in (("quarantined", report.refused), ("unreadable", report.unreadable)):
        for refused in objects[:HOLES]:
            yield f"{kind} object {refused['key']}: {refused['reason']}"
        if len(objects) > HOLES:
            yield f"... and {len(objects) - HOLES} more {kind} objects"
    if report.foreign:
        first = ", ".join(report.foreign[:3]) + (", ..." if report.foreign_count > 3 else "")
        yield f"not named like data ({report.foreign_count:,}): {first}"
    yield from (f"note: {problem}" for problem in report.problems)
    if report.differs:
        yield f"note: {REMEDY}"
    if not report.in_full:
        yield f"last full listing: {iso(report.full_ms)}; what is newer is known from the gateway reports"
    if report.files.full is None:
        yield "files: never yet compared with what is there; --deep compares them now"
    else:
        old = age((report.made_ms - report.files.full) / 1000)
        yield f"files: all compared with what is there since {iso(report.files.full)}, {old} ago"
    verdict = "complete" if report.complete else "NOT complete"
    figures = ", ".join(f"{name} {report.total(name):,}" for name in REMARKS[:5])
    if report.differs:
        figures += "; but others have changed the table (see the notes)"
    if report.files.damages:
        figures += f"; but {len(report.files.damages):,} files are damaged (see the notes)"
    yield f"{verdict}: {report.total('rows'):,} rows, {figures}"
