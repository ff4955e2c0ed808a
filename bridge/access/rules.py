"""Rules and identities: what a client that has logged in may do.

A right is a list of topic filters. In them a stream is its own topic, `streams/<name>`: one filter covers
where a client may publish and which streams it may append to.

    right        on a topic                          on a stream (its topic `streams/<name>`)
    publish      PUBLISH, wills                      append
    subscribe    SUBSCRIBE                           -
    read         delivery of a message               read, describe
    manage       -                                   create, update, delete, purge, describe

* With rules, everything that no rule allows is denied.
* Without rules, every connected client may publish, subscribe and read everywhere, and a client on this
  machine may also manage. A client on another machine needs a rule for that.
* `TRUSTED` is root or the service's user at the control socket. They could change the files as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct

from bridge.errors import Unauthorized
from bridge.topics import covers, filter_mistake, matches

StreamRight = Literal["publish", "read", "manage"]


class AccessRule(Struct, frozen=True, kw_only=True):
    """[[mqtt.acl]]: what some users may do, as topic filters. Rules add up; a rule forbids nothing.

    `user` is a user name; "*" is every client, "" are anonymous clients. In filters `%c` is the client id and
    `%u` the user name; a filter with such a placeholder gives nothing to a client whose id or name contains
    `/`, `+` or `#`. `publish` also covers wills, `subscribe` is what a client may subscribe to, `read` what
    it may receive; without `read`, that is the same as `subscribe`.
    Without any rule every connected client may publish and subscribe everywhere, and clients on this machine
    may do every operation on every stream.

    With rules, an operation on a stream needs a right on `streams/<name>`: `publish` to append, `read` to
    read, `manage` to create, update, delete and purge it; `read` or `manage` to describe it. To create or
    update a stream also needs `read` on everything that its topics cover, and `publish` on the streams that
    its exports append to. Requests are messages too (`streambridge/%c/<operation>`). Clients on port 8088
    are the user `greengrass.user`.
    """

    user: str = "*"
    publish: list[str] = []
    subscribe: list[str] = []
    read: list[str] | None = None
    manage: list[str] = []

    def __post_init__(self) -> None:
        mistakes = [
            f"`{key}`: {mistake}"
            for key in ("publish", "subscribe", "read", "manage")
            for name in getattr(self, key) or ()
            if (mistake := filter_mistake(name)) is not None
        ]
        if mistakes:
            raise ValueError("\n".join(mistakes))


class Identity:
    """A client's names, and what its rules allow; a right that is None allows everything."""

    __slots__ = ("_label", "client_id", "manage", "publish", "read", "subscribe", "trusted", "user")

    def __init__(
        self,
        client_id: str,
        user: str | None,
        rules: Sequence[AccessRule],
        *,
        local: bool = True,
        label: str = "",
        trusted: bool = False,
    ) -> None:
        """`local`: on this machine; `label`: its name in the log; `trusted`: see the module."""
        self.client_id, self.user, self.trusted, self._label = client_id, user, trusted, label
        self.publish: list[str] | None = None
        self.subscribe: list[str] | None = None
        self.read: list[str] | None = None
        self.manage: list[str] | None = None if local else []
        if rules:
            mine = [rule for rule in rules if rule.user in ("*", user or "")]
            self.publish = self._filled(f for rule in mine for f in rule.publish)
            self.subscribe = self._filled(f for rule in mine for f in rule.subscribe)
            self.read = self._filled(
                f for rule in mine for f in (rule.subscribe if rule.read is None else rule.read)
            )
            self.manage = self._filled(f for rule in mine for f in rule.manage)

    @property
    def label(self) -> str:
        """Its name in the log and in errors, with the user, since rules are for users."""
        if self._label:
            return self._label
        user = "anonymous" if self.user is None else f"user {self.user!r}"
        return f"client {self.client_id!r} ({user})"

    def may_publish(self, topic: str) -> bool:
        """Whether it may publish on a topic (not for request topics)."""
        return self.publish is None or any(matches(f, topic) for f in self.publish)

    def may_subscribe(self, topic_filter: str) -> bool:
        return self.subscribe is None or any(covers(f, topic_filter) for f in self.subscribe)

    def may_read(self, topic: str) -> bool:
        return self.read is None or any(matches(f, topic) for f in self.read)

    def may_read_all(self, topic_filter: str) -> bool:
        """Whether it may receive every message that a filter matches."""
        return self.read is None or any(covers(f, topic_filter) for f in self.read)

    def may(self, right: StreamRight, stream: str) -> bool:
        filters: list[str] | None = getattr(self, right)
        return filters is None or any(matches(f, f"streams/{stream}") for f in filters)

    def require(self, stream: str, *rights: StreamRight) -> None:
        """Raise Unauthorized unless it has one of these rights on a stream."""
        if not any(self.may(right, stream) for right in rights):
            needed = " or ".join(f"`{right}`" for right in rights)
            raise Unauthorized(
                f"{self.label} has no right {needed} on streams/{stream}; add it to a rule in [[mqtt.acl]]"
            )

    def _filled(self, filters: Iterable[str]) -> list[str]:
        names = {"%c": self.client_id, "%u": self.user or ""}
        # A name with a wildcard or a level separator would widen the rule.
        bad = [placeholder for placeholder, name in names.items() if not name or set(name) & set("/+#")]
        return [
            re.sub("%[cu]", lambda found: names[found[0]], topic_filter)
            for topic_filter in filters
            if not any(placeholder in topic_filter for placeholder in bad)
        ]


TRUSTED = Identity("", None, (), label="a command", trusted=True)
