"""The report and the figures of a round, for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bridge.ingest.job import Round, Summary
from bridge.ingest.report import Report, StreamReport

HOLES = 20  # printed at most; --json has all of them
COLUMNS = ("first", "last", "rows", "missing", "trimmed", "quarantined", "waiting", "duplicates", "late")


def round_line(done: Round) -> str:
    """One line of progress."""
    seconds = done.plan_seconds + done.work_seconds + done.commit_seconds
    parts = [f"round {done.number}: {done.objects:,} objects, {done.rows:,} rows, {done.bytes / 1e6:,.1f} MB"]
    parts += [f"in {done.tasks} tasks, {seconds:.1f} s ({done.rows / seconds:,.0f} rows/s)"]
    if done.quarantined:
        parts.append(f"{done.quarantined} quarantined")
    if done.vanished:
        parts.append(f"{done.vanished} vanished")
    if done.new_columns:
        parts.append(f"new columns {', '.join(done.new_columns)}: their objects come with the next round")
    return ", ".join(parts)


def summary_line(summary: Summary) -> str:
    if not summary.rounds:
        return f"nothing new in {summary.listed:,} objects ({summary.seconds:.1f} s)"
    return (
        f"{summary.rows:,} rows of {summary.objects:,} objects added in {len(summary.rounds)} rounds "
        f"({summary.seconds:.1f} s, {summary.listed:,} objects listed)"
    )


def show(report: Report, console: Console) -> None:
    """Print the report: a row for every stream, then what needs a look."""
    several = len({(s.gateway, s.stream) for s in report.streams}) < len(report.streams)
    names = ("gateway", "stream", "epoch") if several else ("gateway", "stream")
    table = Table(title=f"Completeness of {report.table}", title_justify="left")
    for name in names:
        table.add_column(name, overflow="fold")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for stream in report.streams:
        cells = [stream.gateway, stream.stream, *([str(stream.epoch)] if several else [])]
        table.add_row(*(Text(cell) for cell in cells), *_figures(stream))
    if len(report.streams) > 1:
        totals = (f"{report.total(name):,}" for name in ("rows", *COLUMNS[3:8], "late_rows"))
        table.add_section()
        table.add_row("total", *[""] * (len(names) - 1), "", "", *totals)
    console.print(table)
    for line in _remarks(report):
        console.print(Text(line))


def _figures(stream: StreamReport) -> Iterator[str | Text]:
    yield "-" if stream.first is None else str(stream.first)
    yield "-" if stream.last is None else str(stream.last)
    yield f"{stream.rows:,}"
    for name in ("missing", "trimmed", "quarantined", "waiting"):
        value = getattr(stream, name)
        bad = value and name in ("missing", "quarantined")
        yield Text(f"{value:,}", style="bold red" if bad else "")
    yield f"{stream.duplicates:,}"
    yield f"{stream.late_rows:,}"


def _remarks(report: Report) -> Iterator[str]:
    holes = [(stream, hole) for stream in report.streams for hole in stream.holes]
    for stream, hole in holes[:HOLES]:
        data = stream.to_json()["holes"][stream.holes.index(hole)]
        span = f", between {data['after'] or 'the start'} and {data['before'] or 'now'}"
        why = f" ({hole.reason})" if hole.reason else ""
        where = f"{stream.gateway} {stream.stream} {hole.first}..{hole.last} ({hole.count:,})"
        yield f"{hole.kind}{why}: {where}{span}"
    if len(holes) > HOLES:
        yield f"... and {len(holes) - HOLES} more ranges (--json lists them)"
    for refused in report.refused[:HOLES]:
        yield f"quarantined object {refused['key']}: {refused['reason']}"
    if len(report.refused) > HOLES:
        yield f"... and {len(report.refused) - HOLES} more quarantined objects"
    if report.foreign:
        yield f"{len(report.foreign)} objects are not named like data: {report.foreign[0]}, ..."
    yield from report.problems
    verdict = "complete" if report.complete else "NOT complete"
    figures = ", ".join(
        f"{name} {report.total(name):,}" for name in ("missing", "quarantined", "trimmed", "waiting")
    )
    yield f"{verdict}: {report.total('rows'):,} rows, {figures}"
