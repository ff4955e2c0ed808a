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
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from bridge.errors import ConfigError

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
        try:
            name, password = _parse(line.rstrip())
            if name in users:
                raise ValueError(f"user {name!r} a second time")
        except ValueError as error:
            raise ConfigError(f"mqtt.users_file {path}, line {number}: {error}") from None
        users[name] = password
    if not users:
        raise ConfigError(
            f"mqtt.users_file {path}: no users in it; add one with `streambridge hash-password`"
        )
    return users


def _parse(line: str) -> tuple[str, Password]:
    found = _LINE.fullmatch(line)
    if found is None:
        raise ValueError("not name:$7$iterations$salt$hash; make it with `streambridge hash-password`")
    iterations = int(found[2])
    if not 0 < iterations <= MAX_ITERATIONS:
        raise ValueError(f"{iterations} iterations; 1 to {MAX_ITERATIONS} are possible")
    try:
        salt, digest = (base64.b64decode(part, validate=True) for part in found.group(3, 4))
    except ValueError:
        raise ValueError("salt or hash is not base64") from None
    return found[1], Password(iterations, salt, digest)
