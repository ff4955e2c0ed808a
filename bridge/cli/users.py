"""`streambridge hash-password`: a line for the users file."""

from __future__ import annotations

import sys
from getpass import getpass
from typing import Annotated

import typer

from bridge.cli.common import echo


def make_line(
    user: Annotated[str, typer.Argument(metavar="USER", help="The name that the device logs in with.")],
) -> None:
    """Print a user's line for `mqtt.users_file`.

    Asks for the password; without a terminal it is the first line of standard input.
    """
    if not user or ":" in user or not user.isprintable():
        raise typer.BadParameter(f"{user!r} cannot be a user's name: it may not be empty or have a `:`")
    if sys.stdin.isatty():
        password = getpass(f"Password of {user}: ")
        if getpass("Once more: ") != password:
            raise typer.BadParameter("the two passwords differ")
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    if not password:
        raise typer.BadParameter("the password is empty")
    from bridge.access.users import hash_password

    echo(f"{user}:{hash_password(password.encode())}")


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(
        "hash-password",
        epilog="""\b
Examples:
  (umask 077; streambridge hash-password thermometer-1 >>users)
""",
    )(make_line)
