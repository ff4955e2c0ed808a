"""Topic names and topic filters: checks, matching, and a tree of subscriptions (MQTT 4.7).

Matching is linear in the number of levels, without regular expressions: filters are untrusted input
(GHSA-2hjf-7455-w946 was a filter turned into a regular expression that stopped a broker).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Generic, TypeVar

MAX_LEVELS = 64
MAX_LENGTH = 4096
REQUEST_LEVEL = "streambridge"  # the first level of request topics, closed to ordinary messages
SHARE = "$share/"  # what the filter of a shared subscription begins with

T = TypeVar("T")


class Remembered(dict[bytes, T]):
    """What is known about some topics. When they are too many or take too much memory, all are forgotten.

    A topic may be 16 KB long, and clients choose them.
    """

    MOST, MOST_BYTES = 50_000, 64 * 1024 * 1024

    def __init__(self) -> None:
        super().__init__()
        self._bytes = 0

    def remember(self, topic: bytes, value: T, size: int = 0) -> None:
        """Keep what is known about a topic; `size`: bytes that it takes beside the topic and an entry."""
        size += 2 * len(topic) + 200
        if len(self) >= self.MOST or self._bytes + size > self.MOST_BYTES:
            self.clear()
        self._bytes += size
        self[topic] = value

    def clear(self) -> None:
        """Forget all."""
        super().clear()
        self._bytes = 0


def is_topic_name(name: str) -> bool:
    """Return whether a PUBLISH may have this topic (MQTT-4.7.1-1, MQTT-4.7.3-1).

    Names that begin with `$` belong to the server (4.7.2).
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
    """Return whether a SUBSCRIBE may have this filter (MQTT-4.7.1-2 and -3)."""
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


def filter_mistake(name: str) -> str | None:
    """What is wrong with a topic filter, and a right one, as a sentence; None if it is one.

    The filter of a shared subscription is a mistake: `$share/<group>/` is only for SUBSCRIBE.
    """
    if is_topic_filter(name) and not name.startswith(SHARE):
        return None
    return f"{name if len(name) <= 80 else name[:77] + '...'!r} is not a topic filter: {_what_is_wrong(name)}"


def _what_is_wrong(name: str) -> str:
    levels = name.split("/")
    if not name:
        return "it is empty; write # for all topics"
    if len(name) > MAX_LENGTH or len(levels) > MAX_LEVELS:
        return (
            f"it has {len(name)} characters and {len(levels)} levels; at most {MAX_LENGTH} and {MAX_LEVELS} "
            "are possible"
        )
    if name.startswith(SHARE):
        rest = name.removeprefix(SHARE).partition("/")[2]
        return f"only the SUBSCRIBE of a client has {SHARE}<group>/; write " + (
            rest if is_topic_filter(rest) else "the filter alone, such as a/#"
        )
    for number, level in enumerate(levels):
        here, before = f"level {number + 1} of {len(levels)}", levels[:number]
        if "\0" in level:
            return f"{here} has a NUL character; remove it"
        if level == "#" and number < len(levels) - 1:
            few, more = "/".join([*before, "#"]), "/".join([*before, "+", *levels[number + 1 :]])
            return f"{here} is `#`, which may only be the last; write {few}" + (
                f" or {more}" if is_topic_filter(more) else ""
            )
        for wildcard in "#+":
            if wildcard in level and level != wildcard:
                right = "/".join([*before, wildcard, *([] if wildcard == "#" else levels[number + 1 :])])
                return f"{here}, {level!r}, has a `{wildcard}`, which stands for a whole level" + (
                    f"; write {right}" if is_topic_filter(right) else ""
                )
    raise AssertionError(name)


def unshared(topic_filter: str) -> str:
    """The filter of a subscription without its `$share/<group>/`, if it has that (MQTT 5 section 4.8.2).

    Empty if it has no group, one with a wildcard, or nothing behind the group (MQTT-4.8.2-1 and -2).
    """
    if not topic_filter.startswith(SHARE):
        return topic_filter
    group, _, rest = topic_filter.removeprefix(SHARE).partition("/")
    return rest if group and not set(group) & set("+#") else ""


def matches(topic_filter: str, topic: str) -> bool:
    """Return whether a valid filter matches a topic name (4.7.1; wildcards never match a leading `$`)."""
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
    """Return whether the filter `outer` matches every topic that the filter `inner` matches."""
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


