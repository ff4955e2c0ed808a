"""Rules: what a client that was let in may do."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec import Struct

from bridge.topics import covers, is_topic_filter, matches

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class AccessRule(Struct, frozen=True, kw_only=True):
    """[[mqtt.acl]]: what some users may do, as topic filters; rules add up, nothing is forbidden by one.

    `user` is a user name; "*" is everybody, and "" are anonymous clients. In filters `%c` stands for the
    client id and `%u` for the user name; a client whose id or name contains `/`, `+` or `#` gets
    nothing from a filter with such a placeholder. `publish` also covers wills, `subscribe` is what may
    be asked for, `read` what may be delivered; left out, `read` is the same as `subscribe`.
    Without any rule everybody who is let in may publish and subscribe everywhere. Requests are
    publications too (`streambridge/%c/<operation>`); to append one also needs `publish`, and to read
    messages `read`, on `streams/<name>`.
    """

    user: str = "*"
    publish: list[str] = []
    subscribe: list[str] = []
    read: list[str] | None = None

    def __post_init__(self) -> None:
        mistakes = [
            f"`{key}`: {name!r} is not a topic filter; `#` may only be the last level"
            for key in ("publish", "subscribe", "read")
            for name in getattr(self, key) or ()
            if not is_topic_filter(name)
        ]
        if mistakes:
            raise ValueError("\n".join(mistakes))


class Identity:
    """A client that was let in: its names, and what its rules allow. None for a list is everything."""

    __slots__ = ("client_id", "publish", "read", "subscribe", "user")

    def __init__(self, client_id: str, user: str | None, rules: Sequence[AccessRule]) -> None:
        self.client_id, self.user = client_id, user
        self.publish: list[str] | None = None
        self.subscribe: list[str] | None = None
        self.read: list[str] | None = None
        if rules:
            mine = [rule for rule in rules if rule.user in ("*", user or "")]
            self.publish = self._filled(f for rule in mine for f in rule.publish)
            self.subscribe = self._filled(f for rule in mine for f in rule.subscribe)
            self.read = self._filled(
                f for rule in mine for f in (rule.subscribe if rule.read is None else rule.read)
            )

    @property
    def label(self) -> str:
        """How the log and errors call it: with its user, since rules are written for users."""
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
