"""The users file: names and hashed passwords.

The format is that of mosquitto_passwd: one `name:$7$iterations$salt$hash` per line (PBKDF2 with HMAC-SHA-512,
salt and hash in base64); `hash_password` makes such a hash. Reading fails closed: a file that is missing,
empty, malformed, or writable by its group or others is a ConfigError.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import hmac
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from bridge.access.linefile import read_lines

CREATE = "create it with `streambridge users add NAME`"  # if the file is missing
ITERATIONS = 210_000  # OWASP's advice for PBKDF2 with SHA-512
MAX_ITERATIONS = 10_000_000
_LINE = re.compile(r"([^:\s][^:]*):\$7\$(\d+)\$([A-Za-z0-9+/=]+)\$([A-Za-z0-9+/=]+)")


class Password(NamedTuple):
    """A hashed password."""

    iterations: int
    salt: bytes
    hash: bytes

    def verify(self, password: bytes) -> bool:
        """Return whether this is the password. Takes about 100 ms, without the GIL."""
        found = hashlib.pbkdf2_hmac("sha512", password, self.salt, self.iterations, len(self.hash))
        return hmac.compare_digest(found, self.hash)


def usual_iterations(users: Mapping[str, Password]) -> int:
    """Return the most common number of iterations; if several are equally common, the largest."""
    counts = Counter(password.iterations for password in users.values())
    return max(counts, key=lambda count: (counts[count], count), default=ITERATIONS)


def hash_password(password: bytes) -> str:
    salt = os.urandom(16)
    digest = hashlib.pbkdf2_hmac("sha512", password, salt, ITERATIONS)
    return f"$7${ITERATIONS}${base64.b64encode(salt).decode()}${base64.b64encode(digest).decode()}"


def read_users(path: Path) -> dict[str, Password]:
    """Read a users file. Raises ConfigError, which names the wrong line."""
    return read_lines(
        "mqtt.users_file",
        path,
        _parse,
        again=lambda name: f"user {name!r} appears twice",
        create=CREATE,
        empty="no users in it; add one with `streambridge users add`",
        secret=False,
    )


def change_users(path: Path, user: str, hashed: str | None, owner: tuple[int, int] | None = None) -> None:
    """Set the password hash of a user, or remove the user; the other lines stay.

    The file is replaced atomically and durably, and keeps its owner and mode. A new one has mode 0600, and
    belongs to `owner` (user and group id). Raises ConfigError or OSError, and then the file is as it was.
    """
    path = path.resolve()
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)  # of two concurrent changes, one would be lost
        before: os.stat_result | None = None
        lines: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            before = path.stat()
            read_users(path)
            lines = path.read_text("utf-8").splitlines()
        fresh = [] if hashed is None else [f"{user}:{hashed}"]
        at = next((n for n, line in enumerate(lines) if line.partition(":")[0] == user), len(lines))
        lines[at : at + 1] = fresh
        new = path.with_name(f".{path.name}.new")
        new.unlink(missing_ok=True)  # left by an interrupted change
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "w", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
                if before is not None:
                    os.fchown(fd, before.st_uid, before.st_gid)
                    os.fchmod(fd, stat.S_IMODE(before.st_mode))
                elif owner is not None:
                    os.fchown(fd, *owner)
                file.flush()
                os.fsync(fd)
            read_users(new)
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        os.fsync(directory)
    finally:
        os.close(directory)


def _parse(line: str) -> tuple[str, Password]:
    found = _LINE.fullmatch(line)
    if found is None:
        raise ValueError("not name:$7$iterations$salt$hash; add users with `streambridge users add`")
    iterations = int(found[2])
    if not 0 < iterations <= MAX_ITERATIONS:
        raise ValueError(f"{iterations} iterations; 1 to {MAX_ITERATIONS} are possible")
    try:
        salt, digest = (base64.b64decode(part, validate=True) for part in found.group(3, 4))
    except ValueError:
        raise ValueError("the salt or hash is not base64") from None
    return found[1], Password(iterations, salt, digest)
