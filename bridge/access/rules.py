"""Rules, roles and identities: what a client that has logged in may do.

A right is a list of topic filters. In them a stream is its own topic, `streams/<name>`: one filter covers
where a client may publish and which streams it may append to.

    right        on a topic                          on a stream (its topic `streams/<name>`)
    publish      PUBLISH, wills                      append
    subscribe    SUBSCRIBE                           -
    read         delivery of a message               read, describe
    manage       -                                   create, update, delete, purge, describe

Two more rights are narrower than these, and matter only where a rule states them:

    operations   which operations, by name, beside the right on the stream that each one needs
    page         what the status page does for the user: nothing, "look", or "operate"

* A rule gives rights to one user. A role is a rule without a user, which `accounts.Account` gives to users.
* `deny` is checked first: what any rule of a client denies, no other rule can grant.
* With rules, everything that no rule allows is denied.
* Without rules, every connected client may publish, subscribe and read everywhere, and a client on this
  machine may also manage. A client on another machine needs a rule for that.
* `TRUSTED` is root or the service's user at the control socket. They could also change the files directly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Literal, NamedTuple, Protocol

from msgspec import Meta, Struct

from bridge.audit import Origin
from bridge.errors import Unauthorized
from bridge.net.addresses import network_of
from bridge.topics import covers, filter_mistake, matches, overlap

StreamRight = Literal["publish", "read", "manage"]
Page = Literal["none", "look", "operate"]
PAGES: tuple[Page, ...] = ("none", "look", "operate")  # each may do what those before it may
FILTERS = ("publish", "subscribe", "read", "manage")
OF_SERVICE = ("streambridge", "streams", "clients")  # first levels of topics that stand for parts of it
_PLACEHOLDER = re.compile("%[cu]")
# Strings that only look like placeholders: `%x`, and those of other brokers, such as `${username}`.
_UNKNOWN = re.compile(r"%(?![cu])[A-Za-z]|\$?\{+[A-Za-z][^{}/]*\}+")


def _wrong_filters(rights: Struct) -> Iterator[str]:
    """Yield the mistakes in the filters of a rule."""
    for right in FILTERS:
        for name in getattr(rights, right) or ():
            if (mistake := filter_mistake(name)) is not None:
                yield f"`{right}`: {mistake}"
            elif (unknown := _UNKNOWN.search(name)) is not None:
                yield (
                    f"`{right}`: {name!r}: there is no placeholder {unknown[0]}; write %u for the user name, "
                    "%c for the client id, or + for a level that really has these characters"
                )


class Deny(Struct, frozen=True, kw_only=True):
    """`deny` in a rule or role: rights that no rule gives to these users.

    `subscribe` refuses each filter that could match one of these topics, and `read` lets such a filter in and
    leaves the messages out. What is denied to subscribe is not delivered either.
    """

    publish: list[str] = []
    subscribe: list[str] = []
    read: list[str] = []
    manage: list[str] = []
    operations: list[str] = []

    def __post_init__(self) -> None:
        if mistakes := list(_wrong_filters(self)):
            raise ValueError("\n".join(mistakes))


class Rights(Struct, frozen=True, kw_only=True):
    """What a rule or a role gives, as topic filters, and takes away.

    `publish` also covers wills, `subscribe` is what a client may subscribe to, `read` what it may receive;
    without `read`, that is the same as `subscribe`. `operations` are names of operations; if no rule of a
    user lists any, all are allowed. `page` is likewise "operate", if no rule of a user states it.
    """

    publish: list[str] = []
    subscribe: list[str] = []
    read: list[str] | None = None
    manage: list[str] = []
    operations: list[str] | None = None
    page: Page | None = None
    deny: Deny = Deny()

    def __post_init__(self) -> None:
        if mistakes := list(_wrong_filters(self)):
            raise ValueError("\n".join(mistakes))


class AccessRule(Rights, frozen=True, kw_only=True):
    """[[mqtt.acl]]: what some users may do. Rules add up; only `deny` forbids.

    `user` is a user name; "*" is every client, "" are anonymous clients. In filters `%c` is the client id and
    `%u` the user name; a filter with such a placeholder gives nothing to a client whose id or name contains
    `/`, `+` or `#`, and denies it everything that the placeholder could stand for. There are no others: `%x`
    and `{user}` are mistakes.
    Without any rule every connected client may publish and subscribe everywhere, and clients on this machine
    may do every operation on every stream.

    With rules, an operation on a stream needs a right on `streams/<name>`: `publish` to append, `read` to
    read, `manage` to create, update, delete and purge it; `read` or `manage` to describe it. `manage` on the
    topic `clients` is the right to list, disconnect and forget MQTT clients. To create or
    update a stream also needs `read` on everything that its topics cover, and `publish` on the streams that
    its exports append to. Requests are messages too (`streambridge/%c/<operation>`). Clients on port 8088
    are the users of their tokens.
    """

    user: str = "*"


class Role(Rights, frozen=True, kw_only=True):
    """[[mqtt.role]]: rights with a name, which [[mqtt.user]] gives to users."""

    name: Annotated[str, Meta(min_length=1)]

    def rule_for(self, user: str) -> AccessRule:
        """This role as a rule of a user."""
        return AccessRule(
            user=user,
            publish=self.publish,
            subscribe=self.subscribe,
            read=self.read,
            manage=self.manage,
            operations=self.operations,
            page=self.page,
            deny=self.deny,
        )


class Holder(NamedTuple):
    """Who counts as one where room is shared: a user of a realm, or, without a user name, an address.

    An IPv6 /64 is one address, as in `net.budgets`. "" stands for an address that is not known.
    """

    realm: str = ""
    user: str | None = None
    network: str = ""

    def __str__(self) -> str:
        """Its name in the log."""
        if self.user is not None:
            return f"user {self.user!r}"
        return f"clients without a user name at {self.network}" if self.network else "unknown clients"


class Source(Protocol):
    """The access that has given an identity."""

    def renewed(self, past: Identity) -> Identity:
        """Return the identity of the same client now; the past one if nothing has changed."""


class Identity:
    """A client's names, and what its rules allow; a right that is None allows everything.

    `access` names the access through which the client came in, and `realm` the one whose user it is: they
    differ where a listener has the users of another one. `may_change` False leaves it the operations that
    only look. `successor` is the identity of the same client after the rules have changed, `source` what
    gives it one, and `since` what that needs to know.
    """

    __slots__ = (
        "_denied", "_label", "access", "client_id", "manage", "may_change", "operations", "origin", "page",
        "publish", "read", "realm", "since", "source", "subscribe", "successor", "trusted", "user",
    )  # fmt: skip

    def __init__(
        self,
        client_id: str,
        user: str | None,
        rules: Sequence[AccessRule],
        *,
        local: bool = True,
        label: str = "",
        trusted: bool = False,
        access: str = "",
        realm: str = "",
    ) -> None:
        """`local`: on this machine; `label`: its name in the log; `trusted`: see the module."""
        self.client_id, self.user, self.trusted, self._label = client_id, user, trusted, label
        self.access, self.realm = access, realm
        self.origin = Origin()  # set by the front end that has let the client in
        self.publish: list[str] | None = None
        self.subscribe: list[str] | None = None
        self.read: list[str] | None = None
        self.manage: list[str] | None = None if local else []
        self.operations: frozenset[str] | None = None
        self.page: Page = "operate"
        self.may_change = True
        self.successor: Identity | None = None
        self.source: Source | None = None
        self.since: object = None
        self._denied: dict[str, list[str]] = {}  # by right; without those of which nothing is denied
        if rules:
            self._limit([rule for rule in rules if rule.user in ("*", user or "")])

    def _limit(self, mine: Sequence[AccessRule]) -> None:
        self.publish = self._filled(f for rule in mine for f in rule.publish)
        self.subscribe = self._filled(f for rule in mine for f in rule.subscribe)
        self.read = self._filled(
            f for rule in mine for f in (rule.subscribe if rule.read is None else rule.read)
        )
        self.manage = self._filled(f for rule in mine for f in rule.manage)
        listed = [rule.operations for rule in mine if rule.operations is not None]
        self.operations = frozenset(name for names in listed for name in names) if listed else None
        self.page = max(
            (rule.page for rule in mine if rule.page is not None), key=PAGES.index, default="operate"
        )
        for right in (*FILTERS, "operations"):
            found = [f for rule in mine for f in getattr(rule.deny, right)]
            if right == "read":
                found += [f for rule in mine for f in rule.deny.subscribe]
            if found:
                self._denied[right] = list(self._filled_wide(found))

    def latest(self) -> Identity:
        """Return the present identity of this client: itself, unless users or rules have changed since."""
        found = self
        while found.successor is not None:
            found = found.successor
        return found if found.source is None else found.source.renewed(found)

    @property
    def label(self) -> str:
        """Return its name in the log and in errors, with the user, because rules are for users."""
        if self._label:
            return self._label
        user = "anonymous" if self.user is None else f"user {self.user!r}"
        return f"client {self.client_id!r} ({user})"

    @property
    def owner(self) -> tuple[str, str | None]:
        """Return the owner of its session: the user and the realm."""
        return self.realm, self.user

    @property
    def holder(self) -> Holder:
        """Who it counts as where room is shared: clients without a user name are told apart by address."""
        network = network_of(self.origin.address) if self.user is None else ""
        return Holder(self.realm, self.user, network)

    @property
    def turn(self) -> tuple[Holder, str]:
        """Who it takes turns as (`net.turns`)."""
        return self.holder, network_of(self.origin.address)

    def may_publish(self, topic: str) -> bool:
        """Return whether it may publish on a topic (not for request topics)."""
        return self._has("publish", topic)

    def may_subscribe(self, topic_filter: str) -> bool:
        """Return whether it may subscribe to all of a filter, and none of it is denied."""
        if any(overlap(f, topic_filter) for f in self._denied.get("subscribe", ())):
            return False
        return self.subscribe is None or any(covers(f, topic_filter) for f in self.subscribe)

    def may_read(self, topic: str) -> bool:
        return self._has("read", topic)

    def may_read_all(self, topic_filter: str) -> bool:
        """Return whether it may receive every message that a filter matches."""
        if any(overlap(f, topic_filter) for f in self._denied.get("read", ())):
            return False
        return self.read is None or any(covers(f, topic_filter) for f in self.read)

    def is_denied(self, right: str, topic_filter: str) -> bool:
        """Return whether a `deny`, and not the lack of a rule, is why it lacks the full right there."""
        return any(overlap(f, topic_filter) for f in self._denied.get(right, ()))

    def denied_to_read(self, topic_filters: Iterable[str]) -> str | None:
        """Return a filter that it is denied to read and that overlaps with one of these, if any."""
        wanted = list(topic_filters)
        return next((f for f in self._denied.get("read", ()) if any(overlap(f, one) for one in wanted)), None)

    @property
    def withheld(self) -> Sequence[str]:
        """The topics that it is denied to read, wherever their messages are stored."""
        return self._denied.get("read", ())

    def may_manage(self, topic: str) -> bool:
        """Return whether it has the right `manage` on a topic; a stream has the topic `streams/<name>`."""
        return self._has("manage", topic)

    def may(self, right: StreamRight, stream: str) -> bool:
        return self._has(right, f"streams/{stream}")

    def require(self, stream: str, *rights: StreamRight) -> None:
        """Raise Unauthorized unless it has one of these rights on a stream."""
        if not any(self.may(right, stream) for right in rights):
            needed = " or ".join(f"`{right}`" for right in rights)
            topic = f"streams/{stream}"
            if any(matches(f, topic) for right in rights for f in self._denied.get(right, ())):
                raise Unauthorized(f"{self.label} is denied {needed} on {topic}, by `deny` of a rule or role")
            raise Unauthorized(
                f"{self.label} has no right {needed} on {topic}; add it to a rule in [[mqtt.acl]] or to a "
                "role of the user"
            )

    def require_operation(self, name: str, *, looks: bool) -> None:
        """Raise Unauthorized unless it may use an operation. `looks`: the operation changes nothing."""
        if not self.may_change and not looks:
            raise Unauthorized(f'{self.label} may only look; {name} needs page = "operate" in a rule or role')
        if name in self._denied.get("operations", ()):
            raise Unauthorized(f"{self.label} is denied {name}, by `deny` of a rule or role")
        if self.operations is not None and name not in self.operations:
            raise Unauthorized(f"{self.label} may not use {name}; add it to `operations` of a rule or role")

    def _has(self, right: str, topic: str) -> bool:
        denied = self._denied.get(right)
        if denied is not None and any(matches(f, topic) for f in denied):
            return False
        filters: list[str] | None = getattr(self, right)
        return filters is None or any(matches(f, topic) for f in filters)

    def _filled(self, filters: Iterable[str]) -> list[str]:
        names, filled = self._names(), []
        # A name with a wildcard or a level separator would widen the rule.
        bad = [placeholder for placeholder, name in names.items() if _is_unsafe(name)]
        for topic_filter in filters:
            if any(placeholder in topic_filter for placeholder in bad):
                continue
            found = _PLACEHOLDER.sub(lambda found: names[found[0]], topic_filter)
            first, named = found.partition("/")[0], topic_filter.partition("/")[0]
            # A client could choose its name so that the filter means the service.
            if first == named or not (first in OF_SERVICE or first.startswith("$")):
                filled.append(found)
        return filled

    def _filled_wide(self, filters: Iterable[str]) -> Iterator[str]:
        """The same for `deny`: a name that does not fit into a level stands for everything below it."""
        names = self._names()
        for topic_filter in filters:
            levels = topic_filter.split("/")
            for number, level in enumerate(levels):
                if any(_is_unsafe(names[found]) for found in _PLACEHOLDER.findall(level)):
                    levels[number:] = ["#"]
                    break
                levels[number] = _PLACEHOLDER.sub(lambda found: names[found[0]], level)
            yield "/".join(levels)

    def _names(self) -> dict[str, str]:
        return {"%c": self.client_id, "%u": self.user or ""}


def _is_unsafe(name: str) -> bool:
    return not name or bool(set(name) & set("/+#"))


def command(address: str) -> Identity:
    """Return the caller of a command: like `TRUSTED`, but `address` identifies the process."""
    found = Identity("", None, (), label="a command", trusted=True)
    found.origin = Origin("control", address)
    return found


NOTHING = (AccessRule(),)  # rules that allow nothing
TRUSTED = Identity("", None, (), label="a command", trusted=True)
