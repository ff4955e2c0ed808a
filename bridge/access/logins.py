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
import re
import ssl
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, cast

from bridge.access import proofs
from bridge.access.accounts import Account, Accounts, presented
from bridge.access.guesses import AT_A_TIME, Guesses, key_of
from bridge.access.remembered import remember
from bridge.access.rules import NOTHING, AccessRule, Identity, Role
from bridge.access.users import Password, read_users, usual_iterations
from bridge.net.addresses import network_of
from bridge.net.fairqueue import FairQueue
from bridge.readable import Kept

ASSIGNED = re.compile("auto-[0-9a-f]{20}")  # a client id that the server gives to a client without one


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
        """The rules; without rules and roles, everything is allowed."""

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
    """A client that is identified by its certificate. `expires` is Unix time in seconds."""

    user: str
    proof: bytes
    expires: float


class Loaded(NamedTuple):
    """The users and rules of an access, read and checked."""

    users: dict[str, Password]
    accounts: Accounts
    rules: dict[str, list[AccessRule]] | None  # by user; None: no rules
    anonymous: bool | None
    client_ids: str
    authorities: AbstractSet[bytes]


def read(
    config: AccessSettings,
    authorities: AbstractSet[bytes] = frozenset(),
    kept: Kept | None = None,
    option: str = "mqtt",
) -> Loaded:
    """Read users and rules; `authorities` is as in `proofs`. Raises ConfigError."""
    users, path = {}, config.users_file
    if path is not None:
        kept = kept or Kept()
        users = kept.read(("users", path), f"{option}.users_file", (path,), lambda: read_users(path))
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
    """Users, roles and rules of one listener, or of [mqtt] and all other front ends.

    `name` is the name of the listener, empty for [mqtt]. `realm` names the access that defines its users:
    itself, or [mqtt] if it shares those users.
    """

    def __init__(
        self,
        config: AccessSettings | Loaded,
        name: str = "",
        *,
        realm: str = "",
        beside: Access | None = None,
    ) -> None:
        """`beside` is an access with which it shares turns and delays, so that guessing is no faster."""
        self.name, self.realm = name, realm
        self._verified: dict[bytes, Password] = {} if beside is None else beside._verified
        self._networks: dict[str, None] = {} if beside is None else beside._networks  # with a login
        self._guesses: Guesses = Guesses() if beside is None else beside._guesses
        self._turns: FairQueue = FairQueue() if beside is None else beside._turns
        self._key: bytes = os.urandom(16) if beside is None else beside._key
        self._applied = 0  # how often users and rules were applied
        # A single separate thread, so that guessing passwords does not occupy the store's threads.
        self._hasher: ThreadPoolExecutor = (
            ThreadPoolExecutor(1, "mqtt-password") if beside is None else beside._hasher
        )
        self.kept: Kept = Kept() if beside is None else beside.kept
        self.apply(config if isinstance(config, Loaded) else read(config, kept=self.kept))

    def load(self, config: AccessSettings, authorities: AbstractSet[bytes] = frozenset()) -> None:
        """Apply users, rules and `proofs.authorities`. After a ConfigError, nothing has changed."""
        self.apply(read(config, authorities, self.kept))

    def apply(self, loaded: Loaded) -> None:
        """Apply the result of `read`."""
        self._users, self._accounts, self._rules = loaded.users, loaded.accounts, loaded.rules
        self._anonymous, self._client_ids = loaded.anonymous, loaded.client_ids
        self._authorities = loaded.authorities
        self._applied += 1
        self._nobody = Password(usual_iterations(self._users), b"", b"\0" * 64)

    def close(self) -> None:
        self._hasher.shutdown(wait=False, cancel_futures=True)

    @property
    def has_users(self) -> bool:
        """Return whether there are users. Without a users file, every client is anonymous."""
        return bool(self._users)

    @property
    def has_rules(self) -> bool:
        """Return whether there are rules or roles. Without any, everybody may do everything."""
        return self._rules is not None

    def knows(self, user: str) -> bool:
        """Whether there is a user of this name."""
        return user in self._users

    def knows_network(self, network: str) -> bool:
        """Whether a client of this network has logged in."""
        return network in self._networks

    def proof_of(self, user: str) -> bytes:
        """Return the proof of a user who has given the password."""
        return proofs.of_password(self._users[user]) if user in self._users else b""

    def still_admits(self, user: str | None, proof: bytes) -> bool:
        """Return whether a client that logged in with this proof (user None: anonymous) could still log in.

        The listener of an anonymous client is not known here; the server checks that.
        """
        if user is None and not proof:
            return self._anonymous is not False
        return proofs.holds(proof, user, self._users, self._authorities, self._accounts)

    def needs_certificate(self, user: str) -> str:
        """Return why a user may not log in without a certificate; empty if the user may."""
        if not self._accounts.is_mapped(user):
            return ""
        return f"user {user!r} logs in only with a certificate; see `certificates` in [[mqtt.user]]"

    def certified(self, tls: ssl.SSLObject) -> Certified | None:
        """Return the login of a client certificate that TLS has verified; None if it has no user."""
        found = self._accounts.user_of(*presented(tls))
        if found is None:
            return None
        user, entry = found
        return Certified(user, proofs.of_certificate(tls, entry), proofs.expires(tls))

    def identify(
        self, client_id: str, user: str | None, *, local: bool = False, label: str = "", visits: bool = False
    ) -> Identity:
        """Return what a client that has logged in may do. `local`: it is on this machine.

        `visits`: it uses the status page, so it logs in with a password, and the right `page` holds for it.
        """
        found = Identity(
            client_id,
            user,
            self._rules_of(user),
            local=local,
            label=label,
            access=self.name,
            realm=self.realm_of(user),
        )
        found.may_change = not visits or found.page == "operate"
        found.source = self
        found.since = self._applied, local, label, self._users.get(user or ""), visits
        return found

    def renewed(self, past: Identity) -> Identity:
        """Return the identity of the same client now.

        A changed password leaves nothing to it, nor does a closed page, or the need of a certificate, to a
        visitor of the page.
        """
        applied, local, label, password, visits = cast(
            "tuple[int, bool, str, Password | None, bool]", past.since
        )
        if applied == self._applied:
            return past
        user = past.user or ""
        found = self.identify(past.client_id, past.user, local=local, label=label, visits=visits)
        closed = visits and (found.page == "none" or self._accounts.is_mapped(user))
        if closed or self._users.get(user) != password:
            found = Identity(past.client_id, past.user, NOTHING, local=False, label=label)
        found.origin = past.origin
        past.successor = found
        return found

    def realm_of(self, user: str | None) -> str:
        """Return the realm of a user; anonymous clients always have that of their access."""
        return self.name if user is None else self.realm

    def _rules_of(self, user: str | None) -> Sequence[AccessRule]:
        """Return the rules for a user. Without any rules, everything is allowed."""
        if self._rules is None:
            return ()
        mine = self._rules.get("*", ()), self._rules.get(user or "", ())
        return [rule for rules in mine for rule in rules] or NOTHING

    def owns_id(self, user: str | None, client_id: str) -> bool:
        """Return whether a client id is reserved for this user, whoever used it first."""
        if (owner := self._accounts.owner_of(client_id)) is not None:
            return owner == user
        bound = user is not None and self._client_ids != "any"  # not for anonymous clients
        return bound and self.may_use_id(user, client_id)

    def may_keep_id(self, user: str | None, client_id: str) -> bool:
        """Return whether this user may go on with a client id, which the server may have assigned."""
        assigned = ASSIGNED.fullmatch(client_id) and self._accounts.owner_of(client_id) is None
        return bool(assigned) or self.may_use_id(user, client_id)

    def may_use_id(self, user: str | None, client_id: str) -> bool:
        """Return whether this user may use a client id (None: anonymous, only ids that belong to no user)."""
        if (bound := self._accounts.owner_of(client_id)) is not None:
            return bound == user
        if user is not None and self._accounts.binds(user):
            return False
        if self._client_ids == "any":
            return True
        owner = client_id.partition(":")[0] if self._client_ids == "prefix" else client_id
        return owner == user if user is not None else owner not in self._users

    def refuse_anonymous(self, *, loopback: bool) -> Denied | None:
        """Return why a client without a user name may not connect to a listener; None if it may."""
        allowed = loopback if self._anonymous is None else self._anonymous
        return None if allowed else Denied(Reason.NOT_ALLOWED, "a user name and password are needed here")

    async def verify(self, user: str, password: bytes | None, address: str) -> Denied | None:
        """Check a password. The reply to a wrong one is delayed, each time longer.

        A name and password that were right before need no hash. All others take turns at the hashing thread,
        by network, then by user. Networks with a successful login get half of the turns. An attempt that is
        cancelled before its turn costs nothing. All unknown names share the turns of one name. To a client,
        unknown names, wrong passwords and users who need a certificate look the same.
        """
        mapped = self._accounts.is_mapped(user)
        known = None if mapped else self._users.get(user)
        digest = hmac.digest(self._key, user.encode() + b"\0" + (password or b""), "sha256")
        if known is not None and self._verified.get(digest) == known:
            return None
        network = network_of(address)
        key = key_of(network, user)
        if not self._guesses.begin(key):
            return Denied(Reason.BUSY, f"{AT_A_TIME} logins of {user!r} from this address are being checked")
        loop = asyncio.get_running_loop()
        began, delay = loop.time(), 0.0
        try:
            right = await self._is_right(known, password, network, user)
            if right and self._users.get(user) == known and not self._accounts.is_mapped(user):
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
        # An unknown name takes as long as a known one, so timing does not reveal which names exist.
        hashed = known or self._nobody
        hashing = loop.run_in_executor(self._hasher, hashed.verify, password)
        hashing.add_done_callback(lambda _: self._turns.done())  # even if it was cancelled
        return await asyncio.shield(hashing) and known is not None

    def _remember(self, digest: bytes, known: Password | None, network: str) -> None:
        """Remember a right password, and its network."""
        self._guesses.right(network)
        if known is not None:
            remember(self._verified, digest, known)
        remember(self._networks, network, None)
