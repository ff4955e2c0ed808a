"""All accesses of a front end, by name: who owns a session, and what its client may do.

A session belongs to a user of a realm (`rules.Identity`). It may be taken over through any access with that
realm.
"""

from __future__ import annotations

from bridge.access.logins import Access
from bridge.access.proofs import is_of_certificate, is_of_plugin
from bridge.access.rules import NOTHING, Identity


class Accesses:
    """The access of [mqtt], and those of its listeners."""

    def __init__(self, first: Access) -> None:
        self.first = first
        self.named: dict[str, Access] = {"": first}
        self.of_plugins: frozenset[bytes] = frozenset()  # the proofs that plugins still accept

    def again(self, past: Identity, *, local: bool = False) -> Identity:
        """Return the current rights of a client that logged in earlier, perhaps before a restart.

        If its listener is gone, it has the rights of a client of [mqtt], provided that [mqtt] has its user.
        """
        access = self._of(past)
        if access is None:
            found = Identity(
                past.client_id, past.user, NOTHING, local=False, access=past.access, realm=past.realm
            )
        else:
            found = access.identify(past.client_id, past.user, local=local)
        found.origin = past.origin
        past.successor = found
        return found

    def still_admits(self, identity: Identity, proof: bytes) -> bool:
        """Return whether a client that logged in with this proof could still log in, with its client id."""
        access = self._of(identity)
        if access is None or not access.may_keep_id(identity.user, identity.client_id):
            return False
        if is_of_plugin(proof):
            user = identity.user or ""
            taken = access.knows(user) or access.needs_certificate(user)
            return proof in self.of_plugins and not taken
        return access.still_admits(identity.user, proof)

    def is_gone(self, identity: Identity, proof: bytes) -> bool:
        """Return whether the user of a client that is no longer admitted is gone, so its session ends."""
        access = self._of(identity)
        if access is None or not access.may_keep_id(identity.user, identity.client_id):
            return True
        if identity.user is None:
            return True
        if is_of_certificate(proof) or is_of_plugin(proof):
            return False  # the client may return with a new one
        return not access.knows(identity.user)

    def owns_id(self, identity: Identity) -> bool:
        """Return whether a client id is reserved for this user, whoever used it first."""
        access = self._of(identity)
        return access is not None and access.owns_id(identity.user, identity.client_id)

    def _of(self, identity: Identity) -> Access | None:
        for name in (identity.access, identity.realm):
            access = self.named.get(name)
            if access is not None and access.realm_of(identity.user) == identity.realm:
                return access
        return None
