"""Having an operation carried out on the streams of a data directory.

While the service runs, it does it: the request goes to its unix socket, `streambridge.sock` in the data
directory. When it is stopped, this process opens the streams itself, which takes the directory's lock, as
the service does at its start; memory streams begin empty then, as they do there. Root does it with the
rights of the service's user, who could not read what root has made.
"""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any, NamedTuple

import cbor2
import msgspec

from bridge import cbor, errors, plugins
from bridge.cli.common import act_as_owner, data_directory, known_config, note
from bridge.cli.lookup import find
from bridge.errors import StreamBridgeError, StreamNotFound
from bridge.export.cursor import forget_stream, highest_exported
from bridge.export.settings import ExportSettings
from bridge.greengrass import wire
from bridge.greengrass.frontend import SOCKET
from bridge.manager import StreamManager
from bridge.model import ExportStatus, MessageStreamDefinition
from bridge.mqtt import requests
from bridge.streams.store import is_running, open_stopped

ANSWER_WITHIN = 120.0  # seconds; to purge by topic, a whole stream is read
LARGEST = 64 * 1024 * 1024  # bytes of a reply


class Place(NamedTuple):
    """Whose streams."""

    data_dir: Path
    plugin_dirs: list[str]


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
    body = cbor2.dumps({"requestId": "cli", "operation": operation, **fields})
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as service:
        if _reach(service, where.data_dir):
            raw = _ask(service, body)
        else:
            raw = asyncio.run(_here(where, operation, body))
    reply = cbor.decode_map(raw)
    if reply["status"]:
        error = _error(str(reply["statusName"]), str(reply["errorMessage"]))
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


def _reach(service: socket.socket, data_dir: Path) -> bool:
    """Connect to the service's socket; False if none runs."""
    service.settimeout(ANSWER_WITHIN)
    # A unix address has room for 107 bytes, a path may be longer: name the directory by descriptor.
    directory = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        service.connect(f"/proc/self/fd/{directory}/{SOCKET}")
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(data_dir / SOCKET)) from None
    finally:
        os.close(directory)
    return True


def _ask(service: socket.socket, body: bytes) -> bytes:
    hello = cbor.encode({"requestId": "hello", "protocolVersion": wire.VERSIONS[0]})
    try:
        service.sendall(bytes((wire.CONNECT_VERSION,)) + wire.frame(wire.Op.CONNECT, hello))
        service.sendall(wire.frame(wire.COMMAND, body))
        with service.makefile("rb") as answers:
            answers.read(1)
            for _ in range(2):
                head = answers.read(wire.HEADER)
                body = answers.read(int.from_bytes(head[:4], "big") - 1) if len(head) == wire.HEADER else b""
                if not body:
                    raise ConnectionResetError
                if head[4] == wire.COMMAND_REPLY:
                    return body
                if head[4] == wire.UNKNOWN_OPERATION_ERROR:  # to whatever is wrong with the request itself
                    failure = cbor.decode_map(body)
                    if failure["status"] != wire.Status.UNKNOWN_OPERATION:
                        raise StreamBridgeError(str(failure["errorMessage"]))
        raise StreamBridgeError("the running service is of another version; restart it")
    except (ConnectionError, TimeoutError):
        raise StreamBridgeError(
            "the service did not answer to the end; look whether the operation was carried out"
        ) from None


async def _here(where: Place, operation: str, body: bytes) -> bytes:
    data_dir = where.data_dir
    act_as_owner(data_dir)
    async with open_stopped(
        data_dir,
        on_event=lambda stream, what: note(f"{stream}: {what}"),
        floor=lambda name, epoch: highest_exported(data_dir, name, epoch) + 1,
    ) as store:
        manager = StreamManager(store, plugins.load(where.plugin_dirs), _Stopped(data_dir))
        return await requests.answer(manager, operation, body, LARGEST)


class _Stopped:
    """The export side while no worker runs."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir

    def define(self, name: str, directory: Path, epoch: int, definition: MessageStreamDefinition) -> None:
        """The worker will be told at the start."""

    def forget(self, name: str) -> None:
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


def _error(name: str, text: str) -> StreamBridgeError:
    """The error that a reply tells of."""
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, StreamBridgeError) and kind.status_name == name:
            return kind(text)
    return StreamBridgeError(text)
