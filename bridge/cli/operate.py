"""Having an operation carried out on the streams of a data directory.

While the service runs, it does it: the request goes to its unix socket, `streambridge.sock` in the data
directory. When it is stopped, this process opens the streams itself, which takes the directory's lock, as
the service does at its start; memory streams begin empty then, as they do there. Root does it with the
rights of the service's user, who could not read what root has made.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import cbor2
import msgspec

from bridge import cbor, errors
from bridge.access.rules import TRUSTED
from bridge.cli.common import act_as_owner, data_directory, known_config, note
from bridge.cli.lookup import find
from bridge.control import MAX_FRAME, SOCKET
from bridge.control.client import Control
from bridge.errors import InvalidDefinition, StreamBridgeError, StreamNotFound
from bridge.export.cursor import forget_stream, highest_exported
from bridge.export.settings import ExportSettings
from bridge.model import ExportStatus, MessageStreamDefinition
from bridge.operations.catalog import Operations
from bridge.operations.codec import answer
from bridge.operations.manager import StreamManager
from bridge.plugin import discovery
from bridge.plugin.api import Record
from bridge.streams.store import is_running, open_stopped


class Place(NamedTuple):
    """Whose streams."""

    data_dir: Path
    plugin_dirs: list[Path]


def place(config: Path, data_dir: Path | None) -> Place:
    """What the options --config and --data-dir stand for; raises ConfigError."""
    directory = data_directory(config, data_dir)
    if data_dir is None:
        return Place(directory, known_config(config, ("export", "plugin_dirs")).export.plugin_dirs)
    return Place(directory, ExportSettings().plugin_dirs)


def operate(where: Place, operation: str, **fields: Any) -> dict[str, Any]:
    """Carry out an operation as a request on its topic would; returns the reply's entries.

    Raises the StreamBridgeError that the operation ends with, or OSError.
    """
    body = cbor2.dumps(fields)
    control = Control.connect(where.data_dir)
    if control is not None:
        with control:
            raw = control.ask(operation, body)
    else:
        raw = asyncio.run(_here(where, operation, body))
    reply = cbor.decode_map(raw)
    if reply["status"]:
        error = _error(reply)
        if isinstance(error, StreamNotFound):
            find(where.data_dir, str(fields["name"]))  # says which there are
        raise error
    return reply


def statuses(data_dir: Path, name: str) -> list[ExportStatus] | None:
    """How far a stream's exports are, as the running service knows it; None if none runs."""
    if not (data_dir / SOCKET).is_socket() or not is_running(data_dir):
        return None
    info = operate(Place(data_dir, []), "describeMessageStream", name=name)["messageStreamInfo"]
    return msgspec.convert(info["exportStatuses"], list[ExportStatus])


async def _here(where: Place, operation: str, body: bytes) -> bytes:
    data_dir = where.data_dir
    act_as_owner(data_dir)
    async with open_stopped(
        data_dir,
        on_event=lambda stream, what: note(f"{stream}: {what}"),
        floor=lambda name, epoch: highest_exported(data_dir, name, epoch) + 1,
    ) as store:
        manager = StreamManager(store, discovery.load(where.plugin_dirs), _Stopped(data_dir))
        return await answer(Operations(manager), operation, body, MAX_FRAME, TRUSTED)


class _Stopped:
    """The export side while no worker runs."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir

    def define(self, name: str, directory: Path, epoch: int, definition: MessageStreamDefinition) -> None:
        """The worker will be told at the start."""

    def waiting(self, name: str) -> dict[str, list[Record]]:
        """No exporter hears of it."""
        return {}

    def forget(self, name: str, waiting: dict[str, list[Record]] | None = None) -> None:
        """The cursors of a deleted stream go too."""
        forget_stream(self._data_dir, name)

    def committed(self, name: str, oldest: int, next_sequence: int) -> None:
        """Nobody exports now."""

    def statuses(self, name: str) -> list[ExportStatus]:
        """Not known here; `streambridge exports` reads the cursors."""
        return []

    def exported_upto(self, name: str) -> int | None:
        """Not known here, so that nothing is freed as exported."""
        return None


def _error(reply: dict[str, Any]) -> StreamBridgeError:
    """The error that a reply reports."""
    if "path" in reply:
        return InvalidDefinition(tuple(reply["path"]), reply["what"], reply["remedy"], other=reply["other"])
    text = str(reply["errorMessage"])
    for kind in vars(errors).values():
        if (
            isinstance(kind, type)
            and issubclass(kind, StreamBridgeError)
            and kind.status_name == reply["statusName"]
        ):
            return kind(text)
    return StreamBridgeError(text)
