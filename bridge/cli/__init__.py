"""The command `streambridge`: parsing and printing.

Exit codes follow sysexits.h where it has one; see `output.ExitCode`. An expected error is one line on stderr,
without a traceback.
"""

from __future__ import annotations

import errno
import sys
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from bridge.cli import (
    clients,
    demo,
    exports,
    integrity,
    keys,
    manual,
    output,
    plugins,
    service,
    streams,
    support,
    users,
)
from bridge.cli.options import denied
from bridge.cli.plain import WIDEST, use_plain_help
from bridge.errors import (
    ConfigError,
    CorruptData,
    DataDirectoryBusy,
    EncryptionKeyError,
    StreamBridgeError,
    StreamNotFound,
)
from bridge.ingest.commands import app as ingest

_CODES: dict[type[Exception], output.ExitCode] = {
    ConfigError: output.ExitCode.CONFIG,
    CorruptData: output.ExitCode.DAMAGED,
    DataDirectoryBusy: output.ExitCode.BUSY,
    EncryptionKeyError: output.ExitCode.CONFIG,
    StreamNotFound: output.ExitCode.NOT_FOUND,
}

_EPILOG = """\b
Examples:
  streambridge check -c config/streambridge.toml
  streambridge run -c config/streambridge.toml
  streambridge streams list
  streambridge streams tail sensors --topic 'sensors/+/temperature'

\b
Exit codes:
  0 success; 1 failure; 2 wrong usage; 65 stored data is damaged; 66 no such stream;
  75 the data directory is in use; 78 the configuration is wrong; 130 Ctrl-C
"""

app = typer.Typer(
    name="streambridge",
    help="An MQTT broker for gateways that stores messages before it acknowledges them.",
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDEST},
)
app.add_typer(service.app)
app.add_typer(integrity.app)
app.add_typer(streams.app, name="streams")
app.add_typer(exports.app, name="exports")
app.add_typer(plugins.app, name="plugins")
app.add_typer(clients.app, name="clients")
app.add_typer(users.app, name="users")
app.add_typer(keys.app, name="keys")
service.app.command(
    epilog="""\b
Examples:
  streambridge support -c config/streambridge.toml
  sudo streambridge support --output /tmp/support.tar.gz
"""
)(support.support)
app.command("man", hidden=True)(manual.man)
app.add_typer(demo.app)
app.add_typer(ingest, name="ingest")


use_plain_help(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            release = version("streambridge")
        except PackageNotFoundError:
            release = "(not installed; run from a checkout)"
        output.echo(f"streambridge {release}")
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
    output.make_usable()
    try:
        app(prog_name="streambridge")
    except (Exception, KeyboardInterrupt) as error:
        fail(error)


def fail(error: BaseException) -> NoReturn:
    """Report an expected error in one line, and exit; any other is raised again."""
    if isinstance(error, KeyboardInterrupt):
        sys.exit(output.ExitCode.INTERRUPTED)
    if isinstance(error, StreamBridgeError):
        _print_error(str(error))
        sys.exit(
            next((code for kind, code in _CODES.items() if isinstance(error, kind)), output.ExitCode.FAILED)
        )
    if isinstance(error, RecursionError):
        _print_error("the input is nested too deeply")
        sys.exit(output.ExitCode.USAGE)
    if isinstance(error, UnicodeEncodeError):  # Python has put the bytes of an argument into surrogates
        _print_error(f"an argument is not valid UTF-8: {ascii(error.object)[:100]}")
        sys.exit(output.ExitCode.USAGE)
    if not isinstance(error, OSError) or error.errno is None:
        raise error
    found = error.filename or _file_of(error)
    path = f"{found}: " if found else ""
    user = denied(Path(error.filename)) if error.filename and error.errno == errno.EACCES else ""
    _print_error(f"{path}{error.strerror}{user}")
    sys.exit(output.ExitCode.FAILED)


def _file_of(error: OSError) -> Path | None:
    """Return which file an error is about that does not say so, as when a read fails: EIO, for example.

    It is the path that the innermost function with a path works on.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        values = frame.f_locals
        object_ = values.get("self")
        named = [object_, *(values.get(name) for name in ("path", "file", "directory"))]
        named += [getattr(object_, name, None) for name in ("path", "_path", "directory", "_directory")]
        if (found := next((one for one in named if isinstance(one, Path)), None)) is not None:
            return found
    return None


def _print_error(message: str) -> None:
    for line in message.split("\n"):  # a configuration has a line for each mistake
        output.note(f"streambridge: {line}")
