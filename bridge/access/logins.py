"""Who may come in: users, passwords, and the price of guessing.

What it promises: security files fail closed (at a reload the old users stay if the new ones are wrong); a
password is verified in a thread, once per client and password, and each failure from an address slows the
next answer to it down.
"""

from __future__ import annotations

import asyncio
import enum
import hmac
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, Protocol

from bridge.access import proofs
from bridge.access.rules import Identity
from bridge.access.users import ITERATIONS, Password, read_users

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet
    from pathlib import Path

    from bridge.access.rules import AccessRule

FIRST_DELAY, LONGEST_DELAY = 0.25, 8.0
AT_A_TIME = 16  # logins of one address that are checked, or made to wait
REMEMBERED = 10_000  # addresses with failures, and verified passwords


class Reason(enum.Enum):
    """Why a client is not let in."""

    NOT_ALLOWED = enum.auto()
    WRONG_CREDENTIALS = enum.auto()
    BUSY = enum.auto()


class AccessSettings(Protocol):
    """What of a configuration says who may come in, and what they may do."""

    @property
    def users_file(self) -> Path | None:
        """The users file; None: no user names."""

    @property
    def acl(self) -> Sequence[AccessRule]:
        """The rules; none: everything is allowed."""

    @property
    def allow_anonymous(self) -> bool | None:
        """Whether clients without a name may come in; None: on loopback only."""


class Denied(NamedTuple):
    """Why a client is not let in, with a text for the log."""

    reason: Reason
    text: str


class Access:
    """The front end's users and rules."""

    def __init__(self, config: AccessSettings) -> None:
        self._rules: Sequence[AccessRule] = ()
        self._users: dict[str, Password] = {}
        self._anonymous: bool | None = None
        self._authorities: AbstractSet[bytes] = frozenset()
        self._verified: dict[bytes, None] = {}
        self._failures: dict[str, int] = {}
        self._checking: Counter[str] = Counter()
        self._key = os.urandom(16)
        # Its own thread, and only one: guessing passwords must not use up the store's threads.
        self._hasher = ThreadPoolExecutor(1, "mqtt-password")
        self.load(config)

    def load(self, config: AccessSettings, authorities: AbstractSet[bytes] = frozenset()) -> None:
        """Take over users, rules and `proofs.authorities`, or raise and leave everything as it was."""
        users = read_users(config.users_file) if config.users_file is not None else {}
        self._authorities = authorities
        self._users, self._rules, self._anonymous = users, config.acl, config.allow_anonymous
        self._verified = {}

    def close(self) -> None:
        """End the thread that hashes."""
        self._hasher.shutdown(wait=False, cancel_futures=True)

    @property
    def has_users(self) -> bool:
        """Whether user names mean anything; without a users file every client is anonymous."""
        return bool(self._users)

    def knows(self, user: str) -> bool:
        """Whether there is a user of this name."""
        return user in self._users

    def proof_of(self, user: str) -> bytes:
        """What a user is let in by who has given the password."""
        return proofs.of_password(self._users[user]) if user in self._users else b""

    def still_admits(self, user: str | None, proof: bytes) -> bool:
        """Whether a client that came in by this proof (user None: anonymous) could still come in by it."""
        return proofs.holds(proof, user, self._users, self._authorities)

    def identify(self, client_id: str, user: str | None, *, local: bool = False, label: str = "") -> Identity:
        """What a client that was let in may do; `local`: it is on this machine."""
        return Identity(client_id, user, self._rules, local=local, label=label)

    def refuse_anonymous(self, *, loopback: bool) -> Denied | None:
        """Whether a client without a user name may come in through a listener."""
        allowed = loopback if self._anonymous is None else self._anonymous
        return None if allowed else Denied(Reason.NOT_ALLOWED, "a user name and password are needed here")

    async def verify(self, user: str, password: bytes | None, address: str) -> Denied | None:
        """Check a password; the answer to a wrong one comes late, and later each time."""
        known = self._users.get(user)
        mark = hmac.digest(self._key, user.encode() + b"\0" + (password or b""), "sha256")
        if known is not None and mark in self._verified:
            return None
        if self._checking[address] >= AT_A_TIME:
            return Denied(Reason.BUSY, f"{AT_A_TIME} logins from this address are being checked already")
        self._checking[address] += 1
        try:
            if await self._hash(known, password) and self._users.get(user) == known:
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
        return Denied(Reason.WRONG_CREDENTIALS, f"wrong user name or password for {user!r}")

    async def _hash(self, known: Password | None, password: bytes | None) -> bool:
        if password is None:
            return False
        # An unknown user takes as long as a known one, so that names cannot be told apart by time.
        hashed = known or Password(ITERATIONS, b"", b"\0" * 64)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._hasher, hashed.verify, password) and known is not None
