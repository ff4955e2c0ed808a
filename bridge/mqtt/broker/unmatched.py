"""Topics that no stream takes: a device with a typo in its topic loses no readings in silence.

What it promises: each such topic is listed, with its last client, the number of messages, and the line of
configuration that would store them; and logged once an hour while messages come. A level with a digit is
listed as `+`, so that a thousand devices are one line. At most `MOST` patterns are kept, `OF_ONE` of them of
one holder (`Identity.holder`); what is beyond counts as `#`. So nobody fills the list or the log for others.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from bridge import books
from bridge.mqtt.broker.reports import HOUR
from bridge.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bridge.access.rules import Holder
    from bridge.clock import Clock
    from bridge.mqtt.broker.reports import Reports
    from bridge.mqtt.broker.store import Store

log = logging.getLogger(__name__)

MOST, OF_ONE = 256, 32
LONGEST = 200  # characters of a pattern
REST = "#"  # the pattern of what has no other


class Topics:
    """The topics of one pattern."""

    __slots__ = ("client", "delivered", "due", "holder", "last", "messages", "pattern", "topic")

    def __init__(self, pattern: str, holder: Holder) -> None:
        self.pattern, self.holder = pattern, holder
        self.topic = self.client = ""  # of the last message
        self.messages = self.last = 0  # how many, and when, Unix time in ms
        self.delivered = False  # whether the last one was for a subscriber, or is retained
        self.due = 0.0  # when it is logged again

    @property
    def line(self) -> str:
        """The line that stores them, in the table of a stream."""
        return f"topics = [{json.dumps(self.pattern, ensure_ascii=False)}]"


class Unmatched:
    """The topics of all messages that no stream has taken since the start."""

    def __init__(self, store: Store, clock: Clock, reports: Reports) -> None:
        self._store, self._clock, self._reports = store, clock, reports
        self._kept: dict[str, Topics] = {}
        self._of: Counter[Holder] = Counter()
        books.opened(self)

    def recount(self) -> Iterable[books.Entry]:
        yield "of", self._of, Counter(topics.holder for topics in self._kept.values())

    def note(
        self, topics: Topics | None, name: str, client: str, label: str, holder: Holder, *, delivered: bool
    ) -> Topics:
        """A client has sent a message on a topic without a stream.

        `topics` is what this has returned for the topic before, if it is known.
        """
        if topics is None or self._kept.get(topics.pattern) is not topics:
            topics = self._topics(name, holder)
        topics.topic, topics.client, topics.delivered = name, client, delivered
        topics.messages += 1
        topics.last = round(self._clock.wall())
        if self._reports.now() >= topics.due:
            topics.due = self._reports.now() + HOUR
            self._say(topics, label)
        return topics

    def _say(self, topics: Topics, label: str) -> None:
        log.log(
            logging.INFO if topics.delivered else logging.WARNING,
            "%s publishes on %s, which no stream takes: %s (%d such messages since the start; said once an "
            "hour). To store them, write in a stream of the configuration: %s",
            label,
            topics.topic[:LONGEST],
            "only subscribers get it" if topics.delivered else "it is stored nowhere, and nobody subscribes",
            topics.messages,
            topics.line,
        )

    def listed(self) -> list[dict[str, Any]]:
        """Return all, those with most messages first. What a stream takes by now is left out."""
        for topics in list(self._kept.values()):
            if self._store.bound(topics.topic):
                self._forget(topics)
        return [
            {
                "topics": printable(topics.pattern),
                "topic": printable(topics.topic[:LONGEST]),
                "client": topics.client,
                "messages": topics.messages,
                "last": topics.last,
                "delivered": topics.delivered,
                "line": printable(topics.line),
            }
            for topics in sorted(self._kept.values(), key=lambda one: -one.messages)
        ]

    def _topics(self, name: str, holder: Holder) -> Topics:
        pattern = pattern_of(name)
        if pattern not in self._kept and (len(self._kept) >= MOST or self._of[holder] >= OF_ONE):
            pattern = REST
        found = self._kept.get(pattern)
        if found is None:
            found = self._kept[pattern] = Topics(pattern, holder)
            self._of[holder] += 1
        return found

    def _forget(self, topics: Topics) -> None:
        del self._kept[topics.pattern]
        self._of[topics.holder] -= 1
        if not self._of[topics.holder]:
            del self._of[topics.holder]


def pattern_of(topic: str) -> str:
    """Return a filter for a topic and those that differ from it in levels with a digit."""
    levels = ["+" if re.search(r"\d", level) else level for level in topic.split("/")]
    if set(levels) == {"+"}:
        levels = topic.split("/")
    while len(levels) > 1 and sum(map(len, levels)) + len(levels) > LONGEST:
        del levels[-1]
        levels[-1] = "#"
    return "/".join(levels) if sum(map(len, levels)) + len(levels) <= LONGEST else REST
