"""Logins: who may connect, with which password, certificate or client id.

Security files fail closed: if the new ones are wrong at a reload, the old users stay. A password is verified
in a thread, once per client and password. Waiting clients take turns, and each failure from an address delays
the next reply to it.
"""

from __future__ import annotations

import asyncio
import enum
import hmac
import os
import ssl
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from bridge.access import proofs
from bridge.access.accounts import Account, Accounts, presented
from bridge.access.guesses import AT_A_TIME, Guesses
from bridge.access.rules import NOTHING, AccessRule, Identity, Role
from bridge.access.users import Password, read_users, usual_iterations
from bridge.net.addresses import network_of
from bridge.net.fairqueue import FairQueue

REMEMBERED = 10_000  # verified passwords, and networks that they came from


class Reason(enum.Enum):
    """Why a client is rejected."""

    NOT_ALLOWED = enum.auto()
    WRONG_CREDENTIALS = enum.auto()
    BUSY = enum.auto()


class AccessSettings(Protocol):
    """The settings for logins and rules."""

    @property
    def users_file(self) -> Path | None:
        """The users file; None: no user names."""

    @property
    def acl(self) -> Sequence[AccessRule]:
        """The rules; without any, and without roles, everything is allowed."""

    @property
    def role(self) -> Sequence[Role]:
        """The roles that accounts may have."""

    @property
    def user(self) -> Sequence[Account]:
        """Roles, client ids and certificates of users."""

    @property
    def allow_anonymous(self) -> bool | None:
        """Whether clients without a user name may connect; None: on loopback only."""

    @property
    def client_ids(self) -> Literal["any", "user", "prefix"]:
        """Which client ids a user may have."""


class Denied(NamedTuple):
    """Why a client is rejected, with a text for the log."""

    reason: Reason
    text: str


class Certified(NamedTuple):
    """A client that its certificate names; `expires` is in seconds of Unix time."""

    user: str
    proof: bytes
    expires: float


class Loaded(NamedTuple):
    """What an access knows, read and checked."""

    users: dict[str, Password]
    accounts: Accounts
    rules: dict[str, list[AccessRule]] | None  # by user; None: there are none
    anonymous: bool | None
    client_ids: str
    authorities: AbstractSet[bytes]


def read(config: AccessSettings, authorities: AbstractSet[bytes] = frozenset()) -> Loaded:
    """Read users and rules; `authorities` is as of `proofs`. Raises ConfigError."""
    users = read_users(config.users_file) if config.users_file is not None else {}
    accounts = Accounts(config.user, config.role)
    rules: dict[str, list[AccessRule]] = {}
    for rule in (*config.acl, *accounts.rules):
        rules.setdefault(rule.user, []).append(rule)
    restricted = bool(config.acl or config.role)
    return Loaded(
        users,
        accounts,
        rules if restricted else None,
        config.allow_anonymous,
        config.client_ids,
        authorities,
    )


