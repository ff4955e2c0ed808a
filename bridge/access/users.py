"""The users file: names and hashed passwords.

The format is that of mosquitto_passwd: one `name:$7$iterations$salt$hash` per line (PBKDF2 with HMAC-SHA-512,
salt and hash in base64); `hash_password` makes such a hash. It fails closed: a file that is missing, empty,
malformed, or writable by its group or others is a ConfigError.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import stat
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from bridge.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ITERATIONS = 210_000  # OWASP's advice for PBKDF2 with SHA-512
MAX_ITERATIONS = 10_000_000
_LINE = re.compile(r"([^:\s][^:]*):\$7\$(\d+)\$([A-Za-z0-9+/=]+)\$([A-Za-z0-9+/=]+)")


class Password(NamedTuple):
    """A hashed password."""

    iterations: int
    salt: bytes
    hash: bytes

    def verify(self, password: bytes) -> bool:
        """Return whether it is this password. Takes about 100 ms, without the GIL."""
        found = hashlib.pbkdf2_hmac("sha512", password, self.salt, self.iterations, len(self.hash))
        return hmac.compare_digest(found, self.hash)


def usual_iterations(users: Mapping[str, Password]) -> int:
    """The most common number of iterations; the largest if several are equally common."""
    counts = Counter(password.iterations for password in users.values())
    return max(counts, key=lambda count: (counts[count], count), default=ITERATIONS)


def hash_password(password: bytes) -> str:
    """Hash a password for the users file."""
    salt = os.urandom(16)
    digest = hashlib.pbkdf2_hmac("sha512", password, salt, ITERATIONS)
    return f"$7${ITERATIONS}${base64.b64encode(salt).decode()}${base64.b64encode(digest).decode()}"


def read_users(path: Path) -> dict[str, Password]:
    """Read a users file; raises ConfigError with the line that is wrong."""
    try:
        mode = path.stat().st_mode
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"mqtt.users_file {path}: {error}") from error
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"mqtt.users_file {path}: others than its owner may write to it; chmod go-w it")
    users: dict[str, Password] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line.rstrip())
        problem = (
            "" if found else "not name:$7$iterations$salt$hash; make it with `streambridge hash-password`"
        )
        if found:
            name, count = found[1], int(found[2])
            if name in users:
                problem = f"user {name!r} a second time"
            elif not 0 < count <= MAX_ITERATIONS:
                problem = f"{count} iterations; 1 to {MAX_ITERATIONS} are possible"
            else:
                try:
                    users[name] = Password(
                        count,
                        base64.b64decode(found[3], validate=True),
                        base64.b64decode(found[4], validate=True),
                    )
                except ValueError:
                    problem = "salt or hash is not base64"
        if problem:
            raise ConfigError(f"mqtt.users_file {path}, line {number}: {problem}")
    if not users:
        raise ConfigError(
            f"mqtt.users_file {path}: no users in it; add one with `streambridge hash-password`"
        )
    return users
