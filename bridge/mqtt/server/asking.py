"""The decisions of authorization plugins about the topics of one connection.

A decision takes time. Meanwhile this connection is not read; all others continue. Decisions are kept, so the
hot path never asks: a PUBLISH asks only when it looks up the route of its topic. After `auth.decisions`, all
decisions and routes of the connection are forgotten. If a plugin does not answer, that counts as a refusal
for `RETRY` seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from bridge import books
from bridge.mqtt.server.connections import Member
from bridge.mqtt.wire.packets import ProtocolError
from bridge.plugin.auth import Question

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from bridge.mqtt.server.connections import Connections
    from bridge.runtime import Timer

MOST = 4_096  # decisions kept for one connection
MOST_CHARACTERS = 512 * 1024  # in the topics of those decisions
RETRY = 5.0  # seconds before a question without an answer is asked again

Action = Literal["publish", "subscribe"]


class Asker(Member, Protocol):
    """A connection with the decisions of the present plugins."""

    asking: Asking | None


class Asking:
    """The decisions for one connection."""

    def __init__(self, conn: Asker, connections: Connections) -> None:
        self._conn, self._connections = conn, connections
        self._known: dict[
            tuple[Action, str], tuple[bool, float]
        ] = {}  # the decision, and until when it holds
        self._characters = 0
        self._timer: Timer | None = None
        books.opened(self)

    def recount(self) -> Iterable[books.Entry]:
        yield "characters", self._characters, sum(len(topic) for _, topic in self._known)

    def may(self, action: Action, topic: str) -> bool | None:
        """Return the decision; None if there is none yet."""
        allowed, until = self._known.get((action, topic), (None, 0.0))
        return allowed if allowed is None or self._now() < until else None

    def holds(self, action: Action, topic: str) -> bool:
        """Return whether a decision may be kept. A refusal for want of an answer may not."""
        return self._known[action, topic][1] == float("inf")

    def ask(self, action: Action, topics: Sequence[str], then: Callable[[], None] | None = None) -> None:
        """Hold the connection until all topics are decided. Then call `then` and resume reading.

        If `then` raises ProtocolError, the connection is closed.
        """
        self._conn.hold("authorize")
        self._connections.spawn(self._ask(action, topics, then))

    def stop(self) -> None:
        """The connection is closed."""
        if self._timer is not None:
            self._timer.cancel()

    async def _ask(self, action: Action, topics: Sequence[str], then: Callable[[], None] | None) -> None:
        for topic in topics:
            if self.may(action, topic) is None and not self._conn.gone:
                await self.learn(action, topic)
        if not self._conn.gone:
            present = self._conn.asking
            if then is not None and present is not None and present is not self:
                present.ask(action, topics, then)  # the plugins have changed meanwhile
                return
            if then is not None:
                try:
                    then()
                except ProtocolError as error:
                    self._conn.fail("protocol_errors", str(error), error.reason)
            self._conn.release("authorize")

    async def learn(self, action: Action, topic: str) -> bool:
        """Ask about one topic and keep the decision."""
        conn = self._conn
        client_id, user = conn.who
        auth, runtime = self._connections.auth, self._connections.runtime
        question = Question(client_id=client_id, user=user, address=conn.address, action=action, topic=topic)
        allowed = await auth.allows(question)
        if (action, topic) not in self._known:  # else there was no answer, and its place is taken again
            self._characters += len(topic)
        if len(self._known) >= MOST or self._characters > MOST_CHARACTERS:
            self._known.clear()
            self._characters = len(topic)
        until = self._now() + RETRY if allowed is None else float("inf")
        self._known[action, topic] = bool(allowed), until
        if self._timer is None and not conn.gone:
            self._timer = runtime.later(auth.settings.decisions / 1000, self._forget)
        return bool(allowed)

    def _forget(self) -> None:
        self._timer = None
        self._known.clear()
        self._characters = 0
        self._conn.forget_routes()

    def _now(self) -> float:
        return self._connections.runtime.now()
