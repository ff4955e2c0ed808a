"""The charts of the soak's report."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter

from benchmarks.soak.faults import Event
from benchmarks.soak.verdict import Sample
from benchmarks.soak.watch import Count

COLOURS = ("#1f77b4", "#d95f02", "#2ca02c", "#9467bd")


def counts(path: Path, acknowledged: Sequence[int], seen: Sequence[Count], events: Sequence[Event]) -> None:
    """Messages acknowledged, stored and exported over time, above a line for each kind of fault."""
    begin = min(one.time for one in seen)
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(11, 7.5), layout="constrained", sharex=True, height_ratios=(3, 2)
    )
    times = [time / 1000 - begin for time in acknowledged]
    above.plot(
        times,
        range(1, len(times) + 1),
        color="#888888",
        lw=5,
        alpha=0.5,
        label="acknowledged to devices (QoS 1 and 2)",
    )
    for colour, gateway in zip(COLOURS, sorted({one.gateway for one in seen}), strict=False):
        mine = [one for one in seen if one.gateway == gateway]
        at = [one.time - begin for one in mine]
        above.plot(at, [one.stored for one in mine], color=colour, lw=1.8, label=f"stored by {gateway}")
        # After a start nothing is known to be exported until the worker says so.
        exported = list(accumulate((one.exported for one in mine), max))
        above.plot(at, exported, color=colour, lw=1.3, ls="--", label=f"in S3 from {gateway}")
    above.set(ylabel="messages", ylim=(0, None))
    above.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    above.set_title("Messages while everything goes wrong", loc="left")
    above.legend(loc="upper left", frameon=False)
    above.grid(axis="y", alpha=0.3)
    kinds = sorted({event.kind for event in events}, reverse=True)
    for line, kind in enumerate(kinds):
        mine_too = [event for event in events if event.kind == kind]
        spans = [(event.begin - begin, max(event.end - event.begin, 0.4)) for event in mine_too]
        colour = "#d9534f" if "SIGKILL" in kind else "#f0ad4e" if kind != "ingest" else "#5b9bd5"
        below.broken_barh(spans, (line - 0.35, 0.7), color=colour)
    below.set_yticks(range(len(kinds)), kinds)
    below.set(xlabel="seconds", xlim=(0, None))
    below.grid(axis="x", alpha=0.3)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def processes(path: Path, samples: Sequence[Sample]) -> None:
    """What each process takes; a gap is where one was killed and another began."""
    begin = min(one.time for one in samples)
    figure, grid = plt.subplots(2, 2, figsize=(11, 7), layout="constrained", sharex=True)
    shown = (
        ("rss", "resident memory, MiB"),
        ("threads", "threads"),
        ("files", "open files"),
        ("sockets", "sockets"),
    )
    for axes, (what, label) in zip(grid.flat, shown, strict=True):
        for colour, name in zip(COLOURS, sorted({one.name for one in samples}), strict=False):
            at: list[float] = []
            values: list[float] = []
            before = None
            for one in (one for one in samples if one.name == name):
                if before not in (None, one.pid):
                    at.append(one.time - begin)
                    values.append(float("nan"))
                before = one.pid
                at.append(one.time - begin)
                values.append(getattr(one, what) / (1 << 20 if what == "rss" else 1))
            axes.plot(at, values, color=colour, lw=1.3, label=name)
        axes.set(ylim=(0, None), xlim=(0, None))
        axes.set_title(label, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    for axes in grid[1]:
        axes.set_xlabel("seconds")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
