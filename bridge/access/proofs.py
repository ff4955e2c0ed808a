"""Proofs: how a client has logged in, to check later whether it still could.

A proof is a few bytes that are stored with the session:

    password       `p`, digest of the user's line in the users file
    certificate    `c`, digests of the certificates in the client CA file that verified it
    the same, if the account lists the certificate
                   `m`, digest of the entry of the account, the same digests
    plugin         `a`, digest of the plugin's name, digest of the basis of its decision if it has stated one
    anonymous      empty

A proof of a password is valid while that line is unchanged and the account lists no certificates. A proof of
a certificate is valid while all of those certificates are in the file, and the account lists the certificate
or none. So a renewed CA certificate ends logins by the old one, even if both have the same key: the client
must present its certificate again, in a new handshake. A proof of a plugin is valid while the plugin is in
use and still accepts that basis (`bridge.plugin.auth`).
"""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from bridge.access.accounts import Accounts
from bridge.access.users import Password
from bridge.net.crl import not_after

SIZE = 16  # bytes of a digest
NOTHING = b"m"  # for a client that its listener would no longer admit; it is never valid


def authorities(certificates: Iterable[bytes]) -> frozenset[bytes]:
    """The digests of the certificates, in DER, that verify client certificates."""
    return frozenset(map(_digest, certificates))


def of_password(password: Password) -> bytes:
    """Return the proof of a client that gave this password."""
    return b"p" + _digest(repr(tuple(password)).encode())


def of_certificate(tls: ssl.SSLObject, entry: str = "") -> bytes:
    """Return the proof of a client whose certificate was verified in this TLS session.

    `entry` is the entry of the user's account. A resumed session has no certificate chain, so its proof needs
    all authorities.
    """
    known = authorities(tls.context.get_ca_certs(binary_form=True))
    needed = {_digest(certificate) for certificate in verified_chain(tls)} & known
    kind = b"m" + _digest(entry.encode()) if entry else b"c"
    return kind + b"".join(sorted(needed or known))


def of_plugin(name: str, basis: str = "") -> bytes:
    """Return the proof of a client that a plugin has admitted."""
    return b"a" + _digest(name.encode()) + (_digest(basis.encode()) if basis else b"")


def is_of_plugin(proof: bytes) -> bool:
    """Return whether a plugin has admitted the client."""
    return proof[:1] == b"a"


def is_of_certificate(proof: bytes) -> bool:
    """Return whether the client has presented a certificate."""
    return proof[:1] in (b"c", b"m")


def holds(
    proof: bytes,
    user: str | None,
    users: Mapping[str, Password],
    known: AbstractSet[bytes],
    accounts: Accounts,
) -> bool:
    """Return whether a client of this name could still log in with its proof."""
    if is_of_certificate(proof):
        begins, name = 1, user or ""
        if proof[:1] == b"m":
            begins += SIZE
            if proof[1:begins] not in {_digest(entry.encode()) for entry in accounts.entries_of(name)}:
                return False
        elif accounts.is_mapped(name):
            return False
        return all(proof[at : at + SIZE] in known for at in range(begins, len(proof), SIZE))
    if user is None:
        return True
    return user in users and not accounts.is_mapped(user) and proof in (b"", of_password(users[user]))


def expires(tls: ssl.SSLObject) -> float:
    """Return when the first of the certificates that verified a client expires, Unix time in seconds.

    In a resumed session, only the client's own certificate is known.
    """
    return min(map(not_after, verified_chain(tls) or [tls.getpeercert(binary_form=True) or b""]))


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:SIZE]


def verified_chain(tls: Any) -> list[bytes]:
    """Return the certificates from the client's to the root, in DER; none in a resumed session."""
    public = getattr(tls, "get_verified_chain", None)  # public since Python 3.13
    if public is not None:
        return list(public())
    private = getattr(getattr(tls, "_sslobj", None), "get_verified_chain", None)
    chain = None if private is None else private()
    return [ssl.PEM_cert_to_DER_cert(certificate.public_bytes()) for certificate in chain or ()]
