"""Accounts: the roles, client ids and certificates of a user.

* A user whose account lists client ids may use only those, and nobody else may use them.
* A user whose account lists certificates can log in only with those. Any other certificate stands for the
  user that its common name gives, if there is exactly one.
* If several accounts list a certificate, the most precise entry counts, in this order: fingerprint,
  alternative names, common name.

The entries of an account:

    client id      `pump-7`, or `pump-7:*` for all with this prefix
    certificate    `cn:NAME`, or `dns:NAME`, `uri:URI`, `email:ADDRESS`, `ip:ADDRESS` (alternative names),
                   or `sha256:DIGITS`, the fingerprint, with or without colons
"""

from __future__ import annotations

import hashlib
import re
import ssl
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from bridge.access.rules import AccessRule, Role
from bridge.errors import ConfigError
from bridge.net.addresses import parse

# The kinds of alternative names (RFC 5280, 4.2.1.6) as Python's ssl calls them.
_KINDS = {"DNS": "dns", "URI": "uri", "email": "email", "IP Address": "ip"}
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


class Account(Struct, frozen=True, kw_only=True):
    """[[mqtt.user]]: the roles of a user, and the client ids and certificates that are this user's alone.

    `name` is a user name; with "*" the roles are those of every client, with "" those of anonymous clients.
    A client id may end with `*`. A certificate is `cn:`, `dns:`, `uri:`, `email:` or `ip:` and a name in it,
    or `sha256:` and its fingerprint.
    """

    name: str
    roles: list[str] = []
    client_ids: list[str] = []
    certificates: list[str] = []

    def __post_init__(self) -> None:
        mistakes = [
            f"`client_ids`: {one!r}: write an id, which may end with one *"
            for one in self.client_ids
            if not one.strip("*") or "*" in one[:-1]
        ]
        mistakes += [
            f"`certificates`: {one!r}: write cn:, dns:, uri:, email: or ip: and a name, or sha256: and 64 "
            "hexadecimal digits"
            for one in self.certificates
            if _entry(one) is None
        ]
        if self.name in ("*", ""):
            mistakes += [
                f"`{key}`: they belong to one user; name it"
                for key in ("client_ids", "certificates")
                if getattr(self, key)
            ]
        if mistakes:
            raise ValueError("\n".join(mistakes))


class Mistake(NamedTuple):
    """A mistake in a table `[[mqtt.TABLE]]`, at one of its keys."""

    table: str
    number: int
    key: str
    what: str


class Accounts:
    """All accounts of an access, and the roles that they have."""

    def __init__(self, accounts: Sequence[Account] = (), roles: Sequence[Role] = ()) -> None:
        """Raises ConfigError for an unknown role, and for an entry that two accounts list."""
        if wrong := next(mistakes(accounts, roles), None):
            raise ConfigError(f"mqtt.{wrong.table}[{wrong.number}].{wrong.key}: {wrong.what}")
        named = {role.name: role for role in roles}
        self.rules: list[AccessRule] = [
            named[role].rule_for(account.name) for account in accounts for role in account.roles
        ]
        self._ids = {one: account.name for account in accounts for one in account.client_ids}
        self._bound = {account.name for account in accounts if account.client_ids}
        self._certificates = {
            entry: account.name
            for account in accounts
            for one in account.certificates
            if (entry := _entry(one)) is not None
        }
        self._mapped = frozenset(self._certificates.values())

    def binds(self, user: str) -> bool:
        """Return whether a user may use only the client ids of the account."""
        return user in self._bound

    def owner_of(self, client_id: str) -> str | None:
        """Return the user whose account lists a client id; None if none does."""
        if (found := self._ids.get(client_id)) is not None or not self._ids:
            return found
        beginnings = (client_id[:size] + "*" for size in range(len(client_id), 0, -1))
        return next((self._ids[one] for one in beginnings if one in self._ids), None)

    def is_mapped(self, user: str) -> bool:
        """Return whether a user can log in only with the certificates of the account."""
        return user in self._mapped

    def user_of(self, certificate: Mapping[str, Any], der: bytes) -> tuple[str, str] | None:
        """Return the user of a verified certificate, and the entry of the account; empty for the common name.

        `certificate` is as from `SSLSocket.getpeercert`, `der` its bytes. Returns None if it has no user.
        """
        entries = list(_entries(certificate, der))
        for entry in entries if self._certificates else ():
            if (user := self._certificates.get(entry)) is not None:
                return user, entry
        names = [entry.removeprefix("cn:") for entry in entries if entry.startswith("cn:")]
        if len(names) != 1 or not names[0] or self.is_mapped(names[0]):
            return None
        return names[0], ""

    def maps(self, entry: str, user: str) -> bool:
        """Return whether the account of a user has this entry."""
        return self._certificates.get(entry) == user

    def entries_of(self, user: str) -> Iterator[str]:
        """The certificates of a user, in one spelling."""
        return (entry for entry, owner in self._certificates.items() if owner == user)


def mistakes(accounts: Sequence[Account], roles: Sequence[Role]) -> Iterator[Mistake]:
    """Yield the mistakes in accounts and roles as a whole."""
    known: set[str] = set()
    for number, role in enumerate(roles):
        if role.name in known:
            yield Mistake("role", number, "name", f"a second role {role.name!r}; choose another name")
        known.add(role.name)
    names: set[str] = set()
    ids: dict[str, str] = {}
    certificates: dict[str, str] = {}
    for number, account in enumerate(accounts):
        if account.name in names:
            yield Mistake("user", number, "name", f"a second table of {account.name!r}; write one")
        names.add(account.name)
        for role_name in account.roles:
            if role_name not in known:
                what = f"there is no role {role_name!r}; known: {', '.join(sorted(known)) or 'none'}"
                yield Mistake("user", number, "roles", what)
        for one in account.client_ids:
            if (other := ids.setdefault(one, account.name)) != account.name:
                yield Mistake("user", number, "client_ids", f"{one!r} already belongs to user {other!r}")
        for one in account.certificates:
            entry = _entry(one) or one
            if (other := certificates.setdefault(entry, account.name)) != account.name:
                yield Mistake("user", number, "certificates", f"{one!r} already belongs to user {other!r}")


def _entry(text: str) -> str | None:
    """Normalize an entry for a certificate; None if it is not one."""
    kind, _, name = text.partition(":")
    if not name:
        return None
    match kind.lower():
        case "sha256":
            digits = name.replace(":", "").lower()
            return f"sha256:{digits}" if _FINGERPRINT.fullmatch(digits) else None
        case "ip":
            try:
                return f"ip:{parse(name)}"
            except ValueError:
                return None
        case "dns" | "email" as known:
            return f"{known}:{name.lower()}"
        case "cn" | "uri" as known:
            return f"{known}:{name}"
    return None


def _entries(certificate: Mapping[str, Any], der: bytes) -> Iterable[str]:
    """Yield the possible entries for a certificate, the most precise first."""
    yield f"sha256:{hashlib.sha256(der).hexdigest()}"
    for kind, value in certificate.get("subjectAltName", ()):
        if kind in _KINDS and (entry := _entry(f"{_KINDS[kind]}:{value}")) is not None:
            yield entry
    for part in certificate.get("subject", ()):
        for key, value in part:
            if key == "commonName":
                yield f"cn:{value}"


def presented(tls: ssl.SSLObject) -> tuple[Mapping[str, Any], bytes]:
    """The verified certificate of a client, for `Accounts.user_of`."""
    return tls.getpeercert() or {}, tls.getpeercert(binary_form=True) or b""
