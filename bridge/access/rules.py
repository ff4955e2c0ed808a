"""Rules and callers: what somebody who was let in may do.

A right is a list of topic filters. A stream stands in them as its own topic, `streams/<name>`, so that one
filter says where a client may publish and which streams it may append to.

    right        on a topic                          on a stream (its topic `streams/<name>`)
    publish      PUBLISH, wills                      append
    subscribe    SUBSCRIBE                           -
    read         delivery of a message               read, describe
    manage       -                                   create, update, delete, purge, describe

* With rules, what no rule lists is refused.
* Without any rule, everybody who was let in may publish, subscribe and read everywhere, and a caller on
  this machine may manage too. A caller from elsewhere may not: it needs a rule.
* `TRUSTED` is root and the service's own user at the control socket. They could change the files as well.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from bridge.errors import Unauthorized
from bridge.topics import covers, is_topic_filter, matches

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

StreamRight = Literal["publish", "read", "manage"]


class AccessRule(Struct, frozen=True, kw_only=True):
    """[[mqtt.acl]]: what some users may do, as topic filters; rules add up, nothing is forbidden by one.

    `user` is a user name; "*" is everybody, and "" are anonymous clients. In filters `%c` stands for the
    client id and `%u` for the user name; a client whose id or name contains `/`, `+` or `#` gets
    nothing from a filter with such a placeholder. `publish` also covers wills, `subscribe` is what may
    be asked for, `read` what may be delivered; left out, `read` is the same as `subscribe`.
    Without any rule everybody who is let in may publish and subscribe everywhere, and clients on this
    machine may do every operation on every stream.

    With rules, an operation on a stream needs a right on `streams/<name>`: `publish` to append, `read` to
    read, `manage` to create, update, delete and purge it; one of the last two to describe it. To create
    or update a stream also needs `read` on all that its topics cover, and `publish` on the streams that its
    exports append to. Requests are publications too (`streambridge/%c/<operation>`). Clients on port 8088
    are the user `greengrass.user`.
    """

    user: str = "*"
    publish: list[str] = []
    subscribe: list[str] = []
    read: list[str] | None = None
    manage: list[str] = []

    def __post_init__(self) -> None:
        mistakes = [
            f"`{key}`: {name!r} is not a topic filter; `#` may only be the last level"
            for key in ("publish", "subscribe", "read", "manage")
            for name in getattr(self, key) or ()
            if not is_topic_filter(name)
        ]
        if mistakes:
            raise ValueError("\n".join(mistakes))


class Identity:
    """Who asks: its names, and what its rules allow. None for a list is everything."""

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
        """`local`: on this machine; `label`: how the log calls it; `trusted`: see the module."""
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
        """How the log and errors call it: with its user, since rules are written for users."""
        if self._label:
            return self._label
        who = "anonymous" if self.user is None else f"user {self.user!r}"
        return f"client {self.client_id!r} ({who})"

    def may_publish(self, topic: str) -> bool:
        """Whether it may publish on a topic (request topics are decided elsewhere)."""
        return self.publish is None or any(matches(f, topic) for f in self.publish)

    def may_subscribe(self, topic_filter: str) -> bool:
        """Whether it may subscribe to all that a filter matches."""
        return self.subscribe is None or any(covers(f, topic_filter) for f in self.subscribe)

    def may_read(self, topic: str) -> bool:
        """Whether a message on a topic may be delivered to it."""
        return self.read is None or any(matches(f, topic) for f in self.read)

    def may_read_all(self, topic_filter: str) -> bool:
        """Whether every message that a filter matches may be delivered to it."""
        return self.read is None or any(covers(f, topic_filter) for f in self.read)

    def may(self, right: StreamRight, stream: str) -> bool:
        """Whether it has a right on a stream."""
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
        # A name with a wildcard or a level of its own would widen the rule: it gets nothing from it.
        bad = {mark for mark, name in names.items() if not name or set(name) & set("/+#")}
        filled: list[str] = []
        for topic_filter in filters:
            if any(mark in topic_filter for mark in bad):
                continue
            filled.append(re.sub("%[cu]", lambda mark: names[mark[0]], topic_filter))
        return filled


TRUSTED = Identity("", None, (), label="a command", trusted=True)
