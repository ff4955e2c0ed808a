"""The state of MQTT, without I/O: what clients are sent, and their sessions.

The server reads a connection (`Line`), parses the packets, and calls these methods:

    open          CONNECT, once the server knows the client: take-over, session; answers by callback
    route         PUBLISH: where its topic goes for this client. With one stream and no subscriber, the
                  server itself appends (`Route.append`)
    publish       every other PUBLISH; `refused` if the append of the server failed
    subscribing   has the methods for SUBSCRIBE and UNSUBSCRIBE
    released      PUBREL. PUBACK, PUBREC and PUBCOMP go to `Session.outbox`
    set_expiry    DISCONNECT, with a Session Expiry Interval
    close         the end of the connection, with or without the will

The answer to a packet goes into the `Batch` of its read, and is sent when everything that the batch has
touched is committed (`inbox`). Time and threads come from a `Runtime`, so a test or a simulation can decide
what happens when. Only the journal touches files.

A session's states:

    none --open--> connected --close--> away --open--> connected
                       |                  |
                       +-- expiry is 0 ---+-- expired, evicted, revoked, forgotten, clean start --> none
"""

from __future__ import annotations

import logging
from collections import Counter
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from bridge import audit, books
from bridge.access.accesses import Accesses
from bridge.mqtt.broker.inbox import Inbox
from bridge.mqtt.broker.joined import ABOVE, Joined
from bridge.mqtt.broker.journal import Journal
from bridge.mqtt.broker.journalfile import NAME
from bridge.mqtt.broker.line import GONE
from bridge.mqtt.broker.publishing import Publisher
from bridge.mqtt.broker.recovery import find_stored_ids, recover, referred, snapshot
from bridge.mqtt.broker.reports import Reports, reason, refused
from bridge.mqtt.broker.router import OURS, Route, Router
from bridge.mqtt.broker.sessions import Session, Sessions
from bridge.mqtt.broker.subscribing import Subscribing
from bridge.mqtt.broker.wills import Wills
from bridge.mqtt.wire import answers
from bridge.mqtt.wire.packets import (
    ADMINISTRATIVE_ACTION,
    NOT_AUTHORIZED,
    PACKET_ID_NOT_FOUND,
    PROTOCOL_ERROR,
    PUBCOMP,
    QUOTA_EXCEEDED,
    SERVER_BUSY,
    SESSION_TAKEN_OVER,
    SUCCESS,
    V5,
    ProtocolError,
    Publish,
)
from bridge.net.turns import Turns
from bridge.topics import SHARE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from bridge.access.logins import Access
    from bridge.access.rules import Identity
    from bridge.clock import Clock
    from bridge.encryption import Keys
    from bridge.errors import StreamBridgeError, StreamError
    from bridge.mqtt.broker.inbox import Batch
    from bridge.mqtt.broker.publishing import Requests
    from bridge.mqtt.broker.store import Store
    from bridge.mqtt.settings import Limits
    from bridge.mqtt.wire.packets import Will
    from bridge.runtime import Runtime, Timer
    from bridge.streams.headers import Headers

SETTLE_TIMEOUT = 5.0  # seconds to wait for the commit of what a client's last connection published
REVOKED = "it could not log in any more with the name, password, token or certificate that it has shown"

log = logging.getLogger(__name__)


class Refused(NamedTuple):
    """Why a CONNECT is refused: an MQTT 5 reason code, and a text for the log."""

    reason: int
    text: str


class Opening(NamedTuple):
    """A client that asks for its session. It logged in as `identity`, by `proof`."""

    identity: Identity
    proof: bytes
    clean: bool
    expiry: int  # seconds, `sessions.NEVER` for no end
    will: Will | None


