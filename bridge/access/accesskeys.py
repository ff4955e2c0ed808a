"""The file of access keys: ids, secrets and users of clients that sign their requests as for AWS.

One key per line: `id secret [user]`, separated by blanks; without a user the id is the user's name in the
rules. A secret is stored as it is, since a signature can be checked only with it. It fails closed: a file
that is missing, empty, malformed, readable by everybody, or writable by its group or others is a ConfigError.
"""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import NamedTuple

from bridge.errors import ConfigError

_ID = re.compile(r"[A-Za-z0-9_]{4,128}")
_SECRET = re.compile(r"[!-~]{16,256}")
# What to do if the file is missing.
CREATE = (
    "create it with `install -m 0640 -g streambridge /dev/null {path}`, and add a line `id secret [user]`"
)


class AccessKey(NamedTuple):
    """A key and whose it is."""

    id: str
    secret: str
    user: str


def read_access_keys(option: str, path: Path) -> dict[str, AccessKey]:
    """Read the keys, by id; raises ConfigError, which names the option and the line, but no secret."""
    try:
        mode = path.stat().st_mode
        lines = path.read_text("ascii").splitlines()
    except FileNotFoundError:
        raise ConfigError(f"{option} {path}: No such file or directory; {CREATE.format(path=path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path}: {error}") from error
    if mode & (stat.S_IWGRP | stat.S_IWOTH | stat.S_IROTH):
        raise ConfigError(
            f"{option} {path}: it has secrets, but users other than its owner and group can read it, or "
            f"users other than its owner can write to it; chmod g-w,o= {path}"
        )
    keys: dict[str, AccessKey] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            key = _key(words)
            if key.id in keys:
                raise ValueError(f"the id {key.id} appears twice")
        except ValueError as error:
            raise ConfigError(f"{option} {path}, line {number}: {error}") from None
        keys[key.id] = key
    if not keys:
        raise ConfigError(f"{option} {path}: no keys in it; write a line `id secret [user]` for each")
    return keys


def _key(words: list[str]) -> AccessKey:
    if len(words) not in (2, 3):
        raise ValueError("not `id secret [user]`")
    if not _ID.fullmatch(words[0]):
        raise ValueError("an id has 4 to 128 letters, digits and underscores")
    if not _SECRET.fullmatch(words[1]):
        raise ValueError("a secret has 16 to 256 characters")
    return AccessKey(words[0], words[1], words[2] if len(words) == 3 else words[0])
