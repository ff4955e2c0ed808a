"""The output of the command, and its exit codes.

0  the table is up to date and complete
1  the run failed; nothing of the failed round is in the table
2  an option is wrong, or Java or a package is missing
3  numbers are missing (everything else was committed)
4  nothing is missing, but numbers are only in quarantined or unreadable objects; refine: the table of rejects
   has rows
5  other runs committed first in every attempt; nothing was added twice
6  nothing was found: no object under --source, and none in the table; or there is no such table
7  others have changed the table: it may not have the rows of its state; everything else was committed
8  `alarm`: the newest row is too old
9  files of the table are gone, have another size or cannot be looked at; everything else was committed
10 the source has nothing of what the table has: the prefix is wrong; nothing was done
143  SIGTERM stopped the run before it was done; a run with --every exits with 0
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import typer

from bridge.ingest.errors import IngestError, Stopped
from bridge.printable import printable, printable_json

EXIT_MISSING = 3
EXIT_QUARANTINED = 4
EXIT_NOTHING = 6
EXIT_DIFFERS = 7
EXIT_LATE = 8
EXIT_DAMAGED = 9
EXIT_ELSEWHERE = 10
EXIT_STOPPED = 143

# top-level modules of the libraries; deltalake has two
LIBRARIES = ("_internal", "botocore", "deltalake", "pyiceberg", "requests", "sqlalchemy")
ORNAMENTS = re.compile(r"\x1b\[[0-9;]*m|\u21b3")  # colours and arrows of delta-rs


def log(line: str) -> None:
    """Print to standard error."""
    typer.echo("\n".join(map(printable, line.split("\n"))), err=True)


def document(content: dict[str, Any], out: TextIO) -> None:
    print(printable_json(json.dumps(content, separators=(",", ":"))), file=out, flush=True)


def answer(content: dict[str, Any], lines: Iterable[str], out: TextIO, *, as_json: bool) -> None:
    """Print the result, as one JSON document or as lines of text."""
    if as_json:
        document(content, out)
    else:
        print(*map(printable, lines), sep="\n", file=out)


@contextmanager
def result() -> Iterator[TextIO]:
    """Reserve standard output for the result; turn errors into one line and an exit code.

    The JVM and the libraries also write to file descriptor 1, so for the run it points to standard error.
    """
    sys.stdout.flush()
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # standard output has no descriptor, as in a test or a notebook
        descriptor = -1
    if descriptor < 0:
        with errors():
            yield sys.stdout
        return
    kept = os.dup(descriptor)
    # object keys may hold any bytes
    out = os.fdopen(kept, "w", encoding=sys.stdout.encoding or "utf-8", errors="backslashreplace")
    os.dup2(2, descriptor)
    try:
        with errors():
            yield out
    finally:
        out.flush()
        os.dup2(kept, descriptor)
        out.close()


def external_reason(error: Exception) -> str | None:
    """Return the error of S3 or of a catalog as one line, which needs no stack trace; None for any other.

    Arrow and delta-rs raise an OSError for these, without the errno that a local file or socket sets.
    """
    package = type(error).__module__.split(".")[0]
    if package in LIBRARIES or (isinstance(error, OSError) and error.errno is None):
        return f"{type(error).__name__}: {' '.join(ORNAMENTS.sub('', str(error)).split())}"
    if package in ("pyspark", "py4j"):  # in a task
        found = re.search(r"botocore\.\w+\.(\w+: .*)|bridge\.ingest\.errors\.\w+: (.*)", str(error))
        return found[1] or found[2] if found else None
    return None


@contextmanager
def errors() -> Iterator[None]:
    try:
        yield
    except IngestError as error:
        log(f"streambridge ingest: {error}")
        raise typer.Exit(error.exit_code) from None
    except Stopped:
        log("streambridge ingest: stopped by SIGTERM; only the rounds that were logged are in the table")
        raise typer.Exit(EXIT_STOPPED) from None
    except Exception as error:
        reason = external_reason(error)
        if reason is None:
            raise
        log(f"streambridge ingest: {reason}")
        raise typer.Exit(IngestError.exit_code) from None
