"""Each counter that goes up and down has a book (`bridge.books`), or a reason to have none."""

from __future__ import annotations

import ast
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from bridge import books

ROOT = Path(__file__).resolve().parents[1]
SHORT_LIVED = ("bridge/ingest/", "bridge/cli/", "bridge/config/")  # their objects end with a run or a command
METRICS = {"counts", "_counts", "counters"}  # of events, by name

# Counters with a book in another class: where its `recount` is, and the name by which that compares them.
ELSEWHERE = {
    "bridge/mqtt/broker/memory.py self.total": ("bridge/mqtt/broker/sessions.py", "total"),
    "bridge/mqtt/broker/outbox.py self.held": ("bridge/mqtt/broker/sessions.py", "held"),
    "bridge/mqtt/broker/outbox.py self._bytes": ("bridge/mqtt/broker/sessions.py", "size"),
    "bridge/mqtt/broker/outbox.py self._memory.total": ("bridge/mqtt/broker/sessions.py", "total"),
    "bridge/mqtt/broker/outbox.py memory.total": ("bridge/mqtt/broker/sessions.py", "total"),
    "bridge/mqtt/broker/retained.py share.bytes": ("bridge/mqtt/broker/retained.py", "bytes"),
    "bridge/mqtt/broker/router.py group.members": ("bridge/mqtt/broker/broker.py", "members"),
    "bridge/mqtt/broker/router.py self.groups.setdefault(subscription.filter, Group()).members": (
        "bridge/mqtt/broker/broker.py", "members",
    ),
    "bridge/mqtt/server/metering.py meter.subscriptions": (
        "bridge/mqtt/server/connections.py", "subscriptions",
    ),
    "bridge/mqtt/server/requests.py conn.requests": ("bridge/mqtt/server/connections.py", "requests"),
    "bridge/net/budgets.py meter.connections": ("bridge/mqtt/server/connections.py", "connections"),
    "bridge/greengrass/connection.py self.appends": ("bridge/greengrass/frontend.py", "appends"),
    "bridge/streams/directory.py self._pins": ("bridge/streams/committer.py", "pinned"),
    "bridge/streams/log.py self.total_bytes": ("bridge/streams/stream.py", "total_bytes"),
    "bridge/streams/stream.py group.size": ("bridge/streams/queue.py", "size"),
}  # fmt: skip
# Whose `recount` another one calls.
PARTS = {
    "bridge/mqtt/broker/outbox.py Outbox", "bridge/net/limits.py ConnectionLimits",
    "bridge/streams/message_limits.py MessageLimitPolicy", "bridge/streams/queue.py CommitQueue",
}  # fmt: skip

