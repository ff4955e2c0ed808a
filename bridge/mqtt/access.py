"""Who may come in, and what they may do: authentication and topic rules.

What it promises: security files fail closed (a missing, empty, malformed or world-writable users file is
a ConfigError, and at a reload the old users stay); a password is verified in a thread, once per
client and password, and each failure from an address slows the next answer to it down.

The users file is that of mosquitto_passwd: one `name:$7$iterations$salt$hash` per line (PBKDF2 with
HMAC-SHA-512, salt and hash in base64); `hash_password` makes such a hash.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import os
import re
import stat
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from bridge.errors import ConfigError
from bridge.mqtt.packets import BAD_USER_OR_PASSWORD, NOT_AUTHORIZED, SERVER_BUSY
from bridge.topics import covers, matches

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from bridge.mqtt.settings import AccessRule, MqttConfig

ITERATIONS = 210_000  # OWASP's advice for PBKDF2 with SHA-512
MAX_ITERATIONS = 10_000_000
_LINE = re.compile(r"([^:\s][^:]*):\$7\$(\d+)\$([A-Za-z0-9+/=]+)\$([A-Za-z0-9+/=]+)")
FIRST_DELAY, LONGEST_DELAY = 0.25, 8.0
AT_A_TIME = 16  # logins of one address that are checked, or made to wait
REMEMBERED = 10_000  # addresses with failures, and verified passwords


class Password(NamedTuple):
    """A hashed password."""

    iterations: int
    salt: bytes
    hash: bytes

    def verify(self, password: bytes) -> bool:
        """Tell whether it is this password. Takes some 100 ms, without the GIL."""
        found = hashlib.pbkdf2_hmac("sha512", password, self.salt, self.iterations, len(self.hash))
        return hmac.compare_digest(found, self.hash)


def hash_password(password: bytes) -> str:
    """Hash a password for the users file."""
    salt = os.urandom(16)
    digest = hashlib.pbkdf2_hmac("sha512", password, salt, ITERATIONS)
    return f"$7${ITERATIONS}${base64.b64encode(salt).decode()}${base64.b64encode(digest).decode()}"


def read_users(path: Path) -> dict[str, Password]:
    """Read a users file, or raise a ConfigError that says which line is wrong."""
    try:
        mode = path.stat().st_mode
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"mqtt.users_file {path}: {error}") from error
    if mode & stat.S_IWOTH:
        raise ConfigError(f"mqtt.users_file {path}: everybody may write to it; chmod o-w it")
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


class Identity:
    """A client that was let in: its names, and what its rules allow. None for a list is everything."""

    __slots__ = ("client_id", "publish", "read", "subscribe", "user")

    def __init__(self, client_id: str, user: str | None, rules: Sequence[AccessRule]) -> None:
        self.client_id, self.user = client_id, user
        self.publish: list[str] | None = None
        self.subscribe: list[str] | None = None
        self.read: list[str] | None = None
        if rules:
            mine = [rule for rule in rules if rule.user in ("*", user or "")]
            self.publish = self._filled(f for rule in mine for f in rule.publish)
            self.subscribe = self._filled(f for rule in mine for f in rule.subscribe)
            self.read = self._filled(
                f for rule in mine for f in (rule.subscribe if rule.read is None else rule.read)
            )

    @property
    def label(self) -> str:
        """How the log and errors call it: with its user, since rules are written for users."""
        who = "anonymous" if self.user is None else f"user {self.user!r}"
        return f"client {self.client_id!r} ({who})"

    def may_publish(self, topic: str) -> bool:
        """Whether it may publish on a topic (request topics are decided elsewhere)."""
        return self.publish is None or any(matches(f, topic) for f in self.publish)

    def may_subscribe(self, topic_filter: str) -> bool:
        """Whether it may subscribe to all that a filter matches."""
        return self.subscribe is None or any(covers(f, topic_filter) for f in self.subscribe)

    def may_read(self, topic: str) -> bool:
        """Whether a message on a topic may be delivered to it."""
        return self.read is None or any(matches(f, topic) for f in self.read)

    def _filled(self, filters: Iterable[str]) -> list[str]:
        names = {"%c": self.client_id, "%u": self.user or ""}
        # A name with a wildcard or a level of its own would widen the rule: it gets nothing from it.
        bad = {mark for mark, name in names.items() if not name or set(name) & set("/+#")}
        filled: list[str] = []
        for topic_filter in filters:
            if any(mark in topic_filter for mark in bad):
                continue
            filled.append(re.sub("%[cu]", lambda mark: names[mark[0]], topic_filter))
        return filled


class Refused(NamedTuple):
    """Why a client is not let in: an MQTT 5 reason code and a text for the log."""

    reason: int
    text: str


class Access:
    """The front end's users and rules."""

    def __init__(self, config: MqttConfig) -> None:
        self._rules: Sequence[AccessRule] = ()
        self._users: dict[str, Password] = {}
        self._anonymous: bool | None = None
        self._verified: dict[bytes, None] = {}
        self._failures: dict[str, int] = {}
        self._checking: Counter[str] = Counter()
        self._key = os.urandom(16)
        # Its own thread, and only one: guessing passwords must not use up the store's threads.
        self._hasher = ThreadPoolExecutor(1, "mqtt-password")
        self.load(config)

    def load(self, config: MqttConfig) -> None:
        """Take over users and rules, or raise and leave everything as it was."""
        users = read_users(config.users_file) if config.users_file is not None else {}
        self._users, self._rules, self._anonymous = users, config.acl, config.allow_anonymous
        self._verified = {}

    def close(self) -> None:
        """End the thread that hashes."""
        self._hasher.shutdown(wait=False, cancel_futures=True)

    @property
    def has_users(self) -> bool:
        """Whether user names mean anything; without a users file every client is anonymous."""
        return bool(self._users)

    def knows(self, user: str | None) -> bool:
        """Whether a client that came in with this name (None: anonymous) could still come in."""
        return user is None or user in self._users

    def identify(self, client_id: str, user: str | None) -> Identity:
        """What a client that was let in may do."""
        return Identity(client_id, user, self._rules)

    def refuse_anonymous(self, *, loopback: bool) -> Refused | None:
        """Whether a client without a user name may come in through a listener."""
        allowed = loopback if self._anonymous is None else self._anonymous
        return None if allowed else Refused(NOT_AUTHORIZED, "a user name and password are needed here")

    async def verify(self, user: str, password: bytes | None, address: str) -> Refused | None:
        """Check a password; the answer to a wrong one comes late, and later each time."""
        known = self._users.get(user)
        mark = hmac.digest(self._key, user.encode() + b"\0" + (password or b""), "sha256")
        if known is not None and mark in self._verified:
            return None
        if self._checking[address] >= AT_A_TIME:
            return Refused(SERVER_BUSY, f"{AT_A_TIME} logins from this address are being checked already")
        self._checking[address] += 1
        try:
            if await self._hash(known, password) and self._users.get(user) is known:
                if len(self._verified) >= REMEMBERED:
                    self._verified.clear()
                self._verified[mark] = None
                self._failures.pop(address, None)
                return None
            count = self._failures.pop(address, 0)
            if len(self._failures) >= REMEMBERED:
                del self._failures[next(iter(self._failures))]
            self._failures[address] = count + 1
            await asyncio.sleep(min(FIRST_DELAY * 2 ** min(count, 8), LONGEST_DELAY))
        finally:
            self._checking[address] -= 1
            if not self._checking[address]:
                del self._checking[address]
        return Refused(BAD_USER_OR_PASSWORD, f"wrong user name or password for {user!r}")

    async def _hash(self, known: Password | None, password: bytes | None) -> bool:
        if password is None:
            return False
        # An unknown user takes as long as a known one, so that names cannot be told apart by time.
        hashed = known or Password(ITERATIONS, b"", b"\0" * 64)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._hasher, hashed.verify, password) and known is not None
