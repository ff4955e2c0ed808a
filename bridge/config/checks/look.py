"""What the parts of `streambridge check` share: the configuration as far as it is known, and findings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from bridge.config.settings import Config
from bridge.config.tomlfile import Document, Keys
from bridge.config.tomlstruct import dotted


class Finding(Struct, frozen=True):
    """One thing that is wrong, with place and remedy."""

    level: Literal["error", "warning"]
    what: str


class Look:
    """A configuration and the file that it stands in.

    `broken` are the keys whose values have a mistake: what they stand for is not known, and nothing is
    found on them. If a file could not be read at all, only what the others state is known.
    """

    def __init__(self, config: Config, document: Document, broken: set[Keys] = frozenset()) -> None:  # type: ignore[assignment]
        self.config, self.document, self._broken = config, document, broken

    def knows(self, *keys: str | int) -> bool:
        """Whether the value of a key is what its owner means."""
        if any(keys[:depth] in self._broken for depth in range(1, len(keys) + 1)):
            return False
        return not self.document.problems or self._stated(keys)

    def _stated(self, keys: Keys) -> bool:
        value: Any = self.document.data
        try:
            for key in keys:
                value = value[key]
        except (KeyError, IndexError, TypeError):
            return False
        return True

    def error(self, keys: Keys, what: str) -> Finding:
        """Something that keeps the service, or a part of it, from working."""
        return Finding("error", f"{self.document.place(keys)}: {dotted(keys)}: {what}")

    def warning(self, keys: Keys, what: str) -> Finding:
        """Something that sooner or later will."""
        return Finding("warning", f"{self.document.place(keys)}: {dotted(keys)}: {what}")


def existing(path: Path) -> Path:
    """The path, or the innermost directory above it that is there."""
    return next(place for place in (path, *path.absolute().parents) if os.path.exists(place))  # noqa: PTH110 - never raises


def read_only(place: Path) -> bool:
    """Whether nobody can write there, whatever rights he has."""
    return bool(os.statvfs(place).f_flag & os.ST_RDONLY)


def unreadable(path: Path) -> str:
    """Why a file cannot be read; empty if it can."""
    try:
        path.open("rb").close()
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return ""
