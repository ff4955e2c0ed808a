"""The demo's chart: how many readings were published, stored and exported, over time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter

if TYPE_CHECKING:
    from parts import Result
    from run import Timeline


def draw(line: Timeline, results: list[Result], path: Path) -> None:
    """Draw the timeline into a PNG."""
    figure, axes = plt.subplots(figsize=(10, 5.5), layout="constrained")
    down, up = line.killed
    axes.axvspan(down, up, color="#d9534f", alpha=0.15, lw=0)
    axes.annotate(
        f"SIGKILL, back after {up - down:.1f} s",
        ((down + up) / 2, 0.97),
        xycoords=("data", "axes fraction"),
        ha="center",
        va="top",
        rotation=90,
        color="#a94442",
        fontsize=9,
    )
    times = sorted(time - line.began for result in results for time in result.times)
    axes.plot(
        times, range(1, len(times) + 1), color="#888888", lw=4, alpha=0.5, label="acknowledged to devices"
    )
    axes.plot(line.seconds, line.stored, color="#1f77b4", lw=1.8, label="stored in streams")
    axes.plot(line.seconds, line.exported, color="#2ca02c", lw=1.8, label="exported to S3")
    axes.set(xlabel="seconds", ylabel="readings", xlim=(0, None), ylim=(0, None))
    axes.set_title("This machine's readings, from PUBLISH to S3", loc="left")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.legend(loc="upper left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