class Broker:
    """Sessions, subscriptions, retained messages, wills and the journal of one front end."""

    def __init__(
        self,
        runtime: Runtime,
        store: Store,
        clock: Clock,
        access: Access,
        limits: Limits,
        directory: Path,
        requests: Requests,
        keys: Keys | None = None,
        encrypts: Callable[[], bool] = lambda: False,
        turns: Turns | None = None,
    ) -> None:
        """`directory` is where the journal is; `requests` answers what clients publish on request topics.

        `encrypts` returns whether any stream is encrypted; then the journal is too, with `keys`.
        `turns` are those of everything else that is expensive; by default, its own.
        """
        self.runtime, self.store, self.clock, self.limits = runtime, store, clock, limits
        self.accesses = Accesses(access)
        self.reports = Reports(runtime.now)
        self.counts = self.reports.counts
        self.journal = Journal(directory / NAME, clock.boot, runtime, keys, encrypts)
        self.turns = turns or Turns(runtime)
        self.router = Router(store, self.journal, limits, clock, self.turns, runtime, self.reports)
        self.sessions = Sessions(
            runtime,
            limits,
            self.counts,
            clock,
            self.journal.notes,
            self._ended,
            self._evicted,
            self._out_of_memory,
        )
        self.publisher = Publisher(
            store, self.router, self.journal, clock, self.turns, self.reports, requests
        )
        self.wills = Wills(runtime, clock, self.journal, self.publisher, self.turns, self.counts)
        self.subscribing = Subscribing(runtime, self.router, self.journal, self.turns, limits, self.reports)
        self.stopping = False
        self.joined: dict[str, Joined] = {}  # our sessions at other brokers
        # Each client's newest connection, until it is closed and all that it published is settled.
        self._newest: dict[str, Inbox] = {}
        books.opened(self)

    def recount(self) -> Iterable[books.Entry]:
        filters = [one for session in self.sessions.all() for one in session.subscriptions]
        members = Counter(one for one in filters if one.startswith(SHARE))
        yield "router.groups", {one: group.members for one, group in self.router.groups.items()}, members

    # -- life ------------------------------------------------------------

    async def start(self) -> None:
        """Restore the sessions. Raises OSError if the journal cannot be written."""
        await recover(self.journal.read(), self)
        await find_stored_ids(self.journal, self.store, self._session_of, self._delivers)
        self.journal.snapshot = lambda: snapshot(self)
        self.journal.referred = lambda: referred(self)
        self.journal.open()
        self.store.on_bindings_changed += [self.router.forget_routes, self.journal.renew]
        for _ in self.revoking():  # the users file may have changed since the stop
            pass
        for session in self.sessions.all():
            self.wills.wait(session)
            self.sessions.leave(session)

    def stop(self) -> None:
        """Write the journal to the disk. Sessions stay as they are."""
        self.sessions.stop()
        self.journal.close()
        for changed in (self.router.forget_routes, self.journal.renew):
            self.store.on_bindings_changed.remove(changed)

    def revoking(self) -> Iterator[None]:
        """Close the connections of clients that could no longer log in, and drop their wills.

        Wills that wait for their delay are dropped too. The session stays for a client that comes back with
        a new password or certificate. A session whose user is gone ends, because nobody could open it. Yields
        after each session, so that others are served in between.
        """
        for session in self.sessions.all():
            yield
            if self.accesses.still_admits(session.identity, session.proof):
                continue
            gone = self.accesses.is_gone(session.identity, session.proof)
            if session.will is None and session.line is None and not gone:
                continue  # it has nothing to lose, or lost it at an earlier reload
            if session.will is not None:
                self.counts["dropped_wills"] += 1
                self.wills.set(session, None)
            audit.record(
                "revoke",
                origin=session.identity.origin,
                user=session.identity.user,
                client=session.client_id,
                why=REVOKED,
            )
            if session.line is not None:
                session.line.fail("refused_reload", REVOKED, NOT_AUTHORIZED)
            if gone:
                self.sessions.end(session)
        self.router.forget_routes()
        for session in self.sessions.all():
            self._drop_unreadable(session)
            yield

    def _drop_unreadable(self, session: Session) -> None:
        """Drop what a client would get, and may read no longer, or give it to another member."""
        asks = len(session.outbox) and not session.identity.may_read_all("#")
        outs = session.outbox.unreadable(session.identity.may_read) if asks else ()
        if not outs:
            return
        for out in outs:
            if out.share and not (out.sent and out.qos == 2) and self.router.reassign(out):
                self.counts["reassigned"] += 1
            else:
                self.counts["dropped_unreadable"] += 1
        session.outbox.remove(outs)
        text = "%d messages that waited for %s are dropped: it may not read them any more (counted)"
        self.reports.log("unreadable", logging.WARNING, text, len(outs), session.identity.label)

    # -- CONNECT and the end ------------------------------------------------------------

    def open(self, inbox: Inbox, asked: Opening, done: Callable[[bool | Refused], None]) -> None:
        """Give a client its session, which it takes over from an older connection if there is one.

        `done` gets whether the session existed, or why the client is refused. It is called once the journal
        has the session, and not at all if the connection has ended by then.
        """
        client_id = asked.identity.client_id
        while not inbox.line.gone:
            old, newest = self.sessions.get(client_id), self._newest.get(client_id)
            foreign = old is not None and old.identity.owner != asked.identity.owner
            if old is not None and foreign and (why := self._not_its_session(old, asked.identity)):
                done(Refused(NOT_AUTHORIZED, why))
                return
            again = self.accesses.still_admits(asked.identity, asked.proof)  # there may have been a reload
            if not (again and inbox.line.admits(asked.identity.user, asked.proof)):
                done(Refused(NOT_AUTHORIZED, "what it logged in with has been replaced"))
                return
            if asked.identity.latest() is not asked.identity:  # likewise
                fresh = self.accesses.again(asked.identity, local=inbox.line.local)
                asked = asked._replace(identity=fresh)
            if old is not None and old.line is not None:
                old.line.fail("taken_over", "taken over by a new connection", SESSION_TAKEN_OVER)
            elif newest is not None and newest.unstored_ids:
                # QoS 2 ids count only once their messages are stored, and only in the session to which they
                # belong.
                _Settling(self, newest, inbox, asked, done)
                return
            elif old is not None and (asked.clean or foreign or self.sessions.is_over(old)):
                self.sessions.end(old)
            else:
                self._attach(inbox, asked, old, done)
                return

    def _not_its_session(self, old: Session, asked: Identity) -> str:
        """Return why a client may not take an id from another user's session; empty if the id is bound to it.

        The same id may be bound to a user of another listener too. Then the existing session stays.
        """
        if not self.accesses.owns_id(asked):
            return f"client id {asked.client_id!r} belongs to another user"
        if self.accesses.owns_id(old.identity):
            whose = f"user {old.identity.user!r} of another listener"
            return f"client id {asked.client_id!r} is bound to {whose} too, whose session has it"
        return ""

    def _attach(
        self, inbox: Inbox, asked: Opening, session: Session | None, done: Callable[[bool | Refused], None]
    ) -> None:
        identity = asked.identity
        present = session is not None
        if session is None:
            session = self.sessions.create(identity.client_id, identity)
        session.identity, session.proof = identity, asked.proof
        self.sessions.enter(session)
        session.line, inbox.session = inbox.line, session
        self._newest[session.client_id] = inbox
        self.set_expiry(session, asked.expiry)
        self.wills.set(session, asked.will)
        if present and session.subscriptions:
            self.router.forget_routes()  # its rules may have changed

        def journaled(_error: StreamError | None) -> None:
            if session.line is inbox.line:
                done(present)

        if session.persistent:
            self.journal.after_commit(journaled)
        else:
            journaled(None)

    def close(self, inbox: Inbox, *, will: bool) -> None:
        """End a connection. `will`: publish the will, because no DISCONNECT has discarded it."""
        session, line = inbox.session, inbox.line
        # The last read of the connection may still put messages into the inbox.
        self.runtime.soon(inbox.when_settled, partial(self._at_rest, inbox))
        if session is None or session.line is not line:
            return
        lost = self.stopping and will and session.will is not None and session.lasting_will is None
        session.line = None
        session.outbox.detach()
        self.router.has_left(session)
        session.left = self.clock.now() / 1000
        if session.persistent:
            self.journal.left(session)
        if lost:
            self.counts["dropped_wills"] += 1
        if lost or not will:
            self.wills.set(session, None)
        elif not self.stopping:
            self.wills.wait(session)
        self.sessions.leave(session)

    def _at_rest(self, inbox: Inbox) -> None:
        """Release a closed connection and its buffers, because no commit is pending any more."""
        inbox.line = GONE
        session = inbox.session
        if session is not None and self._newest.get(session.client_id) is inbox:
            del self._newest[session.client_id]

    def _session_of(self, kept: Headers) -> Session | None:
        """Return the session to which the QoS 2 id of a stored message belongs."""
        return self.joined.get(kept.client) if kept.id >= ABOVE else self.sessions.get(kept.client)

    def _delivers(self, kept: Headers, topic: bytes) -> bool:
        """Whether a message of another broker is more than what streams have of it."""
        return kept.id >= ABOVE and (kept.retain or self.router.route(topic).delivers)

    def join(self, name: str) -> Joined:
        """Return our session at another broker."""
        return self.joined.setdefault(name, Joined(name))

    def unstored_ids(self, session: Session) -> set[int]:
        """Return the QoS 2 ids of a session whose messages may not be stored yet."""
        newest = self._newest.get(session.client_id)
        return newest.uncommitted_ids if newest is not None else set()

    def set_expiry(self, session: Session, seconds: int) -> None:
        """Set how long a session outlives its connection, and keep or forget it accordingly."""
        was, session.expiry = session.persistent, seconds
        if session.persistent:
            self.journal.opened(session)
            for subscription in () if was else session.subscriptions.values():
                self.journal.subscribed(session, subscription)
            for topic_filter, upto in () if was else session.unfed.items():
                self.journal.fed(session, topic_filter, upto)
        elif was:
            self.journal.ended(session)

    def disconnect(self, session: Session) -> None:
        """Close a client's connection, if it has one. Its session stays, and its will is published."""
        if session.line is not None:
            session.line.fail("disconnected_clients", "disconnected by a command", ADMINISTRATIVE_ACTION)

    def forget(self, session: Session) -> None:
        """Disconnect a client, and end its session with its subscriptions, messages and will."""
        self.wills.set(session, None)
        self.disconnect(session)
        self.sessions.end(session)

    def _ended(self, session: Session) -> None:
        if session.will_timer is not None:
            self.wills.publish(session)
        self.router.end(session)
        # Before the session ends, in the journal too: a kill in between causes a duplicate, not a loss.
        for out in session.outbox.shared():
            self.counts["reassigned"] += self.router.reassign(out)
        if session.persistent:
            self.journal.ended(session)

    def _queued(self, session: Session) -> int:
        """Count the messages that a session loses because a limit ends it: not those that others get."""
        lost = len(session.outbox) - len(session.outbox.shared())
        if lost:
            self.counts["dropped_session_ended"] += lost
        return lost

    def _evicted(self, session: Session) -> None:
        text = (
            "the session of client %r is ended, with %d messages queued for it: of those who are away, most "
            "belong to %s, and there are more than [mqtt.limits] sessions = %d (counted in the metrics as "
            "ended_sessions)"
        )
        holder, most = session.identity.holder, self.limits.sessions
        log.warning(text, session.client_id, self._queued(session), holder, most)

    def _out_of_memory(self) -> None:
        self.sessions.memory.make_room(self.sessions.all(), self._lose_oldest, self._end_for_memory)

    def _lose_oldest(self, session: Session) -> None:
        text = (
            "client %r loses messages that waited for it: of the memory of all sessions, most is held by %s, "
            "and [mqtt.limits] session_bytes = %d is reached (counted in the metrics and on the status page)"
        )
        holder, most = session.identity.holder, self.limits.session_bytes
        client = session.client_id
        self.reports.log(f"session_bytes {client}", logging.WARNING, text, client, holder, most)
        session.outbox.drop_oldest()

    def _end_for_memory(self, session: Session) -> None:
        why = (
            f"of the memory of all sessions, most is held by {session.identity.holder}, and [mqtt.limits] "
            f"session_bytes = {self.limits.session_bytes} is reached"
        )
        self.counts["ended_sessions"] += 1
        queued = self._queued(session)
        if session.line is not None:
            session.line.fail("refused_session_bytes", why, QUOTA_EXCEEDED)
        text = (
            "the session of client %r is ended, with %d messages queued for it: %s (counted in the metrics "
            "as ended_sessions)"
        )
        log.warning(text, session.client_id, queued, why)
        self.sessions.end(session)

    # -- PUBLISH ------------------------------------------------------------

    def route(self, session: Session, topic: bytes) -> Route:
        """Return where a topic goes for this client. What it may not publish on is `denied`.

        Raises ProtocolError if it is not a topic name.
        """
        route = self.router.route(topic)
        if route.reserved and route.name.startswith(OURS) and _is_bridge(session):
            route = copy(route)
            route.denied, route.ignored = False, True
        if not route.denied and not route.ignored and not session.identity.may_publish(route.name):
            route = self.denied(session, route, reason(session, "publish", route.name))
        line = session.line
        if route.append is not None and line is not None and line.receipts:
            route = copy(route)
            route.append = None  # its acknowledgements have more than the server's
        if route.stored_nowhere and line is not None and line.refuses_unmatched:
            route = copy(route)
            route.unwanted = True
        return route

    def denied(self, session: Session, route: Route, why: str) -> Route:
        """Return the route that replaces one that this client may not use. It goes nowhere."""
        refused(session, "publish", route.name, why)
        route = Route(route.name, route.streams)
        route.denied = True
        return route

    def publish(self, batch: Batch, packet: Publish, route: Route) -> None:
        """Process a PUBLISH; its acknowledgement goes into `batch`. Raises ProtocolError."""
        self.publisher.publish(batch, packet, route)

    def refused(self, batch: Batch, packet: Publish, error: StreamBridgeError) -> None:
        """Answer a PUBLISH whose message a stream has refused."""
        self.publisher.refused(batch, packet, error)

    def released(self, batch: Batch, packet_id: int) -> None:
        """PUBREL: the client releases a QoS 2 id. It is answered even for an unknown id (4.3.3).

        It must follow PUBREC; if the id were free before, two messages in flight could have it.
        """
        inbox = batch.inbox
        session = inbox.session
        assert session is not None
        if packet_id in batch.ids or inbox.is_unstored(packet_id):
            raise ProtocolError(f"PUBREL for packet id {packet_id} before its PUBREC", PROTOCOL_ERROR)
        reason = SUCCESS
        session.partial.pop(packet_id, None)
        if packet_id in session.incoming:
            session.free_ids((packet_id,))
            if session.persistent:
                self.journal.released(session, packet_id)
        elif inbox.line.level == V5:
            reason = PACKET_ID_NOT_FOUND
        if session.persistent:
            # If the release were lost, the next message with the id would be taken for a duplicate. A
            # repeated PUBREL waits too, because the journal may have failed to keep the release.
            batch.touched[self.journal] = None
        batch.acks += answers.ack(PUBCOMP, packet_id.to_bytes(2, "big"), reason)


def _is_bridge(session: Session) -> bool:
    """Return whether a client is another broker: by its protocol, or by where its will says that it has gone.

    Bridges publish their state below `$SYS/`, at a topic that their configuration may choose, and some send
    all that their broker publishes there. A refusal would end them.
    """
    line, will = session.line, session.will
    return (line is not None and line.bridge) or (will is not None and will.topic.startswith(OURS))


class _Settling:
    """A client that waits for the commit of QoS 2 messages from its last connection."""

    def __init__(
        self,
        broker: Broker,
        newest: Inbox,
        inbox: Inbox,
        asked: Opening,
        done: Callable[[bool | Refused], None],
    ) -> None:
        self._broker, self._inbox, self._asked, self._done = broker, inbox, asked, done
        self._timer: Timer | None = broker.runtime.later(SETTLE_TIMEOUT, self._expired)
        newest.when_settled(self._settled)

    def _settled(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._broker.open(self._inbox, self._asked, self._done)

    def _expired(self) -> None:
        self._timer = None
        if not self._inbox.line.gone:
            self._done(Refused(SERVER_BUSY, "what its last connection sent is not stored yet"))
