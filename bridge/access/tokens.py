"""The file of tokens, which identify the user of a client.

One token per line (`linefile`): `user token`, separated by blanks; a user may have several. Only digests are
in memory, so the look-up takes the same time for every wrong token.

`Proven` remembers which tokens were right, so that wrong ones of others at the same address do not hold up
their clients.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from bridge.access.linefile import read_lines
from bridge.access.remembered import remember

SHORTEST = 16  # characters of a token in the file
_TOKEN = re.compile(rf"[!-~]{{{SHORTEST},256}}")
# What to do if the file is missing.
CREATE = (
    "create it with `install -m 0640 -g streambridge /dev/null {path}`, and add lines `user token`; "
    "`openssl rand -base64 24` makes a token"
)


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()


class Proven:
    """Tokens that were right, each with the network of its client. To show one again is no guess.

    The number is bounded: the one that was not shown for longest goes first. Short tokens are not remembered,
    because they could be found by trying many, if only those that are not remembered were delayed.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes], None] = {}

    def add(self, network: str, token: str) -> None:
        """A token was right."""
        if len(token) >= SHORTEST:
            remember(self._known, (network, digest(token)), None)

    def has(self, network: str, token: str) -> bool:
        """Return whether a token was right. It may have been removed since."""
        return (network, digest(token)) in self._known


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
