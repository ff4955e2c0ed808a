"""Files with one login per line: users, access keys and tokens.

Blank lines and lines that begin with `#` are ignored. Reading fails closed: a file that is missing, empty,
not text, no regular file, writable by its group or others, or, if it has secrets, readable by everybody, is a
ConfigError. So is a line that cannot be parsed or repeats a login.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bridge.errors import ConfigError
from bridge.readable import read_regular, unreadable

K = TypeVar("K")
V = TypeVar("V")


def read_lines(
    option: str,
    path: Path,
    parse: Callable[[str], tuple[K, V]],
    *,
    again: Callable[[K], str],
    create: str,
    empty: str,
    secret: bool,
) -> dict[K, V]:
    """Read a file of logins. Raises ConfigError, which names `option` and the line, but no secret.

    `parse` raises ValueError. `again` is the message for a repeated login, `create` the remedy for a missing
    file, `empty` for one without entries. `secret`: the file has secrets in plain text.
    """
    try:
        content, mode = read_regular(path)
        lines = content.decode().splitlines()
    except OSError as error:
        raise ConfigError(f"{option} {path}: {unreadable(path, create) or error}") from error
    except UnicodeDecodeError:  # its text quotes the bytes, which may be secret
        raise ConfigError(f"{option} {path}: it is not UTF-8; save the file as UTF-8") from None
    if secret and mode & (stat.S_IWGRP | stat.S_IWOTH | stat.S_IROTH):
        raise ConfigError(
            f"{option} {path}: it has secrets, but users other than its owner and group can read it, or "
            f"users other than its owner can write to it; chmod g-w,o= {path}"
        )
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{option} {path}: users other than its owner can write to it; chmod g-w,o= {path}")
    found: dict[K, V] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            key, value = parse(line.rstrip())
            if key in found:
                raise ValueError(again(key))
        except ValueError as error:
            raise ConfigError(f"{option} {path}, line {number}: {error}") from None
        found[key] = value
    if not found:
        raise ConfigError(f"{option} {path}: {empty}")
    return found
