"""Who may come in: users, passwords, and the price of guessing.

What it promises: security files fail closed (at a reload the old users stay if the new ones are wrong); a
password is verified in a thread, once per client and password; whoever waits for that takes turns, and each
failure from an address delays the next answer to it.
"""

from __future__ import annotations

import asyncio
import enum
import hmac
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeVar

from bridge.access import proofs
from bridge.access.guesses import AT_A_TIME, Guesses
from bridge.access.rules import Identity
from bridge.access.users import Password, read_users, usual_iterations
from bridge.net.addresses import network_of
from bridge.net.fairqueue import FairQueue

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet
    from pathlib import Path

    from bridge.access.rules import AccessRule

REMEMBERED = 10_000  # verified passwords, and networks that they came from
K = TypeVar("K")
V = TypeVar("V")


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

    @property
    def client_ids(self) -> Literal["any", "user", "prefix"]:
        """Which client ids a user may have."""


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
        self._verified: dict[bytes, Password] = {}
        self._networks: dict[str, None] = {}  # that have logged in
        self._guesses = Guesses()
        self._turns = FairQueue()
        self._key = os.urandom(16)
        # Its own thread, and only one: guessing passwords must not use up the store's threads.
        self._hasher = ThreadPoolExecutor(1, "mqtt-password")
        self.load(config)

    def load(self, config: AccessSettings, authorities: AbstractSet[bytes] = frozenset()) -> None:
        """Take over users, rules and `proofs.authorities`, or raise and leave everything as it was."""
        users = read_users(config.users_file) if config.users_file is not None else {}
        self._authorities, self._client_ids = authorities, config.client_ids
        self._users, self._rules, self._anonymous = users, config.acl, config.allow_anonymous
        self._nobody = Password(usual_iterations(users), b"", b"\0" * 64)

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

    def knows_network(self, network: str) -> bool:
        """Whether somebody of this network has logged in."""
        return network in self._networks

    def proof_of(self, user: str) -> bytes:
        """What a user is let in by who has given the password."""
        return proofs.of_password(self._users[user]) if user in self._users else b""

    def still_admits(self, user: str | None, proof: bytes) -> bool:
        """Whether a client that came in by this proof (user None: anonymous) could still come in by it."""
        return proofs.holds(proof, user, self._users, self._authorities)

    def identify(self, client_id: str, user: str | None, *, local: bool = False, label: str = "") -> Identity:
        """What a client that was let in may do; `local`: it is on this machine."""
        return Identity(client_id, user, self._rules, local=local, label=label)

    @property
    def binds_ids(self) -> bool:
        """Whether a client id belongs to a user by its name, whoever came with it first."""
        return self._client_ids != "any"

    def may_use_id(self, user: str | None, client_id: str) -> bool:
        """Whether a client id is one of this user's (None: anonymous, for whom it may be nobody's)."""
        if not self.binds_ids:
            return True
        owner = client_id.partition(":")[0] if self._client_ids == "prefix" else client_id
        return owner == user if user is not None else owner not in self._users

    def refuse_anonymous(self, *, loopback: bool) -> Denied | None:
        """Whether a client without a user name may come in through a listener."""
        allowed = loopback if self._anonymous is None else self._anonymous
        return None if allowed else Denied(Reason.NOT_ALLOWED, "a user name and password are needed here")

    async def verify(self, user: str, password: bytes | None, address: str) -> Denied | None:
        """Check a password; the answer to a wrong one comes late, and later each time.

        A name and password that were right before cost no hash. All others take turns at the one thread that
        hashes: by network, then by user; networks that have logged in before keep half of the turns. What
        is cancelled before its turn costs nothing. All names that are not in the users file share the turns
        of one name; they are never told apart from a user with a wrong password.
        """
        known = self._users.get(user)
        mark = hmac.digest(self._key, user.encode() + b"\0" + (password or b""), "sha256")
        if known is not None and self._verified.get(mark) == known:
            return None
        network = network_of(address)
        who = (network, user)
        if not self._guesses.begin(who):
            return Denied(Reason.BUSY, f"{AT_A_TIME} logins of {user!r} from this address are being checked")
        loop = asyncio.get_running_loop()
        began, delay = loop.time(), 0.0
        try:
            right = await self._is_right(known, password, network, user)
            if right and self._users.get(user) == known:
                self._remember(mark, known, network)
                return None
            delay = began + self._guesses.wrong(network) - loop.time()
            await asyncio.sleep(delay)
        finally:
            self._guesses.end(who, began + delay - loop.time() if delay > 0 else 0.0)
        return Denied(Reason.WRONG_CREDENTIALS, f"wrong user name or password for {user!r}")

    async def _is_right(
        self, known: Password | None, password: bytes | None, network: str, user: str
    ) -> bool:
        if password is None:
            return False
        loop = asyncio.get_running_loop()
        name = user if known is not None else ""
        await self._turns.wait(network, name, known=network in self._networks)
        # Somebody unknown costs as much as a user, so that names cannot be told apart by time.
        hashed = known or self._nobody
        hashing = loop.run_in_executor(self._hasher, hashed.verify, password)
        hashing.add_done_callback(lambda _: self._turns.done())  # also if nobody waits for it any more
        return await asyncio.shield(hashing) and known is not None

    def _remember(self, mark: bytes, known: Password | None, network: str) -> None:
        """Note that a password was right, and where it came from."""
        self._guesses.right(network)
        if known is not None:
            _note(self._verified, mark, known)
        _note(self._networks, network, None)


def _note(memory: dict[K, V], key: K, value: V) -> None:
    """Put an entry at the end of a dict of bounded size; the oldest goes."""
    memory.pop(key, None)
    if len(memory) >= REMEMBERED:
        del memory[next(iter(memory))]
    memory[key] = value
