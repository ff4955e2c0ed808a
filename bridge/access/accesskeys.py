"""The file of access keys: ids, secrets and users of clients that sign their requests as for AWS.

One key per line (`linefile`): `id secret [user]`, separated by blanks. Without a user, the id is the user's
name in the rules. A secret is stored in plain text, because a signature can be checked only with it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from bridge.access.linefile import read_lines

_ID = re.compile(r"[A-Za-z0-9_]{4,128}")
_SECRET = re.compile(r"[!-~]{16,256}")
# What to do if the file is missing.
CREATE = (
    "create it with `install -m 0640 -g streambridge /dev/null {path}`, and add a line `id secret [user]`"
)


class AccessKey(NamedTuple):
    """A key and its user."""

    id: str
    secret: str
    user: str


def read_access_keys(option: str, path: Path) -> dict[str, AccessKey]:
    """Read the keys, by id. Raises ConfigError, which names the option and the line, but no secret."""
    return read_lines(
        option,
        path,
        _key,
        again=lambda key: f"the id {key} appears twice",
        create=CREATE.format(path=path),
        empty="no keys in it; write a line `id secret [user]` for each",
        secret=True,
    )


def _key(line: str) -> tuple[str, AccessKey]:
    words = line.split()
    if len(words) not in (2, 3):
        raise ValueError("not `id secret [user]`")
    if not _ID.fullmatch(words[0]):
        raise ValueError("an id has 4 to 128 letters, digits and underscores")
    if not _SECRET.fullmatch(words[1]):
        raise ValueError("a secret has 16 to 256 characters of ASCII")
    return words[0], AccessKey(words[0], words[1], words[2] if len(words) == 3 else words[0])
