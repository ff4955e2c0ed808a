"""The file of tokens, which identify the user of a client.

One token per line (`linefile`): `user token`, separated by blanks; a user may have several. Only digests are
in memory, so the look-up takes the same time for every wrong token.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from bridge.access.linefile import read_lines

_TOKEN = re.compile(r"[!-~]{16,256}")
# What to do if the file is missing.
CREATE = (
    "create it with `install -m 0640 -g streambridge /dev/null {path}`, and add lines `user token`; "
    "`openssl rand -base64 24` makes a token"
)


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()


def read_tokens(option: str, path: Path) -> dict[bytes, str]:
    """Read the users, by the digests of their tokens. Raises ConfigError, which shows no token."""
    return read_lines(
        option,
        path,
        _token,
        again=lambda _: "a token that another line has; give each user its own",
        create=CREATE.format(path=path),
        empty="no tokens in it; write a line `user token` for each",
        secret=True,
    )


def _token(line: str) -> tuple[bytes, str]:
    words = line.split()
    if len(words) != 2:
        raise ValueError("not `user token`")
    if not _TOKEN.fullmatch(words[1]):
        raise ValueError("a token has 16 to 256 characters of ASCII")
    return digest(words[1]), words[0]
