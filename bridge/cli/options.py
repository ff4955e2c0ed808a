"""The options that commands share, and their resolution to directories, configurations and keys."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from bridge import encryption
from bridge.config import tomlfile
from bridge.config.settings import DEFAULT_CONFIG, Config, understand
from bridge.config.tomlfile import Keys
from bridge.errors import ConfigError, StreamBridgeError
from bridge.model import MessageStreamDefinition, identifiers
from bridge.readable import is_directory, user_name
from bridge.streams import formats
from bridge.streams.layout import STREAMS
from bridge.streams.reader import StreamMeta, list_streams
from bridge.streams.store import LOCK

KEY_FILE = "STREAMBRIDGE_KEY_FILE"
_CREDENTIALS = (encryption.OWN_CREDENTIALS, encryption.CREDENTIAL_SOURCES)

ConfigOption = Annotated[
    Path,
    typer.Option(
        "--config",
        "-c",
        envvar="STREAMBRIDGE_CONFIG",
        help="The configuration file.",
        metavar="FILE",
        readable=False,  # its error names the user and the remedy; that of click is about the usage
    ),
]
DataDirOption = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        help="Use this data directory instead of the configured one.",
        metavar="DIRECTORY",
        show_default="gateway.data_dir of the configuration",
    ),
]


KeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        envvar=KEY_FILE,
        help="The file with the key of encrypted streams.",
        metavar="FILE",
        show_default="encryption.key_file of the configuration",
        readable=False,
    ),
]


def typed_path(context: typer.Context, parameter: str) -> Path | None:
    """Return a path option during completion, when values are still as they were typed."""
    given = context.params.get(parameter)
    return Path(given) if given else None


def complete_stream(context: typer.Context, incomplete: str) -> list[str]:
    """Complete the names of streams; there are none without a data directory."""
    return [meta.name for meta in _streams(context) if meta.name.startswith(incomplete)]


def complete_export(context: typer.Context, incomplete: str) -> list[str]:
    """Complete the identifiers of exports, of the given stream or of all streams."""
    found: list[str] = []
    stream = context.params.get("name")  # an unfinished option hides the arguments before it
    for meta in _streams(context):
        if stream in (None, meta.name):
            with suppress(msgspec.MsgspecError):
                found += identifiers(msgspec.json.decode(meta.definition, type=MessageStreamDefinition))
    return [name for name in found if name.startswith(incomplete)]


def _streams(context: typer.Context) -> list[StreamMeta]:
    try:
        config = typed_path(context, "config") or DEFAULT_CONFIG
        return list_streams(data_directory(config, typed_path(context, "data_dir")))
    except (StreamBridgeError, OSError):
        return []


StreamArgument = Annotated[
    str, typer.Argument(metavar="STREAM", help="The stream's name.", autocompletion=complete_stream)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def known_config(path: Path, *needed: Keys) -> Config:
    """Load a configuration of which only some keys must be valid.

    Reading the streams needs neither the service's secrets nor a configuration without mistakes.
    """
    settings, reader = understand(tomlfile.read(path), dict)
    wrong = {keys[:depth] for keys in needed for depth in range(1, len(keys) + 1)} & reader.broken
    if reader.document.problems or wrong:
        raise ConfigError(reader.report())
    return settings


def data_directory(config: Path, data_dir: Path | None, option: str = "--data-dir") -> Path:
    """Return the data directory of a command. Errors mention `option`, which sets it directly."""
    directory = (
        known_config(config, ("gateway", "data_dir")).gateway.data_dir if data_dir is None else data_dir
    )
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory}: this is not a directory; use the one in gateway.data_dir")
    if not directory.is_dir():
        raise ConfigError(
            f"{directory}: there is no such data directory; start the service once, or give another one "
            f"with --config or {option}"
        )
    if not (directory / STREAMS).is_dir() and any(directory.iterdir()):
        raise ConfigError(
            f"{directory}: this is not a data directory of streambridge, since it has no {STREAMS}/; use the "
            "one in gateway.data_dir"
        )
    formats.find(directory)  # refuses a directory of a newer version
    return directory


def find_credentials() -> None:
    """Find the credentials of the running service, or their source, when this is not the service."""
    if "CREDENTIALS_DIRECTORY" not in os.environ:
        source = next((path for path in _CREDENTIALS if is_directory(path)), _CREDENTIALS[-1])
        os.environ["CREDENTIALS_DIRECTORY"] = source


def keys_of(config: Path, data_dir: Path, key_file: Path | None = None) -> encryption.Keys:
    """Return the keys of a data directory. Without `key_file`, the configuration names the key file."""
    if key_file is None and KEY_FILE in os.environ:
        key_file = Path(os.environ[KEY_FILE])
    if key_file is None and config.exists():
        find_credentials()
        key_file = known_config(config).encryption.key_file
    return encryption.Keys(data_dir, key_file)


def act_as_owner(data_dir: Path) -> None:
    """If root runs this command, continue as the service's user, who cannot read files that root creates.

    The owner of the lock file is that user; before the first start, the owner of the directory. Raises
    StreamBridgeError if root may not change its user.
    """
    if os.geteuid() != 0:
        return
    lock = data_dir / LOCK
    owner = (lock if lock.exists() else data_dir).stat()
    if owner.st_uid == 0:
        return
    name = user_name(owner.st_uid)
    try:
        os.initgroups(name, owner.st_gid)
        os.setgid(owner.st_gid)
        os.setuid(owner.st_uid)
    except OSError as error:  # in a container without that capability
        raise StreamBridgeError(
            f"{data_dir}: it belongs to user {name}, and root cannot become that user here: "
            f"{error.strerror}; run this as {name}"
        ) from None


def denied(path: Path) -> str:
    """Explain, for an error about a path, which user lacks access and which user has it."""
    found = next(parent for parent in (path.absolute(), *path.absolute().parents) if os.path.lexists(parent))
    user, owner = user_name(os.geteuid()), user_name(found.lstat().st_uid)
    return f" for user {user}" + (f"; run this as user {owner}" if owner != user else "")
