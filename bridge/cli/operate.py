"""Carries out an operation on the streams of a data directory.

If the service runs, the request goes to its unix socket, `streambridge.sock` in the data directory. If it is
stopped, this process opens the streams itself, as the service does at its start: it takes the lock of the
directory, and memory streams begin empty. Root does this as the service's user, who could not read files
that root creates.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cbor2
import msgspec

from bridge import audit, cbor, errors
from bridge.access.rules import command
from bridge.audit.settings import AuditSettings
from bridge.cli import output
from bridge.cli.lookup import find
from bridge.cli.options import act_as_owner, data_directory, keys_of, known_config
from bridge.control import MAX_FRAME, SOCKET
from bridge.control.client import Control
from bridge.encryption import Keys
from bridge.errors import InvalidDefinition, InvalidRequest, StreamBridgeError, StreamNotFound
from bridge.export.cursor import forget_stream
from bridge.export.settings import ExportSettings
from bridge.model import MAX_INT64, ExportStatus
from bridge.operations.catalog import Operations
from bridge.operations.codec import answer
from bridge.operations.manager import Exports, StreamManager, first_free
from bridge.plugin import discovery
from bridge.plugin.api import Record
from bridge.streams.store import is_running, open_stopped


class Target(NamedTuple):
    """A data directory. `audit` is where changes are recorded while the service is stopped."""

    data_dir: Path
    plugin_dirs: list[Path]
    keys: Keys
    audit: AuditSettings = AuditSettings()


def target_of(config: Path, data_dir: Path | None) -> Target:
    """Return the target of the options --config and --data-dir. Raises ConfigError."""
    directory = data_directory(config, data_dir)
    keys = keys_of(config, directory)
    if data_dir is None:
        known = known_config(config, ("export", "plugin_dirs"))
        return Target(directory, known.export.plugin_dirs, keys, known.audit)
    return Target(directory, ExportSettings().plugin_dirs, keys)


def plugins(config: Path, data_dir: Path | None) -> discovery.Registry:
    """Return the plugins for the options --config and --data-dir. Raises ConfigError."""
    return discovery.load(target_of(config, data_dir).plugin_dirs)


def operate(target: Target, operation: str, **fields: Any) -> dict[str, Any]:
    """Carry out an operation, like a request on its topic; returns the entries of the reply.

    Raises the StreamBridgeError of the operation, or OSError.
    """
    for number in _numbers(fields):
        if abs(number) > MAX_INT64:
            raise InvalidRequest(f"{number}: a number has at most 64 bits, so it is at most {MAX_INT64}")
    body = cbor2.dumps(fields)
    control = Control.connect(target.data_dir)
    if control is not None:
        with control:
            raw = control.ask(operation, body)
    else:
        raw = asyncio.run(_here(target, operation, body))
    return _result(target.data_dir, raw, fields)


def _numbers(value: Any) -> Iterator[int]:
    """Yield the whole numbers in the fields of a request."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _numbers(one)


def _result(data_dir: Path, raw: bytes, fields: dict[str, Any]) -> dict[str, Any]:
    reply = cbor.decode_map(raw, most=len(raw))  # it is ours, so it may have any number of items
    if reply["status"]:
        error = _error(reply)
        if isinstance(error, StreamNotFound):
            find(data_dir, str(fields["name"]))  # its error lists the streams
        raise error
    return reply


def statuses(data_dir: Path, name: str) -> list[ExportStatus] | None:
    """Return the statuses of a stream's exports from the service; None if it is stopped or starting."""
    if not (data_dir / SOCKET).is_socket() or not is_running(data_dir):
        return None
    control = Control.connect(data_dir)
    if control is None:  # it is starting, and the socket is one that a killed service has left
        return None
    with control:
        raw = control.ask("describeMessageStream", cbor2.dumps({"name": name}))
    info = _result(data_dir, raw, {"name": name})["messageStreamInfo"]
    return msgspec.convert(info["exportStatuses"], list[ExportStatus])


async def _here(target: Target, operation: str, body: bytes) -> bytes:
    data_dir = target.data_dir
    act_as_owner(data_dir)
    async with open_stopped(
        data_dir,
        on_event=lambda stream, what: output.note(f"{stream}: {what}"),
        floor=lambda name, epoch: first_free(data_dir, name, epoch),
        keys=target.keys,
    ) as store:
        manager = StreamManager(store, discovery.load(target.plugin_dirs), _Stopped(data_dir))
        caller = command(f"uid {os.getuid()}, pid {os.getpid()}")
        audit.begin(target.audit, data_dir=data_dir)
        try:
            return await answer(Operations(manager), operation, body, MAX_FRAME, caller)
        finally:
            audit.end()
            manager.close()


class _Stopped(Exports):
    """Stands in for the exports while no worker runs. It exports nothing and has no statuses."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir

    def define(self, name: str, *_: object) -> None:
        """The worker reads the definition when it starts."""

    def committed(self, name: str, oldest: int, next_sequence: int) -> None:
        """The worker gets the positions when it starts."""

    def forget(self, name: str, pending: dict[str, list[Record]] | None = None) -> None:
        """Delete the cursors of a deleted stream."""
        forget_stream(self._data_dir, name)


def _error(reply: dict[str, Any]) -> StreamBridgeError:
    """Return the error in a reply."""
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
