"""Proofs: how a client has logged in, to check later whether it still could.

A proof is a few bytes, stored with the session: `p` and a digest of the user's line in the users file, or `c`
and the digests of the certificates in the client CA file that verified the client's certificate. If the
user's account lists that certificate, it is `m`, a digest of what the account lists, and the same digests. If
a plugin let the client in, it is `a`, a digest of the plugin's name, and one of the basis of its decision, if
it has stated one. The proof of an anonymous client is empty.

A proof of a password is valid while that line is unchanged and the account lists no certificates; one of a
certificate while all of those certificates are in the file, and the account lists the certificate, or none.
So a renewed CA certificate ends what the old one allowed, even if both have the same key: the client must
present its certificate again, in a new handshake. One of a plugin is valid while the plugin is asked, and
still accepts on that basis (`bridge.plugin.auth`).
"""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from bridge.access.accounts import Accounts
from bridge.access.users import Password
from bridge.net.crl import not_after

SIZE = 16  # bytes of a digest
NOTHING = b"m"  # of a client that its listener would not let in any more: it never holds


def authorities(context: ssl.SSLContext | None) -> frozenset[bytes]:
    """The digests of the certificates that verify client certificates."""
    found = [] if context is None else context.get_ca_certs(binary_form=True)
    return frozenset(map(_digest, found))


def of_password(password: Password) -> bytes:
    """The proof of a client that gave this password."""
    return b"p" + _digest(repr(tuple(password)).encode())


def of_certificate(tls: ssl.SSLObject, entry: str = "") -> bytes:
    """The proof of a client whose certificate was verified in this TLS session.

    `entry` is what the user's account lists of it. A resumed session has no certificate chain: its proof
    needs all authorities.
    """
    known = authorities(tls.context)
    needed = {_digest(certificate) for certificate in _verified_chain(tls)} & known
    kind = b"m" + _digest(entry.encode()) if entry else b"c"
    return kind + b"".join(sorted(needed or known))


def of_plugin(name: str, basis: str = "") -> bytes:
    """The proof of a client that a plugin has let in."""
    return b"a" + _digest(name.encode()) + (_digest(basis.encode()) if basis else b"")


def is_of_plugin(proof: bytes) -> bool:
    """Whether a plugin has let the client in."""
    return proof[:1] == b"a"


def is_of_certificate(proof: bytes) -> bool:
    """Whether the client has shown a certificate."""
    return proof[:1] in (b"c", b"m")


def holds(
    proof: bytes,
    user: str | None,
    users: Mapping[str, Password],
    known: AbstractSet[bytes],
    accounts: Accounts,
) -> bool:
    """Whether a client of this name could still log in with its proof."""
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
    """When the first of the certificates that verified a client expires, in seconds of Unix time.

    Of a resumed session only the client's own certificate is known.
    """
    return min(map(not_after, _verified_chain(tls) or [tls.getpeercert(binary_form=True) or b""]))


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:SIZE]


def _verified_chain(tls: Any) -> list[bytes]:
    """The certificates from the client's to the root, in DER; none if TLS does not provide them."""
    public = getattr(tls, "get_verified_chain", None)  # public since Python 3.13
    if public is not None:
        return list(public())
    private = getattr(getattr(tls, "_sslobj", None), "get_verified_chain", None)
    chain = None if private is None else private()
    return [ssl.PEM_cert_to_DER_cert(certificate.public_bytes()) for certificate in chain or ()]
