"""`streambridge users ...` and `hash-password`: the users file.

A change replaces the whole file atomically and keeps its owner, mode and comments. A running service applies
it within seconds.
"""

from __future__ import annotations

import os
import sys
from getpass import getpass
from pathlib import Path
from typing import Annotated

import typer

from bridge.access.users import change_users, hash_password, read_users
from bridge.cli import output
from bridge.cli.changes import Sure, confirm
from bridge.cli.options import ConfigOption, JsonOption, known_config, typed_path
from bridge.config.settings import DEFAULT_CONFIG
from bridge.errors import ConfigError, StreamBridgeError
from bridge.streams.store import LOCK

app = typer.Typer(
    help="List, add and remove the users of the users file, and change their passwords.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def _complete_user(context: typer.Context, incomplete: str) -> list[str]:
    """Complete the names of users."""
    try:
        path = _path(typed_path(context, "config") or DEFAULT_CONFIG, typed_path(context, "file"))
        return [name for name in read_users(path) if name.startswith(incomplete)]
    except (ConfigError, OSError):
        return []


NewUser = Annotated[str, typer.Argument(metavar="USER", help="The name that the device logs in with.")]
User = Annotated[str, typer.Argument(metavar="USER", help="The user's name.", autocompletion=_complete_user)]
FileOption = Annotated[
    Path | None,
    typer.Option(
        "--file",
        metavar="FILE",
        help="Use this users file instead of the configured one.",
        show_default="mqtt.users_file of the configuration",
        readable=False,  # its error names the user and the remedy
    ),
]
LONGEST = 65_535  # bytes of a name or password in CONNECT (MQTT section 1.5)
RELOAD = "a running service whose configuration names this file applies it within seconds"


@app.command("list")
def list_users(
    config: ConfigOption = DEFAULT_CONFIG, file: FileOption = None, as_json: JsonOption = False
) -> None:
    """List the names of the users."""
    output.behave_in_pipes()
    names = list(read_users(_path(config, file)))
    if as_json:
        output.json(names)
    else:
        for name in names:
            output.echo(name)


@app.command(
    epilog="""\b
Examples:
  streambridge users add thermometer-1
  pwgen 20 1 | streambridge users add thermometer-1
"""
)
def add(user: NewUser, config: ConfigOption = DEFAULT_CONFIG, file: FileOption = None) -> None:
    """Add a user; creates the users file if there is none.

    Asks for the password twice; without a terminal it is the first line of standard input.
    """
    path = _path(config, file)
    if path.exists() and user in read_users(path):
        raise StreamBridgeError(f"{path} has a user {user} already; change the password with `users passwd`")
    change_users(path, user, _hashed(user), owner=_owner(config, file))
    output.echo(f"added {user}")
    output.note(f"note: {RELOAD}")


@app.command()
def passwd(user: User, config: ConfigOption = DEFAULT_CONFIG, file: FileOption = None) -> None:
    """Change the password of a user.

    Asks for it twice; without a terminal it is the first line of standard input.
    """
    path = _known(config, file, user)
    change_users(path, user, _hashed(user))
    output.echo(f"changed the password of {user}")
    output.note(f"note: {RELOAD}, and closes the connections of {user}")


@app.command()
def remove(
    user: User, sure: Sure = False, config: ConfigOption = DEFAULT_CONFIG, file: FileOption = None
) -> None:
    """Remove a user. The last user cannot be removed, because nobody could log in afterwards."""
    path = _known(config, file, user)
    if len(read_users(path)) == 1:
        raise StreamBridgeError(
            f"{path}: {user} is the last user, and the service refuses an empty users file; add another one "
            "first, or remove mqtt.users_file from the configuration"
        )
    confirm(sure, f"Remove {user}?")
    change_users(path, user, None)
    output.echo(f"removed {user}")
    output.note(f"note: {RELOAD}, and ends the session of {user}")


def hash_command(
    user: Annotated[str, typer.Argument(metavar="USER", help="The name that the device logs in with.")],
) -> None:
    """Print a user's line for `mqtt.users_file`; `users add` writes it there.

    Asks for the password; without a terminal it is the first line of standard input.
    """
    output.echo(f"{user}:{_hashed(user)}")


def _hashed(user: str) -> str:
    """Ask for a password and return its hash."""
    if not user or ":" in user or user[0] in "# " or not user.isprintable():
        raise typer.BadParameter(
            f"{user!r} is not a valid user name: it must be printable, without `:`, and not begin with `#`"
        )
    if user == "*":
        raise typer.BadParameter("* means all users in rules; choose another name")
    if len(user.encode()) > LONGEST:
        raise typer.BadParameter(f"the name has more than {LONGEST} bytes, which MQTT cannot send")
    if sys.stdin.isatty():
        password = getpass(f"Password of {user}: ").encode()
        if getpass("Repeat the password: ").encode() != password:
            raise StreamBridgeError("the two passwords differ; nothing was changed")
    else:
        password = sys.stdin.buffer.readline().rstrip(b"\r\n")
    if not password:
        raise StreamBridgeError("the password is empty; nothing was changed")
    if len(password) > LONGEST:
        raise StreamBridgeError(
            f"the password has more than {LONGEST} bytes, which MQTT cannot send; nothing was changed"
        )
    return hash_password(password)


def _path(config: Path, file: Path | None) -> Path:
    if file is not None:
        return file
    path = known_config(config, ("mqtt", "users_file")).mqtt.users_file
    if path is None:
        raise ConfigError(f"{config}: it has no mqtt.users_file; set it, or give the file with --file")
    return path


def _known(config: Path, file: Path | None, user: str) -> Path:
    """Return the users file. Raises an error if it does not have this user."""
    path = _path(config, file)
    known = read_users(path)
    if user not in known:
        raise StreamBridgeError(f"{path}: there is no user {user}; the users are: {', '.join(known)}")
    return path


def _owner(config: Path, file: Path | None) -> tuple[int, int] | None:
    """Return the owner of a new file that root creates: the service's user must be able to read it."""
    if os.geteuid() != 0:
        return None
    try:
        data_dir = known_config(config, ("gateway", "data_dir")).gateway.data_dir
    except (ConfigError, OSError):
        if file is None:
            raise
        return None  # a file for another machine: there need not be a service here
    lock = data_dir / LOCK
    found = next((place.stat() for place in (lock, data_dir) if place.exists()), None)
    return None if found is None else (found.st_uid, found.st_gid)
