"""What the command says, and with which exit code it ends.

Exit codes:
  0  the table is up to date and complete
  1  the run failed; nothing of the failed round is in the table
  2  the options are wrong, or Java or a package is missing
  3  numbers are missing (what is there was committed)
  4  nothing is missing, but quarantined or unreadable objects hold numbers that are not in the table
  5  other runs were always first; nothing was added twice
  6  nothing was found: no object of any gateway under --source, and none in the table; or no such table
  143  SIGTERM stopped it before it was done; a run with --every ends with 0
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import typer

from bridge.ingest.errors import BadOption, IngestError, Moved, NoTable, NotInstalled
from bridge.printable import printable, printable_json

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_MISSING = 3
EXIT_QUARANTINED = 4
EXIT_MOVED = 5
EXIT_NOTHING = 6
EXIT_STOPPED = 143

OTHERS = (
    "_internal",
    "botocore",
    "deltalake",
    "pyiceberg",
    "requests",
    "sqlalchemy",
)  # the first: deltalake's
ORNAMENTS = re.compile(r"\x1b\[[0-9;]*m|\u21b3")  # colours and arrows of delta-rs


class Stopped(BaseException):
    """Raised by SIGTERM: a round that is not committed leaves nothing."""


def stop(number: int, frame: object) -> None:
    raise Stopped


def say(line: str) -> None:
    typer.echo("\n".join(map(printable, line.split("\n"))), err=True)


def document(content: dict[str, Any], out: TextIO) -> None:
    print(printable_json(json.dumps(content, separators=(",", ":"))), file=out, flush=True)


def result_line(line: str, out: TextIO) -> None:
    """One line of the result for people."""
    print(printable(line), file=out)


def usage(message: str) -> typer.Exit:
    say(f"streambridge ingest: {message}")
    return typer.Exit(EXIT_USAGE)


@contextmanager
def result() -> Iterator[TextIO]:
    """Standard output for the result alone; errors become one line and an exit code.

    The JVM and the libraries write to file descriptor 1 as well, so for the run it is standard error.
    """
    sys.stdout.flush()
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # standard output is not a file, as in a test or a notebook
        descriptor = -1
    if descriptor < 0:
        with errors():
            yield sys.stdout
        return
    kept = os.dup(descriptor)
    # names of objects may be any bytes
    out = os.fdopen(kept, "w", encoding=sys.stdout.encoding or "utf-8", errors="backslashreplace")
    os.dup2(2, descriptor)
    try:
        with errors():
            yield out
    finally:
        out.flush()
        os.dup2(kept, descriptor)
        out.close()


def outside(error: Exception) -> str | None:
    """What an S3 or a catalog that fails or refuses says of it, for that needs no stack trace; else None.

    It is one line. Arrow and delta-rs raise an OSError for it, without the errno that one of a file or a
    socket of this machine has.
    """
    package = type(error).__module__.split(".")[0]
    if package in OTHERS or (isinstance(error, OSError) and error.errno is None):
        return f"{type(error).__name__}: {' '.join(ORNAMENTS.sub('', str(error)).split())}"
    if package in ("pyspark", "py4j"):  # in a task
        found = re.search(r"botocore\.\w+\.(\w+: .*)|bridge\.ingest\.errors\.\w+: (.*)", str(error))
        return found[1] or found[2] if found else None
    return None


@contextmanager
def errors() -> Iterator[None]:
    try:
        yield
    except (BadOption, NotInstalled) as error:
        raise usage(str(error)) from None
    except Moved as error:
        say(f"streambridge ingest: {error}; nothing was added")
        raise typer.Exit(EXIT_MOVED) from None
    except NoTable as error:
        say(f"streambridge ingest: {error}")
        raise typer.Exit(EXIT_NOTHING) from None
    except IngestError as error:
        say(f"streambridge ingest: {error}")
        raise typer.Exit(EXIT_FAILED) from None
    except Stopped:
        say("streambridge ingest: stopped by SIGTERM; nothing of a round that was not told is in the table")
        raise typer.Exit(EXIT_STOPPED) from None
    except Exception as error:
        reason = outside(error)
        if reason is None:
            raise
        say(f"streambridge ingest: {reason}")
        raise typer.Exit(EXIT_FAILED) from None
