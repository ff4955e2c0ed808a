"""Runs every benchmark, and makes one page of what they measured: `make bench`, or

    python -m benchmarks [--only NAME ...] [--output DIR] [--page docs/results.md]

Each program is run in turn with `--output DIR` and leaves NAME.json, NAME.md (tables) and, if it draws,
NAME.png there. The page has for each its first line, the command, its caveats, its tables and its
picture; a program that was not run keeps what the page has of it, with its date. `make bench` installs the
peers first (`.ci/tools`, as root on Debian or Ubuntu); one that is not installed is left out.
"""

from __future__ import annotations

import argparse
import ast
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from benchmarks.testbed.local import find

HERE = Path(__file__).parent
# What is run, with the options that differ from the defaults.
PROGRAMS: dict[str, tuple[str, ...]] = {
    "streams": ("--seconds", "0.3", "--backlogs", "1,100,1000,10000"),
    "ingest": ("--rounds", "5", "--seconds", "0.5"),
    "stages": ("--rounds", "3"),
    "copies": (),
    "operations": (),
    "export": ("--rounds", "1", "--seconds", "15"),
    "ingest_spark": ("--rows", "3000000", "--rounds", "2"),
    "scale": (),
    "scale_ingest": (),
}
LIBRARIES = ("uvloop", "amqtt", "boto3", "pyspark", "pyarrow", "pyiceberg", "moto")
SERVERS = {
    "mosquitto": ("mosquitto", "-h"),
    "nats-server": ("nats-server", "-v"),
    "redis-server": ("redis-server", "-v"),
    "rabbitmq": ("dpkg-query", "-W", "-f", "${Version}", "rabbitmq-server"),
    "java": ("java", "-version"),
}
HEAD = """\
# Results

<!-- Made by `make bench`; a change here is lost. -->

Every benchmark, run one after the other on one machine. Absolute numbers belong to it; ratios within a table
travel better. A section with an older date was kept from an earlier run. What they mean, and where we are
behind and why, is in [Performance](performance.md).

"""


def machine() -> list[tuple[str, str]]:
    """What it was run on: hardware, system, versions."""
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    memory = next((line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0")
    rows = [
        ("processor", f"{cpu}, {os.cpu_count()} cores"),
        ("memory", f"{int(memory) / 2**20:.0f} GiB"),
        ("system", f"{platform.system()} {platform.release()}"),
        ("Python", f"{platform.python_version()}, SQLite {sqlite3.sqlite_version}"),
        ("libraries", ", ".join(f"{name} {version(name)}" for name in LIBRARIES)),
    ]
    found = [f"{name} {_version(command)}" for name, command in SERVERS.items() if _version(command)]
    return [*rows, ("programs", ", ".join(found))]


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _version(command: tuple[str, ...]) -> str:
    """The first word with a digit and a dot that a program says of itself; empty if it is not there."""
    path = find(command[0])
    if path is None:
        return ""
    done = subprocess.run([path, *command[1:]], check=False, capture_output=True, text=True)
    words = (done.stdout + " " + done.stderr).replace('"', " ").split()
    return next((word.lstrip("v=") for word in words if "." in word and any(map(str.isdigit, word))), "")


def docstring(name: str) -> tuple[str, str]:
    """The first line of a program's docstring, and what follows it."""
    doc = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8"))) or ""
    title, _, rest = doc.partition("\n\n")
    return title, rest


def heading(name: str) -> str:
    """What a program's part of the page begins with."""
    return f"## {docstring(name)[0].partition(':')[0].rstrip('.')}\n\n"


def section(name: str, output: Path) -> str:
    """The part of the page of a program that was run just now."""
    title, rest = docstring(name)
    caveats = [paragraph for paragraph in rest.split("\n\n") if paragraph.startswith("Caveats")]
    command = " ".join(["python -m", f"benchmarks.{name}", *PROGRAMS[name]])
    parts = [f"`{command}`, {time.strftime('%Y-%m-%d', time.gmtime())}.", *caveats]
    parts.append((output / f"{name}.md").read_text(encoding="utf-8").strip())
    if (output / f"{name}.png").exists():
        parts.append(f"![{title}](images/bench-{name}.png)")
    return heading(name) + "\n\n".join(parts)


def kept(name: str, page: str) -> str:
    """The part of a program that was not run, as the page has it; empty if it has none."""
    parts = [f"## {part.strip()}" for part in ("\n" + page).split("\n## ")]
    return next((part for part in parts if part.startswith(heading(name))), "")


def main() -> None:
    """Run what is asked for, then write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--output", type=Path, default=Path("benchmark-output"))
    parser.add_argument("--page", type=Path, default=HERE.parent / "docs" / "results.md")
    given = parser.parse_args()
    output = given.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    images = given.page.parent / "images"
    images.mkdir(parents=True, exist_ok=True)
    done = set()
    for name in given.only:
        print(f"--- {name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", "--output", str(output), *PROGRAMS[name]]
        if subprocess.run(command, check=False, cwd=HERE.parent).returncode == 0:
            done.add(name)
            if (output / f"{name}.png").exists():
                shutil.copyfile(output / f"{name}.png", images / f"bench-{name}.png")
    table = "\n".join(f"| {what} | {value} |" for what, value in machine())
    page = given.page.read_text(encoding="utf-8") if given.page.exists() else ""
    sections = [section(name, output) if name in done else kept(name, page) for name in PROGRAMS]
    text = HEAD + f"| what | |\n|---|---|\n{table}\n\n" + "\n\n".join(filter(None, sections)) + "\n"
    given.page.write_text(text, encoding="utf-8")
    print(f"written: {given.page}")
    if failed := [name for name in given.only if name not in done]:
        sys.exit(f"failed: {', '.join(failed)}; the page has their earlier results, if there are any")


if __name__ == "__main__":
    main()