# Never subtracted from: they count events, or name or date something.
GROWS = """
bridge/access/logins.py self._applied
bridge/audit/repeats.py group.counted group.written self._unproven
bridge/audit/writer.py self._lost self._told self._tally.came self._tally.made self._tally.told
bridge/auth/supervisor.py self._number self.restarts
bridge/clock.py self._offset self.steps
bridge/consumers/position.py counts.messages counts.rejected counts.size self.counts.skipped self.version
bridge/export/backoff.py self._refused self.attempts
bridge/export/batches.py cursor.messages cursor.rejected cursor.skipped self._handled
bridge/export/cursor.py self._lines
bridge/export/planning.py self._count self._size
bridge/export/position.py fresh.skipped
bridge/export/supervisor.py self._revision self.restarts suspicion.count
bridge/export/task.py self._host.failures
bridge/export/worker.py self._lines self._numbers
bridge/http/events.py self.number
bridge/http/history.py self._count
bridge/http/observer.py self._stored
bridge/mqtt/broker/journal.py self._numbers
bridge/mqtt/broker/recovery.py message.size
bridge/mqtt/broker/retained.py self._changes
bridge/mqtt/broker/router.py self.epoch
bridge/mqtt/broker/unmatched.py topics.messages
bridge/mqtt/server/connection.py self.published self.traffic.acknowledged_bytes self.traffic.connects
bridge/mqtt/server/connection.py self.traffic.other_bytes self.traffic.others
bridge/mqtt/server/connection.py traffic.published traffic.received_bytes
bridge/mqtt/server/polling.py self._failures
bridge/mqtt/server/reads.py conn.published self._traffic.published self._traffic.received_bytes turns.slices
bridge/mqtt/server/traffic.py self._sent self.sent_bytes
bridge/mqtt/upstream/client.py self._closed self._last_id
bridge/mqtt/upstream/upstream.py self._visit
bridge/net/ranking.py self._entries
bridge/net/turns.py self.slices
bridge/operations/waiting.py self._stale
bridge/plugin/mqtt.py self._unwritten
bridge/plugin/prefixes.py self._count
bridge/streams/committer.py self._proven
bridge/streams/pace.py self._failures
bridge/streams/segment.py self.data_bytes
bridge/streams/store.py self._epoch
bridge/topics.py self._bytes
plugins/mqtt.py self._drops
plugins/reduce.py sent.count
"""
# Bytes, or things in a collection, and not how many there are.
THINGS = """
bridge/consumers/consumer.py self._rejecting
bridge/export/cursor.py self._found
bridge/export/batches.py self._gone
bridge/export/worker.py self._early
bridge/frames.py self._buffer
bridge/greengrass/connection.py self._buffer
bridge/mqtt/broker/broker.py batch.acks self.store.on_bindings_changed
bridge/mqtt/broker/inbox.py self.at_rest
bridge/mqtt/broker/journalfile.py self._buffer
bridge/mqtt/broker/publishing.py batch.acks
bridge/mqtt/server/connection.py self.tail
bridge/mqtt/server/metering.py self.rates
bridge/mqtt/server/systopics.py self._loads
bridge/mqtt/server/websocket.py self._unread
bridge/mqtt/upstream/client.py self._data
bridge/mqtt/upstream/upstream.py batch.acks
bridge/net/crl.py self.parts
bridge/net/flow.py self.holds
bridge/net/httpserver.py self._unread
bridge/net/tlslayer.py self._early
bridge/service/service.py self._mistakes
bridge/streams/directory.py self.pending
bridge/streams/drops.py self._unsaved
bridge/streams/log.py self.damage
bridge/streams/reader.py self.offsets
bridge/streams/verify.py found.problems
"""
# Of one call, read, packet or report, and gone with it.
SHORT = """
bridge/greengrass/connection.py self._skip
bridge/mqtt/broker/inbox.py batch.waiting self.waiting
bridge/mqtt/server/websocket.py self._done self._left
bridge/plugin/httplink.py self._left
bridge/streams/verify.py found.encrypted found.frames found.messages found.segments found.total_bytes
bridge/streams/verify.py found.unopened
"""
# Where the next write goes: a wrong place damages the file, and whoever reads it finds that.
PLACES = """
bridge/audit/sinks.py self._size
bridge/consumers/journal.py self._end self._number
bridge/export/cursor.py self._size
bridge/mqtt/broker/journalfile.py self._size self.size
bridge/streams/drops.py self._size
"""
# Times up to which something is paid, and numbers of turns: they settle by themselves.
RATES = """
bridge/mqtt/server/polling.py self._left self._skip
bridge/net/budgets.py self._bytes self._messages self._spent
bridge/net/fairqueue.py self._next
bridge/net/turns.py self._spent
bridge/streams/pace.py self._at_once
plugins/kinesis.py self._free_at
plugins/mqtt.py self._free_at
"""
REASONS = {
    "bridge/access/guesses.py self._in_progress": "it ends in a `finally` of the caller, or later by a timer",
    "bridge/consumers/position.py lease.deliveries": "of one message: how often it was delivered",
    "bridge/export/batches.py cursor.size": "a metric without what was rejected",
    "bridge/export/host.py self._grown": "the growth of the whole process while a plugin ran",
    "bridge/mqtt/server/metering.py self._prepaid": "never below 0, and less with all that is read",
    "bridge/net/fairqueue.py self._free": "whoever has a turn is a future of the caller",
    "bridge/plugin/link.py self._charged": "compared with what the kernel has sent, after each write",
    "bridge/plugin/link.py self._granted": "never more than a piece, which `close` gives back",
    "bridge/runtime.py self._unfinished": "it only decides when to start another of a few threads",
}


@cache
def trees() -> dict[str, ast.Module]:
    """The code, by path."""
    files = {path.relative_to(ROOT).as_posix(): path for kind in ("bridge", "plugins")
             for path in sorted(ROOT.glob(f"{kind}/**/*.py"))}  # fmt: skip
    return {name: ast.parse(at.read_text()) for name, at in files.items() if not name.startswith(SHORT_LIVED)}