def overlap(one: str, other: str) -> bool:
    """Return whether there is a topic that both filters match."""
    first, second = one.split("/"), other.split("/")
    for wild, literal in ((first, second), (second, first)):
        if literal[0][:1] == "$" and wild[0] in ("+", "#"):
            return False
    for left, right in zip(first, second, strict=False):
        if "#" in (left, right):
            return True
        if left != right and "+" not in (left, right):
            return False
    rest = first[len(second) :] or second[len(first) :]
    return not rest or rest == ["#"]  # "a/#" matches "a" as well (4.7.1.2)


class _Node(Generic[T]):
    """A node, and the levels on the edge from its parent; `#` always has a node of its own."""

    __slots__ = ("children", "edge", "literals", "pick", "values")

    def __init__(self, edge: Sequence[str] = ()) -> None:
        self.children: dict[str, _Node[T]] = {}  # by the first level of their edges
        self.values: list[T] = []
        self.set_edge(edge)

    def set_edge(self, edge: Sequence[str]) -> None:
        self.edge = tuple(edge)
        positions = [at for at, level in enumerate(edge) if at and level != "+"]
        # One call in C compares all levels except the first, by which the node was found.
        self.pick = itemgetter(*positions) if positions else None
        self.literals = self.pick(self.edge) if self.pick is not None else None


class FilterTree(Generic[T]):
    """Values by topic filter; usually the time of a match does not depend on their number.

    A radix tree with a node where filters branch or end: a filter needs two nodes at most, however many
    levels it has. Hostile filters make a match visit every node, which takes some microseconds per filter.
    Empty branches are pruned: endless subscribing and unsubscribing does not use up memory.
    """

    def __init__(self) -> None:
        self._root: _Node[T] = _Node()

    def add(self, topic_filter: str, value: T) -> None:
        levels = topic_filter.split("/")
        size, node, at = len(levels), self._root, 0
        while at < size:
            first = levels[at]
            child = node.children.get(first)
            if child is None:
                end = size - 1 if levels[-1] == "#" and at < size - 1 else size
                child = node.children[first] = _Node(levels[at:end])
            shared = _shared(child.edge, levels, at)
            if shared < len(child.edge):
                upper: _Node[T] = _Node(child.edge[:shared])
                upper.children[child.edge[shared]] = child
                child.set_edge(child.edge[shared:])
                child = node.children[first] = upper
            node, at = child, at + shared
        node.values.append(value)

    def remove(self, topic_filter: str, value: T) -> None:
        """Remove a value from a filter, if it is there."""
        levels = topic_filter.split("/")
        path = [self._root]
        at = 0
        while at < len(levels):
            child = path[-1].children.get(levels[at])
            if child is None or _shared(child.edge, levels, at) < len(child.edge):
                return
            path.append(child)
            at += len(child.edge)
        if value in path[-1].values:
            path[-1].values.remove(value)
        while len(path) > 1:
            node = path.pop()
            first = node.edge[0]
            if not node.values and not node.children:
                del path[-1].children[first]
            elif len(node.children) == 1 and not node.values and "#" not in node.children:
                (below,) = node.children.values()
                below.set_edge(node.edge + below.edge)
                path[-1].children[first] = below
            else:
                return

    def match(self, topic: str) -> list[T]:
        """All values whose filters match the topic name."""
        found: list[T] = []
        levels = topic.split("/")
        size = len(levels)
        todo = [(self._root, 0)]
        while todo:
            node, at = todo.pop()
            children = node.children
            wild = at > 0 or topic[:1] != "$"
            if wild and "#" in children:
                found += children["#"].values  # "a/#" matches "a" as well (4.7.1.2)
            if at == size:
                found += node.values
                continue
            level = levels[at]
            for first in ("+", level) if wild else (level,):
                child = children.get(first)
                if child is None or (first == level and level in ("+", "#")):
                    continue
                end = at + len(child.edge)
                if end <= size and (child.pick is None or child.pick(levels[at:end]) == child.literals):
                    todo.append((child, end))
        return found

    def has_first(self, level: str) -> bool:
        """Whether any filter begins with this level, which is no wildcard."""
        return level in self._root.children

    def __len__(self) -> int:
        """The number of nodes below the root."""
        count, todo = 0, [self._root]
        while todo:
            children = todo.pop().children.values()
            count += len(children)
            todo += children
        return count


def _shared(edge: tuple[str, ...], levels: list[str], at: int) -> int:
    """How many levels an edge has in common with the levels at this position."""
    if edge == tuple(levels[at : at + len(edge)]):
        return len(edge)
    pairs = enumerate(zip(edge, levels[at:], strict=False))
    return next((n for n, (one, other) in pairs if one != other), min(len(edge), len(levels) - at))
