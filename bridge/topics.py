"""Topic names and topic filters: checks, matching, and a tree of subscriptions (MQTT 4.7).

Matching is linear in the number of levels, without regular expressions: a filter is input of a stranger
(GHSA-2hjf-7455-w946 was a filter turned into a regular expression that stopped a whole broker).
"""

from __future__ import annotations

from typing import Generic, TypeVar

MAX_LEVELS = 64
MAX_LENGTH = 4096
REQUEST_LEVEL = "streambridge"  # the first level of request topics, closed to ordinary messages

T = TypeVar("T")


def is_topic_name(name: str) -> bool:
    """Tell whether a PUBLISH may carry the name (MQTT-4.7.1-1, MQTT-4.7.3-1).

    Names below `$` belong to the server (4.7.2), and no client publishes there.
    """
    return bool(
        name
        and len(name) <= MAX_LENGTH
        and name[0] != "$"
        and "+" not in name
        and "#" not in name
        and "\0" not in name
        and name.count("/") < MAX_LEVELS
    )


def is_topic_filter(name: str) -> bool:
    """Tell whether a SUBSCRIBE may carry the filter (MQTT-4.7.1-2 and -3)."""
    if not name or len(name) > MAX_LENGTH or "\0" in name or name.count("/") >= MAX_LEVELS:
        return False
    if "#" not in name and "+" not in name:
        return True
    levels = name.split("/")
    last = len(levels) - 1
    return all(
        (level == "+" or "+" not in level) and ("#" not in level or (level == "#" and index == last))
        for index, level in enumerate(levels)
    )


def matches(topic_filter: str, topic: str) -> bool:
    """Tell whether a valid filter matches a topic name (4.7.1; wildcards never match a leading `$`)."""
    if topic_filter == topic:
        return True
    wanted, levels = topic_filter.split("/"), topic.split("/")
    if topic[:1] == "$" and wanted[0] in ("+", "#"):
        return False
    count = len(levels)
    for index, level in enumerate(wanted):
        if level == "#":
            return True
        if index >= count or (level != "+" and level != levels[index]):
            return False
    return len(wanted) == count


def covers(outer: str, inner: str) -> bool:
    """Tell whether every topic that the filter `inner` matches is matched by the filter `outer` too."""
    out, inn = outer.split("/"), inner.split("/")
    if inn[0][:1] != "$" or out[0] not in ("+", "#"):
        for index, level in enumerate(out):
            if level == "#":
                return True
            if index >= len(inn) or inn[index] == "#":
                return False
            if level != "+" and level != inn[index]:
                return False
        return len(out) == len(inn)
    return False


class _Node(Generic[T]):
    __slots__ = ("children", "values")

    def __init__(self) -> None:
        self.children: dict[str, _Node[T]] = {}
        self.values: list[T] = []


class FilterTree(Generic[T]):
    """Values by topic filter; finds all that match a name in a time that does not grow with their number.

    Empty branches are pruned, so that subscribing and unsubscribing for ever needs no memory.
    """

    def __init__(self) -> None:
        self._root: _Node[T] = _Node()

    def add(self, topic_filter: str, value: T) -> None:
        """Put a value under a filter."""
        node = self._root
        for level in topic_filter.split("/"):
            child = node.children.get(level)
            if child is None:
                child = node.children[level] = _Node()
            node = child
        node.values.append(value)

    def remove(self, topic_filter: str, value: T) -> None:
        """Take a value from under a filter; it is no error if it is not there."""
        path: list[tuple[_Node[T], str]] = []
        node = self._root
        for level in topic_filter.split("/"):
            child = node.children.get(level)
            if child is None:
                return
            path.append((node, level))
            node = child
        if value in node.values:
            node.values.remove(value)
        for parent, level in reversed(path):
            child = parent.children[level]
            if child.values or child.children:
                break
            del parent.children[level]

    def match(self, topic: str) -> list[T]:
        """All values whose filter matches the topic name."""
        found: list[T] = []
        levels = topic.split("/")
        nodes = [self._root]
        for index, level in enumerate(levels):
            below: list[_Node[T]] = []
            wild = index > 0 or level[:1] != "$"
            for node in nodes:
                children = node.children
                if wild:
                    if "#" in children:
                        found += children["#"].values
                    if "+" in children:
                        below.append(children["+"])
                if level in children and level not in ("+", "#"):
                    below.append(children[level])
            if not below:
                return found
            nodes = below
        for node in nodes:
            found += node.values
            if "#" in node.children:  # "a/#" matches "a" as well (4.7.1.2)
                found += node.children["#"].values
        return found

    def __len__(self) -> int:
        """How many nodes there are below the root."""
        count, todo = 0, [self._root]
        while todo:
            children = todo.pop().children.values()
            count += len(children)
            todo += children
        return count
