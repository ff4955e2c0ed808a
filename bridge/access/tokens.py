"""The file of tokens: which user a client is that shows one.

One token per line: `user token`, separated by blanks; a user may have several. It fails closed: a file that
is missing, empty, malformed, readable by everybody, or writable by its group or others is a ConfigError. In
memory there are digests only, so that looking one up takes the same time for every wrong token.
"""

from __future__ import annotations

import hashlib
import re
import stat
from pathlib import Path

from bridge.errors import ConfigError

_TOKEN = re.compile(r"[!-~]{16,256}")
# What to do if the file is missing.
CREATE = (
    "create it with `install -m 0640 -g streambridge /dev/null {path}`, and add lines `user token`; "
    "`openssl rand -base64 24` makes a token"
)


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()


def read_tokens(option: str, path: Path) -> dict[bytes, str]:
    """Read the users, by the digests of their tokens; raises ConfigError, which shows no token."""
    try:
        mode = path.stat().st_mode
        lines = path.read_text("utf-8").splitlines()
    except FileNotFoundError:
        raise ConfigError(f"{option} {path}: No such file or directory; {CREATE.format(path=path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path}: {error}") from error
    if mode & (stat.S_IWGRP | stat.S_IWOTH | stat.S_IROTH):
        raise ConfigError(
            f"{option} {path}: it has secrets, and others than its owner and group can read it, or others "
            f"than its owner can write it; chmod g-w,o= {path}"
        )
    users: dict[bytes, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        place = f"{option} {path}, line {number}"
        if len(words) != 2:
            raise ConfigError(f"{place}: not `user token`")
        if not _TOKEN.fullmatch(words[1]):
            raise ConfigError(f"{place}: a token has 16 to 256 characters of ASCII")
        if digest(words[1]) in users:
            raise ConfigError(f"{place}: a token that another line has; give each user its own")
        users[digest(words[1])] = words[0]
    if not users:
        raise ConfigError(f"{option} {path}: no tokens in it; write a line `user token` for each")
    return users
