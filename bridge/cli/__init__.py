"""The command `streambridge`: nothing but parsing and printing.

Exit codes are those of sysexits.h where it has one; see `common.ExitCode`. An expected error is one line on
stderr, without a traceback.
"""

from __future__ import annotations

import errno
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from bridge.cli import clients, exports, integrity, service, streams, trial, users
from bridge.cli.common import ExitCode, denied, echo, note
from bridge.errors import (
    ConfigError,
    CorruptData,
    DataDirectoryBusy,
    StreamBridgeError,
    StreamNotFound,
)
from bridge.ingest.commands import app as ingest

_CODES: dict[type[Exception], ExitCode] = {
    ConfigError: ExitCode.CONFIG,
    CorruptData: ExitCode.DAMAGED,
    DataDirectoryBusy: ExitCode.BUSY,
    StreamNotFound: ExitCode.NOT_FOUND,
}

_EPILOG = """\b
Examples:
  streambridge check -c config/streambridge.toml
  streambridge run -c config/streambridge.toml
  streambridge streams list
  streambridge streams tail sensors --topic 'sensors/+/temperature'

\b
Exit codes:
  0 done; 1 failed; 2 wrong usage; 65 stored data is damaged; 66 no such stream;
  75 the data directory is in use; 78 the configuration is wrong; 130 Ctrl-C
"""

app = typer.Typer(
    name="streambridge",
    help="Durable streams on an MQTT gateway, exported by plugins, proven complete in the table.",
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
service.add_to(app)
integrity.add_to(app)
app.add_typer(streams.app, name="streams")
exports.add_to(app)
app.add_typer(clients.app, name="clients")
users.add_to(app)
trial.add_to(app)
app.add_typer(ingest, name="ingest")


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            release = version("streambridge")
        except PackageNotFoundError:
            release = "(not installed; run from a checkout)"
        echo(f"streambridge {release}")
        raise typer.Exit


@app.callback()
def _global_options(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line and exit."""
    try:
        app(prog_name="streambridge")
    except StreamBridgeError as error:
        _complain(str(error))
        sys.exit(next((code for kind, code in _CODES.items() if isinstance(error, kind)), ExitCode.FAILED))
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except OSError as error:
        if error.errno is None:
            raise
        place = f"{error.filename}: " if error.filename else ""
        whom = denied(Path(error.filename)) if place and error.errno == errno.EACCES else ""
        _complain(f"{place}{error.strerror}{whom}")
        sys.exit(ExitCode.FAILED)


def _complain(message: str) -> None:
    for line in message.split("\n"):  # a configuration has a line for each mistake
        note(f"streambridge: {line}")
