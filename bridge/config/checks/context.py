"""What the checks share: the configuration as far as it is known, its exports, and findings."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import fields

from bridge.config.settings import Config
from bridge.config.tomlfile import Document, Keys, Problem
from bridge.config.tomlstruct import Reader, dotted, snake
from bridge.errors import InvalidDefinition
from bridge.model import MessageStreamDefinition
from bridge.plugin import discovery
from bridge.plugin.api import ExportConfig
from bridge.readable import unreadable
from bridge.settingtypes import wire_name
from bridge.streams.store import LOCK


class Finding(Struct, frozen=True):
    """One thing that is wrong, where it is, and what to do: `what` says it all.

    `file` and `line` are where it is; None if it is not in the configuration, or the file as a whole.
    """

    level: Literal["error", "warning"]
    what: str
    file: Path | None = None
    line: int | None = None


class DeclaredExport(NamedTuple):
    """An export in the configuration, at `keys`, without the options that are wrong.

    `config` is None if a required option is missing or wrong, or the kind is unknown.
    """

    stream: MessageStreamDefinition
    keys: Keys
    kind: str
    config: ExportConfig | None
    mistakes: list[Problem]


class CheckContext:
    """A configuration and the document that it was read from.

    The values of `broken` keys are unknown, since they are mistakes; no check looks at them. If a file could
    not be read, only the values in the other files are known.
    """

    def __init__(self, config: Config, document: Document, broken: Collection[Keys] = ()) -> None:
        self.config, self.document, self._broken = config, document, broken

    def knows(self, *keys: str | int) -> bool:
        """Return whether the value of a key is the one that its author wants."""
        if any(keys[:depth] in self._broken for depth in range(1, len(keys) + 1)):
            return False
        return not self.document.problems or self.document.states(keys)

    def knows_all(self, *keys: str | int) -> bool:
        """Return whether also everything below a key is what its author wants."""
        return self.knows(*keys) and not any(one[: len(keys)] == keys for one in self._broken)

    def error(self, keys: Keys, what: str) -> Finding:
        """A finding that keeps the service, or a part of it, from working."""
        return finding("error", Problem(self.document.position(keys), f"{dotted(keys)}: {what}"))

    def warning(self, keys: Keys, what: str) -> Finding:
        """A finding that will sooner or later cause trouble."""
        return finding("warning", Problem(self.document.position(keys), f"{dotted(keys)}: {what}"))

    @cached_property
    def service(self) -> int | None:
        """The id of the user whom the data directory belongs to, and who runs the service."""
        data_dir = self.config.gateway.data_dir
        if self.knows("gateway", "data_dir"):
            for path in (data_dir / LOCK, data_dir):
                with suppress(OSError):
                    return path.stat().st_uid
        return None

    def unreadable(self, path: Path, create: str = "") -> str:
        """Return why a file cannot be read and what to do, as `readable.unreadable`, with its path."""
        why = unreadable(path, create, self.service)
        return f"{path} cannot be read: {why}" if why else ""

    @cached_property
    def registry(self) -> discovery.Registry:
        """The plugins."""
        return discovery.load(self.config.export.plugin_dirs)

    @cached_property
    def exports(self) -> list[DeclaredExport]:
        """The exports of all declared streams."""
        return [
            self._export(stream, kind, number)
            for stream in self.config.streams.values()
            for kind, items in stream.export_definition.items()
            for number in range(len(items))
        ]

    def _export(self, stream: MessageStreamDefinition, kind: str, number: int) -> DeclaredExport:
        keys: Keys = ("streams", stream.name, "export", kind, number)
        reader = Reader(self.document, self._broken, full_names=True)
        config: ExportConfig | None = None
        if kind in self.registry.exporters:
            table = self.document.data["streams"][stream.name]["export"][kind][number]
            config = reader.struct(self.registry.exporters[kind].Config, table, keys)
        if not any(broken[: len(keys)] == keys for broken in reader.broken):
            try:
                config = self.registry.config(kind, stream.export_definition[kind][number], ())
            except InvalidDefinition as error:  # of the exporter's own check
                inner = (snake(key) if isinstance(key, str) else key for key in error.path)
                what = error.sentence("")
                for field in fields(config) if config is not None else ():
                    what = re.sub(rf"\b{wire_name(field.name)}\b", field.name, what)
                reader.problem((*keys, *inner), what)
        return DeclaredExport(stream, keys, kind, config, reader.problems)


def finding(level: Literal["error", "warning"], problem: Problem) -> Finding:
    """A finding in the configuration."""
    return Finding(level, str(problem), problem.position.file, problem.position.line or None)


def existing(path: Path) -> Path:
    """The path, or the innermost directory above it that exists."""
    return next(place for place in (path, *path.absolute().parents) if os.path.exists(place))  # noqa: PTH110 - never raises


def read_only(path: Path) -> bool:
    """Return whether a file system is mounted read-only."""
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
