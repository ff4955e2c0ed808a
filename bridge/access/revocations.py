"""The revocation lists of a listener, applied to all certificates that verify a client.

OpenSSL checks the client's own certificate in each full handshake. This module does the rest:

* The certificates above it, up to the root. OpenSSL could check them only if every CA had a list.
* Resumed TLS sessions, in which OpenSSL checks nothing. A ticket is sent before we can look at a chain, so a
  ticket proves nothing. TLS does not know the chain of a resumed session; it is kept from the full handshake,
  if nothing in it was withdrawn. A client whose chain is not known is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import ssl
from datetime import datetime

from bridge.access.proofs import verified_chain
from bridge.access.remembered import REMEMBERED, remember
from bridge.net.crl import Certified, Crls, certified


class Revocations:
    """The lists of a listener, and the chains of its clients."""

    def __init__(self, crls: Crls, before: Revocations | None = None, kept: int = REMEMBERED) -> None:
        """`before` are those of the listener that this one replaces."""
        self.crls, self._kept = crls, kept
        # The issuers and serial numbers of the certificates above that of a client, by the digest of its own
        self._above: dict[bytes, tuple[Certified, ...]] = {} if before is None else before._above

    def keep(self, tls: ssl.SSLObject) -> None:
        """Keep the chain of a client after its handshake."""
        if not self.crls.lists:
            return
        with contextlib.suppress(ValueError, IndexError):  # `refuse` says so
            chain = self._chain(tls)
            if chain is None or any(map(self.crls.revoked, chain)):
                return
            remember(self._above, _digest(tls), tuple(chain[1:]), self._kept)

    def refuse(self, tls: ssl.SSLObject, now: datetime) -> str:
        """Return why a client may not log in; empty if it may."""
        if not self.crls.lists:
            return ""
        try:
            chain = self._chain(tls)
        except (ValueError, IndexError):
            return "its certificate, or one of its CAs, cannot be read"
        if chain is None:
            return "it resumed a TLS session, and the chain of its certificate is not known any more"
        if any(map(self.crls.revoked, chain)):
            return "its certificate, or one of its CAs, is withdrawn; see mqtt.tls.crl_file"
        if not self.crls.knows(chain[0][0]):
            return "its CA has no list; see mqtt.tls.crl_file"
        if any(self.crls.expired(issuer, now) for issuer, _ in chain):
            return "the list of its CA has expired; see mqtt.tls.crl_file"
        return ""

    def revoke(self, tls: ssl.SSLObject) -> bool:
        """Return whether the certificate of a connected client, or one that verified it, is withdrawn.

        So is one whose CA has no list any more. A list that has expired withdraws nothing.
        """
        if not self.crls.lists:
            return False
        chain = self._chain(tls) or [certified(_own(tls))]
        return not self.crls.knows(chain[0][0]) or any(map(self.crls.revoked, chain))

    def _chain(self, tls: ssl.SSLObject) -> list[Certified] | None:
        """Return the chain, beginning with the client's own certificate; None if it is not known."""
        if chain := verified_chain(tls):
            return list(map(certified, chain))
        above = self._above.get(_digest(tls))
        return None if above is None else [certified(_own(tls)), *above]


def _own(tls: ssl.SSLObject) -> bytes:
    return tls.getpeercert(binary_form=True) or b""


def _digest(tls: ssl.SSLObject) -> bytes:
    return hashlib.sha256(_own(tls)).digest()