class Access:
    """Users, roles and rules: those of one listener, or of [mqtt] and all other front ends.

    `name` is the listener's, empty for that of [mqtt]. `realm` names the access whose users these are: its
    own, or that of [mqtt], whose users it shares.
    """

    def __init__(
        self,
        config: AccessSettings | Loaded,
        name: str = "",
        *,
        realm: str = "",
        beside: Access | None = None,
    ) -> None:
        """An access `beside` another one shares its turns and delays, so that guessing is no faster."""
        self.name, self.realm = name, realm
        self._verified: dict[bytes, Password] = {} if beside is None else beside._verified
        self._networks: dict[str, None] = {} if beside is None else beside._networks  # with a login
        self._guesses: Guesses = Guesses() if beside is None else beside._guesses
        self._turns: FairQueue = FairQueue() if beside is None else beside._turns
        self._key: bytes = os.urandom(16) if beside is None else beside._key
        # A single thread of its own: guessing passwords must not occupy the store's threads.
        self._hasher: ThreadPoolExecutor = (
            ThreadPoolExecutor(1, "mqtt-password") if beside is None else beside._hasher
        )
        self.apply(config if isinstance(config, Loaded) else read(config))

    def load(self, config: AccessSettings, authorities: AbstractSet[bytes] = frozenset()) -> None:
        """Apply users, rules and `proofs.authorities`; raises ConfigError, and then nothing has changed."""
        self.apply(read(config, authorities))

    def apply(self, loaded: Loaded) -> None:
        """Apply what `read` has read."""
        self._users, self._accounts, self._rules = loaded.users, loaded.accounts, loaded.rules
        self._anonymous, self._client_ids = loaded.anonymous, loaded.client_ids
        self._authorities = loaded.authorities
        self._nobody = Password(usual_iterations(self._users), b"", b"\0" * 64)

    def close(self) -> None:
        self._hasher.shutdown(wait=False, cancel_futures=True)

    @property
    def has_users(self) -> bool:
        """Whether there are users; without a users file every client is anonymous."""
        return bool(self._users)

    def knows(self, user: str) -> bool:
        """Whether there is a user of this name."""
        return user in self._users

    def knows_network(self, network: str) -> bool:
        """Whether a client of this network has logged in."""
        return network in self._networks

    def proof_of(self, user: str) -> bytes:
        """The proof of a user who has given the password."""
        return proofs.of_password(self._users[user]) if user in self._users else b""

    def still_admits(self, user: str | None, proof: bytes) -> bool:
        """Whether a client that logged in with this proof (user None: anonymous) still could.

        Which address an anonymous client came to is not known here; the server looks at that.
        """
        if user is None and not proof:
            return self._anonymous is not False
        return proofs.holds(proof, user, self._users, self._authorities, self._accounts)

    def needs_certificate(self, user: str) -> str:
        """Why a user may not log in without a certificate; empty if the user may."""
        if not self._accounts.is_mapped(user):
            return ""
        return f"user {user!r} logs in only with a certificate; see `certificates` in [[mqtt.user]]"

    def certified(self, tls: ssl.SSLObject) -> Certified | None:
        """Whose a client's certificate is, which TLS has verified; None: it is nobody's."""
        found = self._accounts.user_of(*presented(tls))
        if found is None:
            return None
        user, entry = found
        return Certified(user, proofs.of_certificate(tls, entry), proofs.expires(tls))

    def identify(self, client_id: str, user: str | None, *, local: bool = False, label: str = "") -> Identity:
        """What a client that has logged in may do; `local`: it is on this machine."""
        return Identity(
            client_id,
            user,
            self._rules_of(user),
            local=local,
            label=label,
            access=self.name,
            realm=self.realm_of(user),
        )

    def realm_of(self, user: str | None) -> str:
        """Whose a user is: clients without a user name are always those of one access."""
        return self.name if user is None else self.realm

    def _rules_of(self, user: str | None) -> Sequence[AccessRule]:
        """The rules for a user; none at all mean that everything is allowed."""
        if self._rules is None:
            return ()
        mine = self._rules.get("*", ()), self._rules.get(user or "", ())
        return [rule for rules in mine for rule in rules] or NOTHING

    def owns_id(self, user: str | None, client_id: str) -> bool:
        """Whether a client id is this user's, whoever was the first client to use it."""
        if (owner := self._accounts.owner_of(client_id)) is not None:
            return owner == user
        bound = user is not None and self._client_ids != "any"  # nobody's name binds no id
        return bound and self.may_use_id(user, client_id)

    def may_use_id(self, user: str | None, client_id: str) -> bool:
        """Whether this user may use a client id (None: anonymous, only ids that belong to no user)."""
        if (bound := self._accounts.owner_of(client_id)) is not None:
            return bound == user
        if user is not None and self._accounts.binds(user):
            return False
        if self._client_ids == "any":
            return True
        owner = client_id.partition(":")[0] if self._client_ids == "prefix" else client_id
        return owner == user if user is not None else owner not in self._users

    def refuse_anonymous(self, *, loopback: bool) -> Denied | None:
        """Why a client without a user name may not connect to a listener; None if it may."""
        allowed = loopback if self._anonymous is None else self._anonymous
        return None if allowed else Denied(Reason.NOT_ALLOWED, "a user name and password are needed here")

    async def verify(self, user: str, password: bytes | None, address: str) -> Denied | None:
        """Check a password; the reply to a wrong one is delayed, each time longer.

        A name and password that were right before need no hash. All others take turns at the hashing thread,
        by network, then by user. Networks with a successful login keep half of the turns. An attempt that is
        cancelled before its turn costs nothing. All unknown names share the turns of one name; a client
        cannot distinguish them from a user with a wrong password, nor users who need a certificate.
        """
        mapped = self._accounts.is_mapped(user)
        known = None if mapped else self._users.get(user)
        digest = hmac.digest(self._key, user.encode() + b"\0" + (password or b""), "sha256")
        if known is not None and self._verified.get(digest) == known:
            return None
        network = network_of(address)
        key = (network, user)
        if not self._guesses.begin(key):
            return Denied(Reason.BUSY, f"{AT_A_TIME} logins of {user!r} from this address are being checked")
        loop = asyncio.get_running_loop()
        began, delay = loop.time(), 0.0
        try:
            right = await self._is_right(known, password, network, user)
            if right and self._users.get(user) == known:
                self._remember(digest, known, network)
                return None
            delay = began + self._guesses.wrong(network) - loop.time()
            await asyncio.sleep(delay)
        finally:
            self._guesses.end(key, began + delay - loop.time() if delay > 0 else 0.0)
        if mapped:
            return Denied(Reason.WRONG_CREDENTIALS, self.needs_certificate(user))
        return Denied(Reason.WRONG_CREDENTIALS, f"wrong user name or password for {user!r}")

    async def _is_right(
        self, known: Password | None, password: bytes | None, network: str, user: str
    ) -> bool:
        if password is None:
            return False
        loop = asyncio.get_running_loop()
        name = user if known is not None else ""
        await self._turns.wait(network, name, known=network in self._networks)
        # An unknown name takes as much time as a user, so timing does not reveal which names exist.
        hashed = known or self._nobody
        hashing = loop.run_in_executor(self._hasher, hashed.verify, password)
        hashing.add_done_callback(lambda _: self._turns.done())  # also if it was cancelled
        return await asyncio.shield(hashing) and known is not None

    def _remember(self, digest: bytes, known: Password | None, network: str) -> None:
        """Remember a right password, and its network."""
        self._guesses.right(network)
        if known is not None:
            _note(self._verified, digest, known)
        _note(self._networks, network, None)


def _note(memory: dict[Any, Any], key: object, value: object) -> None:
    """Put an entry at the end of a dict of bounded size, instead of the oldest one."""
    memory.pop(key, None)
    if len(memory) >= REMEMBERED:
        del memory[next(iter(memory))]
    memory[key] = value
