"""`streambridge keys ...`: the key of encrypted streams."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from bridge.cli import output
from bridge.cli.options import (
    ConfigOption,
    DataDirOption,
    KeyFileOption,
    act_as_owner,
    data_directory,
    keys_of,
)
from bridge.config.settings import DEFAULT_CONFIG
from bridge.encryption import is_used, may_replace, new_master
from bridge.errors import StreamBridgeError

app = typer.Typer(help="Create and replace the key of encrypted streams.", no_args_is_help=True)


@app.command(
    epilog="""\b
Examples:
  streambridge keys new /etc/streambridge/encryption.key
  streambridge keys new - |
    sudo systemd-creds encrypt --name=encryption-key - /etc/credstore.encrypted/encryption-key
"""
)
def new(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The file to create; `-` is standard output.")],
) -> None:
    """Create a key file.

    Keep a copy elsewhere: without the key, nobody can read the encrypted data.
    """
    if str(path) == "-":
        output.echo(new_master().rstrip())
        return
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise StreamBridgeError(f"{path}: this file exists; a key is never overwritten") from None
    with os.fdopen(fd, "w") as file:
        file.write(new_master())
        file.flush()
        os.fsync(fd)
    output.echo(f"{path}: a new key; set key_file in [encryption] to it, and keep a copy elsewhere")


@app.command(
    epilog="""\b
Examples:
  sudo streambridge keys rotate
  streambridge keys rotate --key-file both.key
"""
)
def rotate(
    config: ConfigOption = DEFAULT_CONFIG,
    data_dir: DataDirOption = None,
    key_file: KeyFileOption = None,
) -> None:
    """Replace the key; no message is re-encrypted.

    Puts a new key before the one in the key file, encrypts the keys of the data directory with it, and
    removes the old key from the file. If the file already has several keys, no new one is created and the
    first one stays: this completes an interrupted rotation. The service may be running.
    """
    directory = data_directory(config, data_dir)
    keys = keys_of(config, directory, key_file)
    if not is_used(directory):
        raise StreamBridgeError(f"{directory}: nothing is encrypted here yet; create a new key file instead")
    if keys.key_file is not None and may_replace(keys.key_file):
        number, finished = keys.rotate()
    else:
        act_as_owner(directory)
        number, finished = keys.rotate()
    output.echo(
        f"{output.count(number, 'key')} of {directory}: now encrypted with the first key of {keys.key_file}"
    )
    if not finished:
        output.note(
            f"{keys.key_file}: this file cannot be changed here; remove all keys but the first from it"
        )