def changes(statement: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """The attributes to which a statement adds (True), or from which it subtracts."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add | ast.Sub):
        yield statement.target, isinstance(statement.op, ast.Add)
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target, value = statement.targets[0], statement.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=True))
        for to, new in pairs:
            for sum_ in ast.walk(new):
                sums = isinstance(sum_, ast.BinOp) and isinstance(sum_.op, ast.Add | ast.Sub)
                if sums and attribute(to) in {attribute(part) for part in ast.walk(sum_)}:
                    yield to, isinstance(sum_.op, ast.Add)  # type: ignore[attr-defined]


def attribute(node: ast.AST) -> str:
    """An attribute, also that of one of its items; empty for anything else."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return ast.unparse(node) if isinstance(node, ast.Attribute) else ""


def given_back(body: list[ast.stmt]) -> Iterator[str]:
    """The counters that are raised right before a `try`, and lowered by as much in its `finally`."""
    for before, after in itertools.pairwise(body):
        if isinstance(before, ast.AugAssign) and isinstance(after, ast.Try):
            inverse = ast.unparse(before).replace("+=", "-=")
            if inverse in map(ast.unparse, after.finalbody):
                yield attribute(before.target)


@cache
def found() -> dict[str, set[bool]]:
    """Every counter without a book in its class or a `finally`: whether it is added to (True), or less."""
    sites: dict[str, set[bool]] = defaultdict(set)
    for name, tree in trees().items():
        safe: dict[str, int] = defaultdict(int)
        own: set[str] = set()
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for one in given_back(node.body):
                    safe[one] += 2
            if isinstance(node, ast.ClassDef):
                own |= {f"self.{one}" for one in compared(node)}
        for node in nodes:
            for target, added in changes(node):
                what = attribute(target)
                metric = what.rpartition(".")[2] in METRICS and added
                if not what or metric or what in own:
                    continue
                if safe[what]:
                    safe[what] -= 1
                    continue
                sites[f"{name} {what}"].add(added)
    return sites


def compared(owner: ast.ClassDef) -> set[str]:
    """The names of attributes that the `recount` of a class looks at."""
    return {
        part.attr
        for method in owner.body
        if isinstance(method, ast.FunctionDef) and method.name == "recount"
        for part in ast.walk(method)
        if isinstance(part, ast.Attribute)
    }


def listed(text: str) -> set[str]:
    """The counters in one of the lists above."""
    rows = [line.split() for line in text.split("\n") if line]
    return {f"{name} {one}" for name, *those in rows for one in those}


def test_each_counter_has_a_book_or_a_reason() -> None:
    sites = found()
    known = listed(GROWS) | listed(THINGS) | listed(SHORT) | listed(PLACES) | listed(RATES)
    known |= REASONS.keys() | ELSEWHERE.keys()
    unknown = sites.keys() - known
    assert not unknown, f"compare them in `recount` (see bridge/books.py), or say here why not: {unknown}"
    assert not known - sites.keys(), "no such counters any more"


def test_what_only_grows_is_never_subtracted_from() -> None:
    sites = found()
    assert [one for one in listed(GROWS) if sites[one] != {True}] == []


def test_a_book_elsewhere_compares_its_counter() -> None:
    for name, (place, attr) in ELSEWHERE.items():
        owners = [node for node in ast.walk(trees()[place]) if isinstance(node, ast.ClassDef)]
        assert any(attr in compared(owner) for owner in owners), name


def test_every_book_is_opened() -> None:
    unopened = {
        f"{name} {node.name}"
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any(isinstance(one, ast.FunctionDef) and one.name == "recount" for one in node.body)
        and "books.opened(self)" not in ast.unparse(node)
    }
    assert unopened == PARTS | {"bridge/books.py Book"}


def test_a_wrong_counter_is_named_with_what_it_must_be() -> None:
    class Shelf:
        def __init__(self) -> None:
            self.items, self.number = ["a"], 1
            books.opened(self)

        def recount(self) -> Iterable[books.Entry]:
            yield "number", self.number, len(self.items)

    shelf = Shelf()
    books.check()
    shelf.items.clear()
    with pytest.raises(books.WrongBookError, match=r"test_books\.Shelf: number is 1, and must be 0"):
        books.check()
    shelf.number = 0
